"""GGUF: hf -> gguf -> transformers is the same model with the same tokens; Ollama's Modelfile; what is refused."""

from __future__ import annotations

import copy
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import yaml
from conftest import train_here
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from finetune.errors import RunFailure, UserError
from finetune.export.commands import ExportOptions, export_run, verify_run
from finetune.export.folder import export_gguf
from finetune.export.gguf_file import split_name
from finetune.export.trained import find_trained
from finetune.export.verify import as_llama

gguf = pytest.importorskip("gguf")

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama_tied", {}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", {}),
}


def saved(folder: Path, name: str, changes: dict[str, Any]) -> Path:
    model = tiny.save_model(folder, name, **changes)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    (model / "recipe.txt").write_text("")
    return model


@torch.no_grad()
def log_probs(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(model.eval()(input_ids=ids).logits.double(), dim=-1)


def written(model: Path, out: Path, kind: str) -> Path:
    """A full model as a run's result; its recipe is not needed to write."""
    run = out.with_name(f"{out.name}-run")
    (run / "model").mkdir(parents=True)
    shutil.copytree(model, run / "model", dirs_exist_ok=True)
    recipe = {
        "run": {"name": "tiny"},
        "model": {"name": str(model)},
        "mode": "full",
        "data": {"train": [{"path": "rows.jsonl"}], "max_length": 64},
        "batch": {"rows": 1},
        "optimizer": {"lr": 1e-3},
        "train": {"max_steps": 1, "precision": "fp32"},
    }
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    export_gguf(find_trained(run), out, kind)
    (file,) = out.glob("*.gguf")
    return file


def read(file: Path, config: Any) -> Any:
    config = as_llama(config) if config.model_type == "mistral" else copy.deepcopy(config)
    load: Any = AutoModelForCausalLM.from_pretrained
    model, report = load(file.parent, gguf_file=file.name, config=config, dtype=torch.float32, output_loading_info=True)
    assert not any(report.values()), report
    return model


@pytest.mark.parametrize("name", KINDS)
def test_round_trip(tmp_path: Path, name: str) -> None:
    base, changes = KINDS[name]
    folder = saved(tmp_path, base, changes)
    ids = torch.randint(3, 350, (4, 60), generator=torch.Generator().manual_seed(1))
    expected = log_probs(AutoModelForCausalLM.from_pretrained(folder), ids)
    for kind, mean in {"f32": 1e-12, "bf16": 1e-3, "q8_0": 1e-2}.items():
        file = written(folder, tmp_path / kind, kind)
        found = log_probs(read(file, AutoConfig.from_pretrained(folder)), ids)
        assert float((expected.exp() * (expected - found)).sum(-1).mean()) < mean, kind
        if kind == "f32":
            assert float((expected - found).abs().max()) < 1e-6


def test_the_same_tokens_on_a_thousand_strings(tmp_path: Path) -> None:
    folder = saved(tmp_path, "llama", {})
    file = written(folder, tmp_path / "out", "f32")
    ours = AutoTokenizer.from_pretrained(folder)
    theirs = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    rng = random.Random(0)
    pieces = [
        "river",
        " stone",
        "  ",
        "\n",
        "\t",
        "é",
        "日本",
        "🙂",
        "1234",
        "it's",
        "<|im_end|>",
        "x" * 30,
        "\x00",
        "ﬁ",
    ]
    texts = ["".join(rng.choices(pieces, k=rng.randint(1, 9))) for _ in range(1000)]
    assert [ours(text)["input_ids"] for text in texts] == [theirs(text)["input_ids"] for text in texts]
    assert theirs.chat_template == tiny.CHATML


def test_frequency_factors_of_llama_3(tmp_path: Path) -> None:
    """transformers takes them from the config, llama.cpp from the file: theta^(-2i/d) / factor."""
    changes = {"rope_parameters": LLAMA3_ROPE}
    folder = saved(tmp_path, "llama", changes)
    file = written(folder, tmp_path / "out", "f32")
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(file).tensors}
    model = AutoModelForCausalLM.from_pretrained(folder)
    factors = torch.from_numpy(tensors["rope_freqs.weight"].copy())
    plain = 1.0 / 10000.0 ** (torch.arange(0, 16, 2) / 16)
    torch.testing.assert_close(plain / factors, model.model.rotary_emb.inv_freq)
    assert (factors[0], factors[-1]) == (1, 4)  # high frequencies stay
    ids = torch.randint(3, 350, (2, 60))
    found = log_probs(read(file, AutoConfig.from_pretrained(folder)), ids)
    assert float((log_probs(model, ids) - found).abs().max()) < 1e-6


def test_a_run_is_exported_for_ollama_and_compared(made: Path, tmp_path: Path) -> None:
    recipe = {
        "run": {"name": "lora", "dir": str(tmp_path)},
        "model": {"name": str(made / "llama")},
        "mode": "lora",
        "lora": {"rank": 4},
        "data": {"train": [{"path": str(made / "rows.jsonl"), "format": "messages"}], "max_length": 64},
        "batch": {"rows": 2},
        "optimizer": {"lr": 2e-2},
        "train": {"max_steps": 3, "precision": "fp32"},
    }
    (tmp_path / "lora.yaml").write_text(yaml.safe_dump(recipe))
    train_here(tmp_path / "lora.yaml")
    out = tmp_path / "out"
    quiet = Console(quiet=True)
    export_run(tmp_path / "lora", ExportOptions(to="ollama", out=out, dtype="q8_0"), quiet)
    assert sorted(path.name for path in out.iterdir()) == [
        *("Modelfile", "README.md", "export.json", "lora-q8_0.gguf", "verify.json"),
    ]
    assert (out / "Modelfile").read_text() == 'FROM ./lora-q8_0.gguf\nPARAMETER stop "<|im_end|>"\n'
    figures = json.loads((out / "verify.json").read_text())
    assert (figures["passed"], figures["format"]) == (True, "q8_0")
    assert 1e-9 < figures["kl_mean"] < 1e-2
    with pytest.raises(UserError, match="--dtype q4_0: expected one of f32, bf16, f16, q8_0"):
        export_run(tmp_path / "lora", ExportOptions(to="gguf", dtype="q4_0"), quiet)
    # rows of q and k in transformers' order, and another end token, are caught
    options = ExportOptions(to="gguf", out=tmp_path / "f32", dtype="f32")
    export_run(tmp_path / "lora", options, quiet)
    (file,) = (tmp_path / "f32").glob("*.gguf")
    reader = gguf.GGUFReader(file, "r+")
    q = next(tensor for tensor in reader.tensors if tensor.name == "blk.0.attn_q.weight")
    q.data[:] = q.data.reshape(4, 8, 2, -1).swapaxes(1, 2).reshape(q.data.shape).copy()
    reader.fields["tokenizer.ggml.eos_token_id"].parts[-1][0] = 5
    reader.data.flush()
    with pytest.raises(RunFailure) as error:
        verify_run(tmp_path / "f32", tmp_path / "lora", None, None, 8, quiet)
    assert "KL" in str(error.value)
    assert "[2] end an answer in the run" in str(error.value)


@pytest.mark.parametrize(
    ("name", "changes", "fragment"),
    [
        ("mixtral", {}, "--to gguf: mixtral is not written here (only llama, mistral, qwen2, qwen3, qwen3_moe)"),
        ("mistral", {}, "attention within a window of 8 tokens is not written here"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
            "RoPE of type linear",
        ),
        ("qwen3_moe", {"norm_topk_prob": False}, "llama.cpp normalises"),
    ],
)
def test_what_is_not_written_is_refused_by_name(
    tmp_path: Path, name: str, changes: dict[str, Any], fragment: str
) -> None:
    with pytest.raises(UserError) as error:
        written(saved(tmp_path, name, changes), tmp_path / "out", "f32")
    assert fragment in str(error.value)
    assert "convert_hf_to_gguf.py" in str(error.value)


def test_a_tokenizer_that_splits_text_otherwise_is_refused() -> None:
    content = json.loads(tiny.tokenizer().backend_tokenizer.to_str())
    assert split_name(content) == "gpt-2"
    digits = {"type": "Digits", "individual_digits": True}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, content["pre_tokenizer"]]}
    assert split_name(content) is None
    content["model"] |= {"byte_fallback": True}
    assert split_name(content) is None
