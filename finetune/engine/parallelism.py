"""Parallel dimensions of a launch: the accelerate config's `parallelism_config`.

    processes = pipeline x replicate x shard x context x sequence x tensor         (outermost first)

Ranks that differ in `replicate` or `shard` are data parallel: they train on different rows. The others share their
rows: they have different layers (pipeline), tokens (context, sequence) or columns of the same matrices (tensor).
`expert` is not a dimension of its own: it groups the ranks of one replica so that each group has every expert once.

accelerate has no keys for pipeline and expert. Ours are in the same block, where its launcher ignores them:
`parallelism_config_pp_*` and `parallelism_config_ep_size`.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from finetune.errors import UserError

ContextExchange = Literal["allgather", "alltoall", "ring"]
Schedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]

DIMENSIONS = ("pipeline", "replicate", "shard", "context", "sequence", "tensor")  # outermost first
_PREFIX = "parallelism_config_"
_KEYS = {  # accelerate's keys, then ours
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
_CHOICES = {"exchange": get_args(ContextExchange), "schedule": get_args(Schedule)}
_NO_EFFECT = {"cp_backend", "sp_backend", "sp_seq_length", "sp_seq_length_is_variable", "sp_attn_implementation"}


@dataclass(frozen=True)
class Parallelism:
    """Sizes of the dimensions of a launch; 1 if a dimension is not used."""

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    sequence: int = 1
    tensor: int = 1
    expert: int = 1
    exchange: ContextExchange = "allgather"  # method for keys and values between context ranks
    schedule: Schedule = "1f1b"
    stages_per_rank: int = 1  # in a pipeline; more than one with interleaved schedules only

    @property
    def processes(self) -> int:
        return math.prod(self.sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes in the order of DIMENSIONS."""
        return tuple(getattr(self, name) for name in DIMENSIONS)

    @property
    def data(self) -> int:
        """Data parallel size: number of groups of ranks that train on different rows."""
        return self.replicate * self.shard

    @property
    def tokens(self) -> int:
        """Number of ranks that share the tokens of a row."""
        return self.context * self.sequence

    @property
    def is_plain(self) -> bool:
        """True if only data parallel, replicated or sharded over all ranks, which every backend supports."""
        return self.data == self.processes and self.expert == 1 and 1 in (self.replicate, self.shard)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Returns the coordinate of a rank in every dimension; the last dimension varies fastest.

        >>> Parallelism(shard=2, tensor=2).coordinates(2)
        {'pipeline': 0, 'replicate': 0, 'shard': 1, 'context': 0, 'sequence': 0, 'tensor': 0}
        """
        coordinates: dict[str, int] = {}
        for name, size in zip(reversed(DIMENSIONS), reversed(self.sizes), strict=True):
            rank, coordinates[name] = divmod(rank, size)
        return dict(reversed(coordinates.items()))

    def data_rank(self, rank: int) -> int:
        """Returns the data parallel rank, 0 to `data` - 1."""
        coordinates = self.coordinates(rank)
        return coordinates["replicate"] * self.shard + coordinates["shard"]

    def is_data_parallel_leader(self, rank: int) -> bool:
        """Returns whether a rank is the first of those that share its rows, and reports for them."""
        coordinates = self.coordinates(rank)
        return not any(coordinates[name] for name in DIMENSIONS if name not in ("replicate", "shard"))

    def summary(self) -> str:
        """Summary for reports: `shard 2 x tensor 2`."""
        used = [f"{name} {size}" for name, size in zip(DIMENSIONS, self.sizes, strict=True) if size > 1]
        return " x ".join([*used, *([f"expert {self.expert}"] if self.expert > 1 else [])]) or "one process"


def read_parallelism(config: dict[str, Any], sharded: bool, processes: int, name: str) -> Parallelism:
    """Returns the sizes of an accelerate config. name: the config's name in messages. Raises UserError.

    The data parallel size that the config leaves out follows from the number of processes, so that one file serves any
    number of them: `shard` if the backend is `sharded`, else `replicate`.
    """
    problems, configured = [], dict[str, Any]()
    for key, value in (config.get("parallelism_config") or {}).items():
        short = str(key).removeprefix(_PREFIX)
        field = _KEYS.get(short, "")
        if short in _NO_EFFECT:
            problems.append(f"`{key}` has no effect here: remove it")
        elif not field:
            close = difflib.get_close_matches(short, _KEYS, n=1)
            problems.append(f"`{key}` is not known" + (f"; did you mean `{_PREFIX}{close[0]}`?" if close else ""))
        elif field in _CHOICES and value not in _CHOICES[field]:
            problems.append(f"`{key}: {value}`: must be one of {', '.join(_CHOICES[field])}")
        elif field not in _CHOICES and (type(value) is not int or value < 1):
            problems.append(f"`{key}: {value}`: must be an integer of at least 1")
        configured[field] = value
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise UserError(f"{name}: parallelism_config:\n{lines}\nFix: correct these keys in the accelerate config")
    sizes, free = Parallelism(**configured), "shard" if sharded else "replicate"
    unit, is_complete = sizes.processes, free in configured
    if not is_complete and processes % unit == 0:
        sizes = replace(sizes, **{free: processes // unit})
    if sizes.processes != processes:
        around = (processes // unit * unit, (processes // unit + 1) * unit)
        nearest = f"{unit}" if is_complete else " or ".join(str(n) for n in around if n)
        raise UserError(
            f"{name}: parallelism_config: {sizes.summary()} needs {'' if is_complete else 'a multiple of '}{unit} "
            f"processes, not {processes}. Fix: launch with `--num_processes {nearest}`, or change the sizes"
        )
    return sizes


def dimension_key(field: str) -> str:
    """Returns the key of the accelerate config that sets a field."""
    return _PREFIX + next(key for key, one in _KEYS.items() if one == field)
