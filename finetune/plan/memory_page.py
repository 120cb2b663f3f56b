"""`plan --html`: memory over the phases of a run for the best places, as one page without scripts or requests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from finetune.engine.hardware import GIB
from finetune.plan.search import Choice, PlanRequest
from finetune.utils import write_atomically
from finetune.view.web_page import head, page, text

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
_KEY = """<p class="key"><span><i class="k0"></i>kept between steps</span><span><i class="k1"></i>of the phase</span>
<span><i class="k2"></i>context and gaps, assumed</span><span><i class="k3"></i>the device</span></p>"""


def write_page(path: Path, request: PlanRequest, choices: Sequence[Choice], lines: Sequence[str]) -> None:
    """lines: notes on all choices."""
    figures = "\n".join(_figure(request, one) for one in choices[:SHOWN])
    notes = "\n".join(f"<p>{text(line)}</p>" for line in lines)
    body = f"""<h2>Memory of the fullest device, GiB</h2>
<div class="charts">
{figures}
</div>
<h2>What the numbers rest on</h2>
<div class="lines">
{notes}
</div>"""
    top = head(f"{request.path}: plan", _STYLE)
    write_atomically(path, page(top, "Plan", str(request.path), _KEY, body))


def _figure(request: PlanRequest, one: Choice) -> str:
    """Returns a row for each phase: kept bytes, those of the phase, the reserve; and a line for the device."""
    device, height = one.machines.device.gib, _ROW * len(one.memory.phases)
    scale = (_WIDTH - _LEFT - 46) / max(device, one.peak / GIB)
    reserve = (one.peak - one.memory.tensors) / GIB
    kept = sum(one.memory.persistent.values()) / GIB
    marks: list[str] = []
    for i, (name, size) in enumerate(one.memory.phases.items()):
        top, whole, x = i * _ROW + 2, size / GIB, float(_LEFT)
        below = min(kept, whole)
        marks.append(f'<text x="{_LEFT - 8}" y="{top + 15}" text-anchor="end">{text(name)}</text>')
        for kind, width in (("kept", below), ("phase", whole - below), ("reserve", reserve)):
            size = f'width="{width * scale:.1f}" height="{_ROW - 6}"'
            marks.append(f'<rect class="{kind}" x="{x:.1f}" y="{top}" {size}/>')
            x += width * scale
        marks.append(f'<text x="{x + 5:.1f}" y="{top + 15}">{whole + reserve:.1f}</text>')
    x = _LEFT + device * scale
    marks.append(f'<line class="device" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height}"/>')
    title, bars = text(one.name), "\n".join(marks)
    step = f"{one.step.seconds:.3g} s a step" if one.step else "time not known"
    return f"""<figure>
<figcaption><strong>{title}</strong><span>{one.verdict}, {one.free:+.1f} GiB free, {step}</span></figcaption>
<svg viewBox="0 0 {_WIDTH} {height + 4}" role="img" aria-label="memory by phase of {title}">
{bars}
</svg>
</figure>"""
