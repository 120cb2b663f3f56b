"""What a save costs: ours, asynchronous and synchronous, next to accelerate's own `save_state` under the same configs.

    python benchmarks/checkpoint_cost.py                                   # ddp and fsdp2, two processes each
    python benchmarks/checkpoint_cost.py --config fsdp2 --processes 8 --scale 8      # on a machine with GPUs

Every contender trains the same model from scratch in a launch of its own: a few steps without a save, a save, as many
steps next to it, and again. The contenders take turns, all is repeated, and medians over all saves are shown; the first
save of a launch does not count.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "support"))

import parity
import tiny
from gsm8k_curves import SHAPE

CONTENDERS = ("ours, asynchronous", "ours, synchronous", "accelerate")
WARM_UP = 4  # steps; the first make optimizer state, and DDP's buckets twice
SAMPLE_S = 0.005
MB = 1e6


@dataclass(frozen=True)
class Cycle:
    """Steps without a save, a save, as many steps next to it. Moments of the machine's monotonic clock, in s."""

    quiet: list[float]  # the beginning of the first step, then the end of each
    saved: float  # the save was called
    busy: list[float]  # it returned, then the end of each step
    settled: float  # and the save is complete
    device_quiet: int  # peak of device memory, bytes; 0 without a GPU
    device_busy: int


# --- inside a launch


def measure(
    steps: Iterator[object], save: Callable[[int], None], settle: Callable[[], None], window: int, saves: int
) -> list[Cycle]:
    """window: steps before and after each save."""
    cycles = []
    moments(steps, WARM_UP)
    for n in range(saves):
        device_peak()
        quiet = moments(steps, window)
        device_quiet = device_peak()
        saved = moment()
        save(n)
        busy = moments(steps, window)
        settle()
        cycles.append(Cycle(quiet, saved, busy, moment(), device_quiet, device_peak()))
    return cycles


def moments(steps: Iterator[object], count: int) -> list[float]:
    return [moment(), *(moment() for _ in itertools.islice(steps, count))]


def moment() -> float:
    """Now, with nothing left to do on the device. All processes of a machine share this clock."""
    import torch

    if has_gpu():
        torch.cuda.synchronize()
    return time.monotonic()


def device_peak() -> int:
    """Device memory at its highest since the last call, in bytes; 0 without a GPU."""
    import torch

    if not has_gpu():
        return 0
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return peak


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def train_ours(folder: Path, recipe: Any, window: int, saves: int) -> list[Cycle]:
    """finetune's own loop and saver, without what else a run does between two steps."""
    from rich.console import Console

    from finetune.checkpoints.saver import Saver
    from finetune.data.prefetch import fed_steps
    from finetune.engine.launch import read_launch
    from finetune.engine.start import start_engine
    from finetune.training.prepare import prepare
    from finetune.training.run_dir import make_run_folder
    from finetune.training.signals import StopRequest
    from finetune.training.trainer import Trainer

    prepared = prepare(recipe, "recipe.yaml", read_launch())
    engine = start_engine(recipe, prepared.launch, prepared.base.config)
    make_run_folder(recipe.run)
    trainer = Trainer(prepared, engine, StopRequest(), Console(quiet=True))
    trainer.saver = saver = Saver(engine, recipe, folder / "saves", {})
    with fed_steps(trainer.loader, range(trainer.plan.steps), engine.device) as feed:
        steps = (trainer.train_step(step) for step in trainer.steps(feed))
        cycles = measure(steps, lambda _: saver.save(asdict(trainer.state), {}), saver.settle, window, saves)
    saver.close()
    engine.close()
    return cycles


def train_accelerate(folder: Path, recipe: Any, window: int, saves: int) -> list[Cycle]:
    """A plain loop, as accelerate's documentation has it."""
    from accelerate import Accelerator

    from finetune.engine.launch import read_launch
    from finetune.engine.start import is_rehearsal, prepare_rehearsal

    if is_rehearsal():
        prepare_rehearsal(read_launch())
    accelerator = Accelerator()
    steps = accelerate_steps(accelerator, recipe)
    return measure(steps, lambda n: accelerator.save_state(str(folder / "saves" / str(n))), lambda: None, window, saves)


def accelerate_steps(accelerator: Any, recipe: Any) -> Iterator[None]:
    """As many tokens a step as ours; yields after each."""
    import torch
    from transformers import AutoModelForCausalLM

    from finetune.models.config import model_config

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(model_config(recipe.model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.optimizer.lr, fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    while True:
        tokens = torch.randint(SHAPE["vocab_size"], (1, recipe.data.max_length), device=accelerator.device)
        accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield


def work(folder: Path, contender: str, window: int, saves: int) -> None:
    """One rank of a contender: leaves its process id for the watcher, and its cycles."""
    from finetune.engine.start import leave_group
    from finetune.features import load_recipe
    from finetune.startup import quiet_libraries

    quiet_libraries()
    (folder / f"pid-{os.getpid()}").touch()
    train = train_accelerate if contender == "accelerate" else train_ours
    asynchronous = json.dumps(contender == "ours, asynchronous")
    overrides = [f"checkpoint.asynchronous={asynchronous}", f"run.dir={folder / 'runs'}"]
    cycles = train(folder, load_recipe(folder.parent / "recipe.yaml", overrides), window, saves)
    (folder / f"rank-{os.environ.get('RANK', '0')}.json").write_text(json.dumps([asdict(c) for c in cycles]))
    leave_group()


# --- around it


class Watcher(threading.Thread):
    """Resident memory of all ranks of a launch together."""

    def __init__(self, folder: Path, processes: int):
        super().__init__(daemon=True)
        self.folder, self.processes = folder, processes
        self.over = threading.Event()
        self.samples: list[tuple[float, int]] = []  # (moment, bytes)

    def run(self) -> None:
        ranks: list[psutil.Process] = []
        while not self.over.wait(SAMPLE_S):
            try:
                if len(ranks) < self.processes:
                    ranks = [psutil.Process(int(file.name[4:])) for file in self.folder.glob("pid-*")]
                self.samples.append((time.monotonic(), sum(rank.memory_info().rss for rank in ranks)))
            except psutil.NoSuchProcess:  # the launch comes to its end
                return

    def peak(self, start: float, end: float) -> int:
        """Bytes; between two moments, and at least as they begin."""
        return max(self.at(start), *(size for when, size in self.samples if start <= when <= end), 0)

    def at(self, moment: float) -> int:
        return next(size for when, size in reversed(self.samples) if when <= moment)


def recipe(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """A row of `--tokens` tokens for each process and step."""
    return {
        "run": {"name": "run", "dir": str(folder)},
        "model": {"config": shape(options.scale), "tokenizer": str(folder / "llama")},
        "mode": "full",
        "data": {
            "train": [{"path": str(folder / "rows.jsonl"), "format": "text"}],
            "max_length": options.tokens,
            "overlong": "truncate",
        },
        "batch": {"rows": options.processes},
        "optimizer": {"lr": 1e-4},
        "train": {"max_steps": WARM_UP + 2 * options.window * (options.saves + 1), "precision": "fp32"},
        "checkpoint": {"keep": options.saves + 1},  # neither side spends time on deleting
    }


def shape(scale: float) -> dict[str, Any]:
    """A Llama of about 28 M parameters, wider by the root of `scale`."""
    heads = max(1, round(SHAPE["num_attention_heads"] * scale**0.5))
    heads += heads % 2 if heads > 1 else 0
    return {
        **SHAPE,
        "hidden_size": 64 * heads,
        "intermediate_size": 176 * heads,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 2),
        "max_position_embeddings": 4096,
    }


def prepare(options: argparse.Namespace, folder: Path) -> None:
    tiny.tokenizer().save_pretrained(folder / "llama")
    rng = random.Random(0)
    # Each longer than a row, so that every row has as many tokens.
    rows = [{"text": " ".join(str(rng.random()) for _ in range(options.tokens))} for _ in range(64)]
    tiny.write_rows(folder / "rows.jsonl", rows)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe(options, folder)), encoding="utf-8")


def launch(options: argparse.Namespace, folder: Path, config: str, contender: str) -> list[dict[str, Any]]:
    """Figures of each save that counts. Raises CalledProcessError with the output shown."""
    place = folder / "launch"
    place.mkdir()
    command = [str(Path(sys.executable).with_name("accelerate")), "launch"]
    command += ["--config_file", str(parity.ROOT / "accelerate_configs" / f"{config}.yaml")]
    command += ["--num_processes", str(options.processes), str(Path(__file__).resolve()), "--work", str(place)]
    command += ["--contender", contender, "--window", str(options.window), "--saves", str(options.saves)]
    watcher = Watcher(place, options.processes)
    watcher.start()
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    watcher.over.set()
    watcher.join()
    if done.returncode:
        print(done.stdout[-6000:], file=sys.stderr)
        raise subprocess.CalledProcessError(done.returncode, command)
    measured = figures(place, watcher)
    shutil.rmtree(place)
    return measured


def figures(place: Path, watcher: Watcher) -> list[dict[str, Any]]:
    """Of each save but the first."""
    files = sorted(place.glob("rank-*.json"), key=lambda file: int(file.stem[5:]))
    ranks = [[Cycle(**c) for c in json.loads(file.read_text(encoding="utf-8"))] for file in files]
    first, *counted = zip(*ranks, strict=True)  # cycles of all ranks, by save
    step = statistics.median(b - a for ranks in counted for a, b in itertools.pairwise(ranks[0].quiet))
    written = max(disk_bytes(folder) for folder in (place / "saves").iterdir())
    common = {"step_s": step, "first_stall_s": stall(first), "written_bytes": written}
    before = watcher.peak(first[0].quiet[0], first[0].quiet[-1]), max(cycle.device_quiet for cycle in first)
    return [{**common, **save_figures(step, watcher, before, cycles)} for cycles in counted]


def disk_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def save_figures(step: float, watcher: Watcher, before: tuple[int, int], ranks: tuple[Cycle, ...]) -> dict[str, Any]:
    """step: median without a save, in s; before: resident and device memory at their highest before any save, bytes."""
    main = ranks[0]
    return {
        "stall_s": stall(ranks),
        "cost_s": main.settled - main.saved - (len(main.busy) - 1) * step,
        "wait_s": main.settled - main.busy[-1],
        "memory_bytes": watcher.peak(main.saved, main.settled) - before[0],
        "device_bytes": max(rank.device_busy for rank in ranks) - before[1],
    }


def stall(ranks: tuple[Cycle, ...]) -> float:
    """Of the slowest rank; the others wait for it in the next step."""
    return max(rank.busy[0] - rank.saved for rank in ranks)


# --- the report


def cell(config: str, processes: int, contender: str, saves: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over all saves of a contender; the stalls one by one."""
    medians = {name: statistics.median(save[name] for save in saves) for name in saves[0]}
    stalls = [round(save["stall_s"], 4) for save in saves]
    return {"config": config, "processes": processes, "contender": contender, **medians, "stalls_s": stalls}


def show(cells: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    on_gpu = has_gpu()
    table = Table("", "", "a step", "stall", "the first", "cost in all", "written", "memory")
    if on_gpu:
        table.add_column("device memory")
    for c in cells:
        spread = f"({min(c['stalls_s']):.2f} - {max(c['stalls_s']):.2f})"
        times = [f"{c['step_s']:.2f} s", f"{c['stall_s']:.2f} s {spread}"]
        times += [f"{c[name]:.2f} s" for name in ("first_stall_s", "cost_s")]
        sizes = [f"{c['written_bytes'] / MB:.0f} MB", memory(c, "memory_bytes")]
        sizes += [memory(c, "device_bytes")] if on_gpu else []
        table.add_row(f"{c['config']} x{c['processes']}", c["contender"], *times, *sizes)
    Console(width=150).print(table)


def memory(figures: dict[str, Any], name: str) -> str:
    """Also as a multiple of what is written."""
    return f"{figures[name] / MB:.0f} MB ({figures[name] / figures['written_bytes']:.2f}x)"


def claim(cells: list[dict[str, Any]]) -> str:
    """Of one config: what the asynchronous save is worth."""
    ours, synchronous, theirs = (next(c for c in cells if c["contender"] == name) for name in CONTENDERS)
    times, their_times = (c["stall_s"] / ours["stall_s"] for c in (synchronous, theirs))
    copies = [f"{c['memory_bytes'] / c['written_bytes']:.2f}" for c in (ours, synchronous, theirs)]
    return (
        f"{ours['config']} x{ours['processes']}: an asynchronous save stops the steps for {ours['stall_s']:.2f} s, "
        f"a synchronous one {times:.1f} times as long, save_state {their_times:.1f} times. Memory above training, in "
        f"multiples of what is written: {copies[0]}, {copies[1]} and {copies[2]}."
    )


def late(cells: list[dict[str, Any]]) -> list[str]:
    """Where writing took longer than the steps next to it, which is no asynchronous save any more."""
    return [
        f"{c['config']} x{c['processes']}: the steps waited {c['wait_s']:.2f} s for the end of a save, which is in its "
        "cost: raise --window"
        for c in cells
        if c["wait_s"] > c["step_s"]
    ]


NOTES = """\
stall: the steps stand still in the call, on the slowest rank; median (from - to), and that of a launch's first save,
which counts nowhere else. cost in all: from the call until the save is complete and as many steps are done as lie
between two saves here, less what these steps take without a save. memory: resident, of all ranks together, at its
highest from the call until the save is complete, above its highest before any save. Ours checksums every file and
flushes it to the disk; save_state flushes under fsdp2 only, and checksums nothing."""
REHEARSAL = "CPU processes (rehearsal): the writing thread and the steps share the cores. Ratios count, seconds do not."


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", nargs="+", default=["ddp", "fsdp2"], help="names in accelerate_configs/")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--scale", type=float, default=1.0, help="of the model: 1 is 28 M parameters")
    parser.add_argument("--tokens", type=int, default=64, help="of each process in a step")
    parser.add_argument("--window", type=int, default=5, help="steps before and after each save: enough to write in")
    parser.add_argument("--saves", type=int, default=3, help="of each launch, after the first, which does not count")
    parser.add_argument("--repeats", type=int, default=3, help="launches of each contender")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    return parser.parse_args()


def compare(options: argparse.Namespace, folder: Path, config: str) -> list[dict[str, Any]]:
    """One cell for each contender."""
    saves_of: dict[str, list[dict[str, Any]]] = {contender: [] for contender in CONTENDERS}
    for turn, contender in itertools.product(range(options.repeats), CONTENDERS):
        print(f"{config} x{options.processes}, {turn + 1} of {options.repeats}: {contender}", file=sys.stderr)
        saves_of[contender] += launch(options, folder, config, contender)
    return [cell(config, options.processes, contender, saves) for contender, saves in saves_of.items()]


def main() -> int:
    options = arguments()
    if options.work:
        work(options.work, options.contender, options.window, options.saves + 1)
        return 0
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory(prefix="finetune-saves-") as name:
        folder = Path(name)
        os.environ["FINETUNE_CACHE"] = str(folder / "cache")
        prepare(options, folder)
        cells = [c for config in options.config for c in compare(options, folder, config)]
    show(cells)
    print(NOTES, *([] if has_gpu() else [REHEARSAL]), *late(cells), sep="\n")
    for config in options.config:
        print(claim([c for c in cells if c["config"] == config]))
    if options.json:
        parity.write_json(options.json, f"benchmarks/checkpoint_cost.py {shlex.join(sys.argv[1:])}", cells)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
