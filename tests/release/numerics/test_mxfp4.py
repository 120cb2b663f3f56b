"""Experts that a checkpoint stores in MXFP4, as gpt-oss's: their exact values, frozen under adapters or trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from conftest import tiny_overrides, train_here
from repository import ROOT
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.errors import UserError
from finetune.models.attention import attention_for
from finetune.models.base_model import Base
from finetune.models.config import model_config
from finetune.models.stored_layers import stored_matrices
from finetune.models.weights import Placement, load_model
from finetune.recipe import load_recipe
from finetune.release.export.loading import load_result

SHAPE: dict[str, Any] = {
    "model_type": "gpt_oss",
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "initializer_range": 0.1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
# OCP Microscaling Formats (MX) v1.0, section 5.3.3: E2M1, and a power of two for each block of 32.
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
SHIPPED = ROOT / "recipes/gpt-oss-20b/lora.yaml"
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")


def values_of(blocks: Tensor, scales: Tensor) -> Tensor:  # (E, out, n, 16), (E, out, n) -> (E, 32 n, out)
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2).long()  # (E, out, n, 32)
    signed = E2M1[codes % 8] * torch.where(codes >= 8, -1.0, 1.0)
    return (signed * torch.exp2(scales.float() - 127)[..., None]).flatten(-2).mT


@pytest.fixture
def packed(tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    """A tiny gpt-oss as it is published, and the values of its experts by name."""
    folder, values = tmp_path / "gpt_oss", {}
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPE))
    model.to(torch.bfloat16).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    for name in [name for name in state if name.endswith(EXPERTS)]:
        experts, size, out = state.pop(name).shape
        blocks = torch.randint(0, 256, (experts, out, size // 32, 16), dtype=torch.uint8)
        scales = torch.randint(122, 125, (experts, out, size // 32), dtype=torch.uint8)
        state |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        values[name] = values_of(blocks, scales)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, values


def load(recipe: dict[str, Any], write_recipe: Any) -> Any:
    loaded = load_recipe(write_recipe(recipe))
    config = model_config(loaded.model)
    placement = Placement("load", torch.device("cpu"))
    return load_model(loaded, Base.of(loaded, config), attention_for(loaded, config, "cpu"), placement)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_experts_have_their_exact_values(
    recipe: dict[str, Any], write_recipe: Any, packed: Any, precision: str
) -> None:
    folder, values = packed
    recipe["model"] |= {"name": str(folder), "stored": "unpack"}
    recipe["train"]["precision"] = precision
    recipe.update(mode="lora", lora={"rank": 4, "targets": ["q_proj", "v_proj"]})
    base = load(recipe, write_recipe).get_base_model()
    for name, expected in values.items():
        weight = base.get_parameter(name)
        assert not weight.requires_grad
        assert torch.equal(weight.float(), expected)


def test_the_recipe_that_ships_gives_an_adapter_that_loads(made: Path, packed: Any, tmp_path: Path) -> None:
    folder, values = packed
    train_here(SHIPPED, *tiny_overrides(made, folder, tmp_path))
    model, _ = load_result(tmp_path / "gpt-oss-20b-lora")
    for name, expected in values.items():
        path, _, own = name.rpartition(".")
        experts: Any = model.get_base_model().get_submodule(path)
        packed_experts, matrix = experts.get_parameter(own), stored_matrices(experts)[own]
        assert packed_experts.nbytes * 16 / 17 * 2 == expected.numel(), "4 bits, and 8 for each 32"
        unpacked = torch.stack([matrix.unpack(one, torch.float32) for one in packed_experts])
        assert torch.equal(unpacked.mT, expected)


@pytest.mark.parametrize("mode", ["full", "qlora"])
def test_they_are_not_trained_nor_quantised_again(
    recipe: dict[str, Any], write_recipe: Any, packed: Any, mode: str
) -> None:
    recipe["model"]["name"] = str(packed[0])
    recipe.update({"mode": mode, **({"lora": {"rank": 4}, "quantization": {}} if mode == "qlora" else {})})
    recipe["train"]["precision"] = "bf16"
    with pytest.raises(UserError, match=r"is stored as mxfp4, for frozen weights\. .* Fix: use `mode: lora`"):
        load(recipe, write_recipe)
