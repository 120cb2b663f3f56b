"""Draws the samples of a step, cohort by cohort, over all ranks.

    prompts 3, samples 2, cohort 4     samples in canonical order  a0 a1 b0 b1 | c0 c1      2 cohorts, in turn on ranks

The recipe decides what is decoded together; ranks only share the cohorts out. So on one kind of hardware samples are
the same bits on any number of processes, and elsewhere the same but for ties (`Sampler.margins`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from finetune.data.samples import Medium
from finetune.engine.base import Engine
from finetune.models.compiled import uncompiled
from finetune.recipe.schema import Rollouts
from finetune.rl.rewards.completion import Outcome
from finetune.rl.rollouts.noise import sample_keys
from finetune.rl.rollouts.records import Turns
from finetune.rl.rollouts.sampler import Sampler
from finetune.training.decoding import decode, prompt_media

if TYPE_CHECKING:  # transformers' processors are needed for files only
    from finetune.data.media.feature_reader import FeatureReader


@dataclass(frozen=True)
class Talk:
    """A sample's turns with an environment, as rewards see them."""

    prompt: list[int]  # ids that it began with
    messages: tuple[dict[str, Any], ...]  # of the prompt and all turns before the last
    turns: Turns
    outcome: Outcome | None  # the environment's reward; None if no reward asks for it


@dataclass(frozen=True)
class Drawn:
    """Tokens of one sample, or of one turn of it."""

    ids: list[int]  # up to and with the end token
    log_probs: NDArray[np.float64]  # of each sampled token, in their order
    margins: NDArray[np.float64]
    talk: Talk | None = None  # with an environment, on the main rank


@dataclass(frozen=True)
class Beginning:
    """A sample as far as it has come: its next turn follows."""

    draw: int  # number of the prompt's draw in the run
    sample: int  # of the prompt
    ids: list[int]  # of the prompt and all that followed
    begun: int  # of these, tokens after the prompt
    room: int  # tokens that may follow
    media: tuple[Medium, ...] = ()  # of the prompt


@dataclass(frozen=True)
class Drawer:
    """Samples from the model as it is."""

    engine: Engine
    settings: Rollouts
    seed: int
    end_ids: set[int]
    pad_id: int
    reader: FeatureReader | None = None  # of the files of prompts

    def draw(
        self,
        first_draw: int,
        prompts: Sequence[list[int]],
        each: int,
        media: Sequence[tuple[Medium, ...]] | None = None,
    ) -> list[Drawn]:
        """Returns `each` samples of each prompt, prompt after prompt, on every rank. Collective.

        first_draw: number of the first prompt's draw in the run; the others follow. media: the files of each prompt.
        """
        room, files = self.settings.max_new_tokens, media or [()] * len(prompts)
        places = [(prompt, sample) for prompt in range(len(prompts)) for sample in range(each)]
        return self.turns([Beginning(first_draw + i, sample, prompts[i], 0, room, files[i]) for i, sample in places])

    def turns(self, beginnings: Sequence[Beginning]) -> list[Drawn]:
        """Returns the next turn of each sample, in order, on every rank. Collective."""
        cohort = self.settings.cohort
        cohorts = [beginnings[i : i + cohort] for i in range(0, len(beginnings), cohort)]
        rank, num_ranks = self.engine.data_rank, self.engine.parallelism.data
        local: dict[int, list[Drawn]] = {}
        with self.engine.evaluating(), self.engine.generating(), uncompiled():
            for first in range(0, len(cohorts), num_ranks):  # all ranks take part in every forward
                mine = cohorts[first + rank] if first + rank < len(cohorts) else []
                local[first + rank] = self._cohort(mine)
        gathered: dict[int, list[Drawn]] = {}
        for of_rank in self.engine.ranks.gather(local):  # ranks that share sequences draw the same tokens
            gathered |= of_rank
        return [drawn for i in range(len(cohorts)) for drawn in gathered[i]]

    def _cohort(self, beginnings: Sequence[Beginning]) -> list[Drawn]:
        """Returns the next turns of a cohort. Collective; without samples a dummy is decoded."""
        draws, samples, begun = (
            torch.tensor([getattr(one, name) for one in beginnings] or [0], device=self.engine.device)
            for name in ("draw", "sample", "begun")
        )
        never = self.reader.family.file_ids if self.reader is not None else ()
        sampler = Sampler(self.settings, sample_keys(self.seed, draws, samples), begun, never)
        ids, rooms = [one.ids for one in beginnings], [one.room for one in beginnings]
        most, config = self.settings.max_new_tokens, self.engine.unwrapped.config
        media = prompt_media(self.reader, config, ids, [one.media for one in beginnings], self.pad_id)
        rows = decode(self.engine, ids, self.end_ids, self.pad_id, most, sampler, media, rooms)
        log_probs, margins = (
            torch.stack(of_tokens, 1).cpu().numpy() for of_tokens in (sampler.log_probs, sampler.margins)
        )
        return [Drawn(row, log_probs[i, : len(row)], margins[i, : len(row)]) for i, row in enumerate(rows)]
