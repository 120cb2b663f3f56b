"""The gate: whether an export is what was trained.

    files      tokenizer, templates, settings, as a whole; no other file in the folder    verify_files.py
    tensors    every one, streamed, next to what peft and transformers make of it         verify_tensors.py
    answers    of models that are small enough to be loaded whole, in figures:

    rows of the run's held-out data ── the run's model, adapter next to its base ── log-probs of trained tokens ─┐
                                    └─ the export, loaded as anyone loads it ────── log-probs ───────────────────┴ KL

Equal tensors under equal names, equal settings and equal tokens make equal answers, so the third adds figures and
nothing that a large model would need. Teacher-forced, so that errors do not add up along a text.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig

from finetune.data.building import OpenedSources
from finetune.data.dataset import build_dataset, build_held_out
from finetune.data.examples import row_images
from finetune.data.samples import Example, Image
from finetune.data.samples import Sequence as Document
from finetune.errors import UserError
from finetune.export.figures import SECTION, THRESHOLDS, WHOLE_BYTES, Figures, card_section
from finetune.export.formats import FLOATS, GGUF_TYPES
from finetune.export.gguf_file import gguf_of
from finetune.export.gguf_settings import context_length, open_gguf
from finetune.export.gguf_tokenizer import gguf_tokenizer
from finetune.export.hf_folder import METADATA
from finetune.export.quantised import other_layers
from finetune.export.streamed import StreamedModel
from finetune.export.tensor_files import TensorFiles
from finetune.export.trained import Trained, find_trained
from finetune.export.verify_answers import AnswerReference, Pictures, end_tokens
from finetune.export.verify_files import VERIFY, compare_adapter, compare_files
from finetune.export.verify_models import load_export, load_reference, quiet_loading, recipe_of
from finetune.export.verify_scores import ScoreReference
from finetune.export.verify_settings import compare_settings, read_settings, rounded_here
from finetune.export.verify_tensors import compare_tensors
from finetune.models.base_config import first_line
from finetune.models.remote_code import load_auto
from finetune.models.tokenizer import load_tokenizer, read_tokenizer
from finetune.recipe import Recipe
from finetune.recipe.schema import HeldOut
from finetune.utils import write_atomically

ROWS = 32
# Where tokenizers split text in different ways: digits, runs of spaces, contractions, letters beyond ASCII.
_CHAT = [{"role": "user", "content": "How many days has a week?  It's 1234567,\n\n\tI'D say: naïve 日本 🙂 x1"}]


def verify_export(export: Path, trained: Trained, rows: int = ROWS, base: str | None = None) -> Figures:
    """Compare an export with the run that it is of; write verify.json and the card. Raises UserError if the run's rows,
    its base or the export cannot be read at all."""
    recipe = recipe_of(trained)
    if (export / "adapter_config.json").is_file() and not (export / "config.json").is_file():
        figures = Figures("float32")
        compare_adapter(figures, trained, export)
        _write(export, trained, figures)
        return figures
    written = StreamedModel(trained, None, base)
    figures = Figures(*export_format(export))
    with _settings_of(export) as settings:
        examples = held_out_examples(recipe, trained.settings, rows, base)
        if gguf_of(export) is not None and recipe.data.image is not None:
            examples = [_without_images(example) for example in examples]
            _compare_texts(figures, trained.settings, settings, examples)
        else:
            _compare_tokens(figures, recipe, trained.settings, settings, examples, rows)
        config = compare_settings(figures, recipe, trained, base, export)
        compare_files(figures, trained, written, export)
        compare_tensors(figures, trained, written, export, base)
        if rounded_here(export) and (problem := other_layers(export, written.model)):
            figures.problems.append(problem)
        if 4 * sum(one.numel() for one in written.shapes.values()) <= WHOLE_BYTES:
            _compare_models(figures, recipe, trained, base, export, settings, examples, config)
    figures.judge()
    _write(export, trained, figures)
    return figures


def _compare_models(
    figures: Figures,
    recipe: Recipe,
    trained: Trained,
    base: str | None,
    export: Path,
    settings: Path,
    examples: list[Example],
    config: Any,
) -> None:
    """Compare what two models say, each loaded whole: the run's by peft, the export as anyone loads it."""
    is_gguf = gguf_of(export) is not None
    with quiet_loading():
        model = load_reference(trained, base)
        if recipe.objective.scores_sequences:
            run = ScoreReference.of(model, read_tokenizer(settings).pad_token_id, examples, figures)
        else:
            pictures = _no_pictures if is_gguf else _pictures(recipe, trained.settings, base)
            context = context_length(config) if is_gguf else None
            run = AnswerReference.of(model, pictures, trained, examples, figures, context)
        del model
        gc.collect()  # models refer to themselves: two of them are never in memory
        if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc keeps what tensors below 32 MB had
            trim(0)
        if (model := load_export(export, figures, config, trained, base)) is not None:
            run.compare(model, end_tokens(settings), figures)


def find_against(run_dir: Path, export: Path, step: str | None) -> Trained:
    """Returns what an export claims to be of, or the step that was asked for. Raises UserError."""
    about = export / "export.json"
    if step is not None or not about.is_file():
        return find_trained(run_dir, step)
    known = read_settings(about)
    if "runs" in known:
        raise UserError(
            f"{export}: merged from several runs, so no run answers like it; `evaluate` says how good it is"
        )
    asked = known.get("step")
    return find_trained(run_dir, None if asked is None else str(asked), known.get("averaged"))


def export_format(export: Path) -> tuple[str, str]:
    """Returns the type of an export's weights, and of its tensors that are not in eight bits: by export.json what it
    should have, by the files themselves if it has none. Raises UserError for a folder that is no export."""
    if (file := gguf_of(export)) is not None:
        return _gguf_format(file), "float32"
    if not (export / "config.json").is_file():
        raise UserError(f"{export}: no model here (no config.json and no .gguf file)")
    about = read_settings(export / METADATA) if (export / METADATA).is_file() else {}
    files = TensorFiles(sorted(export.glob("*.safetensors")))
    types = Counter(str(files.meta(name).dtype).removeprefix("torch.") for name in files.names())
    stored = next((one for one, _ in types.most_common() if one in FLOATS), "float32")
    dtype = about.get("dtype", stored)
    if dtype not in FLOATS:
        raise UserError(f"{export / METADATA}: dtype is {dtype}: expected one of {', '.join(FLOATS)}")
    quantised = read_settings(export / "config.json").get("quantization_config")
    if (kind := about.get("quantised")) is not None or quantised is not None:
        return (kind if kind in THRESHOLDS else _quantised_format(export, quantised or {})), dtype
    return dtype, dtype


def _gguf_format(file: Path) -> str:
    kind = next((t.tensor_type.name for t in open_gguf(file).tensors if "attn_q.weight" in t.name), None)
    if kind is None:
        raise UserError(f"{file}: no language model's weights here (no attn_q.weight): compare the file that has them")
    name = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}.get(kind, kind.lower())
    if name not in THRESHOLDS:
        raise UserError(
            f"{file}: weights of type {kind} have no threshold here: compare one of {', '.join(GGUF_TYPES)}"
        )
    return name


def _quantised_format(export: Path, settings: dict[str, Any]) -> str:
    groups = (settings.get("config_groups") or {}).values()
    weights = {(group["weights"]["type"], group["weights"]["num_bits"]) for group in groups}
    found = {("int", 8): "int8", ("float", 8): "fp8"}.get(weights.pop()) if len(weights) == 1 else None
    if found is None:
        raise UserError(
            f"{export}: weights quantised by {settings.get('quant_method')} in another way than `--quantize` writes "
            "have no threshold here"
        )
    return found


@contextlib.contextmanager
def _settings_of(export: Path) -> Iterator[Path]:
    """Yields the folder with an export's tokenizer and generation config: of a GGUF file, as they are read from it."""
    if (file := gguf_of(export)) is None:
        yield export
        return
    with tempfile.TemporaryDirectory() as folder:
        gguf_tokenizer(file).save_pretrained(folder)
        fields = open_gguf(file).fields
        keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
        GenerationConfig(eos_token_id=[int(fields[key].contents()) for key in keys if key in fields]).save_pretrained(
            folder
        )
        yield Path(folder)


# --- rows


def _with_settings(recipe: Recipe, tokenizer: Path, name: str | None) -> Recipe:
    """Returns the recipe with the tokenizer and template of a folder. name: of the model whose processor sees its
    images; None: the recipe's."""
    changes = {"tokenizer": str(tokenizer), "chat_template": None, "chat_template_arguments": None}
    if recipe.data.image is not None and name is not None:
        changes |= {"name": name, "revision": None}
    return recipe.model_copy(update={"model": recipe.model.model_copy(update=changes)})


def _by_own_processor(recipe: Recipe) -> Recipe:
    """Returns the recipe without settings of images: a model's own processor, with its own bounds, sees them."""
    if recipe.data.image is None:
        return recipe
    image = recipe.data.image.model_copy(update={"processor": None, "max_pixels": None, "min_pixels": None})
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"image": image})})


def held_out_examples(recipe: Recipe, tokenizer: Path, rows: int, name: str | None = None) -> list[Example]:
    """Returns the first rows of `data.eval`, or of `data.train`, as a tokenizer's folder renders them. name: see
    `_with_settings`. Raises UserError."""
    recipe = _with_settings(recipe, tokenizer, name)
    model = recipe.model
    data = recipe.data.model_copy(update={"streaming": False, "mixture": None, "overlong": "truncate"})
    recipe = recipe.model_copy(update={"data": data})
    loaded, opened = load_tokenizer(model), OpenedSources(recipe)
    if isinstance(data.eval, HeldOut):
        held_out = build_held_out(recipe, loaded, opened)
    else:
        sources = tuple(
            source.model_copy(update={"limit": min(rows, source.limit or rows), "weight": 1.0, "max_epochs": None})
            for source in data.eval_sources or data.train
        )
        held_out = build_dataset(recipe, sources, loaded, opened=opened)
    assert held_out is not None
    return [held_out.examples[i] for i in range(min(rows, len(held_out.examples)))]


def _compare_tokens(
    figures: Figures, recipe: Recipe, settings: Path, export: Path, examples: list[Example], rows: int
) -> None:
    """Compare rows and conversations as both tokenizers and templates write them, and the tokens that end them."""
    try:
        theirs = held_out_examples(_by_own_processor(recipe), export, rows, str(export))
        tokenizers = [load_auto(AutoTokenizer, folder) for folder in (settings, export)]
    except (UserError, OSError, ValueError, KeyError) as error:
        figures.problems.append(f"the export's tokenizer does not render the run's rows: {first_line(error)}")
        return
    for ours, their in zip(examples, theirs, strict=False):
        if not _same_tokens(ours, their):
            figures.problems.append(f"{ours.path}:{ours.row} has other tokens: another tokenizer or chat template")
            break
    for one in (one for example in examples for one in example.sequences):
        if len({tokenizer.decode(one.input_ids, skip_special_tokens=True) for tokenizer in tokenizers}) > 1:
            figures.problems.append("the same tokens are another text: another decoder, or other special tokens")
            break
    if len(theirs) != len(examples):
        figures.problems.append(f"{len(theirs)} of {len(examples)} rows are rendered: another chat template")
    _compare_prompts(figures, settings, export, tokenizers)


def _compare_texts(figures: Figures, settings: Path, export: Path, examples: list[Example]) -> None:
    """Compare the tokens of rows whose images are taken out, for which there is no template."""
    tokenizers = [load_auto(AutoTokenizer, folder) for folder in (settings, export)]
    for example in examples:
        texts = [tokenizers[0].decode(one.input_ids) for one in example.sequences]
        if len({str([one(text)["input_ids"] for text in texts]) for one in tokenizers}) > 1:
            figures.problems.append(f"{example.path}:{example.row} has other tokens: another tokenizer")
            break
    _compare_prompts(figures, settings, export, tokenizers)


def _compare_prompts(figures: Figures, settings: Path, export: Path, tokenizers: list[Any]) -> None:
    """Compare a prompt as a server tokenises it, and the tokens that end an answer."""
    if problem := _other_prompt(*tokenizers):
        figures.problems.append(problem)
    ours, theirs = (end_tokens(folder) for folder in (settings, export))
    if ours - theirs:
        figures.problems.append(f"{sorted(ours - theirs)} end an answer in the run, and do not in the export")
    if theirs - ours:
        figures.problems.append(f"{sorted(theirs - ours)} end an answer in the export, and do not in the run")


def _pictures(recipe: Recipe, settings: Path, name: str | None) -> Pictures:
    """Returns how a model sees images, by the processor of `name`, see `_with_settings`. Raises UserError."""
    recipe = _with_settings(recipe, settings, name)
    if (seen := row_images(recipe, load_tokenizer(recipe.model))) is None:
        return _no_pictures
    from finetune.data.images.pixels import pixel_reader

    return pixel_reader(seen.family, seen.rules.threads).plain_inputs


def _no_pictures(images: Sequence[Image], ids: Tensor) -> dict[str, Tensor]:
    return {}


def _without_images(example: Example) -> Example:
    """Returns what a GGUF file, which has the language model alone, can be asked of an example."""

    def text(one: Document) -> Document:
        kept = np.ones(len(one.input_ids), np.bool_)
        for image in one.images:
            kept[image.begin : image.end] = False
        return Document(one.input_ids[kept], one.loss_mask[kept])

    return replace(example, sequences=tuple(map(text, example.sequences)))


def _same_tokens(ours: Example, theirs: Example) -> bool:
    pairs = zip(ours.sequences, theirs.sequences, strict=True)
    return all(np.array_equal(a.input_ids, b.input_ids) and np.array_equal(a.loss_mask, b.loss_mask) for a, b in pairs)


def _other_prompt(ours: Any, theirs: Any) -> str | None:
    """Returns how a prompt differs, as a server tokenises it: with the special tokens that a tokenizer adds itself."""
    texts = []
    for tokenizer in (ours, theirs):
        has_template = bool(tokenizer.chat_template)
        chat = tokenizer.apply_chat_template(_CHAT, add_generation_prompt=True, tokenize=False) if has_template else ""
        texts.append((chat, tokenizer(chat or "How many?")["input_ids"]))
    if texts[0][0] != texts[1][0]:
        return "a prompt is rendered otherwise: another chat template"
    if texts[0][1] != texts[1][1]:
        return (
            f"a prompt has other tokens: it begins with {texts[1][1][:3]} in the export, {texts[0][1][:3]} in the run"
        )
    return None


# --- what is written


def _write(export: Path, trained: Trained, figures: Figures) -> None:
    """Write verify.json and the section of the card."""
    about = {"against": {"step": trained.step, **trained.identity()}, **figures.as_dict()}
    about["thresholds"] = asdict(THRESHOLDS[figures.format])
    write_atomically(export / VERIFY, json.dumps(about, indent=1) + "\n")
    card = export / "README.md"
    if card.is_file():
        text = card.read_text(encoding="utf-8").partition(SECTION)[0].rstrip() + "\n\n"
        write_atomically(card, text + card_section(figures))
