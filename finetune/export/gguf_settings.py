"""What a GGUF file says of a model: llama.cpp's name of its architecture, and settings by llama.cpp's names. The same
table is written and, of a file of any make, compared.

    llama         Llama 3's frequency factors are a tensor of the file
    mistral3      Ministral 3: YaRN, and queries that grow with the position
    gemma2, 3     windows, caps and a second rotary base
    qwen2vl, 3vl  Qwen-VL's text parts: which pairs of a head turn by which of three positions, equal ones in a text
    experts       how many, and how many of them a token sees (qwen3moe, and Mixtral as a llama)
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from finetune.errors import UserError

WAY_OUT = "llama.cpp's `convert_hf_to_gguf.py FOLDER` reads the folder that `export --to hf` writes"
# transformers' model types and llama.cpp's.
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}
ARCHITECTURES |= {"mixtral": "llama", "gemma2": "gemma2", "gemma3_text": "gemma3", "ministral3": "mistral3"}
ARCHITECTURES |= {"qwen2_5_vl_text": "qwen2vl", "qwen3_vl_text": "qwen3vl"}
UNREAD = ("mixtral", "ministral3", "qwen2_5_vl_text", "qwen3_vl_text")  # by transformers 5.23 from a GGUF file
UNKNOWN = ("mistral3", "qwen2vl", "qwen3vl")  # architectures that transformers 5.23 has no name for
TURNED = ("llama", "mistral3")  # whose rows of q and k have another order
WINDOWS = {"gemma2": 2, "gemma3_text": 6}  # every so many layers one without a window, as llama.cpp has it
# By which llama.cpp knows the 27B models, whose queries it scales by hidden size / heads, others' by the size of a head
# (https://github.com/ggml-org/llama.cpp, `f_attention_scale`).
_LAYERS_OF_27B = {"gemma2": 46, "gemma3_text": 62}
Settings = dict[str, int | float | str | list[int]]


def package() -> Any:
    try:
        import gguf  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UserError("`--to gguf` needs the package gguf: pip install 'gguf>=0.19'") from None
    return gguf


def open_gguf(file: Path) -> Any:
    """Returns the `gguf` package's reader of a file. Raises UserError for one that is not whole, or is no GGUF."""
    try:
        return package().GGUFReader(file)
    except (ValueError, IndexError, KeyError) as error:
        raise UserError(f"{file}: not a GGUF file, or only a part of one: {error}") from None


def check_architecture(config: Any, is_scoring: bool) -> None:
    """Raises UserError for a model that is not written here."""
    if is_scoring or config.model_type not in ARCHITECTURES:
        what = "a model of scores" if is_scoring else config.model_type
        raise UserError(f"--to gguf: {what} is not written here (only {', '.join(ARCHITECTURES)}); {WAY_OUT}")
    rope = rope_of(config).get("rope_type", "default")
    scaled = {"llama": "llama3", "gemma3_text": "linear", "ministral3": "yarn"}
    if rope not in ("default", scaled.get(config.model_type)):
        raise UserError(f"--to gguf: RoPE of type {rope} is not written here; {WAY_OUT}")
    if config.model_type == "qwen3_moe" and not config.norm_topk_prob:
        raise UserError(
            f"--to gguf: llama.cpp normalises the weights of qwen3_moe's experts, this model not; {WAY_OUT}"
        )
    if config.model_type in WINDOWS:
        _check_gemma(config)
    elif config.hidden_act != "silu" or rope_of(config).get("partial_rotary_factor", 1.0) != 1:
        raise UserError(
            f"--to gguf: {config.model_type} with {config.hidden_act}, or with a part of each head turned, is not "
            f"written here; {WAY_OUT}"
        )
    if config.model_type == "ministral3":
        _check_ministral(config)


def is_written(config: Any) -> bool:
    try:
        check_architecture(config, is_scoring=False)
    except UserError:
        return False
    return True


def context_length(config: Any) -> int:
    """Returns the tokens of the longest text of a file: those of a window, where llama.cpp has none for the
    architecture. Up to there each token sees all before it either way."""
    window = None if config.model_type in WINDOWS else getattr(config, "sliding_window", None)
    if not window or not getattr(config, "use_sliding_window", True):
        return config.max_position_embeddings
    return min(window, config.max_position_embeddings)


def _check_gemma(config: Any) -> None:
    """Raises UserError where a Gemma computes otherwise than llama.cpp does by its architecture."""
    period = WINDOWS[config.model_type]
    sliding = ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(config.num_hidden_layers)]
    if list(config.layer_types) != sliding:
        raise UserError(f"--to gguf: llama.cpp has a layer without a window every {period}, not as here; {WAY_OUT}")
    is_27b = config.num_hidden_layers == _LAYERS_OF_27B[config.model_type]
    scale = config.hidden_size // config.num_attention_heads if is_27b else config.head_dim
    caps, is_2 = (config.attn_logit_softcapping, config.final_logit_softcapping), config.model_type == "gemma2"
    if is_2 != (caps[0] is not None) or (is_2 and caps[1] is None):
        raise UserError(f"--to gguf: logits capped by {caps} are not written here; {WAY_OUT}")
    if config.query_pre_attn_scalar != scale or config.hidden_activation != "gelu_pytorch_tanh":
        raise UserError(
            f"--to gguf: attention scaled by {config.query_pre_attn_scalar}, or {config.hidden_activation}, is not "
            f"written here: llama.cpp scales that of {config.num_hidden_layers} layers by {scale}; {WAY_OUT}"
        )


def _check_ministral(config: Any) -> None:
    """Raises UserError where a Ministral 3 computes otherwise than llama.cpp's `mistral3`, which takes mscale for 1."""
    rope = rope_of(config)
    scales, truncates = (rope.get("mscale"), rope.get("mscale_all_dim")), rope.get("truncate", True)
    if rope.get("rope_type") != "yarn" or rope.get("attention_factor") is not None or not truncates:
        raise UserError(f"--to gguf: a Ministral 3 with {rope} is not written here, only plain YaRN; {WAY_OUT}")
    if all(scales) and scales[0] != 1:
        raise UserError(f"--to gguf: llama.cpp takes YaRN's mscale for 1, and here it is {scales[0]}; {WAY_OUT}")


def rope_of(config: Any) -> dict[str, Any]:
    """Returns the parameters of rotary embeddings, of layers without a window where they differ."""
    parameters = config.rope_parameters or {}
    return parameters.get("full_attention", parameters)


# --- settings


def settings_of(config: Any, whole: Any = None) -> Settings:
    """Returns a file's settings, by llama.cpp's names without the architecture ahead of them. whole: the config of the
    multimodal base that `config` is the text part of."""
    heads, kind = config.num_attention_heads, config.model_type
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    rope = rope_of(config)
    settings: Settings = {
        "context_length": context_length(config),
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": head_dim,
    }
    if kind in ("qwen3_moe", "mixtral"):
        settings["expert_count"] = getattr(config, "num_local_experts", None) or config.num_experts
        settings["expert_used_count"] = config.num_experts_per_tok
    if kind == "qwen3_moe":
        settings["expert_feed_forward_length"] = config.moe_intermediate_size
    if kind in WINDOWS:
        settings |= _gemma(config)
    if kind == "ministral3":
        settings |= _ministral(rope)
    if (sections := rope.get("mrope_section")) is not None:
        settings["rope.dimension_sections"] = [*sections, *[0] * (4 - len(sections))]  # time, height, width, another
    if kind == "qwen3_vl_text" and whole is not None:
        settings["n_deepstack_layers"] = len(whole.vision_config.deepstack_visual_indexes)
    return settings


def _gemma(config: Any) -> Settings:
    settings: Settings = {"attention.sliding_window": config.sliding_window}
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if (cap := getattr(config, name)) is not None:
            settings[name] = float(cap)
    if config.model_type == "gemma3_text":
        settings["rope.freq_base_swa"] = float(config.rope_parameters["sliding_attention"]["rope_theta"])
        if (factor := rope_of(config).get("factor")) is not None:
            settings |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(factor)}
    return settings


def _ministral(rope: dict[str, Any]) -> Settings:
    """As llama.cpp's `mistral3` reads them (https://github.com/ggml-org/llama.cpp/pull/17644)."""
    settings: Settings = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": float(rope["factor"]),
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        "rope.scaling.yarn_beta_fast": float(rope.get("beta_fast") or 32.0),
        "rope.scaling.yarn_beta_slow": float(rope.get("beta_slow") or 1.0),
        "attention.temperature_scale": float(rope["llama_4_scaling_beta"]),
    }
    if rope.get("mscale") and rope.get("mscale_all_dim"):  # else both take the factor of the paper
        settings["rope.scaling.yarn_log_multiplier"] = float(rope["mscale_all_dim"])
    return settings


def add_settings(writer: Any, architecture: str, settings: Settings) -> None:
    for name, value in settings.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
        add[type(value)](f"{architecture}.{name}", value)


# What llama.cpp takes where a file does not say it (`llama_model_base::load_hparams`): a value, or another setting's.
_UNSAID: Settings = {
    "rope.freq_base": 1e4,
    "rope.freq_base_swa": 1e4,
    "rope.scaling.type": "none",
    "rope.scaling.factor": 1.0,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0,
    "attention.causal": True,
    "n_deepstack_layers": 0,
    "expert_count": 0,
    "expert_used_count": 0,
    "expert_group_count": 0,
    "expert_group_used_count": 0,
}
_AS = {
    "attention.head_count_kv": "attention.head_count",
    "attention.value_length": "attention.key_length",
    "rope.dimension_count": "attention.key_length",
    "rope.scaling.original_context_length": "context_length",
}


def other_settings(config: Any, whole: Any, file: Path) -> list[str]:
    """Returns how a file computes otherwise than a model by its config. whole: see `settings_of`."""
    fields = open_gguf(file).fields
    name = fields["general.architecture"].contents() if "general.architecture" in fields else None
    if name != (expected := ARCHITECTURES[config.model_type]):
        return [f"{file}: general.architecture is {name}, and {expected} in the run"]
    ours = settings_of(config, whole)
    ahead = f"{name}."
    theirs = {key.removeprefix(ahead): one.contents() for key, one in fields.items() if key.startswith(ahead)}
    rows, tokens = theirs.pop("vocab_size", None), len(fields["tokenizer.ggml.tokens"].data)
    found = [f"{file}: vocab_size is {rows}, and it has {tokens} tokens"] if rows not in (None, tokens) else []
    for key in sorted(ours.keys() | theirs.keys()):
        values = _taken(key, theirs), _taken(key, ours)
        if not _is_same(*values):
            found.append(f"{file}: {key} is {values[0]}, and {values[1]} in the run")
    return found


def _taken(key: str, settings: dict[str, Any]) -> Any:
    """Returns what llama.cpp takes for a setting."""
    if key in settings:
        return settings[key]
    if key == "attention.key_length":
        return settings.get("embedding_length", 0) // max(1, settings.get("attention.head_count", 0))
    return _taken(_AS[key], settings) if key in _AS else _UNSAID.get(key)


def _is_same(theirs: Any, ours: Any) -> bool:
    if isinstance(ours, float) and isinstance(theirs, float):
        return math.isclose(ours, theirs, rel_tol=1e-6)  # fp32 in the file
    return theirs == ours
