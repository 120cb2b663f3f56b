"""runs/<name>/model/: a plain Hugging Face folder, whole or absent, and read back before it counts.

What it consists of:

    model.safetensors           or model-00001-of-0000N.safetensors with model.safetensors.index.json
    adapter_model.safetensors   instead of these, with adapter_config.json, where an adapter was trained
    config.json                 full fine-tuning only: an adapter names its base
    generation_config.json      ends where this training taught the model to end
    tokenizer files, chat template
    README.md                   the model card
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerFast
from transformers.dynamic_module_utils import custom_object_save

from finetune.engine.base import Engine
from finetune.errors import RunFailure
from finetune.export.disk_layout import DiskLayout, State, as_transformers_knows_it, cast
from finetune.export.main_rank import MainRank
from finetune.export.replace import begin, exchange, partial_of
from finetune.export.verify import Verification, weight_files
from finetune.export.weights_writer import SHARD_BYTES, WeightsWriter


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
    """Weights (or the adapter), tokenizer with chat template, generation config and card. Collective.

    dtype: of the saved full weights; adapters stay as they were trained. Rank 0 holds one shard of `shard_bytes` and
    the tensors on their way into it; an adapter is held whole. Written beside `folder`, verified, then renamed.

    Raises RunFailure on every rank where rank 0 could not write, or could not read back what it wrote: then an earlier
    `folder` is untouched.
    """
    main, partial = MainRank(engine, folder), partial_of(folder)
    main.do(begin, folder)
    main.settle()
    try:
        main.do(write_settings, engine.unwrapped, tokenizer, end_ids, partial)
        main.settle()
        if adapter:
            expected = _write_adapter(engine, main, partial)
        else:
            expected = _write_weights(engine, main, dtype, partial, shard_bytes)
        main.do((partial / "README.md").write_text, card, "utf-8")  # peft has written one of its own
        main.settle()
    except RunFailure:
        if engine.is_main:
            shutil.rmtree(partial, ignore_errors=True)  # its space may be what is missing
        raise
    _verify(engine, main, expected, partial)
    main.do(exchange, folder)
    main.settle()


def _write_weights(engine: Engine, main: MainRank, dtype: torch.dtype, folder: Path, shard_bytes: int) -> State:
    """One tensor at a time from all ranks to the disk. Returns what the files must hold."""
    model = as_transformers_knows_it(engine.unwrapped)
    main.do(write_config, model, dtype, folder)
    coming = {name: cast(tensor, dtype) for name, tensor in engine.saved_shapes(False).items()}
    layout, writer = DiskLayout(model, coming), WeightsWriter(folder, shard_bytes)
    for name, tensor in engine.full_tensors(False, dtype):
        main.do(_take, layout, writer, dtype, name, tensor)
        del tensor  # before the next becomes whole
    main.do(writer.finish)
    return layout.expected


def _take(layout: DiskLayout, writer: WeightsWriter, dtype: torch.dtype, name: str, tensor: Tensor) -> None:
    made = layout.convert(name, cast(tensor, dtype))
    for on_disk in list(made):
        writer.add(on_disk, made.pop(on_disk))


def _write_adapter(engine: Engine, main: MainRank, folder: Path) -> State:
    """Small enough to be held whole, and peft's own to write. Returns what the file must hold."""
    from peft import get_peft_model_state_dict

    model = engine.unwrapped
    state = {name: tensor for name, tensor in engine.full_tensors(True) if tensor is not None}
    main.do(lambda: model.save_pretrained(folder, state_dict=state))
    return get_peft_model_state_dict(model, engine.saved_shapes(True)) if engine.is_main else {}


def _verify(engine: Engine, main: MainRank, expected: State, folder: Path) -> None:
    check = Verification(folder, expected)
    for file in engine.gather(weight_files(folder) if engine.is_main else None)[0]:
        main.do(check.read, file)
        engine.barrier()  # the others' patience ends after a time: it must last for one file only
    main.do(check.finish)
    main.settle()


def write_config(model: Any, dtype: torch.dtype, folder: Path) -> None:
    """config.json, and the code of a model whose class is not transformers' own."""
    model.config.dtype = dtype
    model.config.architectures = [type(model).__name__]
    model.config.use_cache = True  # off in training only
    if model.is_remote_code():
        custom_object_save(model, folder, config=model.config)
    model.config.save_pretrained(folder)


def write_settings(model: Any, tokenizer: PreTrainedTokenizerFast, end_ids: set[int], folder: Path) -> None:
    model.generation_config = generation_config(model, tokenizer, end_ids)
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def generation_config(model: Any, tokenizer: PreTrainedTokenizerFast, end_ids: set[int]) -> GenerationConfig:
    """The model's own, ending where this training taught it to end."""
    config = GenerationConfig(**(model.generation_config.to_diff_dict() if model.generation_config else {}))
    ends = sorted(end_ids)
    config.eos_token_id = ends[0] if len(ends) == 1 else ends
    config.pad_token_id = tokenizer.pad_token_id
    config.bos_token_id = tokenizer.bos_token_id
    return config
