"""The balance loss of routers: its value, what it does not depend on, and that recomputation counts nothing twice."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from finetune.training.routing import ExpertLoad, Routing, routing_line
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.engine.parallelism import Parallelism
from finetune.errors import UserError
from finetune.models.activations import recompute_activations
from finetune.models.routers import find_routers
from finetune.objectives.router_balance import router_balance
from finetune.recipe.schema import Objective


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
    found = router_balance(layers, (7, 9), top_k=2)  # four tokens of padding
    rows = [(layer[:7], layer[7:16]) for layer in layers]
    expected = sum(7 * plain(a, 2) + 9 * plain(b, 2) for a, b in rows) / 3
    torch.testing.assert_close(found.loss.double(), expected, rtol=1e-6, atol=0)
    ours = torch.autograd.grad(found.loss, layers)
    theirs = torch.autograd.grad(expected, layers)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    assert all(gradient[16:].abs().max() == 0 for gradient in ours)
    assert found.chosen.sum(1).tolist() == [16 * 2] * 3


def test_it_does_not_depend_on_how_rows_are_dealt(layers: list[Tensor]) -> None:
    together = router_balance(layers, (7, 9), 2)
    apart = [router_balance([layer[:7] for layer in layers], (7,), 2)]
    apart.append(router_balance([layer[7:] for layer in layers], (9,), 2))
    filler = router_balance(layers, (), 2)  # whose only document counts for nothing
    torch.testing.assert_close(together.loss, sum((one.loss for one in apart), filler.loss))
    assert torch.equal(together.chosen, sum((one.chosen for one in apart), filler.chosen))
    assert filler.loss.item() == 0


def test_it_is_top_k_where_all_experts_are_equally_busy() -> None:
    logits = torch.eye(6).repeat(2, 1) * 1e-3  # every expert is the first choice of two tokens
    assert router_balance([logits], (12,), 1).loss.item() / 12 == pytest.approx(1, abs=1e-3)


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
        with routers.listening() as heard:
            output = made(input_ids=torch.arange(30)[None], use_cache=False).logits.square().mean()
        found = router_balance(heard, (30,), routers.top_k)
        (output + found.loss).backward()
        assert len(heard) == routers.layers == 2
        assert found.chosen.shape == (2, 8)
        gradients.append({name: p.grad for name, p in made.named_parameters()})
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)


def test_null_means_what_the_model_s_config_says() -> None:
    asked = Objective(router_aux_loss_coef=0.5)
    for name, changes, objective, coefficient in (
        ("mixtral", {}, Objective(), 0.0),
        ("mixtral", {"output_router_logits": True, "router_aux_loss_coef": 0.25}, Objective(), 0.25),
        ("mixtral", {"output_router_logits": True}, Objective(router_aux_loss_coef=0), 0.0),
        ("qwen3_moe", {}, asked, 0.5),
        ("llama", {}, Objective(), 0.0),
    ):
        assert Routing.of(model(name, **changes), objective, Parallelism()).coefficient == coefficient
    with pytest.raises(UserError, match=r"objective.router_aux_loss_coef: 0.5: LlamaConfig has no router"):
        Routing.of(model("llama"), asked, Parallelism())


def test_rows_that_no_rank_sees_whole_are_not_balanced() -> None:
    context = Parallelism(context=2)
    assert Routing.of(model("mixtral"), Objective(), context) == Routing()
    with pytest.raises(UserError, match=r"`output_router_logits` in the model's config.*router_aux_loss_coef: 0"):
        Routing.of(model("mixtral", output_router_logits=True), Objective(), context)


def test_what_is_logged_of_the_load(tmp_path: Any) -> None:
    load = torch.tensor([[4, 4, 4, 4], [8, 8, 0, 0]])
    line = routing_line(2.5, load)
    assert line == {"router_balance_loss": 2.5, "experts/load_max_over_mean": 2.0, "experts/idle_share": 0.25}
    assert routing_line(0.0, None) == {}
    table = ExpertLoad()
    table.add(3, load)
    table.add(4, load)
    table.write(tmp_path)
    assert (tmp_path / "experts.json").read_text() == '{"steps": [3, 4], "load": [[8, 8, 8, 8], [16, 16, 0, 0]]}\n'
