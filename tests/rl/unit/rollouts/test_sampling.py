"""Tokens are drawn by keyed noise: with the model's probabilities, whatever is decoded together."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from finetune.recipe.objective_settings import Grpo
from finetune.recipe.schema import Rollouts
from finetune.rl.policy import LOSSES
from finetune.rl.rollouts.advantages import advantages
from finetune.rl.rollouts.noise import gumbel, mixed, sample_keys
from finetune.rl.rollouts.sampler import Sampler, within

SETTINGS = Rollouts(prompts=1, samples=2, max_new_tokens=4)


def splitmix(x: int) -> int:
    """As published, in Python's integers."""
    most = 2**64 - 1
    x = (x + 0x9E3779B97F4A7C15) & most
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & most
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & most
    return x ^ (x >> 31)


def test_the_hash_is_splitmix64() -> None:
    numbers = [0, 1, 2**63 - 1, -1, -(2**63), 123456789]
    assert [x & (2**64 - 1) for x in mixed(torch.tensor(numbers)).tolist()] == [splitmix(x % 2**64) for x in numbers]
    assert splitmix(0) == 0xE220A8397B1DCDAF  # the first output of the published generator with seed 0


def test_noise_is_finite_and_differs_in_every_part_of_its_key() -> None:
    keys = sample_keys(7, torch.tensor([0, 0, 1]), torch.tensor([0, 1, 0]))
    noise = torch.stack([gumbel(keys, position, 1000) for position in range(3)])
    assert torch.isfinite(noise).all()
    assert len(noise.unique()) == noise.numel()
    assert not torch.equal(gumbel(keys, 0, 1000), gumbel(sample_keys(8, torch.tensor([0]), torch.tensor([0])), 0, 1000))


def test_tokens_have_their_probabilities() -> None:
    """Pearson's statistic of 20,000 draws from six probabilities; 5 degrees of freedom exceed 20.5 once in 1,000."""
    probabilities = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.04, 0.01], dtype=torch.float64)
    draws = torch.arange(20_000)
    sampler = Sampler(SETTINGS, sample_keys(3, draws, torch.zeros_like(draws)))
    tokens = sampler(probabilities.log().expand(len(draws), -1), 0)
    expected = probabilities * len(draws)
    assert ((tokens.bincount(minlength=6) - expected) ** 2 / expected).sum() < 20.5
    torch.testing.assert_close(sampler.log_probs[0], probabilities.log()[tokens])


def test_the_token_of_files_is_never_drawn() -> None:
    """Others are as without it, and their log-probabilities those of all tokens, which a trainer computes."""
    probabilities = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    draws = torch.arange(2_000)
    keys, logits = sample_keys(3, draws, torch.zeros_like(draws)), probabilities.log().expand(len(draws), -1)
    free, sampler = Sampler(SETTINGS, keys), Sampler(SETTINGS, keys, never=(0,))
    drawn, tokens = free(logits, 0), sampler(logits, 0)
    assert (drawn == 0).any()
    assert not (tokens == 0).any()
    assert torch.equal(tokens[drawn != 0], drawn[drawn != 0])
    torch.testing.assert_close(sampler.log_probs[0], probabilities.log()[tokens])


def test_a_sample_does_not_depend_on_what_is_drawn_with_it() -> None:
    logits = torch.randn(8, 50, generator=torch.Generator().manual_seed(0))
    draws, samples = torch.arange(8) // 2, torch.arange(8) % 2
    together = Sampler(SETTINGS, sample_keys(1, draws, samples))(logits, 5)
    alone = [Sampler(SETTINGS, sample_keys(1, draws[i, None], samples[i, None]))(logits[i, None], 5) for i in range(8)]
    assert together.tolist() == [int(one) for one in alone]


def test_the_margin_is_the_change_of_a_logit_that_a_token_survives() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)).double()
    keys = sample_keys(1, torch.arange(4), torch.zeros(4, dtype=torch.int64))
    sampler = Sampler(SETTINGS, keys)
    tokens = sampler(logits, 0)
    for i, (token, margin) in enumerate(zip(tokens.tolist(), sampler.margins[0].tolist(), strict=True)):
        for factor, same in ((0.99, True), (1.01, False)):
            changed = logits.clone()
            changed[i, token] -= factor * margin
            assert (int(Sampler(SETTINGS, keys)(changed, 0)[i]) == token) is same


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({"top_k": 2}, [0, 1]),
        ({"top_p": 0.6}, [0, 1]),
        ({"top_p": 0.35}, [0]),
        ({"top_k": 3, "top_p": 0.9}, [0, 1, 2]),
    ],
)
def test_only_the_likeliest_tokens_are_drawn(changes: dict[str, float], kept: list[int]) -> None:
    log_p = torch.tensor([[0.4, 0.3, 0.2, 0.1]], dtype=torch.float64).log()
    left = within(log_p, SETTINGS.model_copy(update=changes))
    assert torch.isfinite(left[0]).nonzero()[:, 0].tolist() == kept


@pytest.mark.parametrize("loss", LOSSES)
def test_samples_of_equal_rewards_have_no_advantage(loss: str) -> None:
    settings = Grpo(loss=loss)  # type: ignore[arg-type]
    rewards = np.array([[0.1, 0.1, 0.1], [0.0, 1.0, 0.5]])
    result = advantages(rewards, settings)
    assert result[0].tolist() == [0.0, 0.0, 0.0]
    assert result[1, 1] > 0 > result[1, 0]
