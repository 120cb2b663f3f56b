"""Memory and FLOPs of models with their tower against real tensors and torch's own count."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch
import yaml
from counted_flops import added_product
from torch.utils.flop_counter import FlopCounterMode

from finetune.data.batch import Batch, MediaPlace, collate
from finetune.data.media.family_table import family_of
from finetune.engine.base import StorageCounter
from finetune.engine.launch import Launch
from finetune.features import load_recipe
from finetune.models.attention import attention_for
from finetune.models.base_config import dtypes
from finetune.models.base_model import Base
from finetune.models.flops import Flops, ModelFlops, model_flops
from finetune.models.loss_model import CausalLMWithLoss
from finetune.models.towers import TowerPart, image_tokens, part_of, patches_of, row_positions
from finetune.models.weights import Placement, fuse_adapters, keep_input_types, load_model
from finetune.objectives import make_objective
from finetune.objectives.forward import ForwardPass
from finetune.plan.images import SeenFile, most_images
from finetune.plan.memory import phases_of
from finetune.plan.meter import Meter
from finetune.plan.micro_batch import HeaviestBatch, examples_of
from finetune.plan.shapes import costs_at
from finetune.recipe import Recipe

LENGTH = 128
CELLS = {
    "smolvlm": ["train.precision=bf16"],
    "qwen3_vl": ["mode=lora", "lora={rank: 4, alpha: 8}", "model.train=[language]", "train.precision=bf16"],
    "mistral3": ["train.activation_checkpointing=true"],
}


@pytest.fixture(
    scope="module", params=["smolvlm", *(pytest.param(name, marks=pytest.mark.long) for name in [*CELLS][1:])]
)
def recipe(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    folder = tmp_path_factory.mktemp("seeing")
    values = {
        "run": {"name": "run", "dir": str(folder)},
        "model": {
            "name": str(tiny.save_seeing(folder, request.param)),
            "train": ["language", "projector", "tower"],
        },
        "mode": "full",
        "data": {"train": [{"path": "rows.jsonl", "format": "messages"}], "max_length": LENGTH, "image": {}},
        "batch": {"rows": 1, "rows_per_device": 1},
        "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.0},
        "train": {"max_steps": 1, "precision": "fp32"},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    return load_recipe(folder / "recipe.yaml", CELLS[request.param])


def heaviest(config: Any) -> HeaviestBatch:
    """Two documents, with two images and with one."""
    each = image_tokens(config, [6])[0]
    one = SeenFile("image", each)
    return HeaviestBatch((LENGTH, LENGTH), 2 * (LENGTH - 1), ((one, one), (one,)))


def real_batch(recipe: Recipe, config: Any) -> Batch:
    batch = heaviest(config)
    pictures = family_of(config).pictures(config, [one.tokens for images in batch.images for one in images])
    places = tuple(MediaPlace(i, 0, 0) for i, images in enumerate(batch.images) for _ in images)
    made = collate(examples_of(recipe.objective, batch, {"image": config.image_token_id}))
    made = replace(made, inputs={**made.inputs, **pictures}, media=places)
    positions = row_positions(config)
    return positions(made) if positions else made


def real_model(recipe: Recipe, config: Any, fuses: bool = True) -> tuple[Any, ForwardPass, ModelFlops]:
    """As `training/run.py` makes it."""
    attention = attention_for(recipe, config, "cpu")
    model = load_model(recipe, Base.of(recipe, config), attention, Placement("load", torch.device("cpu")))
    flops = model_flops(model, attention.implementation, recipe.train.activation_checkpointing)
    types = dtypes(recipe)
    autocast = types.compute if types.compute != types.trained else None
    if autocast:
        keep_input_types(model)
    if fuses:
        fuse_adapters(model, recipe.train.activation_checkpointing)
    images = TowerPart(model, always=False)
    wrapped = CausalLMWithLoss(model, recipe.model.cross_entropy, autocast=autocast, images=images)
    return wrapped.train(), ForwardPass(attention, make_objective(recipe.objective)), flops


def test_memory_of_a_tower_is_that_of_a_run(recipe: Recipe) -> None:
    config = Base.of(recipe).config
    batch, (model, forward, _) = real_batch(recipe, config), real_model(recipe, config)
    costs = costs_at(recipe, config, Launch("replicated", 1), "cpu")
    phases, state = phases_of(costs, config, 0, (9, 0), heaviest(config), 1)
    counted = StorageCounter(torch.device("cpu")).add([*model.parameters(), *model.buffers()])
    assert state.persistent["weights"] == counted
    with Meter("cpu") as meter:
        for parameter in model.parameters():  # mapped files, which no allocator has given
            parameter.data = parameter.data.clone()
        gc.collect()
        meter.begin("forward")
        inputs = batch.map_tensors(torch.clone)
        loss = forward.objective.trial_loss(forward(model, inputs), inputs)
        meter.begin("backward")
        loss.backward()
    gradients = StorageCounter(torch.device("cpu")).add([p.grad for p in model.parameters() if p.grad is not None])
    assert state.persistent["gradients"] == gradients
    for phase in ("forward", "backward"):
        assert phases[phase] == pytest.approx(meter.peaks[phase], rel=0.08), phase


def test_a_tensor_rank_keeps_a_tower_in_full(recipe: Recipe) -> None:
    config = Base.of(recipe).config
    ranks = {"parallelism_config": {"parallelism_config_tp_size": 2}}
    whole, of_rank = (
        costs_at(recipe, config, launch, "cpu")
        for launch in (Launch("replicated", 1), Launch("replicated", 2, "tp.yaml", ranks))
    )
    numels = {weight.name: weight.numel for weight in whole.shapes.weights}
    family, divided = family_of(config), set[str]()
    for weight in of_rank.shapes.weights:
        if part_of(family, weight.name) != "language":
            assert (weight.parts, weight.numel) == (1, numels[weight.name])
        elif weight.parts == 2:
            divided.add(weight.name)
            assert 2 * weight.numel == numels[weight.name]
    assert any("down_proj" in name for name in divided)
    (phases, state), (_, full) = (
        phases_of(costs, config, 0, (9, 0), heaviest(config), 1) for costs in (of_rank, whole)
    )
    assert full.persistent["weights"] / 2 < state.persistent["weights"] < full.persistent["weights"]
    assert phases["backward"] > 0


def test_flops_of_a_tower_are_what_torch_counts(recipe: Recipe) -> None:
    config = Base.of(recipe).config
    batch, (model, forward, flops) = real_batch(recipe, config), real_model(recipe, config, fuses=False)
    in_place = {torch.ops.aten.addmm_: added_product}  # gradient of the head's weight, added up over chunks
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        forward.objective.trial_loss(forward(model, batch), batch).backward()
    patches = flops.patches_in(batch.inputs)
    images = [one.tokens for of_document in heaviest(config).images for one in of_document]
    assert patches["image"] == patches_of(config, images)
    lengths = (LENGTH, LENGTH)
    # torch's counter does not know the CPU's fused attention: products alone.
    towers = tuple(replace(tower, pair=Flops(0.0, 0.0)) for tower in flops.towers)
    products = replace(flops, attention=(), towers=towers)
    found = products.of(lengths, lengths, 2 * (LENGTH - 1), (), patches)
    language = products.of(lengths, lengths, 2 * (LENGTH - 1))
    torch_counts = counter.get_total_flops() - language.hardware
    assert found.hardware - language.hardware == pytest.approx(torch_counts, rel=0.02)
    assert language.model < found.model <= found.hardware


def test_the_most_images_fit_into_a_row(recipe: Recipe) -> None:
    images = most_images(recipe.data, Base.of(recipe).config)
    assert images
    assert sum(one.tokens + 1 for one in images) < recipe.data.max_length
