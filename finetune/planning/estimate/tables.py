"""Facts that `plan` calculates with: devices, links, prices and shapes of models, each with source and date.

They are shipped as YAML next to this file; `hardware.yaml` and `prices.yaml` in the current folder add to them.
"""

from __future__ import annotations

import difflib
import functools
import re
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Annotated, Any, TypeVar

import psutil
import transformers
import yaml
from pydantic import BeforeValidator, Field, ValidationError
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

from finetune.errors import UserError
from finetune.recipe.schema import Names, Positive, Section, Share

_FOLDER = Path(__file__).parent
GIB = 2**30
CPU = "cpu"  # name of this machine's processors in `--on`

Text = Annotated[str, Field(min_length=1)]
Day = Annotated[date, Field(strict=False)]
Table = TypeVar("Table", bound=Section)


class Device(Section):
    """One device as torch counts it. Peaks in TFLOP/s by operand type; None if not supported."""

    name: Text
    also: Names | tuple[()] = ()  # other names in `--on`
    cuda_name: str | None = None  # regular expression for torch.cuda.get_device_name()
    capability: Annotated[tuple[int, int], Field(strict=False)] | None = None  # CUDA's; None: not known, or not CUDA
    fp32: Positive
    tf32: Positive | None = None
    fp16: Positive | None = None
    bf16: Positive | None = None
    memory_gb: Positive  # 10^9 bytes
    memory_gib: Positive | None = None  # that torch reports, which differs
    seen: str | None = None  # source of memory_gib
    bandwidth_gb_s: Positive
    link: Text  # between the devices of a machine; a row of `links`
    network: Text = "ethernet"  # between machines
    source: Text

    @property
    def gib(self) -> float:
        return self.memory_gib or self.memory_gb * 1e9 / GIB


class Link(Section):
    gb_s: Positive  # that one device sends and, at once, receives
    latency_us: Positive
    share: Share  # of it that collectives reach
    source: Text


class Shares(Section):
    """Shares of a device's peaks that operators reach."""

    products: Share  # of matrices
    attention: Share
    memory: Share  # of the bandwidth, by element-wise operators and the optimizer


class Efficiency(Section):
    date: Day
    source: Text
    operator_us: Positive  # that the host takes to start an operator
    ampere: Shares
    hopper: Shares
    default: Shares
    by_device: dict[str, Names]


_Pair = Annotated[tuple[Positive, Positive], Field(strict=False)]


class Processors(Section):
    """What one process reaches on some machine's processors, in fp32; see hardware.yaml."""

    date: Day
    source: Text
    products: Positive  # FLOP/s
    attention: Positive
    memory: tuple[_Pair, ...] = Field(strict=False)  # (bytes of an operator, bytes/s), ascending
    operator_us: Positive
    adamw: Positive  # elements a second


class HostSpec(Section):
    """The machine around devices, for what is offloaded."""

    date: Day
    source: Text
    links: dict[str, Text]  # of a device's link to others: that to host memory, a row of `links`
    adamw_per_core: Positive  # parameters a second
    cores_per_device: Positive
    disk_gb_s: Positive  # of a machine

    def link_of(self, link: str) -> str:
        return self.links.get(link, link)


class Reserve(Section):
    """Memory of a device that no tensor has; see hardware.yaml."""

    date: Day
    source: Text
    context_gib: Annotated[float, Field(ge=0)]
    collectives_gib: Annotated[float, Field(ge=0)]
    gaps: Share
    margin: Share

    def bytes(self, tensors: int, processes: int) -> int:
        """Returns what comes on top of the tensors' peak. processes: of the launch."""
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
        """name: of a device, as torch has it. Returns None for an unknown one, or a slice of one (MIG)."""
        known = self.devices.items() if not re.search(r"\bMIG\b", name) else ()
        return next((key for key, one in known if one.cuda_name and re.search(one.cuda_name, name)), None)

    def shares(self, key: str) -> Shares:
        """key: of a device."""
        efficiency = self.efficiency
        kind = next((name for name, keys in efficiency.by_device.items() if key in keys), "default")
        return getattr(efficiency, kind)


def _amount(value: Any) -> Any:
    """Accepts `2.69 USD/hour`."""
    if isinstance(value, int | float):
        raise ValueError(f"{value} has no unit: write `{value} USD/hour`, for one device")
    if not isinstance(value, str) or (match := _AMOUNT.fullmatch(value.strip())) is None:
        raise ValueError(f"expected a price of one device with its unit, such as `2.69 USD/hour`, got {value!r}")
    return float(match[1]), match[2]


_AMOUNT = re.compile(r"(\d+(?:\.\d+)?) ?([A-Z]{3}) ?/ ?(?:hour|h)")
Amount = Annotated[tuple[float, str], BeforeValidator(_amount)]


class Price(Section):
    """Of one device; (amount, currency) for an hour."""

    device: Text
    provider: Text
    on_demand: Amount | None = None
    spot: Amount | None = None
    losses_per_hour: Positive | None = None  # how often a spot machine is taken away
    date: Day
    source: Text


class Prices(Section):
    prices: tuple[Price, ...] = Field(strict=False)
    losses_per_hour: Positive = 0.05  # where a line has none: an assumption


_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # an eighth of the time, where PyYAML was built with it


def _read(path: Path) -> dict[str, Any]:
    """Raises UserError."""
    try:
        read = yaml.load(path.read_text(encoding="utf-8"), _Loader)  # noqa: S506 - a safe one
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    if not isinstance(read, dict):
        raise UserError(f"{path}: expected keys and values, as in docs/plan.md")
    return read


def _checked(model: type[Table], values: dict[str, Any], path: Path) -> Table:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        lines = [
            f"{'.'.join(map(str, one['loc']))}: {one['msg'].removeprefix('Value error, ')}" for one in error.errors()
        ]
        raise UserError(f"{path}: " + "\n  ".join(lines)) from None


def _merged(shipped: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    both = {**shipped, **own}
    nested = [key for key in own if isinstance(own[key], dict) and isinstance(shipped.get(key), dict)]
    return both | {key: _merged(shipped[key], own[key]) for key in nested}


@functools.cache
def shipped_hardware() -> Hardware:
    path = _FOLDER / "hardware.yaml"
    return _checked(Hardware, _with_links(_read(path)), path)


def read_hardware(own: Path | None = None) -> Hardware:
    """Returns the shipped table and the user's own. own: default hardware.yaml in the current folder, if there is one.
    Raises UserError."""
    path = own or Path("hardware.yaml")
    if own is None and not path.exists():
        return shipped_hardware()
    read = _merged(_read(_FOLDER / "hardware.yaml"), _read(path))
    hardware = _checked(Hardware, _with_links(read), path)
    for key, device in hardware.devices.items():
        for link in (device.link, device.network):
            if link not in hardware.links:
                raise UserError(f"{path}: devices.{key}: no link {link!r}: use one of {', '.join(hardware.links)}")
    return hardware


def _with_links(read: dict[str, Any]) -> dict[str, Any]:
    """Puts the address of a source where its short name is."""
    sources = read.get("sources", {})
    for one in (*read.get("devices", {}).values(), *read.get("links", {}).values()):
        if isinstance(one, dict):
            one["source"] = sources.get(one.get("source"), one.get("source"))
    return read


def read_prices(own: Path | None = None) -> Prices:
    """Returns the shipped prices; those of a device that the user's own file has are replaced. Raises UserError."""
    path = _FOLDER / "prices.yaml"
    shipped = _checked(Prices, _read(path), path)
    path = own or Path("prices.yaml")
    if own is None and not path.exists():
        return shipped
    mine = _checked(Prices, _read(path), path)
    devices = {price.device for price in mine.prices}
    kept = [price for price in shipped.prices if price.device not in devices]
    return Prices(prices=(*mine.prices, *kept), losses_per_hour=mine.losses_per_hour)


# --- places


@dataclass(frozen=True)
class Machines:
    """Equal devices that a run could have."""

    device: Device
    key: str  # in the table
    per_machine: int
    machines: int

    @property
    def count(self) -> int:
        return self.per_machine * self.machines

    @property
    def name(self) -> str:
        return f"{self.machines} x {self.per_machine} {self.key}" if self.machines > 1 else f"{self.count} {self.key}"


MAX_DEVICES = 4096


def parse_machines(text: str, machines: int, hardware: Hardware) -> Machines:
    """Reads `8xH100-80`, `4090` or `2xcpu`. machines: with as many devices each. Raises UserError."""
    match = re.fullmatch(r"(?:(\d+) ?[x×*] ?)?(\S+)", text.strip(), re.IGNORECASE)
    if match is None:
        raise UserError(f"--on {text!r}: expected a number and a device, such as 8xH100-80")
    count, name = int(match[1] or 1), match[2]
    if not 1 <= count * machines <= MAX_DEVICES or machines < 1:
        raise UserError(f"--on {text}: {count} devices on {machines} machines: expected 1 to {MAX_DEVICES:,} in all")
    if name.lower() == CPU:
        return Machines(this_machine(), CPU, count, machines)
    known = {other.lower(): key for key, device in hardware.devices.items() for other in (key, *device.also)}
    if (key := known.get(name.lower())) is None:
        close = difflib.get_close_matches(name.lower(), known, n=3)
        hint = f"did you mean {' or '.join(dict.fromkeys(known[one] for one in close))}? " if close else ""
        raise UserError(
            f"--on {text}: no device {name!r}. {hint}Known: {', '.join(hardware.devices)}, {CPU}; others go into "
            "hardware.yaml (docs/plan.md)"
        )
    return Machines(hardware.devices[key], key, count, machines)


def this_machine() -> Device:
    """Returns this machine's processors and memory as a device, without peaks: only finished runs give times."""
    memory = psutil.virtual_memory().total / 1e9
    link, unknown = "shared_memory", 1.0
    return Device(name=CPU, fp32=unknown, memory_gb=memory, bandwidth_gb_s=unknown, link=link, source="this machine")


# --- models


def _shipped_model(name: str, sees_images: bool) -> dict[str, Any] | None:
    """Returns the facts of a model of the table, with their source; None where it has none of this name."""
    table = _read(_FOLDER / "models.yaml")
    for key, facts in table["seeing" if sees_images else "models"].items():
        if name in (key, *facts.get("also", ())):
            source = facts.get("source", f"https://huggingface.co/{key}/blob/main/config.json")
            return {**facts, "source": f"shipped table ({table['date']}), from {source}"}
    return None


def shapes_source(name: str, sees_images: bool = False) -> str:
    """name: of a model that `shipped_config` knows."""
    facts = _shipped_model(name, sees_images)
    return facts["source"] if facts else ""


def shipped_config(name: str, sees_images: bool = False) -> PretrainedConfig | None:
    """Returns the config of a model of the table, None where it has none of this name. sees_images: with its tower;
    else the text part."""
    if (facts := _shipped_model(name, sees_images)) is None:
        return None
    from finetune.models.text_part import text_config

    kind = facts["config"]["model_type"]
    if kind not in CONFIG_MAPPING:
        raise UserError(f"{name}: transformers {transformers.__version__} has no `{kind}`: pip install -U transformers")
    config = AutoConfig.for_model(**facts["config"])
    config.name_or_path = name
    return config if sees_images else text_config(config, has_head=not config.tie_word_embeddings)
