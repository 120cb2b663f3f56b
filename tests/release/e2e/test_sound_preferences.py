"""DPO and KTO on prompts with clips: losses of plain transformers, one document at a time, on one process and two."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import hearing
import numpy as np
import pytest
import tiny
import torch
from conftest import launch, metrics
from test_audio_runs import train_on_clips
from torch.nn.functional import logsigmoid
from transformers import AutoModelForMultimodalLM

from finetune.data.dataset import build_held_out
from finetune.data.examples import media_reader
from finetune.data.samples import Sequence
from finetune.features import load_recipe
from finetune.models.base_model import Base

pytest.importorskip("soundfile")
pytest.importorskip("soxr")

BETA = 0.1


@pytest.fixture(scope="module")
def ears(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound-preferences")
    for name in hearing.available():
        hearing.save_hearing(folder, name)
    write_pairs(folder, "clips", (0, 1, 1, 2))
    write_pairs(folder, "single", (0, 1, 1))
    return folder


def write_pairs(folder: Path, name: str, numbers: tuple[int, ...]) -> None:
    """numbers: as `hearing.write_clips`."""
    lines = hearing.write_clips(folder, name, 12, seed=6, numbers=numbers).read_text().splitlines()
    pairs = []
    for i, line in enumerate(lines):
        prompt, chosen = json.loads(line)["messages"]
        rejected = {"role": "assistant", "content": tiny.conversations(12, 7)[i]["messages"][1]["content"]}
        pairs.append({"prompt": [prompt], "chosen": [chosen], "rejected": [rejected]})
    tiny.write_rows(folder / f"{name}_pairs.jsonl", pairs)


def train_on_pairs(ears: Path, name: str, objective: str, label: str = "", **changes: Any) -> Path:
    rows = "single" if name in hearing.ALONE else "clips"
    source = {"path": str(ears / f"{rows}_pairs.jsonl"), "format": "preference"}
    return train_on_clips(
        *(ears, name, f"{objective}{label}"),
        model={"name": str(ears / f"{name}_hears"), "train": ["language", "projector", "tower"]},
        objective={"name": objective, "beta": BETA},
        data={"train": [source], "eval": [source], "max_length": 256, "audio": {}},
        evaluate={"at_start": False, "exact_match": 0},
        **changes,
    )


class Plain:
    """Log-probabilities of a run's held-out answers by plain transformers, each sequence alone."""

    def __init__(self, run: Path):
        recipe = load_recipe(run / "recipe.yaml")
        base = Base.of(recipe)
        held_out: Any = build_held_out(recipe, base.renderer(recipe.objective))
        self.examples, self.reader = held_out.examples, media_reader(base.media)

    @torch.no_grad()
    def log_prob(self, model: Any, one: Sequence) -> float:
        ids = torch.from_numpy(one.input_ids[None].astype(np.int64))
        reader: Any = self.reader
        logits = model(ids, use_cache=False, **reader.plain_inputs(one.media, ids)).logits[0, :-1]
        trained = torch.from_numpy(one.loss_mask[1:])
        return float(logits.log_softmax(-1).gather(1, ids[0, 1:, None])[trained].double().sum())

    def pairs(self, model: Any) -> torch.Tensor:  # (E, 2)
        return torch.tensor([[self.log_prob(model, one) for one in e.sequences] for e in self.examples])


@pytest.mark.parametrize("name", hearing.families("voxtral"))
@pytest.mark.parametrize("objective", ["dpo", pytest.param("kto", marks=pytest.mark.long)])
def test_preferences_of_sound_are_what_plain_transformers_computes(objective: str, name: str, ears: Path) -> None:
    """DPO: arXiv:2305.18290, equation 7; KTO: arXiv:2402.01306, equations 7 and 8, with answers of other rows."""
    run, base = train_on_pairs(ears, name, objective), ears / f"{name}_hears"
    policy, reference = (AutoModelForMultimodalLM.from_pretrained(folder).eval() for folder in (run / "model", base))
    plain = Plain(run)
    first, second = (BETA * (plain.pairs(policy) - plain.pairs(reference))).T
    if objective == "dpo":
        loss = -logsigmoid(first - second).mean()
    else:
        signs = torch.tensor([2 * example.columns["label"] - 1 for example in plain.examples])
        loss = (1 - (signs * (first - second.mean().clamp(min=0))).sigmoid()).mean()
        sources = [[[clip.source for clip in one.media] for one in e.sequences] for e in plain.examples]
        assert [own for own, _ in sources] == [mismatched for _, mismatched in sources]  # the prompt's
        assert any(own for own, _ in sources)
    assert abs(loss - {"dpo": math.log(2), "kto": 0.5}[objective]) > 1e-3  # the policy is another by now
    assert [line["eval_loss"] for line in metrics(run) if "eval_loss" in line][-1] == pytest.approx(loss.item(), 1e-5)
    said = json.loads((run / "plan.json").read_text())["shared_prompts"]
    assert said == (None if objective == "kto" else "computed for each answer: documents have images")


@pytest.mark.long
@pytest.mark.parametrize(("config", "name"), [("ddp", "qwen3_asr"), ("fsdp2", "voxtral")])
@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_processes_have_the_same_losses(objective: str, config: str, name: str, ears: Path) -> None:
    batch = {"rows": 4, "rows_per_device": 1}
    single = train_on_pairs(ears, name, objective, "-single", batch=batch)
    several = f"{name}-{objective}-{config}"
    done = launch(config, 2, "train", ears / f"{single.name}.yaml", f"run.name={several}")
    assert done.returncode == 0, done.stderr
    ours, theirs = (
        [(line["step"], line.get("loss", line.get("eval_loss"))) for line in metrics(run)]
        for run in (single, single.parent / several)
    )
    assert [step for step, _ in ours] == [step for step, _ in theirs]
    assert [loss for _, loss in theirs] == pytest.approx([loss for _, loss in ours], rel=5e-6, abs=1e-7)
