"""Checkpoint folders: atomic, verified, pruned; ranges in shards; staging memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from finetune.checkpoints.folder import (
    Retention,
    best_checkpoint,
    find_problem,
    list_checkpoints,
    partial_folder,
    remove,
    seal,
    set_aside,
    step_folder,
    step_of,
)
from finetune.checkpoints.saver import Staging
from finetune.checkpoints.shards import PartReader, part_tensors, shape_metadata, write_tensors
from finetune.engine.state_shards import ShardPart
from finetune.errors import UserError
from finetune.recipe.schema import Checkpoint


def sealed(root: Path, step: int) -> Path:
    partial = partial_folder(root, step)
    partial.mkdir(parents=True)
    (partial / "state.json").write_text('{"step": 1}')
    (partial / "recipe.yaml").write_text("")
    (partial / "rank-00000-of-00001.safetensors").write_bytes(bytes(range(256)) * 8)
    seal(partial, step_folder(root, step), [])
    return step_folder(root, step)


def test_a_sealed_checkpoint_verifies_and_leaves_nothing_partial(tmp_path: Path) -> None:
    folder = sealed(tmp_path, 200)
    assert folder.name == "step-00000200"
    assert find_problem(folder) is None
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def flip_a_bit(folder: Path) -> None:
    file = folder / "rank-00000-of-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[1000] ^= 1
    file.write_bytes(content)


def truncate(folder: Path) -> None:
    file = folder / "rank-00000-of-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def newer_version(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "version": 99}))


DAMAGE: list[tuple[Callable[[Path], object], str]] = [
    (flip_a_bit, "is damaged: its checksum differs"),
    (truncate, "has 2047 bytes instead of 2048"),
    (lambda folder: (folder / "rank-00000-of-00001.safetensors").unlink(), "is missing"),
    (lambda folder: (folder / "manifest.json").unlink(), "it has no manifest.json"),
    (lambda folder: (folder / "manifest.json").write_text("{"), "cannot be read"),
    (newer_version, "it is of format 99, this program writes 1"),
]


@pytest.mark.parametrize(("damage", "reason"), DAMAGE, ids=[reason for _, reason in DAMAGE])
def test_damage_is_detected_and_named(tmp_path: Path, damage: Callable[[Path], object], reason: str) -> None:
    folder = sealed(tmp_path, 1)
    damage(folder)
    assert reason in (find_problem(folder) or "")


def test_an_interrupted_save_is_no_checkpoint_and_is_removed(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        sealed(tmp_path, step)
    partial_folder(tmp_path, 4).mkdir()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000003", "step-00000002", "step-00000001"]
    Retention(tmp_path, Checkpoint(keep=2)).prune()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


def stepped(weight: torch.Tensor) -> tuple[torch.Tensor, torch.optim.Optimizer]:
    parameter = torch.nn.Parameter(weight.clone())
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    parameter.grad = torch.arange(weight.numel(), dtype=torch.float32).view_as(weight)
    optimizer.step()
    return parameter, optimizer


def write(path: Path, part: ShardPart, optimizer: torch.optim.Optimizer) -> None:
    write_tensors(path, part_tensors([part], [optimizer]), shape_metadata([part]))


@pytest.mark.parametrize("writers", [(0, 12), (0, 5, 12), (0, 1, 2, 11, 12)])
@pytest.mark.parametrize("readers", [(0, 12), (0, 7, 12), (0, 3, 6, 9, 12)])
def test_any_ranges_read_what_any_ranges_wrote(
    tmp_path: Path, writers: tuple[int, ...], readers: tuple[int, ...]
) -> None:
    parameter, optimizer = stepped(torch.randn(4, 3))
    for rank, (start, end) in enumerate(pairwise(writers)):
        part = ShardPart("w", (4, 3), start, end - start, parameter, start)
        write(tmp_path / f"rank-{rank}.safetensors", part, optimizer)
    reader = PartReader(sorted(tmp_path.glob("*.safetensors")))
    for start, end in pairwise(readers):
        shard = torch.nn.Parameter(torch.zeros(end - start))
        fresh = torch.optim.AdamW([shard], lr=0.1)
        reader.restore([ShardPart("w", (4, 3), start, end - start, shard, 0)], [fresh], {"w": {"step": 1.0}})
        assert torch.equal(shard.detach(), parameter.detach().view(-1)[start:end])
        for field in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(fresh.state[shard][field], optimizer.state[parameter][field].view(-1)[start:end])
        assert fresh.state[shard]["step"].item() == 1.0


Cut = Callable[[torch.Tensor], list[tuple[torch.Tensor, ShardPart]]]


def columns(weight: torch.Tensor) -> list[tuple[torch.Tensor, ShardPart]]:
    """(8, 6) in four: two rows of columns for two shards, of three ranks' columns each."""
    found = []
    for top, left in product((0, 5), (0, 2, 4)):
        rows = slice(top, 5 if top == 0 else 8)
        shard = torch.nn.Parameter(weight[rows, left : left + 2].clone())
        found.append((shard, ShardPart("w", (8, 6), top * 6 + left, shard.numel(), shard, 0, 2, 6)))
    return found


def rows(weight: torch.Tensor) -> list[tuple[torch.Tensor, ShardPart]]:
    """In pieces that begin and end in the middle of rows."""
    found = []
    for start, end in pairwise((0, 7, 8, 31, 48)):
        shard = torch.nn.Parameter(weight.flatten()[start:end].clone())
        found.append((shard, ShardPart("w", (8, 6), start, end - start, shard, 0)))
    return found


def halves(weight: torch.Tensor) -> list[tuple[torch.Tensor, ShardPart]]:
    found = []
    for left in (0, 3):
        shard = torch.nn.Parameter(weight[:, left : left + 3].clone())
        found.append((shard, ShardPart("w", (8, 6), left, 24, shard, 0, 3, 6)))
    return found


@pytest.mark.parametrize("writers", [columns, rows, halves])
@pytest.mark.parametrize("readers", [columns, rows, halves])
def test_any_sharding_reads_what_any_other_wrote(tmp_path: Path, writers: Cut, readers: Cut) -> None:
    weight = torch.arange(48.0).view(8, 6)
    for rank, (shard, part) in enumerate(writers(weight)):
        optimizer = torch.optim.AdamW([shard], lr=0.0, weight_decay=0.0)
        shard.grad = shard.detach().clone()  # so that the state tells the elements apart
        optimizer.step()
        write(tmp_path / f"rank-{rank}.safetensors", part, optimizer)
    reader = PartReader(sorted(tmp_path.glob("*.safetensors")))
    for wanted, part in readers(weight):
        read = torch.nn.Parameter(torch.full_like(wanted, -1.0))
        optimizer = torch.optim.AdamW([read], lr=0.0)
        reader.restore([replace(part, stepped=read)], [optimizer], {"w": {"step": 1.0}})
        assert torch.equal(read, wanted)
        assert torch.allclose(optimizer.state[read]["exp_avg"], wanted * 0.1)


def test_a_gap_and_another_model_are_errors(tmp_path: Path) -> None:
    parameter, optimizer = stepped(torch.randn(4, 3))
    write(tmp_path / "rank-0.safetensors", ShardPart("w", (4, 3), 0, 5, parameter, 0), optimizer)
    reader = PartReader([tmp_path / "rank-0.safetensors"])
    with pytest.raises(UserError, match="holds 5 of 12 elements of weight of w"):
        reader.restore([ShardPart("w", (4, 3), 0, 12, parameter, 0)], [optimizer], {"w": {}})
    with pytest.raises(UserError, match=r"checkpoint's w is \[4, 3\], the model's \[6, 2\]\. It is of another model"):
        reader.restore([ShardPart("w", (6, 2), 0, 12, parameter, 0)], [optimizer], {"w": {}})
    with pytest.raises(UserError, match="checkpoint's v is absent"):
        reader.restore([ShardPart("v", (4, 3), 0, 12, parameter, 0)], [optimizer], {"v": {}})


def test_a_checkpoint_that_is_set_aside_replaces_nothing(tmp_path: Path) -> None:
    (tmp_path / "aside-step-00000001").write_text("a file in the way")
    (tmp_path / "aside-step-00000001-2").symlink_to("nowhere")
    moved = set_aside(sealed(tmp_path, 1))
    assert moved.name == "aside-step-00000001-3"
    assert find_problem(moved) is None
    with pytest.raises(UserError, match="cannot be set aside as aside-step-00000002: No such file"):
        set_aside(tmp_path / "step-00000002")


@pytest.mark.parametrize("manifest", ["[]", "{}", '{"version": 1}', '{"version": 1, "files": {}}', "null", "1", '"x"'])
def test_a_manifest_that_is_none(manifest: str, tmp_path: Path) -> None:
    folder = sealed(tmp_path, 1)
    (folder / "manifest.json").write_text(manifest)
    assert (find_problem(folder) or "").startswith("its manifest.json is damaged: it ")


def saved(root: Path, step: int, **metrics: float) -> Path:
    partial = partial_folder(root, step)
    partial.mkdir(parents=True)
    (partial / "state.json").write_text(json.dumps({"step": step, "metrics": metrics}))
    (partial / "recipe.yaml").write_text("")
    seal(partial, step_folder(root, step), [])
    return step_folder(root, step)


def damage(folder: Path) -> None:
    (folder / "state.json").write_text("{}")


def steps(root: Path) -> list[int]:
    return [step_of(folder) for folder in list_checkpoints(root)]


def test_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(("metric", "best"), [("eval_loss", 2), ("eval_loss/chat", 4), ("exact_match", 3)])
def test_the_best_is_kept_in_addition_to_the_newest(tmp_path: Path, metric: str, best: int) -> None:
    for step, loss, match in ((1, 3.0, 0.1), (2, 1.0, 0.2), (3, 1.5, 0.9), (4, 2.0, 0.3), (5, 2.5, 0.4)):
        saved(tmp_path, step, **{"eval_loss": loss, "eval_loss/chat": abs(step - 4), "exact_match": match})
    saved(tmp_path, 6)  # without an evaluation
    retention = Retention(tmp_path, Checkpoint(keep=2, best=metric))
    retention.prune()
    assert steps(tmp_path) == [6, 5, best]
    assert retention.best_value() == {"eval_loss": 1.0, "eval_loss/chat": 0, "exact_match": 0.9}[metric]


@pytest.mark.parametrize(("metric", "direction"), [("eval_loss", -1), ("eval_rewards/accuracy", 1)])
def test_the_first_of_those_that_rounding_cannot_tell_apart_is_the_best(
    tmp_path: Path, metric: str, direction: int
) -> None:
    for step, ahead in ((1, 0.0), (2, 1e-7), (3, 1e-3), (4, 1e-3 + 1e-6), (5, 0.0)):
        saved(tmp_path, step, **{metric: 0.5 + direction * ahead})
    assert best_checkpoint(tmp_path, metric) == tmp_path / "step-00000003"
    assert Retention(tmp_path, Checkpoint(best=metric)).best_value() == 0.5 + direction * 1e-3


def test_a_damaged_best_gives_way_to_the_next(tmp_path: Path) -> None:
    for step, loss in ((1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)):
        saved(tmp_path, step, eval_loss=loss)
    shard = tmp_path / "step-00000001" / "state.json"
    shard.write_text(shard.read_text().replace("1.0", "0.5"))
    Retention(tmp_path, Checkpoint(keep=1, best="eval_loss")).prune()
    assert steps(tmp_path) == [4, 2]


def test_remains_of_interrupted_saves_and_deletions_are_removed(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    partial_folder(tmp_path, 2).mkdir()
    (tmp_path / ".removed-step-00000000").mkdir()
    Retention(tmp_path, Checkpoint(keep=1)).prune()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_a_removed_checkpoint_is_gone(tmp_path: Path) -> None:
    remove(saved(tmp_path, 1))
    assert list(tmp_path.iterdir()) == []


def flat_tensors(scale: float) -> dict[str, Tensor]:
    """Of sizes that end between two aligned places."""
    return {
        "weight|0|a": torch.arange(13, dtype=torch.bfloat16) * scale,
        "exp_avg|0|a": torch.arange(13, dtype=torch.float32) * scale,
        "state|0|b": (torch.arange(7) * scale).to(torch.uint8),
        "weight|4|c": torch.arange(40, dtype=torch.float64)[4:21] * scale,
    }


def test_copies_are_equal_and_independent_of_later_steps() -> None:
    tensors = flat_tensors(1.0)
    copies = Staging().copies(tensors)
    for tensor in tensors.values():
        tensor.zero_()
    torch.testing.assert_close(copies, flat_tensors(1.0), rtol=0, atol=0)
    assert list(copies) == list(tensors)


def test_the_next_save_uses_the_same_memory() -> None:
    staging = Staging()
    first = {name: copy.data_ptr() for name, copy in staging.copies(flat_tensors(1.0)).items()}
    second = staging.copies(flat_tensors(2.0))
    assert {name: copy.data_ptr() for name, copy in second.items()} == first
    torch.testing.assert_close(second, flat_tensors(2.0), rtol=0, atol=0)


def test_staging_grows() -> None:
    staging = Staging()
    staging.copies({"weight|0|a": torch.ones(3)})
    torch.testing.assert_close(staging.copies(flat_tensors(3.0)), flat_tensors(3.0), rtol=0, atol=0)


def test_released_memory_is_allocated_again() -> None:
    staging = Staging()
    staging.copies(flat_tensors(1.0))
    staging.release()
    torch.testing.assert_close(staging.copies(flat_tensors(4.0)), flat_tensors(4.0), rtol=0, atol=0)


def test_staging_of_nothing() -> None:
    assert Staging().copies({}) == {}
