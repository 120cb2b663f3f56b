"""`export --to gguf`: one file for llama.cpp, Ollama, LM Studio, ..., made tensor by tensor.

Names come from the `gguf` package's own map. What else the format wants, by architecture:

    llama         rows of q and k in the order of llama.cpp's rotary embedding; Llama 3's frequency factors as a tensor
    mistral3      Ministral 3: the same, YaRN, and queries that grow with the position
    gemma2, 3     norms with the 1 that transformers adds; windows, caps and a second rotary base among the settings
    experts       those of a layer in one tensor for each projection (qwen3moe, and Mixtral as a llama)
    multimodal    the text part alone, under the names of a text model; llama.cpp has towers in a file of their own

Vectors and routers are fp32 whatever the type of the matrices. The tokenizer goes into the file: tokens with their
types, merges, llama.cpp's name of the way to split text before merges (it has a list of them), the chat template, and
whether it writes a token at the beginning itself. A SentencePiece vocabulary has scores in place of merges: here each
token's is the rank of its merges, which have to follow each other.
"""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
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
# transformers' model types and llama.cpp's.
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}
ARCHITECTURES |= {"mixtral": "llama", "gemma2": "gemma2", "gemma3_text": "gemma3", "ministral3": "mistral3"}
UNREAD = ("mixtral", "ministral3")  # by transformers 5.23 from a GGUF file
_TURNED = ("llama", "mistral3")  # whose rows of q and k have another order
_WINDOWS = {"gemma2": 2, "gemma3_text": 6}  # every so many layers one without a window, as llama.cpp has it
# By which llama.cpp knows the 27B models, whose queries it scales by hidden size / heads, others' by the size of a head
# (https://github.com/ggml-org/llama.cpp, `f_attention_scale`).
_LAYERS_OF_27B = {"gemma2": 46, "gemma3_text": 62}
_EXPERT = re.compile(r"(.*\.(?:mlp|block_sparse_moe)\.experts)\.(\d+)\.(\w+)\.weight")
_BLOCK = 32  # values of a q8_0 block


@dataclass(frozen=True)
class TextTensors:
    """What is written: a text model's config and its tensors by the names of a text model's files. make: the values of
    one."""

    config: Any
    shapes: dict[str, Tensor]
    make: Callable[[str], Tensor]


def text_of(model: StreamedModel) -> TextTensors:
    """Returns a trained model as a file has it: of a multimodal one its text part."""
    if (part := model.text_part) is None:
        return TextTensors(model.model.config, model.shapes, model.make)
    own = {part.in_base(name): name for name in part.text.state_dict()}
    files = {own[loaded]: file for file, loaded in part.files.items() if loaded in own and file in model.shapes}
    shapes = {name: model.shapes[file] for name, file in files.items()}
    return TextTensors(part.text.config, shapes, lambda name: model.make(files[name]))


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
    text = text_of(model)
    config = text.config
    check_architecture(config, model.is_scoring)
    partial = path.with_name(path.name + ".partial")
    writer = gguf.GGUFWriter(partial, ARCHITECTURES[config.model_type])
    entries = list(_entries(gguf, text, kind))
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


def check_architecture(config: Any, is_scoring: bool) -> None:
    """Raises UserError for a model that is not written here."""
    if is_scoring or config.model_type not in ARCHITECTURES:
        what = "a model of scores" if is_scoring else config.model_type
        raise UserError(f"--to gguf: {what} is not written here (only {', '.join(ARCHITECTURES)}); {_WAY_OUT}")
    rope = rope_of(config).get("rope_type", "default")
    scaled = {"llama": "llama3", "gemma3_text": "linear", "ministral3": "yarn"}
    if rope not in ("default", scaled.get(config.model_type)):
        raise UserError(f"--to gguf: RoPE of type {rope} is not written here; {_WAY_OUT}")
    if config.model_type == "qwen3_moe" and not config.norm_topk_prob:
        raise UserError(
            f"--to gguf: llama.cpp normalises the weights of qwen3_moe's experts, this model not; {_WAY_OUT}"
        )
    if config.model_type in _WINDOWS:
        _check_gemma(config)
    if config.model_type == "ministral3":
        _check_ministral(config)


def context_length(config: Any) -> int:
    """Returns the tokens of the longest text of a file: those of a window, where llama.cpp has none for the
    architecture. Up to there each token sees all before it either way."""
    window = None if config.model_type in _WINDOWS else getattr(config, "sliding_window", None)
    if not window or not getattr(config, "use_sliding_window", True):
        return config.max_position_embeddings
    return min(window, config.max_position_embeddings)


def _check_gemma(config: Any) -> None:
    """Raises UserError where a Gemma computes otherwise than llama.cpp does by its architecture."""
    period = _WINDOWS[config.model_type]
    sliding = ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(config.num_hidden_layers)]
    if list(config.layer_types) != sliding:
        raise UserError(f"--to gguf: llama.cpp has a layer without a window every {period}, not as here; {_WAY_OUT}")
    is_27b = config.num_hidden_layers == _LAYERS_OF_27B[config.model_type]
    scale = config.hidden_size // config.num_attention_heads if is_27b else config.head_dim
    if config.query_pre_attn_scalar != scale or config.hidden_activation != "gelu_pytorch_tanh":
        raise UserError(
            f"--to gguf: attention scaled by {config.query_pre_attn_scalar}, or {config.hidden_activation}, is not "
            f"written here: llama.cpp scales that of {config.num_hidden_layers} layers by {scale}; {_WAY_OUT}"
        )


def _check_ministral(config: Any) -> None:
    """Raises UserError where a Ministral 3 computes otherwise than llama.cpp's `mistral3`, which takes mscale for 1."""
    rope = rope_of(config)
    scales, truncates = (rope.get("mscale"), rope.get("mscale_all_dim")), rope.get("truncate", True)
    if rope.get("rope_type") != "yarn" or rope.get("attention_factor") is not None or not truncates:
        raise UserError(f"--to gguf: a Ministral 3 with {rope} is not written here, only plain YaRN; {_WAY_OUT}")
    if all(scales) and scales[0] != 1:
        raise UserError(f"--to gguf: llama.cpp takes YaRN's mscale for 1, and here it is {scales[0]}; {_WAY_OUT}")


def rope_of(config: Any) -> dict[str, Any]:
    """Returns the parameters of rotary embeddings, of layers without a window where they differ."""
    parameters = config.rope_parameters or {}
    return parameters.get("full_attention", parameters)


# --- settings


def _add_settings(writer: Any, gguf: Any, config: Any, kind: str, rows: int) -> None:
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_name(ARCHITECTURES[config.model_type])
    writer.add_context_length(context_length(config))
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(float(rope_of(config)["rope_theta"]))
    writer.add_rope_dimension_count(head_dim)
    writer.add_vocab_size(rows)
    names = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
    writer.add_file_type(getattr(gguf.LlamaFileType, names[kind]))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    if config.model_type in ("qwen3_moe", "mixtral"):
        writer.add_expert_count(getattr(config, "num_local_experts", None) or config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if config.model_type == "qwen3_moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if config.model_type in _WINDOWS:
        _add_gemma(writer, gguf, config)
    if config.model_type == "ministral3":
        _add_ministral(writer, gguf, config)


def _add_gemma(writer: Any, gguf: Any, config: Any) -> None:
    writer.add_sliding_window(config.sliding_window)
    if config.attn_logit_softcapping is not None:
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if config.final_logit_softcapping is not None:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.model_type == "gemma3_text":
        writer.add_rope_freq_base_swa(float(config.rope_parameters["sliding_attention"]["rope_theta"]))
        if (factor := rope_of(config).get("factor")) is not None:
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(factor)


def _add_ministral(writer: Any, gguf: Any, config: Any) -> None:
    """As llama.cpp's `mistral3` reads them (https://github.com/ggml-org/llama.cpp/pull/17644)."""
    rope = rope_of(config)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_rope_scaling_yarn_beta_fast(rope.get("beta_fast") or 32.0)
    writer.add_rope_scaling_yarn_beta_slow(rope.get("beta_slow") or 1.0)
    if rope.get("mscale") and rope.get("mscale_all_dim"):  # else both take the factor of the paper
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
    writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


# --- tensors


def _entries(gguf: Any, model: TextTensors, kind: str) -> Iterator[_Entry]:
    """Yields the tensors of the file in order. Raises UserError for one that llama.cpp has no name for."""
    for name, shape, own, stack in _places(gguf, model, kind):
        yield _Entry(name, shape, own, _reader(model, stack, name.rpartition(".")[0]))
    config = model.config
    if rope_of(config).get("rope_type") == "llama3":
        factors = _frequency_factors(config)
        yield _Entry("rope_freqs.weight", tuple(factors.shape), "f32", lambda: factors)


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
                f"--to gguf: llama.cpp has no place for {name} in {ARCHITECTURES[config.model_type]}; {_WAY_OUT}"
            )
        shape = tuple(meta.shape) if not match else (len(stack), *meta.shape)
        is_matrix = len(shape) > 1 and "ffn_gate_inp" not in short
        own = kind if is_matrix and not (kind == "q8_0" and meta.shape[-1] % _BLOCK) else "f32"
        yield f"{short}.{suffix}", shape, own, stack


def _reader(model: TextTensors, stack: list[str], short: str) -> Callable[[], Tensor]:
    config = model.config
    heads = _permuted_heads(config, short)
    adds_one = config.model_type in _WINDOWS and short.endswith("norm")

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
    return heads.get(short.rpartition(".")[2]) if ARCHITECTURES[config.model_type] in _TURNED else None


def read_back(model: StreamedModel, path: Path) -> dict[str, Tensor]:
    """Returns the folder's tensors, fp32, as a file has them: of an architecture that transformers does not read.

    Raises UserError for a tensor that is missing, and for others than are expected.
    """
    gguf, text, state = _package(), text_of(model), {}
    config = text.config
    held = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for name, shape, _, stack in _places(gguf, text, "f32"):
        if (tensor := held.pop(name, None)) is None:
            raise UserError(f"{path}: has no {name}")
        array = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        values = torch.from_numpy(np.array(array, dtype=np.float32)).reshape(shape)
        if heads := _permuted_heads(config, name.rpartition(".")[0]):
            pairs = values.reshape(heads, len(values) // heads // 2, 2, *values.shape[1:])
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        state |= dict(zip(stack, values, strict=True)) if len(stack) > 1 else {stack[0]: values}
    if held:
        raise UserError(f"{path}: has {min(held)}, which the model has not")
    return {name: values.contiguous() for name, values in state.items()}


def gguf_of(export: Path) -> Path | None:
    """Returns the GGUF file of an export. Raises UserError where there are several."""
    files = sorted(export.glob("*.gguf"))
    if len(files) > 1:
        raise UserError(f"{export}: {len(files)} GGUF files: which one? Keep one in the folder")
    return files[0] if files else None


@contextlib.contextmanager
def described(path: Path) -> Iterator[Path]:
    """Yields a file that transformers reads settings and tokenizer from: of an architecture that it does not know, one
    without tensors under Llama's name, which has the same settings."""
    gguf, arch = _package(), "general.architecture"
    fields = gguf.GGUFReader(path).fields
    if (own := fields[arch].contents()) != ARCHITECTURES["ministral3"]:
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        writer = gguf.GGUFWriter(Path(folder) / path.name, "llama")
        for key, field in fields.items():
            if key != arch and not key.startswith("GGUF."):
                key = f"llama.{key.removeprefix(f'{own}.')}" if key.startswith(f"{own}.") else key
                writer.add_key_value(
                    key, field.contents(), field.types[0], field.types[-1] if field.types[1:] else None
                )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        yield Path(folder) / path.name


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
    """Add tokens, merges or scores, the template and the ids of special tokens. Raises UserError where llama.cpp would
    split text otherwise."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    split, prefix = split_name(content), sentencepiece_prefix(content)
    if split is None and prefix is None:
        kind = content["model"]["type"]
        what = f"{folder}'s tokenizer" + (f", of type {kind}," if kind != "BPE" else "")
        raise UserError(f"--to gguf: llama.cpp may not split text as {what} does; {_WAY_OUT}")
    tokens = {index: token for token, index in tokenizer.get_vocab().items()}
    added = {one["id"]: one for one in content["added_tokens"]}
    texts = [tokens.get(index, f"[PAD{index}]") for index in range(max(rows, max(tokens) + 1))]
    kinds = [_kind(gguf.TokenType, i, tokens, added, content["model"]) for i in range(len(texts))]
    if split is not None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(split)
        merges = content["model"]["merges"]
        writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    else:
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_scores(_scores(content, texts, folder))
        writer.add_add_space_prefix(_adds_space(prefix, tokenizer, set(added), folder))
        own = gguf.TokenType.USER_DEFINED  # found in text as it is, before spaces are replaced
        texts = [t.replace("▁", " ") if kind == own else t for t, kind in zip(texts, kinds, strict=True)]
    writer.add_token_list(texts)
    writer.add_token_types(kinds)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)
    _add_special_ids(writer, tokenizer, folder)


def _kind(kinds: Any, index: int, tokens: dict[int, str], added: dict[int, Any], model: dict[str, Any]) -> Any:
    """Returns GGUF's type of a token."""
    if index not in tokens:
        return kinds.UNUSED
    if model.get("byte_fallback") and tokens[index] == model.get("unk_token"):
        return kinds.UNKNOWN
    if index in added:
        return kinds.CONTROL if added[index]["special"] else kinds.USER_DEFINED
    return kinds.BYTE if model.get("byte_fallback") and _BYTE.fullmatch(tokens[index]) else kinds.NORMAL


_BYTE = re.compile("<0x[0-9A-F]{2}>")


def sentencepiece_prefix(content: dict[str, Any]) -> str | None:
    """Returns where a SentencePiece vocabulary of merges writes a space that is not there: never, first (at the
    beginning of a text) or always (also behind special tokens); None for another kind of tokenizer.json."""
    model, normalizer, before = content["model"], content["normalizer"], content["pre_tokenizer"]
    if model["type"] != "BPE" or not model.get("byte_fallback"):
        return None
    replaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    if normalizer is None and before is not None and before["type"] == "Metaspace":
        return before["prepend_scheme"] if before["replacement"] == "▁" and not before["split"] else None
    if normalizer == replaces and (
        before is None or (before["type"], before.get("pattern")) == ("Split", {"String": " "})
    ):
        return "never"  # no space is left that could be split at
    steps = (normalizer or {}).get("normalizers")
    return "always" if steps == [{"type": "Prepend", "prepend": "▁"}, replaces] and before is None else None


def _adds_space(prefix: str | None, tokenizer: Any, added: set[int], folder: Path) -> bool:
    """Returns whether llama.cpp adds a space, which it does behind every special token. Raises UserError where a
    conversation would get one that training had not."""
    if prefix != "first":
        return prefix == "always"
    chat = [{"role": "user", "content": "a"}]
    ids = tokenizer.apply_chat_template(chat, return_dict=False) if tokenizer.chat_template else [-1]
    if ids[0] not in added:
        raise UserError(
            f"--to gguf: {folder}'s tokenizer writes a space at the beginning of a text alone, and conversations "
            f"do not begin with a special token, as llama.cpp needs; {_WAY_OUT}"
        )
    return False


def _scores(content: dict[str, Any], texts: list[str], folder: Path) -> list[float]:
    """Returns the order in which llama.cpp merges: pairs whose token has the highest score first. Raises UserError
    where merges that give one token do not follow each other: no scores say the same."""
    ranks: dict[str, float] = {}
    last = None
    for merge in content["model"]["merges"]:
        token = "".join(merge.split(" ") if isinstance(merge, str) else merge)
        if token != last and token in ranks:
            raise UserError(f"--to gguf: the merges of {folder}'s tokenizer are not those of SentencePiece; {_WAY_OUT}")
        last, ranks[token] = token, ranks.get(token, -float(len(ranks) + 1))
    return [ranks.get(text, -1e4 if _BYTE.fullmatch(text) else 0.0) for text in texts]


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
    if tokenizer.unk_token_id is not None:
        writer.add_unk_token_id(tokenizer.unk_token_id)
    first = tokenizer("a")["input_ids"]
    writer.add_add_bos_token(bool(first) and first[0] == tokenizer.bos_token_id)


# SmolLM2's: single digits, then as GPT-2. transformers 5.23 does not know llama.cpp's name of it.
DIGITS = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ],
}


def split_name(content: dict[str, Any]) -> str | None:
    """Returns llama.cpp's name of a tokenizer.json's way to split text; None where it has none that is known here.

    The names and patterns are those by which transformers reads GGUF files.
    """
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    except ImportError:  # 5.17
        raise UserError(
            "`--to gguf`: this version of transformers does not know by which names llama.cpp splits text: "
            "pip install -U transformers"
        ) from None

    model, before = content["model"], content["pre_tokenizer"] or {}
    if model["type"] != "BPE" or model.get("byte_fallback") or content["normalizer"] not in (None, {"type": "NFC"}):
        return None
    if before == DIGITS:
        return "smollm"
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
