"""Cases drawn at random: the same for a seed, refused with a reason, and what fails does not hide the others."""

from __future__ import annotations

from pathlib import Path
from random import Random

import parity
import parity_random
import pytest
from parity import LORA, Case


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    parity.prepare(tmp_path)
    return tmp_path


def test_a_seed_draws_the_same_cases_and_others_than_another_does() -> None:
    def drawn(seed: int) -> list[Case]:
        random = Random(seed)
        return [parity_random.draw(random, place, number) for number, place in enumerate(parity_random.PLACES)]

    assert drawn(1) == drawn(1) != drawn(2)
    assert {place[0] for place in parity_random.PLACES} <= {config for config, _, _ in parity.LAUNCHES}


@pytest.mark.long
def test_what_a_rule_refuses_has_its_reason(folder: Path) -> None:
    unknown = Case("dropout", (*LORA, "lora.dropout=0.1", "batch.rows_per_device=auto"))
    assert "dropout is sampled per micro-batch" in (parity_random.refusal(folder, ("ddp", 2), unknown) or "")
    in_backward = Case("back", ("optimizer.in_backward=true", "optimizer.max_grad_norm=null"), one_forward=True)
    assert "use fsdp2" in (parity_random.refusal(folder, ("ddp", 2), in_backward) or "")
    assert parity_random.refusal(folder, ("fsdp2", 2), in_backward) is None


@pytest.mark.long
def test_one_that_fails_is_named_and_the_others_run(folder: Path) -> None:
    short = "train.max_steps=4"
    zeros = (*LORA, "lora.dora=true", "lora.targets=[lm_head, q_proj]", short)
    cases = [Case("a", (short,)), Case("zeros", zeros, model="llama_tied"), Case("b", (short, "optimizer.lr=1e-4"))]
    failed = parity_random.train(folder, ("single", 1), cases)
    assert list(failed) == ["zeros"]
    assert "UserError" in failed["zeros"]
    for case in ("a", "b"):
        assert len(parity.train_lines(folder / "runs" / parity.run_name("single", 1, case))) == 4
