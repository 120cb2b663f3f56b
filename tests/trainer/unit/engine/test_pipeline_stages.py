"""Where a model is cut, what a stage holds, and which pipelines are refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from repository import ROOT
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, LlamaForCausalLM

from finetune.engine.compatibility import check_launch
from finetune.engine.launch import Launch, read_config_file
from finetune.engine.stage_cache import stage_cache
from finetune.engine.stage_trial import stage_problem
from finetune.engine.stages import Layout, StageModel, holders, keep_only, lay_out, stage_bounds
from finetune.errors import UserError
from finetune.models.activations import recompute_activations
from finetune.models.base_config import without_weights
from finetune.models.dropout import seed_generators, seed_layers, seed_micro_batch
from finetune.models.loss_model import CausalLMWithLoss
from finetune.models.remote_code import from_config
from finetune.recipe import load_recipe


@pytest.mark.parametrize(
    ("stages", "layers"), [(2, [16, 16]), (4, [7, 9, 9, 7]), (8, [2, 4, 4, 5, 5, 5, 5, 2]), (32, [1] * 32)]
)
def test_ends_of_an_8b_llama_have_fewer_layers(stages: int, layers: list[int]) -> None:
    """Embedding and head weigh 2.4 layers each."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256}
    config = AutoConfig.for_model("llama", **sizes, num_attention_heads=32, num_key_value_heads=8)
    layout = lay_out(without_weights(config), stages, stages)
    assert [len(layout.layers(stage)) for stage in range(stages)] == layers


def test_a_cut_is_the_best_of_all_cuts() -> None:
    layers, first, last = [3, 1, 4, 1, 5, 9, 2], 4, 6

    def costs(bounds: tuple[int, ...]) -> list[int]:
        found = [sum(layers[a:b]) for a, b in pairwise(bounds)]
        return [found[0] + first, *found[1:-1], found[-1] + last]

    for stages in range(2, 8):
        every = [(0, *inner, 7) for inner in combinations(range(1, 7), stages - 1)]
        best = min((max(costs(bounds)), sum(cost**2 for cost in costs(bounds))) for bounds in every)
        found = costs(stage_bounds(tuple(layers), stages, first, last))
        assert (max(found), sum(cost**2 for cost in found)) == best


def test_stages_go_round_the_ranks() -> None:
    layout = Layout((0, 1, 3, 4, 6), ranks=2)
    assert [list(layout.stages_of(rank)) for rank in range(2)] == [[0, 2], [1, 3]]
    assert [layout.layers_of(rank) for rank in range(2)] == [{0, 3}, {1, 2, 4, 5}]


def model_of(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize("name", sorted(tiny.MODELS))
def test_stages_one_after_another_are_the_model(made: Path, name: str) -> None:
    whole = model_of(made / name).eval()
    layout, ids = lay_out(whole, 2, 2), torch.arange(3, 12)[None]
    arguments = {"input_ids": ids, "position_ids": torch.arange(9)[None], "use_cache": False}
    hidden: Any = None
    names, stages = set(), list[StageModel]()
    for rank in range(2):
        model = model_of(made / name).eval()
        held = holders(model, layout)
        keep_only(model, lambda one, rank=rank, held=held: rank in held[one], torch.device("cpu"))
        assert list(model.state_dict()) == list(whole.state_dict())
        names |= {one for one, parameter in model.named_parameters(remove_duplicate=False) if not parameter.is_meta}
        stages.append(StageModel(CausalLMWithLoss(model), layout, rank, torch.float32))
        with torch.no_grad():
            hidden = stages[-1].run(arguments, hidden)  # in the last stage the model's output
    assert torch.equal(hidden.logits, whole(**arguments).logits)
    assert names == {one for one, _ in whole.named_parameters(remove_duplicate=False)}
    assert_same_with_caches(whole, layout, stages)


@torch.no_grad()
def assert_same_with_caches(whole: Any, layout: Layout, stages: list[StageModel]) -> None:
    """Two prompts, the second padded at the left, and two tokens more, beyond the window of models that have one."""
    caches = {rank: stage_cache(whole.config, layout, rank) for rank in range(2)}
    own, mask = DynamicCache(config=whole.config), torch.tensor([[1] * 9, [0] * 4 + [1] * 5])
    for ids in (torch.arange(3, 21).reshape(2, 9), torch.tensor([[7], [8]]), torch.tensor([[9], [4]])):
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        arguments = {"input_ids": ids, "position_ids": positions, "attention_mask": mask, "use_cache": True}
        hidden: Any = None
        for stage in stages:
            hidden = stage.run({**arguments, "past_key_values": caches}, hidden)
        assert torch.equal(hidden.logits, whole(**arguments, past_key_values=own).logits)
        mask = torch.cat([mask, mask.new_ones(2, 1)], 1)


def test_seeds_are_those_of_torch() -> None:
    torch.manual_seed(5 << 40)
    drawn = torch.rand(3)
    seed_generators(5 << 40)
    assert torch.equal(torch.rand(3), drawn)
    assert torch.initial_seed() == 5 << 40


def test_stages_draw_the_dropout_of_the_whole_model() -> None:
    """In each layer; and a layer that is computed again, by when others have drawn, draws the same."""
    shape = {**tiny.MODELS["llama"], "num_hidden_layers": 4, "attention_dropout": 0.3}
    torch.manual_seed(0)
    whole = from_config(AutoModelForCausalLM, AutoConfig.for_model(**shape), dtype=torch.float32)
    seed_layers(whole)
    wrapped, layout = CausalLMWithLoss(whole.train(), "plain"), Layout((0, 1, 3, 4), 3)
    arguments = {"input_ids": torch.arange(3, 12)[None], "position_ids": torch.arange(9)[None], "use_cache": False}

    def computed(stages: list[StageModel]) -> tuple[torch.Tensor, torch.Tensor]:
        hidden: Any = None
        whole.zero_grad()
        for stage in stages:
            seed_micro_batch(42, 3, 1)
            hidden = stage.run(arguments, hidden)
        hidden.logits.square().mean().backward()
        return hidden.logits.detach(), whole.model.layers[2].self_attn.q_proj.weight.grad.clone()

    undivided = computed([StageModel(wrapped, Layout((0, 4), 1), 0, torch.float32)])
    divided = computed([StageModel(wrapped, layout, stage, torch.float32) for stage in range(3)])
    recompute_activations(whole, True)
    again = computed([StageModel(wrapped, layout, stage, torch.float32) for stage in range(3)])
    seed_micro_batch(42, 3, 2)
    other = wrapped(**arguments).logits
    for one in (divided, again):
        assert all(torch.equal(a, b) for a, b in zip(one, undivided, strict=True))
    assert not torch.allclose(other, undivided[0])


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ({**tiny.MODELS["llama"], "model_type": "granite", "embedding_multiplier": 2.0}, None),  # before the layers
        ({"model_type": "gemma2"}, None),
        ({"model_type": "gemma2", "vocab_size": 30}, None),  # of characters or amino acids
        ({"model_type": "deepseek_v3"}, None),  # its routers save buffers
        ({"model_type": "nemotron_h"}, None),
        ({"model_type": "lfm2", "layer_types": ["conv", "full_attention"] * 16}, None),
        ({"model_type": "phi"}, None),  # no plan of transformers
        ({"model_type": "gemma4_text"}, r"weights outside of its layers \(.*embed_tokens_per_layer"),
        ({"model_type": "zamba2"}, "stages give other logits"),  # its layers read the first one's input
        (
            {**tiny.MODELS["qwen3_moe"], "model_type": "qwen4_exp_text", "hc_count": 4},
            "a layer hands on 256 features of a token, not `hidden_size`, 64",
        ),
        ({"model_type": "gpt2"}, "GPT2Model has no `layers`"),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else None,
)
def test_a_trial_says_which_models_stages_can_hold(shape: dict[str, Any], reason: str | None) -> None:
    found = stage_problem(AutoConfig.for_model(**shape))
    assert found is None if reason is None else re.search(reason, found or "")


def test_layout_of_a_model_whose_body_has_another_name_than_its_prefix() -> None:
    """As Llama 4's, and without the trial, whose outcome is remembered."""

    class Renamed(LlamaForCausalLM):
        base_model_prefix = "language_model"

    assert lay_out(Renamed(AutoConfig.for_model(**tiny.MODELS["llama"])), 2, 2).stages == 2


# --- rules


def refused(
    write_recipe: Callable[..., Path], recipe: dict[str, Any], processes: int, kind: Any = "replicated", **keys: Any
) -> str:
    block = {f"parallelism_config_{key}": value for key, value in keys.items()}
    launch = Launch(kind, processes, "it.yaml", {"parallelism_config": block})
    config = AutoConfig.for_model(**tiny.MODELS["llama"])
    with pytest.raises(UserError) as error:
        check_launch(load_recipe(write_recipe(recipe)), "recipe.yaml", launch, config)
    return str(error.value)


@pytest.mark.parametrize(
    ("keys", "processes", "says"),
    [
        (
            {"pp_size": 4},
            4,
            "4 stages need as many layers, and the model has 2: set it to 2 or less",
        ),
        (
            {"pp_size": 2, "pp_schedule": "interleaved", "pp_stages_per_rank": 2},
            2,
            "4 stages need as many layers, and the model has 2: set it to 1 or less",
        ),
        ({"pp_size": 2, "pp_schedule": "interleaved"}, 2, "needs `parallelism_config_pp_stages_per_rank: 2` or more"),
        ({"pp_size": 2, "pp_stages_per_rank": 2}, 2, "`interleaved` or `zero_bubble` only: remove it"),
        ({"pp_stages_per_rank": 2}, 2, "has an effect with a pipeline and"),
        (
            {"pp_size": 2, "tp_size": 4},
            8,
            "`parallelism_config_tp_size: 4` must divide the 4 attention heads and the 2 key-value heads: set it to 2",
        ),
        (
            {"pp_size": 2, "dp_shard_size": 2},
            4,
            "`parallelism_config_dp_shard_size: 2`: `distributed_type: MULTI_GPU` shards nothing: use fsdp2",
        ),
        (
            {"pp_size": 2, "tp_size": 3},
            8,
            "pipeline 2 x tensor 3 needs a multiple of 6 processes, not 8. Fix: launch with `--num_processes 6 or 12`",
        ),
        (
            {"pp_size": 2, "pp_schedule": "zero_bubble", "cp_size": 2},
            4,
            "`parallelism_config_pp_schedule: zero_bubble` with `parallelism_config_cp_size: 2`: ranks exchange in the "
            "backward of a layer, which this schedule splits: use `parallelism_config_pp_schedule: 1f1b`",
        ),
        (
            {"pp_size": 2, "dp_replicate_size": 2},
            4,
            "`parallelism_config_pp_schedule: 1f1b` on 2 ranks cannot run 1 micro-batches a step: "
            "set `batch.rows_per_device: 1` or `batch.rows: 8` or `parallelism_config_pp_schedule: gpipe`",
        ),
    ],
)
def test_pipelines_that_cannot_be_are_refused(
    recipe: dict[str, Any], write_recipe: Any, keys: dict[str, Any], processes: int, says: str
) -> None:
    assert says in refused(write_recipe, recipe, processes, **keys)


@pytest.mark.parametrize(
    ("section", "values", "says"),
    [
        ("optimizer", {"in_backward": True, "max_grad_norm": None}, "a pipeline needs several"),
        ("train", {"compile": True}, "torch cannot split a compiled backward"),
        ("train", {"activation_checkpointing": True}, "recomputed activations exist once"),
        ("model", {"cross_entropy": "auto"}, "has its gradients once: use `1f1b`, or `cross_entropy: plain`"),
    ],
)
def test_recipes_that_no_pipeline_can_keep_are_refused(
    recipe: dict[str, Any], write_recipe: Any, section: str, values: dict[str, Any], says: str
) -> None:
    recipe[section] = {**recipe.get(section, {}), **values}
    assert says in refused(write_recipe, recipe, 2, pp_size=2, pp_schedule="zero_bubble")


def test_automatic_rows_need_a_number_of_micro_batches_that_runs(recipe: dict[str, Any], write_recipe: Any) -> None:
    recipe["batch"] = {"rows": 1, "rows_per_device": "auto"}
    assert "cannot run 1 micro-batches a step: set `batch.rows: 2` or" in refused(write_recipe, recipe, 2, pp_size=2)


@pytest.mark.parametrize(
    ("kind", "keys", "says"),
    [
        ("zero", {"pp_size": 2}, "use pp_fsdp2, or pp"),
        ("fsdp2", {"pp_size": 2, "ep_size": 2}, "the model has no experts: remove it"),
        (
            "fsdp2",
            {"pp_size": 2, "ep_size": 3, "dp_shard_size": 2},
            "`parallelism_config_ep_size: 3` must divide the 2 shards of a model: set it to 2",
        ),
        (
            "fsdp2",
            {"pp_size": 2, "pp_schedule": "zero_bubble"},
            "set `fsdp_reshard_after_forward: false`, or `parallelism_config_pp_schedule: 1f1b`",
        ),
    ],
)
def test_shards_that_no_stage_can_have_are_refused(
    recipe: dict[str, Any], write_recipe: Any, kind: str, keys: dict[str, Any], says: str
) -> None:
    assert says in refused(write_recipe, recipe, 4, kind=kind, **keys)


@pytest.mark.parametrize(
    ("name", "summary"),
    [
        ("pp", "pipeline 2"),
        ("pp_dp", "pipeline 2 x replicate 2"),
        ("pp_fsdp2", "pipeline 2 x shard 2"),
        ("pp_tp", "pipeline 2 x tensor 2"),
        ("pp_fsdp2_tp", "pipeline 2 x shard 2 x tensor 2"),
    ],
)
def test_shipped_configs_say_a_pipeline(name: str, summary: str) -> None:
    launch = read_config_file(str(ROOT / "accelerate_configs" / f"{name}.yaml"))
    assert launch.parallelism.summary() == summary
    assert not launch.frees_gathered  # a stage is gathered once a step
