"""Whether two runs of the same recipe came out the same to the last bit; nothing is within a tolerance."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

# Of a checkpoint's state.json; the rest says when, where and under which name it was written.
_STATE = ("step", "tokens", "supervised_tokens", "tokens_by_source", "row_position", "metrics", "loss_scale", "scalars")

# Meters of a training line, see `finetune/tracking/meters.py`.
_MEASURED = {"step_s", "tokens_per_s", "supervised_tokens_per_s", "tokens_per_s_per_device", "mfu", "hfu", "straggler"}
_MEASURED |= {"supervised_tokens_per_s_per_device", "tflops_per_device", "rank_spread", "memory_peak_gib"}
_MEASURED |= {"device_utilization", "power_w", "energy_j", "tokens_per_j"}

Content = dict[Any, Any]


def differences(reference: Path, other: Path) -> list[str]:
    """Everything in which a run's folder is not the reference's: files, weights, optimizer state, losses, samples."""
    names, other_names = _files(reference), _files(other)
    problems = [f"{name} is {'missing' if name in names else 'left over'}" for name in sorted(names ^ other_names)]
    for name in sorted(names & other_names):
        problems += _differing(name, _content(reference / name), _content(other / name))
    return problems + _differing("rows trained on, by step", samples(reference), samples(other))


def samples(run: Path) -> dict[int, Counter[str]]:
    """By step: how often each row was trained on, over all ranks."""
    rows_of_step: dict[int, Counter[str]] = {}
    for path in sorted((run / "samples").glob("rank-*.jsonl")):
        for line in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            rows_of_step.setdefault(line["step"], Counter()).update(line["rows"])
    return rows_of_step


def _files(run: Path) -> set[str]:
    """But for what a rank wrote when it lost its connection to one that was killed, if its launcher left it the time. A
    rank that fails by itself writes another error."""
    files = {path for path in run.rglob("*") if path.is_file()}
    lost = {path for path in run.glob("finetune-error-*.log") if "gloo/transport/" in path.read_text()}
    return {path.relative_to(run).as_posix() for path in files - lost}


def _content(path: Path) -> Content:
    """What must be the same of a file, by the name to complain of; nothing of those that hold times and names."""
    if path.suffix == ".safetensors":
        from safetensors import deserialize

        return {name: (t["dtype"], t["shape"], t["data"]) for name, t in deserialize(path.read_bytes())}
    if path.name == "state.json":
        state = json.loads(path.read_text(encoding="utf-8"))
        return {name: state[name] for name in _STATE}
    if path.name == "metrics.jsonl":
        return dict(enumerate(map(_timeless, path.read_text(encoding="utf-8").splitlines()), 1))
    return {}


def is_measured(key: str) -> bool:
    """Whether a key of a training line is measured, so that repeating the run gives another value."""
    return key in _MEASURED or key.startswith(("time/", "share/", "memory/"))


def _timeless(line: str) -> dict[str, Any]:
    """A line of metrics.jsonl without what is read from meters."""
    return {name: value for name, value in json.loads(line).items() if not is_measured(name)}


def _differing(what: str, ours: Content, theirs: Content) -> list[str]:
    """At most one problem, with the first names in which the two differ."""
    keys = [key for key in {**ours, **theirs} if key not in ours or key not in theirs or ours[key] != theirs[key]]
    more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
    return [f"{what}: {', '.join(map(str, keys[:3]))}{more}"] if keys else []
