"""Reference log-probabilities on disk: dependencies, cache entry, and copy in the run's folder.

<cache>/data/<key>/               log_probs.npy (M,) float64, one per sequence; report.json, with its checksum
<run>/reference/<train|eval>/     the same two files: the run resumes without the cache
<run>/reference/<key>.npy         (2, M), an unfinished pass, see `Unfinished`
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from numpy.typing import NDArray
from transformers import PretrainedConfig

from finetune import __version__
from finetune.data.cache_entries import entries_folder, made_now, replacing
from finetune.data.checksums import Damaged, checksum, load_array, sealed, unsealed
from finetune.data.dataset import Dataset
from finetune.data.examples import Examples
from finetune.data.sources.files import file_digest
from finetune.errors import UserError
from finetune.models.base_config import dtypes
from finetune.recipe import Recipe
from finetune.utils import fsync

CODE_VERSION = 2  # raise it whenever log-probabilities of the same model, or an entry's layout, change
_WEIGHTS = ("config.json", "*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.py")

log = logging.getLogger(__name__)

Dependencies = dict[str, Any]  # by name; JSON


def model_dependencies(recipe: Recipe, config: PretrainedConfig) -> Dependencies:
    """Returns the dependencies of log-probabilities of `recipe.model`, except tokens. Adapters do not matter: they
    start without effect.

    The model is a digest of local weights, read the first time, the commit of hub weights, or the settings of random
    ones. Raises UserError if the weights cannot be read.
    """
    types, folder = dtypes(recipe), Path(str(recipe.model.name)).expanduser()
    if recipe.model.config is not None:
        model = {"config": recipe.model.config, "seed": recipe.run.seed}
    elif folder.is_dir():
        files = sorted({file for pattern in _WEIGHTS for file in folder.glob(pattern)})
        model = {file.name: file_digest(file) for file in files}
    else:
        # The commit that `revision` was when the config was read; transformers has it only under this name.
        model = {"hub": recipe.model.name, "commit": config._commit_hash or recipe.model.revision}
    return {
        "code": [CODE_VERSION, transformers.__version__],
        "model": model,
        "types": [
            str(types.trained if recipe.mode == "full" else types.frozen),
            str(types.compute),
            *(["fp8"] if recipe.train.precision == "fp8" else []),
        ],
        "quantization": recipe.quantization.model_dump() if recipe.quantization else None,
    }


def key_of(dependencies: Dependencies, data: Dataset) -> str:
    """Returns the sha256 of the model's dependencies, the data's rows and tokens, and image files' sizes and times."""
    everything = {**dependencies, "data": data.identity(), **media_states(data.examples)}
    return hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()


def media_states(examples: Examples) -> Dependencies:
    """Returns sizes and times of the examples' image files. Raises UserError if one cannot be read."""
    try:
        states = [(stat.st_size, stat.st_mtime_ns) for stat in map(os.stat, examples.media_files())]
    except OSError as error:
        raise UserError(
            f"{error.filename}: an image of the data cannot be read: {error.strerror}. Fix: restore the image, or "
            "remove its row"
        ) from None
    return {"images": states} if states else {}


# --- a complete file


def load(folder: Path, key: str, count: int) -> NDArray[np.float64] | None:
    """Returns the (count,) log-probabilities of this key; None if absent, or if damaged, which is logged."""
    try:
        report = unsealed(folder / "report.json")
        if report.get("key") != key:
            return None
        values = load_array(folder / "log_probs.npy", report["checksums"]["log_probs.npy"])
        with contextlib.suppress(OSError):  # a cache on read-only storage works too
            os.utime(folder / "report.json")  # last used
    except FileNotFoundError:
        return None
    except (Damaged, OSError) as damage:
        log.warning("%s: damaged on the disk (%s); it is not used", folder, damage)
        return None
    complete = values.dtype == np.float64 and values.shape == (count,) and bool(np.isfinite(values).all())
    return values if complete else None


def read_report(folder: Path) -> dict[str, Any]:
    """Returns the inputs of a folder's files; {} if absent or damaged."""
    with contextlib.suppress(OSError, Damaged):
        return unsealed(folder / "report.json")
    return {}


def save(folder: Path, values: NDArray[np.float64], report: dict[str, Any]) -> None:
    """Writes a folder that is complete or absent, replacing an existing one. Raises UserError."""
    try:
        with replacing(folder) as temporary:
            np.save(temporary / "log_probs.npy", values)
            checksums = {"log_probs.npy": checksum((temporary / "log_probs.npy").read_bytes())}
            (temporary / "report.json").write_text(sealed({**report, "checksums": checksums}), encoding="utf-8")
            for file in ("log_probs.npy", "report.json"):
                fsync(temporary / file)
    except OSError as error:
        raise UserError(
            f"{error.filename or folder}: reference log-probabilities cannot be written: {error.strerror or error}. "
            "Fix: free disk space or make the folder writable, and run the same command again"
        ) from None


def cache_folder(key: str) -> Path:
    return entries_folder() / key


def described(
    model: str | None, max_length: int, dependencies: Dependencies, data: Dataset, key: str, seconds: float
) -> dict[str, Any]:
    """Returns a report, with `of` and `made` as in token caches: `finetune cache list` shows both. model: its name."""
    return {
        "key": key,
        "dependencies": dependencies,
        "of": {
            "source": ", ".join(data.source_names),
            "format": "reference log-probabilities",
            "tokenizer": model or "a model from scratch",
            "max_length": max_length,
            "finetune": __version__,
        },
        "made": made_now(seconds),
        "report": {"examples": len(data.examples), "tokens": data.tokens},
    }


# --- unfinished passes


class Unfinished:
    """The log-probabilities of a running pass, on disk, so that a stopped one continues. For one process.

    Each is stored twice, and counts if both are equal: values damaged on disk are recomputed.
    """

    def __init__(self, file: Path, count: int):
        """count: number of sequences."""
        self._file, self._count = file, count

    def open(self) -> NDArray[np.bool_]:
        """Returns a mask of stored values; later ones are kept. Raises UserError if the file cannot be written."""
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._copies = self._opened()
        except OSError as error:
            raise UserError(
                f"{self._file}: cannot be written: {error.strerror or error}. Fix: free disk space or make the folder "
                "writable, and run the same command again"
            ) from None
        return np.isfinite(self._copies[0]) & (self._copies[0] == self._copies[1])

    def put(self, places: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        self._copies[:, places] = values

    def values(self) -> NDArray[np.float64]:
        return np.array(self._copies[0])

    def _opened(self) -> NDArray[np.float64]:
        shape = (2, self._count)
        with contextlib.suppress(OSError, ValueError, EOFError):
            copies = np.lib.format.open_memmap(self._file, "r+")
            if copies.dtype == np.float64 and copies.shape == shape and copies.flags.c_contiguous:
                return copies
        for left in self._file.parent.glob("*.npy"):  # files of other keys, no longer used
            left.unlink()
        temporary = self._file.with_suffix(".tmp.npy")  # a partial file must not look complete
        np.save(temporary, np.full(shape, np.nan))
        fsync(temporary)
        temporary.replace(self._file)
        return np.lib.format.open_memmap(self._file, "r+")

    def remove(self) -> None:
        self._file.unlink(missing_ok=True)
