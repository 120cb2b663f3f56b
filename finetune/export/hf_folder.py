"""`export --to hf`: the trained model as a plain Hugging Face folder, whole or absent, the same bytes every time.

Everything is written to OUT.partial and renamed at the end. Weight files there are complete under their own names, so
an export that was stopped continues after the last one, if it would write the same: `progress.json` says what of.

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
from transformers import GenerationConfig

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
_COPIED = ("*.py", "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
Say = Callable[[str], object]
MMPROJ = "which llama.cpp's `convert_hf_to_gguf.py FOLDER --mmproj` makes of the folder of `export --to hf`"


def export_folder(
    trained: Trained,
    out: Path,
    dtype: torch.dtype | None = None,
    base: str | None = None,
    say: Say = lambda text: None,
    shard_bytes: int = SHARD_BYTES,
    quantised: str | None = None,
) -> StreamedModel:
    """Write the trained model to `out`. Returns what was written, without values.

    quantised: int8 or fp8 (quantised.py).

    Raises UserError where there is something at `out` already or nothing can be made of this run, RunFailure where the
    disk is full: what was written until then is kept for the next try.
    """
    check_absent(out)
    model = StreamedModel(trained, dtype, base)
    written = QuantisedModel(model, quantised) if quantised else model
    about = {**describe(model), **({"quantised": quantised} if quantised else {})}
    with whole_or_absent(out, about, {"shard_bytes": shard_bytes}, _card(trained)) as partial:
        write_shards(
            *(partial, written.shapes, written.make, shard_bytes), lambda n, total: say(f"weights: file {n} of {total}")
        )
        write_settings(model, partial)
        if isinstance(written, QuantisedModel):
            config = json.loads((partial / "config.json").read_text(encoding="utf-8"))
            config["quantization_config"] = settings_of(written.kind, written.ignored)
            (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return model


def export_gguf(
    trained: Trained, out: Path, kind: str, base: str | None = None, say: Say = lambda text: None, ollama: bool = False
) -> StreamedModel:
    """Write OUT/<run>-<kind>.gguf with its card, and a Modelfile for Ollama; as `export_folder`."""
    from finetune.export.gguf_file import text_of, write_gguf
    from finetune.export.gguf_settings import context_length

    check_absent(out)
    model = StreamedModel(trained, None, base)
    about = {**describe(model), "dtype": kind}
    with whole_or_absent(out, about, {}, _card(trained)) as partial:
        file = partial / f"{about['run']}-{kind}.gguf"
        if not file.exists():
            say(f"writing {file.name}")
            write_gguf(model, file, kind)
            config = text_of(model).config
            if (window := context_length(config)) < config.max_position_embeddings:
                say(f"{file.name} is for texts of up to {window:,} tokens: llama.cpp has no window for such a model")
            if model.text_part is not None:
                say(f"{file.name} has the language model alone: pictures need a second file, {MMPROJ}")
        if ollama:
            (partial / "Modelfile").write_text(modelfile(trained, file.name), encoding="utf-8")
    return model


@contextlib.contextmanager
def whole_or_absent(out: Path, about: dict[str, Any], how: dict[str, Any], card: str) -> Iterator[Path]:
    """Yields the folder to write in, which becomes `out` with its description and card. Raises RunFailure.

    how: what else has to be the same for an export that was stopped to continue.
    """
    partial = partial_path(out)
    was_there = partial.exists()
    try:
        _start(partial, {**about, **how})
        yield partial
        (partial / METADATA).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        (partial / "README.md").write_text(card, encoding="utf-8")
        finish(partial, out)
    except UserError:  # refused again the next time: there is nothing to go on from
        if not was_there:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    except OSError as error:
        raise not_written(out, error) from error


def modelfile(trained: Trained, name: str) -> str:
    """Returns Ollama's description of a model: the file, which has the template, and where answers end."""
    tokenizer = read_tokenizer(trained.settings)
    ends = GenerationConfig.from_pretrained(trained.settings).eos_token_id
    texts = [tokenizer.convert_ids_to_tokens(end) for end in (ends if isinstance(ends, list) else [ends])]
    stops = "".join(f"PARAMETER stop {json.dumps(text)}\n" for text in texts)
    return f"FROM ./{name}\n{stops}"


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
        for path in (path for pattern in _COPIED for path in sorted(base.folder.glob(pattern))):
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
    for path in sorted(trained.settings.iterdir()):
        if path.name in _SETTINGS or path.suffix == ".jinja":
            shutil.copyfile(path, folder / path.name)
    if (templates := trained.settings / "additional_chat_templates").is_dir():
        shutil.copytree(templates, folder / templates.name, dirs_exist_ok=True)


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


def _card(trained: Trained) -> str:
    """Returns the card of the result, or one for a checkpoint."""
    if not trained.is_checkpoint and (trained.folder / "README.md").is_file():
        return (trained.folder / "README.md").read_text(encoding="utf-8")
    plan_file = trained.run_dir / "plan.json"
    if not (trained.is_checkpoint and trained.recipe is not None and plan_file.is_file()):
        return f"# {trained.folder.name}\n"
    plan = json.loads(plan_file.read_text(encoding="utf-8"))
    state = json.loads((trained.folder / "state.json").read_text(encoding="utf-8"))
    return model_card(trained.recipe, plan, state, None, state["metrics"])
