"""The gate: right exports pass, and each way in which exports are known to go wrong is caught."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import yaml
from conftest import train_here
from rich.console import Console
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer
from usual import usual

from finetune.checkpoints.trained import find_trained
from finetune.errors import RunFailure, UserError
from finetune.release.export.commands import ExportOptions, export_run, merge_adapter, verify_run
from finetune.release.export.figures import Figures
from finetune.release.export.verify import verify_export

MODES: dict[str, dict[str, Any]] = {
    "lora": {"model": "llama", "lora": {"rank": 4, "rslora": True, "alpha": 16}},
    "dora": {"model": "llama", "lora": {"rank": 4, "dora": True}},
    "experts": {"model": "mixtral", "lora": {"rank": 4}},
    "tied": {"model": "llama_tied", "lora": {"rank": 4, "targets": ["q_proj", "lm_head"]}},
}


@pytest.fixture(scope="session")
def exported(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of each kind, and its right export in <run>/out."""
    folder = tmp_path_factory.mktemp("gate")
    for name, kind in MODES.items():
        recipe = {
            "run": {"name": name, "dir": str(folder)},
            "model": {"name": str(made / kind["model"])},
            "mode": "lora",
            "lora": kind["lora"],
            "data": {
                "train": [{"path": str(made / "rows.jsonl"), "format": "messages"}],
                "eval": [{"path": str(made / "held_out.jsonl"), "format": "messages"}],
                "max_length": 64,
            },
            "batch": {"rows": 2},
            "optimizer": {"lr": 3e-2},
            "schedule": {"name": "constant"},
            "train": {"max_steps": 4, "precision": "fp32"},
            "evaluate": {"at_start": False},
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
        with warnings.catch_warnings():  # peft's, of an adapter on a tied head
            warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`|Setting `save_embed", UserWarning)
            train_here(folder / f"{name}.yaml")
        export_run(folder / name, ExportOptions(out=folder / name / "out"), quiet())
    return folder


def quiet() -> Console:
    return Console(quiet=True)


def tampered(exported: Path, run: str, tmp_path: Path, change: Callable[[Path], object]) -> str:
    """Returns what the gate says of a changed export; an empty text if it passes."""
    folder = Path(shutil.copytree(exported / run / "out", tmp_path / "out"))
    change(folder)
    try:
        verify_run(folder, exported / run, None, None, 8, quiet())
    except RunFailure as failure:
        written = json.loads((folder / "verify.json").read_text())
        assert not written["passed"]
        assert "It does not:" in (folder / "README.md").read_text()
        return str(failure)
    return ""


@pytest.mark.parametrize("run", MODES)
def test_a_right_export_passes(exported: Path, run: str) -> None:
    written = json.loads((exported / run / "out" / "verify.json").read_text())
    assert written["passed"], written
    assert written["kl_mean"] < 1e-10
    assert written["kl_base"] > 1e-4  # what was trained is much more than that
    assert (written["top1"], written["greedy"], written["format"]) == (1, 1, "float32")
    assert "| same likeliest token | 100.00% |" in (exported / run / "out" / "README.md").read_text()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding_passes(exported: Path, tmp_path: Path, dtype: str) -> None:
    export_run(exported / "lora", ExportOptions(out=tmp_path / "out", dtype=dtype), quiet())
    written = json.loads((tmp_path / "out" / "verify.json").read_text())
    assert (written["passed"], written["format"]) == (True, dtype)
    assert 1e-11 < written["kl_mean"] < 1e-4


# --- tampered


def weights(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def tamper(folder: Path) -> None:
        (file,) = folder.glob("*.safetensors")
        state = load_file(file)
        change(state)
        save_file(state, file, metadata={"format": "pt"})

    return tamper


def config(name: str, **values: Any) -> Callable[[Path], object]:
    def tamper(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return tamper


def of_base(exported: Path, run: str) -> dict[str, Any]:
    settings = json.loads((exported / run / "model" / "adapter_config.json").read_text())
    return load_file(Path(settings["base_model_name_or_path"]) / "model.safetensors")


def scaled_update(exported: Path, run: str, factor: float) -> Callable[[Path], object]:
    base = of_base(exported, run)

    def scale(state: dict[str, Any]) -> None:
        state.update({n: base[n] + factor * (t - base[n]) if n in base else t for n, t in state.items()})

    return weights(scale)


def other_norm(state: dict[str, Any]) -> None:
    """DoRA's update without its magnitudes: rows as long as W + BA is, here made a little longer."""
    for name in (n for n in state if "proj" in n):
        state[name] = state[name] * 1.05


def permuted(state: dict[str, Any]) -> None:
    """q and k as GGUF has them for llama.cpp."""
    for name in (n for n in state if "q_proj" in n):
        rows = state[name].reshape(4, 2, 8, -1).swapaxes(1, 2)
        state[name] = rows.reshape(state[name].shape).contiguous()


def four_bits(state: dict[str, Any]) -> None:
    for name in (n for n in state if "proj" in n):
        scale = state[name].abs().amax(dim=1, keepdim=True) / 7
        state[name] = (state[name] / scale).round() * scale


def renamed(state: dict[str, Any]) -> None:
    state["model.layers.0.self_attn.query.weight"] = state.pop("model.layers.0.self_attn.q_proj.weight")


def lose_expert(exported: Path) -> Callable[[Path], object]:
    base = of_base(exported, "experts")
    names = [n for n in base if "layers.0" in n and "experts.3." in n]
    assert len(names) == 3
    return weights(lambda state: state.update({name: base[name] for name in names}))


def template(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = tiny.CHATML.replace("assistant\n{% endif", "assistant: {% endif")
    tokenizer.save_pretrained(folder)


def rows_template(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = tiny.CHATML.replace("{{ m.role }}\n", "{{ m.role }}:")
    tokenizer.save_pretrained(folder)


def double_bos(folder: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    start = "<|im_start|>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{start} $A", special_tokens=[(start, tokenizer.convert_tokens_to_ids(start))]
    )
    tokenizer.save_pretrained(folder)


def fewer_rows(folder: Path) -> None:
    config("config.json", vocab_size=300)(folder)
    weights(no_rows)(folder)


ROPE = {"rope_type": "default", "rope_theta": 500.0}


def no_rows(state: dict[str, Any]) -> None:
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        state[name] = state[name][:300].contiguous()


TAMPERED: dict[str, tuple[str, Callable[[Path], Callable[[Path], object]], str]] = {
    "an expert's update dropped": ("experts", lose_expert, "KL"),
    "alpha twice": ("lora", lambda e: scaled_update(e, "lora", 2.0), "KL"),
    "alpha / rank in place of rsLoRA's": ("lora", lambda e: scaled_update(e, "lora", 0.5), "KL"),
    "the whole update lost": ("lora", lambda e: scaled_update(e, "lora", 0.0), "a part of it is lost"),
    "DoRA's norm": ("dora", lambda e: weights(other_norm), "KL"),
    "q permuted": ("lora", lambda e: weights(permuted), "KL"),
    "merged into 4 bit": ("lora", lambda e: weights(four_bits), "KL"),
    "a renamed key": ("lora", lambda e: weights(renamed), "missing keys: model.layers.0.self_attn.q_proj.weight"),
    "the generation prompt": ("lora", lambda e: template, "a prompt is rendered otherwise"),
    "the template": ("lora", lambda e: rows_template, "has other tokens"),
    "a doubled beginning": ("lora", lambda e: double_bos, "a prompt has other tokens: it begins with"),
    "no end token": ("lora", lambda e: config("generation_config.json", eos_token_id=0), "end an answer in the run"),
    "no template": ("lora", lambda e: lambda f: (f / "chat_template.jinja").unlink(), "render"),
    "a head tied again": ("tied", lambda e: config("config.json", tie_word_embeddings=True), "ties the head"),
    "added rows lost": ("lora", lambda e: fewer_rows, "has no embedding: the export has 300"),
    "another class": ("lora", lambda e: config("config.json", architectures=["Qwen3ForCausalLM"]), "architectures is"),
    "another RoPE": ("lora", lambda e: config("config.json", rope_parameters=ROPE), "config.json: rope_parameters is"),
}  # fmt: skip


@pytest.mark.parametrize("name", usual(TAMPERED, *list(TAMPERED)[::2]))
def test_a_tampered_export_is_caught(exported: Path, tmp_path: Path, name: str) -> None:
    run, change, fragment = TAMPERED[name]
    assert fragment in tampered(exported, run, tmp_path, change(exported))


# --- models of scores


@pytest.fixture(scope="module")
def scored(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`reward`, an adapter, and `classify`, a full run, with their right exports in <run>/out."""
    folder = tmp_path_factory.mktemp("scored")
    tiny.write_rows(folder / "pairs.jsonl", tiny.preferences(40))
    tiny.write_rows(folder / "texts.jsonl", tiny.texts(40))
    base = Path(shutil.copytree(made / "llama", folder / "base"))
    padded_by_ends: Any = AutoTokenizer.from_pretrained(base)
    padded_by_ends.pad_token = "<|im_end|>"  # as many tokenizers are: an export has to have another
    padded_by_ends.save_pretrained(base)
    kinds: dict[str, dict[str, Any]] = {
        "reward": {"objective": {"name": "reward"}, "mode": "lora", "lora": {"rank": 4}},
        "classify": {"objective": {"name": "classify", "labels": list(tiny.LABELS)}, "mode": "full"},
    }
    for name, kind in kinds.items():
        rows = {"path": str(folder / ("pairs.jsonl" if name == "reward" else "texts.jsonl"))}
        recipe = {
            "run": {"name": name, "dir": str(folder)},
            "model": {"name": str(base)},
            **kind,
            "data": {"train": [rows], "eval": [rows], "max_length": 128},
            "batch": {"rows": 2},
            "optimizer": {"lr": 3e-2},
            "train": {"max_steps": 3, "precision": "fp32"},
            "evaluate": {"at_start": False},
            "checkpoint": {"every_steps": 3},
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
        train_here(folder / f"{name}.yaml")
        export_run(folder / name, ExportOptions(out=folder / name / "out"), quiet())
    return folder


@pytest.mark.long
@pytest.mark.parametrize("run", ["reward", "classify"])
def test_a_checkpoint_of_scores_is_exported_as_the_result_is(scored: Path, tmp_path: Path, run: str) -> None:
    shutil.copytree(scored / run, tmp_path / run, ignore=shutil.ignore_patterns("model", "out"))  # as of a stopped run
    for step in (None, "3"):
        compared = export_run(tmp_path / run, ExportOptions(step=step, out=tmp_path / f"{step}"), quiet())
        assert (compared["step"], compared["top1"]) == (3, 1)
        assert compared["kl_mean"] < 1e-10
        ours, results = (
            load_file(folder / "model.safetensors") for folder in (tmp_path / f"{step}", scored / run / "out")
        )
        assert ours.keys() == results.keys()
        assert all(torch.equal(ours[name], results[name]) for name in ours)
        for name in ("config.json", "tokenizer_config.json"):
            assert (tmp_path / f"{step}" / name).read_text() == (scored / run / "out" / name).read_text()


def test_a_right_export_of_scores_passes(scored: Path) -> None:
    for run, texts in {"reward": 64, "classify": 32}.items():
        written = json.loads((scored / run / "out" / "verify.json").read_text())
        assert written["passed"], written
        assert (written["rows"], written["scored"], written["top1"], written["tokens"]) == (32, texts, 1, 0)
        assert written["kl_mean"] < 1e-10
        assert written["score_max"] < 1e-4
        card = (scored / run / "out" / "README.md").read_text()
        assert f"| scored texts | {texts} |" in card
        assert "| same label or best answer | 100.00% |" in card
    assert json.loads((scored / "reward" / "out" / "verify.json").read_text())["kl_base"] > 1e-4


def ends_as_padding(folder: Path) -> None:
    """The token that ends each text: its score would be read before it."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = "<|im_end|>"
    tokenizer.save_pretrained(folder)
    config("config.json", pad_token_id=tokenizer.pad_token_id)(folder)


LABELS = {"id2label": {"0": "good", "1": "fair", "2": "bad"}}
TAMPERED_SCORES: dict[str, tuple[str, Callable[[Path], Callable[[Path], object]], str]] = {
    "the head begun again": ("reward", lambda e: weights(lambda s: s["score.weight"].normal_(0, 0.02)), "KL"),
    "the head lost": ("reward", lambda e: weights(lambda s: s.pop("score.weight")), "missing keys: score.weight"),
    "the update lost": ("reward", lambda e: scaled_update(e, "reward", 0.0), "a part of it is lost"),
    "the end as padding": ("reward", lambda e: ends_as_padding, "KL per scored text"),
    "labels in another order": (
        *("classify", lambda e: weights(lambda s: s.update({"score.weight": s["score.weight"].flip(0).contiguous()}))),
        "KL per scored text",
    ),
    "other names of labels": ("classify", lambda e: config("config.json", **LABELS), "config.json: id2label is"),
    "the template": ("reward", lambda e: rows_template, "has other tokens"),
}


@pytest.mark.parametrize("name", TAMPERED_SCORES)
def test_a_tampered_export_of_scores_is_caught(scored: Path, tmp_path: Path, name: str) -> None:
    run, change, fragment = TAMPERED_SCORES[name]
    assert fragment in tampered(scored, run, tmp_path, change(scored))


# --- what is around an export


def test_another_revision_of_the_base_is_caught(exported: Path, tmp_path: Path) -> None:
    other = tiny.save_model(tmp_path, "llama")
    state = load_file(other / "model.safetensors")
    state["lm_head.weight"] = state["lm_head.weight"].flip(1).contiguous()
    save_file(state, other / "model.safetensors", metadata={"format": "pt"})
    options = ExportOptions(out=tmp_path / "out", base=str(other), verify=False)
    export_run(exported / "lora", options, quiet())
    with pytest.raises(RunFailure, match="KL"):
        verify_run(tmp_path / "out", exported / "lora", None, None, 8, quiet())


def test_a_small_loss_is_seen_next_to_what_training_changed() -> None:
    """Below the threshold of the format, but half of what was trained."""
    figures = Figures("bfloat16", kl_mean=2e-4, kl_max=1e-3, top1=1.0, kl_base=4e-4)
    figures.judge()
    assert figures.problems == ["the mean KL is 50% of what training changed (0.0004): a part of it is lost"]


def test_what_cannot_be_compared_is_said(exported: Path, tmp_path: Path) -> None:
    (tmp_path / "foreign").mkdir()
    for folder, fragment in ((tmp_path / "foreign", "no model here"), (tmp_path / "absent", "no such folder")):
        with pytest.raises(UserError, match=fragment):
            verify_run(folder, exported / "lora", None, None, 8, quiet())
    with pytest.raises(UserError, match=r"no recipe\.yaml here, so there are no rows"):
        verify_export(exported / "lora" / "out", find_trained(exported / "lora" / "model"))


def test_rows_that_moved_are_told_before_anything_is_written(exported: Path, tmp_path: Path) -> None:
    run = tmp_path / "lora"
    shutil.copytree(exported / "lora", run, ignore=shutil.ignore_patterns("out"))
    saved = run / "recipe.yaml"
    saved.write_text(saved.read_text(encoding="utf-8").replace("held_out.jsonl", "moved.jsonl"), encoding="utf-8")
    before = sorted(run.rglob("*"))
    for to in ("hf", "gguf"):
        with pytest.raises(UserError, match=r"moved\.jsonl: no such file(.|\n)*\nOr use `export --no-verify`"):
            export_run(run, ExportOptions(to, out=run / to), quiet())
    with pytest.raises(UserError, match="Or use `export --no-verify`"):
        merge_adapter(run, run / "merged")
    assert sorted(run.rglob("*")) == before
    export_run(run, ExportOptions("hf", out=run / "hf", verify=False), quiet())
    assert (run / "hf" / "config.json").is_file()
