"""The two models of the gate: the run's, as training computed with it, and the export's, as anyone loads it."""

from __future__ import annotations

import contextlib
import copy
import logging
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    LlamaConfig,
)

from finetune.errors import UserError
from finetune.export.figures import Figures
from finetune.export.formats import EIGHT_BITS
from finetune.export.gguf_file import gguf_of, gguf_tensors, other_tensors
from finetune.export.gguf_settings import UNREAD, is_written, open_gguf
from finetune.export.loading import class_of_result, load_trained
from finetune.export.streamed import StreamedModel
from finetune.export.trained import Trained
from finetune.export.verify_tensors import stored_tensors
from finetune.models.added_tokens import add_tokens, start_rows, train_rows
from finetune.models.base_checkpoint import base_checkpoint
from finetune.models.base_config import first_line
from finetune.models.config import model_config
from finetune.models.remote_code import from_config, load_auto
from finetune.models.score_model import labelled
from finetune.models.tokenizer import load_tokenizer
from finetune.models.vision import adapted_modules, family_of
from finetune.models.weights import add_adapters
from finetune.objectives import score_labels
from finetune.recipe import Recipe
from finetune.recipe.schema import Model


def recipe_of(trained: Trained) -> Recipe:
    if trained.recipe is None:
        raise UserError(f"{trained.run_dir}: no recipe.yaml here, so there are no rows to compare on: give a run")
    return trained.recipe


def model_of(recipe: Recipe, base: str | None) -> Model:
    """Returns the recipe's model, or another place of it."""
    return recipe.model.model_copy(update={"name": base, "revision": None}) if base else recipe.model


def load_reference(trained: Trained, base: str | None = None) -> Any:
    """Returns the trained model in fp32, adapters beside their base: what training computed with. Raises UserError."""
    recipe = recipe_of(trained)
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
    about, more, first_added = model_of(recipe, base), dict[str, Any](), 0
    auto: Any = AutoModelForCausalLM if about.train is None else AutoModelForImageTextToText
    if labels := score_labels(recipe.objective):
        auto, more["config"] = AutoModelForSequenceClassification, labelled(model_config(about), labels)
    if about.config is not None or about.name is None:  # the schema wants one of the two
        model: Any = from_config(auto, more.get("config") or model_config(about), about.trust_remote_code)
    else:
        if (checkpoint := base_checkpoint(about)) is not None:
            more = {"config": model_config(about), "key_mapping": checkpoint.renames, **more}
        code, revision = about.trust_remote_code, about.revision or "main"
        try:
            model = load_auto(auto, str(about.name), code, revision=revision, dtype=torch.float32, **more)
        except (OSError, ValueError) as error:
            raise UserError(
                f"the base model {about.name!r} cannot be loaded: {first_line(error)}; give --base"
            ) from None
    if recipe.tokens is not None:
        tokenizer = load_tokenizer(about)
        first_added = len(tokenizer)
        start_rows(model, first_added, add_tokens(tokenizer, recipe.tokens))
    return model, first_added


def load_export(export: Path, figures: Figures, config: Any, trained: Trained, base: str | None) -> Any | None:
    """Returns the export in fp32; None where transformers cannot load it. config: of a GGUF file's model, which states
    only some of it."""
    auto: Any = None
    file, more = gguf_of(export), dict[str, Any]()
    if file is not None:
        config = copy.deepcopy(config)
        config.tie_word_embeddings = not any(one.name == "output.weight" for one in open_gguf(file).tensors)
        if is_written(config):
            written = StreamedModel(trained, None, base)
            figures.problems += (others := other_tensors(written, file))
            if config.model_type in UNREAD and others:
                return None
            if config.model_type in UNREAD:
                kind = type(written.text_part.text if written.text_part else written.model)
                state = {name: one.read() for name, one in gguf_tensors(written, file).items()}
                return kind.from_pretrained(None, config=config, state_dict=state).float().eval()
        # llama.cpp has no Mistral: without a window it is the same as Llama.
        config = as_llama(config) if config.model_type == "mistral" else config
        more = {"gguf_file": file.name, "config": config}
    elif figures.format in EIGHT_BITS:
        own = load_auto(AutoConfig, export)
        if find_spec("compressed_tensors") is not None:
            own.quantization_config["dequantize"] = True
        else:  # decoded here, as the format says
            delattr(own, "quantization_config")
            written = StreamedModel(trained, None, base)
            more["state_dict"] = {name: one.read() for name, one in stored_tensors(export, written).items()}
            auto = type(written.model)  # auto classes want a folder
        more["config"] = own
    try:
        if "state_dict" in more:
            model, report = auto.from_pretrained(
                None, trust_remote_code=False, dtype=torch.float32, output_loading_info=True, **more
            )
        else:
            auto = AutoModelForCausalLM if file is not None else class_of_result(export)
            model, report = load_auto(auto, export, dtype=torch.float32, output_loading_info=True, **more)
    except (ImportError, OSError, ValueError, RuntimeError, SafetensorError) as error:
        figures.problems.append(f"transformers cannot load it: {first_line(error)}")
        return None
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if names := sorted(map(str, report.get(kind) or ())):
            figures.problems.append(f"{kind.replace('_', ' ')}: {', '.join(names[:3])} ({len(names)} in all)")
    return model.eval()


def as_llama(config: Any) -> LlamaConfig:
    """Returns Mistral's config as that of the same Llama."""
    return LlamaConfig(**{k: v for k, v in config.to_dict().items() if k not in ("model_type", "architectures")})


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
