"""`export --to hf`: the trained model as a plain Hugging Face folder, whole or absent, the same bytes every time.

Everything is written to OUT.partial, compared with the run there, and renamed at the end: OUT is complete and has
passed, or is not there. Weight files in OUT.partial are complete under their own names, so an export that was stopped
continues after the last one, if it would write the same: `progress.json` says what of. An export that does not pass is
kept as OUT.failed.

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
from typing import Any

import torch

from finetune.errors import RunFailure, UserError
from finetune.export.quantised import QuantisedModel, settings_of
from finetune.export.result import model_card, partial_path, write_config
from finetune.export.streamed import StreamedModel
from finetune.export.tensor_files import write_shards
from finetune.export.trained import Trained
from finetune.export.weight_files import SHARD_BYTES
from finetune.models.tokenizer import read_tokenizer
from finetune.models.vision import processor_settings
from finetune.utils import fsync, write_atomically

PROGRESS = "progress.json"
METADATA = "export.json"
_PACKAGES = ("torch", "transformers", "peft", "safetensors")
# Of the base, in addition to weights and what the tokenizer writes: code, and what images and audio go through.
COPIED = ("*.py", "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
Say = Callable[[str], object]
Check = Callable[[Path], object]


def export_folder(
    trained: Trained,
    out: Path,
    dtype: torch.dtype | None = None,
    base: str | None = None,
    say: Say = lambda text: None,
    shard_bytes: int = SHARD_BYTES,
    quantised: str | None = None,
    check: Check = lambda folder: None,
) -> StreamedModel:
    """Write the trained model to `out`. Returns what was written, without values.

    quantised: int8 or fp8 (quantised.py); check: compares the folder with the run before it gets its name.

    Raises UserError if there is something at `out` already or nothing can be made of this run, RunFailure if the disk
    is full (what was written until then is kept for the next try) or if `check` does.
    """
    check_absent(out)
    model = StreamedModel(trained, dtype, base)
    written = QuantisedModel(model, quantised) if quantised else model
    about = {**describe(model), **({"quantised": quantised} if quantised else {})}
    with whole_or_absent(out, about, {"shard_bytes": shard_bytes}, card_of(trained), check) as partial:
        write_shards(
            *(partial, written.shapes, written.make, shard_bytes), lambda n, total: say(f"weights: file {n} of {total}")
        )
        write_settings(model, partial)
        if isinstance(written, QuantisedModel):
            config = json.loads((partial / "config.json").read_text(encoding="utf-8"))
            config["quantization_config"] = settings_of(written.kind, written.ignored)
            (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return model


@contextlib.contextmanager
def whole_or_absent(
    out: Path, about: dict[str, Any], how: dict[str, Any], card: str, check: Check = lambda folder: None
) -> Iterator[Path]:
    """Yields the folder to write in, which becomes `out` with its description and card, once it has passed `check`.

    how: what else has to be the same for an export that was stopped to continue. Raises RunFailure if the disk fails,
    or if `check` does: the folder is then kept as OUT.failed.
    """
    partial = partial_path(out)
    was_there = partial.exists()
    try:
        _start(partial, {**about, **how})
        yield partial
        (partial / METADATA).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        (partial / "README.md").write_text(card, encoding="utf-8")
    except UserError:  # refused again the next time: there is nothing to go on from
        if not was_there:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    except OSError as error:
        raise not_written(out, error) from error
    _check(partial, out, check)
    try:
        finish(partial, out)
    except OSError as error:
        raise not_written(out, error) from error


def _check(partial: Path, out: Path, check: Check) -> None:
    """Raises RunFailure for an export that does not pass: it is kept under another name."""
    try:
        check(partial)
    except RunFailure as failure:
        kept = out.with_name(f"{out.name}.failed")
        shutil.rmtree(kept, ignore_errors=True)
        (partial / PROGRESS).unlink(missing_ok=True)
        partial.rename(kept)
        raise RunFailure(
            f"{str(failure).replace(str(partial), str(out))}\nit is kept as {kept}, for inspection"
        ) from None


def check_absent(out: Path) -> None:
    if out.exists():
        raise UserError(f"{out} exists already: remove it, or choose another --out")


def not_written(out: Path, error: OSError) -> RunFailure:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return RunFailure(
        f"{out} could not be written: {error}; {partial_path(out)} has what was. "
        f"{'Free space' if full else 'Fix this'} and run the same command again, which continues from there"
    )


def _start(partial: Path, about: dict[str, Any]) -> None:
    """Keep the files of a stopped export of the same; remove those of any other."""
    progress = partial / PROGRESS
    text = json.dumps(about, indent=1) + "\n"
    if partial.exists() and not (progress.is_file() and progress.read_text(encoding="utf-8") == text):
        shutil.rmtree(partial)
    partial.mkdir(parents=True, exist_ok=True)
    for left in partial.iterdir():  # complete weights alone are kept of one that was killed
        if left.is_dir():
            shutil.rmtree(left)
        elif left.suffix not in (".safetensors", ".gguf"):
            left.unlink()
    write_atomically(progress, text)


def finish(partial: Path, out: Path) -> None:
    (partial / PROGRESS).unlink(missing_ok=True)
    for path in (*partial.rglob("*"), partial):
        fsync(path)
    partial.rename(out)
    fsync(out.resolve().parent)


def describe(model: StreamedModel) -> dict[str, Any]:
    """Returns what an export is of; the same for the same, without times and places."""
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


def write_settings(model: StreamedModel, folder: Path) -> None:
    """Write config, generation config and tokenizer."""
    trained, base = model.trained, model.base
    sees_images = trained.recipe is not None and trained.recipe.model.train is not None
    multimodal = model.part is not None or sees_images
    copied = base is not None and (trained.is_adapter or multimodal) and not model.is_scoring
    if copied:
        assert base is not None
        config = json.loads((base.folder / "config.json").read_text(encoding="utf-8"))
        (folder / "config.json").write_text(json.dumps(_changed(config, model), indent=2) + "\n", encoding="utf-8")
        for path in (path for pattern in COPIED for path in sorted(base.folder.glob(pattern))):
            shutil.copyfile(path, folder / path.name)
        if sees_images:
            assert trained.recipe is not None
            own = trained.recipe.model.model_copy(update={"name": str(base.folder), "revision": None})
            for name, content in processor_settings(own, trained.recipe.data.image).items():
                (folder / name).write_bytes(content)
    else:
        if model.is_scoring:  # transformers scores the last token that is no padding
            tokenizer = read_tokenizer(trained.settings)
            model.model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
        if (rows := model.added_rows) is not None:
            model.model.config.get_text_config().vocab_size = rows
        write_config(model.model, model.result_dtype, folder)
    for path in settings_files(trained.settings):
        target = folder / path.relative_to(trained.settings)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target)


def settings_files(folder: Path) -> list[Path]:
    """Returns the files of a tokenizer, its templates and the generation config."""
    own = [path for path in sorted(folder.iterdir()) if path.name in _SETTINGS or path.suffix == ".jinja"]
    return [*own, *sorted(path for path in folder.glob("additional_chat_templates/*") if path.is_file())]


_SETTINGS = {
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
}


def _changed(config: dict[str, Any], model: StreamedModel) -> dict[str, Any]:
    """Returns the base's config with what training changed: rows of the vocabulary, a head that is tied no more."""
    sections = [part for part in (config, config.get("text_config")) if isinstance(part, dict)]
    for part in sections:
        if model.unties and ("tie_word_embeddings" in part or part is config):
            part["tie_word_embeddings"] = False
        if (rows := model.added_rows) is not None and "vocab_size" in part:
            part["vocab_size"] = rows
        for key in ("dtype", "torch_dtype"):
            if key in part:
                part[key] = str(model.result_dtype).removeprefix("torch.")
    return config


def card_of(trained: Trained) -> str:
    """Returns the card of the result, or one for a checkpoint."""
    if not trained.is_checkpoint and (trained.folder / "README.md").is_file():
        return (trained.folder / "README.md").read_text(encoding="utf-8")
    plan_file = trained.run_dir / "plan.json"
    if not (trained.is_checkpoint and trained.recipe is not None and plan_file.is_file()):
        return f"# {trained.folder.name}\n"
    plan = json.loads(plan_file.read_text(encoding="utf-8"))
    state = json.loads((trained.folder / "state.json").read_text(encoding="utf-8"))
    return model_card(trained.recipe, plan, state, None, state["metrics"])
