"""Adapters are where `lora.targets` says, on mixtures of experts as well."""

from __future__ import annotations

import copy
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from experts_table import tiny, with_experts
from peft import PeftModel
from safetensors import safe_open
from tiny import tokenizer as tiny_tokenizer
from torch import nn
from transformers import AutoModelForCausalLM

from finetune.checkpoints.result import name_targets
from finetune.checkpoints.trained import find_trained
from finetune.errors import UserError
from finetune.models.checkpoint_files import check_names_kept
from finetune.models.lora_targets import adapted_paths, check_adapted, find_targets
from finetune.models.moe import group_adapters
from finetune.models.trials import randomize
from finetune.models.weights import add_adapters
from finetune.recipe.schema import Lora
from finetune.release.export.streamed import StreamedModel

QUICK = ("deepseek_v3", "qwen3_moe", "qwen2_moe", "llama4_text", "nemotron_h")
# Linear layers whose weight goes to a kernel, past an adapter, or that multiply in groups.
OUT_OF_REACH = {
    "granitemoehybrid": {"out_proj"},
    "nemotron_h": {"out_proj"},
    "jamba": {"dt_proj"},
    "deepseek_v4": {"o_a_proj"},
}
# peft renames keys as it loads them: `mlp.shared_expert.` is a pattern, which `mlp.shared_experts` fits (Laguna).
NOT_LOADED = {"laguna", "inkling2_text"}
# Of the largest gradient. One product for several adapters rounds otherwise than one for each (0 apart without), and a
# Mamba scan makes 2.3e-6 of the last bit.
ROUNDING = {"granitemoehybrid": 4e-6}
RANK, ALPHA = 4, 8


def model_of(name: str) -> Any:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(copy.deepcopy(tiny(name)), dtype=torch.float32)
    randomize(model)
    return model.train()


def on_meta(name: str) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(tiny(name))


def adapters(model: Any, **lora: Any) -> Any:
    adapted = add_adapters(model, Lora(**{"rank": RANK, "alpha": ALPHA, **lora}), torch.float32)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name and not parameter.is_meta:
            nn.init.normal_(parameter, std=0.05)
    return adapted


def linear_layers_and_experts(model: Any) -> set[str]:
    """What `all-linear` means, found here by names and shapes alone."""
    found = set()
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and path != "lm_head" and not re.search(r"\.(gate|router)(\.|$)", path):
            found.add(path)
        for name, weight in module.named_parameters(recurse=False):
            if weight.ndim == 3 and re.search(r"\.(experts|shared_experts|input_linear|output_linear)$", path):
                found.add(f"{path}.{name}")
    return found


def expected(name: str, model: Any) -> set[str]:
    out = OUT_OF_REACH.get(name, ())
    return {path for path in linear_layers_and_experts(model) if path.rpartition(".")[2] not in out}


@pytest.mark.long
def test_every_class_with_experts() -> None:
    wrong = {}
    for name, model in with_experts():
        should, left_out = expected(name, model), {*find_targets(model, Lora()).left_out}
        out = linear_layers_and_experts(model) - should
        adapted = {path for paths in adapted_paths(adapters(model)) for path in paths}
        if adapted != should or left_out != out:
            wrong[name] = sorted(adapted ^ should)[:4], sorted(left_out ^ out)[:4]
    assert not wrong


@pytest.mark.parametrize("name", QUICK)
def test_adapted_modules_gradients_and_merge(name: str, tmp_path: Path) -> None:
    compare(name, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_class_computes_and_merges_as_peft(tmp_path: Path) -> None:
    wrong = {}
    for name, model in with_experts():
        if name in NOT_LOADED:
            with pytest.raises(UserError, match="peft would not find the adapter"):
                check_names_kept(model, adapted_paths(adapters(model))[0])
            continue
        try:
            compare(name, tmp_path / name)
        except AssertionError as error:
            wrong[name] = str(error)[:200]
    assert not wrong


def compare(name: str, folder: Path) -> None:
    """Raises AssertionError if modules, losses, gradients or merged weights are not those of plain peft."""
    base = model_of(name)
    base.save_pretrained(folder / "base")
    before = {key: tensor.clone() for key, tensor in base.state_dict().items()}
    should = expected(name, base)
    ours = adapters(base)
    assert {path for paths in adapted_paths(ours) for path in paths} == should
    ours.peft_config["default"].base_model_name_or_path = str(folder / "base")
    ours.save_pretrained(folder / "adapter")
    name_targets(ours, folder / "adapter")
    tiny_tokenizer().save_pretrained(folder / "adapter")
    group_adapters(ours)
    plain: Any = AutoModelForCausalLM.from_config(copy.deepcopy(tiny(name)), dtype=torch.float32)
    plain.load_state_dict(before)
    with warnings.catch_warnings():  # for patterns of experts, which match
        warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys did not match", RuntimeWarning)
        theirs = PeftModel.from_pretrained(plain.train(), str(folder / "adapter"), is_trainable=True)
    (loss, gradients), (their_loss, their_gradients) = step(ours), step(theirs)
    assert abs(loss - their_loss) <= 1e-6 * loss
    assert gradients.keys() == their_gradients.keys()
    largest = max(one.abs().max().item() for one in their_gradients.values())
    for key, gradient in gradients.items():
        assert (gradient - their_gradients[key]).abs().max().item() <= ROUNDING.get(name, 1e-6) * max(1.0, largest), key
    check_merged(name, theirs, before, folder)


def step(model: Any) -> tuple[float, dict[str, torch.Tensor]]:
    ids = torch.arange(3, 15)[None]
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.requires_grad and p.grad is not None}


def check_merged(name: str, adapted: Any, before: dict[str, torch.Tensor], folder: Path) -> None:
    """Compares peft's merged model and the streamed one with base + s B A of each module."""
    halves = {key: tensor for key, tensor in adapted.named_parameters() if "lora_" in key}
    wrappers = {path: module for path, module in adapted.get_base_model().named_modules() if hasattr(module, "lora_A")}
    deltas = {}
    for path, wrapper in wrappers.items():
        a, b = (halves[f"base_model.model.{path}.lora_{half}.default.weight"].detach() for half in "AB")
        key = f"{path.replace('.base_layer', '')}.{getattr(wrapper, 'parameter_name', 'weight')}"
        shape, scale = before[key].shape, ALPHA / RANK
        if len(shape) == 2:
            deltas[key] = scale * b @ a
            continue
        right, left = a.view(shape[0], -1, a.shape[1]), b.view(len(b), -1, shape[0]).permute(2, 0, 1)
        product = scale * left @ right
        deltas[key] = product if product.shape == shape else product.mT
    merged = adapted.merge_and_unload()
    for key, tensor in merged.state_dict().items():
        should = before[key] + deltas[key] if key in deltas else before[key]
        torch.testing.assert_close(tensor, should, rtol=0, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}")
    merged.save_pretrained(folder / "merged")
    streamed = StreamedModel(find_trained(folder / "adapter"))
    with safe_open(folder / "merged" / "model.safetensors", framework="pt") as file:
        assert {*file.keys()} == {*streamed.shapes}
        for key in file.keys():  # noqa: SIM118 (of a file)
            torch.testing.assert_close(streamed.make(key), file.get_tensor(key), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "targets", "leaves"),
    [
        ("deepseek_v3", ["gate_proj", "up_proj", "down_proj"], {"gate_proj", "up_proj", "down_proj", "gate_up_proj"}),
        ("mixtral", ["w1", "w2", "w3"], {"gate_up_proj", "down_proj"}),
        ("mixtral", ["gate_up_proj", "down_proj"], {"gate_up_proj", "down_proj"}),
        ("gpt_oss", ["q_proj", "experts.down_proj"], {"q_proj", "down_proj"}),
        ("deepseek_v3", ["shared_experts.gate_proj", "shared_experts.up_proj"], {"gate_proj", "up_proj"}),
    ],
)
def test_named_targets_are_all_of_these_names(name: str, targets: list[str], leaves: set[str]) -> None:
    model = on_meta(name)
    walk = linear_layers_and_experts(model)
    adapted = {path for paths in adapted_paths(adapters(model, targets=targets)) for path in paths}
    assert {path.rpartition(".")[2] for path in adapted} == leaves
    if "." not in "".join(targets):
        assert adapted == {path for path in walk if path.rpartition(".")[2] in leaves}


def test_named_shared_experts_alone_are_loaded_again(tmp_path: Path) -> None:
    targets = ["shared_experts.gate_proj", "q_b_proj"]
    adapted = adapters(model_of("deepseek_v3"), targets=targets, dropout=0.1)
    adapted.save_pretrained(tmp_path, save_embedding_layers=False)  # peft 0.20 would look for a base on the hub
    name_targets(adapted, tmp_path)
    again = PeftModel.from_pretrained(model_of("deepseek_v3"), str(tmp_path)).eval()
    ids = torch.arange(3, 15)[None]
    torch.testing.assert_close(again(input_ids=ids).logits, adapted.eval()(input_ids=ids).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "lora", "message"),
    [
        ("qwen3_moe", {"targets": ["q_proj", "gate_proj"]}, r"'gate_proj' is a part of the tensor .*Fix: name up_proj"),
        ("mixtral", {"targets": ["q_proj", "gate"]}, r"gate is a router.*Fix: remove 'gate'"),
        ("llama4_text", {"targets": ["router"]}, r"router is a router"),
        ("mixtral", {"targets": ["w4"]}, r"no module 'w4'\. Fix: .*; its linear ones are down_proj, gate_up_proj, "),
        ("qwen2_moe", {"dropout": 0.1}, r"lora\.dropout: .*experts.*Fix: `lora\.dropout: 0\.0`"),
        ("deepseek_v3", {"dora": True, "targets": ["shared_experts.down_proj"]}, r"lora\.dora: .*Fix: `lora\.dora: f"),
    ],
)
def test_what_no_adapter_reaches_is_refused(name: str, lora: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        adapters(on_meta(name), **lora)


def test_other_modules_than_named_are_an_error() -> None:
    adapted = adapters(on_meta("mixtral"), targets=["q_proj", "k_proj"])
    targets = find_targets(on_meta("mixtral"), Lora(targets=("q_proj", "v_proj")))
    with pytest.raises(UserError, match=r"2 without \(.*v_proj.*2 in addition \(.*k_proj"):
        check_adapted(adapted, targets)
    check_adapted(adapted, replace(targets, layers=adapted_paths(adapted)[0]))


@pytest.mark.parametrize(("rslora", "scale"), [(False, ALPHA / RANK), (True, ALPHA / RANK**0.5)])
def test_one_scale_for_two_matrices_in_one_tensor(rslora: bool, scale: float) -> None:
    adapted = adapters(on_meta("mixtral"), rslora=rslora)
    wrappers = [module for module in adapted.modules() if hasattr(module, "lora_A")]
    assert {round(module.scaling["default"], 6) for module in wrappers} == {round(scale, 6)}
    assert {module.r["default"] for module in wrappers if getattr(module, "parameter_name", "") == "gate_up_proj"} == {
        2 * RANK
    }
