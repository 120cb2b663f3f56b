"""Greedy tokens of llama.cpp on GGUF files written here, beside transformers' on the same model.

    python scripts/proofs/llama_cpp_check.py --venv ~/.cache/finetune-llama-cpp

llama-cpp-python is built once, in an environment of its own (a C++ compiler; cmake comes by pip; ten minutes of a
core or more). Tiny random models of each architecture are written in fp32, or by --types in others: those are compared
with transformers' reading of the same file. Exit status 1 if a token is not the likeliest one, or under q8_0 lacks
more than a tenth of a nat to it. Not part of CI.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import venv
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "support"))

import tiny
from gguf_files import write_gguf

from finetune.release.export.formats import GGUF_TYPES
from finetune.release.export.loading import auto_class
from finetune.release.export.verify_answers import as_llama

PACKAGE = "llama-cpp-python==0.3.36"
_GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8, "tie_word_embeddings": True}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama_tied", {}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral with a window": ("mistral", {"sliding_window": 256}),
    "mixtral": ("mixtral", {}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "gemma2": ("llama", {"model_type": "gemma2", **_GEMMA}),
    "gemma2 27B": ("llama", {"model_type": "gemma2", **_GEMMA, "head_dim": 32, "num_hidden_layers": 46}),
    "gemma3": ("llama", {"model_type": "gemma3_text", **_GEMMA, "num_hidden_layers": 7}),
    "ministral3": ("ministral3", {}),  # beyond the positions that YaRN begins with
    "qwen2.5-vl": ("qwen2_5_vl", {}),
    "qwen3-vl": ("qwen3_vl", {}),
}
TEXTS = ["the river", " stone 1234\n\n  it's", "<|im_start|>user\nquick<|im_end|>"]
NEW_TOKENS = 24
GAP = 0.1  # nats: with q8_0 llama.cpp rounds activations to eight bits as well, which transformers does not
_ASK = """
import json, sys
from llama_cpp import Llama, llama_cpp
defaults = llama_cpp.llama_model_default_params
def params():  # weights as the file has them: 0.3.36 crashed on so small ones that it had repacked for AMX
    chosen = defaults()
    chosen.use_extra_bufts = False
    return chosen
llama_cpp.llama_model_default_params = params
job = json.load(sys.stdin)
model = Llama(job["file"], n_ctx=256, n_threads=1, verbose=False, logits_all=False)
answer, new = model.generate(job["prompt"], temp=0.0, top_k=1, repeat_penalty=1.0), []
while len(new) < job["new_tokens"]:
    new.append(next(answer))
texts = [model.tokenize(text.encode(), add_bos=False, special=True) for text in job["texts"]]
json.dump({"tokens": new, "texts": texts}, sys.stdout)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, required=True, help="environment of llama-cpp-python, made if absent")
    parser.add_argument("--only", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--types", nargs="*", default=["f32"], choices=GGUF_TYPES, help="of the matrices")
    options = parser.parse_args()
    python = _environment(options.venv.expanduser())
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for name, kind in product(options.only, options.types):
            problems = _compare(name, Path(folder) / f"{name.replace(' ', '-')}-{kind}", python, kind)
            failed += bool(problems)
            print(f"{name:12} {kind:5} {'; '.join(problems) or f'{NEW_TOKENS} tokens as they should be'}", flush=True)
    return int(bool(failed))


def _environment(folder: Path) -> Path:
    """Returns the interpreter of an environment with llama-cpp-python, which is built if it is not there."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    if subprocess.run([python, "-c", "import llama_cpp"], capture_output=True).returncode:
        environment = {**os.environ, "CMAKE_BUILD_PARALLEL_LEVEL": "1", "CMAKE_ARGS": "-DGGML_NATIVE=OFF"}
        environment.pop("PYTHONPATH", None)
        subprocess.run([python, "-m", "pip", "install", PACKAGE], check=True, env=environment)
    return python


def _compare(name: str, folder: Path, python: Path, kind: str = "f32") -> list[str]:
    """Returns how llama.cpp differs."""
    base, changes = MODELS[name]
    file = _written(folder, base, changes, kind)
    if kind == "f32":
        model = auto_class(str(folder / base)).from_pretrained(folder / base).eval()
    else:
        config, load = AutoConfig.from_pretrained(folder / base), AutoModelForCausalLM.from_pretrained
        config = as_llama(config) if config.model_type == "mistral" else config
        model: Any = load(file.parent, gguf_file=file.name, config=config, dtype=torch.float32)
        model = model.eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / base)
    prompt = tokenizer(TEXTS[2], add_special_tokens=False)["input_ids"]
    job = {"file": str(file), "prompt": prompt, "new_tokens": NEW_TOKENS, "texts": TEXTS}
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([python, "-c", _ASK], input=json.dumps(job), capture_output=True, text=True, env=environment)
    if done.returncode:
        return [f"llama.cpp ends with status {done.returncode}: {done.stderr.strip()[-200:]}"]
    found = json.loads(done.stdout)
    gap, problems = _largest_gap(model, prompt, found["tokens"]), list[str]()
    if gap > (GAP if kind == "q8_0" else 0):
        problems.append(f"a token that lacks {gap:.2g} nats to the likeliest one")
    for text, ids in zip(TEXTS, found["texts"], strict=True):
        if (expected := tokenizer(text, add_special_tokens=False)["input_ids"]) != ids:
            problems.append(f"{text!r} is {ids} and not {expected}")
    return problems


@torch.no_grad()
def _largest_gap(model: Any, prompt: list[int], tokens: list[int]) -> float:
    """Returns what the least likely of llama.cpp's tokens lacks to transformers' likeliest one there, in nats; 0 if
    all are the same."""
    ids = torch.tensor([prompt + tokens])
    log_probs = torch.log_softmax(model(input_ids=ids).logits[0, len(prompt) - 1 : -1].double(), dim=-1)
    lacks = log_probs.max(dim=1).values - log_probs.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return float(lacks.max())


def _written(folder: Path, base: str, changes: dict[str, Any], kind: str) -> Path:
    """Returns the file of a random model."""
    model = (tiny.save_multimodal if base in tiny.MULTIMODAL else tiny.save_model)(folder, base, **changes)
    (model / "generation_config.json").write_text('{"eos_token_id": 2}')
    return write_gguf(model, folder / "out", kind)


if __name__ == "__main__":
    sys.exit(main())
