"""The gate: whether an export answers like what was trained, in figures.

    rows of the run's held-out data ── the run's model, adapter beside its base ── log-probs of trained tokens ─┐
                                    └─ the export, loaded as anyone loads it ───── log-probs ───────────────────┴ KL

Teacher-forced, so that errors do not add up along a text; and what is around the weights: the tokens of rendered
conversations, the tokens that end a generation, names of tensors, greedy texts. The run's model is computed by peft's
forward, not by the sums that merged it.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import json
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
)

from finetune.data.building import OpenedSources
from finetune.data.dataset import build_dataset, build_held_out, until_end
from finetune.data.examples import row_images
from finetune.data.samples import Example, Image
from finetune.errors import UserError
from finetune.export.commands import class_of_result, load_trained
from finetune.export.figures import SECTION, THRESHOLDS, Figures, card_section
from finetune.export.gguf_file import UNREAD, context_length, read_back, rope_of
from finetune.export.quantised import other_layers, round_layers
from finetune.export.streamed import StreamedModel
from finetune.export.trained import Trained, find_trained
from finetune.export.verify_scores import ScoreReference
from finetune.models.added_tokens import add_tokens, start_rows, train_rows
from finetune.models.base_checkpoint import base_checkpoint
from finetune.models.config import base_config, first_line, load_tokenizer, model_config
from finetune.models.score_model import labelled
from finetune.models.vision import adapted_modules, family_of, processor_files
from finetune.models.weights import add_adapters
from finetune.objectives import score_labels
from finetune.recipe import Recipe
from finetune.recipe.schema import HeldOut, Model
from finetune.utils import write_atomically

VERIFY = "verify.json"
ROWS = 32
_KEPT_BYTES = 2**28  # of the run's log-probabilities, fp32
_GREEDY_ROWS, _GREEDY_TOKENS = 4, 24
_CHAT = [{"role": "user", "content": "How many days has a week?"}]


def verify_export(export: Path, trained: Trained, rows: int = ROWS, base: str | None = None) -> Figures:
    """Compare an export with the run that it is of; write verify.json and the card. Raises UserError where the run's
    rows, its base or the export cannot be read at all."""
    recipe = _recipe(trained)
    with _settings_of(export) as settings:
        figures = Figures(export_format(export))
        is_gguf = gguf_of(export) is not None
        examples = held_out_examples(recipe, trained.settings, rows, base)
        _compare_tokens(figures, recipe, trained.settings, settings, examples, rows)
        config = _base_config(recipe, base, is_gguf)
        _compare_configs(figures, config, export)
        _compare_processors(figures, recipe, base, export)
        with quiet_loading():
            model, dtype = load_reference(trained, base), _rounded_here(export)
            if recipe.objective.scores_sequences:
                run = ScoreReference.of(model, AutoTokenizer.from_pretrained(settings).pad_token_id, examples, figures)
            else:
                pictures = _pictures(recipe, trained.settings, base)
                context = context_length(config) if is_gguf else None
                run = _Reference.of(model, pictures, trained, examples, figures, context)
                if dtype is not None:
                    run.keep_rounded(round_layers(model, figures.format, dtype), figures)
            del model
            gc.collect()  # models refer to themselves: two of them are never in memory
            if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc keeps what tensors below 32 MB had
                trim(0)
            if (model := _load_export(export, figures, config, trained, base)) is not None:
                run.compare(model, end_tokens(settings), figures)
                if dtype is not None and (problem := other_layers(export, model)):
                    figures.problems.append(problem)
    figures.judge()
    _write(export, trained, figures)
    return figures


def find_against(run_dir: Path, export: Path, step: str | None) -> Trained:
    """Returns what an export claims to be of, or the step that was asked for. Raises UserError."""
    about = export / "export.json"
    if step is not None or not about.is_file():
        return find_trained(run_dir, step)
    known = json.loads(about.read_text(encoding="utf-8"))
    if "runs" in known:
        raise UserError(
            f"{export}: merged from several runs, so no run answers like it; `evaluate` says how good it is"
        )
    return find_trained(run_dir, None if known["step"] is None else str(known["step"]), known.get("averaged"))


def gguf_of(export: Path) -> Path | None:
    """Returns the GGUF file of an export. Raises UserError where there are several."""
    files = sorted(export.glob("*.gguf"))
    if len(files) > 1:
        raise UserError(f"{export}: {len(files)} GGUF files: which one? Keep one in the folder")
    return files[0] if files else None


def export_format(export: Path) -> str:
    """Returns the type of the weights. Raises UserError for a folder that is no export."""
    if (file := gguf_of(export)) is not None:
        from gguf import GGUFReader  # pyright: ignore[reportMissingImports]

        kind = next(t.tensor_type.name for t in GGUFReader(file).tensors if "attn_q.weight" in t.name)
        found = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}.get(kind, kind.lower())
        if found not in THRESHOLDS:
            raise UserError(f"{file}: weights of type {kind} have no threshold here: compare f32, bf16, f16 or q8_0")
        return found
    if not (export / "config.json").is_file():
        raise UserError(f"{export}: no model here (no config.json and no .gguf file)")
    config = json.loads((export / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config") or {}
    if (quantised := config.get("quantization_config")) is not None:
        return _quantised_format(export, quantised)
    found = next((c[key] for c in (config, text) for key in ("dtype", "torch_dtype") if c.get(key)), "float32")
    return found if found in THRESHOLDS else "float32"


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


def _rounded_here(export: Path) -> torch.dtype | None:
    """Returns the type that weights had before `--quantize` rounded them; None of other exports."""
    about = export / "export.json"
    known = json.loads(about.read_text(encoding="utf-8")) if about.is_file() else {}
    return getattr(torch, known["dtype"]) if known.get("quantised") else None


@contextlib.contextmanager
def _settings_of(export: Path) -> Iterator[Path]:
    """Yields the folder with an export's tokenizer and generation config: of a GGUF file, as they are read from it."""
    if (file := gguf_of(export)) is None:
        yield export
        return
    from gguf import GGUFReader  # pyright: ignore[reportMissingImports]

    with tempfile.TemporaryDirectory() as folder:
        gguf_tokenizer(file).save_pretrained(folder)
        fields = GGUFReader(file).fields
        keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
        GenerationConfig(eos_token_id=[int(fields[key].contents()) for key in keys if key in fields]).save_pretrained(
            folder
        )
        yield Path(folder)


def gguf_tokenizer(file: Path) -> Any:
    """Returns the tokenizer of a GGUF file, which splits text as llama.cpp does by the name in the file."""
    from gguf import GGUFReader  # pyright: ignore[reportMissingImports]

    tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    name = GGUFReader(file).fields.get("tokenizer.ggml.pre")
    if name is not None and name.contents() == "smollm":
        digits, of_gpt2 = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, of_gpt2])
    return tokenizer


def _recipe(trained: Trained) -> Recipe:
    if trained.recipe is None:
        raise UserError(f"{trained.run_dir}: no recipe.yaml here, so there are no rows to compare on: give a run")
    return trained.recipe


# --- rows


def _with_settings(recipe: Recipe, tokenizer: Path, name: str | None) -> Recipe:
    """Returns the recipe with the tokenizer and template of a folder. name: of the model whose processor sees its
    images; None: the recipe's."""
    changes = {"tokenizer": str(tokenizer), "chat_template": None, "chat_template_arguments": None}
    if recipe.data.image is not None and name is not None:
        changes |= {"name": name, "revision": None}
    return recipe.model_copy(update={"model": recipe.model.model_copy(update=changes)})


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
        theirs = held_out_examples(recipe, export, rows, str(export))
        tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in (settings, export)]
    except (UserError, OSError, ValueError, KeyError) as error:
        figures.problems.append(f"the export's tokenizer does not render the run's rows: {first_line(error)}")
        return
    for ours, their in zip(examples, theirs, strict=False):
        if not _same_tokens(ours, their):
            figures.problems.append(f"{ours.path}:{ours.row} has other tokens: another tokenizer or chat template")
            break
    if len(theirs) != len(examples):
        figures.problems.append(f"{len(theirs)} of {len(examples)} rows are rendered: another chat template")
    if examples and (problem := _other_prompt(*tokenizers)):
        figures.problems.append(problem)
    ends = [end_tokens(folder) for folder in (settings, export)]
    if ends[0] - ends[1]:
        figures.problems.append(f"{sorted(ends[0] - ends[1])} end an answer in the run, and do not in the export")


Pictures = Callable[[Sequence[Image], Tensor], dict[str, Tensor]]  # images, ids (1, T) -> what a forward takes


def _pictures(recipe: Recipe, settings: Path, name: str | None) -> Pictures:
    """Returns how a model sees images, by the processor of `name`, see `_with_settings`. Raises UserError."""
    recipe = _with_settings(recipe, settings, name)
    if (seen := row_images(recipe, load_tokenizer(recipe.model))) is None:
        return lambda images, ids: {}
    from finetune.data.images.pixels import pixel_reader

    return pixel_reader(seen.family, seen.rules.threads).plain_inputs


def _compare_processors(figures: Figures, recipe: Recipe, base: str | None, export: Path) -> None:
    """Compare the settings of the processors, of a run on images, with the base's."""
    for path in processor_files(_model_of(recipe, base)) if recipe.data.image is not None else ():
        if not (export / path.name).is_file():
            figures.problems.append(f"{path.name} is missing: images would be seen by other settings")
            continue
        ours, theirs = (json.loads(one.read_text(encoding="utf-8")) for one in (path, export / path.name))
        for key in sorted(ours.keys() | theirs.keys()):
            if ours.get(key) != theirs.get(key):
                figures.problems.append(f"{path.name}: {key} is {theirs.get(key)}, and {ours.get(key)} in the run")


# What an export may have otherwise than the base.
_FREE = {"dtype", "torch_dtype", "tie_word_embeddings", "vocab_size", "use_cache", "architectures", "_name_or_path"}
_FREE |= {"quantization_config", "transformers_version", "bos_token_id", "eos_token_id", "pad_token_id", "name_or_path"}


def _base_config(recipe: Recipe, base: str | None, text_alone: bool) -> Any:
    model = _model_of(recipe, base)
    if labels := score_labels(recipe.objective):  # its result is a text model also of a multimodal base
        return labelled(model_config(model), labels)
    return model_config(model) if text_alone or model.config is not None else base_config(model)


def _model_of(recipe: Recipe, base: str | None) -> Model:
    """Returns the recipe's model, or another place of it."""
    return recipe.model.model_copy(update={"name": base, "revision": None}) if base else recipe.model


# What transformers reads from a GGUF file; the rest it takes from the class, and llama.cpp from the architecture.
_IN_GGUF = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "rms_norm_eps")


def _compare_configs(figures: Figures, config: Any, export: Path) -> None:
    if (file := gguf_of(export)) is not None:
        theirs = AutoConfig.from_pretrained(export, gguf_file=file.name)
        settings = [{key: getattr(one, key) for key in _IN_GGUF} for one in (config, theirs)]
        for one, values in zip((config, theirs), settings, strict=True):
            values["rope_theta"] = rope_of(one)["rope_theta"]
            values["rms_norm_eps"] = round(values["rms_norm_eps"], 9)  # fp32 in the file
    else:
        settings = [_settings(one.to_dict()) for one in (config, AutoConfig.from_pretrained(export))]
    for key in sorted(settings[0].keys() | settings[1].keys()):
        ours, theirs = (one.get(key) for one in settings)
        if ours != theirs:
            figures.problems.append(f"{file or 'config.json'}: {key} is {theirs}, and {ours} in the run")


def _settings(config: dict[str, Any]) -> dict[str, Any]:
    """Returns what decides how a model computes."""
    return {
        key: _settings(value) if key.endswith("_config") and isinstance(value, dict) else value
        for key, value in config.items()
        if key not in _FREE
    }


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


def end_tokens(folder: Path) -> set[int]:
    try:
        ends = GenerationConfig.from_pretrained(folder).eos_token_id
    except OSError:
        return set()
    return set(ends) if isinstance(ends, list) else {ends} - {None}  # pyright: ignore[reportReturnType]


# --- models


def load_reference(trained: Trained, base: str | None = None) -> Any:
    """Returns the trained model in fp32, adapters beside their base: what training computed with. Raises UserError."""
    recipe = _recipe(trained)
    if not trained.is_checkpoint:
        return load_trained(trained.folder, base).float().eval()
    model, first_added = _untrained(recipe, base)
    if trained.is_adapter:
        assert recipe.lora is not None
        parts = recipe.model.train
        adapted = adapted_modules(model, family_of(model.config), parts, recipe.lora) if parts else None
        model = add_adapters(model.float(), recipe.lora, torch.float32, recipe.tokens, adapted)
        if recipe.tokens is not None and recipe.tokens.train != "all":
            train_rows(model, first_added, len(recipe.tokens.add), torch.float32)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name in trained.shapes:
            parameters[name].copy_(trained.read(name))
    return model.float().eval()


def _untrained(recipe: Recipe, base: str | None) -> tuple[Any, int]:
    """Returns the model that training began with, of a multimodal one its text part; and the first of added tokens."""
    about, more, first_added = _model_of(recipe, base), dict[str, Any](), 0
    auto: Any = AutoModelForCausalLM if about.train is None else AutoModelForImageTextToText
    if labels := score_labels(recipe.objective):
        auto, more["config"] = AutoModelForSequenceClassification, labelled(model_config(about), labels)
    if about.config is not None:
        model: Any = auto.from_config(more.get("config") or model_config(about))
    else:
        if (checkpoint := base_checkpoint(about)) is not None:
            more = {"config": model_config(about), "key_mapping": checkpoint.renames, **more}
        code, revision = about.trust_remote_code, about.revision or "main"
        try:
            model = auto.from_pretrained(
                about.name, revision=revision, trust_remote_code=code, dtype=torch.float32, **more
            )
        except (OSError, ValueError) as error:
            raise UserError(
                f"the base model {about.name!r} cannot be loaded: {first_line(error)}; give --base"
            ) from None
    if recipe.tokens is not None:
        tokenizer = load_tokenizer(about)
        first_added = len(tokenizer)
        start_rows(model, first_added, add_tokens(tokenizer, recipe.tokens))
    return model, first_added


def _load_export(export: Path, figures: Figures, config: Any, trained: Trained, base: str | None) -> Any | None:
    """Returns the export in fp32; None where transformers cannot load it. config: of a GGUF file's model, which states
    only some of it."""
    file, more = gguf_of(export), dict[str, Any]()
    if file is not None and config.model_type in UNREAD:
        written = StreamedModel(trained, None, base)
        state = read_back(written, file)
        config.tie_word_embeddings = "lm_head.weight" not in state
        return type(written.model).from_pretrained(None, config=config, state_dict=state).float().eval()
    if file is not None:
        # llama.cpp has no Mistral: without a window it is the same as Llama.
        config = as_llama(config) if config.model_type == "mistral" else copy.deepcopy(config)
        config.tie_word_embeddings = AutoConfig.from_pretrained(export, gguf_file=file.name).tie_word_embeddings
        more = {"gguf_file": file.name, "config": config}
    elif figures.format in ("int8", "fp8"):
        own = AutoConfig.from_pretrained(export)
        own.quantization_config["dequantize"] = True
        more = {"config": own}
    try:
        auto: Any = AutoModelForCausalLM if file is not None else class_of_result(export)
        model, report = auto.from_pretrained(export, dtype=torch.float32, output_loading_info=True, **more)
    except (ImportError, OSError, ValueError, RuntimeError) as error:
        figures.problems.append(f"transformers cannot load it: {first_line(error)}")
        return None
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if names := sorted(map(str, report.get(kind) or ())):
            figures.problems.append(f"{kind.replace('_', ' ')}: {', '.join(names[:3])} ({len(names)} in all)")
    return model.eval()


def as_llama(config: Any) -> LlamaConfig:
    """Returns Mistral's config as that of the same Llama."""
    return LlamaConfig(**{k: v for k, v in config.to_dict().items() if k not in ("model_type", "architectures")})


class _Sequence(NamedTuple):
    """A document of a held-out row, or its prompt."""

    ids: Tensor  # (T,)
    mask: Tensor  # (T,)
    images: tuple[Image, ...]

    @property
    def prompt(self) -> _Sequence:
        end = int(self.mask.int().argmax())
        return _Sequence(self.ids[:end], self.mask[:end], tuple(one for one in self.images if one.end <= end))

    def inputs(self, pictures: Pictures, device: torch.device) -> dict[str, Tensor]:
        """Returns what a forward takes."""
        found = {"input_ids": self.ids[None], **pictures(self.images, self.ids[None])}
        return {name: value.to(device) for name, value in found.items()}


@dataclass
class _Reference:
    """What the run's model says, kept while the export is in its place."""

    sequences: list[_Sequence]
    log_probs: list[Tensor]  # (S, V) each
    prompts: list[_Sequence]
    texts: list[list[int]]
    pictures: Pictures  # by the base's processor, whose settings the export has as well
    rounded: list[Tensor] | None = None  # (S, V) each, of the run's model with the weights of a quantised export

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        model: Any,
        pictures: Pictures,
        trained: Trained,
        examples: list[Example],
        figures: Figures,
        context: int | None,
    ) -> _Reference:
        """context: the tokens that the export takes; None: as the run's model."""
        cut, whole = slice(context), [one for e in examples for one in e.sequences]
        sequences = [
            _Sequence(
                torch.from_numpy(one.input_ids[cut].astype("int64")), torch.from_numpy(one.loss_mask[cut]), one.images
            )
            for one in whole
            if one.loss_mask[cut].any()
        ]
        kept, log_probs, kl_base, room = [], [], 0.0, _KEPT_BYTES
        adapted = hasattr(model, "disable_adapter")
        for sequence in sequences:
            if room <= 0:
                break
            found = _log_probs(model, sequence, pictures)
            if adapted:
                with model.disable_adapter():
                    kl_base += float(_kl(found, _log_probs(model, sequence, pictures)).sum())
            room -= found.nbytes
            kept.append(sequence)
            log_probs.append(found)
        figures.rows, figures.tokens = len(kept), sum(map(len, log_probs))
        figures.kl_base = kl_base / figures.tokens if adapted and figures.tokens else None
        ends = end_tokens(trained.settings)
        prompts = [prompt for one in kept if len((prompt := one.prompt).ids)]
        prompts = [one for one in prompts if context is None or len(one.ids) + _GREEDY_TOKENS <= context][:_GREEDY_ROWS]
        texts = [_greedy(model, prompt, pictures, ends) for prompt in prompts]
        return cls(kept, log_probs, prompts, texts, pictures)

    @torch.no_grad()
    def keep_rounded(self, model: Any, figures: Figures) -> None:
        """Keep what the run's model says after the same rounding, and fill in what that costs."""
        self.rounded = [_log_probs(model, sequence, self.pictures) for sequence in self.sequences]
        costs = [float(_kl(*pair).sum()) for pair in zip(self.log_probs, self.rounded, strict=True)]
        figures.kl_rounding = sum(costs) / figures.tokens if figures.tokens else None

    @torch.no_grad()
    def compare(self, model: Any, ends: set[int], figures: Figures) -> None:
        """Fill in how the export's model differs. ends: the tokens that end its answers."""
        rows = model.get_input_embeddings().weight.shape[0]
        highest = max((int(one.ids.max()) for one in self.sequences), default=0)
        if highest >= rows:
            figures.problems.append(
                f"token {highest} has no embedding: the export has {rows} rows, added ones are lost"
            )
            return
        head, embeddings = model.get_output_embeddings().weight, model.get_input_embeddings().weight
        if model.config.get_text_config().tie_word_embeddings and not torch.equal(head, embeddings):
            figures.problems.append("config.json ties the head to the embeddings, and the files hold another head")
        total, worst, same, beyond = 0.0, 0.0, 0, 0.0
        for i, (sequence, ours) in enumerate(zip(self.sequences, self.log_probs, strict=True)):
            theirs = _log_probs(model, sequence, self.pictures)
            width = min(ours.shape[1], theirs.shape[1])  # padding of the vocabulary, if any
            kl = _kl(ours[:, :width], theirs[:, :width])
            total += float(kl.sum())
            worst = max(worst, float(kl.max()) if kl.isfinite().all() else float("inf"))
            same += int((ours.argmax(1) == theirs.argmax(1)).sum())
            beyond += float(_kl(self.rounded[i][:, :width], theirs[:, :width]).sum()) if self.rounded else 0.0
        if figures.tokens:
            figures.kl_mean, figures.kl_max = max(0.0, total / figures.tokens), worst
            figures.top1 = same / figures.tokens
            figures.kl_beyond = max(0.0, beyond / figures.tokens) if self.rounded else None
        pairs = zip(self.prompts, self.texts, strict=True)
        equal = [_greedy(model, prompt, self.pictures, ends) == text for prompt, text in pairs]
        figures.greedy = sum(equal) / len(equal) if equal else None


def _log_probs(model: Any, sequence: _Sequence, pictures: Pictures) -> Tensor:  # (S, V) fp32, of the trained tokens
    inputs = sequence.inputs(pictures, model.device)
    logits = model(**inputs, use_cache=False).logits[0, :-1]
    return torch.log_softmax(logits[sequence.mask[1:].to(logits.device)].float(), dim=-1).cpu()


def _kl(ours: Tensor, theirs: Tensor) -> Tensor:  # (S,) nats
    """Returns KL(ours, theirs), normalised again in fp64: in fp32 a small divergence drowns in the rounding of its
    terms."""
    p, q = (torch.log_softmax(one.double(), dim=1) for one in (ours, theirs))
    return (p.exp() * (p - q)).sum(dim=1)


def _greedy(model: Any, prompt: _Sequence, pictures: Pictures, ends: set[int]) -> list[int]:
    """Returns the likeliest tokens after a prompt, up to and without an end token."""
    inputs = prompt.inputs(pictures, model.device)
    settings = GenerationConfig(
        max_new_tokens=_GREEDY_TOKENS, do_sample=False, eos_token_id=sorted(ends) or None, pad_token_id=0
    )
    mask = torch.ones_like(inputs["input_ids"])
    output = model.generate(**inputs, attention_mask=mask, generation_config=settings)[0, len(prompt.ids) :]
    return until_end(output.tolist(), ends)


_LOADERS = (
    "transformers.modeling_utils",
    "transformers.loading_report",
    "transformers.distributed.tensor_parallel",  # looks, and warns, only where the first one is this quiet
)


@contextlib.contextmanager
def quiet_loading() -> Iterator[None]:
    """What transformers and peft say while they load is in the figures, or known (tied heads, experts' patterns)."""
    loggers = [logging.getLogger(name) for name in _LOADERS]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`", UserWarning)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


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
