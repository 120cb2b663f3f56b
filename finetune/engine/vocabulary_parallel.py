"""Embedding and head of a tensor parallel model: each rank has the rows of its part of the vocabulary.

    tokens -> rows of own tokens, 0 for others -> sum over the ranks -> full hidden states
    hidden states of the targets -> logits of own columns -> losses by sums over the ranks, without all logits

(Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053, section 3.) The losses are in `models/head/vocabulary.py`. A
head that returns logits, for generation or a plain cross entropy, gathers them.

A vocabulary need not be divisible: ranks then differ by one row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp

from finetune.data.media.family_table import FAMILIES
from finetune.engine.tensor_group import Communicate, ParameterShard, ShardedParameters, TensorGroup, all_gathered
from finetune.models.added_tokens import ROWS
from finetune.models.patches import replace_forward
from finetune.models.towers import tower_modules
from finetune.models.wrapped import has_scores, output_head
from finetune.utils import unwrap_peft


@dataclass(frozen=True)
class GroupVocabulary:
    """A `VocabularyPart` (models/head/vocabulary.py) over a tensor parallel group."""

    group: TensorGroup
    first: int
    total: int

    def sum(self, values: Tensor) -> Tensor:
        return self.group.reduced(values, ReduceOp.SUM)

    def largest(self, values: Tensor) -> Tensor:
        return self.group.reduced(values, ReduceOp.MAX)

    def gather(self, values: Tensor) -> Tensor:
        return all_gathered(values, self.group, 1)


def split_vocabulary(model: Any, group: TensorGroup) -> ShardedParameters:
    """Shard embedding and head of a model on `meta`, in place, and make them communicate.

    Returns nothing for tables that are no plain ones, such as a head of several layers, or that are read beside their
    modules (Gemma 4 with a tower), which every rank keeps.
    """
    causal = unwrap_peft(model)
    if tower_modules(causal) and FAMILIES[causal.config.model_type].reads_table:
        return ShardedParameters({}, frozenset())
    names = {id(module): name for name, module in model.named_modules()}
    embeddings = [module for module in causal.get_input_embeddings().modules() if isinstance(module, nn.Embedding)]
    head = None if has_scores(model) else output_head(causal)
    linear = [] if head is None else [one for one in head.modules() if isinstance(one, nn.Linear)]
    down = [one for one in linear if "lora_A" in names[id(one)]]
    linear = [one for one in linear if one not in down]
    total = embeddings[0].num_embeddings if embeddings else 0
    if any(one.out_features != total for one in linear) or any(one.num_embeddings != total for one in embeddings):
        return ShardedParameters({}, frozenset())
    magnitudes = [] if head is None else [m for m in head.modules() if type(m).__name__ == "DoraLinearLayer"]
    shard, tied = group.shard(0, total), dict[int, nn.Parameter]()
    shards: dict[str, ParameterShard] = {}
    for module in (*embeddings, *linear, *magnitudes):
        for name, parameter in list(module.named_parameters(recurse=False)):
            if name != ROWS:
                own = nn.Parameter(shard.take(parameter.detach()).clone(), parameter.requires_grad)
                setattr(module, name, tied.setdefault(id(parameter), own))
                shards[f"{names[id(module)]}.{name}"] = shard
        if hasattr(module, ROWS):  # of added tokens
            vars(module)["first_added"] -= shard.start
    for embedding in embeddings:
        split_embedding(embedding, shard, group)
    partial = [f"{names[id(one)]}.{ROWS}" for one in (*embeddings, *linear) if hasattr(one, ROWS)]
    partial += [f"{names[id(one)]}.weight" for one in down]  # its gradient comes through this rank's columns of B
    for one in linear:
        one.out_features = shard.size
    if head is not None:  # it returns this rank's columns to a loss that takes them, and else gathers logits
        part = GroupVocabulary(group, shard.start, total)
        for module in head.modules_to_save.values() if hasattr(head, "modules_to_save") else (head,):
            module.vocabulary = part  # the module whose forward has the losses, which may be peft's full copy
        head.register_forward_pre_hook(lambda _module, inputs: Communicate.apply(*inputs, group, "copy"))
        head.register_forward_hook(
            lambda _module, _inputs, output: _WholeLogits.apply(output, part) if isinstance(output, Tensor) else output
        )
    return ShardedParameters(shards, frozenset(partial))


def split_embedding(embedding: Any, shard: ParameterShard, group: TensorGroup) -> None:
    """Make an embedding look up this rank's tokens, and sum over the ranks."""
    embedding.num_embeddings = shard.size
    padding = embedding.padding_idx
    if padding is not None:  # that row has no gradient
        here = shard.start <= padding < shard.start + shard.size
        embedding.padding_idx = padding - shard.start if here else None

    def forward(ids: Tensor) -> Tensor:
        row = ids - shard.start
        is_own = (row >= 0) & (row < shard.size)
        found: Any = type(embedding).forward(embedding, row.clamp(0, shard.size - 1))
        whole: Any = Communicate.apply(found.masked_fill(~is_own[..., None], 0.0), group, "reduce")
        return whole

    replace_forward(embedding, forward, "part of the vocabulary")


class _WholeLogits(torch.autograd.Function):
    """Gathers columns of logits, each of which has its gradient on every rank."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, part: GroupVocabulary) -> Tensor:
        ctx.first, ctx.size = part.first, logits.shape[-1]
        return all_gathered(logits, part.group, -1, part.total)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.narrow(-1, ctx.first, ctx.size), None
