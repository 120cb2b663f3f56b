"""llama.cpp's own tools: its converter and quantizer, for architectures and types that are not written here.

    --llama-cpp DIR, or LLAMA_CPP_DIR    a checkout with its build: DIR/convert_hf_to_gguf.py, DIR/build/bin/llama-*
    PATH                                 where packages put them: llama-quantize, llama-imatrix, convert_hf_to_gguf.py

No kept package of the index carries the converter: wheels of llama-cpp-python have the library alone, its sdist has the
whole tree. The converter is Python of that folder, so it runs as a program of its own, as do the others, by a list of
arguments; what they print is shown if they fail.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from finetune.errors import RunFailure, UserError

VARIABLE = "LLAMA_CPP_DIR"
_PLACES = ("build/bin", "build/bin/Release", "bin", ".")  # of built tools in a checkout or a release
_CONVERTER = "convert_hf_to_gguf.py"
_SHOWN_LINES = 15
INSTALL = (
    f"give --llama-cpp DIR (or {VARIABLE}), a checkout of https://github.com/ggml-org/llama.cpp: `cmake -B build && "
    "cmake --build build --target llama-quantize llama-imatrix`"
)
# What its converter ends with, and what to do: by a pattern in its output.
_REMEDIES = {
    r"File not found: .*tokenizer\.model": "its class reads SentencePiece's tokenizer.model alone: put that into the "
    "base's folder",
    r"KeyError: '(<\|?[\w ]+\|?>)'": "its class wants the special token {}: train from a base with its "
    "family's tokenizer",
    r"KeyError: '(rotary_pct|rotary_dim)'": "its class reads `{}`, which transformers 5 does not write any more: "
    "update llama.cpp",
    r"pre-tokenizer was not recognized": "this tokenizer is not known to llama.cpp: update its checkout",
}
_PYTHON = "pip install -r requirements/requirements-convert_hf_to_gguf.txt"


@dataclass(frozen=True)
class Tools:
    """The user's settings for llama.cpp. folder: of a checkout, None: by the environment; imatrix: rows of training for
    an importance matrix."""

    folder: Path | None = None
    imatrix: int | None = None

    def place(self) -> Path | None:
        """Returns the folder that was named. Raises UserError if it is none."""
        named = os.environ.get(VARIABLE) or None
        folder = self.folder if self.folder is not None else Path(named).expanduser() if named else None
        if folder is not None and not folder.is_dir():
            what = "--llama-cpp" if self.folder is not None else VARIABLE
            raise UserError(f"{what}: {folder} is no folder. Fix: {INSTALL}")
        return folder.resolve() if folder is not None else None

    def program(self, name: str) -> Path | None:
        """Returns a built tool, of the named folder or on PATH."""
        if (folder := self.place()) is not None:
            for place in _PLACES:
                if (file := folder / place / name).is_file() and os.access(file, os.X_OK):
                    return file
        found = shutil.which(name)
        return Path(found) if found else None

    def needed(self, name: str, what: str) -> Path:
        """Returns a built tool. what: that needs it. Raises UserError if it is not there."""
        if (file := self.program(name)) is None:
            raise UserError(f"{what}: needs llama.cpp's {name}. Fix: {INSTALL}")
        return file

    def converter(self) -> list[str] | None:
        """Returns the command of llama.cpp's converter; None if it is not there."""
        if (folder := self.place()) is not None and (file := folder / _CONVERTER).is_file():
            return [sys.executable, str(file)]
        found = shutil.which(_CONVERTER)
        return [found] if found else None


def check_converts(command: list[str], architecture: str) -> None:
    """Raises UserError if a converter does not know a class of transformers, or cannot run at all."""
    done = subprocess.run(
        [*command, "--print-supported-models"], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    known = set(re.findall(r"^\s*- (\w+)\s*$", done.stdout + done.stderr, re.MULTILINE))
    if done.returncode or not known:
        raise UserError(
            f"--to gguf: llama.cpp's converter does not run here.\n{_tail(done.stdout + done.stderr)}\nFix: in its "
            f"folder, {_PYTHON}"
        )
    if architecture not in known:
        raise UserError(
            f"--to gguf: llama.cpp's converter does not know {architecture}. Fix: update the checkout of llama.cpp, or "
            "serve the folder of `export --to hf`"
        )


def convert(command: list[str], folder: Path, file: Path, kind: str, name: str) -> None:
    """Write a model folder as one GGUF file. kind: f32, bf16, f16 or q8_0; name: in its metadata."""
    _run([*command, str(folder), "--outfile", str(file), "--outtype", kind, "--model-name", name], file.parent)


def quantize(program: Path, source: Path, file: Path, kind: str, matrix: Path | None) -> None:
    """Write a file in one of llama-quantize's types. matrix: the file of an importance matrix beside `source`."""
    how = ["--imatrix", matrix.name] if matrix is not None else []  # by its name: the file keeps what is given here
    _run([str(program), *how, source.name, str(file.resolve()), kind.upper()], source.parent)


def importance_matrix(program: Path, source: Path, texts: Path, context: int) -> Path:
    """Returns the file of the mean squares of each matrix's inputs on texts. context: tokens that are read at once."""
    matrix = source.parent / "imatrix.gguf"
    how = ["-f", texts.name, "-o", matrix.name, "-c", str(context), "--parse-special", "--no-ppl"]
    _run([str(program), "-m", source.name, *how], source.parent)
    return matrix


def _run(command: list[str], folder: Path) -> None:
    """Run a tool in a folder. Raises RunFailure with the end of what it prints if it fails."""
    done = subprocess.run(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    if done.returncode:
        name = next(Path(one).name for one in command if one != sys.executable)
        what = f"{name} ended with status {done.returncode}:\n{_tail(done.stdout)}"
        raise RunFailure(f"{what}\nFix: {_remedy(done.stdout)}, or serve the folder of `export --to hf`")


def _remedy(output: str) -> str:
    """Returns what to do about the error that a tool ended with."""
    for pattern, remedy in _REMEDIES.items():
        if (found := re.search(pattern, output)) is not None:
            return remedy.format(*found.groups())
    return "the lines above are llama.cpp's own: update it"


def _tail(text: str) -> str:
    return "\n".join(f"  {line[:300]}" for line in text.strip().splitlines()[-_SHOWN_LINES:])
