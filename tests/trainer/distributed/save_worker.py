"""Inside a launch: load models and save them untrained, one after another in this process group.

    accelerate launch --config_file ... tests/trainer/distributed/save_worker.py plan.json
    python tests/trainer/distributed/save_worker.py plan.json

plan.json   {"recipe": file, "out": folder, "cases": [{"name", "overrides", "folder", "shard_bytes", "wrong"}, ...]}
out/        <folder>/ the result, where it could be saved; <name>-<rank>.json: {"error", "message"}

The case "generates" also has "generated": what `greedy` returns, and how many gathers it takes.
`wrong`: "nan", a value that the last rank holds is not a number; "full", no file of rank 0 can outgrow FILE_LIMIT.
"""

from __future__ import annotations

import contextlib
import json
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from worker import main

FILE_LIMIT = 200_000


def run_case(
    recipe_file: str, out: Path, name: str, overrides: list[str], folder: str, shard_bytes: int, wrong: str | None
) -> dict[str, Any]:
    from finetune.checkpoints.result import save_result
    from finetune.engine.compatibility import check_launch
    from finetune.engine.launch import read_launch
    from finetune.engine.start import start_engine
    from finetune.errors import RunFailure
    from finetune.models.base_config import dtypes
    from finetune.models.base_model import Base
    from finetune.recipe import load_recipe

    recipe, launch = load_recipe(recipe_file, [*overrides, f"run.name={name}"]), read_launch()
    micro_batches = check_launch(recipe, recipe_file, launch)
    base = Base.of(recipe)
    engine = start_engine(recipe, launch, base.config)
    wrap(engine, recipe, base, micro_batches)
    if wrong == "nan" and engine.rank == engine.world_size - 1:
        break_a_value(engine.unwrapped)
    generated = generate(engine) if name == "generates" else None
    arguments = base.tokenizer, {2}, recipe.mode != "full", dtypes(recipe).frozen, f"# {name}"
    try:
        with limited_files() if wrong == "full" and engine.is_main else same_files():
            save_result(engine, *arguments, out / folder, shard_bytes)
    except RunFailure as error:
        return {"error": "RunFailure", "message": str(error)}
    finally:
        engine.close()
    return {"error": None, "message": None, **({"generated": generated} if generated else {})}


def wrap(engine: Any, recipe: Any, base: Any, micro_batches: int) -> None:
    from finetune.models.attention import attention_for
    from finetune.models.loss_model import CausalLMWithLoss
    from finetune.models.parameter_roles import parameter_roles
    from finetune.models.weights import load_model
    from finetune.training.optim import build_optimizers

    with engine.loading(recipe):
        attention = attention_for(recipe, base.config, engine.device.type)
        model = load_model(recipe, base, attention, engine.placement(recipe))
    build = partial(build_optimizers, recipe.optimizer, parameter_roles(model))
    engine.wrap(CausalLMWithLoss(model), build, micro_batches)


def generate(engine: Any) -> list[dict[str, Any]]:
    """Generates with the layers freed after each forward, and with those that `generating` keeps."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from finetune.training.evaluation import greedy

    class Gathers(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += "allgather_base" in func.name()
            return func(*args, **(kwargs or {}))

    for parameter in engine.unwrapped.parameters():
        parameter.ds_persist = False  # as of a larger model, whose weights DeepSpeed frees
    found = []
    for around in (contextlib.nullcontext, engine.generating, contextlib.nullcontext):
        with engine.evaluating(), around(), Gathers() as gathers:
            tokens = greedy(engine, [[3, 4, 5]], set(), 0, 5)
        found.append({"tokens": tokens, "gathers": gathers.count})
    assert torch.is_grad_enabled()
    return found


def break_a_value(model: Any) -> None:
    """In the last parameter that trains, in the part of it that this rank holds."""
    import torch

    parameter = [found for found in model.parameters() if found.requires_grad][-1]
    part = getattr(parameter, "ds_tensor", parameter).detach()
    part = part.to_local() if hasattr(part, "to_local") else part
    with torch.no_grad():
        part.view(-1)[0] = float("nan")


@contextmanager
def limited_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_LIMIT, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def same_files() -> Iterator[None]:
    yield


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), run_case)
