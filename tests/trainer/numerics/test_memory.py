"""What saves memory changes no number: recomputation, offloaded activations, steps inside the backward."""

from __future__ import annotations

import gc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import metrics, train_alone
from safetensors.torch import load_file
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from finetune.engine.optimizer_step import StepInBackward
from finetune.errors import RunFailure, UserError
from finetune.models.activations import ActivationOffload, View
from finetune.models.attention import attention_for
from finetune.models.base_model import Base
from finetune.models.config import model_config
from finetune.models.weights import Placement, load_model
from finetune.recipe import load_recipe

CPU = torch.device("cpu")
LORA = {"mode": "lora", "lora": {"rank": 4, "alpha": 8, "dropout": 0.2}}
QLORA = {**LORA, "mode": "qlora", "quantization": {"type": "nf4"}}
MODES = pytest.mark.parametrize("changes", [{}, LORA, QLORA], ids=["full", "lora", "qlora"])
LENGTHS = (5, 23, 36)


class Watch(TorchDispatchMode):
    """Counts operators, and knows which of the storages they made are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = Counter[str]()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls[func.name()] += 1
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.made[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        return out

    def live_bytes(self) -> int:
        return sum(size for storage, size in self.made.values() if not storage.expired())


def loaded(recipe: dict[str, Any], write_recipe: Any, changes: dict[str, Any], **train: Any) -> tuple[Any, Any]:
    """A model and its attention's choice."""
    values = {**recipe, **changes, "train": {**recipe["train"], **train}}
    parsed = load_recipe(write_recipe(values))
    config = model_config(parsed.model)
    choice = attention_for(parsed, config, "cpu")
    return load_model(parsed, Base.of(parsed, config), choice, Placement("load", CPU)), choice


def forward(model: Any, choice: Any) -> torch.Tensor:
    torch.manual_seed(1)
    ids = torch.randint(3, 380, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    arguments = choice.forward_arguments(LENGTHS)
    return model(input_ids=ids, position_ids=positions, use_cache=False, **arguments).logits.float().logsumexp(-1).sum()


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> None:
    assert some.keys() == others.keys()
    assert len(some) > 0
    for name, tensor in some.items():
        assert torch.equal(tensor, others[name]), name


# --- recomputation


@MODES
@pytest.mark.parametrize("how", [True, "selective"])
def test_recomputed_gradients_are_bitwise_the_same(
    recipe: dict[str, Any], write_recipe: Any, changes: dict[str, Any], how: Any
) -> None:
    """Dropout of adapters included: the second forward draws what the first drew."""
    found = {}
    for checkpointing in (False, how):
        model, choice = loaded(recipe, write_recipe, changes, activation_checkpointing=checkpointing)
        loss = forward(model, choice)
        loss.backward()
        found[checkpointing] = {"loss": loss.detach(), **gradients(model)}
    assert_same(found[False], found[how])


def test_selective_computes_no_product_and_no_attention_again(recipe: dict[str, Any], write_recipe: Any) -> None:
    calls, kept = {}, {}
    for how in (False, True, "selective"):
        model, choice = loaded(recipe, write_recipe, {}, activation_checkpointing=how)
        with Watch() as watch:
            loss = forward(model, choice)
            gc.collect()
            kept[how] = watch.live_bytes()
            loss.backward()
        calls[how] = watch.calls
    heavy = ("aten::mm", "aten::_scaled_dot_product_flash_attention_for_cpu")
    for name in heavy:
        assert calls["selective"][name] == calls[False][name] > 0
        assert calls[True][name] > calls[False][name]
    assert calls["selective"]["aten::rsqrt"] == calls[True]["aten::rsqrt"] > calls[False]["aten::rsqrt"]
    assert kept[True] < 0.75 * kept["selective"] < 0.75 * 0.9 * kept[False]


def test_selective_unpacks_no_weight_for_its_product_again(recipe: dict[str, Any], write_recipe: Any) -> None:
    calls = {}
    for how in (False, True, "selective"):
        model, choice = loaded(recipe, write_recipe, QLORA, activation_checkpointing=how)
        with Watch() as watch:
            forward(model, choice).backward()
        calls[how] = watch.calls["bitsandbytes::gemm_4bit"]
    assert 0 < calls["selective"] == calls[False] < calls[True]


def test_selective_computes_attention_with_dropout_again(recipe: dict[str, Any], write_recipe: Any) -> None:
    """It draws random numbers: left out, the dropout after it would be another one."""
    changes = {**LORA, "model": {**recipe["model"], "attention": "sdpa"}}
    found = {}
    for how in (False, "selective"):
        model, choice = loaded(recipe, write_recipe, changes, activation_checkpointing=how)
        for module in model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.3
        forward(model, choice).backward()
        found[how] = gradients(model)
    assert_same(found[False], found["selective"])


# --- offloaded activations


@MODES
@pytest.mark.parametrize("how", [False, True])
@pytest.mark.parametrize("ahead", [0, 2**16, 2**40])
def test_offloaded_gradients_are_bitwise_the_same(
    recipe: dict[str, Any], write_recipe: Any, changes: dict[str, Any], how: bool, ahead: int
) -> None:
    model, choice = loaded(recipe, write_recipe, changes, activation_checkpointing=how)
    forward(model, choice).backward()
    wanted = gradients(model)
    for p in model.parameters():
        p.grad = None
    host = ActivationOffload(CPU, smallest=1, ahead=ahead)
    for _ in range(2):  # the second forward begins where the first has left
        host.begin()
        with saved_tensors_hooks(host.keep, host.bring):
            loss = forward(model, choice)
        assert len(host.away) == host.count > 0
        for p in model.parameters():
            p.grad = None
        loss.backward()
        del loss
        assert len(host.away) == 0
        assert_same(wanted, gradients(model))


def test_what_is_offloaded(recipe: dict[str, Any], write_recipe: Any) -> None:
    """Each storage once, no parameter, nothing small; with recomputation the layers' inputs."""
    model, choice = loaded(recipe, write_recipe, {})
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    host, seen = ActivationOffload(CPU, smallest=4096, ahead=2**40), Counter[int]()

    def keep(tensor: torch.Tensor) -> Any:
        kept = host.keep(tensor)
        address = tensor.untyped_storage().data_ptr()
        small = tensor.untyped_storage().nbytes() < 4096
        assert (kept is tensor) == (address in weights or small)
        seen[address] += kept is not tensor
        return kept

    host.begin()
    with saved_tensors_hooks(keep, host.bring):
        loss = forward(model, choice)
    assert host.count == sum(bool(times) for times in seen.values()) < seen.total()
    del loss

    model, choice = loaded(recipe, write_recipe, {}, activation_checkpointing=True)
    inputs: list[int] = []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda _m, given: inputs.append(given[0].untyped_storage()._cdata))
    host = ActivationOffload(CPU, smallest=1, ahead=2**40)
    with saved_tensors_hooks(host.keep, host.bring):
        loss = forward(model, choice)
    assert set(inputs) <= {storage for storage, _ in host.here}
    loss.backward()


def test_an_address_that_another_storage_had_before() -> None:
    """As where FSDP has emptied the first one, while the graph still holds it."""
    memory, host = bytearray(4096), ActivationOffload(CPU, smallest=1, ahead=2**40)
    first = torch.frombuffer(memory, dtype=torch.float32)
    before = host.keep(first)
    memory[:] = torch.ones(1024).numpy().tobytes()
    second = torch.frombuffer(memory, dtype=torch.float32)
    assert second.data_ptr() == first.data_ptr()
    after = host.keep(second)
    assert isinstance(before, View)
    assert isinstance(after, View)
    assert [view.over(view.kept.host).unique().item() for view in (before, after)] == [0, 1]


def test_a_device_s_copy_goes_before_all_is_kept(recipe: dict[str, Any], write_recipe: Any) -> None:
    model, choice = loaded(recipe, write_recipe, {})
    host = ActivationOffload(CPU, smallest=1, ahead=20_000)
    with saved_tensors_hooks(host.keep, host.bring):
        loss = forward(model, choice)
    on_device = [kept for kept in host.away.values() if kept.device is not None]
    assert sum(kept.size for kept in on_device) <= 20_000
    assert {kept.index for kept in on_device} == set(range(host.count - len(on_device), host.count))
    assert len(on_device) < host.count / 2
    loss.backward()


def test_a_run_with_offloaded_activations_is_the_same_run(recipe: dict[str, Any], write_recipe: Any) -> None:
    recipe["train"]["max_steps"] = 2
    runs = Path(recipe["run"]["dir"])
    said = train_alone(write_recipe(recipe), "run.name=without")
    assert "activation_offload" not in said
    said = train_alone(write_recipe(recipe), "run.name=with", "train.activation_offload=true")
    assert "note: activation_offload has no use here: activations are in host memory already" in said
    assert_same(load_file(runs / "without/model/model.safetensors"), load_file(runs / "with/model/model.safetensors"))


# --- steps inside the backward

IN_BACKWARD = "optimizer.in_backward=true"


@pytest.fixture
def one_forward(recipe: dict[str, Any]) -> dict[str, Any]:
    recipe["batch"]["rows_per_device"] = recipe["batch"]["rows"]
    recipe["optimizer"] |= {"max_grad_norm": None, "weight_decay": 0.1}
    recipe["schedule"] = {"name": "constant", "warmup_steps": 2}
    recipe["train"]["max_steps"] = 4
    del recipe["data"]["eval"]
    return recipe


def weights(run: Path) -> dict[str, torch.Tensor]:
    (file,) = (run / "model").glob("*.safetensors")
    return load_file(file)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit", "sgd"])
def test_a_step_in_the_backward_is_the_same_step(
    one_forward: dict[str, Any], write_recipe: Any, optimizer: str, made: Path
) -> None:
    one_forward["model"]["name"] = str(made / "llama_tied")
    one_forward["optimizer"]["name"] = optimizer
    path, runs = write_recipe(one_forward), Path(one_forward["run"]["dir"])
    train_alone(path, "run.name=after")
    train_alone(path, "run.name=within", IN_BACKWARD)
    after, within = (metrics(runs / name) for name in ("after", "within"))
    for a, b in zip(after, within, strict=True):
        for key in ("loss", "lr"):
            assert a[key] == b[key]
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-12)
    assert_same(weights(runs / "after"), weights(runs / "within"))


def test_one_gradient_at_a_time() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(5)))
    alive = list[int]()

    def build(named: list[tuple[str, torch.Tensor]]) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD([tensor for _, tensor in named], lr=0.1)]

    for p in model.parameters():  # before the step's own hook
        p.register_post_accumulate_grad_hook(
            lambda _: alive.append(sum(p.grad is not None for p in model.parameters()))
        )
    stepper = StepInBackward(((name, p, p) for name, p in model.named_parameters()), build, CPU)
    before = [p.clone() for p in model.parameters()]
    model(torch.ones(3, 8)).sum().backward()
    assert alive == [1] * 10
    assert all(p.grad is None for p in model.parameters())
    moved = sum((p - b).square().sum() for p, b in zip(model.parameters(), before, strict=True))
    torch.testing.assert_close(stepper.take_squared_norm(), (moved / 0.1**2).double(), rtol=1e-5, atol=0)
    assert stepper.take_squared_norm() == 0.0


@pytest.mark.long
def test_resume_with_and_without(one_forward: dict[str, Any], write_recipe: Any) -> None:
    one_forward["checkpoint"] = {"every_steps": 2}
    path, runs = write_recipe(one_forward), Path(one_forward["run"]["dir"])
    for name, first, then in (("on", (), (IN_BACKWARD,)), ("off", (IN_BACKWARD,), ())):
        train_alone(path, f"run.name={name}", "schedule.warmup_steps=0", "train.max_steps=2", *first)
        assert "resuming from" in train_alone(path, f"run.name={name}", "schedule.warmup_steps=0", *then)
    train_alone(path, "run.name=whole", "schedule.warmup_steps=0")
    for name in ("on", "off"):
        assert_same(weights(runs / "whole"), weights(runs / name))


class Broken:
    """From the second training forward on, the gradient that reaches the LM head is infinite, the loss is not."""

    def __init__(self) -> None:
        self.forwards = 0
        self.hook = torch.nn.modules.module.register_module_forward_pre_hook(self._before)

    def _before(self, module: torch.nn.Module, _given: Any) -> None:
        if not isinstance(module, torch.nn.Linear) or module.out_features != 384 or not module.training:
            return
        self.forwards += 1
        if self.forwards == 1:
            module.register_full_backward_pre_hook(self._on_the_way_back)

    def _on_the_way_back(self, _module: torch.nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...] | None:
        return tuple(None if g is None else g * float("inf") for g in given) if self.forwards >= 2 else None


def test_a_gradient_that_is_not_finite_spoils_no_checkpoint(one_forward: dict[str, Any], write_recipe: Any) -> None:
    one_forward["checkpoint"] = {"every_steps": 1}
    broken = Broken()
    try:
        with pytest.raises(RunFailure, match=r"step 2\. The weights in memory are invalid, the last checkpoint is not"):
            train_alone(write_recipe(one_forward), IN_BACKWARD)
    finally:
        broken.hook.remove()
    run = Path(one_forward["run"]["dir"]) / "run"
    assert [path.name for path in sorted((run / "checkpoints").glob("step-*"))] == ["step-00000001"]
    assert [line["step"] for line in metrics(run)] == [1]
    assert not (run / "model").exists()


def test_a_loss_that_is_not_finite_stops_before_the_backward(one_forward: dict[str, Any], write_recipe: Any) -> None:
    one_forward["optimizer"] |= {"name": "sgd", "lr": 1e30, "weight_decay": 0.0}
    with pytest.raises(RunFailure, match=r"the loss is not finite at step 2\. Nothing was stepped"):
        train_alone(write_recipe(one_forward), IN_BACKWARD)


@pytest.mark.parametrize(
    ("section", "values", "fragment"),
    [
        ("optimizer", {"max_grad_norm": 1.0}, "cannot be clipped: set `optimizer.max_grad_norm: null`"),
        ("optimizer", {"name": "muon"}, "which divides parameters between two optimizers"),
        ("train", {"precision": "fp16"}, "as fp16's loss scale requires"),
        ("batch", {"tokens_per_device": 64, "rows_per_device": 1}, "needs one micro-batch per step"),
        ("batch", {"rows_per_device": 2}, "`batch.rows: 4` is 2 micro-batches of 2 on each of 1: set `batch.rows: 2`"),
    ],
)
def test_what_in_backward_cannot_do_is_refused(
    one_forward: dict[str, Any], write_recipe: Any, section: str, values: dict[str, Any], fragment: str
) -> None:
    one_forward["data"]["packing"] = "tokens_per_device" not in values
    one_forward[section] |= values
    with pytest.raises(UserError) as error:
        train_alone(write_recipe(one_forward), IN_BACKWARD)
    assert fragment in str(error.value)


def test_selective_and_offloaded_is_refused(recipe: dict[str, Any], write_recipe: Any) -> None:
    recipe["train"] |= {"activation_checkpointing": "selective", "activation_offload": True}
    with pytest.raises(UserError, match="does not reach the activations that `activation_checkpoint"):
        load_recipe(write_recipe(recipe))
