"""Tiny models, a tokenizer and conversations, made on the spot: what the parity matrix and the tests train."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LABELS = ("bad", "fair", "good")
_WORDS = ("river", "stone", "light", "cloud", "paper", "green", "seven", "house", "under", "table", "quick", "stars")
_SHAPE: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "initializer_range": 0.1}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_SHAPE},
    "llama_tied": {"model_type": "llama", **_SHAPE, "tie_word_embeddings": True},
    "llama_deep": {"model_type": "llama", **_SHAPE, "num_hidden_layers": 4},
    "llama_deepest": {"model_type": "llama", **_SHAPE, "hidden_size": 32, "num_hidden_layers": 8},
    # The window is shorter than most documents, so that it matters.
    "mistral": {"model_type": "mistral", **_SHAPE, "sliding_window": 8},
    # Norms of each head, between the matrices that tensor parallelism cuts.
    "qwen3": {"model_type": "qwen3", **_SHAPE, "head_dim": 16},
    # Mixtures of experts. Routers that are sure of themselves: else rounding decides between experts.
    "mixtral": {"model_type": "mixtral", **_SHAPE, **_EXPERTS, "num_local_experts": 8, "intermediate_size": 32},
    "qwen3_moe": {"model_type": "qwen3_moe", **_SHAPE, **_EXPERTS, "num_experts": 8, "moe_intermediate_size": 32}
    | {"head_dim": 16, "norm_topk_prob": True},
    # A dense layer, then shared and routed experts.
    "qwen2_moe": {"model_type": "qwen2_moe", **_SHAPE, **_EXPERTS, "num_experts": 8, "moe_intermediate_size": 32}
    | {"mlp_only_layers": [0], "shared_expert_intermediate_size": 48, "norm_topk_prob": True},
    # Sinks; the first layer in a window, the second without.
    "gpt_oss": {"model_type": "gpt_oss", **_SHAPE, **_EXPERTS, "head_dim": 16, "num_local_experts": 4}
    | {"intermediate_size": 32, "sliding_window": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    # Hybrids: a gated delta net, or Mamba 2, and a layer of attention.
    "qwen3_5": {"model_type": "qwen3_5_text", **_SHAPE, "layer_types": ["linear_attention", "full_attention"]}
    | {"head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    | {"linear_key_head_dim": 16, "linear_value_head_dim": 16},
    "granite_hybrid": {"model_type": "granitemoehybrid", **_SHAPE, "layer_types": ["mamba", "attention"]}
    | {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 128, "mamba_n_heads": 8}
    | {"mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8, "position_embedding_type": "nope"},
}
# "llama_wide": of its columns two ranks have full blocks of 64.
WIDE: dict[str, Any] = {"model_type": "llama", **_SHAPE, "hidden_size": 128, "intermediate_size": 256}
_VISION: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "image_size": 28}
_HEADS: dict[str, Any] = {"num_attention_heads": 2, "patch_size": 14}
_QWEN_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": 14,
}
_QWEN_VISION |= {"out_hidden_size": 64, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
_LATENT: dict[str, Any] = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
_YARN: dict[str, Any] = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0}
_YARN |= {"original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
_TEXT: dict[str, Any] = {**_SHAPE, "head_dim": 16}
# Multimodal models, of which the text part is trained. Ids of images are beyond those of the tokenizer.
MULTIMODAL: dict[str, dict[str, Any]] = {
    "mistral3": {
        "model_type": "mistral3",
        "text_config": {"model_type": "mistral", **_TEXT, "sliding_window": None},
        "vision_config": {"model_type": "pixtral", **_VISION, **_HEADS, "head_dim": 16},
        "image_token_index": 370,
        "tie_word_embeddings": False,
    },
    "ministral3": {
        "model_type": "mistral3",
        "text_config": {"model_type": "ministral3", **_TEXT, "tie_word_embeddings": True}
        | {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
            }
            | {
                "original_max_position_embeddings": 16,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            }
        },
        "vision_config": {"model_type": "pixtral", **_VISION, **_HEADS, "head_dim": 16},
        "image_token_index": 370,
    },
    "gemma3": {  # tied
        "model_type": "gemma3",
        "text_config": {"model_type": "gemma3_text", **_TEXT, "tie_word_embeddings": True, "sliding_window": 8}
        | {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
        "vision_config": {"model_type": "siglip_vision_model", **_VISION, **_HEADS},
        "mm_tokens_per_image": 4,
        "image_token_index": 370,
        "boi_token_index": 371,
        "eoi_token_index": 372,
    },
    "smolvlm": {
        "model_type": "smolvlm",
        "text_config": {"model_type": "llama", **_TEXT, "tie_word_embeddings": False},
        "vision_config": {"model_type": "smolvlm_vision", **_VISION, **_HEADS, "image_size": 56},
        "scale_factor": 2,
        "image_token_id": 370,
        "tie_word_embeddings": False,
    },
    "qwen3_vl": {  # transformers has no causal class of its text part
        "model_type": "qwen3_vl",
        "text_config": {"model_type": "qwen3_vl_text", **_TEXT, "rope_parameters": _MROPE},
        "vision_config": {"model_type": "qwen3_vl", **_QWEN_VISION},
        "image_token_id": 370,
        "video_token_id": 371,
        "vision_start_token_id": 372,
        "vision_end_token_id": 373,
    },
    "qwen3_vl_moe": {
        "model_type": "qwen3_vl_moe",
        "text_config": {"model_type": "qwen3_vl_moe_text", **_TEXT, **_EXPERTS, "num_local_experts": 4}
        | {"moe_intermediate_size": 32, "rope_parameters": _MROPE},
        "vision_config": {**_QWEN_VISION, "model_type": "qwen3_vl_moe"},
        "image_token_id": 370,
        "video_token_id": 371,
        "vision_start_token_id": 372,
        "vision_end_token_id": 373,
    },
    "mistral4": {  # Mistral Small 4
        "model_type": "mistral3",
        "text_config": {"model_type": "mistral4", **_SHAPE, **_LATENT, "q_lora_rank": 16, "n_routed_experts": 4}
        | {"rope_parameters": _YARN}
        | {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_key_value_heads": 4},
        "vision_config": {"model_type": "pixtral", **_VISION, **_HEADS, "head_dim": 16},
        "image_token_index": 370,
        "tie_word_embeddings": False,
    },
    "mistral_large4": {
        "model_type": "mistral_large4",
        "text_config": {"model_type": "mistral_large4_text", **_SHAPE, **_LATENT, "n_routed_experts": 4}
        | {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_key_value_heads": 4, "index_topk": 64}
        | {"index_head_dim": 16, "index_n_heads": 2, "mlp_layer_types": ["dense", "sparse"]}
        | {"layer_types": ["indexed_attention"] * 2, "indexer_types": ["full"] * 2, "no_rope_layers": [1, 0]}
        | {"kv_source_layers": [0, 1]},
        "vision_config": {"model_type": "pixtral", **_VISION, **_HEADS, "head_dim": 16},
        "image_token_index": 370,
    },
    "qwen2_5_vl": {
        "model_type": "qwen2_5_vl",
        "text_config": {"model_type": "qwen2_5_vl_text", **_TEXT, "rope_parameters": _MROPE},
        "vision_config": {**_QWEN_VISION, "model_type": "qwen2_5_vl", "fullatt_block_indexes": [0]},
        "image_token_id": 370,
        "video_token_id": 371,
        "vision_start_token_id": 372,
        "vision_end_token_id": 373,
    },
    "qwen3_5": {
        "model_type": "qwen3_5",
        "text_config": {"model_type": "qwen3_5_text", **_TEXT, "layer_types": ["linear_attention", "full_attention"]}
        | {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16}
        | {"linear_value_head_dim": 16, "rope_parameters": {**_MROPE, "partial_rotary_factor": 1.0}},
        "vision_config": {**_QWEN_VISION, "model_type": "qwen3_5"},
        "image_token_id": 370,
        "video_token_id": 371,
        "vision_start_token_id": 372,
        "vision_end_token_id": 373,
    },
    "llama4": {
        "model_type": "llama4",
        "text_config": {"model_type": "llama4_text", **_TEXT, "intermediate_size_mlp": 128, "num_local_experts": 4}
        | {"intermediate_size": 64, "attention_chunk_size": 16, "interleave_moe_layer_step": 2},
        "vision_config": {"model_type": "llama4_vision_model", **_VISION, "num_attention_heads": 2}
        | {"patch_size": 14, "vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64},
        "image_token_index": 370,
        "boi_token_index": 371,
        "eoi_token_index": 372,
    },
    "mllama": {  # one layer looks at images
        "model_type": "mllama",
        "text_config": {"model_type": "mllama_text_model", **_SHAPE, "num_hidden_layers": 4}
        | {"cross_attention_layers": [1]},
        "vision_config": {"model_type": "mllama_vision_model", **_VISION, "attention_heads": 2, "patch_size": 14}
        | {"num_global_layers": 1, "vision_output_dim": 64, "intermediate_layers_indices": [0]}
        | {"supported_aspect_ratios": [[1, 1]], "max_num_tiles": 1},
        "image_token_index": 383,
    },
    "gemma4": {
        "model_type": "gemma4",
        "text_config": {"model_type": "gemma4_text", **_TEXT, "sliding_window": 8, "global_head_dim": 16}
        | {"layer_types": ["sliding_attention", "full_attention"], "hidden_size_per_layer_input": 8}
        | {"vocab_size_per_layer_input": 384, "num_kv_shared_layers": 0, "tie_word_embeddings": True},
        "vision_config": {"model_type": "gemma4_vision", **_VISION, **_HEADS, "head_dim": 16, "num_key_value_heads": 2},
        "audio_config": None,
        "image_token_id": 370,
        "audio_token_id": 371,
        "video_token_id": 372,
    },
}


def conversations(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Answers of very different length, so that wrong normalisation shows."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        question = [rng.choice(_WORDS) for _ in range(rng.randint(1, 9))]
        answer = question[::-1] if rng.random() < 0.5 else question[:1]
        rows.append({"messages": [_said("user", question), _said("assistant", answer)]})
    return rows


def preferences(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Pairs of answers to a prompt that are alike in nothing, length least of all."""
    rng = random.Random(seed)
    rows = []
    for row in conversations(count, seed):
        prompt, chosen = row["messages"]
        rejected = [f"{rng.choice(_WORDS)}s" for _ in range(rng.randint(1, 9))]
        rows.append({"prompt": [prompt], "chosen": [chosen], "rejected": [_said("assistant", rejected)]})
    return rows


def texts(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Texts with a label that their words decide."""
    said = [row["messages"][0]["content"] for row in conversations(count, seed)]
    return [{"text": text, "label": LABELS[len(text) % len(LABELS)]} for text in said]


def unpaired(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Answers that are good or bad, two good ones for every bad one: mismatched ones soon are likelier than before."""
    rows = []
    for i, row in enumerate(preferences(count, seed)):
        answer = row["chosen" if i % 3 else "rejected"]
        rows.append({"prompt": row["prompt"], "completion": answer, "label": i % 3 != 0})
    return rows


def _said(role: str, words: list[str]) -> dict[str, str]:
    return {"role": role, "content": " ".join(words)}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def save_teacher(model: Path, folder: Path) -> Path:
    """A model that is sure of itself, unlike random weights. model: its weights before."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    teacher = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        teacher.lm_head.weight.mul_(20)
    teacher.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


def write_teacher(path: Path, model: Path, examples: Any, top_k: int, temperature: float = 1.0) -> Path:
    """A teacher's predictions for `objective.teacher`, by plain transformers, one document after the other.

    Its logits are 20 times those of the random weights: sure of itself, so that divergences are not all rounding.
    """
    import pyarrow
    import pyarrow.parquet
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from finetune.data.predictions import vocabulary_digest

    teacher = AutoModelForCausalLM.from_pretrained(model)
    rows = []
    for example in examples:
        (sequence,) = example.sequences
        tokens = torch.from_numpy(sequence.input_ids.astype("int64"))
        with torch.no_grad():
            logits = 20 * teacher(tokens[None], use_cache=False).logits[0, :-1][sequence.loss_mask[1:]]
        log_probs, ids = torch.log_softmax(logits / temperature, 1).topk(top_k)
        labels = torch.where(torch.from_numpy(sequence.loss_mask), tokens, -100)
        columns = (tokens.tolist(), labels.tolist(), ids.tolist(), log_probs.tolist())
        rows.append(dict(zip(("input_ids", "labels", "ids", "log_probs"), columns, strict=True)))
    vocabulary = vocabulary_digest(AutoTokenizer.from_pretrained(model))
    about = {"vocabulary": vocabulary, "temperature": temperature, "sampled": False}
    table = pyarrow.Table.from_pylist(rows).replace_schema_metadata({"finetune": json.dumps(about)})
    pyarrow.parquet.write_table(table, path)
    return path


def tokenizer() -> Any:
    """Byte-level BPE with ChatML's tokens; pad, end of turn and beginning are three different ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=350,
        special_tokens=["<pad>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator((json.dumps(row) for row in conversations(300)), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<|im_end|>")
    fast.chat_template = CHATML
    return fast


def save_model(folder: Path, name: str, **changes: Any) -> Path:
    """A model folder with random weights and the tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    shape = {"llama_wide": WIDE, **MODELS}[name]
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**shape, **changes})).save_pretrained(folder / name)
    tokenizer().save_pretrained(folder / name)
    return folder / name


def save_with_exchanged_tokens(folder: Path) -> Path:
    """Returns the folder of a model whose tokenizer has two ids the other way round."""
    model = save_model(folder, "llama")
    file = model / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(content), encoding="utf-8")
    return model


def save_multimodal(folder: Path, name: str, **changes: Any) -> Path:
    """The same of `MULTIMODAL`, written by the multimodal class itself; with settings of an image processor."""
    import torch
    from transformers import AutoConfig, AutoModelForMultimodalLM

    torch.manual_seed(0)
    model = AutoModelForMultimodalLM.from_config(AutoConfig.for_model(**{**MULTIMODAL[name], **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)  # nothing is zero or one
    model.save_pretrained(folder / name)
    settings = json.loads((path := folder / name / "config.json").read_text(encoding="utf-8"))
    if name == "mistral3":  # as published: by transformers' default it would be tied, if values did not differ
        del settings["tie_word_embeddings"]
    path.write_text(json.dumps(settings, indent=2), encoding="utf-8")
    tokenizer().save_pretrained(folder / name)
    (folder / name / "preprocessor_config.json").write_text('{"image_mean": [0.5, 0.5, 0.5]}\n', encoding="utf-8")
    return folder / name


# --- models that see images
#
# Tokens of an image in each family: the one whose places the model fills comes first.
_QWEN_IMAGE = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>")
SEEING: dict[str, tuple[tuple[str, ...], str, dict[str, Any], dict[str, Any]]] = {
    # name of `MULTIMODAL`: (tokens, what the template writes, preprocessor_config.json, processor_config.json)
    "smolvlm": (
        ("<image>", "<fake_token_around_image>", "<global-img>"),
        "<image>",
        {"max_image_size": {"longest_edge": 56}, "size": {"longest_edge": 112}, "do_image_splitting": True},
        {"image_seq_len": 4},
    ),
    "qwen2_5_vl": (
        _QWEN_IMAGE,
        "<|vision_start|><|image_pad|><|vision_end|>",
        {"patch_size": 14, "size": {"shortest_edge": 28 * 28, "longest_edge": 8 * 28 * 28}},
        {},
    ),
    "qwen3_vl": (
        _QWEN_IMAGE,
        "<|vision_start|><|image_pad|><|vision_end|>",
        {"patch_size": 14, "size": {"shortest_edge": 28 * 28, "longest_edge": 8 * 28 * 28}},
        {},
    ),
    "gemma3": (
        ("<image_soft_token>", "<start_of_image>", "<end_of_image>"),
        "<start_of_image>",
        {"size": {"height": 28, "width": 28}},
        {"image_seq_length": 4},
    ),
    "mistral3": (
        ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        "[IMG]",
        {"patch_size": 14, "size": {"longest_edge": 84}},
        {"patch_size": 14, "spatial_merge_size": 2},
    ),
}
AS_IDEFICS3: dict[str, Any] = {  # changes of SmolVLM, for both have the same parts
    "model_type": "idefics3",
    "vision_config": {**MULTIMODAL["smolvlm"]["vision_config"], "model_type": "idefics3_vision"},
}
PARTS_OF_CONTENT = (
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}PLACEHOLDER{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
)


def save_seeing(folder: Path, name: str, **changes: Any) -> Path:
    """A model of `SEEING` with tokenizer, template and processor, in `folder/<name>_sees`."""
    tokens, placeholder, preprocessor, processor = SEEING[name]
    from transformers import PreTrainedTokenizerFast

    named = dict(zip(("image_token", "boi_token", "eoi_token"), tokens, strict=True))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer().backend_tokenizer,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        extra_special_tokens=named,
    )
    content = PARTS_OF_CONTENT.replace("PLACEHOLDER", placeholder)
    fast.chat_template = CHATML.replace("{{ m.content }}", content)
    ids = {token: fast.convert_tokens_to_ids(token) for token in tokens}
    key = "image_token_index" if "image_token_index" in MULTIMODAL[name] else "image_token_id"
    made = save_multimodal(folder / "made", name, **{key: ids[tokens[0]], **changes})
    fast.save_pretrained(made)
    (made / "preprocessor_config.json").write_text(json.dumps(preprocessor), encoding="utf-8")
    (made / "processor_config.json").write_text(json.dumps(processor), encoding="utf-8")
    shutil.rmtree(folder / f"{name}_sees", ignore_errors=True)  # of an earlier start in this folder
    return made.rename(folder / f"{name}_sees")


def write_pictures(
    folder: Path, name: str, count: int, seed: int = 0, pairs: bool = False, numbers: Sequence[int] = (0, 1, 1, 2)
) -> Path:
    """Rows `name.jsonl` with pictures of one colour, whose names are the answer. pairs: preferred to another one;
    numbers: of pictures, one of which is drawn for each row."""
    from PIL import Image

    rng, colours = random.Random(seed), {"red": (220, 30, 40), "green": (20, 180, 60), "blue": (40, 60, 220)}
    (folder / name).mkdir(exist_ok=True)
    rows = []
    for i, row in enumerate(conversations(count, seed)):
        seen = [rng.choice(sorted(colours)) for _ in range(rng.choice(numbers))]
        parts: list[dict[str, str]] = []
        for n, colour in enumerate(seen):
            size = (rng.randrange(56, 120), rng.randrange(56, 120))
            picture = Image.new("RGB", size, colours[colour])
            picture.paste((rng.randrange(256),) * 3, (5, 5, 5 + size[0] // 3, 5 + size[1] // 3))
            picture.save(folder / name / f"{i}-{n}.png")
            parts.append({"type": "image", "image": f"{name}/{i}-{n}.png"})
        question, answer = row["messages"]
        said = {"role": "user", "content": [*parts, {"type": "text", "text": question["content"]}]}
        if not seen:
            said = question
        right = _said("assistant", seen) if seen else answer
        if pairs:
            wrong = _said("assistant", [f"{rng.choice(_WORDS)}s" for _ in range(rng.randint(1, 9))])
            rows.append({"prompt": [said], "chosen": [right], "rejected": [wrong]})
        else:
            rows.append({"messages": [said, right]})
    return write_rows(folder / f"{name}.jsonl", rows)
