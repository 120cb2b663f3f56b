"""Runs on sound against plain transformers, one document at a time: losses step by step, the result, its answers."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import hearing
import pytest
import torch
from conftest import train_with
from plain_documents import Plain, metric, own_loop
from repository import ROOT
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMultimodalLM

from finetune.data.media.family_table import family_of
from finetune.errors import UserError
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
    return train_with(folder, recipe, changes)


@pytest.mark.parametrize("name", hearing.families("qwen2_audio"))
@pytest.mark.parametrize(
    "parts", [pytest.param(["language"], marks=pytest.mark.long), WHOLE], ids=["language", "tower"]
)
def test_losses_are_those_of_plain_transformers(name: str, parts: list[str], ears: Path) -> None:
    run = train_on_clips(ears, name, "-".join(parts[-1:]), model={"train": parts, "name": str(ears / f"{name}_hears")})
    assert metric(run, "loss") == pytest.approx(own_loop(run, ears / f"{name}_hears", parts), rel=2e-6)
    plain, result = Plain(run), AutoModelForMultimodalLM.from_pretrained(run / "model")
    with torch.no_grad():
        alone = torch.cat([plain.losses(result, example.sequences[0]) for example in plain.examples]).mean()
    assert metric(run, "eval_loss")[-1] == pytest.approx(float(alone), rel=2e-6)
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
    assert metric(run, "loss") == pytest.approx(own_loop(run, ears / f"{name}_hears", WHOLE), rel=2e-6)


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
    assert metric(run, "eval_loss")[-1] == pytest.approx(float(alone), rel=2e-6)


def test_the_thinker_of_a_model_that_talks_is_trained(ears: Path) -> None:
    """From files of the whole model, whose config has the thinker's within and whose tensors begin with `thinker.`."""
    name = "qwen2_5_omni_thinker"
    whole = hearing.save_talking(ears, name)
    runs = [
        train_on_clips(ears, name, label, model={"name": str(folder), "train": ["language"]})
        for label, folder in (("whole", whole), ("part", ears / f"{name}_hears"))
    ]
    assert metric(runs[0], "loss") == metric(runs[1], "loss")
    result = AutoModelForMultimodalLM.from_pretrained(runs[0] / "model")
    assert type(result).__name__ == "Qwen2_5OmniThinkerForConditionalGeneration"
    assert not any("talker" in key for key in load_file(runs[0] / "model" / "model.safetensors"))
    with pytest.raises(UserError, match=r"also talks, and an adapter of its thinker would not load"):
        train_on_clips(
            ears, name, "adapter", model={"name": str(whole), "train": ["language"]}, mode="lora", lora={"rank": 2}
        )


IDS = torch.arange(5, 40)[None]


def with_adapter_beside(folder: Path, base: Path, beginning: str) -> tuple[Path, torch.Tensor]:
    """A copy of a model with an adapter of its language model in a folder within, as Phi-4 multimodal is published; and
    the logits of both together. beginning: of the names in the adapter's file."""
    from peft import LoraConfig, get_peft_model

    into, plain = folder / "published", AutoModelForMultimodalLM.from_pretrained(base)
    shutil.copytree(base, into)
    layers = r".*\.layers\.\d+\.(self_attn\.(qkv_proj|o_proj)|mlp\.(gate_up_proj|down_proj))"
    settings = LoraConfig(r=4, lora_alpha=8, target_modules=layers, init_lora_weights=False)
    model: Any = get_peft_model(plain, settings).eval()
    model.save_pretrained(into / "speech-lora")
    file = into / "speech-lora" / "adapter_model.safetensors"
    tensors = {f"{beginning}{key.removeprefix('base_model.model.')}": one for key, one in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})
    with torch.no_grad():
        return into, model(IDS).logits


@pytest.mark.parametrize("beginning", ["base_model.model.", ""], ids=["saved by peft", "converted"])
def test_an_adapter_beside_a_model_is_merged_by_the_lines_of_the_docs(
    beginning: str, ears: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = "phi4_multimodal"
    published, adapted = with_adapter_beside(tmp_path, ears / f"{name}_hears", beginning)
    label, model = f"merged-{len(beginning)}", {"name": str(published), "train": WHOLE}
    with pytest.raises(UserError, match=r"hears by a LoRA adapter beside its weights \(speech-lora\)\. Fix: merge"):
        train_on_clips(ears, name, label, model=model)
    page = (ROOT / "docs/reference/audio.md").read_text(encoding="utf-8")
    (lines,) = (one for one in re.findall(r"```python\n(.+?)```", page, re.DOTALL) if "speech-lora" in one)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(published))
    monkeypatch.chdir(tmp_path)
    exec(compile(lines, "audio.md", "exec"), {})
    merged = tmp_path / "Phi-4-multimodal-instruct-speech"
    with torch.no_grad():
        ours, plain = (AutoModelForMultimodalLM.from_pretrained(one)(IDS).logits for one in (merged, published))
    torch.testing.assert_close(ours, adapted, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(plain, adapted, atol=1e-2)
    run = train_on_clips(ears, name, label, model={**model, "name": str(merged)})
    assert metric(run, "loss") == pytest.approx(own_loop(run, merged, WHOLE), rel=2e-6)
