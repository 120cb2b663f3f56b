"""`export --to gguf` by llama.cpp's tools: types and architectures that are not written here, read back by the gate."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
import yaml
from conftest import train_here
from llama_cpp_tools import make_folder
from rich.console import Console
from usual import usual

from finetune.checkpoints.trained import find_trained
from finetune.errors import RunFailure, UserError
from finetune.release.export.commands import ExportOptions, export_run, verify_run
from finetune.release.export.gguf_export import why_not_here
from finetune.release.export.gguf_places import _changes, _fitting
from finetune.release.export.llama_cpp import VARIABLE, Tools, check_converts, convert
from finetune.release.export.streamed import StreamedModel

gguf = pytest.importorskip("gguf")
QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def runs(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of adapters on a Llama, which is written here, and on a Granite, which is not."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("llama", "granite"):
        base = tiny.save_model(folder / name, "llama", model_type=name)
        recipe = {
            "run": {"name": "lora", "dir": str(folder / name)},
            "model": {"name": str(base)},
            "mode": "lora",
            "lora": {"rank": 4},
            "data": {"train": [{"path": str(made / "rows.jsonl"), "format": "messages"}], "max_length": 64},
            "batch": {"rows": 2},
            "optimizer": {"lr": 2e-2},
            "train": {"max_steps": 3, "precision": "fp32"},
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(recipe))
        train_here(folder / f"{name}.yaml")
    return folder


def figures_of(out: Path) -> dict[str, Any]:
    return json.loads((out / "verify.json").read_text())


def changed(file: Path, tensor: str, change: Any) -> None:
    reader = gguf.GGUFReader(file, "r+")
    one = next(one for one in reader.tensors if one.name == tensor)
    one.data[:] = change(one.data)
    reader.data.flush()


def test_a_type_of_llama_quantize_is_read_back(runs: Path, tmp_path: Path) -> None:
    """With a matrix of the run's own rows, whose special tokens are in the text."""
    tools, out = make_folder(tmp_path / "llama.cpp"), tmp_path / "out"
    options = ExportOptions("gguf", out=out, dtype="q5_0", llama_cpp=tools, imatrix=60)
    export_run(runs / "llama" / "lora", options, QUIET)
    fields = gguf.GGUFReader(out / "lora-q5_0.gguf").fields
    assert fields["quantize.imatrix.file"].contents() == "imatrix.gguf"  # no path of this machine
    assert fields["quantize.imatrix.chunks_count"].contents() >= 60
    assert sorted(path.name for path in out.iterdir()) == ["README.md", "export.json", "lora-q5_0.gguf", "verify.json"]
    figures = figures_of(out)
    assert (figures["passed"], figures["format"]) == (True, "q5_0")
    assert "Q5_0" in figures["types"]
    assert 1e-7 < figures["kl_mean"] < 0.05
    assert figures["update"] == pytest.approx(1.0, abs=0.1)
    changed(out / "lora-q5_0.gguf", "blk.1.attn_v.weight", lambda blocks: blocks[::-1].copy())  # rows of another order
    with pytest.raises(RunFailure, match=r"layers\.1\.self_attn\.v_proj\.weight: is off by 1\d\d% of its size"):
        verify_run(out, runs / "llama" / "lora", None, None, 4, QUIET)


@pytest.mark.parametrize("kind", usual(["f32", "q4_1"], "f32"))
def test_an_architecture_by_the_converter_is_read_back(runs: Path, tmp_path: Path, kind: str) -> None:
    """Granite's rows of q and k are found in the order that llama.cpp has them in; one that is not turned is seen."""
    tools, out, heads = make_folder(tmp_path / "llama.cpp"), tmp_path / "out", 4
    export_run(runs / "granite" / "lora", ExportOptions("gguf", out=out, dtype=kind, llama_cpp=tools), QUIET)
    file = out / f"lora-{kind}.gguf"
    assert sorted(path.name for path in out.iterdir()) == ["README.md", "export.json", file.name, "verify.json"]
    figures = figures_of(out)
    assert figures["passed"]
    assert figures["uncompared"] is None
    assert figures["kl_mean"] < (1e-10 if kind == "f32" else 0.1)
    assert kind == "f32" or figures["update"] == pytest.approx(1.0, abs=0.1)
    changed(
        *(file, "blk.1.attn_q.weight"),
        lambda data: data.reshape(heads, -1, 2, data.shape[1]).swapaxes(1, 2).reshape(data.shape).copy(),
    )
    with pytest.raises(RunFailure, match=r"layers\.1\.self_attn\.q_proj\.weight"):
        verify_run(out, runs / "granite" / "lora", None, None, 4, QUIET)
    reader = gguf.GGUFReader(file, "r+")
    reader.fields["granite.attention.layer_norm_rms_epsilon"].parts[-1][0] *= 2
    reader.data.flush()
    with pytest.raises(RunFailure, match=r"attention\.layer_norm_rms_epsilon is 2e-06, and 1e-06|epsilon is"):
        verify_run(out, runs / "granite" / "lora", None, None, 4, QUIET)


def test_what_is_missing_is_said_before_anything_is_written(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("PATH", "")
    out, gone = tmp_path / "out", tmp_path / "gone"

    def refusal(run: str, **options: Any) -> str:
        with pytest.raises(UserError) as error:
            export_run(runs / run / "lora", ExportOptions(**{"to": "gguf", "out": out, **options}), QUIET)
        assert not out.exists()
        assert not out.with_name("out.partial").exists()
        return str(error.value)

    assert "--dtype q4_k_m: needs llama.cpp's llama-quantize. Fix: give --llama-cpp" in refusal("llama", dtype="q4_k_m")
    assert "granite is not written here" in refusal("granite", dtype="f32")
    assert f"--llama-cpp: {gone} is no folder" in refusal("llama", dtype="q4_0", llama_cpp=gone)
    monkeypatch.setenv(VARIABLE, str(gone))
    assert f"{VARIABLE}: {gone} is no folder" in refusal("llama", dtype="q4_0")
    tools = make_folder(tmp_path / "llama.cpp")
    monkeypatch.setenv(VARIABLE, str(tools))
    (tools / "build" / "bin" / "llama-imatrix").unlink()
    assert "--imatrix: needs llama.cpp's llama-imatrix" in refusal("llama", dtype="q4_0", imatrix=8)
    assert "--imatrix: has no effect on f32" in refusal("llama", dtype="f32", imatrix=8)
    assert "--dtype iq2_xs: needs an importance matrix" in refusal("llama", dtype="iq2_xs")
    assert "--llama-cpp only applies to --to gguf" in refusal("llama", to="hf", llama_cpp=tools)
    with pytest.raises(UserError, match="does not know MambaForCausalLM"):
        check_converts(Tools().converter() or [], "MambaForCausalLM")


def test_a_tool_that_fails_is_shown(runs: Path, tmp_path: Path) -> None:
    tools, out = make_folder(tmp_path / "llama.cpp"), tmp_path / "out"
    with pytest.raises(RunFailure, match=r"llama-quantize ended with status 1:\n.*(?s:.)*KeyError: 'Q4_K_M'"):
        export_run(runs / "llama" / "lora", ExportOptions("gguf", out=out, dtype="q4_k_m", llama_cpp=tools), QUIET)
    assert not out.exists()
    (script := tmp_path / "broken.py").write_text("raise SystemExit('no torch')")
    with pytest.raises(
        UserError, match=r"converter does not run here\.\n  no torch\nFix: in its folder, pip install -r"
    ):
        check_converts([sys.executable, str(script)], "LlamaForCausalLM")
    for said, remedy in (
        ("no torch", "the lines above are llama.cpp's own: update it"),
        ("FileNotFoundError: File not found: /a b/hf/tokenizer.model", "put that into the base's folder"),
        ("KeyError: '<|user|>'", r"wants the special token <\|user\|>: train from a base with its family's"),
        (
            "KeyError: 'rotary_pct'",
            "reads `rotary_pct`, which transformers 5 does not write any more: update llama.cpp",
        ),
        ("NotImplementedError: BPE pre-tokenizer was not recognized - update", "is not known to llama.cpp: update"),
    ):
        script.write_text(f"raise SystemExit({said!r})")
        with pytest.raises(RunFailure, match=rf"{re.escape(said)}\nFix: .*{remedy}.*, or serve the folder of `export"):
            convert([sys.executable, str(script)], tmp_path, tmp_path / "x.gguf", "f32", "x")


def test_code_of_the_base_is_not_handed_to_the_converter(runs: Path, tmp_path: Path) -> None:
    """It runs what it finds beside a tokenizer: not what the recipe does not trust."""
    from finetune.release.export.gguf_export import _write_folder

    model = StreamedModel(find_trained(runs / "granite" / "lora"))
    assert model.base is not None
    (model.base.folder / "own.py").write_text("raise SystemExit")
    (model.base.folder / "tokenizer.model").write_text("pieces")  # which some of its classes read alone
    assert "granite is not written here" in str(why_not_here(model))
    (tmp_path / "hf").mkdir()
    _write_folder(model, tmp_path / "hf")
    assert (tmp_path / "hf" / "config.json").is_file()
    assert (tmp_path / "hf" / "tokenizer.model").is_file()
    assert not list((tmp_path / "hf").glob("*.py"))
    (model.base.folder / "own.py").unlink()
    (model.base.folder / "tokenizer.model").unlink()


def test_q_k_and_v_of_all_heads_are_found_in_those_of_each_head() -> None:
    """As the converter writes GPT-NeoX's: a fused matrix of each head's q, k and v, and its bias."""
    heads, size, columns = 4, 8, 16
    config = SimpleNamespace(num_attention_heads=heads, num_key_value_heads=heads)
    for rest in ((columns,), ()):
        ours = torch.randn(3 * heads * size, *rest)
        parts = [[ours[(3 * head + part) * size :][:size] for head in range(heads)] for part in range(3)]
        theirs = torch.cat([rows for part in parts for rows in part])
        change, is_clear = _fitting(_changes(theirs.shape, ours.shape, config), lambda x=theirs: x, lambda e=ours: e)
        assert is_clear
        assert change is not None
        assert torch.equal(change[0](theirs), ours)


@pytest.mark.long
@pytest.mark.skipif(VARIABLE not in os.environ, reason=f"{VARIABLE} names no build of llama.cpp")
@pytest.mark.parametrize("kind", usual(["q4_k_m", "q6_k", "q3_k_s", "mxfp4_moe", "iq4_xs"]))
def test_types_of_llama_cpp_itself(runs: Path, tmp_path: Path, kind: str) -> None:
    export_run(runs / "llama" / "lora", ExportOptions("gguf", out=tmp_path / "out", dtype=kind), QUIET)
    figures = figures_of(tmp_path / "out")
    assert (figures["passed"], figures["format"]) == (True, kind)
