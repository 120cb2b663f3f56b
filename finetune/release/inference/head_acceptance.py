"""`evaluate RUN ... --head`: how many drafts of a head that predicts ahead the model would write itself, both greedy.

    base       the model that training began with, and its head
    trained    the result, or a checkpoint, and the head that it has: trained as well, or kept from the base

At each trained token of the run's held-out rows, every sequence alone, the head drafts it one token early, and the
model says what it would write there (objectives/ahead.py). With a_i accepted ones of n_i drafts in row i of k, and
N = n_1 + .. + n_k:

    acceptance   R = (a_1 + .. + a_k) / N
    a row's value   R + k (a_i - R n_i) / N    the mean of these is R

so the standard error of the values' mean is that of a share of tokens that come row by row, and the error of their
paired differences that of the difference of two shares (clusters in https://arxiv.org/abs/2411.00640).
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PretrainedConfig

from finetune.checkpoints.result import name_in_adapter
from finetune.checkpoints.trained import Trained
from finetune.data.batch import collate, with_ahead
from finetune.data.samples import Example
from finetune.data.samples import Sequence as TokenSequence
from finetune.errors import UserError
from finetune.models.assemble import assemble
from finetune.models.attention import attention_for
from finetune.models.base_model import Base
from finetune.models.checkpoint_files import tensor_names
from finetune.models.mtp import copies_in, in_head
from finetune.models.mtp_files import check_base_has_head
from finetune.models.weights import Placement, load_model
from finetune.models.wrapped import WrappedModel
from finetune.objectives.forward import ForwardPass
from finetune.objectives.table import make_objective
from finetune.recipe import Recipe
from finetune.recipe.objective_settings import Sft
from finetune.release.export.loading import default_device
from finetune.release.export.verify_answers import held_out_examples

ROWS = 1000  # unless --limit says otherwise


@dataclass(frozen=True)
class Drafts:
    """What became of a head's drafts, by row."""

    of_rows: dict[int, tuple[int, int]]  # (accepted, drafts), by a checksum of the row's tokens

    @property
    def acceptance(self) -> float:
        accepted, drafts = map(sum, zip(*self.of_rows.values(), strict=True))
        return accepted / drafts

    def values(self) -> dict[int, float]:
        """Returns the value of each row, whose mean is the acceptance; see above."""
        share, drafts = self.acceptance, sum(count for _, count in self.of_rows.values())
        scale = len(self.of_rows) / drafts
        return {row: share + scale * (accepted - share * count) for row, (accepted, count) in self.of_rows.items()}

    def stderr(self) -> float | None:
        """Returns the standard error of the acceptance; None of one row."""
        values, share, count = self.values().values(), self.acceptance, len(self.of_rows)
        if count < 2:
            return None
        return math.sqrt(math.fsum((one - share) ** 2 for one in values) / (count * (count - 1)))


def measure_head(trained: Trained, limit: int | None, base: bool) -> tuple[Drafts, Drafts | None]:
    """Returns the drafts of a run's head, and of its base's. limit: rows; base: whether the base is asked, too. Raises
    UserError if there is no head, or none that can be measured."""
    recipe = _with_head(trained)
    rows = held_out_examples(recipe, trained.settings, limit or ROWS)
    rows = [row for row in rows if any(len(_ahead_of(one)) for one in row.sequences)]
    if not rows:
        raise _unfit(trained, "its held-out rows have no trained token behind another one")
    is_result = not (trained.is_checkpoint or trained.is_adapter)
    before = None
    if base or not is_result:
        model, forward = _load(recipe)
        before = _drafts(model, forward, rows) if base else None
        if not is_result:  # adapters have changed nothing yet
            _fill(model, trained, recipe)
            return _drafts(model, forward, rows), before
        del model
    settings = {"name": str(trained.folder), "revision": None, "tokenizer": None}
    of_result = recipe.model.model_copy(update=settings)
    return _drafts(*_load(recipe.model_copy(update={"model": of_result, "tokens": None})), rows), before


# --- what can be measured


def _unfit(trained: Trained, reason: str) -> UserError:
    return UserError(f"--head: {trained.run_dir} has no head that can be measured. {reason}. Fix: leave out --head")


def _obstacle(recipe: Recipe | None) -> str | None:
    """Returns why nothing can be measured, by the recipe alone; None if it may be."""
    if recipe is None:
        return "It has no recipe.yaml, which says what its held-out rows are"
    if recipe.objective.scores_sequences:
        return "Its model scores texts, and writes none"
    if recipe.rollouts is not None:
        return "Its rows are prompts without answers to draft"
    if recipe.data.media is not None or recipe.model.train is not None:
        return "It was trained with its tower, and heads are measured on text alone"
    if recipe.model.name is None:
        return "It was made from a config"
    return "`model.mtp: drop` removed it" if recipe.model.mtp == "drop" else None


def _with_head(trained: Trained) -> Recipe:
    """Returns the recipe of a model with its head, for measuring on one process. Raises UserError if it has none."""
    if (reason := _obstacle(recipe := trained.recipe)) is not None:
        raise _unfit(trained, reason)
    assert recipe is not None  # or it is an obstacle
    model = recipe.model.model_copy(update={"mtp": "train", "cross_entropy": "auto"})
    base = Base(model, recipe.tokens)
    try:
        check_base_has_head(model, base.config)
    except UserError as error:
        reason = str(error).removeprefix("model.mtp: train: ").partition(". Fix:")[0]
        raise _unfit(trained, f"{reason[:1].upper()}{reason[1:]}") from None
    if _has_stale_copies(recipe, base.config):
        raise _unfit(trained, "It keeps copies of the base's embedding and LM head, which the model has trained")
    exact = trained.is_checkpoint or base.config.get_text_config().dtype != torch.bfloat16
    changes = {"precision": "fp32" if exact else "bf16_true", "compile": False}
    changes |= {"activation_checkpointing": False, "activation_offload": False}
    train = recipe.train.model_copy(update=changes)
    return recipe.model_copy(update={"model": model, "train": train, "quantization": None})


def _has_stale_copies(recipe: Recipe, config: PretrainedConfig) -> bool:
    """Returns whether the kept head has an embedding or LM head that the model does not have any more."""
    changes = recipe.lora is None or recipe.lora.modules_to_save is not None or recipe.tokens is not None
    return recipe.model.mtp == "keep" and changes and bool(copies_in(config, tensor_names(recipe.model)))


# --- models


def _load(recipe: Recipe) -> tuple[WrappedModel, ForwardPass]:
    """Returns a base with its head, and with adapters that change nothing, on this process's device."""
    device, base = default_device(), Base.of(recipe)
    attention = attention_for(recipe, base.config, device.type)
    model: Any = load_model(recipe, base, attention, Placement("load", None))
    wrapped = assemble(model.to(device), recipe, device, has_scores=False, only_sums=False)
    if wrapped.choice.implementation == "plain":
        raise UserError(
            f"--head: the LM head gives no losses of its own here. {wrapped.choice.reason}. Fix: leave out --head"
        )
    objective = make_objective(Sft(), evaluating=True, mtp_weight=1.0)
    return wrapped.eval(), ForwardPass(attention, objective)


@torch.no_grad()
def _fill(model: WrappedModel, trained: Trained, recipe: Recipe) -> None:
    """Copy trained weights over those of the base. A head that was not trained stays the base's. Raises UserError if
    they do not fit."""
    files, left = Base.of(recipe).files, {*trained.shapes}
    of_multimodal = files is not None and trained.is_adapter and not trained.is_checkpoint
    for name, parameter in model.causal_lm.named_parameters():
        key = trained.key(name)
        if of_multimodal and files is not None:  # its adapter is for the class with a tower
            key = trained.key(name_in_adapter(files.part, name))
        if key is not None and trained.shapes[key].shape == parameter.shape:
            parameter.copy_(trained.read(key))
            left.discard(key)
        elif parameter.requires_grad and not in_head(name):
            raise UserError(f"{trained.folder}: {name} of the model is not in it. Fix: give the run as it was saved")
    if left:
        raise UserError(f"{trained.folder}: {min(left)} is not of its model. Fix: give the run as it was saved")


# --- drafts


def _ahead_of(sequence: TokenSequence) -> Any:
    """Returns the mask of the trained tokens that a head can draft: there are two before them."""
    return sequence.loss_mask[2:].nonzero()[0]


@torch.no_grad()
def _drafts(model: WrappedModel, forward: ForwardPass, rows: list[Example]) -> Drafts:
    """Returns the drafts of the head in rows, every sequence alone."""
    of_rows, device = dict[int, tuple[int, int]](), model.causal_lm.device
    for number, row in enumerate(rows):
        accepted, count, key = 0, 0, number
        for one in row.sequences:
            key = zlib.crc32(one.input_ids.tobytes(), key)
            if not len(_ahead_of(one)):
                continue
            alone = replace(row, sequences=(one,), columns={}, target_columns={})
            batch = with_ahead(collate([alone])).map_tensors(lambda tensor: tensor.to(device))
            terms = forward.objective.terms(forward(model, batch), batch)
            accepted += int(terms["mtp_accepted"].total)
            count += int(terms["mtp_targets"].total)
        of_rows[key] = accepted, count
    return Drafts(of_rows)
