"""Results are written: each causal class that an accelerate config takes trains a step, and its folder, read back by
transformers, has the tensors of one process's result. Each class runs under one config of each way to divide a model,
drawn each time."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random, SystemRandom
from typing import Any

import architectures as sweep
import forks
import parity
import pytest
import tiny
import torch
import yaml
from repository import ROOT
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from finetune.models.trials import FAILURES

WORKER = Path(__file__).with_name("results_worker.py")
LAUNCHES = {"fsdp2": 2, "zero3": 2, "tp": 2, "pp": 2, "pp_fsdp2": 4, "pp_tp": 4, "ep": 2}
DIVIDED = {"shards": ("fsdp2", "zero3"), "stages": ("pp", "pp_fsdp2", "pp_tp"), "layers": ("tp", "ep")}
# Their layers save buffers: the router's bias, which no gradient changes.
WITH_BUFFERS = ("deepseek_v3", "glm4_moe")
CHUNK = 12  # classes of a launch
CLOSE = 1e-4  # of a tensor's largest element: a step of SGD, fp32
# Softmax has no gradient for a bias of keys but rounding, of about 1e-9, and it is all that is in a bias that was 0.
ROUNDING = 1e-7
VOCABULARIES = ("vocab_size", "decoder_vocab_size", "unpadded_vocab_size", "vocab_size_per_layer_input")

Launched = Callable[[str, tuple[str, ...]], dict[str, dict[str, Any]]]


def chunks() -> list[tuple[str, ...]]:
    names = [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in sweep.NO_MODEL]
    return [tuple(names[i : i + CHUNK]) for i in range(0, len(names), CHUNK)]


@pytest.fixture(scope="module")
def launched(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """Train classes under a config, in one launch; returns what became of each on rank 0, with its `folder`."""
    folder = tmp_path_factory.mktemp("results")
    recipe = parity.base_recipe(made)
    recipe["batch"] = {"rows": 4, "rows_per_device": 1}
    recipe["optimizer"] = {"name": "sgd", "lr": 0.1}
    recipe["train"] = {"max_steps": 1, "precision": "fp32"}
    recipe["data"] = {"train": recipe["data"]["train"], "max_length": 64}
    recipe.pop("evaluate", None)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")

    @cache
    def start(config: str, names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
        out = folder / f"{config}-{names[0]}-{len(names)}"
        out.mkdir()
        cases = [{"name": name, "overrides": overrides(name, out)} for name in names if base_of(folder, name)]
        plan = {"recipe": str(folder / "recipe.yaml"), "out": str(out), "cases": cases}
        (out / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
        if config == "single":
            done = forks.python(WORKER, out / "plan.json")
        else:
            file = ROOT / "accelerate_configs" / f"{config}.yaml"
            done = forks.accelerate_launch(file, LAUNCHES[config], WORKER, out / "plan.json")
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
        found = {case["name"]: json.loads((out / f"{case['name']}-0.json").read_text()) for case in cases}
        return {name: {**became, "folder": out / "runs" / name / "model"} for name, became in found.items()}

    def overrides(name: str, out: Path) -> list[str]:
        return [f"model.name={folder / 'bases' / name}", f"run.dir={out / 'runs'}"]

    return start


@cache
def base_of(folder: Path, name: str) -> Path | None:
    """Writes a tiny model of a class; None if transformers cannot make or save one."""
    base = folder / "bases" / name
    try:
        config = sweep.tiny(name)
        for part in (config, config.get_text_config()):
            for key in (one for one in VOCABULARIES if one == "vocab_size" or hasattr(part, one)):
                setattr(part, key, tiny.MODELS["llama"]["vocab_size"])
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(base)
    except FAILURES:
        return None
    tiny.tokenizer().save_pretrained(base)
    return base


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def check_results(launched: Launched, config: str, names: tuple[str, ...]) -> list[str]:
    """Returns what is wrong; classes that one process refuses, and those that the config refuses by rule, are not."""
    wrong, alone = [], launched("single", names)
    for name, became in launched(config, tuple(names)).items():
        if alone[name]["error"] is not None or became["error"] == "UserError":
            continue
        if became["error"]:
            wrong.append(f"{name}: {became['error']}: {became['message']:.300}")
            continue
        expected, found = tensors(alone[name]["folder"]), tensors(became["folder"])
        if expected.keys() != found.keys():
            wrong.append(f"{name}: other tensors: {sorted(expected.keys() ^ found.keys())[:4]}")
            continue
        for key, tensor in expected.items():
            if not torch.allclose(tensor, found[key], rtol=0, atol=max(ROUNDING, CLOSE * float(tensor.abs().max()))):
                wrong.append(f"{name}: {key} differs")
                break
    return wrong


@pytest.mark.long
@pytest.mark.parametrize(
    "config", ["pp", *(pytest.param(name, marks=pytest.mark.long) for name in ("pp_fsdp2", "pp_tp"))]
)
def test_saved_buffers_of_later_stages_are_in_the_result(launched: Launched, config: str) -> None:
    assert check_results(launched, config, WITH_BUFFERS) == []
    for name, became in launched(config, WITH_BUFFERS).items():
        assert became["error"] is None, became["message"]
        biases = [tensor for key, tensor in tensors(became["folder"]).items() if "e_score_correction_bias" in key]
        assert len(biases) >= 1, name
        model, info = AutoModelForCausalLM.from_pretrained(became["folder"], output_loading_info=True)
        assert not info["missing_keys"]
        assert not info["unexpected_keys"], type(model)


@pytest.mark.long
def test_zero_3_steps_with_every_gradient_or_not_at_all(launched: Launched) -> None:
    """MVP's positions are integers, which have no gradient. The attention of OpenAI-GPT returns a list, and DeepSpeed
    would leave its gradients out of the step."""
    assert check_results(launched, "zero3", ("mvp", "openai-gpt")) == []
    became = launched("zero3", ("mvp", "openai-gpt"))
    assert became["mvp"]["error"] is None, became["mvp"]["message"]
    assert became["openai-gpt"]["error"] == "UserError"
    assert "DeepSpeed's hooks do not reduce its gradient" in became["openai-gpt"]["message"]


@pytest.fixture(scope="module")
def seed() -> int:
    return SystemRandom().randrange(2**31)


@pytest.mark.long
@pytest.mark.parametrize("configs", DIVIDED.values(), ids=DIVIDED)
@pytest.mark.parametrize("names", chunks(), ids=lambda names: names[0])
def test_every_class_that_a_config_takes_is_written(
    launched: Launched, seed: int, configs: tuple[str, ...], names: tuple[str, ...]
) -> None:
    config = Random(f"{seed} {configs} {names}").choice(configs)
    assert check_results(launched, config, names) == [], f"under {config}, drawn by {seed}"


@pytest.mark.long
@pytest.mark.parametrize("names", chunks(), ids=lambda names: names[0])
def test_every_class_that_one_process_takes_is_written(launched: Launched, names: tuple[str, ...]) -> None:
    for name, became in launched("single", names).items():
        assert became["error"] in (None, "UserError"), f"{name}: {became['message']}"
        if became["error"] is None:
            _, info = AutoModelForCausalLM.from_pretrained(became["folder"], output_loading_info=True)
            assert not info["missing_keys"], name
            assert not info["unexpected_keys"], name
