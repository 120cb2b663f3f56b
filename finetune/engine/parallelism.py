"""How the processes of a launch divide the work: the accelerate config's `parallelism_config`, read and counted.

    processes = pipeline x replicate x shard x context x sequence x tensor         (outermost first)

Ranks that differ in `replicate` or `shard` train on other rows. The others work together on the same rows: on other
layers of them (pipeline), other tokens (context, sequence), other columns of the same matrices (tensor). `expert`
divides the ranks of one replica anew: each group of so many ranks holds every expert once.

accelerate has no words for pipeline and expert; they stand in the same block, which its launcher passes over, as
`parallelism_config_pp_*` and `parallelism_config_ep_size`.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from finetune.errors import UserError

Exchange = Literal["allgather", "alltoall", "ring"]
Schedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]

DIMENSIONS = ("pipeline", "replicate", "shard", "context", "sequence", "tensor")  # outermost first
_PREFIX = "parallelism_config_"
_KEYS = {  # in accelerate's words, or ours after them
    "dp_replicate_size": "replicate",
    "dp_shard_size": "shard",
    "cp_size": "context",
    "cp_comm_strategy": "exchange",
    "sp_size": "sequence",
    "tp_size": "tensor",
    "pp_size": "pipeline",
    "pp_schedule": "schedule",
    "pp_stages_per_rank": "stages_per_rank",
    "ep_size": "expert",
}
_CHOICES = {"exchange": get_args(Exchange), "schedule": get_args(Schedule)}
_NO_EFFECT = {"cp_backend", "sp_backend", "sp_seq_length", "sp_seq_length_is_variable", "sp_attn_implementation"}


@dataclass(frozen=True)
class Parallelism:
    """Sizes of a launch; 1 where a dimension is not used."""

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    sequence: int = 1
    tensor: int = 1
    expert: int = 1
    exchange: Exchange = "allgather"  # of keys and values between context ranks
    schedule: Schedule = "1f1b"
    stages_per_rank: int = 1  # of a pipeline; more than one only where the schedule interleaves them

    @property
    def processes(self) -> int:
        return math.prod(self.sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """In the order of DIMENSIONS."""
        return tuple(getattr(self, name) for name in DIMENSIONS)

    @property
    def data(self) -> int:
        """Groups of ranks that train on other rows at the same time."""
        return self.replicate * self.shard

    @property
    def tokens(self) -> int:
        """Ranks that share the tokens of a row."""
        return self.context * self.sequence

    @property
    def is_plain(self) -> bool:
        """Only data parallel, replicated or sharded over all ranks, as every backend knows it."""
        return self.data == self.processes and self.expert == 1 and 1 in (self.replicate, self.shard)

    def place(self, rank: int) -> dict[str, int]:
        """Coordinate of a rank in every dimension: the last counts fastest.

        >>> Parallelism(shard=2, tensor=2).place(2)
        {'pipeline': 0, 'replicate': 0, 'shard': 1, 'context': 0, 'sequence': 0, 'tensor': 0}
        """
        place: dict[str, int] = {}
        for name, size in zip(reversed(DIMENSIONS), reversed(self.sizes), strict=True):
            rank, place[name] = divmod(rank, size)
        return dict(reversed(place.items()))

    def data_rank(self, rank: int) -> int:
        """Which of the `data` shares of the rows a rank works on."""
        place = self.place(rank)
        return place["replicate"] * self.shard + place["shard"]

    def leads_rows(self, rank: int) -> bool:
        """Whether a rank is the first of those that work on the same rows, and speaks for them."""
        place = self.place(rank)
        return not any(place[name] for name in DIMENSIONS if name not in ("replicate", "shard"))

    def summary(self) -> str:
        """For reports: `shard 2 x tensor 2`."""
        used = [f"{name} {size}" for name, size in zip(DIMENSIONS, self.sizes, strict=True) if size > 1]
        return " x ".join([*used, *([f"expert {self.expert}"] if self.expert > 1 else [])]) or "one process"


def read_parallelism(config: dict[str, Any], sharded: bool, processes: int, name: str) -> Parallelism:
    """Of an accelerate config. sharded: ranks that no dimension asks for are shards of one model, else replicas.

    The data-parallel size that the config leaves out is what the others leave over, so that one file serves any number
    of processes. name: of the config, for messages. Raises UserError where keys or sizes do not fit.
    """
    given = _given(config.get("parallelism_config") or {}, name)
    rest = "shard" if sharded else "replicate"
    asked = replace(Parallelism(), **given)
    if rest not in given and asked.processes and processes % asked.processes == 0:
        asked = replace(asked, **{rest: processes // asked.processes})
    if asked.processes != processes:
        raise UserError(_do_not_multiply(asked, rest in given, processes, name))
    return asked


def _given(block: dict[str, Any], name: str) -> dict[str, Any]:
    problems, found = [], {}
    for key, value in block.items():
        short = str(key).removeprefix(_PREFIX)
        if short in _NO_EFFECT:
            problems.append(f"`{key}` has no effect here: remove it")
        elif short not in _KEYS:
            close = difflib.get_close_matches(short, _KEYS, n=1)
            problems.append(f"`{key}` is not known" + (f"; did you mean `{_PREFIX}{close[0]}`?" if close else ""))
        elif (problem := _problem(_KEYS[short], value)) is not None:
            problems.append(f"`{key}: {value}`: {problem}")
        else:
            found[_KEYS[short]] = value
    if problems:
        raise UserError(f"{name}: parallelism_config:\n" + "\n".join(f"  {problem}" for problem in problems))
    return found


def _problem(field: str, value: Any) -> str | None:
    """Why a value cannot be."""
    if field in _CHOICES:
        return None if value in _CHOICES[field] else f"one of {', '.join(_CHOICES[field])}"
    return None if type(value) is int and value >= 1 else "a whole number from 1 on"


def _do_not_multiply(asked: Parallelism, all_given: bool, processes: int, name: str) -> str:
    need = asked.processes
    below, above = processes // need * need, (processes // need + 1) * need
    nearest = f"{need}" if all_given else " or ".join(str(n) for n in (below, above) if n)
    return (
        f"{name}: parallelism_config: {asked.summary()} {'are' if all_given else 'go into'} "
        f"{need if all_given else f'multiples of {need}'} processes, not {processes}: "
        f"launch with `--num_processes {nearest}`, or change the sizes"
    )


def dimension_key(field: str) -> str:
    """The key of the accelerate config that sets a field, for messages."""
    assert field in {f.name for f in fields(Parallelism)}
    return _PREFIX + next(key for key, known in _KEYS.items() if known == field)
