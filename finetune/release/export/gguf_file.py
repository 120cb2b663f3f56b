"""`export --to gguf`: one file for llama.cpp, Ollama, LM Studio, ..., made tensor by tensor, and read back.

Names come from the `gguf` package's own map. Other requirements of the format, by architecture:

    llama         rows of q and k in the order of llama.cpp's rotary embedding (mistral3, too); Llama 3's frequency
                  factors as a tensor
    gemma2, 3     norms with the 1 that transformers adds
    experts       those of a layer in one tensor for each projection (qwen3moe, and Mixtral as a llama)
    multimodal    the text part alone, under the names of a text model; llama.cpp has towers in a file of their own

Vectors and routers are fp32 whatever the type of the matrices. The settings of the model are in gguf_settings.py,
its tokenizer in gguf_tokenizer.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from finetune.checkpoints.weight_files import Stored
from finetune.errors import UserError
from finetune.release.export.gguf_codes import SHARES
from finetune.release.export.gguf_places import Places, TensorPlace, find_places, turned
from finetune.release.export.gguf_settings import (
    ARCHITECTURES,
    TURNED,
    WAY_OUT,
    WINDOWS,
    add_settings,
    check_architecture,
    is_written,
    open_gguf,
    package,
    rope_of,
    settings_of,
)
from finetune.release.export.gguf_tokenizer import add_tokenizer
from finetune.release.export.streamed import StreamedModel
from finetune.utils import fsync

_EXPERT = re.compile(r"(.*\.(?:mlp|block_sparse_moe)\.experts)\.(\d+)\.(\w+)\.weight")
_FACTORS = "rope_freqs.weight"
_BLOCK = 32  # values of a q8_0 block
_TYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "Q8_0": torch.float16}
_AT_A_TIME = 1 << 20  # values
_SLIP = 2.0**-22  # of adding and subtracting 1


@dataclass(frozen=True)
class TextTensors:
    """A text model's config and its tensors by the names of a text model's files. make: the values of one; whole: the
    config of the multimodal base that it is the text part of."""

    config: Any
    shapes: dict[str, Tensor]
    make: Callable[[str], Tensor]
    whole: Any = None


def text_of(model: StreamedModel) -> TextTensors:
    """Returns the part of a trained model that a file has: the text part of a multimodal one."""
    if (part := model.text_part) is None:
        read = {name: tensor for name, tensor in model.shapes.items() if name not in model.kept}
        return TextTensors(model.model.config, read, model.make)
    own = {part.in_base(name): name for name in part.text.state_dict()}
    files = {own[loaded]: file for file, loaded in part.files.items() if loaded in own and file in model.shapes}
    shapes = {name: model.shapes[file] for name, file in files.items()}
    return TextTensors(part.text.config, shapes, lambda name: model.make(files[name]), part.base.config)


def write_gguf(model: StreamedModel, path: Path, kind: str) -> None:
    """Write a trained model to one GGUF file, whole or absent.

    kind: type of the matrices, one of GGUF_TYPES. Raises UserError for an architecture or a tokenizer that is not
    written here, OSError if the disk is full.
    """
    gguf, text = package(), text_of(model)
    config = text.config
    check_architecture(config, model.is_scoring)
    partial = path.with_name(path.name + ".partial")
    architecture = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(partial, architecture)
    entries = list(_entries(gguf, text))
    rows = next(entry.shape[0] for entry in entries if entry.name == "token_embd.weight")
    writer.add_name(architecture)
    add_settings(writer, architecture, settings_of(config, text.whole))
    writer.add_vocab_size(rows)
    writer.add_file_type(getattr(gguf.LlamaFileType, f"{'ALL' if kind == 'f32' else 'MOSTLY'}_{kind.upper()}"))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_tokenizer(writer, gguf, model.trained.settings, rows)
    for entry in entries:
        own = entry.type_in(kind)
        ggml = gguf.GGMLQuantizationType[own.upper()]
        if own in ("f32", "f16"):
            shape, dtype = entry.shape, np.dtype(np.float32 if own == "f32" else np.float16)
        else:
            shape, dtype = gguf.quant_shape_to_byte_shape(entry.shape, ggml), np.dtype(np.uint8)
        writer.add_tensor_info(entry.name, shape, dtype, int(np.prod(shape)) * dtype.itemsize, ggml)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for entry in entries:
        writer.write_tensor_data(_coded(gguf, entry.read(text.make), entry.type_in(kind)))
    writer.close()
    fsync(partial)
    partial.rename(path)


# --- tensors


@dataclass(frozen=True)
class _Entry:
    """A tensor of the file, and the folder's tensors that it is made of."""

    name: str
    shape: tuple[int, ...]  # of at least one dimension
    names: list[str]  # of the folder; those of experts are stacked; [] for frequency factors
    heads: int | None = None  # of q or k, whose rows llama.cpp has in another order
    adds_one: bool = False  # of Gemma's norms
    values: Tensor | None = None  # of frequency factors

    def type_in(self, kind: str) -> str:
        """Returns the type of this tensor. kind: of the matrices."""
        *rows, width = self.shape
        is_matrix = bool(rows) and "ffn_gate_inp" not in self.name
        return kind if is_matrix and not (kind == "q8_0" and width % _BLOCK) else "f32"

    def read(self, make: Callable[[str], Tensor]) -> Tensor:
        """Returns the values as the file has them. make: the values of the folder's tensors."""
        if self.values is not None:
            return self.values
        values = make(self.names[0]) if len(self.names) == 1 else torch.stack([make(name) for name in self.names])
        if self.heads:  # from halves of a head to pairs
            values = turned(values, self.heads, 2, len(values) // self.heads // 2)
        return values.float() + 1 if self.adds_one else values

    def restored(self, values: Tensor) -> Tensor:
        """Returns the values of one of the folder's tensors. values: as the file has them, fp32."""
        if self.heads:  # from pairs to halves of a head
            values = turned(values, self.heads, len(values) // self.heads // 2, 2)
        return (values - 1 if self.adds_one else values).contiguous()


def _entries(gguf: Any, model: TextTensors) -> Iterator[_Entry]:
    """Yields the tensors of the file in order. Raises UserError for one that llama.cpp has no name for."""
    config = model.config
    architecture = ARCHITECTURES[config.model_type]
    arch = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    stacks: dict[str, list[str]] = {}  # the experts' tensors of a layer are one
    for name in model.shapes:
        match = _EXPERT.fullmatch(name)
        stacks.setdefault(f"{match[1]}.{match[3]}.weight" if match else name, []).append(name)
    for stacked, members in stacks.items():
        stem, _, suffix = stacked.rpartition(".")
        if (short := names.get_name(stem)) is None:
            raise UserError(f"--to gguf: llama.cpp has no place for {members[0]} in {architecture}. {WAY_OUT}")
        shape = tuple(model.shapes[members[0]].shape)
        yield _Entry(
            f"{short}.{suffix}",
            (len(members), *shape) if members != [stacked] else shape,
            members,
            heads.get(short.rpartition(".")[2]) if architecture in TURNED else None,
            config.model_type in WINDOWS and stem.endswith("norm"),
        )
    if rope_of(config).get("rope_type") == "llama3":
        # Llama 3 divides each frequency (https://github.com/ggml-org/llama.cpp, rope_freqs).
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))  # (head_dim / 2,)
        head_dim = 2 * len(scaled)
        plain = 1.0 / config.rope_parameters["rope_theta"] ** (torch.arange(0, head_dim, 2).float() / head_dim)
        yield _Entry(_FACTORS, tuple(scaled.shape), [], values=plain / scaled)


def other_tensors(model: StreamedModel, path: Path) -> list[str]:
    """Returns the names of tensors that a file lacks or has too many, and whether its frequency factors differ:
    transformers reads none, and llama.cpp takes any that are there. For architectures that are written here."""
    gguf = package()
    held = {tensor.name: tensor for tensor in open_gguf(path).tensors}
    expected = {entry.name: entry for entry in _entries(gguf, text_of(model))}
    problems = [f"{path}: has no {name}" for name in sorted(expected.keys() - held.keys())[:1]]
    problems += [f"{path}: has {name}, which the run's model has not" for name in sorted(held.keys() - expected)[:1]]
    factors = expected[_FACTORS].values if _FACTORS in expected and _FACTORS in held else None
    if factors is not None and not np.allclose(held[_FACTORS].data, factors, rtol=1e-5):
        problems.append(f"{path}: {_FACTORS} are not the factors of the run's RoPE")
    return problems


def places_in(model: StreamedModel, path: Path) -> Places:
    """Returns where a folder's tensors are in a file: as they are written here, or as they are found in it."""
    gguf, text = package(), text_of(model)
    if is_written(text.config):
        own = [entry for entry in _entries(gguf, text) if entry.names]  # without frequency factors
        return Places([TensorPlace(one.name, tuple(one.names), one.restored, _SLIP * one.adds_one) for one in own])
    held = {tensor.name: tensor for tensor in open_gguf(path).tensors}

    def read(name: str, i: int) -> Tensor:
        one = held[name]
        return _decoded(gguf, path, one, i if len(one.shape) == 3 else None)

    kept = model.kept if model.text_part is None else []
    return find_places(path, text.config, text.shapes, kept, text.make, read)


def gguf_tensors(model: StreamedModel, path: Path, places: Places | None = None) -> dict[str, Stored]:
    """Returns the folder's tensors as a file has them; those that it lacks are left out. places: as `places_in`."""
    gguf, tensors, shapes = package(), dict[str, Stored](), text_of(model).shapes
    held = {tensor.name: tensor for tensor in open_gguf(path).tensors}
    for place in (places or places_in(model, path)).places:
        if (one := held.get(place.name)) is None:
            continue
        size, kind = tuple(int(size) for size in reversed(one.shape)), one.tensor_type.name
        is_stack = len(size) == 1 + len(shapes[place.names[0]].shape) and size[0] == len(place.names)
        for i, name in enumerate(place.names):
            shape = tuple(shapes[name].shape)
            if int(np.prod(size)) != len(place.names) * int(np.prod(shape)):
                continue
            if is_written(text_of(model).config) and (size[1:] if is_stack else size) != shape:
                continue

            def read(place: TensorPlace = place, one: Any = one, i: int | None = i if is_stack else None) -> Tensor:
                return place.undo(_decoded(gguf, path, one, i))

            code = "q8_0" if kind == "Q8_0" else kind if kind in SHARES else None
            block = {"block": _BLOCK} if kind == "Q8_0" else {}
            dtype = _TYPES.get(kind, torch.float16)
            tensors[name] = Stored(read, shape, dtype, code, slip=place.slip, **block)
    return tensors


def _decoded(gguf: Any, path: Path, one: Any, i: int | None) -> Tensor:
    """Returns the values of a file's tensor, fp32, read into memory and not mapped. i: the number in a stack."""
    data = one.data if i is None else one.data[i]
    offset = int(one.data_offset) + (i or 0) * data.nbytes
    size = tuple(int(size) for size in reversed(one.shape))
    array = np.fromfile(path, data.dtype, int(np.prod(data.shape)), offset=offset).reshape(data.shape)
    array = _by_rows(array, lambda rows: gguf.quants.dequantize(rows, one.tensor_type), np.dtype(np.float32))
    return torch.from_numpy(array).reshape(size if i is None else size[1:])


def gguf_of(export: Path) -> Path | None:
    """Returns the GGUF file of an export. Raises UserError if there are several."""
    files = sorted(export.glob("*.gguf"))
    if len(files) > 1:
        raise UserError(f"{export}: has {len(files)} GGUF files. Fix: keep the one to compare in the folder")
    return files[0] if files else None


def _coded(gguf: Any, values: Tensor, kind: str) -> np.ndarray[Any, Any]:
    if kind == "bf16":  # its bytes; gguf's own rounding of fp32 is that of torch
        return values.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
    array = values.float().contiguous().numpy()
    if kind == "q8_0":
        own = gguf.GGMLQuantizationType.Q8_0
        return _by_rows(array, lambda rows: gguf.quants.quantize(rows, own), np.dtype(np.uint8))
    return array.astype(np.float16) if kind == "f16" else array


def _by_rows(array: Any, convert: Callable[[Any], Any], dtype: Any) -> Any:
    """Returns gguf's conversion of an array, some rows at a time: it needs several times the memory of its input."""
    if array.ndim < 2:
        return np.ascontiguousarray(convert(array), dtype)
    rows = array.reshape(-1, array.shape[-1])
    count = max(1, _AT_A_TIME // rows.shape[-1])
    converted = None
    for start in range(0, len(rows), count):
        part = convert(rows[start : start + count])
        if converted is None:
            converted = np.empty((len(rows), part.shape[-1]), dtype)
        converted[start : start + count] = part
    assert converted is not None
    return converted.reshape(*array.shape[:-1], -1)
