"""Multimodal checkpoints: their text part is trained as plain transformers computes it in the base's own class, each
document alone, and comes back in the base's own layout."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from conftest import metrics, tiny_overrides, train_here
from peft import PeftModel
from repository import ROOT
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from finetune.checkpoints.result import name_in_adapter
from finetune.data.dataset import build_dataset
from finetune.data.loader import Loader
from finetune.errors import RunFailure, UserError
from finetune.models.added_tokens import grow_to
from finetune.models.attention import attention_for
from finetune.models.base_model import Base
from finetune.models.config import model_config
from finetune.models.lora_targets import adapted_paths
from finetune.models.text_part import text_part_of
from finetune.models.weights import Placement, load_model
from finetune.recipe import load_recipe
from finetune.recipe.schema import Model, Recipe
from finetune.release.export.commands import ExportOptions, export_run, merge_adapter, verify_run
from finetune.release.export.loading import load_result
from finetune.release.inference.score import load_scorer

STEPS = 3
QUIET = Console(quiet=True)
# Recipes that ship, and the tiny models of the same classes.
RECIPES = {
    "mistral-small-3.2-24b": "mistral3",
    "ministral3-8b": "ministral3",
    "llama4-scout": "llama4",
    "mistral-large-4": "mistral_large4",
    "gemma3-4b": "gemma3",
    "gemma4-31b": "gemma4",
    "qwen3.5-9b": "qwen3_5",
}


def families(*default: str) -> list[Any]:
    return [pytest.param(name, marks=[] if name in default else [pytest.mark.long]) for name in tiny.MULTIMODAL]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("bases")
    return lambda name: folder / name if (folder / name).exists() else tiny.save_multimodal(folder, name)


def text_recipe(recipe: dict[str, Any], base: Path, **changes: Any) -> dict[str, Any]:
    recipe["model"]["name"] = str(base)
    recipe["optimizer"] = {"lr": 1e-3, "max_grad_norm": None}
    recipe["schedule"] = {"name": "constant"}
    recipe["train"]["max_steps"] = STEPS
    recipe["batch"]["rows_per_device"] = 1  # of some, attention cannot keep packed documents apart
    return {**recipe, **changes}


def plain_step(model: Any, recipe: Recipe, step: int) -> Tensor:
    """The mean over all target tokens of a step, by plain transformers on one document after the other."""
    data = build_dataset(recipe, recipe.data.train, Base.of(recipe).renderer(recipe.objective))
    packs = attention_for(recipe, model_config(recipe.model), "cpu").isolates_documents
    data = data if packs else data.unpacked()
    batches = Loader(data.in_order(recipe), recipe.batch.rows, 1, 0, 1, 10**6).step(step).batches
    losses, count = [], 0
    for batch in batches:
        labels = torch.full_like(batch.inputs["input_ids"], -100)
        labels[0, batch.targets.positions + 1] = batch.targets.ids
        lengths = list(batch.sequence_lengths)
        for ids, expected in zip(batch.inputs["input_ids"].split(lengths, 1), labels.split(lengths, 1), strict=True):
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
            losses.append(cross_entropy(logits, expected[0, 1:], ignore_index=-100, reduction="sum"))
            count += int((expected[0, 1:] != -100).sum())
    return torch.stack(losses).sum() / count


def plain_losses(model: Any, trained: list[Tensor], recipe: Recipe) -> list[float]:
    optimizer = torch.optim.AdamW(trained, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = plain_step(model, recipe, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def losses_of(run: Path) -> list[float]:
    return [line["loss"] for line in metrics(run) if "loss" in line]


def plain_base(base: Path) -> Any:
    return AutoModelForMultimodalLM.from_pretrained(base, dtype=torch.float32).train()


def assert_same_layout(result: Path, base: Path, touched: set[str]) -> None:
    """Keys, shapes and types of the base; what is not touched, bit for bit; its class finds all and no more."""
    ours, theirs = load_file(result / "model.safetensors"), load_file(base / "model.safetensors")
    assert {n: (t.shape, t.dtype) for n, t in ours.items()} == {n: (t.shape, t.dtype) for n, t in theirs.items()}
    changed = {name for name in ours if not torch.equal(ours[name], theirs[name])}
    assert changed == touched
    assert json.loads((result / "config.json").read_text()) == json.loads((base / "config.json").read_text())
    assert (result / "preprocessor_config.json").read_bytes() == (base / "preprocessor_config.json").read_bytes()
    _, said = AutoModelForMultimodalLM.from_pretrained(result, output_loading_info=True)
    assert not any(said[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def in_files(base: Path, names: set[str]) -> set[str]:
    """Names in files of tensors of the base's class in memory."""
    part = text_part_of(Model(name=str(base)))
    assert part is not None
    return {file for file, loaded in part.files.items() if loaded in names}


# A text part that transformers has no causal class of; the others under --all.
@pytest.mark.parametrize("name", families("qwen3_vl"))
def test_full(recipe: dict[str, Any], write_recipe: Any, bases: Any, tmp_path: Path, name: str) -> None:
    base = bases(name)
    path = write_recipe(text_recipe(recipe, base))
    train_here(path)
    model = plain_base(base)
    wanted = plain_losses(model, list(model.parameters()), load_recipe(path))
    assert losses_of(tmp_path / "runs" / "run") == pytest.approx(wanted, rel=1e-6)
    trained = {n for n, p in model.named_parameters(remove_duplicate=False) if p.grad is not None}
    result = tmp_path / "runs" / "run" / "model"
    assert_same_layout(result, base, in_files(base, trained))
    saved = AutoModelForMultimodalLM.from_pretrained(result, dtype=torch.float32)
    for (ours, p), (theirs, q) in zip(saved.named_parameters(), model.named_parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=2e-4 if p.grad is None else 0, msg=f"{ours} {theirs}")
    assert load_result(tmp_path / "runs" / "run")[0].config.model_type == tiny.MULTIMODAL[name]["model_type"]


# A tied head, and a tower that has modules of the same names.
@pytest.mark.parametrize("name", families("gemma3"))
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning")  # experts'
def test_lora(recipe: dict[str, Any], write_recipe: Any, bases: Any, tmp_path: Path, name: str) -> None:
    base = bases(name)
    whole = name == "qwen3_vl"
    lora: dict[str, Any] = {"rank": 4, "alpha": 8, **({"modules_to_save": ["lm_head"]} if whole else {})}
    if name == "mistral_large4":  # peft would look elsewhere for adapters of its shared experts
        with pytest.raises(UserError, match=r"shared_experts.gate_proj again on MistralLarge4ForConditionalGeneration"):
            train_here(write_recipe(text_recipe(recipe, base, mode="lora", lora=lora)))
        lora["targets"] = ["q_proj", "o_proj"]
    path = write_recipe(text_recipe(recipe, base, mode="lora", lora=lora))
    train_here(path)
    run = tmp_path / "runs" / "run"

    loaded = load_recipe(path)
    config = model_config(loaded.model)
    start = load_model(
        loaded, Base.of(loaded, config), attention_for(loaded, config, "cpu"), Placement("load", torch.device("cpu"))
    )
    part = text_part_of(loaded.model)
    assert part is not None
    adapted = PeftModel.from_pretrained(plain_base(base), str(run / "model"), is_trainable=True)
    with torch.no_grad():
        theirs = dict(adapted.named_parameters())
        ours = {name_in_adapter(part, n): p for n, p in start.named_parameters() if p.requires_grad}
        assert ours.keys() == {n for n, p in theirs.items() if p.requires_grad}
        end = {n: theirs[n].clone() for n in ours}
        for n, p in ours.items():
            theirs[n].copy_(p)
    wanted = plain_losses(adapted, [theirs[n] for n in ours], loaded)
    assert losses_of(run) == pytest.approx(wanted, rel=1e-6)
    for n, p in end.items():
        torch.testing.assert_close(p, theirs[n], rtol=0, atol=2e-4)

    merged = merge_adapter(run, tmp_path / "merged")
    layers, stacked = adapted_paths(adapted)
    modules = {*(f"{path}.weight" for path in layers), *stacked}
    assert_same_layout(merged, base, in_files(base, modules | {f"{part.head}.weight"} if whole else modules))
    ids = torch.arange(3, 40)[None]
    adapter, _ = load_result(run)
    logits = AutoModelForMultimodalLM.from_pretrained(merged, dtype=torch.float32).eval()(input_ids=ids).logits
    torch.testing.assert_close(adapter(input_ids=ids).logits, logits, rtol=1e-4, atol=1e-5)


# An untied head, which has rows of its own, and which the config calls tied.
@pytest.mark.long
@pytest.mark.parametrize("name", families("mistral3"))
def test_tokens_are_added(recipe: dict[str, Any], write_recipe: Any, bases: Any, tmp_path: Path, name: str) -> None:
    """The base's own class, grown, with the adapter as peft reads it; the merged folder; a full result."""
    base, run = bases(name), tmp_path / "runs" / "run"
    add = {"add": ["quick stars", "under table", *(f"<{i}>" for i in range(40))]}
    lora = {"rank": 4, "targets": ["o_proj"] if name == "mistral4" else ["q_proj", "o_proj"]}
    changes = text_recipe(recipe, base, tokens=add)
    refused = {"gemma4": "second table of embeddings", "mllama": "tokens do not fit into the tables of"}
    if name in refused:
        with pytest.raises(UserError, match=refused[name]):
            train_here(write_recipe(changes))
        return
    train_here(write_recipe({**changes, "mode": "lora", "lora": lora}))
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    ids = torch.tensor([tokenizer("seven quick stars river under table")["input_ids"]])
    grown = grow_to(plain_base(base).eval(), len(tokenizer))
    assert ids.max() >= len(tokenizer) - 42  # a new one
    adapted = PeftModel.from_pretrained(grown, str(run / "model")).eval()
    merged = merge_adapter(run, tmp_path / "merged")
    for other in (load_result(run)[0], AutoModelForMultimodalLM.from_pretrained(merged, dtype=torch.float32).eval()):
        assert other.config.get_text_config().vocab_size == len(tokenizer)
        torch.testing.assert_close(other(input_ids=ids).logits, adapted(input_ids=ids).logits, rtol=1e-4, atol=1e-5)
    train_here(write_recipe(changes), "run.name=full")
    full = tmp_path / "runs" / "full"
    model, said = AutoModelForMultimodalLM.from_pretrained(full / "model", output_loading_info=True)
    assert not any(said[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert len(model.get_input_embeddings().weight) == len(tokenizer)


@pytest.mark.long
def test_a_checkpoint_is_exported_in_the_base_s_layout(
    recipe: dict[str, Any], write_recipe: Any, bases: Any, tmp_path: Path
) -> None:
    """Of a tied head, which has no weights of its own to be left as they were. The gate compares answers of the text
    part, of full training and of adapters, and the tensors of all."""
    base, run, out = bases("gemma3"), tmp_path / "runs" / "run", tmp_path / "exported"
    train_here(write_recipe(text_recipe(recipe, base, checkpoint={"every_steps": STEPS})))
    export_run(run, ExportOptions(step=str(STEPS), out=out), QUIET)
    assert_gate_bites(out, run)
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (out, run / "model"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert json.loads((out / "config.json").read_text()) == json.loads((base / "config.json").read_text())
    values = text_recipe(recipe, base, mode="lora", lora={"rank": 4}, checkpoint={"every_steps": STEPS})
    train_here(write_recipe(values), "run.name=lora")
    export_run(tmp_path / "runs" / "lora", ExportOptions(step=str(STEPS), out=tmp_path / "lora"), QUIET)
    assert_gate_bites(tmp_path / "lora", tmp_path / "runs" / "lora")


def assert_gate_bites(export: Path, run: Path) -> None:
    """It passes as it is, and not with another weight of the tower or of the text part, which is put back."""
    written = json.loads((export / "verify.json").read_text())
    assert written["passed"], written
    assert written["kl_mean"] < 1e-10
    file = export / "model.safetensors"
    right, state = file.read_bytes(), load_file(file)
    tower = next(name for name in state if "vision" in name and name.endswith("weight"))
    values = next(name for name in state if "language_model" in name and "layers.0.self_attn.v_proj" in name)
    for name in (tower, values):
        save_file({**state, name: state[name].flip(0).contiguous()}, file, metadata={"format": "pt"})
        with pytest.raises(RunFailure, match="KL" if name == values else "weights: .*vision"):
            verify_run(export, run, None, None, 8, QUIET)
    file.write_bytes(right)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["full", "lora"])
def test_a_head_of_scores_makes_a_text_model(
    recipe: dict[str, Any], write_recipe: Any, bases: Any, tmp_path: Path, mode: str
) -> None:
    rows = tiny.write_rows(tmp_path / "pairs.jsonl", tiny.preferences(60))
    data = {"train": [{"path": str(rows), "format": "preference"}], "max_length": 128}
    values = text_recipe(recipe, bases("mistral3"), mode=mode, objective={"name": "reward"}, data=data)
    train_here(write_recipe({**values, "lora": {"rank": 4}} if mode == "lora" else values))
    run = tmp_path / "runs" / "run"
    result = run / "model" if mode == "full" else merge_adapter(run, tmp_path / "merged")
    model, said = AutoModelForSequenceClassification.from_pretrained(result, output_loading_info=True)
    assert (type(model).__name__, model.config.model_type) == ("MistralForSequenceClassification", "mistral")
    assert not said["missing_keys"]
    assert not said["unexpected_keys"]
    scorer = load_scorer(run).model
    ids = torch.arange(3, 30)[None]
    torch.testing.assert_close(model.eval()(input_ids=ids).logits, scorer(input_ids=ids).logits, rtol=1e-5, atol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("folder", RECIPES)
def test_recipes_that_ship(made: Path, bases: Any, tmp_path: Path, folder: str) -> None:
    base, run = bases(RECIPES[folder]), tmp_path / f"{folder}-lora"
    train_here(ROOT / "recipes" / folder / "lora.yaml", *tiny_overrides(made, base, tmp_path))
    assert len(losses_of(run)) == 2
    merge_adapter(run, tmp_path / "merged")
    assert load_file(tmp_path / "merged" / "model.safetensors").keys() == load_file(base / "model.safetensors").keys()


def test_nothing_but_text_is_in_memory(recipe: dict[str, Any], write_recipe: Any, bases: Any) -> None:
    loaded = load_recipe(write_recipe(text_recipe(recipe, bases("gemma3"), mode="lora", lora={"rank": 4})))
    config = model_config(loaded.model)
    model = load_model(
        loaded, Base.of(loaded, config), attention_for(loaded, config, "cpu"), Placement("load", torch.device("cpu"))
    )
    assert config.model_type == "gemma3_text"
    plain = AutoModelForCausalLM.from_config(config)
    adapters = sum(p.numel() for n, p in model.named_parameters() if ".lora_" in n)
    assert sum(p.numel() for p in model.parameters()) - adapters == sum(p.numel() for p in plain.parameters())


def test_what_cannot_be_is_refused(recipe: dict[str, Any], write_recipe: Any, bases: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="give its text part alone, `model_type: mistral`"):
        model_config(Model(config=tiny.MULTIMODAL["mistral3"], tokenizer="x"))
    quantised = tiny.save_multimodal(tmp_path, "gemma3")
    settings = json.loads((quantised / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps({**settings, "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(UserError, match="stored quantized"):
        text_part_of(Model(name=str(quantised)))
    tied = tiny.save_multimodal(tmp_path / "tied", "mistral3", text_config=tied_text(), tie_word_embeddings=True)
    assert model_config(Model(name=str(tied))).tie_word_embeddings


def tied_text() -> dict[str, Any]:
    return {**tiny.MULTIMODAL["mistral3"]["text_config"], "tie_word_embeddings": True}
