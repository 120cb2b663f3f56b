"""One stage of a model: the modules of other stages are on `meta`, without memory.

So parameters have the names that they have on every other backend. While a stage runs, the base model has that stage's
layers, and in the place of the others modules that return the hidden states unchanged; embeddings, masks and rotations
are what transformers computes from `inputs_embeds` and `position_ids`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from finetune.engine.pipeline_layout import PLAN, Layout
from finetune.errors import UserError
from finetune.models.wrapped import WrappedModel
from finetune.utils import unwrap_peft

_HEAD_ARGUMENTS = ("logits_to_keep", "targets")  # that a stage without the head has no use for


class _PassOn(nn.Module):
    def forward(self, hidden: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        return hidden


class StageModel(nn.Module):
    """Its parameters are the stage's own; called with the hidden states of the stage before it."""

    def __init__(self, model: WrappedModel, layout: Layout, index: int, compute: torch.dtype):
        """compute: the type of the hidden states that stages pass on."""
        super().__init__()
        self.index, self.is_last = index, index == layout.stages - 1
        self._model = [model]  # in a list: no submodule of ours
        self._compute = compute
        base = unwrap_peft(model.causal_lm).base_model
        mine = layout.layers(index)
        self._shown = {
            "layers": nn.ModuleList(layer if i in mine else _PassOn() for i, layer in enumerate(base.layers)),
            "norm": base.norm if self.is_last else _PassOn(),
        }
        self.own_modules = nn.ModuleList(parts_of(model.causal_lm, layout, index))

    def run(self, arguments: dict[str, Any], received: Tensor | None) -> Any:
        """Returns the model's output, in the last stage; in the others hidden states (B, T, D).

        arguments: of the full model's forward. received: (B, T, D), None in the first stage.
        """
        (model,) = self._model
        if received is not None:
            arguments = {**arguments, "inputs_embeds": received}
            del arguments["input_ids"]
        with _showing(unwrap_peft(model.causal_lm).base_model, self._shown):
            if self.is_last:
                return model(**arguments)
            inputs = {name: value for name, value in arguments.items() if name not in _HEAD_ARGUMENTS}
            return self._checked(model.hidden_states(**inputs))

    def _checked(self, hidden: Tensor) -> Tensor:
        if hidden.dtype != self._compute:
            name = type(unwrap_peft(self._model[0].causal_lm)).__name__
            raise UserError(
                f"pipeline: hidden states between the layers of {name} are "
                f"{hidden.dtype}, not {self._compute}: use train.precision: fp32, or another accelerate config"
            )
        if torch.is_grad_enabled() and not hidden.requires_grad:
            hidden.requires_grad_()  # nothing up to here trains; the schedule sends a gradient anyway
        return hidden


@contextlib.contextmanager
def _showing(base: Any, modules: dict[str, nn.Module]) -> Iterator[None]:
    before = {name: base._modules[name] for name in modules}
    base._modules.update(modules)
    try:
        yield
    finally:
        base._modules.update(before)


def parts_of(model: Any, layout: Layout, stage: int) -> list[nn.Module]:
    """Returns the modules of a stage."""
    causal = unwrap_peft(model)
    base = causal.base_model
    parts = [base.layers[i] for i in layout.layers(stage)]
    if stage == 0:
        parts.append(causal.get_input_embeddings())
    if stage == layout.stages - 1:
        parts += [base.norm, causal.get_output_embeddings()]
    return parts


def holders(model: Any, layout: Layout) -> dict[str, list[int]]:
    """Returns the pipeline ranks that have each parameter, by all of its names; a matrix that is embedding and head has
    two."""
    ranks: dict[int, set[int]] = {}
    for stage in range(layout.stages):
        for part in parts_of(model, layout, stage):
            for parameter in part.parameters():
                ranks.setdefault(id(parameter), set()).add(layout.rank_of(stage))
    named = model.named_parameters(remove_duplicate=False)
    return {name: sorted(ranks[id(parameter)]) for name, parameter in named}


def keep_only(model: nn.Module, keeps: Callable[[str], bool], device: torch.device) -> None:
    """Move parameters to the device where `keeps` says so of their names, else to `meta`; one tensor with two names
    stays one."""
    named = list(model.named_parameters(remove_duplicate=False))  # and alive, so that no two have one id
    elsewhere: dict[int, nn.Parameter] = {}
    for name, parameter in named:
        if keeps(name):
            if parameter.device != device:
                parameter.data = parameter.data.to(device)
            continue
        if id(parameter) not in elsewhere:
            without = torch.empty_like(parameter.data, device="meta")
            elsewhere[id(parameter)] = nn.Parameter(without, parameter.requires_grad)
        module, _, own = name.rpartition(".")
        model.get_submodule(module)._parameters[own] = elsewhere[id(parameter)]
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = buffer.to(device)


def check_cuttable(model: Any) -> None:
    """Raises UserError where a base model does more between embedding, layers and norm than to run them in turn.

    That is tried by running it with every layer and the norm returning their inputs.
    """
    causal = unwrap_peft(model)
    base, name = causal.base_model, type(causal).__name__
    others = [
        key for key, part in base.named_children() if key not in PLAN and next(part.parameters(), None) is not None
    ]
    if others:
        raise UserError(f"pipeline: {name} has weights outside its layers ({', '.join(others)}): use another config")
    device = next(base.buffers(), torch.empty(0)).device  # of the rotary frequencies
    hidden = torch.linspace(-1, 1, 2 * base.config.hidden_size, device=device).reshape(1, 2, -1)
    shown = {"layers": nn.ModuleList(_PassOn() for _ in base.layers), "norm": _PassOn()}
    with torch.no_grad(), _showing(base, shown):
        passed = base(inputs_embeds=hidden, position_ids=torch.arange(2, device=device)[None], use_cache=False)[0]
    if not torch.equal(passed, hidden):
        raise UserError(
            f"pipeline: {name} changes hidden states outside its layers, once for each stage: use another config"
        )
