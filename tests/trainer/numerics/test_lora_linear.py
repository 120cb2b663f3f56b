"""Adapted layers in fewer passes: what peft computes, forward and backward, and only where nothing else has a say."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from finetune.models import lora_linear
from finetune.models.casts import cast_once
from finetune.models.compiled import compilations
from finetune.models.lora_linear import FusedLinear, Siblings, fuse_adapters
from finetune.models.packed_linear import keep_weights_unpacked, pack_linear_layers, unpacked_weight
from finetune.models.weights import fuse_adapters as fuse_for
from finetune.recipe.schema import Quantization

SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}


def adapted(layers: int = 2, bias: bool = False, **lora: Any) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=64, num_hidden_layers=layers, attention_bias=bias, **SIZES)
    settings = {"r": 4, "lora_alpha": 12, "target_modules": "all-linear", **lora}
    model = get_peft_model(LlamaForCausalLM(config), LoraConfig(**settings))
    for name, parameter in model.named_parameters():
        if "lora_B" in name or name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
    return model


def fused_of(model: Any) -> list[FusedLinear]:
    return [module for module in model.modules() if isinstance(module, FusedLinear)]


def fused(model: Any) -> Any:
    other = copy.deepcopy(model)
    fuse_adapters(other)
    return other


def step(model: Any, autocast: bool = False) -> dict[str, Tensor]:
    """Gradients by name, and the loss."""
    ids = torch.arange(24)[None] * 7 % 64
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return {"": loss.detach(), **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}


def difference(some: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert some.keys() == other.keys()
    return max(((some[n].double() - other[n].double()).norm() / other[n].double().norm()).item() for n in some)


@pytest.mark.parametrize("bias", [False, True])
def test_it_is_what_peft_computes(bias: bool) -> None:
    theirs = adapted(bias=bias).double()
    ours = fused(theirs)
    assert [len(layer.siblings.layers) for layer in fused_of(ours)] == [3, 3, 3, 1, 2, 2, 1] * 2
    expected = step(theirs)
    assert len(expected) == 1 + 2 * 7 * 2
    assert difference(step(ours), expected) < 1e-13
    assert all(not layer.siblings.outputs and layer.siblings.x is None for layer in fused_of(ours))
    assert difference(step(fused(adapted(bias=bias))), expected) < 5e-6


PACKED = {
    "nf4": Quantization(type="nf4"),
    "nf4, plain scales": Quantization(type="nf4", double_quant=False),
    "fp8": Quantization(type="fp8"),
}


def packed(settings: Quantization, compute: torch.dtype, **lora: Any) -> Any:
    """Returns a model with adapters in fp32 on packed weights, as `mode: qlora` loads it."""
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=2, attention_bias=True, **SIZES))
    torch.manual_seed(0)
    pack_linear_layers(model.to(compute), settings, compute, torch.device("cpu"), torch.device("cpu"))
    keep_weights_unpacked(model)
    model = get_peft_model(model, LoraConfig(**{"r": 4, "lora_alpha": 12, "target_modules": "all-linear", **lora}))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = nn.init.normal_(torch.empty_like(parameter, dtype=torch.float32), std=0.1)
    return model


@pytest.mark.parametrize("settings", PACKED.values(), ids=PACKED)
def test_on_packed_weights_it_is_what_peft_computes(settings: Quantization) -> None:
    theirs = packed(settings, torch.float32)
    ours = fused(theirs)
    assert [len(layer.siblings.layers) for layer in fused_of(ours)] == [3, 3, 3, 1, 2, 2, 1] * 2
    assert all(layer.part() for layer in fused_of(ours))
    assert difference(step(ours), step(theirs)) < 1e-5


def test_on_packed_weights_each_result_is_as_near_to_the_truth_as_peft_s() -> None:
    theirs = packed(PACKED["nf4"], torch.bfloat16)
    torch.manual_seed(2)
    x, upstream = torch.randn(256, 32).bfloat16(), torch.randn(256, 64).bfloat16()

    def results(model: Any) -> list[Tensor]:
        layer = model.base_model.model.model.layers[0].mlp.gate_proj
        rows = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            y = layer(rows)
        y.backward(upstream)
        return [y.detach(), *(p.grad for p in (rows, *layer.parameters()) if p.grad is not None)]

    layer = theirs.base_model.model.model.layers[0].mlp.gate_proj
    weights = [unpacked_weight(layer.base_layer, layer.base_layer.weight)]
    weights += [getattr(layer, name)["default"].weight for name in ("lora_A", "lora_B")]
    rows, weight, down, up = (w.detach().double().requires_grad_() for w in (x, *weights))
    y = rows @ weight.t() + 3.0 * (rows @ down.t()) @ up.t()
    y.backward(upstream.double())
    for ours, usual, truth in zip(
        results(fused(theirs)), results(theirs), [y.detach(), rows.grad, down.grad, up.grad], strict=True
    ):
        assert truth is not None
        distance, usually = ((one.double() - truth).norm() / truth.norm() for one in (ours, usual))
        assert distance < 1.1 * usually


def test_a_packed_weight_is_unpacked_once_each_way_and_no_output_copied() -> None:
    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(func.name())
            return func(*args, **(kwargs or {}))

    layer = fused(packed(PACKED["nf4, plain scales"], torch.float32)).base_model.model.model.layers[0].mlp
    x = torch.randn(1, 8, 32, requires_grad=True)
    names: list[str] = []
    with Calls():
        outputs = [projection(x) for projection in (layer.gate_proj, layer.up_proj)]
        forward, names = names, []
        torch.cat(outputs, 2).sum().backward()
    for called in (forward, names):
        assert sum(name.startswith("bitsandbytes::dequantize_4bit") for name in called) == 2
    assert not {"aten::clone", "aten::add.Tensor", "aten::mul.Tensor"} & {*forward}
    assert names.count("aten::addmm_") == 3  # into the first layer's gradient of x


def test_under_autocast_it_is_as_near_to_the_truth_as_peft() -> None:
    theirs = adapted()
    truth = step(copy.deepcopy(theirs).double())
    assert difference(step(fused(theirs), autocast=True), truth) < 1.1 * difference(step(theirs, autocast=True), truth)


@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
def test_the_micro_batches_of_a_step_share_one_cast_of_each_adapter(recomputed: bool) -> None:
    """With the bits of a cast at each use; another step, and a forward after it, read the weights of then."""
    casts = 0

    class Casts(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal casts
            shape = [*args[0].shape] if args and isinstance(args[0], Tensor) else []
            to_16_bits = (kwargs or {}).get("dtype") == torch.bfloat16
            casts += func.name() == "aten::_to_copy" and to_16_bits and len(shape) == 2 and bool({4, 8, 12} & {*shape})
            return func(*args, **(kwargs or {}))

    def steps(model: Any, context: Any) -> list[Tensor]:
        found, optimizer = [], torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            with context():
                for shift in (0, 5):
                    ids = (torch.arange(24)[None] * 7 + shift) % 64
                    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
                        loss = model(input_ids=ids, labels=ids).loss
                    loss.backward()
                    found.append(loss.detach())
            found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            optimizer.step()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            return [*found, model(input_ids=ids).logits]

    models = [fused(adapted()) for _ in range(2)]
    if recomputed:
        for model in models:
            model.enable_input_require_grads()
            model.train().gradient_checkpointing_enable({"use_reentrant": False})
    wanted = steps(models[0], contextlib.nullcontext)
    with Casts():
        found = steps(models[1], cast_once)
    assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))
    # 4 matrices A of those with one input and 7 B in each of two layers: in each step, and in the forward at the end.
    assert casts == 2 * (4 + 7) * (2 + 1)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_layers_compute_the_same_bits_in_one_graph() -> None:
    """With recomputation, and without a break, as `fullgraph` allows none. The bits are those of layers that share no
    input."""
    theirs = adapted(3)
    theirs.config.use_cache = theirs.base_model.model.config.use_cache = False
    theirs.train().gradient_checkpointing_enable({"use_reentrant": False})
    ours = fused(theirs)
    for layer in fused_of(ours):
        layer.siblings = Siblings([layer])
    wanted = step(ours, autocast=True)
    torch.compiler.reset()
    before = compilations()
    for layer in ours.base_model.model.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True, dynamic=False)
    found = step(ours, autocast=True)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert compilations() - before == 1
    torch.compiler.reset()


def test_the_operator_of_compiled_layers_is_registered_as_it_computes() -> None:
    torch.manual_seed(0)
    rows, down, up = (torch.randn(shape, requires_grad=True) for shape in ((5, 8), (2, 8), (6, 2)))
    for bias in (torch.randn(6), None):
        torch.library.opcheck(lora_linear._adapted, (rows, torch.randn(6, 8), bias, down, up, 2.0))


@pytest.mark.parametrize("shape", [(5, 32), (2, 5, 32)])
def test_a_model_may_add_to_an_output_in_place(shape: tuple[int, ...]) -> None:
    """As Llama 4 does with those of its shared expert; alone, and where several layers have one input."""
    theirs = adapted(1).double()
    ours = fused(theirs)
    x = torch.linspace(-1, 1, 32, dtype=torch.float64) * torch.ones(shape, dtype=torch.float64)
    for path in ("mlp.down_proj", "self_attn.q_proj"):
        gradients = []
        for model in (theirs, ours):
            layer: Any = model.get_submodule(f"base_model.model.model.layers.0.{path}")
            rows = x.repeat_interleave(2, -1) if path == "mlp.down_proj" else x
            out = layer(rows)
            out.add_(rows[..., : out.shape[-1]])
            model.zero_grad()
            out.square().sum().backward()
            gradients.append({n: p.grad for n, p in layer.named_parameters() if p.grad is not None})
        assert difference(gradients[1], gradients[0]) < 1e-13


def test_it_makes_no_pass_over_an_output() -> None:
    """The scaling and the sum are parts of products; q, k and v read their input once for A, and for its gradient."""

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(func.name())
            return func(*args, **(kwargs or {}))

    layer = fused(adapted(1)).base_model.model.model.layers[0].self_attn
    x = torch.randn(1, 8, 32, requires_grad=True)
    names: list[str] = []
    with Calls():
        outputs = [projection(x) for projection in (layer.q_proj, layer.k_proj, layer.v_proj)]
        forward, names = names, []
        torch.cat(outputs, 2).sum().backward()
    assert [name for name in forward if "mm" in name] == ["aten::mm", *["aten::addmm_", "aten::addmm_"] * 3]
    assert "aten::add.Tensor" not in forward
    assert not any(name.startswith("aten::mul.") for name in forward)
    assert names.count("aten::addmm_") == 4  # the adapters' gradient of x, then that of each layer into it
    assert names.count("aten::addmm") == 1 + 3  # the gradients of all A, and of each B


def test_layers_called_with_other_inputs_compute_alone() -> None:
    theirs = adapted(1).double()
    ours = fused(theirs)
    x, y = torch.randn(2, 1, 5, 32, dtype=torch.double)

    def outputs(model: Any) -> list[Tensor]:
        attention = model.base_model.model.model.layers[0].self_attn
        calls = [(attention.q_proj, x), (attention.k_proj, y), (attention.q_proj, x), (attention.q_proj, x)]
        return [layer(given) for layer, given in (*calls, (attention.v_proj, y))]

    torch.testing.assert_close(outputs(ours), outputs(theirs), rtol=1e-12, atol=1e-12)


def test_layers_of_one_input_may_be_scaled_each_its_own_way() -> None:
    """Their A have one product in the backward, whose factor is one if they have one."""
    theirs = adapted(alpha_pattern={"k_proj": 4, "up_proj": 20}).double()
    ours = fused(theirs)
    feed_forward = ours.base_model.model.model.layers[0].mlp
    assert feed_forward.gate_proj.scaling != feed_forward.up_proj.scaling
    assert difference(step(ours), step(theirs)) < 1e-13


def test_an_unused_output_leaves_its_adapter_without_a_gradient() -> None:
    theirs = adapted(1).double()
    ours = fused(theirs)
    x = torch.randn(1, 5, 32, dtype=torch.double)

    def gradients(model: Any) -> dict[str, Any]:
        attention, rows = model.base_model.model.model.layers[0].self_attn, x.clone().requires_grad_()
        query, _, value = (layer(rows) for layer in (attention.q_proj, attention.k_proj, attention.v_proj))
        (query.sum() + value.square().sum()).backward()
        return {"x": rows.grad, **{name: one.grad for name, one in attention.named_parameters() if "lora" in name}}

    some, other = gradients(ours), gradients(theirs)
    assert [name for name in some if some[name] is None] == [name for name in other if other[name] is None] != []
    for name in other:
        if other[name] is not None:
            torch.testing.assert_close(some[name], other[name], rtol=1e-12, atol=1e-12)


def test_no_rows_have_gradients_of_zero() -> None:
    """An adapted head computes none where a rank's rows have no targets."""
    head = fused(adapted(1, target_modules=["lm_head"])).base_model.model.lm_head
    x = torch.zeros(0, 32, requires_grad=True)
    y = head(x)
    y.sum().backward()
    assert (y.shape, x.grad.shape) == ((0, 64), (0, 32))
    assert all(not weight.grad.any() for name, weight in head.named_parameters() if "lora" in name)


@pytest.mark.parametrize("lora", [{"lora_dropout": 0.1}, {"use_dora": True}])
def test_dropout_and_dora_are_left_to_peft(lora: dict[str, Any]) -> None:
    model = fused(adapted(1, **lora))
    assert fused_of(model)
    assert not any(layer.part() for layer in fused_of(model))


def test_what_others_do_around_a_layer_is_kept() -> None:
    """ZeRO-3 gathers weights and tensor parallel sums in hooks, or in a forward of their own."""
    model = fused(adapted(1))
    first = fused_of(model)[0]
    assert first.part()
    with model.disable_adapter():
        assert not first.part()
    with_hook = first.lora_B["default"].register_forward_pre_hook(lambda *_: None)
    assert not first.part()
    with_hook.remove()
    own: Any = first.base_layer
    own.forward = lambda x: nn.functional.linear(x, own.weight) + 1
    assert not first.part()
    x = torch.zeros(1, 3, 32)
    assert torch.equal(first(x), torch.ones(1, 3, 32))


@pytest.mark.parametrize(
    ("recomputed", "schedule", "fuses"), [("selective", "1f1b", 0), (True, "zero_bubble", 0), (True, "1f1b", 7)]
)
def test_not_where_products_are_kept_or_gradients_split(recomputed: Any, schedule: str, fuses: int) -> None:
    model = adapted(1)
    fuse_for(model, recomputed, schedule)
    assert len(fused_of(model)) == fuses


def test_recomputed_layers_give_the_same() -> None:
    model = fused(adapted())
    expected = step(model)
    model.base_model.model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    again = step(model)
    assert all(torch.equal(again[name], expected[name]) for name in expected)


def test_an_output_that_is_not_used_has_no_gradient() -> None:
    model = fused(adapted(1))
    attention = model.base_model.model.model.layers[0].self_attn
    x = torch.randn(1, 5, 32, requires_grad=True)
    assert isinstance(attention.q_proj.siblings, Siblings)
    attention.k_proj(x).sum().backward()
    assert attention.q_proj.lora_A["default"].weight.grad is None
    assert attention.k_proj.lora_A["default"].weight.grad is not None
    assert x.grad is not None


OPERATORS = {"fp32": (torch.float32, False), "bf16": (torch.float32, True), "bf16 weights": (torch.bfloat16, True)}


@pytest.mark.parametrize("kind", OPERATORS)
def test_the_host_starts_fewer_operators_than_peft(kind: str) -> None:
    """In a step of two layers, those that only call others included: all are time in which a GPU may wait."""
    frozen, autocast = OPERATORS[kind]
    theirs = adapted()
    for name, parameter in theirs.named_parameters():
        if "lora_" not in name:
            parameter.data = parameter.data.to(frozen)
    ours = fused(theirs)

    def operators(model: Any) -> Counter[str]:
        step(model, autocast)
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler, cast_once():
            step(model, autocast)
        return Counter({event.key: event.count for event in profiler.key_averages() if event.key.startswith("aten::")})

    mine, peft = operators(ours), operators(theirs)
    assert mine.total() < 0.75 * peft.total()
    assert mine["aten::to"] < peft["aten::to"] or not autocast
    assert mine["aten::mm"] + mine["aten::addmm"] + mine["aten::addmm_"] < peft["aten::mm"]
