"""What every way of showing starts from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from finetune.data import UNTRAINED, Example
from finetune.data.dataset import Dataset
from finetune.planning.inspect.totals import Totals
from finetune.recipe import Recipe
from finetune.recipe.schema import Source


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


def num_trained(example: Example) -> int:
    return int(np.count_nonzero(example.labels != UNTRAINED))
