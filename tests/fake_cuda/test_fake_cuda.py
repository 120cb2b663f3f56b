"""Every accelerate config on CUDA devices that are not there: set-up, load, wrap, steps, the parts of a checkpoint and
the result, as one rank of N, on a torch without CUDA (`tests/support/fake_devices.py`).

What it finds: tensors on a wrong device, of a wrong type or shape, on the branches that only a GPU takes; waits for the
device; collectives of tensors in host memory. What it cannot find: races of streams, kernels, what NCCL does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tiny
import yaml
from conftest import ROOT
from fake_devices import unsupported_reason
from usual import usual

from finetune.engine.launch import read_config_file
from finetune.features import load_recipe
from finetune.models.base_model import Base
from finetune.plan.memory import HeaviestBatch, Place, estimate_memory

pytestmark = [
    pytest.mark.skipif(bool(unsupported_reason()), reason=f"NOTHING CHECKED ON FAKE CUDA: {unsupported_reason()}"),
    pytest.mark.timeout(3600),  # one process measures all cells that a run asks for
]

MODES = {
    "full": (),
    "lora": ("mode=lora", "lora={rank: 4, alpha: 8}"),
    "qlora": ("mode=qlora", "lora={rank: 4, alpha: 8}", "quantization={type: nf4}"),
    "fp8": ("mode=qlora", "lora={rank: 4, alpha: 8}", "quantization={type: fp8}"),
    "scaled": ("mode=qlora", "lora={rank: 4, alpha: 8}", "quantization={type: fp8, compute: scaled}"),
}
LORA_OF_PAIRS = (*MODES["lora"], "data.train=[{path: {folder}/pairs.jsonl, format: preference}]", "data.max_length=128")
PREFERENCES = {
    "orpo": (*LORA_OF_PAIRS, "objective.name=orpo"),
    "dpo": (*LORA_OF_PAIRS, "objective={name: dpo, reference: adapters_off}"),
}
GRAPHS = {
    name: (*MODES["lora"], "train.activation_checkpointing=false", f"train.graphs={graphs}")
    for name, graphs in (("graphs", "auto"), ("no-graphs", "off"))
}
# Configs that cannot run without values, and where they stop.
CANNOT = {
    "pp": "torch's schedules exchange shapes of hidden states as tensors and read them (`PipelineStage`)",
    **dict.fromkeys(("pp_dp", "pp_fsdp2", "pp_tp", "pp_fsdp2_tp"), "as pp"),
    "ep": "experts are sent as many rows as routers chose, which is read off the device",
    "zero2_offload": "DeepSpeed reads each gradient's norm off the device in the backward (stage_1_and_2.py)",
    "zero3_nvme": "DeepSpeed builds its asynchronous I/O with a compiler, and needs libaio",
}
# Waits for the device in a micro-batch that belong to what a config is.
BY_DESIGN = {
    "fsdp2_offload": "_fully_shard",  # FSDP2 waits for gradients to arrive in host memory
    "zero3": "stage3.py",  # DeepSpeed's reduction
    "zero3_offload": "stage3.py",
}
WAITS_OF_A_STEP = 4  # sums of the loss, the norm, the end of the step, numbers of all ranks; DeepSpeed has its own
SIZES = {"single": (1,), **dict.fromkeys(("hsdp", "fsdp2_tp", "fsdp2_cp"), (4, 8))}
REFUSED = {("tp", "scaled"), ("fsdp2_tp", "scaled")}


class Cell(NamedTuple):
    config: str
    processes: int
    mode: str
    rank: int = 0


USUAL = [
    Cell("fsdp2", 2, "full", 1),
    Cell("fsdp2", 2, "qlora"),
    Cell("fsdp2_tp", 8, "lora"),
    Cell("zero3", 8, "lora"),
]
CONFIGS = [path.stem for path in sorted((ROOT / "accelerate_configs").glob("*.yaml")) if path.stem not in CANNOT]
# Every config in every mode, at its sizes in turns.
ALL = [
    Cell(config, sizes[(i + j) % len(sizes)], mode)
    for i, config in enumerate(CONFIGS)
    for sizes in [SIZES.get(config, (2, 8))]
    for j, mode in enumerate(MODES)
]


def name(cell: Cell) -> str:
    return "-".join(map(str, cell))


CELLS = [pytest.param(cell, id=name(cell)) for cell in USUAL]
CELLS += [pytest.param(cell, id=name(cell), marks=pytest.mark.long) for cell in ALL if cell not in USUAL]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with NAME.json of each cell that these tests ask for, or its traceback in NAME.log."""
    folder = tmp_path_factory.mktemp("fake")
    values = {
        "run": {"name": "run", "dir": str(folder / "runs")},
        "model": {"name": str(made / "llama")},
        "mode": "full",
        "data": {"train": [{"path": str(made / "rows.jsonl"), "format": "messages"}], "max_length": 64},
        "batch": {"rows": 8, "rows_per_device": 1},
        "optimizer": {"lr": 1e-3},
        "train": {"max_steps": 6, "precision": "bf16", "activation_checkpointing": True},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    wanted = [item.callspec.params["cell"] for item in request.session.items if _is_here(item)]
    tiny.write_rows(folder / "pairs.jsonl", tiny.preferences(60))
    tiny.save_model(folder, "llama_wide")
    changes = {
        mode: [o.replace("{folder}", str(folder)) for o in v] for mode, v in {**MODES, **PREFERENCES, **GRAPHS}.items()
    }
    cells = {name(cell): [*cell[:2], cell.rank, *changes[cell.mode], *_own(cell, folder)] for cell in wanted}
    program = [sys.executable, str(ROOT / "tests" / "fake_cuda" / "fake_cells.py"), folder / "recipe.yaml", folder]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
    }
    subprocess.run(program, input=json.dumps(cells), text=True, env=environment, check=True)
    return folder


def _is_here(item: Any) -> bool:
    """Whether a test is one of these, of a cell, and runs."""
    skipped = item.get_closest_marker("long") and not item.config.getoption("--all")
    return item.path == Path(__file__) and hasattr(item, "callspec") and "cell" in item.callspec.params and not skipped


def _own(cell: Cell, folder: Path) -> list[str]:
    """Two micro-batches a step if gradients are added up in host memory, one elsewhere; and a model whose columns two
    ranks can share in blocks."""
    shares_blocks = cell.mode == "qlora" and "tp" in cell.config
    wide = [f"model.name={folder / 'llama_wide'}"] if shares_blocks else []
    return [f"batch.rows={cell.processes * (2 if 'offload' in cell.config else 1)}", *wide]


def measured(results: Path, cell: Cell) -> dict[str, Any]:
    file = results / f"{name(cell)}.json"
    assert file.exists(), file.with_suffix(".log").read_text(encoding="utf-8")[-4000:]
    return json.loads(file.read_text(encoding="utf-8"))


@pytest.mark.parametrize("cell", CELLS)
def test_a_config_on_devices(results: Path, cell: Cell) -> None:
    found = measured(results, cell)
    assert ("refused" in found) == ((cell.config, cell.mode) in REFUSED)
    if "refused" in found:
        return
    phases = found["phases"]
    assert {"load", "wrap", "forward", "backward", "reduction", "optimizer", "save"} <= phases.keys()
    assert all(phases[name]["peak_bytes"] > 0 for name in ("wrap", "forward", "backward", "optimizer"))
    for name in ("forward", "backward"):
        waits = [wait for wait in phases[name]["waits"] if BY_DESIGN.get(cell.config, "-") not in wait]
        assert not waits, name
    in_host_memory = [
        name for counts in phases.values() for name, device, _ in counts["collectives"] if device == "cpu"
    ]
    assert set(in_host_memory) <= {"barrier"}
    if not cell.config.startswith("zero"):
        ends = [wait for name in ("reduction", "optimizer", "end of the step") for wait in phases[name]["waits"]]
        assert len(ends) <= WAITS_OF_A_STEP + ("offload" in cell.config), ends  # its norm is made in host memory


@pytest.mark.parametrize(
    "cell", usual((Cell("fsdp2", 2, "orpo"), Cell("single", 1, "dpo")), Cell("single", 1, "dpo")), ids=name
)
def test_pairs_that_share_their_prompts_wait_for_nothing(results: Path, cell: Cell) -> None:
    phases = measured(results, cell)["phases"]
    assert {phase: phases[phase]["waits"] for phase in ("forward", "backward")} == {"forward": {}, "backward": {}}


@pytest.mark.parametrize(
    ("cell", "least", "most", "reductions"),
    [
        (Cell("single", 1, "graphs"), 0, 80, []),
        (Cell("single", 1, "no-graphs"), 400, 2000, []),
        (Cell("ddp", 2, "graphs"), 0, 140, [["allreduce_", "cuda", 1]]),  # and a view of each gradient
    ],
    ids=["single", "single without graphs", "ddp"],
)
def test_graphs_leave_a_micro_batch_few_operators(
    results: Path, cell: Cell, least: int, most: int, reductions: list[Any]
) -> None:
    """Copies into buffers, head and loss; on ddp one reduction of all gradients."""
    forward, backward = (measured(results, cell)["phases"][phase] for phase in ("forward", "backward"))
    assert (forward["waits"], backward["waits"], backward["collectives"]) == ({}, {}, reductions)
    assert least <= sum(sum(phase["operators"].values()) for phase in (forward, backward)) <= most


@pytest.mark.long
def test_masks_of_flex_attention_are_copied_without_a_wait() -> None:
    """Of documents, and of documents with shared beginnings: a copy for each tensor of each window's mask."""
    program = """
import os
from fake_devices import enable, fake_cuda, real
enable()
from finetune.models.attention import kernels
for prefixes in ((), (0, 60, 0, 90)):
    with fake_cuda() as meter:
        meter.begin("masks")
        kernels.prepare_flex((100, 200, 150, 60), prefixes, device="cuda", windows=(None, 64))
    print(dict(meter.phases["masks"].host_copies), dict(meter.phases["masks"].waits), flush=True)
os._exit(0)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.stdout.splitlines() == ["{'cpu to cuda': 10} {}", "{'cpu to cuda': 16} {}"], done.stderr[-3000:]


@pytest.mark.parametrize(
    "cell", usual((Cell("single", 1, "full"), Cell("fsdp2", 2, "qlora")), Cell("fsdp2", 2, "qlora")), ids=name
)
def test_a_checkpoint_waits_for_its_copies_once(results: Path, cell: Cell) -> None:
    """Without the wait the thread would write what has not arrived; one for each tensor would be slow."""
    counts = measured(results, cell)["phases"]["copies of a checkpoint"]
    assert counts["host_copies"]["cuda to cpu"] > 1
    assert [(where.split(" in ")[0], n) for where, n in counts["waits"].items()] == [("cuda.synchronize", 1)]


@pytest.mark.parametrize("cell", [Cell("fsdp2", 2, "full", 1)], ids=name)
def test_other_ranks_wait_while_rank_0_writes(results: Path, cell: Cell) -> None:
    """Else they queue the gathers of all tensors at once, and NCCL's timeout runs for each from then on."""
    saving = measured(results, cell)["phases"]["save"]
    gathers = sum(count for operator, _, count in saving["collectives"] if "gather" in operator)
    assert sum(count for wait, count in saving["waits"].items() if "synchronize" in wait) == gathers > 2


@pytest.mark.parametrize(
    ("cell", "copies"),
    [(Cell("fsdp2", 2, "qlora"), 2), pytest.param(Cell("fsdp2", 2, "fp8"), 6, marks=pytest.mark.long)],
)
def test_packing_takes_one_layer_at_a_time(results: Path, cell: Cell, copies: int) -> None:
    """Of rank 0, which packs all of the model: on its device are a layer's values and what packs them, no more."""
    config = Base.of(load_recipe(str(results / "recipe.yaml"), [*MODES[cell.mode]])).config
    largest = config.hidden_size * config.intermediate_size * 2  # bytes in bf16
    assert 0 < measured(results, cell)["phases"]["load"]["peak_bytes"] < copies * largest


@pytest.mark.parametrize("cell", CELLS)
def test_memory_by_formula_is_that_of_a_run(results: Path, cell: Cell) -> None:
    """The two levels of `plan`: what the estimate says of a config, and what its own run takes on devices."""
    found = measured(results, cell)
    if "refused" in found:
        return
    recipe = load_recipe(str(results / "recipe.yaml"), [*MODES[cell.mode], *_own(cell, results)])
    launch = read_config_file(str(ROOT / "accelerate_configs" / f"{cell.config}.yaml"), cell.processes)
    place, batch = Place(launch, cell.processes), HeaviestBatch.of_rows(1, recipe.data.max_length)
    micro_batches = recipe.batch.rows // launch.parallelism.data
    estimate = estimate_memory(recipe, Base.of(recipe).config, place, batch, micro_batches)
    peaks = {name: counts["peak_bytes"] for name, counts in found["phases"].items()}
    formula = dict(estimate.phases)
    if cell.config == "ddp":  # whose buckets are its reducer's, without which replicas run here
        formula["forward"] -= estimate.persistent["gradients"]
    assert max(formula.values()) == pytest.approx(max(peaks.values()), rel=0.15)
    kept = sum(size for what, size in estimate.persistent.items() if what != "gradients")
    if "zero" not in cell.config and "offload" not in cell.config:  # DeepSpeed keeps buffers as well
        assert kept == peaks["end"]
