"""`export --to gguf`: one file for llama.cpp, Ollama, LM Studio, ..., made tensor by tensor.

Names come from the `gguf` package's own map. What else the format wants, by architecture:

    llama         rows of q and k in the order of llama.cpp's rotary embedding; Llama 3's frequency factors as a tensor
    qwen3moe      the experts of a layer in one tensor for each projection

Vectors and routers are fp32 whatever the type of the matrices. The tokenizer goes into the file: tokens with their
types, merges, llama.cpp's name of the way to split text before merges (it has a list of them), the chat template, and
whether it writes a token at the beginning itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from finetune.errors import UserError
from finetune.export.streamed import StreamedModel
from finetune.utils import fsync

TYPES = ("f32", "bf16", "f16", "q8_0")
_WAY_OUT = "llama.cpp's `convert_hf_to_gguf.py FOLDER` reads the folder that `export --to hf` writes"
# transformers' model types and llama.cpp's; what only some have (windows, scaled embeddings, sinks) is not written.
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}
_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(\w+)\.weight")
_BLOCK = 32  # values of a q8_0 block


@dataclass(frozen=True)
class _Entry:
    """A tensor of the file."""

    name: str
    shape: tuple[int, ...]  # of at least one dimension
    kind: str
    values: Callable[[], Tensor]


def write_gguf(model: StreamedModel, path: Path, kind: str) -> None:
    """Write a trained model to one GGUF file, whole or absent.

    kind: type of the matrices, one of TYPES. Raises UserError for an architecture or a tokenizer that is not written
    here, OSError where the disk is full.
    """
    gguf = _package()
    config = model.model.config
    check_architecture(config, model)
    partial = path.with_name(path.name + ".partial")
    writer = gguf.GGUFWriter(partial, ARCHITECTURES[config.model_type])
    entries = list(_entries(gguf, model, kind))
    rows = next(entry.shape[0] for entry in entries if entry.name == "token_embd.weight")
    _add_settings(writer, gguf, config, kind, rows)
    _add_tokenizer(writer, gguf, model.trained.settings, rows)
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


def _package() -> Any:
    try:
        import gguf  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UserError("`--to gguf` needs the package gguf: pip install 'gguf>=0.19'") from None
    return gguf


def check_architecture(config: Any, model: StreamedModel) -> None:
    """Raises UserError for a model that is not written here."""
    if model.is_scoring or model.part is not None or config.model_type not in ARCHITECTURES:
        what = "a model of scores" if model.is_scoring else config.model_type
        raise UserError(f"--to gguf: {what} is not written here (only {', '.join(ARCHITECTURES)}); {_WAY_OUT}")
    rope = (config.rope_parameters or {}).get("rope_type", "default")
    if rope not in ("default", *(("llama3",) if config.model_type == "llama" else ())):
        raise UserError(f"--to gguf: RoPE of type {rope} is not written here; {_WAY_OUT}")
    if config.model_type == "qwen3_moe" and not config.norm_topk_prob:
        raise UserError(
            f"--to gguf: llama.cpp normalises the weights of qwen3_moe's experts, this model not; {_WAY_OUT}"
        )
    window = getattr(config, "sliding_window", None)
    if window and window < config.max_position_embeddings and getattr(config, "use_sliding_window", True):
        raise UserError(f"--to gguf: attention within a window of {window} tokens is not written here; {_WAY_OUT}")


# --- settings


def _add_settings(writer: Any, gguf: Any, config: Any, kind: str, rows: int) -> None:
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_name(ARCHITECTURES[config.model_type])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(float(config.rope_parameters["rope_theta"]))
    writer.add_rope_dimension_count(head_dim)
    writer.add_vocab_size(rows)
    names = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
    writer.add_file_type(getattr(gguf.LlamaFileType, names[kind]))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    if config.model_type == "qwen3_moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


# --- tensors


def _entries(gguf: Any, model: StreamedModel, kind: str) -> Iterator[_Entry]:
    """Yields the tensors of the file in order. Raises UserError for one that llama.cpp has no name for."""
    config = model.model.config
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
                f"--to gguf: llama.cpp has no place for {name} in {ARCHITECTURES[config.model_type]}; {_WAY_OUT}"
            )
        shape = tuple(meta.shape) if not match else (len(stack), *meta.shape)
        is_matrix = len(shape) > 1 and "ffn_gate_inp" not in short
        own = kind if is_matrix and not (kind == "q8_0" and meta.shape[-1] % _BLOCK) else "f32"
        yield _Entry(f"{short}.{suffix}", shape, own, _reader(model, stack, short))
    if (config.rope_parameters or {}).get("rope_type") == "llama3":
        factors = _frequency_factors(config)
        yield _Entry("rope_freqs.weight", tuple(factors.shape), "f32", lambda: factors)


def _reader(model: StreamedModel, stack: list[str], short: str) -> Callable[[], Tensor]:
    config = model.model.config
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(short.rpartition(".")[2])
    permutes = ARCHITECTURES[config.model_type] == "llama" and heads is not None

    def read() -> Tensor:
        values = model.make(stack[0]) if len(stack) == 1 else torch.stack([model.make(name) for name in stack])
        if permutes:  # from halves of a head to pairs
            assert heads is not None
            rows = values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:])
            values = rows.swapaxes(1, 2).reshape(values.shape)
        return values

    return read


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
    return array if kind == "f32" else gguf.quants.quantize(array, gguf.GGMLQuantizationType.Q8_0)


# --- tokenizer


def _add_tokenizer(writer: Any, gguf: Any, folder: Path, rows: int) -> None:
    """Add tokens, merges, the template and the ids of special tokens. Raises UserError where llama.cpp would split text
    otherwise."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    split = split_name(content)
    if split is None:
        raise UserError(f"--to gguf: llama.cpp may not split text as {folder}'s tokenizer does; {_WAY_OUT}")
    tokens = {index: token for token, index in tokenizer.get_vocab().items()}
    added = {one["id"]: one for one in content["added_tokens"]}
    kinds = gguf.TokenType
    texts = [tokens.get(index, f"[PAD{index}]") for index in range(max(rows, max(tokens) + 1))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(texts)
    writer.add_token_types(
        [
            (kinds.CONTROL if added[i]["special"] else kinds.USER_DEFINED)
            if i in added
            else kinds.NORMAL
            if i in tokens
            else kinds.UNUSED
            for i in range(len(texts))
        ]
    )
    merges = content["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)
    _add_special_ids(writer, tokenizer, folder)


def _add_special_ids(writer: Any, tokenizer: Any, folder: Path) -> None:
    ends = GenerationConfig.from_pretrained(folder).eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    if len(ends) > 3:
        raise UserError(f"--to gguf: {len(ends)} tokens end an answer, and the format has places for three; {_WAY_OUT}")
    for add, end in zip(
        (writer.add_eos_token_id, writer.add_eot_token_id, writer.add_eom_token_id), ends, strict=False
    ):
        add(end)
    if tokenizer.bos_token_id is not None:
        writer.add_bos_token_id(tokenizer.bos_token_id)
    if tokenizer.pad_token_id is not None:
        writer.add_pad_token_id(tokenizer.pad_token_id)
    first = tokenizer("a")["input_ids"]
    writer.add_add_bos_token(bool(first) and first[0] == tokenizer.bos_token_id)


def split_name(content: dict[str, Any]) -> str | None:
    """Returns llama.cpp's name of a tokenizer.json's way to split text; None where it has none that is known here.

    The names and patterns are those by which transformers reads GGUF files.
    """
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    model, before = content["model"], content["pre_tokenizer"] or {}
    if model["type"] != "BPE" or model.get("byte_fallback") or content["normalizer"] not in (None, {"type": "NFC"}):
        return None
    steps = before.get("pretokenizers", [before])
    if steps[-1].get("type") != "ByteLevel" or steps[-1]["add_prefix_space"]:
        return None
    if len(steps) == 1:
        return "gpt-2" if steps[0]["use_regex"] else None
    if len(steps) != 2 or steps[0].get("type") != "Split" or steps[-1]["use_regex"]:
        return None
    known = {
        pattern: name
        for name in ("llama-bpe", "qwen2", "tekken", "gpt-4o")
        if (pattern := GGUF_PRE_TOKENIZER_SPLITS[name])
    }
    return known.get(steps[0]["pattern"].get("Regex")) if steps[0]["behavior"] == "Isolated" else None
