"""Bases that stay as their checkpoint stores them: exact values, the losses and gradients of the unpacked model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import stored
import tiny
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from usual import usual

from finetune.errors import UserError
from finetune.models.assemble import assemble
from finetune.models.attention import attention_for
from finetune.models.base_model import Base
from finetune.models.checkpoint_files import kept_tensors
from finetune.models.config import model_config
from finetune.models.packed_linear import linear_weights
from finetune.models.stored_config import FORMATS, check_stored, stored_format
from finetune.models.stored_layers import StoredLinear, stored_matrices
from finetune.models.weights import Placement, load_model, parameter_counts
from finetune.recipe import load_recipe

CPU = torch.device("cpu")
# A dense model in every format; experts that transformers stacks, and those that files stack; matrices that blocks of
# fp8 do not divide, by latent attention; biases.
CASES = [(kind, "llama") for kind in stored.MAKE if kind != "mxfp4"]
CASES += [("fp8", "qwen3_moe"), ("mxfp4", "gpt_oss"), ("nvfp4", "mixtral"), ("fp8", "qwen2_moe"), ("fp8", "deepseek")]
DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "num_key_value_heads": 4,
}


@pytest.fixture(scope="module")
def folders(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns the folders, stored and unpacked, of a format and a model."""
    folder, known = tmp_path_factory.mktemp("stored"), dict[tuple[str, str], tuple[Path, Path]]()

    def get(kind: str, name: str) -> tuple[Path, Path]:
        if (kind, name) not in known:
            (folder / name / kind).mkdir(parents=True)
            is_own = name == "deepseek"
            plain = tiny.save_model(folder / "plain", "llama", **DEEPSEEK) if is_own else made / name
            known[kind, name] = stored.store(plain, folder / name / kind, kind)
        return known[kind, name]

    return get


def load(recipe: dict[str, Any], write_recipe: Any, folder: Path, weights: Any = "load", **changes: Any) -> Any:
    values = {**recipe, "mode": "lora", "lora": {"rank": 4, "alpha": 8}, **changes}
    values["model"] = {"name": str(folder), "attention": "eager", **changes.get("model", {})}
    loaded = load_recipe(write_recipe(values))
    config = model_config(loaded.model)
    attention = attention_for(loaded, config, "cpu")
    model = load_model(loaded, Base.of(loaded, config), attention, Placement(weights, CPU))
    return model, loaded


def values_of(model: Any) -> dict[str, Tensor]:
    """The frozen base's tensors by name, unpacked."""
    found = {}
    for path, module in model.get_base_model().named_modules():
        for name, weight in module.named_parameters(recurse=False):
            matrix = module.matrix if isinstance(module, StoredLinear) and name == "weight" else None
            if matrix is not None:
                weight = matrix.unpack(weight, weight.dtype)
            elif (matrix := stored_matrices(module).get(name)) is not None:
                weight = torch.stack([matrix.unpack(one, weight.dtype) for one in weight])
                weight = weight.mT if module.is_transposed else weight
            found[f"{path}.{name}".replace(".base_layer", "")] = weight
    return {name: weight for name, weight in found.items() if ".lora_" not in name}


@pytest.mark.parametrize("precision", usual(("fp32", "bf16"), "fp32"))
@pytest.mark.parametrize(
    "case",
    usual(CASES, ("gptq", "llama"), ("w4a16_zeros", "llama"), ("fp8", "deepseek"), ("mxfp4", "gpt_oss")),
    ids=str,
)
def test_values_are_those_of_the_unpacked_checkpoint(
    recipe: dict[str, Any], write_recipe: Any, folders: Any, case: tuple[str, str], precision: str
) -> None:
    recipe["train"]["precision"] = precision
    kept, plain = (values_of(load(recipe, write_recipe, folder)[0]) for folder in folders(*case))
    assert kept.keys() == plain.keys()
    for key, value in plain.items():
        assert kept[key].dtype == value.dtype, key
        assert torch.equal(kept[key], value), key


def gradients(model: Any, recipe: Any) -> tuple[float, dict[str, Tensor]]:
    assemble(model, recipe, CPU, has_scores=False, only_sums=True)
    ids = torch.randint(3, 384, (2, 24), generator=torch.Generator().manual_seed(1))
    # B is zero at the start, and so are the gradients of A.
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            draw = torch.Generator().manual_seed(len(name))
            parameter.data = torch.randn(parameter.shape, generator=draw) * 0.02
    hidden = model.get_base_model().base_model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    hidden = hidden.last_hidden_state
    loss = hidden.float().square().mean() + hidden.float()[..., 0].mean()
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("case", usual(CASES, ("fp8", "qwen3_moe"), ("mxfp4", "gpt_oss")), ids=str)
@pytest.mark.parametrize("recomputed", usual((False, True, "selective"), False))
def test_losses_and_gradients_are_those_of_the_unpacked_model(
    recipe: dict[str, Any], write_recipe: Any, folders: Any, case: tuple[str, str], recomputed: Any
) -> None:
    if recomputed == "selective" and case[1] == "gpt_oss":
        pytest.skip("transformers' grouped products of the plain model add a bias in place, to a result that is kept")
    recipe["train"]["activation_checkpointing"] = recomputed
    (loss, ours), (plain_loss, plain) = (gradients(*load(recipe, write_recipe, folder)) for folder in folders(*case))
    assert loss == pytest.approx(plain_loss, rel=5e-6)
    assert ours.keys() == plain.keys()
    for key, gradient in plain.items():
        assert torch.linalg.vector_norm(gradient) > 0 or "experts" in key, key
        torch.testing.assert_close(ours[key], gradient, rtol=1e-5, atol=1e-5 * float(gradient.abs().max()), msg=key)


@pytest.mark.parametrize("case", usual(CASES, ("fp8", "deepseek"), ("mxfp4", "gpt_oss")), ids=str)
def test_ranks_without_values_have_the_same_shapes(
    recipe: dict[str, Any], write_recipe: Any, folders: Any, case: tuple[str, str]
) -> None:
    """A plan, and FSDP2's ranks above 0, know the config alone."""
    folder, _ = folders(*case)
    shapes, real = (load(recipe, write_recipe, folder, weights)[0] for weights in ("meta", "load"))
    assert all(p.is_meta for p in shapes.parameters())
    pairs = [[(n, p.shape, p.dtype) for n, p in model.named_parameters()] for model in (shapes, real)]
    assert pairs[0] == pairs[1]
    assert parameter_counts(shapes) == parameter_counts(real)
    _, plain = folders(*case)
    assert parameter_counts(real) == parameter_counts(load(recipe, write_recipe, plain)[0])


def test_bytes_are_those_of_the_files(recipe: dict[str, Any], write_recipe: Any, folders: Any) -> None:
    folder, _ = folders("mxfp4", "gpt_oss")
    model, _ = load(recipe, write_recipe, folder)
    packed = {id(p): p for p, _ in linear_weights(model)}
    files = load_file(folder / "model.safetensors")
    of_files = sum(t.nbytes for name, t in files.items() if name.endswith(("_blocks", "_scales")))
    assert sum(p.nbytes for p in packed.values()) == of_files


@pytest.mark.long
def test_loading_has_one_tensor_beside_the_model(
    recipe: dict[str, Any], write_recipe: Any, made: Path, tmp_path: Path
) -> None:
    wide = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6}
    folder = tmp_path / "wide"
    folder.mkdir()
    config = json.loads((made / "llama" / "config.json").read_text()) | wide | {"dtype": "bfloat16"}
    for path in (made / "llama").glob("token*"):
        (folder / path.name).write_bytes(path.read_bytes())
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).state_dict()
    state = dict[str, Tensor]()
    for name, shape in shapes.items():
        state[name] = torch.full(shape.shape, 0.01, dtype=torch.bfloat16)
        if shape.ndim == 2 and ".layers." in name:
            state[name] = state[name].to(torch.float8_e4m3fn)
            state[f"{name}_scale_inv"] = torch.ones(-(-shape.shape[0] // 128), -(-shape.shape[1] // 128))
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config))
    recipe |= {"mode": "lora", "lora": {"rank": 2}, "model": {"name": str(folder)}}
    recipe["train"]["precision"] = "bf16"
    worker = Path(__file__).with_name("stored_memory_worker.py")
    done = subprocess.run([sys.executable, worker, write_recipe(recipe)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    largest = wide["hidden_size"] * wide["intermediate_size"]
    assert found["kept"] == pytest.approx(sum(t.nbytes for t in state.values()), rel=0.02)  # and adapters
    assert found["peak"] < found["kept"] + 4 * largest + 2**25, found


def test_unpacked_on_demand_it_is_a_plain_model(recipe: dict[str, Any], write_recipe: Any, folders: Any) -> None:
    for kind, name in (("fp8", "qwen3_moe"), ("mxfp4", "gpt_oss")):
        folder, plain = folders(kind, name)
        model, loaded = load(recipe, write_recipe, folder, model={"stored": "unpack"}, mode="full", lora=None)
        theirs, _ = load(recipe, write_recipe, plain, mode="full", lora=None)
        assert not list(linear_weights(model))
        assert all(p.requires_grad for p in model.parameters())
        expected = dict(theirs.named_parameters())
        assert all(torch.equal(p, expected[key]) for key, p in model.named_parameters())
        check_stored(loaded, model_config(loaded.model))


def test_tensors_beside_the_model_are_kept(
    recipe: dict[str, Any], write_recipe: Any, folders: Any, tmp_path: Path
) -> None:
    folder, _ = folders("fp8", "deepseek")
    state = load_file(folder / "model.safetensors")
    extra = {"model.layers.2.self_attn.o_proj.weight", "model.layers.2.self_attn.o_proj.weight_scale_inv"}
    extra |= {"model.layers.2.eh_proj.weight"}
    for name in extra:
        state[name] = state["model.layers.1.self_attn.o_proj.weight"].clone()
    other = tmp_path / "with_a_head"
    other.mkdir()
    for path in folder.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    save_file(state, other / "model.safetensors", metadata={"format": "pt"})
    assert {*kept_tensors(load(recipe, write_recipe, other)[0])} == extra


# --- what is refused


def settings(folder: Path, out: Path, **changes: Any) -> Path:
    """A copy of a checkpoint whose config says something else."""
    out.mkdir()
    for path in folder.iterdir():
        (out / path.name).write_bytes(path.read_bytes())
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"] |= changes
    (out / "config.json").write_text(json.dumps(config))
    return out


REFUSED = [
    ("fp8", {"quant_method": "quark"}, r"is stored as quark\. That is not read\. Nothing here unpacks it"),
    ("fp8", {"weight_block_size": None}, r"is stored as fp8 without blocks"),
    ("fp8", {"expert_dtype": "fp4"}, r"with other parts in fp4"),
    ("gptq", {"bits": 3}, r"is stored as gptq of 3 bits\. That is not read\. Four bits are read here"),
    ("gptq", {"checkpoint_format": "marlin"}, r"checkpoint_format marlin"),
    ("awq", {"version": "gemv"}, r"awq of 4 bits, version gemv"),
    ("w4a16", {"config_groups": {}}, r"compressed-tensors in several groups"),
    ("w4a16", {"format": "marlin-24"}, r"compressed-tensors, marlin-24 \(4 bits, int\)"),
    (
        "gptq",
        {"group_size": 64},
        r"qzeros of .* is int32 \[2, 8\] in its file\. By its config \(gptq\) it is int32 \[1, 8\]",
    ),
    ("fp8", {"weight_block_size": [16, 16]}, r"weight_scale_inv of .* is float32 .* in its file"),
    ("nvfp4", {"ignore": ["lm_head", "re:.*q_proj"]}, r"lacks .*self_attn\.q_proj\.weight"),
    (
        "fp8",
        {"modules_to_not_convert": ["lm_head", "model.layers.0.self_attn"]},
        r"lacks a plain model\.layers\.0\.self_attn\.\w+\.weight\. Its config says fp8 blocks",
    ),
]


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [pytest.param(*one, marks=pytest.mark.long if i % 2 else ()) for i, one in enumerate(REFUSED)],
)
def test_other_formats_and_configs_that_lie_are_refused(
    recipe: dict[str, Any], write_recipe: Any, folders: Any, tmp_path: Path, kind: str, changes: Any, message: str
) -> None:
    folder = settings(folders(kind, "llama")[0], tmp_path / "changed", **changes)
    with pytest.raises(UserError, match=message):
        load(recipe, write_recipe, folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"mode": "full", "lora": None},
            r"mode: full: .* is stored as fp8 blocks, for frozen weights\. The mode trains",
        ),
        ({"mode": "qlora", "quantization": {}}, r"The mode would pack them again"),
        ({"lora": {"rank": 4, "dora": True}}, r"lora\.dora: peft cannot unpack"),
        ({"train": {"compile": True}}, r"train\.compile: compiled layers unpack .* wrongly"),
    ],
)
def test_recipes_that_a_stored_base_cannot_serve_are_refused(
    recipe: dict[str, Any], write_recipe: Any, folders: Any, changes: Any, message: str
) -> None:
    folder, _ = folders("fp8", "qwen3_moe")
    changes = {**changes, "train": {**recipe["train"], **changes.get("train", {})}}
    with pytest.raises(UserError, match=message):
        load(recipe, write_recipe, folder, "meta", **changes)


def test_a_tensor_that_is_missing_is_named(
    recipe: dict[str, Any], write_recipe: Any, folders: Any, tmp_path: Path
) -> None:
    folder = settings(folders("fp8", "llama")[0], tmp_path / "cut")
    state = load_file(folder / "model.safetensors")
    del state["model.layers.1.mlp.up_proj.weight_scale_inv"]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight_scale_inv\. Its config"):
        load(recipe, write_recipe, folder)


def test_every_format_has_a_checkpoint_here() -> None:
    assert {settings["quant_method"] for settings in stored.SETTINGS.values()} == set(FORMATS)


def test_bitsandbytes_is_left_to_transformers(recipe: dict[str, Any], write_recipe: Any) -> None:
    config = model_config(load_recipe(write_recipe(recipe)).model)
    config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    assert stored_format(config) is None
