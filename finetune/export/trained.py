"""What a run has trained, read from its result or from one of its checkpoints: no cluster, no engine, one tensor at a
time.

A checkpoint has the trained parameters in full precision by their names in memory; a result has an adapter, or all
weights in the type they are used in.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from finetune.checkpoints.folder import best_checkpoint, find_problem, list_checkpoints, step_folder
from finetune.checkpoints.reading import Held, hold
from finetune.checkpoints.shards import WeightReader
from finetune.errors import UserError
from finetune.export.tensor_files import TensorFiles
from finetune.models.damage import ADAPTER_CONFIG, check_settings, check_weights, read_object
from finetune.recipe import Recipe, load_recipe
from finetune.utils import sha256_file

ADAPTER = "adapter_model.safetensors"


@dataclass(frozen=True)
class Trained:
    """Where trained weights are, and what they are of."""

    run_dir: Path
    recipe: Recipe | None  # None: a folder of an adapter or a model that no run is around
    folder: Path  # the checkpoint, the adapter or the model
    step: int | None  # of a checkpoint
    shapes: Mapping[str, Tensor]  # (device meta) by the name in the file
    read: Callable[[str], Tensor]
    averaged: tuple[Path, ...] = ()  # the checkpoints, where it is the mean of several; `folder` is the newest
    held: tuple[Held, ...] = ()  # keeps a run that is training from deleting the checkpoints

    @property
    def is_checkpoint(self) -> bool:
        return self.step is not None

    @property
    def is_adapter(self) -> bool:
        if self.step is None:
            return (self.folder / "adapter_config.json").is_file()
        return self.recipe is not None and self.recipe.mode != "full"

    @property
    def settings(self) -> Path:
        """Returns the folder with tokenizer and generation config."""
        if self.step is None:
            return self.folder
        for folder in (self.run_dir / "tokenizer", self.run_dir / "model"):
            if (folder / "tokenizer_config.json").is_file():
                return folder
        raise UserError(
            f"{self.run_dir}: no tokenizer/ and no model/ here, so the chat template of this run is not known: resume "
            "the run once, which writes tokenizer/ when it starts"
        )

    def key(self, name: str) -> str | None:
        """Returns the key of a parameter, by its name in peft's model or in transformers'; None if it has none here."""
        if self.is_checkpoint or not self.is_adapter:
            return name if name in self.shapes else None
        key = name.replace(".modules_to_save.default", "").replace("_vector.default.weight", "_vector")
        key = key.replace(".default", "")
        return key if key in self.shapes else None

    def identity(self) -> dict[str, Any]:
        """Returns what was exported, for the metadata."""
        if self.averaged:
            return {"mean of": {path.name: sha256_file(path / "manifest.json") for path in self.averaged}}
        if self.step is not None:
            return {"checkpoint": self.folder.name, "sha256": sha256_file(self.folder / "manifest.json")}
        if self.is_adapter:
            return {"adapter": ADAPTER, "sha256": sha256_file(self.folder / ADAPTER)}
        files = sorted(self.folder.glob("*.safetensors"))
        return {"model": {file.name: sha256_file(file) for file in files}}


def find_trained(run_dir: Path, step: str | None = None, average: int | None = None) -> Trained:
    """Returns a run's result, or the checkpoint of a step; step: a number, or best. Without a result, the newest
    checkpoint. average: the mean of so many checkpoints, that of `step` or the newest and those before it. Raises
    UserError where there is neither."""
    recipe_file = run_dir / "recipe.yaml"
    recipe = load_recipe(recipe_file) if recipe_file.is_file() else None
    settings = (folder / name for folder in (run_dir / "model", run_dir) for name in ("config.json", ADAPTER_CONFIG))
    result = next((file.parent for file in settings if file.is_file()), None)
    if step is None and average is None and result is not None:
        files = TensorFiles(sorted(check_model_folder(result).glob("*.safetensors")))
        shapes = {name: files.meta(name) for name in files.names()}
        return Trained(run_dir, recipe, result, None, shapes, files.read)
    for _ in range(_TRIES):
        checkpoints = list_checkpoints(run_dir / "checkpoints")
        if not checkpoints or recipe is None:
            what = "no checkpoint either" if step is None else "no checkpoint"
            raise UserError(
                f"{run_dir}: no result here (no model/config.json or model/adapter_config.json), and {what}; has the "
                "run saved anything? `checkpoint.every_steps` saves while it trains"
            )
        last = _chosen(run_dir, recipe, step) if step else checkpoints[0]
        folders = [path for path in checkpoints if path <= last][: average or 1]
        held = tuple(one for one in map(hold, folders) if one is not None)
        if len(held) == len(folders):
            parts = [_checkpoint(run_dir, recipe, folder) for folder in folders]
            trained = parts[0] if average is None else _mean(run_dir, recipe, parts, average)
            return replace(trained, held=held)
    raise UserError(
        f"{run_dir}: the run that trains here deletes its checkpoints as fast as they are found: raise "
        "`checkpoint.keep`, or wait for its end"
    )


_TRIES = 20  # to find checkpoints that are not deleted in the same moment


def check_model_folder(folder: Path) -> Path:
    """Returns the folder of a model or an adapter. Raises UserError where its files are not what their names say."""
    for name, key in (("config.json", "model_type"), ("adapter_config.json", "base_model_name_or_path")):
        if not (file := folder / name).is_file():
            continue
        if not isinstance(read_object(file).get(key), str):
            raise UserError(f"{file}: not the settings of a model (no `{key}`): is this a folder of another program?")
    check_settings(folder)
    check_weights(folder)
    for kind, patterns in (("weights", ("*.safetensors",)), ("tokenizer", ("tokenizer*", "vocab*"))):
        if not any(path for pattern in patterns for path in folder.glob(pattern)):
            raise UserError(f"{folder}: no {kind} here ({', '.join(patterns)}), so this is no whole model")
    return folder


def _checkpoint(run_dir: Path, recipe: Recipe, folder: Path) -> Trained:
    if problem := find_problem(folder, read=False):
        raise UserError(f"{folder} cannot be trusted: {problem}")
    reader = WeightReader(sorted(folder.glob("rank-*.safetensors")))
    step = json.loads((folder / "state.json").read_text(encoding="utf-8"))["step"]
    return Trained(run_dir, recipe, folder, step, reader.shapes, reader.read)


def _mean(run_dir: Path, recipe: Recipe, parts: list[Trained], count: int) -> Trained:
    """Returns the mean of the weights of checkpoints, newest first. Raises UserError where there are fewer."""
    if recipe.mode != "full":
        raise UserError(
            f"--average-checkpoints: {run_dir} trains adapters, and the product of two means is not the mean of the "
            "products: average a run of `mode: full`"
        )
    if len(parts) < count:
        raise UserError(
            f"--average-checkpoints {count}: {run_dir} has {len(parts)} checkpoints up to there; `checkpoint.keep` "
            "says how many a run keeps"
        )

    def read(name: str) -> Tensor:
        total = parts[0].read(name).float()
        for part in parts[1:]:
            total += part.read(name)
        return total / len(parts)

    return replace(parts[0], read=read, averaged=tuple(part.folder for part in parts))


def _chosen(run_dir: Path, recipe: Recipe, step: str) -> Path:
    root = run_dir / "checkpoints"
    present = ", ".join(str(int(path.name.removeprefix("step-"))) for path in list_checkpoints(root))
    if step == "best":
        folder = best_checkpoint(root, recipe.checkpoint.best)
        if folder is None:
            raise UserError(
                f"--step best: no checkpoint of {run_dir} was measured by checkpoint.best "
                f"({recipe.checkpoint.best or 'the recipe sets none'}); give one of the steps {present}"
            )
        return folder
    if not step.isdecimal():
        raise UserError(f"--step {step}: expected a number or `best`; there are the steps {present}")
    if not (folder := step_folder(root, int(step))).is_dir():
        raise UserError(f"--step {step}: {root} has no such checkpoint; there are the steps {present}")
    return folder
