"""Fingerprint of a run's model: tokenizer, config and the base's files, small enough for a checkpoint to keep.

    tokenizer   digests of the vocabulary, the rules and the chat template; the special tokens themselves
    config      the values themselves, so that a change has a name and two values
    base        the size of each file, and a digest of the parts that are read; for the hub also the commit

A base may have hundreds of gigabytes, so a file larger than `READ_WHOLE` is not read in full: of it the header, which
has the name, type and place of each tensor, a block within each tensor, and blocks at even distances. Other weights of
the same shapes differ there; a few bytes that were changed in between are not seen.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import transformers
from transformers import PretrainedConfig, PreTrainedTokenizerFast
from transformers.utils import CONFIG_NAME

from finetune.data.content import DIGITS, digest
from finetune.errors import UserError
from finetune.models.checkpoint_files import checkpoint_file
from finetune.recipe.schema import Model

READ_WHOLE = 1 << 26  # bytes; of a larger file of weights, samples
_BLOCK = 1 << 12
_BLOCKS_OF_TENSORS, _BLOCKS_BETWEEN = 4096, 512  # at most, of a file
_MOST_HEADER = 1 << 27
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "adapter_config.json")
# Keys of a config that do not affect any computation.
_NOT_COMPUTED = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
_NOT_COMPUTED |= {"id2label", "label2id", "problem_type", "return_dict"}


def tokenizer_content(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """Identifies a tokenizer in memory; `library` wrote the text digested as `rules`. A large vocabulary is not
    parsed, which would take most of the time."""
    written = tokenizer.backend_tokenizer.to_str()
    begin = written.index(',"model":{"type":')  # the last key
    rules = json.loads(written[:begin] + "}")
    rules = {name: part for name, part in rules.items() if name not in ("truncation", "padding")}
    by_id = sorted(tokenizer.get_vocab().items(), key=itemgetter(1))
    ids = np.array([number for _, number in by_id], np.int64)
    template = tokenizer.chat_template
    return {
        "library": tokenizers.__version__,
        "tokens": len(by_id),
        "ids of tokens": digest("\0".join(map(itemgetter(0), by_id)), ids),
        "rules": digest(json.dumps(rules, sort_keys=True), written[begin:]),
        "chat template": digest(json.dumps(template, sort_keys=True)) if template else None,
        **{name: str(token) for name, token in tokenizer.special_tokens_map.items()},
    }


def config_content(config: PretrainedConfig) -> dict[str, Any]:
    """Returns the values of a config that affect computation; `library` determines which keys there are."""
    return {"library": transformers.__version__, **_computed(json.loads(config.to_json_string(use_diff=False)))}


def _computed(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _computed(value) if isinstance(value, dict) else value
        for name, value in values.items()
        if name not in _NOT_COMPUTED
    }


def base_content(model: Model) -> dict[str, Any]:
    """Identifies the weights that a run begins with: {} if they are random. They are on this machine, as they have been
    loaded. Raises UserError if they cannot be read."""
    if model.config is not None:
        return {}
    folder, commit = Path(str(model.name)).expanduser(), None
    if not folder.is_dir():
        config = checkpoint_file(model, CONFIG_NAME)
        if config is None:
            return {}
        folder, commit = config.parent, config.parent.name
    files: dict[str, str] = {}
    patterns = (*_WEIGHTS, "*.py") if model.trust_remote_code else _WEIGHTS
    try:
        for path in (path for pattern in patterns for path in sorted(folder.glob(pattern))):
            size, content = path.stat().st_size, hashlib.sha256()
            with path.open("rb", buffering=0) as file:
                for begin, end in _places(file.fileno(), size, path.suffix == ".safetensors"):
                    content.update(os.pread(file.fileno(), end - begin, begin))
            files[path.name] = f"{size:,} bytes, {content.hexdigest()[:DIGITS]}"
    except OSError as error:
        raise UserError(
            f"model.name: {error.filename or folder} cannot be read: {error.strerror}. Fix: check the file and its "
            "permissions"
        ) from None
    return {**({"commit": commit} if commit else {}), "files": files}


def base_enters_steps(model: Any) -> bool:
    """Returns whether the base's weights still matter once a checkpoint has been read: frozen parameters and buffers
    are not in it."""
    frozen = any(not parameter.requires_grad for parameter in model.parameters())
    return frozen or any(
        name not in module._non_persistent_buffers_set  # torch tells by nothing else what a state dict leaves out
        for module in model.modules()
        for name, _ in module.named_buffers(recurse=False, remove_duplicate=False)
    )


def _places(file: int, size: int, has_header: bool) -> Iterator[tuple[int, int]]:
    """Yields the stretches of a file that are read."""
    if size <= READ_WHOLE:
        yield 0, size
        return
    end_of_header = 8 + struct.unpack("<Q", os.pread(file, 8, 0))[0] if has_header else 0
    if 8 < end_of_header <= min(size, _MOST_HEADER):
        yield 0, end_of_header
        try:
            header = json.loads(os.pread(file, end_of_header - 8, 8))
            places = [one["data_offsets"] for name, one in header.items() if name != "__metadata__"]
            tensors = sorted((int(begin), int(end)) for begin, end in places)
        except (ValueError, LookupError, TypeError, AttributeError):  # damaged, which the load reports
            tensors = []
        for begin, end in tensors[:: -(-len(tensors) // _BLOCKS_OF_TENSORS) or 1]:
            middle = end_of_header + begin + max(0, (end - begin - _BLOCK) // 2)
            yield middle, min(middle + _BLOCK, end_of_header + end)
    for begin in range(0, size, -(-size // _BLOCKS_BETWEEN)):
        yield begin, begin + _BLOCK
