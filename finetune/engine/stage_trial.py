"""Tests on a tiny copy of a model whether stages compute the same as the whole: the name of a class does not say what
its layers hand to each other, or what runs between them.

Every cut of the copy in two is tried: outputs, gradients, and a token after a prompt with caches.
"""

from __future__ import annotations

import copy
import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PretrainedConfig

from finetune.engine import stages
from finetune.engine.stage_cache import stage_cache
from finetune.engine.stages import Layout, StageModel, buffer_holders, final_norms, holders, keep_only, parts_of
from finetune.models.loss_model import CausalLMWithLoss
from finetune.models.remote_code import from_config
from finetune.models.text_part import name_body
from finetune.models.tiny_config import VOCABULARY, WINDOW, tiny_config
from finetune.models.trials import FAILURES, randomize, tiny_problem

_TOLERANCE = 1e-5  # of the largest element
_ROWS, _TOKENS = 2, 2 * WINDOW


def stage_problem(config: PretrainedConfig) -> str | None:
    """Returns why a model cannot be divided into stages; None if it can."""
    code = b"".join(Path(str(file)).read_bytes() for file in (__file__, stages.__file__))
    return tiny_problem(config, tiny_config, f"stages {hashlib.sha256(code).hexdigest()}", differ)


def differ(tiny: Any) -> str | None:
    torch.manual_seed(0)
    whole: Any = from_config(AutoModelForCausalLM, copy.deepcopy(tiny), dtype=torch.float32)
    randomize(whole)
    name_body(whole)
    base = whole.base_model
    if not hasattr(base, "layers"):
        return f"{type(base).__name__} has no `layers`"
    if len(parts := final_norms(base)) > 1:
        return f"it has weights outside of its layers ({', '.join(parts)})"
    if len(base.layers) < 2:
        return "it has one layer"
    for cut in range(1, len(base.layers)):
        if (reason := differ_when_cut(whole, Layout((0, cut, len(base.layers)), ranks=2))) is not None:
            return reason
    return None


def differ_when_cut(whole: Any, layout: Layout) -> str | None:
    """Returns why two stages differ from the whole model."""
    parts = [part for stage in range(2) for part in parts_of(whole, layout, stage)]
    within = {id(parameter) for part in parts for parameter in part.parameters()}
    if outside := [name for name, parameter in whole.named_parameters() if id(parameter) not in within]:
        return f"it has weights outside of its layers ({', '.join(outside[:3])})"
    held, buffers = holders(whole, layout), buffer_holders(whole, layout)
    models, divided = [], list[StageModel]()
    ends = {id(module.weight) for module in (whole.get_input_embeddings(), whole.get_output_embeddings())}
    for name, parameter in whole.named_parameters():
        if len(held[name]) > 1 and id(parameter) not in ends:
            return f"layers of different stages share weights (`{name}`)"
    for rank in range(2):
        models.append(copy.deepcopy(whole))
        keep_only(models[-1], lambda name, rank=rank: rank in held[name], torch.device("cpu"))
        _leave_out(models[-1], {name for name, ranks in buffers.items() if rank not in ranks})
        divided.append(StageModel(CausalLMWithLoss(models[-1], "plain"), layout, rank, torch.float32))
    for name, tensor in whole.state_dict().items():
        rank = {**held, **buffers}[name][0]
        if not torch.equal(models[rank].state_dict()[name], tensor):
            return f"the stage that saves `{name}` does not have it"
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (_ROWS, _TOKENS + 1), generator=generator)
    prompt = {"input_ids": ids[:, :-1], "position_ids": torch.arange(_TOKENS).expand(_ROWS, -1)}
    features, width = divided[0].run({**prompt, "use_cache": False}, None).shape[-1], whole.config.hidden_size
    if features != width:  # stages receive as many of a token
        return f"a layer hands on {features} features of a token, not `hidden_size`, {width}"
    own, ours = _of_whole(whole, {**prompt, "use_cache": False}), _of_stages(divided, {**prompt, "use_cache": False})
    if not _same(own, ours):
        return "stages give other logits than the whole model"
    for logits in (own, ours):
        logits.square().mean().backward()
    expected = {name: parameter.grad for name, parameter in whole.named_parameters()}
    whole.zero_grad(set_to_none=True)
    largest = max(float(gradient.abs().max()) for gradient in expected.values() if gradient is not None)
    for name, gradient in expected.items():
        of_ranks = [p.grad for model in models if (p := model.get_parameter(name)).grad is not None]
        found, wanted = sum(of_ranks, torch.zeros(())), torch.zeros(()) if gradient is None else gradient
        if not torch.allclose(found.expand_as(wanted), wanted, rtol=_TOLERANCE, atol=_TOLERANCE * largest):
            return f"stages give another gradient of `{name}` than the whole model"
    return differ_with_caches(whole, divided, layout, ids)


def _leave_out(model: Any, names: set[str]) -> None:
    """Move buffers to `meta`, as of layers that a rank has not loaded."""
    for name in names:
        module, _, own = name.rpartition(".")
        buffers = model.get_submodule(module)._buffers
        buffers[own] = buffers[own].to("meta")


@torch.no_grad()
def differ_with_caches(whole: Any, divided: list[StageModel], layout: Layout, ids: Tensor) -> str | None:
    """Returns why generation with the caches of stages differs from that with one cache."""
    config = whole.config
    cache, caches = DynamicCache(config=config), {i: stage_cache(config, layout, i) for i in range(2)}
    mask, begin = torch.ones_like(ids), 0
    mask[1, :3] = 0  # padding at the left
    whole.eval()
    for stage in divided:
        stage.eval()
    for end in (_TOKENS, _TOKENS + 1):
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, begin:end]
        inputs = {"input_ids": ids[:, begin:end], "position_ids": positions, "attention_mask": mask[:, :end]}
        try:
            own = _of_whole(whole, {**inputs, "past_key_values": cache, "use_cache": True})
        except FAILURES:  # it has no such cache anywhere
            return None
        if not _same(own[:, -1], _of_stages(divided, {**inputs, "past_key_values": caches, "use_cache": True})[:, -1]):
            return "stages with caches of their own give other logits than the whole model with one"
        begin = end
    return None


def _of_whole(model: Any, arguments: dict[str, Any]) -> Tensor:
    return CausalLMWithLoss(model, "plain")(**arguments).logits


def _of_stages(divided: list[StageModel], arguments: dict[str, Any]) -> Tensor:
    hidden: Any = None
    for stage in divided:
        hidden = stage.run(arguments, hidden)
    return hidden.logits


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=_TOLERANCE, atol=_TOLERANCE * float(one.detach().abs().max()))
