"""What every way of showing starts from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from finetune.data.dataset import Dataset
from finetune.planning.inspect.totals import Totals
from finetune.recipe import Recipe
from finetune.recipe.schema import Source

SEQUENCES = ("chosen", "rejected")  # of an example that has two


@dataclass(frozen=True)
class View:
    """A recipe's data, ready to be looked at."""

    recipe: Recipe
    recipe_path: Path
    sources: Sequence[Source]  # data.train or data.eval
    tokenizer: PreTrainedTokenizerBase
    template: str  # what the chat template is called
    data: Dataset
    totals: Totals
