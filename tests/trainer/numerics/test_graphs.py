"""Runs by CUDA graphs, as far as a CPU goes (tests/support/graphed.py): the numbers of runs without, all bits."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import graphed
import pytest
import torch
import trainers
from conftest import ROOT

from finetune.engine.graphs import CudaRecorder, graph_problem
from finetune.engine.launch import read_config_file
from finetune.errors import RunFailure
from finetune.models.attention import Kernels, attention_for, kernels
from finetune.models.weights import Placement, load_model
from finetune.recipe import load_recipe
from finetune.training import parts

MODES = {
    "full": ("mode=full",),
    "tied": ("mode=full", "model.name={made}/llama_tied"),
    "lora": ("mode=lora", "lora={rank: 4, alpha: 8}"),
    "head": ("mode=lora", "lora={rank: 4, alpha: 8, modules_to_save: [lm_head]}"),
    "qlora": ("mode=qlora", "lora={rank: 4, alpha: 8}", "quantization={type: nf4}"),
}
USUAL = [("lora", 2), ("tied", 2)]


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's kernel of many documents is for GPUs."""
    monkeypatch.setattr(kernels, "varlen_attn", graphed.varlen_attn)
    monkeypatch.setattr(kernels, "_TAKES_GROUPS", False)


@pytest.fixture
def file(recipe: dict[str, Any], write_recipe: Callable[..., Path]) -> str:
    recipe["train"] = {"max_steps": 3, "precision": "bf16", "graphs": "auto"}
    recipe["data"]["max_length"] = 96
    return str(write_recipe(recipe))


@pytest.fixture
def run(file: str, made: Path) -> Callable[..., graphed.Trained]:

    def trained(*overrides: str, **how: Any) -> graphed.Trained:
        return graphed.trained(file, [one.replace("{made}", str(made)) for one in overrides], **how)

    return trained


def same(one: graphed.Trained, other: graphed.Trained) -> None:
    assert one.losses == other.losses
    assert one.norms == other.norms
    assert all(torch.equal(values, other.weights[name]) for name, values in one.weights.items())


@pytest.mark.parametrize(
    ("mode", "rows_per_device"),
    [
        pytest.param(mode, rows, marks=[] if (mode, rows) in USUAL else pytest.mark.long)
        for mode in MODES
        for rows in (2, 4)
    ],
)
def test_a_run_by_graphs_is_the_run_without(
    run: Callable[..., graphed.Trained], mode: str, rows_per_device: int
) -> None:
    """Two micro-batches a step, whose gradients add up, and one; tied weights have gradients of the head as well.
    Rows of up to 8 documents and of more have graphs of their own, a forward and a backward each."""
    overrides = (*MODES[mode], f"batch.rows_per_device={rows_per_device}")
    mine, without = (run(*overrides, graphed=graphs) for graphs in (True, False))
    assert mine.shares == [1.0] * 3
    assert mine.captures == {2: 4, 4: 2}[rows_per_device]
    same(mine, without)


def write_documents(path: Path, lengths: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = (torch.randint(3, 300, (length,), generator=generator).tolist() for length in lengths)
    path.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in rows), encoding="utf-8")


FULL = [96, 80, 64, 60, 36, 32, 16] * 6  # in rows of 96
OTHERS = [50, 37, 29, 70] * 12


@pytest.mark.parametrize("mode", ["full", "lora"])
@pytest.mark.parametrize(("lengths", "is_full"), [(FULL, True), (OTHERS, False)], ids=["full", "padded"])
def test_padded_rows_of_constant_shapes_are_the_usual_ones(
    run: Callable[..., graphed.Trained], tmp_path: Path, mode: str, lengths: list[int], is_full: bool
) -> None:
    """Beside one call a document on rows as they are: rows that are full are the same products, bit by bit."""
    write_documents(tmp_path / "documents.jsonl", lengths)
    overrides = (*MODES[mode], f"data.train=[{{path: {tmp_path / 'documents.jsonl'}, format: tokens}}]")
    mine = run(*overrides, graphed=True)
    usual = run(*overrides, graphed=False, padded=False, attention="documents")
    assert mine.shares == [1.0] * 3
    if is_full:
        same(mine, usual)
    assert mine.losses == pytest.approx(usual.losses, rel=1e-3)
    assert mine.norms == pytest.approx(usual.norms, rel=1e-2)


def test_rows_of_other_lengths_run_as_they_are(
    run: Callable[..., graphed.Trained], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before replays of the same step, into the same gradients; and say so once."""
    write_documents(tmp_path / "documents.jsonl", OTHERS)
    data = f"data.train=[{{path: {tmp_path / 'documents.jsonl'}, format: tokens}}]"
    mine, without = (run(data, graphed=graphs, padded="some") for graphs in (True, False))
    assert capsys.readouterr().out.count("a micro-batch without: its row is not 192 tokens long") == 1
    assert mine.shares == [0.5] * 3
    same(mine, without)


LORA = MODES["lora"]
# Overrides of a run that captures, and the beginning of the reason why it does not with them.
REASONS: list[tuple[tuple[str, ...], str | None]] = [
    ((), None),
    (LORA, None),
    (MODES["qlora"], None),
    (("train.precision=bf16_true",), None),
    (("train.graphs=off",), "train.graphs"),
    (("train.compile=true",), "train.compile"),
    (("train.activation_checkpointing=true",), "activations are recomputed"),
    (("train.activation_checkpointing=selective",), "activations are recomputed"),
    (("train.activation_offload=true",), "activations are moved"),
    (("optimizer={lr: 1e-3, in_backward: true, max_grad_norm: null}",), "optimizer.in_backward"),
    (("train.precision=fp8",), "train.precision: fp8"),
    (("mode=lora", "lora={rank: 4, alpha: 8, dropout: 0.1}"), "dropout"),
    (("model.train=[language]", "data.image={}"), "images"),
    (("model.trust_remote_code=true",), "the model's own code"),
    (("train.precision=fp32",), "attention by finetune_documents"),
    (("model.attention=flex",), "attention by finetune_flex"),
    (("data.packing=false",), "data.packing is off"),
    ((), "rows are 62% full"),
]


def problem_of(file: str, made: Path, overrides: tuple[str, ...], loaded: tuple[str, ...], **changes: Any) -> Any:
    """Returns the reason of a recipe on a GPU, for the model of the recipe with `loaded`."""
    prepared = trainers.prepared_run(file, [one.replace("{made}", str(made)) for one in loaded])
    here = attention_for(prepared.recipe, prepared.base.config, "cpu")
    model, _ = parts.with_objective(
        prepared,
        load_model(prepared.recipe, prepared.base, here, Placement("load", torch.device("cpu"))),
        here,
        torch.device("cpu"),
    )
    recipe = load_recipe(file, [one.replace("{made}", str(made)) for one in overrides])
    text = recipe.model_copy(update={"model": recipe.model.model_copy(update={"train": None})})
    there = Kernels(graphed.H100, flash_kernels=True, triton=True)
    attention = attention_for(text, prepared.base.config, "cuda", there)
    given = {"launch": prepared.launch, "device_type": "cuda", "model": model, "attention": attention} | changes
    return graph_problem(recipe, **given)


@pytest.mark.parametrize(("overrides", "reason"), REASONS, ids=lambda value: str(value)[:40])
def test_why_a_run_captures_nothing(file: str, made: Path, overrides: tuple[str, ...], reason: str | None) -> None:
    changes = {"fullness": 0.62} if reason == "rows are 62% full" else {}
    found = problem_of(file, made, overrides, overrides if overrides in (LORA, MODES["qlora"]) else (), **changes)
    assert (found or "").startswith(reason or "")
    assert (found is None) == (reason is None)


def test_why_a_model_or_a_launch_captures_nothing(file: str, made: Path) -> None:
    ddp, fsdp2 = (read_config_file(str(ROOT / "accelerate_configs" / f"{name}.yaml"), 2) for name in ("ddp", "fsdp2"))
    assert problem_of(file, made, (), (), device_type="cpu") == "no GPU"
    assert problem_of(file, made, LORA, LORA, launch=ddp) is None
    assert problem_of(file, made, (), (), launch=ddp).startswith("DDP reduces")
    assert problem_of(file, made, LORA, LORA, launch=fsdp2).startswith("weights or rows are divided")
    experts = ("model.name={made}/mixtral",)
    assert problem_of(file, made, experts, experts).startswith("experts")
    plain = ("model.cross_entropy=plain",)
    assert problem_of(file, made, plain, plain).startswith("cross entropy plain")
    head = ("mode=lora", "lora={rank: 4, alpha: 8, targets: [lm_head]}")
    assert problem_of(file, made, head, head) == "no layer trains"


def test_a_run_without_a_gpu_says_why_and_is_as_without(file: str) -> None:
    prepared = trainers.prepared_run(file, [])
    trainer = trainers.ready_trainer(prepared, trainers.started_engine(prepared))
    assert trainer.plan.graphs == "off (no GPU)"
    assert (trainer.graphs, trainer.engine.keeps_gradients, trainer.loader.padded_to) == (None, False, None)
    trainer.engine.close()


def test_a_capture_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a failed capture fails as well, and leaves its stream."""

    @contextlib.contextmanager
    def capture(*_: Any, **__: Any) -> Iterator[None]:
        try:
            yield
        finally:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    streams: list[str] = []
    stand_ins = {"Stream": str, "CUDAGraph": str, "current_stream": lambda: "own", "set_stream": streams.append}
    for name, value in (stand_ins | {"graph": capture, "graph_pool_handle": lambda: (0, 0)}).items():
        monkeypatch.setattr(torch.cuda, name, value)

    def waits() -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    with pytest.raises(RunFailure, match=r"captured: operation not permitted when stream is capturing\. Fix: set"):
        CudaRecorder().record(waits)
    assert streams == ["own"]
