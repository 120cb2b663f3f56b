"""The rows of a run that samples them: each step's rollouts, recorded before the step, as rows of one sample each.

    a record exists     read it
    else                draw on all ranks, with the log-probabilities that the loss compares with; on the main rank
                        reward, and write to the disk
    then                advantages -> examples

Every rank has the examples of the step, which its loader reads as any others.

A batch of rollouts is trained on in `reuse` steps, and drawn from the weights `staleness` batches before the first:

    reuse 2, staleness 1    steps from 0 on     0  1 | 2  3 | 4  5
                            train on batch      0  0 | 1  1 | 2  2
                            draw before         0, 1 |   2  |   3
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from finetune.checkpoints.folder import step_of
from finetune.checkpoints.inputs import on_main, reward_files, sample_teacher
from finetune.data.chat.renderer import Renderer
from finetune.data.chat.turns import TurnRenderer
from finetune.data.predictions import IDS, LOG_PROBS
from finetune.data.row_source import RunRows
from finetune.data.samples import Example, Medium, SharedPrompt
from finetune.data.samples import Sequence as Tokens
from finetune.engine.base import Engine
from finetune.engine.kept_weights import KeptWeights
from finetune.errors import UserError
from finetune.models.attention import AttentionChoice
from finetune.models.fingerprint import base_content
from finetune.models.head.token_loss import CooledTokenLoss
from finetune.objectives.forward import ForwardPass
from finetune.objectives.objective import KEPT, Objective
from finetune.recipe import Recipe
from finetune.recipe.objective_settings import Grpo
from finetune.recipe.schema import ENGINE_KEYS
from finetune.rl.policy import (
    ADVANTAGE,
    CORRECTION,
    INITIAL,
    OLD,
    ROOM,
    SAMPLED,
    SAMPLER,
    is_off_policy,
)
from finetune.rl.rewards.completion import Completion, Reward
from finetune.rl.rewards.scoring import Rewards
from finetune.rl.rollouts import records
from finetune.rl.rollouts.advantages import advantages
from finetune.rl.rollouts.correction import correction_weights
from finetune.rl.rollouts.drawing import Drawer, Drawn
from finetune.rl.rollouts.episodes import EpisodeDrawer, Episodes
from finetune.rl.rollouts.held_out import HeldOutSamples
from finetune.rl.rollouts.prompts import PromptContent, RowPrompt, RunPrompts, completion_of
from finetune.rl.rollouts.records import Predicted, Sample
from finetune.rl.rollouts.sample_metrics import measured, measured_corrections
from finetune.rl.rollouts.server_drawing import ServerDrawer
from finetune.training.target_values import ExampleRows, MakeLoader, TargetPass, Values

if TYPE_CHECKING:  # transformers' processors are needed for files only
    from finetune.data.media.feature_reader import FeatureReader

log = logging.getLogger(__name__)


class Teacher(Protocol):
    """The model that samples are compared with, under `objective.name: distill`."""

    @property
    def of(self) -> str: ...  # it and the settings that its values depend on
    def __call__(self, examples: Sequence[Example]) -> list[list[Values]]:
        """Returns (token losses (n,), ids (n, k), log-probabilities (n, k)) of the sequence of each example.
        Collective."""
        ...


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
        renderer: Renderer,
        end_ids: set[int],
        folder: Path,
        attention: AttentionChoice,
        loader: MakeLoader,
        teacher: Teacher | None = None,
        held_out: RunPrompts | None = None,
        reader: FeatureReader | None = None,
    ):
        """content: of the rows of `data.train`, see `RowSource.content`; folder: of the run; held_out: prompts of
        which evaluations reward samples; reader: of the files of prompts. The engine has the initial weights."""
        assert recipe.rollouts is not None  # the caller's condition
        assert isinstance(tokenizer.pad_token_id, int)  # load_tokenizer ensures it
        self._recipe, self._settings, self._engine, self._prompts = recipe, recipe.rollouts, engine, prompts
        self._tokenizer, self._end_ids, self._folder = tokenizer, end_ids, folder
        self._vocabulary = max(len(tokenizer), engine.unwrapped.config.get_text_config().vocab_size)
        self._records = Path(self._settings.replay).expanduser() if self._settings.replay else folder / records.FOLDER
        self._server = (
            ServerDrawer(recipe, engine, tokenizer, end_ids, folder, self._vocabulary)
            if recipe.rollouts.engine == "vllm"
            else None
        )
        self._drawer = Drawer(engine, recipe.rollouts, recipe.run.seed, end_ids, tokenizer.pad_token_id, reader)
        self._episodes = None
        if recipe.rollouts.environment is not None and recipe.rollouts.replay is None:
            turns = TurnRenderer(renderer, frozenset(end_ids))
            self._episodes = EpisodeDrawer(engine, self._drawer, Episodes(recipe, turns, folder))
        self._rewards = Rewards(recipe.rewards, folder)
        self._identity = on_main(engine, lambda: run_identity(recipe, content))
        self._held_out = None
        if held_out is not None:
            through = (self._draw, self._rewarded, self._records, self._identity)
            self._held_out = HeldOutSamples(recipe.evaluate, engine, held_out, *through)
        self._teacher, objective = teacher, recipe.objective
        self._policy = objective if isinstance(objective, Grpo) else None  # else the samples are a teacher's
        self._corrects = self._policy is not None and self._policy.corrects
        cooled = Objective(
            lambda outputs, batch: {}, token_loss=CooledTokenLoss(recipe.rollouts.temperature), num_details=1
        )
        log_probs = TargetPass(engine, ForwardPass(attention, cooled), loader)
        # By field of `Sample`.
        self._passes: dict[str, Callable[[Sequence[Example]], list[list[Values]]]] = {}
        if teacher is not None:
            self._passes["teacher"] = teacher
        elif is_off_policy(recipe.rollouts) or self._corrects:
            self._passes["old"] = log_probs
        if self._policy is not None and self._policy.kl:
            self._passes["initial"] = replace(log_probs, changed=KeptWeights(engine).in_place)
        self._staleness = recipe.rollouts.staleness
        self._samples: dict[int, list[Sample]] = {}  # by batch: the one in memory, and those to come that are drawn
        self._batch = -1  # of the rows in memory
        self._rows = ExampleRows([])
        self._measured, self._times, self._of_server = dict[str, float](), dict[str, float](), dict[str, float]()

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Starts the rewards on the main rank, and ends them; under `replay` only checks that its records exist.
        Collective. Raises UserError on every rank."""
        try:
            if self._settings.replay is None:
                on_main(self._engine, self._open)
            else:
                needed = (self._num_steps, self._settings.reuse, self._recipe.batch.rows, self._vocabulary)
                on_main(self._engine, lambda: records.check_records(self._records, *needed))
            yield
            if self._server is not None and self._engine.is_main:
                self._server.close()
        finally:
            if self._engine.is_main and self._settings.replay is None:
                self._rewards.__exit__(None, None, None)
                if self._episodes is not None:
                    self._episodes.episodes.__exit__()

    def _open(self) -> None:
        """Looks for the server; starts the environment and the rewards; sets the records of an earlier run aside if
        none of it is resumed. Raises UserError."""
        if self._recipe.checkpoint.resume == "never":  # or those of the earlier run would be trained on
            for kind in (records.STEP, records.EVALUATION):
                for file in sorted(self._records.glob(f"{kind}-*.jsonl")):
                    records.set_record_aside(self._records, step_of(file), kind)
        if self._server is not None:
            self._server.open()
        if self._episodes is not None:
            self._episodes.episodes.__enter__()
        with self._engine.loading_whole():  # of a reward model
            self._rewards.__enter__()
        for note in self._rewards.notes:
            log.warning("%s", note)

    @property
    def _num_steps(self) -> int:
        return self._recipe.train.max_steps or 0

    def prepare(self, step: int) -> None:
        batch, times = step // self._settings.reuse, dict[str, float]()
        last = (self._num_steps - 1) // self._settings.reuse
        for needed in range(batch, min(batch + self._staleness, last) + 1):
            if needed not in self._samples:
                self._samples[needed], took = self._recorded_or_drawn(needed, step)
                times |= {name: times.get(name, 0.0) + seconds for name, seconds in took.items()}
        self._samples = {needed: samples for needed, samples in self._samples.items() if needed >= batch}
        if batch != self._batch:
            self._batch, samples = batch, self._samples[batch]
            rewards = np.array([sample.reward.total for sample in samples]).reshape(-1, self._settings.samples)
            weights, advantage, policy = list[NDArray[np.float64]](), np.zeros(len(samples)), self._policy
            if policy is not None:
                pairs = [(one.old, one.log_probs) for one in samples if self._corrects and one.old is not None]
                weights = [correction_weights(old, sampler, policy) for old, sampler in pairs]
                advantage = advantages(rewards, policy)
            of_samples = zip(samples, advantage.ravel().tolist(), strict=True)
            examples = [example_of(one, value, self._media_of(one)) for one, value in of_samples]
            if weights:
                corrected = zip(examples, weights, strict=True)
                examples = [replace(one, target_columns={**one.target_columns, CORRECTION: w}) for one, w in corrected]
            if policy is not None and policy.overlong == "mask":
                kept = [not sample.is_truncated for sample in samples]
                examples = [masked(one, keeps) for one, keeps in zip(examples, kept, strict=True)]
                weights = [one for one, keeps in zip(weights, kept, strict=True) if keeps] if weights else []
            self._rows = ExampleRows(examples, {ROOM: self._settings.max_new_tokens})
            self._measured = measured(samples, rewards) | measured_corrections(weights)
        self._times = times
        self._of_server = self._server.measured if self._server is not None and times else {}

    def _first_step(self, batch: int) -> int:
        """Returns the step (from 0) before which a batch is drawn: its weights are those after so many steps."""
        return max(0, batch - self._staleness) * self._settings.reuse

    def _recorded_or_drawn(self, batch: int, step: int) -> tuple[list[Sample], dict[str, float]]:
        """Returns the samples of a batch, complete, on every rank, and the seconds that they took. Collective. step:
        steps done. Raises UserError if they are neither recorded nor can be drawn again."""
        first = batch * self._settings.reuse + 1
        may_draw = step == self._first_step(batch)

        def read() -> list[Sample] | None:
            if self._settings.replay is not None:
                return records.replayed(self._records, first, self._recipe.batch.rows, self._vocabulary)
            try:
                found = records.read_record(self._records, first, vocabulary=self._vocabulary)
                problem = f"{records.record_file(self._records, first)} "
                problem += "is missing or incomplete" if found is None else "is of another recipe, or of other rows"
            except records.DamagedRecord as damage:
                found, problem = None, str(damage)
                if may_draw:
                    log.warning("%s; it is set aside, and its samples are drawn again", problem)
            if found is not None and found[1] == self._identity:
                return found[0]
            if not may_draw:
                drawn_after = self._first_step(batch)
                raise UserError(
                    f"{problem}. Its samples cannot be drawn again: "
                    f"they are from the weights after step {drawn_after}, and the run continues after step {step}. "
                    f"Fix: restore the file and the recipe, or resume from step {drawn_after} if that checkpoint is "
                    "there (checkpoint.resume), or begin again with checkpoint.resume: never"
                )
            records.set_record_aside(self._records, first)
            return None

        samples = on_main(self._engine, read)
        if samples is None:
            return self._drawn(batch)
        lacking = [name for name in self._passes if getattr(samples[0], name) is None]  # by another objective's run
        if self._teacher is not None and samples[0].teacher is not None and samples[0].teacher.of != self._teacher.of:
            lacking = ["teacher"]
        if "old" in lacking and not may_draw:
            raise UserError(
                f"rollouts.replay: {records.record_file(self._records, first)} lacks the log-probabilities of the "
                "weights that drew it. Fix: record it under the `reuse` and `staleness` of this recipe"
            )
        return self._completed(samples, lacking), {}

    def _drawn(self, batch: int) -> tuple[list[Sample], dict[str, float]]:
        """Returns new samples of a batch, recorded, and the seconds that they took. Collective. Raises UserError."""
        first, began = batch * self._settings.prompts, time.perf_counter()
        prompts = [self._prompts.drawn(first + i) for i in range(self._settings.prompts)]
        drawn = self._draw(first, self._prompts, prompts, self._settings.samples)
        drawn_at = time.perf_counter()
        rewarded = on_main(self._engine, lambda: self._rewarded(prompts, self._prompts.contents(prompts), drawn))
        rewarded_at = time.perf_counter()
        samples = self._completed(rewarded, self._passes)
        first_step = batch * self._settings.reuse + 1
        on_main(self._engine, lambda: records.write_record(self._records, first_step, samples, self._identity))
        times = {"time/generation": drawn_at - began, "time/rewards": rewarded_at - drawn_at}
        if self._passes:
            times["time/log_probs"] = time.perf_counter() - rewarded_at
        return samples, times

    def _draw(self, first_draw: int, source: RunPrompts, prompts: Sequence[RowPrompt], each: int) -> list[Drawn]:
        """Returns `each` samples of each prompt of a source, in order. Collective. Raises UserError."""
        if self._episodes is not None:
            return self._episodes.draw(first_draw, source, prompts, each)
        ids = [prompt.ids for prompt in prompts]
        if self._server is not None:
            return self._server.draw(first_draw, ids, each)
        return self._drawer.draw(first_draw, ids, each, [prompt.media for prompt in prompts])

    def _media_of(self, sample: Sample) -> tuple[Medium, ...]:
        """Returns the files of a sample's prompt, which records do not hold. Raises UserError if its row is gone."""
        if self._recipe.data.media is None:
            return ()
        prompt = self._prompts.by_row.get((sample.source, sample.path, sample.row))
        if prompt is None or prompt.ids != sample.prompt:
            raise UserError(
                f"rollouts.replay: {sample.path}:{sample.row} has another prompt now than its sample. Its files are "
                "read from the row. Fix: restore the rows that the samples were drawn for"
            )
        return prompt.media

    def _completed(self, samples: list[Sample], names: Iterable[str]) -> list[Sample]:
        """Returns samples with log-probabilities in these fields, by the passes of the same names. Collective."""
        for name in names:
            computed = self._passes[name]([example_of(sample, 0.0, self._media_of(sample)) for sample in samples])
            fields: list[Any] = [-values[0].astype(np.float64) for (values,) in computed]
            if self._teacher is not None and name == "teacher":
                predicted = (values[1:] for (values,) in computed)
                fields = [Predicted(ids.astype(np.int32), each, self._teacher.of) for ids, each in predicted]
            samples = [replace(sample, **{name: field}) for sample, field in zip(samples, fields, strict=True)]
        return samples

    def _rewarded(
        self, prompts: Sequence[RowPrompt], contents: Sequence[PromptContent], drawn: Sequence[Drawn]
    ) -> list[Sample]:
        """Returns the samples with their rewards, on the main rank. drawn: equally many of each prompt, in order."""
        each = len(drawn) // len(prompts)
        completions, samples = list[Completion](), list[Sample]()
        for i, one in enumerate(drawn):
            prompt, content, number = prompts[i // each], contents[i // each], i % each
            ids, turns, is_truncated = one.ids, None, one.ids[-1] not in self._end_ids
            if one.talk is not None:  # rewards see its last turn, after all others
                prompt, content = replace(prompt, ids=one.talk.prompt), replace(content, messages=one.talk.messages)
                turns, is_truncated = one.talk.turns, one.talk.turns.ended == "max_new_tokens"
                ids = one.ids[turns.spans[-1][0] :]
            completion = completion_of(prompt, content, ids, self._tokenizer, is_truncated, number)
            text = completion.text
            if one.talk is not None:
                completion = replace(completion, num_tokens=len(one.log_probs), outcome=one.talk.outcome)
                text = str(self._tokenizer.decode(one.ids))  # with the marks between turns
            completions.append(completion)
            of_prompt = (prompt.path, prompt.row, prompt.source, number, prompt.ids)
            of_ids = (one.ids, text, is_truncated, one.log_probs, one.margins)
            samples.append(Sample(*of_prompt, *of_ids, Reward(0.0, {}, ()), turns=turns))
        rewards = self._rewards.score(completions)
        return [sample.rewarded(reward) for sample, reward in zip(samples, rewards, strict=True)]

    def evaluated(self, step: int) -> Mapping[str, float]:
        return {} if self._held_out is None else self._held_out.metrics(step)

    # --- as a loader reads them

    def row(self, position: int) -> list[Example]:
        return self._rows.row(self._at(position))

    def lengths(self, position: int) -> NDArray[np.int64]:
        return self._rows.lengths(self._at(position))

    def counts(self, position: int) -> Mapping[str, int]:
        return self._rows.counts(self._at(position))

    def prompt(self, position: int) -> SharedPrompt | None:
        return self._rows.prompt(self._at(position))

    def epoch_at(self, position: int) -> float:
        """Returns the passes over the prompts; a batch counts with its last step, in parts before."""
        return self._prompts.epochs(position // (self._settings.samples * self._settings.reuse))

    def measured(self, step: int) -> Mapping[str, float]:
        return {**self._measured, **self._of_server, **self._times}

    def _at(self, position: int) -> int:
        step, row = divmod(position, self._recipe.batch.rows)
        assert step // self._settings.reuse == self._batch  # `prepare` was called for it, and for no later one
        return row


def example_of(sample: Sample, advantage: float, media: tuple[Medium, ...] = ()) -> Example:
    """Returns a sample as an example of one sequence, whose sampled tokens are its targets. media: of its prompt,
    which then shares nothing: prompts of equal tokens may have other files."""
    ids = np.array([*sample.prompt, *sample.ids], np.int32)
    loss_mask = np.concatenate([np.zeros(len(sample.prompt), bool), sample.sampled])
    columns = {ADVANTAGE: advantage, SAMPLED: float(sample.num_sampled)}
    of_targets = {SAMPLER: sample.log_probs, OLD: sample.old, INITIAL: sample.initial}
    given: dict[str, NDArray[Any]] = {name: values for name, values in of_targets.items() if values is not None}
    if sample.teacher is not None:
        given |= {IDS: sample.teacher.ids.astype(np.int64), LOG_PROBS: sample.teacher.log_probs}
    shared = None if media else SharedPrompt(tuple(sample.prompt), len(sample.prompt))
    return Example(sample.path, sample.row, sample.source, (Tokens(ids, loss_mask, media),), columns, given, shared)


def masked(example: Example, keeps: bool) -> Example:
    """Returns an example that says whether it is kept; one that is not has no advantage."""
    advantage = example.columns[ADVANTAGE] if keeps else 0.0
    return replace(example, columns={**example.columns, ADVANTAGE: advantage, KEPT: float(keeps)})


# Parts of a recipe that decide a step's rollouts; `data` without what evaluation reads.
_DECIDING = ("model", "mode", "lora", "quantization", "tokens", "objective", "rollouts", "rewards", "batch")
_DECIDING += ("optimizer", "schedule", "train")


def run_identity(recipe: Recipe, content: Mapping[str, Any]) -> str:
    """Returns a digest of all that decides the weights of a step and its rollouts, so that a record is not taken for
    one of another run in the same folder. content: of the rows of `data.train`. Raises UserError."""
    settings = recipe.model_dump(mode="json")
    for key in ENGINE_KEYS["vllm"]:  # where a server is changes no sample
        del settings["rollouts"][key]
    if recipe.schedule.name == "constant" and recipe.schedule.warmup_ratio is None:
        del settings["train"]["max_steps"]  # no rate depends on it
    parts = {
        **{name: settings[name] for name in _DECIDING},
        "seed": recipe.run.seed,
        "data": [settings["data"][name] for name in ("max_length", "overlong")],
        "content": content,
        "base": base_content(recipe.model),
        "reward files": reward_files(recipe.rewards, recipe.rollouts),
        "teacher": sample_teacher(recipe),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()
