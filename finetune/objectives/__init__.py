"""Losses and metrics of a run. `recipe.objective` is read here and nowhere else."""

from finetune.objectives.objective import Counts, Objective, Sums, Term, Terms
from finetune.objectives.table import OBJECTIVES, make_objective

__all__ = ["OBJECTIVES", "Counts", "Objective", "Sums", "Term", "Terms", "make_objective"]
