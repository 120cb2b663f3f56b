"""Synchronisations, casts and copies of weights in a micro-batch, counted on the CPU."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from finetune.data.dataset import build_training
from finetune.data.loader import Loader
from finetune.models.attention import attention_for
from finetune.models.base_config import dtypes
from finetune.models.base_model import Base
from finetune.models.config import model_config
from finetune.models.loss_model import CausalLMWithLoss
from finetune.models.weights import Placement, keep_input_types, load_model
from finetune.objectives import make_objective
from finetune.objectives.forward import ForwardPass
from finetune.recipe import load_recipe

CPU = torch.device("cpu")
LORA = {"mode": "lora", "lora": {"rank": 4, "alpha": 8, "dropout": 0.0}}
WAITS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero")


class Counted(TorchDispatchMode):
    """Calls by operator; elements of casts from a type to another, by both."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.cast = Counter[str](), Counter[tuple[torch.dtype, torch.dtype]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls[func.name()] += 1
        if func is torch.ops.aten._to_copy.default and out.dtype != args[0].dtype:
            self.cast[args[0].dtype, out.dtype] += out.numel()
        return out


Step = tuple[torch.Tensor, dict[str, torch.Tensor]]


class Case:
    """A recipe's model as a run wraps it, and a packed micro-batch."""

    def __init__(self, values: dict[str, Any], write_recipe: Any, balances: bool = False, **changes: Any):
        """balances: whether the model's config asks for a balance loss in each forward."""
        recipe = load_recipe(write_recipe({**values, **changes}))
        config, types = model_config(recipe.model), dtypes(recipe)
        if balances:
            config.output_router_logits = True
        attention = attention_for(recipe, config, "cpu")
        self.model = load_model(recipe, Base.of(recipe, config), attention, Placement("load", CPU))
        if casts := types.compute != types.trained:
            keep_input_types(self.model)
        autocast = types.compute if casts else None
        self.loss_model = CausalLMWithLoss(self.model, recipe.model.cross_entropy, autocast=autocast)
        self.forward = ForwardPass(attention, make_objective(recipe.objective, ("rows",)))
        self.batch = (
            Loader(
                build_training(recipe, Base.of(recipe).renderer(recipe.objective)).in_order(recipe), 4, 2, 0, 1, 10**6
            )
            .step(0)
            .batches[0]
        )
        assert len(self.batch.sequence_lengths) > 2

    def run(self) -> Step:
        self.model.zero_grad()
        loss = self.forward(self.loss_model, self.batch).total
        loss.backward()
        return loss.detach(), {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}


def assert_same(some: Step, other: Step) -> None:
    assert torch.equal(some[0], other[0])
    assert some[1].keys() == other[1].keys()
    assert all(torch.equal(gradient, other[1][name]) for name, gradient in some[1].items())


# --- synchronisations


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", "mixtral"])
def test_a_micro_batch_waits_for_nothing(made: Path, recipe: dict[str, Any], write_recipe: Any, name: str) -> None:
    recipe["model"]["name"] = str(made / name)
    case = Case(recipe, write_recipe)
    case.run()
    with Counted() as counted:
        case.run()
    assert {name: counted.calls[name] for name in WAITS if counted.calls[name]} == {}


def test_a_micro_batch_of_pairs_waits_for_nothing(recipe: dict[str, Any], write_recipe: Any, tmp_path: Path) -> None:
    """That copies to a GPU do not wait, either: tests/fake_cuda."""
    tiny.write_rows(tmp_path / "pairs.jsonl", tiny.preferences(60))
    recipe["data"] |= {"train": [{"path": str(tmp_path / "pairs.jsonl"), "format": "preference"}], "max_length": 128}
    del recipe["data"]["eval"], recipe["evaluate"]
    case = Case(recipe, write_recipe, objective={"name": "orpo"})
    case.run()
    with Counted() as counted:
        case.run()
    assert {name: counted.calls[name] for name in WAITS if counted.calls[name]} == {}


def test_the_counter_sees_a_wait() -> None:
    with Counted() as counted:
        torch.ones(1).item()
    assert counted.calls[WAITS[0]] == 1


def test_a_model_that_reads_the_mask_fails(made: Path, recipe: dict[str, Any], write_recipe: Any) -> None:
    """A mask of one element would let every document see every other, in silence."""
    case = Case(recipe, write_recipe)
    case.model.config._attn_implementation = "sdpa"
    with pytest.raises(RuntimeError, match=r"size|shape|expand"):
        case.run()


@pytest.mark.parametrize("cross_entropy", ["plain", "chunked"])
def test_a_balance_loss_of_transformers_does_not_read_it(
    made: Path, recipe: dict[str, Any], write_recipe: Any, cross_entropy: str
) -> None:
    """`output_router_logits` in a model's config asks for one in each forward, over the tokens that a mask keeps."""
    recipe["model"] |= {"name": str(made / "mixtral"), "cross_entropy": cross_entropy}
    without = Case(recipe, write_recipe).run()
    case = Case(recipe, write_recipe, balances=True)
    assert case.model.config.output_router_logits
    assert_same(case.run(), without)


# --- casts and copies


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "lm_head"]], ids=["layers", "head"])
def test_inputs_of_adapters_are_not_cast(
    recipe: dict[str, Any], write_recipe: Any, monkeypatch: pytest.MonkeyPatch, targets: Any
) -> None:
    recipe["train"]["precision"] = "bf16"
    case = Case(recipe, write_recipe, mode="lora", lora={**LORA["lora"], "targets": targets})
    torch.manual_seed(3)
    for parameter in case.model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)  # where one half of each is zero, little could differ
    adapted = [module for module in case.model.modules() if hasattr(module, "cast_input_dtype_enabled")]
    assert len(adapted) > 2
    with Counted() as ours:
        without = case.run()
    for module in adapted:
        monkeypatch.setattr(module, "cast_input_dtype_enabled", True)  # as peft has it
    with Counted() as theirs:
        assert_same(case.run(), without)
    back_and_forth = (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)
    for types in back_and_forth:
        assert ours.cast[types] < theirs.cast[types], types


@pytest.mark.parametrize("adapter", [{"dropout": 0.1}, {"dropout": 0.0, "dora": True}], ids=["dropout", "dora"])
def test_inputs_that_more_than_a_product_reads_are(
    recipe: dict[str, Any], write_recipe: Any, adapter: dict[str, Any]
) -> None:
    recipe["train"]["precision"] = "bf16"
    case = Case(recipe, write_recipe, mode="lora", lora={**LORA["lora"], **adapter})
    assert all(getattr(module, "cast_input_dtype_enabled", True) for module in case.model.modules())


class WeightCopies(TorchDispatchMode):
    """Peak bytes of copies of weights in another type."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[Any] = []
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and isinstance(args[0], torch.nn.Parameter):
            self.copies.append((torch.multiprocessing.reductions.StorageWeakRef(out.untyped_storage()), out.nbytes))
            self.peak = max(self.peak, sum(size for storage, size in self.copies if not storage.expired()))
        return out


@pytest.mark.parametrize("name", ["llama", "llama_tied"])
def test_autocast_keeps_no_copy_of_the_weights(
    made: Path, recipe: dict[str, Any], write_recipe: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    recipe["model"]["name"] = str(made / name)
    recipe["train"] |= {"precision": "bf16", "activation_checkpointing": True}
    case = Case(recipe, write_recipe)
    layer = sum(p.numel() * 2 for p in case.model.model.layers[0].parameters())
    head = case.model.get_output_embeddings().weight.numel() * 2
    with WeightCopies() as ours:
        without = case.run()
    usual = torch.autocast
    monkeypatch.setattr(torch, "autocast", lambda *a, **k: usual(*a, **{**k, "cache_enabled": True}))
    with WeightCopies() as theirs:
        assert_same(case.run(), without)
    assert ours.peak <= max(layer, head) < theirs.peak


def test_weights_are_read_straight_to_the_device(recipe: dict[str, Any], write_recipe: Any) -> None:
    """`meta` stands for the device: a copy in host memory, to be moved later, would have values."""
    loaded = load_recipe(write_recipe(recipe))
    config, device = model_config(loaded.model), torch.device("meta")
    attention = attention_for(loaded, config, "cpu")
    for direct in (True, False):
        model = load_model(loaded, Base.of(loaded, config), attention, Placement("load", device, direct=direct))
        assert {parameter.is_meta for parameter in model.parameters()} == {direct}
