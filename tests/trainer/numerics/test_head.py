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
from conftest import metrics, train_alone
from largest import Largest
from transformers import AutoConfig, AutoModelForCausalLM
from usual import usual

from finetune.engine.hardware import shipped_hardware
from finetune.errors import UserError
from finetune.models.attention import choose_attention
from finetune.models.base_model import Base
from finetune.models.config import model_config
from finetune.models.head import TokenLoss, chunked
from finetune.models.head.chunked import HeadDevice, HeadTask, is_small, matrix_losses
from finetune.models.head.token_loss import LogitMap, UnknownHead, logit_map
from finetune.models.loss_model import CausalLMWithLoss, TargetTokens, choose_cross_entropy
from finetune.models.weights import Placement, add_adapters, load_model
from finetune.models.wrapped import trained_head
from finetune.recipe import load_recipe
from finetune.recipe.schema import Lora

SHAPE = {key: value for key, value in tiny.MODELS["llama"].items() if key != "model_type"}
MODELS: dict[str, dict[str, Any]] = {
    **tiny.MODELS,
    # Logits of random weights are small: a low cap, so that it bends them.
    "gemma2": {"model_type": "gemma2", **SHAPE, "head_dim": 16, "final_logit_softcapping": 0.3},
    "granite": {"model_type": "granite", **SHAPE, "logits_scaling": 0.25},
    "cohere": {"model_type": "cohere", **SHAPE, "logit_scale": 3.0},
    "biased": {"model_type": "phi", **SHAPE},  # its head has a bias
}
TOKEN_LOSSES = [TokenLoss(0.0, 0.0), TokenLoss(0.01, 0.0), TokenLoss(0.0, 0.1), TokenLoss(0.02, 0.3)]
POSITIONS = torch.tensor([1, 2, 3, 7, 8, 9, 10, 20, 21, 22, 30])
NLL = TokenLoss()
SCALE = 0.37  # what the loop multiplies the sum with


@pytest.fixture(autouse=True)
def tiny_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four positions at a time: three chunks, the last one short."""
    monkeypatch.setattr(chunked, "FEWEST_ROWS", 4)
    monkeypatch.setattr(chunked, "CHUNK_BYTES", dict.fromkeys(chunked.CHUNK_BYTES, 0))


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


def by_formula(model: Any, token_loss: TokenLoss) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Losses and gradients in fp64, all logits at once, the formula in words of its paper."""
    model = copy.deepcopy(model).double()
    model.set_experts_implementation("eager")  # torch's grouped products have no fp64
    arguments, targets = batch(model)
    logits = model(**arguments).logits[0, POSITIONS]
    lse = logits.exp().sum(1).log()
    nll, uniform = lse - logits[range(len(targets)), targets], lse - logits.mean(1)
    losses = (1 - token_loss.label_smoothing) * nll + token_loss.label_smoothing * uniform + token_loss.z_loss * lse**2
    (losses.sum() * SCALE).backward()
    return losses.detach(), gradients(model)


def by_head(
    model: Any, asked: str, token_loss: TokenLoss = NLL, autocast: torch.dtype | None = None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss_model = CausalLMWithLoss(model, asked, autocast=autocast)
    assert loss_model.choice.implementation == asked
    arguments, ids = batch(model)
    total, each, *_ = loss_model(targets=TargetTokens(POSITIONS, ids, token_loss), **arguments)
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


@pytest.mark.parametrize("token_loss", usual(TOKEN_LOSSES, TOKEN_LOSSES[0], TOKEN_LOSSES[3]), ids=str)
@pytest.mark.parametrize("asked", ["plain", "chunked"])
@pytest.mark.parametrize(
    "name", [name for name in MODELS if name != "qwen3_5"]
)  # whose mixers round in fp32 even in fp64
def test_equal_to_the_formula(name: str, asked: str, token_loss: TokenLoss) -> None:
    model = model_of(name)
    wanted = by_formula(model, token_loss)
    assert_equal_to_rounding(by_head(model, asked, token_loss), wanted)


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


@pytest.mark.parametrize("token_loss", [TOKEN_LOSSES[0], TOKEN_LOSSES[3]], ids=str)
@pytest.mark.parametrize("asked", ["plain", "chunked"])
@pytest.mark.parametrize("adapters", ADAPTERS)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_adapters(name: str, adapters: str, asked: str, token_loss: TokenLoss) -> None:
    model = adapted(name, ADAPTERS[adapters])
    wanted = by_formula(model, token_loss)
    assert_equal_to_rounding(by_head(model, asked, token_loss), wanted)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_lora_on_a_tied_head() -> None:
    model = adapted("llama_tied", ADAPTERS["lora"])
    causal = model.get_base_model()
    causal.tie_weights()  # as FSDP2's wrapping does
    assert causal.lm_head.base_layer.weight is causal.get_input_embeddings().weight
    wanted = by_formula(model, NLL)
    assert_equal_to_rounding(by_head(model, "chunked"), wanted)


def test_quantised_weights(made: Path, recipe: dict[str, Any], write_recipe: Any) -> None:
    """Against the plain way on the same 4-bit model; once more with the head itself in 4 bits."""
    from bitsandbytes.nn import Linear4bit

    recipe |= {"mode": "qlora", "quantization": {"type": "nf4"}, "lora": {"rank": 4}}
    loaded = load_recipe(write_recipe(recipe))
    config = model_config(loaded.model)
    attention = choose_attention("eager", AutoModelForCausalLM._model_mapping[type(config)], config, "cpu", False)
    model = load_model(loaded, Base.of(loaded, config), attention, Placement("load", torch.device("cpu")))
    plain = by_head(model, "plain")
    assert isinstance(trained_head(model), torch.nn.Linear)
    assert_equal_to_rounding(by_head(model, "chunked"), plain)
    causal = model.get_base_model()
    packed = Linear4bit(64, config.vocab_size, bias=False, compute_dtype=torch.float32, quant_type="nf4")
    packed.load_state_dict({"weight": causal.lm_head.weight.detach().cpu()})
    causal.lm_head = packed.to("cpu").requires_grad_(False)
    plain = by_head(model, "plain")
    assert_equal_to_rounding(by_head(model, "chunked"), plain)
    weights = torch.linspace(-1, 2, len(POSITIONS))
    plain = by_token(model, "plain", weights, True, NLL)
    for differentiable in (False, True):
        assert_equal_to_rounding(by_token(model, "chunked", weights, differentiable, NLL), plain)


@pytest.mark.parametrize("adapters", [None, "lora", "dora"])
def test_bf16_is_no_further_from_the_truth_than_the_plain_way(adapters: str | None) -> None:
    """16-bit matrix products, losses in fp32. The mean over parameters and draws: the worst parameter of one draw is up
    to a fifth larger in either way, by chance."""
    distances: dict[str, list[tuple[float, float]]] = {"plain": [], "chunked": []}
    for draw in range(3):
        model = adapted("llama", ADAPTERS[adapters]) if adapters else model_of("llama")
        generator = torch.Generator().manual_seed(draw)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
        losses, wanted = by_formula(model, NLL)
        for asked, found in distances.items():
            each, gradient = by_head(copy.deepcopy(model), asked, autocast=torch.bfloat16)
            apart = [((gradient[name] - wanted[name]).norm() / wanted[name].norm()).item() for name in wanted]
            found.append(((each - losses).abs().max().item(), sum(apart) / len(apart)))
    (plain_loss, plain_gradient), (our_loss, our_gradient) = (
        [sum(values) / len(values) for values in zip(*distances[asked], strict=True)] for asked in ("plain", "chunked")
    )
    assert 0 < our_loss < 1.1 * plain_loss + 1e-6
    assert 0 < our_gradient < 1.1 * plain_gradient


@pytest.mark.parametrize("differentiable", [False, True])
def test_bf16_gradients_of_the_head_are_added_up_in_fp32(differentiable: bool) -> None:
    """Over a thousand chunks that all pull one way: a sum in bf16 would stand still after a few hundred of them."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.rand(4096, 8, generator=generator) + 0.5
    task = HeadTask(torch.zeros(4096, dtype=torch.long), NLL, LogitMap(), 4, differentiable=differentiable)
    gradients = []
    for dtype, autocast in ((torch.float64, False), (torch.float32, True)):
        weight = torch.zeros(6, 8, dtype=dtype, requires_grad=True)
        bias = torch.zeros(6, dtype=dtype, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            losses = matrix_losses(hidden.to(dtype), weight, bias, task)
        (losses.each.sum() if differentiable else losses.total).backward()
        gradients.append((weight.grad, bias.grad))
    for ours, wanted in zip(gradients[1], gradients[0], strict=True):
        torch.testing.assert_close(ours.double(), wanted, rtol=5e-3, atol=0)


# --- losses that differ in weight, or that an objective is not linear in


def by_token(
    model: Any, asked: str, token_weights: torch.Tensor, differentiable: bool, token_loss: TokenLoss
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Each token's loss, and the gradient of their weighted sum; weights are known then, or in the backward."""
    model.zero_grad()
    arguments, ids = batch(model)
    weights = None if differentiable else token_weights.to(model.dtype)
    targets = TargetTokens(POSITIONS, ids, token_loss, weights, differentiable)
    outputs = CausalLMWithLoss(model, asked)(targets=targets, **arguments)
    loss = (outputs.token_losses * token_weights.to(model.dtype)).sum() if differentiable else outputs.total
    loss.backward()
    return outputs.token_losses.detach().double(), gradients(model)


WEIGHTED = {
    "full": ("llama", None),
    "tied": ("llama_tied", None),
    "soft cap": ("gemma2", None),
    "bias": ("biased", None),
    **{adapters: ("llama", adapters) for adapters in ADAPTERS},  # trained and frozen heads
}


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32], ids=["16 bit weights", "autocast"])
def test_a_gradient_that_is_written_in_16_bits_has_the_bits_of_one_in_fp32(weights: torch.dtype) -> None:
    """With weights of 1 it is multiplied by them, in fp32."""
    torch.manual_seed(0)
    ids, found = torch.randint(0, 70, (13,)), []
    hidden, weight = torch.randn(13, 16).bfloat16() * 4, torch.randn(70, 16).to(weights)
    ids[0] = (hidden[0].float() @ weight.float().t()).argmax()  # likely: p - 1 near 0
    for of_tokens in (None, torch.ones(13)):
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        with torch.autocast("cpu", torch.bfloat16):
            losses = matrix_losses(*leaves, None, HeadTask(ids, NLL, LogitMap(), 4, of_tokens))
        losses.total.backward()
        found.append([losses.each, *(leaf.grad for leaf in leaves)])
    for rounded, exact in zip(*found, strict=True):
        assert torch.equal(rounded, exact)


@pytest.mark.parametrize("token_loss", [TOKEN_LOSSES[0], TOKEN_LOSSES[3]], ids=str)
@pytest.mark.parametrize("differentiable", [False, True])
@pytest.mark.parametrize("kind", WEIGHTED)
def test_weighted_losses_have_the_plain_way_s_gradient_in_fp64(
    kind: str, differentiable: bool, token_loss: TokenLoss
) -> None:
    """All three ways: weights known in the forward; by token, with a frozen head, and with one that trains."""
    name, adapters = WEIGHTED[kind]
    model = (adapted(name, ADAPTERS[adapters]) if adapters else model_of(name)).double()
    weights = torch.linspace(-1, 2, len(POSITIONS), dtype=torch.float64)
    plain = by_token(copy.deepcopy(model), "plain", weights, True, token_loss)
    losses, found = by_token(model, "chunked", weights, differentiable, token_loss)
    torch.testing.assert_close(losses, plain[0], rtol=1e-12, atol=1e-12)
    assert found.keys() == plain[1].keys()
    for key, gradient in found.items():
        torch.testing.assert_close(gradient, plain[1][key], rtol=1e-9, atol=1e-12, msg=key)


@pytest.mark.parametrize("trained", [False, True])
def test_gradcheck_of_a_head_s_token_losses(trained: bool) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 5, dtype=torch.float64, requires_grad=trained)
    task = HeadTask(torch.arange(6), TOKEN_LOSSES[3], LogitMap(cap=2.0), 4, differentiable=True)
    inputs = (hidden, weight) if trained else (hidden,)
    assert torch.autograd.gradcheck(lambda *x: matrix_losses(hidden, weight, None, task).each, inputs)


def test_dropout_of_an_adapted_head_is_the_same_when_it_is_computed_again() -> None:
    lora = Lora(rank=4, alpha=8, dropout=0.5, targets=("lm_head",))
    model, weights = adapted("llama", lora), torch.linspace(-1, 2, len(POSITIONS))
    results = []
    for differentiable in (False, True):
        torch.manual_seed(3)
        results.append(by_token(model, "chunked", weights, differentiable, NLL))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=0, atol=0)
    for name, gradient in results[0][1].items():
        torch.testing.assert_close(gradient, results[1][1][name], rtol=1e-5, atol=1e-6, msg=name)


# --- what is never there


@pytest.mark.parametrize("asked", ["plain", "chunked"])
def test_all_logits_are_never_there(asked: str) -> None:
    tokens, vocabulary, width, rows = 200, 3000, 8, 4
    head = torch.nn.Linear(width, vocabulary)
    hidden, targets = torch.randn(tokens, width, requires_grad=True), torch.arange(tokens)
    task = HeadTask(targets, NLL, LogitMap(), rows)
    with Largest() as seen:
        if asked == "plain":
            losses = torch.nn.functional.cross_entropy(head(hidden), targets, reduction="sum")
        else:
            losses = matrix_losses(hidden, head.weight, head.bias, task).total
        losses.backward()
    assert head.weight.grad is not None
    bound = max(rows * vocabulary, vocabulary * width)
    assert (seen.numel >= tokens * vocabulary) if asked == "plain" else (seen.numel == bound)


def test_a_frozen_head_has_no_gradient_made() -> None:
    head = torch.nn.Linear(8, 500).requires_grad_(False)
    hidden = torch.randn(9, 8, requires_grad=True)
    with Largest() as seen:
        matrix_losses(hidden, head.weight, head.bias, HeadTask(torch.arange(9), NLL, LogitMap(), 4)).total.backward()
    assert hidden.grad is not None
    assert head.weight.grad is None
    assert not [name for name in seen.operations if name.startswith(("addmm", "zeros")) and "(500, 8)" in name]


def test_nothing_is_kept_without_a_graph() -> None:
    head = torch.nn.Linear(8, 500)
    task = HeadTask(torch.arange(9), NLL, LogitMap(), 4)
    hidden = torch.randn(9, 8, requires_grad=True)
    with torch.no_grad(), Largest() as seen:
        losses = matrix_losses(hidden, head.weight, head.bias, task)
    assert not losses.total.requires_grad
    assert seen.numel == 500 * 8  # the transposed weight; no gradient of it
    assert not [name for name in seen.operations if name.startswith(("addmm_", "zeros"))]
    torch.testing.assert_close(losses.each, matrix_losses(hidden, head.weight, head.bias, task).each)


@pytest.mark.parametrize("differentiable", [False, True])
@pytest.mark.parametrize("adapters", [None, "lora"])
def test_without_targets_there_is_a_graph_and_no_gradient(adapters: str | None, differentiable: bool) -> None:
    model = adapted("llama", ADAPTERS[adapters]) if adapters else model_of("llama")
    none = torch.zeros(0, dtype=torch.long)
    targets = TargetTokens(none, none, TOKEN_LOSSES[3], differentiable=differentiable)
    total, each, *_ = CausalLMWithLoss(model, "chunked")(targets=targets, **batch(model)[0])
    total.backward()
    assert (total.item(), each.shape) == (0.0, (0,))
    trained = [p for p in model.parameters() if p.requires_grad]
    assert all(p.grad is not None and not p.grad.any() for p in trained)


def test_a_second_backward_says_so() -> None:
    weight = torch.randn(20, 4, requires_grad=True)
    task = HeadTask(torch.arange(5), NLL, LogitMap(), 4)
    total = matrix_losses(torch.randn(5, 4), weight, None, task).total
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="run the forward again"):
        total.backward()


def test_without_targets_a_model_is_what_it_was() -> None:
    model = model_of("gemma2").eval()
    arguments, _ = batch(model)
    before = model(**arguments).logits
    loss_model = CausalLMWithLoss(model, "chunked")
    assert torch.equal(loss_model(**arguments).logits, before)
    kept = loss_model(**arguments, logits_to_keep=2).logits
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
    choice = CausalLMWithLoss(model, "auto").choice
    assert choice.implementation == "plain"
    assert reason in choice.reason
    assert type(model.get_output_embeddings()) is torch.nn.Linear
    with pytest.raises(UserError, match=f"model.cross_entropy: `chunked` is not possible: .*{reason}"):
        CausalLMWithLoss(model, "chunked")


def test_auto_takes_liger_s_kernel_if_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = HeadDevice("cuda", liger=True)
    assert choose_cross_entropy("auto", LogitMap(), True, 32_000, gpu).implementation == "chunked"  # not installed
    monkeypatch.setattr("finetune.models.loss_model.liger_problem", lambda _device: None)
    for matrix, only_sums, device, expected in (
        (True, True, gpu, "liger"),
        (False, True, gpu, "chunked"),
        (True, False, gpu, "chunked"),
        (True, True, HeadDevice("cuda"), "chunked"),  # `model.kernels: plain`
    ):
        found = choose_cross_entropy("auto", LogitMap(), matrix, 32_000, device, only_sums)
        assert found.implementation == expected
    assert choose_cross_entropy("chunked", LogitMap(), True, 32_000, gpu).implementation == "chunked"


def test_what_cannot_be_is_refused_with_its_reason() -> None:
    def choose(asked: str, found: LogitMap | UnknownHead = LogitMap(), matrix: bool = True) -> str:  # noqa: B008
        return choose_cross_entropy(asked, found, matrix, 32_000, HeadDevice("cpu")).implementation

    assert [choose(asked) for asked in ("auto", "plain", "chunked")] == ["chunked", "plain", "chunked"]
    with pytest.raises(UserError, match="`liger` is not possible: its kernels need a CUDA device"):
        choose("liger")
    with pytest.raises(UserError, match="`liger` is not possible: it takes a head that is one matrix"):
        choose("liger", matrix=False)
    with pytest.raises(UserError, match="`liger` is not possible: it gives the sum of the token losses only"):
        choose_cross_entropy("liger", LogitMap(), True, 32_000, HeadDevice("cpu"), only_sums=False)


def test_chunks_follow_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert [HeadDevice("cpu").rows(words) for words in (32_768, 131_072, 262_144)] == [256, 128, 128]
    assert HeadDevice("cuda").rows(131_072) == 1024
    assert HeadDevice("cuda", ranks=4).rows(131_072) == 4096  # of as many bytes on each rank
    assert HeadDevice("cuda", small=True).rows(131_072) == 512
    cards = ("T4-16", "4090-24", "5090-32", "V100-32", "H100-80")
    assert [is_small(shipped_hardware().devices[card].gib) for card in cards] == [True, True, False, False, False]
    assert not is_small(None)


# --- a run


def test_a_run_with_every_term(recipe: dict[str, Any], write_recipe: Any, tmp_path: Path) -> None:
    """`loss` is what is optimised, `eval_loss` the negative log-likelihood alone; the plan says which and why."""
    recipe["train"]["max_steps"] = 3
    recipe["evaluate"] = {"at_start": True}
    path, runs = write_recipe(recipe), {}
    terms = ("objective.z_loss=0.01", "objective.label_smoothing=0.1")
    for name, overrides in {"bare": (), "chunked": terms, "plain": (*terms, "model.cross_entropy=plain")}.items():
        shown = train_alone(path, f"run.name={name}", *overrides)
        runs[name] = metrics(tmp_path / "runs" / name)
        assert f"cross entropy │ {'plain (asked' if name == 'plain' else 'chunked (logits of 4 tokens'}" in shown
    plan = json.loads((tmp_path / "runs" / "bare" / "plan.json").read_text(encoding="utf-8"))
    assert plan["cross_entropy"] == "chunked (logits of 4 tokens at a time, 0 MiB)"
    losses = {name: [line["loss"] for line in lines if "loss" in line] for name, lines in runs.items()}
    start = {name: lines[0]["eval_loss"] for name, lines in runs.items()}
    assert losses["chunked"] == pytest.approx(losses["plain"], rel=1e-6)
    assert losses["chunked"][0] > losses["bare"][0] + 0.1
    assert start["chunked"] == start["bare"] == pytest.approx(start["plain"], rel=1e-6)
