"""The ways that need a GPU: equal to one document at a time, logits and gradients; and one compilation."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, GptOssConfig, LlamaConfig, MistralConfig

from finetune.data.batch import row_places
from finetune.models.activations import recompute_activations
from finetune.models.attention import FLEX, VARLEN, choose_attention
from finetune.models.attention.choice import AttentionChoice
from finetune.models.attention.kernels import flash_3_missing
from finetune.models.compiled import compilations, compile_layers

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

TINY = {
    "vocab_size": 384,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
CONFIGS = {
    "llama": LlamaConfig(**TINY),
    "mistral": MistralConfig(**TINY, sliding_window=70),
    "gemma2": Gemma2Config(**TINY, sliding_window=70, attn_logit_softcapping=0.5, query_pre_attn_scalar=32),
    # Every token takes every expert: rounding would decide between them.
    "gpt_oss": GptOssConfig(**TINY, sliding_window=70, num_local_experts=4, num_experts_per_tok=4, pad_token_id=0),
}
ROWS = ((7, 300, 1, 204), (512,), (128, 128, 256), (3, 130, 200, 100, 79))  # of 512 tokens
CASES = [("llama", "varlen"), ("mistral", "varlen"), ("llama", "flex"), ("mistral", "flex"), ("gemma2", "flex")]
CASES += [("gpt_oss", "varlen"), ("gpt_oss", "flex")]
# Last: torch has these kernels from then on.
CASES += [(name, "flash_attention_3") for name in ("llama", "mistral", "gpt_oss")]


def choose(name: str, asked: str, longest: int | None = None) -> AttentionChoice:
    config = CONFIGS[name]
    kind = AutoModelForCausalLM._model_mapping[type(config)]
    if asked == "flash_attention_3" and (torch.cuda.get_device_capability()[0] != 9 or flash_3_missing()):
        pytest.skip(flash_3_missing() or "needs a Hopper GPU")
    return choose_attention(asked, kind, config, "cuda", half_precision=True, longest=longest)


def model_with(name: str, attention: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    config = deepcopy(CONFIGS[name])  # a model writes its attention into it
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("sinks"):
            torch.nn.init.normal_(parameter)  # those of a new model are near 0
    return model.to("cuda", dtype).train()


def row(lengths: tuple[int, ...], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(3, 380, (1, sum(lengths)), generator=torch.Generator().manual_seed(seed))
    return ids.cuda(), torch.cat([torch.arange(length) for length in lengths])[None].cuda()


def outcome(model: Any, lengths: tuple[int, ...], choice: AttentionChoice | None) -> list[torch.Tensor]:
    """Logits, then gradients; choice None: one document at a time, under eager attention."""
    ids, positions = row(lengths)
    model.zero_grad()
    if choice is None:
        logits = torch.cat([model(input_ids=piece, use_cache=False).logits for piece in ids.split(lengths, 1)], 1)
    else:
        made = choice.forward_arguments(lengths)
        logits = model(input_ids=ids, position_ids=positions, use_cache=False, **made).logits
    logits.float().logsumexp(-1).sum().backward()
    return [logits.detach().float(), *(p.grad.float() for p in model.parameters())]


def relative(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> list[float]:
    return [((a - b).norm() / b.norm()).item() for a, b in zip(ours, theirs, strict=True)]


@pytest.mark.parametrize(("name", "asked"), CASES)
@pytest.mark.parametrize("lengths", ROWS)
def test_equal_to_one_document_at_a_time(name: str, asked: str, lengths: tuple[int, ...]) -> None:
    """In bf16, no farther from the truth (fp32, one document at a time) than eager attention in bf16 is, give or take
    half as much again."""
    choice = choose(name, asked)
    truth = outcome(model_with(name, "eager", torch.float32), lengths, None)
    eager = relative(outcome(model_with(name, "eager", torch.bfloat16), lengths, None), truth)
    ours = relative(outcome(model_with(name, choice.implementation, torch.bfloat16), lengths, choice), truth)
    for distance, allowed in zip(ours, eager, strict=True):
        assert distance <= 1.5 * allowed + 1e-3


@pytest.mark.parametrize("name", list(CONFIGS))
@pytest.mark.parametrize("lengths", ROWS)
def test_flex_in_fp32_equals_one_document_at_a_time(name: str, lengths: tuple[int, ...]) -> None:
    choice = choose(name, "flex")
    truth = outcome(model_with(name, "eager", torch.float32), lengths, None)
    ours = relative(outcome(model_with(name, FLEX, torch.float32), lengths, choice), truth)
    assert max(ours) < 1e-5


OWN, PREFIXES = (200, 90, 130, 1, 91), (0, 120, 0, 77, 0)  # of documents that begin with some of the one before


def outcome_with_prefixes(model: Any, choice: AttentionChoice | None) -> list[torch.Tensor]:
    """Logits of each whole document, then gradients; choice None: each alone, under eager attention."""
    ids, _ = row(OWN)
    places = torch.from_numpy(row_places(OWN, PREFIXES)).cuda()
    lengths = [own + prefix for own, prefix in zip(OWN, PREFIXES, strict=True)]
    model.zero_grad()
    if choice is None:
        documents = ids[:, places].split(lengths, 1)
        logits = torch.cat([model(input_ids=whole, use_cache=False).logits for whole in documents], 1)
    else:
        made = choice.forward_arguments(OWN, PREFIXES)
        spans = zip(PREFIXES, lengths, strict=True)
        positions = torch.cat([torch.arange(prefix, length) for prefix, length in spans])[None].cuda()
        logits = model(input_ids=ids, position_ids=positions, use_cache=False, **made).logits[:, places]
    logits.float().logsumexp(-1).sum().backward()
    return [logits.detach().float(), *(p.grad.float() for p in model.parameters())]


@pytest.mark.parametrize(("name", "asked"), CASES)
def test_shared_beginnings_are_equal_to_one_document_at_a_time(name: str, asked: str) -> None:
    """As above; in fp32 where the kernel can, exactly. Of varlen it shows that the last query sees the last key."""
    choice = choose(name, asked)
    assert choice.not_shared is None
    truth = outcome_with_prefixes(model_with(name, "eager", torch.float32), None)
    if asked == "flex":
        ours = relative(outcome_with_prefixes(model_with(name, FLEX, torch.float32), choice), truth)
        assert max(ours) < 1e-5
    eager = relative(outcome_with_prefixes(model_with(name, "eager", torch.bfloat16), None), truth)
    ours = relative(outcome_with_prefixes(model_with(name, choice.implementation, torch.bfloat16), choice), truth)
    for distance, allowed in zip(ours, eager, strict=True):
        assert distance <= 1.5 * allowed + 1e-3


@pytest.mark.parametrize(("name", "asked"), CASES)
def test_a_changed_token_moves_nothing_in_another_document(name: str, asked: str) -> None:
    choice, lengths = choose(name, asked), ROWS[0]
    model = model_with(name, choice.implementation, torch.bfloat16)
    ids, positions = row(lengths)
    changed = ids.clone()
    changed[0, 2] = 5 if ids[0, 2] != 5 else 6
    made = choice.forward_arguments(lengths)
    before, after = (
        model(input_ids=given, position_ids=positions, use_cache=False, **made).logits[0] for given in (ids, changed)
    )
    assert not torch.equal(before[2:7], after[2:7])
    assert torch.equal(before[7:], after[7:])


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("name", "asked"), CASES)
def test_compiled_layers_are_one_graph_for_rows_of_other_documents(name: str, asked: str, checkpointing: bool) -> None:
    torch.compiler.reset()
    choice = choose(name, asked, longest=512)
    model = model_with(name, choice.implementation, torch.bfloat16)
    plain = model_with(name, choice.implementation, torch.bfloat16)
    if checkpointing:
        recompute_activations(model, True)
    compile_layers(model)
    start, counts = compilations(), []
    for lengths in ROWS:
        ours = relative(outcome(model, lengths, choice), outcome(plain, lengths, choose(name, asked)))
        assert max(ours) < 2e-2  # the compiler fuses, and so rounds to bf16 elsewhere
        counts.append(compilations() - start)
    kinds = 2 if name in ("gemma2", "gpt_oss") else 1  # of layers
    assert counts[0] >= kinds
    assert counts == counts[:1] * len(ROWS)


def test_varlen_is_what_auto_takes_where_the_device_can() -> None:
    wanted = VARLEN if torch.cuda.get_device_capability() >= (8, 0) else FLEX
    assert choose("llama", "auto").implementation == wanted
    assert choose("gpt_oss", "auto").implementation == wanted
    assert choose("gemma2", "auto").implementation == FLEX
