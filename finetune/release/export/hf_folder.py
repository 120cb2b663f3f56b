"""`export --to hf`: the trained model as a plain Hugging Face folder, whole or absent, the same bytes every time.

Everything is written to OUT.partial, compared with the run there, and renamed at the end: OUT is complete and has
passed, or does not exist. Weight files in OUT.partial are complete under their own names, so an export that was stopped
continues after the last one, if `progress.json` says that it would write the same. An export that does not pass is kept
as OUT.failed.

    model*.safetensors, config.json, generation_config.json, tokenizer files, README.md
    export.json     what was exported: base with its revision, hash of adapter or checkpoint, versions
    verify.json     how it compares with the run (verify.py)
"""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch

from finetune.checkpoints.card_metadata import with_metadata
from finetune.checkpoints.model_card import model_card
from finetune.checkpoints.result import partial_path, write_config
from finetune.checkpoints.trained import Trained
from finetune.checkpoints.weight_files import SHARD_BYTES, write_shards
from finetune.errors import RunFailure, UserError
from finetune.models.base_model import Base, processor_settings
from finetune.models.checkpoint_files import kept_words
from finetune.models.damage import read_object
from finetune.models.mtp_files import undeclare_head
from finetune.models.tokenizer import read_tokenizer
from finetune.release.export.eight_bits import QuantizedModel, settings_of
from finetune.release.export.stored_base import RepackedModel
from finetune.release.export.streamed import StreamedModel
from finetune.utils import fsync, write_atomically

PROGRESS = "progress.json"
METADATA = "export.json"
_PACKAGES = ("torch", "transformers", "peft", "safetensors")
# Files of the base that are copied: code, and the settings by which images and audio are processed.
COPIED = ("*.py", "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
_SETTINGS = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
_SETTINGS += ("added_tokens.json", "tokenizer.model", "vocab.json", "merges.txt")
Say = Callable[[str], object]
Check = Callable[[Path], object]


def export_folder(
    trained: Trained,
    out: Path,
    dtype: torch.dtype | None = None,
    base: str | None = None,
    say: Say = lambda text: None,
    shard_bytes: int = SHARD_BYTES,
    quantized: str | None = None,
    check: Check = lambda folder: None,
    as_base: bool = False,
) -> None:
    """Write the trained model to `out`.

    quantized: int8 or fp8 (eight_bits.py); as_base: in the format of its base (stored_base.py); check: compares the
    folder with the run before it gets its name.

    Raises UserError if `out` exists already or this run cannot be exported, RunFailure if the disk is full (the written
    files are kept for the next try) or if `check` does.
    """
    check_absent(out)
    model = StreamedModel(trained, dtype, base, is_exact=as_base)
    if model.kept:
        say(kept_words(model.kept, model.model.config))
    written = QuantizedModel(model, quantized) if quantized else RepackedModel(model) if as_base else model
    kind = written.form.name if isinstance(written, RepackedModel) else quantized
    about = {**describe(model), **({"quantised": kind} if kind else {})}
    with whole_or_absent(out, about, {"shard_bytes": shard_bytes}, export_card(trained, "finetune"), check) as partial:
        write_shards(
            *(partial, written.shapes, written.make, shard_bytes), lambda n, total: say(f"weights: file {n} of {total}")
        )
        write_settings(model, partial, as_base)
        if isinstance(written, QuantizedModel):
            config = read_object(partial / "config.json")
            config["quantization_config"] = settings_of(written.kind, written.ignored)
            (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


@contextlib.contextmanager
def whole_or_absent(
    out: Path, about: dict[str, Any], how: dict[str, Any], card: str, check: Check = lambda folder: None
) -> Iterator[Path]:
    """Yields the folder to write in, which becomes `out` with its description and card once it has passed `check`.

    how: settings that also have to be the same for a stopped export to continue. Raises RunFailure if the disk fails,
    or if `check` does: the folder is then kept as OUT.failed.
    """
    partial, progress = partial_path(out), partial_path(out) / PROGRESS
    was_there = partial.exists()
    try:
        settings = json.dumps({**about, **how}, indent=1) + "\n"
        if was_there and not (progress.is_file() and progress.read_text(encoding="utf-8") == settings):
            shutil.rmtree(partial)  # of another export
        partial.mkdir(parents=True, exist_ok=True)
        for left in partial.iterdir():  # only complete weights are kept of an export that was stopped
            if left.is_dir():
                shutil.rmtree(left)
            elif left.suffix not in (".safetensors", ".gguf"):
                left.unlink()
        write_atomically(progress, settings)
        yield partial
        (partial / METADATA).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        (partial / "README.md").write_text(card, encoding="utf-8")
    except UserError:  # it would be refused the next time, too: there is nothing to continue from
        if not was_there:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    except OSError as error:
        raise _not_written(out, error) from error
    try:
        check(partial)
    except RunFailure as failure:
        kept = out.with_name(f"{out.name}.failed")
        shutil.rmtree(kept, ignore_errors=True)
        progress.unlink(missing_ok=True)
        partial.rename(kept)
        text = str(failure).replace(str(partial), str(out))
        raise RunFailure(f"{text}; this one is kept as {kept}, for inspection") from None
    try:
        progress.unlink(missing_ok=True)
        for path in (*partial.rglob("*"), partial):
            fsync(path)
        partial.rename(out)
        fsync(out.resolve().parent)
    except OSError as error:
        raise _not_written(out, error) from error


def check_absent(out: Path) -> None:
    if out.exists():
        raise UserError(f"{out} exists already. Fix: remove it, or choose another --out")


def _not_written(out: Path, error: OSError) -> RunFailure:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return RunFailure(
        f"{out} could not be written: {error}. {partial_path(out)} has the files until then. Fix: "
        f"{'free space' if full else 'remove the cause'} and run the same command again, which continues from there"
    )


def describe(model: StreamedModel) -> dict[str, Any]:
    """Returns the contents of an export; equal for equal exports, as it has no times and places."""
    trained = model.trained
    return {
        "run": trained.recipe.run.name if trained.recipe else trained.folder.name,
        "step": trained.step,
        "averaged": len(trained.averaged) or None,
        "trained": trained.identity(),
        "base": model.base.identity() if model.base else None,
        "dtype": str(model.result_dtype).removeprefix("torch."),
        "head_untied": model.unties,
        "versions": {name: metadata.version(name) for name in _PACKAGES},
    }


def write_settings(model: StreamedModel, folder: Path, as_base: bool = False) -> None:
    """Write config, generation config and tokenizer. as_base: weights are in the format of the base."""
    trained, base, recipe = model.trained, model.base, model.trained.recipe
    sees_images = recipe is not None and recipe.model.train is not None
    if base is not None and (trained.is_adapter or model.part or sees_images) and not model.is_scoring:
        # The base's own, with the changes of training: rows of the vocabulary, a head that is no longer tied.
        config = read_object(base.folder / "config.json")
        if sees_images and "thinker_config" in config:  # a model that also talks
            config = config["thinker_config"] | {"architectures": [type(model.model).__name__]}
        if not as_base:
            config.pop("quantization_config", None)
        for part in (one for one in (config, config.get("text_config")) if isinstance(one, dict)):
            if model.unties and ("tie_word_embeddings" in part or part is config):
                part["tie_word_embeddings"] = False
            if model.added_rows is not None and "vocab_size" in part:
                part["vocab_size"] = model.added_rows
            for key in {"dtype", "torch_dtype"} & part.keys():
                part[key] = str(model.result_dtype).removeprefix("torch.")
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for path in (path for pattern in COPIED for path in sorted(base.folder.glob(pattern))):
            shutil.copyfile(path, folder / path.name)
        if sees_images:
            assert recipe is not None
            own = recipe.model.model_copy(update={"name": str(base.folder), "revision": None})
            for name, content in processor_settings(Base(own, image=recipe.data.media)).items():
                (folder / name).write_bytes(content)
    else:
        text = model.model.config.get_text_config()
        if model.is_scoring:  # transformers scores the last token that is no padding
            text.pad_token_id = read_tokenizer(trained.settings).pad_token_id
        if model.added_rows is not None:
            text.vocab_size = model.added_rows
        write_config(model.model, model.result_dtype, folder)
    if model.about.mtp == "drop":
        undeclare_head(folder, model.model.config)
    for name, path in settings_files(trained.settings).items():
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(path, folder / name)


def settings_files(folder: Path) -> dict[str, Path]:
    """Returns the files of a tokenizer, its templates and the generation config, by their paths in a folder."""
    own = [path for path in sorted(folder.iterdir()) if path.name in _SETTINGS or path.suffix == ".jinja"]
    own += sorted(path for path in folder.glob("additional_chat_templates/*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path for path in own}


def export_card(trained: Trained, relation: Literal["finetune", "quantized"]) -> str:
    """Returns the card of an export, which is a whole model: the result's, or one for a checkpoint."""
    card = _card_of(trained)
    whole = {"library_name": "transformers"}
    return with_metadata(card, whole | ({"base_model_relation": relation} if "\nbase_model: " in card else {}))


def _card_of(trained: Trained) -> str:
    if not trained.is_checkpoint and (trained.folder / "README.md").is_file():
        return (trained.folder / "README.md").read_text(encoding="utf-8")
    plan_file = trained.run_dir / "plan.json"
    if not (trained.is_checkpoint and trained.recipe is not None and plan_file.is_file()):
        return f"# {trained.folder.name}\n"
    plan = json.loads(plan_file.read_text(encoding="utf-8"))
    state = json.loads((trained.folder / "state.json").read_text(encoding="utf-8"))
    return model_card(trained.recipe, plan, state, None, state["metrics"])
