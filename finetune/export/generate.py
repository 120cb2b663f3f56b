"""`generate`: answers of a finished run, in the terminal."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, TextStreamer

from finetune.errors import UserError


def answer_prompts(run_dir: Path, prompts: list[str], max_new_tokens: int, temperature: float, as_json: bool) -> None:
    """Answer each prompt; without any, ask for them until an empty line or end of input. Raises UserError."""
    model, tokenizer = load_result(run_dir)
    asked = prompts or _typed(as_json)
    for prompt in asked:
        if not as_json and len(prompts) > 1:
            print(f"> {prompt}")
        streamer = None if as_json else TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        answer = _answer(model, tokenizer, prompt, max_new_tokens, temperature, streamer)
        if as_json:
            print(json.dumps({"prompt": prompt, "answer": answer}, ensure_ascii=False), flush=True)


def load_result(run_dir: Path) -> tuple[Any, Any]:
    """Model and tokenizer of a run directory, or of a model folder itself. Raises UserError where there is none."""
    folder = run_dir / "model" if (run_dir / "model").is_dir() else run_dir
    if not any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise UserError(
            f"{run_dir}: no result here (no model/config.json or model/adapter_config.json); has it finished?"
        )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    if (folder / "generation_config.json").is_file():  # an adapter's model has its base's, which ends elsewhere
        model.generation_config = GenerationConfig.from_pretrained(folder)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    return model.to(device).eval(), tokenizer


def _typed(as_json: bool) -> Any:
    """Lines of standard input, with a prompt where someone types them."""
    while True:
        if sys.stdin.isatty() and not as_json:
            print("> ", end="", flush=True)
        line = sys.stdin.readline().rstrip("\n")
        if not line:
            return
        yield line


@torch.no_grad()
def _answer(
    model: Any, tokenizer: Any, prompt: str, max_new_tokens: int, temperature: float, streamer: TextStreamer | None
) -> str:
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        inputs = tokenizer(prompt, return_tensors="pt")
    inputs = {name: tensor.to(model.device) for name, tensor in inputs.items() if name != "token_type_ids"}
    sampling: dict[str, Any] = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    output = model.generate(**inputs, max_new_tokens=max_new_tokens, streamer=streamer, **sampling)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
