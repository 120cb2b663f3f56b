"""The shipped tables of `plan`, and what users add to them."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from transformers import AutoModelForMultimodalLM

from finetune.engine.hardware import read_hardware, shipped_hardware
from finetune.errors import UserError
from finetune.features import load_recipe
from finetune.models.base_config import without_weights
from finetune.plan import tables
from finetune.plan.tables import parse_machines, read_prices, shapes_source, shipped_config

RECIPES = sorted(path for path in Path("recipes").rglob("*.yaml") if path.parent.name not in ("base", "tasks"))
TABLE = yaml.safe_load((Path(tables.__file__).parent / "models.yaml").read_text())
MODELS, SEEING = TABLE["models"], TABLE["seeing"]


@pytest.mark.parametrize("name", SEEING)
def test_models_with_a_tower_have_the_published_number_of_parameters(name: str) -> None:
    config = shipped_config(name, sees_images=True)
    assert config is not None
    model = without_weights(config, AutoModelForMultimodalLM)
    model.tie_weights()
    assert sum(parameter.numel() for parameter in model.parameters()) == SEEING[name]["parameters"]


@pytest.mark.parametrize("name", [name for name in MODELS if "B" not in name or "70B" in name or "-8B" in name])
def test_models_of_the_table_have_the_published_number_of_parameters(name: str) -> None:
    _check_parameters(name)


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_all_models_of_the_table_have_the_published_number_of_parameters(name: str) -> None:
    _check_parameters(name)


def _check_parameters(name: str) -> None:
    config = shipped_config(name)
    assert config is not None
    model = without_weights(config)
    model.tie_weights()
    assert sum(parameter.numel() for parameter in model.parameters()) == MODELS[name]["parameters"]


def test_every_recipe_of_a_hub_model_can_be_planned_offline() -> None:
    known, seeing = (
        {*table, *(also for facts in table.values() for also in facts.get("also", ()))} for table in (MODELS, SEEING)
    )
    models = [load_recipe(path).model for path in RECIPES]
    hub = [one for one in models if one.name and not one.name.startswith("runs/")]
    assert {one.name for one in hub if one.train is not None} <= seeing
    named = {one.name for one in hub if one.train is None}
    assert len(named) > 20
    assert named - known == set()


def test_every_line_has_a_source_and_a_date() -> None:
    hardware, prices = shipped_hardware(), read_prices()
    for device in hardware.devices.values():
        assert device.source.startswith("https://"), device.name
        assert {device.link, device.network} <= set(hardware.links), device.name
        assert (device.memory_gib is None) == (device.seen is None), device.name
    assert {name for names in hardware.efficiency.model_dump()["by_device"].values() for name in names} <= set(
        hardware.devices
    )
    for price in prices.prices:
        assert price.source.startswith("https://")
        assert price.device in hardware.devices
    assert all("https://" in shapes_source(name) for name in MODELS)
    assert all("https://" in facts["source"] for facts in SEEING.values())


def test_machines_are_read_by_any_of_their_names() -> None:
    hardware = shipped_hardware()
    eight = parse_machines("8xH100-80", 2, hardware)
    assert (eight.key, eight.per_machine, eight.machines, eight.count) == ("H100-80", 8, 2, 16)
    assert parse_machines("4090", 1, hardware).key == parse_machines("1 x RTX-4090", 1, hardware).key == "4090-24"


@pytest.mark.parametrize(
    ("text", "machines", "words"),
    [
        ("8xH100-81", 1, "did you mean H100-80"),
        ("0xH100", 1, "0 devices"),
        ("9000xH100", 1, "out of range. Fix: give 1 to 4,096"),
        ("2xH100", 0, "on 0 machines"),
        ("", 1, "not a number and a device. Fix: write it like"),
        ("two H100", 1, "not a number and a device. Fix: write it like"),
    ],
)
def test_an_unknown_device_or_an_impossible_size_says_what_to_do(text: str, machines: int, words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse_machines(text, machines, shipped_hardware())


def test_users_add_devices_and_prices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    own = {
        "fp32": 10,
        "bf16": 100,
        "memory_gb": 48,
        "bandwidth_gb_s": 900,
        "link": "slow",
        "name": "Mine",
        "source": "me",
    }
    link = {"gb_s": 5, "latency_us": 50, "share": 0.5, "source": "me"}
    Path("hardware.yaml").write_text(
        yaml.safe_dump({"devices": {"Mine-48": own, "H100-80": {"memory_gib": 70}}, "links": {"slow": link}})
    )
    Path("prices.yaml").write_text(
        "prices:\n  - {device: H100-80, provider: me, on_demand: 1.5 EUR/hour, date: 2026-11-01, source: me}\n"
    )
    hardware = read_hardware()
    assert hardware.devices["Mine-48"].gib == pytest.approx(48e9 / 2**30)
    assert hardware.devices["H100-80"].gib == 70
    assert hardware.devices["H100-80"].bf16 == 989.5
    assert [price.provider for price in read_prices().prices if price.device == "H100-80"] == ["me"]


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        (
            "prices.yaml",
            "prices: [{device: H100-80, provider: me, on_demand: 2.5, date: 2026-11-01, source: me}]",
            "no unit",
        ),
        (
            "prices.yaml",
            "prices: [{device: H100-80, provider: me, on_demand: 2 dollars, date: 2026-11-01, source: me}]",
            "with its unit",
        ),
        ("prices.yaml", "prices: [", "cannot be read"),
        ("prices.yaml", "2", "expected keys"),
        ("hardware.yaml", "devices: {Mine: {name: Mine}}", "devices.Mine.fp32: Field required"),
        ("hardware.yaml", "devices: {H100-80: {memory: 3}}", "devices.H100-80.memory: Extra"),
        ("hardware.yaml", "devices: {H100-80: {link: smoke}}", "no link 'smoke'"),
    ],
)
def test_a_bad_file_of_the_user_is_named_with_key_and_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, text: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(file).write_text(text)
    with pytest.raises(UserError, match=words) as raised:
        (read_hardware if file == "hardware.yaml" else read_prices)()
    assert file in str(raised.value)
