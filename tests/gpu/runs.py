"""Short runs on a machine's GPUs, most valuable first, and what they are compared with: `./scripts/gpu.sh`.

pytest does not collect this file by itself: the plugin `gpu_check` has its fixtures and keeps the results.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from gpu_check import ROOT, Result, Runs, start_python

Record = Callable[[str, Any], None]
PACKAGES = ("torch", "transformers", "accelerate", "peft", "datasets", "triton", "bitsandbytes", "deepspeed", "torchao")
PACKAGES += ("liger-kernel", "flash-attn", "trl")
LORA = ("mode=lora", "lora={rank: 8, alpha: 16}")
QLORA = (*LORA, "mode=qlora", "quantization={type: nf4}")
FP32, BF16 = "train.precision=fp32", "train.precision=bf16"
FP32_LOSS = 2e-5  # relative, GPU against CPU over 20 steps: other kernels sum in another order
BF16_LOSS = 2.0**-7  # two roundings of bf16
SEVERAL = ("ddp", "fsdp2", "fsdp2_offload", "hsdp", "zero2", "zero3", "tp", "fsdp2_tp", "cp", "ulysses", "pp", "ep")
OF_ATTENTION = "lora.targets=[q_proj, k_proj, v_proj, o_proj]"  # adapters of experts are other products
PAIRS = "data.train=[{path: OUT/pairs.jsonl, format: preference}]"
EXPERTS = ("model.name=OUT/mixtral", FP32)
IMAGES = ("model.name=OUT/gemma3_sees", "model.train=[language]", "data.image={}", "data.max_length=256", FP32)
IMAGES += ("data.train=[{path: OUT/pictures.jsonl, format: messages}]",)
# Overrides and the bound of the losses' difference of each recipe that runs on both devices. OUT: the folder.
PARITY: dict[str, tuple[tuple[str, ...], float]] = {
    "full-fp32": ((FP32,), FP32_LOSS),
    "full-bf16": ((BF16,), BF16_LOSS),
    "lora-fp32": ((*LORA, FP32), FP32_LOSS),
    "lora-bf16": ((*LORA, BF16), BF16_LOSS),
    "dpo-lora-fp32": ((*LORA, FP32, "objective={name: dpo}", PAIRS), FP32_LOSS),
    "orpo-fp32": ((FP32, "objective={name: orpo}", PAIRS), FP32_LOSS),
    "experts-fp32": (EXPERTS, FP32_LOSS),
    "experts-lora-fp32": ((*EXPERTS, *LORA, OF_ATTENTION), FP32_LOSS),
    # The CPU emulates products of 8 bits.
    "qlora-fp8": ((*QLORA, "quantization={type: fp8}", BF16), BF16_LOSS),
    "qlora-fp8-scaled": ((*QLORA, "quantization={type: fp8, compute: scaled}", BF16), BF16_LOSS),
    "full-fp8": (("train.precision=fp8",), BF16_LOSS),
    "images-fp32": (IMAGES, FP32_LOSS),
}
PLAIN = {"model.attention": "documents", "model.cross_entropy": "plain"}
KERNELS: dict[str, dict[str, str]] = {
    **{
        f"attention-{name}": PLAIN | {"model.attention": name}
        for name in ("varlen", "flex", "flash_attention_2", "flash_attention_3", "sdpa")
    },
    **{f"cross-entropy-{name}": PLAIN | {"model.cross_entropy": name} for name in ("chunked", "liger")},
    "compile": PLAIN | {"train.compile": "true"},
    "auto": {},
}
# An option, and what the run that it is compared with has as well.
SAVERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "paged-AdamW": ("optimizer.name=paged_adamw", ()),
    "recomputation": ("train.activation_checkpointing=true", ()),
    "selective-recomputation": ("train.activation_checkpointing=selective", ()),
    "activation-offload": ("train.activation_offload=true", ()),
    "steps-in-the-backward": (
        "optimizer.in_backward=true",
        ("optimizer.max_grad_norm=null", "batch.rows_per_device=4"),
    ),
}
FALLING: dict[str, tuple[str, ...]] = {
    "QLoRA": QLORA,
    "adamw_8bit": ("optimizer.name=adamw_8bit",),
    "paged_adamw_8bit": ("optimizer.name=paged_adamw_8bit",),
}
MEMORY: dict[str, tuple[str, ...]] = {
    "full": (),
    "full-recomputed": ("train.activation_checkpointing=true",),
    "full-one-row-at-once": ("batch.rows_per_device=1",),
    "full-adamw-8bit": ("optimizer.name=adamw_8bit",),
}
CELLS = [(cell, who) for cell in ("8b-lora", "1b-full", "8b-qlora", "8b-full-8bit") for who in ("ours", "trl", "bare")]


@pytest.fixture
def record(record_property: Record) -> Callable[[Result], None]:
    """Adds figures to the test's line of results."""
    return lambda values: [record_property(name, value) for name, value in values.items()] and None


def require_packages(*modules: str) -> None:
    if missing := [name for name in modules if importlib.util.find_spec(name) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}")


def in_folder(runs: Runs, overrides: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(one.replace("OUT", str(runs.out)) for one in overrides)


def same_losses(mine: Result, other: Result, bound: float) -> Result:
    """Fails if a step's loss differs by more than `bound`, relative."""
    pairs = zip(mine["losses"], other["losses"], strict=True)
    difference = max(abs(a - b) / abs(b) for a, b in pairs)
    assert difference <= bound, f"losses differ by {difference:.1e}, relative; {bound:.1e} is rounding"
    return {"difference": difference, "step_s": mine["step_s"], "peak GiB": mine["peak_gib"]}


def memory_beside_prediction(runs: Runs, run: Path) -> Result:
    """Returns GiB as the formulas predict and as the run measured them, by name."""
    done = runs.start(["-m", "finetune", "plan", "--report", run, "--json"])
    assert done.returncode == 0, (done.stdout + done.stderr)[-300:]
    sizes = [one for one in json.loads(done.stdout) if one["unit"] == "GiB"]
    text = "{measured:.3f} GiB, predicted {predicted:.3f} ({error:+.1%})"
    return {one["what"]: text.format(**one) for one in sizes}


def test_versions(record: Any) -> None:
    found = {package.metadata["Name"].lower(): package.version for package in metadata.distributions()}
    missing = [name for name in PACKAGES if name not in found]
    versions = {name: found[name] for name in PACKAGES if name in found}
    record({"python": platform.python_version(), **versions, "missing": missing})


def test_devices(gpu: Runs, record: Any) -> None:
    import torch
    from torch.cuda import nccl

    if gpu.rehearse:
        record({"device": "CPU", "cores": os.cpu_count()})
        return
    properties = torch.cuda.get_device_properties(0)
    record(
        {
            "device": properties.name,
            "count": gpu.num_devices,
            "GiB": round(properties.total_memory / 2**30, 1),
            "capability": f"{properties.major}.{properties.minor}",
            "CUDA": torch.version.cuda,
            "NCCL": ".".join(map(str, nccl.version())),
        }
    )


def test_products(gpu: Runs, record: Any) -> None:
    done = gpu.start([ROOT / "benchmarks/products.py", "cpu" if gpu.rehearse else "cuda", "bfloat16"])
    assert done.returncode == 0, done.stderr[-300:]
    record({"bf16 TFLOP/s": float(done.stdout.splitlines()[-1])})


def benchmark_cell(runs: Runs, cell: str, contender: str) -> Result:
    """benchmarks/gpu.py: ours against the bare loop and TRL, and our memory against the prediction."""
    require_packages(*(["bitsandbytes"] if cell in ("8b-qlora", "8b-full-8bit") else []))
    file, folder = runs.out / "benchmark.json", runs.out / "benchmark"
    program = [ROOT / "benchmarks/gpu.py", "--only", cell, "--contenders", contender, "--json", file]
    program += ["--folder", folder, "--budget-s", runs.seconds_left - 10]
    program += ["--device", "cpu", "--shape", "tiny", "--steps", 2] if runs.rehearse else ["--device", "cuda"]
    done = start_python(program, {}, runs.seconds_left)
    cells = json.loads(file.read_text(encoding="utf-8"))["cells"] if file.exists() else []
    found = [one for one in cells if (one["cell"], one["contender"]) == (cell, contender)]
    if not found:
        pytest.skip(" ".join((done.stderr or done.stdout).strip().splitlines()[-1:])[-300:])
    (one,) = found
    assert "failed" not in one, one["failed"]
    result = {"tokens/s": one["tokens_per_s"], "peak GiB": (one["peak_device"] or one["peak_rss"]) / 2**30}
    plans = sorted(folder.glob("*/runs/speed/plan.json"), key=lambda plan: plan.stat().st_mtime)
    return result | (memory_beside_prediction(runs, plans[-1].parent) if contender == "ours" else {})


def test_speed(gpu: Runs, record: Any) -> None:
    """What a GPU is rented for: tokens/s of an 8B model with adapters."""
    record(benchmark_cell(gpu, "8b-lora", "ours"))


def benchmark_recipe(runs: Runs) -> Path:
    recipe = runs.out / "benchmark" / ("tiny" if runs.rehearse else "8b") / "recipe.yaml"
    if not recipe.exists():
        pytest.skip("the recipe and weights of test_speed are not here: run it first")
    return recipe


def test_compiled_speed(gpu: Runs, record: Any) -> None:
    """Compiled layers beside fused kernels, on the 8B model of `test_speed`: a compiler that is slower is no use."""
    recipe, overrides = benchmark_recipe(gpu), ("train.max_steps=10", f"run.dir={gpu.out / 'runs'}")
    eager = gpu.train("eager", *overrides, recipe=recipe)
    compiled = gpu.train("compiled", *overrides, "train.compile=true", recipe=recipe)
    record({"compiled step_s": compiled["step_s"], "eager step_s": eager["step_s"]})
    assert compiled["compilations"], "nothing was compiled"
    assert gpu.rehearse or compiled["step_s"] <= eager["step_s"], "slower than without the compiler"


def test_profile(gpu: Runs, record: Any) -> None:
    """A profile of a step of the 8B model of `test_speed`."""
    overrides = ("profile={steps: [2, 2]}", "train.max_steps=3", f"run.dir={gpu.out / 'runs'}")
    run = gpu.train("profiled", *overrides, recipe=benchmark_recipe(gpu))
    files = sorted(file.name for file in (gpu.out / "runs" / "profiled" / "profile").iterdir())
    record({"step_s": run["step_s"], "peak GiB": run["peak_gib"], "runs/profiled/profile": ", ".join(files)})


GRAPHED = {"full": (), "lora": LORA, "qlora": QLORA}


@pytest.mark.parametrize("mode", GRAPHED)
def test_graphs(gpu: Runs, record: Any, mode: str) -> None:
    """CUDA graphs beside none, on rows that are full: the same products in the same order. To the last bit; to rounding
    if kernels sum in any order, so that two runs without graphs differ as well."""
    documents = gpu.out / "full.jsonl"
    ids = [[3 + (7 * row + place) % 200 for place in range(128)] for row in range(256)]
    documents.write_text("".join(json.dumps({"input_ids": one}) + "\n" for one in ids), encoding="utf-8")
    overrides = (*GRAPHED[mode], BF16, "data.max_length=128", "data.eval=[]", "evaluate={}")
    overrides += (f"data.train=[{{path: {documents}, format: tokens}}]",)
    without = gpu.train(f"{mode}-no-graphs", *overrides, "train.graphs=off")
    mine = gpu.train(f"{mode}-graphs", *overrides, "train.graphs=auto")
    plan = json.loads((gpu.out / "runs" / f"{mode}-graphs" / "plan.json").read_text(encoding="utf-8"))
    assert gpu.rehearse or not plan["graphs"].startswith("off"), plan["graphs"]
    if mine["losses"] != without["losses"]:
        again = gpu.train(f"{mode}-no-graphs-again", *overrides, "train.graphs=off")["losses"]
        assert again != without["losses"], "otherwise with graphs, though two runs without are equal"
    record({**same_losses(mine, without, BF16_LOSS), "without graphs step_s": without["step_s"]})


def test_graphed_speed(gpu: Runs, record: Any) -> None:
    """CUDA graphs beside none, on the 8B model of `test_speed`."""
    recipe, overrides = benchmark_recipe(gpu), ("train.max_steps=12", f"run.dir={gpu.out / 'runs'}")
    runs = {
        graphs: gpu.train(f"8b-graphs-{graphs}", *overrides, f"train.graphs={graphs}", recipe=recipe)
        for graphs in ("off", "auto")
    }
    record({f"step_s, graphs {graphs}": run["step_s"] for graphs, run in runs.items()})
    record({f"peak GiB, graphs {graphs}": run["peak_gib"] for graphs, run in runs.items()})
    record(same_losses(runs["auto"], runs["off"], BF16_LOSS))
    assert gpu.rehearse or runs["auto"]["step_s"] <= runs["off"]["step_s"], "slower than without graphs"


@pytest.mark.parametrize("name", KERNELS)
def test_kernels(gpu: Runs, record: Any, name: str) -> None:
    """Every choice against the plainest one, in bf16."""
    plain = gpu.train("plain", *gpu.shape, BF16, *(f"{key}={value}" for key, value in PLAIN.items()))
    mine = gpu.train(name, *gpu.shape, BF16, *(f"{key}={value}" for key, value in KERNELS[name].items()))
    record({**same_losses(mine, plain, BF16_LOSS), "speed against plain": plain["step_s"] / mine["step_s"]})
    assert name != "compile" or mine["compilations"], "nothing was compiled"


@pytest.mark.parametrize("name", PARITY)
def test_reference(runs: Runs, name: str) -> None:
    """The CPU's side of `test_parity`, made on a machine without a GPU and carried along."""
    runs.train(f"{name}-cpu", *in_folder(runs, PARITY[name][0]), cpu=True)


@pytest.mark.parametrize("name", PARITY)
def test_parity(gpu: Runs, record: Any, name: str) -> None:
    """One process, the same recipe on both devices."""
    overrides, bound = in_folder(gpu, PARITY[name][0]), PARITY[name][1]
    record(same_losses(gpu.train(name, *overrides), gpu.train(f"{name}-cpu", *overrides, cpu=True), bound))


@pytest.mark.parametrize("file", sorted(Path(__file__).parent.glob("test_*.py")), ids=lambda file: file.stem)
def test_file(gpu: Runs, record: Any, file: Path) -> None:
    """tests/gpu, each file as a process: an error of a kernel leaves a process without a usable device."""
    require_packages("pytest_socket", "pytest_timeout")
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if gpu.rehearse else {}
    # Not -x: how many fail is worth knowing. Warnings of versions that the tests do not know are no failures here.
    done = start_python(["-m", "pytest", "-q", "-W", "default", file], hidden, gpu.seconds_left)
    (gpu.out / f"{file.stem}.log").write_text(done.stdout + done.stderr, encoding="utf-8")
    last = [line for line in (done.stdout or done.stderr or "no output").splitlines() if line.strip()][-1]
    first_error = next((line for line in done.stdout.splitlines() if line.startswith("E ")), "")
    assert done.returncode == 0, f"{last}: {first_error[:300]}"
    if "passed" not in last:
        pytest.skip(last)
    record({"pytest": last})


@pytest.mark.parametrize("mode", ["full", "lora"])
@pytest.mark.parametrize("config", SEVERAL)
def test_several(gpu: Runs, record: Any, config: str, mode: str) -> None:
    """The same losses on several devices as on one: what NCCL does."""
    processes = 4 if config in ("hsdp", "fsdp2_tp") else 2
    if gpu.num_devices < processes:
        pytest.skip(f"{processes} devices, here {'is' if gpu.num_devices == 1 else 'are'} {gpu.num_devices}")
    require_packages(*(["deepspeed"] if "zero" in config else []))
    one, overrides = f"one-{mode}", LORA if mode == "lora" else ()
    if config == "ep":
        one = f"{one}-experts"
        overrides = (*overrides, f"model.name={gpu.out / 'mixtral'}", *([OF_ATTENTION] if overrides else []))
    mine = gpu.train(f"{config}-{processes}-{mode}", *overrides, config=config, processes=processes)
    record(same_losses(mine, gpu.train(one, *overrides), FP32_LOSS))


@pytest.mark.parametrize("mode", ["full", "lora"])
def test_resume(gpu: Runs, record: Any, mode: str) -> None:
    """Steps 5 to 8 from a checkpoint of step 4: equal to the last bit; to rounding if kernels sum in any order, so that
    two runs without a stop differ as well."""
    name, folder = f"resume-{mode}", gpu.out / "runs"
    ends = ("train.max_steps=8", "checkpoint={every_steps: 4, keep: 2}", *(LORA if mode == "lora" else ()))
    whole = gpu.train(name, *ends)
    shutil.rmtree(folder / f"{name}-again", ignore_errors=True)
    step = Path("checkpoints", "step-00000004")
    shutil.copytree(folder / name / step, folder / f"{name}-again" / step)
    done = gpu.start(["-m", "finetune", "train", gpu.out / "recipe.yaml", *ends, f"run.name={name}-again"])
    assert done.returncode == 0, (done.stdout + done.stderr)[-300:]
    again, expected = gpu.read(f"{name}-again"), {**whole, "losses": whole["losses"][4:]}
    if again["losses"] != expected["losses"]:
        repeated = gpu.train(f"{name}-repeated", *ends)["losses"]
        assert repeated != whole["losses"], "resumed otherwise, though two runs without a stop are equal"
    record({"steps 5 to 8": same_losses(again, expected, FP32_LOSS)["difference"]})


@pytest.mark.parametrize("name", SAVERS)
def test_savers(gpu: Runs, record: Any, name: str) -> None:
    """Options that save memory give the losses of what they replace."""
    override, both = SAVERS[name]
    usual = gpu.train(f"usual{len(both)}", *gpu.shape, BF16, *both)
    mine = gpu.train(name, *gpu.shape, BF16, *both, override)
    record({**same_losses(mine, usual, BF16_LOSS), "GiB less": usual["peak_gib"] - mine["peak_gib"]})


@pytest.mark.parametrize("name", FALLING)
def test_falling(gpu: Runs, record: Any, name: str) -> None:
    """What rounds to few bits has no run to be equal to: it learns."""
    mine = gpu.train(name, BF16, *FALLING[name])
    assert mine["losses"][-1] < mine["losses"][0], mine["losses"]
    record({"last loss": mine["losses"][-1], "step_s": mine["step_s"], "peak GiB": mine["peak_gib"]})


@pytest.mark.parametrize("config", ["fsdp2", "fsdp2_offload", "zero2_offload", "zero3_offload"])
def test_alone(gpu: Runs, record: Any, config: str) -> None:
    """A launch of one process, against none."""
    require_packages(*(["deepspeed"] if "zero" in config else []))
    record(same_losses(gpu.train(f"one-{config}", config=config), gpu.train("full-fp32", FP32), FP32_LOSS))


@pytest.mark.parametrize("name", MEMORY)
def test_memory(gpu: Runs, record: Any, name: str) -> None:
    """What `plan` predicts and what a run measures; on a CPU of the state alone."""
    gpu.train(f"memory-{name}", *gpu.shape, BF16, *MEMORY[name])
    record(memory_beside_prediction(gpu, gpu.out / "runs" / f"memory-{name}"))


@pytest.mark.parametrize(("cell", "contender"), CELLS[1:])  # the first is test_speed
def test_benchmark(gpu: Runs, record: Any, cell: str, contender: str) -> None:
    record(benchmark_cell(gpu, cell, contender))
