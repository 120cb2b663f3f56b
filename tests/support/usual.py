"""Parameters of tests of which the default suite runs some."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def usual(values: Iterable[Any], *default: Any) -> list[Any]:
    """Returns the values as parameters; all but those of the default suite are `long`."""
    values = list(values)
    assert set(default) <= set(values), default
    return [pytest.param(one, marks=() if one in default else pytest.mark.long) for one in values]
