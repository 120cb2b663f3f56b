"""The gate for weights: every tensor of an export against what was trained, one at a time.

    export's files ── decoded (int8, fp8, GGUF) ── transformers' own conversion on load ───── tensor in memory ─┐
    base's files ──── transformers' own conversion on load ── peft's own `merge` of one layer ── expected ──────┴ bounds

Nothing is shared with the code that merged (`merging.py`) or rounded (`quantised.py`): sums are peft's, names in memory
are transformers'. A tensor that was not trained has to be the base's, rounded to the type of the export if that is
another one; a trained one has to lie between the roundings of the expected value with what fp32 may lose in a sum; a
block of eight bits has to have the scale that its largest value says, and no value further off than half a step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from finetune.errors import UserError
from finetune.export.figures import Figures
from finetune.export.gguf_file import gguf_of, gguf_tensors
from finetune.export.hf_folder import METADATA
from finetune.export.merging import plain_name
from finetune.export.streamed import StreamedModel, adapted, own_tensors
from finetune.export.tensor_files import TensorFiles
from finetune.export.trained import Trained
from finetune.models.added_tokens import ROWS
from finetune.models.tokenizer import load_tokenizer

_PREFIX = "base_model.model."  # peft's, before transformers' names
_SUMS = 2.0**-18  # of the largest value of a row: what fp32 may lose in W + s B A, in any order
_AT_A_TIME = 1 << 20  # values
# Of each code: its largest number, half a step of it, and half a step as a share of the value (of a float's mantissa).
_CODES = {"int8": (127.0, 0.5, 0.0), "q8_0": (127.0, 0.5, 0.0), "fp8": (448.0, 2.0**-10, 2.0**-4)}
_UNITS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-23}
_GGUF = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "Q8_0": torch.float16}


@dataclass(frozen=True)
class Stored:
    """A tensor of an export, by the name that a Hugging Face folder has for it.

    read: its values, decoded; dtype: the type of values, or of scales; code: int8, fp8 or q8_0 if they are rounded by
    blocks of `block` values (None: whole rows); slip: how far off a value may be besides.
    """

    read: Callable[[], Tensor]
    shape: tuple[int, ...]
    dtype: torch.dtype
    code: str | None = None
    block: int | None = None
    slip: float = 0.0


@dataclass(frozen=True)
class Value:
    """What training made of a tensor. slack: by how much each row may be off, (.., 1); None: it is exact; dtype: the
    type that the run itself has it in."""

    tensor: Tensor
    slack: Tensor | None
    dtype: torch.dtype


def stored_tensors(export: Path, written: StreamedModel) -> dict[str, Stored]:
    """Returns the tensors of an export. Raises UserError if a file cannot be read, or is not what it says."""
    if (file := gguf_of(export)) is not None:
        held = gguf_tensors(written, file).items()
        codes = {name: "q8_0" if one.kind == "Q8_0" else None for name, one in held}
        return {
            name: Stored(one.read, one.shape, _GGUF[one.kind], codes[name], 32 if codes[name] else None, one.slip)
            for name, one in held
        }
    files, tensors = TensorFiles(sorted(export.glob("*.safetensors"))), dict[str, Stored]()
    coded = {name.removesuffix("_scale") for name in files.names() if name.endswith(".weight_scale")}
    for name in files.names():
        stem, _, part = name.rpartition(".")
        if f"{stem}.weight" in coded and part in ("weight", "weight_packed", "weight_scale", "weight_shape"):
            continue
        meta = files.meta(name)
        tensors[name] = Stored(lambda name=name: files.read(name), tuple(meta.shape), meta.dtype)
    for name in sorted(coded):
        scale, code = files.meta(f"{name}_scale").dtype, "int8" if f"{name}_packed" in files else "fp8"
        rows, columns = files.meta(f"{name}_packed" if code == "int8" else name).shape
        shape = (rows, columns * 4 if code == "int8" else columns)
        if code == "int8" and tuple(files.read(f"{name}_shape").tolist()) != shape:
            raise UserError(f"{export}: {name}_shape is not {list(shape)}, which {name}_packed has")
        tensors[name] = Stored(lambda name=name: _decoded(files, name), shape, scale, code)
    return tensors


def _decoded(files: TensorFiles, name: str) -> Tensor:  # (out, in) fp32
    """Returns a weight of eight bits, as compressed-tensors' formats say: code times scale of the row."""
    scale = files.read(f"{name}_scale").float()
    if f"{name}_packed" not in files:
        return files.read(name).float() * scale
    code = files.read(f"{name}_packed")  # (out, in / 4), each of four unsigned bytes, the first one lowest
    values = torch.empty(*code.shape, 4)
    for i in range(4):
        values[..., i] = ((code >> (8 * i)) & 255) - 128
    return values.reshape(len(code), -1).mul_(scale)


class InMemory:
    """The tensors of files as transformers has them in memory, by its own renaming and conversion, a group at a time.

    unused: names in the files that the model has no use for.
    """

    def __init__(self, model: Any, shapes: Mapping[str, Any], read: Callable[[str], Tensor]):
        conversions = get_model_conversion_mapping(model)
        renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
        converters = [one for one in conversions if isinstance(one, WeightConverter)]
        self._model, self._read, self._own = model, read, model.state_dict()
        self._converter = {pattern: one for one in converters for pattern in one.source_patterns}
        self._groups: dict[str, list[tuple[str, str | None]]] = {}  # by the first tensor that a group becomes
        self.unused: list[str] = []
        for name in shapes:
            loaded, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, self._own)
            if loaded not in self._own and name in self._own:
                loaded, pattern = name, None
            if loaded in self._own:
                self._groups.setdefault(loaded, []).append((name, pattern))
            else:
                self.unused.append(name)
        meta = {name: torch.empty(tuple(shape), device="meta") for name, shape in shapes.items()}
        self._first = {name: first for first in self._groups for name in self._converted(first, meta.__getitem__)}
        self._ready: dict[str, Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._first

    def file_of(self, name: str) -> str:
        """Returns the first tensor of the files that one in memory is made of."""
        return self._groups[self._first[name]][0][0]

    def names(self) -> list[str]:
        """Returns all tensors in memory; those of a group follow each other."""
        return list(self._first)

    def load(self, name: str) -> Tensor:
        """Returns the values of one. Others of its group are kept until they are read, or another group is."""
        if name not in self._ready:
            self._ready = self._converted(self._first[name], self._read)
        return self._ready.pop(name)

    def _converted(self, first: str, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        group = sorted(self._groups[first], key=lambda one: _numbers_last(one[0]))
        if group[0][1] is None:
            return {first: read(group[-1][0])}
        converter: Any = copy.deepcopy(self._converter[group[0][1]])
        for name, pattern in group:
            converter.add_tensor(first, name, pattern, read(name))
        tensors = converter.convert(first, model=self._model, config=self._model.config)
        return {name: one[0] if isinstance(one, list) else one for name, one in tensors.items() if name in self._own}


def _numbers_last(name: str) -> list[tuple[int, int, str]]:
    """Returns by what names are sorted so that expert 10 follows expert 9."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]


class Expected:
    """What training made of each tensor in memory, by its name in transformers' model."""

    def __init__(self, trained: Trained, written: StreamedModel, base: str | None):
        self._trained, self._result_dtype = trained, written.result_dtype
        files = written.base.files if written.base else None
        self.base = None
        if files is not None:
            self.base = InMemory(written.model, {name: files.meta(name).shape for name in files.names()}, files.read)
        _, self._aliases = own_tensors(written.model)
        self._whole: dict[str, str] = {}  # tensor in memory -> the trained one in its place
        self._layers: dict[str, tuple[str, Any]] = {}  # tensor in memory -> path and module of peft's
        self._rows: dict[str, tuple[str, list[int]]] = {}  # tensor in memory -> trained rows, and where they are
        # Checkpoints have the names of the text part alone.
        self._in_base = written.part.in_base if written.part is not None and trained.is_checkpoint else str
        if trained.is_adapter:
            self._find_layers(adapted(trained, base, written.part))
        elif trained.is_checkpoint:
            self._whole = {self._in_base(name): name for name in trained.shapes}

    def _find_layers(self, model: Any) -> None:
        """Note which tensors have an adapter, are trained in full, or have trained rows. model: peft's. Raises
        UserError if a trained tensor has no place in the model."""
        from peft.tuners.lora.layer import LoraLayer
        from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper

        state = model.state_dict(keep_vars=True)
        self._twins = {name: [o for o, other in state.items() if other is one] for name, one in state.items()}
        self._taken = set[str]()
        plain = model.get_base_model()
        for path, module in plain.named_modules():
            inside = f"{plain_name(path)}."
            if isinstance(module, LoraLayer):
                self._layers[self._in_base(inside + _adapted_parameter(module))] = (path, module)
                for own in _adapter_parameters(module):
                    self._key(f"{path}.{own}")
            elif isinstance(module, TrainableTokensWrapper):
                key = self._key(f"{path}.token_adapter.trainable_tokens_delta.default")
                rows = list(module.token_adapter.token_indices["default"])
                self._rows[self._in_base(f"{inside}weight")] = (key, rows)
            elif isinstance(module, ModulesToSaveWrapper):
                for own, _ in module.original_module.named_parameters():
                    key = self._key(f"{path}.modules_to_save.default.{own}")
                    self._whole[self._in_base(inside + own)] = key
        plain_names = {plain_name(name) for name in plain.state_dict()}
        for key in sorted(set(self._trained.shapes) - self._taken):
            name = plain_name(key.removeprefix(_PREFIX))
            if name.endswith(f".{ROWS}"):
                self._find_added_rows(model, key)
            elif name in plain_names:  # peft saves embeddings that have grown with the adapter
                self._whole[self._in_base(name)] = key
            else:
                raise UserError(f"{self._trained.folder}: {key} has no place in the base model: is it another one?")

    def _find_added_rows(self, model: Any, key: str) -> None:
        assert self._trained.recipe is not None
        first, count = len(load_tokenizer(self._trained.recipe.model)), len(self._trained.shapes[key])
        table = key.removesuffix(ROWS) + "weight"
        for twin in self._twins.get(table, [table]):
            name = self._in_base(plain_name(twin.removeprefix(_PREFIX)))
            self._rows[name] = (key, list(range(first, first + count)))

    def _key(self, name: str) -> str:
        """Returns the trained tensor of a parameter of peft's model, or of one that it is tied to."""
        full = _PREFIX + name
        keys = [key for one in (full, *self._twins.get(full, ())) if (key := self._trained.key(one)) is not None]
        if not keys:
            raise UserError(f"{self._trained.folder}: no tensor for {name}: this adapter belongs to another model")
        self._taken.update(keys)
        return keys[0]

    def value(self, name: str) -> Value | None:
        """Returns the value of a tensor; None if neither base nor run has it."""
        first = self._aliases.get(name, name)
        if name in self._whole or (first in self._whole and not self._trained.is_adapter):  # tied: trained as one
            return self._trained_whole(self._whole.get(name) or self._whole[first])
        if (base := self._of_base(name)) is None:
            return None
        dtype = base.dtype
        if name in self._layers:
            slack = _slack(base)
            merged = self._merged(name, base)
            return Value(merged, torch.maximum(slack, _slack(merged)), dtype)
        if name in self._rows:
            key, rows = self._rows[name]
            grown = torch.zeros(max(len(base), max(rows) + 1), *base.shape[1:])
            grown[: len(base)] = base
            grown[rows] = self._trained.read(key).float()
            return Value(grown, None, dtype)
        return Value(base, None, dtype)

    def _trained_whole(self, key: str) -> Value:
        tensor = self._trained.read(key)
        return Value(tensor, _slack(tensor) if self._trained.averaged else None, self._result_dtype)

    def _of_base(self, name: str) -> Tensor | None:
        if self.base is None:
            return None
        first = self._aliases.get(name, name)
        twins = [name, first, *(alias for alias, one in self._aliases.items() if one == first)]
        place = next((one for one in twins if one in self.base), None)
        return self.base.load(place) if place is not None else None

    @torch.no_grad()
    def _merged(self, name: str, base: Tensor) -> Tensor:
        """Returns W with its adapter, by peft's own `merge` of this layer, in fp32."""
        path, module = self._layers[name]
        layer, parameter, empty = module.get_base_layer(), _adapted_parameter(module), {}
        for own in _adapter_parameters(module):
            empty[own] = _exchange(module, own, self._trained.read(self._key(f"{path}.{own}")).float())
        of_base = _exchange(layer, parameter, base.float())
        module.merge(adapter_names=["default"])
        module.merged_adapters.clear()
        merged = _exchange(layer, parameter, of_base)
        for own, without_values in empty.items():
            _exchange(module, own, without_values)
        return merged


def _adapted_parameter(module: Any) -> str:
    return getattr(module, "parameter_name", "weight")


def _adapter_parameters(module: Any) -> list[str]:
    """Returns the names of a layer's own factors and magnitudes, below it."""
    return [n for n, _ in module.named_parameters() if ".default" in n and not n.startswith("base_layer.")]


def _exchange(module: Any, name: str, value: Tensor) -> Tensor:
    """Put a tensor in a parameter's place; returns the one that was there."""
    holder, _, last = name.rpartition(".")
    place = module.get_submodule(holder) if holder else module
    old, new = getattr(place, last), nn.Parameter(value, requires_grad=False)
    if isinstance(place, nn.ParameterDict):
        place[last] = new
    else:
        setattr(place, last, new)
    return old.data


def _slack(tensor: Tensor) -> Tensor:  # (.., 1)
    return tensor.abs().amax(dim=-1, keepdim=True).float() * _SUMS


# --- one tensor


def difference(values: Tensor, value: Value, chain: list[torch.dtype], stored: Stored) -> str | None:
    """Returns how a tensor differs from the expected one, found in blocks of rows; None if it does not.

    chain: the types that values are rounded to, one after the other.
    """
    x, e, slack = values, value.tensor, value.slack
    if not e.is_floating_point() or e.ndim == 0:
        return None if torch.equal(x.to(e.dtype), e) else "is not the run's"
    width = max(1, x.shape[-1])
    x, e = x.reshape(-1, width), e.reshape(-1, width)
    rows = torch.zeros(len(e), 1) if slack is None else slack.reshape(-1, 1).expand(len(e), 1)
    compare = _outside_code if stored.code else _outside
    count, wrong, worst = max(1, _AT_A_TIME // width), 0, 0.0
    for start in range(0, len(x), count):
        theirs, ours = x[start : start + count].float(), e[start : start + count].float()
        outside = compare(theirs, ours, rows[start : start + count] + stored.slip, chain, stored)
        if outside.any():
            wrong += int(outside.sum())
            off = (theirs - ours).abs()[outside].nan_to_num(float("inf"), float("inf"))
            worst = max(worst, float(off.max()))
    return f"{wrong:,} of {x.numel():,} values are not the run's, by up to {worst:.3g}" if wrong else None


def _rounded(values: Tensor, chain: list[torch.dtype]) -> Tensor:
    for dtype in chain:
        values = values.to(dtype)
    return values.float()


def _outside(x: Tensor, e: Tensor, slack: Tensor, chain: list[torch.dtype], stored: Stored) -> Tensor:
    """Returns which values are not between the roundings of the least and the largest value that is right."""
    return ~((x >= _rounded(e - slack, chain)) & (x <= _rounded(e + slack, chain)))


def _outside_code(x: Tensor, e: Tensor, slack: Tensor, chain: list[torch.dtype], stored: Stored) -> Tensor:
    """Returns which values are more than half a step off, and all of a block that has another scale."""
    largest, half, share = _CODES[stored.code or ""]
    shape, block = x.shape, stored.block or e.shape[-1]
    slack = slack.repeat_interleave(shape[-1] // block, 0)
    x, e = x.reshape(-1, block), e.reshape(-1, block)
    unit = sum(_UNITS[dtype] for dtype in chain)  # each rounding, and that of the scale
    top = e.abs().amax(dim=-1, keepdim=True)
    tiny = 2.0**-24 * largest if stored.code == "q8_0" else 0.0  # scales below it are 0 in fp16
    step = torch.maximum(half * top / largest, share * e.abs()) * (1 + 2.0**-6)
    is_near = (x - e).abs() <= step + unit * e.abs() + slack + tiny
    is_scaled = (x.abs().amax(dim=-1, keepdim=True) - top).abs() <= unit * top + slack + tiny
    return ~(is_near & is_scaled).reshape(shape)


# --- all of them


@dataclass
class _Comparison:
    """What was found. dtype: the type that the export should have; None: not known; is_gguf: of a GGUF file, whose
    values are rounded to the run's own type first."""

    expected: Expected
    dtype: torch.dtype | None
    is_gguf: bool
    problems: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    compared: int = 0

    def compare(self, name: str, values: Tensor, stored: Stored) -> None:
        if (value := self.expected.value(name)) is None:
            self.problems.append(f"unexpected keys: {name}")
            return
        self.compared += 1
        if values.shape != value.tensor.shape:
            what = f"{name} has {list(values.shape)} values, and {list(value.tensor.shape)} in the run"
            self.problems.append(f"{what}: rows of added tokens, or others, are lost")
            return
        plain = value.tensor.is_floating_point() and not stored.code and not self.is_gguf and self.dtype is not None
        if plain and stored.dtype not in (self.dtype, value.dtype):
            types = (str(one).removeprefix("torch.") for one in (stored.dtype, self.dtype))
            self.problems.append("{}: is {}, and {} by what was exported".format(name, *types))
        chain = [value.dtype, stored.dtype] if self.is_gguf else [stored.dtype]
        if (why := difference(values, value, [one for one in chain if one in _UNITS], stored)) is not None:
            self.differing.append(f"{name}: {why}")


def compare_tensors(figures: Figures, trained: Trained, written: StreamedModel, export: Path, base: str | None) -> None:
    """Compare every tensor of an export with what was trained. Raises UserError if a file cannot be read."""
    whole = (export / METADATA).is_file()  # else another tool may have left out what transformers does not load
    dtype = getattr(torch, figures.dtype) if whole else None
    stored, expected = stored_tensors(export, written), Expected(trained, written, base)
    is_gguf = gguf_of(export) is not None
    part = written.text_part if is_gguf else None
    model, in_base = (part.text, part.in_base) if part is not None else (written.model, str)
    held = InMemory(model, {name: one.shape for name, one in stored.items()}, lambda name: stored[name].read())
    result = _Comparison(expected, dtype, is_gguf)
    for name in held.names():
        result.compare(in_base(name), held.load(name), stored[held.file_of(name)])
    if not is_gguf:
        _compare_unused(result, written, held, stored, whole)
    figures.tensors = result.compared
    if lacking := _lacking(model, held, expected, in_base):
        figures.problems.append(f"missing keys: {', '.join(lacking[:3])} ({len(lacking)} in all)")
    figures.problems += result.problems[:3]
    if result.differing:
        more = f" ({len(result.differing)} tensors in all)" if result.differing[3:] else ""
        figures.problems.append(f"weights: {'; '.join(result.differing[:3])}{more}")


def _compare_unused(
    result: _Comparison, written: StreamedModel, held: InMemory, stored: dict[str, Stored], whole: bool
) -> None:
    """Compare what files have in addition to the model: as the base's have it, or unexpected."""
    base = written.base.files if written.base and not written.is_scoring else None
    for name in held.unused:
        if base is None or name not in base:
            result.problems.append(f"unexpected keys: {name}")
            continue
        tensor = base.read(name)
        chain = [one for one in (stored[name].dtype,) if one in _UNITS]
        if (why := difference(stored[name].read(), Value(tensor, None, tensor.dtype), chain, stored[name])) is not None:
            result.differing.append(f"{name}: {why}")
    extra = result.expected.base.unused if whole and base is not None and result.expected.base is not None else []
    if lost := sorted(set(extra) - set(held.unused)):
        result.problems.append(f"missing keys: {lost[0]}, which the base's files have ({len(lost)} in all)")


def _lacking(model: Any, held: InMemory, expected: Expected, in_base: Callable[[str], str]) -> list[str]:
    """Returns the tensors that an export lacks, and that are not another one that transformers ties them to."""
    aliases = {**own_tensors(model)[1], **model.get_expanded_tied_weights_keys(all_submodels=True)}
    lacking = []
    for name in model.state_dict():
        if name in held or (value := expected.value(in_base(name))) is None:
            continue
        twin = aliases.get(name) or next((alias for alias, first in aliases.items() if first == name), None)
        tied = expected.value(in_base(twin)) if twin is not None and twin in held else None
        if tied is None or not torch.equal(tied.tensor, value.tensor):
            lacking.append(name)
    return lacking
