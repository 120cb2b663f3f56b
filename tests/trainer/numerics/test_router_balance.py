"""The balance loss of routers: its value, what it does not depend on, and that recomputation counts nothing twice."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.errors import UserError
from finetune.models.activations import recompute_activations
from finetune.models.moe import find_routers
from finetune.objectives.objective import Sums, Term
from finetune.objectives.router_balance import balance_coefficient, balance_of_experts, router_balance
from finetune.recipe.schema import ObjectiveSettings
from finetune.training.run_dir import ExpertLoad


def plain(logits: Tensor, top_k: int) -> Tensor:  # of one layer and one row, in fp64
    """Fedus et al. 2021, equations 4 to 6, with f counted over all choices of a token."""
    experts, probabilities = logits.shape[1], logits.double().softmax(1)
    total = torch.zeros((), dtype=torch.float64)
    for expert in range(experts):
        chose = (probabilities.topk(top_k, 1).indices == expert).any(1)
        total = total + chose.double().mean() * probabilities[:, expert].mean()
    return experts * total


@pytest.fixture
def layers() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(20, 6).requires_grad_() for _ in range(3)]


def test_it_is_the_mean_over_layers_of_every_row_by_its_tokens(layers: list[Tensor]) -> None:
    loss, chosen = router_balance(layers, (7, 9), top_k=2)  # four tokens of padding
    rows = [(layer[:7], layer[7:16]) for layer in layers]
    expected = sum(7 * plain(a, 2) + 9 * plain(b, 2) for a, b in rows) / 3
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    ours = torch.autograd.grad(loss, layers)
    theirs = torch.autograd.grad(expected, layers)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    assert all(gradient[16:].abs().max() == 0 for gradient in ours)
    assert chosen.sum(1).tolist() == [16 * 2] * 3


def test_it_does_not_depend_on_how_rows_are_distributed(layers: list[Tensor]) -> None:
    together = router_balance(layers, (7, 9), 2)
    apart = [router_balance([layer[:7] for layer in layers], (7,), 2)]
    apart.append(router_balance([layer[7:] for layer in layers], (9,), 2))
    dummy = router_balance(layers, (), 2)  # whose only document counts for nothing
    torch.testing.assert_close(together[0], sum((loss for loss, _ in apart), dummy[0]))
    assert torch.equal(together[1], sum((chosen for _, chosen in apart), dummy[1]))
    assert dummy[0].item() == 0


def test_a_row_that_is_masked_has_no_part(layers: list[Tensor]) -> None:
    kept = torch.tensor([1.0, 0.0], dtype=torch.float64)
    given = [layer.detach().clone().requires_grad_() for layer in layers]
    loss, chosen = router_balance(given, (7, 9), 2, kept)
    alone, of_alone = router_balance([layer[:7] for layer in layers], (7,), 2)
    torch.testing.assert_close(loss, alone)
    assert torch.equal(chosen, of_alone)
    loss.backward()
    assert all(layer.grad is not None and layer.grad[:7].any() and not layer.grad[7:].any() for layer in given)


def test_it_is_top_k_where_all_experts_are_equally_busy() -> None:
    logits = torch.eye(6).repeat(2, 1) * 1e-3  # every expert is the first choice of two tokens
    assert router_balance([logits], (12,), 1)[0].item() / 12 == pytest.approx(1, abs=1e-3)


def model(name: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**tiny.MODELS[name], **changes})).train()


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_a_layer_that_is_computed_again_counts_once(name: str) -> None:
    gradients = []
    for again in (False, True):
        made = model(name)
        routers = find_routers(made)
        assert routers is not None
        if again:
            recompute_activations(made, True)
        with routers.recording() as recorded:
            output = made(input_ids=torch.arange(30)[None], use_cache=False).logits.square().mean()
        loss, chosen = router_balance(recorded, (30,), routers.top_k)
        (output + loss).backward()
        assert len(recorded) == routers.layers == 2
        assert chosen.shape == (2, 8)
        gradients.append({name: p.grad for name, p in made.named_parameters()})
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)


def coefficient(settings: ObjectiveSettings, name: str, divided: str | None = None, **changes: Any) -> float:
    made = model(name, **changes)
    return balance_coefficient(settings, made.config, find_routers(made), divided)


def test_null_means_what_the_model_s_config_says() -> None:
    half = ObjectiveSettings(router_aux_loss_coef=0.5)
    adds = {"output_router_logits": True, "router_aux_loss_coef": 0.25}
    assert coefficient(ObjectiveSettings(), "mixtral") == 0.0
    assert coefficient(ObjectiveSettings(), "mixtral", **adds) == 0.25
    assert coefficient(ObjectiveSettings(router_aux_loss_coef=0), "mixtral", output_router_logits=True) == 0.0
    assert coefficient(half, "qwen3_moe") == 0.5
    assert coefficient(ObjectiveSettings(), "llama") == 0.0
    with pytest.raises(UserError, match=r"objective.router_aux_loss_coef: 0.5: LlamaConfig has no router"):
        coefficient(half, "llama")


def test_rows_that_no_rank_has_in_full_are_not_balanced() -> None:
    assert coefficient(ObjectiveSettings(), "mixtral", "context 2") == 0.0
    with pytest.raises(UserError, match=r"`output_router_logits` in the model's config.*under context 2.*_coef: 0"):
        coefficient(ObjectiveSettings(), "mixtral", "context 2", output_router_logits=True)


def test_what_is_logged_of_the_load(tmp_path: Any) -> None:
    load = torch.tensor([[4.0, 4, 4, 4], [8, 8, 0, 0]], dtype=torch.float64)
    totals = {"router_balance_loss": torch.tensor(25.0), "expert_load": load}
    terms = {"router_balance_loss": Term(totals["router_balance_loss"], "tokens"), "expert_load": Term(load)}
    line = balance_of_experts(0.0, 2).metrics(Sums(totals, terms, {"tokens": 10}))
    assert line == {"router_balance_loss": 2.5, "experts/load_max_over_mean": 2.0, "experts/idle_share": 0.25}
    table = ExpertLoad()
    table.add(3, load)
    table.add(4, load)
    table.write(tmp_path)
    assert (tmp_path / "experts.json").read_text() == '{"steps": [3, 4], "load": [[8, 8, 8, 8], [16, 16, 0, 0]]}\n'
