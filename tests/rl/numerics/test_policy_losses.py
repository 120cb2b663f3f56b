"""Each loss of `grpo` on recorded rollouts, against plain transformers in fp64 and formulas of papers and of TRL 1.16
(grpo_trainer.py, rloo_trainer.py in https://github.com/huggingface/trl/tree/main/trl/trainer), with the ratio and its
clip: on-policy these are inactive, and their gradient is that of our linear form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import metrics, train_here
from torch import Tensor
from transformers import AutoModelForCausalLM

from finetune.rl.rewards.completion import Reward
from finetune.rl.rollouts.records import Sample, write_record

PROMPTS, SAMPLES, MOST, TEMPERATURE = 3, 4, 6, 0.7


def recorded(folder: Path) -> list[Sample]:
    """Writes a step of made-up samples: of unequal lengths, with rewards, of which those of one prompt are equal."""
    random = np.random.Generator(np.random.PCG64(1))
    samples = []
    for prompt in range(PROMPTS):
        prompt_ids = random.integers(3, 380, int(random.integers(4, 20))).tolist()
        for sample in range(SAMPLES):
            length = int(random.integers(1, MOST + 1))
            reward = Reward(0.3 if prompt == 1 else float(random.normal()), {"made": 0.0}, ())
            samples.append(
                Sample(
                    *("rows.jsonl", prompt + 1, 0, sample, prompt_ids, random.integers(3, 380, length).tolist(), ""),
                    is_truncated=length == MOST,
                    log_probs=np.zeros(length),
                    margins=np.ones(length),
                    reward=reward,
                )
            )
    folder.mkdir()
    write_record(folder, 1, samples, "made up")
    return samples


def clipped(log_p: Tensor, advantage: Tensor) -> Tensor:
    """-min(ratio A, clip(ratio) A) of tokens or samples, with old = current (Schulman et al. 2017, equation 7)."""
    ratio = (log_p - log_p.detach()).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)


def mean_of_means(of_samples: list[Tensor]) -> Tensor:
    return torch.stack([tokens.mean() for tokens in of_samples]).mean()


def by_room(of_samples: list[Tensor]) -> Tensor:
    return torch.cat(of_samples).sum() / (len(of_samples) * MOST)


def over_tokens(of_samples: list[Tensor]) -> Tensor:
    return torch.cat(of_samples).mean()


def group_scaled(rewards: Tensor) -> Tensor:
    return (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)


def centred(rewards: Tensor) -> Tensor:
    return rewards - rewards.mean(1, keepdim=True)


def leave_one_out(rewards: Tensor) -> Tensor:
    others = [[[r for j, r in enumerate(row) if j != i] for i in range(len(row))] for row in rewards.tolist()]
    return rewards - torch.tensor(others, dtype=torch.float64).mean(2)


def batch_normalised(rewards: Tensor) -> Tensor:
    return centred(rewards) / (centred(rewards).std() + 1e-4)


# The advantage of a sample, and the loss of all samples from losses of their tokens; rloo: of whole samples.
FORMULAS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[list[Tensor]], Tensor]]] = {
    "grpo": (group_scaled, mean_of_means),
    "dr_grpo": (centred, by_room),
    "dapo": (group_scaled, over_tokens),
    "rloo": (leave_one_out, mean_of_means),
    "reinforce_pp": (batch_normalised, over_tokens),
}


def expected(model: Any, samples: list[Sample], loss: str, overlong: str) -> tuple[float, float]:
    """Returns (loss of the linear form, norm of the gradient of the clipped form). overlong: mask: samples that are cut
    count in means and divisors, and have no loss of their own."""
    rewards = torch.tensor([one.reward.total for one in samples], dtype=torch.float64).view(PROMPTS, SAMPLES)
    advantages, reduced = FORMULAS[loss][0](rewards).ravel(), FORMULAS[loss][1]
    if overlong == "mask":
        advantages = advantages * torch.tensor([not one.is_truncated for one in samples])
    log_probs = []
    for one in samples:
        logits = model(input_ids=torch.tensor([one.prompt + one.ids])).logits[0, len(one.prompt) - 1 : -1]
        log_p = (logits / TEMPERATURE).log_softmax(1).gather(1, torch.tensor(one.ids)[:, None])[:, 0]
        log_probs.append(log_p.sum()[None] if loss == "rloo" else log_p)
    pairs = list(zip(log_probs, advantages, strict=True))
    reduced([clipped(log_p, advantage) for log_p, advantage in pairs]).backward()
    norm = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt().item()
    return reduced([-advantage * log_p for log_p, advantage in pairs]).item(), norm


@pytest.fixture
def replaying(recipe: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """One step on recorded samples, in several micro-batches."""
    rows = PROMPTS * SAMPLES
    recipe["data"] |= {"packing": False}
    del recipe["data"]["eval"], recipe["evaluate"]
    return recipe | {
        "rollouts": {
            "prompts": PROMPTS,
            "samples": SAMPLES,
            "max_new_tokens": MOST,
            "temperature": TEMPERATURE,
            "replay": str(tmp_path / "recorded"),
        },
        "batch": {"rows": rows, "tokens_per_device": 64},
        "train": {"max_steps": 1, "precision": "fp32"},
    }


@pytest.mark.parametrize(("loss", "overlong"), [*((loss, "keep") for loss in FORMULAS), ("dapo", "mask")])
def test_a_loss_has_the_value_and_gradient_of_its_formula(
    loss: str, overlong: str, replaying: dict[str, Any], write_recipe: Any, made: Path, tmp_path: Path
) -> None:
    samples = recorded(tmp_path / "recorded")
    assert 0 < sum(one.is_truncated for one in samples) < len(samples)
    replaying["objective"] = {"name": "grpo", "loss": loss, "overlong": overlong}
    train_here(write_recipe(replaying))
    (line,) = metrics(tmp_path / "runs" / "run")
    model = AutoModelForCausalLM.from_pretrained(made / "llama").double()
    value, norm = expected(model, samples, loss, overlong)
    assert line["loss"] == pytest.approx(value, rel=2e-6, abs=1e-7)
    assert line["grad_norm"] == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo"])
def test_a_sample_that_was_cut_has_no_part_in_kl_and_metrics(
    loss: str, replaying: dict[str, Any], write_recipe: Any, made: Path, tmp_path: Path
) -> None:
    """With a divergence that is not 0: initial log-probabilities that are made up, far off for samples that are cut."""
    model: Any = AutoModelForCausalLM.from_pretrained(made / "llama").double()
    samples, random = recorded(tmp_path / "made-up"), np.random.Generator(np.random.PCG64(2))
    rewards = torch.tensor([one.reward.total for one in samples], dtype=torch.float64).view(PROMPTS, SAMPLES)
    advantages, reduced = FORMULAS[loss][0](rewards).ravel(), FORMULAS[loss][1]
    losses, kls, entropies = list[Tensor](), list[Tensor](), list[Tensor]()
    for i, one in enumerate(samples):
        logits = model(input_ids=torch.tensor([one.prompt + one.ids])).logits[0, len(one.prompt) - 1 : -1]
        log_all = (logits / TEMPERATURE).log_softmax(1)
        log_p = log_all.gather(1, torch.tensor(one.ids)[:, None])[:, 0]
        initial = log_p.detach() + torch.from_numpy(random.normal(2.0 if one.is_truncated else 0.0, 0.3, len(one.ids)))
        samples[i] = replace(one, initial=initial.numpy())
        of_kl = (initial - log_p).exp() - (initial - log_p) - 1
        # At ratio 1 with the gradient of the ratio, which makes it that of the divergence.
        of_kl = of_kl * (log_p - log_p.detach()).exp()
        kept = 0.0 if one.is_truncated else 1.0
        losses.append(kept * (-advantages[i] * log_p + 0.4 * of_kl))
        if kept:
            kls.append(of_kl.detach())
            entropies.append(-(log_all.exp() * log_all).sum(1).detach())
    reduced(losses).backward()
    norm = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt().item()
    (tmp_path / "recorded").mkdir()
    write_record(tmp_path / "recorded", 1, samples, "made up")
    replaying["objective"] = {"name": "grpo", "loss": loss, "overlong": "mask", "kl": 0.4}
    train_here(write_recipe(replaying))
    (line,) = metrics(tmp_path / "runs" / "run")
    assert line["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert line["kl"] == pytest.approx(torch.cat(kls).mean().item(), rel=1e-5)
    assert line["entropy"] == pytest.approx(torch.cat(entropies).mean().item(), rel=1e-5)
    assert line["loss"] == pytest.approx(reduced(losses).item(), rel=2e-6, abs=1e-7)


def test_a_sampler_that_rounds_is_corrected(
    replaying: dict[str, Any], write_recipe: Any, made: Path, tmp_path: Path
) -> None:
    """A sampler in 16 bit, with some tokens that are far off: their weight is the ratio, or 0 outside the bounds."""
    model: Any = AutoModelForCausalLM.from_pretrained(made / "llama").double()
    samples, random = recorded(tmp_path / "made-up"), np.random.Generator(np.random.PCG64(2))
    losses, ratios = [], []
    for i, one in enumerate(samples):
        logits = model(input_ids=torch.tensor([one.prompt + one.ids])).logits[0, len(one.prompt) - 1 : -1]
        log_p = (logits / TEMPERATURE).log_softmax(1).gather(1, torch.tensor(one.ids)[:, None])[:, 0]
        rounded = log_p.detach().bfloat16().double() + torch.from_numpy(random.choice([0.0, 1.0], len(one.ids)))
        ratio = (log_p.detach() - rounded).exp()
        ratio = torch.where((ratio >= 0.5) & (ratio <= 5), ratio, 0)
        samples[i] = replace(one, log_probs=rounded.numpy())
        losses.append(-log_p * ratio)
        ratios.append(ratio)
    rewards = torch.tensor([one.reward.total for one in samples], dtype=torch.float64).view(PROMPTS, SAMPLES)
    loss = over_tokens([a * tokens for a, tokens in zip(group_scaled(rewards).ravel(), losses, strict=True)])
    loss.backward()
    norm = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt().item()
    (tmp_path / "recorded").mkdir()
    write_record(tmp_path / "recorded", 1, samples, "made up")
    replaying["objective"] = {"name": "grpo", "loss": "dapo", "correction": "icepop"}
    train_here(write_recipe(replaying))
    (line,) = metrics(tmp_path / "runs" / "run")
    weights = torch.cat(ratios)
    assert 0 < line["correction/masked"] < 1
    assert line["correction/masked"] == pytest.approx((weights == 0).double().mean().item())
    assert line["correction/weight"] == pytest.approx(weights.mean().item(), rel=1e-5)
    assert line["loss"] == pytest.approx(loss.item(), rel=2e-6, abs=1e-7)
    assert line["grad_norm"] == pytest.approx(norm, rel=1e-5)
