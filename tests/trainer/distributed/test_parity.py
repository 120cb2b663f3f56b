"""The promise: one recipe, the same loss at every step and the same parameters at the end, wherever it runs.

Cells of the matrix of scripts/proofs/parity_matrix.py, and proof that its comparison can fail.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import parity
import pytest
from safetensors.torch import load_file, save_file

CASE_BY_NAME = {case.name: case for case in parity.CASES}
Place = tuple[str, int]  # accelerate config, processes
STEPS, ROWS = 8, 80  # the matrix: 20, 300; epochs end on the way in both
# Cells for what each config decides; tests/matrices, with --all, covers every case and every config.
RUN: dict[Place, set[str]] = {
    # Ranks take rows, whole parameters on each.
    ("ddp", 2): {"full accumulate 1", "full auto rows", "full token budget"},
    # Shards decide more: a tied table, mixed precision, dropout.
    ("fsdp2", 2): {
        *("full bf16", "full tied", "full muon", "lora dropout rslora", "lora dpo adapters off", "qlora fp8"),
        *("full", "full own sft", "full own", "full gpt_oss", "full mtp"),
    },
    ("fsdp2_offload", 2): {"full"},
    ("zero3", 2): {"full qwen3_5", "lora dora", "full mtp"},
    # Ranks share rows.
    ("pp", 2): {"lora", "full orpo", "full mtp"},
    ("tp", 2): {"lora dropout rslora", "full mtp"},
    ("ulysses", 2): {"full mistral window", "full own"},
    ("ep", 2): {"full mixtral balance"},
}
LAUNCHES = tuple(
    (config, processes, [CASE_BY_NAME[name] for name in sorted(names)]) for (config, processes), names in RUN.items()
)


Lines = list[dict[str, Any]]


@pytest.fixture(scope="module", autouse=True)
def few_steps() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parity, "STEPS", STEPS)
        yield


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of scripts/proofs/parity_matrix.py with every case run on one process."""
    folder = tmp_path_factory.mktemp("parity")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FINETUNE_CACHE", str(folder / "cache"))
        parity.prepare(folder, ROWS)
        names = {case.name for _, _, cases in LAUNCHES for case in cases}
        parity.launch(folder, "single", 1, [case.name for case in parity.CASES if case.name in names])
    return folder


def test_the_matrix_has_every_config_and_size_that_is_promised() -> None:
    sizes = {(config, processes) for config, processes, _ in parity.LAUNCHES}
    configs = {"ddp", "fsdp2", "fsdp2_offload", "zero2", "zero2_offload", "zero3", "zero3_offload"}
    assert sizes >= {(config, processes) for config in configs for processes in (2, 4)}
    shipped = {path.stem for path in (parity.ROOT / "accelerate_configs").glob("*.yaml")}
    assert {config for config, _ in sizes} == (shipped - {"single", "zero3_nvme"}) | set(parity.VARIANTS)
    for config, processes, cases in parity.selected([]):
        names = {case.name for case in cases}
        assert any(name.startswith("full") for name in names), config
        if config == "ep":
            assert {"full mixtral", "lora mixtral", "full qwen3_moe"} <= names
        if processes == 2 and config in configs:
            assert {"full", "lora", "qlora"} <= names, config


def test_the_cells_that_the_matrix_draws_cover_it() -> None:
    drawn, offered = (
        {(config, processes): {case.name for case in cases} for config, processes, cases in launches}
        for launches in (parity.covering(0), parity.selected([]))
    )
    assert all(names <= offered[place] for place, names in drawn.items())
    assert {processes for _, processes in offered.keys() - drawn.keys()} == {8}
    assert set().union(*drawn.values()) == set().union(*offered.values())
    pairs, all_pairs = (
        {(word, parity.kind(config)) for (config, _), names in some.items() for name in names for word in name.split()}
        for some in (drawn, offered)
    )
    assert pairs == all_pairs
    assert sum(map(len, drawn.values())) < 0.3 * sum(map(len, offered.values()))


@pytest.mark.parametrize(
    ("config", "processes", "cases"), LAUNCHES, ids=[f"{config} x{processes}" for config, processes, _ in LAUNCHES]
)
def test_same_as_one_process(
    references: Path, monkeypatch: pytest.MonkeyPatch, config: str, processes: int, cases: list[parity.Case]
) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(references / "cache"))
    parity.launch(references, config, processes, [case.name for case in cases])
    differences = [parity.compare(references, config, processes, case) for case in cases]
    assert len(differences) == len(cases) > 0
    assert [f"{d.case}: {problem}" for d in differences for problem in d.problems] == []
    assert all(d.passed for d in differences)
    if {"full auto rows", "full accumulate 1"} <= {case.name for case in cases}:  # four rows in a forward, both
        found, said = (
            timeless(references, config, processes, name) for name in ("full auto rows", "full accumulate 1")
        )
        assert found == said  # to the last bit: looking for them left no trace
    if {"full", "full own sft"} <= {case.name for case in cases}:
        for place in ((config, processes), ("single", 1)):
            assert timeless(references, *place, "full own sft") == timeless(references, *place, "full")


def timeless(folder: Path, config: str, processes: int, case: str) -> Lines:
    """A run's train lines without what the clock says."""
    lines = parity.train_lines(folder / "runs" / parity.run_name(config, processes, case))
    return [{name: line[name] for name in ("step", "loss", "grad_norm", "tokens")} for line in lines]


# --- the comparison itself


def edit_lines(run: Path, change: Callable[[Lines], Lines]) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    text = "".join(json.dumps(line) + "\n" for line in change(lines))
    (run / "metrics.jsonl").write_text(text, encoding="utf-8")


def one_loss_off(run: Path) -> None:
    edit_lines(
        run,
        lambda lines: [{**x, "loss": x["loss"] * (1 + (x["step"] == 7) * 2e-5)} if "loss" in x else x for x in lines],
    )


def every_loss_a_little_high(run: Path) -> None:
    edit_lines(run, lambda lines: [{**x, "loss": x["loss"] * (1 + 2e-6)} if "loss" in x else x for x in lines])


def last_step_missing(run: Path) -> None:
    edit_lines(run, lambda lines: [x for x in lines if x["step"] < STEPS])


def change_parameters(run: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    file = run / "model" / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def one_parameter_off(run: Path) -> None:
    change_parameters(
        run,
        lambda t: {
            **t,
            "lm_head.weight": t["lm_head.weight"].index_fill(0, t["lm_head.weight"].new_tensor([3]).long(), 1.0),
        },
    )


def one_parameter_not_a_number(run: Path) -> None:
    change_parameters(run, lambda t: {**t, "lm_head.weight": t["lm_head.weight"] * float("nan")})


def a_parameter_missing(run: Path) -> None:
    change_parameters(run, lambda t: {name: x for name, x in t.items() if name != "lm_head.weight"})


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (one_loss_off, "loss differs by 2.0e-05, allowed 5e-06"),
        (every_loss_a_little_high, "losses differ by 2.0e-06 on average, allowed 1e-06"),
        (last_step_missing, f"{STEPS - 1} steps instead of {STEPS}"),
        (one_parameter_off, "parameters differ by "),
        (one_parameter_not_a_number, "parameters differ by nan"),
        (a_parameter_missing, "parameters differ by inf"),
    ],
)
def test_the_comparison_finds_a_difference(
    references: Path, tmp_path: Path, damage: Callable[[Path], None], problem: str
) -> None:
    original = references / "runs" / parity.run_name("single", 1, "full")
    for name in (("single", 1), ("ddp", 2)):
        shutil.copytree(original, tmp_path / "runs" / parity.run_name(*name, "full"))
    whole = parity.compare(tmp_path, "ddp", 2, CASE_BY_NAME["full"])
    assert (whole.passed, whole.loss, whole.parameter, whole.problems) == (True, 0.0, 0.0, [])
    damage(tmp_path / "runs" / parity.run_name("ddp", 2, "full"))
    found = parity.compare(tmp_path, "ddp", 2, CASE_BY_NAME["full"])
    assert not found.passed
    assert any(problem in text for text in found.problems), found.problems
