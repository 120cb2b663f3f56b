"""Base and adapter as one model, tensor by tensor: what each tensor of the result is made from.

peft puts an adapter into a model without weights (device `meta`), so its own code says which modules have an adapter,
of which kind and with which scale. The sums are computed here, in fp32, some rows at a time:

    LoRA       W + s B A                      s: alpha / rank, or alpha / sqrt(rank)  (https://arxiv.org/abs/2106.09685)
    DoRA       m (W + s B A) / |W + s B A|    norm of each row                        (https://arxiv.org/abs/2402.09353)
    experts    W[e] + s B[e] A[e]             peft's ParamWrapper
    in full    the trained tensor (modules_to_save), or its rows (trainable tokens)

transformers holds some architectures in another layout than files (`weight_files.py`): there the update is converted
to the files' layout, and added to the values of the files.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from finetune.checkpoints.trained import ADAPTER, Trained
from finetune.errors import UserError
from finetune.models.added_tokens import ROWS
from finetune.models.damage import ADAPTER_CONFIG, short
from finetune.models.tokenizer import load_tokenizer

_BLOCK = 1 << 24  # elements that are added at a time, 64 MB in fp32
_PREFIX = "base_model.model."  # peft's, before transformers' names
# Raised by peft for settings of another type, missing targets and weights of other shapes.
_REFUSED = (ValueError, TypeError, LookupError, AttributeError)


@dataclass(frozen=True)
class Patch:
    """The change that training made to one parameter. Values are read when they are needed."""

    kind: str  # lora | dora | full | rows
    keys: tuple[str, ...]  # of the trained tensors: A and B (and the magnitude), the weight, the rows
    values: Callable[[], Tensor] | None = None  # of `full` and `rows`
    rows: tuple[int, ...] = ()
    factors: Callable[[], tuple[Tensor, Tensor]] | None = None  # (.., out, r), (.., r, in), times the scale
    magnitude: Callable[[], Tensor] | None = None  # (out,)
    layer: Any = None  # peft's
    parameters: Mapping[str, str] | None = None  # the layer's own parameters, with their keys

    def apply(self, base: Tensor | None, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Returns the trained parameter. base: its values in the base; None: returns the update alone."""
        if self.values is not None and self.kind == "full":
            return self.values().to(dtype)
        if self.values is not None:
            assert base is not None
            result = torch.zeros(shape, dtype=dtype)  # the base may lack the last rows
            result[: len(base)] = base
            result[list(self.rows)] = self.values().to(dtype)
            return result
        assert self.factors is not None
        left, right = (factor.float() for factor in self.factors())
        magnitude = self.magnitude().float().reshape(-1, 1) if self.magnitude is not None else None
        result = torch.empty(shape, dtype=dtype) if base is None or base.dtype != dtype else base
        experts: Any = range(len(left)) if left.ndim == 3 else [...]
        count = max(1, _BLOCK // right.shape[-1])
        for start in range(0, left.shape[-2], count):
            rows = slice(start, start + count)
            for expert in experts:
                total = left[expert][rows] @ right[expert]
                if base is not None:
                    total.add_(base[expert][rows])
                if magnitude is not None:
                    total.mul_(magnitude[rows] / total.norm(dim=-1, keepdim=True))
                result[expert][rows] = total
        return result


def adapter_patches(model: Any, trained: Trained) -> dict[str, Patch]:
    """Returns the changes of an adapter, by the parameter's name in transformers' model.

    model: peft's, without weights. Raises UserError for an adapter of a kind that is not merged here, and if the
    adapter's tensors are not those of the model.
    """
    from peft.tuners.lora.layer import LoraLayer
    from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper

    patches: dict[str, Patch] = {}
    base, left = model.get_base_model(), set(trained.shapes)
    state = model.state_dict(keep_vars=True)
    first = {id(tensor): name for name, tensor in reversed(state.items())}
    first_names = {name: first[id(tensor)] for name, tensor in state.items()}  # of the names of one tensor

    def take(name: str) -> str:
        """Returns the key of a tensor, or of the one that it is tied to."""
        names = (first_names.get(_PREFIX + name, _PREFIX + name), _PREFIX + name)
        keys = [key for key in map(trained.key, names) if key is not None]
        if not keys:
            raise UserError(
                f"{trained.folder}: no tensor for {name}. Fix: give --base the model that this adapter belongs to"
            )
        left.difference_update(keys)
        return keys[0]

    for path, module in base.named_modules():
        if isinstance(module, LoraLayer):
            name, patch = _lora(path, module, take, trained.read)
            patches[name] = patch
        elif isinstance(module, TrainableTokensWrapper):
            key = take(f"{path}.token_adapter.trainable_tokens_delta.default")
            rows = tuple(module.token_adapter.token_indices["default"])
            patches[f"{_plain_name(path)}.weight"] = Patch("rows", (key,), partial(trained.read, key), rows)
        elif isinstance(module, ModulesToSaveWrapper):
            for own, _ in module.original_module.named_parameters():
                key = take(f"{path}.modules_to_save.default.{own}")
                patches[f"{_plain_name(path)}.{own}"] = Patch("full", (key,), partial(trained.read, key))
    shapes, lost = {_plain_name(name): one.shape for name, one in base.state_dict(keep_vars=True).items()}, []
    for key in sorted(left):
        name, read = _plain_name(key.removeprefix(_PREFIX)), partial(trained.read, key)
        if key.endswith(f".{ROWS}"):  # tokens that the recipe adds, in a checkpoint
            assert trained.recipe is not None
            start, table = len(load_tokenizer(trained.recipe.model)), f"{key.removesuffix(ROWS)}weight"
            patch = Patch("rows", (key,), read, tuple(range(start, start + len(trained.shapes[key]))))
            tied = [other for other, one in first_names.items() if one == table]
            patches |= {_plain_name(other.removeprefix(_PREFIX)): patch for other in tied}
        elif name not in shapes:
            lost.append(key)
        elif shapes[name] != trained.shapes[key].shape:  # embeddings, which peft saves also if they have not grown
            patches[name] = Patch("full", (key,), read)
    if lost:
        raise UserError(
            f"{trained.folder}: {len(lost)} tensors have no place in the base model, such as {lost[0]}. Merging would "
            "lose them. Fix: give --base the model that this adapter belongs to, or install the version of peft that "
            "wrote it"
        )
    return patches


def _plain_name(path: str) -> str:
    """Returns a module's path in transformers' model."""
    return path.replace(".base_layer", "").replace(".original_module", "").replace(".token_adapter", "")


def _lora(path: str, module: Any, take: Callable[[str], str], read: Callable[[str], Tensor]) -> tuple[str, Patch]:
    """Returns the name of the parameter that a layer of peft adapts, and its change. Raises UserError for other kinds
    of layers than those above."""
    from peft.tuners import lora
    from peft.tuners.lora.layer import ParamWrapper

    dora, scale = module.use_dora.get("default", False), module.scaling["default"]
    is_embedding, wrapper = isinstance(module, lora.Embedding), isinstance(module, ParamWrapper)
    is_known = is_embedding or wrapper or isinstance(module, lora.Linear)
    name = f"{_plain_name(path)}.{module.parameter_name if wrapper else 'weight'}"
    experts: Any = module.num_experts if wrapper else 1
    if experts > 1:
        # peft's flag, set as it reads the shape of the experts: (E, in, out) or (E, out, in).
        transposed = not module._did_swap_in_out_features
    else:  # the weights of GPT-2's Conv1D are (in, out)
        transposed = is_known and not is_embedding and bool(module.fan_in_fan_out)
    variant = module.lora_variant and not dora
    if not is_known or variant or any(module.lora_bias.values()) or (dora and (transposed or is_embedding)):
        raise UserError(
            f"{name}: adapters of kind {type(module).__name__}{' with DoRA' if dora else ''} are not merged here. Fix: "
            "merge it in memory by peft's `merge_and_unload`, and give the folder that it saves as model.name"
        )
    owns = [f"lora_embedding_{part}.default" if is_embedding else f"lora_{part}.default.weight" for part in "AB"]
    owns += ["lora_magnitude_vector.default.weight"] if dora else []
    parameters = {own: take(f"{path}.{own}") for own in owns}
    a, b, *more = parameters.values()

    def factors() -> tuple[Tensor, Tensor]:
        if is_embedding:
            return read(a).T * scale, read(b).T  # (num, r), (r, dim)
        left, right = read(b).float() * scale, read(a)
        if experts > 1:  # (out, r, E) -> (E, out, r); (E, r, in)
            left = left.reshape(len(left), -1, experts).permute(2, 0, 1)
            right = right.reshape(experts, -1, right.shape[-1])
        return (right.mT, left.mT) if transposed else (left, right)

    magnitude = partial(read, more[0]) if more else None
    kind = "dora" if dora else "lora"
    return name, Patch(kind, (a, b, *more), factors=factors, magnitude=magnitude, layer=module, parameters=parameters)


# --- the files of an adapter, which are checked against each other and against the base


def read_lora(folder: Path) -> Any:
    """Returns peft's config of an adapter. Raises UserError if it is damaged or of another kind than LoRA."""
    from peft import PeftConfig

    with FittingAdapter(folder):
        config: Any = PeftConfig.from_pretrained(str(folder))
    if config.peft_type != "LORA":
        raise UserError(
            f"{folder / ADAPTER_CONFIG}: only LoRA is loaded, not {config.peft_type}. Fix: use peft itself for it"
        )
    if type(config.r) is not int or config.r < 1 or not isinstance(config.target_modules, str | set):
        raise UserError(
            f"{folder / ADAPTER_CONFIG}: `r` is no rank, or `target_modules` no names. Fix: restore the file"
        )
    return config


_MISSING = "Found missing adapter keys while loading the checkpoint: "  # peft's


class FittingAdapter(contextlib.AbstractContextManager[None]):
    """Turns the errors of peft for an adapter that does not fit its base, or whose files differ, into a UserError; also
    its warning of missing keys, with which it computes as if these were not trained."""

    def __init__(self, folder: Path):
        self._folder, self._warnings = folder, warnings.catch_warnings()

    def __enter__(self) -> None:
        self._warnings.__enter__()
        warnings.filterwarnings("error", _MISSING, UserWarning)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self._warnings.__exit__(None, None, None)
        if isinstance(error, UserWarning) and str(error).startswith(_MISSING):
            raise _unfit(self._folder, str(error).removeprefix(_MISSING)) from error
        if isinstance(error, _REFUSED) or (isinstance(error, RuntimeError) and "size mismatch" in str(error)):
            raise UserError(
                f"{self._folder}: the adapter does not fit its settings or its base: {short(error)}. Fix: restore its "
                "files"
            ) from error


def check_names(folder: Path, missing: Sequence[str]) -> None:
    """Raises UserError if peft found no values for tensors of an adapter. missing: their names."""
    if missing:
        raise _unfit(folder, str(list(missing)))


def _unfit(folder: Path, missing: str) -> UserError:
    return UserError(
        f"{folder}: tensors of the adapter have other names than its base gives them: {missing[:120]}... are missing. "
        "Fix: restore its files, or name the base that it was trained on"
    )


def check_shapes(trained: Trained, adapted: Any, base: str | None) -> None:
    """Raises UserError if an adapter's weights have other shapes than its settings give them on this base.

    adapted: peft's model, without weights; base: its name, for the message. Trained tables may have more rows than the
    base's: those of added tokens.
    """
    tables = [adapted.get_input_embeddings(), adapted.get_output_embeddings()]
    in_tables = {id(p) for table in tables if table is not None for p in table.parameters()}
    for name, parameter in adapted.named_parameters():
        if (key := trained.key(name)) is None:
            continue
        expected, shape = tuple(parameter.shape), tuple(trained.shapes[key].shape)
        grown = id(parameter) in in_tables and name.endswith(".weight") and shape[0] > expected[0]
        if shape[grown:] != expected[grown:]:
            raise UserError(
                f"{trained.folder / ADAPTER}: {key} has the shape {list(shape)} and not {list(expected)}. "
                f"{ADAPTER_CONFIG} and the base {base} give it the second. The files are not of one run, or the base "
                "is another. Fix: restore them"
            )
