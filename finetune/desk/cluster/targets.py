"""Schedulers and clouds that a manifest can be written for: one row of a table and one template each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from finetune.engine.hardware import CPU
from finetune.errors import UserError
from finetune.plan.tables import Machines

SHARED = "/shared"  # where containers see the volume


@dataclass(frozen=True)
class Target:
    """A scheduler or cloud.

    devices: its name of each device of hardware.yaml; None: it counts GPUs without naming them.
    shared: what `--shared` names; None: the current folder, which every machine sees.
    alone: why a run has one machine there; None: it may have several.
    """

    title: str
    suffix: str  # of the manifest
    submit: tuple[str, ...]  # the command, before the manifest
    shared: str | None
    devices: Mapping[str, str] | None = None
    alone: str | None = None

    @property
    def has_containers(self) -> bool:
        return self.shared is not None


# Names as of 2026-11: https://docs.skypilot.co/en/latest/reference/compute/gpus.html, and JobHardware of
# huggingface_hub 2.4. SkyPilot reaches the other clouds.
_SKYPILOT = {
    "B200-180": "B200",
    "H200-141": "H200",
    "H100-80": "H100",
    "A100-80": "A100-80GB",
    "A100-40": "A100",
    "L40S-48": "L40S",
    "L4-24": "L4",
    "A10-24": "A10",
    "A6000-48": "RTXA6000",
    "T4-16": "T4",
    "5090-32": "RTX5090",
    "4090-24": "RTX4090",
    "3090-24": "RTX3090",
    "V100-32": "V100-32GB",
    "V100-16": "V100",
    "MI300X-192": "MI300X",
}
_HF_JOBS = {  # a flavor has its number of devices
    "H200-141": "h200",
    "2xH200-141": "h200x2",
    "4xH200-141": "h200x4",
    "8xH200-141": "h200x8",
    "A100-80": "a100-large",
    "4xA100-80": "a100x4",
    "8xA100-80": "a100x8",
    "T4-16": "t4-medium",
    "L40S-48": "l40sx1",
    "4xL40S-48": "l40sx4",
    "8xL40S-48": "l40sx8",
    "L4-24": "l4x1",
    "4xL4-24": "l4x4",
    CPU: "cpu-xl",
}

TARGETS: dict[str, Target] = {
    "slurm": Target("Slurm", ".sbatch", ("sbatch",), shared=None),
    "kubeflow": Target("Kubeflow Trainer", ".yaml", ("kubectl", "apply", "-f"), "a PersistentVolumeClaim"),
    "skypilot": Target("SkyPilot", ".yaml", ("sky", "jobs", "launch", "--yes"), "a SkyPilot volume", _SKYPILOT),
    "hf-jobs": Target(
        "Hugging Face Jobs", ".sh", ("bash",), "a bucket, USER/NAME", _HF_JOBS, "a job there is one machine"
    ),
}


def target_of(name: str) -> Target:
    if name not in TARGETS:
        raise UserError(f"--on {name}: not a known target. Fix: use one of {', '.join(TARGETS)}")
    return TARGETS[name]


def device_name(target: Target, machines: Machines) -> str | None:
    """Returns a target's name of the devices of a machine; None if it names none. Raises UserError."""
    if machines.key == CPU and (target.devices is None or CPU not in target.devices):
        return None
    if target.devices is None:
        return None
    counts = any("x" in key for key in target.devices)
    key = f"{machines.per_machine}x{machines.key}" if counts and machines.per_machine > 1 else machines.key
    if machines.key == CPU:
        key = CPU
    if key not in target.devices:
        offers = ", ".join(name for name in target.devices if name != CPU)
        raise UserError(
            f"{target.title} offers no {machines.per_machine} x {machines.key} in a machine. Fix: use one of {offers}"
        )
    return target.devices[key]
