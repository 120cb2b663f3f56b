"""Modules that carry something along the row run once for each document: packed is as each document alone."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import architectures as sweep
import pytest
import tiny
import torch
from conftest import tiny_overrides, train_here
from repository import ROOT
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.data.batch import UNSHARDED
from finetune.engine.context_parallel import apply_context_parallel
from finetune.engine.parallelism import Parallelism
from finetune.errors import UserError
from finetune.models.activations import recompute_activations
from finetune.models.attention import DOCUMENTS, AttentionChoice, choose_attention
from finetune.models.attention.isolation import batched_where_same
from finetune.models.attention.mixers import (
    Mixer,
    Mixers,
    calls_of,
    documents_of_forward,
    find_mixers,
    recomputed_alike,
    run_per_document,
)
from finetune.models.attention.per_document import prepare
from finetune.models.trials import NoMixers
from finetune.models.weights import add_adapters
from finetune.recipe.schema import Lora
from finetune.release.export.commands import merge_adapter
from finetune.release.export.loading import load_result

RECIPES = ROOT / "recipes"


def choice_of(config: Any, **settings: Any) -> AttentionChoice:
    model_class: Any = AutoModelForCausalLM._model_mapping[type(config)]
    return choose_attention("auto", model_class, config, "cpu", False, **settings)


def qwen3_5() -> Any:
    return AutoConfig.for_model(**tiny.MODELS["qwen3_5"])


# Hybrids of the recipes, one of each kind of mixer; the sweep has all (`scripts/proofs/architectures.py`).
FAMILIES = {
    "qwen3_5_text": "Qwen3_5GatedDeltaNet",
    "lfm2": "Lfm2ShortConv",
    "granitemoehybrid": "GraniteMoeHybridMambaLayer",
    "nemotron_h": "NemotronHMamba2Mixer",
    "minimax": "MiniMaxLightningAttention",
}
OTHERS = {
    "qwen3_next": "Qwen3NextGatedDeltaNet",
    "bamba": "BambaMixer",
    "jamba": "JambaMambaMixer",
    "mamba": "MambaMixer",
    "mamba2": "Mamba2Mixer",
    "kimi_linear": "KimiLinearDeltaAttention",
    "olmo_hybrid": "OlmoHybridGatedDeltaNet",
    "recurrent_gemma": "RecurrentGemmaRecurrentBlock",
    "rwkv": "RwkvSelfAttention",
    "lfm2_moe": "Lfm2MoeShortConv",
}


@pytest.mark.parametrize(
    ("name", "mixer"),
    [
        pytest.param(*item, marks=() if item[0] in ("qwen3_5_text", "granitemoehybrid") else pytest.mark.long)
        for item in (FAMILIES | OTHERS).items()
    ],
)
def test_packed_documents_of_a_hybrid_are_those_of_each_alone(tmp_path: Path, name: str, mixer: str) -> None:
    line = sweep.examine(name, tmp_path)
    assert line.verdict == "packed", line
    choice = choice_of(sweep.tiny(name))
    assert mixer in choice.mixers
    assert choice.mixers[mixer]["batched"]
    assert f"{mixer} once for each document" in choice.reason
    # Shared beginnings would need the state at the end of the beginning.
    assert choice.not_shared is not None


def test_documents_of_like_length_are_one_call_and_each_is_in_one() -> None:
    assert calls_of((180, 42, 95, 300, 61, 33)) == ((3,), (0,), (2, 4), (1, 5))
    assert calls_of((7,)) == ((0,),)
    assert calls_of((1000, 1, 1000)) == ((0, 2), (1,))


class _Sums(torch.nn.Module):
    """Of the tokens before, and of those that a mask lets through: causal, and of a number of calls that is counted."""

    calls = 0

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        self.calls += 1
        seen = torch.ones(hidden.shape[1], hidden.shape[1]).tril() if mask is None else mask[:, 0].float()
        return seen @ hidden


@pytest.mark.parametrize("masked", [True, False])
def test_a_batch_of_documents_is_in_the_rows_order_and_padding_is_not_in_it(masked: bool) -> None:
    lengths, module = (3, 5, 2, 4), _Sums()
    hidden = torch.randn(1, 14, 6, requires_grad=True)
    alone = torch.block_diag(*(torch.ones(n, n).tril() for n in lengths))
    places: dict[str, list[int]] = {"['hidden']": [1]} | ({"['mask']": [2, 3]} if masked else {})
    run_per_document(module, {"_Sums": Mixer(inputs=places, outputs={"": [1]}, batched=True)})
    with documents_of_forward(lengths):
        ours = module(hidden, mask=alone.bool()[None, None] if masked else None)
    assert module.calls == 1
    torch.testing.assert_close(ours, alone @ hidden)
    weights = torch.randn(1, 14, 6)
    (gradient,) = torch.autograd.grad((ours * weights).sum(), hidden)
    torch.testing.assert_close(gradient, alone.T @ weights)


def test_modules_are_batched_only_where_the_trial_is_the_same() -> None:
    def mixer(dimension: int) -> Mixer:
        return Mixer(inputs={"['x']": [dimension]}, outputs={"": [1]}, batched=False)

    mixers: Mixers = {"Same": mixer(1), "Other": mixer(1), "Also": mixer(2), "NoRoom": mixer(0)}
    tried = []

    def same(one: Mixers) -> bool:
        tried.append([name for name in one if one[name]["batched"]])
        return "Other" not in tried[-1]

    chosen = batched_where_same(mixers, same)
    assert [name for name in chosen if chosen[name]["batched"]] == ["Same", "Also"]
    assert tried == [["Same", "Other", "Also"], ["Same"], ["Same", "Other"], ["Same", "Also"]]


# Mamba's kernels read `out_proj.weight`: adapters on it would train on the CPU only.
HYBRID_RECIPES = {"granite4-h-micro": "granitemoehybrid", "nemotron-nano-9b-v2": "nemotron_h", "lfm2.5-1.2b": "lfm2"}


@pytest.mark.parametrize("folder", [pytest.param(name, marks=pytest.mark.long) for name in HYBRID_RECIPES])
def test_recipes_of_hybrids(made: Path, tmp_path: Path, folder: str) -> None:
    base, run = tmp_path / "base", tmp_path / f"{folder}-lora"
    config = sweep.tiny(HYBRID_RECIPES[folder])
    config.vocab_size = 384
    AutoModelForCausalLM.from_config(config).save_pretrained(base)
    tiny.tokenizer().save_pretrained(base)
    train_here(RECIPES / folder / "lora.yaml", *tiny_overrides(made, base, tmp_path))
    plan = json.loads((run / "plan.json").read_text(encoding="utf-8"))
    assert "once for each document" in plan["attention"]
    adapted = {name.rpartition(".lora_A")[0] for name in load_file(run / "model" / "adapter_model.safetensors")} - {""}
    mixers = {name for name in adapted if ".mamba." in name or ".mixer." in name or ".conv." in name}
    assert {name.rpartition(".")[2] for name in mixers} >= {"in_proj"}
    assert ("out_proj" in {name.rpartition(".")[2] for name in adapted}) == (folder == "lfm2.5-1.2b")
    merged = AutoModelForCausalLM.from_pretrained(merge_adapter(run, tmp_path / "merged")).eval()
    ids = torch.arange(3, 40)[None]
    torch.testing.assert_close(
        load_result(run)[0](input_ids=ids).logits, merged(input_ids=ids).logits, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("name", ["granitemoehybrid", "mamba"])
def test_adapters_that_kernels_would_pass_by(name: str) -> None:
    def adapted(targets: Any) -> set[str]:
        model: Any = AutoModelForCausalLM.from_config(sweep.tiny(name))
        model = add_adapters(model, Lora(rank=2, alpha=4, targets=targets), torch.float32)
        return {n.rpartition(".lora_A")[0].rpartition(".")[2] for n, _ in model.named_parameters() if "lora_A" in n}

    assert "in_proj" in adapted("all-linear")
    assert not adapted("all-linear") & {"out_proj", "dt_proj"}
    if name == "granitemoehybrid":  # of the other peft knows it
        with pytest.raises(UserError, match=r"out_proj: GraniteMoeHybridMambaLayer reads its weight itself"):
            adapted(("out_proj",))


def test_the_sweep_sees_mixers_that_run_along_the_row() -> None:
    config = sweep.tiny("qwen3_5_text")
    differences, moved = sweep.as_in_a_run(config, replace(choice_of(config), mixers={}), sweep.plain(config))
    assert min(differences.loss, differences.gradient, moved) > 1e-3


def test_a_model_whose_documents_do_not_see_each_other_has_no_mixers() -> None:
    config = AutoConfig.for_model(**tiny.MODELS["llama"])
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation=DOCUMENTS)
    lengths = (11, 19, 17)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    row = {"input_ids": torch.arange(3, 50)[None], "position_ids": positions, "use_cache": False, **prepare(lengths)}
    with pytest.raises(NoMixers):
        find_mixers(model, lambda: model(**row), lengths)


@pytest.mark.parametrize("how", [True, "selective"])
def test_recomputation_has_the_documents_of_its_own_forward(how: Literal["selective"] | bool) -> None:
    """Another forward may run before the backward."""

    def gradients(checkpointed: bool) -> list[Tensor]:
        torch.manual_seed(0)
        choice = choice_of(qwen3_5())
        model: Any = AutoModelForCausalLM.from_config(qwen3_5(), attn_implementation=choice.implementation).train()
        run_per_document(model, choice.mixers)
        if checkpointed:
            recompute_activations(model, how, recomputed_alike)

        def loss(lengths: tuple[int, ...]) -> Tensor:
            ids = torch.arange(3, 3 + sum(lengths))[None]
            positions = torch.cat([torch.arange(n) for n in lengths])[None]
            with documents_of_forward(lengths):
                arguments = choice.forward_arguments(lengths)
                return model(input_ids=ids, position_ids=positions, use_cache=False, **arguments).logits.square().mean()

        first = loss((5, 9, 7))
        loss((14, 7))
        first.backward()
        return [parameter.grad for parameter in model.parameters()]

    for plain, recomputed in zip(gradients(False), gradients(True), strict=True):
        torch.testing.assert_close(recomputed, plain, rtol=1e-5, atol=1e-8)


def test_a_row_of_another_length_than_its_documents_is_an_error() -> None:
    choice = choice_of(qwen3_5())
    model: Any = AutoModelForCausalLM.from_config(qwen3_5())
    run_per_document(model, choice.mixers)
    with documents_of_forward((5, 9)), pytest.raises(ValueError, match="without the 14 tokens of the row"):
        model(input_ids=torch.arange(3, 18)[None], use_cache=False)


def test_compiled_layers_take_one_document_per_forward() -> None:
    choice = choice_of(qwen3_5(), longest=64)
    assert not choice.isolates_documents
    assert "compiled layers cannot run Qwen3_5GatedDeltaNet once for each document" in choice.reason
    assert choice.mixers == {}


@pytest.mark.parametrize("sizes", [Parallelism(context=2), Parallelism(sequence=2)])
def test_tokens_of_a_mixers_document_cannot_be_shared(sizes: Parallelism) -> None:
    with pytest.raises(UserError, match="Qwen3_5GatedDeltaNet runs along each document whole, so its tokens cannot"):
        apply_context_parallel(choice_of(qwen3_5()), UNSHARDED, sizes, 0)


def test_the_page_has_each_architecture_with_its_reason(tmp_path: Path) -> None:
    page = tmp_path / "models.md"
    page.write_text(f"before\n{sweep.BEGINS}\nolder\n{sweep.ENDS}\nafter\n", encoding="utf-8")
    packed = sweep.Line("mamba", "packed", "eager", 0.0, 0.0, 0.0, ("MambaMixer",), "same", "same", "same")
    lines = [packed, sweep.Line("bert", "refused", reason="sees | what it is to predict")]
    sweep.write_page(page, [asdict(line) for line in lines])
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "older" not in text
    assert "| mamba | eager | MambaMixer | same | same | same |" in text
    assert "| bert | sees / what it is to predict |" in text


@pytest.mark.long
def test_the_sweep_names_what_stands_still_on_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = tmp_path / "lines.jsonl"
    monkeypatch.setattr(sweep, "STANDSTILL_S", 0.1)
    sweep.launch(lines, ["llama", "qwen3"])
    (line,) = sweep.read(lines)
    assert line["name"] == "llama"
    assert "stands still" in line["reason"]


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_no_architecture_trains_wrongly() -> None:
    assert sweep.main([]) == 0
