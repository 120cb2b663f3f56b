"""A causal language model that returns losses of target tokens, not logits.

Letters: T tokens of the flat row, S targets, V vocabulary, D hidden size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from finetune.data.batch import Ahead
from finetune.errors import UserError
from finetune.models.head.chunked import (
    HeadDevice,
    HeadTask,
    liger_losses,
    liger_problem,
    matrix_losses,
    module_losses,
)
from finetune.models.head.token_loss import (
    GuessLoss,
    HeadLosses,
    LogitMap,
    TargetLoss,
    TokenLoss,
    UnknownHead,
    at_least_fp32,
    logit_map,
)
from finetune.models.head.vocabulary import VocabularyPart
from finetune.models.mtp import head_of, place_of_layer
from finetune.models.patches import mix_in
from finetune.models.shown_layers import PassOn, showing
from finetune.models.wrapped import (
    CrossEntropyChoice,
    Outputs,
    WrappedModel,
    accepted,
    accepted_names,
    output_head,
    trained_head,
)
from finetune.utils import unwrap_peft

_MATRIX_LOSSES = {"chunked": matrix_losses, "liger": liger_losses}


@dataclass(frozen=True)
class TargetTokens:
    """The targets of a forward, and their losses."""

    positions: Tensor  # (S,) in the row: the positions that predict targets
    ids: Tensor  # (S,) the tokens predicted there
    token_loss: TargetLoss
    weights: Tensor | None = None  # (S,) of the tokens in `Outputs.total`; None: 1 each
    differentiable: bool = False  # `Outputs.token_losses` has a graph, for objectives not linear in the tokens' losses
    columns: Mapping[str, Tensor] = field(default_factory=dict)  # (S, ...) each, that the loss reads
    # Of more targets than these, each of which is one of them: its index (N,). Losses are of those N.
    of_target: Tensor | None = None
    scales_last: bool = False  # see `HeadTask`
    ahead: Ahead | None = None  # of a head that predicts ahead, with losses of its own


class CausalLMWithLoss(WrappedModel):
    """`forward(targets=TargetTokens(...), **inputs)` returns `Outputs` with losses.

    The base model runs, the hidden states of the targets go to the head, and the head, inside its own forward, returns
    losses. So a backend's hooks around forwards to gather weights (FSDP2 around this module and the head, ZeRO-3
    around every module, DDP around this one) run once for all chunks.
    """

    def __init__(
        self,
        model: Any,
        cross_entropy: str = "auto",
        only_sums: bool = True,
        head_device: HeadDevice | None = None,
        **surroundings: Any,  # see `WrappedModel`
    ):
        """model: transformers' or peft's; cross_entropy: `model.cross_entropy`; only_sums: whether every objective of
        this run is an unweighted sum of token losses; head_device: None: a large one of this type. Raises
        UserError if the cross entropy is not possible."""
        super().__init__(model, **surroundings)
        causal = unwrap_peft(model)
        head: Any = trained_head(causal)
        vocabulary = causal.config.get_text_config().vocab_size
        self._takes = accepted_names(causal)
        self._keeps_positions = "logits_to_keep" in inspect.signature(causal.forward).parameters
        balances = getattr(causal.config.get_text_config(), "output_router_logits", False)
        self._no_balance_loss = {"output_router_logits": False} if balances else {}  # of transformers' own; see _logits
        try:
            mapping: LogitMap | UnknownHead = logit_map(causal)
        except UnknownHead as reason:
            mapping = reason
        device, matrix = head_device or HeadDevice(self._device_type), is_matrix(head)
        self.choice = choose_cross_entropy(cross_entropy, mapping, matrix, vocabulary, device, only_sums)
        if self.choice.implementation != "plain":
            assert isinstance(mapping, LogitMap)  # the choice is plain if it is unknown
            self._logit_map, self._rows = mapping, device.rows(vocabulary)
            head.loss_implementation = self.choice.implementation if matrix else "module"
            mix_in(head, HeadWithLoss, "losses in the head")

    def _read(self, targets: TargetTokens, inputs: dict[str, Any]) -> Outputs:
        if self.choice.implementation == "plain":
            # A model's config can enable a balance loss in each forward. It is not read; an objective adds its own.
            taken = accepted({**inputs, **self._no_balance_loss}, self._takes)
            if self._keeps_positions:
                logits = self.causal_lm(**taken, logits_to_keep=targets.positions).logits[0]  # (S, V)
            else:
                logits = self.causal_lm(**taken).logits[0, targets.positions]
            each, details = targets.token_loss.losses(at_least_fp32(logits), targets.ids, targets.columns)
            total = each.sum() if targets.weights is None else (each * targets.weights).sum()
            losses = HeadLosses(total, each if targets.differentiable else each.detach(), details)
        else:
            hidden = self._base(inputs)
            task = HeadTask(
                targets.ids,
                targets.token_loss,
                self._logit_map,
                self._rows,
                targets.weights,
                targets.differentiable,
                targets.columns,
                scales_last=targets.scales_last,
            )
            if targets.ahead is not None:
                return self._read_both(hidden, targets, targets.ahead, inputs, task)
            losses: HeadLosses = output_head(self.causal_lm)(hidden[:, targets.positions], task=task)
        if targets.of_target is None:
            return Outputs(*losses)
        each, *details = (values[targets.of_target] for values in (losses.each, *losses.details))
        return Outputs(each.sum(), each, tuple(details))

    def _read_both(
        self, hidden: Tensor, targets: TargetTokens, ahead: Ahead, inputs: dict[str, Any], task: HeadTask
    ) -> Outputs:
        """Returns the outputs with the losses of the head that predicts ahead. The LM head is called once for both: a
        backend's hooks are around its call."""
        both = hidden[:, targets.positions], self._hidden_ahead(hidden, ahead, inputs)[:, ahead.positions]
        # Guesses are compared with the model's; nothing is added to the loss of the targets themselves.
        token_loss = targets.token_loss if isinstance(targets.token_loss, GuessLoss) else TokenLoss()
        of_ahead = HeadTask(ahead.ids, token_loss, self._logit_map, self._rows)
        losses, ours = output_head(self.causal_lm)(torch.cat(both, 1), task=(task, of_ahead))
        return Outputs(*losses, ahead=ours)

    def _hidden_ahead(self, hidden: Tensor, ahead: Ahead, inputs: dict[str, Any]) -> Tensor:  # (1, T, D)
        """Returns the output of the head's layer, after its norm. The base model calls it, in place of its own layers,
        with the masks and rotations that it has made for these rows."""
        causal = unwrap_peft(self.causal_lm)
        head, base = head_of(causal), causal.base_model
        embedded = causal.get_input_embeddings()(ahead.next_ids)
        others = (PassOn() for _ in range(place_of_layer(causal.config)))
        shown = {"layers": nn.ModuleList([*others, head.layers[0]]), "norm": head.norm}
        with showing(base, shown):
            return self._called_base({**inputs, "input_ids": None, "inputs_embeds": head.inputs(embedded, hidden)})


class HeadWithLoss:
    """Mixed into the class of a model's head: given a task, its forward returns losses in place of logits."""

    loss_implementation: str
    vocabulary: VocabularyPart | None = None  # set by an engine that splits this head

    def forward(
        self, hidden: Tensor, *args: Any, task: HeadTask | tuple[HeadTask, ...] | None = None, **kwargs: Any
    ) -> Any:
        own = super().forward  # pyright: ignore[reportAttributeAccessIssue]  (of the class it is mixed into)
        if task is None:
            return own(hidden, *args, **kwargs)
        if isinstance(task, tuple):  # one after the other, of hidden states end to end
            parts = hidden.split([len(one.target_ids) for one in task], 1)
            return tuple(self._losses(part, one, own) for part, one in zip(parts, task, strict=True))
        return self._losses(hidden, task, own)

    def _losses(self, hidden: Tensor, task: HeadTask, own: Callable[[Tensor], Tensor]) -> HeadLosses:
        head: Any = self
        if self.vocabulary is not None:
            task = replace(task, part=self.vocabulary)
        if self.loss_implementation in _MATRIX_LOSSES:
            return _MATRIX_LOSSES[self.loss_implementation](hidden[0], head.weight, head.bias, task)
        return module_losses(hidden[0], own, [p for p in head.parameters() if p.requires_grad], task)


def is_matrix(head: nn.Module) -> bool:
    """Returns whether a head is a plain linear layer, without adapters or quantized weights."""
    kind = type(head)
    return kind is nn.Linear or (isinstance(head, HeadWithLoss) and kind.__mro__[2] is nn.Linear)


def choose_cross_entropy(
    requested: str,
    mapping: LogitMap | UnknownHead,  # changes of the logits by the architecture
    matrix: bool,  # the head is a linear layer, without adapters
    vocabulary: int,
    device: HeadDevice,
    only_sums: bool = True,
) -> CrossEntropyChoice:
    """Returns which implementation computes the losses, and why. Raises UserError if the requested one is not
    possible."""
    if requested == "plain":
        return CrossEntropyChoice("plain", "asked for in the recipe")
    if isinstance(mapping, UnknownHead):
        if requested == "auto":
            return CrossEntropyChoice("plain", str(mapping))
        raise UserError(f"model.cross_entropy: `{requested}` is not possible: {mapping}. Fix: use `auto`")
    if requested == "liger":
        obstacle = liger_problem(device.type)
        if not matrix:
            obstacle = "it takes a head that is one matrix, and this one has adapters or quantized weights"
        if not only_sums:
            obstacle = "it gives the sum of the token losses only, and the objective needs more"
        if obstacle:
            raise UserError(f"model.cross_entropy: `{requested}` is not possible: {obstacle}. Fix: use `auto`")
        return CrossEntropyChoice(requested, "asked for in the recipe")
    fits_liger = matrix and only_sums and device.ranks == 1
    if requested == "auto" and device.liger and fits_liger and liger_problem(device.type) is None:
        return CrossEntropyChoice("liger", "liger-kernel is installed")
    rows = device.rows(vocabulary)
    size = f"logits of {rows:,} tokens at a time, {rows * vocabulary * 4 / device.ranks / 2**20:,.0f} MiB"
    return CrossEntropyChoice("chunked", size if requested == "auto" else f"asked for in the recipe; {size}")
