"""A tiny copy of a model's config: the same class and switches, few and narrow layers.

Settings that decide how a model computes stay (kinds of layers, biases, norms, types of RoPE, routing); those that
decide how large it is shrink: widths, heads, experts, vocabulary. Windows and the lengths at which RoPE changes become
shorter than the documents that are tried on the copy, so that they matter there.
"""

from __future__ import annotations

import copy
import re
from typing import Any

from transformers import PretrainedConfig

from finetune.data.media.family_table import Family, Kinds, family_of, rows_of, set_file_token
from finetune.models.base_config import rope_types

VOCABULARY = 128
HEAD_SIZE = 16
HEADS = 4
HIDDEN_SIZE = HEADS * HEAD_SIZE
EXPERTS = 4
WINDOW = 5  # tokens
CHUNK = 8  # tokens
POSITIONS = 64
PRETRAINED_POSITIONS = 16  # length at which RoPE types that grow with the document begin to

_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers", "encoder_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "encoder_attention_heads")
# Trials draw ids below VOCABULARY, so the copy of a model with fewer tokens (characters, proteins) has more than it.
_VOCABULARY = re.compile(r"(\w+_)?vocab_size(_\w+)?|n_words")
_SIZES: tuple[tuple[str, int], ...] = (  # the first pattern that matches a setting's full name
    (r"codebook_size", VOCABULARY),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|max_sequence_length", POSITIONS),
    (r"max_(source|target)_positions", POSITIONS),
    (r"original_max_position_embeddings|floor_scale", PRETRAINED_POSITIONS),
    (r"(attention_)?window_size|attention_window_size|local_attention|(\w+_)?sliding_window(_size)?", WINDOW),
    (r"attention_chunk_size|(mamba_)?chunk_size", CHUNK),
    (r"qk_nope_head_dim|qk_rope_head_dim|rotary_dim|index_head_dim", HEAD_SIZE // 2),
    (r"(\w+_)?head_dim|d_kv|kv_channels|mamba_d_head|mamba_headdim|query_pre_attn_scalar", HEAD_SIZE),
    (r"time_step_rank|mamba_dt_rank|(\w+_)?(low_rank_dim|lora_rank)", HEAD_SIZE),
    (r"(\w+_)?state_size|mamba_d_state", 8),
    (r"linear_num_key_heads", 2),
    (r"linear_num_value_heads|index_n_heads|linear_num_heads", HEADS),
    (r"mamba_n_heads|mamba_num_heads|n_mamba_heads", 8),
    (r"n_routed_experts|(\w+_)?num_(local_)?experts|n_experts", EXPERTS),
    (r"num_experts_per_tok(en)?|(moe_)?top_?k(_experts)?|moe_k|index_topk|router_top_k", 2),
    (r"n_group|topk_group|num_expert_group", 1),
    (r"(\w+_)?(intermediate_size|ffn_dim|ffn_hidden_size|n_inner|d_ff|mlp_dim)(_\w+)?", 2 * HIDDEN_SIZE),
    (r"mamba_d_ssm|conv_dim", 2 * HIDDEN_SIZE),
    (
        r"hidden_size(_global)?|n_embd|d_model|dim|emb_dim|embedding_dim|word_embed_proj_dim|lru_width|attention_hidden_size",
        HIDDEN_SIZE,
    ),
    (r"(\w+_)?(embedding_size|hidden_dim)", HIDDEN_SIZE),
    (r"hidden_size_per_layer_input", 8),
    (r"(attn|expert)_layer_period|full_attention_interval|(\w+_)?(layer_freq|every_n_layers)", 2),
    (r"sliding_window_pattern|no_rope_layer_interval|interleave_moe_layer_step", 2),
    (r"(attn|expert)_layer_offset|first_k_dense_replace|num_dense_layers", 1),
)
_KV_HEADS = re.compile(r"num_key_value_heads|num_kv_heads|n_head_kv|(\w+_)?num_key_value_heads|multi_query_group_num")
_PERIOD = re.compile(
    r"(\w+_)?layer_period|full_attention_interval|sliding_window_pattern|no_rope_layer_interval|\w+_step"
)


def tiny_config(config: PretrainedConfig) -> PretrainedConfig:
    """Returns a copy of a transformers config whose model has some hundred thousand parameters and drops nothing.

    It is a guess from the settings' names: whether a model can be created from it, and runs, must be tried.
    """
    tiny = copy.deepcopy(config)
    for name in tiny.sub_configs:
        if isinstance(part := getattr(tiny, name, None), PretrainedConfig):
            setattr(tiny, name, tiny_config(part))
    settings = {name: value for name, value in vars(tiny).items() if not name.startswith("_")}
    layers = _Layers.from_settings(settings)
    heads = next((settings[name] for name in _HEADS if isinstance(settings.get(name), int)), None)
    hidden, head_size = getattr(tiny, "hidden_size", None), settings.get("head_dim")
    if not isinstance(head_size, int):
        head_size = hidden // heads if heads and isinstance(hidden, int) else None
    per_layer = vars(tiny).pop("_heterogeneity_spec", None)  # transformers' settings of single layers
    for name, value in settings.items():
        if not isinstance(value, PretrainedConfig):
            setattr(tiny, name, _shrunk(name, layers.select(value), settings, layers, head_size))
    if per_layer is not None:

        def of_layer(own: dict[str, Any]) -> dict[str, Any]:
            shrunk = {name: _shrunk(name, value, {**settings, **own}, layers, None) for name, value in own.items()}
            if (
                "head_dim" in own and own["head_dim"] > settings["head_dim"]
            ):  # heads wider than those of other layers stay so
                shrunk["head_dim"] = 2 * HEAD_SIZE
            return shrunk

        overrides = per_layer.per_layer_overrides
        tiny.per_layer_config = {at: of_layer(overrides[i]) for at, i in enumerate(layers.chosen) if overrides.get(i)}
    return tiny


class _Layers:
    """Layers of a model that the copy keeps: one of each kind, at least two; two that share a block's weights."""

    def __init__(self, count: int, chosen: list[int], shared: int):
        self.count, self.chosen, self.shared = count, chosen, shared

    @classmethod
    def from_settings(cls, settings: dict[str, Any]) -> _Layers:
        count = next((settings[name] for name in _LAYERS if isinstance(settings.get(name), int)), 0)
        lists = [value for value in settings.values() if isinstance(value, list | tuple) and len(value) == count]
        shared = settings.get("num_kv_shared_layers") or 0  # the last ones, which have keys of earlier ones
        kinds: dict[str, int] = {}
        for i, kind in enumerate(zip(*lists, strict=True) if lists else ()):
            kinds.setdefault(repr((kind, i >= count - shared)), i)
        has_period = any(_PERIOD.fullmatch(name) and settings[name] for name in settings)
        number = min(count, 4 if has_period and not lists else 2)
        chosen = list(kinds.values())[:6]
        sharing = [i for i, kind in enumerate(zip(*lists, strict=True)) if "hybrid" in kind][:2]  # Zamba
        chosen += [i for i in sharing if i not in chosen]
        chosen += [i for i in range(count) if i not in chosen][: max(0, number - len(chosen))]
        return cls(count, sorted(chosen), sum(i >= count - shared for i in chosen))

    def select(self, value: Any) -> Any:
        """Returns, of a list with an item for each layer, those of the chosen layers."""
        if isinstance(value, list | tuple) and self.count > 1 and len(value) == self.count:
            return type(value)([value[i] for i in self.chosen])
        return value


def _shrunk(name: str, value: Any, settings: dict[str, Any], layers: _Layers, head_size: int | None) -> Any:
    if isinstance(value, dict):
        if name == "layer_types_map":
            return value
        return {key: _shrunk(str(key), inner, settings, layers, head_size) for key, inner in value.items()}
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, float):
        if name == "partial_rotary_factor" and value == settings.get("qk_rope_head_dim", 0) / (head_size or 1):
            return _shrunk_number("qk_rope_head_dim", HEAD_SIZE, settings, layers) / HEAD_SIZE
        return 0.0 if "drop" in name or "jitter" in name else value
    if isinstance(value, list | tuple):
        if name in ("long_factor", "short_factor") and head_size:
            return list(value)[: max(1, len(value) * HEAD_SIZE // head_size)]
        if name == "mrope_section" and head_size:
            total = sum(value) * HEAD_SIZE // head_size
            scaled = [max(1, section * total // sum(value)) for section in value]
            scaled[0] += total - sum(scaled)
            return scaled
        if name == "hybrid_layer_ids":  # Zamba 2
            return [at for at, i in enumerate(layers.chosen) if i in value]
        if name == "attention_types" and value and isinstance(value[0], list | tuple):  # GPT-Neo: [[kinds, times]]
            kinds = value[0][0]
            return [[kinds, 1]]
        if value and all(type(item) is int for item in value) and not re.search(r"layer|indices|ratio|id", name):
            return type(value)([_shrunk_number(name, item, settings, layers) for item in value])
        return value
    return _shrunk_number(name, value, settings, layers) if isinstance(value, int) else value


def _shrunk_number(name: str, value: int, settings: dict[str, Any], layers: _Layers) -> int:
    if name == "num_kv_shared_layers":
        return layers.shared
    if name in _LAYERS:
        return min(value, len(layers.chosen) or 2)
    if name == "num_heads" and "state_size" in settings:  # Mamba 2: heads x their size is the inner width
        return min(value, 2 * HEADS)
    if name in _HEADS:
        return min(value, HEADS)
    if name == "mamba_d_ssm" and isinstance(size := settings.get("mamba_d_head"), int):  # heads x their size
        return min(settings["mamba_n_heads"], 2 * HEADS) * min(size, HEAD_SIZE)
    # Zamba: next to the first layer's input
    if name == "attention_hidden_size" and value == 2 * settings["hidden_size"]:
        return 2 * HIDDEN_SIZE
    if name == "head_dim" and value == settings.get("qk_rope_head_dim"):  # multi-head latent attention: RoPE's part
        return HEAD_SIZE // 2
    if _KV_HEADS.fullmatch(name):
        heads = next((settings[key] for key in _HEADS if settings.get(key)), value)
        return HEADS if value == heads else min(value, HEADS // 2)
    if re.fullmatch(r"\w*_(token_id|token_index|token)|\w*_token_ids?", name):
        return value if value < 3 else 2
    if name == "max_position_embeddings" and "dynamic" in rope_types(settings.get("rope_parameters")):
        return PRETRAINED_POSITIONS
    if _VOCABULARY.fullmatch(name) and value > 0:
        return VOCABULARY
    for pattern, size in _SIZES:
        if re.fullmatch(pattern, name):
            return min(value, size) if value > 0 else value
    return value


# --- multimodal models

_WIDTH = HEADS * HEAD_SIZE // 2
_SMALL_TOWER: dict[str, Any] = {
    "hidden_size": _WIDTH,
    "intermediate_size": 2 * _WIDTH,
    "num_attention_heads": 2,
    "num_heads": 2,
    "num_hidden_layers": 2,
    "depth": 2,
    "head_dim": HEAD_SIZE,
    "out_hidden_size": HIDDEN_SIZE,
    "fullatt_block_indexes": [1],
    "deepstack_visual_indexes": [0, 1],
    "num_position_embeddings": 16,
}


_SMALL_EAR: dict[str, Any] = {
    "d_model": _WIDTH,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 2 * _WIDTH,
    "intermediate_size": 4 * _WIDTH,  # Voxtral: four positions are a token
    "num_mel_bins": 8,
    "max_source_positions": 16,
    "downsample_hidden_size": 8,
    "output_dim": HIDDEN_SIZE,
    "output_proj_dims": _WIDTH,
    "subsampling_conv_channels": [8, 8],
    "attention_chunk_size": 4,
    "attention_context_left": 5,
    "n_window_infer": 100,
    # Gemma 3n
    "input_feat_size": 8,
    "sscp_conv_channel_size": [8, 8],
    "conf_num_attention_heads": 2,
    "conf_num_hidden_layers": 2,
    "conf_attention_chunk_size": 4,
    "conf_attention_context_left": 5,
    # Granite Speech
    "dim_head": HEAD_SIZE,
    "context_size": 8,
    "max_pos_emb": 16,
    # Phi-4
    "num_blocks": 2,
    "input_size": 8,
    "nemo_final_size": 1,  # of these bins, halved three times
    "nemo_conv_channels": 8,
    "ext_pw_out_channel": _WIDTH,
    "depthwise_separable_out_channel": _WIDTH,
    "bias_max_distance": 16,
}
_SMALL_OTHER: dict[str, Any] = {**_SMALL_TOWER, "num_key_value_heads": 2, "position_embedding_size": 64}


def _set_there(part: Any, sizes: dict[str, Any]) -> None:
    for key, value in sizes.items():
        if hasattr(part, key):
            setattr(part, key, value)


def _with_small_ear(tiny: Any, tower: Any, row: Family) -> None:
    _set_there(tower, _SMALL_EAR)
    if hasattr(tower, "n_window") and not hasattr(tower, "n_window_infer"):
        tower.n_window = 4  # Qwen2.5-Omni: a clip has several windows
    for name in row.drops:
        if hasattr(tower, name):
            setattr(tower, name, 0.0)
    if (projector := getattr(tiny, "projector_config", None)) is not None:
        _set_there(projector, {**_SMALL_TOWER, "encoder_hidden_size": _WIDTH})
    if hasattr(tiny, "audio_soft_tokens_per_image"):
        _with_own_tokens(tiny)


def _with_own_tokens(tiny: Any) -> None:
    """Gemma 3n: the last ids are those of towers, which have embeddings of their own; and a small network of timm."""
    count = 8
    for part, after in ((tiny.vision_config, 2 * count), (tiny.audio_config, count)):
        part.vocab_size, part.vocab_offset = count, VOCABULARY - after
    tiny.text_config.vocab_size_per_layer_input = VOCABULARY - 2 * count
    tiny.audio_soft_tokens_per_image, tiny.image_token_id = 4, VOCABULARY - count - 1
    tiny.vision_config.architecture = "test_resnet"


def tiny_whole(config: PretrainedConfig, kinds: Kinds = None) -> Any:
    """Returns a tiny copy of a multimodal config: small text model, small towers, few patches. kinds: see
    `family_of`."""
    tiny: Any = copy.deepcopy(config)
    text = tiny.get_text_config(decoder=True)
    if text is tiny:  # Phi-4
        tiny = text = tiny_config(tiny)
    else:
        name, text = next(name for name in tiny.sub_configs if getattr(tiny, name) is text), tiny_config(text)
        setattr(tiny, name, text)
    text.pad_token_id = 0
    for row in rows_of(config.model_type).values():
        if (tower := getattr(tiny, row.config)) is not None:
            _set_there(tower, _SMALL_TOWER)
            if row.others:
                _set_there(tiny.vision_config, _SMALL_OTHER)
            if row.kind == "audio":
                _with_small_ear(tiny, tower, row)
            elif row.tokens is not None:
                _with_small_squares(tiny, tower)
    last = VOCABULARY
    for row in family_of(config, kinds).each:
        set_file_token(tiny, row, last := last - 1)
    return tiny


def _with_small_squares(tiny: Any, vision: Any) -> None:
    vision.image_size = vision.patch_size * 2 * getattr(tiny, "scale_factor", 1)
    if hasattr(tiny, "mm_tokens_per_image"):
        vision.image_size, tiny.mm_tokens_per_image = vision.patch_size * 4, 4
