"""Runs of tiny models, exported by llama.cpp's converter and quantizer, and read back by the gate.

    python scripts/proofs/gguf_architectures.py --llama-cpp ~/llama.cpp --types q4_k_m --only olmo2 gpt2

A random model of each architecture, in sizes that K-quants need (rows of 256), gets an adapter in a few steps (`--mode
full`: all weights), and `export --to gguf` writes it. The tokenizer is one of llama.cpp's own tests (the checkout's
`models/ggml-vocab-*.gguf`), as its converter knows tokenizers by their ids of a long text; some of its classes want
tokens of their family, or SentencePiece's own file. A line for each: types of tensors, figures of the gate. Exit status
1 if one does not pass. Not part of CI.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import tempfile
import time
import warnings
from itertools import product
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from finetune.api import train
from finetune.errors import RunFailure, UserError
from finetune.models.trials import FAILURES
from finetune.release.export.commands import ExportOptions, export_run
from finetune.release.export.formats import GGUF_TYPES, LLAMA_TYPES

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
_MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "gpt2": {"n_embd": 256, "n_layer": 2, "n_head": 4, "n_positions": 256, "n_ctx": 256},
    "starcoder2": {},
    "stablelm": {},
    "olmo2": {},
    "granite": {},
    "smollm3": {"pad_token_id": 0},
    "cohere": {"pad_token_id": 0},
    "olmo": {"pad_token_id": 0},
    "exaone4": {"sliding_window": None, "pad_token_id": 0},
    "nemotron": {"head_dim": 64, "partial_rotary_factor": 0.5},
    "qwen2_moe": {**_MOE, "shared_expert_intermediate_size": 256, "norm_topk_prob": False},
}
# glm4: all tensors fit, but this random model does not end answers by <|user|>, as the converter says. gpt_neox: the
# converter of llama-cpp-python 0.3.36 cannot read it under transformers 5. The last was not run yet.
NOT_RUN: dict[str, dict[str, Any]] = {
    "glm4": {"head_dim": 64, "pad_token_id": 0},
    "gpt_neox": {"num_key_value_heads": None, "tie_word_embeddings": False},
    "qwen3_moe": {**_MOE, "head_dim": 64},
}
SENTENCEPIECE = ("nemotron",)  # whose class reads tokenizer.model alone
TOKENS = {"glm4": ["<|user|>", "<|endoftext|>"]}  # that a class looks up
WORDS = ("river", "stone", "light", "green", "quick", "north", "seven", "copper", "lantern", "wheel")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-cpp", type=Path, required=True, help="a checkout with its build")
    parser.add_argument("--only", nargs="*", default=list(MODELS), choices=[*MODELS, *NOT_RUN])
    parser.add_argument("--types", nargs="*", default=["q4_k_m"], choices=[*GGUF_TYPES, *LLAMA_TYPES])
    parser.add_argument("--vocabulary", default="gpt-2", help="of the checkout's models/ggml-vocab-NAME.gguf")
    parser.add_argument("--imatrix", type=int, help="rows of an importance matrix")
    parser.add_argument("--mode", default="lora", choices=["lora", "full"], help="what is trained")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    found, failed = dict[str, Any](), 0
    with tempfile.TemporaryDirectory() as folder:
        for name in options.only:
            started = time.monotonic()
            try:
                run = _run(Path(folder), name, options.llama_cpp / "models", options.vocabulary, options.mode)
            except (UserError, RunFailure, *FAILURES) as error:
                print(f"{name:11} no run: {error}", flush=True)
                failed += 1
                continue
            for kind in options.types:
                line, figures = _export(run, Path(folder) / f"{name}-{kind}", kind, options.llama_cpp, options.imatrix)
                failed += figures is None or not figures["passed"]
                found[f"{name} {kind}"] = figures
                print(f"{name:11} {kind:7} {time.monotonic() - started:4.0f} s  {line}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return int(bool(failed))


def _run(folder: Path, name: str, vocabularies: Path, vocabulary: str, mode: str) -> Path:
    """Returns the folder of a run of a few steps on a random model."""
    torch.manual_seed(0)
    base = folder / name / "base"
    vocabulary = "llama-spm" if name in SENTENCEPIECE else vocabulary
    tokenizer: Any = AutoTokenizer.from_pretrained(vocabularies, gguf_file=f"ggml-vocab-{vocabulary}.gguf")
    tokenizer.add_special_tokens({"additional_special_tokens": TOKENS.get(name, [])})
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}{% endfor %}"
    end = tokenizer.eos_token_id
    sizes = {
        **SIZES,
        "vocab_size": len(tokenizer),
        "bos_token_id": end,
        "eos_token_id": end,
        **(MODELS | NOT_RUN)[name],
    }
    sizes = {key: value for key, value in sizes.items() if value is not None}
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)  # nothing is zero or one
    model.save_pretrained(base)
    tokenizer.save_pretrained(base)
    if name in SENTENCEPIECE:
        _write_pieces(vocabularies / f"ggml-vocab-{vocabulary}.gguf", base / "tokenizer.model")
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": end}), encoding="utf-8")
    rows = [{"messages": _chat(a, b)} for a, b in product(WORDS, WORDS)]
    (folder / name / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    recipe = {
        "run": {"name": name, "dir": str(folder / name)},
        "model": {"name": str(base)},
        "mode": mode,
        **({"lora": {"rank": 8}} if mode == "lora" else {}),
        "data": {"train": [{"path": str(folder / name / "rows.jsonl"), "format": "messages"}], "max_length": 128},
        "batch": {"rows": 2},
        "optimizer": {"lr": 1e-2 if mode == "lora" else 1e-3},
        "train": {"max_steps": 5, "precision": "fp32"},
    }
    (file := folder / name / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    with (
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.redirect_stdout(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        return Path(train(file))


def _write_pieces(vocabulary: Path, file: Path) -> None:
    """Write SentencePiece's file of the pieces, scores and kinds in a GGUF file."""
    import gguf
    from sentencepiece import sentencepiece_model_pb2

    kinds: Any = sentencepiece_model_pb2
    fields = gguf.GGUFReader(vocabulary).fields
    model = kinds.ModelProto()
    parts = (fields[f"tokenizer.ggml.{part}"].contents() for part in ("tokens", "scores", "token_type"))
    for piece, score, kind in zip(*parts, strict=True):
        model.pieces.add(piece=piece, score=score, type=kind)  # both number kinds alike
    model.trainer_spec.model_type = kinds.TrainerSpec.BPE
    model.trainer_spec.byte_fallback = True
    file.write_bytes(model.SerializeToString())


def _chat(a: str, b: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{a} and {b}?"}, {"role": "assistant", "content": f"the {b} of the {a}"}]


def _export(run: Path, out: Path, kind: str, llama_cpp: Path, imatrix: int | None) -> tuple[str, dict[str, Any] | None]:
    """Returns a line, and the figures of the gate; None if nothing was written."""
    options = ExportOptions("gguf", out=out, dtype=kind, llama_cpp=llama_cpp, imatrix=imatrix)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            export_run(run, options, Console(quiet=True))
    except (UserError, RunFailure, *FAILURES) as error:
        failed = out.with_name(f"{out.name}.failed") / "verify.json"
        return str(error), json.loads(failed.read_text(encoding="utf-8")) if failed.is_file() else None
    figures = json.loads((out / "verify.json").read_text(encoding="utf-8"))
    shown = {name: figures[name] for name in ("kl_mean", "kl_max", "kl_base", "top1", "update")}
    numbers = "  ".join(f"{name} {value:.3g}" for name, value in shown.items() if value is not None)
    return f"{figures['tensors']} tensors ({figures['types']})  {numbers}", figures


if __name__ == "__main__":
    sys.exit(main())
