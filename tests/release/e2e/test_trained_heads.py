"""`model.mtp`: heads that predict a token further ahead, trained or dropped, from a recipe to the files of a result."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mtp_bases
import pytest
import stored
import tiny
import torch
from conftest import metrics, train_here
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor
from usual import usual

from finetune.errors import UserError
from finetune.release.export.commands import ExportOptions, export_run, merge_adapter, verify_run

LORA = ("mode=lora", "lora={rank: 4, targets: all-linear}", "optimizer.lr=5e-3")
Write = Callable[..., Path]


def tensors(folder: Path) -> dict[str, Tensor]:
    return {key: tensor for file in folder.glob("*.safetensors") for key, tensor in load_file(file).items()}


def of_head(name: str) -> bool:
    return name.startswith(("mtp.", "model.layers.2."))


@pytest.fixture
def start(recipe: dict[str, Any], write_recipe: Write, tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """Makes a base and a recipe that trains its head; returns both."""

    def make(name: str, mtp: str = "train") -> tuple[Path, Path]:
        base = mtp_bases.save_base(tmp_path, name)
        return base, write_recipe({**recipe, "model": {"name": str(base), "mtp": mtp}})

    return make


@pytest.mark.parametrize("name", usual(list(mtp_bases.BASES), "glm4_moe"))
def test_a_result_has_the_trained_head_by_the_names_of_its_base(name: str, start: Any, tmp_path: Path) -> None:
    """From the run, from its checkpoint and from a merged adapter; nothing calls it stale."""
    base, path = start(name)
    before, console = tensors(base), Console(quiet=True)
    said = train_here(path, "checkpoint.every_steps=6", "run.name=full")
    assert "stale" not in said
    assert "is not trained" not in said
    run = tmp_path / "runs" / "full"
    after = tensors(run / "model")
    assert after.keys() == before.keys()
    same = {key for key, tensor in before.items() if torch.equal(tensor, after[key])}
    assert all(key.endswith("e_score_correction_bias") for key in same)  # a buffer
    for copy, table in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
        if name in mtp_bases.BEHIND_LAST:
            assert torch.equal(after[f"model.layers.2.{copy}.weight"], after[f"{table}.weight"])
    export_run(run, ExportOptions(out=tmp_path / "out"), console)
    shutil.rmtree(run / "model")
    export_run(run, ExportOptions(out=tmp_path / "again"), console)
    for out in (tmp_path / "out", tmp_path / "again"):
        exported = tensors(out)
        assert exported.keys() == after.keys()
        assert all(torch.equal(exported[key], tensor) for key, tensor in after.items())
    train_here(path, *LORA, "run.name=lora")
    merge_adapter(tmp_path / "runs" / "lora", tmp_path / "merged")
    merged = tensors(tmp_path / "merged")
    assert merged.keys() == before.keys()
    matrices = {key for key, tensor in before.items() if of_head(key) and tensor.ndim > 1}
    changed = {key for key in matrices if not torch.equal(merged[key], before[key])}
    frozen = ("mlp.gate.weight", "embed_tokens.weight", "shared_head.head.weight")
    assert matrices - changed == {key for key in matrices if key.endswith(frozen)}
    assert verify_run(tmp_path / "merged", tmp_path / "runs" / "lora", None, None, 4, console) is not None
    settings = json.loads((tmp_path / "merged" / "config.json").read_text(encoding="utf-8"))
    assert {"num_nextn_predict_layers": 1}.items() <= settings.items() or settings["mtp_num_hidden_layers"] == 1


@pytest.mark.long
@pytest.mark.parametrize("mode", ["full", "lora"])
def test_the_text_part_of_a_multimodal_base_trains_its_head(
    mode: str, recipe: dict[str, Any], write_recipe: Write, tmp_path: Path
) -> None:
    """Qwen3.5, whose published models see images."""
    from transformers import AutoModelForCausalLM

    base = tiny.save_multimodal(tmp_path, "qwen3_5")
    settings = tiny.MULTIMODAL["qwen3_5"]["text_config"]
    text = mtp_bases.save_base(tmp_path / "text", "qwen3_5_text", **settings)
    mtp_bases.add_tensors(base, {key: tensor for key, tensor in tensors(text).items() if key.startswith("mtp.")})
    model: Any = AutoModelForCausalLM.from_pretrained(text)
    assert model.config.hidden_size == 64
    path = write_recipe({**recipe, "model": {"name": str(base), "mtp": "train"}})
    said = train_here(path, *(LORA if mode == "lora" else ()))
    assert "is not trained" not in said
    run, before = tmp_path / "runs" / "run", tensors(base)
    export_run(run, ExportOptions(out=tmp_path / "out"), Console(quiet=True))
    for folder in ([run / "model"] if mode == "full" else []) + [tmp_path / "out"]:
        after = tensors(folder)
        assert after.keys() == before.keys()
        assert not torch.equal(after["mtp.fc.weight"], before["mtp.fc.weight"])
        assert not torch.equal(after["mtp.layers.0.mlp.up_proj.weight"], before["mtp.layers.0.mlp.up_proj.weight"])
        towers = {key for key in before if ".visual." in key}
        assert towers
        assert all(torch.equal(after[key], before[key]) for key in towers)


def test_more_guesses_are_accepted_after_training_and_a_resumed_run_is_the_same(start: Any, tmp_path: Path) -> None:
    """As the model learns to write the same words, and the head learns them too."""
    _, path = start("qwen3_5_text")
    rows = [
        {"messages": [tiny._said("user", [word]), tiny._said("assistant", ["river stone light cloud"])]}
        for word in "abcdef"
    ]
    source = tiny.write_rows(tmp_path / "same.jsonl", rows * 4)
    settings = [f"data.train=[{{path: {source}}}]", f"data.eval=[{{path: {source}}}]", "optimizer.lr=5e-3"]
    settings += [
        "train.max_steps=24",
        "evaluate={at_start: true, every_steps: 12}",
        "model.mtp_weight=1",
        "schedule={name: constant, warmup_steps: 0}",
    ]
    train_here(path, *settings, "run.name=whole")
    lines = metrics(tmp_path / "runs" / "whole")
    acceptance = [line["eval_mtp_acceptance"] for line in lines if "eval_mtp_acceptance" in line]
    assert acceptance[0] < 0.2
    assert acceptance[-1] > 0.9
    train_here(path, *settings, "run.name=parts", "train.max_steps=12", "checkpoint.every_steps=12")
    shutil.rmtree(tmp_path / "runs" / "parts" / "model")
    train_here(path, *settings, "run.name=parts", "checkpoint.every_steps=12")
    trained = [[line for line in read if "loss" in line] for read in (lines, metrics(tmp_path / "runs" / "parts"))]
    compared = ("step", "loss", "mtp_loss", "grad_norm")
    whole, parts = ([tuple(line[key] for key in compared) for line in read] for read in trained)
    assert len(whole) == 24
    assert parts == whole


@pytest.mark.parametrize("name", usual(["deepseek_v3", "qwen3_5_text"], "deepseek_v3"))
def test_a_dropped_head_leaves_neither_tensors_nor_a_declaration(name: str, start: Any, tmp_path: Path) -> None:
    base, path = start(name, mtp="drop")
    kept = {key for key in tensors(base) if not of_head(key)}
    said = train_here(path, "train.max_steps=1", "run.name=full")
    assert "kept from the base" not in said
    export_run(tmp_path / "runs" / "full", ExportOptions(out=tmp_path / "out"), Console(quiet=True))
    train_here(path, "train.max_steps=1", *LORA, "run.name=lora")
    merge_adapter(tmp_path / "runs" / "lora", tmp_path / "merged")
    for folder in (tmp_path / "runs" / "full" / "model", tmp_path / "out", tmp_path / "merged"):
        assert tensors(folder).keys() == kept
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        # transformers' config of DeepSeek-V3 has a head unless it is told that there is none
        assert not settings.get("num_nextn_predict_layers")
        assert "mtp_num_hidden_layers" not in settings
        assert not any("mtp" in key for key in settings)


@pytest.mark.long
def test_a_multimodal_base_drops_its_head(recipe: dict[str, Any], write_recipe: Write, tmp_path: Path) -> None:
    base = tiny.save_multimodal(tmp_path, "qwen3_5")
    kept = tensors(base).keys()
    mtp_bases.add_tensors(base, {"mtp.fc.weight": torch.zeros(64, 128)})
    train_here(write_recipe({**recipe, "model": {"name": str(base), "mtp": "drop"}}), "train.max_steps=1")
    export_run(tmp_path / "runs" / "run", ExportOptions(out=tmp_path / "out"), Console(quiet=True))
    for folder in (tmp_path / "runs" / "run" / "model", tmp_path / "out"):
        assert tensors(folder).keys() == kept


def lines_of(run: Path) -> list[dict[str, Any]]:
    shown = ("loss", "mtp_loss", "eval_loss", "eval_mtp_loss", "eval_mtp_acceptance")
    return [{key: line[key] for key in shown if key in line} for line in metrics(run)]


@pytest.mark.parametrize("case", usual([("fp8", "deepseek_v3"), ("nvfp4", "qwen3_5_text")], ("fp8", "deepseek_v3")))
def test_a_head_in_fewer_bits_trains_as_the_unpacked_one(
    case: tuple[str, str], recipe: dict[str, Any], write_recipe: Write, tmp_path: Path
) -> None:
    """By adapters on its codes, as the layers do; and it is exported in them."""
    kind, name = case
    base, plain = stored.store(mtp_bases.save_base(tmp_path, name), tmp_path, kind)
    before = tensors(base)
    path = write_recipe({**recipe, "model": {"name": str(base), "mtp": "train"}})
    settings = (*LORA, "evaluate={at_start: true, every_steps: 6}")
    train_here(path, *settings, "run.name=kept")
    train_here(path, *settings, "run.name=plain", f"model.name={plain}")
    kept, unpacked = (tmp_path / "runs" / one for one in ("kept", "plain"))
    for ours, theirs in zip(lines_of(kept), lines_of(unpacked), strict=True):
        assert ours == pytest.approx(theirs, rel=5e-6)
    ours, theirs = tensors(kept / "model"), tensors(unpacked / "model")
    assert ours.keys() == theirs.keys()
    assert any(".mtp." in key for key in ours)
    largest = max(float(one.abs().max()) for one in theirs.values())
    for key, one in theirs.items():
        torch.testing.assert_close(ours[key], one, rtol=0, atol=1e-5 * largest, msg=lambda text, k=key: f"{k}: {text}")
    export_run(kept, ExportOptions(to="base", out=tmp_path / "out"), Console(quiet=True))  # and its gate
    after = tensors(tmp_path / "out")
    assert after.keys() == before.keys()
    changed = {key for key in before if not torch.equal(before[key].view(torch.uint8), after[key].view(torch.uint8))}
    codes = {key for key in before if of_head(key) and before[key].itemsize == 1 and "scale" not in key}
    assert codes
    assert codes <= changed
    assert not {key for key in changed if "norm" in key or "embed_tokens" in key or "shared_head.head" in key}


@pytest.mark.long
@pytest.mark.parametrize("mode", ["full", "lora"])
def test_a_head_that_is_unpacked_as_it_is_read(
    mode: str, recipe: dict[str, Any], write_recipe: Write, tmp_path: Path
) -> None:
    base, plain = stored.store(mtp_bases.save_base(tmp_path, "glm4_moe"), tmp_path, "fp8")
    settings = LORA if mode == "lora" else ()
    for run, name, more in (("unpacked", base, {"stored": "unpack"}), ("plain", plain, {})):
        path = write_recipe({**recipe, "model": {"name": str(name), "mtp": "train", **more}})
        train_here(path, *settings, f"run.name={run}")
    assert lines_of(tmp_path / "runs" / "unpacked") == lines_of(tmp_path / "runs" / "plain")
    ours, theirs = (tensors(tmp_path / "runs" / run / "model") for run in ("unpacked", "plain"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], one) for key, one in theirs.items())


def without(base: Path, *ends: str) -> None:
    file = base / "model.safetensors"
    left = {key: tensor for key, tensor in load_file(file).items() if not (of_head(key) and key.endswith(ends))}
    save_file(left, file, metadata={"format": "pt"})


def test_bases_whose_head_cannot_train_are_refused(start: Any, recipe: dict[str, Any], write_recipe: Write) -> None:
    base, path = start("deepseek_v3")
    whole = tensors(base)
    without(base, "enorm.weight", "experts.1.up_proj.weight")
    with pytest.raises(UserError, match=r"the head of .* lacks 2 tensors, such as `model\.layers\.2\.enorm"):
        train_here(path)
    mtp_bases.add_tensors(base, {**whole, "model.layers.2.eh_proj.weight": torch.zeros(64, 64)})
    with pytest.raises(UserError, match=r"contradict the shapes of its config\.json"):
        train_here(path)
    mtp_bases.add_tensors(base, {**whole, "model.layers.2.shared_head.head.weight": torch.zeros(384, 64)})
    with pytest.raises(
        UserError, match=r"`model\.layers\.2\.shared_head\.head\.weight` in .* is not `lm_head\.weight`"
    ):
        train_here(path)
    mtp_bases.add_tensors(base, {**whole, "model.layers.2.draft.weight": torch.zeros(8)})
    with pytest.raises(UserError, match=r"has `model\.layers\.2\.draft\.weight`\. No part of a head"):
        train_here(path)
    mtp_bases.add_tensors(base, {**whole, "model.layers.3.eh_proj.weight": torch.zeros(64, 64)})
    with pytest.raises(UserError, match="has several heads"):
        train_here(path)
    without(base, "")
    with pytest.raises(UserError, match="has no head that predicts several tokens"):
        train_here(path)
    recipe["model"] |= {"mtp": "train"}  # a Llama
    with pytest.raises(UserError, match="the head of `llama` cannot be trained"):
        train_here(write_recipe(recipe))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (("model.mtp=keep", "model.mtp_weight=0.2"), "model.mtp_weight: has no effect under `mtp: keep`"),
        (("objective.name=focal",), "model.mtp: `train` learns to write the targets"),
        (("model.cross_entropy=plain",), "model.cross_entropy: `plain` has the logits"),
        (("mode=lora", "lora={modules_to_save: [mtp]}"), "lora.modules_to_save: the head trains by adapters"),
        (("mode=lora", "lora={}", "tokens.add=[x1]"), "tokens.add: the head's files have copies"),
    ],
)
def test_settings_that_contradict_a_trained_head(settings: tuple[str, ...], problem: str, start: Any) -> None:
    _, path = start("deepseek_v3")
    with pytest.raises(UserError, match=problem):
        train_here(path, *settings)


@pytest.mark.long
def test_experts_of_a_checkpoint_are_exported_in_the_type_of_the_result(start: Any, tmp_path: Path) -> None:
    """Which files have one by one, and memory stacked; the base is in fp32."""
    _, path = start("glm4_moe")
    train_here(path, "train.precision=bf16", "checkpoint.every_steps=6")
    run = tmp_path / "runs" / "run"
    result = tensors(run / "model")
    shutil.rmtree(run / "model")
    export_run(run, ExportOptions(out=tmp_path / "out"), Console(quiet=True))
    for name, tensor in tensors(tmp_path / "out").items():
        if "experts" in name:
            assert tensor.dtype == torch.bfloat16
            assert torch.equal(tensor, result[name])


@pytest.mark.long
def test_experts_that_files_have_stacked_stay_so(start: Any, tmp_path: Path) -> None:
    """As published Qwen3.5 models have them, in layers and head alike."""
    base, path = start("qwen3_5_moe_text")
    model, head = mtp_bases.load_plain(base)
    experts = {f"{name}": p.detach() for name, p in model.named_parameters() if ".experts." in name}
    experts |= {f"mtp.layers.0.{n}": p.detach() for n, p in head.layer.named_parameters() if ".experts." in n}
    file = base / "model.safetensors"
    left = {name: tensor for name, tensor in load_file(file).items() if ".experts." not in name}
    save_file({**left, **experts}, file, metadata={"format": "pt"})
    train_here(path)
    after = tensors(tmp_path / "runs" / "run" / "model")
    assert after.keys() == tensors(base).keys()
    stacked = after["mtp.layers.0.mlp.experts.gate_up_proj"]
    assert stacked.shape == (4, 64, 64)
    assert not torch.equal(stacked, experts["mtp.layers.0.mlp.experts.gate_up_proj"])
