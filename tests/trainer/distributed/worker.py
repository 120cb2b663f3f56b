"""Inside a launch: train the cases of a plan one after another in this process group, and write what became of each.

    accelerate launch --config_file ... tests/trainer/distributed/worker.py plan.json
    python tests/trainer/distributed/worker.py plan.json

plan.json   {"recipe": file, "out": folder, "cases": [{"name", "overrides", "break_at", "heal_at"}, ...]}
out/        <name>-<rank>.json: {"error", "message", "reductions"} and, with `break_at`, {"moved", "unchanged"}
            <name>.txt: what a person saw on rank 0

`break_at`: from that step on (1-based, at least 2), until `heal_at` if there is one, the gradient that reaches the LM
head is infinite, the loss is not. `moved`: the parameters differ between the beginnings of the step before and of that
step. `unchanged`: they are the same, bit by bit, at its beginning and at that of `heal_at`, or after the run's end.
`reductions`: how often DDP reduced a bucket of gradients.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def main(plan: dict[str, Any], run_case: Callable[..., dict[str, Any]]) -> None:
    """Run every case of a plan in this process group; what became of each goes to <name>-<rank>.json."""
    from finetune.startup import quiet_libraries

    quiet_libraries()
    from finetune.engine.start import leave_group

    for case in plan["cases"]:
        become = run_case(plan["recipe"], Path(plan["out"]), **case)
        file = Path(plan["out"]) / f"{case['name']}-{os.environ.get('RANK', '0')}.json"
        file.write_text(json.dumps(become), encoding="utf-8")
    leave_group()


def run_case(
    recipe: str, out: Path, name: str, overrides: list[str], break_at: int | None = None, heal_at: int | None = None
) -> dict[str, Any]:
    from rich.console import Console

    from finetune.errors import RunFailure, UserError
    from finetune.recipe import load_recipe
    from finetune.training.run import train
    from finetune.training.signals import StopRequest

    loaded = load_recipe(recipe, [*overrides, f"run.name={name}"])
    micro_batches = loaded.batch.rows // loaded.batch.rows_per_device // int(os.environ.get("WORLD_SIZE", "1"))
    broken = BrokenGradient(break_at, heal_at, micro_batches) if break_at else None
    become: dict[str, Any] = {"error": None, "message": None}
    reductions = Reductions()
    seen = out / f"{name}.txt" if os.environ.get("RANK", "0") == "0" else Path(os.devnull)
    with seen.open("w", encoding="utf-8") as file:
        try:
            train(loaded, recipe, StopRequest(), Console(file=file, width=200))
        except (RunFailure, UserError, ArithmeticError) as error:
            become = {"error": type(error).__name__, "message": str(error)}
    become["reductions"] = reductions.finish()
    if broken:
        become.update(broken.verdict())
    return become


class Reductions:
    """Counted by a communication hook of DDP's that does what DDP does without one."""

    def __init__(self) -> None:
        from torch.nn.modules.module import register_module_forward_pre_hook

        self.count, self.model = 0, None
        self.hook = register_module_forward_pre_hook(self._before_forward)

    def _before_forward(self, module: Any, _inputs: Any) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
        from torch.nn.parallel import DistributedDataParallel

        def counted(_state, bucket):  # torch reads annotations, and refuses what is only their text
            self.count += 1
            return allreduce_hook(module.process_group, bucket)

        if isinstance(module, DistributedDataParallel) and self.model is None:
            self.model = module
            module.register_comm_hook(None, counted)

    def finish(self) -> int:
        self.hook.remove()
        return self.count


class BrokenGradient:
    """Through torch's hooks for every module; no code of ours is replaced."""

    def __init__(self, break_at: int, heal_at: int | None, micro_batches: int):
        from torch.nn.modules.module import register_module_forward_pre_hook

        self.first = (break_at - 1) * micro_batches  # forward in which it breaks, from 0
        self.previous = self.first - micro_batches
        self.healed = (heal_at - 1) * micro_batches if heal_at else sys.maxsize
        self.forwards, self.accumulates = 0, micro_batches > 1
        self.model: Any = None
        self.snapshots: dict[int, list[Any]] = {}
        self.hook = register_module_forward_pre_hook(self._before_forward)

    def _before_forward(self, module: Any, _inputs: Any) -> None:
        from torch._subclasses.fake_tensor import FakeTensor
        from torch.nn.parallel import DistributedDataParallel

        from finetune.models.loss_model import CausalLMWithLoss

        if isinstance(module, DistributedDataParallel) and self.model is None and self.accumulates:
            self.forwards = -2  # warm-ups come before the first step
        if not isinstance(module, CausalLMWithLoss) or not module.training:
            return
        if isinstance(next(module.parameters()), FakeTensor):  # the prediction of the run, for plan.json
            return
        if self.model is None:
            self.model = module.causal_lm
            self.model.get_output_embeddings().register_full_backward_pre_hook(self._on_the_way_back)
        if self.forwards in (self.previous, self.first, self.healed):
            self.snapshots[self.forwards] = stored(self.model)
        self.forwards += 1

    def _on_the_way_back(self, _module: Any, gradients: tuple[Any, ...]) -> tuple[Any, ...] | None:
        broken = self.first < self.forwards <= self.healed  # forwards counts the one on its way back
        return tuple(None if g is None else g * float("inf") for g in gradients) if broken else None

    def verdict(self) -> dict[str, bool]:
        self.hook.remove()
        earlier, before = self.snapshots[self.previous], self.snapshots[self.first]
        after = self.snapshots.get(self.healed) or stored(self.model)
        return {"moved": not same(earlier, before), "unchanged": same(before, after)}


def stored(model: Any) -> list[Any]:
    """A copy of this rank's part of every parameter, under any backend."""
    parts = [getattr(parameter, "ds_tensor", parameter).detach() for parameter in model.parameters()]
    return [(part.to_local() if hasattr(part, "to_local") else part).clone() for part in parts]


def same(some: list[Any], others: list[Any]) -> bool:
    import torch

    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), run_case)
