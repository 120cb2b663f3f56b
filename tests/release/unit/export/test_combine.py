"""`merge RUN1 RUN2 ...`: each method against its formula in fp64, entry by entry; what is refused."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from conftest import finetune
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.checkpoints.trained import find_trained
from finetune.errors import UserError
from finetune.release.export.combine import combination, merge_runs
from finetune.release.export.verify import find_against

NAME = "model.layers.0.self_attn.q_proj.weight"
State = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, and the results of three runs of it: two adapters, and one of full training that moved the norms too."""
    root = tmp_path_factory.mktemp("several")
    base = tiny.save_model(root, "llama")
    for run in (1, 2):
        adapter(base, root / f"lora-{run}", run)
    shutil.copytree(base, root / "full" / "model")
    state = load_file(root / "full" / "model" / "model.safetensors")
    draw = torch.Generator().manual_seed(3)
    moved = {n: t + 0.02 * torch.randn(t.shape, generator=draw) for n, t in state.items() if "embed" not in n}
    save_file({**state, **moved}, root / "full" / "model" / "model.safetensors", metadata={"format": "pt"})
    (root / "full" / "recipe.yaml").write_text(
        f"run: {{name: full}}\nmodel: {{name: {base}}}\nmode: full\n"
        "data: {train: [{path: rows.jsonl}], max_length: 64}\nbatch: {rows: 1}\n"
        "optimizer: {lr: 0.001}\ntrain: {max_steps: 1, precision: fp32}\n"
    )
    return root


def adapter(base: Path, out: Path, seed: int) -> None:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    targets = ["q_proj", "down_proj"] if seed == 1 else ["q_proj", "k_proj"]
    model = AutoModelForCausalLM.from_pretrained(base)
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False))
    adapted.save_pretrained(out)
    AutoTokenizer.from_pretrained(base).save_pretrained(out)
    (out / "generation_config.json").write_text('{"eos_token_id": 2}')


def deltas(folder: Path, *runs: str) -> list[State]:
    """What each run changed, by peft's own merge, in fp64."""
    from peft import PeftModel

    base, found = load_file(folder / "llama" / "model.safetensors"), []
    for run in runs:
        if run == "full":
            state = load_file(folder / "full" / "model" / "model.safetensors")
        else:
            model = AutoModelForCausalLM.from_pretrained(folder / "llama")
            state = PeftModel.from_pretrained(model, str(folder / run)).merge_and_unload().state_dict()
        found.append({name: state[name].double() - base[name].double() for name in base})
    return found


def merged(folder: Path, out: Path, runs: tuple[str, ...], method: str, **how: Any) -> State:
    chosen = {"weights": None, "density": None, "seed": None, **how}
    merge_runs([find_trained(folder / run) for run in runs], combination(method, len(runs), **chosen), out)
    return load_file(out / "model.safetensors")


def ties(entries: list[list[float]], weights: list[float], density: float) -> list[float]:
    """Section 3 of the paper for one tensor, an entry at a time."""
    trimmed = []
    for values in entries:
        kept = sorted(range(len(values)), key=lambda i: -abs(values[i]))[: round(density * len(values))]
        trimmed.append([value if i in set(kept) else 0.0 for i, value in enumerate(values)])
    result = []
    for column in zip(*trimmed, strict=True):
        elected = math.copysign(1, sum(w * v for w, v in zip(weights, column, strict=True)))
        agreeing = [(w, v) for w, v in zip(weights, column, strict=True) if v * elected > 0]
        result.append(sum(w * v for w, v in agreeing) / sum(w for w, _ in agreeing) if agreeing else 0.0)
    return result


def slerp(a: torch.Tensor, b: torch.Tensor, t: float) -> torch.Tensor:
    angle = math.acos(float((a * b).sum() / (a.norm() * b.norm())))
    return (math.sin((1 - t) * angle) * a + math.sin(t * angle) * b) / math.sin(angle)


@pytest.mark.parametrize("method", ["linear", "slerp", "ties"])
def test_a_method_is_its_formula(folder: Path, tmp_path: Path, method: str) -> None:
    runs = ("lora-1", "full") if method == "slerp" else ("lora-1", "lora-2", "full")
    weights = [0.3, 0.7] if method == "slerp" else [0.5, 0.2, 0.9]
    more = {"density": 0.3} if method == "ties" else {}
    base = load_file(folder / "llama" / "model.safetensors")
    result = merged(folder, tmp_path / "out", runs, method, weights=",".join(map(str, weights)), **more)
    changes = deltas(folder, *runs)
    assert result.keys() == base.keys()
    for name in (NAME, "model.layers.1.self_attn.k_proj.weight", "model.norm.weight"):
        ours = [change[name] for change in changes]
        if method == "ties":
            flat = ties([one.reshape(-1).tolist() for one in ours], weights, 0.3)
            expected = torch.tensor(flat, dtype=torch.float64).reshape(base[name].shape)
        elif method == "slerp" and bool(ours[0].any()):
            expected = slerp(*ours, weights[1])
        else:
            expected = sum(w * one for w, one in zip(weights, ours, strict=True))
        torch.testing.assert_close(result[name].double() - base[name].double(), expected, atol=3e-7, rtol=0)
    assert torch.equal(result["model.embed_tokens.weight"], base["model.embed_tokens.weight"])  # nobody changed it


def test_dare_keeps_drawn_entries_and_divides_them(folder: Path, tmp_path: Path) -> None:
    base = load_file(folder / "llama" / "model.safetensors")
    one, two = deltas(folder, "lora-1", "lora-2")
    found = {}
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        found[name] = merged(
            folder, tmp_path / name, ("lora-1", "lora-2"), "dare", weights="1,1", density=0.25, seed=seed
        )
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()
    change = (found["a"][NAME].double() - base[NAME].double()).reshape(-1)
    options = torch.stack([x.reshape(-1) / 0.25 for x in (0 * one[NAME], one[NAME], two[NAME], one[NAME] + two[NAME])])
    distance, nearest = (options - change).abs().min(0)
    assert float(distance.max()) < 1e-6  # each entry is none, the first's, the second's or both, times 4
    shares = torch.bincount(nearest, minlength=4) / len(change)
    expected = torch.tensor([0.5625, 0.1875, 0.1875, 0.0625])
    assert float((shares - expected).abs().max()) < 5 * math.sqrt(0.25 / len(change))  # five standard deviations
    assert not torch.equal(found["a"][NAME], found["c"][NAME])
    about = json.loads((tmp_path / "a" / "export.json").read_text())
    assert (about["method"], about["weights"], about["density"], about["seed"]) == ("dare", [1, 1], 0.25, 7)
    with pytest.raises(UserError, match="merged from several runs"):
        find_against(folder / "lora-1", tmp_path / "a", None)


def test_the_command_writes_a_model_and_overwrites_nothing(folder: Path, tmp_path: Path) -> None:
    arguments = ("merge", folder / "lora-1", folder / "full", "--method", "linear", "-o", tmp_path / "out")
    done = finetune(*arguments)
    assert (done.returncode, done.stdout) == (0, f"merged into {tmp_path / 'out'}\n"), done.stderr
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    one, full = deltas(folder, "lora-1", "full")
    base = load_file(folder / "llama" / "model.safetensors")
    expected = base[NAME] + (one[NAME] + full[NAME]).float() / 2
    torch.testing.assert_close(model.state_dict()[NAME], expected, atol=3e-7, rtol=0)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == tiny.CHATML
    assert "| lora-1 | 0.5 |" in (tmp_path / "out" / "README.md").read_text()
    again = finetune(*arguments)
    assert (again.returncode, "exists already" in again.stderr) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (("mean", 2, None, None, None), "--method mean: no such method. Fix: give one of linear, slerp, ties, dare"),
        (
            ("linear", 2, "0.5", None, None),
            "--weights 0.5: not 2 finite numbers. Fix: give one number for each run, such as 0.5,0.5",
        ),
        (("linear", 2, "a,b", None, None), "--weights a,b: not numbers with commas"),
        (("slerp", 3, None, None, None), "needs two runs"),
        (("slerp", 2, "0.5,0.6", None, None), "with sum 1"),
        (("ties", 2, "1,0", None, None), "weights above 0"),
        (("linear", 2, None, 0.5, None), "expected a share above 0 and up to 1, for ties or dare"),
        (("dare", 2, None, 0.0, None), "a share above 0 and up to 1"),
        (("ties", 2, None, None, 3), "only dare does"),
    ],
)
def test_settings_without_meaning_are_refused(arguments: tuple[Any, ...], fragment: str) -> None:
    with pytest.raises(UserError) as error:
        combination(*arguments)
    assert fragment in str(error.value)


def test_runs_of_other_bases_and_other_tensors_are_refused(folder: Path, tmp_path: Path) -> None:
    other = tiny.save_model(tmp_path, "llama")
    state = load_file(other / "model.safetensors")
    save_file({n: t + 1 for n, t in state.items()}, other / "model.safetensors", metadata={"format": "pt"})
    adapter(other, tmp_path / "lora-3", 2)
    with pytest.raises(UserError, match="the runs have different bases"):
        merged(folder, tmp_path / "out", (str(folder / "lora-1"), str(tmp_path / "lora-3")), "linear")
    shutil.copytree(folder / "full", tmp_path / "grown")
    file = tmp_path / "grown" / "model" / "model.safetensors"
    state = load_file(file)
    state["lm_head.weight"] = torch.cat([state["lm_head.weight"], torch.zeros(2, 64)])
    save_file(state, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lm_head.weight has shape .386, 64., and the base no such tensor"):
        merged(folder, tmp_path / "out", (str(folder / "lora-1"), str(tmp_path / "grown")), "linear")
    assert not list(tmp_path.glob("out*"))
