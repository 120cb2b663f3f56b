"""On CUDA devices: the device of offloaded shards, the threads that step them, the types that a GPU supports."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from finetune.engine import sharding
from finetune.engine.launch import Launch, read_config_file
from finetune.engine.sharding import Weights, fill_shards
from finetune.engine.start import check_cuda, check_in_backward, optimizer_threads
from finetune.errors import UserError
from finetune.recipe import load_recipe

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
OFFLOADING = {"fsdp2_offload", "zero2_offload", "zero3_offload", "zero3_nvme"}


def with_real_numbers(*arguments: Any) -> Any:
    """torch's own arithmetic of shards, which it does on tensors."""
    with _disable_current_modes():
        return compute_local_shape_and_global_offset(*arguments)


@pytest.fixture
def cuda_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceMesh]:
    """Rank 1 of 2 on CUDA devices that are not there: for fake tensors, with collectives that do nothing."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device=None: (9, 0))
    monkeypatch.setattr(sharding, "compute_local_shape_and_global_offset", with_real_numbers)
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    yield init_device_mesh("cuda", (2,))
    dist.destroy_process_group()


class Two(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 6, bias=False), nn.Linear(6, 4, bias=False))
        self.register_buffer("scale", torch.ones(4))

    def tie_weights(self) -> None:
        pass


@pytest.mark.parametrize(("policy", "stays"), [(CPUOffloadPolicy(pin_memory=False), CPU), (OffloadPolicy(), CUDA)])
def test_filled_shards_are_where_they_say(cuda_ranks: DeviceMesh, policy: OffloadPolicy, stays: torch.device) -> None:
    """FSDP2 puts the local tensor of an offloaded shard on the CPU. Were the DTensor around it made on the GPU, it
    would name the GPU from then on, and not even `detach` works on it."""
    model, weights = Two().to("meta"), Weights({}, {})  # as `take_weights` leaves them on a rank above 0
    with FakeTensorMode(allow_non_fake_inputs=True):
        fully_shard(model, mesh=cuda_ranks, offload_policy=policy)
        fill_shards(model, weights, {}, CUDA, stays)
        for parameter in model.parameters():
            assert parameter.device == stays
            assert parameter.detach().to_local().device == stays  # pyright: ignore[reportAttributeAccessIssue]
        assert model.scale.device == CUDA  # the forward reads it there


def test_a_gpu_that_emulates_bf16_has_none(
    recipe: dict[str, Any], write_recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A T4 or a V100, as torch sees them: a tensor of bf16 can be made."""
    for name, value in {
        "is_available": True,
        "current_device": 0,
        "get_device_name": "Tesla T4",
        "get_device_properties": SimpleNamespace(major=7),
        "_check_bf16_tensor_supported": True,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    recipe["train"]["precision"] = "bf16"
    with pytest.raises(UserError, match=r"Tesla T4 has no bf16\. Fix: use fp16 or fp32"):
        check_cuda(load_recipe(write_recipe(recipe)), Launch("replicated", 1))


@pytest.mark.parametrize(("capability", "refused"), [((8, 9), True), ((9, 0), False)])
def test_products_of_8_bits_need_a_gpu_that_has_them(
    recipe: dict[str, Any],
    write_recipe: Any,
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    refused: bool,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA L4")
    scaled = {"mode": "qlora", "lora": {"rank": 4}, "quantization": {"type": "fp8", "compute": "scaled"}}
    for changes, precision, other in (({}, "fp8", "bf16"), (scaled, "bf16", "dequantised")):
        changed = {**recipe, **changes, "train": {**recipe["train"], "precision": precision}}
        said = pytest.raises(UserError, match=rf"NVIDIA L4 has no products of 8 bits.*: use {other}$")
        with said if refused else contextlib.nullcontext():
            check_cuda(load_recipe(write_recipe(changed)), Launch("replicated", 1))


# --- which configs let the CPU step


def shipped(name: str) -> Launch:
    return read_config_file(str(ROOT / "accelerate_configs" / f"{name}.yaml"), 2)


def test_configs_whose_optimizer_the_cpu_steps() -> None:
    names = {path.stem for path in (ROOT / "accelerate_configs").glob("*.yaml")}
    assert {name for name in names if shipped(name).offloads_optimizer} == OFFLOADING


def test_a_deepspeed_file_says_it_too(tmp_path: Path) -> None:
    file = tmp_path / "zero.json"
    file.write_text('{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}')
    assert Launch("zero", 2, config={"deepspeed_config": {"deepspeed_config_file": str(file)}}).offloads_optimizer


def test_steps_in_the_backward_of_offloaded_shards_need_a_torch_that_waits(
    recipe: dict[str, Any], write_recipe: Any
) -> None:
    recipe["optimizer"] |= {"in_backward": True, "max_grad_norm": None}
    recipe["batch"] = {"rows": 2, "rows_per_device": 1}
    loaded = load_recipe(write_recipe(recipe))
    for torch_version in ("2.11.0+cu128", "2.12.1"):
        with pytest.raises(UserError, match=rf"torch {torch_version[:4]}.* steps offloaded.*use torch 2.13 or newer"):
            check_in_backward(loaded.optimizer, shipped("fsdp2_offload"), torch_version)
        check_in_backward(loaded.optimizer, shipped("fsdp2"), torch_version)
    check_in_backward(loaded.optimizer, shipped("fsdp2_offload"), "2.13.0+cu130")
    recipe["optimizer"]["in_backward"] = False
    check_in_backward(load_recipe(write_recipe(recipe)).optimizer, shipped("fsdp2_offload"), "2.11.0")


# --- its threads

LAUNCHER = """
import os, subprocess, sys
environment = {**os.environ, "OMP_NUM_THREADS": "1"}
subprocess.run([sys.executable, "-c", sys.argv[1]], env=environment, check=True)
"""
LAUNCHED = """
from finetune.engine.launch import Launch
from finetune.engine.start import optimizer_threads
for offloads in ("true", "false"):
    config = {"fsdp_config": {"fsdp_offload_params": offloads}}
    print(optimizer_threads(Launch("fsdp2", 2, None, config, launched=True)))
"""


@pytest.mark.long
@pytest.mark.parametrize("users", [None, "1"])
def test_a_launcher_s_one_thread_is_not_the_user_s(users: str | None) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"} | {"LOCAL_WORLD_SIZE": "1"}
    if users is not None:
        environment["OMP_NUM_THREADS"] = users
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHER, LAUNCHED], env=environment, capture_output=True, text=True, check=True
    )
    cores = len(os.sched_getaffinity(0))
    assert done.stdout.split() == [str(cores) if users is None else "None", "None"]


def test_cores_are_shared_by_the_processes_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(range(96)))
    for processes, threads in ((8, 12), (128, 1)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
        assert optimizer_threads(shipped("zero2_offload")) == threads
