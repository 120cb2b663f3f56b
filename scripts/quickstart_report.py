"""What scripts/quickstart.sh taught: a table of before and after, and runs/quickstart.svg with every step's loss.

python scripts/quickstart_report.py [RUNS [STAGE ...]]    # default: runs full lora dpo-lora

Status 1 if a stage learned less than it should.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

WIDTH, HEIGHT, TOP, BOTTOM = 760, 300, 56, 44  # of the picture, in pixels
PANELS = ((48, 404), (460, 640))  # from, to: loss by step; the held-out measure by share of the steps
LOWEST_LOSS = 1e-4  # where the axis of the loss ends
EXACT = "exact_match"  # the answer is the expected one; every stage has it, and the picture shows it


@dataclass(frozen=True)
class Stage:
    name: str
    learns: str
    measures: dict[str, tuple[str, float]]  # what of the held-out rows: metric, and the least that is enough
    color: str

    def lines(self, runs: Path) -> list[dict[str, float]]:
        text = (runs / f"quickstart-{self.name}" / "metrics.jsonl").read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]


STAGES = (
    Stage("full", "any date -> 2021-03-03", {"exact match": (EXACT, 0.99)}, "#0072b2"),
    Stage("lora", "any date -> 3 March 2021", {"exact match": (EXACT, 0.95)}, "#d55e00"),
    Stage(
        "dpo-lora",
        "2021/03/03, not 2021-03-03",
        {"exact match": (EXACT, 0.85), "pairs right": ("eval_rewards/accuracy", 0.95)},
        "#007a5a",
    ),
    Stage("digits-full", "1234 -> 4321, stopped early", {"exact match": (EXACT, 0.1)}, "#5f5c56"),
    Stage(
        "grpo-full",
        "the rest, from rewards",
        {"exact match": (EXACT, 0.95), "reward": ("eval_reward", 0.9)},
        "#0072b2",
    ),
    Stage("images-full", "a picture -> yellow circle", {"exact match": (EXACT, 0.95)}, "#8a3f94"),
    Stage("audio-full", "a sound -> la gallop", {"exact match": (EXACT, 0.95)}, "#8a3f94"),
)
DATES = ("full", "lora", "dpo-lora")  # what the script trains by default


def table(runs: Path, stages: list[Stage]) -> tuple[Table, list[str]]:
    """Returns the table of before and after, and what learned too little."""
    shown = Table(title="Held-out rows, before -> after")
    for heading in ("stage", "learns", "measure", "before", "after"):
        shown.add_column(heading, justify="right" if heading in ("before", "after") else "left")
    missed = []
    for stage in stages:
        lines = stage.lines(runs)
        for measure, (metric, enough) in stage.measures.items():
            scores = [line[metric] for line in lines if metric in line]
            shown.add_row(stage.name, stage.learns, measure, f"{scores[0]:.1%}", f"{scores[-1]:.1%}")
            if scores[-1] < enough:
                missed.append(f"{stage.name}: {measure} {scores[-1]:.1%}, expected {enough:.0%}")
    return shown, missed


def picture(runs: Path, stages: list[Stage]) -> str:
    """Returns an SVG: on the left the loss of each step, on the right the held-out measure from start to end."""
    (left, right), (start, end) = PANELS
    floor = HEIGHT - BOTTOM
    decades = range(int(math.log10(LOWEST_LOSS)), 2)
    steps = max(int(line["step"]) for stage in stages for line in stage.lines(runs))

    def loss_at(step: float, loss: float) -> str:
        height = (math.log10(max(loss, LOWEST_LOSS)) - decades[0]) / (decades[-1] - decades[0])
        return f"{left + (right - left) * step / steps:.1f},{floor - (floor - TOP) * height:.1f}"

    def score_at(share: float, score: float) -> str:
        return f"{start + (end - start) * share:.1f},{floor - (floor - TOP) * score:.1f}"

    parts = [f'<text x="{left}" y="30" class="head">Loss of each step</text>']
    parts += [f'<text x="{start}" y="30" class="head">Held-out rows, start to end</text>']
    for exponent in decades:
        y = loss_at(0, 10.0**exponent).split(",")[1]
        parts.append(f'<path d="M{left} {y}H{right}" class="grid"/>')
        parts.append(f'<text x="{left - 6}" y="{y}" class="tick" text-anchor="end">{10.0**exponent:g}</text>')
    for percent in (0, 50, 100):
        y = score_at(0, percent / 100).split(",")[1]
        parts.append(f'<path d="M{start} {y}H{end}" class="grid"/>')
        parts.append(f'<text x="{start - 6}" y="{y}" class="tick" text-anchor="end">{percent} %</text>')
    parts.append(f'<text x="{left}" y="{floor + 26}" class="tick">step 1</text>')
    parts.append(f'<text x="{right}" y="{floor + 26}" class="tick" text-anchor="end">step {steps}</text>')
    for i, stage in enumerate(stages):
        lines = stage.lines(runs)
        losses = " ".join(loss_at(line["step"], line["loss"]) for line in lines if "loss" in line)
        measured = [(line["step"], line[EXACT]) for line in lines if EXACT in line]
        scores = " ".join(score_at(step / measured[-1][0], score) for step, score in measured)
        parts.append(f'<polyline points="{losses}" stroke="{stage.color}" class="curve" opacity="0.75"/>')
        parts.append(f'<polyline points="{scores}" stroke="{stage.color}" class="curve"/>')
        label = f'<tspan font-weight="600">{stage.name}</tspan> {measured[-1][1]:.1%}'
        parts.append(f'<text x="{end + 10}" y="{TOP + 4 + 18 * i}" fill="{stage.color}">{label}</text>')
    style = (
        "text{font:12px system-ui,sans-serif}.head{font-weight:600;font-size:14px;fill:#222}"
        ".tick{fill:#666;dominant-baseline:middle}.grid{stroke:#ddd}.curve{fill:none;stroke-width:1.5}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">'
        f"<title>Loss and held-out scores of the quickstart</title><style>{style}</style>"
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def main() -> None:
    folder, *names = sys.argv[1:] or ["runs"]
    runs, stages = Path(folder), [stage for stage in STAGES if stage.name in (names or DATES)]
    shown, missed = table(runs, stages)
    print()
    Console().print(shown)
    path = runs / "quickstart.svg"
    path.write_text(picture(runs, stages), encoding="utf-8")
    print(f"The picture, for a browser: {path}")
    if missed:
        raise SystemExit(f"{'; '.join(missed)}: please report this with the output above")


if __name__ == "__main__":
    main()
