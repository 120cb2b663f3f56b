"""The LM head's losses: every implementation against the formula written out in fp64, gradients too, on every kind of
head, and proof that logits of all positions are never there together."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from conftest import metrics, train_here
from finetune.models.head.choice import choose_cross_entropy
from finetune.models.head.formula import LogitMap
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.errors import UserError
from finetune.models.adapters import add_adapters
from finetune.models.attention import choose_attention
from finetune.models.config import model_config
from finetune.models.head import Formula, LossHead, attach_head, chunked, loss_module
from finetune.models.head.architecture import Unknown, logit_map
from finetune.models.head.chunked import Work, linear_losses, rows_at_once
from finetune.models.weights import Placement, load_model
from finetune.recipe import load_recipe
from finetune.recipe.schema import Lora

needs_torch_s = pytest.mark.skipif(not hasattr(torch.nn.functional, "linear_cross_entropy"), reason="torch < 2.13")
SHAPE = {key: value for key, value in tiny.MODELS["llama"].items() if key != "model_type"}
MODELS: dict[str, dict[str, Any]] = {
    **tiny.MODELS,
    # Logits of random weights are small: a low cap, so that it bends them.
    "gemma2": {"model_type": "gemma2", **SHAPE, "head_dim": 16, "final_logit_softcapping": 0.3},
    "granite": {"model_type": "granite", **SHAPE, "logits_scaling": 0.25},
    "cohere": {"model_type": "cohere", **SHAPE, "logit_scale": 3.0},
    "biased": {"model_type": "phi", **SHAPE},  # its head has a bias
}
FORMULAS = [Formula(0.0, 0.0), Formula(0.01, 0.0), Formula(0.0, 0.1), Formula(0.02, 0.3)]
POSITIONS = torch.tensor([1, 2, 3, 7, 8, 9, 10, 20, 21, 22, 30])
SCALE = 0.37  # what the loop multiplies the sum with


@pytest.fixture(autouse=True)
def tiny_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four positions at a time: three chunks, the last one short."""
    monkeypatch.setattr(chunked, "FEWEST_ROWS", 4)
    monkeypatch.setattr(chunked, "CHUNK_BYTES", {"cpu": 0})


def model_of(name: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(**MODELS[name])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)  # biases and norms are not left at 0 and 1
    return model.to(dtype)


def batch(model: Any) -> tuple[dict[str, Any], torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    vocabulary = model.config.vocab_size
    ids = torch.randint(3, vocabulary, (1, 32), generator=generator)
    arguments = {"input_ids": ids, "position_ids": torch.arange(32)[None], "use_cache": False}
    return arguments, torch.randint(0, vocabulary, (len(POSITIONS),), generator=generator)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def by_formula(model: Any, formula: Formula) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Losses and gradients in fp64, all logits at once, the formula in words of its paper."""
    model = copy.deepcopy(model).double()
    model.set_experts_implementation("eager")  # torch's grouped products have no fp64
    arguments, targets = batch(model)
    logits = model(**arguments).logits[0, POSITIONS]
    lse = logits.exp().sum(1).log()
    nll, uniform = lse - logits[range(len(targets)), targets], lse - logits.mean(1)
    losses = (1 - formula.label_smoothing) * nll + formula.label_smoothing * uniform + formula.z_loss * lse**2
    (losses.sum() * SCALE).backward()
    return losses.detach(), gradients(model)


def by_head(model: Any, head: LossHead) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    arguments, targets = batch(model)
    total, each = head.losses(model, arguments, POSITIONS, targets)
    assert total.dtype == each.dtype == torch.float32
    assert not each.requires_grad
    torch.testing.assert_close(total.detach(), each.sum())
    (total * SCALE).backward()
    return each.double(), gradients(model)


def assert_equal_to_rounding(
    ours: tuple[torch.Tensor, dict[str, torch.Tensor]], wanted: tuple[torch.Tensor, dict[str, torch.Tensor]]
) -> None:
    torch.testing.assert_close(ours[0], wanted[0], rtol=1e-6, atol=1e-6)
    assert ours[1].keys() == wanted[1].keys()
    for name, gradient in ours[1].items():
        largest = wanted[1][name].abs().max().item()
        torch.testing.assert_close(gradient, wanted[1][name], rtol=0, atol=5e-6 * largest + 1e-12, msg=name)


@pytest.mark.parametrize("formula", FORMULAS, ids=str)
@pytest.mark.parametrize("asked", ["plain", "chunked"])
@pytest.mark.parametrize("name", MODELS)
def test_equal_to_the_formula(name: str, asked: str, formula: Formula) -> None:
    model = model_of(name)
    wanted = by_formula(model, formula)
    head = attach_head(model, asked, formula, "cpu")
    assert head.choice.implementation == asked
    assert_equal_to_rounding(by_head(model, head), wanted)


@needs_torch_s
@pytest.mark.parametrize("name", ["llama", "llama_tied", "granite", "biased"])
def test_torch_s_own(name: str) -> None:
    model = model_of(name)
    wanted = by_formula(model, Formula())
    assert_equal_to_rounding(by_head(model, attach_head(model, "torch", Formula(), "cpu")), wanted)


ADAPTERS = {
    "lora": Lora(rank=4, alpha=8, targets=("lm_head", "q_proj")),
    "rslora": Lora(rank=4, alpha=8, rslora=True, targets=("lm_head",)),
    "dora": Lora(rank=4, alpha=8, dora=True, targets=("lm_head", "q_proj")),
    "whole head": Lora(rank=4, alpha=8, targets=("q_proj",), modules_to_save=("lm_head",)),
    "frozen head": Lora(rank=4, alpha=8, targets=("q_proj",)),
}


def adapted(name: str, lora: Lora) -> Any:
    model = add_adapters(model_of(name), lora, torch.float32)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_B" in key:  # zero to begin with, and then nothing reaches A
                parameter.normal_(std=0.1)
    return model


@pytest.mark.parametrize("formula", [FORMULAS[0], FORMULAS[3]], ids=str)
@pytest.mark.parametrize("asked", ["plain", "chunked"])
@pytest.mark.parametrize("adapters", ADAPTERS)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_adapters(name: str, adapters: str, asked: str, formula: Formula) -> None:
    model = adapted(name, ADAPTERS[adapters])
    wanted = by_formula(model, formula)
    assert_equal_to_rounding(by_head(model, attach_head(model, asked, formula, "cpu")), wanted)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_lora_on_a_tied_head() -> None:
    model = adapted("llama_tied", ADAPTERS["lora"])
    causal = model.get_base_model()
    causal.tie_weights()  # as FSDP2's wrapping does
    assert causal.lm_head.base_layer.weight is causal.get_input_embeddings().weight
    wanted = by_formula(model, Formula())
    assert_equal_to_rounding(by_head(model, attach_head(model, "chunked", Formula(), "cpu")), wanted)


def test_quantised_weights(made: Path, recipe: dict[str, Any], write_recipe: Any) -> None:
    """Against the plain way on the same 4-bit model; once more with the head itself in 4 bits."""
    from bitsandbytes.nn import Linear4bit

    recipe |= {"mode": "qlora", "quantization": {"type": "nf4"}, "lora": {"rank": 4}}
    loaded = load_recipe(write_recipe(recipe))
    config = model_config(loaded.model)
    attention = choose_attention("eager", AutoModelForCausalLM._model_mapping[type(config)], config, "cpu", False)
    model = load_model(loaded, config, attention, Placement("load", torch.device("cpu")))
    plain = by_head(model, attach_head(model, "plain", Formula(), "cpu"))
    assert type(loss_module(model)) is torch.nn.Linear
    assert_equal_to_rounding(by_head(model, attach_head(model, "chunked", Formula(), "cpu")), plain)
    causal = model.get_base_model()
    packed = Linear4bit(64, config.vocab_size, bias=False, compute_dtype=torch.float32, quant_type="nf4")
    packed.load_state_dict({"weight": causal.lm_head.weight.detach().cpu()})
    causal.lm_head = packed.to("cpu").requires_grad_(False)
    causal.__dict__.pop("forward")
    plain = by_head(model, attach_head(model, "plain", Formula(), "cpu"))
    assert_equal_to_rounding(by_head(model, attach_head(model, "chunked", Formula(), "cpu")), plain)


@pytest.mark.parametrize("adapters", [None, "lora", "dora"])
def test_bf16_is_no_further_from_the_truth_than_the_plain_way(adapters: str | None) -> None:
    """16-bit matrix products, losses in fp32."""
    model = adapted("llama", ADAPTERS[adapters]) if adapters else model_of("llama")
    losses, wanted = by_formula(model, Formula())
    distances = []
    for asked in ("plain", "chunked"):
        head = attach_head(model, asked, Formula(), "cpu")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            each, found = by_head(model, head)
        worst = [(found[name] - wanted[name]).norm() / wanted[name].norm() for name in wanted]
        distances.append(((each - losses).abs().max().item(), max(worst).item()))
    (plain_loss, plain_gradient), (our_loss, our_gradient) = distances
    assert 0 < our_loss < 1.1 * plain_loss + 1e-6
    assert 0 < our_gradient < 1.1 * plain_gradient


# --- what is never there


class Largest(TorchDispatchMode):
    """The largest tensor that any operation gives, in elements, and the shapes that were added to or made."""

    def __init__(self) -> None:
        super().__init__()
        self.numel, self.operations = 0, set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
                self.operations.add(f"{func.__name__} {tuple(tensor.shape)}")
        return result


@pytest.mark.parametrize("asked", ["plain", "chunked", pytest.param("torch", marks=needs_torch_s)])
def test_all_logits_are_never_there(asked: str) -> None:
    tokens, vocabulary, width, rows = 200, 3000, 8, 4
    head = torch.nn.Linear(width, vocabulary)
    hidden, targets = torch.randn(tokens, width, requires_grad=True), torch.arange(tokens)
    work = Work(targets, Formula(), LogitMap(), rows)
    with Largest() as seen:
        if asked == "plain":
            losses = torch.nn.functional.cross_entropy(head(hidden), targets, reduction="sum")
        else:
            from finetune.models.head.attach import _OF_A_MATRIX

            losses = _OF_A_MATRIX[asked](hidden, head.weight, head.bias, work).total
        losses.backward()
    assert head.weight.grad is not None
    bound = max(rows * vocabulary, vocabulary * width)
    assert (seen.numel >= tokens * vocabulary) if asked == "plain" else (seen.numel == bound)


def test_a_frozen_head_has_no_gradient_made() -> None:
    head = torch.nn.Linear(8, 500).requires_grad_(False)
    hidden = torch.randn(9, 8, requires_grad=True)
    with Largest() as seen:
        linear_losses(hidden, head.weight, head.bias, Work(torch.arange(9), Formula(), LogitMap(), 4)).total.backward()
    assert hidden.grad is not None
    assert head.weight.grad is None
    assert not [name for name in seen.operations if name.startswith(("addmm", "zeros")) and "(500, 8)" in name]


def test_nothing_is_kept_without_a_graph() -> None:
    head = torch.nn.Linear(8, 500)
    work = Work(torch.arange(9), Formula(), LogitMap(), 4)
    hidden = torch.randn(9, 8, requires_grad=True)
    with torch.no_grad(), Largest() as seen:
        losses = linear_losses(hidden, head.weight, head.bias, work)
    assert not losses.total.requires_grad
    assert seen.numel == 500 * 8  # the transposed weight; no gradient of it
    assert not [name for name in seen.operations if name.startswith(("addmm_", "zeros"))]
    torch.testing.assert_close(losses.each, linear_losses(hidden, head.weight, head.bias, work).each)


@pytest.mark.parametrize("adapters", [None, "lora"])
def test_without_supervised_tokens_there_is_a_graph_and_no_gradient(adapters: str | None) -> None:
    model = adapted("llama", ADAPTERS[adapters]) if adapters else model_of("llama")
    head = attach_head(model, "chunked", FORMULAS[3], "cpu")
    none = torch.zeros(0, dtype=torch.long)
    total, each = head.losses(model, batch(model)[0], none, none)
    total.backward()
    assert (total.item(), each.shape) == (0.0, (0,))
    trained = [p for p in model.parameters() if p.requires_grad]
    assert all(p.grad is not None and not p.grad.any() for p in trained)


def test_a_second_backward_says_so() -> None:
    weight = torch.randn(20, 4, requires_grad=True)
    work = Work(torch.arange(5), Formula(), LogitMap(), 4)
    total = linear_losses(torch.randn(5, 4), weight, None, work).total
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="run the forward again"):
        total.backward()


def test_without_targets_a_model_is_what_it_was() -> None:
    model = model_of("gemma2").eval()
    arguments, _ = batch(model)
    before = model(**arguments).logits
    attach_head(model, "chunked", Formula(), "cpu")
    assert torch.equal(model(**arguments).logits, before)
    kept = model(**arguments, logits_to_keep=2).logits
    torch.testing.assert_close(kept, before[:, -2:])
    assert model.generate(arguments["input_ids"], max_new_tokens=3, do_sample=False).shape == (1, 35)


# --- the choice


def test_what_an_architecture_does_to_its_logits_is_found() -> None:
    maps = {name: logit_map(model_of(name)) for name in MODELS}
    assert maps.pop("gemma2") == LogitMap(cap=0.3)
    assert maps.pop("granite") == LogitMap(scale=4.0)
    assert maps.pop("cohere") == LogitMap(scale=3.0)
    assert set(maps.values()) == {LogitMap()}


def test_it_is_found_without_weights() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODELS["gemma2"]))
    assert logit_map(model) == LogitMap(cap=0.3)


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ({"model_type": "minicpm3", **SHAPE}, "changes the hidden states before its head"),
        (
            {"model_type": "opt", "hidden_size": 32, "ffn_dim": 32, "vocab_size": 384, "num_attention_heads": 2},
            "does not run in parts",
        ),
    ],
)
def test_an_architecture_that_does_more_keeps_its_own_forward(shape: dict[str, Any], reason: str) -> None:
    if shape["model_type"] not in AutoConfig.for_model.__globals__["CONFIG_MAPPING"]:
        pytest.skip("this transformers does not have it")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape))
    head = attach_head(model, "auto", Formula(), "cpu")
    assert head.choice.implementation == "plain"
    assert reason in head.choice.reason
    assert "forward" not in vars(model)
    with pytest.raises(UserError, match=f"model.cross_entropy: `chunked` is not possible: .*{reason}"):
        attach_head(model, "chunked", Formula(), "cpu")


def test_what_cannot_be_is_refused_with_its_reason() -> None:
    def choose(asked: str, found: LogitMap | Unknown = LogitMap(), is_matrix: bool = True) -> str:  # noqa: B008
        return choose_cross_entropy(asked, found, is_matrix, 32_000, "cpu").implementation

    assert [choose(asked) for asked in ("auto", "plain", "chunked")] == ["chunked", "plain", "chunked"]
    with pytest.raises(UserError, match="`liger` is not possible: its kernels need a CUDA device"):
        choose("liger")
    with pytest.raises(UserError, match="`torch` is not possible: it takes a head that is one matrix"):
        choose("torch", is_matrix=False)
    if hasattr(torch.nn.functional, "linear_cross_entropy"):
        assert choose("torch") == "torch"
        with pytest.raises(UserError, match="`torch` is not possible: it cannot cap the logits"):
            choose("torch", LogitMap(cap=30.0))
    else:
        with pytest.raises(UserError, match=r"`torch` is not possible: it needs torch >= 2\.13"):
            choose("torch")


def test_chunks_follow_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert [rows_at_once(words, "cpu") for words in (32_768, 131_072, 262_144)] == [256, 128, 128]
    assert rows_at_once(131_072, "cuda") == 1024


# --- a run


def test_a_run_with_every_term(recipe: dict[str, Any], write_recipe: Any, tmp_path: Path) -> None:
    """`loss` is what is optimised, `eval_loss` the negative log-likelihood alone; the plan says which and why."""
    recipe["train"]["max_steps"] = 3
    recipe["evaluate"] = {"at_start": True}
    path, runs = write_recipe(recipe), {}
    terms = ("objective.z_loss=0.01", "objective.label_smoothing=0.1")
    for name, overrides in {"bare": (), "chunked": terms, "plain": (*terms, "model.cross_entropy=plain")}.items():
        shown = train_here(path, f"run.name={name}", *overrides)
        runs[name] = metrics(tmp_path / "runs" / name)
        assert f"cross entropy │ {'plain (asked' if name == 'plain' else 'chunked (logits of 4 tokens'}" in shown
    plan = json.loads((tmp_path / "runs" / "bare" / "plan.json").read_text(encoding="utf-8"))
    assert plan["cross_entropy"] == "chunked (logits of 4 tokens at a time, 0 MiB)"
    losses = {name: [line["loss"] for line in lines if "loss" in line] for name, lines in runs.items()}
    start = {name: lines[0]["eval_loss"] for name, lines in runs.items()}
    assert losses["chunked"] == pytest.approx(losses["plain"], rel=1e-6)
    assert losses["chunked"][0] > losses["bare"][0] + 0.1
    assert start["chunked"] == start["bare"] == pytest.approx(start["plain"], rel=1e-6)
