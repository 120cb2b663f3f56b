"""FLOPs are those that torch counts while a model runs, less the pairs that causal attention leaves out."""

from __future__ import annotations

import inspect
from dataclasses import replace
from itertools import accumulate
from typing import Any

import mtp_bases
import numpy as np
import peft
import pytest
import tiny
import torch
from counted_flops import added_product
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from usual import usual

from finetune.data.batch import Batch, collate, with_ahead
from finetune.data.samples import Example, Sequence
from finetune.engine.hardware import peak_tflops, shipped_hardware
from finetune.models.activations import recompute_activations
from finetune.models.attention import DOCUMENTS
from finetune.models.attention.per_document import prepare
from finetune.models.base_config import without_weights
from finetune.models.flops import ModelFlops, causal_pairs, model_flops
from finetune.models.head import TokenLoss
from finetune.models.loss_model import CausalLMWithLoss, TargetTokens
from finetune.models.mtp import attach_head
from finetune.models.tiny_config import tiny_config

LENGTHS = (7, 16, 3)
MIXTRAL = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
QWEN3_MOE = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
QWEN3_MOE |= {"decoder_sparse_step": 1}
GEMMA3 = {"model_type": "gemma3_text", "head_dim": 16, "sliding_window": 8}
aten = torch.ops.aten
# transformers 5.17 makes the angles of rotary positions by a product, later versions element by element.
ANGLES = 2 * 8 * sum(LENGTHS) if " @ " in inspect.getsource(LlamaRotaryEmbedding.forward) else 0


def forward_flops(query: Any, key: Any, value: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Of the CPU's fused attention, which torch's counter does not know; as it counts CUDA's: every pair."""
    return 2 * query[0] * query[1] * query[2] * key[2] * (query[3] + value[3])


def backward_flops(_: Any, query: Any, key: Any, value: Any, *__: Any, out_shape: Any = None, **___: Any) -> int:
    """Scores again, gradients of queries and keys; of weights and values."""
    return 2 * query[0] * query[1] * query[2] * key[2] * (3 * query[3] + 2 * value[3])


FUSED = {
    aten._scaled_dot_product_flash_attention_for_cpu: forward_flops,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: backward_flops,
}


def row() -> Batch:
    rng, examples = np.random.default_rng(0), []
    for n in LENGTHS:
        ids = rng.integers(3, 384, n)
        examples.append(Example("a", n, 0, (Sequence(ids.astype(np.int32), np.arange(n) > n // 3),)))
    return collate(examples)


def made(config: dict[str, Any], implementation: str, adapted: Any) -> Any:
    torch.manual_seed(0)
    shape = AutoConfig.for_model(**{**tiny._SHAPE, "model_type": "llama", **config})
    model = AutoModelForCausalLM.from_config(shape, attn_implementation=implementation)
    if "num_experts_per_tok" in config:
        model.set_experts_implementation("eager")  # grouped products are none that torch's counter knows
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=adapted)) if adapted else model


def counted(model: Any, batch: Batch, implementation: str) -> tuple[int, int]:
    """(products, fused attention) by torch's counter, forward and backward."""
    arguments = prepare(batch.sequence_lengths) if implementation == DOCUMENTS else {}
    targets = TargetTokens(batch.targets.positions, batch.targets.ids, TokenLoss(), ahead=batch.ahead)
    with FlopCounterMode(display=False, custom_mapping={**FUSED, aten.addmm_: added_product}) as counter:
        inputs = {**batch.inputs, "use_cache": False, **arguments}
        outputs = CausalLMWithLoss(model)(targets=targets, **inputs)
        (outputs.total if outputs.ahead is None else outputs.total + outputs.ahead.total).backward()
    by_operator = counter.get_flop_counts()["Global"]
    fused = sum(count for operator, count in by_operator.items() if operator in FUSED)
    return sum(by_operator.values()) - fused, fused


def parts(flops: ModelFlops, batch: Batch) -> tuple[float, float]:
    """(products, attention) that are executed."""
    lengths, supervised = batch.sequence_lengths, batch.counts["target_tokens"]
    whole = flops.of(lengths, lengths, supervised).hardware
    products = replace(flops, attention=()).of(lengths, lengths, supervised).hardware
    return products, whole - products


@pytest.mark.parametrize(
    ("config", "implementation", "adapted", "checkpointing"),
    [
        ({}, DOCUMENTS, None, False),
        ({}, DOCUMENTS, None, True),
        ({}, DOCUMENTS, "all-linear", False),
        ({}, DOCUMENTS, "all-linear", True),
        ({}, DOCUMENTS, ["q_proj", "v_proj"], False),
        ({}, DOCUMENTS, ["down_proj"], False),
        ({"tie_word_embeddings": True}, DOCUMENTS, None, False),
        ({}, "sdpa", None, False),
        ({}, "eager", None, False),
        ({"model_type": "phi3"}, DOCUMENTS, None, False),
        ({"model_type": "mistral", "sliding_window": 8}, DOCUMENTS, None, False),
        (GEMMA3, DOCUMENTS, ["q_proj", "v_proj"], False),
        (MIXTRAL, DOCUMENTS, None, False),
        (MIXTRAL, DOCUMENTS, None, True),
        (QWEN3_MOE, DOCUMENTS, None, False),
    ],
)
def test_hardware_flops_are_what_torch_counts(
    config: dict[str, Any], implementation: str, adapted: Any, checkpointing: bool
) -> None:
    model, batch = made(config, implementation, adapted), row()
    if checkpointing:
        recompute_activations(model, True)
    products, attention = parts(model_flops(model.train(), implementation, checkpointing), batch)
    torch_products, torch_attention = counted(model, batch, implementation)
    if implementation == "eager":  # its attention is made of plain products
        torch_products, torch_attention = torch_products - int(attention), int(attention)
    assert products == torch_products - ANGLES
    # torch counts every pair of a document; the kernel skips those above the diagonal, unless there is a band.
    pairs = sum(n * n for n in LENGTHS)
    executed = causal_pairs(LENGTHS, None)
    if config.get("sliding_window"):
        executed = sum(n * n if n > 8 else causal_pairs([n], None) for n in LENGTHS)
    if implementation != DOCUMENTS:
        pairs = executed = 1
    assert attention == pytest.approx(torch_attention * executed / pairs, rel=1e-12)


@pytest.mark.parametrize("adapted", [None, ["q_proj", "v_proj", "fc"]])
@pytest.mark.parametrize("checkpointing", usual([False, True], False))
def test_a_head_that_predicts_ahead_is_one_more_layer(adapted: list[str] | None, checkpointing: bool) -> None:
    """With one more product of the LM head for each target, none of which is the second token of its document."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**{**mtp_bases.BASES["glm4_moe"], "first_k_dense_replace": 9})
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation=DOCUMENTS)
    attach_head(model)
    if adapted:
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=adapted))
    if checkpointing:
        recompute_activations(model, True)
    batch = with_ahead(row())
    assert batch.ahead is not None
    assert len(batch.ahead.ids) == len(batch.targets.ids)
    products, attention = parts(model_flops(model.train(), DOCUMENTS, checkpointing), batch)
    torch_products, torch_attention = counted(model, batch, DOCUMENTS)
    assert products == torch_products - 2 * ANGLES
    pairs = sum(n * n for n in LENGTHS)
    assert attention == pytest.approx(torch_attention * causal_pairs(LENGTHS, None) / pairs, rel=1e-12)


def test_model_flops_of_a_full_model_are_three_forwards_of_causal_attention() -> None:
    model, batch = made({}, DOCUMENTS, None), row()
    layers = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and ".layers." in name)
    tokens, supervised = batch.counts["tokens"], batch.counts["target_tokens"]
    products = 6 * (layers * tokens + 384 * 64 * supervised)
    attention = 3 * 2 * (4 * 16 * 2 * 2) * sum(n * (n + 1) // 2 for n in LENGTHS)  # layers, heads, size, two products
    assert model_flops(model, DOCUMENTS, False).of(LENGTHS, LENGTHS, supervised).model == products + attention


def test_lora_needs_no_gradients_of_what_is_frozen() -> None:
    batch = row()
    full, lora = (
        model_flops(made({}, DOCUMENTS, adapted), DOCUMENTS, False)
        .of(LENGTHS, LENGTHS, batch.counts["target_tokens"])
        .model
        for adapted in (None, "all-linear")
    )
    assert 2 / 3 < lora / full < 0.75  # two of three products, the adapters' own besides


def test_checkpointing_and_padding_are_hardware_flops_alone() -> None:
    plain, again = (model_flops(made({}, DOCUMENTS, None), DOCUMENTS, checkpointing) for checkpointing in (False, True))
    assert again.of(LENGTHS, LENGTHS, 9).model == plain.of(LENGTHS, LENGTHS, 9).model
    assert again.of(LENGTHS, LENGTHS, 9).hardware > 1.2 * plain.of(LENGTHS, LENGTHS, 9).hardware
    padded = plain.of(LENGTHS, (*LENGTHS, 6), 9)
    assert padded.model == plain.of(LENGTHS, LENGTHS, 9).model
    assert padded.hardware > plain.of(LENGTHS, LENGTHS, 9).hardware


def test_adapters_that_compute_full_weights_have_no_known_hardware_flops() -> None:
    model = peft.get_peft_model(made({}, DOCUMENTS, None), peft.LoraConfig(target_modules=["q_proj"], use_dora=True))
    found = model_flops(model, DOCUMENTS, False).of(LENGTHS, LENGTHS, 9)
    assert found.model > 0
    assert found.hardware != found.hardware


@pytest.mark.parametrize("window", [None, 1, 4, 100])
def test_pairs_are_those_of_a_mask(window: int | None) -> None:
    ends = list(accumulate(LENGTHS))
    document = np.searchsorted(ends, np.arange(ends[-1]), side="right")
    place = np.arange(ends[-1])
    distance = place[:, None] - place[None, :]
    seen = (document[:, None] == document[None, :]) & (distance >= 0)
    if window is not None:
        seen &= distance < window
    assert causal_pairs(LENGTHS, window) == seen.sum()


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H200", "H200 SXM"),
        ("NVIDIA A100-SXM4-40GB", "A100 SXM 40GB"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe 80GB"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("Tesla V100-SXM2-32GB", "V100 SXM2 32GB"),
        ("Tesla T4", "T4"),
        ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000 Blackwell Workstation"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000 Blackwell Server"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "RTX PRO 6000 Blackwell Max-Q"),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA L40", None),
        ("NVIDIA A10G", None),
        ("NVIDIA GB300", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", None),
        ("cpu", None),
    ],
)
def test_devices_are_known_by_torchs_name_or_not_at_all(name: str, device: str | None) -> None:
    key = shipped_hardware().key_of(name)
    assert (shipped_hardware().devices[key].name if key else None) == device


def test_peaks_are_of_the_type_of_the_products() -> None:
    peaks = [peak_tflops("NVIDIA A100-SXM4-80GB", dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)]
    assert peaks == [312, 312, 19.5]
    assert peak_tflops("Tesla T4", torch.bfloat16) is None
    assert peak_tflops("a device of tomorrow", torch.bfloat16) is None
    assert all(device.source.startswith("https://") for device in shipped_hardware().devices.values())


@pytest.mark.parametrize(
    ("model_type", "attending"), [("mamba", 0), ("nemotron_h", 1), ("qwen3_next", 1), ("gemma4_text", 2)]
)
def test_of_recurrent_layers_the_products_with_weights_are_counted(model_type: str, attending: int) -> None:
    """No layer of Mamba has heads; one of each kind is in the hybrids' tiny copies; Gemma 4's differ in their sizes."""
    flops = model_flops(without_weights(tiny_config(AutoConfig.for_model(model_type))), "sdpa", False)
    assert len(flops.attention) == attending
    assert flops.of([5], [5], 3).model > 0
    assert flops.of([10], [10], 3).model > flops.of([5], [5], 3).model
