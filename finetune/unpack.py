"""Unpacks a GGUF file into a model folder that a recipe can name: `python -m finetune.unpack FILE.gguf FOLDER`.

transformers reads the file (`gguf_file`), for the architectures that it knows; llama.cpp's package `gguf` unpacks the
weights. They are written in fp32, in which the products of 4-bit numbers and 16-bit scales are exact.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import struct
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from finetune.errors import UserError

# What transformers raises over a file that is cut or damaged, or of an architecture that it does not know.
_UNREADABLE = (ValueError, KeyError, IndexError, RuntimeError, OSError, struct.error)


def unpack(file: Path, folder: Path) -> None:
    """Writes weights, config and tokenizer of a GGUF file into `folder`, which appears when it is complete. Raises
    UserError if the file cannot be read, or the folder is there."""
    if not file.is_file():
        raise UserError(f"{file}: no such file. Fix: name a .gguf file")
    if folder.exists():
        raise UserError(f"{folder} is there already. Fix: name a new folder, or delete it")
    if importlib.util.find_spec("gguf") is None:
        raise UserError(f"{file}: the package gguf reads it, which is not installed. Fix: pip install 'gguf>=0.19'")
    import torch
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from finetune.models.remote_code import from_config, load_auto

    def read_auto(auto: Any, **arguments: Any) -> Any:
        return load_auto(auto, file.parent, trusted=False, gguf_file=file.name, **arguments)

    # Newer versions can leave the weights of some architectures packed.
    packed = getattr(transformers, "GgufConfig", None)
    dense = {} if packed is None else {"quantization_config": packed(dequantize=True)}
    try:
        with warnings.catch_warnings():  # numpy's, of the memory that gguf maps read-only
            warnings.simplefilter("ignore", UserWarning)
            config, tokenizer = read_auto(AutoConfig), read_auto(AutoTokenizer)
            model = read_auto(AutoModelForCausalLM, **dense, dtype=torch.float32)
    except _UNREADABLE as error:
        line = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise UserError(
            f"{file}: transformers cannot read this GGUF file: {line}. Fix: use the model's own folder from the hub"
        ) from error
    # The model that was read is marked as one of GGUF, which transformers does not write.
    with torch.device("meta"):
        plain = from_config(AutoModelForCausalLM, config, trusted=False, dtype=torch.float32)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = model.generation_config
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    plain.save_pretrained(part)
    tokenizer.save_pretrained(part)
    part.rename(folder)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m finetune.unpack", description="Unpack a GGUF file.")
    parser.add_argument("file", type=Path, metavar="FILE.gguf")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="of the model; made here")
    options = parser.parse_args(arguments)
    try:
        unpack(options.file, options.folder)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"unpacked into {options.folder}; a recipe names it: model: {{name: {options.folder}}}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
