"""Rollouts on one process and on several: the same tokens, and the same curve when they are trained on again.

A run that is killed continues with those that it has recorded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from conftest import launch, metrics, train_here
from transformers import AutoModelForCausalLM

from finetune.errors import UserError
from finetune.features import load_recipe
from finetune.rl.rollouts.records import EVALUATION, STEP, read_record, record_file

Write = Callable[..., Path]
STEPS, PROMPTS, SAMPLES = 4, 4, 4
REPLAYED = 5e-6  # of a loss


@pytest.fixture
def online(recipe: dict[str, Any]) -> dict[str, Any]:
    """Vowels are rewarded, which a random model writes now and then."""
    recipe["data"] |= {"packing": False}
    return recipe | {
        "objective": {"name": "grpo"},
        "rollouts": {"prompts": PROMPTS, "samples": SAMPLES, "max_new_tokens": 6, "cohort": 4, "temperature": 0.8},
        "rewards": [{"name": "regex", "pattern": "[aeiou]"}],
        "batch": {"rows": PROMPTS * SAMPLES, "tokens_per_device": 128},
        "train": {"max_steps": STEPS, "precision": "fp32"},
        "evaluate": {"every_steps": 2, "at_start": False, "prompts": 3, "samples": 2},
    }


def steps_of(run: Path) -> list[dict[str, Any]]:
    return [line for line in metrics(run) if "loss" in line]


def distilling(made: Path, folder: Path) -> dict[str, Any]:
    """On-policy distillation: changes of `online`."""
    teacher = tiny.save_teacher(made / "qwen3", folder / "teacher")
    objective = {"name": "distill", "teacher": str(teacher), "divergence": "reverse_kl", "top_k": 8, "temperature": 2.0}
    return {"objective": objective, "rewards": [], "evaluate": {"every_steps": 2, "at_start": False}}


def curve(run: Path) -> list[float]:
    return [line["loss"] for line in steps_of(run)]


def lines_of(run: Path, step: int, kind: str = STEP) -> list[dict[str, Any]]:
    return [json.loads(line) for line in record_file(run / "rollouts", step, kind).read_text().splitlines()]


def evaluations(run: Path) -> list[dict[str, float]]:
    """Returns the metrics of held-out samples, but for their smallest margin."""
    lines = [line for line in metrics(run) if "eval_loss" in line]
    return [{k: v for k, v in line.items() if k not in ("eval_loss", "eval_margin")} for line in lines]


def assert_same_tokens(run: Path, other: Path) -> None:
    for step in range(1, STEPS + 1):
        margin = min(float(sample.margins.min()) for sample in (read_record(run / "rollouts", step) or ([], ""))[0])
        ours, theirs = lines_of(run, step), lines_of(other, step)
        assert ours == theirs, f"step {step}: the nearest tie had a margin of {margin:.2e}"


def assert_same_curve(curve: list[float], other: list[float]) -> None:
    assert len(curve) == len(other) == STEPS
    assert other == pytest.approx(curve, rel=REPLAYED, abs=1e-7)


LORA = {"mode": "lora", "lora": {"rank": 4, "alpha": 8}, "optimizer": {"lr": 5e-3}}
QLORA = {**LORA, "mode": "qlora", "quantization": {"type": "nf4"}, "optimizer": {"lr": 1e-3}}  # see parity.QLORA
MODES: dict[str, dict[str, Any]] = {"full": {}, "lora": LORA, "qlora": QLORA, "distill": {}}
DEFAULT = (("fsdp2", 2, "full"),)
# Every config, and every mode on every kind of them: replicas, shards of either library, shared rows and matrices,
# stages, experts.
MORE = (
    *((config, 2, "full") for config in ("ddp", "zero3", "tp", "cp", "ep", "pp")),
    *((config, 2, "full") for config in ("fsdp2_offload", "zero2_offload", "zero3_offload")),
    *((config, 4, "full") for config in ("hsdp", "fsdp2_tp", "fsdp2_cp", "pp_dp")),
    *((config, 2, "lora") for config in ("ddp", "fsdp2", "zero2", "tp", "ulysses", "pp", "ep")),
    *((config, 2, "qlora") for config in ("ddp", "fsdp2", "zero3", "cp", "pp")),
    *((config, 2, "distill") for config in ("ddp", "fsdp2", "zero3", "tp", "ulysses", "pp")),
    ("hsdp", 4, "distill"),
)


@pytest.mark.parametrize(
    ("config", "processes", "mode"),
    [*DEFAULT, *(pytest.param(*place, marks=pytest.mark.long) for place in MORE)],
)
def test_processes_sample_the_same_tokens_and_train_on_them_alike(
    config: str, processes: int, mode: str, online: dict[str, Any], write_recipe: Write, made: Path, tmp_path: Path
) -> None:
    online |= distilling(made, tmp_path) if mode == "distill" else MODES[mode]
    if config == "ep":
        online |= {"model": {"name": str(made / "mixtral")}}
    train_here(write_recipe(online))
    single = tmp_path / "runs" / "run"
    assert len(set(curve(single))) == STEPS  # rewards differ, or nothing would be learnt
    for name, changes in {
        "sampled": {},
        "replayed": {
            "rollouts": {**online["rollouts"], "replay": str(single / "rollouts")},
            "rewards": [],
            "evaluate": {},
        },
    }.items():
        online["run"]["name"] = name
        path = write_recipe({**online, **changes}, f"{name}.yaml")
        done = launch(config, processes, "train", path)
        assert done.returncode == 0, done.stderr
        assert_same_curve(curve(single), curve(tmp_path / "runs" / name))
    assert_same_tokens(single, tmp_path / "runs" / "sampled")
    if online["rewards"]:
        assert evaluations(tmp_path / "runs" / "sampled") == evaluations(single)
        assert lines_of(tmp_path / "runs" / "sampled", 4, EVALUATION) == lines_of(single, 4, EVALUATION)
        assert "eval_reward" not in evaluations(tmp_path / "runs" / "replayed")[0]  # nothing rewards them
        assert not (tmp_path / "runs" / "replayed" / "rollouts").exists()


def test_what_is_decoded_together_changes_no_token(online: dict[str, Any], write_recipe: Write, tmp_path: Path) -> None:
    """Prompts of a cohort are padded to its longest: neither a cohort's size nor the padding is in the noise."""
    train_here(write_recipe(online))
    online["rollouts"]["cohort"], online["run"]["name"] = PROMPTS * SAMPLES, "together"
    train_here(write_recipe(online))
    ours, theirs = (lines_of(tmp_path / "runs" / name, 1) for name in ("run", "together"))
    assert len({line["row"] for line in ours}) == PROMPTS
    assert ours == theirs


@pytest.mark.long
def test_recorded_rollouts_are_used_after_a_kill_and_none_of_another_recipe(
    online: dict[str, Any], write_recipe: Write, tmp_path: Path
) -> None:
    """As a kill leaves the folder: in a step, with its rollouts recorded; and while they are being written."""
    path = write_recipe(online | {"checkpoint": {"every_steps": 2}})
    train_here(path)
    run, whole = tmp_path / "runs" / "run", tmp_path / "whole"
    shutil.copytree(run, whole)
    for folder in ("step-00000004",):
        shutil.rmtree(run / "checkpoints" / folder)
    marked = lines_of(run, 3)
    (run / "rollouts" / "step-00000004.safetensors").unlink()  # incomplete
    train_here(path)
    assert curve(run) == curve(whole)
    assert lines_of(run, 3) == marked
    assert_same_tokens(run, whole)
    assert [file.name for file in sorted((run / "rollouts").glob("aside-*"))] == ["aside-0-step-00000004.jsonl"]
    assert evaluations(run) == evaluations(whole)
    assert "time/generation" not in next(line for line in metrics(run) if line.get("step") == 3)

    shutil.rmtree(run / "checkpoints")
    online["optimizer"]["lr"] = 2e-3
    train_here(write_recipe(online))
    assert lines_of(run, 1) == lines_of(whole, 1)  # of the initial weights, drawn again
    assert lines_of(run, 4) != lines_of(whole, 4)
    assert (run / "rollouts" / "aside-0-step-00000001.jsonl").is_file()


def test_held_out_prompts_are_sampled_and_rewarded_in_each_evaluation(
    online: dict[str, Any], write_recipe: Write, tmp_path: Path
) -> None:
    """Prompts that training does not draw; the best checkpoint is that of their reward."""
    path = write_recipe(online | {"checkpoint": {"best": "reward"}, "optimizer": {"lr": 0.02}})
    train_here(path)
    run = tmp_path / "runs" / "run"
    first, last = (lines_of(run, step, EVALUATION) for step in (2, 4))
    assert [(line["row"], line["sample"]) for line in first] == [(line["row"], line["sample"]) for line in last]
    assert len({line["row"] for line in first}) == 3
    assert "held_out.jsonl" in first[0]["row"]
    assert first != last
    trained = {line["text"] for step in range(1, STEPS + 1) for line in lines_of(run, step)}
    assert {line["text"] for line in first} - trained
    for (step, lines), line in zip({2: first, 4: last}.items(), evaluations(run), strict=True):
        assert line["step"] == step
        rewards = [one["reward"] for one in lines]
        assert line["eval_reward"] == line["eval_reward/regex"] == line["eval_pass@1/regex"] == sum(rewards) / 6
        assert line["eval_pass@2/regex"] == sum(max(rewards[i : i + 2]) for i in (0, 2, 4)) / 3
        assert "eval_zero_variance" not in line
    best = max(evaluations(run), key=lambda line: line["eval_reward"])["step"]
    assert (run / "checkpoints" / f"step-{best:08d}").is_dir()
    assert load_recipe(path).checkpoint.best == "eval_reward"


@pytest.mark.long
def test_an_evaluation_that_was_recorded_is_read_again(
    online: dict[str, Any], write_recipe: Write, tmp_path: Path
) -> None:
    """As a kill leaves it between the record and the line of the log; and of no other number of samples. Evaluations
    draw by the same noise: with equal weights, here almost, the answers are equal."""
    run = tmp_path / "runs" / "run"
    online["evaluate"]["at_start"], online["optimizer"] = True, {"lr": 1e-12}
    train_here(write_recipe(online))
    assert lines_of(run, 0, EVALUATION) == lines_of(run, 4, EVALUATION)
    assert lines_of(run, 1) != lines_of(run, 0, EVALUATION)
    lines = record_file(run / "rollouts", 0, EVALUATION)
    before, modified = lines.read_bytes(), lines.stat().st_mtime_ns
    (run / "metrics.jsonl").unlink()
    train_here(write_recipe(online))
    assert (lines.read_bytes(), lines.stat().st_mtime_ns) == (before, modified)
    (run / "metrics.jsonl").unlink()
    online["evaluate"]["samples"] = 1
    train_here(write_recipe(online))
    assert len(lines.read_bytes().splitlines()) == 3
    assert (run / "rollouts" / "aside-0-eval-00000000.jsonl").read_bytes() == before


@pytest.mark.long
def test_a_reward_model_is_whole_on_its_process_under_zero3(
    online: dict[str, Any], recipe: dict[str, Any], write_recipe: Write, tmp_path: Path
) -> None:
    """transformers shards every model that is loaded under ZeRO-3; the main process loads this one by itself."""
    pairs = tiny.write_rows(tmp_path / "pairs.jsonl", tiny.preferences(8))
    data = {"train": [{"path": str(pairs), "format": "preference"}], "max_length": 128}
    run = {**recipe["run"], "name": "judge"}
    train_here(write_recipe({**recipe, "run": run, "objective": {"name": "reward"}, "data": data}), "train.max_steps=1")
    online["rewards"] = [{"reward_model": str(tmp_path / "runs" / "judge")}]
    train_here(write_recipe(online))
    done = launch("zero3", 2, "train", write_recipe(online, "sampled.yaml"), "run.name=sampled")
    assert done.returncode == 0, done.stderr
    single, sampled = tmp_path / "runs" / "run", tmp_path / "runs" / "sampled"
    assert_same_curve(curve(single), curve(sampled))
    assert_same_tokens(single, sampled)


@pytest.fixture
def off_policy(online: dict[str, Any]) -> dict[str, Any]:
    online["objective"] |= {"loss": "grpo", "kl": 0.2}
    online["rollouts"] |= {"reuse": 2, "staleness": 1}
    return online | {"train": {"max_steps": 6, "precision": "fp32"}}


@pytest.mark.parametrize(
    "config",
    [pytest.param(name, marks=pytest.mark.long) for name in ("fsdp2", "ddp", "zero2", "zero3", "tp", "cp", "pp")],
)
def test_older_samples_and_a_reference_are_the_same_on_processes(
    config: str, off_policy: dict[str, Any], write_recipe: Write, tmp_path: Path
) -> None:
    """Samples, ratios to their weights, and the divergence from the initial weights, which take turns in the model."""
    train_here(write_recipe(off_policy))
    single = tmp_path / "runs" / "run"
    assert steps_of(single)[-1]["kl"] > 0
    assert steps_of(single)[-1]["old_kl"] > 0
    off_policy["run"]["name"] = "sampled"
    done = launch(config, 2, "train", write_recipe(off_policy, "sampled.yaml"))
    assert done.returncode == 0, done.stderr
    assert curve(tmp_path / "runs" / "sampled") == pytest.approx(curve(single), rel=REPLAYED, abs=1e-7)
    largest = [[line["ratio_max"] for line in steps_of(run)] for run in (single, tmp_path / "runs" / "sampled")]
    assert largest[1] == pytest.approx(largest[0], rel=1e-5)
    for step in (1, 3, 5):
        assert lines_of(single, step) == lines_of(tmp_path / "runs" / "sampled", step)


def test_samples_are_of_the_weights_that_the_recipe_says(
    off_policy: dict[str, Any], write_recipe: Write, tmp_path: Path
) -> None:
    """Those of steps 5 and 6 are of the weights after step 2, as is the trainer's record of their probabilities."""
    off_policy["model"]["dtype"], off_policy["schedule"] = "float32", {"name": "constant"}  # whatever the length
    train_here(write_recipe(off_policy))
    run = tmp_path / "runs" / "run"
    assert sorted(file.name for file in (run / "rollouts").glob("step-*.jsonl")) == [
        f"step-0000000{step}.jsonl" for step in (1, 3, 5)
    ]
    assert [steps_of(run)[i]["epoch"] for i in (1, 3, 5)] == [steps_of(run)[1]["epoch"] * n for n in (1, 2, 3)]
    off_policy["rollouts"] |= {"replay": str(run / "rollouts"), "staleness": 0}
    off_policy |= {
        "run": {**off_policy["run"], "name": "short"},
        "rewards": [],
        "evaluate": {},
        "train": {"max_steps": 2},
    }
    off_policy["train"]["precision"] = "fp32"
    train_here(write_recipe(off_policy))
    assert curve(tmp_path / "runs" / "short") == curve(run)[:2]
    after_2 = AutoModelForCausalLM.from_pretrained(tmp_path / "runs" / "short" / "model")
    at_first = AutoModelForCausalLM.from_pretrained(off_policy["model"]["name"])
    for step, model, initial in ((1, at_first, at_first), (3, at_first, at_first), (5, after_2, at_first)):
        (samples, _) = read_record(run / "rollouts", step) or ([], "")
        for sample in samples:
            expected = log_probs_of(model, sample.prompt, sample.ids)
            np.testing.assert_allclose(sample.log_probs, expected, rtol=0, atol=2e-5)
            np.testing.assert_allclose(sample.old, expected, rtol=0, atol=2e-5)
            np.testing.assert_allclose(
                sample.initial, log_probs_of(initial, sample.prompt, sample.ids), rtol=0, atol=2e-5
            )
        if step == 5:
            assert max(np.abs(sample.old - sample.initial).max() for sample in samples) > 1e-3


@torch.no_grad()
def log_probs_of(model: Any, prompt: list[int], ids: list[int]) -> np.ndarray[Any, Any]:
    """Returns the log-probabilities of sampled tokens by plain transformers."""
    logits = model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    return (logits / 0.8).log_softmax(1).gather(1, torch.tensor(ids)[:, None])[:, 0].double().numpy()


@pytest.mark.long
def test_a_run_goes_on_in_its_second_step_on_the_same_samples(
    off_policy: dict[str, Any], write_recipe: Write, tmp_path: Path
) -> None:
    """Killed after step 3 of 6: samples of steps 3 to 6 are recorded, of weights that are gone."""
    path = write_recipe(off_policy | {"checkpoint": {"every_steps": 3, "keep": 10}})
    train_here(path)
    run, whole = tmp_path / "runs" / "run", tmp_path / "whole"
    shutil.copytree(run, whole)
    shutil.rmtree(run / "checkpoints" / "step-00000006")
    train_here(path)
    assert curve(run) == curve(whole)
    assert not list((run / "rollouts").glob("aside-*"))
    shutil.rmtree(run / "checkpoints" / "step-00000006")
    (run / "rollouts" / "step-00000005.safetensors").unlink()
    with pytest.raises(
        UserError, match=r"step-00000005\.jsonl is missing or incomplete.*weights after step 2, and the run"
    ):
        train_here(path)


@pytest.mark.long
def test_lost_samples_are_drawn_again_from_a_checkpoint_of_their_weights(
    off_policy: dict[str, Any], write_recipe: Write, tmp_path: Path
) -> None:
    path = write_recipe(off_policy | {"checkpoint": {"every_steps": 2, "keep": 10}})
    train_here(path)
    run, whole = tmp_path / "runs" / "run", tmp_path / "whole"
    shutil.copytree(run, whole)
    for step in (4, 6):
        shutil.rmtree(run / "checkpoints" / f"step-0000000{step}")
    (run / "rollouts" / "step-00000005.safetensors").unlink()
    train_here(path)
    assert curve(run) == curve(whole)
    assert lines_of(run, 5) == lines_of(whole, 5)


def test_a_replay_that_lacks_a_step_or_has_another_size_is_refused(
    online: dict[str, Any], write_recipe: Write, tmp_path: Path
) -> None:
    train_here(write_recipe(online))
    records = tmp_path / "runs" / "run" / "rollouts"
    online |= {"run": {**online["run"], "name": "again"}, "rewards": [], "evaluate": {}}
    online["rollouts"]["replay"] = str(records)
    longer = write_recipe(online | {"train": {"max_steps": STEPS + 1, "precision": "fp32"}})
    with pytest.raises(UserError, match=r"step-00000005\.jsonl: no such file\. train\.max_steps needs 5 steps"):
        train_here(longer)
    smaller = {**online, "batch": {**online["batch"], "rows": 8}, "rollouts": {**online["rollouts"], "prompts": 2}}
    with pytest.raises(UserError, match="has 16 samples, and a step of this recipe 8"):
        train_here(write_recipe(smaller))


@pytest.mark.long
def test_a_prompt_that_samples_share_is_computed_once(
    online: dict[str, Any], write_recipe: Write, tmp_path: Path
) -> None:
    for name, shares in (("shared", "auto"), ("whole", False)):
        online["run"]["name"], online["objective"]["share_prompts"] = name, shares
        train_here(write_recipe(online))
    shared, whole = (tmp_path / "runs" / name for name in ("shared", "whole"))
    assert_same_tokens(whole, shared)
    assert_same_curve(curve(whole), curve(shared))
    for ours, theirs in zip(steps_of(shared), steps_of(whole), strict=True):
        assert ours["tokens"] == theirs["tokens"]
        assert "shared_token_share" not in theirs
        assert ours["shared_token_share"] > 0.3  # prompts of 9 tokens and more, 4 samples of at most 6


def test_distillation_on_own_samples_is_the_closed_form_and_is_recorded(
    online: dict[str, Any], write_recipe: Write, made: Path, tmp_path: Path
) -> None:
    """The divergence of plain transformers in fp64, each sample alone; replay and resume read the teacher's values."""
    online |= distilling(made, tmp_path)
    path = write_recipe(online | {"checkpoint": {"every_steps": 2}})
    train_here(path)
    run, teacher = tmp_path / "runs" / "run", tmp_path / "teacher"
    (samples, _), lines = read_record(run / "rollouts", 1) or ([], ""), steps_of(run)
    models = [AutoModelForCausalLM.from_pretrained(folder).double() for folder in (teacher, made / "llama")]
    divergences = []
    for sample in samples:
        ids = torch.tensor([[*sample.prompt, *sample.ids]])
        with torch.no_grad():
            p, q = (
                torch.softmax(model(ids, use_cache=False).logits[0, len(sample.prompt) - 1 : -1] / 2.0, 1)
                for model in models
            )
        top = p.topk(8, 1).indices
        p, q = (torch.cat([one.gather(1, top), 1 - one.gather(1, top).sum(1, keepdim=True)], 1) for one in (p, q))
        divergences.append((q * (q / p).log()).sum(1))
    expected = torch.cat(divergences).mean().item()
    assert lines[0]["divergence"] == pytest.approx(expected, rel=1e-5)
    assert lines[0]["loss"] == pytest.approx(4 * expected, rel=1e-5)  # times the squared temperature
    assert "reward" not in lines[0]

    whole = curve(run)
    shutil.rmtree(run / "checkpoints" / "step-00000004")
    train_here(path)
    assert curve(run) == whole
    assert not {"time/generation", "time/log_probs"} & set(steps_of(run)[2])

    (teacher / "model.safetensors").unlink()  # which a replay does not load
    online["run"]["name"] = "replayed"
    online["rollouts"]["replay"] = str(run / "rollouts")
    train_here(write_recipe(online))
    assert curve(tmp_path / "runs" / "replayed") == whole
