"""Which checkpoints are deleted: never the last good one, never the best."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from finetune.checkpoints.folder import (
    Retention,
    find_problem,
    list_checkpoints,
    partial_folder,
    remove,
    score,
    seal,
    step_folder,
)
from finetune.recipe.schema import Checkpoint


def saved(root: Path, step: int, **metrics: float) -> Path:
    partial = partial_folder(root, step)
    partial.mkdir(parents=True)
    (partial / "state.json").write_text(json.dumps({"step": step, "metrics": metrics}))
    seal(partial, step_folder(root, step), [])
    return step_folder(root, step)


def damage(folder: Path) -> None:
    (folder / "state.json").write_text("{}")


def steps(root: Path) -> list[int]:
    return [int(folder.name.removeprefix("step-")) for folder in list_checkpoints(root)]


def test_the_newest_stay(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        saved(tmp_path, step)
    Retention(tmp_path, Checkpoint(keep=2)).prune()
    assert steps(tmp_path) == [4, 3]


def test_a_damaged_one_does_not_count_as_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        saved(tmp_path, step)
    damage(tmp_path / "step-00000004")
    damage(tmp_path / "step-00000002")
    Retention(tmp_path, Checkpoint(keep=1)).prune()
    assert steps(tmp_path) == [4, 3]
    assert find_problem(tmp_path / "step-00000003") is None


def test_nothing_is_deleted_where_none_is_good(tmp_path: Path) -> None:
    for step in (1, 2):
        damage(saved(tmp_path, step))
    Retention(tmp_path, Checkpoint(keep=1)).prune()
    assert steps(tmp_path) == [2, 1]


@pytest.mark.parametrize(("metric", "best"), [("eval_loss", 2), ("exact_match", 3)])
def test_the_best_stays_besides_the_newest(tmp_path: Path, metric: str, best: int) -> None:
    for step, loss, match in ((1, 3.0, 0.1), (2, 1.0, 0.2), (3, 1.5, 0.9), (4, 2.0, 0.3), (5, 2.5, 0.4)):
        saved(tmp_path, step, eval_loss=loss, exact_match=match)
    saved(tmp_path, 6)  # without an evaluation
    retention = Retention(tmp_path, Checkpoint(keep=2, best=metric))  # type: ignore[arg-type]
    retention.prune()
    assert steps(tmp_path) == [6, 5, best]
    assert retention.best_score() == score({"eval_loss": 1.0, "exact_match": 0.9}, metric)


def test_a_damaged_best_gives_way_to_the_next(tmp_path: Path) -> None:
    for step, loss in ((1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)):
        saved(tmp_path, step, eval_loss=loss)
    shard = tmp_path / "step-00000001" / "state.json"
    shard.write_text(shard.read_text().replace("1.0", "0.5"))
    Retention(tmp_path, Checkpoint(keep=1, best="eval_loss")).prune()
    assert steps(tmp_path) == [4, 2]


def test_what_interrupted_saves_and_deletions_left_is_swept_up(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    partial_folder(tmp_path, 2).mkdir()
    (tmp_path / ".removed-step-00000000").mkdir()
    Retention(tmp_path, Checkpoint(keep=1)).prune()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_a_removed_one_is_gone(tmp_path: Path) -> None:
    remove(saved(tmp_path, 1))
    assert list(tmp_path.iterdir()) == []
