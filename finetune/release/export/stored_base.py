"""`export --to base`: merged weights in the format of a base that is stored in 8 or 4 bits (models/stored_formats.py).

    base's files ── decoded (`DecodedFiles`) ── merged, as every base's (streamed.py) ── packed again (`RepackedModel`)

What training left alone is copied bit for bit, codes and scales. A trained matrix is rounded in its format so that
little is lost of what its adapter adds to outputs (`stored_rounding.rounded`). The gate says how much is, in weights
and in answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PretrainedConfig

from finetune.checkpoints.weight_files import TensorFiles
from finetune.errors import UserError
from finetune.models.damage import read_object
from finetune.models.stored_config import FORMATS, stored_format
from finetune.models.stored_formats import StoredFormat
from finetune.models.stored_loading import PieceInFiles, StoredFiles, StoredParameter, is_transposed, stored_parameters
from finetune.release.export.figures import Figures


def format_of_folder(folder: Path) -> StoredFormat | None:
    """Returns the format of a model folder; None for a plain one. Raises UserError for others."""
    config = read_object(folder / "config.json")
    if (settings := config.get("quantization_config")) is None or settings.get("quant_method") not in FORMATS:
        return None
    dtype = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    return stored_format(PretrainedConfig.from_dict({"quantization_config": settings, "dtype": dtype}), str(folder))


def format_of_export(folder: Path) -> StoredFormat | None:
    """Returns the format of an export; None for a plain one, and for those that `--quantize` and other tools write."""
    try:
        return format_of_folder(folder)
    except UserError:
        return None


class DecodedFiles:
    """Same interface as `TensorFiles`: the tensors of a stored checkpoint as a plain one has them, in fp32."""

    def __init__(self, files: TensorFiles, form: StoredFormat, model: Any, name: str):
        """model: transformers', without weights."""
        self.raw, self.form, self.identity = files, form, files.identity
        self.parameters = stored_parameters(model, form)
        self.stored = StoredFiles(form, self.parameters, {one: files.file_of(one) for one in files.names()}, name)
        self.codes = self.stored.own  # names of codes and scales, and of what belongs to them
        self._pieces: dict[str, tuple[StoredParameter, PieceInFiles]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for one in self.parameters:
            for piece in one.pieces:
                self._pieces.setdefault(piece.name, (one, piece))
                self._shapes[piece.name] = (piece.rows, one.matrix.columns)
            if form.of_experts:
                assert one.experts is not None
                transposed = is_transposed(model.get_submodule(one.path))
                shape = one.matrix.shape[::-1] if transposed else one.matrix.shape
                self._shapes[one.pieces[0].name] = (one.experts, *shape)

    def __contains__(self, name: str) -> bool:
        return name in self._pieces or (name in self.raw and name not in self.codes)

    def names(self) -> list[str]:
        """Returns the names of a plain checkpoint: in the order of the files, a weight at its first part."""
        plain = {part: name for name in self._pieces for part in self.parts_of(name)}
        names = (plain.get(name, name) for name in self.raw.names() if name in plain or name not in self.codes)
        return list(dict.fromkeys(names))

    def paths(self) -> list[Path]:
        return self.raw.paths()

    def is_stored(self, name: str) -> bool:
        return name in self._pieces

    def parts_of(self, name: str) -> dict[str, str]:
        """Returns, by its name in the files, which part of a weight a tensor is."""
        one, piece = self._pieces[name]
        parts = self.form.parts(piece.rows, one.matrix.columns)
        return {self.form.file_name(name, part): part for part in parts}

    def meta(self, name: str) -> Tensor:
        if name not in self._pieces:
            return self.raw.meta(name)
        return torch.empty(self._shapes[name], dtype=torch.float32, device="meta")

    def place_of(self, name: str, index: int) -> tuple[StoredParameter, int]:
        """Returns the parameter of a weight's matrix, and its expert there."""
        one, piece = self._pieces[name]
        return one, index if self.form.of_experts else piece.expert

    def matrices(self, name: str) -> list[tuple[dict[str, Tensor], int, int]]:
        """Returns the parts of a weight, with its rows and columns; of stacked experts, of each."""
        one, piece = self._pieces[name]
        experts = range(one.experts or 1) if self.form.of_experts else [None]
        sizes = (piece.rows, one.matrix.columns)
        return [(self.stored.parts(name, *sizes, expert), *sizes) for expert in experts]

    def read(self, name: str) -> Tensor:
        if name not in self._pieces:
            return self.raw.read(name)
        return self.stacked(name, [self.form.unpack(*one) for one in self.matrices(name)])

    def stacked(self, name: str, values: list[Tensor]) -> Tensor:
        """Returns the tensor of a plain checkpoint, of the values of its matrices (O, I)."""
        if not self.form.of_experts:
            return values[0].contiguous()
        shape = self._shapes[name]
        return torch.stack([one if one.shape == shape[1:] else one.t() for one in values]).view(shape)

    def unstacked(self, name: str, tensor: Tensor) -> list[Tensor]:
        """Returns the matrices (O, I) of a tensor of a plain checkpoint."""
        one, _ = self._pieces[name]
        if not self.form.of_experts:
            return [tensor]
        is_turned = tuple(tensor.shape[1:]) != one.matrix.shape
        return [(each.t() if is_turned else each).contiguous() for each in tensor]


def decoded_of(written: Any) -> DecodedFiles | None:
    """Returns the files of a stored base; None for a plain one. written: a `StreamedModel`."""
    files = written.base.files if written.base is not None else None
    return files if isinstance(files, DecodedFiles) else None


class RepackedModel:
    """Same interface as `StreamedModel`: the tensors of the result in the base's format. Raises UserError for a base
    that is not stored in one."""

    def __init__(self, written: Any):
        self._written, files = written, decoded_of(written)
        if files is None:
            name = written.about.name
            raise UserError(
                f"--to base: {name!r} is not stored in fewer bits. Its plain format is that of --to hf. Fix: give "
                "--to hf"
            )
        self.files, self.form = files, files.form
        self._weight = {part: name for name in files.names() if files.is_stored(name) for part in files.parts_of(name)}
        plain = {name: tensor for name, tensor in written.shapes.items() if not files.is_stored(name)}
        raw = {name: files.raw.meta(name) for name in files.raw.names()}
        self.shapes: dict[str, Tensor] = {name: plain.get(name, tensor) for name, tensor in raw.items()}
        self.shapes |= {name: tensor for name, tensor in plain.items() if name not in raw}
        self.trained = [name for name in dict.fromkeys(self._weight.values()) if written.is_trained(name)]
        self._ready: dict[str, Tensor] = {}
        self.rounding = Rounding()

    def is_trained_weight(self, name: str) -> bool:
        """Returns whether a tensor is a part of a stored weight that training changed."""
        return name in self._weight and self._written.is_trained(self._weight[name])

    def is_copied(self, name: str) -> bool:
        """Returns whether a tensor is the base's, bit for bit."""
        if name in self.files.codes:
            return name not in self._weight or not self._written.is_trained(self._weight[name])
        return name in self.files.raw and not self._written.is_trained(name)

    def make(self, name: str) -> Tensor:
        """Returns the values of a tensor."""
        if self.is_copied(name):
            return self.files.raw.read(name).to(self.shapes[name].dtype)
        if name not in self._weight:
            return self._written.make(name)
        if name not in self._ready:
            self._ready |= self._packed(self._weight[name])
        return self._ready.pop(name)

    def merged(self, weight: str) -> Iterator[Merged]:
        """Yields each matrix of a trained weight, before it is rounded."""
        matrices = self.files.matrices(weight)
        values = self.files.unstacked(weight, self._written.make(weight).float())
        for i, (own, (base, rows, columns)) in enumerate(zip(values, matrices, strict=True)):
            yield Merged(own, base, self._inputs(weight, i), rows, columns)

    def _inputs(self, weight: str, index: int) -> Tensor | None:
        """Returns the directions of inputs (r, columns) that a matrix's adapter reads; None for one without."""
        one, expert = self.files.place_of(weight, index)
        patch = self._written.patches.get(f"{one.path}.{one.name}")
        if patch is None or patch.factors is None:
            return None
        left, right = patch.factors()
        reads = left.mT if right.shape[-1] != one.matrix.columns else right
        return reads[expert] if reads.ndim == 3 else reads

    def kinds(self, weight: str) -> dict[str, torch.dtype]:
        return {part: self.shapes[name].dtype for name, part in self.files.parts_of(weight).items()}

    def _packed(self, weight: str) -> dict[str, Tensor]:
        names, kinds, packed = self.files.parts_of(weight), self.kinds(weight), []
        for one in self.merged(weight):
            packed.append(self.form.pack(one.values, one.base, kinds, one.inputs))
            before, after = (self.form.unpack(parts, one.rows, one.columns) for parts in (one.base, packed[-1]))
            self.rounding.add(before, one.values, after, one.inputs)
        stack: Any = torch.stack if self.form.of_experts else lambda parts: parts[0]
        shaped = {name: stack([one[part] for one in packed]) for name, part in names.items()}
        return {name: one.to(kinds[names[name]]).view(self.shapes[name].shape) for name, one in shaped.items()}


class Merged(NamedTuple):
    """A matrix (rows, columns) with its adapter. base: the parts that it had; inputs: see `stored_rounding.rounded`."""

    values: Tensor
    base: dict[str, Tensor]
    inputs: Tensor | None
    rows: int
    columns: int


class Rounding:
    """How far rounding moves outputs, next to how far training has, for the inputs that adapters read."""

    def __init__(self) -> None:
        self._error, self._update = 0.0, 0.0

    def add(self, before: Tensor, merged: Tensor, rounded: Tensor, inputs: Tensor | None) -> None:
        self._update += along(merged - before, inputs)
        self._error += along(rounded - merged, inputs)

    @property
    def share(self) -> float | None:
        """The norm of the error over that of the update; None if nothing was trained."""
        return (self._error / self._update) ** 0.5 if self._update else None


def along(change: Tensor, inputs: Tensor | None) -> float:
    """Returns the square of the norm of a change of a matrix, for inputs in some directions alone."""
    if inputs is not None:
        change = change @ torch.linalg.qr(inputs.float().t()).Q
    return float(change.square().sum(dtype=torch.float64))


# --- the gate


def compare_codes(figures: Figures, written: Any, export: Path) -> None:
    """Compare every tensor of an export in the base's format with the base's bits, or with the merged values. written:
    a `StreamedModel`."""
    ours, files = RepackedModel(written), TensorFiles(sorted(export.glob("*.safetensors")))
    if missing := sorted({*ours.shapes} - {*files.names()}):
        figures.problems.append(f"missing keys: {', '.join(missing[:3])} ({len(missing)} in all)")
    if others := sorted({*files.names()} - {*ours.shapes}):
        figures.problems.append(f"unexpected keys: {', '.join(others[:3])} ({len(others)} in all)")
    if missing:
        return
    theirs, differing = DecodedFiles(files, ours.form, written.model, str(export)), list[str]()
    for name in ours.shapes:
        if not ours.is_trained_weight(name) and (why := _other_bits(ours.make(name), files.read(name))) is not None:
            differing.append(f"{name}: {why}" + (", which is the base's" if ours.is_copied(name) else ""))
    for weight in ours.trained:
        found, kinds = theirs.matrices(weight), ours.kinds(weight)
        for i, (one, (parts, rows, columns)) in enumerate(zip(ours.merged(weight), found, strict=True)):
            if (why := _other_codes(ours, one, parts, kinds)) is not None:
                differing.append(f"{weight}{f'[{i}]' if len(found) > 1 else ''}: {why}")
            before, after = (ours.form.unpack(parts, rows, columns) for parts in (one.base, parts))
            ours.rounding.add(before, one.values, after, one.inputs)
    if differing:
        more = f" ({len(differing)} tensors in all)" if differing[3:] else ""
        figures.problems.append(f"weights: {'; '.join(differing[:3])}{more}")
    figures.rounding = ours.rounding.share


_STEPS = 4.0  # by which a number may be off: what a column lost is added to the next ones
_SHARE = 1e-3  # of blocks whose scale may be the other of two that round alike
_TIMES = 2.0  # what may be lost along an adapter, of what is lost here: another machine adds up in another order


def _other_codes(ours: RepackedModel, merged: Merged, found: dict[str, Tensor], kinds: Any) -> str | None:
    """Returns how a stored matrix differs from the rounded merge; None if it does not."""
    form, values = ours.form, merged.values
    expected = form.pack(values, merged.base, kinds, merged.inputs)
    if all(torch.equal(expected[part].to(kinds[part]), found[part].to(kinds[part])) for part in expected):
        return None
    fitted, after = form.fit(values, merged.base, kinds), form.unpack(found, merged.rows, merged.columns)
    for part, tensor in expected.items():
        if part in form.codes:
            continue
        other = tensor.to(kinds[part]).view(torch.uint8) != found[part].to(kinds[part]).contiguous().view(torch.uint8)
        if (count := int(other.sum())) > _SHARE * other.numel():
            return f"{part} differs from the run's in {count:,} of {other.numel():,} bytes"
    error = after - values
    step = fitted.table.diff().max() if len(fitted.table) < _FEW else values.abs() / fitted.scale / 4 + 1
    if (wrong := int((error.abs() > _STEPS * step * fitted.scale).sum())) > 0:
        return f"{wrong:,} of {error.numel():,} values are not the run's, by up to {float(error.abs().max()):.3g}"
    best = form.unpack(expected, merged.rows, merged.columns) - values
    lost, least = along(error, merged.inputs), along(best, merged.inputs)
    if lost > _TIMES**2 * least:
        return f"rounding loses {(lost / max(least, 1e-30)) ** 0.5:.1f} times what it has to"
    return None


_FEW = 32  # numbers of a table of 4 bits


def _other_bits(expected: Tensor, found: Tensor) -> str | None:
    if expected.dtype != found.dtype or expected.shape != found.shape:
        return f"is {found.dtype} {list(found.shape)}, not {expected.dtype} {list(expected.shape)}"
    ours, theirs = (one.contiguous().reshape(-1).view(torch.uint8) for one in (expected, found))
    size = expected.element_size()
    wrong = int((ours != theirs).view(-1, size).any(1).sum()) if expected.numel() else 0
    return f"{wrong:,} of {expected.numel():,} values are not the run's" if wrong else None
