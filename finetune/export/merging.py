"""Base and adapter as one model, tensor by tensor: what each tensor of the result is made from.

peft puts an adapter into a model without weights (device `meta`): so its own code says which modules have one, of which
kind and how it is scaled. The sums are computed here, in fp32, some rows at a time:

    LoRA       W + s B A                      s: alpha / rank, or alpha / sqrt(rank)  (https://arxiv.org/abs/2106.09685)
    DoRA       m (W + s B A) / |W + s B A|    norm of each row                        (https://arxiv.org/abs/2402.09353)
    experts    W[e] + s B[e] A[e]             peft's ParamWrapper
    in full    the trained tensor (modules_to_save), or its rows (trainable tokens)

transformers holds some architectures otherwise than files do (`weight_files.py`): there the update is converted to the
files' layout, and added to what the files hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from finetune.errors import UserError
from finetune.export.trained import Trained
from finetune.models.added_tokens import ROWS
from finetune.models.tokenizer import load_tokenizer

_BLOCK = 1 << 24  # elements that are added at a time, 64 MB in fp32
_PREFIX = "base_model.model."  # peft's, before transformers' names


@dataclass(frozen=True)
class Patch:
    """What training did to one parameter. The factors are read when they are needed."""

    kind: str  # lora | dora | full | rows
    keys: tuple[str, ...]  # of the trained tensors: A and B (and the magnitude), the weight, the rows
    factors: Callable[[], tuple[Tensor, Tensor]] | None = None  # (.., out, r), (.., r, in), times the scale
    magnitude: Callable[[], Tensor] | None = None  # (out,)
    full: Callable[[], Tensor] | None = None
    rows: tuple[int, ...] = ()

    def apply(self, base: Tensor | None, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Returns the trained parameter. base: its values in the base; None: nothing to add to, for an update alone."""
        if self.kind == "full":
            assert self.full is not None
            return self.full().to(dtype)
        if self.kind == "rows":
            assert self.full is not None
            assert base is not None
            result = torch.zeros(shape, dtype=dtype)  # the base may lack the last rows
            result[: len(base)] = base
            result[list(self.rows)] = self.full().to(dtype)
            return result
        return self._add(base, shape, dtype)

    def _add(self, base: Tensor | None, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        assert self.factors is not None
        left, right = (factor.float() for factor in self.factors())
        magnitude = self.magnitude().float().reshape(-1, 1) if self.magnitude is not None else None
        result = torch.empty(shape, dtype=dtype) if base is None or base.dtype != dtype else base
        for at, block_left, block_right in _blocks(left, right):
            update = block_left @ block_right
            total = update if base is None else update.add_(base[at])
            if magnitude is not None:
                total.mul_(magnitude[at] / total.norm(dim=-1, keepdim=True))
            result[at] = total
        return result


def _blocks(left: Tensor, right: Tensor) -> Iterator[tuple[Any, Tensor, Tensor]]:
    """Yields (index, rows of the left factor, right factor), of each expert where there are several."""
    rows = max(1, _BLOCK // right.shape[-1])
    for start in range(0, left.shape[-2], rows):
        if left.ndim == 2:
            yield slice(start, start + rows), left[start : start + rows], right
            continue
        for expert in range(len(left)):
            yield (expert, slice(start, start + rows)), left[expert, start : start + rows], right[expert]


def adapter_patches(model: Any, trained: Trained) -> dict[str, Patch]:
    """Returns what was trained, by the parameter's name in transformers' model.

    model: peft's, without weights. Raises UserError for an adapter of a kind that is not merged here, and where the
    adapter's tensors are not those of the model.
    """
    from peft.tuners.lora.layer import LoraLayer
    from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper

    patches: dict[str, Patch] = {}
    reader = _Reader(trained, model)
    for path, module in model.get_base_model().named_modules():
        if isinstance(module, LoraLayer):
            name, patch = _lora(path, module, reader)
            patches[name] = patch
        elif isinstance(module, TrainableTokensWrapper):
            key = reader.take(f"{path}.token_adapter.trainable_tokens_delta.default")
            rows = tuple(module.token_adapter.token_indices["default"])
            full = partial(trained.read, key)
            patches[f"{_plain(path)}.weight"] = Patch("rows", (key,), full=full, rows=rows)
        elif isinstance(module, ModulesToSaveWrapper):
            for name, _ in module.original_module.named_parameters():
                key = reader.take(f"{path}.modules_to_save.default.{name}")
                patches[f"{_plain(path)}.{name}"] = Patch("full", (key,), full=partial(trained.read, key))
    patches |= reader.rows_of_checkpoint()
    patches |= reader.resized(model.get_base_model())
    reader.check_all_taken()
    return patches


class _Reader:
    """Finds an adapter's tensors by peft's names, and knows which were not asked for."""

    def __init__(self, trained: Trained, model: Any):
        self._trained, self._left = trained, set(trained.shapes)
        state = model.state_dict(keep_vars=True)
        first = {id(tensor): name for name, tensor in reversed(state.items())}
        self._first = {name: first[id(tensor)] for name, tensor in state.items()}  # of names of one tensor
        self.read = trained.read

    def take(self, name: str) -> str:
        """Returns the key of a tensor, or of the one that it is tied to. Raises UserError where there is neither."""
        full = _PREFIX + name
        keys = [key for key in map(self._trained.key, (self._first.get(full, full), full)) if key is not None]
        if not keys:
            raise UserError(f"{self._trained.folder}: no tensor for {name}: this adapter belongs to another model")
        self._left.difference_update(keys)
        return keys[0]

    def rows_of_checkpoint(self) -> dict[str, Patch]:
        """Returns the rows of tokens that the recipe adds, by their names in memory."""
        recipe, patches = self._trained.recipe, {}
        for key in [key for key in sorted(self._left) if key.endswith(f".{ROWS}")]:
            assert recipe is not None
            first, count = len(load_tokenizer(recipe.model)), len(self._trained.shapes[key])
            self._left.discard(key)
            full = partial(self._trained.read, key)
            patch = Patch("rows", (key,), full=full, rows=tuple(range(first, first + count)))
            name = f"{key.removesuffix(ROWS)}weight"
            tied = [other for other, one in self._first.items() if one == name]
            patches |= {_plain(other.removeprefix(_PREFIX)): patch for other in tied}
        return patches

    def resized(self, base: Any) -> dict[str, Patch]:
        """Returns embeddings that peft wrote with the adapter: replaced where rows were added, else the base's own."""
        patches, shapes = {}, {_plain(name): tensor.shape for name, tensor in base.state_dict(keep_vars=True).items()}
        for key in sorted(self._left):
            name = _plain(key.removeprefix(_PREFIX))
            if name in shapes:
                self._left.discard(key)
                if shapes[name] != self._trained.shapes[key].shape:
                    patches[name] = Patch("full", (key,), full=partial(self._trained.read, key))
        return patches

    def check_all_taken(self) -> None:
        if self._left:
            raise UserError(
                f"{self._trained.folder}: {len(self._left)} tensors have no place in the base model, such as "
                f"{min(self._left)}: merging would lose them; this adapter belongs to another model, or to another "
                "version of peft"
            )


def _plain(path: str) -> str:
    """Returns a module's path in transformers' model."""
    return path.replace(".base_layer", "").replace(".original_module", "").replace(".token_adapter", "")


def _lora(path: str, module: Any, reader: _Reader) -> tuple[str, Patch]:
    """Returns the parameter that a layer of peft adapts, and how. Raises UserError for kinds that are not known."""
    from peft.tuners import lora
    from peft.tuners.lora.layer import ParamWrapper

    dora, scale = module.use_dora.get("default", False), module.scaling["default"]
    if isinstance(module, lora.Embedding):
        a, b = (reader.take(f"{path}.lora_embedding_{part}.default") for part in "AB")
        patch = Patch("lora", (a, b), lambda: (reader.read(a).T * scale, reader.read(b).T))  # (num, r), (r, dim)
        kind, name = "lora.Embedding", f"{_plain(path)}.weight"
    elif isinstance(module, lora.Linear | ParamWrapper):
        a, b = (reader.take(f"{path}.lora_{part}.default.weight") for part in "AB")
        wrapper = isinstance(module, ParamWrapper)
        name = f"{_plain(path)}.{module.parameter_name if wrapper else 'weight'}"
        experts, transposed = (module.num_experts if wrapper else 1), _is_transposed(module)
        kind, keys = type(module).__name__, (a, b)

        def factors() -> tuple[Tensor, Tensor]:
            left, right = reader.read(b).float() * scale, reader.read(a)
            if experts > 1:  # (out, r, E) -> (E, out, r); (E, r, in)
                left = left.reshape(len(left), -1, experts).permute(2, 0, 1)
                right = right.reshape(experts, -1, right.shape[-1])
            return (right.mT, left.mT) if transposed else (left, right)

        patch = Patch("lora", keys, factors)
        if dora:
            m = reader.take(f"{path}.lora_magnitude_vector.default.weight")
            patch = Patch("dora", (*keys, m), factors, lambda: reader.read(m))
    else:
        kind, name, patch, transposed = type(module).__name__, path, None, False
    variant = module.lora_variant and not dora
    if patch is None or variant or any(module.lora_bias.values()) or (dora and (transposed or patch.kind != "dora")):
        what = f"{kind}{' with DoRA' if dora else ''}"
        raise UserError(
            f"{name}: an adapter of kind {what} is not merged tensor by tensor: merge it in memory by peft's "
            "`merge_and_unload`, and give the folder that it saves as model.name"
        )
    return name, patch


def _is_transposed(module: Any) -> bool:
    """Whether the weight is (in, out): Conv1D of GPT-2, and experts of some architectures."""
    if hasattr(module, "parameter_name") and module.num_experts > 1:
        return not module._did_swap_in_out_features
    return bool(module.fan_in_fan_out)
