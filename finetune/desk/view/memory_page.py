"""`plan --html`: a table of places with hours and price, and memory over the phases of the best, as one page without
scripts or requests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from finetune.desk.view.web_page import render
from finetune.engine.hardware import GIB
from finetune.plan.answer import facts, in_table, price_lines, refused, rests_on, why
from finetune.plan.search import Choice, PlanRequest, SearchResult, answers, as_lines
from finetune.utils import write_atomically

SHOWN = 6  # pictures
_NUMBERS = ("hours", "price", "a million tokens", "peak GiB", "free", "host GiB", "step s", "tokens/s")
_WIDTH, _ROW, _LEFT = 480, 24, 104  # SVG units
_STYLE = """
rect.kept { fill: var(--edge); }
svg rect.reserve { fill: var(--chip-line); }
.device { stroke: var(--over); stroke-width: 2; }
.key { display: flex; flex-wrap: wrap; gap: 0.3rem 1.2rem; margin-top: 0.8rem; font-size: 0.92rem; }
.key i { display: inline-block; width: 0.8em; height: 0.8em; border-radius: 3px; margin-right: 0.4em; }
.k0 { background: var(--edge); } .k1 { background: var(--bar); } .k2 { background: var(--chip-line); }
.k3 { background: var(--over); }
p, figcaption { overflow-wrap: anywhere; }
tr.answer > * { font-weight: 650; }
tbody th { min-width: 9rem; } td.n { white-space: nowrap; }
tbody th span { display: block; font-weight: 400; font-size: 0.92em; color: var(--soft); }
td.on { white-space: nowrap; }
.verdict { font-weight: 650; } .fits { color: #2e7d32; } .tight { color: var(--chip); } .no { color: #c0392b; }
@media (prefers-color-scheme: dark) { .fits { color: #7bc47f; } .no { color: #ec8a7d; } }
figure { min-width: 0; }
.lines p { margin-top: 0.5rem; max-width: 60rem; }
@media (max-width: 46rem) {
  .charts { grid-template-columns: 1fr; } main { padding: 1.5rem 0.8rem 3rem; } svg text { font-size: 16px; }
}
"""


def write_page(path: Path, request: PlanRequest, choices: Sequence[Choice], results: Sequence[SearchResult]) -> None:
    """choices: those of `plan`; results: of the search on each kind of machines."""
    shown, first = in_table(choices), answers(choices)
    rows: list[dict[str, Any]] = []  # of cells, "" for numbers that are not known
    for one in shown:
        price = [f"{value:,.2f} {one.currency}" if value is not None else "" for value in (one.price, one.per_million)]
        cells = (
            f"{one.hours:.2f}" if one.hours else "",
            *price,
            f"{'> ' if one.memory.at_least else ''}{one.peak / GIB:.1f}",
            f"{one.free:+.1f}",
            f"{one.host_need:.0f}" if one.memory.host or one.host_missing else "",
            f"{one.step.seconds:.3g}" if one.step else "",
            f"{one.tokens_per_s:,.0f}" if one.tokens_per_s else "",
        )
        changes = ", ".join(as_lines(one.changes))
        about = {"config": f"{one.config} {one.sizes}".strip(), "changes": changes, "on": one.machines.name}
        about |= {"verdict": one.verdict, "is_answer": any(one is other for other in first)}
        rows.append({**about, **dict(zip(_NUMBERS, cells, strict=True))})
    empty = [title for title in _NUMBERS if all(row[title] == "" for row in rows)]
    values = {
        "facts": facts(request, shown, results),
        "titles": [title for title in _NUMBERS if title not in empty],
        "rows": rows,
        "reasons": [
            *({"name": one.name, "why": why(request, one)} for one in first),
            *({"name": line["on"], "why": line["why"]} for line in refused(results)),
        ],
        "figures": [_figure(request, one) for one in shown[:SHOWN]],
        "lines": [*price_lines(request, choices[0]), *rests_on(request, shown)],
    }
    names = {"eyebrow": "Plan", "heading": request.path, "width": _WIDTH, "left": _LEFT}
    write_atomically(path, render("plan.html.jinja", f"{request.path}: plan", _STYLE, **values, **names))


def _figure(request: PlanRequest, one: Choice) -> dict[str, Any]:
    """Returns a row for each phase: kept bytes, those of the phase, the reserve; and the place of the device's size."""
    device = one.machines.device.gib
    scale = (_WIDTH - _LEFT - 46) / max(device, one.peak / GIB)
    reserve = (one.peak - one.memory.tensors) / GIB
    kept = sum(one.memory.persistent.values()) / GIB
    rows = []
    for i, (phase, size) in enumerate(one.memory.phases.items()):
        whole, x, bars = size / GIB, float(_LEFT), []
        below = min(kept, whole)
        for kind, width in (("kept", below), ("phase", whole - below), ("reserve", reserve)):
            bars.append((kind, f"{x:.1f}", f"{width * scale:.1f}"))
            x += width * scale
        ends = {"end": f"{x + 5:.1f}", "total": f"{whole + reserve:.1f}"}
        rows.append({"phase": phase, "y": i * _ROW + 2, "height": _ROW - 6, "bars": bars, **ends})
    step = f"{one.step.seconds:.3g} s a step" if one.step else "time not known"
    host = f", {one.host_missing:.0f} GiB of host memory missing" if one.host_missing else ""
    summary = f"{one.verdict}, {one.free:+.1f} GiB free{host}, {step}"
    sizes = {"height": _ROW * len(rows), "device": f"{_LEFT + device * scale:.1f}"}
    return {"name": one.name, "summary": summary, "rows": rows, **sizes}
