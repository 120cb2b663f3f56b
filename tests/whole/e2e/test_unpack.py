"""A GGUF file becomes a model folder that can be trained, and is refused until it is one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, finetune, metrics
from gguf_files import write_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.errors import UserError
from finetune.unpack import unpack

gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable:UserWarning")


@pytest.mark.parametrize(("name", "kind"), [("llama", "f32"), ("llama_tied", "q8_0")])
def test_a_file_becomes_the_model_that_it_holds(made: Path, tmp_path: Path, name: str, kind: str) -> None:
    file = write_gguf(made / name, tmp_path / "file", kind)
    unpack(file, tmp_path / "model")
    ours, theirs = (AutoModelForCausalLM.from_pretrained(folder) for folder in (tmp_path / "model", made / name))
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in (tmp_path / "model", made / name)]
    assert len({tuple(tokenizer("river stone 7?").input_ids) for tokenizer in tokenizers}) == 1
    ids = torch.arange(12)[None]
    exact = {"rtol": 0, "atol": 0} if kind == "f32" else {"rtol": 0.02, "atol": 0.02}
    torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, **exact)


def test_a_packed_file_is_refused_with_the_command_that_unpacks_it(
    recipe: dict[str, Any], write_recipe: Any, made: Path, tmp_path: Path
) -> None:
    file = write_gguf(made / "llama", tmp_path / "file", "f32")
    path = write_recipe(recipe)
    for named in (file, file.parent):
        refused = finetune("check", path, f"model.name={named}")
        assert refused.returncode == 2
        assert f"model.name: {file} is a GGUF file" in refused.stderr
        assert f"python -m finetune.unpack {file} FOLDER" in refused.stderr


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("none.gguf", None, "no such file"),
        ("text.gguf", b"not a model", "cannot read this GGUF file"),
        ("short.gguf", b"GGUF\x03\x00\x00\x00", "cannot read this GGUF file"),
    ],
)
def test_a_file_that_is_none_is_said(tmp_path: Path, name: str, content: bytes | None, said: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=said):
        unpack(tmp_path / name, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_folder_that_is_there_stays(made: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "file.gguf").touch()
    with pytest.raises(UserError, match="is there already"):
        unpack(tmp_path / "file.gguf", tmp_path / "model")


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_smollm2_is_trained_alike_and_exported(tmp_path: Path) -> None:
    """A pretrained model: needs runs/smollm2, which scripts/make_smollm2.py makes (a download of 93 MB)."""
    if not (ROOT / "runs" / "smollm2" / "model").exists():
        pytest.skip("python scripts/make_smollm2.py has not been run")
    recipe, common = ROOT / "recipes/quickstart/smollm2-lora.yaml", ["train.max_steps=4", f"run.dir={tmp_path}"]
    common += ["evaluate.at_start=false", "evaluate.generate=0"]
    losses = {}
    for config, processes in (("single", 1), ("fsdp2", 2), ("zero3", 2)):
        launcher = ["-m", "accelerate.commands.launch", "--num_processes", str(processes)]
        launcher += ["--config_file", str(ROOT / "accelerate_configs" / f"{config}.yaml")]
        command = [sys.executable, *launcher, "-m", "finetune", "train", str(recipe), *common, f"run.name={config}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        losses[config] = [line["loss"] for line in metrics(tmp_path / config) if "loss" in line]
    assert losses["fsdp2"] == pytest.approx(losses["single"], rel=5e-6)
    assert losses["zero3"] == pytest.approx(losses["single"], rel=5e-6)
    exported = finetune("export", tmp_path / "fsdp2", "--to", "gguf", "-o", tmp_path / "gguf")
    assert exported.returncode == 0, exported.stderr  # compared with the run, or it has no name
    assert list((tmp_path / "gguf").glob("*.gguf"))
