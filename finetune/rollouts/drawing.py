"""Draws the samples of a step, cohort by cohort, over all ranks.

    prompts 3, samples 2, cohort 4     samples in canonical order  a0 a1 b0 b1 | c0 c1      2 cohorts, in turn on ranks

The recipe decides what is decoded together; ranks only share the cohorts out. So on one kind of hardware samples are
the same bits on any number of processes, and elsewhere the same but for ties (`Sampler.margins`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from finetune.engine.base import Engine
from finetune.models.compiled import uncompiled
from finetune.recipe.schema import Rollouts
from finetune.rollouts.decoding import decode
from finetune.rollouts.noise import sample_keys
from finetune.rollouts.sampler import Sampler


@dataclass(frozen=True)
class Drawn:
    """Tokens of one sample."""

    ids: list[int]  # up to and with the end token
    log_probs: NDArray[np.float64]  # (len(ids),)
    margins: NDArray[np.float64]  # (len(ids),)


@dataclass(frozen=True)
class Drawer:
    """Samples from the model as it is."""

    engine: Engine
    settings: Rollouts
    seed: int
    end_ids: set[int]
    pad_id: int

    def draw(self, first_draw: int, prompts: Sequence[list[int]], each: int) -> list[Drawn]:
        """Returns `each` samples of each prompt, prompt after prompt, on every rank. Collective.

        first_draw: number of the first prompt's draw in the run; the others follow.
        """
        cohort = self.settings.cohort
        places = [(prompt, sample) for prompt in range(len(prompts)) for sample in range(each)]
        cohorts = [places[i : i + cohort] for i in range(0, len(places), cohort)]
        rank, num_ranks = self.engine.data_rank, self.engine.parallelism.data
        local: dict[int, list[Drawn]] = {}
        with self.engine.evaluating(), self.engine.generating(), uncompiled():
            for first in range(0, len(cohorts), num_ranks):  # all ranks take part in every forward
                mine = cohorts[first + rank] if first + rank < len(cohorts) else []
                local[first + rank] = self._cohort(first_draw, prompts, mine)
        gathered: dict[int, list[Drawn]] = {}
        for of_rank in self.engine.ranks.gather(local):  # ranks that share sequences draw the same tokens
            gathered |= of_rank
        return [drawn for i in range(len(cohorts)) for drawn in gathered[i]]

    def _cohort(self, first_draw: int, prompts: Sequence[list[int]], places: Sequence[tuple[int, int]]) -> list[Drawn]:
        """Returns the samples at (prompt, sample). Collective; without places a dummy is decoded."""
        device = self.engine.device
        draws = torch.tensor([first_draw + prompt for prompt, _ in places] or [0], device=device)
        samples = torch.tensor([sample for _, sample in places] or [0], device=device)
        sampler = Sampler(self.settings, sample_keys(self.seed, draws, samples))
        ids = [prompts[prompt] for prompt, _ in places]
        rows = decode(self.engine, ids, self.end_ids, self.pad_id, self.settings.max_new_tokens, sampler)
        log_probs, margins = (
            torch.stack(of_tokens, 1).cpu().numpy() for of_tokens in (sampler.log_probs, sampler.margins)
        )
        return [Drawn(row, log_probs[i, : len(row)], margins[i, : len(row)]) for i, row in enumerate(rows)]
