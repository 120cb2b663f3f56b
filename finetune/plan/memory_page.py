"""`plan --html`: memory over the phases of a run for the best places, as one page without scripts or requests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from finetune.engine.hardware import GIB
from finetune.plan.search import Choice, PlanRequest
from finetune.utils import write_atomically
from finetune.view.web_page import render

SHOWN = 6  # pictures
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
figure { min-width: 0; }
.lines p { margin-top: 0.5rem; max-width: 60rem; }
@media (max-width: 46rem) {
  .charts { grid-template-columns: 1fr; } main { padding: 1.5rem 0.8rem 3rem; } svg text { font-size: 16px; }
}
"""


def write_page(path: Path, request: PlanRequest, choices: Sequence[Choice], lines: Sequence[str]) -> None:
    """lines: notes on all choices."""
    figures = [_figure(request, one) for one in choices[:SHOWN]]
    names = {"eyebrow": "Plan", "heading": request.path, "width": _WIDTH, "left": _LEFT}
    title = f"{request.path}: plan"
    write_atomically(path, render("plan.html.jinja", title, _STYLE, figures=figures, lines=lines, **names))


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
    summary = f"{one.verdict}, {one.free:+.1f} GiB free, {step}"
    sizes = {"height": _ROW * len(rows), "device": f"{_LEFT + device * scale:.1f}"}
    return {"name": one.name, "summary": summary, "rows": rows, **sizes}
