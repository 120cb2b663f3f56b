"""In which order the stages of a pipeline run the micro-batches of a step, and what that costs.

gpipe         every forward, then every backward            Huang et al. 2018, https://arxiv.org/abs/1811.06965
1f1b          a backward as soon as there is one to do      Narayanan et al. 2021, https://arxiv.org/abs/2104.04473
interleaved   the same, with several stages on each rank    the same, section 2.2
zero_bubble   gradients of weights where a rank would wait  Qi et al. 2023, https://arxiv.org/abs/2401.10241 (ZB-H1)
"""

from __future__ import annotations

from finetune.engine.parallelism import Schedule

ONE_STAGE = ("gpipe", "1f1b")  # a rank


def bubble_share(schedule: Schedule, ranks: int, stages_per_rank: int, micro_batches: int) -> float:
    """What share of a step a rank stands still, all stages being alike and backwards twice as long as forwards.

    With p ranks, m micro-batches and v stages on a rank, in the time of one stage's forward and backward of one
    micro-batch: it works for v m, and waits for p - 1 (Narayanan et al. 2021, section 2.2). Under ZB-H1 it waits for a
    third of that: forward, gradient of the input and gradient of the weights take a third each, and the wait is for
    the first two less the third (Qi et al. 2023, table 2).
    """
    waits = (ranks - 1) / (3 if schedule == "zero_bubble" else 1)
    return waits / (stages_per_rank * micro_batches + waits)


def fitting(schedule: Schedule, ranks: int, micro_batches: int) -> int:
    """The fewest micro-batches, from `micro_batches` on, that a schedule takes.

    1F1B wants one for each stage. Those with several stages on a rank go round in turns of about `ranks` micro-batches
    each, and all turns have equally many.

    >>> [fitting("1f1b", 4, n) for n in (1, 4, 5)], [fitting("interleaved", 4, n) for n in (3, 7, 9)]
    ([4, 4, 5], [3, 7, 10])
    """
    if schedule == "gpipe":
        return micro_batches
    if schedule == "1f1b":
        return max(micro_batches, ranks)
    while micro_batches % max(1, micro_batches // ranks):
        micro_batches += 1
    return micro_batches
