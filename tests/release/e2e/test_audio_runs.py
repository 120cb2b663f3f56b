"""Runs on sound against plain transformers, one document at a time: losses step by step, the result, its answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hearing
import numpy as np
import pytest
import torch
import yaml
from conftest import train_here
from transformers import AutoModelForMultimodalLM
from usual import usual

from finetune.data.dataset import build_training, on_disk
from finetune.data.examples import Examples, media_reader
from finetune.data.samples import Sequence
from finetune.features import load_recipe
from finetune.models.base_model import Base

pytest.importorskip("soundfile")
pytest.importorskip("soxr")

WHOLE = ["language", "projector", "tower"]


@pytest.fixture(scope="module")
def ears(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("audio-runs")
    for name in hearing.HEARING:
        hearing.save_hearing(folder, name)
    hearing.write_clips(folder, "clips", 24)
    hearing.write_clips(folder, "rare", 24, seed=3, numbers=(0,) * 5 + (1,))
    return folder


def train_on_clips(folder: Path, name: str, label: str, rows: str = "clips", **changes: Any) -> Path:
    """Returns the folder of the run. changes: of the recipe's sections; keys of a section."""
    recipe: dict[str, Any] = {
        "run": {"name": f"{name}-{label}", "dir": str(folder / "runs")},
        "model": {"name": str(folder / f"{name}_hears")},
        "mode": "full",
        "data": {
            "train": [{"path": str(folder / f"{rows}.jsonl"), "format": "messages"}],
            "eval": [{"path": str(folder / f"{rows}.jsonl"), "format": "messages"}],
            "max_length": 128,
            "audio": {},
        },
        "batch": {"rows": 3},
        "optimizer": {"lr": 3e-3, "weight_decay": 0.1, "max_grad_norm": None, "betas": [0.9, 0.95]},
        "schedule": {"name": "constant"},
        "train": {"max_steps": 4, "precision": "fp32"},
        "evaluate": {"at_start": False, "exact_match": 4, "max_new_tokens": 3},
        "tracking": {"samples": True},
    }
    for section, keys in changes.items():
        recipe[section] = {**recipe.get(section, {}), **keys} if isinstance(keys, dict) else keys
    path = folder / f"{recipe['run']['name']}.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    train_here(path)
    return Path(recipe["run"]["dir"]) / recipe["run"]["name"]


def metrics(run: Path, key: str) -> list[float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [line[key] for line in lines if key in line]


class Plain:
    """The examples of a run, each alone through plain transformers."""

    def __init__(self, run: Path):
        recipe = load_recipe(run / "recipe.yaml")
        base = Base.of(recipe)
        self.examples: Examples = on_disk(build_training(recipe, base.renderer(recipe.objective))).examples
        self.reader: Any = media_reader(base.media)

    def losses(self, model: Any, one: Sequence) -> torch.Tensor:  # (S,)
        ids = torch.from_numpy(one.input_ids[None].astype(np.int64))
        inputs = self.reader.plain_inputs(one.media, ids)
        logits = model(input_ids=ids, use_cache=False, **inputs).logits[0, :-1]
        targets = torch.from_numpy(one.loss_mask[1:])
        return torch.nn.functional.cross_entropy(logits[targets], ids[0, 1:][targets], reduction="none")


def own_loop(run: Path, base: Path, trained: tuple[str, ...]) -> list[float]:
    """The losses of a loop over plain transformers on the rows of the run's steps, one document at a time."""
    plain, model = Plain(run), AutoModelForMultimodalLM.from_pretrained(base)
    named = [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if any(part in name for part in trained) or not ("audio_tower" in name or "multi_modal_projector" in name)
    ]
    groups = [[p for _, p in named if (p.ndim >= 2) == matrices] for matrices in (True, False)]
    optimizer = torch.optim.AdamW(
        [{"params": params, "weight_decay": decay} for params, decay in zip(groups, (0.1, 0.0), strict=True)],
        lr=3e-3,
        betas=(0.9, 0.95),
    )
    by_row = {f"{example.path}:{example.row}": example.sequences[0] for example in plain.examples}
    losses = []
    for line in (run / "samples" / "rank-00000.jsonl").read_text(encoding="utf-8").splitlines():
        nll = torch.cat([plain.losses(model, by_row[row]) for row in json.loads(line)["rows"]]).mean()
        optimizer.zero_grad()
        nll.backward()
        optimizer.step()
        losses.append(nll.item())
    return losses


@pytest.mark.parametrize("name", usual(hearing.HEARING, "qwen2_audio"))
@pytest.mark.parametrize(
    "parts", [pytest.param(["language"], marks=pytest.mark.long), WHOLE], ids=["language", "tower"]
)
def test_losses_are_those_of_plain_transformers(name: str, parts: list[str], ears: Path) -> None:
    run = train_on_clips(ears, name, "-".join(parts[-1:]), model={"train": parts, "name": str(ears / f"{name}_hears")})
    trained = ("audio_tower", "multi_modal_projector") if parts == WHOLE else ()
    assert metrics(run, "loss") == pytest.approx(own_loop(run, ears / f"{name}_hears", trained), rel=2e-6)
    plain, result = Plain(run), AutoModelForMultimodalLM.from_pretrained(run / "model")
    with torch.no_grad():
        alone = torch.cat([plain.losses(result, example.sequences[0]) for example in plain.examples]).mean()
    assert metrics(run, "eval_loss")[-1] == pytest.approx(float(alone), rel=2e-6)
    assert (run / "model" / "preprocessor_config.json").is_file()
    tower = (json.loads((run / "plan.json").read_text())["parts"])["tower"]
    assert (tower[1] > 0) == (parts == WHOLE)


@pytest.mark.parametrize("name", usual(hearing.HEARING, "voxtral"))
def test_steps_without_a_clip_leave_tower_and_projector(name: str, ears: Path) -> None:
    """As plain torch does, whose gradients are None there: no decay, no momentum."""
    model = {"train": WHOLE, "name": str(ears / f"{name}_hears")}
    run = train_on_clips(
        ears,
        name,
        "rare",
        "rare",
        model=model,
        data={
            "train": [{"path": str(ears / "rare.jsonl"), "format": "messages"}],
            "max_length": 128,
            "audio": {},
            "packing": False,
        },
        batch={"rows": 2},
        train={"max_steps": 8, "precision": "fp32"},
    )
    trained = ("audio_tower", "multi_modal_projector")
    assert metrics(run, "loss") == pytest.approx(own_loop(run, ears / f"{name}_hears", trained), rel=2e-6)


@pytest.mark.long
@pytest.mark.parametrize("name", hearing.HEARING)
def test_adapters_in_all_parts(name: str, ears: Path) -> None:
    from peft import PeftModel

    lora = {"lora": {"rank": 2, "alpha": 4.0}, "model": {"train": WHOLE, "name": str(ears / f"{name}_hears")}}
    run = train_on_clips(ears, name, "lora", mode="lora", **lora)
    base = AutoModelForMultimodalLM.from_pretrained(ears / f"{name}_hears")
    plain, result = Plain(run), PeftModel.from_pretrained(base, run / "model").eval()
    assert {"audio_tower", "multi_modal_projector", "language_model"} <= {
        part for key in result.state_dict() if "lora_" in key for part in key.split(".")
    }
    with torch.no_grad():
        alone = torch.cat([plain.losses(result, example.sequences[0]) for example in plain.examples]).mean()
    assert metrics(run, "eval_loss")[-1] == pytest.approx(float(alone), rel=2e-6)
