"""The gate against tampered exports: files and tensors alone, as of a model that is too large to be loaded whole."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import yaml
from conftest import train_here
from rich.console import Console
from safetensors.torch import load_file, save_file

from finetune.checkpoints.trained import find_trained
from finetune.errors import RunFailure, UserError
from finetune.release.export import verify
from finetune.release.export.commands import ExportOptions, export_run, verify_run
from finetune.release.export.hf_folder import export_folder

QUIET = Console(quiet=True)
Change = Callable[[Path], object]


@pytest.fixture(scope="module")
def exports(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of an adapter, and its right exports, by kind, in <run>/<kind>."""
    folder = tmp_path_factory.mktemp("tampers")
    recipe = {
        "run": {"name": "run", "dir": str(folder)},
        "model": {"name": str(made / "llama")},
        "mode": "lora",
        "lora": {"rank": 4, "rslora": True, "targets": ["q_proj", "down_proj"]},
        "data": {"train": [{"path": str(made / "rows.jsonl"), "format": "messages"}], "max_length": 64},
        "batch": {"rows": 2},
        "optimizer": {"lr": 3e-2},
        "train": {"max_steps": 2, "precision": "fp32"},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(recipe))
    train_here(folder / "run.yaml")
    run = folder / "run"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(verify, "WHOLE_BYTES", 0)
        for kind, options in {
            "hf": {},
            "bf16": {"dtype": "bfloat16"},
            "int8": {"quantized": "int8"},
            "fp8": {"quantized": "fp8"},
            "ollama": {"to": "ollama", "dtype": "q8_0"},
        }.items():
            export_run(run, ExportOptions(out=run / kind, **options), QUIET)
    export_folder(find_trained(run), run / "shards", shard_bytes=200_000)
    shutil.copytree(run / "model", run / "adapter")
    return run


def said(exports: Path, kind: str, folder: Path, change: Change) -> str:
    """Returns what the gate says of a changed copy; nothing if it passes."""
    shutil.copytree(exports / kind, folder / kind)
    change(folder / kind)
    try:
        verify_run(folder / kind, exports, None, None, 4, QUIET)
    except (RunFailure, UserError) as failure:
        return str(failure)
    return ""


# --- changes


def keys(name: str, **values: Any) -> Change:
    def change(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        for path, value in values.items():
            inner, *rest = content, *path.split("__")
            for key in rest[:-1]:
                inner = inner[key]
            inner[rest[-1]] = value(inner[rest[-1]]) if callable(value) else value
        (folder / name).write_text(json.dumps(content))

    return change


def without(name: str, *names: str) -> Change:
    def change(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({k: v for k, v in content.items() if k not in names}))

    return change


def state(change: Callable[[dict[str, Any]], object], name: str = "model.safetensors") -> Change:
    def tamper(folder: Path) -> None:
        tensors = load_file(folder / name)
        change(tensors)
        tensors = {key: tensor.clone().contiguous() for key, tensor in tensors.items()}
        save_file(tensors, folder / name, metadata={"format": "pt"})

    return tamper


def of(name: str, change: Callable[[Any], Any]) -> Change:
    """Changes one tensor."""
    return state(lambda tensors: tensors.update({name: change(tensors[name])}))


def put(index: Any, value: float) -> Callable[[Any], Any]:
    def change(tensor: Any) -> Any:
        tensor[index] = value
        return tensor

    return change


def swap(one: str, other: str) -> Change:
    return state(lambda tensors: tensors.update({one: tensors[other], other: tensors[one]}))


def template(before: str, after: str) -> Change:
    return lambda f: (f / "chat_template.jinja").write_text(
        (f / "chat_template.jinja").read_text().replace(before, after, 1)
    )


def file(name: str, content: str = "{}") -> Change:
    def change(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)

    return change


def copied(name: str, to: str) -> Change:
    return lambda folder: shutil.copy(folder / name, folder / to)


def linked(folder: Path) -> None:
    """Weights that lie elsewhere, and that may change there."""
    shutil.move(folder / "model.safetensors", folder.with_name("elsewhere"))
    os.symlink(folder.with_name("elsewhere"), folder / "model.safetensors")


def all_of(*changes: Change) -> Change:
    return lambda folder: [change(folder) for change in changes]


def as_type(dtype: torch.dtype) -> Callable[[dict[str, Any]], object]:
    return lambda tensors: tensors.update({name: tensor.to(dtype) for name, tensor in tensors.items()})


def swapped_ids(vocabulary: dict[str, int]) -> dict[str, int]:
    one, other = list(vocabulary)[100:102]
    return vocabulary | {one: vocabulary[other], other: vocabulary[one]}


def first_with(key: str, value: Any) -> Callable[[list[dict[str, Any]]], list[dict[str, Any]]]:
    return lambda tokens: [{**tokens[0], key: value}, *tokens[1:]]


def flip(bit: int) -> Callable[[Any], Any]:
    def change(tensor: Any) -> Any:
        tensor.view(torch.int32)[5, 5] ^= 1 << bit
        return tensor

    return change


def lost_update(exports: Path) -> Any:
    settings = json.loads((exports / "model" / "adapter_config.json").read_text())
    return load_file(Path(settings["base_model_name_or_path"]) / "model.safetensors")[Q]


def in_file(before: bytes, after: bytes) -> Change:
    """Changes bytes of the GGUF file, without moving others."""

    def change(folder: Path) -> None:
        (path,) = folder.glob("*.gguf")
        content = path.read_bytes()
        assert len(before) == len(after)
        assert before in content
        path.write_bytes(content.replace(before, after, 1))

    return change


def field(name: str, value: Any, at: int = 0) -> Change:
    def change(folder: Path) -> None:
        (path,) = folder.glob("*.gguf")
        reader = gguf.GGUFReader(path, "r+")
        one = reader.fields[name]
        one.parts[one.data[at]][0] = value
        reader.data.flush()

    return change


def blocks(name: str, change: Callable[[Any], object]) -> Change:
    """Changes the bytes of a tensor: of q8_0 34 for each block, a scale of two and 32 numbers."""

    def tamper(folder: Path) -> None:
        (path,) = folder.glob("*.gguf")
        reader = gguf.GGUFReader(path, "r+")
        change(next(one for one in reader.tensors if one.name == name).data)
        reader.data.flush()

    return tamper


def scales(data: Any) -> None:
    for row in data:
        pairs = row.reshape(-1, 34)
        pairs[:, :2] = (pairs[:, :2].copy().view("float16") * 1.01).astype("float16").view("uint8")


def one_number(data: Any) -> None:
    data[3, 7] ^= 0x40


Q, DOWN = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight"
K, V = Q.replace("q_proj", "k_proj"), Q.replace("q_proj", "v_proj")
EMBED, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
TOKENIZER, CONFIG, GENERATION, META = "tokenizer.json", "config.json", "generation_config.json", "export.json"
INDEX = "model.safetensors.index.json"
SETTINGS, ADAPTER = "adapter_config.json", "adapter_model.safetensors"
GROUP = "quantization_config__config_groups__group_0__"
A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"

# kind of export, change, what the gate says; None: accepted, for the reason in the name
TAMPERS: dict[str, tuple[str, Change, str | None]] = {
    # the tokenizer
    "a tokenizer without its decoder": ("hf", keys(TOKENIZER, decoder=None), "tokenizer.json: decoder is None"),
    "a special token that is none": ("hf", keys(TOKENIZER, added_tokens=first_with("special", False)), "added_tokens"),
    "two ids exchanged": ("hf", keys(TOKENIZER, model__vocab=swapped_ids), "tokenizer.json: model is"),
    "two merges exchanged": ("hf", keys(TOKENIZER, model__merges=lambda m: [m[1], m[0], *m[2:]]), "json: model is"),
    "text in lower case": ("hf", keys(TOKENIZER, normalizer={"type": "Lowercase"}), "tokenizer.json: normalizer is"),
    "another way to split": ("hf", keys(TOKENIZER, pre_tokenizer={"type": "Whitespace"}), "json: pre_tokenizer is"),
    "a post-processor": ("hf", keys(TOKENIZER, post_processor={"type": "ByteLevel", "trim_offsets": False,
        "add_prefix_space": False, "use_regex": False}), "post_processor is"),
    "prompts cut": ("hf", keys(TOKENIZER, truncation={"direction": "Right", "max_length": 200, "stride": 0,
        "strategy": "LongestFirst"}), "tokenizer.json: truncation is"),
    "prompts padded": ("hf", keys(TOKENIZER, padding={"strategy": {"Fixed": 4}, "direction": "Right", "pad_id": 0,
        "pad_to_multiple_of": None, "pad_type_id": 0, "pad_token": "x"}), "tokenizer.json: padding is"),
    "a token that takes the space before": ("hf", keys(TOKENIZER, added_tokens=first_with("lstrip", True)), "added_t"),
    "an unknown token": ("hf", keys(TOKENIZER, model__unk_token="a"), "tokenizer.json: model is"),
    "no tokenizer": ("hf", lambda f: (f / TOKENIZER).unlink(), "tokenizer.json is missing"),
    "another end in tokenizer_config": ("hf", keys("tokenizer_config.json", eos_token="<|im_start|>"), "eos_token is"),
    "another padding": ("hf", keys("tokenizer_config.json", pad_token="<|im_end|>"), "pad_token is"),
    "a beginning added": ("hf", keys("tokenizer_config.json", add_bos_token=True), "add_bos_token is True"),
    "a shorter context": ("hf", keys("tokenizer_config.json", model_max_length=8), "model_max_length is 8"),
    "another class of tokenizer": ("hf", keys("tokenizer_config.json", tokenizer_class="GPT2Tokenizer"), "_class is"),
    "spaces cleaned": ("hf", keys("tokenizer_config.json", clean_up_tokenization_spaces=True), "clean_up"),
    "a template in tokenizer_config": ("hf", keys("tokenizer_config.json", chat_template="x"), "chat_template is x"),
    # the template, by branches that no held-out row takes
    "a system prompt dropped": ("hf", template("{% for m in messages %}",
        "{% for m in messages if m.role != 'system' %}"), "chat_template.jinja is not the run's"),
    "tools": ("hf", template("{% for", "{% if tools %}x{% endif %}{% for"), "chat_template.jinja is not"),
    "the third turn": ("hf", template("{% for", "{% if messages | length > 4 %}x{% endif %}{% for"), "jinja is not"),
    "thinking": ("hf", template("{% for", "{% if enable_thinking %}<think>{% endif %}{% for"), "jinja is not"),
    "a name": ("hf", template("{{ m.role }}", "{{ m.name or m.role }}"), "chat_template.jinja is not the run's"),
    "a second template": ("hf", file("additional_chat_templates/tool_use.jinja", "x"), "tool_use.jinja: unexpected"),
    "no template": ("hf", lambda f: (f / "chat_template.jinja").unlink(), "chat_template.jinja is missing"),
    # generation
    "an end more": ("hf", keys(GENERATION, eos_token_id=lambda e: [*(e if isinstance(e, list) else [e]), 77]),
        "[77] end an answer in the export, and do not in the run"),
    "another end": ("hf", keys(GENERATION, eos_token_id=77), "end an answer in the run, and do not in the export"),
    "no end": ("hf", without(GENERATION, "eos_token_id"), "end an answer in the run"),
    "no generation config": ("hf", lambda f: (f / GENERATION).unlink(), "generation_config.json is missing"),
    "a temperature": ("hf", keys(GENERATION, temperature=0.3, do_sample=True), "temperature is 0.3"),
    "a suppressed token": ("hf", keys(GENERATION, suppress_tokens=[5]), "suppress_tokens is [5]"),
    "a penalty": ("hf", keys(GENERATION, repetition_penalty=1.2), "repetition_penalty is 1.2"),
    "short answers": ("hf", keys(GENERATION, max_new_tokens=3), "max_new_tokens is 3"),
    "a padding of generation": ("hf", keys(GENERATION, pad_token_id=7), "generation_config.json: pad_token_id is 7"),
    # config.json
    "an end in config": ("hf", keys(CONFIG, eos_token_id=77), "config.json: eos_token_id is 77"),
    "a beginning in config": ("hf", keys(CONFIG, bos_token_id=77), "config.json: bos_token_id is 77"),
    "a padding in config": ("hf", keys(CONFIG, pad_token_id=77), "config.json: pad_token_id is 77"),
    "another type in config": ("hf", keys(CONFIG, dtype="bfloat16"), "config.json: dtype is bfloat16"),
    "another type by its old name": ("hf", keys(CONFIG, torch_dtype="float16"), "config.json: dtype is float16"),
    "another class": ("hf", keys(CONFIG, architectures=["Qwen3ForCausalLM"]), "architectures is"),
    "a tied head": ("hf", keys(CONFIG, tie_word_embeddings=True), "tie_word_embeddings is True"),
    "another epsilon": ("hf", keys(CONFIG, rms_norm_eps=1e-3), "config.json: rms_norm_eps is 0.001"),
    "another RoPE": ("hf",
        keys(CONFIG, rope_parameters={"rope_type": "default", "rope_theta": 5e2}), "rope_parameters"),
    "RoPE beyond the rows": ("hf", keys(CONFIG, max_position_embeddings=128), "max_position_embeddings is 128"),
    "another activation": ("hf", keys(CONFIG, hidden_act="gelu"), "config.json: hidden_act is gelu"),
    "biases": ("hf", keys(CONFIG, attention_bias=True), "config.json: attention_bias is True"),
    "a layer less": ("hf", keys(CONFIG, num_hidden_layers=1), "config.json: num_hidden_layers is 1"),
    "more rows": ("hf", keys(CONFIG, vocab_size=400), "config.json: vocab_size is 400"),
    "code that is loaded": ("hf", keys(CONFIG, auto_map={"AutoModelForCausalLM": "m.Model"}), "auto_map is"),
    "a quantization": ("hf", keys(CONFIG, quantization_config={"quant_method": "fp8"}), ""),
    # weights
    "rows of unseen tokens that are not numbers": ("hf",
        of(EMBED, put(slice(370, 380), float("nan"))), f"{EMBED}: 640"),
    "a value of an unseen token": ("hf", of(EMBED, put((375, 3), 1.0)), "1 of 24,576 values are not the run's"),
    "an infinite norm": ("hf", of(NORM, put(5, float("inf"))), f"{NORM}: 1 of 64 values"),
    "a norm by 1 %": ("hf", of(NORM, lambda t: t * 1.01), f"{NORM}: 64 of 64"),
    "the lowest bit of a weight that was not trained": ("hf", of(K, flip(0)), f"{K}: 1 of"),
    "a bit of a trained weight": ("hf", of(Q, flip(12)), f"{Q}: 1 of"),
    "a sign": ("hf", of(HEAD, flip(31)), f"{HEAD}: 1 of"),
    "a zeroed row": ("hf", of(HEAD, put(383, 0.0)), f"{HEAD}: 64 of"),
    "a transposed matrix": ("hf", of(Q, lambda t: t.T), f"{Q}: "),
    "keys and values exchanged": ("hf", swap(K, V), f"{K}: "),
    "layers exchanged": ("hf", swap(Q, Q.replace("layers.0", "layers.1")), f"{Q}: "),
    "a matrix rounded to bfloat16": ("hf", of(DOWN, lambda t: t.bfloat16().float()), f"{DOWN}: "),
    "a matrix stored in bfloat16": ("hf", of(DOWN, lambda t: t.bfloat16()), "is bfloat16, and float32 by what was"),
    "all stored in bfloat16": ("hf",
        all_of(state(as_type(torch.bfloat16)), keys(CONFIG, dtype="bfloat16")), "and float32"),
    "loosened by its type": ("hf", all_of(of(DOWN, lambda t: t * 1.001), keys(CONFIG, dtype="bfloat16"),
        keys(META, dtype="bfloat16")), f"{DOWN}: "),
    "an update by 1 %": ("bf16", of(DOWN, lambda t: (t.float() * 1.01).bfloat16()), f"{DOWN}: "),
    "one step of bfloat16 in a weight that was not trained": ("bf16", of(V, lambda t: t + t.abs() * 2**-7), f"{V}: "),
    "a tensor more": ("hf", state(lambda s: s.update({"model.layers.9.x": torch.ones(2)})), "unexpected keys"),
    "a tensor less": ("hf", state(lambda s: s.pop(DOWN)), f"missing keys: {DOWN}"),
    "a head of scores": ("hf",
        state(lambda s: s.update({"score.weight": torch.ones(1, 64)})), "unexpected keys: score"),
    # what lies in the folder
    "other weights": ("hf", copied("model.safetensors", "model-00002-of-00002.safetensors"), "weights: model-00002"),
    "a pickle": ("hf", file("pytorch_model.bin", "x"), "pytorch_model.bin: unexpected file"),
    "an index next to one file": ("hf", file(INDEX, '{"weight_map": {}}'), "unexpected next to model.safetensors"),
    "an adapter beside merged weights": ("hf", file(SETTINGS, '{"peft_type": "LORA"}'), f"{SETTINGS}: unexpected file"),
    "code": ("hf", file("modeling_x.py", "x = 1"), "modeling_x.py: unexpected file"),
    "a hidden file": ("hf", file(".env", "x"), ".env: unexpected file"),
    "a folder": ("hf", file("onnx/model.onnx", "x"), "onnx/model.onnx: unexpected file"),
    "a processor": ("hf", file("preprocessor_config.json"), "preprocessor_config.json: unexpected file"),
    "a file of tokens": ("hf", file("added_tokens.json", '{"x": 3}'), "added_tokens.json: unexpected file"),
    "a link": ("hf", linked, "model.safetensors: a link"),
    "of another step": ("hf",
        keys(META, trained={"checkpoint": "step-00000001", "sha256": "0"}), "export.json: trained"),
    "of another base": ("hf", keys(META, base__tensors="0"), "export.json: base is"),
    "an index that names another file": ("shards", keys(INDEX, weight_map=lambda m: m | {EMBED: "model-00002-of-00003."
        "safetensors"}), f"{INDEX}: "),
    "an index that lacks a tensor": ("shards",
        keys(INDEX, weight_map=lambda m: {k: v for k, v in m.items() if k != Q}), INDEX),
    "no index": ("shards", lambda f: (f / INDEX).unlink(), "weights: model-00001-of-"),
    "a file beside shards": ("shards",
        lambda f: shutil.copy(next(f.glob("*.safetensors")), f / "model.safetensors"), "weights: model"),
    # eight bits
    "scales by 1 %": ("int8", of(f"{DOWN}_scale", lambda t: t * 1.01), f"{DOWN}: "),
    "a scale by 1 %": ("int8", of(f"{DOWN}_scale", put((3, 0), 0.0)), f"{DOWN}: 128 of"),
    "scales in another order": ("int8", of(f"{DOWN}_scale", lambda t: t.flip(0)), f"{DOWN}: "),
    "a block lost": ("int8", of(f"{DOWN}_packed", put(slice(0, 8), -2139062144)), f"{DOWN}: 1,024 of"),
    "each number one more": ("int8", of(f"{DOWN}_packed", lambda t: t + 0x01010101), f"{DOWN}: "),
    "another shape": ("int8", of(f"{DOWN}_shape", lambda t: t.flip(0)), f"{DOWN}_shape is not"),
    "other bits": ("int8", keys(CONFIG, **{f"{GROUP}weights__num_bits": 4}), "config_groups is"),
    "rounded activations": ("int8", keys(CONFIG, **{f"{GROUP}input_activations": {"num_bits": 8}}), "config_groups is"),
    "scales of tensors": ("int8", keys(CONFIG, **{f"{GROUP}weights__strategy": "tensor"}), "config_groups is"),
    "a layer not in eight bits": ("int8",
        keys(CONFIG, quantization_config__ignore=["lm_head", DOWN[:-7]]), f"{DOWN[:-7]} is in eight bits"),
    "an embedding beside eight bits": ("int8", of(EMBED, put((1, 1), 9.0)), f"{EMBED}: 1 of"),
    "scales of fp8 by 1 %": ("fp8", of(f"{DOWN}_scale", lambda t: t * 1.01), f"{DOWN}: "),
    "a sign in fp8": ("fp8",
        of(DOWN, lambda t: put((2, 2), 0x7E)(t.view(torch.uint8)).view(torch.float8_e4m3fn)), DOWN),
    "int8 that says fp8": ("int8", keys(META, quantized="fp8"), ""),
    # GGUF
    "a template in the file": ("ollama",
        in_file(b"<|im_start|>assistant", b"<|im_start|>Assistant"), "chat_template is"),
    "a token in the file": ("ollama", in_file(b"<|im_end|>", b"<|im_End|>"), ""),
    "another end in the file": ("ollama", field("tokenizer.ggml.eos_token_id", 5), "end an answer"),
    "another padding in the file": ("ollama", field("tokenizer.ggml.padding_token_id", 5), "padding_token_id is 5"),
    "a beginning in the file": ("ollama", field("tokenizer.ggml.add_bos_token", 1), "add_bos_token is True"),
    "another type of a token": ("ollama", field("tokenizer.ggml.token_type", 6, 90), "token_type is"),
    "another way to split in the file": ("ollama", in_file(b"gpt-2", b"qwen2"), ""),
    "another epsilon in the file": ("ollama", field("llama.attention.layer_norm_rms_epsilon", 1e-3), "epsilon is"),
    "another RoPE in the file": ("ollama", field("llama.rope.freq_base", 5e2), "freq_base is 500.0"),
    "scales of blocks by 1 %": ("ollama", blocks("blk.1.ffn_down.weight", scales), f"{DOWN}: "),
    "a number of a block": ("ollama", blocks("blk.1.ffn_down.weight", one_number), f"{DOWN}: "),
    "a norm in the file": ("ollama", blocks("output_norm.weight", lambda d: d.__imul__(1.01)), f"{NORM}: "),
    "no stop": ("ollama", file("Modelfile", "FROM ./run-q8_0.gguf\n"), "has no line 'PARAMETER stop"),
    "a system prompt of Ollama": ("ollama",
        lambda f: (f / "Modelfile").open("a").write("SYSTEM x\n"), "is not of the run"),
    "a second GGUF": ("ollama", copied("run-q8_0.gguf", "x.gguf"), "2 GGUF files"),
    "weights beside a GGUF": ("ollama", file("model.safetensors", "x"), "model.safetensors: unexpected file"),
    # an adapter
    "base weights beside an adapter": ("adapter", file("model.safetensors", "x"), "model.safetensors: unexpected file"),
    "another alpha": ("adapter", keys(SETTINGS, lora_alpha=99), "adapter_config.json: lora_alpha is 99"),
    "no rsLoRA": ("adapter", keys(SETTINGS, use_rslora=False), "adapter_config.json: use_rslora is False"),
    "a pattern of ranks": ("adapter", keys(SETTINGS, alpha_pattern={"q_proj": 1}), "alpha_pattern is"),
    "fewer modules": ("adapter", keys(SETTINGS, target_modules=["q_proj"]), "target_modules is"),
    "a value of an adapter": ("adapter", state(lambda s: s[A].mul_(1.001), ADAPTER), f"{A} is not the run's"),
    "a module less": ("adapter", state(lambda s: s.pop(A), ADAPTER), f"{A} is missing"),
    "a module more": ("adapter", state(lambda s: s.update({"x": torch.ones(1)}), ADAPTER), "x is not in the run"),
    "an adapter in bfloat16": ("adapter", state(as_type(torch.bfloat16), ADAPTER), "is not the run's"),
    "the tokenizer of an adapter": ("adapter", keys(TOKENIZER, decoder=None), "tokenizer.json: decoder is None"),
    # accepted
    "a card, which is for people": ("hf", file("README.md", "# mine\n"), None),
    "an earlier verdict, which is written again": ("hf", file("verify.json", '{"passed": true}'), None),
    "other versions, which compute nothing": ("hf", keys(META, versions={"torch": "0"}), None),
    "a name in config, which nothing reads": ("hf", keys(CONFIG, _name_or_path="x"), None),
    "a longer context of Ollama, of which the run says nothing": ("ollama",
        lambda f: (f / "Modelfile").open("a").write("PARAMETER num_ctx 64\n"), None),
    "the base's name on the hub": ("adapter", keys(SETTINGS, base_model_name_or_path="org/base"), None),
    "the same file in other lines": ("hf", keys(TOKENIZER), None),
}  # fmt: skip
# At least one of each way in which the gate sees something; the others under --all.
SHORT = (
    *("a tokenizer without its decoder", "two ids exchanged", "the third turn", "an end more", "an end in config"),
    *("another type in config", "rows of unseen tokens that are not numbers", "loosened by its type", "a tensor more"),
    *("a bit of a trained weight", "a file beside shards", "a link", "a hidden file", "scales by 1 %"),
    *("scales of fp8 by 1 %", "scales of blocks by 1 %", "a template in the file", "base weights beside an adapter"),
    *("a card, which is for people", "an index that names another file", "a value of an adapter"),
)


@pytest.mark.parametrize(
    "name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.long) for name in TAMPERS]
)
@pytest.mark.filterwarnings("ignore")
def test_a_tampered_export_is_seen(exports: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(verify, "WHOLE_BYTES", 0)
    kind, change, fragment = TAMPERS[name]
    message = said(exports, kind, tmp_path, change)
    assert (message == "") == (fragment is None), message
    assert (fragment or "") in message


def test_the_table_is_long_enough() -> None:
    """And whole: no name twice, each short one in it."""
    assert sum(fragment is not None for _, _, fragment in TAMPERS.values()) >= 100
    assert {*SHORT} <= {*TAMPERS}
