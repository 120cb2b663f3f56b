"""The gate: whether an export matches the trained model.

    files      tokenizer, templates, settings, as a whole; no other file in the folder    verify_files.py
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
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer, GenerationConfig

from finetune.checkpoints.trained import Trained, find_trained
from finetune.checkpoints.weight_files import TensorFiles
from finetune.data.building import OpenedSources
from finetune.data.dataset import build_dataset, build_held_out
from finetune.data.samples import Example
from finetune.data.samples import Sequence as Document
from finetune.data.sources.source import SourceReader
from finetune.errors import UserError
from finetune.models.base_config import first_line
from finetune.models.base_model import Base
from finetune.models.damage import read_object
from finetune.models.remote_code import load_auto
from finetune.models.tokenizer import read_tokenizer
from finetune.recipe import Recipe
from finetune.recipe.schema import HeldOut
from finetune.release.export.eight_bits import other_layers
from finetune.release.export.figures import SECTION, THRESHOLDS, WHOLE_BYTES, Figures, card_section
from finetune.release.export.formats import FLOATS, GGUF_TYPES
from finetune.release.export.gguf_file import gguf_of
from finetune.release.export.gguf_settings import context_length, open_gguf
from finetune.release.export.gguf_tokenizer import gguf_tokenizer
from finetune.release.export.hf_folder import METADATA
from finetune.release.export.streamed import StreamedModel
from finetune.release.export.verify_answers import AnswerReference, ScoreReference, end_tokens
from finetune.release.export.verify_files import VERIFY, compare_adapter, compare_files, compare_settings, is_quantized
from finetune.release.export.verify_models import load_export, load_reference, quiet_loading
from finetune.release.export.verify_tensors import compare_tensors
from finetune.utils import write_atomically

ROWS = 32
# Text that tokenizers split in different ways: digits, runs of spaces, contractions, letters beyond ASCII.
_CHAT = [{"role": "user", "content": "How many days has a week?  It's 1234567,\n\n\tI'D say: naïve 日本 🙂 x1"}]


def verify_export(export: Path, trained: Trained, rows: int = ROWS, base: str | None = None) -> Figures:
    """Compare an export with its run; write verify.json and the section of the card. Raises UserError if the run's
    rows, its base or the export cannot be read at all."""
    if (recipe := trained.recipe) is None:
        raise UserError(f"{trained.run_dir}: no recipe.yaml here, so there are no rows to compare on: give a run")
    if (export / "adapter_config.json").is_file() and not (export / "config.json").is_file():
        figures = Figures("float32")
        compare_adapter(figures, trained, export)
    else:
        written = StreamedModel(trained, None, base)
        figures = Figures(*export_format(export))
        with _settings_of(export) as settings:
            examples = held_out_examples(recipe, trained.settings, rows, base)
            if gguf_of(export) is not None and recipe.data.image is not None:
                examples = [_without_images(example) for example in examples]
                # There is no template for rows whose images are taken out, so their tokens alone are compared.
                tokenizers: list[Any] = [load_auto(AutoTokenizer, folder) for folder in (trained.settings, settings)]
                for example in examples:
                    texts = [tokenizers[0].decode(one.input_ids) for one in example.sequences]
                    if len({str([one(text)["input_ids"] for text in texts]) for one in tokenizers}) > 1:
                        figures.problems.append(f"{example.path}:{example.row} has other tokens: another tokenizer")
                        break
                _compare_prompts(figures, trained.settings, settings, tokenizers)
            else:
                _compare_tokens(figures, recipe, trained.settings, settings, examples, rows)
            config = compare_settings(figures, trained, base, export)
            compare_files(figures, trained, written, export)
            compare_tensors(figures, trained, written, export)
            if is_quantized(export) and (problem := other_layers(export, written.model)):
                figures.problems.append(problem)
            if 4 * sum(one.numel() for one in written.shapes.values()) <= WHOLE_BYTES:
                _compare_models(figures, written, base, export, settings, examples, config)
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
) -> None:
    """Compare the answers of two models, each loaded whole: the run's by peft, the export as anyone loads it."""
    trained, is_gguf = written.trained, gguf_of(export) is not None
    assert trained.recipe is not None
    with quiet_loading():
        model = load_reference(trained, base)
        if trained.labels:
            run = ScoreReference.of(model, read_tokenizer(settings).pad_token_id, examples, figures)
        else:
            recipe, pictures = _with_settings(trained.recipe, trained.settings, base), None
            if not is_gguf and (seen := Base(recipe.model, image=recipe.data.image).images) is not None:
                from finetune.data.images.pixels import pixel_reader

                pictures = pixel_reader(seen.family, seen.rules.threads).plain_inputs
            context = context_length(config) if is_gguf else None
            run = AnswerReference.of(model, pictures, end_tokens(trained.settings), examples, figures, context)
        del model
        gc.collect()  # models refer to themselves: two of them are never in memory
        if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc keeps the memory of tensors below 32 MB
            trim(0)
        if (model := load_export(export, figures, config, written)) is not None:
            run.compare(model, end_tokens(settings), figures)


def find_against(run_dir: Path, export: Path, step: str | None) -> Trained:
    """Returns the trained weights that an export names, or those of `step`. Raises UserError."""
    about = export / METADATA
    if step is not None or not about.is_file():
        return find_trained(run_dir, step)
    exported = read_object(about)
    if "runs" in exported:
        raise UserError(
            f"{export}: merged from several runs, so no run answers like it; `evaluate` says how good it is"
        )
    number = exported.get("step")
    return find_trained(run_dir, None if number is None else str(number), exported.get("averaged"))


def export_format(export: Path) -> tuple[str, str]:
    """Returns the type of an export's weights, and of its tensors that are not in eight bits: by export.json, or by the
    files themselves if it has none. Raises UserError for a folder that is no export."""
    if (file := gguf_of(export)) is not None:
        kind = next((t.tensor_type.name for t in open_gguf(file).tensors if "attn_q.weight" in t.name), None)
        if kind is None:
            raise UserError(f"{file}: no language model's weights here (no attn_q.weight): give the file that has them")
        name = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}.get(kind, kind.lower())
        if name not in THRESHOLDS:
            raise UserError(
                f"{file}: weights of type {kind} have no threshold here: compare one of {', '.join(GGUF_TYPES)}"
            )
        return name, "float32"
    if not (export / "config.json").is_file():
        raise UserError(f"{export}: no model here (no config.json and no .gguf file)")
    about = read_object(export / METADATA) if (export / METADATA).is_file() else {}
    files = TensorFiles(sorted(export.glob("*.safetensors")))
    types = Counter(str(files.meta(name).dtype).removeprefix("torch.") for name in files.names())
    dtype = about.get("dtype", next((one for one, _ in types.most_common() if one in FLOATS), "float32"))
    if dtype not in FLOATS:
        raise UserError(f"{export / METADATA}: dtype is {dtype}: expected one of {', '.join(FLOATS)}")
    quantized = read_object(export / "config.json").get("quantization_config")
    if (kind := about.get("quantised")) is None and quantized is None:
        return dtype, dtype
    if kind not in THRESHOLDS:
        groups = ((quantized or {}).get("config_groups") or {}).values()
        weights = {(group["weights"]["type"], group["weights"]["num_bits"]) for group in groups}
        kind = {("int", 8): "int8", ("float", 8): "fp8"}.get(weights.pop()) if len(weights) == 1 else None
    if kind is None:
        raise UserError(
            f"{export}: weights quantized by {(quantized or {}).get('quant_method')} in another way than `--quantize` "
            "writes have no threshold here"
        )
    return kind, dtype


@contextlib.contextmanager
def _settings_of(export: Path) -> Iterator[Path]:
    """Yields the folder with an export's tokenizer and generation config; those of a GGUF file are read from it."""
    if (file := gguf_of(export)) is None:
        yield export
        return
    with tempfile.TemporaryDirectory() as folder:
        gguf_tokenizer(file).save_pretrained(folder)
        fields = open_gguf(file).fields
        keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
        ends = [int(fields[key].contents()) for key in keys if key in fields]
        GenerationConfig(eos_token_id=ends).save_pretrained(folder)
        yield Path(folder)


# --- rows


def _with_settings(recipe: Recipe, tokenizer: Path, name: str | None) -> Recipe:
    """Returns the recipe with the tokenizer and template of a folder. name: of the model whose processor prepares its
    images; None: the recipe's."""
    changes = {"tokenizer": str(tokenizer), "chat_template": None, "chat_template_arguments": None}
    if recipe.data.image is not None and name is not None:
        changes |= {"name": name, "revision": None}
    return recipe.model_copy(update={"model": recipe.model.model_copy(update=changes)})


def check_rows(trained: Trained) -> None:
    """Raises UserError if the rows that an export is compared on are gone: before hours of writing."""
    if (recipe := trained.recipe) is None:
        return
    data = recipe.data
    for source in data.train if isinstance(data.eval, HeldOut) else data.eval_sources or data.train:
        try:
            SourceReader(source)
        except UserError as error:
            raise UserError(
                f"{trained.run_dir}: the run's rows, which an export is compared on, cannot be read: {error}\n"
                "Fix: put them back, or `export --no-verify`, which compares nothing"
            ) from None


def held_out_examples(recipe: Recipe, tokenizer: Path, rows: int, name: str | None = None) -> list[Example]:
    """Returns the first rows of `data.eval`, or of `data.train`, as a tokenizer's folder renders them. name: see
    `_with_settings`. Raises UserError."""
    recipe = _with_settings(recipe, tokenizer, name)
    overlong = "drop" if recipe.objective.name in ("dpo", "orpo", "reward") else "truncate"  # answers stay whole
    data = recipe.data.model_copy(update={"streaming": False, "mixture": None, "overlong": overlong})
    recipe = recipe.model_copy(update={"data": data})
    # The folder's tokenizer has the tokens that the recipe adds.
    base, opened = Base(recipe.model, image=data.image), OpenedSources(recipe)
    renderer = base.renderer(recipe.objective)
    if isinstance(data.eval, HeldOut):
        held_out = build_held_out(recipe, renderer, opened)
    else:
        sources = tuple(
            source.model_copy(update={"limit": min(rows, source.limit or rows), "weight": 1.0, "max_epochs": None})
            for source in data.eval_sources or data.train
        )
        held_out = build_dataset(recipe, sources, renderer, opened=opened)
    assert held_out is not None
    return [held_out.examples[i] for i in range(min(rows, len(held_out.examples)))]


def _compare_tokens(
    figures: Figures, recipe: Recipe, settings: Path, export: Path, examples: list[Example], rows: int
) -> None:
    """Compare rows as both tokenizers and templates write them."""
    if (image := recipe.data.image) is not None:  # a model's own processor prepares images, with its own bounds
        image = image.model_copy(update={"processor": None, "max_pixels": None, "min_pixels": None})
        recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"image": image})})
    try:
        theirs = held_out_examples(recipe, export, rows, str(export))
        tokenizers: list[Any] = [load_auto(AutoTokenizer, folder) for folder in (settings, export)]
    except (UserError, OSError, ValueError, KeyError) as error:
        figures.problems.append(f"the export's tokenizer does not render the run's rows: {first_line(error)}")
        return
    for ours, their in zip(examples, theirs, strict=False):
        pairs = zip(ours.sequences, their.sequences, strict=True)
        if not all(
            np.array_equal(a.input_ids, b.input_ids) and np.array_equal(a.loss_mask, b.loss_mask) for a, b in pairs
        ):
            figures.problems.append(f"{ours.path}:{ours.row} has other tokens: another tokenizer or chat template")
            break
    for one in (one for example in examples for one in example.sequences):
        if len({tokenizer.decode(one.input_ids, skip_special_tokens=True) for tokenizer in tokenizers}) > 1:
            figures.problems.append("the same tokens are another text: another decoder, or other special tokens")
            break
    if len(theirs) != len(examples):
        figures.problems.append(f"{len(theirs)} of {len(examples)} rows are rendered: another chat template")
    _compare_prompts(figures, settings, export, tokenizers)


def _compare_prompts(figures: Figures, settings: Path, export: Path, tokenizers: list[Any]) -> None:
    """Compare a prompt as a server tokenizes it, with the special tokens that a tokenizer adds itself, and the tokens
    that end an answer."""
    chats = [
        one.apply_chat_template(_CHAT, add_generation_prompt=True, tokenize=False) if one.chat_template else ""
        for one in tokenizers
    ]
    ours, theirs = (one(chat or "How many?")["input_ids"] for one, chat in zip(tokenizers, chats, strict=True))
    if chats[0] != chats[1]:
        figures.problems.append("a prompt is rendered otherwise: another chat template")
    elif ours != theirs:
        figures.problems.append(
            f"a prompt has other tokens: it begins with {theirs[:3]} in the export, {ours[:3]} in the run"
        )
    ends, other_ends = (end_tokens(folder) for folder in (settings, export))
    if ends - other_ends:
        figures.problems.append(f"{sorted(ends - other_ends)} end an answer in the run, and do not in the export")
    if other_ends - ends:
        figures.problems.append(f"{sorted(other_ends - ends)} end an answer in the export, and do not in the run")


def _without_images(example: Example) -> Example:
    """Returns an example for a GGUF file, which has the language model alone."""

    def text(one: Document) -> Document:
        kept = np.ones(len(one.input_ids), np.bool_)
        for image in one.images:
            kept[image.begin : image.end] = False
        return Document(one.input_ids[kept], one.loss_mask[kept])

    return replace(example, sequences=tuple(map(text, example.sequences)))
