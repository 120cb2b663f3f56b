"""The cases of `doctor --gpu`: short runs, and what they are compared with."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
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

from finetune.errors import UserError

Result = dict[str, Any]
Cases = Iterator[tuple[str, Callable[[], Result]]]  # name, and what measures
PACKAGES = ("torch", "transformers", "accelerate", "peft", "datasets", "triton", "bitsandbytes", "deepspeed", "torchao")
PACKAGES += ("liger-kernel", "flash-attn", "trl")
LORA = ("mode=lora", "lora={rank: 8, alpha: 16}")
QLORA = (*LORA, "mode=qlora", "quantization={type: nf4}")
BF16 = "train.precision=bf16"
FP32_LOSS = 2e-5  # relative, GPU against CPU over 20 steps: other kernels sum in another order
BF16_LOSS = 2.0**-7  # two roundings of bf16
TINY: Result = {
    "model_type": "llama",
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# 160 M parameters, for runs that are timed: large enough for kernels to matter, small enough for any card.
MEDIUM = TINY | {"vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8}
MEDIUM |= {"num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 4096}
SEVERAL = ("ddp", "fsdp2", "fsdp2_offload", "hsdp", "zero2", "zero3", "tp", "fsdp2_tp", "cp", "ulysses", "pp", "ep")


class LeftOut(UserError):
    """A case that cannot run here; the message says what is missing."""


@dataclass
class GpuCheck:
    """Runs `finetune train` and keeps what runs gave, because several cases compare with the same run."""

    out: Path
    rehearse: int = 0  # CPU processes of a rehearsal with tiny shapes; 0: a check of GPUs
    until: float = float("inf")  # by time.monotonic()
    case_until: float = float("inf")  # the same of the case that is measured: one that hangs costs no other
    again: bool = False  # the case has failed: its own runs, but for references, are not those of then
    trained: dict[str, Result] = field(default_factory=dict)

    @property
    def seconds_left(self) -> float:
        """Returns the seconds until the command, or the case, has to end."""
        return max(1.0, min(self.until, self.case_until) - time.monotonic())

    @property
    def num_devices(self) -> int:
        import torch

        return self.rehearse or torch.cuda.device_count()

    @property
    def shape(self) -> tuple[str, ...]:
        """Overrides for runs that are timed."""
        if self.rehearse:
            return ("train.max_steps=3",)
        tokenizer = f"model.tokenizer={self.out / 'llama'}"
        size = ("data.max_length=4096", "train.max_steps=12", "batch={rows: 4, rows_per_device: 2}")
        size += ("optimizer.lr=1e-4",)  # at 1e-3 the loss jumps, and rounding grows to 1e-2 in ten steps
        return ("model.name=null", f"model.config={json.dumps(MEDIUM)}", tokenizer, *size)

    def train(
        self,
        name: str,
        *overrides: str,
        cpu: bool = False,
        config: str = "",
        processes: int = 1,
        recipe: Path | None = None,
    ) -> Result:
        """Trains once for each name, whichever command did; returns losses, the median seconds of a step and the peak
        memory.

        config: name in accelerate_configs/; none: without a launcher. recipe: None: that of all cases. Raises LeftOut
        if finetune refuses (status 2), RuntimeError if it fails."""
        name = name.replace(", ", "-").replace(" ", "-")
        # Without the folder's own path: references are made on another machine.
        same = json.dumps([[one.replace(str(self.out), "OUT") for one in overrides], cpu, config, processes])
        done_file = self.out / f"{name}.done"
        is_done = done_file.exists() and done_file.read_text(encoding="utf-8") == same
        if name not in self.trained and is_done and (cpu or not self.again):
            self.trained[name] = self.read(name)
        if name not in self.trained:
            done_file.unlink(missing_ok=True)
            shutil.rmtree(self.out / "runs" / name, ignore_errors=True)
            program = ["-m", "finetune", "train", recipe or self.out / "recipe.yaml", *overrides, f"run.name={name}"]
            if config:
                file = in_clone(f"accelerate_configs/{config}.yaml")
                launcher = ("-m", "accelerate.commands.launch", "--num_processes", processes, "--config_file", file)
                program = [*launcher, *program]
            done = self.start(program, without_gpu=cpu)
            output = done.stdout + done.stderr
            (self.out / f"{name}.log").write_text(output, encoding="utf-8")
            lines = [line for line in output.splitlines() if line.strip()] or ["no output"]
            if done.returncode == 2:
                raise LeftOut(" ".join(lines[-3:])[-400:])
            if done.returncode:
                raise RuntimeError(lines[-1])
            self.trained[name] = self.read(name)
            done_file.write_text(same, encoding="utf-8")
        return self.trained[name]

    def read(self, name: str) -> Result:
        text = (self.out / "runs" / name / "metrics.jsonl").read_text(encoding="utf-8")
        lines = [line for line in map(json.loads, text.splitlines()) if "loss" in line]
        later = lines[len(lines) // 2 :]
        return {
            "losses": [line["loss"] for line in lines],
            "step_s": statistics.median(line["step_s"] for line in later),
            "tokens_per_s": statistics.median(line["tokens_per_s"] for line in later),
            "peak_gib": max(line["memory_peak_gib"] for line in lines),
        }

    def start(self, program: list[Any], without_gpu: bool = False) -> subprocess.CompletedProcess[str]:
        environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        environment |= {"CUDA_VISIBLE_DEVICES": ""} if without_gpu or self.rehearse else {}
        # A collective that waits for a rank that has died, or for another collective, ends before the case does.
        environment |= {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "60"}
        return start_python(program, environment, self.seconds_left)


def start_python(program: list[Any], environment: dict[str, str], seconds: float) -> subprocess.CompletedProcess[str]:
    """Runs a Python program. If it takes longer, ends it with all that it has started and raises RuntimeError."""
    command = [sys.executable, *map(str, program)]
    package = Path(__file__).resolve().parents[2]  # it need not be installed
    paths = os.pathsep.join([str(package), *filter(None, [os.environ.get("PYTHONPATH")])])
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths, **environment}, **pipes) as process:
        try:
            output, errors = process.communicate(timeout=None if seconds == float("inf") else seconds)
        except subprocess.TimeoutExpired:
            import psutil

            for one in (*psutil.Process(process.pid).children(recursive=True), process):
                one.kill()
            raise RuntimeError(f"not over after {seconds:.0f} s, all that it was given") from None
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def in_clone(name: str) -> Path:
    """Returns a file or folder of the repository. Raises LeftOut if neither the current folder nor the package is in a
    clone of it."""
    for clone in (Path.cwd(), Path(__file__).resolve().parents[2]):
        if (clone / name).exists():
            return clone / name
    raise LeftOut(f"no {name} here: run this in a clone of the repository")


def require_packages(*modules: str) -> None:
    if missing := [name for name in modules if importlib.util.find_spec(name) is None]:
        raise LeftOut(f"not installed: {', '.join(missing)}")


def installed_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


# --- comparing


def same_losses(mine: Result, other: Result, bound: float) -> Result:
    """Raises RuntimeError if a step's loss differs by more than `bound`, relative."""
    if len(mine["losses"]) != len(other["losses"]):
        raise RuntimeError(f"{len(mine['losses'])} steps against {len(other['losses'])}")
    difference = max(abs(a - b) / abs(b) for a, b in zip(mine["losses"], other["losses"], strict=True))
    if not difference <= bound:
        raise RuntimeError(f"losses differ by {difference:.1e}, relative; {bound:.1e} is rounding")
    return {"difference": difference, "step_s": mine["step_s"], "peak GiB": mine["peak_gib"]}


def falling_loss(mine: Result) -> Result:
    first, last = mine["losses"][0], mine["losses"][-1]
    if not last < first:
        raise RuntimeError(f"the loss went from {first:.4f} to {last:.4f}")
    return {"first loss": first, "last loss": last, "step_s": mine["step_s"], "peak GiB": mine["peak_gib"]}


def memory_beside_prediction(check: GpuCheck, run: Path) -> Result:
    """Returns GiB as the formulas predict and as the run measured them, by name."""
    done = check.start(["-m", "finetune", "plan", "--report", run, "--json"])
    if done.returncode:
        raise RuntimeError((done.stdout + done.stderr)[-300:])
    sizes = [one for one in json.loads(done.stdout) if one["unit"] == "GiB"]
    text = "{measured:.3f} GiB, predicted {predicted:.3f} ({error:+.1%})"
    return {one["what"]: text.format(**one) for one in sizes}


# --- pieces


def environment(check: GpuCheck) -> Cases:
    def versions() -> Result:
        versions = {name: installed_version(name) for name in PACKAGES}
        missing = [name for name, version in versions.items() if version is None]
        return {"python": platform.python_version(), **{k: v for k, v in versions.items() if v}, "missing": missing}

    def devices() -> Result:
        import torch
        from torch.cuda import nccl

        if check.rehearse:
            return {"device": "CPU", "cores": os.cpu_count()}
        properties = torch.cuda.get_device_properties(0)
        return {
            "device": properties.name,
            "count": check.num_devices,
            "GiB": round(properties.total_memory / 2**30, 1),
            "capability": f"{properties.major}.{properties.minor}",
            "CUDA": torch.version.cuda,
            "NCCL": ".".join(map(str, nccl.version())),
        }

    def products() -> Result:
        done = check.start([in_clone("benchmarks/products.py"), "cpu" if check.rehearse else "cuda", "bfloat16"])
        if done.returncode:
            raise RuntimeError(done.stderr[-300:])
        return {"bf16 TFLOP/s": float(done.stdout.splitlines()[-1])}

    yield "versions", versions
    yield "devices", devices
    yield "matrix products", products


def parity_choices(check: GpuCheck) -> dict[str, tuple[tuple[str, ...], float]]:
    """Returns (overrides, bound of the losses' difference) of each recipe that runs on both devices."""
    pairs = f"data.train=[{{path: {check.out / 'pairs.jsonl'}, format: preference}}]"
    experts = (f"model.name={check.out / 'mixtral'}",)
    of_attention = "lora.targets=[q_proj, k_proj, v_proj, o_proj]"  # adapters of experts are other products
    return {
        "full fp32": (("train.precision=fp32",), FP32_LOSS),
        "full bf16": ((BF16,), BF16_LOSS),
        "lora fp32": ((*LORA, "train.precision=fp32"), FP32_LOSS),
        "lora bf16": ((*LORA, BF16), BF16_LOSS),
        "dpo lora fp32": ((*LORA, "train.precision=fp32", "objective={name: dpo}", pairs), FP32_LOSS),
        "orpo fp32": (("train.precision=fp32", "objective={name: orpo}", pairs), FP32_LOSS),
        "experts fp32": ((*experts, "train.precision=fp32"), FP32_LOSS),
        "experts lora fp32": ((*experts, *LORA, of_attention, "train.precision=fp32"), FP32_LOSS),
        # The CPU emulates products of 8 bits.
        "qlora fp8": ((*QLORA, "quantization={type: fp8}", BF16), BF16_LOSS),
        "qlora fp8 scaled": ((*QLORA, "quantization={type: fp8, compute: scaled}", BF16), BF16_LOSS),
        "full fp8": (("train.precision=fp8",), BF16_LOSS),
    }


def reference(check: GpuCheck, name: str, overrides: tuple[str, ...]) -> Result:
    """Returns what the CPU gives, which `doctor --gpu --references` has made before a GPU is paid for."""
    return check.train(f"{name} cpu", *overrides, cpu=True)


def parity_with_cpu(check: GpuCheck) -> Cases:
    """One process, the same recipe on both devices."""

    def compared(name: str, overrides: tuple[str, ...], bound: float) -> Result:
        return same_losses(check.train(name, *overrides), reference(check, name, overrides), bound)

    for name, (overrides, bound) in parity_choices(check).items():
        yield name, partial(compared, name, overrides, bound)


def images(check: GpuCheck) -> Cases:
    """A tiny model that sees images, on both devices; a clone has what makes it."""

    def compared() -> Result:
        folder, support = check.out / "seeing", in_clone("tests/support")
        if not (folder / "rows.jsonl").exists():
            folder.mkdir(exist_ok=True)
            lines = "import sys, pathlib, tiny; folder = pathlib.Path(sys.argv[1])"
            lines += "; tiny.save_seeing(folder, 'gemma3'); tiny.write_pictures(folder, 'rows', 80)"
            paths = os.pathsep.join(map(str, (support, support.parents[1])))
            done = start_python(["-c", lines, folder], {"PYTHONPATH": paths}, check.seconds_left)
            if done.returncode:
                raise RuntimeError(done.stderr[-300:])
        rows = f"data.train=[{{path: {folder / 'rows.jsonl'}, format: messages}}]"
        overrides = (f"model.name={folder / 'gemma3_sees'}", "model.train=[language]", "data.image={}", rows)
        overrides = (*overrides, "model.chat_template=null", "data.max_length=256", "train.precision=fp32")
        mine = check.train("images", *overrides)
        return same_losses(mine, reference(check, "images", overrides), FP32_LOSS)

    yield "images fp32", compared


def first_speed(check: GpuCheck) -> Cases:
    """What a GPU is rented for: tokens/s of an 8B model with adapters, and a profile of one of its steps."""
    yield "8b-lora, ours", partial(benchmark_case, check, "8b-lora", "ours")

    def profiled() -> Result:
        measured = check.out / "benchmark" / ("tiny" if check.rehearse else "8b")
        if not (measured / "recipe.yaml").exists():
            raise LeftOut("the recipe and weights of `8b-lora, ours` are not here: run that case first")
        overrides = ("profile={steps: [2, 2]}", "train.max_steps=3", f"run.dir={check.out / 'runs'}")
        run = check.train("profiled", *overrides, recipe=measured / "recipe.yaml")
        files = sorted(file.name for file in (check.out / "runs" / "profiled" / "profile").iterdir())
        return {"step_s": run["step_s"], "peak GiB": run["peak_gib"], "runs/profiled/profile": ", ".join(files)}

    yield "8b-lora, one profiled step", profiled


def tests(check: GpuCheck) -> Cases:
    """tests/gpu of a clone."""

    def passed(file: Path) -> Result:
        require_packages("pytest", "pytest_socket", "pytest_timeout")
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if check.rehearse else {}
        # Not -x: how many fail is worth knowing. Warnings of versions that the tests do not know are no failures here.
        done = start_python(["-m", "pytest", "-q", "-W", "default", file], hidden, check.seconds_left)
        (check.out / f"{file.stem}.log").write_text(done.stdout + done.stderr, encoding="utf-8")
        last = [line for line in (done.stdout or done.stderr or "no output").splitlines() if line.strip()][-1]
        if done.returncode:
            first = next((line for line in done.stdout.splitlines() if line.startswith("E ")), "")
            raise RuntimeError(f"{last}: {first[:300]}")
        return {"pytest": last}

    try:
        for file in sorted(in_clone("tests/gpu").glob("test_*.py")):
            yield file.stem, partial(passed, file)
    except LeftOut:
        yield "tests/gpu", lambda: {"": in_clone("tests/gpu")}  # its result says what is missing


def kernels(check: GpuCheck) -> Cases:
    """Every choice against the plainest one, in bf16."""
    plain = {"model.attention": "documents", "model.cross_entropy": "plain"}
    attention = ("varlen", "flex", "flash_attention_2", "flash_attention_3", "sdpa")
    choices = {f"attention {name}": plain | {"model.attention": name} for name in attention}
    choices |= {f"cross entropy {name}": plain | {"model.cross_entropy": name} for name in ("chunked", "liger")}
    choices |= {"compile": plain | {"train.compile": "true"}, "auto": {}}

    def compared(name: str, keys: dict[str, str]) -> Result:
        reference = check.train("plain", *check.shape, BF16, *(f"{key}={value}" for key, value in plain.items()))
        mine = check.train(name, *check.shape, BF16, *(f"{key}={value}" for key, value in keys.items()))
        speed = reference["step_s"] / mine["step_s"]
        return {**same_losses(mine, reference, BF16_LOSS), "speed against plain": speed}

    for name, keys in choices.items():
        yield name, partial(compared, name, keys)


def several(check: GpuCheck) -> Cases:
    """The same losses on several devices as on one: what NCCL does."""

    def compared(config: str, processes: int, mode: str, overrides: tuple[str, ...]) -> Result:
        if check.num_devices < processes:
            raise LeftOut(f"{processes} devices, here {'is' if check.num_devices == 1 else 'are'} {check.num_devices}")
        require_packages(*(["deepspeed"] if "zero" in config else []))
        one = f"one {mode}"
        if config == "ep":
            targets = ("lora.targets=[q_proj, k_proj, v_proj, o_proj]",) if mode == "lora" else ()
            one, overrides = f"{one} experts", (*overrides, f"model.name={check.out / 'mixtral'}", *targets)
        mine = check.train(f"{config} {processes} {mode}", *overrides, config=config, processes=processes)
        return same_losses(mine, check.train(one, *overrides), FP32_LOSS)

    for config in SEVERAL:
        processes = 4 if config in ("hsdp", "fsdp2_tp") else 2
        for mode, overrides in (("full", ()), ("lora", LORA)):
            yield f"{config} x {processes}, {mode}", partial(compared, config, processes, mode, overrides)


def resume(check: GpuCheck) -> Cases:
    """Steps 5 to 8 from a checkpoint of step 4: equal to the last bit; to rounding if kernels sum in any order, so that
    two runs without a stop differ as well."""

    def resumed(name: str, *overrides: str) -> Result:
        ends = ("train.max_steps=8", "checkpoint={every_steps: 4, keep: 2}", *overrides)
        whole, runs = check.train(name, *ends), check.out / "runs"
        shutil.rmtree(runs / f"{name}-again", ignore_errors=True)
        step = Path("checkpoints", "step-00000004")
        shutil.copytree(runs / name / step, runs / f"{name}-again" / step)
        program = ["-m", "finetune", "train", check.out / "recipe.yaml", *ends, f"run.name={name}-again"]
        done = check.start(program)
        if done.returncode:
            raise RuntimeError((done.stdout + done.stderr)[-300:])
        again, expected = check.read(f"{name}-again")["losses"], whole["losses"][4:]
        if again == expected:
            return {"steps 5 to 8": "equal to the last bit"}
        if check.train(f"{name} repeated", *ends)["losses"] == whole["losses"]:
            raise RuntimeError(f"steps 5 to 8: {again} after the resume; two runs without a stop both have {expected}")
        rounding = same_losses({**whole, "losses": again}, {**whole, "losses": expected}, FP32_LOSS)
        return {"steps 5 to 8": "to rounding, as two runs without a stop", "difference": rounding["difference"]}

    yield "full", partial(resumed, "resume-full")
    yield "lora", partial(resumed, "resume-lora", *LORA)


def savers(check: GpuCheck) -> Cases:
    """Options that save memory train, and give the losses of what they replace if they are meant to."""
    in_backward = ("optimizer.max_grad_norm=null", "batch.rows_per_device=4")  # of what it is compared with as well
    exact: dict[str, tuple[str, tuple[str, ...]]] = {
        "paged AdamW": ("optimizer.name=paged_adamw", ()),
        "recomputation": ("train.activation_checkpointing=true", ()),
        "selective recomputation": ("train.activation_checkpointing=selective", ()),
        "activation offload": ("train.activation_offload=true", ()),
        "steps in the backward": ("optimizer.in_backward=true", in_backward),
    }

    def compared(name: str, override: str, both: tuple[str, ...]) -> Result:
        usual = check.train(f"usual{len(both)}", *check.shape, BF16, *both)
        mine = check.train(name, *check.shape, BF16, *both, override)
        return {**same_losses(mine, usual, BF16_LOSS), "GiB less": usual["peak_gib"] - mine["peak_gib"]}

    def alone(config: str) -> Result:
        require_packages(*(["deepspeed"] if "zero" in config else []))
        return same_losses(check.train(f"one {config}", config=config), check.train("full fp32"), FP32_LOSS)

    for name, (override, both) in exact.items():
        yield name, partial(compared, name, override, both)
    yield "QLoRA", lambda: falling_loss(check.train("QLoRA", BF16, *QLORA))
    for name in ("adamw_8bit", "paged_adamw_8bit"):
        yield name, lambda name=name: falling_loss(check.train(name, BF16, f"optimizer.name={name}"))
    for config in ("fsdp2", "fsdp2_offload", "zero2_offload", "zero3_offload"):
        yield f"{config}, one process", partial(alone, config)


def memory(check: GpuCheck) -> Cases:
    """What `plan` predicts and what a run measures; on a CPU of the state alone."""
    choices = {
        "full": (),
        "full, recomputed": ("train.activation_checkpointing=true",),
        "full, one row at once": ("batch.rows_per_device=1",),
        "full, AdamW in 8 bits": ("optimizer.name=adamw_8bit",),
    }

    def compared(name: str, overrides: tuple[str, ...]) -> Result:
        run = "memory-" + name.replace(", ", "-").replace(" ", "-")
        check.train(run, *check.shape, BF16, *overrides)
        return memory_beside_prediction(check, check.out / "runs" / run)

    for name, overrides in choices.items():
        yield name, partial(compared, name, overrides)


def benchmark_case(check: GpuCheck, cell: str, contender: str) -> Result:
    """benchmarks/gpu.py of a clone: ours against the bare loop and TRL, and our memory against the prediction."""
    require_packages(*(["bitsandbytes"] if cell in ("8b-qlora", "8b-full-8bit") else []))
    file, folder = check.out / "benchmark.json", check.out / "benchmark"
    program = [in_clone("benchmarks/gpu.py"), "--only", cell, "--contenders", contender, "--json", file]
    program += ["--folder", folder, "--budget-s", check.seconds_left - 10]
    program += ["--device", "cpu", "--shape", "tiny", "--steps", 2] if check.rehearse else ["--device", "cuda"]
    done = start_python(program, {}, check.seconds_left)
    cells = json.loads(file.read_text(encoding="utf-8"))["cells"] if file.exists() else []
    for one in cells:
        if (one["cell"], one["contender"]) == (cell, contender):
            if "failed" in one:
                raise RuntimeError(one["failed"])
            result = {"tokens/s": one["tokens_per_s"], "peak GiB": (one["peak_device"] or one["peak_rss"]) / 2**30}
            plans = sorted(folder.glob("*/runs/speed/plan.json"), key=lambda plan: plan.stat().st_mtime)
            of_ours = memory_beside_prediction(check, plans[-1].parent) if contender == "ours" else {}
            return {**result, **of_ours}
    raise LeftOut(" ".join((done.stderr or done.stdout).strip().splitlines()[-1:])[-300:])


def benchmark(check: GpuCheck) -> Cases:
    """The cells that `speed` has not."""
    for cell in ("8b-lora", "1b-full", "8b-qlora", "8b-full-8bit"):
        for contender in ("ours", "trl", "bare"):
            if (cell, contender) != ("8b-lora", "ours"):
                yield f"{cell}, {contender}", partial(benchmark_case, check, cell, contender)


PIECES: dict[str, Callable[[GpuCheck], Cases]] = {  # in the order of their worth
    "environment": environment,
    "speed": first_speed,
    "kernels": kernels,
    "parity": parity_with_cpu,
    "tests": tests,
    "several": several,
    "images": images,
    "resume": resume,
    "savers": savers,
    "memory": memory,
    "benchmark": benchmark,
}
