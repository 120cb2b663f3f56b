"""`serve`: finished runs behind OpenAI's API, one request after the other.

    POST /v1/chat/completions, POST /v1/completions, GET /v1/models, GET /health

    request ── body (http_api.py), fields and bounds, prompt rendered and tokenized as in training (api_requests.py)
            ── waits for the lane, the thread in which models generate (lane.py) ── pieces, or one answer

All of this runs outside the event loop, so that /health answers meanwhile.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import uvicorn
from transformers import AutoTokenizer, GenerationConfig

from finetune.checkpoints.trained import is_scoring
from finetune.errors import UserError
from finetune.models.remote_code import load_auto
from finetune.release.export.loading import default_device, load_trained, model_folder
from finetune.release.export.merging import FittingAdapter, check_names
from finetune.release.inference.answering import Answerer, answerer_of
from finetune.release.inference.http_api import build_app
from finetune.release.local_server import ANY_ADDRESS, LOCAL_HOSTS


class Served:
    """A name of the server: its adapter is activated for each request."""

    def __init__(self, model: Any, adapter: str | None, settings: GenerationConfig):
        self._model, self._adapter = model, adapter
        self.generation_config, self.config = settings, model.config

    @property
    def device(self) -> torch.device:
        return self._model.device

    @property
    def dtype(self) -> torch.dtype:
        return self._model.dtype

    def generate(self, **arguments: Any) -> Any:
        if self._adapter is not None:
            self._model.set_adapter(self._adapter)
        self._model.generation_config = self.generation_config
        with torch.no_grad():
            return self._model.generate(**arguments)


def load_served(runs: Sequence[tuple[str, Path]], device: str) -> dict[str, Answerer]:
    """Returns the results of runs by their names; adapters of the same base share it. Raises UserError."""
    shared: dict[tuple[str, int], Any] = {}
    entries: dict[str, Answerer] = {}
    for name, run_dir in runs:
        folder = model_folder(run_dir)
        if is_scoring(folder):
            raise UserError(f"{run_dir}: reward models and classifiers do not generate text. Fix: use `finetune score`")
        if name in entries:
            raise UserError(f"serve: two models are named {name!r}. Fix: rename one of them, as NAME={run_dir}")
        tokenizer, adapter = load_auto(AutoTokenizer, folder), f"served_{len(entries)}"
        base, adapter_file = None, folder / "adapter_config.json"
        if adapter_file.is_file():
            config = json.loads(adapter_file.read_text(encoding="utf-8"))
            changes_base = ("modules_to_save", "target_parameters", "trainable_token_indices")
            base = None if any(config.get(key) for key in changes_base) else config["base_model_name_or_path"]
        key = (base or str(folder), len(tokenizer))
        if key in shared:
            model = shared[key]
            with FittingAdapter(folder):
                found = model.load_adapter(str(folder), adapter_name=adapter)
            check_names(folder, found.missing_keys)
        else:
            # auto: over all accelerators if there are several.
            if device == "auto" and torch.accelerator.is_available() and torch.accelerator.device_count() > 1:
                model = load_trained(folder, adapter=adapter, device_map="auto")
            else:
                try:
                    model = load_trained(folder, adapter=adapter).to(
                        default_device() if device == "auto" else torch.device(device)
                    )
                except (RuntimeError, AssertionError) as error:
                    problem = f"cannot be used: {str(error).splitlines()[0].rstrip('.')}"
                    raise UserError(f"--device {device}: {problem}. Fix: give another, such as auto or cpu") from None
            if base is not None:
                shared[key] = model
        has_settings = (folder / "generation_config.json").is_file()
        settings = GenerationConfig.from_pretrained(folder) if has_settings else model.generation_config
        served = Served(model.eval(), adapter if adapter_file.is_file() else None, settings)
        entries[name] = answerer_of(run_dir, served, tokenizer)
    return entries


def hosts_of(host: str, more: Sequence[str]) -> set[str]:
    """Returns the names of a server that listens on a host: any name if on all addresses."""
    every = {ANY_ADDRESS} if host in ("0.0.0.0", "::", "") else set[str]()
    return {*LOCAL_HOSTS, host.lower(), *map(str.lower, more), *every}


def serve(runs: Sequence[tuple[str, Path]], host: str, port: int, device: str, allowed: Sequence[str] = ()) -> None:
    """Serve runs until Ctrl-C. port 0: any free port; allowed: more names of the server. Raises UserError."""
    try:
        listening = socket.create_server((host, port))
    except OSError as error:
        raise UserError(f"serve: cannot listen on {host}:{port}: {error.strerror}. Fix: give another --port") from None
    with listening:
        app = build_app(load_served(runs, device), hosts_of(host, allowed))
        url = f"http://{host}:{listening.getsockname()[1]}/v1"
        print(f"serving {', '.join(name for name, _ in runs)} at {url} (Ctrl-C ends it)", flush=True)
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=3)
        uvicorn.Server(config).run(sockets=[listening])
