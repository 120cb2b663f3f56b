"""A server with the requests of `vllm serve` that a run makes, on a tiny model of transformers.

It loads the folders that it is told to, really samples, and refuses what a vLLM server would refuse or quietly ignore.

`fault` makes it misbehave.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

MODEL = "tiny"
NEUTRAL = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
NEUTRAL |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}
_KNOWN = {"model", "prompt", "max_tokens", "temperature", "seed", "logprobs", "prompt_logprobs", "return_token_ids"}
_KNOWN |= {"stop_token_ids", "ignore_eos", "return_tokens_as_token_ids", *NEUTRAL}


class Refusal(Exception):
    """args: status, text."""


class SamplingServer:
    """State of the server. fault: stale (weights are acknowledged and not loaded), base (adapters are ignored), error,
    hang, dropped (the first connections), ids, no_ids, no_log_probs, raw_log_probs, aborted."""

    def __init__(self, model: Path, max_length: int = 128, key: str | None = None, dev_mode: bool = True):
        self.fault: str | None = None
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.max_length, self.key, self.dev_mode, self.url = max_length, key, dev_mode, ""
        self.dropped = 0
        self.at_once = self.most_at_once = 0
        self._lock, self._model, self._folder = threading.Lock(), self._load(model), model
        self._adapters: dict[str, Any] = {}
        self._paths: list[str] = []  # of all weights that were ever loaded
        self._paused = False

    def paths(self, *kinds: str) -> list[str]:
        """Returns the paths of the calls in order, those of some kinds only."""
        return [path for path, _ in self.calls if not kinds or path in kinds]

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any] | str:
        self.calls.append((path, body))
        if path == "/v1/models":
            base = {"id": MODEL, "parent": None, "max_model_len": self.max_length}
            return {"data": [base, *({"id": name, "parent": MODEL} for name in self._adapters)]}
        if path == "/v1/completions":
            return self._completion(body)
        with self._lock:
            if path == "/v1/load_lora_adapter":
                if body["lora_name"] in self._adapters:
                    raise Refusal(400, "has already been loaded")
                self._adapters[body["lora_name"]] = self._loaded(body["lora_path"], is_adapter=True)
                return "Success"
            if path == "/v1/unload_lora_adapter":
                if self._adapters.pop(body["lora_name"], None) is None:
                    raise Refusal(404, "cannot be found")
                return "Success"
            if path == "/pause?mode=wait" and self.dev_mode:
                self._paused = True
                return {"status": "paused"}
            if path == "/resume" and self.dev_mode:
                self._paused = False
                return {"status": "resumed"}
            if path == "/collective_rpc" and self.dev_mode:
                assert body["method"] == "reload_weights"
                if not self._paused:
                    raise Refusal(500, "weights are replaced while requests run")
                self._model = self._loaded(body["kwargs"]["weights_path"], is_adapter=False)
                return {"results": [None]}
        raise Refusal(404, json.dumps({"detail": "Not Found"}, separators=(",", ":")))

    def _loaded(self, path: str, is_adapter: bool) -> Any:
        """Returns the model of a folder; a second time under the same path a server may take what it has of it."""
        if path in self._paths or not Path(path).is_absolute():
            raise Refusal(500, f"{path} was loaded before")
        self._paths.append(path)
        if is_adapter:
            stale = next(reversed(self._adapters.values()), None) if self.fault == "stale" else None
            return stale or self._load(self._folder, Path(path))
        return self._model if self.fault == "stale" else self._load(Path(path))

    @staticmethod
    def _load(folder: Path, adapter: Path | None = None) -> Any:
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return (model if adapter is None else PeftModel.from_pretrained(model, str(adapter))).eval()

    @torch.no_grad()
    def _completion(self, body: dict[str, Any]) -> dict[str, Any]:
        if self._paused:
            raise Refusal(503, "paused")
        if unknown := set(body) - _KNOWN or {key for key, value in NEUTRAL.items() if body.get(key) != value}:
            raise Refusal(400, f"{sorted(unknown)}: unknown, or left to the model's generation_config.json")
        if not 0 <= body["seed"] < 2**63:
            raise Refusal(400, f"seed {body['seed']}")
        if body["model"] not in (MODEL, *self._adapters):
            raise Refusal(404, f"no model {body['model']}")
        adapter = self._adapters.get(body["model"])
        model = self._model if adapter is None or self.fault == "base" else adapter
        prompt, temperature = list(body["prompt"]), body["temperature"]
        generator = torch.Generator().manual_seed(body["seed"])
        sampled, log_probs, likeliest = list[int](), list[float](), list[dict[str, float]]()
        with self._lock:
            all_log_p = model(torch.tensor([prompt])).logits[0].double().log_softmax(-1)
            for _ in range(body["max_tokens"]):
                logits = model(torch.tensor([prompt + sampled])).logits[0, -1].double()
                processed = (logits / temperature).log_softmax(-1)
                shown = logits.log_softmax(-1) if self.fault == "raw_log_probs" else processed
                token = int(torch.multinomial(processed.exp(), 1, generator=generator))
                sampled.append(token)
                log_probs.append(float(shown[token]))
                best = shown.topk(max(1, body.get("logprobs", 1)))
                ids = best.indices.tolist()
                likeliest.append(dict(zip((f"token_id:{i}" for i in ids), best.values.tolist(), strict=True)))
                if token in body.get("stop_token_ids", ()) or (token == 2 and not body.get("ignore_eos")):
                    break
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length", "token_ids": sampled}
        choice["prompt_token_ids"] = [*prompt[:-1], prompt[-1] + 1] if self.fault == "ids" else prompt
        if "logprobs" in body and self.fault != "no_log_probs":
            choice["logprobs"] = {"token_logprobs": log_probs, "top_logprobs": likeliest}
        if "prompt_logprobs" in body:
            scores = all_log_p[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
            entries = ({str(i): {"logprob": value}} for i, value in zip(prompt[1:], scores, strict=True))
            choice["prompt_logprobs"] = [None, *entries]
        if self.fault == "no_ids":
            del choice["token_ids"]
        if self.fault == "aborted":
            choice |= {"token_ids": [7], "finish_reason": "abort", "logprobs": {"token_logprobs": [-1.0]}}
        return {"choices": [choice]}


class _Handler(BaseHTTPRequestHandler):
    server: Any

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _answer(self, body: dict[str, Any]) -> None:
        state: SamplingServer = self.server.state
        is_sample = self.path == "/v1/completions"
        if state.fault == "dropped" and is_sample and state.dropped < 2:
            state.dropped += 1
            self.close_connection = True
            return
        if state.fault == "hang" and is_sample:
            time.sleep(1.0)
        state.at_once += 1
        state.most_at_once = max(state.most_at_once, state.at_once)
        try:
            if state.key and self.path.startswith("/v1") and self.headers["Authorization"] != f"Bearer {state.key}":
                raise Refusal(401, f"Unauthorized: {self.headers['Authorization']}")
            if state.fault == "error" and is_sample:
                raise Refusal(500, "EngineCore encountered an issue")
            status, content = 200, state.answer(self.path, body)
        except Refusal as refusal:
            status, content = refusal.args
        finally:
            state.at_once -= 1
        data = (content if isinstance(content, str) else json.dumps(content)).encode()
        with contextlib.suppress(ConnectionError):  # the client has stopped waiting
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)


@contextlib.contextmanager
def sampling_server(model: Path, **settings: Any) -> Iterator[SamplingServer]:
    """A running server with the model of a folder."""
    state = SamplingServer(model, **settings)
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        server.state = state  # type: ignore[attr-defined]
        state.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield state
        finally:
            server.shutdown()
            thread.join()
