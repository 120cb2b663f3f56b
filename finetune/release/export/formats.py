"""The formats that `export --to` writes: a new one is a row of EXPORTS and a file that writes it.

The command's help, its checks, `merge` and the gate read this table; the file that writes a format is imported when it
is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.errors import UserError
from finetune.release.export.weight_types import EIGHT_BITS, FLOATS, GGUF_TYPES, LLAMA_TYPES, NEED_IMATRIX

if TYPE_CHECKING:
    from finetune.checkpoints.trained import Trained
    from finetune.release.export.hf_folder import Check, Say

_CALIBRATED = {
    "awq": "llm-compressor's AWQModifier (https://github.com/vllm-project/llm-compressor)",
    "gptq": "GPT-QModel (https://github.com/ModelCloud/GPTQModel) or llm-compressor's GPTQModifier",
}


@dataclass(frozen=True)
class ExportOptions:
    """Options of `export`."""

    to: str = "hf"
    step: str | None = None
    out: Path | None = None
    dtype: str | None = None
    base: str | None = None
    verify: bool = True
    average: int | None = None  # checkpoints
    quantized: str | None = None  # int8 or fp8
    gpus: int | None = None  # of the server, for its command; None: those of this machine
    llama_cpp: Path | None = None  # a folder with llama.cpp's tools
    imatrix: int | None = None  # rows of training that an importance matrix is made of


def _write_folder(trained: Trained, out: Path, options: ExportOptions, say: Say, check: Check) -> None:
    import torch

    from finetune.release.export.hf_folder import export_folder

    dtype = getattr(torch, options.dtype) if options.dtype else None
    export_folder(trained, out, dtype, options.base, say, quantized=options.quantized, check=check)


def _write_as_base(trained: Trained, out: Path, options: ExportOptions, say: Say, check: Check) -> None:
    from finetune.release.export.hf_folder import export_folder

    export_folder(trained, out, None, options.base, say, check=check, as_base=True)


def _write_gguf(trained: Trained, out: Path, options: ExportOptions, say: Say, check: Check) -> None:
    from finetune.release.export.gguf_export import export_gguf
    from finetune.release.export.llama_cpp import Tools

    tools = Tools(options.llama_cpp, options.imatrix)
    export_gguf(trained, out, options.dtype or "bf16", options.base, say, options.to == "ollama", check, tools)


@dataclass(frozen=True)
class Export:
    """A format. dtypes: of `--dtype`; quantized: of `--quantize`; is_served: whether it is a folder that vLLM, SGLang,
    ... load, whose commands are printed."""

    about: str
    dtypes: tuple[str, ...]
    write: Callable[[Trained, Path, ExportOptions, Say, Check], None]
    quantized: tuple[str, ...] = ()
    is_served: bool = False


EXPORTS = {
    "hf": Export("a plain model folder", FLOATS, _write_folder, EIGHT_BITS, is_served=True),
    "vllm": Export("the same folder", FLOATS, _write_folder, EIGHT_BITS, is_served=True),
    "base": Export("a model folder in the 8 or 4 bits of its base", (), _write_as_base, is_served=True),
    "gguf": Export("one file for llama.cpp", (*GGUF_TYPES, *LLAMA_TYPES), _write_gguf),
    "ollama": Export("the same with a Modelfile", (*GGUF_TYPES, *LLAMA_TYPES), _write_gguf),
}


def check_options(options: ExportOptions) -> Export:
    """Returns the format. Raises UserError for options that do not go together."""
    if (export := EXPORTS.get(options.to)) is None:
        raise UserError(f"--to {options.to}: no such format. Fix: give one of {', '.join(EXPORTS)}")
    if options.dtype is not None and options.dtype not in export.dtypes:
        expected = f"give one of {', '.join(export.dtypes)}" if export.dtypes else "leave it out"
        raise UserError(f"--dtype {options.dtype}: no type of `--to {options.to}`. Fix: {expected}")
    if (kind := options.quantized) is not None:
        if not export.quantized:
            names = " or ".join(name for name, one in EXPORTS.items() if one.quantized)
            raise UserError(
                f"--quantize {kind}: only goes with --to {names}. Fix: give one of these, or --dtype instead"
            )
        if kind in _CALIBRATED:
            raise UserError(
                f"--quantize {kind}: needs calibration, which is not done here. Fix: run {_CALIBRATED[kind]} on the "
                "folder that `export --to hf` writes"
            )
        if kind not in export.quantized:
            raise UserError(f"--quantize {kind}: no such type. Fix: give one of {', '.join(export.quantized)}")
    if options.gpus is not None and not export.is_served:
        names = " and ".join(f"--to {name}" for name, one in EXPORTS.items() if one.is_served)
        raise UserError(f"--gpus only applies to {names}. Fix: leave it out")
    _check_llama_cpp(options)
    return export


def _check_llama_cpp(options: ExportOptions) -> None:
    """Raises UserError for options of llama.cpp's tools that have no effect, or that a type lacks."""
    given = {"--llama-cpp": options.llama_cpp, "--imatrix": options.imatrix}
    if options.to not in ("gguf", "ollama"):
        for name, value in given.items():
            if value is not None:
                raise UserError(f"{name} only applies to --to gguf and --to ollama. Fix: leave it out")
    kind = options.dtype or "bf16"
    if options.imatrix is not None and kind not in LLAMA_TYPES:
        raise UserError(
            f"--imatrix: has no effect on {kind}. Fix: leave it out, or give --dtype one of {', '.join(LLAMA_TYPES)}"
        )
    if options.imatrix is None and kind in NEED_IMATRIX:
        raise UserError(f"--dtype {kind}: needs an importance matrix. Fix: add --imatrix 512, rows that it is made of")
