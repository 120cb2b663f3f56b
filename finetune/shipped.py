"""Recipes, accelerate configs and the quickstart's script: inside the package in a wheel, next to it in a clone."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
SHIPPED = _PACKAGE / "resources" if (_PACKAGE / "resources").is_dir() else _PACKAGE.parent


def here_or_shipped(path: Path) -> Path:
    """Returns a path as it is, unless nothing is there and a file of that name comes with the package:
    `recipes/quickstart/full.yaml` names one from any folder."""
    if path.exists() or path.is_absolute() or not (SHIPPED / path).is_file():
        return path
    return SHIPPED / path
