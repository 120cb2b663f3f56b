"""Tensors of a base that transformers leaves out as it reads the model are in every result, as they are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import architectures as sweep
import pytest
import tiny
import torch
from conftest import launch, train_here
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from finetune.release.export.commands import ExportOptions, export_run

# What the published checkpoints have behind the layers, by transformers' class.
HEADS = {
    "qwen3_next": ("mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.mlp.gate.weight"),
    "deepseek_v3": ("model.layers.61.eh_proj.weight", "model.layers.61.self_attn.o_proj.weight"),
    "ernie4_5_moe": ("model.mtp_block.0.norm.weight",),
}
DECLARES = {"qwen3_next": {"mtp_num_hidden_layers": 1}, "deepseek_v3": {"num_nextn_predict_layers": 1}}


def base_with_heads(folder: Path, name: str) -> tuple[Path, dict[str, torch.Tensor]]:
    base, config = folder / name, sweep.tiny(name)
    config.vocab_size = tiny.MODELS["llama"]["vocab_size"]
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(base)
    tiny.tokenizer().save_pretrained(base)
    heads = {key: torch.randn(8, 8, dtype=torch.bfloat16) for key in HEADS[name]}
    file = base / "model.safetensors"
    save_file({**load_file(file), **heads}, file, metadata={"format": "pt"})
    settings = json.loads((base / "config.json").read_text(encoding="utf-8"))
    (base / "config.json").write_text(json.dumps({**settings, **DECLARES.get(name, {})}), encoding="utf-8")
    return base, heads


def check_folder(folder: Path, base: Path, heads: dict[str, torch.Tensor], name: str) -> None:
    found = {key: tensor for file in folder.glob("*.safetensors") for key, tensor in load_file(file).items()}
    with safe_open(base / "model.safetensors", framework="pt") as opened:
        assert found.keys() == set(opened.keys())
    for key, tensor in heads.items():
        assert torch.equal(found[key], tensor)
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert DECLARES.get(name, {}).items() <= settings.items()


@pytest.mark.parametrize(
    "name", ["qwen3_next", *(pytest.param(one, marks=pytest.mark.long) for one in ("deepseek_v3", "ernie4_5_moe"))]
)
def test_a_full_result_and_its_export_keep_them(
    name: str, recipe: dict[str, Any], write_recipe: Any, tmp_path: Path
) -> None:
    base, heads = base_with_heads(tmp_path, name)
    path, run = write_recipe(recipe), tmp_path / "runs" / "run"
    settings = ("train.max_steps=1", "checkpoint.every_steps=1")
    said = train_here(path, f"model.name={base}", *settings)
    assert f"note: {len(heads)} tensors that transformers does not load" in said
    check_folder(run / "model", base, heads, name)
    console = Console(file=(tmp_path / "said.txt").open("w", encoding="utf-8"), width=300)
    export_run(run, ExportOptions(out=tmp_path / "out"), console)
    check_folder(tmp_path / "out", base, heads, name)
    shutil.rmtree(run / "model")  # from the checkpoint
    export_run(run, ExportOptions(out=tmp_path / "again"), console)
    check_folder(tmp_path / "again", base, heads, name)
    console.file.close()
    assert "are kept from the base as they are" in (tmp_path / "said.txt").read_text(encoding="utf-8")


def test_a_merged_adapter_keeps_them(recipe: dict[str, Any], write_recipe: Any, tmp_path: Path) -> None:
    base, heads = base_with_heads(tmp_path, "qwen3_next")
    train_here(
        write_recipe(recipe),
        f"model.name={base}",
        "train.max_steps=1",
        "mode=lora",
        "lora={rank: 4, targets: [q_proj]}",
    )
    export_run(tmp_path / "runs" / "run", ExportOptions(out=tmp_path / "out"), Console(quiet=True))
    check_folder(tmp_path / "out", base, heads, "qwen3_next")


@pytest.mark.parametrize(
    "config",
    [
        "fsdp2",
        pytest.param("pp", marks=pytest.mark.long),
        pytest.param("zero3", marks=pytest.mark.long),
        pytest.param("tp", marks=pytest.mark.long),
    ],
)
def test_a_result_of_several_processes_keeps_them(
    config: str, recipe: dict[str, Any], write_recipe: Any, tmp_path: Path
) -> None:
    name = "deepseek_v3"
    base, heads = base_with_heads(tmp_path, name)
    path = write_recipe({**recipe, "batch": {"rows": 4, "rows_per_device": 1}})
    done = launch(config, 2, "train", path, f"model.name={base}", "train.max_steps=1")
    assert done.returncode == 0, done.stderr[-3000:]
    check_folder(tmp_path / "runs" / "run" / "model", base, heads, name)
