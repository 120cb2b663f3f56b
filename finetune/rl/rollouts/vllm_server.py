"""Client of a vLLM server (`vllm serve`) that samples for a run: token ids in, token ids out. It imports no vLLM.

    GET  /v1/models                                     the base model, and its longest sequence
    POST /v1/load_lora_adapter, /v1/unload_lora_adapter weights of a step, as an adapter folder that both see
    POST /pause, /collective_rpc, /resume               weights of a step, as a model folder that both see
    POST /v1/completions                                samples, and log-probabilities of a prompt

Requests: https://docs.vllm.ai/en/v0.32.0/api/vllm/entrypoints/openai/completion/protocol/; adapters:
https://docs.vllm.ai/en/v0.32.0/features/lora/; weights: `reload_weights` of
https://docs.vllm.ai/en/v0.32.0/api/vllm/v1/worker/gpu_worker/, which needs neither NCCL nor CUDA IPC in the trainer, as
the backends of https://docs.vllm.ai/en/v0.32.0/training/weight_transfer/ do.
"""

from __future__ import annotations

import http.client
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from finetune.errors import UserError
from finetune.recipe.schema import Rollouts
from finetune.recipe.urls import scrubbed
from finetune.release.http_exchange import StatusError, TooLargeError, content

START = (
    "VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve MODEL --logprobs-mode processed_logprobs "
    "(and --enable-lora for adapters)"
)
# A path that the server does not know, and the variable without which it has none.
_SWITCHES = {
    "/v1/load_lora_adapter": "start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora",
    "/pause": "start it with VLLM_SERVER_DEV_MODE=1",
    "/collective_rpc": "start it with VLLM_SERVER_DEV_MODE=1",
}
_RETRY_AFTER_S = (0.2, 1.0, 5.0)  # after a failed connection
_CONTENT_BYTES = 1 << 28
_ROUNDING = 1e-3  # by which a log-probability of a certain token may be above 0 in 16 bits
# In every request: a server takes what it lacks from the model's generation_config.json, such as a `top_k` of 20.
_NEUTRAL = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


class VllmServer:
    """The server of a recipe. Its key is in no message. vocabulary: the model's; None: ids are not compared with it.

    Raises UserError if the key's variable is not set.
    """

    def __init__(self, settings: Rollouts, vocabulary: int | None = None):
        assert settings.url is not None  # a rule of the recipe
        self._vocabulary = vocabulary
        self._url, self._seconds = settings.url.rstrip("/"), settings.value("seconds")
        self._key = os.environ.get(settings.key) if settings.key else None
        if settings.key and not self._key:
            raise UserError(
                f"rollouts.key: the environment variable {settings.key} is not set. Fix: set it, or leave out "
                "rollouts.key"
            )

    def base_model(self, max_length: int) -> str:
        """Returns the name of the model that the server was started with. Raises UserError unless it answers, and takes
        sequences of `max_length` tokens."""
        listed = self._ask("/v1/models").get("data")
        models = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
        bases = [one for one in models if one.get("parent") is None and isinstance(one.get("id"), str)]
        if not bases:
            raise self._invalid("/v1/models", "it lists no model")
        longest = bases[0].get("max_model_len")
        if longest is not None and (type(longest) is not int or longest < 1):
            raise self._invalid("/v1/models", f"its `max_model_len` is {str(longest)[:40]!r}, not a number of tokens")
        if longest is not None and longest < max_length:
            raise UserError(
                f"rollouts.url: {self._url} takes sequences of {longest} tokens, and data.max_length is {max_length}. "
                "Fix: start it with a larger --max-model-len, or lower data.max_length"
            )
        return bases[0]["id"]

    # --- weights

    def load_adapter(self, name: str, folder: Path) -> None:
        """Loads an adapter under a new name: a server keeps the prompts that it has computed by an adapter's name."""
        self._ask("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)}, is_json=False)

    def unload_adapter(self, name: str) -> None:
        self._ask("/v1/unload_lora_adapter", {"lora_name": name}, is_json=False)

    def load_weights(self, folder: Path) -> None:
        """Replaces the server's weights by those of a model folder. A pause waits for requests and drops the computed
        prompts; after an error the server stays paused, as half of its weights may be replaced."""
        self._ask("/pause?mode=wait", {})
        self._ask("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}, False)
        self._ask("/resume", {})

    # --- samples

    def score(self, model: str, ids: Sequence[int]) -> NDArray[np.float64]:  # (len(ids) - 1,)
        """Returns the log-probabilities of tokens from the second one on, at temperature 1."""
        choice = self._complete(model, ids, {"max_tokens": 1, "seed": 0, "prompt_logprobs": 1})
        listed = choice.get("prompt_logprobs")
        if not isinstance(listed, list) or len(listed) != len(ids):
            raise self._invalid("/v1/completions", "it gave no `prompt_logprobs` of these tokens")
        values = []
        for token, of_token in zip(ids[1:], listed[1:], strict=True):
            entry = of_token.get(str(token)) if isinstance(of_token, dict) else None
            values.append(entry.get("logprob") if isinstance(entry, dict) else None)
        return self._finite(values)

    def spread(self, model: str, ids: Sequence[int], temperature: float) -> float:
        """Returns the distance between the two likeliest next tokens' log-probabilities, as the server gives them."""
        body = {"max_tokens": 1, "seed": 0, "temperature": temperature, "logprobs": 2}
        choice = self._complete(model, ids, {**body, "return_tokens_as_token_ids": True})
        listed = self._of_tokens(choice, "top_logprobs")
        first = listed[0] if isinstance(listed, list) and listed else None
        if not isinstance(first, dict) or len(first) < 2:
            raise self._invalid("/v1/completions", "it gave no `top_logprobs`")
        likeliest = sorted(self._finite(list(first.values())).tolist())
        return likeliest[-1] - likeliest[-2]

    def sample(
        self, model: str, ids: list[int], seed: int, settings: Rollouts, end_ids: set[int]
    ) -> tuple[list[int], NDArray[np.float64]]:
        """Returns the ids of one sample, up to and with its end token, and their log-probabilities under the
        temperature."""
        body = {"max_tokens": settings.max_new_tokens, "temperature": settings.temperature, "seed": seed}
        # The run's end tokens, and none of the server's own.
        ends = {"ignore_eos": True, "stop_token_ids": sorted(end_ids)}
        choice = self._complete(model, ids, {**body, **ends, "logprobs": 0})
        sampled = choice.get("token_ids")
        if not isinstance(sampled, list) or not sampled or not all(type(one) is int for one in sampled):
            raise self._invalid("/v1/completions", "it gave no `token_ids`, as its version may be too old")
        if self._vocabulary is not None and (wrong := [one for one in sampled if not 0 <= one < self._vocabulary]):
            reason = f"it sampled the id {str(wrong[0])[:40]}, and the model has {self._vocabulary:,} tokens"
            raise self._invalid("/v1/completions", reason)
        if any(one in end_ids for one in sampled[:-1]):
            raise self._invalid("/v1/completions", "a sample goes on after an end token")
        if len(sampled) > settings.max_new_tokens:
            reason = f"it gave {len(sampled)} tokens, and rollouts.max_new_tokens is {settings.max_new_tokens}"
            raise self._invalid("/v1/completions", reason)
        if sampled[-1] not in end_ids and len(sampled) != settings.max_new_tokens:
            reason = f"it ended a sample of {len(sampled)} tokens ({choice.get('finish_reason')})"
            raise self._invalid("/v1/completions", f"{reason}, at neither an end token nor rollouts.max_new_tokens")
        values = self._of_tokens(choice, "token_logprobs")
        if not isinstance(values, list) or len(values) != len(sampled):
            raise self._invalid("/v1/completions", "it gave no `token_logprobs` of the sampled tokens")
        return sampled, self._finite(values)

    def _complete(self, model: str, ids: Sequence[int], settings: dict[str, Any]) -> dict[str, Any]:
        """Returns the one choice of a completion of these ids."""
        body = {"model": model, "prompt": list(ids), "return_token_ids": True, **_NEUTRAL, "temperature": 1.0}
        choices = self._ask("/v1/completions", {**body, **settings}, retries=True).get("choices")
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
            raise self._invalid("/v1/completions", "it gave no choice, or several")
        if choices[0].get("prompt_token_ids") != list(ids):
            raise self._invalid("/v1/completions", "the `prompt_token_ids` of the answer are not those of the request")
        return choices[0]

    def _of_tokens(self, choice: dict[str, Any], key: str) -> Any:
        listed = choice.get("logprobs")
        return listed.get(key) if isinstance(listed, dict) else None

    def _finite(self, values: list[Any]) -> NDArray[np.float64]:
        if not all(type(one) in (float, int) and abs(one) <= sys.float_info.max for one in values):
            raise self._invalid("/v1/completions", "a log-probability is missing or not finite")
        if values and (most := max(values)) > _ROUNDING:
            raise self._invalid("/v1/completions", f"a log-probability is {most:g}, above 0")
        return np.array(values, np.float64)

    # --- requests

    def _ask(
        self, path: str, body: dict[str, Any] | None = None, is_json: bool = True, retries: bool = False
    ) -> dict[str, Any]:
        """Returns a server's answer. retries: ask again after a failed connection. Raises UserError."""
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        data = None if body is None else json.dumps(body).encode()
        pauses, end = list(_RETRY_AFTER_S) if retries else [], time.monotonic() + self._seconds
        while True:
            try:
                answer = content(self._url + path, data, headers, end - time.monotonic(), _CONTENT_BYTES)
                break
            except StatusError as error:
                text = self._clean(error.text)
                switch = _SWITCHES.get(path.partition("?")[0])
                fix = switch if switch and '{"detail":"Not Found"}' in text else "look at the server's log"
                raise UserError(
                    f"rollouts.url: {self._url}{path} answered with status {error.code}: {text}. Fix: {fix}"
                ) from None
            except TimeoutError:
                raise UserError(
                    f"rollouts.url: {self._url}{path} gave no answer in {self._seconds:g} s. Fix: look at the server's "
                    "log, or raise rollouts.seconds"
                ) from None
            except TooLargeError as error:
                raise self._invalid(path, f"it sent {error}") from None
            except (OSError, http.client.HTTPException) as error:
                reason = getattr(error, "reason", None) or error
                if not pauses:
                    text = self._clean(str(reason)) or type(reason).__name__
                    raise UserError(
                        f"rollouts.url: {self._url} cannot be reached: {text}. Fix: start the server, such as {START}"
                    ) from None
                time.sleep(pauses.pop(0))
        return self._parsed(path, answer) if is_json else {}

    def _parsed(self, path: str, body: bytes) -> dict[str, Any]:
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise self._invalid(path, repr(self._clean(body[:80].decode("utf-8", "replace"))))
        return answer

    def _invalid(self, path: str, problem: str) -> UserError:
        return UserError(
            f"rollouts.url: {self._url}{path} does not answer as a vLLM server: {problem}. Fix: give the address of "
            f"one, started such as {START}"
        )

    def _clean(self, text: str) -> str:
        """Returns a server's text on one line, without the key, which it may repeat in an error."""
        return " ".join(scrubbed(text.replace(self._key, "***") if self._key else text).split())
