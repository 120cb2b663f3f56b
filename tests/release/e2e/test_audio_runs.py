"""Runs on sound against plain transformers, one document at a time: losses step by step, the result, its answers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import hearing
import numpy as np
import pytest
import torch
import yaml
from conftest import train_here
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMultimodalLM

from finetune.data.dataset import build_training, on_disk
from finetune.data.examples import Examples, media_reader
from finetune.data.media.family_table import family_of
from finetune.data.samples import Sequence
from finetune.errors import UserError
from finetune.features import load_recipe
from finetune.models.base_model import Base
from finetune.models.towers import part_of

pytest.importorskip("soundfile")
pytest.importorskip("soxr")

WHOLE = ["language", "projector", "tower"]


@pytest.fixture(scope="module")
def ears(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("audio-runs")
    for name in hearing.available():
        hearing.save_hearing(folder, name)
    hearing.write_clips(folder, "clips", 24)
    hearing.write_clips(folder, "single", 24, numbers=(0, 1, 1))
    hearing.write_clips(folder, "rare", 24, seed=3, numbers=(0,) * 5 + (1,))
    return folder


def train_on_clips(folder: Path, name: str, label: str, rows: str = "", **changes: Any) -> Path:
    """Returns the folder of the run. changes: of the recipe's sections; keys of a section."""
    rows = rows or ("single" if name in hearing.ALONE else "clips")
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


def own_loop(run: Path, base: Path, trained: list[str]) -> list[float]:
    """The losses of a loop over plain transformers on the rows of the run's steps, one document at a time."""
    plain, model = Plain(run), AutoModelForMultimodalLM.from_pretrained(base)
    family = family_of(model.config)
    kept = (*family.unused, *family.others)
    named = [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if part_of(family, name) in trained and not any(f".{path}." in name for path in kept)
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
        if not any(by_row[row].media for row in json.loads(line)["rows"]):  # Gemma 3n: zeros, of an id without use
            for name, parameter in named:
                parameter.grad = parameter.grad if part_of(family, name) == "language" else None
        optimizer.step()
        losses.append(nll.item())
    return losses


@pytest.mark.parametrize("name", hearing.families("qwen2_audio"))
@pytest.mark.parametrize(
    "parts", [pytest.param(["language"], marks=pytest.mark.long), WHOLE], ids=["language", "tower"]
)
def test_losses_are_those_of_plain_transformers(name: str, parts: list[str], ears: Path) -> None:
    run = train_on_clips(ears, name, "-".join(parts[-1:]), model={"train": parts, "name": str(ears / f"{name}_hears")})
    assert metrics(run, "loss") == pytest.approx(own_loop(run, ears / f"{name}_hears", parts), rel=2e-6)
    plain, result = Plain(run), AutoModelForMultimodalLM.from_pretrained(run / "model")
    with torch.no_grad():
        alone = torch.cat([plain.losses(result, example.sequences[0]) for example in plain.examples]).mean()
    assert metrics(run, "eval_loss")[-1] == pytest.approx(float(alone), rel=2e-6)
    assert (run / "model" / "preprocessor_config.json").is_file()
    tower = (json.loads((run / "plan.json").read_text())["parts"])["tower"]
    assert (tower[1] > 0) == (parts == WHOLE)


@pytest.mark.parametrize("name", hearing.families("voxtral"))
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
    assert metrics(run, "loss") == pytest.approx(own_loop(run, ears / f"{name}_hears", WHOLE), rel=2e-6)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning")  # of stacked experts
@pytest.mark.parametrize("name", hearing.families())
def test_adapters_in_all_parts(name: str, ears: Path) -> None:
    from peft import PeftModel

    lora: dict[str, Any] = {
        "lora": {"rank": 2, "alpha": 4.0},
        "model": {"train": WHOLE, "name": str(ears / f"{name}_hears")},
    }
    run = train_on_clips(ears, name, "lora", mode="lora", **lora)
    base = AutoModelForMultimodalLM.from_pretrained(ears / f"{name}_hears")
    plain, result = Plain(run), PeftModel.from_pretrained(base, run / "model").eval()
    family = family_of(base.config)
    adapted = (key.removeprefix("base_model.model.") for key in result.state_dict() if "lora_" in key)
    assert {part_of(family, key) for key in adapted} == {*WHOLE}
    with torch.no_grad():
        alone = torch.cat([plain.losses(result, example.sequences[0]) for example in plain.examples]).mean()
    assert metrics(run, "eval_loss")[-1] == pytest.approx(float(alone), rel=2e-6)


def test_the_thinker_of_a_model_that_talks_is_trained(ears: Path) -> None:
    """From files of the whole model, whose config has the thinker's within and whose tensors begin with `thinker.`."""
    name = "qwen2_5_omni_thinker"
    whole = ears / "omni_hears"
    shutil.copytree(ears / f"{name}_hears", whole)
    tensors = {f"thinker.{key}": value for key, value in load_file(whole / "model.safetensors").items()}
    save_file({**tensors, "talker.norm.weight": torch.ones(4)}, whole / "model.safetensors", {"format": "pt"})
    thinker = json.loads((whole / "config.json").read_text())
    config = {"model_type": "qwen2_5_omni", "architectures": ["Qwen2_5OmniModel"], "thinker_config": thinker}
    (whole / "config.json").write_text(json.dumps(config))
    runs = [
        train_on_clips(ears, name, label, model={"name": str(folder), "train": ["language"]})
        for label, folder in (("whole", whole), ("part", ears / f"{name}_hears"))
    ]
    assert metrics(runs[0], "loss") == metrics(runs[1], "loss")
    result = AutoModelForMultimodalLM.from_pretrained(runs[0] / "model")
    assert type(result).__name__ == "Qwen2_5OmniThinkerForConditionalGeneration"
    assert not any("talker" in key for key in load_file(runs[0] / "model" / "model.safetensors"))
    with pytest.raises(UserError, match=r"also talks, and an adapter of its thinker would not load"):
        train_on_clips(
            ears, name, "adapter", model={"name": str(whole), "train": ["language"]}, mode="lora", lora={"rank": 2}
        )
