"""The functions that one example's data passes from `finetune train` to the optimizer step, by a profile of a real run.

    python scripts/proofs/example_path.py                    # of the package on PYTHONPATH, or of this checkout
    python scripts/proofs/example_path.py --json path.json --against before.json

One row is trained on for one step, on one process, with an empty cache. Counted are functions of the package (a) of
which an argument or the result holds the row's text or tokens, and (b) all that the main thread calls between the
model's first forward and the end of the optimizer's step. A generator counts by what it yields, `self` does not count.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import os
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "support"))

import tiny

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "finetune"
MARKER = "é"  # two bytes, and with this tokenizer two tokens, that nothing else of the run has
DEPTH = 5  # of containers that are looked into
WIDTH = 50  # entries of a container that are looked at


@dataclasses.dataclass(frozen=True)
class Visited:
    function: str
    file: str  # from the package's parent
    line: int


class Carries:
    """Test of whether a value holds the row: its marker as text, or the marker's tokens one after the other."""

    def __init__(self, marker_ids: tuple[int, int]):
        self._ids = marker_ids

    def __call__(self, value: Any, depth: int = DEPTH) -> bool:
        if isinstance(value, str):
            # As text, and as JSON that escapes it.
            return MARKER in value or "\\u00e9" in value
        if isinstance(value, bytes | bytearray | memoryview):
            return MARKER.encode() in bytes(value)
        if value is None or isinstance(value, int | float | type) or depth == 0:
            return False
        if (tokens := _integers(value)) is not None:
            return bool(np.any((tokens[:-1] == self._ids[0]) & (tokens[1:] == self._ids[1])))
        return any(self(part, depth - 1) for part in _parts(value))


def _integers(value: Any) -> np.ndarray | None:
    """Returns the value's entries if it is an array, tensor or list of integers."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        is_integer = not value.is_floating_point() and value.dtype != torch.bool and value.device.type != "meta"
        return value.detach().cpu().numpy().ravel() if is_integer else None
    if isinstance(value, np.ndarray):
        return np.asarray(value).ravel() if value.dtype.kind in "iu" else None
    if isinstance(value, list | tuple) and value and all(type(entry) is int for entry in value):
        return np.array(value)
    return None


def _parts(value: Any) -> list[Any]:
    """Returns the values in a container, or in an object of the package."""
    if isinstance(value, Mapping):
        return list(value.values())[:WIDTH]
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)[:WIDTH]
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    if type(value).__module__.partition(".")[0] == PACKAGE:
        return list(getattr(value, "__dict__", {}).values())[:WIDTH]
    if type(value).__module__.startswith("tokenizers"):
        return [getattr(value, "ids", None)]
    return []


class Recorder:
    """A profile function: notes the package's functions that the row passes, until the optimizer has stepped."""

    def __init__(self, package: Path, marker_ids: tuple[int, int]):
        self._prefix = f"{package.resolve()}{os.sep}"
        self._carries = Carries(marker_ids)
        self._main = threading.get_ident()
        self._in_step = self.done = False
        self.passed: dict[CodeType, None] = {}  # in the order of their first calls
        self.called: dict[CodeType, None] = {}

    def __call__(self, frame: FrameType, event: str, result: Any) -> None:
        code = frame.f_code
        if self.done or event not in ("call", "return"):
            return
        if not code.co_filename.startswith(self._prefix):
            self._follow(frame, event)
        elif code.co_name[0] != "<":  # a comprehension or lambda is part of its function
            self.called.setdefault(code)
            whole_step = self._in_step and threading.get_ident() == self._main
            if code not in self.passed and (whole_step or self._holds_row(frame, event, result)):
                self.passed[code] = None

    def _follow(self, frame: FrameType, event: str) -> None:
        """Begin and end of the step, by what the libraries do. A forward without the row is a trial of the set-up."""
        name, file = frame.f_code.co_name, frame.f_code.co_filename
        if event == "call" and name == "forward" and f"{os.sep}transformers{os.sep}models{os.sep}" in file:
            self._in_step = self._in_step or self._holds_row(frame, event, None)
        if event == "return" and name == "step" and f"torch{os.sep}optim{os.sep}" in file:
            self.done = self._in_step

    def _holds_row(self, frame: FrameType, event: str, result: Any) -> bool:
        if event == "return":
            return self._carries(result)
        code, values = frame.f_code, frame.f_locals
        count = code.co_argcount + code.co_kwonlyargcount
        flags = bool(code.co_flags & 0x04) + bool(code.co_flags & 0x08)  # *args, **kwargs
        names = [name for name in code.co_varnames[: count + flags] if name not in ("self", "cls")]
        return any(self._carries(values.get(name)) for name in names)

    def visits(self, codes: Mapping[CodeType, None]) -> list[Visited]:
        root = Path(self._prefix).parent
        places = {code: Path(code.co_filename).relative_to(root).as_posix() for code in codes}
        return [Visited(_qualified(code), file, code.co_firstlineno) for code, file in places.items()]


def _qualified(code: CodeType) -> str:
    return str(getattr(code, "co_qualname", code.co_name)).replace("<locals>.", "")


def prepare(folder: Path) -> Path:
    """A model, one row with the marker in the question and in the answer, and a recipe of one step."""
    import yaml

    model = tiny.save_model(folder, "llama")
    conversation = [{"role": "user", "content": f"river {MARKER}"}, {"role": "assistant", "content": f"{MARKER} stone"}]
    rows = tiny.write_rows(folder / "rows.jsonl", [{"messages": conversation}])
    recipe = {
        "run": {"name": "run", "dir": str(folder / "runs")},
        "model": {"name": str(model)},
        "mode": "full",
        "data": {"train": [{"path": str(rows), "format": "messages"}], "max_length": 64},
        "batch": {"rows": 1},
        "optimizer": {"lr": 1e-3},
        "train": {"max_steps": 1, "precision": "fp32"},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path


def record(folder: Path) -> Recorder:
    """Trains one step under the profile. Raises RuntimeError if the run did not come to an optimizer step."""
    import torch  # noqa: F401 (imports are no part of the path)
    import transformers  # noqa: F401

    import finetune
    from finetune.desk.cli import main as command

    recipe = prepare(folder)
    ids = tuple(tiny.tokenizer()(MARKER, add_special_tokens=False)["input_ids"])
    assert len(ids) == 2, ids
    recorder = Recorder(Path(str(finetune.__file__)).parent, ids)
    sys.argv = ["finetune", "train", str(recipe)]
    said = io.StringIO()
    threading.setprofile(recorder)
    sys.setprofile(recorder)
    try:
        with contextlib.suppress(SystemExit), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            command()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    if not recorder.done:
        raise RuntimeError(f"no optimizer step was seen:\n{said.getvalue()[-3000:]}")
    return recorder


def counts(path: dict[str, Any]) -> dict[str, int]:
    files, called = {v["file"] for v in path["passed"]}, path["called"]
    return {
        "functions the row passes": len(path["passed"]),
        "in files": len(files),
        "functions called until then": len(called),
        "in files of these": len({v["file"] for v in called}),
    }


def show(path: dict[str, Any], before: dict[str, Any] | None) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=140, highlight=False)
    table = Table("", "file", "function", title="in the order of the first call")
    last = ""
    for number, visit in enumerate(path["passed"], 1):
        table.add_row(str(number), "" if visit["file"] == last else visit["file"], visit["function"])
        last = visit["file"]
    console.print(table)
    numbers, earlier = counts(path), counts(before) if before else {}
    for name, value in numbers.items():
        console.print(f"{value:5} {name}" + (f" (before: {earlier[name]})" if before else ""))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the path there")
    parser.add_argument("--against", type=Path, help="a file that --json wrote, whose counts are shown as well")
    arguments = parser.parse_args()
    os.environ.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    with tempfile.TemporaryDirectory(prefix="finetune-path-") as folder:
        os.environ["FINETUNE_CACHE"] = str(Path(folder) / "cache")
        recorder = record(Path(folder))
    visits = {"passed": recorder.visits(recorder.passed), "called": recorder.visits(recorder.called)}
    path = {name: [dataclasses.asdict(visit) for visit in visited] for name, visited in visits.items()}
    show(path, json.loads(arguments.against.read_text(encoding="utf-8")) if arguments.against else None)
    if arguments.json:
        text = json.dumps({"command": "python scripts/proofs/example_path.py", **path}, indent=1)
        arguments.json.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    # The package of this checkout, unless PYTHONPATH names another.
    sys.path.append(str(ROOT))
    raise SystemExit(main())
