"""`merge RUN1 RUN2 ...`: several runs of one base as one model, tensor by tensor, from what each of them changed.

    d_i = run_i - base                 in fp32, of one tensor at a time
    linear    sum w_i d_i                                    (https://arxiv.org/abs/2203.05482, .../2212.04089)
    slerp     d_1 to d_2 on the arc between them, at w_2     (Shoemake, https://doi.org/10.1145/325334.325242)
    ties      of each d_i the largest entries; of those, the ones that have the sign of sum w_i d_i,
              the mean weighted by w_i                       (https://arxiv.org/abs/2306.01708)
    dare      each entry of d_i kept with probability `density` and divided by it, then linear
                                                             (https://arxiv.org/abs/2311.03099)

TIES takes the largest entries of each tensor, not of the whole model as its paper does: memory is that of one tensor in
fp32 for each run, and two. The entries that DARE keeps follow from seed, run and tensor's name alone.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from finetune.checkpoints.trained import Trained
from finetune.checkpoints.weight_files import SHARD_BYTES, write_shards
from finetune.errors import UserError
from finetune.models.tokenizer import read_tokenizer
from finetune.release.export.hf_folder import Say, check_absent, describe, whole_or_absent, write_settings
from finetune.release.export.streamed import BaseFolder, StreamedModel, base_model, find_base
from finetune.utils import sha256_file

_PARALLEL = 0.9995  # cosine from which the arc is taken as a line
_DENSITY = {"ties": 0.2, "dare": 0.5}


@dataclass(frozen=True)
class Merge:
    """Settings of a combination of runs."""

    method: str
    weights: tuple[float, ...]
    density: float | None  # share of entries that is kept; of ties and dare
    seed: int | None  # of dare


def combination(method: str, runs: int, weights: str | None, density: float | None, seed: int | None) -> Merge:
    """Returns a checked combination. weights: numbers with commas; None: equal ones with sum 1. Raises UserError."""
    if method not in METHODS:
        raise UserError(f"--method {method}: no such method. Fix: give one of {', '.join(METHODS)}")
    try:
        shares = tuple(map(float, weights.split(","))) if weights else (1 / runs,) * runs
    except ValueError:
        raise UserError(f"--weights {weights}: not numbers with commas. Fix: give them as in 0.7,0.3") from None
    if len(shares) != runs or not all(map(math.isfinite, shares)):
        given = f"--weights {weights}: not {runs} finite numbers"
        raise UserError(f"{given}. Fix: give one number for each run, such as {','.join(['0.5'] * runs)}")
    if method == "slerp" and (runs != 2 or abs(sum(shares) - 1) > 1e-6 or min(shares) < 0):
        raise UserError(
            "--method slerp: needs two runs, and weights from 0 to 1 with sum 1. Fix: give two runs, and --weights "
            "such as 0.7,0.3"
        )
    if method == "ties" and min(shares) <= 0:
        raise UserError("--method ties: a weighted mean needs weights above 0. Fix: give such --weights")
    if density is not None and (method not in _DENSITY or not 0 < density <= 1):
        raise UserError(
            f"--density {density}: expected a share above 0 and up to 1, for {' or '.join(_DENSITY)}. Fix: give a "
            "share such as 0.5, and none for other methods"
        )
    if seed is not None and method != "dare":
        raise UserError(f"--seed: {method} draws nothing; only dare does. Fix: leave it out")
    return Merge(method, shares, density or _DENSITY.get(method), (seed or 0) if method == "dare" else None)


# Each method returns the change that is added to a tensor of the base. deltas: fp32, of each run; they may be
# overwritten.


def _linear(how: Merge, deltas: Sequence[Tensor], name: str) -> Tensor:
    total = deltas[0] * how.weights[0]
    for delta, weight in zip(deltas[1:], how.weights[1:], strict=True):
        total.add_(delta, alpha=weight)
    return total


def _slerp(how: Merge, deltas: Sequence[Tensor], name: str) -> Tensor:
    first, second = (delta.reshape(-1) for delta in deltas)
    lengths = float(first.norm()) * float(second.norm())
    cosine = float(first @ second) / lengths if lengths else 1.0
    if abs(cosine) > _PARALLEL:
        return _linear(how, deltas, name)
    angle = math.acos(cosine)
    one, other = (math.sin(weight * angle) / math.sin(angle) for weight in how.weights)
    return (first * one).add_(second, alpha=other).reshape(deltas[0].shape)


def _ties(how: Merge, deltas: Sequence[Tensor], name: str) -> Tensor:
    for delta in deltas:
        count = delta.numel()
        dropped = count - max(1, round((how.density or 1) * count))
        if dropped:
            delta[delta.abs() < delta.abs().reshape(-1).kthvalue(dropped + 1).values] = 0
    sign = _linear(how, deltas, name).sign_()
    total, mass = torch.zeros_like(sign), torch.zeros_like(sign)
    for delta, weight in zip(deltas, how.weights, strict=True):
        agrees = delta.sign() * sign > 0
        total.add_(delta * agrees, alpha=weight)
        mass.add_(agrees, alpha=weight)
    return total.div_(mass.masked_fill_(mass == 0, 1))


def _dare(how: Merge, deltas: Sequence[Tensor], name: str) -> Tensor:
    assert how.density is not None
    for run, delta in enumerate(deltas):
        seed = hashlib.sha256(f"{how.seed} {run} {name}".encode()).digest()[:8]
        generator = torch.Generator().manual_seed(int.from_bytes(seed, "big"))
        kept = torch.rand(delta.shape, generator=generator) < how.density
        delta.mul_(kept).div_(how.density)
    return _linear(how, deltas, name)


METHODS = {"linear": _linear, "slerp": _slerp, "ties": _ties, "dare": _dare}


def merge_runs(
    runs: Sequence[Trained], how: Merge, out: Path, base: str | None = None, say: Say = lambda text: None
) -> None:
    """Write the combined model of several runs to `out`: whole or absent, the same bytes every time.

    base: a folder or hub id in place of the one that the runs name. Tokenizer, template and settings are the first
    run's. Raises UserError if the runs have no common base or other tensors, RunFailure if the disk is full.
    """
    check_absent(out)
    common = _common_base(runs, base)
    models = [StreamedModel(run, torch.float32, base) for run in runs]
    for model in models:
        for name in {*model.shapes} ^ {*models[0].shapes}:
            raise UserError(
                f"{model.trained.run_dir}: only one of this run and {runs[0].run_dir} has {name}. Fix: merge runs "
                "whose models have the same tensors"
            )
        for name, tensor in model.shapes.items():
            if name not in common.files or common.files.meta(name).shape != tensor.shape:
                raise UserError(
                    f"{model.trained.run_dir}: {name} has shape {list(tensor.shape)}, and the base no such tensor. "
                    "What a run adds (tokens, a head of its own, scores) cannot be merged with other runs. Fix: leave "
                    "this run out"
                )
    templates = [read_tokenizer(run.settings).chat_template for run in runs]
    if any(one != templates[0] for one in templates):
        say(f"note: the runs have different chat templates; the result has that of {runs[0].run_dir}")
    settings = {key: value for key, value in asdict(how).items() if value is not None}
    about = {"base": common.identity(), **settings, "runs": [describe(model) for model in models]}
    table = [("Base", about["base"]["name"]), *((key, one) for key, one in settings.items() if key != "weights")]
    weights = [(one["run"], f"{weight:g}") for one, weight in zip(about["runs"], how.weights, strict=True)]
    card = ["# Merged runs", "", "| | |", "| --- | --- |", *(f"| {key} | {value} |" for key, value in table), ""]
    card += ["| run | weight |", "| --- | --- |", *(f"| {run} | {weight} |" for run, weight in weights), ""]

    def make(name: str) -> Tensor:
        values = common.files.read(name)
        if not values.is_floating_point():
            return values
        deltas = [model.make(name).sub_(values.float()) for model in models]
        if not any(bool(delta.any()) for delta in deltas):
            return values  # bit for bit
        return METHODS[how.method](how, deltas, name).add_(values.float()).to(values.dtype)

    shapes = {name: common.files.meta(name) for name in models[0].shapes}
    with whole_or_absent(out, about, {}, "\n".join(card)) as partial:
        write_shards(partial, shapes, make, SHARD_BYTES, lambda n, total: say(f"weights: file {n} of {total}"))
        write_settings(models[0], partial)


def _common_base(runs: Sequence[Trained], base: str | None) -> BaseFolder:
    """Returns the base of all runs. Raises UserError if there is none, or several."""
    bases: dict[str, BaseFolder] = {}
    for run in runs:
        about = base_model(run, base)
        if about.name is None:
            raise UserError(f"{run.run_dir}: was trained from scratch, so it has no base. Fix: leave this run out")
        one = find_base(about.name, about.revision)
        bases.setdefault(str(one.folder.resolve()), one)
    if len(bases) > 1 and len({tuple(map(sha256_file, one.files.paths())) for one in bases.values()}) > 1:
        names = " and ".join(sorted(one.name for one in bases.values()))
        raise UserError(
            f"the runs have different bases ({names}). What they changed does not add up. Fix: merge runs of one base, "
            "or give --base FOLDER if these are the same model"
        )
    return next(iter(bases.values()))
