"""`report`: runs as one HTML page that makes no request and runs no script, with the style of the inspect page.

Every number is one of metrics.jsonl, plan.json, status.json, recipe.yaml, evaluate.json or verify.json, and every token
one of examples.json; a curve keeps its values in `data-values`. Several runs are laid over each other, and their
recipes' differences are listed.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml
from markupsafe import Markup

from finetune.checkpoints.folder import best_checkpoint
from finetune.data.visible_text import Token, visible
from finetune.errors import UserError
from finetune.tracking.metrics import EXAMPLES, GENERATIONS, read_steps
from finetune.utils import LOCAL_HOSTS, host_name
from finetune.view.token_html import sequence_names, tokens_html
from finetune.view.web_page import head, page, text

WIDTH, HEIGHT = 480, 150  # of a chart, in SVG units
POINTS = 1000  # of a curve; of longer ones every n-th is drawn, and the last
EVALUATIONS = 12  # whose answers are shown, of a run
COLOURS = ("#2f7fc1", "#c9772b", "#3f9a5f", "#a34fa8", "#b8433f", "#6b7280")
REFRESH_S = 5
_AXES = {"step", "epoch"}
_GROUPS: dict[str, Callable[[str], bool]] = {
    "Held-out data": lambda key: key.startswith("eval_") or key == "exact_match",
    "Speed": lambda key: key.endswith("_per_s") or key in ("step_s", "mfu", "tflops_per_device"),
    "Time by phase": lambda key: (
        key.startswith(("time/", "share/")) or (key.endswith("_s") and not key.endswith("_per_s"))
    ),
    "Memory": lambda key: "memory" in key or key.endswith("_gib"),
    "Counts": lambda key: "tokens" in key,
}
Place = Callable[[float, float], tuple[float, float]]
_STYLE = """
polyline { fill: none; stroke-width: 1.6; vector-effect: non-scaling-stroke; }
svg line.best { stroke-dasharray: 2 3; }
.runs { display: flex; flex-wrap: wrap; gap: 0.3rem 1.2rem; margin-top: 0.8rem; font-size: 0.92rem; }
.runs i { display: inline-block; width: 0.8em; height: 0.8em; border-radius: 3px; margin-right: 0.4em; }
article .text { white-space: pre-wrap; overflow-wrap: anywhere; }
td { overflow-wrap: anywhere; min-width: 12.5rem; }
td.n { text-align: left; white-space: nowrap; overflow-wrap: normal; min-width: 0; }
tbody th { min-width: 11rem; }
.answers td { min-width: 16rem; font-family: var(--mono); font-size: 0.82rem; white-space: pre-wrap; }
.answers td.n { min-width: 0; }
.answers .note { margin: 0 0 0.5rem; }
.answers img { max-width: 100%; height: auto; }
@media (max-width: 46rem) { td { min-width: 9rem; } tbody th { min-width: 8rem; } .answers td { min-width: 13rem; } }
"""


@dataclass(frozen=True)
class RunData:
    """What a run directory holds."""

    folder: Path
    name: str
    lines: list[dict[str, Any]]  # of metrics.jsonl
    recipe: dict[str, Any]
    plan: dict[str, Any]
    status: dict[str, Any]
    best_step: int | None  # by `checkpoint.best`
    verified: dict[str, dict[str, Any]]  # verify.json of exports, by folder
    evaluated: dict[str, dict[str, Any]]  # evaluate.json: scores by "task/metric"
    examples: list[dict[str, Any]]  # examples.json: what the model was trained on, as text
    generations: list[dict[str, Any]]  # generations.jsonl: {"step": .., "columns": .., "rows": ..} of each evaluation

    def curve(self, key: str) -> list[tuple[int, float]]:
        return [(line["step"], line[key]) for line in self.lines if isinstance(line.get(key), int | float)]


def read_run(folder: Path) -> RunData:
    """Raises UserError where the folder is no run."""
    if not (folder / "metrics.jsonl").is_file():
        raise UserError(f"{folder}: no run here (no metrics.jsonl); give a run directory, such as runs/quickstart-full")
    recipe_file = folder / "recipe.yaml"
    recipe = yaml.safe_load(recipe_file.read_text(encoding="utf-8")) if recipe_file.is_file() else {}
    best = best_checkpoint(folder / "checkpoints", (recipe.get("checkpoint") or {}).get("best"))
    return RunData(
        folder=folder,
        name=folder.name,
        lines=list(read_steps(folder / "metrics.jsonl")),
        recipe=recipe,
        plan=_json(folder / "plan.json"),
        status=_json(folder / "status.json"),
        best_step=int(best.name.removeprefix("step-")) if best else None,
        verified={path.parent.name: _json(path) for path in sorted(folder.glob("*/verify.json"))},
        evaluated=_json(folder / "evaluate.json").get("scores", {}),
        examples=_json(folder / EXAMPLES) or [],
        generations=read_steps(folder / GENERATIONS),
    )


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise UserError(f"{path}: cannot be read: {error}") from None


def write_report(folders: Sequence[Path], out: Path) -> None:
    """Write the page. Raises UserError where a folder is no run, or the page cannot be written."""
    whole = render([read_run(folder) for folder in folders])
    try:
        out.write_text(whole, encoding="utf-8", newline="\n")
    except OSError as error:
        raise UserError(f"-o {out}: cannot be written: {error.strerror or error}") from None


def watch(folders: Sequence[Path], port: int, ready: Callable[[str], object]) -> None:
    """Serve the page on 127.0.0.1, made again for each request, until interrupted. Raises UserError."""
    [read_run(folder) for folder in folders]  # raises at once for a folder that is no run

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if host_name(self.headers.get("Host", "")) not in LOCAL_HOSTS:
                self.send_error(403, "this server is called localhost or 127.0.0.1")
                return
            if self.path != "/":
                self.send_error(404)
                return
            body = render([read_run(folder) for folder in folders], REFRESH_S).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: a line for each refresh is of no use."""

    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except OSError as error:
        raise UserError(f"--port {port}: {error.strerror}: give another one") from None
    with server:
        ready(f"http://127.0.0.1:{server.server_port}/")
        server.serve_forever()


# --- the page


def render(runs: Sequence[RunData], refresh_s: int | None = None) -> str:
    """Returns the page. refresh_s: seconds after which a browser loads it again."""
    colours = "".join(f".c{i} {{ stroke: {c}; }} i.c{i} {{ background: {c}; }}\n" for i, c in enumerate(COLOURS))
    title = " / ".join(run.name for run in runs)
    top = head(f"{title}: report", _STYLE + colours, refresh_s=refresh_s)
    return page(top, "Report", title, _legend(runs), "\n".join(_sections(runs)))


def _legend(runs: Sequence[RunData]) -> str:
    parts = []
    for i, run in enumerate(runs):
        status, best = run.status, f", best step {run.best_step}" if run.best_step is not None else ""
        state = f"{status.get('status', 'unknown')}, step {status.get('step', '?')} of {status.get('steps', '?')}{best}"
        parts.append(f'<span><i class="c{i % len(COLOURS)}"></i><b>{text(run.name)}</b> {text(state)}</span>')
    return f'<div class="runs">{"".join(parts)}</div>'


def _sections(runs: Sequence[RunData]) -> Iterator[str]:
    keys = list(dict.fromkeys(key for run in runs for line in run.lines for key in line if key not in _AXES))
    drawn = [key for key in keys if any(value for run in runs for _, value in run.curve(key))]  # some other than 0
    grouped: dict[str, list[str]] = {"Training": []}
    for key in drawn:
        name = next((name for name, belongs in _GROUPS.items() if belongs(key)), "Training")
        grouped.setdefault(name, []).append(key)
    for name in ("Training", *_GROUPS):
        if charts := [_chart(key, runs) for key in grouped.get(name, ())]:
            yield f'<section><h2>{name}</h2><div class="charts">{"".join(charts)}</div></section>'
    names = [run.name for run in runs]
    yield _table("Last values", ["", *names], [[k, *(_last(run, k) for run in runs)] for k in drawn])
    if len(runs) > 1:
        yield _table("What their recipes differ in", ["key", *names], _differences([run.recipe for run in runs]))
    settled = [{key: run.plan[key] for key in run.plan if key not in ("predicted", "measured")} for run in runs]
    yield _table("Plan", ["", *names], _rows([_flat(plan) for plan in settled]))
    for run in runs:
        if measured := _measured(run):
            yield _table(f"Planned and measured: {run.name}", ["", "planned", "measured"], measured)
    scores = [(run, name, score) for run in runs for name, score in run.evaluated.items()]
    if scores:
        fields = [f"{name}{end}" for name in ("base", "trained", "difference") for end in ("", "_stderr")]
        fields = ["rows", *fields, "step", "fewshot", "limit"]
        titles = [title for one in ("base", "trained", "trained - base") for title in (one, "± standard error")]
        head = ["run, task", "rows", *titles, *fields[7:]]
        yield _table("Tasks", head, [[f"{run.name}: {n}", *(s.get(f) for f in fields)] for run, n, s in scores])
    yield from _examples(runs)
    yield from _answers(runs)
    exports = [(run, name, figures) for run in runs for name, figures in run.verified.items()]
    if exports:
        head = ["export", "format", "passed", "KL mean", "KL max", "same likeliest token", "same greedy text"]
        fields = ("format", "passed", "kl_mean", "kl_max", "top1", "greedy")
        rows = [[f"{run.name}/{name}", *(figures.get(f) for f in fields)] for run, name, figures in exports]
        yield _table("Exports compared with their runs", head, rows)


def _measured(run: RunData) -> list[list[Any]]:
    """Returns what the plan says next to what the metrics do: totals of the last line, by its epochs."""
    plan = run.plan
    rows: list[list[Any]] = []
    if run.lines and "steps" in plan:
        rows.append(["steps", plan["steps"], run.lines[-1]["step"]])
    predicted, measured = (_flat(plan.get(side) or {}) for side in ("predicted", "measured"))
    rows += [[key, predicted[key], measured[key]] for key in measured if key in predicted]
    line = next((line for line in reversed(run.lines) if line.get("epoch") and "tokens" in line), None)
    if line is None:
        return rows
    for key in ("tokens", "supervised_tokens"):
        if f"{key}_per_epoch" in plan and key in line:
            rows.append([f"{key} per epoch", plan[f"{key}_per_epoch"], round(line[key] / line["epoch"])])
    return rows


def _examples(runs: Sequence[RunData]) -> Iterator[str]:
    """Yields the first training examples of each run, and once those of runs that have the same."""
    alike: dict[str, list[RunData]] = {}
    for run in runs:
        alike.setdefault(json.dumps(run.examples), []).append(run)
    legend = '<span class="text"><mark>supervised</mark></span> <span class="text"><span>context</span></span>'
    for group in alike.values():
        objective = (group[0].recipe.get("objective") or {}).get("name", "sft")
        if articles := "".join(_example(one, objective) for one in group[0].examples):
            title = text(f"First training examples: {', '.join(run.name for run in group)}")
            yield f'<section><h2>{title}</h2><p class="legend">{legend}</p>{articles}</section>'


def _example(example: dict[str, Any], objective: str) -> str:
    """Returns an example as `inspect` shows it, its sequences below each other."""
    place = text(visible(f"{example['path']}:{example['row']}"))
    names = sequence_names(objective, len(example["sequences"]))
    shown = ""
    for name, one in zip(names, example["sequences"], strict=True):
        begins = (0, one["tokens"] - len(one["pieces"][-1]))
        pieces = [tokens_html([Token(*t) for t in piece], at) for piece, at in zip(one["pieces"], begins, strict=False)]
        body = Markup('<em class="cut">{}</em>').format(one["left_out"]).join(pieces)
        sizes = f'<span class="sizes">{one["tokens"]:,} tokens, <b>{one["supervised"]:,} supervised</b></span>'
        shown += f'<h3><span class="place">{place}</span> {name} {sizes}</h3><div class="text">{body}</div>'
    return f"<article>{shown}</article>"


def _answers(runs: Sequence[RunData]) -> Iterator[str]:
    """Yields a table for each prompt that every evaluation answers: its answers over time, of each run."""
    prompts: dict[str, list[list[Any]]] = {}
    pictures: dict[str, Path] = {}
    for run in runs:
        every = max(1, -(-len(run.generations) // EVALUATIONS))
        for entry in [*run.generations[:-1:every], *run.generations[-1:]]:
            shown = entry.get("pictures") or [None] * len(entry["rows"])
            pictures |= {row[0]: run.folder / name for row, name in zip(entry["rows"], shown, strict=True) if name}
            for prompt, output, reference in entry["rows"]:
                rows = prompts.setdefault(prompt, [["expected", reference, ""]])
                rows.append([f"{run.name}, step {entry['step']}", output, output == reference])
    for number, (prompt, rows) in enumerate(prompts.items(), 1):
        table = _table(f"Answers over time {number}", ["", "answer", "equal"], rows)
        note = f'<p class="note">{text(prompt)}</p>{_picture(pictures.get(prompt))}'
        yield table.replace("<section>", '<section class="answers">', 1).replace("</h2>", f"</h2>{note}", 1)


def _picture(path: Path | None) -> str:
    """Returns the pictures of a prompt, within the page."""
    if path is None or not path.is_file():
        return ""
    source = base64.b64encode(path.read_bytes()).decode()
    return f'<p><img src="data:image/png;base64,{source}" alt="the images of the prompt, in their order"></p>'


def _last(run: RunData, key: str) -> float | None:
    curve = run.curve(key)
    return curve[-1][1] if curve else None


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(values, dict):
        return {prefix: values}
    return {
        k: v for key, value in values.items() for k, v in _flat(value, f"{prefix}.{key}" if prefix else key).items()
    }


def _rows(columns: Sequence[dict[str, Any]]) -> list[list[Any]]:
    keys = dict.fromkeys(key for column in columns for key in column)
    return [[key, *(column.get(key) for column in columns)] for key in keys]


def _differences(recipes: Sequence[dict[str, Any]]) -> list[list[Any]]:
    rows = _rows([_flat(recipe) for recipe in recipes])
    return [row for row in rows if any(value != row[1] for value in row[2:])]


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Returns a table; the first cell of a row is its name."""
    top = "".join(f'<th scope="col">{text(cell)}</th>' for cell in head)
    body = "".join(f'<tr><th scope="row">{_name(row[0])}</th>{"".join(map(_cell, row[1:]))}</tr>' for row in rows)
    label = text(title)
    return (
        f'<section><h2>{label}</h2><div class="scroll" tabindex="0" role="region" aria-label="{label}"><table>'
        f"<thead><tr>{top}</tr></thead><tbody>{body or '<tr><th>none</th></tr>'}</tbody></table></div></section>"
    )


def _name(value: object) -> Markup:
    """Returns a name that breaks after its underscores and dots."""
    return text(value).replace("_", Markup("_<wbr>")).replace(".", Markup(".<wbr>"))


def _cell(value: Any) -> str:
    kind = ' class="n"' if isinstance(value, int | float) else ""  # a number is never broken
    return f"<td{kind}>{text(_shown(value))}</td>"


def _shown(value: Any) -> str:
    """Returns a value as JSON has it; a list of settings in one line."""
    if value is None:
        return "–"
    return value if isinstance(value, str) else json.dumps(value)


def _chart(key: str, runs: Sequence[RunData]) -> str:
    """Returns a figure with a curve for each run, its range, and the best step of a single run."""
    curves = [run.curve(key) for run in runs]
    points = [point for curve in curves for point in curve if math.isfinite(point[1])]
    low, high = min(y for _, y in points), max(y for _, y in points)
    first, last = min(x for x, _ in points), max(x for x, _ in points)

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - first) / (last - first) if last > first else 0.5
        up = (y - low) / (high - low) if high > low else 0.5
        return round(across * WIDTH, 2), round(HEIGHT - up * HEIGHT, 2)

    drawn = "".join(_curve(i, runs[i].name, key, curve, place) for i, curve in enumerate(curves) if curve)
    for i, run in enumerate(runs):
        if run.best_step is not None and curves[i] and first <= run.best_step <= last:
            x, title = place(run.best_step, low)[0], text(f"{run.name}: best step {run.best_step}")
            colour = f"c{i % len(COLOURS)}"
            drawn += f'<line class="best {colour}" x1="{x}" x2="{x}" y1="0" y2="{HEIGHT}"><title>{title}</title></line>'
    ends = ", ".join(f"{curve[-1][1]:.5g}" for curve in curves if curve)
    label = f"{key}: last {ends}"
    return (
        f"<figure><figcaption><strong>{text(key)}</strong><span>last {text(ends)}</span></figcaption>"
        f'<svg viewBox="-2 -22 {WIDTH + 4} 200" role="img" aria-label="{text(label)}">'
        f'<text x="0" y="-8">{low:.5g} to {high:.5g}</text>'
        f'<line x1="0" x2="{WIDTH}" y1="0" y2="0" class="grid"/>'
        f'<line x1="0" x2="{WIDTH}" y1="{HEIGHT / 2}" y2="{HEIGHT / 2}" class="grid"/>'
        f'<line x1="0" x2="{WIDTH}" y1="{HEIGHT}" y2="{HEIGHT}" class="axis"/>{drawn}'
        f'<text x="0" y="168">step {first}</text>'
        f'<text x="{WIDTH}" y="168" text-anchor="end">step {last}</text></svg></figure>'
    )


def _curve(
    index: int,
    name: str,
    key: str,
    curve: list[tuple[int, float]],
    place: Callable[[float, float], tuple[float, float]],
) -> str:
    every = -(-len(curve) // POINTS)
    kept = [point for i, point in enumerate(curve) if i % every == 0 or i == len(curve) - 1]
    kept = [point for point in kept if math.isfinite(point[1])]
    points = " ".join("{},{}".format(*place(x, y)) for x, y in kept)
    steps, values = (" ".join(json.dumps(p[i]) for p in kept) for i in (0, 1))
    colour = f"c{index % len(COLOURS)}"
    data = f'data-run="{text(name)}" data-key="{text(key)}" data-steps="{steps}" data-values="{values}"'
    if len(kept) == 1:
        x, y = place(*kept[0])
        points = f"{x - 4},{y} {x + 4},{y}"  # a point would not be seen
    return f'<polyline class="{colour}" points="{points}" {data}><title>{text(name)}</title></polyline>'
