"""Inside a launch: train cases one after another, and say what each rank held and how it cut its rows into forwards.

    accelerate launch --config_file ... tests/trainer/distributed/rank_memory_worker.py plan.json
    python tests/trainer/distributed/rank_memory_worker.py plan.json

plan.json   {"recipe": file, "out": folder, "cases": [{"name", "overrides", "fits"}, ...]}
out/        <name>-<rank>.json: {"rows", "micro_batches", "trained", "frozen", "live", "bucket", "waits"}

`fits`: rows that the device holds in one forward, for `batch.rows_per_device: auto`. `trained`: parameters of the whole
model; `frozen`: bytes by type of what a rank keeps of frozen weights; `live`: bytes of all tensors that it has;
`bucket`: gradients that DeepSpeed reduces at a time; `waits`: seconds that each process group made before training
waits.
"""

from __future__ import annotations

import gc
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from worker import main


def run_case(recipe_file: str, out: Path, name: str, overrides: list[str], fits: int | None) -> dict[str, Any]:
    from rich.console import Console
    from trainers import prepared_run, started_engine

    from finetune.training import parts
    from finetune.training.signals import StopRequest
    from finetune.training.trainer import Trainer

    prepared = prepared_run(recipe_file, [*overrides, f"run.name={name}", f"run.dir={out / 'runs'}"])
    engine = started_engine(prepared)
    if fits is not None:
        parts.memory_of = lambda _engine: SmallDevice(fits, prepared.recipe.data.max_length)
    trainer = Trainer(prepared, engine, StopRequest(), Console(quiet=True))
    waits = group_timeouts()
    trainer.run()
    plan, zero = trainer.plan, getattr(engine, "zero", None)
    found = {
        "rows": plan.rows_per_device,
        "micro_batches": plan.micro_batches,
        "trained": plan.trainable_parameters,
        "frozen": frozen_bytes(engine.unwrapped),
        "live": live_bytes(),
        "bucket": zero and zero.reduce_bucket_size,
        "waits": waits,
    }
    engine.close()
    return found


class SmallDevice:
    """Holds `fits` rows of `tokens` in one forward and backward. Counted in tokens, not measured: a tiny model's
    activations are lost in the memory of a process."""

    TOKEN = 10**9  # bytes; so many that the optimizer's do not count

    def __init__(self, fits: int, tokens: int):
        self.name = f"a device for {fits} rows"
        self.limit = int((fits + 0.5) * tokens * self.TOKEN)

    def release(self) -> None:
        pass

    def peak(self, work: Callable[[], None]) -> int:
        from torch.nn import Embedding
        from torch.nn.modules.module import register_module_forward_pre_hook

        tokens: list[int] = []

        def count(module: Any, inputs: tuple[Any, ...]) -> None:
            if isinstance(module, Embedding):
                tokens.append(inputs[0].numel())

        hook = register_module_forward_pre_hook(count)
        work()
        hook.remove()
        return max(tokens, default=0) * self.TOKEN


def frozen_bytes(model: Any) -> dict[str, int]:
    found: Counter[str] = Counter()
    for parameter in model.parameters():
        if not parameter.requires_grad:
            part = getattr(parameter, "ds_tensor", parameter)  # ZeRO-3's share
            part = part.to_local() if hasattr(part, "to_local") else part
            found[str(part.dtype)] += part.numel() * part.element_size()
    return dict(found)


def group_timeouts() -> list[float]:
    import torch
    from torch.distributed import distributed_c10d

    backends = [group._get_backend(torch.device("cpu")) for group in distributed_c10d._world.pg_map]
    return [backend.options._timeout.total_seconds() for backend in backends]


def live_bytes() -> int:
    import torch

    gc.collect()
    storages = [
        found.untyped_storage()
        for found in gc.get_objects()
        if type(found) in (torch.Tensor, torch.nn.Parameter) and not found.is_meta
    ]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), run_case)
