"""`export --to gguf` and `--to ollama`: which way a file is written, and what its folder has.

    architecture and tokenizer are written here, type f32, bf16, f16, q8_0    gguf_file.py
    the same, another type                                                    gguf_file.py, then llama-quantize
    other architectures and tokenizers                                        the folder of `--to hf`, llama.cpp's
                                                                              converter, then llama-quantize

What the way needs is looked up before anything is written. Whoever wrote the file, the gate reads it (verify.py).
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from transformers import GenerationConfig

from finetune.checkpoints.trained import Trained
from finetune.checkpoints.weight_files import SHARD_BYTES, write_shards
from finetune.errors import UserError
from finetune.models.checkpoint_files import tensors_text
from finetune.models.damage import read_object
from finetune.models.tokenizer import read_tokenizer
from finetune.release.export.gguf_file import text_of, write_gguf
from finetune.release.export.gguf_settings import NotWritten, check_architecture, context_length, is_written, package
from finetune.release.export.gguf_tokenizer import add_tokenizer
from finetune.release.export.hf_folder import (
    Check,
    Say,
    check_absent,
    describe,
    export_card,
    whole_or_absent,
    write_settings,
)
from finetune.release.export.llama_cpp import INSTALL, Tools, check_converts, convert, importance_matrix, quantize
from finetune.release.export.streamed import StreamedModel
from finetune.release.export.verify_answers import training_texts
from finetune.release.export.weight_types import GGUF_TYPES, LLAMA_TYPES

MMPROJ = "which llama.cpp's `convert_hf_to_gguf.py FOLDER --mmproj` makes of the folder of `export --to hf`"
_WORK = "llama.cpp"  # the folder of what only llama.cpp's tools read
_CONTEXT = 512  # tokens of a text that importance matrices are made of, as llama-imatrix has it
_FLOATS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


@dataclass(frozen=True)
class Way:
    """How a file is written. converter: of llama.cpp, None: here; quantizer, reader: its tools, of types and of
    importance matrices, None: not needed."""

    converter: list[str] | None = None
    quantizer: Path | None = None
    reader: Path | None = None


def why_not_here(model: StreamedModel) -> NotWritten | None:
    """Returns why a model or its tokenizer is not written here; None if it is. Raises UserError for what llama.cpp
    does not compute either."""
    gguf, config = package(), text_of(model).config
    try:
        check_architecture(config, model.is_scoring)
        rows = len(read_tokenizer(model.trained.settings))
        add_tokenizer(gguf.GGUFWriter(None, "llama"), gguf, model.trained.settings, rows)
    except NotWritten as reason:
        return reason
    return None


def find_way(model: StreamedModel, kind: str, tools: Tools) -> Way:
    """Returns how a file is written. Raises UserError if what that needs is not here."""
    converter = quantizer = reader = None
    if (reason := why_not_here(model)) is not None:
        if (converter := tools.converter()) is None:
            raise UserError(f"{reason}. Fix: {INSTALL}; its convert_hf_to_gguf.py is used then")
        check_converts(converter, _architecture(model))
    if kind in LLAMA_TYPES:
        quantizer = tools.needed("llama-quantize", f"--dtype {kind}")
    if tools.imatrix is not None:
        reader = tools.needed("llama-imatrix", "--imatrix")
    tools.place()
    return Way(converter, quantizer, reader)


def _architecture(model: StreamedModel) -> str:
    """Returns the class that config.json of the exported folder names."""
    if model.base is not None:
        named = read_object(model.base.folder / "config.json").get("architectures")
        if named:
            return str(named[0])
    return type(model.model).__name__


def export_gguf(
    trained: Trained,
    out: Path,
    kind: str,
    base: str | None = None,
    say: Say = lambda text: None,
    ollama: bool = False,
    check: Check = lambda folder: None,
    tools: Tools = Tools(),  # noqa: B008 it is frozen
) -> None:
    """Write OUT/<run>-<kind>.gguf with its card, and a Modelfile for Ollama; as `export_folder`."""
    check_absent(out)
    model = StreamedModel(trained, None, base)
    way = find_way(model, kind, tools)
    about = {**describe(model), "dtype": kind}
    how = {"files": ["Modelfile"]} if ollama else {}
    with whole_or_absent(out, about, how, export_card(trained, "quantized"), check) as partial:
        file = partial / f"{about['run']}-{kind}.gguf"
        if not file.exists():
            say(f"writing {file.name}")
            _write(model, file, kind, way, tools.imatrix, say)
            _say_limits(model, file, way, say)
        if ollama:
            (partial / "Modelfile").write_text(modelfile(trained, file.name), encoding="utf-8")


def _write(model: StreamedModel, file: Path, kind: str, way: Way, rows: int | None, say: Say) -> None:
    """Write a file whole or not at all. rows: of training, for an importance matrix."""
    if way.converter is None and way.quantizer is None:
        write_gguf(model, file, kind)
        return
    work = file.parent / _WORK
    work.mkdir(exist_ok=True)
    plain = kind if kind in GGUF_TYPES else _FLOATS[str(model.result_dtype).removeprefix("torch.")]
    source = work / f"{plain}.gguf"
    if way.converter is None:
        write_gguf(model, source, plain)
    else:
        say("llama.cpp's converter writes it")
        folder = work / "hf"
        folder.mkdir()
        _write_folder(model, folder)
        convert(way.converter, folder.resolve(), source.resolve(), plain, str(describe(model)["run"]))
        shutil.rmtree(folder)
    if way.quantizer is not None:
        matrix = _matrix(model, source, way, rows, say)
        partial = work / f"{kind}.gguf"
        quantize(way.quantizer, source, partial, kind, matrix)
        source = partial
    source.rename(file)
    shutil.rmtree(work)


def _write_folder(model: StreamedModel, folder: Path) -> None:
    """Write the folder of `--to hf` for the converter, which runs code of a model's repository unasked."""
    write_shards(folder, model.shapes, model.make, SHARD_BYTES, lambda n, total: None)
    write_settings(model, folder)
    if not model.about.trust_remote_code:
        for path in folder.glob("*.py"):
            path.unlink()
    # Some of its classes read SentencePiece's own file alone, which transformers 5 no longer writes.
    own = model.base.folder / "tokenizer.model" if model.base and model.about.tokenizer is None else None
    if own is not None and own.is_file() and not (folder / own.name).exists():
        shutil.copyfile(own, folder / own.name)


def _matrix(model: StreamedModel, source: Path, way: Way, rows: int | None, say: Say) -> Path | None:
    """Returns the file of an importance matrix of the run's own rows. Raises UserError if they are too few."""
    recipe = model.trained.recipe
    if way.reader is None or rows is None:
        return None
    if recipe is None:
        raise UserError("--imatrix: this folder has no run, so there are no rows. Fix: give the run's folder")
    texts, tokens = training_texts(recipe, model.trained.settings, rows, str(model.base.folder) if model.base else None)
    context = min(_CONTEXT, context_length(text_of(model).config))
    if tokens < 2 * context:
        raise UserError(
            f"--imatrix {rows}: {tokens:,} tokens are fewer than two texts of {context}. Fix: give more rows"
        )
    say(f"importance matrix of {len(texts):,} rows, {tokens:,} tokens")
    (source.parent / "rows.txt").write_text("\n".join(texts), encoding="utf-8")
    return importance_matrix(way.reader, source, source.parent / "rows.txt", context)


def _say_limits(model: StreamedModel, file: Path, way: Way, say: Say) -> None:
    config = text_of(model).config
    if way.converter is not None:
        say(f"how llama.cpp computes {config.model_type} is not checked here: ask llama-server by `verify --url`")
    elif is_written(config) and (window := context_length(config)) < config.max_position_embeddings:
        say(f"{file.name} is for texts of up to {window:,} tokens: llama.cpp has no window for such a model")
    if model.kept and way.converter is None:
        say(f"{file.name} leaves out {tensors_text(model.kept)} of the base, which transformers does not load")
    if model.text_part is not None:
        say(f"{file.name} has the language model alone: pictures need a second file, {MMPROJ}")


def modelfile(trained: Trained, name: str) -> str:
    """Returns Ollama's description of a model: the file, which has the template, and where answers end."""
    tokenizer = read_tokenizer(trained.settings)
    ends = GenerationConfig.from_pretrained(trained.settings).eos_token_id
    texts = [tokenizer.convert_ids_to_tokens(end) for end in (ends if isinstance(ends, list) else [ends])]
    stops = "".join(f"PARAMETER stop {json.dumps(text)}\n" for text in texts)
    return f"FROM ./{name}\n{stops}"
