"""`export` and `merge`: results and checkpoints become Hugging Face folders that are the trained model, tensor by
tensor."""

from __future__ import annotations

import json
import shutil
import signal
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import forks
import pytest
import tiny
import torch
import yaml
from conftest import metrics, train_here
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from finetune.checkpoints import weight_files
from finetune.checkpoints.folder import describe_checkpoints
from finetune.checkpoints.trained import find_trained
from finetune.errors import RunFailure, UserError
from finetune.models.weights import add_adapters
from finetune.recipe.schema import Lora
from finetune.release.export.commands import ExportOptions, export_run
from finetune.release.export.hf_folder import export_folder
from finetune.release.export.loading import load_result

IDS = torch.arange(3, 103).reshape(2, 50)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@torch.no_grad()
def logits(folder: Path) -> torch.Tensor:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(input_ids=IDS).logits


@pytest.fixture(scope="session")
def runs(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`lora` and `full`, with checkpoints at steps 2, 4 (the best, made so) and 6."""
    folder = tmp_path_factory.mktemp("exported")
    for name, changes in {
        "lora": {"mode": "lora", "lora": {"rank": 4, "dora": True}},
        "full": {"mode": "full"},
    }.items():
        recipe = {
            "run": {"name": name, "dir": str(folder)},
            "model": {"name": str(made / "llama")},
            **changes,
            "data": {
                "train": [{"path": str(made / "rows.jsonl"), "format": "messages"}],
                "eval": [{"path": str(made / "held_out.jsonl"), "format": "messages"}],
                "max_length": 64,
            },
            "batch": {"rows": 4},
            "optimizer": {"lr": 3e-3},
            "train": {"max_steps": 6, "precision": "bf16"},
            "evaluate": {"at_start": False, "every_steps": 2},
            "checkpoint": {"every_steps": 2, "keep": 5, "best": "eval_loss"},
        }
        path = folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
        train_here(path)
        state = folder / name / "checkpoints" / "step-00000004" / "state.json"
        state.write_text(json.dumps(json.loads(state.read_text()) | {"metrics": {"eval_loss": 0.0}}))
        rewrite_manifest(state.parent)
    return folder


def rewrite_manifest(folder: Path) -> None:
    from finetune.utils import sha256_file

    manifest = json.loads((folder / "manifest.json").read_text())
    path = folder / "state.json"
    manifest["files"]["state.json"] = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
    (folder / "manifest.json").write_text(json.dumps(manifest))


# --- from a run


def test_a_checkpoint_of_the_last_step_gives_the_result_bit_by_bit(runs: Path, tmp_path: Path) -> None:
    export_run(runs / "full", ExportOptions(step="6", out=tmp_path / "out"), quiet())
    ours, result = tensors(tmp_path / "out"), tensors(runs / "full" / "model")
    assert len(result) == 21
    assert ours.keys() == result.keys()
    assert all(torch.equal(ours[name], result[name]) and ours[name].dtype == result[name].dtype for name in result)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == json.loads(
        (runs / "full" / "model" / "config.json").read_text()
    )
    for folder in (tmp_path / "out", runs / "full" / "model"):
        assert AutoTokenizer.from_pretrained(folder).chat_template == tiny.CHATML
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == 2


@pytest.mark.long
def test_an_adapter_of_a_checkpoint_merges_as_the_result_does(runs: Path, tmp_path: Path) -> None:
    for name, step in {"result": None, "last": "6", "best": "best"}.items():
        export_run(runs / "lora", ExportOptions(step=step, out=tmp_path / name, dtype="float32"), quiet())
    result, last, best = (tensors(tmp_path / name) for name in ("result", "last", "best"))
    base = tensors(Path(yaml.safe_load((runs / "lora" / "recipe.yaml").read_text())["model"]["name"]))
    assert result.keys() == base.keys()
    assert all(torch.equal(result[name], last[name]) for name in result)
    changed = {name for name in base if not torch.equal(base[name].float(), result[name])}
    assert changed == {name for name in base if "proj" in name}  # all-linear; the rest is the base's, bit by bit
    assert not torch.equal(best[min(changed)], last[min(changed)])
    about = json.loads((tmp_path / "best" / "export.json").read_text())
    assert (about["step"], about["trained"]["checkpoint"]) == (4, "step-00000004")
    adapted, _ = load_result(runs / "lora")
    with torch.no_grad():
        expected = adapted.float()(input_ids=IDS).logits
    torch.testing.assert_close(logits(tmp_path / "result"), expected, rtol=0, atol=2e-5)


def test_the_same_export_has_the_same_bytes_and_goes_on_after_a_stop(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, shards = find_trained(runs / "lora"), 100_000
    export_folder(trained, tmp_path / "a", shard_bytes=shards)
    real, written = weight_files.write_safetensors, list[str]()

    def stopping(path: Path, *arguments: Any) -> int:
        if len(written) == 2:
            raise OSError(28, "No space left on device", str(path))
        written.append(path.name.removesuffix(".partial"))
        return real(path, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(weight_files, "write_safetensors", stopping)
        with pytest.raises(RunFailure, match=r"No space left.*Fix: free space and run the same command again"):
            export_folder(trained, tmp_path / "b", shard_bytes=shards)
    assert not (tmp_path / "b").exists()
    kept = {name: (tmp_path / "b.partial" / name).stat().st_mtime_ns for name in written}
    export_folder(trained, tmp_path / "b", shard_bytes=shards)
    assert {name: (tmp_path / "b" / name).stat().st_mtime_ns for name in written} == kept
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "b").iterdir())
    assert len([name for name in names if name.endswith(".safetensors")]) > 3
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in names)


KILLER = Path(__file__).with_name("export_killer.py")
KILLS = {
    "while it writes": ("writing", "hf"),
    "in its gate": ("gate", "hf"),
    "before it gets its name": ("rename", "hf"),
    "as a GGUF file in its gate": ("gate", "ollama"),
}


@pytest.mark.parametrize(
    "name",
    [name if name == "in its gate" else pytest.param(name, marks=pytest.mark.long) for name in KILLS],
)
def test_a_killed_export_has_no_name_and_goes_on(runs: Path, tmp_path: Path, name: str) -> None:
    point, to = KILLS[name]
    out, partial, failed = (tmp_path / f"out{suffix}" for suffix in ("", ".partial", ".failed"))
    options = ExportOptions(to=to, out=out, dtype="f32" if to == "ollama" else None)
    more = ("--dtype", options.dtype) if options.dtype else ()
    killed = forks.python(KILLER, point, out, "export", runs / "lora", "--to", to, "-o", out, *more)
    assert killed.returncode == signal.SIGKILL, killed.stderr
    assert (out.exists(), partial.exists()) == (False, True)
    if name == "in its gate":  # and what it had written is damaged before the same command goes on with it
        file = partial / "model.safetensors"
        content = bytearray(file.read_bytes())
        content[-100:] = bytes(100)
        file.write_bytes(content)
        with pytest.raises(
            RunFailure, match=r"does not match the trained model:\n.*are not the run's(?s:.*)out\.failed"
        ):
            export_run(runs / "lora", options, quiet())
        assert (out.exists(), partial.exists()) == (False, False)
        assert not json.loads((failed / "verify.json").read_text())["passed"]
    export_run(runs / "lora", options, quiet())
    assert json.loads((out / "verify.json").read_text())["passed"]
    assert sorted(path.name for path in tmp_path.glob("out*")) == ["out", *(["out.failed"] if failed.exists() else [])]
    export_run(runs / "lora", replace(options, out=tmp_path / "again"), quiet())
    for path in (tmp_path / "again").iterdir():
        assert path.read_bytes() == (out / path.name).read_bytes(), path.name


def test_what_is_left_of_another_export_is_not_used(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "model.safetensors").write_bytes(b"of another")
    (tmp_path / "out.partial" / "progress.json").write_text("{}\n")
    export_folder(find_trained(runs / "lora"), tmp_path / "out")
    assert len(tensors(tmp_path / "out")) == 21


def test_a_stopped_run_without_result_or_base_folder(runs: Path, made: Path, tmp_path: Path) -> None:
    """The newest checkpoint; the base from where it is now."""
    run = Path(shutil.copytree(runs / "lora", tmp_path / "run"))
    shutil.rmtree(run / "model")
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    recipe["model"]["name"] = str(tmp_path / "gone")
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    with pytest.raises(UserError, match=r"gone.*is neither a folder here nor on the hub"):
        export_run(run, ExportOptions(), quiet())
    exported = export_run(run, ExportOptions(base=str(made / "llama")), quiet())
    assert (exported["out"], exported["step"], exported["top1"]) == (str(run / "export-hf-step-6"), 6, 1)
    export_folder(find_trained(runs / "lora"), tmp_path / "result")
    ours, result = tensors(run / "export-hf-step-6"), tensors(tmp_path / "result")
    assert all(torch.equal(ours[name], result[name]) for name in result)


def quiet() -> Any:
    from rich.console import Console

    return Console(quiet=True)


def test_the_mean_of_checkpoints(runs: Path, tmp_path: Path) -> None:
    parts = []
    for step in ("2", "4", "6"):
        export_folder(find_trained(runs / "full", step), tmp_path / step, torch.float32)
        parts.append(tensors(tmp_path / step))
    options = ExportOptions(out=tmp_path / "mean", dtype="float32", average=3)
    assert export_run(runs / "full", options, quiet())["top1"] == 1
    for name, mean in tensors(tmp_path / "mean").items():
        torch.testing.assert_close(mean, sum(part[name] for part in parts) / 3, rtol=1e-6, atol=1e-7)
    assert not torch.equal(mean, parts[2][name])
    about = json.loads((tmp_path / "mean" / "export.json").read_text())
    assert list(about["trained"]["mean of"]) == ["step-00000006", "step-00000004", "step-00000002"]
    export_folder(find_trained(runs / "full", "4", 2), tmp_path / "two", torch.float32)
    torch.testing.assert_close(tensors(tmp_path / "two")[name], (parts[0][name] + parts[1][name]) / 2)


# --- every kind of adapter


@pytest.mark.parametrize(
    ("name", "lora", "untied"),
    [
        ("llama", {"rslora": True, "alpha": 7.0}, False),
        ("llama", {"modules_to_save": ("lm_head",)}, False),
        ("llama_tied", {"targets": ("q_proj", "lm_head")}, True),
        ("llama_tied", {"targets": ("q_proj", "embed_tokens")}, True),
        ("llama_tied", {"modules_to_save": ("embed_tokens", "lm_head")}, False),
        ("mixtral", {"rslora": True}, False),
        ("qwen3_moe", {}, False),
    ],
)
def test_merged_tensor_by_tensor_is_the_adapted_model(
    made: Path, tmp_path: Path, name: str, lora: dict[str, Any], untied: bool
) -> None:
    """Against peft's own forward. A tied head that was trained alone gets weights of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = AutoModelForCausalLM.from_pretrained(made / name)
        adapted = add_adapters(base, Lora(rank=4, **lora), torch.float32).eval()
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in (p for p in adapted.parameters() if p.requires_grad):
                parameter.add_(torch.randn_like(parameter) * 0.03)
            expected = adapted(input_ids=IDS).logits
        adapted.save_pretrained(tmp_path / "adapter")
    tiny.tokenizer().save_pretrained(tmp_path / "adapter")
    export_folder(find_trained(tmp_path / "adapter"), tmp_path / "out")
    torch.testing.assert_close(logits(tmp_path / "out"), expected, rtol=0, atol=5e-5)
    keys, base_keys = set(tensors(tmp_path / "out")), set(tensors(made / name))
    assert keys - base_keys == ({"lm_head.weight"} if untied else set())
    assert base_keys <= keys


# --- messages


def bad_adapter(change: Callable[[Path], object]) -> Callable[[Path, Path], Path]:
    def make(runs: Path, tmp_path: Path) -> Path:
        folder = Path(shutil.copytree(runs / "lora" / "model", tmp_path / "adapter"))
        change(folder)
        return folder

    return make


def changed_settings(folder: Path, **values: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def never_saved(runs: Path, tmp_path: Path) -> Path:
    (tmp_path / "empty").mkdir()
    shutil.copy(runs / "lora" / "recipe.yaml", tmp_path / "empty")
    return tmp_path / "empty"


@pytest.mark.parametrize(
    ("make", "fragment"),
    [
        (never_saved, "no result here (no model/config.json or model/adapter_config.json), and no checkpoint either"),
        (bad_adapter(lambda f: changed_settings(f, base_model_name_or_path="/gone/base")), "give --base FOLDER"),
        (bad_adapter(lambda f: changed_settings(f, bias="all")), "only LoRA without trained biases is merged"),
        (bad_adapter(lambda f: changed_settings(f, target_modules=["q_proj"])), "tensors have no place in the base"),
        (
            bad_adapter(lambda f: (f / "adapter_model.safetensors").write_bytes(b"x" * 9)),
            "damaged or incomplete (9 bytes; header too large)",
        ),
    ],
)
def test_what_cannot_be_exported_is_said(
    runs: Path, tmp_path: Path, make: Callable[[Path, Path], Path], fragment: str
) -> None:
    with pytest.raises(UserError) as error:
        export_run(make(runs, tmp_path), ExportOptions(out=tmp_path / "out"), quiet())
    assert fragment in str(error.value)
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    ("options", "fragment"),
    [
        (ExportOptions(step="5"), "has no such checkpoint. Fix: give one of the steps 6, 4, 2"),
        (ExportOptions(average=4), "--average-checkpoints 4"),
        (ExportOptions(step="five"), "expected a number or `best`"),
        (ExportOptions(to="onnx"), "--to onnx: no such format. Fix: give one of hf"),
        (ExportOptions(dtype="int8"), "--dtype int8: no type of `--to hf`. Fix: give one of float32"),
    ],
)
def test_bad_options(runs: Path, options: ExportOptions, fragment: str) -> None:
    with pytest.raises(UserError) as error:
        export_run(runs / "full", options, quiet())
    assert fragment in str(error.value)


# --- the best checkpoint


def test_the_best_checkpoint_is_marked(runs: Path) -> None:
    entries = describe_checkpoints(runs / "full", verify=False)
    assert {entry.step: entry.best for entry in entries} == {6: False, 4: True, 2: False}


def test_the_result_may_be_the_best_checkpoint(recipe: dict[str, Any], write_recipe: Any, tmp_path: Path) -> None:
    """A rate that ruins the model, so that it is not the last one."""
    recipe |= {"optimizer": {"lr": 0.3}, "schedule": {"name": "constant"}}
    recipe["checkpoint"] = {"best": "eval_loss", "every_steps": 1, "keep": 1}
    recipe["evaluate"] |= {"every_steps": 1}
    recipe["train"] |= {"result": "best"}
    said = train_here(write_recipe(recipe))
    run = tmp_path / "runs" / "run"
    losses = {line["step"]: line["eval_loss"] for line in metrics(run) if "eval_loss" in line}
    step = min(losses, key=lambda one: losses[one])
    assert step < 6
    assert f"the result is that of step {step}, the best by eval_loss" in said
    export_run(run, ExportOptions(step="best", out=tmp_path / "out"), quiet())
    best, result = tensors(tmp_path / "out"), tensors(run / "model")
    assert all(torch.equal(best[name], result[name]) for name in result)
    assert f"| Steps | {step} of" in (run / "model" / "README.md").read_text()
    assert json.loads((run / "status.json").read_text())["step"] == 6
