"""FLOPs of a step, from the architecture and the lengths of its documents.

A multiply-add counts as two. Only matrix products are counted: every weight that hidden states are multiplied with, and
the two products of attention; not norms, activations, rotary embeddings or the optimizer
(https://arxiv.org/abs/2204.02311, appendix B). Of a model that sees or hears, tower and projector are counted as well.

- `model`: the cost of the maths. Forward; backward if needed: two products like the forward's for a trained weight,
  one for a frozen one whose input needs a gradient, none below the first trained layer. Attention: pairs of tokens that
  attend to each other. LM head: supervised positions; a head of scores, at one token of a document, is not counted.
  Experts: those that a token is routed to. A tower: pairs of patches of a picture, or of a window of it.
  A head that predicts ahead is one more layer, after all others, and calls the LM head once more.
- `hardware`: executed FLOPs. In addition: padding, masked pairs that are computed anyway, recomputation by activation
  checkpointing and fused attention in the backward.

Letters: T tokens, L length of one document, w attention window, H heads.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from finetune.data.media.family_table import family_of, rows_of
from finetune.data.samples import MediaKind
from finetune.models.attention import DOCUMENTS
from finetune.models.base_config import head_sizes, layer_configs
from finetune.models.mtp import head_of, in_head
from finetune.models.towers import is_of_others, part_of, patches_in, patches_per_token, tower_modules
from finetune.models.wrapped import has_scores, output_head
from finetune.utils import full_shape, unwrap_peft

_EMBEDDED = re.compile(r"lora_embedding_A|\boriginal_module\b|_bias\b")  # looked up, unused, added: not multiplied
_ATTENTION = re.compile(r"attn|attention")
_OUTPUT = re.compile(r"\b(o_proj|out_proj|c_proj|wo|down_proj|w2|fc2|linear_fc2|dense|dense_4h_to_h)\b")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "moe_k", "moe_topk", "num_experts_per_token")
_MASKED = ("sdpa", "eager")  # compute every pair of the row, and mask


class Flops(NamedTuple):
    model: float
    hardware: float  # NaN if unknown


@dataclass(frozen=True)
class AttentionFlops:
    """The two attention products of one layer: queries with keys, weights with values."""

    per_pair: float  # FLOPs for a pair of tokens, forward
    scores: float  # of these, queries with keys
    window: int | None
    backward: bool
    executed_backward: bool


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs of a model, as a function of lengths. Per-token numbers are sums over all layers."""

    token_forward: float
    token_backward: float
    token_recomputed: float  # executed in addition in the backward
    head: float  # forward and backward of a position that reaches the LM head
    attention: tuple[AttentionFlops, ...]  # by layer
    implementation: str  # transformers' name
    recomputes: bool  # full activation checkpointing
    hardware_known: bool
    towers: tuple[TowerFlops, ...] = ()  # of each kind of files

    def of(
        self,
        counted: Sequence[int],
        executed: Sequence[int],
        supervised: int,
        prefixes: Sequence[int] = (),
        patches: Mapping[MediaKind, Sequence[int]] | None = None,
    ) -> Flops:
        """Returns the FLOPs of forward and backward of one micro-batch.

        counted: lengths of the documents; executed: lengths including padding; supervised: positions that reach the LM
        head; prefixes: of the documents, tokens of another that each sees as its beginning, which are computed there;
        patches: of each picture that a tower sees.
        """
        model = hardware = self.head * supervised
        for tower in self.towers:
            if mine := (patches or {}).get(tower.kind):
                of_tower = tower.of(mine)
                model, hardware = model + of_tower.model, hardware + of_tower.hardware
        products = self.token_forward + self.token_backward
        model += products * sum(counted)
        hardware += (products + self.token_recomputed) * sum(executed)
        for layer, number in self._layers.items():
            pairs = causal_pairs(counted, layer.window, prefixes)
            model += number * layer.per_pair * pairs * (3 if layer.backward else 1)
            per_pair = layer.per_pair * (2 if self.recomputes else 1)
            if layer.executed_backward:  # fused attention computes the scores again
                per_pair += layer.per_pair * 2 + (0 if self.implementation == "eager" else layer.scores)
            if self.implementation in _MASKED:
                executed_pairs = float(sum(executed) ** 2)
            elif self.implementation != DOCUMENTS:
                executed_pairs = causal_pairs(executed, layer.window, prefixes)
            else:
                sizes = itertools.zip_longest(executed, prefixes, fillvalue=0)
                # A window is a mask, and so are the keys of another document.
                executed_pairs = float(
                    sum(n * (n + p) if p or n > (layer.window or n) else n * (n + 1) / 2 for n, p in sizes)
                )
            hardware += number * per_pair * executed_pairs
        return Flops(model, hardware if self.hardware_known else math.nan)

    @cached_property
    def _layers(self) -> Counter[AttentionFlops]:
        return Counter(self.attention)

    def patches_in(self, inputs: Mapping[str, Tensor]) -> dict[MediaKind, list[int]]:
        """Returns the patches of each picture of each kind among the inputs of a forward."""
        return {tower.kind: patches_in(tower.config, inputs, tower.kind) for tower in self.towers}


@dataclass(frozen=True)
class TowerFlops:
    """FLOPs of tower and projector of a kind of files. Backwards are included if there are any."""

    kind: MediaKind
    config: Any  # the multimodal model's
    patch: Flops  # products for one patch
    token: Flops  # for one token of the projector
    pair: Flops  # the two attention products for a pair of patches, in a layer
    layers: int
    windows: int = 0  # of these layers, those that see a window
    window: int = 0  # patches
    together: bool = False  # all pictures are one row, under a mask: every pair is computed

    def of(self, patches: Sequence[int]) -> Flops:
        total = sum(patches)
        pairs = (self.layers - self.windows) * sum(n * n for n in patches)
        executed = (self.layers - self.windows) * total**2 if self.together else pairs
        in_windows = self.windows * sum(n * min(n, self.window) for n in patches)
        tokens = total / patches_per_token(self.config, self.kind)
        model, hardware = (
            products * total + merged * tokens + each * (count + in_windows)
            for products, merged, each, count in zip(self.patch, self.token, self.pair, (pairs, executed), strict=True)
        )
        return Flops(model, hardware)


def _towers(model: Any, recomputes: bool) -> tuple[TowerFlops, ...]:
    """Returns the FLOPs of the tower of each kind of files; () for a text model."""
    if not tower_modules(model):
        return ()
    rows = rows_of(model.config.model_type).values()
    there: list[MediaKind] = [row.kind for row in rows if getattr(model.config, row.config) is not None]
    return tuple(_tower(model, kind, recomputes) for kind in there)


def _tower(model: Any, kind: MediaKind, recomputes: bool) -> TowerFlops:
    """Returns the FLOPs of tower and projector. Modules created before the first trained weight have no backward."""
    config, family = model.config, family_of(model.config, kind)
    tower = getattr(config, family.config)
    products: list[_Product] = []  # `after_trained`: something before it is trained
    after_trained = False
    for path, module in unwrap_peft(model).named_modules():
        if part_of(family, path) == "language" or is_of_others(family, path) or isinstance(module, nn.Embedding):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            shape, full_name = _shape(module, name, parameter), f"{path}.{name}"
            if len(shape) >= 2:
                place, weights = _position(full_name), float(np.prod(shape))
                products.append(_Product(full_name, place, weights, parameter.requires_grad, False, after_trained))
            after_trained |= parameter.requires_grad
    of_patches = [product for product in products if part_of(family, product.path) == "tower"]
    layers_train = any(product.trained for product in of_patches)
    again = 2 * sum(_recomputed(of_patches)) if recomputes and layers_train else 0.0
    patch, token = (
        sum(2 * one.weights * (1 + one.trained + one.after_trained) for one in those)
        for those in (of_patches, [one for one in products if part_of(family, one.path) == "projector"])
    )
    # Queries with keys, and weights with values; fused attention computes the first again in its backward.
    pair = 4.0 * (getattr(tower, "hidden_size", None) or tower.d_model)
    pairs = Flops(pair * 3, pair * (3.5 + recomputes)) if layers_train else Flops(pair, pair)
    names = ("num_hidden_layers", "depth", "conf_num_hidden_layers", "num_blocks")
    layers = next(count for name in names if (count := getattr(tower, name, None)))
    full = getattr(tower, "fullatt_block_indexes", None)
    windows = 0 if full is None else layers - len(full)
    window = (tower.window_size // tower.patch_size) ** 2 if windows else 0
    products_of = Flops(patch, patch + again), Flops(token, token), pairs
    return TowerFlops(kind, config, *products_of, layers, windows, window, family.joins_images)


def causal_pairs(lengths: Sequence[int], window: int | None, prefixes: Sequence[int] = ()) -> float:
    """Counts pairs of a token and one it attends to, itself included: the sum of min(i, w) for i = 1..L per document.

    prefixes: of some documents, tokens before the first that are seen: i = p+1..p+L.

    >>> causal_pairs([3, 2], None), causal_pairs([3, 2], 2), causal_pairs([3, 2], None, [0, 3])
    (9.0, 8.0, 15.0)
    """
    if any(prefixes):
        whole = [length + prefix for length, prefix in itertools.zip_longest(lengths, prefixes, fillvalue=0)]
        return causal_pairs(whole, window) - causal_pairs(prefixes, window)
    length = np.asarray(lengths, np.float64)
    full = length if window is None else np.minimum(length, window)
    return float((full * (full + 1) / 2 + (length - full) * full).sum())


def model_flops(model: Any, implementation: str, checkpointing: bool | str) -> ModelFlops:
    """Returns the FLOPs of a loaded model before it is wrapped; shards and 4-bit weights are supported.

    implementation: of attention, transformers' name. checkpointing: as `train.activation_checkpointing`. In the first
    layer that trains anything, module names decide which inputs need a gradient; with unusual names it is counted too
    high.
    """
    products = list(_products(model))
    of_media = {id(p) for module in tower_modules(model) for p in module.parameters()}  # not counted
    trained = [
        _Position(-1, -1) if id(parameter) in of_media else _position(name)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    first = min(trained, default=None)
    needed = [_backward(product, first) for product in products]
    # transformers lets gradients reach the embedding table if a frozen model is checkpointed.
    hooked = getattr(model, "_require_grads_hooks", None) or getattr(model, "_require_grads_hook", None)
    reached = _Position(-1, -1) if hooked else first
    executed = [_backward(product, reached) for product in products]
    recomputes = checkpointing is True
    recomputed = sum(executed) - sum(needed) + (sum(_recomputed(products)) if recomputes else 0.0)
    in_layers, heads = [not product.head for product in products], 1 if head_of(model) is None else 2
    return ModelFlops(
        token_forward=2 * sum(p.weights for p in products if not p.head),
        token_backward=2 * sum(itertools.compress(needed, in_layers)),
        token_recomputed=2 * recomputed,
        head=2 * heads * sum(p.weights + _backward(p, first) for p in products if p.head and not has_scores(model)),
        attention=tuple(_attention(model.config, first, reached, heads - 1)),
        implementation=implementation,
        recomputes=recomputes,
        # DoRA's norms, and adapters on fused experts if peft computes them, take full matrices in each forward.
        hardware_known=not any(
            type(module).__name__ == "ParamWrapper" or getattr(module, "lora_magnitude_vector", None)
            for module in model.modules()
        ),
        towers=_towers(model, recomputes),
    )


class _Position(NamedTuple):
    """Coarse order of execution. Stages of a layer: norms -1; attention 0, 1; feed-forward 2, 3."""

    layer: float
    stage: int


@dataclass(frozen=True)
class _Product:
    path: str
    position: _Position
    weights: float  # that one token is multiplied with
    trained: bool
    head: bool
    after_trained: bool  # LoRA's B: its input comes from A, which is trained


def _products(model: Any) -> Iterator[_Product]:
    output = output_head(model)
    path = next((path for path, candidate in model.named_modules() if candidate is output), "")
    head = re.sub(r"\.(base_layer|modules_to_save\..*|original_module)$", "", path)  # or that of its wrapper
    of_media = {inner for module in tower_modules(model) for inner in module.modules()}
    config = model.config.get_text_config()
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding) or module in of_media:
            continue
        for name, parameter in module.named_parameters(recurse=False):
            full_name = f"{path}.{name}"
            shape = _shape(module, name, parameter)
            if len(shape) < 2 or _EMBEDDED.search(full_name):
                continue
            share = 1.0  # of the weights of experts: those that a token uses
            if len(shape) > 2 or re.search(r"\bexperts\b", path):
                count = shape[0] if len(shape) > 2 else _first_setting(config, _EXPERTS)
                chosen = _first_setting(config, _TOP_K)
                share = chosen / count if chosen and count else 1.0
            yield _Product(
                path=full_name,
                position=_position(full_name, head),
                weights=float(np.prod(shape)) * share,
                trained=parameter.requires_grad,
                head=bool(head) and full_name.startswith(f"{head}."),
                after_trained="lora_B" in full_name or "lora_embedding_B" in full_name,
            )


def _first_setting(config: Any, names: Sequence[str]) -> int | None:
    return next((getattr(config, name) for name in names if getattr(config, name, None)), None)


def _shape(module: nn.Module, name: str, parameter: Any) -> tuple[int, ...]:
    if name == "weight" and hasattr(module, "in_features") and hasattr(module, "out_features"):
        features: Any = module
        return (features.out_features, features.in_features)  # 4-bit weights are stored flat
    return tuple(full_shape(parameter))


def _position(path: str, head: str = "") -> _Position:
    if head and path.startswith(f"{head}."):
        return _Position(float("inf"), 0)
    number = re.search(r"\.(\d+)\.", path)
    if number is not None and in_head(path):  # its layer comes after all others
        return _Position(_AFTER_ALL, _position(f".0.{path[number.end() :]}").stage)
    if number is None:
        return _Position(-1 if "embed" in path or "wte" in path else float("inf"), -1)
    after = path[number.end() :]
    if "norm" in after:
        return _Position(int(number[1]), -1)
    output = _OUTPUT.search(after) is not None
    return _Position(int(number[1]), (0 if _ATTENTION.search(after) else 2) + output)


_AFTER_ALL = 10**6  # layers


def _backward(product: _Product, first_trained: _Position | None) -> float:
    """Returns multiply-adds for the gradient of the weight, and of the input if an earlier module is trained."""
    input_needs = product.after_trained or (first_trained is not None and first_trained < product.position)
    return product.weights * (product.trained + input_needs)


def _recomputed(products: list[_Product]) -> Iterator[float]:
    """Yields all but the last product of each layer: torch stops when it has the input of the last one."""
    layers: dict[float, list[_Product]] = {}
    for product in products:
        if product.position.layer not in (-1, float("inf")):
            layers.setdefault(product.position.layer, []).append(product)
    for members in layers.values():
        outputs = [p for p in members if p.position.stage == 3]
        adapters = [p for p in outputs if p.after_trained]
        # Routers weight the outputs of experts, so the backward needs them.
        last = [] if any("experts" in p.path for p in members) else (adapters or outputs)[-1:]
        yield sum(p.weights for p in members) - sum(p.weights for p in last)


def _attention(
    config: Any, first_trained: _Position | None, reached: _Position | None, ahead: int = 0
) -> Iterator[AttentionFlops]:
    """Yields one for each layer that attends to pairs of tokens; of recurrent layers only the weights count. ahead:
    layers of a head behind them, which attend to all."""
    config = config.get_text_config()
    layers = layer_configs(config)
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    kinds = [str(kind) for kind in kinds] if kinds else ["sliding_attention"] * config.num_hidden_layers
    for number, kind in enumerate([*kinds, *["full_attention"] * ahead]):
        layer = layers[number % len(layers)]
        heads, sizes = getattr(layer, "num_attention_heads", None), head_sizes(layer)
        if _WITHOUT_PAIRS.search(kind) or not isinstance(heads, int) or sizes is None:
            continue
        scores, values = (2.0 * heads * size for size in sizes)
        window = getattr(layer, "sliding_window", None) if kind == "sliding_attention" else None
        after = _Position(number, 1)
        backward, executed = (place is not None and place < after for place in (first_trained, reached))
        yield AttentionFlops(scores + values, scores, window, backward, executed)


# Kinds of layers, in the words of configs, that compute no product for each pair of tokens.
_WITHOUT_PAIRS = re.compile(r"mamba|conv|linear|recurrent|lightning|^(mlp|moe)$")
