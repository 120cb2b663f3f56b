"""Every tensor of a base is in its result: those that transformers does not read are as they were."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import architectures as sweep
import pytest
import tiny
import torch
from conftest import launch, train_here
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

from finetune.errors import RunFailure
from finetune.release.export.commands import ExportOptions, export_run, merge_adapter, verify_run

# By architecture, what published checkpoints have beside what transformers' class reads: every causal class that says
# so by a pattern (`test_the_table_has_every_family`), ...
LEFT_OUT: dict[str, tuple[str, ...]] = {
    "axk1": ("model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.0.mlp.post_mlp_layernorm.weight"),
    "axk2": ("model.layers.0.self_attn.rotary_emb.inv_freq",),
    "bailing_hybrid": ("model.layers.42.eh_proj.weight", "model.layers.42.final_layernorm.weight"),
    "bart": ("encoder.version", "decoder.version"),
    "deepseek_v3": ("model.layers.61.eh_proj.weight", "model.layers.61.self_attn.o_proj.weight"),
    "deepseek_v32": ("model.layers.61.eh_proj.weight", "model.layers.61.shared_head.norm.weight"),
    "deepseek_v4": ("mtp.0.e_proj.weight", "mtp.0.norm.weight"),
    "dots3_note": ("model.layers.46.eh_proj.weight", "model.mtp.embed_tokens.weight"),
    "dots3_note_text": ("model.layers.46.eh_proj.weight", "model.mtp.embed_tokens.weight"),
    "ernie4_5_moe": ("model.mtp_block.0.norm.weight",),
    "exaone_moe": ("mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight"),
    "glm4_moe": ("model.layers.46.eh_proj.weight", "model.layers.92.eh_proj.weight"),
    "glm4_moe_lite": ("model.layers.47.eh_proj.weight",),
    "glm_moe_dsa": ("model.layers.78.eh_proj.weight",),
    "gpt-sw3": ("transformer.h.0.attn.bias",),
    "gpt2": ("transformer.h.0.attn.bias",),
    "gpt_neox": ("gpt_neox.layers.0.attention.bias", "gpt_neox.layers.0.attention.masked_bias"),
    "hy_v3": ("model.layers.80.eh_proj.weight",),
    "hy_v4": ("model.mtp_layers.0.eh_proj.weight",),
    "inkling_text": ("model.mtp.fc.weight",),
    "longcat_flash": ("model.mtp.layers.0.eh_proj.weight",),
    "mellum": ("mtp.fc.weight",),
    "mimo_v2_flash": ("model.mtp.layers.0.eh_proj.weight",),
    "minimax_m3_vl_text": ("mtp.layers.0.eh_proj.weight",),
    "nemotron_h": ("mtp.layers.0.eh_proj.weight",),
    "olmo_hybrid": ("mtp.fc.weight",),
    "qwen3_5": ("mtp.fc.weight",),
    "qwen3_5_moe": ("mtp.fc.weight",),
    "qwen3_5_moe_text": ("mtp.fc.weight", "model.visual.patch_embed.proj.weight"),
    "qwen3_5_text": ("mtp.fc.weight", "model.visual.patch_embed.proj.weight"),
    "qwen3_next": ("mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.mlp.gate.weight"),
    "qwen4_exp": ("mtp.fc.weight",),
    "qwen4_exp_text": ("mtp.fc.weight",),
}
# ... and what no pattern names: layers behind the last in families whose pattern has the number of one size alone, and
# buffers of older versions.
UNNAMED = {
    "deepseek_v3": ("model.layers.2.eh_proj.weight", "model.layers.2.mlp.experts.0.gate_proj.weight"),
    "glm4_moe": ("model.layers.2.shared_head.norm.weight",),
    "llama": ("model.layers.0.self_attn.rotary_emb.inv_freq", "draft.weight"),
}
DECLARES = {"qwen3_next": {"mtp_num_hidden_layers": 1}, "deepseek_v3": {"num_nextn_predict_layers": 1}}
STALE = "a head that predicts several tokens is not trained"
NO_HEAD = ("inv_freq", ".bias", "masked_bias", ".version", "draft", "visual", "post_mlp")
Heads = dict[str, torch.Tensor]


def base_with(folder: Path, name: str, kept: tuple[str, ...]) -> tuple[Path, Heads]:
    base, config = folder / name, sweep.tiny(name)
    text = config.get_text_config()
    text.vocab_size = tiny.MODELS["llama"]["vocab_size"]
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(base)
    tiny.tokenizer().save_pretrained(base)
    return base, add_tensors(base, kept, DECLARES.get(name, {}))


def add_tensors(base: Path, names: tuple[str, ...], declared: dict[str, Any]) -> Heads:
    heads = {key: torch.randn(8, 8, dtype=torch.bfloat16) for key in names}
    file = base / "model.safetensors"
    save_file({**load_file(file), **heads}, file, metadata={"format": "pt"})
    settings = json.loads((base / "config.json").read_text(encoding="utf-8"))
    (base / "config.json").write_text(json.dumps({**settings, **declared}), encoding="utf-8")
    return heads


def check_folder(folder: Path, base: Path, heads: Heads, declared: dict[str, Any]) -> None:
    found = {key: tensor for file in folder.glob("*.safetensors") for key, tensor in load_file(file).items()}
    with safe_open(base / "model.safetensors", framework="pt") as opened:
        assert found.keys() == set(opened.keys())
    for key, tensor in heads.items():
        assert torch.equal(found[key], tensor)
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert declared.items() <= settings.items()


def says(text: str, heads: Heads) -> bool:
    """Whether a text names tensors that are kept, and calls them stale if they are of a head."""
    is_head = not all(any(part in name for part in NO_HEAD) for name in heads)
    named = f"{len(heads):,} tensors that transformers does not load (" in text and "are kept from the base" in text
    return named and (STALE in text) == is_head


def exported(run: Path, out: Path, **options: str) -> str:
    """Returns what the export of a run says."""
    with (out.parent / f"{out.name}.txt").open("w", encoding="utf-8") as file:
        export_run(run, ExportOptions(out=out, **options), Console(file=file, width=500))
    return Path(file.name).read_text(encoding="utf-8")


CASES = [*LEFT_OUT.items(), *UNNAMED.items()]
DEFAULT = [("deepseek_v3", LEFT_OUT["deepseek_v3"]), *((name, UNNAMED[name]) for name in ("deepseek_v3", "llama"))]


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")  # peft, of GPT-2
@pytest.mark.parametrize(
    ("name", "kept"),
    [
        pytest.param(*case, marks=[] if case in DEFAULT else [pytest.mark.long], id=f"{case[0]}, {len(case[1])}")
        for case in CASES
    ],
)
def test_results_and_merges_have_every_tensor_of_the_base(
    name: str, kept: tuple[str, ...], recipe: dict[str, Any], write_recipe: Any, tmp_path: Path
) -> None:
    """Of full training, from its checkpoint, and of a merged adapter; each says what it keeps."""
    base, heads = base_with(tmp_path, name, kept)
    path, declared = write_recipe(recipe), DECLARES.get(name, {})
    common = (f"model.name={base}", "train.max_steps=1", "checkpoint.every_steps=1", "batch.rows_per_device=1")
    said = train_here(path, *common, "run.name=full")
    assert says(said, heads)
    run = tmp_path / "runs" / "full"
    check_folder(run / "model", base, heads, declared)
    assert says(exported(run, tmp_path / "out"), heads)
    check_folder(tmp_path / "out", base, heads, declared)
    shutil.rmtree(run / "model")  # from the checkpoint
    exported(run, tmp_path / "again")
    check_folder(tmp_path / "again", base, heads, declared)
    said = train_here(path, *common, "run.name=lora", "mode=lora", "lora={rank: 4, targets: all-linear}")
    assert says(said, heads)
    assert says(exported(tmp_path / "runs" / "lora", tmp_path / "merged"), heads)
    check_folder(tmp_path / "merged", base, heads, declared)


@pytest.mark.long  # it imports every model
def test_the_table_has_every_family() -> None:
    """Every causal class of transformers that leaves tensors out by a pattern."""
    found = set[str]()
    for name in CONFIG_MAPPING:
        if CONFIG_MAPPING[name] in MODEL_FOR_CAUSAL_LM_MAPPING:
            found |= (
                {name}
                if MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[name]]._keys_to_ignore_on_load_unexpected
                else set()
            )
    assert found == LEFT_OUT.keys()


def test_a_merged_qlora_has_every_tensor(
    recipe: dict[str, Any], write_recipe: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    base, heads = base_with(tmp_path, "deepseek_v3", LEFT_OUT["deepseek_v3"])
    settings = ("mode=qlora", "quantization={type: nf4}", "lora={rank: 4, targets: [o_proj]}")
    train_here(write_recipe(recipe), f"model.name={base}", "train.max_steps=1", *settings)
    merge_adapter(tmp_path / "runs" / "run", tmp_path / "out")
    check_folder(tmp_path / "out", base, heads, DECLARES["deepseek_v3"])
    assert STALE in capfd.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize("mode", ["full", pytest.param("lora", marks=pytest.mark.long)])
def test_the_text_part_of_a_multimodal_base_keeps_its_head(
    mode: str, recipe: dict[str, Any], write_recipe: Any, tmp_path: Path
) -> None:
    base = tiny.save_multimodal(tmp_path, "qwen3_5")
    heads = add_tensors(base, ("mtp.fc.weight", "mtp.norm.weight"), {})
    settings = ("mode=lora", "lora={rank: 4, targets: [q_proj]}") if mode == "lora" else ()
    said = train_here(write_recipe(recipe), f"model.name={base}", "train.max_steps=1", *settings)
    assert says(said, heads)
    assert says(exported(tmp_path / "runs" / "run", tmp_path / "out"), heads)
    check_folder(tmp_path / "out", base, heads, {})


def test_a_gguf_file_says_what_it_leaves_out(recipe: dict[str, Any], write_recipe: Any, tmp_path: Path) -> None:
    """Of a merged adapter, whose base's files are read as they are."""
    base, _ = base_with(tmp_path, "llama", UNNAMED["llama"])
    settings = ("mode=lora", "lora={rank: 4, targets: [q_proj]}")
    train_here(write_recipe(recipe), f"model.name={base}", "train.max_steps=1", *settings)
    said = exported(tmp_path / "runs" / "run", tmp_path / "out", to="gguf", dtype="f16")
    assert re.search(r"f16\.gguf leaves out 2 tensors \([\w.]+, \.\.\.\) of the base", said)


def test_a_model_of_scores_says_what_it_leaves_out(recipe: dict[str, Any], write_recipe: Any, tmp_path: Path) -> None:
    base, heads = base_with(tmp_path, "llama", UNNAMED["llama"])
    sources = [{"path": str(tiny.write_rows(tmp_path / "texts.jsonl", tiny.texts(40)))}]
    objective = {"name": "classify", "labels": list(tiny.LABELS)}
    data = {"train": sources, "eval": sources, "max_length": 64}
    path = write_recipe({**recipe, "objective": objective, "data": data})
    said = train_here(path, f"model.name={base}", "train.max_steps=1")
    assert f"has no use for {len(heads) + 1} tensors (" in said


def test_verify_compares_the_lists_of_tensors(recipe: dict[str, Any], write_recipe: Any, tmp_path: Path) -> None:
    """A full result that lost some is seen, also if the export has all that the result has."""
    base, heads = base_with(tmp_path, "llama", UNNAMED["llama"])
    train_here(write_recipe(recipe), f"model.name={base}", "train.max_steps=1")
    run, out, console = tmp_path / "runs" / "run", tmp_path / "out", Console(quiet=True)
    export_run(run, ExportOptions(out=out), console)
    figures = verify_run(out, run, None, None, 4, console)
    assert figures is not None
    assert figures.of_base == f"{len(heads)} of {len(heads)} kept"
    for folder in (run / "model", out):
        tensors = load_file(folder / "model.safetensors")
        del tensors["draft.weight"]
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RunFailure, match=r"missing keys: draft\.weight, which the base's files have \(1 in all\)"):
        verify_run(out, run, None, None, 4, console)
    (out / "export.json").unlink()  # another tool's: named, not refused
    figures = verify_run(out, run, None, None, 4, console)
    assert figures is not None
    assert figures.of_base == f"{len(heads) - 1} of {len(heads)} kept"
    (base / "model.safetensors").unlink()
    figures = verify_run(out, run, None, None, 4, console)
    assert figures is not None
    assert figures.of_base == "not compared, the base is not here"


@pytest.mark.parametrize(
    "config",
    [
        "fsdp2",
        pytest.param("pp", marks=pytest.mark.long),
        pytest.param("zero3", marks=pytest.mark.long),
        pytest.param("tp", marks=pytest.mark.long),
    ],
)
def test_a_result_of_several_processes_keeps_them(
    config: str, recipe: dict[str, Any], write_recipe: Any, tmp_path: Path
) -> None:
    base, heads = base_with(tmp_path, "deepseek_v3", LEFT_OUT["deepseek_v3"] + UNNAMED["deepseek_v3"])
    path = write_recipe({**recipe, "batch": {"rows": 4, "rows_per_device": 1}})
    done = launch(config, 2, "train", path, f"model.name={base}", "train.max_steps=1")
    assert done.returncode == 0, done.stderr[-3000:]
    check_folder(tmp_path / "runs" / "run" / "model", base, heads, DECLARES["deepseek_v3"])
