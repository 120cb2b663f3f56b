"""The promise: one recipe, the same loss at every step and the same parameters at the end, wherever it runs.

The matrix of scripts/proofs/parity_matrix.py, and proof that its comparison can fail.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import parity
import pytest
from safetensors.torch import load_file, save_file

CASE_BY_NAME = {case.name: case for case in parity.CASES}
# Sharding code paths with nothing to share: a group of one must be the one process.
ALONE = (("fsdp2", 1, [CASE_BY_NAME["lora"]]),)
# For time: every case on one config at least; the script runs all of its cases on every one.
BY_SCRIPT = {
    *("full compile", "lora compile checkpointing"),  # inductor takes a minute of each process
    *("full deep", "lora deep", "full deep token budget", "full deep plain head", "lora plain head"),  # schedules
    *("full qwen3", "full qwen3_moe", "lora qwen3_moe balance", "full qwen3_moe balance unpacked"),
    *("full mixtral bf16", "lora mixtral experts", "lora qwen3_moe experts checkpointing", "lora mistral window"),
    *("qlora tokens", "lora mixtral tokens", "lora text part tokens"),
    *("full plain head", "full paged_adamw", "full sgd no clip", "full checkpointing offloaded"),
    *("full dpo", "full dpo plain head", "full deep dpo", "lora simpo"),
    *("lora qwen3_5", "full qwen3_5 checkpointing"),
    *(
        "lora tied and whole head",
        "full images",
        "full images projector",
        "lora images",
        "lora images tower",
        "qlora images",
        "full images bf16",
    ),
    *("full images dpo", "full images kto", "lora images dpo adapters off"),
    *("lora text part", "full chunked head", "full classify", "lora accumulate 1"),
    *("full granite_hybrid", "lora granite_hybrid checkpointing selective"),
    *(
        "lora dpo",
        "lora reward",
        "lora distill",
        "lora focal",
        "lora chunked head",
        "lora tied tokens",
        "lora tokens whole",
        "lora tokens",
        "full focal",
        "full text part",
        "full checkpointing",
    ),
}
ON_DDP = {
    "full",
    "full accumulate 1",
    "full auto rows",
    "full token budget",
    "lora unpacked",
    "qlora",
    "full bf16",
    "full kto",
}
ON_EP = {
    *("full mixtral", "lora mixtral", "full mixtral balance", "full qwen3_moe balance checkpointing"),
    *("full mixtral offloaded", "full orpo experts balance"),
}
ON_FSDP2 = (
    {case.name for case in parity.CASES}
    - BY_SCRIPT
    - (ON_EP - {"full qwen3_moe balance checkpointing"})
    - {"full accumulate 1", "full unpacked", "lora tied", "lora bf16"}
    - {"full dpo ipo unpacked", "full orpo", "full kto", "full qwen3_5"}
)
BY_SCRIPT_ALONE = (
    *(("cp", 2), ("cp", 4), ("cp_alltoall", 2), ("cp_ring", 2), ("cp_ring_of_4", 4)),
    *(("zero3_cp", 2), ("ulysses_of_4", 4), ("cp_ulysses", 4), ("fsdp2_cp", 4)),
    *((config, 1) for config in ("ddp", "fsdp2", "zero2", "zero3")),
)
SELECTED = {
    ("ddp", 2): {*ON_DDP, "full unpacked", "lora tied", "lora bf16"},
    ("fsdp2", 2): ON_FSDP2
    - {"full from scratch", "lora dora", "lora mistral window", "lora dropout offloaded"}
    - {"lora qwen3", "full auto rows", "full token budget", "full mistral window", "lora unpacked"}
    - {"lora tied chunked head", "lora and whole head", "lora", "qlora", "full images rare"},
    ("fsdp2_offload", 2): {"full"},
    ("zero2", 2): {"full accumulate 1", "qlora"},
    ("zero3", 2): {"full", "full from scratch", "lora dora", "qlora", "lora dropout offloaded"}
    | {
        "full images rare",
        "lora images",
        "full qwen3_5",
    },  # what is in its mixers runs as often as a rank has documents
    ("zero3_offload", 2): {"full"},
    ("pp", 2): {
        *("full", "lora", "full token budget", "full tied", "full bf16"),
        *("lora and whole head", "lora tied chunked head", "full orpo"),
    },
    ("pp_dp", 4): {"full"},
    ("pp_interleaved", 2): set(),  # in test_pipeline.py
    ("pp_gpipe", 2): set(),
    ("pp_zero_bubble", 2): set(),
    ("pp_zero_bubble_2", 2): set(),
    ("pp_4", 4): set(),
    ("ep", 2): ON_EP - {"full qwen3_moe balance checkpointing"},
    ("ep", 4): set(),  # one that is resumed from is in test_resume_elsewhere.py
    ("ddp", 4): set(),
    ("fsdp2", 4): set(),
    ("zero3", 4): set(),
    ("fsdp2_offload", 4): set(),
    ("zero2", 4): set(),
    ("zero2_offload", 2): set(),
    ("zero2_offload", 4): set(),
    ("zero3_offload", 4): set(),
    # More of them is in test_context_parallel.py; the script runs them all.
    ("ulysses", 2): {"full unpacked", "full auto rows", "full mistral window", "full dpo ipo unpacked"},
    **{launch: set() for launch in BY_SCRIPT_ALONE},
    ("hsdp", 4): {"full"},
    ("tp", 2): {"full tied", "lora dropout rslora", "lora qwen3", "lora tied tokens whole"},
    ("tp", 4): set(),
    ("fsdp2_tp", 4): set(),  # in test_tensor_parallel.py
}
LAUNCHES = (
    *(
        (config, processes, chosen)
        for config, processes, cases in parity.selected([])
        if (chosen := [c for c in cases if c.name in SELECTED.get((config, processes), {c.name})])
    ),
    *ALONE,
)


Lines = list[dict[str, Any]]


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of scripts/proofs/parity_matrix.py with every case run on one process."""
    folder = tmp_path_factory.mktemp("parity")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FINETUNE_CACHE", str(folder / "cache"))
        parity.prepare(folder)
        names = {case.name for _, _, cases in LAUNCHES for case in cases}
        parity.launch(folder, "single", 1, [case.name for case in parity.CASES if case.name in names])
    return folder


def test_every_case_is_run_on_several_processes() -> None:
    assert {case.name for _, processes, cases in LAUNCHES if processes > 1 for case in cases} | BY_SCRIPT == set(
        CASE_BY_NAME
    )


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
    edit_lines(run, lambda lines: [x for x in lines if x["step"] < parity.STEPS])


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
        (last_step_missing, f"{parity.STEPS - 1} steps instead of {parity.STEPS}"),
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
