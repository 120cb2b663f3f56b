"""What every contender of a speed benchmark trains: one model folder, one file of rows, and what each step is made of.

    FOLDER/model/          random weights from a seed, tokenizer with its chat template
    FOLDER/rows.jsonl      the rows
    FOLDER/recipe.yaml     ours reads this and the two above
    FOLDER/steps.npz       the documents of every step, in order: what the others read
    FOLDER/work.json       the settings (`Work`)

The steps are taken from our own packing and order, so that all train the same documents in the same step, whether they
pack them or pad them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml
from numpy.typing import NDArray

UNTRAINED = -100
SEED = 7
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<pad>", "<|im_start|>", "<|im_end|>"]  # ids 0, 1, 2


def llama(hidden: int, layers: int, heads: int, kv_heads: int, mlp: int, vocabulary: int, tied: bool) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "tie_word_embeddings": tied,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "tiny": llama(64, 2, 4, 2, 128, 512, tied=True),
    "25m": llama(384, 8, 6, 2, 1024, 32768, tied=True),
    # https://huggingface.co/meta-llama/Llama-3.2-1B/blob/main/config.json and Llama-3.1-8B, without rope scaling
    "1b": llama(2048, 16, 32, 8, 8192, 128256, tied=True),
    "8b": llama(4096, 32, 32, 8, 14336, 128256, tied=False),
}


@dataclass(frozen=True)
class Work:
    """The settings that all contenders share."""

    shape: dict[str, Any]
    mode: Literal["full", "lora", "qlora"] = "full"
    precision: Literal["fp32", "bf16", "bf16_true"] = "fp32"
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    checkpointing: bool = False  # activations are recomputed
    row_tokens: int = 2048
    rows_per_step: int = 1  # packed rows, all in one forward
    documents: Literal["many", "whole", "short"] = "many"  # of random ids in a row: see `random_documents`
    steps: int = 10
    device: Literal["cpu", "cuda"] = "cpu"
    threads: int = 2
    keeps_freed_memory: bool = False  # on the CPU: see `contenders.KEPT`
    lr: float = 1e-4
    overrides: tuple[str, ...] = ()  # of our recipe alone, `section.key=value`

    @classmethod
    def read(cls, folder: Path) -> Work:
        fields = json.loads((folder / "work.json").read_text(encoding="utf-8"))
        return cls(**{key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()})

    def write(self, folder: Path) -> None:
        (folder / "work.json").write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


# --- rows


def conversations_of(path: Path) -> list[dict[str, Any]]:
    """A jsonl of `messages`, or of `question` and `answer` (GSM8K)."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [row if "messages" in row else conversation(row["question"], row["answer"]) for row in rows]


def conversation(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def synthetic_conversations(count: int, seed: int = SEED) -> list[dict[str, Any]]:
    """Sums told as stories, two to fourteen steps long: about as long as GSM8K's, for whoever has no rows at hand."""
    rng = random.Random(seed)
    names, things = ("Ada", "Boris", "Chen", "Dara", "Elif", "Femi"), ("apples", "coins", "stamps", "pencils", "shells")
    rows = []
    for _ in range(count):
        name, thing, total = rng.choice(names), rng.choice(things), rng.randint(2, 90)
        sentences, worked = [f"{name} has {total} {thing}."], []
        for _ in range(rng.randint(2, 14)):
            more, other = rng.randint(1, 90), rng.choice(names)
            verb, after, sign = ("gives", total + more, "+") if rng.random() < 0.6 else ("takes", total - more, "-")
            sentences.append(f"{other} {verb} {more}.")
            worked.append(f"After {other}'s turn {name} has {total} {sign} {more} = {after} {thing}.")
            total = after
        question = " ".join([*sentences, f"How many {thing} does {name} have in the end?"])
        rows.append(conversation(question, "\n".join([*worked, f"#### {total}"])))
    return rows


def random_documents(
    count: int, vocabulary: int, longest: int, kind: str = "many", median: int = 320, seed: int = SEED
) -> Iterator[dict[str, Any]]:
    """Rows of `format: tokens`: random ids.

    kind: many: log-normal lengths, the last 60 % of each trained; whole: as long as a row, all trained, as others
    publish their speed; short: 8 to 15 tokens, whose losses say whether they see each other.
    """
    rng = np.random.default_rng(seed)
    for _ in range(count):
        length = int(np.clip(rng.lognormal(np.log(median), 0.6), 8, longest))
        length = {"many": length, "whole": longest, "short": int(rng.integers(8, 16))}[kind]
        trained = np.arange(length) >= (max(1, int(0.4 * length)) if kind == "many" else 1)
        yield {
            "input_ids": rng.integers(3, vocabulary, length).tolist(),
            "trained": trained.astype(int).tolist(),
        }


def write_rows(path: Path, rows: Any) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


# --- model and tokenizer


def save_tokenizer(rows: list[dict[str, Any]], folder: Path, vocabulary: int) -> None:
    """Byte-level BPE learnt from the conversations; it may stay smaller than the model's vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator((turn["content"] for row in rows for turn in row["messages"]), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<|im_end|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


def save_padded_tokenizer(folder: Path, size: int) -> None:
    """Bytes, and names without use up to `size`: for rows that are ids already."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    names += [f"unused-{i}" for i in range(size - len(names))]
    backend = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<|im_end|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


def save_weights(shape: dict[str, Any], folder: Path, dtype: str = "float32", device: str = "cpu") -> int:
    """Random weights from the seed; returns the number of parameters. On the disk: 2 or 4 bytes each."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(SEED)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape), dtype=getattr(torch, dtype))
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


# --- the recipe, and what each step holds


def recipe(folder: Path, work: Work, row_format: str) -> dict[str, Any]:
    model = {"name": str(folder / "model")}
    values: dict[str, Any] = {
        "run": {"name": "speed", "dir": str(folder / "runs")},
        "model": model,
        "mode": work.mode,
        "data": {
            "train": [{"path": str(folder / "rows.jsonl"), "format": row_format}],
            "max_length": work.row_tokens,
        },
        "batch": {"rows": work.rows_per_step, "rows_per_device": work.rows_per_step},
        "optimizer": {"name": work.optimizer, "lr": work.lr},
        "schedule": {"name": "constant"},
        "train": {
            "max_steps": work.steps,
            "precision": work.precision,
            "activation_checkpointing": work.checkpointing,
        },
        "checkpoint": {"resume": "never"},
    }
    if work.mode != "full":
        values["lora"] = {"rank": 16, "alpha": 32, "targets": "all-linear"}
    if work.mode == "qlora":
        values["quantization"] = {"type": "nf4"}
    return values


def write_recipe(folder: Path, work: Work, row_format: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe(folder, work, row_format)), encoding="utf-8")
    return path


def write_steps(folder: Path, work: Work) -> None:
    """Prepare the rows as ours does and write down what each step trains. Fills ours' caches, of rows and attention."""
    from finetune.data.chat.renderer import labels_of
    from finetune.data.dataset import build_dataset
    from finetune.features import load_recipe
    from finetune.models.attention import attention_for
    from finetune.models.base_model import Base
    from finetune.models.config import model_config

    loaded = load_recipe(folder / "recipe.yaml", list(work.overrides))
    attention_for(loaded, model_config(loaded.model), work.device)
    dataset = build_dataset(loaded, loaded.data.train, Base.of(loaded).renderer(loaded.objective))
    if len(dataset.rows) < work.steps * work.rows_per_step:
        raise SystemExit(f"{len(dataset.rows)} packed rows are too few for {work.steps} steps of {work.rows_per_step}")
    ordered = dataset.in_order(loaded)
    arrays: dict[str, list[NDArray[np.int64]]] = {"ids": [], "labels": []}
    lengths, documents = [], []
    for step in range(work.steps):
        first = step * work.rows_per_step
        examples = [one for i in range(work.rows_per_step) for one in ordered.row(first + i)]
        (sequences,) = zip(*(one.sequences for one in examples), strict=True)
        arrays["ids"] += [one.input_ids.astype(np.int64) for one in sequences]
        arrays["labels"] += [labels_of(one.input_ids, one.loss_mask).astype(np.int64) for one in sequences]
        lengths += [len(one.input_ids) for one in sequences]
        documents.append(len(examples))
    np.savez(
        folder / "steps.npz",
        ids=np.concatenate(arrays["ids"]),
        labels=np.concatenate(arrays["labels"]),
        lengths=np.array(lengths),
        documents=np.array(documents),
    )


@dataclass(frozen=True)
class StepRows:
    """The documents of one step."""

    ids: list[NDArray[np.int64]]
    labels: list[NDArray[np.int64]]  # aligned with ids; -100 where not trained

    @property
    def tokens(self) -> int:
        return sum(map(len, self.ids))

    @property
    def supervised(self) -> int:
        return sum(int((labels != UNTRAINED).sum()) for labels in self.labels)


def first_losses(folder: Path) -> tuple[float, float]:
    """Returns the loss of the first step by plain transformers in fp32 on the CPU: of its documents one by one, and if
    they saw each other."""
    import torch
    from torch.nn.functional import cross_entropy
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32, attn_implementation="eager")
    step = read_steps(folder)[0]

    @torch.no_grad()
    def losses(ids: NDArray[np.int64], labels: NDArray[np.int64]) -> torch.Tensor:
        logits = model.eval()(input_ids=torch.from_numpy(ids)[None]).logits[0, :-1]
        return cross_entropy(logits, torch.from_numpy(labels[1:]), ignore_index=UNTRAINED, reduction="sum")

    alone = torch.stack([losses(*one) for one in zip(step.ids, step.labels, strict=True)]).sum()
    together = losses(np.concatenate(step.ids), np.concatenate(step.labels))
    return alone.item() / step.supervised, together.item() / step.supervised


def read_steps(folder: Path) -> list[StepRows]:
    with np.load(folder / "steps.npz") as file:
        ends = np.cumsum(file["lengths"])[:-1]
        ids, labels = np.split(file["ids"], ends), np.split(file["labels"], ends)
        documents = np.cumsum(file["documents"]).tolist()
    return [StepRows(ids[a:b], labels[a:b]) for a, b in zip([0, *documents], documents, strict=False)]
