"""The scripts that measure the package's structure, and what holds in its sources."""

from __future__ import annotations

import ast
import functools
import typing
from collections import Counter
from pathlib import Path

import example_path
import golden_losses
import numpy as np
import structure
import torch
from repository import ROOT

from finetune.engine.launch import Kind
from finetune.engine.pipeline import Pipeline
from finetune.engine.start import ENGINES
from finetune.models.patches import PATCHES

DOCUMENTED = {"_replace", "_fields", "_asdict", "_exit"}  # of named tuples, and of `os`


@functools.cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def package() -> list[Path]:
    return sorted((ROOT / "finetune").rglob("*.py"))


def test_names_of_classes_and_files_are_unique_in_the_package():
    files = Counter(path.name for path in package() if not path.name.startswith("__"))
    classes = Counter(node.name for path in package() for node in tree(path).body if isinstance(node, ast.ClassDef))
    assert [name for counts in (files, classes) for name, count in counts.items() if count > 1] == []


def backend_tests(source: str) -> list[int]:
    """Returns the lines that compare a launch's kind, or ask for the class of an engine."""
    kinds = set(typing.get_args(Kind))
    lines = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            values = {one.value for side in sides for one in ast.walk(side) if isinstance(one, ast.Constant)}
            if any(ast.unparse(side).endswith("kind") for side in sides) and values & kinds:
                lines.append(node.lineno)
        elif isinstance(node, ast.Attribute) and node.attr in ("is_sharded", "is_stage_3", "is_fsdp"):
            lines.append(node.lineno)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
            classes = {one.id for one in ast.walk(node.args[1]) if isinstance(one, ast.Name)}
            lines += [node.lineno] * bool(classes & {engine.__name__ for engine in (*ENGINES.values(), Pipeline)})
    return sorted(lines)


def test_no_room_but_engine_asks_which_backend_runs():
    source = "if launch.kind == 'zero' or launch.is_sharded: pass\nisinstance(engine, Fsdp2)\nrow.kind == 'full'"
    assert backend_tests(source) == [1, 1, 2]
    found = {
        str(path.relative_to(ROOT)): backend_tests(path.read_text(encoding="utf-8"))
        for path in package()
        if "engine" not in path.parts
    }
    assert not {file: lines for file, lines in found.items() if lines}


def test_forwards_and_classes_are_replaced_by_the_table_of_patches_alone():
    """No assignment to an instance's `forward` or `__class__` elsewhere, by `setattr` neither; no row without a use."""
    elsewhere, used = [], set()
    for path in package():
        for node in ast.walk(tree(path)):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            assigned = {target.attr for target in targets if isinstance(target, ast.Attribute)}
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                if node.func.id == "setattr" and isinstance(node.args[1], ast.Constant):
                    assigned.add(str(node.args[1].value))
                if node.func.id in ("replace_forward", "replace_class", "mix_in", "set_attribute", "attribute_set"):
                    patch = node.args[-1]
                    used |= {patch.value} if isinstance(patch, ast.Constant) else set()
            if assigned & {"forward", "__class__"} and path.name != "patches.py":
                elsewhere.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert elsewhere == []
    assert used == set(PATCHES)


def unexplained(source: str) -> list[str]:
    """Returns "line name" of private names of other code than this file, if no comment gives a reason: on a line that
    uses the name, or on the line above."""
    lines, tree = source.splitlines(), ast.parse(source)
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    uses: dict[str, list[int]] = {}
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls"):
            own.add(node.attr)
        elif isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            names = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
        elif isinstance(node, ast.ImportFrom) and not f"{node.module}.".startswith("finetune."):
            names = [*str(node.module).split("."), *(alias.name for alias in node.names)]
        for name in names:
            if name.startswith("_") and not name.startswith("__") and name not in DOCUMENTED:
                uses.setdefault(name, []).append(node.lineno)
    commented = {i for i, line in enumerate(lines, 1) if "#" in line}
    commented |= {i + 1 for i in commented if lines[i - 1].lstrip().startswith("#")}
    return [f"{at[0]} {name}" for name, at in uses.items() if name not in own and not commented & set(at)]


def test_a_private_name_of_a_library_has_its_reason():
    source = "x = torch._one\nself._own = y._own\nz = getattr(m, '_two')\nfrom a._b import c"
    assert sorted(unexplained(source)) == ["1 _one", "3 _two", "4 _b"]
    assert unexplained("# As the public one copies.\nx = torch._one\ny = torch._one") == []
    found = {
        str(path.relative_to(ROOT)): unexplained(path.read_text(encoding="utf-8"))
        for path in package()
        if "engine" not in path.parts and path.name != "patches.py"
    }
    assert not {file: names for file, names in found.items() if names}


def test_files_import_each_other_one_way():
    """Also in functions and for types; importing a file imports the packages that it is in."""
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in (ROOT / "finetune").rglob("*.py")}
    files = {name.removesuffix(".__init__"): path for name, path in files.items()}
    del files["finetune"]  # its version is read everywhere
    imports: dict[str, set[str]] = {}
    for name, path in files.items():
        named = set[str]()
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Import):
                named |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                named |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        named |= {one.rpartition(".")[0] for one in named}
        imports[name] = {one for one in named if one in files and not f"{name}.".startswith(f"{one}.")}
    while free := {name for name, others in imports.items() if not others & imports.keys()}:
        for name in free:
            del imports[name]
    assert sorted(imports) == []  # what is left imports itself through others


@functools.cache
def names_of(module: str) -> set[str]:
    """Returns what a module of the package has at its top level, submodules included."""
    path = ROOT / module.replace(".", "/")
    submodules = {file.stem for file in path.iterdir()} if path.is_dir() else set[str]()
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    names = set[str]()
    for node in ast.walk(tree(file)) if file.exists() else ():
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names | submodules


def test_what_scripts_benchmarks_and_tests_import_of_the_package_exists():
    """Most of them run for minutes, in few runs, so a renamed function would be missed there for days."""
    missing = [
        f"{file.relative_to(ROOT)}:{node.lineno}: {node.module}.{name.name}"
        for room in ("scripts", "benchmarks", "tests")
        for file in (ROOT / room).rglob("*.py")
        for node in ast.walk(tree(file))
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "finetune"
        for name in node.names
        if name.name not in names_of(str(node.module))
    ]
    assert missing == []


def test_structure_counts_what_a_reader_has_to_follow(tmp_path: Path):
    source = """
class Batch:
    def run(self, a, b, c, d, e, f, g, h, *, i):
        return _once(a) + twice(b) + twice(c)

def _once(x):
    return x

def twice(x):
    return x

def replace(model):
    model.forward = twice
    setattr(model, "forward", twice)
"""
    for room in ("data", "engine"):
        (tmp_path / "finetune" / room).mkdir(parents=True)
        (tmp_path / "finetune" / room / "batch.py").write_text(source)
    measured = structure.measure(tmp_path)
    assert measured["files"] == 2
    assert measured["functions"] == 8
    assert measured["private functions called once"] == 2  # `_once`, once in each file
    assert measured["functions with more than 8 parameters"] == [
        f"finetune/{room}/batch.py:3 run (9)" for room in ("data", "engine")
    ]
    places = [f"finetune/{room}/batch.py:{line}" for room in ("data", "engine") for line in (13, 14)]
    assert measured["places that replace a forward"] == places
    assert [entry.split(":")[0] for entry in measured["class names used more than once"]] == ["Batch"]
    assert [entry.split(":")[0] for entry in measured["file names used more than once"]] == ["batch.py"]


def test_the_last_bit_of_a_loss_is_a_difference():
    line = {"step": 1, "loss": (0.5).hex(), "grad_norm": None}
    ours = {"metrics": [line, {**line, "step": 2}], "weights": "abc"}
    assert golden_losses.difference(ours, ours) == ("", "0")
    moved = {**ours, "metrics": [line, {**line, "step": 2, "loss": (0.5 + 2**-53).hex()}]}
    assert golden_losses.difference(ours, moved) == ("loss from step 2 on", "2.2e-16")
    shorter = {**ours, "metrics": [line], "weights": "abd"}
    assert golden_losses.difference(ours, shorter)[0] == "1 lines instead of 2, final weights"
    assert golden_losses.difference(ours, {"metrics": [], "weights": "", "error": "it broke"})[0] == "failed: it broke"


def test_a_row_is_found_as_text_and_as_tokens():
    carries = example_path.Carries((195, 169))
    for holding in (
        "a é",
        b"\xc3\xa9",
        [[1, 195, 169]],
        {"x": np.array([[7, 195], [169, 8]])},
        torch.tensor([195, 169]),
    ):
        assert carries(holding), holding
    for other in ("a e", [195, 7, 169], np.array([0.195, 169]), torch.ones(3), None, {"x": (169, 195)}):
        assert not carries(other), other
