"""One attempt to reach the Hugging Face hub, before the libraries that would retry for minutes are imported."""

from __future__ import annotations

import functools
import glob
import http.client
import logging
import os
import ssl
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import NoReturn

from finetune.data.sources.locations import local_files
from finetune.errors import UserError
from finetune.recipe.schema import Recipe
from finetune.recipe.urls import is_url, without_credentials

log = logging.getLogger(__name__)

_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")  # either takes huggingface_hub offline
_FILES = ("config.json", "tokenizer_config.json", "tokenizer.json", "preprocessor_config.json")  # one in every model


def check_hub(recipe: Recipe) -> None:
    """Tries to reach the hub once if the recipe names models or datasets of it, and continues offline if it fails.

    Raises UserError if a model is not on this machine either.
    """
    model, objective, data = recipe.model, recipe.objective, recipe.data
    models = {
        "model.name": model.name,
        "model.tokenizer": model.tokenizer,
        **{f"objective.{key}": name for key, name in objective.other_models.items()},
        **{
            f"data.{kind}.processor": files.processor
            for kind, files in zip(data.media_kinds, data.media or (), strict=True)
        },
    }
    on_hub = {key: name for key, name in models.items() if name and is_hub_model(name)}
    sources = (*recipe.data.train, *recipe.data.own_eval_sources)
    if not on_hub and not any(is_hub_dataset(source.path) for source in sources):
        return
    problem = offline_without_hub()
    if problem is None:
        return
    from huggingface_hub import try_to_load_from_cache

    revisions = {"model.name": model.revision}
    absent: list[str] = []
    for key, name in on_hub.items():
        cached = (try_to_load_from_cache(name, file, revision=revisions.get(key)) for file in _FILES)
        if not any(isinstance(path, str) for path in cached):
            absent.append(f"{key}={name}")
    if absent:
        raise UserError(
            f"{problem}. {' and '.join(absent)} {'is' if len(absent) == 1 else 'are'} neither a folder nor in its "
            "cache here. `plan` and `check --recipe-only` need no network, and with HF_HUB_OFFLINE=1 this attempt is "
            "left out. Fix: without a network give folders and files, such as model.name=/folder; docs/reference/"
            "offline.md says how to fetch them before"
        )
    log.warning("%s; continuing with what is in its cache here, as with HF_HUB_OFFLINE=1", problem)


def is_hub_model(name: str) -> bool:
    """Returns whether the name of a model can only be an id of the hub."""
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith(".parquet")
    return not is_path and not Path(name).expanduser().exists()


def is_hub_dataset(path: str) -> bool:
    """Returns whether the path of a source can only be an id of the hub."""
    if is_url(path) or glob.has_magic(path) or Path(path).expanduser().exists():
        return False
    try:
        return not local_files(path)
    except UserError:  # a file that is not there, which opening the source says
        return False


def offline_without_hub() -> str | None:
    """Tries to reach the hub, unless libraries are offline already; returns why it cannot be reached, and then
    takes them offline: by the environment, and their shared session if it exists already."""
    if any(os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE") for name in _OFFLINE):
        return None
    address = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    if (reason := _failure(address)) is None:
        return None
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")  # read at import, also by processes that start later
    if "huggingface_hub" in sys.modules:
        from huggingface_hub import get_session

        get_session().event_hooks["request"].append(_refuse)
    return f"{without_credentials(address)} cannot be reached ({reason})"


@functools.cache  # one attempt for each process
def _failure(address: str) -> str | None:
    """Returns the reason if no server answers at an address, through the proxies of the environment."""
    limit_s = float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or 10)  # huggingface_hub's own
    try:
        with urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=limit_s):
            return None
    except (urllib.error.HTTPError, http.client.HTTPException, ssl.SSLError, ValueError):
        return None  # someone answered, or the address is wrong: the library says more
    except OSError as error:
        reason = getattr(error, "reason", error)
        return None if isinstance(reason, ssl.SSLError) else getattr(reason, "strerror", None) or str(reason)


def _refuse(request: object) -> NoReturn:
    """Raises what huggingface_hub raises for each request when it is offline."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    raise OfflineModeIsEnabled("offline, because the hub could not be reached")
