"""Devices, their links and host machines: peaks, memory, bandwidth, each with source and date.

They are shipped in `hardware.yaml`; a file of that name in the current folder adds to them.
"""

from __future__ import annotations

import functools
import re
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch
import yaml
from pydantic import Field, ValidationError

from finetune.errors import UserError
from finetune.recipe.schema import Names, Positive, Section, Share

_SHIPPED = Path(__file__).with_name("hardware.yaml")
GIB = 2**30
CPU = "cpu"  # name of this machine's processors in `--on`

Text = Annotated[str, Field(min_length=1)]
Day = Annotated[date, Field(strict=False)]
Table = TypeVar("Table", bound=Section)


class Device(Section):
    """One device as torch counts it. Peaks in TFLOP/s by operand type; None if not supported."""

    name: Text
    also: Names | tuple[()] = ()  # further names in `--on`
    cuda_name: str | None = None  # regular expression for torch.cuda.get_device_name()
    capability: Annotated[tuple[int, int], Field(strict=False)] | None = None  # of CUDA; None: unknown, or AMD
    amd: bool = False  # torch calls it `cuda`, without the attention kernels of NVIDIA
    fp32: Positive
    tf32: Positive | None = None
    fp16: Positive | None = None
    bf16: Positive | None = None
    memory_gb: Positive  # 10^9 bytes
    memory_gib: Positive | None = None  # total that torch reports, which differs
    seen: str | None = None  # source of memory_gib
    bandwidth_gb_s: Positive
    link: Text  # between the devices of a machine; a row of `links`
    network: Text = "ethernet"  # between machines
    host_gib: Positive | None = None  # host memory of a machine with such devices; None: not known
    source: Text

    @property
    def gib(self) -> float:
        return self.memory_gib or self.memory_gb * 1e9 / GIB

    @property
    def kernels(self) -> tuple[int, int] | None:
        """Returns the capability that attention kernels depend on, None on AMD; Hopper's if it is not known."""
        return None if self.amd else self.capability or (9, 0)

    @property
    def has_flash_kernels(self) -> bool:
        return self.kernels is not None and self.kernels >= (8, 0)

    def faster_precision(self, precision: str) -> str | None:
        """Returns a note if a recipe is in fp32 and the device multiplies faster in 16 bits; as `new` writes it on a
        CPU, though it may run elsewhere."""
        peak = self.bf16 or self.fp16
        if precision != "fp32" or peak is None or peak <= self.fp32:
            return None
        name = "bf16" if self.bf16 else "fp16"
        return (
            f"train.precision: fp32 leaves most of {self.name} unused. By its tables it multiplies "
            f"{peak / self.fp32:.0f} times faster in {name}. Fix: train.precision={name}; `new` writes fp32 where "
            "16 bits are emulated"
        )


class Link(Section):
    gb_s: Positive  # sent, and received at once, by one device
    latency_us: Positive
    share: Share  # share of gb_s reached by collectives
    nics: Annotated[int, Field(ge=1)] | Literal["device"] = 1  # network cards of a machine, or one for each device
    source: Text

    def between_machines(self, per_machine: int, members: int) -> float:
        """Returns the GB/s that a collective of `members` devices of each machine reaches over all cards of its
        machine, which it shares with the collectives of the other devices."""
        cards = per_machine if self.nics == "device" else self.nics
        return self.gb_s * self.share * cards * members / per_machine


class Shares(Section):
    """Shares of a device's peaks reached by operators."""

    products: Share  # share for matrix products
    attention: Share
    memory: Share  # share of bandwidth, for element-wise operators and the optimizer


class Efficiency(Section):
    date: Day
    source: Text
    operator_us: Positive  # for the host to start an operator
    flex: Share  # of the speed of flash kernels that FlexAttention reaches
    flex_source: Text
    fused: Share  # of the bytes of element-wise operators that are left if a compiler fuses them
    fused_source: Text
    families: dict[str, Shares]  # `default`: of devices that are in no other
    by_device: dict[str, Names]  # keys of devices by family


_Pair = Annotated[tuple[Positive, Positive], Field(strict=False)]


class Processors(Section):
    """Throughput of one process on a machine's processors, in fp32; see hardware.yaml."""

    date: Day
    source: Text
    products: Positive  # FLOP/s
    attention: Positive
    memory: tuple[_Pair, ...] = Field(strict=False)  # (bytes of an operator, bytes/s), ascending
    operator_us: Positive
    adamw: Positive  # elements per second


class HostSpec(Section):
    """The machine around devices, for offload."""

    date: Day
    source: Text
    links: dict[str, Text]  # device link -> link to host memory, a row of `links`
    adamw_per_core: Positive  # parameters per second
    cores_per_device: Positive
    disk_gb_s: Positive  # per machine
    process_gib: Positive  # of a process without its tensors

    def link_of(self, link: str) -> str:
        return self.links.get(link, link)


class Reserve(Section):
    """Device memory outside tensors; see hardware.yaml."""

    date: Day
    source: Text
    context_gib: Annotated[float, Field(ge=0)]
    collectives_gib: Annotated[float, Field(ge=0)]
    gaps: Share
    margin: Share

    def bytes(self, tensors: int, processes: int) -> int:
        """Returns the bytes on top of the tensors' peak. processes: number in the launch."""
        fixed = self.context_gib + (self.collectives_gib if processes > 1 else 0)
        return int(fixed * GIB + self.gaps * tensors)


class Hardware(Section):
    date: Day
    sources: dict[str, str]
    devices: dict[str, Device]
    links: dict[str, Link]
    efficiency: Efficiency
    processors: Processors
    host: HostSpec
    reserve: Reserve

    def key_of(self, name: str) -> str | None:
        """Returns the key of a device by torch's name; None for an unknown one, or a slice of one (MIG)."""
        known = self.devices.items() if not re.search(r"\bMIG\b", name) else ()
        return next((key for key, one in known if one.cuda_name and re.search(one.cuda_name, name)), None)

    def family(self, key: str) -> str:
        """Returns the family of a device, whose shares it has."""
        return next((name for name, keys in self.efficiency.by_device.items() if key in keys), "default")

    def shares(self, key: str) -> Shares:
        """Returns the shares of a device by key."""
        return self.efficiency.families[self.family(key)]


# --- reading

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # takes an eighth of the time, if PyYAML was built with it


def read_table(path: Path) -> dict[str, Any]:
    """Reads a YAML table. Raises UserError."""
    try:
        read = yaml.load(path.read_text(encoding="utf-8"), _Loader)  # noqa: S506 - a safe loader
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}. Fix: correct the path, or the YAML in it") from None
    if not isinstance(read, dict):
        raise UserError(f"{path}: expected keys and values. Fix: write them as in docs/reference/plan.md")
    return read


def checked(model: type[Table], values: dict[str, Any], path: Path) -> Table:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        lines = [
            f"{'.'.join(map(str, one['loc']))}: {one['msg'].removeprefix('Value error, ')}" for one in error.errors()
        ]
        problems = "\n  ".join(lines)
        raise UserError(f"{path}: {problems}\nFix: correct these keys, as in docs/reference/plan.md") from None


def merged(shipped: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    both = {**shipped, **own}
    nested = [key for key in own if isinstance(own[key], dict) and isinstance(shipped.get(key), dict)]
    return both | {key: merged(shipped[key], own[key]) for key in nested}


@functools.cache
def shipped_hardware() -> Hardware:
    return checked(Hardware, _with_links(read_table(_SHIPPED)), _SHIPPED)


def read_hardware(own: Path | None = None) -> Hardware:
    """Returns the shipped table with the user's own, by default ./hardware.yaml. Raises UserError."""
    path = own or Path("hardware.yaml")
    if own is None and not path.exists():
        return shipped_hardware()
    read = merged(read_table(_SHIPPED), read_table(path))
    hardware = checked(Hardware, _with_links(read), path)
    for key, device in hardware.devices.items():
        for link in (device.link, device.network):
            if link not in hardware.links:
                raise UserError(f"{path}: devices.{key}: no link {link!r}. Fix: use one of {', '.join(hardware.links)}")
    return hardware


def _with_links(read: dict[str, Any]) -> dict[str, Any]:
    """Replaces short names of sources by their addresses."""
    sources = read.get("sources", {})
    for one in (*read.get("devices", {}).values(), *read.get("links", {}).values()):
        if isinstance(one, dict):
            one["source"] = sources.get(one.get("source"), one.get("source"))
    return read


def peak_tflops(name: str, compute: torch.dtype) -> float | None:
    """Returns the dense peak for products of this type; fp32 ones run in TF32 if torch allows it."""
    hardware = shipped_hardware()
    if (key := hardware.key_of(name)) is None:
        return None
    device = hardware.devices[key]
    if compute == torch.bfloat16:
        return device.bf16
    if compute == torch.float16:
        return device.fp16
    fast = device.tf32 is not None and torch.get_float32_matmul_precision() != "highest"
    return device.tf32 if fast else device.fp32
