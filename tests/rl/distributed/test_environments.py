"""Samples of several turns, which an environment answers: the same tokens on processes, never tokenized again, trained
if the model sampled them, and recorded as a whole."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from conftest import launch, metrics, train_here
from transformers import AutoModelForCausalLM
from turns import BROKEN, ECHO, PROMPTS, SAMPLES, STEPS, recipe_with_turns

from finetune.errors import UserError
from finetune.models.tokenizer import read_tokenizer
from finetune.rl.rollouts.environment import LOG
from finetune.rl.rollouts.noise import gumbel, sample_keys
from finetune.rl.rollouts.records import EVALUATION, STEP, Sample, read_record, record_file
from finetune.rl.rollouts.step_rows import example_of

Write = Callable[..., Path]
REPLAYED = 5e-6  # of a loss


def talkative(folder: Path) -> Path:
    """Returns a model that ends a turn after about six tokens: the first dimension of all embeddings is large, and
    the head reads the end of a turn from it."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] = 0.1
        model.get_output_embeddings().weight[2, 0] = 1.2
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a model's folder, with `env.py` beside it."""
    folder = tmp_path_factory.mktemp("talkative") / "llama"
    shutil.copytree(made / "llama", folder)
    (folder.parent / "env.py").write_text(ECHO)
    return talkative(folder)


@pytest.fixture
def online(made: Path, model: Path, tmp_path: Path) -> dict[str, Any]:
    return recipe_with_turns(made, model, tmp_path / "runs")


@pytest.fixture(scope="module")
def trained(made: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of a run of `online` on one process."""
    folder = tmp_path_factory.mktemp("trained")
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe_with_turns(made, model, folder / "runs")))
    train_here(path)
    return folder / "runs" / "run"


def samples_of(run: Path, step: int, kind: str = STEP) -> list[Sample]:
    return (read_record(run / "rollouts", step, kind) or ([], ""))[0]


def lines_of(run: Path, step: int, kind: str = STEP) -> list[dict[str, Any]]:
    return [json.loads(line) for line in record_file(run / "rollouts", step, kind).read_text().splitlines()]


def steps_of(run: Path) -> list[dict[str, Any]]:
    return [line for line in metrics(run) if "loss" in line]


def curve(run: Path) -> list[float]:
    return [line["loss"] for line in steps_of(run)]


def assert_same(run: Path, other: Path) -> None:
    assert curve(other) == pytest.approx(curve(run), rel=REPLAYED, abs=1e-7)
    for step in range(1, STEPS + 1):
        margin = min(float(sample.margins.min()) for sample in samples_of(run, step))
        ours, theirs = lines_of(run, step), lines_of(other, step)
        assert ours == theirs, f"step {step}: the nearest tie had a margin of {margin:.2e}"


def replaying(online: dict[str, Any], records: Path) -> dict[str, Any]:
    rollouts = {**online["rollouts"], "environment": None, "replay": str(records)}
    return {**online, "rollouts": rollouts, "rewards": [], "evaluate": {}}


LORA = {"mode": "lora", "lora": {"rank": 4, "alpha": 8}, "optimizer": {"lr": 5e-3}}
PLACES = (
    *((config, 2, {}) for config in ("ddp", "fsdp2", "zero2", "zero3", "tp", "cp", "ulysses")),
    *((config, 4, {}) for config in ("ddp", "hsdp", "fsdp2_tp")),
    *((config, 2, LORA) for config in ("fsdp2", "zero3")),
)


@pytest.mark.long  # of samples without turns a default test has it: test_rollouts.py
@pytest.mark.parametrize(("config", "processes", "mode"), PLACES)
def test_processes_sample_the_same_turns_and_train_on_them_alike(
    config: str,
    processes: int,
    mode: dict[str, Any],
    trained: Path,
    online: dict[str, Any],
    write_recipe: Write,
    tmp_path: Path,
) -> None:
    single, online["run"]["name"] = trained, "single"
    if mode:
        train_here(write_recipe(online | mode))
        single = tmp_path / "runs" / "single"
    online["run"]["name"] = "sampled"
    assert len(set(curve(single))) == STEPS
    done = launch(config, processes, "train", write_recipe(online | mode, "sampled.yaml"))
    assert done.returncode == 0, done.stderr
    assert_same(single, tmp_path / "runs" / "sampled")
    assert lines_of(tmp_path / "runs" / "sampled", 4, EVALUATION) == lines_of(single, 4, EVALUATION)
    if config != "ddp":
        online["run"]["name"] = "replayed"
        path = write_recipe(replaying(online | mode, single / "rollouts"), "replayed.yaml")
        done = launch(config, processes, "train", path)
        assert done.returncode == 0, done.stderr
        assert curve(tmp_path / "runs" / "replayed") == pytest.approx(curve(single), rel=REPLAYED, abs=1e-7)


def log_probs_of(model: Any, sample: Sample) -> np.ndarray[Any, Any]:
    """Returns the log-probabilities of a sample's own tokens by plain transformers."""
    each = distributions(model, sample).gather(1, torch.tensor(sample.ids)[:, None])[:, 0]
    return each.numpy()[sample.sampled]


@torch.no_grad()
def distributions(model: Any, sample: Sample) -> torch.Tensor:
    """Returns the log-probabilities of all tokens at each place after the prompt."""
    logits = model(input_ids=torch.tensor([[*sample.prompt, *sample.ids]])).logits[0, len(sample.prompt) - 1 : -1]
    return (logits.double() / 0.8).log_softmax(1)


def test_turns_stay_as_sampled_between_messages_that_are_not_trained(trained: Path, model: Path) -> None:
    """The turns of the first step, by the initial weights; all that a step is made of is recorded."""
    tokenizer, plain = read_tokenizer(model), AutoModelForCausalLM.from_pretrained(model)
    samples, again = samples_of(trained, 1), 0
    ends = {sample.turns.ended for step in (1, 2, 3, 4) for sample in samples_of(trained, step) if sample.turns}
    assert ends == {"over", "max_turns", "max_new_tokens"}
    for i, sample in enumerate(samples):
        assert sample.turns is not None
        spans = sample.turns.spans
        assert spans[0][0] == 0
        assert spans[-1][1] == len(sample.ids)
        for (begin, end), (following, _) in zip(spans, [*spans[1:], (len(sample.ids), 0)], strict=True):
            turn = sample.ids[begin:end]
            assert 2 not in turn[:-1]
            again += tokenizer.encode(tokenizer.decode(turn), add_special_tokens=False) != turn
            if following < len(sample.ids):
                letters = len(str(tokenizer.decode(turn, skip_special_tokens=True)))
                message, _, rest = str(tokenizer.decode(sample.ids[end:following])).partition(", ")
                assert message == f"<|im_start|>user\n{letters} letters"
                assert rest[1:] == "<|im_end|><|im_start|>assistant\n"
        (sequence,) = example_of(sample, 1.0).sequences
        assert sequence.loss_mask.tolist() == [False] * len(sample.prompt) + sample.sampled.tolist()
        assert sequence.num_targets == sum(end - begin for begin, end in spans) == len(sample.log_probs)
        np.testing.assert_allclose(sample.log_probs, log_probs_of(plain, sample), rtol=0, atol=2e-5)
        log_p = distributions(plain, sample)  # the noise is that of a token's place after the prompt
        key = sample_keys(42, torch.tensor([i // SAMPLES]), torch.tensor([i % SAMPLES]))
        drawn = [int((log_p[at] + gumbel(key, at, log_p.shape[1])[0]).argmax()) for at in range(len(sample.ids))]
        assert [id_ for id_, own in zip(drawn, sample.sampled, strict=True) if own] == [
            id_ for id_, own in zip(sample.ids, sample.sampled, strict=True) if own
        ]
    assert again > 5  # a tokenizer gives other ids for the same text
    prompts = [str(tokenizer.decode(sample.prompt)) for sample in samples]
    assert len(set(prompts)) == PROMPTS  # `reset` draws a task for a prompt, not for a sample
    assert any("task" in prompt for prompt in prompts)
    line = steps_of(trained)[0]
    assert line["turns"] == np.mean([len(sample.turns.spans) for sample in samples if sample.turns])
    assert line["completion_tokens"] == np.mean([len(sample.log_probs) for sample in samples])
    lengths = [sum(len(turn) for turn in turns_of(sample, tokenizer)) for sample in samples]
    assert [sample.reward.by_name["environment"] for sample in samples] == [length % 7 for length in lengths]


def turns_of(sample: Sample, tokenizer: Any) -> list[str]:
    """Returns the texts of the turns that the environment has read: those with an end."""
    spans = sample.turns.spans if sample.turns else ()
    read = [sample.ids[begin:end] for begin, end in spans if sample.ids[end - 1] == 2]
    return [str(tokenizer.decode(ids, skip_special_tokens=True)) for ids in read]


def test_a_run_with_turns_goes_on_and_is_replayed(
    trained: Path, online: dict[str, Any], write_recipe: Write, tmp_path: Path
) -> None:
    """After a kill with the turns of step 3 recorded, and those of step 4 half written."""
    run = tmp_path / "runs" / "run"
    shutil.copytree(trained, run)
    shutil.rmtree(run / "checkpoints" / "step-00000004")
    (run / "rollouts" / "step-00000004.safetensors").unlink()
    train_here(write_recipe(online))
    assert curve(run) == curve(trained)
    assert_same(trained, run)
    assert "turns" in steps_of(run)[2]
    assert "time/generation" not in steps_of(run)[2]
    online["run"]["name"] = "replayed"
    train_here(write_recipe(replaying(online, trained / "rollouts")))
    assert curve(tmp_path / "runs" / "replayed") == curve(trained)


@pytest.mark.long
def test_what_is_decoded_together_changes_no_turn(
    trained: Path, online: dict[str, Any], write_recipe: Write, tmp_path: Path
) -> None:
    online["rollouts"]["cohort"], online["run"]["name"] = PROMPTS * SAMPLES, "together"
    online["rollouts"]["environment"]["processes"] = 3
    train_here(write_recipe(online))
    assert lines_of(trained, 1) == lines_of(tmp_path / "runs" / "together", 1)


@pytest.mark.long
@pytest.mark.parametrize("config", ["single", "fsdp2"])
def test_older_turns_a_reference_and_corrections(
    config: str, online: dict[str, Any], write_recipe: Write, model: Path, tmp_path: Path
) -> None:
    """Log-probabilities of a turn's tokens by the trainer, by its initial weights and by the sampler agree, so that
    correcting the recorded ones changes nothing."""
    online["objective"] |= {"loss": "grpo", "kl": 0.2}
    online["rollouts"] |= {"reuse": 2}
    done = launch(config, 1 if config == "single" else 2, "train", write_recipe(online))
    assert done.returncode == 0, done.stderr
    run, plain = tmp_path / "runs" / "run", AutoModelForCausalLM.from_pretrained(model)
    for sample in samples_of(run, 1):
        for values in (sample.old, sample.initial, sample.log_probs):
            np.testing.assert_allclose(values, log_probs_of(plain, sample), rtol=0, atol=2e-5)
    assert all(np.isfinite(line["kl"]) for line in steps_of(run))
    online["objective"]["correction"], online["run"]["name"] = "tis", "corrected"
    train_here(write_recipe(replaying(online, run / "rollouts")))
    corrected = tmp_path / "runs" / "corrected"
    assert all(abs(line["correction/weight"] - 1) < 1e-4 for line in steps_of(corrected))
    assert curve(corrected) == pytest.approx(curve(run), rel=1e-4, abs=1e-5)


def test_an_environment_that_fails_is_counted_and_told_or_stops_the_run(
    online: dict[str, Any], write_recipe: Write, tmp_path: Path
) -> None:
    """Never a silent 0: the reward of a sample that failed is what the recipe says, or the run stops."""
    (tmp_path / "env.py").write_text(BROKEN)
    online["rollouts"]["environment"]["file"] = str(tmp_path / "env.py")
    online["train"]["max_steps"], online["evaluate"] = 1, {"at_start": False, "prompts": 0}
    with pytest.raises(
        UserError, match=r"rollouts.environment: .*rows.jsonl:\d+, sample \d, turn 1: .*Fix: correct the env"
    ):
        train_here(write_recipe(online))
    run, online["run"]["name"] = tmp_path / "runs" / "ended", "ended"
    online["rollouts"]["environment"]["on_failure"] = "end"
    with pytest.raises(UserError, match=r"rewards\[0\] \(environment\): .*set `on_failure` to the value"):
        train_here(write_recipe(online))
    online["rewards"][0]["on_failure"] = -1.0
    train_here(write_recipe(online))
    samples = samples_of(run, 1)
    failed = [sample for sample in samples if sample.turns and sample.turns.failure]
    assert {sample.turns.failure for sample in failed if sample.turns} == {"raised", "died", "invalid"}
    assert all(sample.reward.by_name["environment"] is None and sample.reward.failures for sample in failed)
    line = steps_of(run)[0]
    assert line["environment_failures"] == line["reward_failures/environment"] == len(failed)
    log = (run / LOG).read_text()
    assert "raised KeyError: 'no key in turn 1'" in log
    assert "ended its process (status 3)" in log
    assert "step returned int (7); expected a text, messages, or None at the end" in log
    assert "    reading " in log  # what it printed
    others = [sample for sample in samples if sample not in failed]
    assert all(sample.reward.by_name["environment"] is not None for sample in others)
