"""Draws the samples of a step from a vLLM server, which gets the weights of the step before.

    save      all ranks     <run>/sampler/weights-00000001-ID: the adapter, or all weights, as in the run's result
    load      main rank     under a new name and path each step: a server may keep what it computed for an old one
    prove     all ranks     log-probabilities of one prompt, by the server and by the wrapped model
    sample    main rank     one request for each sample, with its own seed; then all ranks have the samples

Tokens are the server's, which promises none: they may depend on its version, load and hardware. Replay and resume hold
in full, as for samples of the model that trains.

Letters: P tokens of the prompt that is scored.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from finetune.checkpoints.inputs import on_main
from finetune.checkpoints.result import save_result
from finetune.engine.base import Engine
from finetune.errors import RunFailure, UserError
from finetune.models.adapters import adapters_off
from finetune.models.base_config import dtypes
from finetune.models.compiled import uncompiled
from finetune.recipe import Recipe
from finetune.rl.rollouts.drawing import Drawn
from finetune.rl.rollouts.noise import sample_keys
from finetune.rl.rollouts.vllm_server import START, VllmServer

log = logging.getLogger(__name__)

FOLDER = "sampler"  # in the run's folder
_SCORED_TOKENS = 256  # of a prompt: their logits are in memory at once
_SEED_BITS = (1 << 63) - 1  # not negative: vLLM takes -1 for no seed
# Largest mean difference of log-probabilities that the rounding of other kernels explains, in nats per token: chosen,
# with 8 significant bits in mind, not measured on GPUs.
_FP32, _HALF, _QUANTIZED = 0.01, 0.1, 0.3
_LEAST = 0.01  # share of the bound below which a difference says nothing


class ServerDrawer:
    """Samples from a server that has the weights of the run."""

    def __init__(
        self,
        recipe: Recipe,
        engine: Engine,
        tokenizer: PreTrainedTokenizerFast,
        end_ids: set[int],
        folder: Path,
        vocabulary: int,
    ):
        """folder: of the run; vocabulary: number of ids that the model has."""
        assert recipe.rollouts is not None  # the caller's condition
        self._recipe, self._settings, self._engine = recipe, recipe.rollouts, engine
        self._tokenizer, self._end_ids, self._vocabulary = tokenizer, end_ids, vocabulary
        self._folder, self._is_adapter = (folder / FOLDER).resolve(), recipe.mode != "full"
        self._id = on_main(engine, lambda: uuid.uuid4().hex[:8])  # of this launch, in names of adapters and folders
        self._base, self._adapter = "", ""  # names on the server: of the model, and of the last adapter
        self._draws = 0  # of this launch
        self._probe: list[int] = []
        self._earlier: dict[str, NDArray[np.float64]] = {}  # scores of the probe by weights that are not this step's
        self.measured: dict[str, float] = {}  # of the last step

    def open(self) -> None:
        """Looks for the server, on the main rank. Raises UserError."""
        self._server = VllmServer(self._settings, self._vocabulary)
        self._base = self._server.base_model(self._recipe.data.max_length)
        shutil.rmtree(self._folder, ignore_errors=True)  # of a run that was killed

    def close(self) -> None:
        """Removes the weights of the last step, on the main rank."""
        if self._adapter:
            try:
                self._server.unload_adapter(self._adapter)
            except UserError as error:
                log.warning("%s", error)
        shutil.rmtree(self._folder, ignore_errors=True)

    def draw(self, first_draw: int, prompts: Sequence[list[int]], each: int) -> list[Drawn]:
        """Returns `each` samples of each prompt, prompt after prompt, on every rank. Collective. Raises UserError.

        first_draw: number of the first prompt's draw in the run; the others follow.
        """
        self._draws += 1
        weights = self._folder / f"weights-{self._draws:08d}-{self._id}"
        card = "Weights of a run for its sampler. They are removed after the samples.\n"
        saved_as = dtypes(self._recipe).frozen
        try:
            save_result(self._engine, self._tokenizer, self._end_ids, self._is_adapter, saved_as, card, weights)
        except RunFailure as failure:
            raise UserError(str(failure)) from None
        model = on_main(self._engine, lambda: self._load(weights))
        self._prove(model, prompts)

        def sample() -> list[Drawn]:
            drawn = self._samples(model, first_draw, prompts, each)
            with contextlib.suppress(OSError):
                shutil.rmtree(weights)  # the server has read it
            return drawn

        return on_main(self._engine, sample)

    def _load(self, weights: Path) -> str:
        """Returns the name under which the server has the weights of a folder."""
        if not self._is_adapter:
            self._server.load_weights(weights)
            return self._base
        name, old = f"{self._recipe.run.name}-{weights.name}", self._adapter
        self._server.load_adapter(name, weights)
        self._adapter = name
        if old:
            self._server.unload_adapter(old)
        return name

    # --- the proof that the server has the weights

    def _prove(self, model: str, prompts: Sequence[list[int]]) -> None:
        """Compares the log-probabilities of one prompt. Collective. Raises UserError."""
        is_first = not self._probe
        if is_first:
            self._probe = max(prompts, key=len)[:_SCORED_TOKENS]
            if len(self._probe) < 2:
                raise UserError(
                    "rollouts.engine: no prompt of this step has two tokens. By such a prompt the server is proved to "
                    "have the weights. Fix: give longer prompts"
                )
            if self._is_adapter:
                with adapters_off(self._engine.unwrapped):
                    self._earlier["the base model, without the adapter"] = self._own_scores()
        own = self._own_scores()

        def compare() -> float:
            temperature = self._settings.temperature
            if is_first and temperature != 1.0:  # by which differences of log-probabilities are divided
                at_one, given = (self._server.spread(model, self._probe, value) for value in (1.0, temperature))
                if abs(given - at_one) < abs(given - at_one / temperature):
                    raise UserError(
                        "rollouts.temperature: the server gives log-probabilities without the temperature of "
                        f"{temperature:g}. Fix: start it with --logprobs-mode processed_logprobs ({START})"
                    )
            return self._mismatch(own, self._server.score(model, self._probe))

        self.measured = {"sampler_mismatch": on_main(self._engine, compare)}
        if is_first and not self._is_adapter:
            self._earlier["the weights that this run started with"] = own
        self._earlier["the weights of an earlier step"] = own

    @torch.no_grad()
    def _own_scores(self) -> NDArray[np.float64]:  # (P - 1,)
        """Returns the log-probabilities of the probe's tokens from the second one on. Collective."""
        ids = torch.tensor([self._probe], device=self._engine.device)
        with self._engine.evaluating(), self._engine.generating(), uncompiled():
            places = torch.arange(ids.shape[1], device=ids.device)[None]
            mask = torch.ones_like(ids)
            output = self._engine.model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=places,
                use_cache=False,
                logits_to_keep=ids.shape[1],  # all; stages of a pipeline have to know
            )
        log_p = torch.log_softmax(output.logits[0, :-1].double(), 1)
        return log_p.gather(1, ids[0, 1:, None])[:, 0].cpu().numpy()

    def _mismatch(self, own: NDArray[np.float64], theirs: NDArray[np.float64]) -> float:
        """Returns the mean difference, in nats per token. Raises UserError if the server has other weights.

        They are those of an earlier step if they are twice as near to these: also a small step is seen that way, which
        a bound for rounding cannot tell from it.
        """
        difference, bound, train = float(np.abs(theirs - own).mean()), self._settings.max_mismatch, self._recipe.train
        if bound is None and (self._recipe.quantization is not None or train.precision == "fp8"):
            bound = _QUANTIZED
        elif bound is None:
            bound = _FP32 if train.precision == "fp32" else _HALF
        place = "rollouts.url: the server's log-probabilities of a prompt differ from the trainer's"
        place += f" by {difference:.2g} nats per token"
        if difference > _LEAST * bound:
            for name, scores in self._earlier.items():
                if np.abs(theirs - scores).mean() < difference / 2:
                    raise UserError(
                        f"{place}. They are those of {name}: it did not get the weights. Fix: restart it, so that it "
                        f"sees {self._folder} under the same path"
                    )
        if difference > bound:
            raise UserError(
                f"{place}, and {bound:g} is the most (rollouts.max_mismatch). It has another model, other weights or "
                "another type of numbers. Fix: start it with the recipe's model, and with its type as --dtype"
            )
        return difference

    # --- samples

    def _samples(self, model: str, first_draw: int, prompts: Sequence[list[int]], each: int) -> list[Drawn]:
        """Returns the samples in order. After a failure no more requests are sent. Raises UserError."""
        failed = Event()
        places = [(prompt, sample) for prompt in range(len(prompts)) for sample in range(each)]
        draws, samples = torch.tensor(places).unbind(1)
        keys = sample_keys(self._recipe.run.seed, first_draw + draws, samples) & _SEED_BITS

        def sampled(prompt: int, key: int) -> Drawn | None:
            if failed.is_set():
                return None
            try:
                ids, log_probs = self._server.sample(model, prompts[prompt], key, self._settings, self._end_ids)
            except UserError:
                failed.set()
                raise
            return Drawn(ids, log_probs, np.full(len(ids), np.nan))

        with ThreadPoolExecutor(self._settings.value("requests"), "sampler") as threads:
            futures = [
                threads.submit(sampled, prompt, key) for (prompt, _), key in zip(places, keys.tolist(), strict=True)
            ]
        for future in futures:
            if (error := future.exception()) is not None:
                raise error
        return [drawn for future in futures if (drawn := future.result()) is not None]
