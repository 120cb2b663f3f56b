"""Compiled layers: the same losses, compiled once, whatever the lengths of the documents."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forks
import pytest
import torch
from conftest import metrics, train_alone

from finetune.models.compiled import CompilationWatch, compilations, uncompiled


@pytest.fixture
def without_inductor() -> Iterator[None]:
    """What is counted is decided before inductor writes C++, which takes it half a minute here; older versions of torch
    have to wait for it. scripts/proofs/parity_matrix.py runs compiled cases with everything."""
    torch.compiler.reset()
    if hasattr(torch.compiler, "set_default_backend"):
        torch.compiler.set_default_backend("aot_eager")
        yield
        torch.compiler.set_default_backend("inductor")
    else:
        yield
    torch.compiler.reset()


# dynamo looks at it, behind a filter of its own that pytest's "error" overrules.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.usefixtures("without_inductor")
def test_compiled_layers_give_the_same_losses_and_are_compiled_once(
    recipe: dict[str, Any], write_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    """Five steps, each of other document lengths, with activations recomputed and an evaluation in the middle, that
    generates token by token."""
    recipe["train"]["max_steps"] = 5
    recipe["train"]["activation_checkpointing"] = True
    recipe["evaluate"] |= {"every_steps": 3, "generate": 1, "max_new_tokens": 3}
    path = write_recipe(recipe)
    train_alone(path, "run.name=plain")
    before = compilations()
    said = train_alone(path, "run.name=compiled", "train.compile=true")
    plain, compiled = (metrics(tmp_path / "runs" / name) for name in ("plain", "compiled"))
    assert len(plain) == len(compiled) == 7
    for ours, theirs in zip(compiled, plain, strict=True):
        for key in {"loss", "eval_loss", "grad_norm"} & theirs.keys():
            assert ours[key] == pytest.approx(theirs[key], rel=5e-6), key
        assert ours.get("tokens") == theirs.get("tokens"), "padding is not counted"
    counts = [line["compilations"] - before for line in compiled if "loss" in line]
    assert counts[:3] == [1, 1, 1], "one graph for all layers and lengths"
    assert counts[3] == counts[4] <= 3, "no_grad has its own, with and without a gradient of the first layer's input"
    assert "compilations" not in plain[0]
    assert "train.compile" not in said


TRAIN = """
import sys
import trainer_alone
sys.exit(trainer_alone.exit_status(["train", *sys.argv[1:]]))
"""


def test_a_run_of_which_nothing_is_compiled_stops_with_the_reason(
    recipe: dict[str, Any], write_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    """In a process in which torch's compiler is off, as by TORCHDYNAMO_DISABLE=1."""
    script = tmp_path / "disabled.py"
    script.write_text("import torch._dynamo\ntorch._dynamo.config.disable = True\n" + TRAIN, encoding="utf-8")
    done = forks.python(script, write_recipe(recipe), "train.compile=true")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "train.compile: torch has compiled nothing. It is disabled (TORCHDYNAMO_DISABLE" in done.stderr
    assert "Fix: set train.compile: false" in done.stderr
    assert "Traceback" not in done.stderr
    status = json.loads((tmp_path / "runs" / "run" / "status.json").read_text(encoding="utf-8"))
    assert status["status"] == "failed"


def test_a_recompilation_after_the_second_step_is_reported_once_with_its_reason() -> None:
    torch.compiler.reset()
    watch = CompilationWatch()
    double = torch.compile(lambda x: x * 2, dynamic=False, backend="eager")
    said = []
    for tokens in (3, 4, 5, 5, 6):
        double(torch.ones(tokens))
        said.append(watch.step_done())
    assert [bool(text) for text in said] == [False, False, True, False, False]
    assert "compiled 1 graphs again in step 3" in said[2]
    assert "size mismatch" in said[2]
    watch = CompilationWatch()
    double(torch.ones(7))
    watch.evaluated()
    assert [watch.step_done() for _ in range(3)] == [None] * 3
    with uncompiled():
        double(torch.ones(8))
    assert watch.step_done() is None
