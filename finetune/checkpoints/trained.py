"""The trained weights of a run, read from its result or from one of its checkpoints: no cluster, no engine, one tensor
at a time.

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

from finetune.checkpoints.folder import best_checkpoint, find_problem, list_checkpoints, step_folder, step_of
from finetune.checkpoints.reading import Held, hold
from finetune.checkpoints.shards import WeightReader
from finetune.checkpoints.weight_files import TensorFiles
from finetune.errors import UserError
from finetune.models.damage import ADAPTER_CONFIG, check_settings, check_weights, read_object
from finetune.recipe import Recipe, load_recipe
from finetune.utils import sha256_file

ADAPTER = "adapter_model.safetensors"
LABELS = "labels.json"  # of an adapter, whose base has none; a `config.json` would make the folder a full model
_TRIES = 20  # to hold checkpoints that are not deleted in the same moment


@dataclass(frozen=True)
class Trained:
    """Trained weights in files, and their run."""

    run_dir: Path
    recipe: Recipe | None  # None: a folder of an adapter or a model without its run
    folder: Path  # the checkpoint, the adapter or the model
    step: int | None  # of a checkpoint
    shapes: Mapping[str, Tensor]  # (device meta) by the name in the file
    read: Callable[[str], Tensor]
    averaged: tuple[Path, ...] = ()  # the checkpoints, if it is the mean of several; `folder` is the newest
    held: tuple[Held, ...] = ()  # keeps a run that is training from deleting the checkpoints

    @property
    def is_checkpoint(self) -> bool:
        return self.step is not None

    @property
    def is_adapter(self) -> bool:
        if self.step is None:
            return (self.folder / ADAPTER_CONFIG).is_file()
        return self.recipe is not None and self.recipe.mode != "full"

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels of a head of scores; () for a model that generates."""
        if self.is_adapter and not self.is_checkpoint:
            return read_labels(self.folder) if is_scoring(self.folder) else ()
        assert self.recipe is not None
        return self.recipe.objective.score_labels

    @property
    def settings(self) -> Path:
        """The folder with tokenizer and generation config."""
        if self.step is None:
            return self.folder
        for folder in (self.run_dir / "tokenizer", self.run_dir / "model"):
            if (folder / "tokenizer_config.json").is_file():
                return folder
        raise UserError(
            f"{self.run_dir}: no tokenizer/ and no model/ here. The chat template of this run is not known. Fix: "
            "resume the run once, which writes tokenizer/ when it starts"
        )

    def key(self, name: str) -> str | None:
        """Returns the key of a parameter, by its name in peft's model or in transformers'; None if it has none here."""
        if not self.is_checkpoint and self.is_adapter:
            name = name.replace(".modules_to_save.default", "").replace("_vector.default.weight", "_vector")
            name = name.replace(".default", "")
        return name if name in self.shapes else None

    def identity(self) -> dict[str, Any]:
        """Returns hashes of the files, for the metadata of an export."""
        if self.averaged:
            return {"mean of": {path.name: sha256_file(path / "manifest.json") for path in self.averaged}}
        if self.step is not None:
            return {"checkpoint": self.folder.name, "sha256": sha256_file(self.folder / "manifest.json")}
        if self.is_adapter:
            return {"adapter": ADAPTER, "sha256": sha256_file(self.folder / ADAPTER)}
        return {"model": {file.name: sha256_file(file) for file in sorted(self.folder.glob("*.safetensors"))}}


def find_trained(run_dir: Path, step: str | None = None, average: int | None = None) -> Trained:
    """Returns a run's result, or a checkpoint: the newest one if there is no result.

    step: a number, or best; average: the mean of that many checkpoints, of `step` or the newest one and those before.
    Raises UserError if there is none.
    """
    recipe_file = run_dir / "recipe.yaml"
    recipe = load_recipe(recipe_file) if recipe_file.is_file() else None
    settings = (folder / name for folder in (run_dir / "model", run_dir) for name in ("config.json", ADAPTER_CONFIG))
    result = next((file.parent for file in settings if file.is_file()), None)
    if step is None and average is None and result is not None:
        files = TensorFiles(sorted(check_model_folder(result).glob("*.safetensors")))
        return Trained(run_dir, recipe, result, None, {name: files.meta(name) for name in files.names()}, files.read)
    for _ in range(_TRIES):
        checkpoints = list_checkpoints(run_dir / "checkpoints")
        if not checkpoints or recipe is None:
            what = "no checkpoint either" if step is None else "no checkpoint"
            raise UserError(
                f"{run_dir}: no result here (no model/config.json or model/adapter_config.json), and {what}. Fix: let "
                "the run save first; `checkpoint.every_steps` saves while it trains"
            )
        last = _chosen(run_dir, recipe.checkpoint.best, step) if step else checkpoints[0]
        folders = [path for path in checkpoints if path <= last][: average or 1]
        held = tuple(one for one in map(hold, folders) if one is not None)
        if len(held) < len(folders):
            continue
        parts: list[Trained] = []
        for folder in folders:
            if problem := find_problem(folder, read=False):
                raise UserError(
                    f"{folder} cannot be trusted: {problem}. Fix: restore its files, or choose another checkpoint"
                )
            reader = WeightReader(sorted(folder.glob("rank-*.safetensors")))
            number = json.loads((folder / "state.json").read_text(encoding="utf-8"))["step"]
            parts.append(Trained(run_dir, recipe, folder, number, reader.shapes, reader.read, held=held))
        return parts[0] if average is None else _mean(parts, average)
    raise UserError(
        f"{run_dir}: its checkpoints are deleted as fast as they are found. The run that trains here deletes them. "
        "Fix: raise `checkpoint.keep`, or wait for its end"
    )


def _mean(parts: list[Trained], count: int) -> Trained:
    """Returns the mean of the weights of checkpoints, newest first. Raises UserError if there are too few."""
    newest = parts[0]
    if newest.is_adapter:
        raise UserError(
            f"--average-checkpoints: {newest.run_dir} trains adapters. The product of two means is not the mean of the "
            "products. Fix: average a run of `mode: full`"
        )
    if len(parts) < count:
        raise UserError(
            f"--average-checkpoints {count}: {newest.run_dir} has {len(parts)} checkpoints up to there. Fix: average "
            "no more than these; `checkpoint.keep` says how many a run keeps"
        )

    def read(name: str) -> Tensor:
        total = newest.read(name).float()
        for part in parts[1:]:
            total += part.read(name)
        return total / len(parts)

    return replace(newest, read=read, averaged=tuple(part.folder for part in parts))


def _chosen(run_dir: Path, best: str | None, step: str) -> Path:
    root = run_dir / "checkpoints"
    present = ", ".join(str(step_of(path)) for path in list_checkpoints(root))
    if step == "best":
        if (folder := best_checkpoint(root, best)) is not None:
            return folder
        raise UserError(
            f"--step best: no checkpoint of {run_dir} was measured by checkpoint.best "
            f"({best or 'the recipe sets none'}). Fix: give one of the steps {present}"
        )
    if not step.isdecimal():
        raise UserError(f"--step {step}: expected a number or `best`. Fix: give one of the steps {present}")
    if not (folder := step_folder(root, int(step))).is_dir():
        raise UserError(f"--step {step}: {root} has no such checkpoint. Fix: give one of the steps {present}")
    return folder


def check_model_folder(folder: Path) -> Path:
    """Returns the folder of a model or an adapter. Raises UserError if its files do not have the expected contents."""
    for name, key in (("config.json", "model_type"), (ADAPTER_CONFIG, "base_model_name_or_path")):
        if (file := folder / name).is_file() and not isinstance(read_object(file).get(key), str):
            raise UserError(
                f"{file}: not the settings of a model (no `{key}`). Fix: give the folder of a model, and not of "
                "another program"
            )
    check_settings(folder)
    check_weights(folder)
    for kind, patterns in (("weights", ("*.safetensors",)), ("tokenizer", ("tokenizer*", "vocab*"))):
        if not any(path for pattern in patterns for path in folder.glob(pattern)):
            raise UserError(
                f"{folder}: no {kind} here ({', '.join(patterns)}), so this is no whole model. Fix: complete the "
                "folder, or give another"
            )
    return folder


def is_scoring(folder: Path) -> bool:
    """Returns whether a result, an adapter or a full model, has a head of scores."""
    if (folder / ADAPTER_CONFIG).is_file():
        return read_object(folder / ADAPTER_CONFIG).get("task_type") == "SEQ_CLS"
    config = read_object(folder / "config.json")
    return any("ForSequenceClassification" in name for name in config.get("architectures") or ())


def read_labels(adapter: Path) -> tuple[str, ...]:
    """Returns the labels of an adapter's scores. Raises UserError if there are none."""
    try:
        return tuple(json.loads((adapter / LABELS).read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise UserError(
            f"{adapter}: an adapter of a sequence classification model without {LABELS}. Fix: copy this file from the "
            "run that trained it"
        ) from None
