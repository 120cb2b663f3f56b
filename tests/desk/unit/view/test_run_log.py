"""`logs` follows a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from run_files import write_run

from finetune.desk.view.run_log import follow
from finetune.errors import UserError


def test_a_log_is_followed_until_the_run_ends(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", "running", 8, 3)

    def goes_on(_seconds: float) -> None:
        """As if another process wrote two steps and ended."""
        whole = (run / "metrics.jsonl").read_text(encoding="utf-8").rpartition("\n")[0] + "\n"
        added = "".join(json.dumps({"step": step, "loss": 0.5, "lr": 1e-4}) + "\n" for step in (4, 5))
        (run / "metrics.jsonl").write_text(whole + added, encoding="utf-8")
        (run / "status.json").write_text(json.dumps({"status": "stopped", "step": 5, "steps": 8}))

    assert list(follow(run, 2, goes_on=True, wait=goes_on)) == [
        "step 3  loss 0.6667  100 tok/s",
        "step 3:  eval_loss 0.25  eval_loss/chat 0.5  exact_match 0.75",
        "step 4  loss 0.5  lr 0.0001",
        "step 5  loss 0.5  lr 0.0001",
        f"{run}: stopped",
    ]
    assert len(list(follow(run, None, goes_on=False))) == 6
    assert list(follow(run, 0, goes_on=False)) == []
    with pytest.raises(UserError, match="no run here"):
        next(follow(tmp_path / "nothing", None, goes_on=True))
