"""`export --to base`: merges in the format of a base of 8 or 4 bits, the gate's figures, and errors planted there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import stored
import torch
import yaml
from conftest import train_here
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor
from usual import usual

from finetune.errors import RunFailure, UserError
from finetune.release.export.commands import export_run, verify_run
from finetune.release.export.formats import ExportOptions
from finetune.release.export.loading import load_result

QUIET = Console(quiet=True)
CASES = [("fp8", "qwen3_moe"), ("mxfp4", "gpt_oss"), *((kind, "llama") for kind in stored.MAKE if kind != "mxfp4")]
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def exported(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[str, str]], tuple[Path, Path]]:
    """Returns the run of a format and a model, and its export."""
    known: dict[tuple[str, str], tuple[Path, Path]] = {}

    def get(case: tuple[str, str]) -> tuple[Path, Path]:
        if case not in known:
            kind, name = case
            folder = tmp_path_factory.mktemp(f"{kind}-{name}")
            base, _ = stored.store(made / name, folder, kind)
            recipe = {
                "run": {"name": "run", "dir": str(folder)},
                "model": {"name": str(base)},
                "mode": "lora",
                "lora": {"rank": 4, "alpha": 8},
                "data": {"train": [{"path": str(made / "rows.jsonl"), "format": "messages"}], "max_length": 64},
                "batch": {"rows": 4, "rows_per_device": 4},
                "optimizer": {"lr": 2e-2},
                "train": {"max_steps": 24, "precision": "fp32"},
            }
            (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
            train_here(folder / "recipe.yaml")
            export_run(folder / "run", ExportOptions(to="base"), QUIET)
            known[case] = folder / "run", folder / "run" / "export-base"
        return known[case]

    return get


def base_of(run: Path) -> Path:
    return Path(yaml.safe_load((run / "recipe.yaml").read_text())["model"]["name"])


@pytest.mark.parametrize("case", usual(CASES, ("fp8", "qwen3_moe")), ids="-".join)
def test_the_result_is_in_the_format_of_its_base(exported: Any, case: tuple[str, str]) -> None:
    run, out = exported(case)
    figures = json.loads((out / "verify.json").read_text())
    assert figures["passed"]
    assert 0 < figures["rounding"] < 0.25  # of what adapters add, for the inputs that they read
    assert figures["kl_mean"] < figures["kl_base"] / 4
    base, merged = load_file(base_of(run) / WEIGHTS), load_file(out / WEIGHTS)
    assert {k: (t.shape, t.dtype) for k, t in merged.items()} == {k: (t.shape, t.dtype) for k, t in base.items()}
    settings = [json.loads((folder / "config.json").read_text()) for folder in (base_of(run), out)]
    assert settings[0]["quantization_config"] == settings[1]["quantization_config"]
    assert torch.equal(merged["lm_head.weight"], base["lm_head.weight"])
    # What is read of it: the run's model, but for rounding.
    (ours, _), (theirs, _) = load_result(run), load_result(out)
    ids = torch.arange(3, 23)[None]
    with torch.no_grad():
        logits = [model(input_ids=ids, use_cache=False).logits.float().log_softmax(-1) for model in (ours, theirs)]
    assert (logits[0].exp() * (logits[0] - logits[1])).sum(-1).mean() < 0.2


@pytest.mark.long
def test_the_unpacked_export_is_a_plain_model(exported: Any, tmp_path: Path) -> None:
    run, _ = exported(("fp8", "qwen3_moe"))
    export_run(run, ExportOptions(to="hf", out=tmp_path / "hf"), QUIET)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert "quantization_config" not in config
    figures = json.loads((tmp_path / "hf" / "verify.json").read_text())
    assert figures["passed"]
    assert not any(name.endswith("scale_inv") for name in load_file(tmp_path / "hf" / WEIGHTS))


# --- planted errors


def scale_off(state: dict[str, Tensor], base: dict[str, Tensor]) -> None:
    state["model.layers.1.self_attn.q_proj.weight_scale_inv"][0, 0] *= 1.01


def blocks_swapped(state: dict[str, Tensor], base: dict[str, Tensor]) -> None:
    code = state["model.layers.0.self_attn.o_proj.weight"].view(torch.uint8)
    high, _ = stored.BLOCK
    code[:high], code[high : 2 * high] = code[high : 2 * high].clone(), code[:high].clone()


def expert_stale(state: dict[str, Tensor], base: dict[str, Tensor]) -> None:
    for name in base:
        if ".layers.1.mlp.experts.3." in name:
            state[name] = base[name].clone()


def untrained_changed(state: dict[str, Tensor], base: dict[str, Tensor]) -> None:
    state["model.norm.weight"][3] *= 1.01


def part_lost(state: dict[str, Tensor], base: dict[str, Tensor]) -> None:
    del state["model.layers.0.mlp.experts.0.up_proj.weight_scale_inv"]


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (scale_off, r"q_proj\.weight: weight_scale_inv differs from the run's"),
        pytest.param(
            blocks_swapped, r"layers\.0\.self_attn\.o_proj\.weight: .* values are not the run's", marks=pytest.mark.long
        ),
        (expert_stale, r"layers\.1\.mlp\.experts\.3\.down_proj\.weight: weight_scale_inv differs from the run's"),
        pytest.param(
            *(untrained_changed, r"model\.norm\.weight: 1 of 64 values are not the run's, which is the base's"),
            marks=pytest.mark.long,
        ),
        pytest.param(*(part_lost, r"missing keys: .*experts\.0\.up_proj\.weight_scale_inv"), marks=pytest.mark.long),
    ],
)
def test_planted_errors_are_seen(exported: Any, tmp_path: Path, plant: Any, message: str) -> None:
    run, out = exported(("fp8", "qwen3_moe"))
    damaged = tmp_path / "damaged"
    shutil.copytree(out, damaged)
    state = load_file(out / WEIGHTS)
    plant(state, load_file(base_of(run) / WEIGHTS))
    save_file(state, damaged / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(RunFailure, match=message):
        verify_run(damaged, run, None, None, 4, QUIET)


def test_a_plain_base_has_no_such_export(recipe: dict[str, Any], write_recipe: Any, tmp_path: Path) -> None:
    recipe |= {"mode": "lora", "lora": {"rank": 2}}
    recipe["train"]["max_steps"] = 1
    train_here(write_recipe(recipe))
    with pytest.raises(UserError, match=r"--to base: .* is not stored in fewer bits\. Its plain format"):
        export_run(tmp_path / "runs" / "run", ExportOptions(to="base"), QUIET)
