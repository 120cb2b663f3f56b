"""The teacher of a run that distills on its own samples, in a plan: a second model, whole on each process
(`finetune/rl/sample_teacher.py`). Its forward, without gradients, is weighed by the run's own code on fake tensors."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass

import torch

# torch documents this mode, and has it under no other name.
from torch._subclasses.fake_tensor import FakeTensorMode

from finetune.data.batch import collate
from finetune.models.assemble import assemble
from finetune.models.base_config import dtypes
from finetune.models.casts import cast_once
from finetune.models.head.chunked import HeadDevice
from finetune.objectives.forward import ForwardPass
from finetune.plan.meter import Meter
from finetune.plan.micro_batch import HeaviestBatch, How, attention_at, examples_of, fill, short_model
from finetune.plan.shapes import CacheKey, shapes_of, skeleton
from finetune.plan.stand_ins import stand_ins
from finetune.plan.tables import config_and_source
from finetune.recipe import Recipe
from finetune.recipe.objective_settings import Distill
from finetune.rl.sample_teacher import predictions, recipe_beside_student


@dataclass(frozen=True)
class TeacherCosts:
    """Bytes on the device of a process."""

    kept: int  # weights and buffers
    forward: int  # in addition, at the peak of a micro-batch


def teacher_of(recipe: Recipe, batch: HeaviestBatch, how: How) -> TeacherCosts | None:
    """Returns the costs of a run's teacher; None if it has none beside the student. how: of the student. Raises
    UserError if the teacher's config is not here."""
    objective = recipe.objective
    if recipe.rollouts is None or not isinstance(objective, Distill) or objective.teacher is None:
        return None
    beside = recipe_beside_student(recipe)
    config, _ = config_and_source(beside)
    shapes = shapes_of(beside, config)
    kept = sum(weight.bytes + weight.scales for weight in shapes.weights)
    kept += shapes.buffers + shapes.buffers_of_layer * shapes.layers
    alone = How(device=how.device, capability=how.capability, small=how.small)
    settings = (objective.kept_ids, objective.temperature)
    return TeacherCosts(kept, forward_of(CacheKey(beside, config, {"precision"}, *settings, batch, alone)))


@functools.lru_cache(maxsize=64)
def forward_of(key: CacheKey) -> int:
    """Returns the bytes of a micro-batch on a teacher. key: others: k, temperature, batch, how."""
    recipe, config = key.recipe, key.config
    count, temperature, heaviest, how = key.others
    attention, meter = attention_at(recipe, config, how), Meter("cpu")
    model = assemble(
        skeleton(recipe, short_model(config), attention),
        recipe,
        torch.device("cpu"),
        has_scores=False,
        only_sums=False,
        emulates_fp8=how.device == "cpu",
        head_device=HeadDevice(how.device, how.small, recipe.model.kernels != "plain"),
    ).requires_grad_(False)
    forward = ForwardPass(attention, predictions(count, temperature, config.get_text_config().vocab_size))
    batch = collate(examples_of(recipe.objective, heaviest))
    with contextlib.ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(cast_once())
        stack.enter_context(meter)
        stack.enter_context(torch.no_grad())
        stack.enter_context(stand_ins(dtypes(recipe).compute, how.keeps_inputs_alone, how.device != "cpu"))
        fill(model)
        begin = meter.now
        meter.begin("forward")
        forward(model.eval(), batch.map_tensors(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype)))
    return meter.peaks["forward"] - begin
