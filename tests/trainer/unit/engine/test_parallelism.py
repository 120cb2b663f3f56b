"""How a launch divides its processes: read from the config, counted, and refused where it cannot be."""

from __future__ import annotations

from itertools import product

import pytest

from finetune.engine.parallelism import DIMENSIONS, Parallelism, read_parallelism
from finetune.errors import UserError


def block(**sizes: object) -> dict[str, object]:
    return {"parallelism_config": {f"parallelism_config_{key}": value for key, value in sizes.items()}}


@pytest.mark.parametrize("sharded", [False, True])
def test_without_a_block_every_rank_is_data_parallel(sharded: bool) -> None:
    found = read_parallelism({}, sharded, 4, "it.yaml")
    assert found == (Parallelism(shard=4) if sharded else Parallelism(replicate=4))
    assert found.is_plain
    assert found.data == 4
    assert [found.data_rank(rank) for rank in range(4)] == [0, 1, 2, 3]


def test_what_the_config_leaves_out_is_left_over() -> None:
    assert read_parallelism(block(tp_size=2), True, 8, "it.yaml") == Parallelism(shard=4, tensor=2)
    assert read_parallelism(block(pp_size=2), False, 8, "it.yaml") == Parallelism(pipeline=2, replicate=4)
    hybrid = read_parallelism(block(dp_replicate_size=2), True, 8, "it.yaml")
    assert hybrid == Parallelism(replicate=2, shard=4)
    assert not hybrid.is_plain


def test_ranks_of_the_same_rows_have_one_data_rank() -> None:
    sizes = Parallelism(pipeline=2, replicate=2, shard=2, context=2, tensor=2)
    places = [sizes.coordinates(rank) for rank in range(sizes.processes)]
    assert [tuple(place[name] for name in DIMENSIONS) for place in places] == list(product(*map(range, sizes.sizes)))
    for rank, place in enumerate(places):
        assert sizes.data_rank(rank) == place["replicate"] * 2 + place["shard"]
    assert {sizes.data_rank(rank) for rank in range(sizes.processes)} == set(range(sizes.data))


@pytest.mark.parametrize(
    ("config", "processes", "says"),
    [
        (block(tp_size=2), 3, "tensor 2 needs a multiple of 2 processes, not 3.*--num_processes 2 or 4"),
        (block(tp_size=2), 1, "not 1. Fix: launch with `--num_processes 2`"),
        (block(dp_shard_size=2, tp_size=2), 8, "shard 2 x tensor 2 needs 4 processes, not 8.*--num_processes 4"),
        (block(tp_siz=2), 2, "`parallelism_config_tp_siz` is not known; did you mean `parallelism_config_tp_size`"),
        (block(tp_size="two"), 2, "`parallelism_config_tp_size: two`: must be an integer of at least 1"),
        (block(tp_size=0), 2, "must be an integer of at least 1"),
        (block(cp_comm_strategy="gather"), 2, "must be one of allgather, alltoall, ring"),
        (block(sp_seq_length=4096), 2, "`parallelism_config_sp_seq_length` has no effect here: remove it"),
    ],
)
def test_what_cannot_be_is_an_error(config: dict[str, object], processes: int, says: str) -> None:
    with pytest.raises(UserError, match=f"(?s)it.yaml: parallelism_config.*{says}"):
        read_parallelism(config, True, processes, "it.yaml")


def test_all_wrong_keys_are_reported_at_once() -> None:
    with pytest.raises(UserError, match=r"(?s)tp_siz.*pp_schedule"):
        read_parallelism(block(tp_siz=2, pp_schedule="fast"), True, 2, "it.yaml")
