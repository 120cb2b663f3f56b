"""`mutants`: every wrong line still has its place, and a test to be caught by; the script itself runs long."""

from __future__ import annotations

import pytest
from mutants import MUTANTS
from repository import ROOT


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_a_mutant_changes_one_line_of_the_tree(mutant) -> None:
    assert (ROOT / mutant.file).read_text(encoding="utf-8").count(mutant.old) == 1
    assert mutant.old != mutant.new
    tests = [test.partition("::") for test in mutant.tests if ".py" in test]
    assert tests
    for file, _, name in tests:
        assert f"def {name.partition('[')[0]}" in (ROOT / file).read_text(encoding="utf-8")


def test_names_are_unique() -> None:
    names = [(mutant.topic, mutant.name) for mutant in MUTANTS]
    assert len(names) == len(set(names))
