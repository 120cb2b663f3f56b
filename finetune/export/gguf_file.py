"""`export --to gguf`: one file for llama.cpp, Ollama, LM Studio, ..., made tensor by tensor, and read back.

Names come from the `gguf` package's own map. What else the format wants, by architecture:

    llama         rows of q and k in the order of llama.cpp's rotary embedding (mistral3, too); Llama 3's frequency
                  factors as a tensor
    gemma2, 3     norms with the 1 that transformers adds
    experts       those of a layer in one tensor for each projection (qwen3moe, and Mixtral as a llama)
    multimodal    the text part alone, under the names of a text model; llama.cpp has towers in a file of their own

Vectors and routers are fp32 whatever the type of the matrices. What a file says of the model is in gguf_settings.py,
its tokenizer in gguf_tokenizer.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from finetune.errors import UserError
from finetune.export.gguf_settings import (
    ARCHITECTURES,
    TURNED,
    WAY_OUT,
    WINDOWS,
    add_settings,
    check_architecture,
    context_length,
    package,
    rope_of,
    settings_of,
)
from finetune.export.gguf_tokenizer import add_tokenizer
from finetune.export.hf_folder import Check, Say, card_of, check_absent, describe, whole_or_absent
from finetune.export.streamed import StreamedModel
from finetune.export.trained import Trained
from finetune.models.tokenizer import read_tokenizer
from finetune.utils import fsync

_EXPERT = re.compile(r"(.*\.(?:mlp|block_sparse_moe)\.experts)\.(\d+)\.(\w+)\.weight")
_BLOCK = 32  # values of a q8_0 block
_AT_A_TIME = 1 << 20  # values
MMPROJ = "which llama.cpp's `convert_hf_to_gguf.py FOLDER --mmproj` makes of the folder of `export --to hf`"


@dataclass(frozen=True)
class TextTensors:
    """What is written: a text model's config and its tensors by the names of a text model's files. make: the values of
    one; whole: the config of the multimodal base that it is the text part of."""

    config: Any
    shapes: dict[str, Tensor]
    make: Callable[[str], Tensor]
    whole: Any = None


def text_of(model: StreamedModel) -> TextTensors:
    """Returns a trained model as a file has it: of a multimodal one its text part."""
    if (part := model.text_part) is None:
        return TextTensors(model.model.config, model.shapes, model.make)
    own = {part.in_base(name): name for name in part.text.state_dict()}
    files = {own[loaded]: file for file, loaded in part.files.items() if loaded in own and file in model.shapes}
    shapes = {name: model.shapes[file] for name, file in files.items()}
    return TextTensors(part.text.config, shapes, lambda name: model.make(files[name]), part.base.config)


@dataclass(frozen=True)
class _Entry:
    """A tensor of the file."""

    name: str
    shape: tuple[int, ...]  # of at least one dimension
    kind: str
    values: Callable[[], Tensor]


def export_gguf(
    trained: Trained,
    out: Path,
    kind: str,
    base: str | None = None,
    say: Say = lambda text: None,
    ollama: bool = False,
    check: Check = lambda folder: None,
) -> StreamedModel:
    """Write OUT/<run>-<kind>.gguf with its card, and a Modelfile for Ollama; as `export_folder`."""
    check_absent(out)
    model = StreamedModel(trained, None, base)
    about = {**describe(model), "dtype": kind}
    how = {"files": ["Modelfile"]} if ollama else {}
    with whole_or_absent(out, about, how, card_of(trained), check) as partial:
        file = partial / f"{about['run']}-{kind}.gguf"
        if not file.exists():
            say(f"writing {file.name}")
            write_gguf(model, file, kind)
            config = text_of(model).config
            if (window := context_length(config)) < config.max_position_embeddings:
                say(f"{file.name} is for texts of up to {window:,} tokens: llama.cpp has no window for such a model")
            if model.text_part is not None:
                say(f"{file.name} has the language model alone: pictures need a second file, {MMPROJ}")
        if ollama:
            (partial / "Modelfile").write_text(modelfile(trained, file.name), encoding="utf-8")
    return model


def modelfile(trained: Trained, name: str) -> str:
    """Returns Ollama's description of a model: the file, which has the template, and where answers end."""
    tokenizer = read_tokenizer(trained.settings)
    ends = GenerationConfig.from_pretrained(trained.settings).eos_token_id
    texts = [tokenizer.convert_ids_to_tokens(end) for end in (ends if isinstance(ends, list) else [ends])]
    stops = "".join(f"PARAMETER stop {json.dumps(text)}\n" for text in texts)
    return f"FROM ./{name}\n{stops}"


def write_gguf(model: StreamedModel, path: Path, kind: str) -> None:
    """Write a trained model to one GGUF file, whole or absent.

    kind: type of the matrices, one of GGUF_TYPES. Raises UserError for an architecture or a tokenizer that is not
    written here, OSError if the disk is full.
    """
    gguf = package()
    text = text_of(model)
    config = text.config
    check_architecture(config, model.is_scoring)
    partial = path.with_name(path.name + ".partial")
    architecture = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(partial, architecture)
    entries = list(_entries(gguf, text, kind))
    rows = next(entry.shape[0] for entry in entries if entry.name == "token_embd.weight")
    writer.add_name(architecture)
    add_settings(writer, architecture, settings_of(config, text.whole))
    writer.add_vocab_size(rows)
    writer.add_file_type(getattr(gguf.LlamaFileType, f"{'ALL' if kind == 'f32' else 'MOSTLY'}_{kind.upper()}"))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_tokenizer(writer, gguf, model.trained.settings, rows)
    for entry in entries:
        shape, dtype, size, raw = _stored(gguf, entry)
        writer.add_tensor_info(entry.name, shape, dtype, size, raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for entry in entries:
        writer.write_tensor_data(_coded(gguf, entry.values(), entry.kind))
    writer.close()
    fsync(partial)
    partial.rename(path)


# --- tensors


def _entries(gguf: Any, model: TextTensors, kind: str) -> Iterator[_Entry]:
    """Yields the tensors of the file in order. Raises UserError for one that llama.cpp has no name for."""
    for name, shape, own, stack in _places(gguf, model, kind):
        yield _Entry(name, shape, own, _reader(model, stack, name.rpartition(".")[0]))
    config = model.config
    if rope_of(config).get("rope_type") == "llama3":
        factors = _frequency_factors(config)
        yield _Entry(_FACTORS, tuple(factors.shape), "f32", lambda: factors)


def _places(gguf: Any, model: TextTensors, kind: str) -> Iterator[tuple[str, tuple[int, ...], str, list[str]]]:
    """Yields (name in the file, shape, type, the folder's tensors that it is made of)."""
    config = model.config
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == ARCHITECTURES[config.model_type])
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    experts: dict[str, list[str]] = {}
    for name in model.shapes:
        if match := _EXPERT.fullmatch(name):
            experts.setdefault(f"{match[1]}.{match[3]}.weight", []).append(name)
    for name, meta in model.shapes.items():
        match = _EXPERT.fullmatch(name)
        stack = experts[f"{match[1]}.{match[3]}.weight"] if match else [name]
        if name != stack[0]:
            continue
        stem, _, suffix = (f"{match[1]}.{match[3]}.weight" if match else name).rpartition(".")
        short = names.get_name(stem)
        if short is None:
            raise UserError(
                f"--to gguf: llama.cpp has no place for {name} in {ARCHITECTURES[config.model_type]}; {WAY_OUT}"
            )
        shape = tuple(meta.shape) if not match else (len(stack), *meta.shape)
        is_matrix = len(shape) > 1 and "ffn_gate_inp" not in short
        own = kind if is_matrix and not (kind == "q8_0" and meta.shape[-1] % _BLOCK) else "f32"
        yield f"{short}.{suffix}", shape, own, stack


def _reader(model: TextTensors, stack: list[str], short: str) -> Callable[[], Tensor]:
    config = model.config
    heads = _permuted_heads(config, short)
    adds_one = config.model_type in WINDOWS and short.endswith("norm")

    def read() -> Tensor:
        values = model.make(stack[0]) if len(stack) == 1 else torch.stack([model.make(name) for name in stack])
        if heads:  # from halves of a head to pairs
            rows = values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:])
            values = rows.swapaxes(1, 2).reshape(values.shape)
        return values.float() + 1 if adds_one else values

    return read


def _permuted_heads(config: Any, short: str) -> int | None:
    """Returns the heads of q or k, whose rows llama.cpp has in another order; None of other tensors."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    return heads.get(short.rpartition(".")[2]) if ARCHITECTURES[config.model_type] in TURNED else None


def other_tensors(model: StreamedModel, path: Path) -> list[str]:
    """Returns which tensors a file lacks or has too many, by name, and whether its frequency factors are others:
    transformers reads none, and llama.cpp takes any that are there."""
    gguf, text = package(), text_of(model)
    held = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    factors = _frequency_factors(text.config) if rope_of(text.config).get("rope_type") == "llama3" else None
    expected = {name for name, *_ in _places(gguf, text, "f32")} | ({_FACTORS} if factors is not None else set())
    found = [f"{path}: has no {name}" for name in sorted(expected - held.keys())[:1]]
    found += [f"{path}: has {name}, which the run's model has not" for name in sorted(held.keys() - expected)[:1]]
    if factors is not None and _FACTORS in held and not np.allclose(held[_FACTORS].data, factors, rtol=1e-5):
        found.append(f"{path}: {_FACTORS} are not the factors of the run's RoPE")
    return found


_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a file, by the name that the folder has for it. slip: what adding and subtracting 1 may cost."""

    read: Callable[[], Tensor]  # fp32
    shape: tuple[int, ...]
    kind: str  # F32, BF16, F16, Q8_0, ...
    slip: float = 0.0


def gguf_tensors(model: StreamedModel, path: Path) -> dict[str, GgufTensor]:
    """Returns the folder's tensors as a file has them; none for those that it lacks."""
    gguf, text, tensors = package(), text_of(model), dict[str, GgufTensor]()
    held = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for name, shape, _, stack in _places(gguf, text, "f32"):
        if name not in held or tuple(int(n) for n in reversed(held[name].shape)) != shape:
            continue
        kind, heads = held[name].tensor_type, _permuted_heads(text.config, name.rpartition(".")[0])
        adds_one = text.config.model_type in WINDOWS and stack[0].rpartition(".")[0].endswith("norm")
        own = shape[1:] if len(stack) > 1 else shape
        for i, one in enumerate(stack):
            data = held[name].data if len(stack) == 1 else held[name].data[i]
            place = (path, int(held[name].data_offset) + i * data.nbytes, data.shape, data.dtype)
            read = partial(_dequantized, gguf, place, kind, own, heads, adds_one)
            tensors[one] = GgufTensor(read, own, kind.name, 2.0**-22 if adds_one else 0.0)
    return tensors


def _dequantized(gguf: Any, place: Any, kind: Any, shape: tuple[int, ...], heads: int | None, adds_one: bool) -> Tensor:
    """Returns a tensor, fp32. place: file, offset, shape and type of its bytes, which the reader would map."""
    path, offset, of_bytes, dtype = place
    data = np.fromfile(path, dtype, int(np.prod(of_bytes)), offset=offset).reshape(of_bytes)
    array = _by_rows(data, lambda rows: gguf.quants.dequantize(rows, kind), np.dtype(np.float32))
    values = torch.from_numpy(array).reshape(shape)
    if heads:  # from pairs to halves of a head
        pairs = values.reshape(heads, len(values) // heads // 2, 2, *values.shape[1:])
        values = pairs.swapaxes(1, 2).reshape(values.shape)
    return (values - 1 if adds_one else values).contiguous()


def gguf_of(export: Path) -> Path | None:
    """Returns the GGUF file of an export. Raises UserError where there are several."""
    files = sorted(export.glob("*.gguf"))
    if len(files) > 1:
        raise UserError(f"{export}: {len(files)} GGUF files: which one? Keep one in the folder")
    return files[0] if files else None


def _frequency_factors(config: Any) -> Tensor:  # (head_dim / 2,)
    """Returns by what Llama 3 divides each frequency (https://github.com/ggml-org/llama.cpp, rope_freqs)."""
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    head_dim = 2 * len(scaled)
    plain = 1.0 / config.rope_parameters["rope_theta"] ** (torch.arange(0, head_dim, 2).float() / head_dim)
    return plain / scaled


def _stored(gguf: Any, entry: _Entry) -> tuple[tuple[int, ...], Any, int, Any]:
    """Returns (shape in bytes or values, numpy type, bytes, GGML's type) of a tensor as the file has it."""
    kind = gguf.GGMLQuantizationType[entry.kind.upper()]
    if entry.kind in ("f32", "f16"):
        dtype = np.dtype(np.float32 if entry.kind == "f32" else np.float16)
        return entry.shape, dtype, int(np.prod(entry.shape)) * dtype.itemsize, kind
    shape = gguf.quant_shape_to_byte_shape(entry.shape, kind)
    return shape, np.dtype(np.uint8), int(np.prod(shape)), kind


def _coded(gguf: Any, values: Tensor, kind: str) -> np.ndarray[Any, Any]:
    if kind == "bf16":  # its bytes; gguf's own rounding of fp32 is that of torch
        return values.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
    array = values.float().contiguous().numpy()
    if kind == "f16":
        return array.astype(np.float16)
    if kind == "f32":
        return array
    own = gguf.GGMLQuantizationType.Q8_0
    return _by_rows(array, lambda rows: gguf.quants.quantize(rows, own), np.dtype(np.uint8))


def _by_rows(array: Any, convert: Callable[[Any], Any], dtype: Any) -> Any:
    """Returns what gguf makes of an array, some rows at a time: it needs several times the memory of what it gets."""
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
