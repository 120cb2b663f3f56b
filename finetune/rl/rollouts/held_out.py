"""Samples of the held-out prompts at each evaluation, rewarded, recorded and read again as a step's are."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from finetune.checkpoints.inputs import on_main
from finetune.engine.base import Engine
from finetune.recipe.schema import Evaluate
from finetune.rl.rollouts import records
from finetune.rl.rollouts.drawing import Drawn
from finetune.rl.rollouts.prompts import PromptContent, RowPrompt, RunPrompts
from finetune.rl.rollouts.records import Sample
from finetune.rl.rollouts.sample_metrics import measured

log = logging.getLogger(__name__)

_FIRST_DRAW = 1 << 62  # of the first held-out prompt: no run has as many

# Of the number of the first draw, prompts of a source, and the number of samples of each: these, on every rank.
Draw = Callable[[int, RunPrompts, Sequence[RowPrompt], int], list[Drawn]]
# Of prompts, the contents of their rows, and samples: these with their rewards, on the main rank.
Rewarded = Callable[[Sequence[RowPrompt], Sequence[PromptContent], Sequence[Drawn]], list[Sample]]


class HeldOutSamples:
    """Samples the first `evaluate.prompts` held-out prompts.

    Sampled as in training, not greedily, so that `eval_reward` is for unseen prompts what `reward` is for those of a
    step. Draws are far beyond those of any run, and the same in every evaluation: two evaluations differ by their
    weights alone.
    """

    def __init__(
        self,
        settings: Evaluate,
        engine: Engine,
        prompts: RunPrompts,
        draw: Draw,
        rewarded: Rewarded,
        folder: Path,
        run_identity: str,
    ):
        """folder: of the run's records."""
        self._settings, self._engine, self._prompts, self._draw = settings, engine, prompts, draw
        self._rewarded, self._folder = rewarded, folder
        read = [run_identity, prompts.content, self._settings.prompts, self._settings.samples]
        self._identity = hashlib.sha256(json.dumps(read, sort_keys=True).encode()).hexdigest()

    def metrics(self, step: int) -> dict[str, float]:
        """Returns rewards, pass@1 and lengths after a step, `eval_` before their names. Collective."""
        prompts = self._prompts.prompts[: self._settings.prompts]
        samples = on_main(self._engine, lambda: self._recorded(step))
        if samples is None:
            drawn = self._draw(_FIRST_DRAW, self._prompts, prompts, self._settings.samples)

            def reward_and_record() -> list[Sample]:
                samples = self._rewarded(prompts, self._prompts.contents(prompts), drawn)
                records.write_record(self._folder, step, samples, self._identity, records.EVALUATION)
                return samples

            samples = on_main(self._engine, reward_and_record)
        rewards = np.array([sample.reward.total for sample in samples]).reshape(len(prompts), -1)
        metrics = measured(samples, rewards)
        del metrics["zero_variance"]  # of groups that are trained on
        return {f"eval_{name}": value for name, value in metrics.items()}

    def _recorded(self, step: int) -> list[Sample] | None:
        """Returns the samples of a complete record, on the main rank; sets another's record aside."""
        found = None
        try:
            found = records.read_record(self._folder, step, records.EVALUATION)
        except records.DamagedRecord as damage:
            log.warning("%s; it is set aside, and its samples are drawn again", damage)
        if found is not None and found[1] == self._identity:
            return found[0]
        records.set_record_aside(self._folder, step, records.EVALUATION)
        return None
