"""The gate for settings: whatever of a config decides how a model computes is seen, also what acts at length only."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import yaml
from transformers import AutoConfig

from finetune.checkpoints.trained import Trained
from finetune.errors import UserError
from finetune.features import load_recipe
from finetune.release.export.eight_bits import settings_of
from finetune.release.export.figures import Figures
from finetune.release.export.gguf_export import modelfile
from finetune.release.export.verify import (
    compare_each,
    compare_modelfile,
    compare_settings,
    export_format,
    held_out_examples,
)

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "mistral": {**tiny.MODELS["mistral"], "sliding_window": 32, "rope_parameters": YARN},
    "gemma3": {**tiny.MODELS["llama"], "model_type": "gemma3_text", "head_dim": 16, "query_pre_attn_scalar": 16}
    | {"sliding_window": 8, "rope_parameters": ROPES},
    "experts": tiny.MODELS["qwen3_moe"],
    "seen": {**tiny.MULTIMODAL["qwen3_vl"], "architectures": ["Qwen3VLForConditionalGeneration"]},
}
# What decides nothing, or is held by names, shapes and ends (verify.py), or is said by no key of the model itself.
FREE = {"architectures", "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "vocab_size"}
FREE |= {"transformers_version", "use_cache", "dtype"}


def of_run(folder: Path, config: dict[str, Any]) -> Trained:
    """The result of a recipe whose base has this config: a tokenizer's settings alone."""
    for name in ("base", "out"):
        AutoConfig.for_model(**config).save_pretrained(folder / name)
    (folder / "settings").mkdir()
    tiny.tokenizer().save_pretrained(folder / "settings")
    (folder / "settings" / "generation_config.json").write_text('{"eos_token_id": [2], "temperature": 0.6}')
    (folder / "out" / "generation_config.json").write_text('{"eos_token_id": [2], "temperature": 0.6}')
    recipe = {
        "run": {"name": "tiny"},
        "model": {"name": str(folder / "base")},
        "mode": "full",
        "data": {"train": [{"path": "rows.jsonl"}], "max_length": 64},
        "batch": {"rows": 1},
        "optimizer": {"lr": 1e-3},
        "train": {"max_steps": 1},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    loaded = load_recipe(folder / "recipe.yaml")
    return Trained(folder, loaded, folder / "settings", None, {}, lambda name: torch.zeros(0))


def problems(run: Trained, export: Path, kind: str = "float32") -> list[str]:
    figures = Figures(kind)
    try:
        compare_settings(figures, run, None, export)
        name = "generation_config.json"
        compare_each(figures, {name: run.settings / name}, export)
    except UserError as error:
        return [str(error)]
    return figures.problems


def changes(config: dict[str, Any], ahead: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields the place of each key, and another value of it."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from changes(value, (*ahead, key))
        elif isinstance(value, bool):
            yield (*ahead, key), not value
        elif isinstance(value, int | float) and value:
            yield (*ahead, key), value * 2


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.filterwarnings("ignore")
def test_any_key_of_a_config_is_seen(tmp_path: Path, name: str) -> None:
    run, path = of_run(tmp_path, CONFIGS[name]), tmp_path / "out" / "config.json"
    assert problems(run, tmp_path / "out") == []
    config, tried = json.loads(path.read_text()), set[str]()
    for place, value in changes(config):
        if FREE & {*place} or (name == "mistral" and place[-1] == "max_position_embeddings"):
            continue
        tampered: Any = copy.deepcopy(config)
        inner = tampered
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = value
        path.write_text(json.dumps(tampered))
        assert problems(run, tmp_path / "out"), place
        tried.add(place[-1])
    assert {"rms_norm_eps", "num_key_value_heads", "rope_theta"} <= tried
    assert name != "mistral" or {"factor", "original_max_position_embeddings", "sliding_window"} <= tried


def test_what_servers_take_beside_the_weights_is_seen(tmp_path: Path) -> None:
    run, out = of_run(tmp_path, tiny.MODELS["llama"]), tmp_path / "out"
    (out / "generation_config.json").write_text('{"eos_token_id": [2], "temperature": 0.6, "repetition_penalty": 1.3}')
    assert problems(run, out) == ["generation_config.json: repetition_penalty is 1.3, and None in the run"]
    for ends, shown in ((0, "[0]"), ([2, 0], "[0, 2]"), ([], "[]")):  # other ends, more, fewer
        (out / "generation_config.json").write_text(json.dumps({"eos_token_id": ends, "temperature": 0.6}))
        assert problems(run, out) == [f"generation_config.json: eos_token_id is {shown}, and [2] in the run"]


def test_another_scheme_of_eight_bits_is_seen(tmp_path: Path) -> None:
    run, out = of_run(tmp_path, tiny.MODELS["llama"]), tmp_path / "out"
    (out / "export.json").write_text('{"quantised": "int8", "dtype": "bfloat16"}')
    config, settings = json.loads((out / "config.json").read_text()), settings_of("int8", ["lm_head"])
    (out / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    assert problems(run, out, "int8") == []
    settings["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "type": "int", "dynamic": True}
    (out / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    (problem,) = problems(run, out, "int8")
    assert problem.startswith("config.json, quantization_config: config_groups is")


def test_what_ollama_is_told_beside_the_file_is_seen(tmp_path: Path) -> None:
    run = of_run(tmp_path, tiny.MODELS["llama"])
    figures, path = Figures("q8_0"), tmp_path / "out" / "Modelfile"
    said = modelfile(run, "a.gguf")
    for text, found in {
        said + "PARAMETER num_ctx 8192\n": [],
        said + 'SYSTEM "You are a pirate."\n': [f"""{path}: 'SYSTEM "You are a pirate."' is not of the run"""],
        "FROM ./a.gguf\n": [f"""{path}: has no line 'PARAMETER stop "<|im_end|>"'"""],
    }.items():
        path.write_text(text)
        figures.problems = []
        compare_modelfile(figures, run, tmp_path / "out", Path("a.gguf"))
        assert figures.problems == found


def test_pairs_of_answers_that_are_too_long_are_left_out(tmp_path: Path) -> None:
    recipe = of_run(tmp_path, tiny.MODELS["llama"]).recipe
    assert recipe is not None
    source = {"path": str(tiny.write_rows(tmp_path / "pairs.jsonl", tiny.preferences(24)))}
    values = recipe.model_dump(exclude_unset=True) | {"objective": {"name": "reward"}}
    counts = {}
    for length in (64, 1024):
        values["data"] = {"train": [source], "max_length": length}
        (tmp_path / "pairs.yaml").write_text(yaml.safe_dump(values))
        examples = held_out_examples(load_recipe(tmp_path / "pairs.yaml"), tmp_path / "settings", 32)
        counts[length] = len(examples)
        assert all(len(one.input_ids) <= length for example in examples for one in example.sequences)
    assert 0 < counts[64] < counts[1024] == 24


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "export.json"])
def test_a_file_that_is_half_there_is_said_by_name(tmp_path: Path, name: str) -> None:
    run, out = of_run(tmp_path, tiny.MODELS["llama"]), tmp_path / "out"
    (out / name).write_text('{"eos_token_id": [2, 0')
    assert problems(run, out)[0].startswith(f"{out / name}: ")


def test_a_gguf_file_that_is_half_there_is_said_by_name(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    for content in (b"", b"GGUF", b"GGUF\x03\0\0\0\x05\0\0\0\0\0\0\0", b"<html>not here</html>"):
        (tmp_path / "a.gguf").write_bytes(content)
        with pytest.raises(UserError, match=r"a\.gguf: not a GGUF file, or only a part of one: "):
            export_format(tmp_path)
