"""The memory estimate against real tensors: what a rank keeps, to the byte; layers that are multiplied."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hearing
import mtp_bases
import pytest
import stored
import tiny
import torch
import yaml
from conftest import ROOT
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
from usual import usual

from finetune.engine.base import StorageCounter
from finetune.engine.costs import ModelSize, Shapes, Weight, costs_of
from finetune.engine.costs.common import weights_of_stage
from finetune.engine.launch import Launch, read_config_file
from finetune.engine.muon import orthogonalized
from finetune.engine.parallelism import Parallelism
from finetune.engine.stages import holders, lay_out
from finetune.errors import UserError
from finetune.features import load_recipe
from finetune.models.attention import attention_for
from finetune.models.base_config import without_weights
from finetune.models.base_model import Base
from finetune.models.mtp import attach_without_weights
from finetune.models.packed_linear import state_tensors
from finetune.models.parameter_roles import parameter_roles
from finetune.models.weights import Placement, load_model
from finetune.plan import tables
from finetune.plan.comparison import compare_run
from finetune.plan.memory import HeaviestBatch, Place, estimate_memory
from finetune.plan.meter import together
from finetune.plan.micro_batch import How, attention_at, model_at
from finetune.plan.shapes import costs_at, shapes_of, shortened
from finetune.plan.tables import config_and_source, shipped_config
from finetune.plan.timeline import timeline_of
from finetune.recipe import Recipe
from finetune.training.optim import build_optimizers

ALONE = Launch("replicated", 1)
MODELS = yaml.safe_load((Path(tables.__file__).parent / "models.yaml").read_text(encoding="utf-8"))["models"]


@pytest.fixture
def recipe(made: Path, tmp_path: Path) -> Any:
    def load(*overrides: str) -> Recipe:
        values = {
            "run": {"name": "run", "dir": str(tmp_path)},
            "model": {"name": str(made / "llama")},
            "mode": "full",
            "data": {"train": [{"path": str(made / "rows.jsonl"), "format": "messages"}], "max_length": 64},
            "batch": {"rows": 8, "rows_per_device": 1},
            "optimizer": {"lr": 1e-3},
            "train": {"max_steps": 6, "precision": "bf16"},
        }
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
        return load_recipe(tmp_path / "recipe.yaml", list(overrides))

    return load


@pytest.mark.parametrize(
    "overrides",
    [
        ("mode=full",),
        ("mode=full", "train.precision=bf16_true"),
        ("mode=lora", "lora={rank: 4, alpha: 8}"),
        ("mode=qlora", "lora={rank: 4, alpha: 8}", "quantization={type: nf4}"),
        ("mode=qlora", "lora={rank: 4, alpha: 8}", "quantization={type: fp8}"),
        ("mode=full", "optimizer={name: sgd, lr: 0.1, momentum: 0.9}"),
        ("mode=full", "optimizer={name: muon, lr: 0.1}"),
    ],
    ids=" ".join,
)
def test_state_is_that_of_real_tensors(recipe: Any, overrides: tuple[str, ...]) -> None:
    loaded = recipe(*overrides)
    config = Base.of(loaded).config
    model = load_model(
        loaded, Base.of(loaded, config), attention_for(loaded, config, "cpu"), Placement("load", torch.device("cpu"))
    )
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    optimizers = build_optimizers(loaded.optimizer, parameter_roles(model), trained)
    for _, parameter in trained:
        parameter.grad = torch.ones_like(parameter)
    for optimizer in optimizers:
        optimizer.step()
    counter = StorageCounter(torch.device("cpu"))
    scales = [tensor for module in model.modules() for _, tensor in state_tensors(module)]
    real = {
        "weights": counter.add([*model.parameters(), *model.buffers(), *scales]),
        "gradients": counter.add([parameter.grad for _, parameter in trained if parameter.grad is not None]),
        "optimizer state": counter.add(
            value
            for optimizer in optimizers
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        ),
    }
    state = costs_at(loaded, config, ALONE, "cpu").state(0).persistent
    assert {name: state[name] for name in real} == real


@pytest.mark.parametrize(("kind", "processes"), [("replicated", 2), ("fsdp2", 1), ("fsdp2", 4), ("zero", 4)])
def test_matrices_that_muon_gathers_are_in_memory_and_traffic(recipe: Any, kind: Any, processes: int) -> None:
    loaded, launch = recipe("optimizer={name: muon, lr: 0.1}"), Launch(kind, processes)
    shapes = Shapes(
        (Weight("tall", (30, 8), 4, True, 0, "layer"), Weight("wide", (2, 6), 4, True, 0, "layer")), 0, 0, 1
    )
    costs = costs_of(loaded, launch, shapes, "cpu", lambda *_: (0, 0))
    assert costs.orthogonalizing() == 8 * 240 + 4 * 8**2
    counted = []
    for weight in shapes.weights:
        with FlopCounterMode(display=False) as counter:
            orthogonalized(torch.randn(weight.shape))
        counted.append(counter.get_total_flops())
    # One rank, or each of several that hold copies, has both matrices; else the larger is the busiest rank's.
    assert costs.orthogonalizing_flops() == (sum if costs.owners == 1 else max)(counted)
    size = ModelSize(252, 252, 0, 0, 0, 2, 2, 2, 1, 8, 8, 8, 0)
    sent = [one.moved for one in costs.transfers_of_weights(size, 1) if one.kind == "all-to-all"]
    # bf16, there and back, of this rank's quarter to three others
    assert sent == ([] if kind == "replicated" or processes == 1 else [2 * 2 * 252 / 4 * 3 / 4])
    assert costs_of(recipe(), launch, shapes, "cpu", lambda *_: (0, 0)).orthogonalizing() == 0


@pytest.mark.parametrize("rows", [1, 5, 8])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_rows_are_cut_as_torch_cuts_them(recipe: Any, rows: int, ranks: int) -> None:
    weight, launch = Weight("w", (rows, 3), 4, True, 0, "layer"), Launch("fsdp2", ranks)
    costs = costs_of(recipe(), launch, Shapes((weight,), 0, 0, 1), "cpu", lambda *_: (0, 0))
    chunks = torch.arange(rows * 3).view(rows, 3).chunk(ranks)
    for rank in range(ranks):
        shard = costs.shard(weight, launch.parallelism.coordinates(rank))
        assert shard.numel == (chunks[rank].numel() if rank < len(chunks) else 0)
        assert shard.padded == chunks[0].numel()


@pytest.mark.parametrize("name", ["llama_tied", "llama_deep", "mistral", "qwen3", "mixtral", "qwen3_5"])
def test_layers_that_are_multiplied_are_all_layers(recipe: Any, name: str) -> None:
    settings = {**tiny.MODELS[name], "num_hidden_layers": 4}
    if "layer_types" in settings:
        settings["layer_types"] = settings["layer_types"] * 2
    config = AutoConfig.for_model(**settings)
    full = {name: parameter.numel() for name, parameter in without_weights(config).named_parameters()}
    if config.tie_word_embeddings:
        del full["lm_head.weight"]
    assert {weight.name: weight.numel for weight in shapes_of(recipe(), config).weights} == full


def test_layers_that_take_the_keys_of_others_are_counted_as_they_are(recipe: Any) -> None:
    """Gemma 4 E2B: the last layers have no keys and values, and are twice as wide."""
    config = AutoConfig.for_model(**hearing.HEARING["gemma4"].config["text_config"], use_double_wide_mlp=True)
    full = {name: parameter.numel() for name, parameter in without_weights(config).named_parameters()}
    del full["lm_head.weight"]  # tied
    assert {weight.name: weight.numel for weight in shapes_of(recipe(), config).weights} == full


@pytest.mark.parametrize(
    "name", ["llama4-scout", "mistral-large-4", "nemotron-nano-9b-v2", "granite4-h-micro", "gemma4-31b"]
)
def test_one_layer_of_each_kind_stands_for_a_model_of_many_kinds(name: str) -> None:
    """Kinds that the config tells apart: dense and sparse, with rotary positions or without, Mamba, wider heads."""
    loaded = load_recipe(ROOT / "recipes" / name / "lora.yaml", [])
    if name == "mistral-large-4" and "mistral_large4_text" not in CONFIG_MAPPING:
        with pytest.raises(UserError, match=r"has no `mistral_large4_text`\. Fix: pip install -U transformers"):
            shipped_config(loaded.model.name or "")
        return
    config = shipped_config(loaded.model.name or "")
    assert config is not None
    kept = [weight.numel for weight in shapes_of(loaded, config).weights if not weight.trains]
    facts = next(facts for key, facts in MODELS.items() if loaded.model.name in (key, *facts.get("also", ())))
    assert sum(kept) == facts["parameters"]
    assert shortened(config)[0].get_text_config().num_hidden_layers <= 4


def test_a_reward_and_a_preference_need_no_files() -> None:
    for name in ("reward-full", "dpo-full"):
        loaded = load_recipe(ROOT / "recipes" / "llama3.1-8b" / f"{name}.yaml", ["data.max_length=64"])
        place, batch = Place(ALONE, 1), HeaviestBatch.of_rows(1, 64)
        memory = estimate_memory(loaded, config_and_source(loaded)[0], place, batch)
        assert memory.persistent["weights"] > 4 * 7.5e9


def test_recomputing_and_fewer_rows_take_less(recipe: Any) -> None:
    def peak(*overrides: str, rows: int = 1) -> int:
        loaded = recipe("mode=full", *overrides)
        batch = HeaviestBatch.of_rows(8 * rows, 64)
        memory = estimate_memory(loaded, Base.of(loaded).config, Place(ALONE, 1, "cpu"), batch)
        return max(memory.phases["forward"], memory.phases["backward"])

    keeps = peak("train.activation_checkpointing=false")
    recomputes = peak("train.activation_checkpointing=true")
    assert recomputes < peak("train.activation_checkpointing=selective") <= keeps
    assert peak("train.activation_checkpointing=false", rows=2) > keeps


def test_graphs_keep_gradients_through_the_forward(recipe: Any, made: Path) -> None:
    """With one micro-batch a step, where they would not be there yet."""

    def estimate(graphs: str, device: str) -> Any:
        place, config = Place(ALONE, 1, device, (9, 0), 80.0), AutoConfig.from_pretrained(made / "llama")
        changes = (f"train.graphs={graphs}", "train.activation_checkpointing=false", "train.precision=bf16")
        return estimate_memory(recipe(*changes), config, place, HeaviestBatch.of_rows(1, 64), 1)

    without = estimate("off", "cuda")
    more = estimate("auto", "cuda").phases["forward"] - without.phases["forward"]
    assert more == without.persistent["gradients"] > 0
    assert estimate("auto", "cpu").phases == estimate("off", "cpu").phases


# dynamo looks at it, behind a filter of its own that pytest's "error" overrules.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_layers_of_a_run_are_compiled_after_its_memory_was_estimated(recipe: Any, made: Path) -> None:
    """As a run on a GPU does. torch leaves code alone for good that it met under a dispatch mode first."""
    place = Place(ALONE, 1, "cuda", (9, 0), 80.0)
    torch.compiler.reset()
    estimate_memory(
        recipe("train.compile=true"), AutoConfig.from_pretrained(made / "llama"), place, HeaviestBatch.of_rows(1, 64), 1
    )
    model = AutoModelForCausalLM.from_pretrained(made / "llama")
    graphs: list[Any] = []
    forward = torch.compile(
        model.model.layers[0].forward, backend=lambda graph, _: graphs.append(graph) or graph.forward
    )
    hidden = torch.zeros(1, 8, model.config.hidden_size)
    forward(hidden, position_embeddings=model.model.rotary_emb(hidden, torch.arange(8)[None]))
    torch.compiler.reset()
    (graph,) = graphs
    products = [node for node in graph.graph.nodes if node.target is torch.nn.functional.linear]
    assert len(products) == 7


def test_fp8_is_weighed_with_its_packed_operands(recipe: Any) -> None:
    """As bf16 it would have the casts and scales of no operand."""
    loaded, how = recipe("train.precision=fp8"), How()
    if find_spec("torchao") is None:
        with pytest.raises(UserError, match=r"needs torchao\. Fix: pip install 'torchao"):
            model_at(loaded, Base.of(loaded).config, attention_at(loaded, Base.of(loaded).config, how), how)
        return
    moved = []
    for one in (loaded, recipe("train.precision=bf16")):
        parts = timeline_of(one, Base.of(one).config, HeaviestBatch.of_rows(2, 64), how)
        moved.append(together([part.work for part in (*parts.layers, *parts.layers_backward)]).bytes)
    assert moved[0] > 1.2 * moved[1]


@pytest.mark.parametrize(
    "mode", [("objective.router_aux_loss_coef=0.02",), ("mode=lora", "lora={rank: 4, alpha: 8, targets: [q_proj]}")]
)
def test_experts_have_an_estimate_in_every_type(recipe: Any, made: Path, mode: tuple[str, ...]) -> None:
    """torch knows the shapes of grouped products in bf16 alone."""

    def peak(precision: str) -> int:
        loaded = recipe(*mode, f"model.name={made / 'mixtral'}", f"train.precision={precision}")
        batch = HeaviestBatch.of_rows(8, 64)
        return estimate_memory(loaded, Base.of(loaded).config, Place(ALONE, 1), batch).phases["backward"]

    assert 0 < peak("bf16") < peak("fp32") < 3 * peak("bf16")


def test_a_rank_of_expert_parallel_gathers_its_own_experts(recipe: Any, made: Path) -> None:
    """Half of a layer's where two share them: gathered in bf16, reduced in fp32."""
    loaded = recipe("mode=full", f"model.name={made / 'mixtral'}")
    config, batch = Base.of(loaded).config, HeaviestBatch.of_rows(1, 64)
    experts = sum(w.numel for w in shapes_of(loaded, config).weights if w.expert and w.layer == 0)
    assert experts > 0
    peaks = {
        name: estimate_memory(
            loaded, config, Place(read_config_file(str(ROOT / "accelerate_configs" / f"{name}.yaml"), 4), 4), batch
        ).phases["backward"]
        for name in ("fsdp2", "ep")
    }
    assert peaks["fsdp2"] - peaks["ep"] > experts // 2 * (2 + 4)


def test_what_ranks_read_is_in_the_hosts_memory(recipe: Any, made: Path, tmp_path: Path) -> None:
    """Bytes of a base that stays as it is stored, until they are sharded: on rank 0 under FSDP2, on every rank under
    ZeRO-3. The files of a plain base are not copied."""
    base, plain = stored.store(made / "llama", tmp_path, "fp8")

    def reading(name: str, folder: Path) -> tuple[int, list[Weight]]:
        loaded = recipe("mode=lora", "lora={rank: 4, alpha: 8}", f"model.name={folder}")
        config = Base.of(loaded).config
        launch = read_config_file(str(ROOT / "accelerate_configs" / f"{name}.yaml"), 4)
        memory = estimate_memory(loaded, config, Place(launch, 2), HeaviestBatch.of_rows(1, 64))
        return memory.reading, list(shapes_of(loaded, config).weights)

    read, weights = reading("fsdp2", base)
    assert any(weight.packed for weight in weights)
    assert read == sum(weight.bytes for weight in weights if weight.packed or weight.trains)
    read, weights = reading("zero3", base)
    assert read == 2 * sum(weight.bytes for weight in weights)  # two processes on each machine
    read, weights = reading("fsdp2", plain)
    assert read == sum(weight.bytes for weight in weights if weight.trains)
    assert reading("zero3", plain)[0] == 0


def test_every_config_has_an_estimate(recipe: Any) -> None:
    loaded = recipe("mode=full", "batch.rows=64")
    config = Base.of(loaded).config
    for file in sorted((ROOT / "accelerate_configs").glob("*.yaml")):
        launch = read_config_file(str(file), 1 if file.stem == "single" else 4 if "_" in file.stem else 2)
        if launch.parallelism.expert > 1:
            continue
        memory = estimate_memory(loaded, config, Place(launch, 4), HeaviestBatch.of_rows(1, 64), 2)
        assert memory.tensors > 0
        assert all(size >= 0 for size in memory.persistent.values()), file.stem
        assert ("offload" in file.stem or "nvme" in file.stem) == (memory.host > 0), file.stem


def test_a_folder_that_is_no_run_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not the folder of a run"):
        compare_run(tmp_path)


@pytest.mark.parametrize("mode", usual([("mode=full",), ("mode=lora", "lora={rank: 4, alpha: 8}")], ("mode=full",)))
def test_a_head_that_predicts_ahead_is_in_the_last_stage(recipe: Any, mode: tuple[str, ...], tmp_path: Path) -> None:
    """Every weight, and each where the engine has it: the embedding at both ends."""
    base = mtp_bases.save_base(tmp_path, "glm4_moe", num_hidden_layers=4)
    loaded = recipe(f"model.name={base}", "model.mtp=train", *mode)
    config = Base.of(loaded).config
    attention = attention_for(loaded, config, "cpu")
    model = load_model(loaded, Base.of(loaded, config), attention, Placement("load", torch.device("cpu")))
    shapes, sizes = shapes_of(loaded, config), Parallelism(pipeline=2)
    named = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert {weight.name: weight.shape for weight in shapes.weights} == named
    skeleton = without_weights(config)
    attach_without_weights(skeleton, torch.float32)
    layout = lay_out(skeleton, 2, 2)
    held = holders(model, layout)
    for rank in range(2):
        ours = {weight.name for weight in weights_of_stage(shapes, sizes, rank)}
        assert ours == {name for name in named if rank in held[name]}
    timeline = timeline_of(loaded, config, HeaviestBatch((32, 32), 40), How())
    without = timeline_of(recipe(f"model.name={base}", *mode), config, HeaviestBatch((32, 32), 40), How())
    assert timeline.head.kept > without.head.kept
