"""The first hour on a GPU: what has only ever run on CPU processes, checked and measured, the most valuable first.

    python scripts/gpu_check.py --out build/gpu_check                    # all pieces, one after the other
    python scripts/gpu_check.py --out build/gpu_check --pieces parity kernels --seconds 540
    python scripts/gpu_check.py --out build/gpu_check --report           # of what is there, nothing is run

A piece is cut into cases; each one's result is a line of OUT/results.jsonl as soon as it is there, and stays.
So a machine that is lent for minutes at a time continues where it was: a command is over after `--seconds`, and starts
no case that may take longer than what is left. A case that fails is a result, too, and is tried again after those that
have none; so is one that a missing package or device leaves out, with what is missing. OUT/report.md is written after
every case. `--device cpu --tiny` rehearses all of it.

finetune itself need not be installed, what it imports must be: the first lines say what is missing. pytest with its
plugins, torchao, bitsandbytes, deepspeed, liger-kernel and trl only for their own cases. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))
sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))

import parity
import tiny

from finetune.errors import UserError

ROOT = Path(__file__).resolve().parent.parent

Result = dict[str, Any]
PACKAGES = ("torch", "transformers", "accelerate", "peft", "datasets", "triton", "bitsandbytes", "deepspeed", "torchao")
PACKAGES += ("liger-kernel", "flash-attn", "trl")
OPTIONAL = ("bitsandbytes", "deepspeed", "ninja", "wandb")  # of pyproject's dependencies
LORA = ("mode=lora", "lora={rank: 8, alpha: 16}")
QLORA = (*LORA, "mode=qlora", "quantization={type: nf4}")
BF16 = "train.precision=bf16"
FP32_LOSS = 2e-5  # relative, GPU against CPU over 20 steps: other kernels add up in other orders
BF16_LOSS = 2.0**-7  # two roundings of bf16
# Of the runs that are timed. 160 M parameters: large enough for kernels to matter, small enough for any card.
MEDIUM = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SEVERAL = ("ddp", "fsdp2", "fsdp2_offload", "hsdp", "zero2", "zero3", "tp", "fsdp2_tp", "cp", "ulysses", "pp", "ep")


class LeftOut(Exception):
    """A case that cannot be here: what is missing."""


@dataclass
class Check:
    """Arguments, and the runs that several cases compare with."""

    out: Path
    device: str
    tiny: bool
    devices: int
    until: float = float("inf")  # by time.monotonic(): the end of this command
    trained: dict[str, Result] = field(default_factory=dict)

    def train(self, name: str, *overrides: str, cpu: bool = False, config: str = "", processes: int = 1) -> Result:
        """Trains; returns losses, the median of a step's seconds and the peak of memory. Raises LeftOut where finetune
        refuses (status 2), RuntimeError where it fails."""
        if name in self.trained:
            return self.trained[name]
        program = ["-m", "finetune", "train", self.out / "recipe.yaml", *overrides, f"run.name={name}"]
        shutil.rmtree(self.out / "runs" / name, ignore_errors=True)
        done = self.start(config, processes, program, hidden=cpu)
        (self.out / f"{name}.log").write_text(done.stdout + (done.stderr or ""), encoding="utf-8")
        if done.returncode:
            said = [line for line in (done.stdout + (done.stderr or "")).splitlines() if line.strip()]
            problem = " ".join(said[-3:])[-400:] if done.returncode == 2 else said[-1] if said else "no output"
            raise (LeftOut if done.returncode == 2 else RuntimeError)(problem)
        self.trained[name] = self.read(name)
        return self.trained[name]

    def start(self, config: str, processes: int, program: list[Any], hidden: bool = False) -> Any:
        """hidden: the GPU is, for a run on the CPU."""
        environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        environment |= {"CUDA_VISIBLE_DEVICES": ""} if hidden or self.device == "cpu" else {}
        if config:
            launch = ["-m", "accelerate.commands.launch", "--num_processes", processes]
            program = [*launch, "--config_file", ROOT / "accelerate_configs" / f"{config}.yaml", *program]
        return start_one(program, environment, self.left)

    @property
    def left(self) -> float:
        """Seconds."""
        return max(1.0, self.until - time.monotonic())

    def read(self, name: str) -> Result:
        text = (self.out / "runs" / name / "metrics.jsonl").read_text(encoding="utf-8")
        lines = [line for line in map(json.loads, text.splitlines()) if "loss" in line]
        return {
            "losses": [line["loss"] for line in lines],
            "step_s": statistics.median(line["step_s"] for line in lines[len(lines) // 2 :]),
            "tokens_per_s": statistics.median(line["tokens_per_s"] for line in lines[len(lines) // 2 :]),
            "peak_gib": max(line["memory_peak_gib"] for line in lines),
        }

    @property
    def shape(self) -> tuple[str, ...]:
        """Overrides for runs that are timed."""
        if self.tiny:
            return ("train.max_steps=3",)
        tokenizer = f"model.tokenizer={self.out / 'llama'}"
        size = ("data.max_length=4096", "train.max_steps=12", "batch={rows: 4, rows_per_device: 2}")
        return ("model.name=null", f"model.config={json.dumps(MEDIUM)}", tokenizer, *size)


def start_one(program: list[Any], environment: dict[str, str], seconds: float) -> Any:
    """Returns what a program of Python wrote. Raises RuntimeError where it takes longer; what it has started ends."""
    command = [sys.executable, *map(str, program)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths, **environment}, **pipes) as process:
        try:
            output, errors = process.communicate(timeout=None if seconds == float("inf") else seconds)
        except subprocess.TimeoutExpired:
            import psutil

            for one in (*psutil.Process(process.pid).children(recursive=True), process):
                one.kill()
            raise RuntimeError(f"not over after {seconds:.0f} s, all that this command had left") from None
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


# --- pieces: each yields (case, what gives its result)

Cases = Iterator[tuple[str, Callable[[], Result]]]


def environment(check: Check) -> Cases:
    def versions() -> Result:
        found = {name: _version(name) for name in PACKAGES}
        missing = [name for name, version in found.items() if version is None]
        return {"python": platform.python_version(), **{k: v for k, v in found.items() if v}, "missing": missing}

    yield "versions", versions
    yield "devices", lambda: devices(check)
    yield "matrix products", lambda: {"bf16 TFLOP/s": _products(check)}


def _products(check: Check) -> float:
    import products

    return products.measured_apart(check.device, "bf16")


def devices(check: Check) -> Result:
    import torch

    if check.device == "cpu":
        return {"device": "CPU", "cores": os.cpu_count()}
    about = torch.cuda.get_device_properties(0)
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None
    return {
        "device": about.name,
        "count": check.devices,
        "GiB": round(about.total_memory / 2**30, 1),
        "capability": f"{about.major}.{about.minor}",
        "CUDA": torch.version.cuda,
        "NCCL": nccl,
    }


def tests(check: Check) -> Cases:
    for file in sorted((ROOT / "tests" / "gpu").glob("test_*.py")):
        yield file.stem, lambda file=file: _pytest(check, file)


def _pytest(check: Check, file: Path) -> Result:
    _needs("pytest", "pytest_socket", "pytest_timeout")
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if check.device == "cpu" else {}
    # Not -x: how many fail is worth knowing. Warnings of versions that the tests do not know are no failures here.
    done = start_one(["-m", "pytest", "-q", "-W", "default", str(file)], hidden, check.left)
    (check.out / f"{file.stem}.log").write_text(done.stdout + (done.stderr or ""), encoding="utf-8")
    last = [line for line in (done.stdout or done.stderr or "no output").splitlines() if line.strip()][-1]
    if done.returncode:
        first = next((line for line in done.stdout.splitlines() if line.startswith("E ")), "")
        raise RuntimeError(f"{last}: {first[:300]}")
    return {"pytest": last}


def parity_with_cpu(check: Check) -> Cases:
    """One process, the same recipe on both devices."""
    for mode, settings in (("full", ()), ("lora", LORA)):
        for precision, bound in (("fp32", FP32_LOSS), ("bf16", BF16_LOSS)):
            words = (*settings, f"train.precision={precision}")
            yield f"{mode} {precision}", partial(_compare_with_cpu, check, f"{mode}-{precision}", words, bound)
    eight_bits = {
        "qlora fp8": (*QLORA, "quantization={type: fp8}", BF16),
        "qlora fp8 scaled": (*QLORA, "quantization={type: fp8, compute: scaled}", BF16),
        "full fp8": ("train.precision=fp8",),
    }
    for name, words in eight_bits.items():  # the CPU emulates products of 8 bits
        yield name, partial(_compare_with_cpu, check, name.replace(" ", "-"), words, BF16_LOSS)


def _compare_with_cpu(check: Check, name: str, words: tuple[str, ...], bound: float) -> Result:
    return _alike(check.train(name, *words), check.train(f"{name}-cpu", *words, cpu=True), bound)


def kernels(check: Check) -> Cases:
    """Every choice against the plainest one, in bf16."""
    attention = ("varlen", "flex", "flash_attention_2", "flash_attention_3", "sdpa")
    choices = {f"attention {name}": (f"model.attention={name}",) for name in attention}
    choices |= {f"cross entropy {name}": (f"model.cross_entropy={name}",) for name in ("chunked", "liger")}
    choices |= {"compile": ("train.compile=true",), "auto": ()}
    plain = ("model.attention=documents", "model.cross_entropy=plain")
    for name, settings in choices.items():

        def compared(name: str = name, settings: tuple[str, ...] = settings) -> Result:
            reference = check.train("plain", *check.shape, BF16, *plain)
            words = [word for word in plain if word.split("=")[0] not in {one.split("=")[0] for one in settings}]
            words = [] if name == "auto" else words
            mine = check.train(name.replace(" ", "-"), *check.shape, BF16, *words, *settings)
            return {**_alike(mine, reference, BF16_LOSS), "speed against plain": reference["step_s"] / mine["step_s"]}

        yield name, compared


def resume(check: Check) -> Cases:
    yield "full", partial(_resumed, check, "resume-full")
    yield "lora", partial(_resumed, check, "resume-lora", *LORA)


def _resumed(check: Check, name: str, *settings: str) -> Result:
    """Steps 5 to 8 from a checkpoint of step 4, in a run that has nothing else. To the last bit; to rounding where
    kernels add up in any order, so that two runs without a stop differ as well."""
    ends = ("train.max_steps=8", "checkpoint={every_steps: 4, keep: 2}", *settings)
    whole, runs = check.train(name, *ends), check.out / "runs"
    shutil.rmtree(runs / f"{name}-again", ignore_errors=True)
    step = Path("checkpoints", "step-00000004")
    shutil.copytree(runs / name / step, runs / f"{name}-again" / step)
    program = ["-m", "finetune", "train", check.out / "recipe.yaml", *ends, f"run.name={name}-again"]
    done = check.start("", 1, program)
    if done.returncode:
        raise RuntimeError((done.stdout + (done.stderr or ""))[-300:])
    again, expected = check.read(f"{name}-again")["losses"], whole["losses"][4:]
    if again == expected:
        return {"steps 5 to 8": "equal to the last bit"}
    if check.train(f"{name}-repeated", *ends)["losses"] == whole["losses"]:
        raise RuntimeError(f"steps 5 to 8: {again} after the resume; two runs without a stop both have {expected}")
    rounding = _alike({**whole, "losses": again}, {**whole, "losses": expected}, FP32_LOSS)
    return {"steps 5 to 8": "to rounding, as two runs without a stop", "difference": rounding["difference"]}


def savers(check: Check) -> Cases:
    """What saves memory: it trains, and gives the losses of what it replaces where it is meant to."""
    exact = {
        "paged AdamW": ("optimizer.name=paged_adamw",),
        "recomputation": ("train.activation_checkpointing=true",),
        "selective recomputation": ("train.activation_checkpointing=selective",),
        "activation offload": ("train.activation_offload=true",),
        "steps in the backward": (
            *("optimizer.in_backward=true", "optimizer.max_grad_norm=null", "batch.rows_per_device=4"),
        ),
    }
    eight_bits = {name: (f"optimizer.name={name}",) for name in ("adamw_8bit", "paged_adamw_8bit")}
    trains = {"QLoRA": QLORA, **eight_bits}
    for name, settings in exact.items():

        def compared(name: str = name, settings: tuple[str, ...] = settings) -> Result:
            like = [word for word in settings if "rows_per_device" in word or "max_grad_norm" in word]
            usual = check.train(f"usual{len(like)}", *check.shape, BF16, *like)
            mine = check.train(name.replace(" ", "-"), *check.shape, BF16, *settings)
            return {**_alike(mine, usual, BF16_LOSS), "GiB less": usual["peak_gib"] - mine["peak_gib"]}

        yield name, compared
    for name, settings in trains.items():
        yield name, lambda name=name, settings=settings: _falls(check.train(name.replace(" ", "-"), BF16, *settings))
    for config in ("fsdp2", "fsdp2_offload", "zero2_offload", "zero3_offload"):

        def alone(config: str = config) -> Result:
            _needs(*(["deepspeed"] if "zero" in config else []))
            return _alike(check.train(f"one-{config}", config=config), check.train("full-fp32"), FP32_LOSS)

        yield f"{config}, one process", alone


def several(check: Check) -> Cases:
    """The same losses on several devices as on one: what NCCL does."""
    for config in SEVERAL:
        for mode, settings in (("full", ()), ("lora", LORA)):
            processes = 4 if config in ("hsdp", "fsdp2_tp") else 2
            yield (
                f"{config} x {processes}, {mode}",
                partial(_compare_with_one, check, config, processes, mode, settings),
            )


def _compare_with_one(check: Check, config: str, processes: int, mode: str, settings: tuple[str, ...]) -> Result:
    if check.devices < processes:
        raise LeftOut(f"{processes} devices, here {'is' if check.devices == 1 else 'are'} {check.devices}")
    _needs(*(["deepspeed"] if "zero" in config else []))
    experts = config == "ep"
    if experts:
        settings = (*settings, f"model.name={check.out / 'mixtral'}", *([parity.ATTENTION] if settings else []))
    one = check.train(f"one-{mode}{'-experts' * experts}", *settings)
    several = check.train(f"{config}-{processes}-{mode}", *settings, config=config, processes=processes)
    return _alike(several, one, FP32_LOSS)


def memory(check: Check) -> Cases:
    """What `plan` predicts beside what a run measured; on a CPU of the state alone."""
    choices = {
        "full": (),
        "full, recomputed": ("train.activation_checkpointing=true",),
        "full, one row at once": ("batch.rows_per_device=1",),
        "full, AdamW in 8 bits": ("optimizer.name=adamw_8bit",),
    }
    for name, settings in choices.items():
        yield name, partial(_trained_and_predicted, check, name.replace(", ", "-").replace(" ", "-"), settings)


def _trained_and_predicted(check: Check, name: str, settings: tuple[str, ...]) -> Result:
    check.train(f"memory-{name}", *check.shape, BF16, *settings)
    return _predicted(check.out / "runs" / f"memory-{name}")


def _predicted(run: Path) -> Result:
    """Returns GiB of the formulas beside those that were measured, by what."""
    from finetune.plan.comparison import compare_run

    memory = [one for one in compare_run(run) if one.unit == "GiB"]
    return {one.what: f"{one.measured:.3f} GiB, predicted {one.predicted:.3f} ({one.error:+.1%})" for one in memory}


def benchmark(check: Check) -> Cases:
    """benchmarks/gpu.py, beside the bare loop and TRL; memory of ours beside the prediction."""
    for cell in ("8b-lora", "1b-full", "8b-qlora", "8b-full-8bit"):
        for who in ("ours", "trl", "bare"):
            yield f"{cell}, {who}", lambda cell=cell, who=who: _benchmark(check, cell, who)


def _benchmark(check: Check, cell: str, who: str) -> Result:
    _needs(*(["bitsandbytes"] if cell in ("8b-qlora", "8b-full-8bit") else []))
    small = ["--shape", "tiny", "--steps", "2"] if check.tiny else []
    where = ["--device", check.device, "--json", check.out / "benchmark.json", "--folder", check.out / "benchmark"]
    program = [ROOT / "benchmarks" / "gpu.py", "--only", cell, "--contenders", who, *small, *where]
    done = start_one([*program, "--budget-s", check.left - 10], {}, check.left)
    file = check.out / "benchmark.json"
    cells = json.loads(file.read_text(encoding="utf-8"))["cells"] if file.exists() else []
    for one in cells:
        if (one["cell"], one["contender"]) == (cell, who):
            if "failed" in one:
                raise RuntimeError(one["failed"])
            result = {"tokens/s": one["tokens_per_s"], "peak GiB": (one["peak_device"] or one["peak_rss"]) / 2**30}
            plans = sorted(
                (check.out / "benchmark").glob("*/runs/speed/plan.json"), key=lambda file: file.stat().st_mtime
            )
            return {**result, **(_predicted(plans[-1].parent) if who == "ours" else {})}
    raise LeftOut(" ".join((done.stderr or done.stdout).strip().splitlines()[-1:])[-300:])


PIECES: dict[str, Callable[[Check], Cases]] = {
    "environment": environment,
    "parity": parity_with_cpu,
    "tests": tests,
    "kernels": kernels,
    "several": several,
    "resume": resume,
    "savers": savers,
    "memory": memory,
    "benchmark": benchmark,
}
# Seconds that a case may take, an estimate: none has run on a GPU. Of the first of an 8B model most is making weights.
LONGEST = {"tests": 180, "resume": 150, "benchmark": 400}
USUALLY = 120


# --- comparing


def _alike(mine: Result, other: Result, bound: float) -> Result:
    """Raises RuntimeError where a step's loss differs by more than `bound`, relative."""
    if len(mine["losses"]) != len(other["losses"]):
        raise RuntimeError(f"{len(mine['losses'])} steps against {len(other['losses'])}")
    pairs = zip(mine["losses"], other["losses"], strict=True)
    difference = max(abs(a - b) / abs(b) for a, b in pairs)
    if not difference <= bound:
        raise RuntimeError(f"losses differ by {difference:.1e}, relative; {bound:.1e} is rounding")
    return {"difference": difference, "step_s": mine["step_s"], "peak GiB": mine["peak_gib"]}


def _falls(mine: Result) -> Result:
    first, last = mine["losses"][0], mine["losses"][-1]
    if not last < first:
        raise RuntimeError(f"the loss went from {first:.4f} to {last:.4f}")
    return {"first loss": first, "last loss": last, "step_s": mine["step_s"], "peak GiB": mine["peak_gib"]}


def missing_requirements() -> list[str]:
    """Returns what a run needs and this Python does not have, or in another version, as pyproject.toml asks for it."""
    from packaging.requirements import Requirement

    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    listed = text.partition("\ndependencies = [")[2].partition("\n]")[0]
    wanted = [Requirement(line) for line in re.findall(r'"(.+)",$', listed, re.MULTILINE)]
    return [
        f"{one.name}{one.specifier}"
        for one in wanted
        if one.name not in OPTIONAL and not one.specifier.contains(_version(one.name) or "0.dev0", prereleases=True)
    ]


def _needs(*modules: str) -> None:
    if missing := [name for name in modules if importlib.util.find_spec(name) is None]:
        raise LeftOut(f"not installed: {', '.join(missing)}")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


# --- running


def main() -> None:
    if missing := missing_requirements():
        names = " ".join(missing)
        raise SystemExit(f"not installed, or in another version: {names} (docs/proofs/gpu.md has the commands)")
    arguments = parse_arguments()
    arguments.out.mkdir(parents=True, exist_ok=True)
    results = read_results(arguments.out)
    if not arguments.report:
        results = run(arguments, results)
    write_report(arguments, results)
    failed = [f"{one['piece']}: {one['case']}" for one in results if one["status"] == "failed"]
    print(f"{len(results)} results, {len(failed)} failed: {arguments.out / 'report.md'}")
    raise SystemExit(1 if failed else 0)


def run(arguments: argparse.Namespace, results: list[Result]) -> list[Result]:
    """Runs what has no result yet, then what has failed before."""
    import torch

    devices = torch.cuda.device_count() if arguments.device == "cuda" else arguments.processes
    check = Check(arguments.out, arguments.device, arguments.tiny, devices, time.monotonic() + arguments.seconds)
    prepare(check)
    statuses = {(one["piece"], one["case"]): one["status"] for one in results}
    waiting = [
        (statuses.get((piece, case)) is not None, piece, case, measure)
        for piece in arguments.pieces
        for case, measure in PIECES[piece](check)
        if statuses.get((piece, case)) in (None, "failed") and (not arguments.cases or case in arguments.cases)
    ]
    started = 0
    for _, piece, case, measure in sorted(waiting, key=lambda one: one[0]):
        if started and check.left < LONGEST.get(piece, USUALLY):
            continue
        started += 1
        result = attempt(piece, case, measure)
        with open(arguments.out / "results.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
        results = read_results(arguments.out)
        write_report(arguments, results)
        print(f"{piece}, {case}: {result['status']} {result.get('why', '')}", flush=True)
    if started < len(waiting):
        print(f"no time left for {len(waiting) - started} cases; the same command continues from here")
    return results


_PROBLEMS = (RuntimeError, OSError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError, ImportError)
_PROBLEMS += (subprocess.SubprocessError,)


def attempt(piece: str, case: str, measure: Callable[[], Result]) -> Result:
    """Returns a case's result. Whatever goes wrong in one must not keep the others from running."""
    began, status, values = time.monotonic(), "ok", {}
    try:
        values = measure()
    except (LeftOut, UserError) as why:
        status, values = "left out", {"why": str(why)}
    except _PROBLEMS as error:
        status, values = "failed", {"why": f"{type(error).__name__}: {error}"[:600]}
    return {"piece": piece, "case": case, "status": status, "seconds": round(time.monotonic() - began, 1), **values}


def prepare(check: Check) -> None:
    """Makes models, rows and the recipe, once."""
    if (check.out / "recipe.yaml").exists():
        return
    import yaml

    for name in ("llama", "mixtral"):
        tiny.save_model(check.out, name)
    tiny.write_rows(check.out / "rows.jsonl", tiny.conversations(300 if check.tiny else 20_000))
    recipe = parity.base_recipe(check.out)
    del recipe["data"]["eval"], recipe["evaluate"]
    recipe["batch"] = {"rows": 4, "rows_per_device": 1}
    recipe["train"]["max_steps"] = 3 if check.tiny else 20
    (check.out / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")


def read_results(out: Path) -> list[Result]:
    """Returns the last result of each case. A line that was cut off is none."""
    latest: dict[tuple[str, str], Result] = {}
    file = out / "results.jsonl"
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        try:
            result = json.loads(line)
        except ValueError:
            continue
        latest[result["piece"], result["case"]] = result
    return list(latest.values())


def write_report(arguments: argparse.Namespace, results: list[Result]) -> None:
    about = next((one for one in results if one["case"] == "devices"), {})
    device = about.get("device", arguments.device)
    lines = [f"# GPU check: {device}", ""]
    if arguments.device == "cpu":
        lines += ["A rehearsal on the CPU: no figure here is a GPU's.", ""]
    for piece in PIECES:
        mine = [one for one in results if one["piece"] == piece]
        if not mine:
            continue
        lines += [f"## {piece}", "", "| case | result | figures | s |", "| --- | --- | --- | --- |"]
        lines += [f"| {one['case']} | {one['status']} | {_figures(one)} | {one['seconds']} |" for one in mine]
        lines.append("")
    for path in (arguments.out / "report.md", *([arguments.to] if arguments.to else [])):
        path.write_text("\n".join(lines), encoding="utf-8")


def _figures(result: Result) -> str:
    values = {k: v for k, v in result.items() if k not in ("piece", "case", "status", "seconds")}
    shown = (f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in values.items())
    return ", ".join(shown).replace("|", "/").replace("\n", " ")


def parse_arguments() -> argparse.Namespace:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of results, logs and runs")
    parser.add_argument("--pieces", nargs="+", choices=list(PIECES), default=list(PIECES))
    parser.add_argument("--cases", nargs="+", default=[], help="only these, by name")
    parser.add_argument("--seconds", type=float, default=570.0, help="after which the command is over")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes everywhere: a rehearsal")
    parser.add_argument("--processes", type=int, default=1, help="that a rehearsal on the CPU may start")
    parser.add_argument("--report", action="store_true", help="write the report of what is there, and run nothing")
    parser.add_argument("--to", type=Path, help="a second place for the report, such as benchmarks/results/NAME.md")
    arguments = parser.parse_args()
    arguments.out = arguments.out.resolve()
    return arguments


if __name__ == "__main__":
    main()
