"""The result, saved by one process and by two that share the model: the same folder, or the same failure everywhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import forks
import parity
import pytest
import tiny
import torch
import yaml
from repository import ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer

WORKER = Path(__file__).with_name("save_worker.py")
ZERO_3 = pytest.param("zero3", 2, marks=pytest.mark.long)  # the parity tests read what it writes
LAUNCHES = [("single", 1), ("fsdp2", 2), ZERO_3]
MIXTRAL = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
ONE_FILE, SEVERAL = 10**9, 100_000
# Its embedding can be written under the file size that `wrong: full` allows, its layers cannot.
WIDE = {**tiny.MODELS["llama"], "intermediate_size": 1024}
SCRATCH = {"mixtral": {**tiny.MODELS["mistral"], **MIXTRAL}, "wide": WIDE}


def case(name: str, model: str, shard_bytes: int, *overrides: str, **others: Any) -> dict[str, Any]:
    chosen = {"name": name, "folder": name, "shard_bytes": shard_bytes, "wrong": None, **others}
    return {**chosen, "model": model, "overrides": overrides}


CASES = [
    case("llama", "llama", ONE_FILE),
    case("llama_bf16", "llama", SEVERAL, "train.precision=bf16"),
    case("llama_tied", "llama_tied", SEVERAL),
    case("mistral", "mistral", SEVERAL, "train.precision=bf16"),
    case("mixtral", "mixtral", SEVERAL, "train.precision=bf16"),
    case("mixtral_scratch", "scratch mixtral", SEVERAL),
    case("lora", "llama", SEVERAL, *parity.LORA),
    case("lora_tied_dora", "llama_tied", SEVERAL, *parity.LORA, "lora.dora=true"),
    # Into one folder after another: what the earlier save left must not show, what fails must change nothing.
    case("many", "llama", 1, folder="again"),
    case("again", "llama_tied", SEVERAL),
    case("nan", "llama", SEVERAL, wrong="nan", folder="again"),
    case("full", "scratch wide", 150_000, wrong="full", folder="again"),
    case("generates", "llama", ONE_FILE),
    case("lora_nan", "llama", SEVERAL, *parity.LORA, wrong="nan"),
]
WHOLE = [c["name"] for c in CASES if not c["wrong"] and c["name"] not in ("many", "generates")]

Saved = Callable[[str, int], Path]


@pytest.fixture(scope="module")
def sources(made: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    mixtral = tiny.save_model(tmp_path_factory.mktemp("mixtral"), "mistral", **MIXTRAL)
    return {**{name: made / name for name in tiny.MODELS}, "mixtral": mixtral}


@pytest.fixture(scope="module")
def saved(made: Path, sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Launch a config with all cases, once; returns the folder of results."""
    folder = tmp_path_factory.mktemp("save")
    (folder / "recipe.yaml").write_text(yaml.safe_dump(parity.base_recipe(made)), encoding="utf-8")

    def overrides(model: str) -> list[str]:
        if not model.startswith("scratch "):
            return [f"model.name={sources[model]}"]
        shape = json.dumps(SCRATCH[model.removeprefix("scratch ")])
        return ["model.name=null", f"model.config={shape}", f"model.tokenizer={made / 'llama'}"]

    @cache
    def start(config: str, processes: int) -> Path:
        out = folder / f"{config}-{processes}"
        out.mkdir()
        cases = [dict(c) for c in CASES]
        for one in cases:
            one["overrides"] = [*one["overrides"], *overrides(one.pop("model"))]
        plan = {"recipe": str(folder / "recipe.yaml"), "out": str(out), "cases": cases}
        (out / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
        config_file = ROOT / "accelerate_configs" / f"{config}.yaml"
        done = forks.accelerate_launch(config_file, processes, WORKER, out / "plan.json")
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
        return out

    return start


def became(out: Path, name: str) -> list[dict[str, Any]]:
    """Of each rank."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(out.glob(f"{name}-[0-9]*.json"))]


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("config", "processes"), LAUNCHES)
@pytest.mark.parametrize("name", WHOLE)
def test_the_same_from_one_process_and_from_two(saved: Saved, name: str, config: str, processes: int) -> None:
    reference, out = saved("single", 1), saved(config, processes)
    assert became(out, name) == [{"error": None, "message": None}] * processes
    assert parity.same_tensors(out / name, reference / name)
    files = [sorted(path.relative_to(f).as_posix() for path in f.rglob("*")) for f in (out / name, reference / name)]
    assert files[0] == files[1]
    assert (out / name / "README.md").read_text(encoding="utf-8") == f"# {name}"
    assert not list(out.glob(f"{name}.*")), "nothing is left beside it"


@pytest.mark.parametrize(("config", "at_once"), [("fsdp2", 2 + 1), pytest.param("zero3", 0, marks=pytest.mark.long)])
def test_a_generation_gathers_the_weights_once(saved: Saved, config: str, at_once: int) -> None:
    """And not for each of its five tokens; the text is the same, and weights are freed again after it.

    at_once: gathers in the first of five forwards: of layers and embedding, or none, all are there before it.
    """
    (single,) = became(saved("single", 1), "generates")
    for rank in became(saved(config, 2), "generates"):
        before, kept, after = rank["generated"]
        assert before["tokens"] == kept["tokens"] == after["tokens"] == single["generated"][0]["tokens"]
        assert kept["gathers"] == at_once
        assert before["gathers"] >= 5 * max(at_once, 1) <= after["gathers"]


@pytest.mark.parametrize(("config", "processes"), LAUNCHES)
@pytest.mark.parametrize("name", ["llama", "llama_bf16", "llama_tied", "mistral", "mixtral"])
def test_what_save_pretrained_writes_of_the_same_model(
    saved: Saved, sources: dict[str, Path], tmp_path: Path, name: str, config: str, processes: int
) -> None:
    ours, dtype = saved(config, processes) / name, torch.float32 if name in ("llama", "llama_tied") else torch.bfloat16
    AutoModelForCausalLM.from_pretrained(sources[name.removesuffix("_bf16")], dtype=dtype).save_pretrained(tmp_path)
    assert parity.same_tensors(ours, tmp_path)
    assert {**config_of(ours), "use_cache": True} == {**config_of(tmp_path), "use_cache": True}
    assert config_of(ours)["dtype"] == str(dtype).removeprefix("torch.")
    assert (ours / "model.safetensors").exists() == (name == "llama")


@pytest.mark.parametrize(("config", "processes"), LAUNCHES)
@pytest.mark.parametrize("name", ["llama", "llama_bf16", "llama_tied", "mistral", "mixtral", "mixtral_scratch", "lora"])
def test_it_loads(saved: Saved, name: str, config: str, processes: int) -> None:
    """Every weight from the files: nothing is missing, unexpected or made anew."""
    folder = saved(config, processes) / name
    if name == "lora":
        AutoModelForCausalLM.from_pretrained(folder)
    else:
        _, said = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
        assert not any(said.values()), said
    assert AutoTokenizer.from_pretrained(folder).chat_template == tiny.CHATML


@pytest.mark.parametrize(("config", "processes"), LAUNCHES)
def test_experts_are_split_also_where_the_model_was_never_loaded(saved: Saved, config: str, processes: int) -> None:
    """Then transformers looks the conversion up by the model's class, which FSDP2 has changed."""
    names = parity.tensors(saved(config, processes) / "mixtral_scratch").keys()
    assert "model.layers.1.block_sparse_moe.experts.3.w2.weight" in names
    assert not any("gate_up_proj" in name for name in names)


@pytest.mark.parametrize(("config", "processes"), LAUNCHES)
def test_a_value_that_is_not_finite_is_a_failure_of_all(saved: Saved, config: str, processes: int) -> None:
    out = saved(config, processes)
    for name, kept, tensor in (("nan", "again.partial", "lm_head.weight"), ("lora_nan", "lora_nan.partial", "lora_B")):
        ranks = became(out, name)
        assert len(ranks) == processes
        assert {rank["error"] for rank in ranks} == {"RunFailure"}
        assert len({rank["message"] for rank in ranks}) == 1
        for part in (f"{kept}/", ".safetensors: ", tensor, "values are not finite in float32", "last checkpoint"):
            assert part in ranks[0]["message"], part
    assert not (out / "lora_nan").exists()
    assert list((out / "lora_nan.partial").glob("*.safetensors")), "kept for inspection"


@pytest.mark.parametrize(("config", "processes"), LAUNCHES)
def test_a_file_that_cannot_be_written_is_a_failure_of_all(saved: Saved, config: str, processes: int) -> None:
    """In the middle of the weights, while the other ranks still send theirs."""
    out = saved(config, processes)
    ranks = became(out, "full")
    assert [rank["error"] for rank in ranks] == ["RunFailure"] * processes
    for rank in ranks:
        assert f"{out / 'again'} could not be written" in rank["message"]
        assert "the last checkpoint is intact" in rank["message"]
        assert "run the same command again" in rank["message"]
    assert not (out / "again.partial").exists(), "its space is given back"
