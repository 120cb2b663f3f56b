"""Rollouts that a server samples (`rollouts.engine: vllm`): order and content of its requests, whole runs, and what a
server must not get away with."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from conftest import launch, metrics, train_here
from sampling_server import MODEL, SamplingServer, sampling_server

from finetune.errors import UserError
from finetune.recipe.schema import Rollouts
from finetune.rl.rollouts.noise import sample_keys
from finetune.rl.rollouts.records import read_record, record_file
from finetune.rl.rollouts.vllm_server import VllmServer

Write = Callable[..., Path]
STEPS, PROMPTS, SAMPLES, SEED = 4, 2, 4, 42
# The server's log-probabilities of about -5 are rounded by 5e-7, and with them the ratios of the loss, whose terms of
# about 1 cancel to a hundredth.
ROUNDED = 1e-6
LOAD, UNLOAD, SAMPLE = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/completions"
SWAP = ["/pause?mode=wait", "/collective_rpc", "/resume"]


@pytest.fixture
def server(made: Path) -> Iterator[SamplingServer]:
    with sampling_server(made / "llama") as running:
        yield running


@pytest.fixture
def served(recipe: dict[str, Any], server: SamplingServer) -> dict[str, Any]:
    recipe["data"] |= {"packing": False}
    del recipe["data"]["eval"], recipe["evaluate"]
    rollouts = {"prompts": PROMPTS, "samples": SAMPLES, "max_new_tokens": 5, "temperature": 0.8}
    return recipe | {
        "mode": "lora",
        "lora": {"rank": 4},
        "objective": {"name": "grpo", "correction": "sequence_mask"},
        "optimizer": {"lr": 1e-2},
        "rollouts": {**rollouts, "engine": "vllm", "url": server.url, "requests": 3},
        "rewards": [{"name": "regex", "pattern": "[aeiou]"}],
        "batch": {"rows": PROMPTS * SAMPLES, "tokens_per_device": 256},
        "train": {"max_steps": STEPS, "precision": "fp32"},
    }


def curve(run: Path) -> list[float]:
    return [line["loss"] for line in metrics(run) if "loss" in line]


def samples_of(server: SamplingServer) -> list[dict[str, Any]]:
    return [body for path, body in server.calls if path == SAMPLE and body.get("stop_token_ids")]


def test_a_run_samples_each_step_from_its_own_adapter_and_resumes(
    served: dict[str, Any], server: SamplingServer, write_recipe: Write, tmp_path: Path
) -> None:
    served["checkpoint"] = {"every_steps": 2}
    path = write_recipe(served)
    train_here(path)
    run, whole = tmp_path / "runs" / "run", tmp_path / "whole"
    loaded = [body["lora_name"] for path, body in server.calls if path == LOAD]
    # Looks for the server; then each step loads a new adapter, unloads the last, proves the new one, and samples.
    assert server.paths()[0] == "/v1/models"
    assert server.paths(LOAD, UNLOAD) == [LOAD, *[LOAD, UNLOAD] * (STEPS - 1), UNLOAD]
    assert len(set(loaded)) == STEPS
    samples = samples_of(server)
    assert [body["model"] for body in samples] == [name for name in loaded for _ in range(PROMPTS * SAMPLES)]
    draws = torch.arange(STEPS * PROMPTS).repeat_interleave(SAMPLES)
    keys = sample_keys(SEED, draws, torch.arange(SAMPLES).repeat(STEPS * PROMPTS)) & (2**63 - 1)
    assert sorted(body["seed"] for body in samples) == sorted(keys.tolist())
    assert 2 <= server.most_at_once <= 3
    assert not (run / "sampler").exists()

    lines = [line for line in metrics(run) if "loss" in line]
    assert len({line["loss"] for line in lines}) == STEPS
    for line in lines:
        assert line["sampler_mismatch"] < 1e-5
        assert abs(line["sampler_kl"]) < 1e-5
        assert "margin" not in line
    recorded = (read_record(run / "rollouts", 1) or ([], ""))[0]
    assert all(np.isnan(sample.margins).all() for sample in recorded)

    # As a kill leaves the folder: in step 3, with its rollouts recorded; those of step 4 are being written.
    shutil.copytree(run, whole)
    shutil.rmtree(run / "checkpoints" / "step-00000004")
    (run / "rollouts" / "step-00000004.safetensors").unlink()
    server.calls.clear()
    served["rollouts"] |= {"requests": 1, "seconds": 30}  # neither changes a sample
    train_here(write_recipe(served))
    assert curve(run) == curve(whole)
    assert record_file(run / "rollouts", 3).read_text() == record_file(whole / "rollouts", 3).read_text()
    assert record_file(run / "rollouts", 4).read_text() == record_file(whole / "rollouts", 4).read_text()
    assert server.paths(LOAD, UNLOAD) == [LOAD, UNLOAD]

    # Recorded rollouts train without a server.
    own = {
        key: value for key, value in served["rollouts"].items() if key not in ("engine", "url", "requests", "seconds")
    }
    served |= {"rollouts": {**own, "replay": str(whole / "rollouts")}, "rewards": []}
    served["run"]["name"] = "replayed"
    server.calls.clear()
    train_here(write_recipe(served))
    assert curve(tmp_path / "runs" / "replayed") == curve(whole)
    assert server.calls == []


@pytest.mark.long
def test_all_weights_are_replaced_while_the_server_is_paused(
    served: dict[str, Any], server: SamplingServer, write_recipe: Write, tmp_path: Path
) -> None:
    del served["lora"]
    served |= {"mode": "full", "optimizer": {"lr": 1e-3}}
    train_here(write_recipe(served))
    assert server.paths(*SWAP, LOAD) == SWAP * STEPS
    assert {body["model"] for body in samples_of(server)} == {MODEL}
    lines = [line for line in metrics(tmp_path / "runs" / "run") if "loss" in line]
    assert all(line["sampler_mismatch"] < 1e-5 for line in lines)
    assert len({line["loss"] for line in lines}) == STEPS


@pytest.mark.long
def test_a_student_is_taught_at_the_samples_of_a_server(
    served: dict[str, Any], server: SamplingServer, made: Path, write_recipe: Write, tmp_path: Path
) -> None:
    """Samples come from the server, with each step's adapter; the teacher's distributions from beside the student, and
    a replay needs neither."""
    teacher = tiny.save_teacher(made / "qwen3", tmp_path / "teacher")
    served["objective"] = {"name": "distill", "teacher": str(teacher), "divergence": "reverse_kl", "top_k": 8}
    served |= {"rewards": [], "train": {"max_steps": 2, "precision": "fp32"}}
    train_here(write_recipe(served))
    run = tmp_path / "runs" / "run"
    assert server.paths(LOAD, UNLOAD) == [LOAD, LOAD, UNLOAD, UNLOAD]
    assert len(samples_of(server)) == 2 * PROMPTS * SAMPLES
    lines = [line for line in metrics(run) if "loss" in line]
    assert all(line["divergence"] > 0.1 and line["sampler_mismatch"] < 1e-5 for line in lines)
    recorded = (read_record(run / "rollouts", 1) or ([], ""))[0]
    assert all(sample.teacher is not None and sample.teacher.ids.shape == (len(sample.ids), 8) for sample in recorded)
    own = {key: value for key, value in served["rollouts"].items() if key not in ("engine", "url", "requests")}
    served |= {"rollouts": {**own, "replay": str(run / "rollouts")}, "run": {**served["run"], "name": "replayed"}}
    (teacher / "model.safetensors").unlink()
    server.calls.clear()
    train_here(write_recipe(served))
    assert curve(tmp_path / "runs" / "replayed") == curve(run)
    assert server.calls == []


@pytest.mark.long
@pytest.mark.parametrize(("fault", "mode"), [("stale", "lora"), ("base", "lora"), ("stale", "full")])
def test_a_server_without_the_weights_of_the_step_stops_the_run(
    fault: str, mode: str, served: dict[str, Any], server: SamplingServer, write_recipe: Write, tmp_path: Path
) -> None:
    """After one step weights differ by 1e-3 nats per token, a tenth of what rounding is allowed."""
    if mode == "full":
        del served["lora"]
    served |= {"mode": mode, "optimizer": {"lr": 1e-3}}
    server.fault = fault
    with pytest.raises(UserError) as error:
        train_here(write_recipe(served))
    where = "the base model, without the adapter" if mode == "lora" else "the weights that this run started with"
    assert f"They are those of {where}: it did not get the weights" in str(error.value)
    assert len(curve(tmp_path / "runs" / "run")) == 1


def test_a_server_with_another_model_stops_the_run_before_a_sample(
    served: dict[str, Any], made: Path, write_recipe: Write, tmp_path: Path
) -> None:
    with sampling_server(made / "llama_tied") as other:
        served["rollouts"]["url"] = other.url
        with pytest.raises(UserError, match=r"and 0\.01 is the most \(rollouts\.max_mismatch\)\. It has another model"):
            train_here(write_recipe(served))
        assert samples_of(other) == []
        served["rollouts"]["max_mismatch"] = 100.0
        served["train"]["max_steps"] = 1
        train_here(write_recipe(served))
    assert metrics(tmp_path / "runs" / "run")[0]["sampler_mismatch"] > 0.01


def test_log_probabilities_without_the_temperature_stop_the_run(
    served: dict[str, Any], server: SamplingServer, write_recipe: Write
) -> None:
    server.fault = "raw_log_probs"
    with pytest.raises(UserError, match="start it with --logprobs-mode processed_logprobs"):
        train_here(write_recipe(served))


def test_a_server_that_is_not_there_stops_the_run_before_training(served: dict[str, Any], write_recipe: Write) -> None:
    served["rollouts"]["url"] = "http://127.0.0.1:9"
    path = write_recipe(served)
    message = r"127\.0\.0\.1:9 cannot be reached: .*\. Fix: start the server, such as .* vllm serve"
    with pytest.raises(UserError, match=message):
        train_here(path)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("error", "/v1/completions answered with status 500: EngineCore encountered an issue"),
        ("hang", r"/v1/completions gave no answer in 0\.3 s\. Fix: .*raise rollouts\.seconds"),
        ("ids", "the `prompt_token_ids` of the answer are not those of the request"),
        ("no_ids", "it gave no `token_ids`"),
        ("no_log_probs", "it gave no `token_logprobs` of the sampled tokens"),
        ("aborted", r"it ended a sample of 1 tokens \(abort\), at neither an end token nor rollouts.max_new_tokens"),
    ],
)
def test_a_sample_that_is_not_whole_is_refused(fault: str, message: str, server: SamplingServer) -> None:
    settings = Rollouts(prompts=1, samples=2, max_new_tokens=3, engine="vllm", url=server.url, seconds=0.3)
    client = VllmServer(settings)
    model = client.base_model(64)
    assert len(client.sample(model, [5, 6, 7], 1, settings, {2})[0]) == 3
    server.fault = fault
    with pytest.raises(UserError, match=message):
        client.sample(model, [5, 6, 7], 1, settings, {2})


def test_lost_connections_are_tried_again_and_switches_are_named(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMPLER_KEY", "sk-secret")
    with sampling_server(made / "llama", key="sk-secret", max_length=32, dev_mode=False) as server:
        settings = Rollouts(prompts=1, samples=2, max_new_tokens=3, engine="vllm", url=server.url, key="SAMPLER_KEY")
        client = VllmServer(settings)
        with pytest.raises(UserError, match=r"takes sequences of 32 tokens, and data\.max_length is 64"):
            client.base_model(64)
        server.fault = "dropped"
        assert (
            client.sample(MODEL, [5, 6, 7], 1, settings, {2})[0] == client.sample(MODEL, [5, 6, 7], 1, settings, {2})[0]
        )
        assert server.dropped == 2
        with pytest.raises(UserError, match=r"answered with status 404: .*\. Fix: start it with VLLM_SERVER_DEV"):
            client.load_weights(made)
        server.key = "sk-other"
        with pytest.raises(UserError, match="status 401: Unauthorized: Bearer") as error:
            client.base_model(16)
        assert "sk-secret" not in str(error.value)
    monkeypatch.delenv("SAMPLER_KEY")
    with pytest.raises(UserError, match="the environment variable SAMPLER_KEY is not set"):
        VllmServer(settings)


@pytest.mark.long
@pytest.mark.parametrize(
    ("config", "mode"),
    [("fsdp2", "lora"), ("zero3", "full"), ("tp", "lora"), ("cp", "full"), ("pp", "lora"), ("pp", "full")],
)
def test_processes_get_the_samples_of_one_process(
    config: str, mode: str, served: dict[str, Any], made: Path, write_recipe: Write, tmp_path: Path
) -> None:
    if mode == "full":
        del served["lora"]
    served |= {"mode": mode, "optimizer": {"lr": 1e-3}}
    if config == "tp":  # Adapters are not fused there, nor under this recomputation: the same order of sums on both.
        served["train"] = {**served["train"], "activation_checkpointing": "selective"}
    for name in ("single", "several"):
        served["run"]["name"] = name
        with sampling_server(made / "llama") as fresh:
            served["rollouts"]["url"] = fresh.url
            path = write_recipe(served, f"{name}.yaml")
            if name == "single":
                train_here(path)
            else:
                done = launch(config, 2, "train", path)
                assert done.returncode == 0, done.stderr
            assert len(samples_of(fresh)) == STEPS * PROMPTS * SAMPLES  # by the main rank alone
    single, several = (tmp_path / "runs" / name for name in ("single", "several"))
    assert curve(several) == pytest.approx(curve(single), rel=0, abs=ROUNDED)
    for step in range(1, STEPS + 1):
        ours, theirs = (
            [json.loads(line) for line in record_file(run / "rollouts", step).read_text().splitlines()]
            for run in (single, several)
        )
        assert ours == theirs
