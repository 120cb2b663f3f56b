"""Pipeline schedules of torch.distributed.pipelining, with stages that report when they compute."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble

from finetune.engine.parallelism import Schedule
from finetune.engine.pipeline_layout import SINGLE_STAGE_SCHEDULES

_CLASSES: dict[Schedule, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
}


class TimedStage(PipelineStage):
    """Reports when it computes backwards; forwards are reported by the stage's own module."""

    computing: Callable[[], AbstractContextManager[None]]

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self.computing():
            return super().backward_one_chunk(*args, **kwargs)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self.computing():
            return super().backward_weight_one_chunk(*args, **kwargs)


def make_schedule(schedule: Schedule, stages: list[PipelineStage], micro_batches: int) -> Any:
    """Returns the schedule of one step. The last stage returns normalised losses: nothing is scaled here."""
    own = stages[0] if schedule in SINGLE_STAGE_SCHEDULES else stages
    return _CLASSES[schedule](own, micro_batches, loss_fn=lambda loss, _target: loss, scale_grads=False)


def make_stage(
    module: torch.nn.Module,
    index: int,
    count: int,
    group: Any,
    hidden: Tensor,  # (1, T, D) on `meta`: the output of a stage
    device: torch.device,
    computing: Callable[[], AbstractContextManager[None]],
) -> PipelineStage:
    """All shapes are given, so torch does not infer them by a trial forward."""
    number, loss = torch.empty(1, dtype=torch.int64, device="meta"), torch.empty((), device="meta", requires_grad=True)
    stage = TimedStage(
        module,
        index,
        count,
        device,
        input_args=number if index == 0 else hidden,
        output_args=loss if index == count - 1 else hidden,
        group=group,
    )
    stage.computing = computing
    return stage
