"""Figures of a comparison of an export with its run, what a format may cost, and how both are shown."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from finetune.release.export.weight_types import LLAMA_TYPES

WHOLE_BYTES = 2**28  # of a model in fp32, up to which the run's and the export's are also loaded, one after the other


@dataclass(frozen=True)
class Threshold:
    """What a format may cost, in nats and shares."""

    kl_mean: float
    kl_max: float
    top1: float  # least share of trained tokens with the same likeliest token


# Rounding of weights alone, measured with room to spare (docs/reference/export.md). The largest of some
# thousand tokens is up to a hundred times the mean.
THRESHOLDS = {
    "float32": Threshold(1e-6, 1e-3, 0.999),
    "bfloat16": Threshold(1e-3, 0.1, 0.97),
    "float16": Threshold(1e-4, 1e-2, 0.99),
    "q8_0": Threshold(1e-2, 1.0, 0.95),
    "int8": Threshold(1e-2, 1.0, 0.95),
    "fp8": Threshold(5e-2, 3.0, 0.90),
    # In the format of the base (stored_base.py), by the names of stored_formats.py.
    "fp8 blocks": Threshold(5e-2, 3.0, 0.90),
    "mxfp4": Threshold(0.2, 6.0, 0.80),
    "nvfp4": Threshold(0.2, 6.0, 0.80),
    "w4a16": Threshold(0.2, 6.0, 0.80),
    "gptq": Threshold(0.2, 6.0, 0.80),
    "awq": Threshold(0.2, 6.0, 0.80),
}
AS_BASE = ("fp8 blocks", "mxfp4", "nvfp4", "w4a16", "gptq", "awq")
# Seven times llama.cpp's own mean, as for q8_0; of the likeliest tokens, 0.6 times the root of that mean may differ:
# 8.1 % at 0.031 and 29 % at 0.45 in the same measurements.
THRESHOLDS |= {
    kind: Threshold(7 * kl, max(1.0, min(20.0, 700 * kl)), max(0.0, 1 - 0.6 * (7 * kl) ** 0.5))
    for kind, kl in LLAMA_TYPES.items()
}
# A lost update moves a model by as much as training did; rounding moves it by much less, except after runs that hardly
# trained.
_LOST_SHARE, _ROUNDING = 0.25, {"float32": 1e-9, "bfloat16": 1e-5, "float16": 1e-6, "q8_0": 1e-3}
_ROUNDING |= {"int8": 1e-3, "fp8": 1e-2, **dict.fromkeys(AS_BASE, 1e-3)}
_ROUNDING |= {kind: 2 * kl for kind, kl in LLAMA_TYPES.items()}  # below it `update` says what is lost


@dataclass
class Figures:
    """How an export compares with its run."""

    format: str  # what the export should be in, a key of THRESHOLDS
    dtype: str = "float32"  # of the tensors that are not in eight bits
    rows: int = 0
    tokens: int = 0  # trained ones
    scored: int = 0  # sequences, of a model of scores: the figures are theirs (verify_answers.py)
    kl_mean: float | None = None  # KL(trained, exported) per token, nats
    kl_max: float | None = None
    top1: float | None = None  # share of tokens with the same likeliest token
    kl_base: float | None = None  # KL(trained, base): what training has changed; of adapters
    greedy: float | None = None  # share of equal greedy texts
    tensors: int = 0  # compared one by one
    score_max: float | None = None  # largest difference of a score
    rounding: float | None = None  # of the base's format: what it loses of the update, for the inputs of adapters
    of_base: str | None = None  # how many of the base's tensors that transformers does not load are there
    types: str | None = None  # of a GGUF file's tensors, with their numbers
    update: float | None = None  # share of what training changed that is in quantised tensors, of adapters
    uncompared: str | None = None  # tensors of a GGUF file whose layout is not known here
    problems: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {"passed": not self.problems, **asdict(self)}

    def judge(self) -> None:
        """Add what is beyond the format's thresholds to the problems."""
        limits, unit = THRESHOLDS[self.format], "scored text" if self.scored else "trained token"
        for name, value, limit in (("mean", self.kl_mean, limits.kl_mean), ("maximal", self.kl_max, limits.kl_max)):
            if value is not None and not value <= limit:
                self.problems.append(f"{name} KL per {unit} is {value:.3g}, more than {limit:g} ({self.format})")
        if self.top1 is not None and self.top1 < limits.top1 and not self.scored:  # of few texts one may be a tie
            self.problems.append(f"only {self.top1:.1%} of likeliest tokens are the same, less than {limits.top1:.1%}")
        if self.kl_mean is not None and self.kl_base is not None:
            lost = self.kl_mean / self.kl_base if self.kl_base else 0.0
            if self.kl_mean > _ROUNDING[self.format] and lost > _LOST_SHARE:
                instead = "; serve the adapter next to its base, or export --to hf" if self.format in AS_BASE else ""
                self.problems.append(
                    f"the mean KL is {lost:.0%} of what training changed ({self.kl_base:.3g}): a part of it is lost"
                    + instead
                )
        if self.format == "float32" and self.greedy is not None and self.greedy < 1:
            self.problems.append(f"only {self.greedy:.0%} of greedy texts are the same")


SECTION = "## Compared with the run"


def card_section(figures: Figures) -> str:
    """Returns the card's section, in Markdown."""
    lines = [f"| {name} | {value} |" for name, value in table_of(figures)]
    problems = [f"- {problem}" for problem in figures.problems]
    verdict = "Every figure is within what rounding to this format costs." if not figures.problems else "It does not:"
    on_rows = f", and its answers on {figures.rows} held-out rows" if figures.rows else ""
    head = f"{SECTION}\n\nWhether this model is what was trained: its files, each tensor{on_rows}."
    return "\n".join([head, "", "| | |", "| --- | --- |", *lines, "", verdict, *problems, ""])


def table_of(figures: Figures) -> list[tuple[str, str]]:
    """Returns the figures that were measured, with their names."""
    unit, count = ("text", figures.scored) if figures.scored else ("token", figures.tokens)
    values = {
        "format": figures.format,
        "tensors compared": f"{figures.tensors:,}",
        "tensors of the base that transformers does not load": figures.of_base,
        "scored texts" if figures.scored else "trained tokens": f"{count:,}" if count else None,
        f"KL per {unit}, mean (nats)": figures.kl_mean,
        f"KL per {unit}, maximum": figures.kl_max,
        "KL of the base, mean": figures.kl_base,
        "lost to rounding, of what adapters add": figures.rounding,
        "largest difference of a score": figures.score_max,
        "types of tensors": figures.types,
        "what training changed, in the file": None if figures.update is None else f"{figures.update:.1%}",
        "tensors not compared": figures.uncompared,
    }
    shown = [(name, one if isinstance(one, str) else f"{one:.3g}") for name, one in values.items() if one is not None]
    same = "same label or best answer" if figures.scored else "same likeliest token"
    shares = {same: figures.top1, "same greedy text": figures.greedy}
    return [*shown, *((name, f"{share:.2%}") for name, share in shares.items() if share is not None)]


def show_figures(console: Console, figures: Figures) -> None:
    table = Table("compared with the run", "")
    for name, value in table_of(figures):
        table.add_row(name, value)
    console.print(table)
