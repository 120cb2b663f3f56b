"""`plan`: choices of places by verdict, time and price, for people, machines and `accelerate launch`."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from finetune.engine.compatibility import check_products
from finetune.engine.hardware import GIB, shipped_hardware
from finetune.engine.launch import read_config_file
from finetune.errors import UserError
from finetune.features import load_recipe
from finetune.plan.answer import SHOWN, as_dicts, assumptions, facts, refused, show, why
from finetune.plan.command import (
    PlanOptions,
    PlanRequest,
    plan,
    ranked,
    run,
    size_of,
    write_config,
)
from finetune.plan.memory import Place, estimate_memory, how_of
from finetune.plan.search import (
    Choice,
    SearchResult,
    answers,
    config_folder,
    host_memory,
    launches,
    verdict,
)
from finetune.plan.shapes import costs_at
from finetune.plan.speed import table_speeds
from finetune.plan.tables import parse_machines

KEYS = {"config", "processes", "verdict", "peak_gib", "tensors_gib", "step_s", "tokens_per_s", "price", "why"}
FREE = ("batch.rows_per_device", "train.activation_checkpointing")
SHORT = ("train.max_steps=60", "schedule.warmup_steps=6", "train.precision=bf16", "data.max_length=64", "batch.rows=4")


def no_page(*_: object) -> None:
    raise AssertionError("--html was not given")


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One plan that several tests look at; made by the first."""
    return {}


@pytest.fixture
def found(planned: dict[str, Any], recipe: dict[str, Any], write_recipe: Any) -> tuple[PlanRequest, list[Choice]]:
    if not planned:
        request, choices, founds = plan(write_recipe(recipe), SHORT, PlanOptions(("2xH100-80",)), load_recipe)
        planned.update(request=request, choices=choices, illegal=founds[0].illegal)
    return planned["request"], planned["choices"]


def test_every_config_is_planned_or_refused_with_its_rule(found: Any, planned: dict[str, Any]) -> None:
    shipped = {path.stem for path in Path("accelerate_configs").glob("*.yaml")}
    named = {one.config for one in found[1]} | {name.split()[0] for name in planned["illegal"]}
    of_more = {"pp_dp", "fsdp2_tp", "fsdp2_cp", "pp_fsdp2", "pp_tp", "pp_fsdp2_tp"}
    assert named == shipped - of_more - {"single"}
    assert "experts" in planned["illegal"]["ep (ep_size 2)"]


def test_objects_for_machines(found: tuple[PlanRequest, list[Choice]]) -> None:
    made = json.loads(json.dumps(as_dicts(*found)))
    assert all(set(one) >= KEYS for one in made)
    for one in made:
        assert one["verdict"] == "fits"
        assert one["peak_gib"] > one["tensors_gib"] > 0
        assert one["step_s"] == pytest.approx(sum(one["step_parts_s"].values()))
        assert one["price"] == pytest.approx(2 * 2.69 * one["step_s"] * 60 / 3600)
    assert [one["step_s"] for one in made] == sorted(one["step_s"] for one in made)


def test_for_people_in_eighty_columns(found: tuple[PlanRequest, list[Choice]]) -> None:
    request, choices = found
    changed = dataclasses.replace(choices[0], changes={"batch.rows_per_device": 2})
    elsewhere = dataclasses.replace(choices[0], machines=parse_machines("1xA100-80", 1, request.hardware))
    for shown in ([changed, *choices[1:]], [changed, elsewhere, *choices[2:]]):
        console = Console(file=io.StringIO(), width=80)
        illegal = {f"ep (ep_size {n})": f"`ep_size: {n}`: no experts" for n in (2, 4)} | {"pp (pp_size 2)": "too few"}
        machines = {one.machines.name: one.machines for one in shown}.values()
        results = [SearchResult(one, [x for x in shown if x.machines == one], illegal) for one in machines]
        show(console, request, shown, results, verbose=True)
        lines = [line for line in console.file.getvalue().splitlines() if line.strip()]
        heading = next(i for i, line in enumerate(lines) if line.startswith("config"))
        table = [line.split() for line in lines[heading + 1 : heading + 1 + min(SHOWN, len(shown))]]
        assert [row[0] for row in table] == [one.config for one in shown[:SHOWN]]  # a line each
        assert [line for line in lines if "\N{HORIZONTAL ELLIPSIS}" in line] == []
        assert table[0][-1] == "a"
        assert lines[-2:] == [
            "not possible: ep (ep_size 2), ep (ep_size 4): `ep_size: 2`: no experts",
            "not possible: pp (pp_size 2): too few",
        ]
        assert "with a: batch.rows_per_device: 2" in lines
        named = {one.config: one.sizes.split()[0] for one in shown if one.sizes}
        assert f"sizes: {', '.join(f'{config} {size}' for config, size in named.items())}" in lines


@pytest.mark.parametrize(("on", "expected"), [("64xH100-80", ["--on 8xH100-80 --nodes 8"]), ("8xH100-80", [])])
def test_devices_that_no_machine_has_are_told(
    found: tuple[PlanRequest, list[Choice]], on: str, expected: list[str]
) -> None:
    request, choices = found
    lines = facts(request, choices, [SearchResult(parse_machines(on, 8, request.hardware), list(choices))])
    assert [line.partition(" in all are ")[2] for line in lines if "devices: --on says" in line] == expected


def test_each_kind_of_machines_is_answered_before_the_rest(found: tuple[PlanRequest, list[Choice]]) -> None:
    request, choices = found
    big, small, none = (parse_machines(text, 1, request.hardware) for text in ("2xH100-80", "1x4090", "2xV100-16"))
    hopeless = dataclasses.replace(choices[0], machines=small, verdict="no", peak=30 * GIB)
    worse = dataclasses.replace(hopeless, peak=40 * GIB)
    every = [*choices, worse, hopeless]
    first = ranked(every, PlanOptions(()))
    assert [one.machines.name for one in answers(first)] == ["2 H100-80", "1 4090-24"]
    assert answers(first)[1] is hopeless  # the least is missing
    results = [SearchResult(big, list(choices)), SearchResult(small, [worse, hopeless])]
    results.append(SearchResult(none, [], {"ddp": "no products of bf16"}))
    shown = [first[0], hopeless, *(one for one in first[1:] if one is not hopeless)]
    console = Console(file=io.StringIO(), width=100)
    show(console, request, shown, results)
    text = console.file.getvalue()
    table = text[text.index("\nconfig ") :].splitlines()[2:5]
    assert [re.findall(r"\d [A-Z\d]+-\d+", line)[0] for line in table] == ["2 H100-80", "1 4090-24", "2 V100-16"]
    assert f"{hopeless.name}: 6.4 GiB more than the 23.6 of a device" in text
    assert "2 V100-16: no products of bf16" in text
    assert "40.0" not in text  # what does not fit is behind -v
    assert "-v shows" in text
    assert refused(results)[0]["on"] == "2 V100-16"
    show(console, request, shown, results, verbose=True)
    assert "40.0" in console.file.getvalue()


def test_every_device_that_was_asked_for_has_an_answer(recipe: dict[str, Any], write_recipe: Any) -> None:
    """A small model is not faster on more devices, which is said."""
    on = ("2x4090", "1x4090", "1x4090", "4x4090")
    request, choices, results = plan(write_recipe(recipe), SHORT, PlanOptions(on), load_recipe)
    assert sorted(one.machines.count for one in answers(choices)) == [1, 2, 4]
    assert [one["is_answer"] for one in as_dicts(request, choices)] == [True] * 3 + [False] * (len(choices) - 3)
    assert all(one.config != "single" for one in choices if one.machines.count > 1)
    assert results[0].alone is not None
    for one in choices:
        if one.faster is not None:
            assert one.step is not None
            assert one.faster.step is not None
            assert one.faster.step.seconds <= one.step.seconds
            assert f"not faster than {one.faster.config} on" in why(request, one)
    assert any(one.faster for one in answers(choices))


def test_what_changes_no_result_is_all_that_may_differ(found: tuple[PlanRequest, list[Choice]]) -> None:
    assert all(set(one.changes) <= set(FREE) for one in found[1])


def test_the_written_config_is_one_that_accelerate_reads(
    found: tuple[PlanRequest, list[Choice]], tmp_path: Path
) -> None:
    request, choices = found
    one = next(choice for choice in choices if choice.config == "tp")
    lines = write_config(request, one, tmp_path)
    launch = read_config_file(str(tmp_path / "plan-tp-2.yaml"))
    assert (launch.processes, launch.parallelism.tensor) == (2, 2)
    assert "batch.rows_per_device" in lines[2]
    assert "activation_checkpointing" in lines[2]


def test_known_times_and_prices_come_before_unknown_ones(found: tuple[PlanRequest, list[Choice]]) -> None:
    cheap, dear = found[1][0], dataclasses.replace(found[1][0], price=1e6, hours=100.0, step=None)
    unknown = dataclasses.replace(cheap, per_million=None)
    assert ranked([dear, cheap], PlanOptions(()))[0] is cheap  # a step whose time is known
    assert ranked([unknown, cheap], PlanOptions((), by="price"))[0] is cheap


def test_never_fits_within_the_margin() -> None:
    hardware = shipped_hardware()
    machines = parse_machines("4090", 1, hardware)
    device = machines.device.gib
    margin = hardware.reserve.margin * device
    for peak, expected in ((device - margin - 0.01, "fits"), (device - margin + 0.01, "tight"), (device + 0.01, "no")):
        assert verdict(int(peak * GIB), machines, hardware) == expected


def test_the_verdict_counts_host_memory(found: tuple[PlanRequest, list[Choice]]) -> None:
    request, choices = found
    one = next(choice for choice in choices if choice.config == "fsdp2_offload")
    process = request.hardware.host.process_gib
    assert one.memory.host > 0
    assert one.host_need == pytest.approx((one.memory.host + one.memory.after["save"]) / GIB + 2 * process)
    assert one.host_has == 232  # of the cheapest offer that says it, for two devices
    assert "GiB of host memory on each machine, of 232" in why(request, one)
    elsewhere, hardware = parse_machines("2x4090", 1, request.hardware), request.hardware
    assert host_memory(request, elsewhere) is None
    assert host_memory(dataclasses.replace(request, host_gib=64.0), one.machines) == 64
    for need, expected in ((50.0, "fits"), (60.0, "tight"), (70.0, "no")):
        assert verdict(GIB, one.machines, hardware, need, 64.0) == expected
        assert verdict(GIB, one.machines, hardware, need, None) == "fits"
    short = dataclasses.replace(one, verdict="no", host_need=70.0, host_has=64.0)
    assert short.host_missing == 6
    assert why(request, short).startswith("needs 70 GiB of host memory on each machine, which has 64")
    unknown = dataclasses.replace(one, host_has=None)
    assert "not known to be there" in why(request, unknown)
    assert ranked([short, unknown], PlanOptions(()))[0] is unknown


def test_a_step_is_not_weighed_where_what_is_kept_is_too_much(found: tuple[PlanRequest, list[Choice]]) -> None:
    request, (one, *_) = found
    place = Place(one.launch, 2)
    whole = estimate_memory(request.recipe, request.config, place, one.batch)
    kept = estimate_memory(request.recipe, request.config, place, one.batch, most=1)
    assert kept.at_least
    assert not whole.at_least
    assert kept.tensors == sum(whole.persistent.values()) - whole.persistent["gradients"] < whole.tensors
    hopeless = dataclasses.replace(one, memory=kept, verdict="no", step=None)
    heavy = dataclasses.replace(one, verdict="no")
    assert ranked([hopeless, heavy], PlanOptions(()))[-1] is hopeless
    assert "no step weighed" in as_dicts(request, [hopeless])[0]["why"]


def test_tensor_parallel_groups_stay_on_a_machine() -> None:
    machines = parse_machines("4xH100-80", 2, shipped_hardware())
    sizes = {launch.parallelism.tensor for launch in launches(machines) if launch.where == "tp"}
    assert sizes == {2, 4}  # not 8
    assert {launch.parallelism.replicate for launch in launches(machines) if launch.where == "hsdp"} == {2}


def test_a_config_is_searched_by_what_it_says_not_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hardware, folder = shipped_hardware(), tmp_path / "accelerate_configs"
    shipped_folder = config_folder()
    folder.mkdir()
    names = {"single": "single", "pp": "a", "hsdp": "b", "zero3_offload": "c", "fsdp2_tp": "d"}
    for shipped, name in names.items():
        (folder / f"{name}.yaml").write_text((shipped_folder / f"{shipped}.yaml").read_text(encoding="utf-8"))
    monkeypatch.chdir(tmp_path)
    found = [(one.where, one.parallelism.summary()) for one in launches(parse_machines("4xH100-80", 1, hardware))]
    assert found == [
        ("a", "pipeline 4"),
        ("b", "replicate 2 x shard 2"),
        ("c", "shard 4"),
        ("d", "shard 2 x tensor 2"),
    ]
    alone = [one.where for one in launches(parse_machines("1xH100-80", 1, hardware))]
    assert alone == ["c", "single"]


def test_what_is_assumed_has_a_name(found: tuple[PlanRequest, list[Choice]]) -> None:
    request, choices = found
    assert request.shapes_from == "its config.json"
    of_config = {one.config: " ".join(assumptions(request, one)) for one in choices}
    assert "collectives reach 75% of nvlink4's 450 GB/s" in of_config["fsdp2"]
    assert "fsdp2: communication is hidden by up to 90% of compute" in of_config["fsdp2"]
    assert "pipelines" in of_config["pp"]
    assert "pipelines" not in of_config["ddp"]
    other = request.recipe.model_copy(
        update={"batch": request.recipe.batch.model_copy(update={"rows_per_device": "auto"})}
    )
    assert "auto is 1" in assumptions(dataclasses.replace(request, recipe=other), choices[0])[0]
    assert "V100-16 has the memory of its data sheet" in " ".join(
        assumptions(request, dataclasses.replace(choices[0], machines=parse_machines("V100-16", 1, request.hardware)))
    )


@pytest.mark.long
def test_a_device_is_planned_with_the_attention_that_a_run_has_there(recipe: dict[str, Any], write_recipe: Any) -> None:
    """AMD's cards, and NVIDIA's before Ampere, have none of torch's flash kernels."""
    path, on = write_recipe(recipe), PlanOptions(("1xMI300X", "1xH100-80"))
    # Plain layers: of the less that fused ones keep, what the mask of flex takes is a larger part.
    request, choices, _ = plan(path, (*SHORT, "model.kernels=plain"), on, load_recipe)
    amd, hopper = (next(one for one in choices if one.machines.key[0] == key) for key in "MH")
    flex = request.hardware.efficiency.flex
    assert amd.machines.device.kernels is None
    assert hopper.machines.device.has_flash_kernels
    assert "a kernel compiled for the documents' mask; not varlen" in assumptions(request, amd)[-1]
    speeds = [table_speeds(request.recipe, one.machines, request.hardware) for one in (amd, hopper)]
    shares = [request.hardware.shares(one.machines.key) for one in (amd, hopper)]
    for speed, share, one, factor in zip(speeds, shares, (amd, hopper), (flex, 1.0), strict=True):
        assert speed
        assert speed.attention == pytest.approx((one.machines.device.bf16 or 0) * 1e12 * share.attention * factor)
    assert amd.memory.tensors == pytest.approx(hopper.memory.tensors, rel=0.02)
    with pytest.raises(UserError, match=r"`varlen` does not fit .* need an NVIDIA GPU"):
        plan(path, (*SHORT, "model.attention=varlen"), PlanOptions(("1xMI300X",)), load_recipe)
    costs = costs_at(request.recipe, request.config, amd.launch, "cuda")
    hows = [how_of(costs, capability, 1).capability for capability in ((8, 6), (9, 0), (7, 5), None)]
    assert hows == [(9, 0), (9, 0), (7, 5), None]  # one kernel from Ampere on


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (PlanOptions(()), "--on is required. Fix: add --on 8xH100-80"),
        (PlanOptions(("8xH100-81",)), "did you mean"),
        (PlanOptions(("2xH100",), by="luck"), "time or price"),
        (
            PlanOptions(("2xH100",), host_memory="128"),
            "--host-memory 128: not a size with its unit. Fix: write it like 24GB",
        ),
        (PlanOptions(("2xcpu",), host_memory="128GB"), "memory is this machine's. Fix: remove it"),
        (PlanOptions(("2xH100",), as_json=True, verbose=True), "--json has all places anyway"),
    ],
)
def test_bad_input_says_what_to_give(
    recipe: dict[str, Any], write_recipe: Any, options: PlanOptions, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        run(write_recipe(recipe), SHORT, options, Console(), load_recipe, no_page)


SCALED = ("mode=qlora", "lora={rank: 4, alpha: 8}", "quantization={type: fp8, compute: scaled}")
EIGHT_BITS = [(("train.precision=fp8",), "bf16"), (SCALED, "dequantised")]


@pytest.mark.parametrize(("words", "other"), EIGHT_BITS)
def test_products_of_8_bits_are_refused_where_a_device_has_none(
    recipe: dict[str, Any], write_recipe: Any, words: tuple[str, ...], other: str
) -> None:
    path, refused = write_recipe(recipe), f"has no products of 8 bits with a scale for each row.*: use {other}"
    with pytest.raises(UserError, match=f"RTX 4090 {refused}"):
        plan(path, (*SHORT, *words), PlanOptions(("4090",)), load_recipe)
    asked, devices = load_recipe(path, (*SHORT, *words)), shipped_hardware().devices
    known = {key: device.capability for key, device in devices.items() if device.capability}
    have = ("H100", "H200", "GH200", "B200", "B300", "5090", "RTX-PRO-6000")  # Hopper and Blackwell
    for key, capability in known.items():
        refuses = nullcontext() if key.startswith(have) else pytest.raises(UserError)
        with refuses:
            check_products(asked.train, asked.quantization, key, capability)
    assert set(devices) - set(known) == {"MI300X-192", "MI325X-256", "MI250X-64"}


def test_sizes_are_read() -> None:
    assert (size_of("--memory", "24GiB"), round(size_of("--memory", "24GB"), 2)) == (24.0, 22.35)
    with pytest.raises(UserError, match="--memory 24"):
        size_of("--memory", "24")


@pytest.mark.long
def test_a_smaller_device(recipe: dict[str, Any], write_recipe: Any, capsys: Any) -> None:
    path, on = write_recipe(recipe), ("1xH100-80",)
    long = (*SHORT, "data.max_length=16384", "batch.rows_per_device=4", "train.activation_checkpointing=false")
    run(path, long, PlanOptions(on, memory="8GiB", as_json=True), Console(), load_recipe, no_page)
    first, *lines = json.loads(capsys.readouterr().out)
    assert (first["change"], first["saves_gib"], first["config"]) == ("no change", 0, "single")
    assert [line["change"].split(":")[0] for line in lines[:2]] == list(FREE)
    for line in lines:
        assert line["verdict"] == "fits"
        assert line["saves_gib"] == pytest.approx(first["peak_gib"] - line["peak_gib"], abs=0.002)
        assert line["saves_gib"] > 0.01 * line["peak_gib"]
    assert len({line["change"] for line in lines}) == len(lines)
    assert not any("paged" in line["change"] or "qlora" in line["change"] for line in lines)
    run(path, long, PlanOptions(on, memory="0.5GiB"), Console(), load_recipe, no_page)
    assert "no setting makes this fit in 0.5GiB" in capsys.readouterr().out
