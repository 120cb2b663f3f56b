"""Items made ahead: in order, not too far, and what goes wrong is said where it belongs."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Iterator

import pytest

from finetune.data.prefetch import Prefetched
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
