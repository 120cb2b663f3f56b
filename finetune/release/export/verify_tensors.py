"""The gate for weights: every tensor of an export against what was trained, one at a time.

    export's files ── decoded (int8, fp8, GGUF) ── transformers' own conversion on load ───── tensor in memory ─┐
    base's files ──── transformers' own conversion on load ── peft's own `merge` of one layer ── expected ──────┴ bounds

Sums are peft's and names in memory are transformers', not those of the code that merged (`merging.py`) or rounded
(`eight_bits.py`); only which tensor of an adapter belongs to which parameter is `merging.py`'s. A tensor that was not
trained has to be the base's, rounded to the type of the export if that is another one. A trained one has to lie between
the roundings of the expected value with what fp32 may lose in a sum. A block of eight bits has to have the scale of its
largest value, and no value further off than half a step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from finetune.checkpoints.trained import Trained
from finetune.checkpoints.weight_files import Stored, TensorFiles
from finetune.data.media.family_table import SPEECH
from finetune.errors import UserError
from finetune.models.checkpoint_files import tensor_names, unread_names
from finetune.models.mtp import copies_in_result, is_of_head, places_of_head, renames
from finetune.release.export.figures import Figures
from finetune.release.export.gguf_codes import SHARES, Update, block_problem, update_problem
from finetune.release.export.gguf_file import gguf_of, gguf_tensors
from finetune.release.export.gguf_places import Places
from finetune.release.export.hf_folder import METADATA
from finetune.release.export.merging import Patch
from finetune.release.export.stored_base import decoded_of, format_of_export
from finetune.release.export.streamed import StreamedModel, own_tensors

_SUMS = 2.0**-18  # of the largest value of a row: what fp32 may lose in W + s B A, in any order
_AT_A_TIME = 1 << 20  # values
# Of each code: its largest number, half a step of it, and half a step as a share of the value (of a float's mantissa).
_CODES = {"int8": (127.0, 0.5, 0.0), "q8_0": (127.0, 0.5, 0.0), "fp8": (448.0, 2.0**-10, 2.0**-4)}
_UNITS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-23}


@dataclass(frozen=True)
class Value:
    """What training made of a tensor. slack: by how much each row may be off, (.., 1); None: it is exact; dtype: the
    type that the run itself has it in; base: what it was before, of an adapter's."""

    tensor: Tensor
    slack: Tensor | None
    dtype: torch.dtype
    base: Tensor | None = None


def stored_tensors(export: Path, written: StreamedModel, places: Places | None = None) -> dict[str, Stored]:
    """Returns the tensors of an export; of one in the format of its base what is packed there, which `compare_codes`
    compares with it. places: of a GGUF file's. Raises UserError if a file cannot be read, or contradicts itself."""
    if gguf_of(export) is None and format_of_export(export) is not None and decoded_of(written) is not None:
        shapes = written.shapes
        return {name: Stored(partial(written.make, name), tuple(one.shape), one.dtype) for name, one in shapes.items()}
    if (file := gguf_of(export)) is not None:
        return gguf_tensors(written, file, places)
    files, tensors = TensorFiles(sorted(export.glob("*.safetensors"))), dict[str, Stored]()
    coded = {name.removesuffix("_scale") for name in files.names() if name.endswith(".weight_scale")}
    for name in files.names():
        stem, _, part = name.rpartition(".")
        if f"{stem}.weight" in coded and part in ("weight", "weight_packed", "weight_scale", "weight_shape"):
            continue
        meta = files.meta(name)
        tensors[name] = Stored(partial(files.read, name), tuple(meta.shape), meta.dtype)
    for name in sorted(coded):
        scale, code = files.meta(f"{name}_scale").dtype, "int8" if f"{name}_packed" in files else "fp8"
        rows, columns = files.meta(f"{name}_packed" if code == "int8" else name).shape
        shape = (rows, columns * 4 if code == "int8" else columns)
        if code == "int8" and tuple(files.read(f"{name}_shape").tolist()) != shape:
            raise UserError(f"{export}: {name}_shape is not {list(shape)}, as {name}_packed has. Fix: export it again")
        tensors[name] = Stored(partial(_decoded, files, name), shape, scale, code)
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
        conversions = get_model_conversion_mapping(model, renames(places_of_head(model)) or None)
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

    def files_of(self, name: str) -> list[str]:
        """Returns the tensors of the files that one in memory, and others of its group, are made of."""
        return [file for file, _ in self._groups[self._first[name]]]

    def names(self) -> list[str]:
        """Returns all tensors in memory; those of a group follow each other."""
        return list(self._first)

    def load(self, name: str) -> Tensor:
        """Returns the values of one. Others of its group are kept until they are read, or another group is."""
        if name not in self._ready:
            self._ready = self._converted(self._first[name], self._read)
        return self._ready.pop(name)

    def _converted(self, first: str, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        def numbers_last(one: tuple[str, str | None]) -> list[tuple[int, int, str]]:  # expert 10 follows expert 9
            return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in one[0].split(".")]

        group = sorted(self._groups[first], key=numbers_last)
        if group[0][1] is None:
            return {first: read(group[-1][0])}
        converter: Any = copy.deepcopy(self._converter[group[0][1]])
        for name, pattern in group:
            converter.add_tensor(first, name, pattern, read(name))
        tensors = converter.convert(first, model=self._model, config=self._model.config)
        return {name: one[0] if isinstance(one, list) else one for name, one in tensors.items() if name in self._own}


class Expected:
    """The value of each tensor after training, by its name in transformers' model. keeps_base: also that before it."""

    def __init__(self, trained: Trained, written: StreamedModel, keeps_base: bool = False):
        self._trained, self._written, self._keeps_base = trained, written, keeps_base
        self.base = None
        if written.base is not None:
            files = written.base.files
            self.base = InMemory(written.model, {name: files.meta(name).shape for name in files.names()}, files.read)
        self._aliases = own_tensors(written.model)[1]

    def value(self, name: str) -> Value | None:
        """Returns the value of a tensor; None if neither base nor run has it."""
        patches, first = self._written.patches, self._aliases.get(name, name)
        patch = patches.get(name)
        if patch is None and not self._trained.is_adapter:  # tied weights are trained as one
            patch = patches.get(first)
        if patch is not None and patch.kind == "full":
            tensor = self._trained.read(patch.keys[0])
            return Value(tensor, _slack(tensor) if self._trained.averaged else None, self._written.result_dtype)
        twins = [name, first, *(alias for alias, one in self._aliases.items() if one == first)]
        place = next((one for one in twins if self.base is not None and one in self.base), None)
        if self.base is None or place is None:
            return None
        base = self.base.load(place)
        if patch is None:
            return Value(base, None, base.dtype)
        if patch.kind == "rows":
            grown = torch.zeros(max(len(base), max(patch.rows) + 1), *base.shape[1:])
            grown[: len(base)] = base
            grown[list(patch.rows)] = self._trained.read(patch.keys[0]).float()
            return Value(grown, None, base.dtype)
        slack, before = _slack(base), base.clone() if self._keeps_base else None  # peft adds to fp32 in its place
        merged = self._merged(patch, base)
        return Value(merged, torch.maximum(slack, _slack(merged)), base.dtype, before)

    @torch.no_grad()
    def _merged(self, patch: Patch, base: Tensor) -> Tensor:
        """Returns W with its adapter, by peft's own `merge` of this layer, in fp32."""
        module, parameter = patch.layer, getattr(patch.layer, "parameter_name", "weight")
        keys = patch.parameters or {}
        empty = {own: _exchange(module, own, self._trained.read(key).float()) for own, key in keys.items()}
        of_base = _exchange(module.get_base_layer(), parameter, base.float())
        module.merge(adapter_names=["default"])
        module.merged_adapters.clear()
        merged = _exchange(module.get_base_layer(), parameter, of_base)
        for own, without_values in empty.items():
            _exchange(module, own, without_values)
        return merged


def _exchange(module: Any, name: str, value: Tensor) -> Tensor:
    """Put a tensor in a parameter's place; returns the previous one."""
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
    """Returns how a tensor differs from the expected one, compared in blocks of rows; None if it does not.

    chain: the types that values are rounded to, one after the other.
    """
    x, e, slack = values, value.tensor, value.slack
    if not e.is_floating_point() or e.ndim == 0:
        return None if torch.equal(x.to(e.dtype), e) else "is not the run's"
    if stored.code in SHARES:
        return block_problem(x, e, stored.code)
    chain = [dtype for dtype in chain if dtype in _UNITS]
    width = max(1, x.shape[-1])
    x, e = x.reshape(-1, width), e.reshape(-1, width)
    rows = torch.zeros(len(e), 1) if slack is None else slack.reshape(-1, 1).expand(len(e), 1)
    count, wrong, worst = max(1, _AT_A_TIME // width), 0, 0.0
    for start in range(0, len(x), count):
        theirs, ours = x[start : start + count].float(), e[start : start + count].float()
        room = rows[start : start + count] + stored.slip
        if stored.code is not None:
            outside = _outside_code(theirs, ours, room, chain, stored.code, stored.block or width)
        else:
            outside = ~((theirs >= _rounded(ours - room, chain)) & (theirs <= _rounded(ours + room, chain)))
        if outside.any():
            wrong += int(outside.sum())
            off = (theirs - ours).abs()[outside].nan_to_num(float("inf"), float("inf"))
            worst = max(worst, float(off.max()))
    return f"{wrong:,} of {x.numel():,} values are not the run's, by up to {worst:.3g}" if wrong else None


def _rounded(values: Tensor, chain: list[torch.dtype]) -> Tensor:
    for dtype in chain:
        values = values.to(dtype)
    return values.float()


def _outside_code(x: Tensor, e: Tensor, slack: Tensor, chain: list[torch.dtype], code: str, block: int) -> Tensor:
    """Returns which values are more than half a step off, and all of a block that has another scale."""
    (largest, half, share), shape = _CODES[code], x.shape
    slack = slack.repeat_interleave(shape[-1] // block, 0)
    x, e = x.reshape(-1, block), e.reshape(-1, block)
    unit = sum(_UNITS[dtype] for dtype in chain)  # each rounding, and that of the scale
    top = e.abs().amax(dim=-1, keepdim=True)
    tiny = 2.0**-24 * largest if code == "q8_0" else 0.0  # scales below it are 0 in fp16
    step = torch.maximum(half * top / largest, share * e.abs()) * (1 + 2.0**-6)
    is_near = (x - e).abs() <= step + unit * e.abs() + slack + tiny
    is_scaled = (x.abs().amax(dim=-1, keepdim=True) - top).abs() <= unit * top + slack + tiny
    return ~(is_near & is_scaled).reshape(shape)


# --- all of them


def compare_tensors(
    figures: Figures, trained: Trained, written: StreamedModel, export: Path, places: Places | None = None
) -> None:
    """Compare every tensor of an export with what was trained. places: of a GGUF file's. Raises UserError if a file
    cannot be read."""
    is_whole = (export / METADATA).is_file()  # else another tool may have left out what transformers does not load
    is_gguf = gguf_of(export) is not None
    dtype = getattr(torch, figures.dtype) if is_whole and not is_gguf else None  # None: not known
    part = written.text_part if is_gguf else None
    model, in_base = (part.text, part.in_base) if part is not None else (written.model, str)
    stored = stored_tensors(export, written, places)
    expected = Expected(trained, written, any(one.code in SHARES for one in stored.values()))
    held = InMemory(model, {name: one.shape for name, one in stored.items()}, lambda name: stored[name].read())
    problems, differing, update = list[str](), list[str](), Update()

    def compare(name: str) -> None:  # a function, so that the tensors are gone before the next ones are read
        own, files = in_base(name), [stored[file] for file in held.files_of(name)]
        file = max(files, key=lambda one: SHARES.get(one.code or "", (0.0,)))  # the coarsest
        values, value = held.load(name), expected.value(own)
        if value is None:
            problems.append(f"unexpected keys: {own}")
            return
        figures.tensors += 1
        if values.shape != value.tensor.shape:
            what = f"{own} has {list(values.shape)} values, and {list(value.tensor.shape)} in the run"
            problems.append(f"{what}: rows of added tokens, or others, are lost")
            return
        if dtype and not file.code and value.tensor.is_floating_point() and file.dtype not in (dtype, value.dtype):
            types = (str(one).removeprefix("torch.") for one in (file.dtype, dtype))
            problems.append("{}: is {}, and {} by what was exported".format(own, *types))
        chain = [value.dtype, file.dtype] if is_gguf else [file.dtype]  # GGUF rounds the run's own type
        why = difference(values, value, chain, file)
        if file.code in SHARES and value.base is not None:
            lost = update_problem(values, value.tensor, value.base, update)
            why = why or lost
        if why is not None:
            differing.append(f"{own}: {why}")

    for name in held.names():
        compare(name)
    base = written.base.files if written.base and not written.is_scoring and not is_gguf else None
    copies = copies_in_result(written.model)
    for name in () if is_gguf else held.unused:  # in the files in addition to the model: the base's own
        if name in copies:  # of the embedding or the LM head
            if not torch.equal(stored[name].read(), stored[copies[name]].read()):
                differing.append(f"{name}: is not {copies[name]}, of which it is a copy")
            continue
        if base is None or name not in base:
            problems.append(f"unexpected keys: {name}")
            continue
        tensor = base.read(name)
        file = stored[name]
        if (why := difference(file.read(), Value(tensor, None, tensor.dtype), [file.dtype], file)) is not None:
            differing.append(f"{name}: {why}")
    _compare_lists(figures, written, set() if is_gguf else set(stored), is_whole and not is_gguf, problems)
    figures.update = update.share
    unplaced = {*(places.unplaced if places is not None else ())}
    if missing := [name for name in _missing(model, held, expected, in_base) if not unplaced]:
        figures.problems.append(f"missing keys: {', '.join(missing[:3])} ({len(missing)} in all)")
    figures.problems += problems[:3]
    if differing:
        more = f" ({len(differing)} tensors in all)" if differing[3:] else ""
        figures.problems.append(f"weights: {'; '.join(differing[:3])}{more}")


def _compare_lists(
    figures: Figures, written: StreamedModel, held: set[str], must_have: bool, problems: list[str]
) -> None:
    """Compare the list of the base's tensors that its class does not read with that of an export. They are a problem
    if an export of ours lacks them; a format or another tool may leave them out, which the figures say."""
    if written.is_scoring or written.about.name is None:
        return
    try:
        names = tensor_names(written.about)  # of the base itself: a full run's result is compared with it, too
    except (UserError, OSError):
        figures.of_base = "not compared, the base is not here"
        return
    left = set(unread_names(written.model, names)) - set(copies_in_result(written.model))
    if (files := decoded_of(written)) is not None:
        left -= set(files.codes)
    if written.about.train is not None:  # a thinker has no part that talks
        left = {name for name in left if not name.startswith(SPEECH)}
    if written.about.mtp == "drop":
        layers = written.model.config.get_text_config().num_hidden_layers
        left = {name for name in left if not is_of_head(name, layers)}
    if not (unread := sorted(left)):
        return
    lost = sorted(set(unread) - held)
    figures.of_base = f"{len(unread) - len(lost):,} of {len(unread):,} kept"
    if lost and must_have:
        problems.append(f"missing keys: {lost[0]}, which the base's files have ({len(lost)} in all)")


def _missing(model: Any, held: InMemory, expected: Expected, in_base: Callable[[str], str]) -> list[str]:
    """Returns the tensors that an export lacks, except those that transformers ties to an equal one."""
    aliases = {**own_tensors(model)[1], **model.get_expanded_tied_weights_keys(all_submodels=True)}
    missing = []
    for name in model.state_dict():
        if name in held or (value := expected.value(in_base(name))) is None:
            continue
        twin = aliases.get(name) or next((alias for alias, first in aliases.items() if first == name), None)
        tied = expected.value(in_base(twin)) if twin is not None and twin in held else None
        if tied is None or not torch.equal(tied.tensor, value.tensor):
            missing.append(name)
    return missing
