"""runs/<name>/model/: a plain Hugging Face folder, complete or absent, verified by reading it back.

    model.safetensors           or model-00001-of-0000N.safetensors with model.safetensors.index.json
    adapter_model.safetensors   instead of these, with adapter_config.json, if an adapter was trained
    config.json                 full fine-tuning only: an adapter names its base
    labels.json                 instead of it, if an adapter was trained with a head of scores
    generation_config.json      end tokens that this training taught; none with a head of scores
    tokenizer files, chat template
    README.md                   the model card

It is written to model.partial and renamed; model.old is the previous result during the exchange. Rank 0 writes while
every rank takes part in the same collectives.
"""

from __future__ import annotations

import copy
import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerFast
from transformers.dynamic_module_utils import custom_object_save

from finetune.checkpoints.safetensors_writer import save_tensors
from finetune.checkpoints.trained import LABELS
from finetune.checkpoints.weight_files import (
    SHARD_BYTES,
    DiskLayout,
    State,
    Verification,
    WeightsWriter,
    cast,
    weight_files,
    with_own_class,
)
from finetune.engine.base import Engine
from finetune.errors import RunFailure
from finetune.models.added_tokens import has_added_tokens, split_rows
from finetune.models.base_checkpoint import BaseCheckpoint
from finetune.models.checkpoint_files import dropped_tensors, kept_tensors
from finetune.models.config import restore_dropout
from finetune.models.generation_config import valid_generation_config
from finetune.models.lora_targets import adapted_paths, loadable_targets
from finetune.models.mtp import copies_in_result
from finetune.models.mtp_files import undeclare_head
from finetune.models.text_part import TextPart
from finetune.models.wrapped import has_scores
from finetune.utils import fsync, pattern_of, unwrap_peft, write_atomically

_LIKELY = ("pad", "reserved", "unused", "unk")  # parts of names of tokens that no document ends with, the best first


def save_result(
    engine: Engine,
    tokenizer: PreTrainedTokenizerFast,
    end_ids: set[int],
    adapter: bool,
    dtype: torch.dtype,
    card: str,
    folder: Path,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Save weights (or the adapter), tokenizer with chat template, settings and model card. Collective.

    dtype: of saved full weights; adapters keep the type they were trained in. Rank 0 holds one shard of `shard_bytes`
    and the tensors on their way into it, or the full adapter.

    Raises RunFailure on every rank if rank 0 fails to write or to read back: an earlier `folder` is then untouched.
    """
    main, partial = MainRank(engine, folder), partial_path(folder)
    main.do(start_replace, folder)
    main.settle()
    try:
        main.do(_write_settings, engine.unwrapped, tokenizer, end_ids, adapter, partial)
        main.settle()
        if adapter:
            expected, copied = _write_adapter(engine, main, partial), {}
        else:
            expected, copied = _write_weights(engine, main, dtype, partial, shard_bytes)
        main.do((partial / "README.md").write_text, card, "utf-8")  # peft has written one of its own
        main.settle()
    except RunFailure:
        if engine.is_main:
            shutil.rmtree(partial, ignore_errors=True)  # its space may be what is missing
        raise
    verification = Verification(partial, expected, copied)
    for file in engine.ranks.gather(weight_files(partial) if engine.is_main else None)[0]:
        main.do(verification.read, file)
        engine.ranks.barrier()  # so that the collective timeout has to cover one file only
    main.do(verification.finish)
    main.settle()
    main.do(finish_replace, folder)
    main.settle()


def _write_weights(
    engine: Engine, main: MainRank, dtype: torch.dtype, folder: Path, shard_bytes: int
) -> tuple[State, dict[str, Path]]:
    """Gather and write one tensor at a time. Returns the expected tensors of the files, and the sources of copied
    ones."""
    model = with_own_class(engine.unwrapped)
    shapes = {name: cast(tensor, dtype) for name, tensor in engine.saved_shapes(False).items()}
    writer = WeightsWriter(folder, shard_bytes)
    if (base := base_of(model)) is None:
        layout = DiskLayout(model, shapes)
        main.do(write_config, model, dtype, folder)
    else:
        layout = BaseLayout(base, shapes)
        main.do(write_base_settings, base, model.config, dtype, folder)

    copies = copies_in_result(model)

    def write(name: str, tensor: Tensor) -> None:
        converted = layout.convert(name, cast(tensor, dtype))
        for name_on_disk in list(converted):
            for again in (one for one, table in copies.items() if table == name_on_disk):
                writer.add(again, converted[name_on_disk].clone())
            writer.add(name_on_disk, converted.pop(name_on_disk))

    for name, tensor in engine.full_tensors(False, dtype):
        main.do(write, name, tensor)
        del tensor  # before the next one is gathered
    others = layout.copied if isinstance(layout, BaseLayout) else kept_tensors(model)
    if (dropped := dropped_tensors(model)) is not None:
        others = {name: file for name, file in others.items() if name not in dropped}
        main.do(undeclare_head, folder, model.config)
    copied = {name: file for name, file in others.items() if name not in layout.expected}
    main.do(_copy, copied, writer)
    main.do(writer.finish)
    return {**layout.expected, **{one: layout.expected[table] for one, table in copies.items()}}, copied


def _write_adapter(engine: Engine, main: MainRank, folder: Path) -> State:
    """Write the adapter through peft. Returns the expected tensors of the file."""
    from peft import get_peft_model_state_dict

    model: Any = engine.unwrapped
    # peft would save a grown embedding whole; only its new rows are needed.
    tables: dict[str, Any] = {"save_embedding_layers": False} if has_added_tokens(model) else {}
    state, rows = split_rows({name: tensor for name, tensor in engine.full_tensors(True) if tensor is not None})
    state = _with_tied(model, state)
    main.do(lambda: model.save_pretrained(folder, state_dict=state, **tables))
    if has_added_tokens(model):
        file = folder / "adapter_model.safetensors"
        main.do(lambda: save_tensors(file, {**load_file(file), **rows}))
    shapes, rows = split_rows(engine.saved_shapes(True))
    if not engine.is_main:
        return {}
    expected = {**get_peft_model_state_dict(model, _with_tied(model, shapes), **tables), **rows}
    if (base := base_of(model)) is None:
        main.do(name_targets, model, folder)
    else:
        main.do(adapter_for_base, model, base.part, folder)
        expected = {name_in_adapter(base.part, name): tensor for name, tensor in expected.items()}
    return expected


def _with_tied(model: Any, state: State) -> State:
    """Returns the tensors also by the other names of tied ones: peft saves each module that is trained in full."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if "modules_to_save" in name:
            names.setdefault(id(parameter), []).append(name)
    tied = {name: next((one for one in group if one in state), None) for group in names.values() for name in group}
    return {**{name: state[one] for name, one in tied.items() if one is not None}, **state}


def _copy(tensors: dict[str, Path], writer: WeightsWriter) -> None:
    """Write tensors of the base's files as they are. Raises as `WeightsWriter.add`."""
    for name, file in tensors.items():
        with safe_open(file, framework="pt") as opened:
            writer.add(name, opened.get_tensor(name))


def base_of(model: Any) -> BaseCheckpoint | None:
    """Returns the base that a model is the text part of; on a rank that has read no weights, None."""
    return getattr(unwrap_peft(model), "base_checkpoint", None)


# --- the text part of a multimodal base: its names and config.json, and its other tensors, unchanged


class BaseLayout:
    """`DiskLayout` of a model that is the text part of a base. copied: the file of each other tensor."""

    def __init__(self, base: BaseCheckpoint, in_memory: State):
        """in_memory: every tensor that will be converted, in order, by its name in the text part."""
        self._base, self._part = base, base.part
        tied = base.part.text.get_expanded_tied_weights_keys(all_submodels=True).items()
        stored = {*base.part.files.values()}
        # A tied weight is one tensor in memory; files may have it twice.
        self._again = {source: target for target, source in tied if base.part.in_base(target) in stored}
        shapes = {own: tensor for name, tensor in in_memory.items() for own in self._names(name)}
        self._layout = DiskLayout(base.part.base, shapes)
        self.expected = self._layout.expected
        self.copied = {name: file for name, file in base.places.items() if name not in self.expected}

    def convert(self, name: str, tensor: Tensor) -> State:
        """Returns the folder's tensors that this one completes; none until its group is complete."""
        converted: State = {}
        for own in self._names(name):
            converted |= self._layout.convert(own, tensor)
        return converted

    def _names(self, name: str) -> list[str]:
        names = [name, *([self._again[name]] if name in self._again else [])]
        return [self._part.in_base(one) for one in names]


def write_base_settings(base: BaseCheckpoint, text: PretrainedConfig, dtype: torch.dtype, folder: Path) -> None:
    """Write the base's config.json, with what training changed of it, and the settings of its processors.

    text: the config of the trained text part; dtype: of its weights.
    """
    settings = json.loads(base.config.read_text(encoding="utf-8"))
    config = base.part.base.config
    name = next(name for name in config.sub_configs if getattr(config, name) is config.get_text_config(decoder=True))
    sections = [settings, *([settings[name]] if isinstance(settings.get(name), dict) else [])]
    for section in sections:
        for key in ("dtype", "torch_dtype"):
            if section.get(key) is not None:
                section[key] = str(dtype).removeprefix("torch.")
    if text.vocab_size != config.get_text_config(decoder=True).vocab_size:
        for section in (settings.setdefault(name, {}), *(s for s in sections[:1] if "vocab_size" in s)):
            section["vocab_size"] = text.vocab_size
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    for file in base.processors:
        shutil.copyfile(file, folder / file.name)


def name_in_adapter(part: TextPart, name: str) -> str:
    """Returns the name, in an adapter for the base's own class, of a tensor of one for the text part alone."""
    ahead = "base_model.model."
    return ahead + part.in_base(name.removeprefix(ahead))


def adapter_for_base(model: Any, part: TextPart, folder: Path) -> None:
    """Rewrite the adapter in a folder, as peft has written it for the text part alone, for the base's own class.

    model: peft's. `target_modules` match what was adapted and nothing else: other parts have modules of the same names.
    """
    path = folder / "adapter_model.safetensors"
    state = {name_in_adapter(part, name): tensor for name, tensor in load_file(path).items()}
    save_tensors(path, state)
    settings = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    layers, stacked = ([part.in_base(path) for path in paths] for paths in adapted_paths(model))
    settings["target_modules"] = pattern_of(layers, [name for name, _ in part.base.named_modules()])
    settings |= loadable_targets(part.base, layers, stacked, settings)
    if settings.get("modules_to_save"):
        whole = [name for name, module in model.get_base_model().named_modules() if hasattr(module, "modules_to_save")]
        settings["modules_to_save"] = [part.in_base(name) for name in whole]
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=2, sort_keys=True), encoding="utf-8")


def name_targets(model: Any, folder: Path) -> None:
    """Rewrite the targets of the adapter in a folder, if peft would load it on other modules than were trained."""
    path = folder / "adapter_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    loadable = loadable_targets(model.get_base_model(), *adapted_paths(model), settings)
    path.write_text(json.dumps(settings | loadable, indent=2, sort_keys=True), encoding="utf-8")


# --- settings


def write_config(model: Any, dtype: torch.dtype, folder: Path) -> None:
    """Write config.json, and the code of a model whose class is not transformers' own. The model's own config stays:
    a model that is sent to a sampler trains on."""
    config = copy.deepcopy(model.config)
    config.dtype = dtype
    config.architectures = [type(model).__name__]
    config.use_cache = True  # off in training only
    if (base := getattr(model, "base_config", None)) is not None:
        restore_dropout(config, base)
    if model.is_remote_code():
        custom_object_save(model, folder, config=config)
    config.save_pretrained(folder)


def _write_settings(
    model: Any, tokenizer: PreTrainedTokenizerFast, end_ids: set[int], adapter: bool, folder: Path
) -> None:
    """Write tokenizer, generation config and processors; an adapter's labels. Sets the padding token that
    transformers' head of scores looks for."""
    if has_scores(model):
        config = unwrap_peft(model).config
        tokenizer.pad_token = _padding_token(tokenizer, end_ids)
        config.get_text_config().pad_token_id = tokenizer.pad_token_id
        if adapter:
            (folder / LABELS).write_text(json.dumps(list(config.id2label.values())) + "\n", encoding="utf-8")
    else:
        model.generation_config = _generation_config(model, tokenizer, end_ids)
        model.generation_config.save_pretrained(folder)
    _save_tokenizer(tokenizer, folder)
    for name, content in getattr(unwrap_peft(model), "processor_files", {}).items():
        (folder / name).write_bytes(content)


def write_tokenizer(model: Any, tokenizer: PreTrainedTokenizerFast, end_ids: set[int], folder: Path) -> None:
    """Write the files that an export of a checkpoint needs in addition to weights, also of a run that never ends.
    Raises OSError, which leaves an earlier folder as it was."""
    start_replace(folder)
    partial = partial_path(folder)
    if has_scores(model):
        tokenizer = copy.deepcopy(tokenizer)  # the run's own stays as it is
        tokenizer.pad_token = _padding_token(tokenizer, end_ids)
    else:
        _generation_config(unwrap_peft(model), tokenizer, end_ids).save_pretrained(partial)
    _save_tokenizer(tokenizer, partial)
    finish_replace(folder)


def _save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    # The tokenizers library raises a bare Exception if the disk is full: its large file is written here first.
    write_atomically(folder / "tokenizer.json", tokenizer.backend_tokenizer.to_str(pretty=True))
    tokenizer.save_pretrained(folder)


def _padding_token(tokenizer: PreTrainedTokenizerFast, end_ids: set[int]) -> str | None:
    """Returns a special token that ends no document, the tokenizer's own if it can be: transformers scores the last
    token that is not padding. None if there is none: transformers then refuses padded batches."""
    special = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    free = [text for number, text in special.items() if number not in end_ids and text != tokenizer.eos_token]
    own = [text for text in free if text == tokenizer.pad_token]
    named = [text for part in _LIKELY for text in free if part in text.lower()]
    return next(iter([*own, *named, *free]), None)


def _generation_config(model: Any, tokenizer: PreTrainedTokenizerFast, end_ids: set[int]) -> GenerationConfig:
    """Returns the model's generation config with the end tokens of this training."""
    config, _ = valid_generation_config(model)
    ends = sorted(end_ids)
    config.eos_token_id = ends[0] if len(ends) == 1 else ends
    config.pad_token_id = tokenizer.pad_token_id
    config.bos_token_id = tokenizer.bos_token_id
    return config


# --- whole or absent


class MainRank:
    """Runs steps on rank 0 until one fails; the others go through the same collectives and learn of it in `settle`."""

    def __init__(self, engine: Engine, folder: Path):
        self._engine, self._folder = engine, folder
        self._failure: str | None = None

    def do(self, work: Callable[..., object], *arguments: Any) -> None:
        """Run on rank 0 unless a step failed before; keeps an error of the disk or of a check for `settle`."""
        if not self._engine.is_main or self._failure is not None:
            return
        try:
            work(*arguments)
        except (OSError, SafetensorError) as error:
            codes, text = (errno.ENOSPC, errno.EDQUOT), str(error)  # safetensors has the system's errors as text
            full = getattr(error, "errno", None) in codes or f"(os error {errno.ENOSPC})" in text
            self._failure = (
                f"{self._folder} could not be written: {text}. An earlier result is untouched and the last checkpoint "
                f"is intact. Fix: {'free space' if full else 'repair the disk or the path'}, and run the same command "
                "again"
            )
        except RunFailure as error:
            self._failure = str(error)

    def settle(self) -> None:
        """Raises RunFailure on every rank if a step failed. Collective."""
        failure = self._engine.ranks.gather(self._failure)[0]
        if failure is not None:
            raise RunFailure(failure)


def partial_path(folder: Path) -> Path:
    return folder.with_name(folder.name + ".partial")


def _old_path(folder: Path) -> Path:
    return folder.with_name(folder.name + ".old")


def start_replace(folder: Path) -> None:
    """Make an empty partial folder; removes or restores the remains of an interrupted save. Raises OSError."""
    old, partial = _old_path(folder), partial_path(folder)
    for path in (folder, old, partial):
        if path.exists() and not path.is_dir():  # not ours
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    if old.exists() and not folder.exists():
        old.rename(folder)
    for left in (old, partial):
        if left.exists():
            shutil.rmtree(left)
    partial.mkdir(parents=True)


def finish_replace(folder: Path) -> None:
    """Rename the partial folder to `folder`; on return, it survives a power cut. Raises OSError."""
    old, partial = _old_path(folder), partial_path(folder)
    for path in (*partial.rglob("*"), partial):
        fsync(path)
    if folder.exists():
        folder.rename(old)
    try:
        partial.rename(folder)
    except OSError:
        if old.exists():
            old.rename(folder)
        raise
    fsync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)  # else the next save removes it
