"""The bubble of each schedule, and the micro-batches it takes: by formula, and by torch's own order of actions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from finetune.engine.parallelism import Schedule
from finetune.engine.pipeline import TimedStage, make_schedule
from finetune.engine.stages import SINGLE_STAGE_SCHEDULES, bubble_share, schedulable_micro_batches

SECONDS = {"F": 1, "B": 2, "I": 1, "W": 1}  # a backward is as long as two forwards; I and W are its halves


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[int]:
    """A process group of so many, of which only this process is there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    yield request.param
    dist.destroy_process_group()


def order(schedule: Schedule, ranks: int, stages_per_rank: int, micro_batches: int) -> dict[int, list[Any]]:
    """What each rank does, one after the other; torch works it out for all of them."""
    hidden, stages = torch.empty(1, 4, 2, device="meta"), range(0, ranks * stages_per_rank, ranks)
    made = [
        TimedStage(nn.Identity(), index, ranks * stages_per_rank, None, hidden, torch.device("cpu"), None)  # type: ignore[arg-type]
        for index in stages
    ]
    found = make_schedule(schedule, list(made), micro_batches)
    actions = found._get_pipeline_order() if schedule in SINGLE_STAGE_SCHEDULES else found.pipeline_order
    computing = {rank: [one for one in of_rank if one and one.is_compute_op] for rank, of_rank in actions.items()}
    return {rank: list(numbered(of_rank)) for rank, of_rank in computing.items()}


def numbered(actions: list[Any]) -> Iterator[Any]:
    """Forwards of a stage in their order: torch's picture of 1F1B, which it does not run by, begins with 1 on the last
    rank."""
    done: dict[Any, int] = {}
    for action in actions:
        which = action.computation_type, action.stage_index
        done[which] = done.get(which, -1) + 1
        yield action._replace(microbatch_index=done[which])


def played(actions: dict[int, list[Any]], stages: int) -> float:
    """Share of the time that a rank stands still until all are done."""
    ended: dict[tuple[str, int, int], float] = {}
    clock, left = dict.fromkeys(actions, 0.0), {rank: list(of_rank) for rank, of_rank in actions.items()}
    while any(left.values()):
        before = len(ended)
        for rank, todo in left.items():
            while todo:
                kind, stage, batch = todo[0].computation_type.value, todo[0].stage_index, todo[0].microbatch_index
                needs = needed(kind, stage, batch, stages)
                if any(need not in ended for need in needs):
                    break
                begin = max([clock[rank], *(ended[need] for need in needs)])
                clock[rank] = ended[kind, stage, batch] = begin + SECONDS[kind]
                if kind == "B":
                    ended["I", stage, batch] = clock[rank]
                elif kind == "I":
                    ended["B", stage, batch] = clock[rank]
                todo.pop(0)
        assert len(ended) > before, "nothing can go on"
    work = sum(SECONDS[action.computation_type.value] for action in actions[0])
    return 1 - work / max(clock.values())


def needed(kind: str, stage: int, batch: int, stages: int) -> list[tuple[str, int, int]]:
    if kind == "F":
        return [("F", stage - 1, batch)] if stage else []
    if kind == "W":
        return [("I", stage, batch)]
    return [("F", stage, batch), *([("I", stage + 1, batch)] if stage < stages - 1 else [])]


@pytest.mark.parametrize("ranks", [2, 4, 8], indirect=True)
@pytest.mark.parametrize(
    ("schedule", "stages_per_rank"),
    [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zero_bubble", 1)],
)
@pytest.mark.parametrize("rounds", [2, 3])
def test_bubble_is_what_torchs_order_leaves(ranks: int, schedule: Schedule, stages_per_rank: int, rounds: int) -> None:
    micro_batches = rounds * ranks
    found = played(order(schedule, ranks, stages_per_rank, micro_batches), ranks * stages_per_rank)
    assert bubble_share(schedule, ranks, stages_per_rank, micro_batches) == pytest.approx(found)


@pytest.mark.parametrize("ranks", [2, 3, 4], indirect=True)
@pytest.mark.parametrize("schedule", get_args(Schedule))
def test_torch_takes_as_many_micro_batches_as_are_computed_to_fit(ranks: int, schedule: Schedule) -> None:
    stages_per_rank = 1 if schedule in SINGLE_STAGE_SCHEDULES else 2
    for count in range(1, 12):
        fits = schedulable_micro_batches(schedule, ranks, count)
        assert fits >= count
        assert order(schedule, ranks, stages_per_rank, fits)
        if fits != count:
            with pytest.raises(ValueError, match="microbatches"):
                order(schedule, ranks, stages_per_rank, count)


def test_papers_numbers() -> None:
    assert bubble_share("1f1b", 4, 1, 8) == bubble_share("gpipe", 4, 1, 8) == 3 / 11
    assert bubble_share("interleaved", 4, 2, 8) == 3 / 19
    assert bubble_share("zero_bubble", 4, 1, 8) == 1 / 9
