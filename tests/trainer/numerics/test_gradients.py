"""Loss and gradient of one step against the plainest possible reference: one process, one document at a time, fp64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from finetune.data.batch import Batch
from finetune.data.dataset import build_dataset
from finetune.data.loader import Loader
from finetune.models.attention import AttentionChoice, attention_for
from finetune.models.base_model import Base
from finetune.models.config import model_config
from finetune.models.loss_model import CausalLMWithLoss
from finetune.models.weights import Placement, load_model
from finetune.objectives import make_objective
from finetune.objectives.forward import ForwardPass
from finetune.recipe import load_recipe
from finetune.recipe.schema import ObjectiveSettings, Recipe

CPU = torch.device("cpu")


def loader(recipe: Recipe, rank: int = 0, world_size: int = 1) -> Loader:
    data = build_dataset(recipe, recipe.data.train, Base.of(recipe).renderer(recipe.objective))
    batch = recipe.batch
    return Loader(data.in_order(recipe), batch.rows, batch.rows_per_device, rank, world_size, 10**6)


def forward_of(choice: AttentionChoice) -> ForwardPass:
    return ForwardPass(choice, make_objective(ObjectiveSettings()))


def reference(made: Path, batches: list[Batch]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Mean negative log-likelihood over all supervised tokens, and its gradient; every document by itself, fp64."""
    model = AutoModelForCausalLM.from_pretrained(made / "llama", dtype=torch.float64)
    losses, count = [], 0
    for batch in batches:
        labels = torch.full_like(batch.inputs["input_ids"], -100)
        labels[0, batch.targets.positions + 1] = batch.targets.ids
        lengths = batch.sequence_lengths
        documents = zip(batch.inputs["input_ids"].split(lengths, 1), labels.split(lengths, 1), strict=True)
        for ids, expected in documents:
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
            losses.append(cross_entropy(logits, expected[0, 1:], ignore_index=-100, reduction="sum"))
            count += int((expected[0, 1:] != -100).sum())
    loss = torch.stack(losses).sum() / count
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("attention", ["documents", "sdpa", "eager"])
@pytest.mark.parametrize("rows_per_device", [1, 2, 4])
def test_accumulated_gradient_is_the_full_batch_s(
    made: Path, recipe: dict[str, Any], write_recipe: Any, attention: str, rows_per_device: int
) -> None:
    recipe["batch"]["rows_per_device"] = rows_per_device
    recipe["model"]["attention"] = attention
    loaded = load_recipe(write_recipe(recipe))
    config = model_config(loaded.model)
    choice = attention_for(loaded, config, "cpu")
    model = load_model(loaded, Base.of(loaded, config), choice, Placement("load", CPU))
    forward, loss_model = forward_of(choice), CausalLMWithLoss(model)
    batches = loader(loaded).step(0).batches
    items = sum(batch.counts["target_tokens"] for batch in batches)
    loss = torch.zeros(())
    for batch in batches:
        part = forward(loss_model, batch).total / items
        part.backward()
        loss += part.detach()
    wanted, gradients = reference(made, batches)
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-6, atol=0)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad.double(), gradients[name], rtol=1e-5, atol=1e-7, msg=name)


def test_a_batch_with_nothing_supervised_has_no_loss_and_no_gradient(recipe: dict[str, Any], write_recipe: Any) -> None:
    """The filler of a run's last step: every rank has a forward, nothing is trained."""
    loaded = load_recipe(write_recipe(recipe))
    config = model_config(loaded.model)
    choice = attention_for(loaded, config, "cpu")
    model = load_model(loaded, Base.of(loaded, config), choice, Placement("load", CPU))
    forward, loss_model = forward_of(choice), CausalLMWithLoss(model)
    whole = loader(loaded)
    short = Loader(whole.rows, 4, 2, rank=1, world_size=2, total_rows=1)
    (batch,) = short.step(0).batches
    assert batch.counts["target_tokens"] == 0
    loss = forward(loss_model, batch).total
    loss.backward()
    assert loss.item() == 0.0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_only_supervised_positions_reach_the_head(recipe: dict[str, Any], write_recipe: Any) -> None:
    loaded = load_recipe(write_recipe(recipe))
    config = model_config(loaded.model)
    choice = attention_for(loaded, config, "cpu")
    model = load_model(loaded, Base.of(loaded, config), choice, Placement("load", CPU))
    forward, loss_model = forward_of(choice), CausalLMWithLoss(model)
    seen: list[int] = []
    model.get_output_embeddings().register_forward_pre_hook(lambda _m, inputs: seen.append(inputs[0].shape[1]))
    batch = loader(loaded).step(0).batches[0]
    forward(loss_model, batch)
    assert seen == [batch.counts["target_tokens"]]
    assert batch.counts["target_tokens"] < batch.counts["tokens"]
