"""The gate: whether an export matches the trained model.

    files      tokenizer, templates, settings, as a whole; no other file in the folder    here
    tensors    every one, streamed, next to what peft and transformers make of it         verify_tensors.py
    answers    of models that are small enough to be loaded whole, in figures:            verify_answers.py

    rows of the run's held-out data ── the run's model, adapter next to its base ── log-probs of trained tokens ─┐
                                    └─ the export, loaded as anyone loads it ────── log-probs ───────────────────┴ KL

Equal tensors under equal names, equal settings and equal tokens give equal answers, so the third adds figures and
nothing that a large model would need. It is teacher-forced, so that errors do not add up along a text.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from dataclasses import asdict
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from finetune.checkpoints.trained import ADAPTER, LABELS, Trained, find_trained
from finetune.checkpoints.weight_files import INDEX, TensorFiles, shard_name
from finetune.data.samples import Example
from finetune.errors import UserError
from finetune.models.base_config import base_config, first_line
from finetune.models.base_model import Base, processor_settings
from finetune.models.checkpoint_files import PROCESSORS
from finetune.models.config import model_config
from finetune.models.damage import ADAPTER_CONFIG, read_object
from finetune.models.mtp_files import undeclared
from finetune.models.remote_code import load_auto
from finetune.models.score_model import labelled
from finetune.models.tokenizer import read_tokenizer
from finetune.release.export.eight_bits import other_layers, settings_of
from finetune.release.export.figures import AS_BASE, SECTION, THRESHOLDS, WHOLE_BYTES, Figures, card_section
from finetune.release.export.gguf_export import modelfile, why_not_here
from finetune.release.export.gguf_file import gguf_of, places_in
from finetune.release.export.gguf_places import Places
from finetune.release.export.gguf_settings import (
    context_length,
    is_written,
    open_gguf,
    other_settings,
    package,
    settings_of_another_tool,
)
from finetune.release.export.gguf_tokenizer import add_tokenizer, gguf_tokenizer, other_tokens
from finetune.release.export.hf_folder import COPIED, METADATA, PROGRESS, describe, settings_files
from finetune.release.export.stored_base import compare_codes, format_of_export
from finetune.release.export.streamed import StreamedModel, base_model
from finetune.release.export.verify_answers import (
    AnswerReference,
    ScoreReference,
    compare_prompts,
    compare_tokens,
    drop_images,
    end_tokens,
    held_out_examples,
    load_export,
    load_reference,
    quiet_loading,
    replace_settings,
)
from finetune.release.export.verify_tensors import compare_tensors
from finetune.release.export.weight_types import EIGHT_BITS, FLOATS, GGUF_TYPES, LLAMA_TYPES
from finetune.utils import write_atomically

ROWS = 32
VERIFY = "verify.json"
_MATRIX = re.compile(r"blk\.\d+\.(attn_q|attn_qkv|attn_output|ffn_down|ffn_up)\.weight")
_ALWAYS = {"README.md", METADATA, VERIFY}
# Keys that do not change how a model or a tokenizer acts.
_INERT = {"transformers_version", "_name_or_path", "name_or_path", "_from_model_config", "is_local", "local_files_only"}
# Keys of config.json that are compared with the files of the base, or of the result.
_OF_BASE = ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "vocab_size")
# Keys that do not decide how a model computes, or that are compared by themselves.
_NOT_COMPUTING = _INERT | {*_OF_BASE, "dtype", "torch_dtype", "use_cache", "architectures", "quantization_config"}


def verify_export(export: Path, trained: Trained, rows: int = ROWS, base: str | None = None) -> Figures:
    """Compare an export with its run; write verify.json and the section of the card. Raises UserError if the run's
    rows, its base or the export cannot be read at all."""
    if (recipe := trained.recipe) is None:
        raise UserError(f"{trained.run_dir}: no recipe.yaml here, so there are no rows to compare on. Fix: give a run")
    if (export / "adapter_config.json").is_file() and not (export / "config.json").is_file():
        figures = Figures("float32")
        compare_adapter(figures, trained, export)
    else:
        figures = Figures(*export_format(export))
        written = StreamedModel(trained, None, base, is_exact=figures.format in AS_BASE)
        places = None
        with _settings_of(export, trained.settings) as settings:
            examples = held_out_examples(recipe, trained.settings, rows, base)
            if gguf_of(export) is not None and recipe.data.media is not None:
                examples = [drop_images(example) for example in examples]
                # There is no template for rows whose images are taken out, so their tokens alone are compared.
                tokenizers: list[Any] = [load_auto(AutoTokenizer, folder) for folder in (trained.settings, settings)]
                for example in examples:
                    texts = [tokenizers[0].decode(one.input_ids) for one in example.sequences]
                    if len({str([one(text)["input_ids"] for text in texts]) for one in tokenizers}) > 1:
                        figures.problems.append(f"{example.path}:{example.row} has other tokens: another tokenizer")
                        break
                compare_prompts(figures, trained.settings, settings, tokenizers)
            else:
                compare_tokens(figures, recipe, trained.settings, settings, examples, rows)
            config = compare_settings(figures, trained, base, export)
            compare_files(figures, trained, written, export)
            if (file := gguf_of(export)) is not None:
                places = places_in(written, file)
                figures.types = ", ".join(f"{n} {kind}" for kind, n in _types_in(file).most_common())
            compare_tensors(figures, trained, written, export, places)
            if figures.format in AS_BASE:
                compare_codes(figures, written, export)
            if is_quantized(export) and (problem := other_layers(export, written.model)):
                figures.problems.append(problem)
            if 4 * sum(one.numel() for one in written.shapes.values()) <= WHOLE_BYTES:
                _compare_models(figures, written, base, export, settings, examples, config, places)
            if places is not None:
                _judge_places(figures, places)
        figures.judge()
    about = {"against": {"step": trained.step, **trained.identity()}, **figures.as_dict()}
    about["thresholds"] = asdict(THRESHOLDS[figures.format])
    write_atomically(export / VERIFY, json.dumps(about, indent=1) + "\n")
    if (card := export / "README.md").is_file():
        text = card.read_text(encoding="utf-8").partition(SECTION)[0].rstrip() + "\n\n"
        write_atomically(card, text + card_section(figures))
    return figures


def _compare_models(
    figures: Figures,
    written: StreamedModel,
    base: str | None,
    export: Path,
    settings: Path,
    examples: list[Example],
    config: Any,
    places: Places | None,
) -> None:
    """Compare the answers of two models, each loaded whole: the run's by peft, the export as anyone loads it."""
    trained, is_gguf = written.trained, gguf_of(export) is not None
    assert trained.recipe is not None
    with quiet_loading():
        model = load_reference(trained, base)
        if trained.labels:
            run = ScoreReference.of(model, read_tokenizer(settings).pad_token_id, examples, figures)
        else:
            recipe, pictures = replace_settings(trained.recipe, trained.settings, base), None
            if not is_gguf and recipe.data.media:
                from finetune.data.examples import media_reader

                reader = media_reader(Base(recipe.model, image=recipe.data.media).media)
                pictures = reader and reader.plain_inputs
            context = context_length(config) if is_gguf else None
            run = AnswerReference.of(model, pictures, end_tokens(trained.settings), examples, figures, context)
        del model
        gc.collect()  # models refer to themselves: two of them are never in memory
        if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc keeps the memory of tensors below 32 MB
            trim(0)
        if (model := load_export(export, figures, config, written, places)) is not None:
            run.compare(model, end_tokens(settings), figures)


def _types_in(file: Path) -> Counter[str]:
    return Counter(tensor.tensor_type.name for tensor in open_gguf(file).tensors)


def _judge_places(figures: Figures, places: Places) -> None:
    """Say what could not be compared of another tool's file; a problem if its answers were not compared either."""
    if not (names := [*places.unplaced, *places.extra]):
        return
    figures.uncompared = f"{len(names):,} ({names[0]}, ...)"
    if figures.kl_mean is None:
        figures.problems.append(
            f"{names[0]}: its place or layout in the file is not known here ({len(names):,} tensors in all), and no "
            "answers were compared: ask llama-server by `verify --url`, and export with --no-verify"
        )


def find_against(run_dir: Path, export: Path, step: str | None) -> Trained:
    """Returns the trained weights that an export names, or those of `step`. Raises UserError."""
    about = export / METADATA
    if step is not None or not about.is_file():
        return find_trained(run_dir, step)
    exported = read_object(about)
    if "runs" in exported:
        raise UserError(
            f"{export}: merged from several runs, so no run answers like it. Fix: use `evaluate`, which says how good "
            "it is"
        )
    number = exported.get("step")
    return find_trained(run_dir, None if number is None else str(number), exported.get("averaged"))


def export_format(export: Path) -> tuple[str, str]:
    """Returns the type of an export's weights, and of its tensors that are not in eight bits: by export.json, or by the
    files themselves if it has none. Raises UserError for a folder that is no export."""
    if (file := gguf_of(export)) is not None:
        gguf, reader = package(), open_gguf(file)
        if "general.file_type" in reader.fields:
            stated = gguf.LlamaFileType(int(reader.fields["general.file_type"].contents())).name
            if (named := stated.removeprefix("MOSTLY_").lower()) in LLAMA_TYPES:
                return named, "float32"
        matrices = (t.tensor_type.name for t in reader.tensors if _MATRIX.search(t.name))
        kind = next(matrices, None)
        if kind is None:
            raise UserError(
                f"{file}: no language model's weights here (no {_MATRIX.pattern}). Fix: give the file that has them"
            )
        name = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}.get(kind, kind.lower())
        if name not in THRESHOLDS:
            raise UserError(
                f"{file}: weights of type {kind} have no threshold here. Fix: compare one of "
                f"{', '.join((*GGUF_TYPES, *LLAMA_TYPES))}"
            )
        return name, "float32"
    if not (export / "config.json").is_file():
        raise UserError(f"{export}: no model here (no config.json and no .gguf file). Fix: give the export's folder")
    about = read_object(export / METADATA) if (export / METADATA).is_file() else {}
    files = TensorFiles(sorted(export.glob("*.safetensors")))
    types = Counter(str(files.meta(name).dtype).removeprefix("torch.") for name in files.names())
    dtype = about.get("dtype", next((one for one, _ in types.most_common() if one in FLOATS), "float32"))
    if dtype not in FLOATS:
        raise UserError(f"{export / METADATA}: dtype is {dtype}. Fix: set it to one of {', '.join(FLOATS)}")
    quantized = read_object(export / "config.json").get("quantization_config")
    if (kind := about.get("quantised")) is None and quantized is None:
        return dtype, dtype
    if kind is None and (form := format_of_export(export)) is not None:
        return form.name, dtype
    if kind not in THRESHOLDS:
        groups = ((quantized or {}).get("config_groups") or {}).values()
        weights = {(group["weights"]["type"], group["weights"]["num_bits"]) for group in groups}
        kind = {("int", 8): "int8", ("float", 8): "fp8"}.get(weights.pop()) if len(weights) == 1 else None
    if kind is None:
        raise UserError(
            f"{export}: weights quantized by {(quantized or {}).get('quant_method')} have no threshold here. Only "
            "those that `--quantize` writes have one. Fix: compare such an export"
        )
    return kind, dtype


@contextlib.contextmanager
def _settings_of(export: Path, own: Path) -> Iterator[Path]:
    """Yields the folder with an export's tokenizer and generation config; those of a GGUF file are read from it. own:
    the run's."""
    if (file := gguf_of(export)) is None:
        yield export
        return
    with tempfile.TemporaryDirectory() as folder:
        gguf_tokenizer(file, read_tokenizer(own)).save_pretrained(folder)
        fields = open_gguf(file).fields
        keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
        ends = [int(fields[key].contents()) for key in keys if key in fields]
        GenerationConfig(eos_token_id=ends).save_pretrained(folder)
        yield Path(folder)


# --- files: an export has those that were written, and no other; each is the run's or the base's
#
# Files that servers read in addition to the weights are compared as a whole: tokenizer, chat templates, generation
# config, processors, code. config.json may differ in few keys, each with the value that training gave it.


def compare_files(figures: Figures, trained: Trained, written: StreamedModel, export: Path) -> None:
    """Compare all files of an export but the tensors. Raises UserError if one cannot be read."""
    about = export / METADATA
    if about.is_file():
        ours, theirs = describe(written), read_object(about)
        for one in (ours, theirs):
            if isinstance(one.get("base"), dict):  # its place and revision may differ
                one["base"] = one["base"].get("tensors")
        figures.problems += other_keys(METADATA, ours, theirs, {"versions", "dtype", "quantised"})
    if (file := gguf_of(export)) is not None:
        allowed = {file.name, "Modelfile"}
        stated = read_object(about).get("dtype") if about.is_file() else figures.format
        if figures.format in LLAMA_TYPES and stated != figures.format:
            figures.problems.append(f"{file.name}: says that it is {figures.format}, and {METADATA} {stated}")
        if about.is_file() and why_not_here(written) is None:  # else llama.cpp's converter wrote the tokenizer
            gguf, fields = package(), open_gguf(file).fields
            writer = gguf.GGUFWriter(None, "llama")
            add_tokenizer(writer, gguf, trained.settings, len(fields["tokenizer.ggml.tokens"].data))
            ours = {key: one.value for key, one in writer.kv_data[0].items() if key.startswith("tokenizer.")}
            types = "tokenizer.ggml.token_type"
            ours[types] = [int(one) for one in ours[types]]  # of an enumeration
            theirs = {key: field.contents() for key, field in fields.items() if key.startswith("tokenizer.")}
            figures.problems += other_keys(file.name, ours, theirs)
    else:
        settings = settings_files(trained.settings)
        compare_each(figures, settings, export)
        folder = written.base.folder if written.base else None  # its code and settings of processors are copied
        copied = {path.name: path for pattern in COPIED for path in sorted(folder.glob(pattern))} if folder else {}
        sees = trained.recipe is not None and trained.recipe.model.train is not None
        needs = about.is_file() and (trained.is_adapter or written.part is not None) and not written.is_scoring
        if not sees:  # else they have the run's own bounds, see `compare_settings`
            compare_each(figures, {n: path for n, path in copied.items() if needs or (export / n).is_file()}, export)
        weights = _compare_weight_files(figures, export)
        _compare_config(figures, trained, written, export)
        allowed = {*settings, *copied, *weights, "config.json", *(COPIED if sees else ())}
    _compare_names(figures, export, allowed)


def compare_adapter(figures: Figures, trained: Trained, export: Path) -> None:
    """Compare a folder of an adapter with the adapter of a run. Raises UserError for another result."""
    if trained.is_checkpoint or not trained.is_adapter:
        raise UserError(
            f"{export}: an adapter, and the result of {trained.run_dir} is none. Fix: give the run that it is the "
            "result of"
        )
    theirs, ours = (read_object(folder / ADAPTER_CONFIG) for folder in (export, trained.folder))
    place = {"base_model_name_or_path", "revision"}  # of the copy that is on the hub
    figures.problems += other_keys(ADAPTER_CONFIG, ours, theirs, place)
    settings = settings_files(trained.settings)
    settings |= {name: path for name in PROCESSORS if (path := trained.folder / name).is_file()}  # of a run on files
    if (trained.folder / LABELS).is_file():
        settings[LABELS] = trained.folder / LABELS
    compare_each(figures, settings, export)
    _compare_names(figures, export, {*settings, ADAPTER_CONFIG, ADAPTER})
    if not (export / ADAPTER).is_file():
        figures.problems.append(f"{ADAPTER} is missing")
        return
    tensors = TensorFiles([export / ADAPTER])
    for name in sorted({*tensors.names()} ^ {*trained.shapes}):
        figures.problems.append(f"{ADAPTER}: {name} is {'not in the run' if name in tensors else 'missing'}")
        return
    for name in tensors.names():
        one, other = tensors.read(name), trained.read(name)
        if one.dtype != other.dtype or one.shape != other.shape or not one.equal(other):
            figures.problems.append(f"{ADAPTER}: {name} is not the run's")
            return
        figures.tensors += 1


def compare_each(figures: Figures, ours: Mapping[str, Path], export: Path) -> None:
    """Compare files as a whole, by their paths in the export; JSON files key by key."""
    for name, path in ours.items():
        if not (export / name).is_file():
            figures.problems.append(f"{name} is missing")
        elif path.read_bytes() == (export / name).read_bytes():
            continue
        elif not name.endswith(".json"):
            figures.problems.append(f"{name} is not the run's")
        else:
            figures.problems += other_keys(name, _content(path), _content(export / name))


def _content(file: Path) -> dict[str, Any]:
    settings = read_object(file)
    if file.name != "generation_config.json":
        return settings
    settings = GenerationConfig(**settings).to_dict()
    ends = settings["eos_token_id"]
    return {**settings, "eos_token_id": sorted({*ends}) if isinstance(ends, list) else [ends]}


def other_keys(file: str, ours: dict[str, Any], theirs: dict[str, Any], free: Set[str] = frozenset()) -> list[str]:
    """Returns the first three keys that differ, with both values, each cut to what fits a line."""
    keys = [k for k in sorted(ours.keys() | theirs.keys()) if ours.get(k) != theirs.get(k) and k not in _INERT | free]

    def cut(value: Any) -> str:
        text = str(value)
        return text if len(text) <= 60 else f"{text[:57]}..."

    return [f"{file}: {key} is {cut(theirs.get(key))}, and {cut(ours.get(key))} in the run" for key in keys[:3]]


def _compare_weight_files(figures: Figures, export: Path) -> set[str]:
    """Returns the names of weight files, and of their index, as transformers finds them."""
    index, held = export / INDEX, sorted(path.name for path in export.glob("*.safetensors"))
    numbered = [shard_name(number, len(held)) for number in range(1, len(held) + 1)]
    if held == [shard_name(1, 1)]:
        if index.is_file():
            figures.problems.append(f"{INDEX}: unexpected next to {held[0]}, which has all tensors")
    elif held != numbered or not index.is_file():
        expected = f"{numbered[0]}, ... and {INDEX}" if numbered else shard_name(1, 1)
        figures.problems.append(f"weights: {', '.join(held[:3]) or 'no file'}: expected {expected}")
    else:
        places = read_object(index).get("weight_map", {})
        names = {file: TensorFiles([export / file]).names() for file in held}
        real = {name: file for file in held for name in names[file]}
        if sum(map(len, names.values())) != len(real):
            figures.problems.append("weights: two files have a tensor of the same name")
        if places != real:
            name = min({*places.items()} ^ {*real.items()})[0]
            figures.problems.append(
                f"{INDEX}: {name} is in {places.get(name)}, and the files have it in {real.get(name)}"
            )
    return {*held, INDEX}


def _compare_names(figures: Figures, export: Path, allowed: set[str]) -> None:
    """Report files that export does not write, and links."""
    allowed |= _ALWAYS | ({PROGRESS} if export.name.endswith(".partial") else set())
    for path in sorted(export.rglob("*")):
        name = path.relative_to(export).as_posix()
        if path.is_symlink():
            figures.problems.append(f"{name}: a link; an export contains only files")
        elif not path.is_dir() and name not in allowed:
            figures.problems.append(f"{name}: unexpected file: it was not written by the export; remove it")


# --- config.json and other settings


def _config_of(folder: Path, trusted: bool | None = None) -> Any:
    try:
        return load_auto(AutoConfig, folder, trusted)
    except (OSError, ValueError, KeyError, TypeError, StrictDataclassError) as error:
        reason = first_line(error)
        raise UserError(
            f"{folder / 'config.json'}: transformers cannot build a model from it: {reason}. Fix: restore the file, or "
            "export again"
        ) from None


def _compare_config(figures: Figures, trained: Trained, written: StreamedModel, export: Path) -> None:
    """Compare the keys of config.json that do not change how the model computes: class, special tokens, rows, tying,
    type."""
    theirs, base = read_object(export / "config.json"), written.base
    source = read_object(base.folder / "config.json") if base is not None else {}
    kinds, kind = theirs.get("architectures") or [], type(written.model).__name__
    if kinds != [kind] and (base is None or kinds != (source.get("architectures") or [])):
        figures.problems.append(f"config.json: architectures is {kinds}, and [{kind!r}] in the run")
    types = {part.get(key) for part in (theirs, theirs.get("text_config") or {}) for key in ("dtype", "torch_dtype")}
    if other := sorted(str(one) for one in types - {None, figures.dtype}):
        figures.problems.append(f"config.json: dtype is {other[0]}, and the weights are {figures.dtype}")
    if figures.format in AS_BASE:
        ours, others = (one.get("quantization_config") or {} for one in (source, theirs))
        figures.problems += other_keys("config.json, quantization_config", ours, others)
    elif "quantization_config" in theirs and figures.format not in EIGHT_BITS:
        figures.problems.append("config.json: quantization_config is there, and the weights are not quantized")
    if base is None or (written.is_scoring and trained.is_adapter):
        return
    if source.get("model_type") != theirs.get("model_type"):
        return
    # With the defaults of its class; code is not run here.
    ours, others = (
        read if "auto_map" in read else _config_of(folder, False).to_dict()
        for read, folder in ((source, base.folder), (theirs, export))
    )
    for section in ("", "text_config"):
        for key in _OF_BASE:
            one, other = ((config.get(section) or {} if section else config).get(key) for config in (ours, others))
            if one is not None and key == "vocab_size" and written.added_rows is not None:
                one = written.added_rows
            elif one is not None and key == "tie_word_embeddings" and written.unties:
                one = False
            if one != other and not (key == "pad_token_id" and written.is_scoring):
                figures.problems.append(f"config.json: {key} is {other}, and {one} in the run")


def compare_settings(figures: Figures, trained: Trained, base: str | None, export: Path) -> Any:
    """Compare the settings by which an export computes, and by which servers answer, with the run's; returns the config
    of the run's model, of a GGUF file's that of its text part. Raises UserError for an invalid config."""
    assert trained.recipe is not None
    model, file = base_model(trained, base), gguf_of(export)
    if trained.labels:  # its result is a text model also of a multimodal base
        config = labelled(model_config(model), trained.labels)
    elif file is not None:
        config = model_config(model.model_copy(update={"train": None}))
    else:
        config = model_config(model) if model.config is not None else base_config(model)
    if file is not None:
        if is_written(config):
            whole = base_config(model) if model.config is None else None
            figures.problems += other_settings(config, whole, file)
        else:  # another tool wrote it
            figures.problems += settings_of_another_tool(config, file)
        figures.problems += other_tokens(trained.settings, file)
        compare_modelfile(figures, trained, export, file)
        return config
    stated = config.to_dict()
    if model.mtp == "drop":
        stated = undeclared(stated, config)
    ours, theirs = (_computing(one) for one in (stated, _config_of(export).to_dict()))
    figures.problems += other_keys("config.json", ours, theirs)
    if is_quantized(export):  # but for the layers that it leaves, see `other_layers`
        stated = read_object(export / "config.json")["quantization_config"]
        ours = settings_of(figures.format, stated.get("ignore", []))
        figures.problems += other_keys("config.json, quantization_config", ours, stated)
    if (files := trained.recipe.data.media) is not None:
        for name, content in processor_settings(Base(model, image=files)).items():
            if not (export / name).is_file():
                figures.problems.append(f"{name} is missing: files would be read by other settings")
            else:
                figures.problems += other_keys(name, json.loads(content), read_object(export / name))
    return config


def is_quantized(export: Path) -> bool:
    """Returns whether `--quantize` wrote an export."""
    return (export / METADATA).is_file() and read_object(export / METADATA).get("quantised") in EIGHT_BITS


def _computing(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings that decide how a model computes."""
    return {
        key: _computing(value) if key.endswith("_config") and isinstance(value, dict) else value
        for key, value in settings.items()
        if key not in _NOT_COMPUTING
    }


def compare_modelfile(figures: Figures, trained: Trained, export: Path, file: Path) -> None:
    """Compare Ollama's file: the ends of an answer, and nothing that changes one."""
    if not (path := export / "Modelfile").is_file():
        return
    lines = {line.strip() for line in path.read_text(encoding="utf-8").splitlines()}
    expected = set(modelfile(trained, file.name).splitlines())
    figures.problems += [f"{path}: has no line {line!r}" for line in sorted(expected - lines)]
    free = ("#", "LICENSE ", "PARAMETER num_ctx ")
    others = sorted(line for line in lines - expected if line and not line.startswith(free))
    figures.problems += [f"{path}: {line!r} is not of the run" for line in others[:1]]
