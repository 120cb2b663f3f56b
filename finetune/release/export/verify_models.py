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
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from finetune.checkpoints.trained import Trained
from finetune.errors import UserError
from finetune.models.added_tokens import start_rows, train_rows
from finetune.models.base_config import first_line
from finetune.models.base_model import Base
from finetune.models.remote_code import from_config, load_auto
from finetune.models.score_model import labelled
from finetune.models.vision import family_of, targets_in_parts
from finetune.models.weights import add_adapters
from finetune.release.export.figures import Figures
from finetune.release.export.formats import EIGHT_BITS
from finetune.release.export.gguf_file import gguf_of, other_tensors
from finetune.release.export.gguf_settings import UNREAD, is_written, open_gguf
from finetune.release.export.loading import class_of_result, load_trained
from finetune.release.export.streamed import StreamedModel, auto_class, base_model
from finetune.release.export.verify_tensors import stored_tensors

_LOADERS = (
    "transformers.modeling_utils",
    "transformers.loading_report",
    "transformers.distributed.tensor_parallel",  # looks, and warns, only if the first one is this quiet
)


def load_reference(trained: Trained, base: str | None = None) -> Any:
    """Returns the trained model in fp32, with adapters next to their base, as in training. Raises UserError."""
    if not trained.is_checkpoint:
        return load_trained(trained.folder, base).float().eval()
    recipe = trained.recipe
    assert recipe is not None  # as a checkpoint has
    about, first_added = base_model(trained, base), 0
    of_run, auto = Base(about, recipe.tokens), auto_class(about, trained.labels)
    config = labelled(of_run.config, trained.labels) if trained.labels else of_run.config
    if about.name is None or about.config is not None:  # the schema wants one of the two
        model: Any = from_config(auto, config, about.trust_remote_code)
    else:  # of a multimodal one its text part
        files = of_run.files
        more: dict[str, Any] = {"config": config, "key_mapping": files.renames} if files is not None else {}
        more |= {"config": config} if trained.labels else {}
        revision = about.revision or "main"
        try:
            model = load_auto(
                *(auto, about.name, about.trust_remote_code), revision=revision, dtype=torch.float32, **more
            )
        except (OSError, ValueError) as error:
            raise UserError(
                f"the base model {about.name!r} cannot be loaded: {first_line(error)}; give --base"
            ) from None
    if recipe.tokens is not None:
        first_added = len(of_run.tokenizer) - len(of_run.pieces)
        start_rows(model, first_added, of_run.pieces)
    if trained.is_adapter:
        assert recipe.lora is not None
        parts = recipe.model.train
        targets = targets_in_parts(model, family_of(model.config), parts, recipe.lora) if parts else None
        model = add_adapters(model.float(), recipe.lora, torch.float32, recipe.tokens, targets)
        if recipe.tokens is not None and recipe.tokens.train != "all":
            train_rows(model, first_added, len(recipe.tokens.add), torch.float32)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name in trained.shapes:
            parameters[name].copy_(trained.read(name))
    return model.float().eval()


def load_export(export: Path, figures: Figures, config: Any, written: StreamedModel) -> Any | None:
    """Returns the export in fp32; None if transformers cannot load it. config: of a GGUF file's model, which states
    only some of it; written: the run's tensors."""
    file, is_decoded, more = gguf_of(export), False, dict[str, Any]()
    if file is not None:
        config = copy.deepcopy(config)
        config.tie_word_embeddings = not any(one.name == "output.weight" for one in open_gguf(file).tensors)
        if is_written(config):
            figures.problems += (others := other_tensors(written, file))
            is_decoded = config.model_type in UNREAD
            if is_decoded and others:
                return None
        # llama.cpp has no Mistral: without a window it is the same as Llama.
        config = as_llama(config) if config.model_type == "mistral" else config
        more = {"gguf_file": file.name, "config": config}
    elif figures.format in EIGHT_BITS:
        config = more["config"] = load_auto(AutoConfig, export)
        is_decoded = find_spec("compressed_tensors") is None
        if is_decoded:
            del config.quantization_config
        else:
            config.quantization_config["dequantize"] = True
    try:
        if is_decoded:  # here, as the format says; auto classes want a folder
            kind = type(written.text_part.text if file is not None and written.text_part else written.model)
            state = {name: one.read() for name, one in stored_tensors(export, written).items()}
            settings: dict[str, Any] = {"config": config, "state_dict": state, "trust_remote_code": False}
            model, report = kind.from_pretrained(None, dtype=torch.float32, output_loading_info=True, **settings)
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


@contextlib.contextmanager
def quiet_loading() -> Iterator[None]:
    """Hides the messages of transformers and peft while they load: they are in the figures, or expected (tied heads,
    experts' patterns)."""
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
