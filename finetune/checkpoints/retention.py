"""Which checkpoints stay: the newest good ones, and the best by a metric."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

from finetune.checkpoints.folder import complete, problem, remove, sweep
from finetune.recipe.schema import Checkpoint

Metrics = dict[str, float]
_SIGN = {"eval_loss": 1.0, "exact_match": -1.0}


def score(metrics: Metrics, name: str | None) -> float | None:
    """The metric such that the lowest is best; None where it was not measured, or none was asked for."""
    return metrics[name] * _SIGN[name] if name is not None and name in metrics else None


class Retention:
    """Deletes what need not stay. What does not verify never counts as kept, so that a good one always remains."""

    def __init__(self, root: Path, recipe: Checkpoint):
        self._root, self._recipe = root, recipe
        self._good: set[Path] = set()  # written by this process, or verified by it

    def trust(self, folder: Path) -> None:
        """Count a checkpoint as good without reading it again."""
        self._good.add(folder)

    def prune(self) -> None:
        """Keep the `keep` newest that verify and the best that does; remove older ones, and what kills left behind."""
        found = complete(self._root)
        kept = list(islice(filter(self._is_good, found), self._recipe.keep))
        if not kept:
            return
        best = self._best(found)
        for folder in found:
            if folder < kept[-1] and folder != best:
                self._good.discard(folder)
                remove(folder)
        sweep(self._root)

    def best_score(self) -> float | None:
        """Of the checkpoints that are there, where the recipe names a metric."""
        best = self._best(complete(self._root))
        return self._score(best) if best else None

    def _best(self, found: list[Path]) -> Path | None:
        scored = [(value, folder) for folder in found if (value := self._score(folder)) is not None]
        return next((folder for _, folder in sorted(scored) if self._is_good(folder)), None)

    def _score(self, folder: Path) -> float | None:
        if self._recipe.best is None:
            return None
        try:
            state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None  # a damaged one
        return score(state["metrics"], self._recipe.best)

    def _is_good(self, folder: Path) -> bool:
        if folder not in self._good and problem(folder) is None:
            self._good.add(folder)
        return folder in self._good
