"""Where the other tool ran: devices, mixed precision and the accelerate config of ours that takes its place.

Keys: `accelerate launch --help` and its config files, https://github.com/huggingface/accelerate; DeepSpeed's JSON;
the parallel sizes of axolotl and of transformers' ParallelismConfig.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from finetune.desk.setup.conversion import Conversion
from finetune.desk.setup.foreign_command import LAUNCHER
from finetune.desk.setup.foreign_values import ForeignTable, read_config, whole

# TRL's own configs by their name, which have 8 processes and bf16: trl/accelerate_configs.
_OF_TRL = {
    "single_gpu": "single",
    "multi_gpu": "ddp",
    "fsdp1": "fsdp2",
    "fsdp2": "fsdp2",
    "zero1": "zero2",
    "zero2": "zero2",
    "zero3": "zero3",
}
_SIZES = {  # keys of parallel sizes whose processes share their rows
    "tp": ("tensor_parallel_size", "parallelism_config_tp_size", "tp_size"),
    "cp": ("context_parallel_size", "sequence_parallel_degree", "parallelism_config_cp_size", "cp_size"),
    "sp": ("sequence_parallel_size", "parallelism_config_sp_size", "sp_size"),
}
_SHARDS = ("dp_shard_size", "parallelism_config_dp_shard_size")
_COPIES = ("dp_replicate_size", "parallelism_config_dp_replicate_size")
_SHARDED = ("fsdp", "zero", "hsdp")  # beginnings of configs whose trained weights are in fp32 under mixed precision


@dataclass
class ForeignLaunch:
    """What decides the maths of where the other tool ran."""

    devices: int | None = None
    mixed_precision: str | None = None  # of the launcher; None: not said
    sharing: int = 1  # processes that have the same rows
    sizes: str = ""  # in words
    by_sizes: int | None = None  # processes by the parallel sizes
    needs_devices: bool = False  # it ran on several, and nobody said how many

    @property
    def row_devices(self) -> int | None:
        """Returns the devices that have rows of their own."""
        return self.devices and max(1, self.devices // self.sharing)


def read_foreign_launch(c: Conversion) -> ForeignLaunch:
    """Reads all keys of the launch, and sets the accelerate config."""
    launch = ForeignLaunch()
    launcher = c.theirs.table(LAUNCHER)
    _accelerate_config(c, launcher, launch)
    tables = (c.theirs, launcher)
    sizes = {kind: _size(tables, keys) for kind, keys in _SIZES.items()}
    for size in sizes.values():
        launch.sharing *= size or 1
    shards, copies = _size(tables, _SHARDS), _size(tables, _COPIES)
    launch.sizes = ", ".join(f"{kind} {size}" for kind, size in sizes.items() if (size or 1) > 1)
    if (shards or 1) * (copies or 1) > 1:
        launch.by_sizes = launch.sharing * (shards or 1) * (copies or 1)
    _devices(c, launcher, launch)
    _engine(c, launcher)
    before = c.launch or ""
    sharded = before.startswith(_SHARDED)
    wanted = {"tp": (sizes["tp"] or 1) > 1, "cp": (sizes["cp"] or 1) * (sizes["sp"] or 1) > 1}
    for kind, is_on in wanted.items():
        if is_on:
            c.launch = f"fsdp2_{kind}" if sharded or (shards or 1) > 1 else kind
    if all(wanted.values()):
        name = next(name for name in _SIZES["cp"] + _SIZES["sp"] if any(name in table for table in tables))
        table = next(table for table in tables if name in table)
        table.leave(name, "no accelerate config has tp and cp at once: choose fsdp2_tp or fsdp2_cp")
    elif (copies or 1) > 1 and not any(wanted.values()):
        c.launch = "hsdp"
    several = c.launch not in (None, "single") or _is_on(launcher, "multi_gpu")
    if before.endswith("_offload") and c.launch != before:
        key = next(key for key in ("fsdp_config", "fsdp", "deepspeed") if key in c.theirs)
        c.theirs.leave(key, f"offloading: there is no accelerate config {c.launch} with it")
    launch.needs_devices = several and launch.devices is None
    return launch


def _is_on(table: ForeignTable, name: str) -> bool:
    return name in table and table.is_on(name)


def _size(tables: tuple[ForeignTable, ...], keys: tuple[str, ...]) -> int | None:
    found = [table.count(*keys) for table in tables]
    return next((size for size in found if size is not None), None)


def _devices(c: Conversion, launcher: ForeignTable, launch: ForeignLaunch) -> None:
    """Finds the number of devices: --devices, the launcher's options, its config, the parallel sizes."""
    nodes = launcher.count("num_machines", "nnodes", "num_nodes", "NNODES", default=1)
    of_node = launcher.count("nproc_per_node", "num_gpus", "NPROC_PER_NODE")
    given = launcher.count("num_processes") or c.theirs.count("num_processes") or (of_node and of_node * nodes)
    visible = launcher.count("visible_devices")
    launch.devices = c.devices or given or launch.devices or launch.by_sizes or visible


def _accelerate_config(c: Conversion, launcher: ForeignTable, launch: ForeignLaunch) -> None:
    """Reads the accelerate config that the launch names: a file, or one of TRL's by its name."""
    name = launcher.word("config_file", "accelerate_config") or c.theirs.word("accelerate_config")
    mixed = launcher.word("mixed_precision") or c.theirs.word("mixed_precision")
    if name is not None and (path := Path(name)).is_file():
        table = ForeignTable(read_config(path), f"{path.name}: ", c.theirs.left)
        c.launch = _of_accelerate(table)
        processes = table.count("num_processes")
        launch.devices = 1 if c.launch == "single" else processes
        launch.mixed_precision = table.word("mixed_precision")
        c.others.append(table)
    elif name in _OF_TRL:
        c.launch, launch.devices, launch.mixed_precision = _OF_TRL[name], 8 if name != "single_gpu" else 1, "bf16"
    elif name is not None:
        c.launch = _by_name(name)
        owner = launcher if "config_file" in launcher or "accelerate_config" in launcher else c.theirs
        key = next(key for key in ("config_file", "accelerate_config") if key in owner)
        guess = f"by its name it is {c.launch}" if c.launch else "choose a file of accelerate_configs/"
        owner.leave(key, f"the file is not here: {guess}; its num_processes and mixed_precision are not known")
    launch.mixed_precision = mixed or launch.mixed_precision


def _of_accelerate(table: ForeignTable) -> str | None:
    """Returns our accelerate config for a file of theirs."""
    kind = str(table.take("distributed_type", default="NO")).upper()
    table.ignore(*_PLACES)
    if kind == "FSDP":
        return "fsdp2_offload" if _offloads(table.table("fsdp_config")) else "fsdp2"
    if kind == "DEEPSPEED":
        section = table.table("deepspeed_config")
        named = section.word("deepspeed_config_file")
        return (_of_deepspeed_file(named) if named else _of_deepspeed(section)) or "zero3"
    return {"NO": "single", "FALSE": "single", "MULTI_GPU": "ddp"}.get(kind)


# Keys of accelerate's configs that say where a process runs.
_PLACES = (
    *("compute_environment", "machine_rank", "num_machines", "rdzv_backend", "same_network", "main_training_function"),
    *("main_process_port", "main_process_ip", "debug", "enable_cpu_affinity", "downcast_bf16", "use_cpu", "gpu_ids"),
    *("tpu_env", "tpu_use_cluster", "tpu_use_sudo"),
)


def _offloads(fsdp: ForeignTable) -> bool:
    """Returns whether FSDP offloads; marks the keys that only say how weights are divided."""
    is_on = any(str(fsdp.take(name)).lower() == "true" for name in ("offload_params", "fsdp_offload_params"))
    fsdp.ignore(*_DIVISION, *(f"fsdp_{name}" for name in _DIVISION))
    return is_on


_DIVISION = (
    *("auto_wrap_policy", "transformer_layer_cls_to_wrap", "min_num_params", "state_dict_type", "sharding_strategy"),
    *("final_state_dict_type", "reshard_after_forward", "cpu_ram_efficient_loading", "sync_module_states", "version"),
    *("use_orig_params", "limit_all_gathers", "backward_prefetch", "backward_prefetch_policy", "forward_prefetch"),
    *("activation_checkpointing", "cpu_offload_pin_memory"),
)


def _of_deepspeed(table: ForeignTable) -> str | None:
    """Returns our config for a section or a JSON of DeepSpeed; None if it names no stage."""
    zero = whole(table.table("zero_optimization"))  # says how weights are divided, and changes no result
    stage = table.number("zero_stage", default=zero.get("stage"))
    flat = [table.word("offload_optimizer_device"), table.word("offload_param_device")]
    inside = [zero.get(name) for name in ("offload_optimizer", "offload_param")]
    devices = [*flat, *(one.get("device") for one in inside if isinstance(one, dict))]
    table.ignore(
        "zero3_init_flag", "zero3_save_16bit_model", "deepspeed_multinode_launcher", "zero_force_ds_cpu_optimizer"
    )
    _ignore_auto(table)
    if not isinstance(stage, int | float):
        return None
    name = {0: "ddp", 1: "zero2", 2: "zero2"}.get(int(stage), "zero3")
    offloads = any(device not in (None, "none") for device in devices)
    return f"{name}_offload" if offloads and stage >= 2 else name


def _ignore_auto(table: ForeignTable) -> None:
    """Marks values that DeepSpeed takes from the trainer's own arguments."""
    for name, value in table.values.items():
        if value == "auto":
            table.ignore(name)
        elif isinstance(value, ForeignTable):
            _ignore_auto(table.table(name))


def _of_deepspeed_file(name: str, c: Conversion | None = None) -> str | None:
    """Returns our config for a JSON of DeepSpeed: by its values, or by its name if it is not here; None if neither."""
    path = Path(name)
    if path.is_file():
        table = ForeignTable(read_config(path), f"{path.name}: ", c.theirs.left if c else [])
        if c is not None:
            c.others.append(table)
        return _of_deepspeed(table)
    return _by_name(path.name)


def _by_name(name: str) -> str | None:
    """Returns our config for the name of a file, such as ds_z3_offload_config.json."""
    text = Path(name).stem.lower()
    offloads = "_offload" if "offload" in text else ""
    if stage := re.search(r"(?:zero|stage|z)[-_]?([0-3])", text):
        return {"0": "ddp", "1": "zero2", "2": f"zero2{offloads}"}.get(stage[1], f"zero3{offloads}")
    if "fsdp" in text:
        return f"fsdp2{offloads}"
    return {"ddp": "ddp", "multi_gpu": "ddp", "single": "single", "single_gpu": "single"}.get(text)


def _engine(c: Conversion, launcher: ForeignTable) -> None:
    """Chooses the accelerate config by the keys of DeepSpeed and FSDP, of the tool and of the launcher."""
    deepspeed = c.theirs.take("deepspeed")
    if isinstance(deepspeed, ForeignTable):
        c.launch = _of_deepspeed(deepspeed) or "zero3"
    elif deepspeed not in (None, False):
        found = _of_deepspeed_file(str(deepspeed), c)
        c.launch = found or "zero3"
        if found is None:
            c.theirs.leave("deepspeed", "the file is not here: choose an accelerate config, zero2 or zero3")
    elif _is_on(launcher, "use_deepspeed"):
        named = launcher.word("deepspeed_config_file")
        by_file = _of_deepspeed_file(named, c) if named else None
        c.launch = by_file or _of_deepspeed(launcher) or "zero2"  # accelerate's default stage
    fsdp, settings = c.theirs.take("fsdp"), c.theirs.take("fsdp_config")
    words = " ".join(map(str, fsdp)) if isinstance(fsdp, list) else str(fsdp or "")
    if isinstance(settings, str):  # as a file, or as JSON in words
        settings = c.theirs.table("fsdp_config")
    offloads = _offloads(settings) if isinstance(settings, ForeignTable) else False
    version = c.theirs.take("fsdp_version")
    if words or isinstance(settings, ForeignTable) or version:
        c.launch = "fsdp2_offload" if offloads or "offload" in words else "fsdp2"
    elif _is_on(launcher, "use_fsdp"):
        launcher.ignore("fsdp_version")
        c.launch = "fsdp2_offload" if _offloads_by_words(launcher) else "fsdp2"
    elif c.launch is None and _is_on(launcher, "multi_gpu"):
        c.launch = "ddp"


def _offloads_by_words(launcher: ForeignTable) -> bool:
    return "fsdp_offload_params" in launcher and launcher.is_on("fsdp_offload_params")
