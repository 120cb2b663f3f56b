"""Schedules by value, optimizers by their published update, every name of both tables."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.engine.optimizer_step import IDLE, OF_MEDIA
from finetune.models.added_tokens import train_rows
from finetune.models.parameter_roles import ParameterRoles, parameter_roles
from finetune.models.weights import add_adapters
from finetune.recipe.schema import Lora, Optimizer, Schedule
from finetune.training.optim import BUILDERS, SHAPES, build_optimizers, decay_groups, lr_factor, state_bytes


def factors(steps: int, **settings: object) -> list[float]:
    schedule = Schedule.model_validate(settings)
    return [lr_factor(schedule, step, steps) for step in range(steps)]


def test_every_name_of_the_schema_is_in_the_tables() -> None:
    assert set(get_args(Schedule.model_fields["name"].annotation)) == set(SHAPES)
    assert set(get_args(Optimizer.model_fields["name"].annotation)) == set(BUILDERS)


@pytest.mark.parametrize("name", BUILDERS)
def test_the_state_of_every_optimizer_is_planned(name: str) -> None:
    assert state_bytes(Optimizer.model_validate({"name": name, "lr": 0.01}), [], "cpu") == (0, 0)


def test_warm_up_is_linear_and_never_zero() -> None:
    assert factors(8, name="constant", warmup_steps=3) == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 1, 1])


def test_linear_by_its_formula() -> None:
    assert factors(4, name="linear", min_lr_ratio=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4])


def test_cosine_by_its_formula() -> None:
    got = factors(10, name="cosine", min_lr_ratio=0.1)
    assert got == pytest.approx([0.1 + 0.45 * (1 + math.cos(math.pi * i / 10)) for i in range(10)])


def test_wsd_is_flat_then_linear() -> None:
    got = factors(10, name="wsd", decay_ratio=0.4)
    assert got == pytest.approx([1, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25])


@pytest.mark.parametrize("name", SHAPES)
def test_a_run_of_one_step_trains(name: str) -> None:
    assert lr_factor(Schedule.model_validate({"name": name}), 0, 1) == 1.0


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("warmup", [0, 3])
def test_no_step_stands_still(name: str, warmup: int) -> None:
    assert min(factors(20, name=name, warmup_steps=warmup)) > 0


def test_matrices_decay_vectors_do_not() -> None:
    matrix, vector = torch.zeros(2, 2), torch.zeros(2)
    groups = decay_groups(ParameterRoles(), [("w", matrix), ("b", vector)], 0.1)
    assert [(g["params"], g["weight_decay"]) for g in groups] == [([matrix], 0.1), ([vector], 0.0)]
    assert len(decay_groups(ParameterRoles(), [("w", matrix)], 0.1)) == 1


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.filterwarnings("ignore:Paged optimizers:UserWarning")  # bitsandbytes: no unified memory without a GPU
def test_each_optimizer_goes_downhill(name: str) -> None:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(64, 64))
    bias = torch.nn.Parameter(torch.randn(64))
    recipe = Optimizer.model_validate({"name": name, "lr": 0.01})
    optimizers = build_optimizers(recipe, ParameterRoles(), [("w", weight), ("b", bias)])
    before = (weight.square().sum() + bias.square().sum()).item()
    for _ in range(20):
        (weight.square().sum() + bias.square().sum()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert (weight.square().sum() + bias.square().sum()).item() < 0.97 * before


@pytest.mark.parametrize(
    ("architecture", "tables"),
    [
        ("gpt2", {"transformer.wte.weight", "transformer.wpe.weight"}),  # the head is tied
        ("gpt_neox", {"gpt_neox.embed_in.weight", "lm_head.weight"}),
        ("llama", {"model.embed_tokens.weight", "lm_head.weight"}),
    ],
)
def test_muon_steps_no_table(architecture: str, tables: set[str]) -> None:
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    if architecture != "gpt2":  # whose own names for them `for_model` maps
        sizes["intermediate_size"] = 32
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **sizes))
    named = list(model.named_parameters())
    recipe = Optimizer.model_validate({"name": "muon", "lr": 0.01})
    muon, adamw = build_optimizers(recipe, parameter_roles(model), named)
    names = {id(parameter): name for name, parameter in named}
    of_muon, of_adamw = (
        {names[id(parameter)] for group in one.param_groups for parameter in group["params"]} for one in (muon, adamw)
    )
    assert of_muon == {name for name, parameter in named if parameter.ndim == 2} - tables
    assert of_adamw == set(names.values()) - of_muon


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_muon_is_torchs_to_the_last_bit(dtype: torch.dtype) -> None:
    recipe = Optimizer(name="muon", lr=0.02, weight_decay=0.1, momentum=0.9)
    ours = {f"{rows}": torch.randn(rows, 24).to(dtype) for rows in (5, 24, 65)}
    theirs = [matrix.clone() for matrix in ours.values()]
    (muon,) = build_optimizers(recipe, ParameterRoles(), list(ours.items()))
    reference = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        for mine, other in zip(ours.values(), theirs, strict=True):
            mine.grad = other.grad = torch.randn(mine.shape).to(dtype)
        muon.step()
        reference.step()
    for mine, other in zip(ours.values(), theirs, strict=True):
        assert torch.equal(mine, other)
        assert torch.equal(muon.state[mine]["momentum_buffer"], reference.state[other]["momentum_buffer"])


@pytest.mark.filterwarnings("ignore:fan_in_fan_out:UserWarning")  # peft's, of Conv1D
def test_muon_steps_no_trained_copy_and_no_added_row() -> None:
    """Under adapters the tables are modules of peft: a copy with a name of its own, rows of added tokens."""
    config = AutoConfig.for_model("gpt2", vocab_size=40, n_embd=16, n_layer=1, n_head=2)
    lora = Lora.model_validate({"rank": 2, "targets": ["c_attn"], "modules_to_save": ["wpe"]})
    model = add_adapters(AutoModelForCausalLM.from_config(config), lora, torch.float32)
    train_rows(model, 38, 2, torch.float32)
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    muon, adamw = build_optimizers(Optimizer(name="muon", lr=0.01), parameter_roles(model), trained)
    names = {id(parameter): name for name, parameter in trained}
    of_muon = {names[id(p)] for group in muon.param_groups for p in group["params"]}
    assert of_muon
    assert all(".lora_A." in name or ".lora_B." in name for name in of_muon)
    rest = {names[id(p)] for group in adamw.param_groups for p in group["params"]}
    assert sorted(name.split("transformer.")[1] for name in rest) == [
        "wpe.modules_to_save.default.weight",
        "wte.added_rows",
    ]


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.filterwarnings("ignore:Paged optimizers:UserWarning")
def test_an_idle_group_stays_as_it_is(name: str) -> None:
    """What plain torch does with parameters without a gradient: no decay, no momentum, no step."""

    def steps(idle: set[int], without_gradient: bool) -> list[Any]:
        torch.manual_seed(0)
        tower, norm, other = (torch.nn.Parameter(torch.randn(shape)) for shape in ((64, 64), (64,), (64, 64)))
        recipe = Optimizer.model_validate({"name": name, "lr": 0.01, "weight_decay": 0.1})
        roles = ParameterRoles(of_media={"tower": ("image",), "norm": ("image",)})
        optimizers = build_optimizers(recipe, roles, [("tower", tower), ("norm", norm), ("other", other)])
        for step in range(4):
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group[IDLE] = bool(group[OF_MEDIA]) and step in idle and not without_gradient
            for parameter in (tower, norm, other):
                parameter.grad = torch.randn(parameter.shape)
            for parameter in (tower, norm) if step in idle else ():
                parameter.grad = None if without_gradient else torch.zeros_like(parameter)
            gradient = tower.grad
            for optimizer in optimizers:
                optimizer.step()
            assert tower.grad is gradient  # DeepSpeed's own buffer under offload
        return [tower, norm, other]

    for idle in ({1, 2}, {0}):
        ours, plain = steps(idle, without_gradient=False), steps(idle, without_gradient=True)
        for mine, theirs in zip(ours, plain, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def test_adamw_by_the_paper() -> None:
    """Loshchilov & Hutter 2017, algorithm 2, one matrix, three steps."""
    recipe = Optimizer(lr=0.1, weight_decay=0.01, betas=(0.9, 0.95), eps=1e-8)
    weight = torch.nn.Parameter(torch.tensor([[1.0, -2.0]], dtype=torch.float64))
    (optimizer,) = build_optimizers(recipe, ParameterRoles(), [("w", weight)])
    w, m, v = weight.detach().clone(), torch.zeros(1, 2), torch.zeros(1, 2)
    for t in range(1, 4):
        gradient = torch.tensor([[0.5, -t / 2]], dtype=torch.float64)
        weight.grad = gradient.clone()
        optimizer.step()
        m, v = 0.9 * m + 0.1 * gradient, 0.95 * v + 0.05 * gradient**2
        w = w * (1 - 0.1 * 0.01) - 0.1 * (m / (1 - 0.9**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-8)
    torch.testing.assert_close(weight.detach(), w)


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_the_decay_begins_where_the_warm_up_ends(name) -> None:
    schedule = Schedule(name=name, warmup_steps=4)
    assert lr_factor(schedule, 4, 12) == 1.0
    assert lr_factor(schedule, 8, 12) == pytest.approx(0.5)
