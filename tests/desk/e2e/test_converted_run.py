"""A config of axolotl, from the file to a trained adapter, by the commands that a person types."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

CONFIG = """
base_model: {model}
adapter: lora
lora_r: 4
lora_alpha: 8
lora_target_linear: true
chat_template: chatml
datasets:
  - path: {rows}
    type: alpaca
val_set_size: 0.2
sequence_len: 64
sample_packing: true
micro_batch_size: 2
gradient_accumulation_steps: 2
max_steps: 2
optimizer: adamw_torch_fused
learning_rate: 1e-3
lr_scheduler: cosine
warmup_steps: 1
bf16: false
float32: true
logging_steps: 1
flash_attention: true
"""


def finetune(folder: Path, *words: object, status: int = 0) -> str:
    """Runs a command; returns what it printed."""
    command = [sys.executable, "-m", "finetune", *map(str, words)]
    ended = subprocess.run(command, cwd=folder, env=dict(os.environ), capture_output=True, text=True, check=False)
    assert ended.returncode == status, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


@pytest.mark.long
def test_axolotl_to_two_steps(made: Path, tmp_path: Path) -> None:
    rows = [{"instruction": f"Say {i}.", "input": "", "output": f"It is {i}."} for i in range(60)]
    path = tiny.write_rows(tmp_path / "rows.jsonl", rows)
    (tmp_path / "theirs.yaml").write_text(CONFIG.format(model=made / "llama", rows=path), encoding="utf-8")
    printed = finetune(tmp_path, "new", "--from", "theirs.yaml", "--name", "mine")
    assert "written: mine.yaml, from axolotl" in printed
    assert "--model is not used with --from" in finetune(
        *(tmp_path, "new", "--from", "theirs.yaml", "--model", "a"), status=2
    )
    finetune(tmp_path, "train", "mine.yaml")
    lines = [json.loads(line) for line in (tmp_path / "runs" / "mine" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2]
    assert steps[0]["lr"] == 5e-4  # the first of one step of warm-up
    assert (tmp_path / "runs" / "mine" / "model" / "adapter_config.json").is_file()
    assert [line["step"] for line in lines if "eval_loss" in line] == [0, 2]
