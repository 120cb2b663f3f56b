"""Operators that torch starts for one decoder layer, ours beside plain transformers and peft: on one process, DDP and
FSDP2, for full training, LoRA and QLoRA.

    python benchmarks/operators.py                              # the table; no GPU, a minute
    python benchmarks/operators.py --only fsdp2 lora --list     # which operators, and how many of each

A layer's are the difference between models of two layers and of one: what a step has once cancels out. They are those
that torch's profiler counts, calls of one by another included, in one micro-batch of a step, casts of its weights and
the reduction of its gradients included.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "tests" / "support")]

ENGINES = {"single": 1, "ddp": 2, "fsdp2": 2}  # processes of each
MODES = ("full", "lora", "qlora")
LAYERS = (1, 2)  # the first layer's input has no gradient with adapters, the other's has
TOKENS = 16

MicroBatch = tuple[Callable[[], Any], Callable[[Any], None]]  # forward, and the backward of what it returns
Counts = dict[str, Counter[str]]  # by `forward` and `backward`


def main() -> None:
    arguments = read_arguments()
    if arguments.measure:
        for mode in arguments.only or MODES:
            counts = {who: of_layer(arguments.measure / mode, mode, who) for who in ("ours", "plain")}
            if os.environ.get("RANK", "0") == "0":
                (arguments.measure / f"{mode}.json").write_text(json.dumps(counts), encoding="utf-8")
        return
    wanted = arguments.only or [*ENGINES, *MODES]
    engines, modes = ([one for one in names if one in wanted] or list(names) for names in (ENGINES, MODES))
    with tempfile.TemporaryDirectory() as folder:
        results = {engine: measured(engine, modes, Path(folder, engine)) for engine in engines}
    show(results, arguments.list)


def measured(engine: str, modes: list[str], folder: Path) -> dict[str, Any]:
    """Returns, by mode, the counts of a launch of this program."""
    make_work(folder, modes)
    command = [sys.executable]
    if ENGINES[engine] > 1:
        command += ["-m", "accelerate.commands.launch", "--config_file", f"{ROOT}/accelerate_configs/{engine}.yaml"]
        command += ["--num_processes", str(ENGINES[engine])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([*command, __file__, "--measure", str(folder), "--only", *modes], env=environment, check=True)
    return read_counts(folder, modes)


def make_work(folder: Path, modes: list[str]) -> None:
    """Write the models, rows and recipes of all modes."""
    from workload import (
        Work,
        llama,
        random_documents,
        save_padded_tokenizer,
        save_weights,
        write_recipe,
        write_rows,
        write_steps,
    )

    for mode in modes:
        for layers in LAYERS:
            of_work = folder / mode / str(layers)
            shape = llama(64, layers, 4, 2, 128, 512, tied=True)
            work = Work(shape, mode=mode, precision="bf16", row_tokens=TOKENS, rows_per_step=2, steps=1, threads=1)  # pyright: ignore[reportArgumentType]
            save_weights(shape, of_work / "model")
            save_padded_tokenizer(of_work / "model", 512)
            write_rows(of_work / "rows.jsonl", random_documents(64, 512, TOKENS))
            write_recipe(of_work, work, "tokens")
            work.write(of_work)
            write_steps(of_work, work)


def read_counts(folder: Path, modes: list[str]) -> dict[str, Any]:
    return {mode: json.loads((folder / f"{mode}.json").read_text(encoding="utf-8")) for mode in modes}


def of_layer(folder: Path, mode: str, who: str) -> Counts:
    """Returns the operators of one layer. who: `ours` or `plain`."""
    few, many = (counted((our if who == "ours" else plain)(folder / str(layers), mode)) for layers in LAYERS)
    found = {}
    for phase in few:
        counts = {name: many[phase][name] - few[phase][name] for name in {**few[phase], **many[phase]}}
        found[phase] = Counter({name: count for name, count in counts.items() if count})
    return found


def counted(micro_batch: MicroBatch) -> Counts:
    """Runs the micro-batch twice and counts the second time."""
    forward, backward = micro_batch
    backward(forward())
    found = {}
    with traced() as operators:
        loss = forward()
    found["forward"] = operators()
    with traced() as operators:
        backward(loss)
    found["backward"] = operators()
    return found


@contextlib.contextmanager
def traced() -> Iterator[Callable[[], Counter[str]]]:
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        yield lambda: Counter(
            {
                event.key: event.count
                for event in profile.key_averages()
                if event.key.startswith(("aten::", "finetune::", "bitsandbytes::", "fsdp::"))
            }
        )


def our(folder: Path, mode: str) -> MicroBatch:
    import trainers

    from finetune.models.casts import cast_once

    prepared = trainers.prepared_run(
        str(folder / "recipe.yaml"), [f"batch.rows_per_device={2 // int(os.environ.get('WORLD_SIZE', '1'))}"]
    )
    trainer = trainers.ready_trainer(prepared, trainers.started_engine(prepared))
    engine, objective, step = trainer.engine, trainer.forward.objective, trainer.loader.step(0)
    (batch,) = step.batches

    def forward() -> Any:
        with cast_once(), engine.micro_batch(last=True):
            return objective.loss(objective.terms(trainer.forward(engine.model, batch), batch), step.counts)

    def backward(loss: Any) -> None:
        engine.backward(loss)
        engine.drop_gradients()

    return forward, backward


def plain(folder: Path, mode: str) -> MicroBatch:
    """The bare loop's model, in torch's own wrapper of the engine."""
    import torch
    from contenders import bare_model, flat_batch
    from torch.nn.functional import cross_entropy
    from workload import StepRows, Work, read_steps

    work = Work.read(folder)
    model, attention = bare_model(folder, work, torch.device("cpu"))
    inner, context = wrapped(model, mode)
    (of_step,) = read_steps(folder)
    mine = slice(int(os.environ.get("RANK", "0")), None, int(os.environ.get("WORLD_SIZE", "1")))
    rows = StepRows(of_step.ids[mine], of_step.labels[mine])  # as many documents as ours has on a rank
    input_ids, position_ids, selected, targets = flat_batch(rows, torch.device("cpu"))
    extra = attention.forward_arguments(tuple(map(len, rows.ids)))

    def forward() -> Any:
        with context():
            logits = inner(input_ids=input_ids, position_ids=position_ids, use_cache=False, **extra).logits
        return cross_entropy(logits[0, selected].float(), targets, reduction="sum") / len(targets)

    def backward(loss: Any) -> None:
        loss.backward()
        model.zero_grad()

    return forward, backward


def wrapped(model: Any, mode: str) -> tuple[Any, Callable[[], Any]]:
    """Returns the model as `accelerate`'s user would wrap it, and the context of its forwards."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from finetune.models.packed_linear import make_plain

    def autocast() -> Any:
        return torch.autocast("cpu", torch.bfloat16)

    if not dist.is_initialized():
        return model, autocast
    if os.environ.get("ACCELERATE_USE_FSDP") != "true":
        return DistributedDataParallel(model), autocast
    if mode == "qlora":
        make_plain(model)  # bitsandbytes' parameters cannot be sharded
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in [module for module in model.modules() if type(module).__name__ == "LlamaDecoderLayer"]:
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy), contextlib.nullcontext


def show(results: dict[str, dict[str, Any]], lists: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=120)
    table = Table(title="Operators of a decoder layer: ours / plain transformers and peft")
    for column in ("engine", "mode", "forward", "backward", "both"):
        table.add_column(column)
    for engine, modes in results.items():
        for mode, counts in modes.items():
            sums = {who: [sum(counts[who][phase].values()) for phase in ("forward", "backward")] for who in counts}
            pairs = zip([*sums["ours"], sum(sums["ours"])], [*sums["plain"], sum(sums["plain"])], strict=True)
            table.add_row(engine, mode, *(f"{ours:,} / {bare:,}" for ours, bare in pairs))
    console.print(table)
    for engine, modes in results.items() if lists else ():
        for mode, counts in modes.items():
            listed = Table(title=f"{engine} {mode}: ours / plain")
            for column in ("operator", "forward", "backward"):
                listed.add_column(column)
            ours, bare = counts["ours"], counts["plain"]
            for name in sorted({name for one in (ours, bare) for phase in one.values() for name in phase}):
                cells = [f"{ours[p].get(name, 0)} / {bare[p].get(name, 0)}" for p in ("forward", "backward")]
                listed.add_row(name, *cells)
            console.print(listed)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*ENGINES, *MODES], help="engines and modes; default: all")
    parser.add_argument("--list", action="store_true", help="also list the operators of each")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)  # as a rank of a launch: the folder of work
    return parser.parse_args()


if __name__ == "__main__":
    main()
