"""A config of another tool on its way to a recipe: the recipe's keys, and what has no place in it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from finetune.desk.setup.foreign_keys import ForeignTool, foreign_tool
from finetune.desk.setup.foreign_values import ForeignTable, Leftover, one_line, shown
from finetune.errors import UserError
from finetune.recipe.yaml_tree import Location, Tree, flow, override

TODO = "TODO: "  # begins the comment of a value that a person has to decide
OFF = "off there as well"  # reason of keys that are false and have no counterpart
_SECTIONS = (
    *("run", "model", "mode", "lora", "quantization", "tokens", "data", "objective", "rollouts", "rewards", "batch"),
    *("optimizer", "schedule", "train", "evaluate", "checkpoint", "tracking"),
)
_SOURCES = ("datasets", "test_datasets", "pretraining_dataset")  # keys of lists whose sections are sources
_TEXTS = (("run", "name"), ("model", "name"), ("model", "revision"), ("model", "tokenizer"))

_FILES = {  # with keys of the tool
    "axolotl": ("axolotl",),
    "LLaMA-Factory": ("llama_factory",),
    "TRL": ("trl",),
    "Unsloth": ("unsloth", "trl"),  # its scripts have TRL's trainers
    "torchtune": ("torchtune",),
}

Source = tuple[dict[str, Any], str]  # of a recipe, and its comment


@dataclass
class Conversion:
    """Values of the other tool, and the recipe that they become."""

    tool: str
    theirs: ForeignTable
    devices: int | None = None  # that the other tool ran on; None: not said
    keys: dict[str, tuple[Any, str]] = field(default_factory=dict)  # of the recipe, dotted: value and comment
    sources: dict[str, list[Source]] = field(default_factory=dict)  # by train, eval
    rewards: list[Source] = field(default_factory=list)
    launch: str | None = None  # name of an accelerate config
    others: list[ForeignTable] = field(default_factory=list)  # files that the config names, about the launch
    data: ForeignTool = field(init=False)  # keys, values and defaults of the tool
    defaults: dict[str, Any] = field(init=False)  # of the tool, by its keys; a trainer has others

    def __post_init__(self) -> None:
        self.data = foreign_tool(*_FILES[self.tool], "transformers")
        self.defaults = dict(self.data.defaults)

    def set(self, key: str, value: Any, comment: str = "") -> None:
        self.keys[key] = (value, comment)

    def value(self, key: str) -> Any:
        return self.keys.get(key, (None, ""))[0]

    def default(self, names: Sequence[str], other: Any = None) -> Any:
        """Returns what the tool takes if none of the keys is given."""
        return next((self.defaults[name] for name in names if name in self.defaults), other)

    def number(self, key: str, default: float | None = None) -> Any:
        """Returns the tool's number for a key of the recipe, or its default; the next four likewise."""
        names = self.data.names(key)
        return self.theirs.number(*names, default=self.default(names, default))

    def count(self, key: str) -> Any:
        names = self.data.names(key)
        return self.theirs.count(*names, default=self.default(names))

    def word(self, key: str) -> str | None:
        names = self.data.names(key)
        return self.theirs.word(*names, default=self.default(names))

    def words(self, key: str) -> list[str]:
        names = self.data.names(key)
        return self.theirs.words(*names) or list(self.default(names, ()))

    def is_on(self, key: str) -> bool:
        names = self.data.names(key)
        return self.theirs.is_on(*names, default=self.default(names, False))

    def copy(self, key: str, *names: str, default: float | None = None, table: ForeignTable | None = None) -> None:
        """Sets a number of the recipe from the tool's, or from its default, which then is written out.

        names: of the key, if not all that the tool has; table: where it is, if not at the top.
        """
        table, names = table or self.theirs, names or self.data.names(key)
        value = table.number(*names, default=self.default(names) if default is None else default)
        if value is not None:
            self.set(key, value, "" if any(name in table for name in names) else f"the default of {self.tool}")

    def doubt(self, key: str, problem: str) -> None:
        """Marks a value of the recipe as one that a person has to decide."""
        value, comment = self.keys[key]
        said = comment.removeprefix(TODO)
        self.keys[key] = (value, TODO + "; ".join(part for part in (problem, said) if part))

    def override(self, text: str) -> None:
        """Applies `section.key=value` in place of what was converted. Raises UserError for a key of another depth."""
        key, equals, value = text.partition("=")
        if not equals or (key.count(".") != 1 and key != "mode"):
            raise UserError(f"{text!r}: not of the form section.key=value. Fix: write it like optimizer.lr=1e-4")
        tree = Tree({}, {(): Location("command line")})
        override(tree, text, _TEXTS.__contains__)
        section, _, name = key.partition(".")
        if key in ("data.train", "data.eval"):
            self.sources.pop(name, None)
        self.set(key, tree.values[section][name] if name else tree.values[section], "from the command line")
        unused = {"full": ("lora", "quantization"), "lora": ("quantization",)}.get(value, ()) if key == "mode" else ()
        self.keys = {name: one for name, one in self.keys.items() if name.partition(".")[0] not in unused}

    def leave_the_rest(self) -> None:
        """Lists every key that nobody asked for, at any depth, with the reason that `check` gives for it."""
        for one in list(self.theirs.unread()):
            reason = OFF if one.value is False else self._reason(one.path)
            self.theirs.left.append(Leftover(one.path, one.value, reason))
        launch = foreign_tool().keys["local_rank"].note
        for table in self.others:
            self.theirs.left += [Leftover(one.path, one.value, launch) for one in table.unread()]

    def doubt_computed(self, computed: dict[str, str]) -> None:
        """Marks what a script computes, which nobody ran. computed: code, by the tool's key."""
        for name, code in computed.items():
            row = self.data.keys.get(name)
            key = row.ours if row is not None else None
            if key in self.keys:
                self.doubt(key, f"computed there ({code})")
            elif key in ("data.train", "data.eval") and (sources := self.sources.get(key.partition(".")[2])):
                sources[:] = [(source, f"{TODO}computed there ({code})") for source, _ in sources]
            else:
                self.theirs.left.append(Leftover(name, code, f"{TODO}computed there, and the script is not run"))

    def _reason(self, path: str) -> str:
        """Returns why a key of the tool is not converted: by its place, its name, or the section around it."""
        first, *inner = [part for part in re.findall(r"[^.\[\]]+", path) if not part.isdecimal()]
        tools = (self.data, foreign_tool())
        tables = [tool.sources for tool in tools if first in _SOURCES and inner] + [tool.keys for tool in tools]
        names = (".".join((first, *inner)), (inner or [first])[-1])
        row = next((table[name] for table in tables for name in names if name in table), None)
        if row is None and inner and (around := foreign_tool().keys.get(first)) and around.note:
            row = around
        if row is None:
            return "no counterpart is known"
        return row.note or f"set `{row.ours}`, if it is meant"

    def not_converted(self) -> list[str]:
        """Returns lines of `path=value, path=value: reason`, one for each reason."""
        by_reason: dict[str, list[str]] = {}
        for one in self.theirs.left:
            by_reason.setdefault(one.reason, []).append(shown(one))
        return [f"{', '.join(texts)}: {one_line(reason, 400)}" for reason, texts in by_reason.items()]

    def todos(self) -> list[str]:
        """Returns what a person has to decide, with the key."""
        comments = [(key, comment) for key, (_, comment) in self.keys.items()]
        comments += [(f"data.{part}", comment) for part, sources in self.sources.items() for _, comment in sources]
        comments += [("rewards", comment) for _, comment in self.rewards]
        done = [(key, one_line(comment.removeprefix(TODO), 400)) for key, comment in comments if TODO in comment]
        return [f"{key}: {text}" for key, text in dict.fromkeys(done)]

    def text(self, origin: str) -> str:
        """Returns the recipe as YAML with comments. origin: a short name of the config that it was."""
        lines = [f"# {one_line(origin)} of {self.tool}, converted by `python -m finetune new --from`."]
        if left := self.not_converted():
            lines += ["#", "# Not converted:", *(f"#   {line}" for line in left)]
        lists = {f"data.{part}": sources for part, sources in self.sources.items()}
        keys = {key: one for key, one in self.keys.items() if key not in lists}  # a list of sources is the whole value
        for section in _SECTIONS:
            inside = {key.partition(".")[2]: one for key, one in keys.items() if key.partition(".")[0] == section}
            if "" in inside:  # a key of its own, such as `mode`
                value, comment = inside[""]
                lines.append(_line(f"{section}: {flow(value)}", comment))
                continue
            below: list[str] = []
            for part, sources in self.sources.items() if section == "data" else ():
                below += [f"  {part}:", *(_line(f"    - {flow(source)}", comment) for source, comment in sources)]
            for reward, comment in self.rewards if section == "rewards" else ():
                below.append(_line(f"  - {flow(reward)}", comment))
            below += [_line(f"  {name}: {flow(value)}", comment) for name, (value, comment) in inside.items()]
            lines += [f"{section}:", *below] if below else []
        return "\n".join(lines) + "\n"


def _line(text: str, comment: str) -> str:
    return f"{text}  # {one_line(comment, 400)}" if comment else text


def run_name(text: str) -> str:
    """Returns a name of a run: the last part of a path, with `-` for other characters."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text.rstrip("/").rpartition("/")[2]).strip("-._") or "run"
