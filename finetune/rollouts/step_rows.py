"""The rows of a run that samples them: each step's rollouts, recorded before the step, as rows of one sample each.

    a record exists     read it
    else                draw on all ranks; on the main rank reward, and write to the disk
    then                advantages -> examples

Every rank has the examples of the step, which its loader reads as any others.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from finetune.checkpoints.inputs import on_main, reward_files
from finetune.data.row_source import RunRows
from finetune.data.samples import Example
from finetune.data.samples import Sequence as Tokens
from finetune.engine.base import Engine
from finetune.models.fingerprint import base_content
from finetune.objectives.policy import ADVANTAGE, ROOM, SAMPLED, SAMPLER
from finetune.recipe import Recipe
from finetune.recipe.schema import ENGINE_KEYS
from finetune.rewards.completion import Completion, Reward
from finetune.rewards.scoring import Rewards
from finetune.rollouts import records
from finetune.rollouts.advantages import advantages, has_variance
from finetune.rollouts.drawing import Drawer, Drawn
from finetune.rollouts.prompts import RowPrompt, RunPrompts, completion_of
from finetune.rollouts.records import Sample
from finetune.rollouts.server_drawing import ServerDrawer

log = logging.getLogger(__name__)


class RolloutRows(RunRows):
    """Rows of the samples of each step, in canonical order: prompt after prompt, sample after sample."""

    ahead = 0  # samples are drawn from the weights that the step before has left

    def __init__(
        self,
        recipe: Recipe,
        engine: Engine,
        prompts: RunPrompts,
        content: Mapping[str, Any],
        tokenizer: PreTrainedTokenizerFast,
        end_ids: set[int],
        folder: Path,
    ):
        """content: of the rows of `data.train`, see `RowSource.content`; folder: of the run."""
        assert recipe.rollouts is not None  # the caller's condition
        assert isinstance(tokenizer.pad_token_id, int)  # load_tokenizer ensures it
        self._recipe, self._settings, self._engine, self._prompts = recipe, recipe.rollouts, engine, prompts
        self._tokenizer, self._end_ids, self._folder = tokenizer, end_ids, folder
        self._records = Path(self._settings.replay).expanduser() if self._settings.replay else folder / records.FOLDER
        self._server = (
            ServerDrawer(recipe, engine, tokenizer, end_ids, folder) if recipe.rollouts.engine == "vllm" else None
        )
        own = Drawer(engine, recipe.rollouts, recipe.run.seed, end_ids, tokenizer.pad_token_id)
        self._drawer = self._server or own
        self._rewards = Rewards(recipe.rewards, folder)
        self._identity = on_main(engine, lambda: run_identity(recipe, content))
        self._step = -1  # of the rows in memory
        self._examples: list[Example] = []
        self._measured: dict[str, float] = {}

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Starts the rewards on the main rank, and ends them; under `replay` only checks that its records exist.
        Collective. Raises UserError on every rank."""
        try:
            if self._settings.replay is None:
                on_main(self._engine, self._open)
            else:
                steps = self._recipe.train.max_steps or 0
                on_main(self._engine, lambda: records.check_records(self._records, steps))
            yield
            if self._server is not None and self._engine.is_main:
                self._server.close()
        finally:
            if self._engine.is_main and self._settings.replay is None:
                self._rewards.__exit__(None, None, None)

    def _open(self) -> None:
        """Looks for the server; starts the rewards; sets the records of an earlier run aside if none of it is resumed.
        Raises UserError."""
        if self._recipe.checkpoint.resume == "never":  # or those of the earlier run would be trained on
            for file in sorted(self._records.glob("step-*.jsonl")):
                records.set_record_aside(self._records, int(file.stem.removeprefix("step-")))
        if self._server is not None:
            self._server.open()
        self._rewards.__enter__()
        for note in self._rewards.notes:
            log.warning("%s", note)

    def prepare(self, step: int) -> None:
        samples, times = self._recorded(step), dict[str, float]()
        if samples is None:
            samples, times = self._drawn(step)
        rewards = np.array([sample.reward.total for sample in samples]).reshape(-1, self._settings.samples)
        advantage = advantages(rewards, self._recipe.objective).ravel()
        masks = self._recipe.objective.value("overlong") == "mask"
        pairs = zip(samples, advantage.tolist(), strict=True)
        self._examples = [example_of(one, 0.0 if masks and one.is_truncated else value) for one, value in pairs]
        self._measured, self._step = {**measured(samples, rewards), **times}, step

    def _recorded(self, step: int) -> list[Sample] | None:
        """Returns the recorded samples of a step, on every rank; None if they have to be drawn. Collective."""

        def read() -> list[Sample] | None:
            found = records.read_record(self._records, step + 1)
            if self._settings.replay is not None:
                return records.replayed(found, self._records, step + 1, self._recipe.batch.rows)
            if found is not None and found[1] == self._identity:
                return found[0]
            records.set_record_aside(self._records, step + 1)
            return None

        return on_main(self._engine, read)

    def _drawn(self, step: int) -> tuple[list[Sample], dict[str, float]]:
        """Returns new samples of a step, recorded, and its seconds and other measurements. Collective. Raises
        UserError."""
        first, began = step * self._settings.prompts, time.perf_counter()
        prompts = [self._prompts.drawn(first + i) for i in range(self._settings.prompts)]
        drawn = self._drawer.draw(first, [prompt.ids for prompt in prompts])
        drawn_at = time.perf_counter()

        def score_and_record() -> list[Sample]:
            samples = self._rewarded(prompts, drawn)
            records.write_record(self._records, step + 1, samples, self._identity)
            return samples

        samples = on_main(self._engine, score_and_record)
        measured = dict(self._server.measured) if self._server is not None else {}
        times = {"time/generation": drawn_at - began, "time/rewards": time.perf_counter() - drawn_at}
        return samples, {**measured, **times}

    def _rewarded(self, prompts: Sequence[RowPrompt], drawn: Sequence[Drawn]) -> list[Sample]:
        """Returns the samples with their rewards, on the main rank. drawn: `samples` of each prompt, in order."""
        each, contents = self._settings.samples, self._prompts.contents(prompts)
        completions, samples = list[Completion](), list[Sample]()
        for i, one in enumerate(drawn):
            prompt, number = prompts[i // each], i % each
            is_truncated = one.ids[-1] not in self._end_ids
            completion = completion_of(prompt, contents[i // each], one.ids, self._tokenizer, is_truncated, number)
            completions.append(completion)
            of_prompt = (prompt.path, prompt.row, prompt.source, number, prompt.ids)
            nothing = Reward(0.0, {}, ())
            samples.append(
                Sample(*of_prompt, one.ids, completion.text, is_truncated, one.log_probs, one.margins, nothing)
            )
        rewards = self._rewards.score(completions)
        return [sample.rewarded(reward) for sample, reward in zip(samples, rewards, strict=True)]

    # --- as a loader reads them

    def row(self, position: int) -> list[Example]:
        return [self._at(position)]

    def lengths(self, position: int) -> NDArray[np.int64]:
        return np.array([self._at(position).num_tokens])

    def counts(self, position: int) -> Mapping[str, int]:
        tokens, targets = self._at(position).num_tokens, self._at(position).num_targets
        return {
            "target_tokens": targets,
            "first_target_tokens": targets,
            "tokens": tokens,
            "sequences": 1,
            "examples": 1,
            "shared_tokens": 0,
            ROOM: self._settings.max_new_tokens,
        }

    def epoch_at(self, position: int) -> float:
        return self._prompts.epochs(position // self._settings.samples)

    def measured(self, step: int) -> Mapping[str, float]:
        return self._measured

    def _at(self, position: int) -> Example:
        step, row = divmod(position, self._recipe.batch.rows)
        assert step == self._step  # `prepare` was called for it, and for no later one
        return self._examples[row]


def example_of(sample: Sample, advantage: float) -> Example:
    """Returns a sample as an example of one sequence, whose sampled tokens are its targets."""
    ids = np.array([*sample.prompt, *sample.ids], np.int32)
    loss_mask = np.arange(len(ids)) >= len(sample.prompt)
    columns = {ADVANTAGE: advantage, SAMPLED: float(len(sample.ids))}
    tokens = (Tokens(ids, loss_mask),)
    return Example(sample.path, sample.row, sample.source, tokens, columns, {SAMPLER: sample.log_probs})


def measured(samples: Sequence[Sample], rewards: NDArray[np.float64]) -> dict[str, float]:
    """Returns the metrics of a step's rollouts. rewards: (P, G), weighted sums.

    pass@G/<name>: share of prompts with a sample that has 1, if this reward has only the values 0 and 1.
    """
    finite = [float(margin) for sample in samples for margin in sample.margins if np.isfinite(margin)]
    line = {
        "reward": float(rewards.mean()),
        "completion_tokens": float(np.mean([len(sample.ids) for sample in samples])),
        "truncated": float(np.mean([sample.is_truncated for sample in samples])),
        "zero_variance": float(1 - has_variance(rewards).mean()),  # share of prompts that teach nothing
        **({"margin": min(finite)} if finite else {}),
    }
    for name in samples[0].reward.by_name:
        values = [sample.reward.by_name[name] for sample in samples]
        answered = [value for value in values if value is not None]
        if answered:
            line[f"reward/{name}"] = float(np.mean(answered))
        if len(answered) < len(values):
            line[f"reward_failures/{name}"] = float(len(values) - len(answered))
        if set(answered) <= {0.0, 1.0}:
            right = np.array([value == 1.0 for value in values]).reshape(rewards.shape)
            line[f"pass@{rewards.shape[1]}/{name}"] = float(right.any(1).mean())
    return line


# Parts of a recipe that decide a step's rollouts; `data` without what evaluation reads.
_DECIDING = ("model", "mode", "lora", "quantization", "tokens", "objective", "rollouts", "rewards", "batch")
_DECIDING += ("optimizer", "schedule", "train")


def run_identity(recipe: Recipe, content: Mapping[str, Any]) -> str:
    """Returns a digest of all that decides the weights of a step and its rollouts, so that a record is not taken for
    one of another run in the same folder. content: of the rows of `data.train`. Raises UserError."""
    settings = recipe.model_dump(mode="json")
    for key in ENGINE_KEYS["vllm"]:  # where a server is changes no sample
        del settings["rollouts"][key]
    parts = {
        **{name: settings[name] for name in _DECIDING},
        "seed": recipe.run.seed,
        "data": [settings["data"][name] for name in ("max_length", "overlong")],
        "content": content,
        "base": base_content(recipe.model),
        "reward files": reward_files(recipe),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()
