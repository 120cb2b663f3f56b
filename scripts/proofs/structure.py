"""Numbers of the package's structure, from its sources: what a refactoring should make smaller.

    python scripts/proofs/structure.py                       # of this checkout
    python scripts/proofs/structure.py ../other-checkout     # of another one
    python scripts/proofs/structure.py --json after.json --against before.json

A function is called once if its name is read once: a private one in its file, a public one in the package, if no
other has the same name. Of the private ones, a caller could hold those that are called there: not those that a table
or another function is given, that a decorator caches, or that another file reads too. Lines of a function are those
from `def` to its end, docstring included.
"""

from __future__ import annotations

import argparse
import ast
import json
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "finetune"
SHORT_FILE_LINES = 50
SHORT_HELPER_LINES = 4
MANY_PARAMETERS = 8

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    path: str  # from the package's parent
    tree: ast.Module
    lines: int


@dataclass(frozen=True)
class Function:
    path: str
    name: str
    line: int
    lines: int
    parameters: int  # without self and cls
    is_private: bool
    is_decorated: bool

    @property
    def place(self) -> str:
        return f"{self.path}:{self.line} {self.name}"


def modules(root: Path) -> list[Module]:
    """Modules of the package, by path."""
    package = []
    for file in sorted((root / PACKAGE).rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        package.append(Module(file.relative_to(root).as_posix(), ast.parse(text), len(text.splitlines())))
    return package


def functions(module: Module) -> list[Function]:
    """Functions and methods, nested ones included."""
    return [_function(module, node) for node in ast.walk(module.tree) if isinstance(node, FunctionNode)]


def _function(module: Module, node: FunctionNode) -> Function:
    arguments = node.args
    given = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    names = [argument.arg for argument in given if argument]
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    private = node.name.startswith("_") and not node.name.startswith("__")
    count = len(names) - (names[:1] in (["self"], ["cls"]))
    return Function(module.path, node.name, node.lineno, lines, count, private, bool(node.decorator_list))


def names_read(tree: ast.AST) -> Counter[str]:
    """How often each name is read, as a variable or as an attribute."""
    nodes = ast.walk(tree)
    return Counter(
        node.id if isinstance(node, ast.Name) else node.attr
        for node in nodes
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load)
    )


def called_once(package: list[Module], everything: list[Function]) -> list[Function]:
    """Functions whose only reader could as well hold their lines."""
    by_file = {module.path: names_read(module.tree) for module in package}
    in_package = sum(by_file.values(), Counter())
    defined = Counter(function.name for function in everything)
    defined_in_file = Counter((function.path, function.name) for function in everything)
    return [
        function
        for function in everything
        if (
            by_file[function.path][function.name] == 1 == defined_in_file[function.path, function.name]
            if function.is_private
            else in_package[function.name] == 1 == defined[function.name]
        )
    ]


def could_be_lines(package: list[Module], once: list[Function]) -> list[Function]:
    """Of private functions that are called once: those that their caller could hold as lines."""
    functions_called, methods_called, read = set[tuple[str, str]](), set[tuple[str, str]](), Counter[str]()
    for module in package:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Attribute):
                read[node.attr] += 1
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                functions_called.add((module.path, node.func.id))
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                methods_called.add((module.path, node.func.attr))
    methods_called = {(path, name) for path, name in methods_called if read[name] == 1}  # else by another file too
    return [one for one in once if (one.path, one.name) in functions_called | methods_called and not one.is_decorated]


def forward_assignments(module: Module) -> list[str]:
    """Places that replace the `forward` of an instance or a class."""
    lines = []
    for node in ast.walk(module.tree):
        targets = node.targets if isinstance(node, ast.Assign) else []
        lines += [t.lineno for t in targets if isinstance(t, ast.Attribute) and t.attr == "forward"]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr":
            names = [a.value for a in node.args[1:2] if isinstance(a, ast.Constant)]
            lines += [node.lineno for name in names if name == "forward"]
    return [f"{module.path}:{line}" for line in sorted(lines)]


def duplicates(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Of (name, path) pairs: the names with more than one path, as one line each."""
    paths = defaultdict(list)
    for name, path in pairs:
        paths[name].append(path)
    return [f"{name}: {', '.join(sorted(where))}" for name, where in sorted(paths.items()) if len(where) > 1]


def _classes(package: list[Module]) -> list[tuple[str, str]]:
    return [(n.name, m.path) for m in package for n in ast.walk(m.tree) if isinstance(n, ast.ClassDef)]


def measure(root: Path) -> dict[str, Any]:
    """By name: a number, or the places that are counted."""
    package = modules(root)
    everything = [function for module in package for function in functions(module)]
    lengths, file_lines = [f.lines for f in everything], [m.lines for m in package]
    once = called_once(package, everything)
    helpers = [f for f in once if f.is_private]
    files = [(Path(m.path).name, m.path) for m in package if not Path(m.path).name.startswith("__")]
    return {
        "files": len(package),
        "lines": sum(file_lines),
        "lines of a file, median": statistics.median(file_lines),
        f"files of up to {SHORT_FILE_LINES} lines": sum(lines <= SHORT_FILE_LINES for lines in file_lines),
        "functions": len(everything),
        "lines of a function, median": statistics.median(lengths),
        "lines of a function, p90": statistics.quantiles(lengths, n=10)[-1],
        "lines of a function, max": max(lengths),
        "functions called once": len(once),
        "private functions called once": len(helpers),
        "private functions called once that a caller could hold": len(could_be_lines(package, helpers)),
        f"private functions called once, up to {SHORT_HELPER_LINES} lines": [
            f.place for f in helpers if f.lines <= SHORT_HELPER_LINES
        ],
        f"functions with more than {MANY_PARAMETERS} parameters": [
            f"{f.place} ({f.parameters})" for f in everything if f.parameters > MANY_PARAMETERS
        ],
        "places that replace a forward": [place for module in package for place in forward_assignments(module)],
        "class names used more than once": duplicates(_classes(package)),
        "file names used more than once": duplicates(files),
    }


def show(measured: dict[str, Any], before: dict[str, Any] | None, named: Callable[[str], bool]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=140, highlight=False)
    table = Table("", *(["before"] if before else []), "now" if before else "")
    for name, value in measured.items():
        table.add_row(name, *([_number(before.get(name, ""))] if before else []), _number(value))
    console.print(table)
    for name, value in measured.items():
        if isinstance(value, list) and value and named(name):
            console.print(f"\n[bold]{name}[/bold]", *value, sep="\n  ", soft_wrap=True)


def _number(value: Any) -> str:
    return str(len(value)) if isinstance(value, list) else f"{value:,}" if isinstance(value, int) else f"{value}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", nargs="?", type=Path, default=ROOT, help="checkout to measure (this one)")
    parser.add_argument("--json", type=Path, help="write the numbers and places there")
    parser.add_argument("--against", type=Path, help="a file that --json wrote, shown in a column of its own")
    parser.add_argument("--all", action="store_true", help="name the short helpers as well")
    arguments = parser.parse_args()
    measured = measure(arguments.root.resolve())
    before = json.loads(arguments.against.read_text(encoding="utf-8")) if arguments.against else None
    show(measured, before, lambda name: arguments.all or not name.startswith("private"))
    if arguments.json:
        text = json.dumps({"command": "python scripts/proofs/structure.py", **measured}, indent=1)
        arguments.json.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
