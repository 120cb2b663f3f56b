"""DPO and KTO on prompts with videos: losses of plain transformers, one document at a time, on one process and two."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import filming
import pytest
import tiny
import torch
from conftest import launch, metrics
from test_sound_preferences import BETA, Plain
from test_video_runs import train_on_films
from torch.nn.functional import logsigmoid
from transformers import AutoModelForMultimodalLM
from usual import usual


@pytest.fixture(scope="module")
def films(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("video-preferences")
    for name in filming.FILMING:
        filming.save_filming(folder, name)
    lines = filming.write_films(folder, "films", 10, seed=6, listed=True).read_text().splitlines()
    pairs = []
    for i, row in enumerate(map(json.loads, lines)):
        prompt, chosen = row["messages"]
        rejected = {"role": "assistant", "content": tiny.conversations(10, 7)[i]["messages"][1]["content"]}
        pairs.append({"prompt": [prompt], "chosen": [chosen], "rejected": [rejected]})
    tiny.write_rows(folder / "pairs.jsonl", pairs)
    return folder


def train_on_pairs(films: Path, name: str, objective: str, label: str = "", **changes: Any) -> Path:
    source = [{"path": str(films / "pairs.jsonl"), "format": "preference"}]
    return train_on_films(
        *(films, name, f"{objective}{label}"),
        objective={"name": objective, "beta": BETA},
        data={"train": source, "eval": source, "max_length": 256, "video": {"max_frames": 4}},
        evaluate={"at_start": False, "generate": 0},
        **changes,
    )


@pytest.mark.parametrize("name", usual(filming.FILMING, "qwen3_vl"))
@pytest.mark.parametrize("objective", usual(["dpo", "kto"], "dpo"))
def test_preferences_of_videos_are_what_plain_transformers_computes(objective: str, name: str, films: Path) -> None:
    """DPO: arXiv:2305.18290, equation 7; KTO: arXiv:2402.01306, equations 7 and 8, with answers of other rows."""
    run, base = train_on_pairs(films, name, objective), films / f"{name}_films"
    policy, reference = (AutoModelForMultimodalLM.from_pretrained(folder).eval() for folder in (run / "model", base))
    plain = Plain(run)
    first, second = (BETA * (plain.pairs(policy) - plain.pairs(reference))).T
    if objective == "dpo":
        loss = -logsigmoid(first - second).mean()
    else:
        signs = torch.tensor([2 * example.columns["label"] - 1 for example in plain.examples])
        loss = (1 - (signs * (first - second.mean().clamp(min=0))).sigmoid()).mean()
    sources = [[[film.source for film in one.media] for one in e.sequences] for e in plain.examples]
    assert all(one == other for one, other in sources)  # the prompt's, of both answers
    assert any(one for one, _ in sources)
    assert abs(loss - {"dpo": math.log(2), "kto": 0.5}[objective]) > 1e-3  # the policy is another by now
    assert [line["eval_loss"] for line in metrics(run) if "eval_loss" in line][-1] == pytest.approx(loss.item(), 1e-5)


@pytest.mark.long
@pytest.mark.parametrize(("config", "name"), [("ddp", "qwen3_vl"), ("fsdp2", "qwen2_5_vl")])
@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_processes_have_the_same_losses(objective: str, config: str, name: str, films: Path) -> None:
    batch = {"rows": 4, "rows_per_device": 1}
    single = train_on_pairs(films, name, objective, "-single", batch=batch)
    several = f"{name}-{objective}-{config}"
    done = launch(config, 2, "train", films / f"{single.name}.yaml", f"run.name={several}")
    assert done.returncode == 0, done.stderr
    ours, theirs = (
        [(line["step"], line.get("loss", line.get("eval_loss"))) for line in metrics(run)]
        for run in (single, single.parent / several)
    )
    assert [step for step, _ in ours] == [step for step, _ in theirs]
    assert [loss for _, loss in theirs] == pytest.approx([loss for _, loss in ours], rel=5e-6, abs=1e-7)
