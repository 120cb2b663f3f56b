"""The modules of a model that get adapters: what `lora.targets` names, module by module, and whether peft did as named.

    all-linear       every linear layer but the LM head (or head of scores) and the routers, and all stacked experts
    [up_proj, w1]    modules and stacked tensors of these names, also of the names that they have in the model's files

    layers     paths of modules: peft wraps them
    stacked    paths of tensors with all experts of a layer, (E, ..): peft adds adapters to the tensor (`ParamWrapper`)

peft itself reads names of older versions of transformers, in which experts were modules of their own: it takes
`down_proj`, `gate` and the like for stacked tensors and routers, and leaves out dense layers and shared experts of
these names. So it is given paths, and its reading of names is off meanwhile. Whoever loads a saved adapter has it on:
`loadable_targets` are settings that come out of it as the same modules.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter
from transformers.pytorch_utils import Conv1D

from finetune.errors import UserError
from finetune.models.patches import attribute_set
from finetune.recipe.schema import Lora
from finetune.utils import full_shape

_ROUTER = re.compile(r"(Router|Gating)$")  # the classes of transformers that choose experts
_ROUTER_NAMES = ("gate", "router")  # next to `experts`, in other classes
_FUSED = {"gate_up_proj": ("gate_proj", "up_proj")}  # one tensor with both, in the order of its rows
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class AdapterTargets:
    """Paths of what gets an adapter, and what `all-linear` means but cannot have one."""

    layers: list[str]
    stacked: list[str]
    left_out: dict[str, str]  # path: why


def find_targets(model: Any, lora: Lora, trained: Callable[[str], bool] = lambda path: True) -> AdapterTargets:
    """Returns what `lora.targets` names. trained: whether a path is in a trained part of the model. Raises UserError if
    a name is of nothing, of a router, or of a part of a tensor."""
    named, routed = dict(model.named_modules()), router_modules(model)
    tensors, unreachable = stacked_tensors(model)
    stacked, out_of_reach = names_of(tensors, model), layers_out_of_reach(model)
    _check_names(named, stacked, lora)
    if isinstance(lora.targets, str):
        heads = (model.get_output_embeddings(), named.get("score"))  # the latter in transformers' classifiers
        layers = [path for path, one in named.items() if isinstance(one, nn.Linear | Conv1D) and one not in heads]
        left_out = {path: why for path, why in out_of_reach.items() if path not in routed} | unreachable
        layers = [path for path in layers if path not in routed and path not in out_of_reach]
    else:
        layers, left_out = [path for path in named if any(_is_named(path, one) for one in lora.targets)], {}
        if routers := [path for path in layers if path in routed]:
            raise UserError(
                f"lora.targets: {routers[0]} is a router, which gets no adapter. Fix: remove "
                f"{next(one for one in lora.targets if _is_named(routers[0], one))!r}, or name more of the paths"
            )
        if here := [path for path in layers if path in out_of_reach]:
            leaf = here[0].rpartition(".")[2]
            raise UserError(
                f"lora.targets: no adapter can be on {here[0]}: {out_of_reach[here[0]]}. Fix: remove {leaf!r} "
                "(`all-linear` leaves it out)"
            )
        tensors = _named_tensors(lora.targets, stacked)
    whole = [re.compile(rf"(^|.*\.){name}($|\..*)") for name in lora.modules_to_save or ()]  # as peft reads them

    def kept(paths: Collection[str]) -> list[str]:
        return [path for path in paths if trained(path) and not any(one.match(path) for one in whole)]

    targets = AdapterTargets(kept(layers), kept(tensors), {path: left_out[path] for path in kept(left_out)})
    _check_variants(targets, lora, model)
    return targets


def _is_named(path: str, name: str) -> bool:
    return path == name or path.endswith(f".{name}")


def _check_names(paths: Mapping[str, Any], stacked: Mapping[str, list[tuple[str, ...]]], lora: Lora) -> None:
    known = [*paths, *(name for groups in stacked.values() for group in groups for name in group)]
    names = [("lora.targets", name) for name in (() if isinstance(lora.targets, str) else lora.targets)]
    for key, name in names + [("lora.modules_to_save", name) for name in lora.modules_to_save or ()]:
        if not any(_is_named(path, name) for path in (known if key == "lora.targets" else paths)):
            linear = {path.rpartition(".")[2] for path, module in paths.items() if "Linear" in type(module).__name__}
            linear |= {path.rpartition(".")[2] for path in stacked}
            names_here = ", ".join(sorted(linear) or {path.rpartition(".")[2] for path in paths})
            raise UserError(
                f"{key}: the model has no module {name!r}. Fix: name modules that it has; its linear ones are "
                f"{names_here}"
            )


def _check_variants(targets: AdapterTargets, lora: Lora, model: Any) -> None:
    """Raises UserError for what peft has on linear layers alone."""
    as_tensors = targets.stacked + ([] if not lora.dora else _read_as_tensors(model, targets.layers))
    for key, is_set in (("dropout", lora.dropout), ("dora", lora.dora)):
        if is_set and (targets.stacked or key == "dora") and as_tensors:
            off = "0.0" if key == "dropout" else "false"
            raise UserError(
                f"lora.{key}: peft has none for adapters on tensors, such as {as_tensors[0]} ({len(as_tensors)} in "
                f"all). Fix: `lora.{key}: {off}`, or lora.targets without them, such as [q_proj, "
                "k_proj, v_proj, o_proj]"
            )


# --- parts of a mixture of experts


def router_modules(model: nn.Module) -> set[str]:
    """Returns the paths of the modules that choose experts, and of all modules in them."""
    named, paths = dict(model.named_modules()), set[str]()
    for path, module in named.items():
        parent, _, leaf = path.rpartition(".")
        next_to_experts = leaf in _ROUTER_NAMES and hasattr(named[parent], "experts")
        if path and (_ROUTER.search(type(module).__name__) or next_to_experts):
            paths |= {f"{path}.{inner}" if inner else path for inner, _ in module.named_modules()}
    return paths


def stacked_tensors(model: nn.Module) -> tuple[list[str], dict[str, str]]:
    """Returns the paths of tensors with the weights of all experts of a layer, (E, .., ..); and of those that no
    adapter can be on, with the reason."""
    stacked, unreachable = [], dict[str, str]()
    for path, module in model.named_modules():
        if "Expert" not in type(module).__name__ or isinstance(module, nn.Linear):
            continue
        for name, weight in module.named_parameters(recurse=False):
            if name.endswith("bias") or len(full_shape(weight)) < 2:
                continue
            if len(full_shape(weight)) == 3 and weight.dtype in _FLOATS:
                stacked.append(f"{path}.{name}")
            else:
                unreachable[f"{path}.{name}"] = f"{weight.dtype}, {len(full_shape(weight))} dimensions: no adapter"
    return stacked, unreachable


def names_of(stacked: Sequence[str], model: Any) -> dict[str, list[tuple[str, ...]]]:
    """Returns, of each stacked tensor, the paths by which it may be named: its own, or all of its parts in files.

    model.layers.0.mlp.experts.gate_up_proj of Mixtral, below `model.layers.0.mlp.experts`:
    (gate_up_proj), (gate_proj, up_proj), (w1, w3)
    """
    in_files = _names_in_files(model) if stacked else []
    names = {}
    for path in stacked:
        container, _, leaf = path.rpartition(".")
        groups = [(leaf,), *([_FUSED[leaf]] if leaf in _FUSED else [])]
        groups += [parts for target, parts in in_files if _is_named(path, target)]
        names[path] = [tuple(f"{container}.{part}" for part in group) for group in dict.fromkeys(groups)]
    return names


def _names_in_files(model: Any) -> list[tuple[str, tuple[str, ...]]]:
    """Returns the ends of stacked tensors' paths, with the last names of their parts in files, by transformers'
    conversions: `mlp.experts.*.gate_proj.weight`, `mlp.experts.*.up_proj.weight` -> `mlp.experts.gate_up_proj`."""
    found = []
    for one in get_model_conversion_mapping(model) or []:
        if isinstance(one, WeightConverter) and len(one.target_patterns) == 1:
            target = one.target_patterns[0].replace("\\", "").lstrip(".")
            parts = [re.search(r"\*\.(\w+)\.weight$", pattern) for pattern in one.source_patterns]
            if all(parts):
                found.append((target, tuple(part[1] for part in parts if part)))
    return found


def _named_tensors(names: Sequence[str], stacked: Mapping[str, list[tuple[str, ...]]]) -> list[str]:
    """Returns the stacked tensors that are named. Raises UserError if a part of one is."""
    found = []
    for path, groups in stacked.items():
        missing = {group: [part for part in group if not any(_is_named(part, n) for n in names)] for group in groups}
        if not all(missing.values()):
            found.append(path)
            continue
        for group, absent in missing.items():
            if len(absent) < len(group):
                others = ", ".join(one.rpartition(".")[2] for one in absent)
                here = next(part for part in group if part not in absent).rpartition(".")[2]
                raise UserError(
                    f"lora.targets: {here!r} is a part of the tensor {path}, which has {others} as well. Fix: name "
                    f"{others}, too, or paths outside of the experts, such as shared_experts.{here}"
                )
    return found


def layers_out_of_reach(model: Any) -> dict[str, str]:
    """Returns the linear layers that no adapter can be on, with the reason: it acts when a layer is called, and adds a
    plain product. Some layers' weights are handed to a kernel by the module around them, as Mamba's are; others are
    linear by their class but compute something else, as DeepSeek-V4's grouped ones do."""
    modules = {
        name: module
        for name, module in model.named_modules()
        if type(module).__module__.startswith("transformers.models.") and not isinstance(module, PreTrainedModel)
    }
    handed_over = {
        f"{name}.{layer}": f"{type(module).__name__} reads its weight itself, for its kernels"
        for name, module in modules.items()
        for layer in _weights_read_by(type(module))
        if isinstance(getattr(module, layer, None), nn.Linear)
    }
    special = {
        name: f"{type(module).__name__} computes another product than a linear layer"
        for name, module in modules.items()
        if isinstance(module, nn.Linear) and type(module).forward is not nn.Linear.forward
    }
    return handed_over | special


@functools.cache
def _weights_read_by(kind: type[nn.Module]) -> tuple[str, ...]:
    """Returns the layers whose weight a class reads, and not only its type, or a slice. Its source is parsed for it."""
    read = re.compile(r"self\.(\w+)\.weight\b(?!\[|\.(?:data|dtype|device|shape))")
    return tuple(dict.fromkeys(read.findall(inspect.getsource(kind))))


# --- peft's settings


def peft_settings(model: Any, targets: AdapterTargets, lora: Lora) -> dict[str, Any]:
    """Returns the arguments of `LoraConfig` that say which modules get adapters, and of which rank."""
    if not targets.stacked and not isinstance(lora.targets, str):
        return {"target_modules": list(lora.targets)}
    settings: dict[str, Any] = {"target_modules": targets.layers}
    if targets.stacked:
        modules, tensors = ([name for name, _ in named] for named in (model.named_modules(), model.named_parameters()))
        settings["target_modules"] = shortest(targets.layers, modules)
        settings["target_parameters"] = shortest(targets.stacked, tensors)
        settings |= _fused_ranks(targets.stacked, [*modules, *tensors], lora.rank, lora.alpha, lora.rslora)
    return settings


def _fused_ranks(stacked: Sequence[str], every: Sequence[str], rank: int, alpha: float, rslora: bool) -> dict[str, Any]:
    """Returns peft's settings for two matrices in one tensor: twice the rank, and the scale of one."""
    fused = [path for path in stacked if path.rpartition(".")[2] in _FUSED]
    patterns = [re.escape(name) for name in shortest(fused, every)]
    scaled = alpha * (math.sqrt(2) if rslora else 2)
    return {"rank_pattern": dict.fromkeys(patterns, 2 * rank), "alpha_pattern": dict.fromkeys(patterns, scaled)}


def shortest(paths: Sequence[str], every: Sequence[str]) -> list[str]:
    """Returns the ends of paths that no other path has, as peft compares them; else the full paths.

    >>> shortest(["layers.0.mlp.up", "layers.1.mlp.up"], ["layers.0.mlp.up", "layers.1.mlp.up", "layers.1.mlp.down"])
    ['up']
    """
    wanted, names, left = {*paths}, list[str](), {*paths}
    for depth in (1, 2, 3):
        by_end: dict[str, list[str]] = {}
        for path in every:
            by_end.setdefault(".".join(path.split(".")[-depth:]), []).append(path)
        for end, those in by_end.items():
            if wanted.issuperset(those) and left.intersection(those):
                names.append(end)
                left -= {*those}
    return [*names, *(path for path in paths if path in left)]


@contextmanager
def names_as_given() -> Iterator[None]:
    """peft takes the names that it is given for those of this version of transformers."""
    from peft.utils import transformers_weight_conversion

    name = "convert_peft_config_for_transformers"
    with attribute_set(transformers_weight_conversion, name, lambda *_, **__: None, "names as given"):
        yield


def check_adapted(adapted: Any, targets: AdapterTargets) -> None:
    """Raises UserError if the modules with adapters are not those that are named. adapted: peft's model."""
    layers, stacked = adapted_paths(adapted)
    missing = sorted({*targets.layers, *targets.stacked} - {*layers, *stacked})
    others = sorted({*layers, *stacked} - {*targets.layers, *targets.stacked})
    if missing or others:
        kinds = {"without": missing, "in addition": others}
        which = ", ".join(f"{len(some)} {kind} ({', '.join(some[:3])})" for kind, some in kinds.items() if some)
        raise UserError(
            f"lora.targets: peft adapts other modules than the named ones: {which}. Fix: leave these names out, or "
            "install a version of peft that pyproject.toml allows"
        )


def adapted_paths(adapted: Any) -> tuple[list[str], list[str]]:
    """Returns the paths, in transformers' model, of layers and of stacked tensors with an adapter."""
    from peft.tuners.lora.layer import LoraLayer, ParamWrapper

    layers, stacked = [], []
    for path, module in adapted.get_base_model().named_modules():
        if isinstance(module, ParamWrapper):
            stacked.append(f"{re.sub(r'([.]base_layer)*$', '', path)}.{module.parameter_name}")
        elif isinstance(module, LoraLayer):
            layers.append(path)
    return layers, stacked


def loadable_targets(
    base: Any, layers: Sequence[str], stacked: Sequence[str], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns peft's settings by which a saved adapter is loaded on these modules and no others; {} if peft reads the
    names as they are. base: the model that it is loaded on; settings: those of the adapter.

    A layer whose name peft takes for an expert's is named by its weight, which is a tensor, too: the same sum.
    """
    moved = _read_as_tensors(base, layers)
    if not moved and not stacked:
        return {}
    modules, tensors = (
        list(dict.fromkeys(re.sub(r"\.base_layer(?=\.|$)", "", name) for name, _ in named))  # of a model with adapters
        for named in (base.named_modules(), base.named_parameters())
    )
    weights = [f"{path}.weight" for path in moved]
    own = [settings[key] for key in ("r", "lora_alpha", "use_rslora")]
    loadable: dict[str, Any] = {
        "target_modules": shortest([path for path in layers if path not in moved], modules),
        "target_parameters": shortest([*weights, *stacked], tensors),
        **_fused_ranks(stacked, [*modules, *tensors], *own),
    }
    if moved:
        loadable["lora_dropout"] = 0.0  # peft has none on tensors, and a loaded adapter drops nothing
    return loadable


def _read_as_tensors(base: Any, layers: Sequence[str]) -> list[str]:
    """Returns the layers whose names peft takes for those of experts' tensors or routers, by its own function."""
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    def is_read_so(leaf: str) -> bool:
        config = LoraConfig(target_modules=[leaf])
        try:
            convert_peft_config_for_transformers(config, model=base, conversions=None)
        except ValueError:  # half of a tensor
            return True
        return leaf not in (config.target_modules or ())

    leaves = {leaf: is_read_so(leaf) for leaf in {path.rpartition(".")[2] for path in layers}}
    return [path for path in layers if leaves[path.rpartition(".")[2]]]


def describe_left_out(left_out: Mapping[str, str]) -> list[str]:
    """Returns, for people, what `all-linear` leaves out: a line for each reason."""
    by_reason: dict[str, list[str]] = {}
    for path, why in left_out.items():
        by_reason.setdefault(f"{path.rpartition('.')[2]} ({why})", []).append(path)
    return [f"{len(paths)} x {reason}" for reason, paths in by_reason.items()]
