"""`export --quantize`: files that compressed-tensors itself would have written, read by transformers, within what
eight bits cost."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import train_here
from rich.console import Console
from safetensors.torch import load_file, save_file
from usual import usual

from finetune.errors import RunFailure, UserError
from finetune.release.export.commands import ExportOptions, export_run, verify_run
from finetune.release.export.eight_bits import quantize

QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def runs(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantised")
    for name in ("llama", "llama_tied", "mixtral"):
        recipe = {
            "run": {"name": name, "dir": str(folder)},
            "model": {"name": str(made / name)},
            "mode": "lora",
            "lora": {"rank": 4, "targets": ["q_proj", "v_proj"]},
            "data": {"train": [{"path": str(made / "rows.jsonl"), "format": "messages"}], "max_length": 64},
            "batch": {"rows": 2},
            "optimizer": {"lr": 2e-2},
            "train": {"max_steps": 2, "precision": "fp32"},
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(recipe))
        train_here(folder / f"{name}.yaml")
    return folder


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_weight_is_its_rounding(kind: str) -> None:
    weight = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight[2] = 0
    made = quantize(weight, kind)
    scale = made["weight_scale"]
    assert (scale.shape, scale.dtype) == ((6, 1), torch.bfloat16)
    if kind == "fp8":
        values, step = made["weight"].float(), weight.float().abs() / 16  # half of E4M3's distance, above 2^-6
    else:
        assert made["weight_packed"].shape == (6, 2)
        assert made["weight_shape"].tolist() == [6, 8]
        words = made["weight_packed"].long() & 0xFFFFFFFF
        values = torch.stack([(words >> 8 * i & 255) - 128 for i in range(4)], dim=-1).reshape(6, 8).float()
        step = scale.float() * 0.5 + weight.float().abs() / 256  # and the scale's own rounding, at the largest
    assert bool(((values * scale.float() - weight.float()).abs() <= step + 1e-2 * scale.float()).all())
    assert not values[2].any()


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("name", usual(("llama", "llama_tied"), "llama_tied"))
def test_an_export_is_read_and_answers_like_the_run(runs: Path, tmp_path: Path, name: str, kind: str) -> None:
    out = tmp_path / kind
    export_run(runs / name, ExportOptions(out=out, quantized=kind), QUIET)
    figures = json.loads((out / "verify.json").read_text())
    assert (figures["passed"], figures["format"]) == (True, kind)
    assert 1e-9 < figures["kl_mean"] < (1e-4 if kind == "int8" else 1e-2)
    export_run(runs / name, ExportOptions(out=tmp_path / "plain", verify=False), QUIET)
    plain, ours = load_file(tmp_path / "plain" / "model.safetensors"), load_file(out / "model.safetensors")
    untouched = {key for key in plain if "proj" not in key}
    assert untouched == {key for key in ours if "proj" not in key}
    assert all(torch.equal(plain[key], ours[key]) for key in untouched)
    if find_spec("compressed_tensors") is None:  # else its own compressor writes the same
        return
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    settings = QuantizationConfig.model_validate(json.loads((out / "config.json").read_text())["quantization_config"])
    (scheme,) = settings.config_groups.values()
    stem = "model.layers.1.self_attn.q_proj"
    state = {"weight": plain[f"{stem}.weight"], "weight_scale": ours[f"{stem}.weight_scale"]}
    theirs = BaseCompressor.get_value_from_registry(settings.format).compress(state, scheme)
    assert all(torch.equal(ours[f"{stem}.{key}"], value) for key, value in theirs.items())


def test_experts_are_written_one_by_one(runs: Path, tmp_path: Path) -> None:
    """A matrix of each expert and projection, the router as it is; an expert's scales in another order are caught."""
    out = tmp_path / "out"
    export_run(runs / "mixtral", ExportOptions(out=out, quantized="int8"), QUIET)
    figures = json.loads((out / "verify.json").read_text())
    assert figures["passed"], figures["problems"]
    assert 1e-9 < figures["kl_mean"] < 1e-2  # a router near a tie takes another expert
    export_run(runs / "mixtral", ExportOptions(out=tmp_path / "plain", verify=False), QUIET)
    plain, ours = load_file(tmp_path / "plain" / "model.safetensors"), load_file(out / "model.safetensors")
    ahead = "model.layers.1.block_sparse_moe"
    settings = json.loads((out / "config.json").read_text())["quantization_config"]
    assert f"{ahead}.gate" in settings["ignore"]
    assert torch.equal(ours[f"{ahead}.gate.weight"], plain[f"{ahead}.gate.weight"])
    for expert in range(8):
        for matrix in ("w1", "w2", "w3"):
            stem = f"{ahead}.experts.{expert}.{matrix}"
            made = quantize(plain[f"{stem}.weight"], "int8")
            assert all(torch.equal(ours[f"{stem}.{key}"], value) for key, value in made.items())
    key = f"{ahead}.experts.3.w2.weight_scale"
    ours[key] = ours[key].flip(0).contiguous()
    save_file(ours, out / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RunFailure, match=r"weights: model.layers.1.mlp.experts.down_proj: 2,048 of"):
        verify_run(out, runs / "mixtral", None, None, 8, QUIET)


# --- tampered


def changed(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def tamper(folder: Path) -> None:
        state = load_file(folder / "model.safetensors")
        change(state)
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})

    return tamper


def ignoring(names: Callable[[list[str]], list[str]]) -> Callable[[Path], object]:
    def tamper(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        settings = config["quantization_config"]
        settings["ignore"] = names(settings["ignore"])
        (folder / "config.json").write_text(json.dumps(config))

    return tamper


DOWN = "model.layers.0.mlp.down_proj"


def no_block(state: dict[str, Any]) -> None:
    """A quarter of a layer's rows are zero."""
    if (packed := state.get(f"{DOWN}.weight_packed")) is not None:
        packed[:16] = torch.tensor([128] * 4, dtype=torch.uint8).view(torch.int32)
    else:
        state[f"{DOWN}.weight"].view(torch.uint8)[:16] = 0


TAMPERED: dict[str, tuple[Callable[[Path], object], str]] = {
    "a layer's scales": (changed(lambda state: state[f"{DOWN}.weight_scale"].mul_(2)), f"{DOWN}.weight: "),
    "scales in another order": (
        changed(lambda state: state.update({f"{DOWN}.weight_scale": state[f"{DOWN}.weight_scale"].flip(0)})),
        f"{DOWN}.weight: ",
    ),
    "a zeroed block": (changed(no_block), f"{DOWN}.weight: "),
    "a layer that is ignored": (ignoring(lambda names: [*names, DOWN]), f"{DOWN} is in eight bits, and config.json"),
    "a head that is not": (ignoring(lambda names: []), "lm_head is not in eight bits, and config.json"),
}


@pytest.mark.parametrize("kind", ["int8", pytest.param("fp8", marks=pytest.mark.long)])
def test_a_tampered_export_is_caught(runs: Path, tmp_path: Path, kind: str) -> None:
    export_run(runs / "llama", ExportOptions(out=tmp_path / "out", quantized=kind), QUIET)
    for i, (name, (change, fragment)) in enumerate(TAMPERED.items()):
        change(Path(shutil.copytree(tmp_path / "out", tmp_path / str(i))))
        with pytest.raises(RunFailure) as error:
            verify_run(tmp_path / str(i), runs / "llama", None, None, 8, QUIET)
        assert fragment in str(error.value), name


def test_what_is_not_quantised_is_refused_by_name(runs: Path, tmp_path: Path) -> None:
    cases = {
        "awq": "llm-compressor's AWQModifier",
        "gptq": "GPT-QModel",
        "int3": "Fix: give one of int8, fp8",
    }
    for kind, fragment in cases.items():
        with pytest.raises(UserError, match=fragment):
            export_run(runs / "llama", ExportOptions(out=tmp_path / "out", quantized=kind), QUIET)
    with pytest.raises(UserError, match="only goes with --to hf"):
        export_run(runs / "llama", ExportOptions(to="gguf", out=tmp_path / "out", quantized="int8"), QUIET)
    with pytest.raises(UserError, match=r"vLLM loads experts \(model.layers.0.mlp.experts.gate_up_proj\) only with"):
        export_run(runs / "mixtral", ExportOptions(out=tmp_path / "out", verify=False, quantized="fp8"), QUIET)
    assert not (tmp_path / "out").exists()
