"""Items made ahead: in order, not too far, and what goes wrong is said where it belongs."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from finetune.data.loader import Loader, StepBatches
from finetune.data.prefetch import Feed, Prefetched, fed_steps
from finetune.data.row_source import RunRows
from finetune.data.samples import Example, Sequence
from finetune.errors import UserError


def test_the_same_items_in_the_same_order():
    with Prefetched(iter(range(100)), most=3) as items:
        assert list(items) == list(range(100))
        assert list(items) == []


def test_made_by_another_thread_a_few_ahead():
    made: list[int] = []
    threads = set()

    def make() -> Iterator[int]:
        for number in range(100):
            made.append(number)
            threads.add(threading.current_thread())
            yield number

    items = Prefetched(make(), most=2)
    assert next(items) == 0
    while len(made) < 3:  # 0 is taken, 1 and 2 are ready
        time.sleep(0.001)
    items.close()
    assert made == [0, 1, 2]
    (maker,) = threads
    assert maker is not threading.current_thread()
    assert not maker.is_alive()


def test_a_failure_is_raised_after_the_items_before_it_with_its_place():
    def breaks_here() -> Iterator[int]:
        yield 1
        yield 2
        raise UserError("row 3 cannot be read")

    items = Prefetched(breaks_here(), most=5)
    assert [next(items), next(items)] == [1, 2]
    with pytest.raises(UserError, match="row 3") as raised:
        next(items)
    assert "breaks_here" in "".join(traceback.format_tb(raised.value.__traceback__))
    with pytest.raises(UserError, match="row 3"):  # not an end like any other
        next(items)


def test_nothing_is_left_running_where_the_user_of_items_fails():
    before = threading.active_count()
    with pytest.raises(ZeroDivisionError), Prefetched(iter(range(10)), most=1) as items:
        1 / next(items)
    assert threading.active_count() == before


# --- rows that exist only after `prepare`


class Sampled(RunRows):
    """Rows of one example, as a model would sample them: the tokens are its version when the step was prepared."""

    def __init__(self, ahead: int):
        self.ahead, self.version, self.prepared = ahead, 0, dict[int, int]()

    def prepare(self, step: int) -> None:
        assert threading.current_thread() is threading.main_thread()
        self.prepared[step] = self.version

    def row(self, position: int) -> list[Example]:
        ids = np.full(3, self.prepared[position // ROWS], np.int32)
        return [Example("", 1, 0, (Sequence(ids, np.array([False, True, True])),))]

    def lengths(self, position: int) -> NDArray[np.int64]:
        return np.array([one.num_tokens for one in self.row(position)])

    def counts(self, position: int) -> dict[str, int]:
        return {"tokens": int(self.lengths(position).sum())}

    def epoch_at(self, position: int) -> float:
        return position / 100


ROWS, STEPS = 2, 7


def feed_of(rows: Sampled, start: int) -> Feed[StepBatches]:
    return fed_steps(Loader(rows, ROWS, 1, 0, 1, ROWS * STEPS), range(start, STEPS), torch.device("cpu"))


@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("start", [0, 4])
def test_a_step_is_prepared_so_many_ahead_and_not_earlier(ahead: int, start: int) -> None:
    rows = Sampled(ahead)
    with feed_of(rows, start) as feed:
        feed.peek()  # the first is read twice, and prepared once
        for step in range(start, STEPS):
            batches = next(feed).batches
            assert {int(one) for batch in batches for one in batch.inputs["input_ids"].flatten()} == {
                max(0, step - ahead - start)
            }
            assert list(rows.prepared) == list(range(start, min(step + ahead + 1, STEPS)))
            rows.version += 1  # an optimizer step
        assert list(feed) == []


def test_what_prepare_raises_is_raised_where_the_step_is_read() -> None:
    rows, before = Sampled(0), threading.active_count()
    with feed_of(rows, 0) as feed:
        next(feed)
        del rows.version
        with pytest.raises(AttributeError, match="version"):
            next(feed)
    assert threading.active_count() == before
