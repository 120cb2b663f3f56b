"""Prices and configs of models, each with source and date, shipped as YAML next to this file; and machines.

`prices.yaml` in the current folder adds to the prices.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import psutil
import transformers
from pydantic import BeforeValidator, Field
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

from finetune.engine.hardware import CPU, Day, Device, Hardware, Text, checked, read_table
from finetune.errors import UserError
from finetune.models.base_config import base_config
from finetune.models.base_model import Base
from finetune.models.config import without_dropout
from finetune.recipe import Recipe
from finetune.recipe.schema import Positive, Section

_FOLDER = Path(__file__).parent


def parse_amount(value: Any) -> Any:
    """Reads `2.69 USD/hour`."""
    if isinstance(value, int | float):
        raise ValueError(f"{value} has no unit: write `{value} USD/hour`, for one device")
    text = value.strip() if isinstance(value, str) else ""
    if (match := re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Z]{3}) ?/ ?(?:hour|h)", text)) is None:
        raise ValueError(f"expected a price of one device with its unit, such as `2.69 USD/hour`, got {value!r}")
    return float(match[1]), match[2]


Amount = Annotated[tuple[float, str], BeforeValidator(parse_amount)]


class Price(Section):
    """Price of one device; (amount, currency) for an hour."""

    device: Text
    provider: Text
    on_demand: Amount
    host_gib: Positive | None = None  # host memory of its machine for each device; None: not published
    date: Day
    source: Text


class Prices(Section):
    prices: tuple[Price, ...] = Field(strict=False)


def read_prices(own: Path | None = None) -> Prices:
    """Returns the shipped prices, with devices of the user's own file replaced. Raises UserError."""
    path = _FOLDER / "prices.yaml"
    shipped = checked(Prices, read_table(path), path)
    path = own or Path("prices.yaml")
    if own is None and not path.exists():
        return shipped
    mine = checked(Prices, read_table(path), path)
    devices = {price.device for price in mine.prices}
    kept = [price for price in shipped.prices if price.device not in devices]
    return Prices(prices=(*mine.prices, *kept))


@dataclass(frozen=True)
class Machines:
    """Equal devices on equal machines."""

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
        raise UserError(f"--on {text!r}: not a number and a device. Fix: write it like 8xH100-80")
    count, name = int(match[1] or 1), match[2]
    if not 1 <= count * machines <= MAX_DEVICES or machines < 1:
        raise UserError(
            f"--on {text}: {count} devices on {machines} machines are out of range. Fix: give 1 to {MAX_DEVICES:,} in "
            "all"
        )
    if name.lower() == CPU:
        return Machines(this_machine(), CPU, count, machines)
    keys = {other.lower(): key for key, device in hardware.devices.items() for other in (key, *device.also)}
    if (key := keys.get(name.lower())) is None:
        close = difflib.get_close_matches(name.lower(), keys, n=3)
        hint = f" (did you mean {' or '.join(dict.fromkeys(keys[one] for one in close))}?)" if close else ""
        raise UserError(
            f"--on {text}: no device {name!r}{hint}. Known: {', '.join(hardware.devices)}, {CPU}. Fix: use one of "
            "them, or add yours to hardware.yaml (docs/reference/plan.md)"
        )
    return Machines(hardware.devices[key], key, count, machines)


def this_machine() -> Device:
    """Returns this machine's processors and memory as a device, without peaks: only finished runs give times."""
    memory = psutil.virtual_memory().total / 1e9
    link, unknown = "shared_memory", 1.0
    return Device(name=CPU, fp32=unknown, memory_gb=memory, bandwidth_gb_s=unknown, link=link, source="this machine")


def _shipped_model(name: str, sees_images: bool) -> dict[str, Any] | None:
    """Returns the facts of a model of the table, with their source; None for an unknown name."""
    table = read_table(_FOLDER / "models.yaml")
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
    """Returns the config of a model of the table, None for an unknown name. sees_images: with its tower; else the text
    part."""
    if (facts := _shipped_model(name, sees_images)) is None:
        return None
    from finetune.models.text_part import text_config

    kind = facts["config"]["model_type"]
    if kind not in CONFIG_MAPPING:
        raise UserError(
            f"{name}: transformers {transformers.__version__} has no `{kind}`. Fix: pip install -U transformers"
        )
    config = AutoConfig.for_model(**facts["config"])
    config.name_or_path = name
    return config if sees_images else text_config(config, has_head=not config.tie_word_embeddings)


def config_and_source(recipe: Recipe) -> tuple[PretrainedConfig, str]:
    """Returns the config of the recipe's model, from its folder or the hub's cache, else from the shipped table; and
    its source. Raises UserError."""
    try:
        base_config(recipe.model)
    except UserError as error:
        name, sees_images = recipe.model.name or "", recipe.model.train is not None
        config = shipped_config(name, sees_images)
        if config is None:
            raise UserError(
                f"{error}\n`plan` downloads nothing, and the shipped table does not have this model. Fix: give a "
                "folder with its config.json, or download it once"
            ) from None
        config = without_dropout(config) if recipe.drops_nothing else config
        return config, shapes_source(name, sees_images)
    return Base.of(recipe).config, "its config.json"
