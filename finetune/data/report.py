"""What became of every row of every source."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class SourceReport:
    """What became of one source. rows = bad + overlong dropped + the rest; counts before `weight`."""

    path: str
    name: str = ""  # in metrics
    format: str = ""  # the one that was chosen, where the recipe says auto
    rows: int = 0  # read, the bad ones too
    bad: int = 0  # skipped under on_bad_row: skip
    dropped_overlong: int = 0
    truncated: int = 0
    split: int = 0  # rows cut into pieces
    no_supervised_token: int = 0  # examples (or pieces) dropped because nothing in them is trained
    unrolled: int = 0  # conversations that became several examples, because the template rewrites history
    duplicates: int = 0  # examples whose tokens are those of an earlier one of this source; kept
    examples: int = 0  # what is left
    tokens: int = 0
    supervised_tokens: int = 0
    bad_rows: list[str] = field(default_factory=list)  # the first ten, with place and reason
    weight: float = 1.0
    passes: float = 1.0  # over this source in an epoch
    taken: int = 0  # examples of an epoch


@dataclass(frozen=True)
class Report:
    """All sources; `totals` sums them, `as_dict` is for JSON."""

    sources: tuple[SourceReport, ...]

    def totals(self) -> dict[str, int]:
        """Every count, over all sources."""
        names = [name for name, value in asdict(SourceReport("")).items() if isinstance(value, int)]
        return {name: sum(getattr(source, name) for source in self.sources) for name in names}

    def as_dict(self) -> dict[str, Any]:
        return {**self.totals(), "sources": [asdict(source) for source in self.sources]}
