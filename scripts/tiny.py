"""Tiny models, a tokenizer and conversations, made on the spot: what the parity matrix and the tests train."""

from __future__ import annotations

import json
import random
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
    # The window is shorter than most documents, so that it matters.
    "mistral": {"model_type": "mistral", **_SHAPE, "sliding_window": 8},
    # Norms of each head, between the matrices that tensor parallelism cuts.
    "qwen3": {"model_type": "qwen3", **_SHAPE, "head_dim": 16},
    # Mixtures of experts. Routers that are sure of themselves: else rounding decides between experts.
    "mixtral": {"model_type": "mixtral", **_SHAPE, **_EXPERTS, "num_local_experts": 8, "intermediate_size": 32},
    "qwen3_moe": {"model_type": "qwen3_moe", **_SHAPE, **_EXPERTS, "num_experts": 8, "moe_intermediate_size": 32}
    | {"head_dim": 16, "norm_topk_prob": True},
    # Hybrids: a gated delta net, or Mamba 2, and a layer of attention.
    "qwen3_5": {"model_type": "qwen3_5_text", **_SHAPE, "layer_types": ["linear_attention", "full_attention"]}
    | {"head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    | {"linear_key_head_dim": 16, "linear_value_head_dim": 16},
    "granite_hybrid": {"model_type": "granitemoehybrid", **_SHAPE, "layer_types": ["mamba", "attention"]}
    | {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 128, "mamba_n_heads": 8}
    | {"mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8, "position_embedding_type": "nope"},
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
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**MODELS[name], **changes})).save_pretrained(folder / name)
    tokenizer().save_pretrained(folder / name)
    return folder / name
