"""Mistakes around bases as they are published: stored in fewer bits, with heads that predict ahead, and exported again.

Each is answered by one short sentence that says what is wrong and where, and ends with what to do.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mtp_bases
import pytest
import stored
import torch
import yaml
from conftest import ROOT, train_here
from rich.console import Console
from safetensors.torch import load_file, save_file

from finetune.desk.setup.check import check_recipe
from finetune.errors import UserError
from finetune.release.export.commands import ExportOptions, export_run
from finetune.release.inference.evaluate import EvaluateOptions, evaluate_runs

QUIET = Console(quiet=True)
LORA = ("mode=lora", "lora={rank: 4}")
HEAD = ("model.mtp=train",)
WORDS = 12  # of the first sentence


@dataclass(frozen=True)
class Bad:
    """A recipe that cannot run on a base."""

    base: str  # a format of `stored.MAKE`, a row of `mtp_bases.BASES`, both, or llama
    message: str  # part of the error
    recipe: tuple[str, ...] = LORA  # overrides
    settings: dict[str, Any] = field(default_factory=dict)  # changes of `quantization_config`
    lacks: str | None = None  # pattern of names of tensors
    has: str | None = None  # name of a tensor in addition
    config: str | None = None  # of accelerate, by name
    sizes: dict[str, Any] = field(default_factory=dict)  # changes of its `parallelism_config`
    processes: int = 2


def compressed(*groups: dict[str, Any], layout: str = "pack-quantized") -> dict[str, Any]:
    return {"format": layout, "config_groups": {str(i): group for i, group in enumerate(groups)}}


INT8 = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}
RECIPES = {
    # --- formats
    "of another library": Bad("fp8", "is stored as hqq. That is not read", settings={"quant_method": "hqq"}),
    "without a format's name": Bad("fp8", "has no `quant_method`", settings={"quant_method": None}),
    "fp8 without blocks": Bad("fp8", "Its config has no `weight_block_size`", settings={"weight_block_size": None}),
    "experts in fp4": Bad("fp8", "fp8 with other parts in fp4", settings={"expert_dtype": "fp4"}),
    "three bits": Bad("gptq", "Four bits are read here", settings={"bits": 3}),
    "rules by layer": Bad("gptq", "One rule for all layers", settings={"dynamic": {"a": 1}}),
    "a layout of a kernel": Bad("gptq", "gptq and gptq_v2 are read here", settings={"checkpoint_format": "marlin"}),
    "a version of awq": Bad("awq", "Four bits and version gemm", settings={"version": "gemv"}),
    "integers of eight bits": Bad("w4a16", "int-quantized (8 bits", settings=compressed(INT8, layout="int-quantized")),
    "two groups": Bad("w4a16", "One format for all linear", settings=compressed(INT8, INT8)),
    "turned layers": Bad("nvfp4", "Its layers are transformed", settings={"transform_config": {"a": 1}}),
    "blocks of another size": Bad("fp8", "By its config", settings={"weight_block_size": [16, 16]}),
    "a scale that is missing": Bad("fp8", "lacks model.layers.0.mlp.", lacks=r"layers\.0\.mlp\..*_scale_inv"),
    # --- what they are trained by
    "all weights": Bad("fp8", "is stored as fp8 blocks, for frozen weights", ("mode=full",)),
    "packed again": Bad("mxfp4", "would pack them again", ("mode=qlora", "lora={rank: 4}", "quantization={}")),
    "norms of rows": Bad("nvfp4", "peft cannot unpack", (*LORA, "lora.dora=true")),
    "compiled": Bad("fp8", "compiled layers unpack", (*LORA, "train.compile=true")),
    "divided matrices": Bad("fp8", "ranks would split blocks that share a scale", config="tp"),
    "stages": Bad("fp8", "a stage reads its own layers", config="pp"),
    "experts that do not divide": Bad(
        *("mxfp4", "must divide the model's 4 experts: set it to"),
        config="ep",
        sizes={"parallelism_config_ep_size": 3},
        processes=3,
    ),
    # --- heads
    "a family without a head": Bad("llama", "the head of `llama` cannot be trained", HEAD),
    "no head in the files": Bad("qwen3_5_text", "has no head that predicts several tokens", HEAD, lacks=r"mtp\."),
    "half a head": Bad("qwen3_5_text", "lacks 1 tensors, such as `mtp.fc.weight`", HEAD, lacks=r"mtp\.fc\."),
    "two heads": Bad("qwen3_5_text", "has several heads", HEAD, has="mtp.layers.1.norm.weight"),
    "an unknown part": Bad("qwen3_5_text", "No part of a head that is trained", HEAD, has="mtp.draft.weight"),
    "a head in fewer bits without a scale": Bad(
        *("fp8 glm4_moe", "lacks 1 tensors, such as `model.layers.2.self_attn.q_proj.weight_scale_inv`"),
        recipe=(*LORA, *HEAD),
        lacks=r"layers\.2\.self_attn\.q_proj\.weight_scale_inv",
    ),
    "a schedule of halves": Bad(
        *("qwen3_5_text", "has a second path to the embedding", HEAD),
        config="pp",
        sizes={"parallelism_config_pp_schedule": "zero_bubble"},
    ),
}


def well_said(text: str) -> bool:
    """Returns whether an error begins with one short sentence, and ends with what to do."""
    first, end = re.split(r"[.;] |\n", text.strip())[0], text.rpartition("Fix: ")[2]
    return len(first.split()) <= WORDS and "Fix: " in text and not end.strip().endswith(".")


@pytest.fixture(scope="module")
def bases(made: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, names = tmp_path_factory.mktemp("bases"), {bad.base for bad in RECIPES.values()}
    plain = {"mxfp4": "gpt_oss"}
    found = {kind: stored.store(made / plain.get(kind, "llama"), folder, kind)[0] for kind in names & {*stored.MAKE}}
    found |= {name: mtp_bases.save_base(folder, name) for name in names & {*mtp_bases.BASES}}
    for both in (name for name in names if " " in name):
        kind, name = both.split()
        found[both] = stored.store(mtp_bases.save_base(folder / both, name), folder / both, kind)[0]
    return {**found, "llama": made / "llama"}


def changed(bad: Bad, bases: dict[str, Path], folder: Path) -> Path:
    """Returns a base with what is wrong with it."""
    base = folder / "base"
    shutil.copytree(bases[bad.base], base)
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    if bad.settings:
        config["quantization_config"] |= bad.settings
        (base / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if bad.lacks or bad.has:
        state = load_file(base / "model.safetensors")
        state = {name: one for name, one in state.items() if not bad.lacks or not re.search(bad.lacks, name)}
        save_file(state | ({bad.has: torch.ones(64)} if bad.has else {}), base / "model.safetensors", {"format": "pt"})
    return base


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_that_cannot_run_on_its_base(
    name: str, recipe: dict[str, Any], write_recipe: Any, bases: dict[str, Path], tmp_path: Path
) -> None:
    bad = RECIPES[name]
    overrides = (f"model.name={changed(bad, bases, tmp_path)}", *bad.recipe)
    path = write_recipe(recipe)
    if bad.config is None:
        with pytest.raises(UserError) as raised:
            train_here(path, *overrides)
        said = str(raised.value)
    else:
        launch = yaml.safe_load((ROOT / "accelerate_configs" / f"{bad.config}.yaml").read_text(encoding="utf-8"))
        launch["parallelism_config"] = {**launch.get("parallelism_config", {}), **bad.sizes}
        (tmp_path / "launch.yaml").write_text(yaml.safe_dump(launch), encoding="utf-8")
        said = check_recipe(path, overrides, tmp_path / "launch.yaml", bad.processes).error or ""
    assert bad.message in said
    assert well_said(said), said


# --- results

EXPORTS: dict[str, tuple[dict[str, Any], str]] = {
    "no such format": ({"to": "mlx"}, "no such format"),
    "as a plain base": ({"to": "base"}, "is not stored in fewer bits"),
    "a type of another format": ({"to": "hf", "dtype": "q4_k_m"}, "no type of `--to hf`"),
    "a type that needs data": ({"to": "hf", "quantized": "awq"}, "needs calibration"),
    "eight bits in a GGUF file": ({"to": "gguf", "quantized": "fp8"}, "only goes with --to hf"),
    "a tool that is not there": ({"to": "gguf", "dtype": "q4_k_m"}, "needs llama.cpp's llama-quantize"),
    "a folder that is not there": ({"to": "gguf", "dtype": "q4_k_m", "llama_cpp": Path("none")}, "is no folder"),
    "a matrix without effect": ({"to": "gguf", "dtype": "q8_0", "imatrix": 8}, "has no effect on q8_0"),
    "a type without its matrix": ({"to": "gguf", "dtype": "iq2_xs"}, "needs an importance matrix"),
    "tools of another format": ({"to": "hf", "imatrix": 8}, "only applies to --to gguf"),
}


@pytest.fixture(scope="module")
def run(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    values = {
        "run": {"name": "run", "dir": str(folder)},
        "model": {"name": str(made / "llama")},
        "mode": "lora",
        "lora": {"rank": 4},
        "data": {"train": [{"path": str(made / "rows.jsonl"), "format": "messages"}], "max_length": 64},
        "batch": {"rows": 4, "rows_per_device": 4},
        "optimizer": {"lr": 1e-3},
        "train": {"max_steps": 1, "precision": "fp32"},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    train_here(folder / "recipe.yaml")
    return folder / "run"


@pytest.mark.parametrize("name", EXPORTS)
def test_an_export_that_is_not_possible(name: str, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options, message = EXPORTS[name]
    monkeypatch.delenv("LLAMA_CPP_DIR", raising=False)
    monkeypatch.setenv("PATH", "")
    before = sorted(run.iterdir())
    with pytest.raises(UserError, match=re.escape(message)) as raised:
        export_run(run, ExportOptions(**options), QUIET)
    assert well_said(str(raised.value)), raised.value
    assert sorted(run.iterdir()) == before


def test_a_library_that_is_missing_is_named(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match="needs the package gguf") as raised:
        export_run(run, ExportOptions("gguf"), QUIET)
    assert well_said(str(raised.value)), raised.value
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    with pytest.raises(UserError, match="needs the package lm_eval") as raised:
        evaluate_runs([run], EvaluateOptions(("gsm8k",)), QUIET)
    assert well_said(str(raised.value)), raised.value


def test_a_head_that_is_not_there_is_not_measured(run: Path) -> None:
    with pytest.raises(UserError, match="has no head that can be measured") as raised:
        evaluate_runs([run], EvaluateOptions((), head=True), QUIET)
    assert well_said(str(raised.value)), raised.value
