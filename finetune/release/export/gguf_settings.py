"""The settings of a model in a GGUF file: llama.cpp's name of its architecture, and settings by llama.cpp's names. The
same table is written and, for a file of any make, compared.

    llama         Llama 3's frequency factors are a tensor of the file
    mistral3      Ministral 3: YaRN, and queries that grow with the position
    gemma2, 3     windows, caps and a second rotary base
    qwen2vl, 3vl  Qwen-VL's text parts: which pairs of a head turn by which of three positions, equal ones in a text
    experts       how many, and how many of them a token sees (qwen3moe, and Mixtral as a llama)
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

from finetune.errors import UserError

WAY_OUT = "Fix: serve the folder that `export --to hf` writes"
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
_ANY_LENGTH = 1 << 30  # of a model whose config states none (Mamba)
Settings = dict[str, int | float | str | list[int]]


class NotWritten(UserError):
    """A model or tokenizer that only llama.cpp's converter may write."""


def package() -> Any:
    try:
        import gguf  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UserError("--to gguf: needs the package gguf. Fix: pip install 'gguf>=0.19'") from None
    return gguf


@functools.lru_cache(maxsize=1)  # seconds for a large vocabulary, and the gate asks many times
def _reader(file: Path, inode: int, size: int, changed_ns: int) -> Any:
    return package().GGUFReader(file)


def open_gguf(file: Path) -> Any:
    """Returns the `gguf` package's reader of a file. Raises UserError for one that is not whole, or is no GGUF."""
    try:
        found = file.stat()
        return _reader(file, found.st_ino, found.st_size, found.st_mtime_ns)
    except (ValueError, IndexError, KeyError) as error:
        raise UserError(
            f"{file}: not a GGUF file, or only a part of one: {error}. Fix: copy or export the file again"
        ) from None


def check_architecture(config: Any, is_scoring: bool) -> None:
    """Raises NotWritten for a model that is not written here, UserError for one that computes otherwise than llama.cpp
    does by its architecture."""
    kind, rope = config.model_type, rope_of(config)
    if is_scoring:
        raise UserError(f"--to gguf: a model of scores is not written. {WAY_OUT}")
    if kind not in ARCHITECTURES:
        raise NotWritten(f"--to gguf: {kind} is not written here (only {', '.join(ARCHITECTURES)})")
    rope_type = rope.get("rope_type", "default")
    scaled = {"llama": "llama3", "gemma3_text": "linear", "ministral3": "yarn"}
    if rope_type not in ("default", scaled.get(kind)):
        raise NotWritten(f"--to gguf: RoPE of type {rope_type} is not written here")
    rules = list[tuple[bool, str]]()
    if kind == "qwen3_moe":
        why = "llama.cpp normalizes the weights of qwen3_moe's experts, this model does not"
        rules.append((not config.norm_topk_prob, why))
    if kind in WINDOWS:
        layers, period = config.num_hidden_layers, WINDOWS[kind]
        sliding = ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(layers)]
        caps, is_2 = (config.attn_logit_softcapping, config.final_logit_softcapping), kind == "gemma2"
        is_27b = layers == _LAYERS_OF_27B[kind]
        scale = config.hidden_size // config.num_attention_heads if is_27b else config.head_dim
        own, activation = config.query_pre_attn_scalar, config.hidden_activation
        rules += [
            (
                list(config.layer_types) != sliding,
                f"llama.cpp has a layer without a window every {period}, unlike this model",
            ),
            (
                is_2 != (caps[0] is not None) or (is_2 and caps[1] is None),
                f"logits capped by {caps} are not written here",
            ),
            (
                own != scale or activation != "gelu_pytorch_tanh",
                f"attention scaled by {own}, or {activation}, is not written here. llama.cpp scales that of {layers} "
                f"layers by {scale}",
            ),
        ]
    else:
        what = f"{kind} with {config.hidden_act}, or with a partial rotary embedding, is not written here"
        rules.append((config.hidden_act != "silu" or rope.get("partial_rotary_factor", 1.0) != 1, what))
    if kind == "ministral3":  # llama.cpp's `mistral3` takes mscale for 1
        is_plain = rope_type == "yarn" and rope.get("attention_factor") is None and rope.get("truncate", True)
        scales = (rope.get("mscale"), rope.get("mscale_all_dim"))
        rules += [
            (not is_plain, f"a Ministral 3 with {rope} is not written here, only plain YaRN"),
            (all(scales) and scales[0] != 1, f"llama.cpp takes YaRN's mscale for 1, and here it is {scales[0]}"),
        ]
    for is_broken, why in rules:
        if is_broken:
            raise UserError(f"--to gguf: {why}. {WAY_OUT}")


def is_written(config: Any) -> bool:
    try:
        check_architecture(config, is_scoring=False)
    except UserError:
        return False
    return True


def context_length(config: Any) -> int:
    """Returns the tokens of the longest text of a file: those of a window if llama.cpp has none for an architecture
    that is written here. Up to there each token sees all before it either way."""
    window = getattr(config, "sliding_window", None) if config.model_type in {*ARCHITECTURES} - {*WINDOWS} else None
    longest = getattr(config, "max_position_embeddings", None) or _ANY_LENGTH
    return min(window, longest) if window and getattr(config, "use_sliding_window", True) else longest


def rope_of(config: Any) -> dict[str, Any]:
    """Returns the parameters of rotary embeddings, of layers without a window if they differ."""
    parameters = getattr(config, "rope_parameters", None) or {}  # learned positions have none
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
        settings["attention.sliding_window"] = config.sliding_window
        for name in ("attn_logit_softcapping", "final_logit_softcapping"):
            if (cap := getattr(config, name)) is not None:
                settings[name] = float(cap)
    if kind == "gemma3_text":
        settings["rope.freq_base_swa"] = float(config.rope_parameters["sliding_attention"]["rope_theta"])
        if (factor := rope.get("factor")) is not None:
            settings |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(factor)}
    if kind == "ministral3":  # as llama.cpp's `mistral3` reads them (https://github.com/ggml-org/llama.cpp/pull/17644)
        settings |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(rope["factor"]),
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_beta_fast": float(rope.get("beta_fast") or 32.0),
            "rope.scaling.yarn_beta_slow": float(rope.get("beta_slow") or 1.0),
            "attention.temperature_scale": float(rope["llama_4_scaling_beta"]),
        }
        if rope.get("mscale") and rope.get("mscale_all_dim"):  # else both take the factor of the paper
            settings["rope.scaling.yarn_log_multiplier"] = float(rope["mscale_all_dim"])
    if (sections := rope.get("mrope_section")) is not None:
        settings["rope.dimension_sections"] = [*sections, *[0] * (4 - len(sections))]  # time, height, width, another
    if kind == "qwen3_vl_text" and whole is not None:
        settings["n_deepstack_layers"] = len(whole.vision_config.deepstack_visual_indexes)
    return settings


def add_settings(writer: Any, architecture: str, settings: Settings) -> None:
    for name, value in settings.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
        add[type(value)](f"{architecture}.{name}", value)


# Values that llama.cpp takes if a file has none (`llama_model_base::load_hparams`), or those of another setting.
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
    """Returns the settings of a file that differ from a model's config. whole: see `settings_of`."""
    fields = open_gguf(file).fields
    name = fields["general.architecture"].contents() if "general.architecture" in fields else None
    if name != (expected := ARCHITECTURES[config.model_type]):
        return [f"{file}: general.architecture is {name}, and {expected} in the run"]
    ours = settings_of(config, whole)
    ahead = f"{name}."
    theirs = {key.removeprefix(ahead): one.contents() for key, one in fields.items() if key.startswith(ahead)}
    rows, tokens = theirs.pop("vocab_size", None), len(fields["tokenizer.ggml.tokens"].data)
    problems = [f"{file}: vocab_size is {rows}, and it has {tokens} tokens"] if rows not in (None, tokens) else []
    for key in sorted(ours.keys() | theirs.keys()):
        their, our = _taken(key, theirs), _taken(key, ours)
        if isinstance(our, float) and isinstance(their, float) and math.isclose(our, their, rel_tol=1e-6):
            continue  # fp32 in the file
        if their != our:
            problems.append(f"{file}: {key} is {their}, and {our} in the run")
    return problems


# Settings of any architecture by llama.cpp's names, and where configs of transformers have them.
_ANY: dict[str, tuple[str, ...]] = {
    "embedding_length": ("hidden_size",),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps", "layer_norm_epsilon"),
    "attention.layer_norm_epsilon": ("layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps"),
    "expert_count": ("num_local_experts", "num_experts", "n_routed_experts"),
    "expert_used_count": ("num_experts_per_tok", "num_experts_per_token"),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "rope.freq_base": ("rope_theta",),
}


def settings_of_another_tool(config: Any, file: Path) -> list[str]:
    """Returns the settings of a file, of any architecture, that differ from a model's config: those that both have
    under a name that is known here."""
    fields = open_gguf(file).fields
    ahead = f"{fields['general.architecture'].contents()}."
    theirs = {key.removeprefix(ahead): one.contents() for key, one in fields.items() if key.startswith(ahead)}
    heads = theirs.get("nextn_predict_layers", 0)
    layers = theirs.get("block_count", 0) - heads
    problems = []
    if layers != config.num_hidden_layers:
        problems.append(f"{file}: has {layers} layers, and {config.num_hidden_layers} in the run")
    if "attention.kv_lora_rank" in theirs:  # latent attention: llama.cpp has one head of keys
        theirs.pop("attention.head_count_kv", None)
    for key, names in _ANY.items():
        values = [getattr(config, name, None) for name in names if name != "rope_theta"]
        values += [rope_of(config).get("rope_theta")] if "rope_theta" in names else []
        our, their = next((one for one in values if one is not None), None), theirs.get(key)
        if not isinstance(our, int | float) or not isinstance(their, int | float):
            continue
        if not math.isclose(our, their, rel_tol=1e-6):  # fp32 in the file
            problems.append(f"{file}: {key} is {their}, and {our} in the run")
    return problems[:3]


def _taken(key: str, settings: dict[str, Any]) -> Any:
    """Returns the value that llama.cpp takes for a setting."""
    if key in settings:
        return settings[key]
    if key == "attention.key_length":
        return settings.get("embedding_length", 0) // max(1, settings.get("attention.head_count", 0))
    return _taken(_AS[key], settings) if key in _AS else _UNSAID.get(key)
