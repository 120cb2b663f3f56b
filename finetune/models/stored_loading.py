"""Reads a checkpoint whose weights stay as they are stored (stored_layers.py).

    config.json ── format, and which layers have it       the same on ranks that read nothing, and in a plan
    plain model on `meta` ── transformers' own conversion, reverted, of numbered rows ── names in files of each matrix
    files ── transformers reads all that is plain, into a model with holes ── holes are filled, one layer at a time

What transformers has for such checkpoints computes without a gradient, on one kind of device, or unpacks all of it.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.core_model_loading import revert_weight_conversion
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from finetune.errors import UserError
from finetune.models.mtp import HEAD, name_in_files, named_as_in_files
from finetune.models.patches import set_attribute
from finetune.models.stored_formats import StoredFormat
from finetune.models.stored_layers import StoredLinear, StoredMatrix
from finetune.recipe.schema import Model

_NUMBER = 1 << 40  # of a parameter, above the numbers of its rows


@dataclass(frozen=True)
class PieceInFiles:
    """A matrix in the files: rows of a parameter, of one of its experts."""

    name: str  # that a plain checkpoint would have for it
    expert: int
    rows: int


@dataclass(frozen=True)
class StoredParameter:
    """A parameter that is stored: `path.name`."""

    path: str  # of its module
    name: str
    matrix: StoredMatrix
    pieces: tuple[PieceInFiles, ...]  # in the order of experts, and of rows
    experts: int | None  # None: of a linear layer


def without_quantization(config: PretrainedConfig) -> PretrainedConfig:
    """Returns the config of the same model, unpacked."""
    config = copy.deepcopy(config)
    vars(config).pop("quantization_config", None)
    return config


def stored_parameters(model: Any, form: StoredFormat) -> list[StoredParameter]:
    """Returns the parameters of a plain model, on `meta` or not, that its checkpoint stores. Raises UserError if their
    sizes or names are not of the format."""
    named = [*_stacked(model, form), *([] if form.of_experts else _linear(model, form))]
    if not named:
        raise UserError(
            f"model.name: {type(model).__name__} has no layer that can be stored as {form.name}. Fix: name a copy in "
            "bfloat16"
        )
    in_files = _names_in_files(model, named, form)
    found = []
    for path, name, experts, rows, columns in named:
        pieces = in_files[f"{path}.{name}"]
        own = [piece.rows for piece in pieces if piece.expert == 0]
        if [piece.rows for piece in pieces] != own * (experts or 1) or sum(own) != rows:
            raise UserError(
                f"model.name: files of {type(model).__name__} divide {path}.{name} in another way. It is read in the "
                f"rows that transformers writes, as {form.name}. Fix: name a copy in bfloat16"
            )
        matrix = StoredMatrix(form, tuple(own), columns)
        try:
            matrix.nbytes  # noqa: B018 (raises)
        except ValueError as error:
            raise UserError(
                f"model.name: {path}.{name} cannot be stored as {form.name}: {error}. Fix: name another checkpoint"
            ) from None
        found.append(StoredParameter(path, name, matrix, tuple(pieces), experts))
    return found


def _linear(model: Any, form: StoredFormat) -> Iterable[tuple[str, str, int | None, int, int]]:
    """Yields path, name, None, rows and columns of linear layers that are stored."""
    is_kept = _kept(model, form)
    for path, module in model.named_modules():
        if type(module) is nn.Linear and not is_kept(path):
            yield path, "weight", None, module.out_features, module.in_features


def _stacked(model: Any, form: StoredFormat) -> Iterable[tuple[str, str, int | None, int, int]]:
    """Yields path, name, experts, rows and columns of stacked experts that are stored."""
    from finetune.models.moe import stacked_experts

    is_kept = _kept(model, form)
    for path, experts in stacked_experts(model).items():
        for name, weight in experts.named_parameters(recurse=False):
            if weight.ndim == 3 and not is_kept(path):
                rows, columns = reversed(weight.shape[1:]) if is_transposed(experts) else weight.shape[1:]
                yield path, name, experts.num_experts, rows, columns


def is_transposed(experts: Any) -> bool:
    """Returns whether a plain module of experts has matrices (in, out)."""
    return bool(getattr(experts, "is_transposed", False))


def _kept(model: Any, form: StoredFormat) -> Callable[[str], bool]:
    """Returns whether the module of a path stays plain, by the config of the checkpoint, which has the names of files.
    So does the first matrix of a head that predicts ahead, of which published configs say nothing."""
    ignored = list(form.ignored) if form.ignored is not None else None
    patterns = [re.compile(one.removeprefix("re:")) for one in ignored or () if one.startswith("re:")]
    names = None if ignored is None else [one for one in ignored if not one.startswith("re:")]
    # The attribute by which transformers' models declare modules that stay in fp32.
    skipped = HfQuantizer.get_modules_to_not_convert(model, names, model._keep_in_fp32_modules)
    plain = {path for path, module in model.named_modules() if module is model.get_output_embeddings()} | {f"{HEAD}.fc"}

    def is_kept(path: str) -> bool:
        named = name_in_files(model, path)
        return path in plain or any(one.match(named) for one in patterns) or not should_convert_module(named, skipped)

    return is_kept


def _names_in_files(model: Any, named: list[Any], form: StoredFormat) -> dict[str, list[PieceInFiles]]:
    """Returns, for each parameter, the matrices of the files that it is made of, by reverting transformers' conversion
    for tensors whose values are the numbers of their rows."""
    numbered, names = dict[str, Tensor](), [f"{path}.{name}" for path, name, *_ in named]
    if form.of_experts:  # the files have them stacked, too
        return {
            name: [PieceInFiles(name, expert, rows) for expert in range(experts)]
            for name, (_, _, experts, rows, _) in zip(names, named, strict=True)
        }
    for i, (name, (_, _, experts, rows, _)) in enumerate(zip(names, named, strict=True)):
        shape = (rows, 1) if experts is None else (experts, rows, 1)
        count = torch.arange((experts or 1) * rows, device="cpu")  # a plan makes its models on `meta`
        numbered[name] = (count + i * _NUMBER).view(shape)
    found: dict[str, list[tuple[int, PieceInFiles]]] = {name: [] for name in names}
    for name, values in named_as_in_files(model, revert_weight_conversion(model, numbered)).items():
        if values.ndim != 2 or not torch.equal(values.diff(dim=0), torch.ones_like(values[1:])):
            continue  # `stored_parameters` finds rows missing
        number, row = divmod(int(values[0, 0]), _NUMBER)
        rows = named[number][3]
        found[names[number]].append((row, PieceInFiles(name, row // rows, len(values))))
    return {name: [piece for _, piece in sorted(pieces, key=lambda one: one[0])] for name, pieces in found.items()}


# --- a model with packed parameters


def put_in(model: Any, stored: Iterable[StoredParameter], packed: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Replace layers of a model by stored ones, in place. packed: their bytes by name; none: shapes on `meta`.

    Stacked experts keep the shape of the plain parameter, without memory, until `place_stacks`: peft reads it.
    """
    for one in stored:
        module, meta = model.get_submodule(one.path), torch.device("meta")
        name = f"{one.path}.{one.name}"
        if one.experts is None:
            own = packed[name] if name in packed else one.matrix.empty(dtype=dtype, device=meta)
            bias = None if module.bias is None else module.bias.detach()
            layer = StoredLinear(one.matrix, own, bias).requires_grad_(False).train(module.training)
            model.set_submodule(one.path, layer)
            continue
        own = packed[name] if name in packed else one.matrix.empty(one.experts, dtype=dtype, device=meta)
        shape = one.matrix.shape[::-1] if is_transposed(module) else one.matrix.shape
        shown = torch.empty((), dtype=dtype, device=own.device).expand(one.experts, *shape)
        module.register_parameter(one.name, nn.Parameter(shown, requires_grad=False))
        matrices = {**getattr(module, "stored_matrices", {}), one.name: one.matrix}
        waiting = {**getattr(module, "stored_bytes", {}), one.name: own}
        set_attribute(module, "stored_matrices", matrices, "stored experts")
        set_attribute(module, "stored_bytes", waiting, "stored experts")


def unpack_in(model: Any, one: StoredParameter, packed: Tensor, dtype: torch.dtype) -> None:
    """Put the values of a stored parameter into a plain model, in place. packed: its bytes."""
    module = model.get_submodule(one.path)
    if one.experts is None:
        layer = nn.Linear(one.matrix.columns, one.matrix.shape[0], module.bias is not None, device="meta")
        layer.weight = nn.Parameter(one.matrix.unpack(packed, dtype))
        layer.bias = module.bias
        model.set_submodule(one.path, layer.train(module.training))
        return
    values = torch.empty(one.experts, *one.matrix.shape, dtype=dtype, device=packed.device)
    for expert in range(one.experts):
        values[expert] = one.matrix.unpack(packed[expert], dtype)
    if is_transposed(module):
        values = values.mT.contiguous()
    module.register_parameter(one.name, nn.Parameter(values))


def place_stacks(model: nn.Module) -> None:
    """Give modules of experts the bytes of their weights, in place, once they have their adapters."""
    for module in model.modules():
        for name, packed in getattr(module, "stored_bytes", {}).items():
            setattr(module, name, nn.Parameter(packed, requires_grad=False))
        if hasattr(module, "stored_bytes"):
            del module.stored_bytes


class _Hole(nn.Module):
    """A linear layer whose weight is read by us."""

    def __init__(self, bias: nn.Parameter | None):
        super().__init__()
        self.register_parameter("bias", bias)


def with_holes(model_class: Any, stored: list[StoredParameter]) -> Any:
    """Returns the class of a model without its stored parameters, for `from_pretrained`."""

    class Holes(model_class):
        _keys_to_ignore_on_load_unexpected = [""]  # noqa: RUF012 (transformers' name and type)

        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            for one in stored:
                module: Any = self.get_submodule(one.path)
                if one.experts is None:
                    self.set_submodule(one.path, _Hole(module.bias))
                else:
                    module.register_parameter(one.name, None)  # the others keep their order
                    module._is_hf_initialized = True  # its own initialization would look for the weight

    # transformers finds conversions by the names of class and module.
    Holes.__name__, Holes.__module__ = model_class.__name__, model_class.__module__
    return Holes


# --- files


class StoredFiles:
    """The stored matrices of a checkpoint's files.

    places: the file of each tensor; plain: those that the model reads as they are. Raises UserError if the files have
    other tensors than the config says.
    """

    def __init__(
        self,
        form: StoredFormat,
        stored: Iterable[StoredParameter],
        places: Mapping[str, Path],
        name: str,
        plain: Container[str] = (),
    ):
        self._form, self._places, self._name = form, places, name
        self._stored = list(stored)
        self.own = {tensor for one in self._stored for tensor in self.tensors_of(one)}  # names of all their tensors
        missing = sorted({tensor for one in self._stored for tensor in self._needed(one)} - {*places})
        # A weight that is read as a plain one would be cast from its codes.
        scaled = (name for name in places if name.endswith("weight_scale_inv") and name not in self.own)
        missing = [f"a plain {one}" for name in scaled if (one := name.removesuffix("_scale_inv")) in plain] or missing
        if missing:
            raise UserError(
                f"model.name: {name!r} lacks {missing[0]}. Its config says {form.name} ({len(missing):,} such in "
                "all). Fix: complete the folder, or correct `quantization_config` in its config.json"
            )

    def _needed(self, one: StoredParameter) -> Iterable[str]:
        parts = self._form.parts(one.matrix.rows[0], one.matrix.columns)
        return (self._form.file_name(piece.name, part) for piece in one.pieces for part in parts)

    def tensors_of(self, one: StoredParameter) -> list[str]:
        """Returns the names in the files of a parameter's tensors, and of those that belong to it."""
        others = (self._form.file_name(piece.name, part) for piece in one.pieces for part in self._form.unread)
        return list(dict.fromkeys([*self._needed(one), *(name for name in others if name in self._places)]))

    def read(self, one: StoredParameter, dtype: torch.dtype) -> Tensor:
        """Returns the bytes of a parameter, as floats of a type. Raises UserError for other shapes or types."""
        counts = () if one.experts is None else (one.experts,)
        packed = one.matrix.empty(*counts, dtype=dtype, device=torch.device("cpu"))
        for piece, index, own in pieces_of(one, packed):
            of_expert = piece.expert if self._form.of_experts else None
            one.matrix.fill(own, index, self.parts(piece.name, piece.rows, one.matrix.columns, of_expert))
        return packed

    def parts(self, weight: str, rows: int, columns: int, expert: int | None = None) -> dict[str, Tensor]:
        """Returns the parts of one matrix, in the types that they are kept in. expert: of stacked files."""
        found = {}
        for part, (dtype, shape) in self._form.parts(rows, columns).items():
            name = self._form.file_name(weight, part)
            with safe_open(self._places[name], framework="pt") as file:
                tensor = file.get_tensor(name) if expert is None else file.get_slice(name)[expert]
            found[part] = self._checked(name, tensor, dtype, shape)
        return found

    def _checked(self, name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        if tensor.dtype != dtype and tensor.dtype.is_floating_point and dtype.is_floating_point and tensor.ndim < 3:
            kept = tensor.to(dtype)  # a scale
            if dtype.itemsize > 1 and torch.equal(kept.float(), tensor.float()):
                tensor = kept
        if tensor.dtype != dtype or tensor.numel() != torch.Size(shape).numel():
            kinds = [str(one).removeprefix("torch.") for one in (tensor.dtype, dtype)]
            raise UserError(
                f"model.name: {name} of {self._name!r} is {kinds[0]} {list(tensor.shape)} in its file. By its config "
                f"({self._form.name}) it is {kinds[1]} {list(shape)}. Fix: correct `quantization_config` or `dtype` "
                "in its config.json, or name another copy"
            )
        return tensor.reshape(shape)


def pieces_of(one: StoredParameter, packed: Tensor) -> Iterable[tuple[PieceInFiles, int, Tensor]]:
    """Yields each matrix of a parameter, its number within its expert, and the bytes of that expert."""
    each = len(one.matrix.rows)
    for number, piece in enumerate(one.pieces):
        yield piece, number % each, packed if one.experts is None else packed[piece.expert]


def read_stored(
    load: Any,  # a model class of transformers
    config: PretrainedConfig,
    stored: list[StoredParameter],
    files: StoredFiles,
    stored_in: torch.dtype,
    kept_on: torch.device,
    about: Model,
    unpacks: bool = False,
    **common: Any,
) -> tuple[Any, Any]:
    """Returns the model with its stored weights on `kept_on`, and transformers' report; see `put_in`.

    stored_in: the type in which stored weights compute, or that of unpacked ones; unpacks: makes a plain model of
    them; common: further arguments of `from_pretrained`.
    """
    config = without_quantization(config)
    model, report = with_holes(load, stored).from_pretrained(
        about.name,
        config=config,
        use_safetensors=True,
        revision=about.revision or "main",
        trust_remote_code=about.trust_remote_code,
        output_loading_info=True,
        **common,
    )
    set_attribute(model, "__class__", load, "own class")
    for one in stored:
        packed = files.read(one, stored_in).to(kept_on)
        if unpacks:
            unpack_in(model, one, packed, stored_in)
        else:
            put_in(model, [one], {f"{one.path}.{one.name}": packed}, stored_in)
    return model, report
