"""Tokens that a recipe adds: in the tokenizer, as rows of the embedding and of an untied LM head, and trained alone
under adapters.

A row begins as the mean of the rows of its pieces: the tokens of its text before it was added. Under
`tokens.train: added` these rows are parameters of their own, in the module whose frozen rows they stand for, so that
every backend treats them like any other weight of it; saved, they are peft's `trainable_token_indices`.

Letters: n tokens added, D hidden size, V rows of the embedding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from tokenizers import AddedToken
from torch import Tensor, nn
from torch.nn.functional import embedding, linear
from transformers import PreTrainedTokenizerBase

from finetune.errors import UserError
from finetune.models.patches import mix_in, set_attribute
from finetune.recipe.schema import Tokens
from finetune.utils import full_shape, unwrap_peft

ROWS = "added_rows"  # the parameter (n, D) of an embedding or head
_SAVED = "token_adapter.trainable_tokens_delta"  # its name in an adapter's file, peft's


def add_tokens(tokenizer: PreTrainedTokenizerBase, tokens: Tokens) -> list[list[int]]:
    """Adds tokens to a tokenizer, in place; returns the ids of each one's pieces before.

    They are not special: a text may have them, and a decoded answer shows them. Raises UserError for a token that is
    one already.
    """
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    if present := [token for token in tokens.add if token in vocabulary]:
        raise UserError(
            f"tokens.add: {present[0]!r} is a token of this tokenizer already (id {vocabulary[present[0]]}). Fix: "
            "leave it out"
        )
    pieces: list[list[int]] = [tokenizer(token, add_special_tokens=False)["input_ids"] for token in tokens.add]
    if empty := [token for token, ids in zip(tokens.add, pieces, strict=True) if not ids]:
        raise UserError(f"tokens.add: this tokenizer reads nothing in {empty[0]!r}. Fix: give a token with a character")
    first = len(tokenizer)
    new: list[Any] = [AddedToken(token, normalized=False) for token in tokens.add]
    tokenizer.add_tokens(new)
    ids: Any = tokenizer.convert_tokens_to_ids(list(tokens.add))
    if ids != list(range(first, first + len(tokens.add))):
        raise UserError(
            f"tokens.add: {type(tokenizer).__name__} gives new tokens other ids than the next: {ids}. Fix: leave "
            "tokens.add out, or use another tokenizer"
        )
    return pieces


def start_rows(model: Any, first: int, pieces: list[list[int]]) -> None:
    """Grow embedding and head if they lack rows from `first` on, and set each to the mean of its pieces' rows.

    model: transformers', before adapters. Computed in fp32, the same on every rank. Raises UserError for a model with
    tables that cannot grow.
    """
    count = first + len(pieces)
    text = model.config.get_text_config()
    if getattr(text, "hidden_size_per_layer_input", None) and count > text.vocab_size_per_layer_input:
        raise UserError(
            f"tokens.add: {type(model).__name__} has a second table of embeddings, which cannot grow. It has "
            f"{text.vocab_size_per_layer_input:,} rows, which are inputs of the layers: an added token would have none "
            "of its own there (Gemma 3n would give all of them that of token 0), and results with a larger table are "
            "not written here. Fix: use some of its unused tokens in your rows"
        )
    model.has_added_tokens = True
    sizes = [full_shape(module.weight)[0] for module in _tables(model)]
    if min(sizes) < count:
        if min(sizes) < max(sizes):  # Llama 3.2 Vision
            raise UserError(
                f"tokens.add: {count:,} tokens do not fit into the tables of {type(model).__name__}. Its embedding has "
                f"{max(sizes):,} rows and its head {min(sizes):,}; transformers makes the difference of its own "
                "accord, and would not load a result whose tables have grown. Fix: use some of its unused tokens in "
                "your rows"
            )
        model.resize_token_embeddings(count, mean_resizing=False)
    weights = {id(w): w for module in _tables(model) for w in (module.weight, getattr(module, "bias", None))}
    for weight in weights.values():
        if weight is None or weight.is_meta:
            continue
        with _gathered(weight), torch.no_grad():
            rows = [weight[ids].float().mean(0) for ids in pieces]
            weight[first:count] = torch.stack(rows).to(weight.dtype)


def has_added_tokens(model: Any) -> bool:
    """Returns whether `start_rows` has changed a transformers or peft model."""
    return getattr(unwrap_peft(model), "has_added_tokens", False)


def _tables(model: Any) -> list[Any]:
    """Returns the modules with a row for each token: the embedding, and an LM head if there is one."""
    head = model.get_output_embeddings()
    return [model.get_input_embeddings(), *([head] if head is not None else [])]


@contextlib.contextmanager
def _gathered(weight: Any) -> Iterator[None]:
    """Gathers the full weight under ZeRO-3; each rank then keeps its shard of rank 0's."""
    if not hasattr(weight, "ds_id"):
        yield
        return
    from deepspeed.runtime.zero import GatheredParameters

    with GatheredParameters([weight], modifier_rank=0):
        yield


# --- rows that are trained alone


class _WithRows:
    """Mixed into the class of an embedding or a head: the rows from `first_added` on are a parameter, in place of the
    frozen ones."""

    first_added: int

    def forward(self, inputs: Tensor) -> Tensor:
        module, out = self, super().forward(inputs)  # pyright: ignore[reportAttributeAccessIssue]  (mixed into)
        rows: Tensor = getattr(module, ROWS)
        first, count = self.first_added, len(rows)
        if isinstance(module, nn.Embedding):
            index = inputs - first  # (..., T)
            is_added = (index >= 0) & (index < count)
            added = embedding(index.clamp(0, count - 1), rows) * getattr(module, "embed_scale", 1.0)
            return torch.where(is_added[..., None], added.to(out.dtype), out)  # (..., T, D)
        bias = getattr(module, "bias", None)
        # Of a vocabulary that ranks share, a part may have some of the rows, or none.
        low, high = (min(max(place, 0), out.shape[-1]) for place in (first, first + count))
        bias = None if bias is None else bias[low:high].to(rows.dtype)
        added = linear(inputs.to(rows.dtype), rows[low - first : high - first], bias).to(out.dtype)  # (..., n)
        return torch.cat([out[..., :low], added, out[..., high:]], dim=-1)  # (..., V)


def train_rows(model: Any, first: int, count: int, dtype: torch.dtype) -> None:
    """Convert the rows of added tokens to parameters in `dtype`, in a peft model whose other weights are frozen.

    A head that is tied to the embedding has the same ones. Raises UserError if adapters have changed these modules.
    """
    base, shared = unwrap_peft(model), {}
    for module in _tables(base):
        kind: Any = type(module)
        if kind is not nn.Linear and not isinstance(module, nn.Embedding):
            raise UserError(
                f"tokens.train: `added` trains rows of {kind.__name__}, which has adapters or is trained whole. Fix: "
                "leave it out of lora.targets and lora.modules_to_save, or set `tokens.train: all`"
            )
        weight = module.weight
        if id(weight) not in shared:
            rows = torch.empty(count, weight.shape[1], device="meta")
            if not weight.is_meta:
                with _gathered(weight):
                    rows = weight[first : first + count].detach().clone()
            shared[id(weight)] = nn.Parameter(rows.to(dtype))
        module.register_parameter(ROWS, shared[id(weight)])
        vars(module)["first_added"] = first
        mix_in(module, _WithRows, "added rows")
    names = [name for name, module in base.named_modules() if hasattr(module, ROWS)]
    if len(shared) < len(names):  # so that tying the weights again ties these, too
        # transformers' models declare their ties in this attribute.
        keys = {**(base._tied_weights_keys or {}), f"{names[1]}.{ROWS}": f"{names[0]}.{ROWS}"}
        set_attribute(base, "_tied_weights_keys", keys, "tied adapters")
    ids = list(range(first, first + count))
    indices = {name.rpartition(".")[2]: ids for name in names[: len(shared)]}
    model.peft_config[model.active_adapter].trainable_token_indices = indices


def split_rows(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns an adapter's other tensors, and its trained rows by their names in peft's files."""
    rows = {name: tensor for name, tensor in state.items() if name.endswith(f".{ROWS}")}
    saved = {name.removesuffix(ROWS) + _SAVED: tensor for name, tensor in rows.items()}
    return {name: tensor for name, tensor in state.items() if name not in rows}, saved


def grow_to(model: Any, size: int) -> Any:
    """Returns a base with at least as many rows as the tokenizer of its adapter has tokens."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if len(embedding.weight) < size:
        if head is not None and head.weight is not embedding.weight:  # growing would tie them if the config says so
            model.config.tie_word_embeddings = False
        model.resize_token_embeddings(size, mean_resizing=False)
    return model
