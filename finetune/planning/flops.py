"""Floating-point operations of a step, from the architecture and the lengths of its documents.

A multiply-add counts as two. What is counted are products of matrices: every weight that hidden states are multiplied
with, and the two products of attention. Everything else (norms, activations, rotary angles, the optimizer) is left out,
as is usual: https://arxiv.org/abs/2204.02311, appendix B.

- `model`: what the maths needs. Forward; backward as far as it is needed: two products like the forward's for a trained
  weight, one for a frozen one whose input needs a gradient, none below the first trained layer. Attention: pairs of
  tokens that see each other, no more. The LM head: supervised positions. Experts: those that a token is sent to.
- `hardware`: what is executed for it. On top: padding, pairs that a masked attention computes and throws away, what
  activation checkpointing and fused attention compute again in the backward.

Letters: T tokens, L length of one document, w attention window, H heads.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from finetune.models.attention import DOCUMENTS
from finetune.models.config import layer_configs

_EMBEDDED = re.compile(r"lora_embedding_A|\boriginal_module\b|_bias\b")  # looked up, unused, added: not multiplied
_ATTENTION = re.compile(r"attn|attention")
_OUTPUT = re.compile(r"\b(o_proj|out_proj|c_proj|wo|down_proj|w2|fc2|dense|dense_4h_to_h)\b")
_TOP_K = ("num_experts_per_tok", "moe_k", "moe_topk", "num_experts_per_token")
_MASKED = ("sdpa", "eager")  # compute every pair of the row, and mask


class Flops(NamedTuple):
    model: float
    hardware: float  # not a number where nobody can tell


@dataclass(frozen=True)
class Attention:
    """One layer's two products, of queries with keys and of their weights with values."""

    per_pair: float  # FLOPs for a pair of tokens, forward
    scores: float  # of these, queries with keys
    window: int | None
    backward: bool
    executed_backward: bool


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs of a model for any lengths. Those `of` a token or position are sums over the whole model."""

    token_forward: float
    token_backward: float
    token_again: float  # executed in the backward besides
    head: float  # forward and backward of a position that reaches the LM head
    attention: tuple[Attention, ...]  # a layer each
    implementation: str  # transformers' name
    recomputes: bool  # activation checkpointing of whole layers
    hardware_known: bool

    def of(self, counted: Sequence[int], executed: Sequence[int], supervised: int) -> Flops:
        """Forward and backward of one micro-batch.

        counted: lengths of the documents that train; executed: of all that are computed, padding too; supervised:
        positions that reach the LM head.
        """
        model = hardware = self.head * supervised
        products = self.token_forward + self.token_backward
        model += products * sum(counted)
        hardware += (products + self.token_again) * sum(executed)
        for layer, number in self._kinds():
            model += number * layer.per_pair * causal_pairs(counted, layer.window) * (3 if layer.backward else 1)
            hardware += number * self._executed(layer) * self._executed_pairs(executed, layer.window)
        return Flops(model, hardware if self.hardware_known else math.nan)

    def _kinds(self) -> list[tuple[Attention, int]]:
        return [(layer, self.attention.count(layer)) for layer in dict.fromkeys(self.attention)]

    def _executed(self, layer: Attention) -> float:
        """For a pair. Fused attention keeps no scores: the backward makes them anew."""
        forwards = 2 if self.recomputes else 1
        scores_again = 0 if self.implementation == "eager" else layer.scores
        return layer.per_pair * forwards + (layer.per_pair * 2 + scores_again if layer.executed_backward else 0)

    def _executed_pairs(self, lengths: Sequence[int], window: int | None) -> float:
        if self.implementation in _MASKED:
            return float(sum(lengths) ** 2)
        if self.implementation == DOCUMENTS and window is not None:  # a band is a mask
            return float(sum(n * n if n > window else n * (n + 1) / 2 for n in lengths))
        return causal_pairs(lengths, window)


def causal_pairs(lengths: Sequence[int], window: int | None) -> float:
    """Pairs of a token and one that it sees, itself included: the sum of min(i, w) for i = 1 .. L of each document.

    >>> causal_pairs([3, 2], None), causal_pairs([3, 2], 2)
    (9.0, 8.0)
    """
    length = np.asarray(lengths, np.float64)
    full = length if window is None else np.minimum(length, window)
    return float((full * (full + 1) / 2 + (length - full) * full).sum())


def model_flops(model: Any, implementation: str, checkpointing: bool | str) -> ModelFlops:
    """Read off the modules of a loaded model, before it is wrapped; shards and 4-bit weights are fine.

    implementation: of attention, transformers' name. checkpointing: as `train.activation_checkpointing`.
    Exact for one product after another. In the first layer that trains anything, which inputs need a gradient is told
    from the modules' names; where these are unusual, that one layer is counted too high.
    """
    products = list(_products(model))
    first = _first_trained(model)
    needed = [_backward(product, first) for product in products]
    # transformers lets gradients reach the embedding table where a frozen model is checkpointed.
    hooked = getattr(model, "_require_grads_hooks", None) or getattr(model, "_require_grads_hook", None)
    reached = _Place(-1, -1) if hooked else first
    executed = [_backward(product, reached) for product in products]
    recomputes = checkpointing is True
    again = sum(executed) - sum(needed) + (sum(_recomputed(products)) if recomputes else 0.0)
    in_layers = [not product.head for product in products]
    return ModelFlops(
        token_forward=2 * sum(p.weights for p in products if not p.head),
        token_backward=2 * sum(itertools.compress(needed, in_layers)),
        token_again=2 * again,
        head=2 * sum(p.weights + _backward(p, first) for p in products if p.head),
        attention=tuple(_attention(model.config, first, reached)),
        implementation=implementation,
        recomputes=recomputes,
        hardware_known=not any(_makes_weights(name, module) for name, module in model.named_modules()),
    )


def _makes_weights(path: str, module: nn.Module) -> bool:
    """Adapters that make whole matrices at each forward: on experts in one tensor, and DoRA's norms."""
    return type(module).__name__ == "ParamWrapper" or bool(getattr(module, "lora_magnitude_vector", None))


class _Place(NamedTuple):
    """Order of execution, coarse: what stands before a layer is -1; its attention 0, 1; its feed-forward 2, 3."""

    layer: float
    stage: int


@dataclass(frozen=True)
class _Product:
    path: str
    place: _Place
    weights: float  # that one token is multiplied with
    trained: bool
    head: bool
    after_trained: bool  # LoRA's second matrix reads what its first, a trained one, made


def _products(model: Any) -> Iterator[_Product]:
    head = _path_of(model, model.get_output_embeddings())
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            whole = f"{path}.{name}"
            shape = _shape(module, name, parameter)
            if len(shape) < 2 or _EMBEDDED.search(whole):
                continue
            share = _active_share(model, path, shape)
            yield _Product(
                path=whole,
                place=_place(whole, head),
                weights=float(np.prod(shape)) * share,
                trained=parameter.requires_grad,
                head=bool(head) and whole.startswith(f"{head}."),
                after_trained="lora_B" in whole or "lora_embedding_B" in whole,
            )


def _shape(module: nn.Module, name: str, parameter: Any) -> tuple[int, ...]:
    if name == "weight" and hasattr(module, "in_features") and hasattr(module, "out_features"):
        features: Any = module
        return (features.out_features, features.in_features)  # 4-bit weights are stored flat
    return tuple(getattr(parameter, "ds_shape", parameter.shape))  # ds_shape: cut by ZeRO-3


def _active_share(model: Any, path: str, shape: tuple[int, ...]) -> float:
    """Of an expert's weights, or of many experts' in one tensor."""
    if len(shape) < 3 and not re.search(r"\bexperts\b", path):
        return 1.0
    config = model.config.get_text_config()
    chosen = next((getattr(config, name) for name in _TOP_K if getattr(config, name, None)), None)
    count = shape[0] if len(shape) > 2 else _num_experts(config)
    return chosen / count if chosen and count else 1.0


def _num_experts(config: Any) -> int | None:
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    return next((getattr(config, name) for name in names if getattr(config, name, None)), None)


def _path_of(model: Any, module: Any) -> str:
    """Where a module stands, or what wraps it (an adapter, a trained copy)."""
    path = next((path for path, found in model.named_modules() if found is module), "")
    return re.sub(r"\.(base_layer|modules_to_save\..*|original_module)$", "", path)


def _place(path: str, head: str = "") -> _Place:
    if head and path.startswith(f"{head}."):
        return _Place(float("inf"), 0)
    number = re.search(r"\.(\d+)\.", path)
    if number is None:
        return _Place(-1 if "embed" in path or "wte" in path else float("inf"), -1)
    after = path[number.end() :]
    if "norm" in after:
        return _Place(int(number[1]), -1)
    output = _OUTPUT.search(after) is not None
    return _Place(int(number[1]), (0 if _ATTENTION.search(after) else 2) + output)


def _first_trained(model: Any) -> _Place | None:
    places = [_place(name) for name, parameter in model.named_parameters() if parameter.requires_grad]
    return min(places, default=None)


def _backward(product: _Product, first_trained: _Place | None) -> float:
    """Multiply-adds: for the gradient of the weight, and for that of the input where something before it is trained."""
    input_needs = product.after_trained or (first_trained is not None and first_trained < product.place)
    return product.weights * (product.trained + input_needs)


def _recomputed(products: list[_Product]) -> Iterator[float]:
    """Of each layer all but the last product: torch stops when it has what the backward needs, the last one's input."""
    layers: dict[float, list[_Product]] = {}
    for product in products:
        if product.place.layer not in (-1, float("inf")):
            layers.setdefault(product.place.layer, []).append(product)
    for members in layers.values():
        yield sum(p.weights for p in members) - _last(members)


def _last(members: list[_Product]) -> float:
    """Of a dense layer. Experts' outputs are weighted by the router, so they are needed."""
    outputs = [p for p in members if p.place.stage == 3]
    if not outputs or any("experts" in p.path for p in members):
        return 0.0
    adapters = [p for p in outputs if p.after_trained]
    return (adapters or outputs)[-1].weights


def _attention(config: Any, first_trained: _Place | None, reached: _Place | None) -> Iterator[Attention]:
    """A layer each of those that attend to pairs of tokens; recurrent ones are counted by their weights alone."""
    config = config.get_text_config()
    layers, kinds = layer_configs(config), _layer_kinds(config)
    for number, kind in enumerate(kinds):
        layer = layers[number % len(layers)]
        heads, size = getattr(layer, "num_attention_heads", None), _head_size(layer)
        if _WITHOUT_PAIRS.search(kind) or not isinstance(heads, int) or size is None:
            continue
        scores = 2.0 * heads * size
        values = 2.0 * heads * (getattr(layer, "v_head_dim", None) or size)
        window = getattr(layer, "sliding_window", None) if kind == "sliding_attention" else None
        after = _Place(number, 1)
        backward, executed = (place is not None and place < after for place in (first_trained, reached))
        yield Attention(scores + values, scores, window, backward, executed)


# Kinds of layers, in the words of configs, that compute no product for each pair of tokens.
_WITHOUT_PAIRS = re.compile(r"mamba|conv|linear|recurrent|lightning|^(mlp|moe)$")


def _layer_kinds(config: Any) -> list[str]:
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    return [str(kind) for kind in kinds] if kinds else ["sliding_attention"] * config.num_hidden_layers


def _head_size(config: Any) -> int | None:
    """Of queries and keys; None where the config gives none."""
    if getattr(config, "qk_nope_head_dim", None):  # DeepSeek's multi-head latent attention
        return config.qk_nope_head_dim + config.qk_rope_head_dim
    heads, hidden = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
    if size := getattr(config, "head_dim", None):
        return size
    return hidden // heads if isinstance(heads, int) and isinstance(hidden, int) else None
