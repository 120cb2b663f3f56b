"""Recipe and accelerate config: who owns what, and launches that are not what they say."""

from __future__ import annotations

import json
import os
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.state import PartialState
from repository import ROOT

from finetune.engine import launch as launch_module
from finetune.engine.compatibility import check_launch
from finetune.engine.launch import Launch, _option, check_started, collective_timeout, read_config_file, read_launch
from finetune.engine.start import _replace_prepare_backend, prepare_rehearsal
from finetune.errors import UserError
from finetune.models.config import model_config
from finetune.recipe import load_recipe

CONFIGS = ROOT / "accelerate_configs"
PIPELINES = {"pp", "pp_dp", "pp_fsdp2", "pp_tp", "pp_fsdp2_tp"}  # in tests/trainer/unit/engine/test_pipeline_stages.py
SHIPPED = {"single", "ddp", "fsdp2", "fsdp2_offload", "zero2", "zero2_offload", "zero3", "zero3_offload", "zero3_nvme"}
SHARING_ROWS = {"cp", "ulysses", "fsdp2_cp"}  # two ranks each
DIVIDED = {"hsdp": 4, "tp": 2, "fsdp2_tp": 2, "ep": 4}  # for some sizes only; how many shares of the rows four have


def launch_of(tmp_path: Path, name: str, **changes: Any) -> Launch:
    """One of our configs with top-level changes; a dict is merged into its section."""
    values = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    for key, value in changes.items():
        values[key] = {**values.get(key, {}), **value} if isinstance(value, dict) else value
    path = tmp_path / f"{name}.yaml"
    path.write_text(yaml.safe_dump(values))
    return read_config_file(str(path), 2)


def test_the_shipped_configs_are_these() -> None:
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == SHIPPED | SHARING_ROWS | PIPELINES | set(DIVIDED)


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("name", sorted(SHARING_ROWS))
def test_ranks_that_share_rows_have_micro_batches_as_one(
    recipe: dict[str, Any], write_recipe: Any, name: str, processes: int
) -> None:
    recipe["batch"]["rows"] = 8
    launch = read_config_file(str(CONFIGS / f"{name}.yaml"), processes)
    assert check_launch(load_recipe(write_recipe(recipe)), "recipe.yaml", launch) == 8 // processes


@pytest.mark.parametrize(("name", "shares"), DIVIDED.items())
def test_divided_configs_agree_with_any_recipe(
    recipe: dict[str, Any], write_recipe: Any, name: str, shares: int
) -> None:
    recipe["batch"]["rows"] = 8
    loaded = load_recipe(write_recipe(recipe))
    config = model_config(loaded.model) if name != "ep" else None  # the model has no experts
    launch = read_config_file(str(CONFIGS / f"{name}.yaml"), 4)
    assert check_launch(loaded, "recipe.yaml", launch, config) == 8 // (2 * shares)


@pytest.mark.parametrize("processes", [1, 2, 4])
@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_shipped_configs_agree_with_any_recipe(
    recipe: dict[str, Any], write_recipe: Any, name: str, processes: int
) -> None:
    recipe["batch"]["rows"] = 8
    loaded = load_recipe(write_recipe(recipe))
    launch = read_config_file(str(CONFIGS / f"{name}.yaml"), processes)
    assert check_launch(loaded, "recipe.yaml", launch) == 8 // (2 * processes)


DISAGREEMENTS: list[tuple[str, dict[str, Any], str]] = [
    ("ddp", {"mixed_precision": "bf16"}, "`mixed_precision: bf16` against `train.precision: fp32`"),
    ("ddp", {"gradient_accumulation_steps": 4}, "`gradient_accumulation_steps: 4` against `batch.rows"),
    ("ddp", {"dynamo_config": {"dynamo_backend": "INDUCTOR"}}, "`dynamo_config` is decided by `train.compile`"),
    ("zero3", {"deepspeed_config": {"gradient_accumulation_steps": 8}}, "`deepspeed gradient_accumulation_steps: 8`"),
    ("zero3", {"deepspeed_config": {"gradient_clipping": 0.5}}, "against `optimizer.max_grad_norm: 1.0`"),
    ("zero2", {"deepspeed_config": {"bf16": {"enabled": True}}}, "`deepspeed bf16.enabled: True`"),
    ("zero2", {"deepspeed_config": {"optimizer": {"type": "Adam"}}}, "deepspeed `optimizer` is decided by the recipe"),
    ("zero2", {"deepspeed_config": {"train_batch_size": 64}}, "deepspeed `train_batch_size` is decided by the recipe"),
    ("fsdp2", {"fsdp_config": {"fsdp_activation_checkpointing": True}}, "`fsdp_activation_checkpointing: True`"),
    (
        "fsdp2",
        {"fsdp_config": {"fsdp_activation_checkpointing_offload": True}},
        "`fsdp_activation_checkpointing_offload: True` against `train.activation_offload: false`",
    ),
    ("ddp", {"mixed_precision": "fp8"}, "would replace layers"),
    ("fsdp2", {"fp8_config": {"backend": "TE"}}, "set `train.precision: fp8` in the recipe"),
    ("zero2", {"deepspeed_config": {"msamp": {"enabled": True}}}, "deepspeed `msamp` computes or steps in other types"),
    ("fsdp2", {"fsdp_config": {"fsdp_version": 1}}, "`fsdp_version: 1` loses the optimizer state"),
]


@pytest.mark.parametrize(("name", "changes", "fragment"), DISAGREEMENTS)
def test_disagreement_names_both_files(
    recipe: dict[str, Any], write_recipe: Any, tmp_path: Path, name: str, changes: dict[str, Any], fragment: str
) -> None:
    launch = launch_of(tmp_path, name, **changes)
    with pytest.raises(UserError) as error:
        check_launch(load_recipe(write_recipe(recipe)), "my_recipe.yaml", launch)
    for part in (f"{name}.yaml", "my_recipe.yaml", fragment):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("name", "fragment"), [("zero3", "use ddp, fsdp2"), ("zero2", "use ddp, fsdp2"), ("tp", "use fsdp2")]
)
def test_products_of_8_bits_where_they_cannot_be(
    recipe: dict[str, Any], write_recipe: Any, name: str, fragment: str
) -> None:
    recipe["train"]["precision"], recipe["batch"]["rows"] = "fp8", 8
    with pytest.raises(UserError, match=fragment):
        check_launch(
            load_recipe(write_recipe(recipe)), "recipe.yaml", read_config_file(str(CONFIGS / f"{name}.yaml"), 2)
        )


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("ddp", {"mixed_precision": "no", "gradient_accumulation_steps": 1}),
        ("zero3", {"deepspeed_config": {"gradient_clipping": 1.0, "gradient_accumulation_steps": 1}}),
        ("fsdp2", {"fsdp_config": {"fsdp_activation_checkpointing": False}}),
    ],
)
def test_saying_the_same_is_no_disagreement(
    recipe: dict[str, Any], write_recipe: Any, tmp_path: Path, name: str, changes: dict[str, Any]
) -> None:
    check_launch(load_recipe(write_recipe(recipe)), "recipe.yaml", launch_of(tmp_path, name, **changes))


def test_accumulation_that_a_trial_is_to_find(recipe: dict[str, Any], write_recipe: Any, tmp_path: Path) -> None:
    recipe["batch"] = {"rows": 8, "rows_per_device": "auto"}
    loaded = load_recipe(write_recipe(recipe))
    left_open = launch_of(tmp_path, "zero3", deepspeed_config={"gradient_accumulation_steps": "auto"})
    assert check_launch(loaded, "recipe.yaml", left_open) == 4
    with pytest.raises(UserError, match=r"gradient_accumulation_steps: 4` against `batch.rows_per_device: auto`"):
        check_launch(loaded, "recipe.yaml", launch_of(tmp_path, "ddp", gradient_accumulation_steps=4))
    with pytest.raises(UserError, match=r"nearest: 6, 9"):
        check_launch(loaded, "recipe.yaml", read_config_file(str(CONFIGS / "ddp.yaml"), 3))


def test_a_deepspeed_json_is_read_too(recipe: dict[str, Any], write_recipe: Any, tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 2}, "gradient_clipping": 5.0}))
    launch = launch_of(tmp_path, "zero2", deepspeed_config={"deepspeed_config_file": str(file)})
    with pytest.raises(UserError, match=r"gradient_clipping: 5\.0"):
        check_launch(load_recipe(write_recipe(recipe)), "recipe.yaml", launch)
    file.write_text("{")
    with pytest.raises(UserError, match=r"ds.json: the DeepSpeed config cannot be read"):
        check_launch(load_recipe(write_recipe(recipe)), "recipe.yaml", launch)


def test_rows_that_do_not_divide_name_the_nearest(recipe: dict[str, Any], write_recipe: Any) -> None:
    launch = read_config_file(str(CONFIGS / "ddp.yaml"), 3)
    with pytest.raises(UserError, match=r"nearest: 6"):
        check_launch(load_recipe(write_recipe(recipe)), "recipe.yaml", launch)


@pytest.mark.parametrize("optimizer", ["adamw_8bit", "paged_adamw_8bit"])
def test_8_bit_state_is_not_swapped_to_nvme(recipe: dict[str, Any], write_recipe: Any, optimizer: str) -> None:
    recipe["optimizer"]["name"] = optimizer
    loaded = load_recipe(write_recipe(recipe))
    check_launch(loaded, "recipe.yaml", read_config_file(str(CONFIGS / "zero3_offload.yaml"), 2))
    with pytest.raises(UserError, match=f"DeepSpeed swaps optimizer state to NVMe as fp32, which `{optimizer}`"):
        check_launch(loaded, "recipe.yaml", read_config_file(str(CONFIGS / "zero3_nvme.yaml"), 2))


@pytest.mark.parametrize("config", ["fsdp2", "fsdp2_offload", "zero2", "zero3_offload", "zero3_nvme"])
def test_muon_is_refused_on_nvme_alone(recipe: dict[str, Any], write_recipe: Any, config: str) -> None:
    recipe["optimizer"]["name"] = "muon"
    loaded, launch = load_recipe(write_recipe(recipe)), read_config_file(str(CONFIGS / f"{config}.yaml"), 2)
    if not launch.uses_nvme:
        check_launch(loaded, "recipe.yaml", launch)
        return
    with pytest.raises(UserError, match="`muon` was not tried with optimizer state on NVMe: use another config"):
        check_launch(loaded, "recipe.yaml", launch)


@pytest.mark.parametrize(
    ("precision", "compiled", "fragment"),
    [
        ("bf16_true", False, "against `bf16_true`"),
        ("fp32", True, "`train.compile` does not support DeepSpeed"),
    ],
)
def test_what_zero_cannot_do_is_refused(
    recipe: dict[str, Any], write_recipe: Any, precision: str, compiled: bool, fragment: str
) -> None:
    recipe["train"].update(precision=precision, compile=compiled)
    launch = read_config_file(str(CONFIGS / "zero3.yaml"), 2)
    with pytest.raises(UserError) as error:
        check_launch(load_recipe(write_recipe(recipe)), "recipe.yaml", launch)
    assert fragment in str(error.value)


@pytest.mark.parametrize(
    ("config", "processes", "fragments"),
    [
        ("ddp", 2, ("DDP stores every gradient until it is reduced over all ranks", "use fsdp2")),
        ("zero2", 2, ("DeepSpeed steps its own groups of gradients", "use fsdp2")),
        ("zero3", 1, ("DeepSpeed steps its own groups of gradients",)),
        (
            "fsdp2",
            2,
            ("is 4 micro-batches of 1 on each of 2: set `batch.rows: 2`, or", "rows_per_device: 4`"),
        ),
        (
            "single",
            1,
            ("is 8 micro-batches of 1 on each of 1: set `batch.rows: 1`, or", "rows_per_device: 8`"),
        ),
    ],
)
def test_where_the_backward_cannot_step(
    recipe: dict[str, Any], write_recipe: Any, config: str, processes: int, fragments: tuple[str, ...]
) -> None:
    recipe["batch"] = {"rows": 8, "rows_per_device": 1 if config in ("fsdp2", "single") else 8 // processes}
    recipe["optimizer"] |= {"in_backward": True, "max_grad_norm": None}
    launch = read_config_file(str(CONFIGS / f"{config}.yaml"), processes)
    with pytest.raises(UserError) as error:
        check_launch(load_recipe(write_recipe(recipe)), "recipe.yaml", launch)
    for fragment in fragments:
        assert fragment in str(error.value)


@pytest.mark.parametrize(("config", "processes"), [("single", 1), ("ddp", 1), ("fsdp2", 2), ("fsdp2_offload", 4)])
def test_where_the_backward_can_step(recipe: dict[str, Any], write_recipe: Any, config: str, processes: int) -> None:
    recipe["batch"] = {"rows": 8, "rows_per_device": 8 // processes}
    recipe["optimizer"] |= {"in_backward": True, "max_grad_norm": None}
    launch = read_config_file(str(CONFIGS / f"{config}.yaml"), processes)
    assert check_launch(load_recipe(write_recipe(recipe)), "recipe.yaml", launch) == 1


@pytest.mark.parametrize(
    ("text", "fragment"), [("[1", "not an accelerate config"), ("a: 1", "it has no `distributed_type`")]
)
def test_what_is_not_an_accelerate_config(tmp_path: Path, text: str, fragment: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=fragment):
        read_config_file(str(path))
    with pytest.raises(UserError, match="cannot be read"):
        read_config_file(str(tmp_path / "absent.yaml"))


def test_a_launch_that_came_out_smaller_is_an_error() -> None:
    with pytest.raises(UserError, match=r"asks for 2 processes, but 1 is running\. Each would train alone"):
        check_started(Launch("replicated", 2, "ddp.yaml"), 1, "replicated")


def test_a_launch_that_came_out_as_something_else_is_an_error() -> None:
    with pytest.raises(UserError, match="asks for zero, but accelerate started replicated"):
        check_started(Launch("zero", 2, "zero3.yaml"), 2, "replicated")


@pytest.mark.parametrize(
    "words",
    [
        ["--config_file", "a.yaml", "-m", "finetune", "train", "--config_file", "b.yaml"],
        ["--config-file=a.yaml", "-m", "finetune"],
    ],
)
def test_the_launcher_s_options_end_where_ours_begin(words: list[str]) -> None:
    assert _option(words, "config_file") == "a.yaml"
    assert _option(["-m", "finetune", "x", "--config_file", "b.yaml"], "config_file") is None


def test_rehearsal_refuses_an_accelerate_it_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PartialState, "_prepare_backend", lambda self, other: None)
    with pytest.raises(UserError, match="does not know accelerate"):
        _replace_prepare_backend(sharded=True)


@pytest.mark.parametrize("version", ["1", "2"])
def test_fsdp_without_a_config_file_has_the_version_of_the_launchers_option(
    recipe: dict[str, Any], write_recipe: Any, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(launch_module, "_launcher_arguments", lambda: None)
    for name, value in {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": version, "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    launch, loaded = read_launch(), load_recipe(write_recipe(recipe))
    if version == "1":
        with pytest.raises(UserError, match="`fsdp_version: 1` loses the optimizer state"):
            check_launch(loaded, "recipe.yaml", launch)
    else:
        assert check_launch(loaded, "recipe.yaml", launch) == 1


def test_a_rehearsal_compiles_nothing_of_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    deepspeed = pytest.importorskip("deepspeed")
    monkeypatch.setitem(deepspeed.ops.__compatible_ops__, "deepspeed_shm_comm", True)
    from deepspeed.comm.torch import build_shm_op

    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "DS_ACCELERATOR"):
        monkeypatch.setenv(name, "")  # and put back afterwards
    for name in ("LOCAL_RANK", "ACCELERATE_TORCH_DEVICE", "ACCELERATE_USE_CPU"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(PartialState, "_prepare_backend", PartialState._prepare_backend)  # replaced by a rehearsal
    prepare_rehearsal(Launch("zero", 1))
    assert build_shm_op() is None


# --- torchrun

TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "6"}


@pytest.mark.parametrize(
    ("config", "kind", "told"),
    [
        ("ddp", "replicated", {}),
        ("fsdp2", "fsdp2", {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": "false"}),
        ("zero3", "zero", {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}),
    ],
)
def test_torchrun_s_processes_are_told_what_accelerate_tells_its_own(
    monkeypatch: pytest.MonkeyPatch, config: str, kind: str, told: dict[str, str]
) -> None:
    """The size is what torchrun started, whatever the file says."""
    monkeypatch.setattr(os, "environ", {**os.environ, **TORCHRUN})
    launch = read_launch(str(CONFIGS / f"{config}.yaml"))
    assert (launch.kind, launch.processes, launch.where, launch.launched) == (kind, 6, config, True)
    assert {name: os.environ.get(name) for name in told} == told
    assert os.environ["WORLD_SIZE"] == "6"


def test_torchrun_without_a_config_is_data_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert read_launch() == Launch("replicated", 6, launched=True)


@pytest.mark.parametrize(
    ("environment", "config", "fragment"),
    [
        (
            {},
            "ddp",
            "is for processes that torchrun started. Fix: under accelerate, use `accelerate launch --config_file",
        ),
        (TORCHRUN, "single", "is for one process, and torchrun started 6. Fix: use accelerate_configs/ddp.yaml"),
        (TORCHRUN, "absent", "cannot be read"),
    ],
)
def test_configs_that_torchrun_cannot_have(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], config: str, fragment: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=re.escape(fragment)):
        read_launch(str(CONFIGS / f"{config}.yaml"))


def test_a_config_is_not_given_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_module, "_launcher_arguments", lambda: ["--num_processes", "2"])
    with pytest.raises(UserError, match=r"accelerate launch has an option of its own\. Fix: use --config_file"):
        read_launch("ddp.yaml")


def test_how_long_ranks_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FINETUNE_TIMEOUT_S", raising=False)
    assert collective_timeout() == timedelta(minutes=30)
    monkeypatch.setenv("FINETUNE_TIMEOUT_S", "90")
    assert collective_timeout() == timedelta(seconds=90)
    for wrong in ("soon", "0", "-1", "nan", "inf"):
        monkeypatch.setenv("FINETUNE_TIMEOUT_S", wrong)
        with pytest.raises(UserError, match=f"FINETUNE_TIMEOUT_S={wrong}: not a number of seconds above 0"):
            collective_timeout()
