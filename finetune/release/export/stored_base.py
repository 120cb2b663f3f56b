"""`export --to base`: merged weights in the format of a base that is stored in 8 or 4 bits (models/stored_formats.py).

    base's files ── decoded (`DecodedFiles`) ── merged, as every base's (streamed.py) ── packed again (`RepackedModel`)

What training left alone is copied bit for bit, codes and scales. A trained matrix is rounded to nearest in its format;
a block keeps the base's scale unless another one rounds less. Rounding loses what is smaller than half a step: the gate
says how much of the training that is, in weights and in answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from finetune.checkpoints.weight_files import TensorFiles
from finetune.errors import UserError
from finetune.models.damage import read_object
from finetune.models.stored_formats import FORMATS, Format, stored_format
from finetune.models.stored_loading import Piece, StoredFiles, StoredParameter, is_transposed, stored_parameters
from finetune.release.export.figures import Figures


def format_of_folder(folder: Path) -> Format | None:
    """Returns the format of a model folder; None for a plain one. Raises UserError for others."""
    config = read_object(folder / "config.json")
    if (settings := config.get("quantization_config")) is None or settings.get("quant_method") not in FORMATS:
        return None
    dtype = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    return stored_format(PretrainedConfig(quantization_config=settings, dtype=dtype), str(folder))


class DecodedFiles:
    """Same interface as `TensorFiles`: the tensors of a stored checkpoint as a plain one has them, in fp32."""

    def __init__(self, files: TensorFiles, form: Format, model: Any, name: str):
        """model: transformers', without weights."""
        self.raw, self.form, self.identity = files, form, files.identity
        self.parameters = stored_parameters(model, form)
        self.stored = StoredFiles(form, self.parameters, {one: files.file_of(one) for one in files.names()}, name)
        self._pieces: dict[str, tuple[StoredParameter, Piece]] = {}
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
        return name in self._pieces or (name in self.raw and name not in self.stored.own)

    def names(self) -> list[str]:
        """Returns the names of a plain checkpoint: in the order of the files, a weight at its first part."""
        plain = {part: name for name in self._pieces for part in self.parts_of(name)}
        names = (plain.get(name, name) for name in self.raw.names() if name in plain or name not in self.stored.own)
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
        self._ready: dict[str, Tensor] = {}
        self.rounding = Rounding()

    def is_copied(self, name: str) -> bool:
        """Returns whether a tensor is the base's, bit for bit."""
        if name in self.files.stored.own:
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

    def _packed(self, weight: str) -> dict[str, Tensor]:
        names = self.files.parts_of(weight)
        kinds = {part: self.shapes[name].dtype for name, part in names.items()}
        merged, packed = self.files.unstacked(weight, self._written.make(weight).float()), []
        for values, (base, rows, columns) in zip(merged, self.files.matrices(weight), strict=True):
            packed.append(self.form.pack(values, base, kinds))
            before, after = (self.form.unpack(parts, rows, columns) for parts in (base, packed[-1]))
            self.rounding.add(before, values, after)
        stack: Any = torch.stack if self.form.of_experts else lambda parts: parts[0]
        shaped = {name: stack([one[part] for one in packed]) for name, part in names.items()}
        return {name: one.to(kinds[names[name]]).view(self.shapes[name].shape) for name, one in shaped.items()}


class Rounding:
    """How far rounding moves weights, next to how far training has."""

    def __init__(self) -> None:
        self._error, self._update = 0.0, 0.0

    def add(self, before: Tensor, merged: Tensor, rounded: Tensor) -> None:
        self._update += float((merged - before).square().sum(dtype=torch.float64))
        self._error += float((rounded - merged).square().sum(dtype=torch.float64))

    @property
    def share(self) -> float | None:
        """The norm of the error over that of the update; None if nothing was trained."""
        return (self._error / self._update) ** 0.5 if self._update else None


def compare_codes(figures: Figures, written: Any, export: Path) -> None:
    """Compare every tensor of an export in the base's format, bit for bit: with the base's, or with the rounded merge.
    written: a `StreamedModel`."""
    ours, files = RepackedModel(written), TensorFiles(sorted(export.glob("*.safetensors")))
    names: Mapping[str, Tensor] = ours.shapes
    if missing := sorted({*names} - {*files.names()}):
        figures.problems.append(f"missing keys: {', '.join(missing[:3])} ({len(missing)} in all)")
    if others := sorted({*files.names()} - {*names}):
        figures.problems.append(f"unexpected keys: {', '.join(others[:3])} ({len(others)} in all)")
    differing = list[str]()
    for name in names:
        expected = ours.make(name)
        if name in files and (why := _other_bits(expected, files.read(name))) is not None:
            differing.append(f"{name}: {why}" + (", and the base's is kept" if ours.is_copied(name) else ""))
    if differing:
        more = f" ({len(differing)} tensors in all)" if differing[3:] else ""
        figures.problems.append(f"weights: {'; '.join(differing[:3])}{more}")
    figures.rounding = ours.rounding.share


def _other_bits(expected: Tensor, found: Tensor) -> str | None:
    if expected.dtype != found.dtype or expected.shape != found.shape:
        return f"is {found.dtype} {list(found.shape)}, not {expected.dtype} {list(expected.shape)}"
    ours, theirs = (one.contiguous().reshape(-1).view(torch.uint8) for one in (expected, found))
    size = expected.element_size()
    wrong = int((ours != theirs).view(-1, size).any(1).sum()) if expected.numel() else 0
    return f"{wrong:,} of {expected.numel():,} values are not the run's" if wrong else None
