"""Tokens that a recipe adds: their first rows, the gradient of rows that are trained alone, and the result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from conftest import train_here
from peft import AutoPeftModelForCausalLM
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.checkpoints.trained import find_trained
from finetune.errors import UserError
from finetune.models.added_tokens import ROWS, add_tokens, start_rows
from finetune.models.attention import attention_for
from finetune.models.base_model import Base
from finetune.models.config import model_config
from finetune.models.tokenizer import load_tokenizer
from finetune.models.weights import Placement, load_model
from finetune.recipe import load_recipe
from finetune.recipe.schema import Tokens
from finetune.release.export.commands import ExportOptions, export_run, merge_adapter
from finetune.release.export.hf_folder import export_folder
from finetune.release.export.loading import load_result

FEW = ["quick stars", "under table"]
MANY = [*FEW, *(f"<{i}>" for i in range(40))]  # more than the spare rows of the embedding
CPU = torch.device("cpu")
TEXT = "seven quick stars river under table"


def load(recipe: dict[str, Any], write_recipe: Any, weights: Any = "load") -> Any:
    loaded = load_recipe(write_recipe(recipe))
    config = model_config(loaded.model)
    return load_model(loaded, Base.of(loaded, config), attention_for(loaded, config, "cpu"), Placement(weights, CPU))


@pytest.mark.parametrize("add", [FEW, MANY], ids=["spare rows", "grown"])
@pytest.mark.parametrize("name", ["llama", "llama_tied"])
def test_a_row_begins_as_the_mean_of_its_pieces(made: Path, name: str, add: list[str]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(made / name)
    before = {token: tokenizer(token, add_special_tokens=False)["input_ids"] for token in add}
    base, model = (AutoModelForCausalLM.from_pretrained(made / name) for _ in range(2))
    first = len(tokenizer)
    start_rows(model, first, add_tokens(tokenizer, Tokens(add=tuple(add))))
    assert model.config.vocab_size == max(384, first + len(add))
    assert {first, first + 1} <= set(tokenizer(TEXT)["input_ids"])
    for table, old in (
        (model.get_input_embeddings(), base.get_input_embeddings()),
        (model.get_output_embeddings(), base.get_output_embeddings()),
    ):
        assert torch.equal(table.weight[:first], old.weight[:first])
        for i, token in enumerate(add):
            assert torch.equal(table.weight[first + i], old.weight[before[token]].mean(0))
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert tied == (name == "llama_tied")


@pytest.mark.parametrize("name", ["llama", "llama_tied"])
def test_the_gradient_of_rows_is_that_of_the_full_tables(
    recipe: dict[str, Any], write_recipe: Any, made: Path, name: str
) -> None:
    recipe.update(mode="lora", lora={"rank": 4}, tokens={"add": MANY})
    recipe["model"] = {"name": str(made / name), "attention": "sdpa"}
    model, tokenizer = load(recipe, write_recipe), load_tokenizer(load_recipe(write_recipe(recipe)).model)
    whole, first = AutoModelForCausalLM.from_pretrained(made / name), len(tokenizer)
    start_rows(whole, first, add_tokens(tokenizer, Tokens(add=tuple(MANY))))
    ids = torch.tensor([tokenizer(TEXT)["input_ids"]])
    losses = [one(input_ids=ids, labels=ids).loss for one in (model, whole)]  # adapters begin as zero
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
    for loss in losses:
        loss.backward()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad and "lora_" not in n}
    assert [n.rpartition(".")[2] for n in trained] == [ROWS] * (1 if name == "llama_tied" else 2)
    tables = (whole.get_input_embeddings(), whole.get_output_embeddings())
    for rows, table in zip(trained.values(), tables, strict=False):
        expected = table.weight.grad[first : first + len(MANY)]
        torch.testing.assert_close(rows.grad, expected, rtol=1e-5, atol=1e-7)
        assert rows.grad[:2].abs().sum() > 0


def test_shapes_only_has_the_same_tensors(recipe: dict[str, Any], write_recipe: Any) -> None:
    recipe.update(mode="lora", lora={"rank": 4}, tokens={"add": MANY})
    shapes, real = load(recipe, write_recipe, "meta"), load(recipe, write_recipe)
    assert [(n, p.is_meta, p.shape) for n, p in shapes.named_parameters()] == [
        (n, True, p.shape) for n, p in real.named_parameters()
    ]


@pytest.mark.parametrize(
    ("name", "train"),
    [
        ("llama", "added"),
        ("llama_tied", "all"),
        pytest.param("llama_tied", "added", marks=pytest.mark.long),
        pytest.param("llama", "all", marks=pytest.mark.long),
    ],
)
def test_peft_generate_and_merge_read_the_result_alike(
    recipe: dict[str, Any], write_recipe: Any, made: Path, tmp_path: Path, name: str, train: str
) -> None:
    recipe.update(mode="lora", lora={"rank": 4}, tokens={"add": MANY, "train": train}, optimizer={"lr": 1e-2})
    recipe["checkpoint"] = {"every_steps": 6}
    recipe["model"]["name"] = str(made / name)
    train_here(write_recipe(recipe))
    folder = tmp_path / "runs" / "run"
    merge_adapter(folder, tmp_path / "merged")
    export_folder(find_trained(folder, "6"), tmp_path / "of checkpoint")
    model, tokenizer = load_result(folder)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    ids = torch.tensor([AutoTokenizer.from_pretrained(tmp_path / "merged")(TEXT)["input_ids"]])
    assert ids.max() > 345  # an added one
    logits = model(input_ids=ids).logits
    of_checkpoint = AutoModelForCausalLM.from_pretrained(tmp_path / "of checkpoint")
    for other in (merged, of_checkpoint, AutoPeftModelForCausalLM.from_pretrained(folder / "model").eval()):
        torch.testing.assert_close(other(input_ids=ids).logits, logits, rtol=1e-4, atol=1e-5)
    table = merged.get_input_embeddings().weight
    assert merged.config.vocab_size == len(table) == len(tokenizer) == 388
    base = AutoModelForCausalLM.from_pretrained(made / name).get_input_embeddings().weight
    assert torch.equal(table[:346], base[:346]) == (train == "added")
    begun = base[[321, 337]].mean(0)  # of the pieces of "quick stars"
    assert (table[346] - begun).abs().max() > 1e-3  # it was trained


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_the_gate_compares_checkpoints_with_added_tokens(
    recipe: dict[str, Any], write_recipe: Any, made: Path, tmp_path: Path, mode: str
) -> None:
    recipe.update(mode=mode, tokens={"add": MANY, "train": "added" if mode == "lora" else "all"})
    recipe |= {"checkpoint": {"every_steps": 1}, "optimizer": {"lr": 1e-2}, **({"lora": {}} if mode == "lora" else {})}
    rows = [{"messages": [{"role": r, "content": t} for r, t in (("user", TEXT), ("assistant", TEXT))]}]
    source = {"path": str(tiny.write_rows(tmp_path / "rows.jsonl", rows * 8))}
    recipe["data"] |= {"train": [source], "eval": [source]}
    train_here(write_recipe(recipe), "train.max_steps=1")
    export_run(tmp_path / "runs" / "run", ExportOptions(step="1", out=tmp_path / "out"), Console(quiet=True))
    written = json.loads((tmp_path / "out" / "verify.json").read_text())
    assert written["passed"], written
    assert written["kl_mean"] < 1e-10
    assert mode == "full" or written["kl_base"] > 1e-4


def test_rows_in_chunks_are_those_at_once(recipe: dict[str, Any], write_recipe: Any, tmp_path: Path) -> None:
    recipe.update(mode="lora", lora={"rank": 4}, tokens={"add": MANY})
    found = []
    for how in ("plain", "chunked"):
        train_here(write_recipe(recipe), f"model.cross_entropy={how}", "train.max_steps=2", f"run.name={how}")
        found.append(load_result(tmp_path / "runs" / how)[0].state_dict())
    for key, value in found[0].items():
        torch.testing.assert_close(found[1][key], value, rtol=1e-4, atol=1e-6)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tokens": {"add": ["river"]}}, r"tokens.add: 'river' is a token of this tokenizer already \(id 298\)"),
    ({"lora": {"targets": ["lm_head"]}}, "tokens.train: `added` trains rows of Linear, which has adapters"),
    ({"lora": {"modules_to_save": ["embed_tokens"]}}, "tokens.train: `added` trains rows of ModulesToSaveWrapper"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_refused(recipe: dict[str, Any], write_recipe: Any, changes: dict[str, Any], message: str) -> None:
    recipe.update({"mode": "lora", "lora": {"rank": 4}, "tokens": {"add": FEW}, **changes})
    with pytest.raises(UserError, match=message):
        load(recipe, write_recipe)
