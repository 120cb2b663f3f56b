"""Documents of one packed row are strangers: every attention path, exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, Gemma2Config, MambaConfig

from finetune.errors import UserError
from finetune.models.attention import NAME, choose_attention
from finetune.models.layers import recompute_activations

LENGTHS = (7, 21, 3, 12)
PATHS = (NAME, "sdpa", "eager")


def load(made: Path, name: str, attention: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(made / name, attn_implementation=attention, dtype=torch.float32).train()


def row(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 380, (1, sum(LENGTHS)), generator=generator)
    return ids, torch.cat([torch.arange(length) for length in LENGTHS])[None]


def logits(model: Any, ids: torch.Tensor, positions: torch.Tensor, attention: str) -> torch.Tensor:
    lengths = {"document_lengths": LENGTHS} if attention == NAME else {}
    return model(input_ids=ids, position_ids=positions, use_cache=False, **lengths).logits[0]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("attention", PATHS)
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_changed_token_moves_nothing_in_another_document(
    made: Path, name: str, attention: str, checkpointing: bool
) -> None:
    model = load(made, name, attention)
    if checkpointing:
        recompute_activations(model)
    ids, positions = row()
    before = logits(model, ids, positions, attention)
    changed = ids.clone()
    changed[0, 2] = 5 if ids[0, 2] != 5 else 6
    after = logits(model, changed, positions, attention)
    assert not torch.equal(before[2:7], after[2:7]), "the changed document itself must change"
    assert torch.equal(before[7:], after[7:]), "bitwise: nothing of document 1 may enter documents 2 to 4"


@pytest.mark.parametrize("attention", PATHS)
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_no_gradient_crosses_a_document(made: Path, name: str, attention: str) -> None:
    model = load(made, name, attention)
    ids, positions = row()
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    lengths = {"document_lengths": LENGTHS} if attention == NAME else {}
    output = model(inputs_embeds=embedded, position_ids=positions, use_cache=False, **lengths).logits[0, 7:28]
    output.square().sum().backward()
    touched = embedded.grad[0].abs().sum(-1) > 0
    assert touched[7:28].all()
    assert not touched[:7].any()
    assert not touched[28:].any()


@pytest.mark.parametrize("attention", PATHS)
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_packed_equals_one_document_at_a_time(made: Path, name: str, attention: str) -> None:
    model, alone = load(made, name, attention), load(made, name, "sdpa")
    ids, positions = row()
    packed = logits(model, ids, positions, attention)
    apart = torch.cat([alone(input_ids=piece, use_cache=False).logits[0] for piece in ids.split(LENGTHS, dim=1)])
    torch.testing.assert_close(packed, apart, rtol=0, atol=2e-6)


def test_the_trap_itself_with_a_cache_documents_see_each_other(made: Path) -> None:
    """Why every training forward says use_cache=False; if this fails, transformers has mended it."""
    model = load(made, "llama", "sdpa")
    ids, positions = row()
    cached = model(input_ids=ids, position_ids=positions, past_key_values=DynamicCache(config=model.config)).logits[0]
    assert (cached - logits(model, ids, positions, "sdpa")).abs().max() > 1e-3


def test_documents_attention_refuses_to_guess(made: Path) -> None:
    model = load(made, "llama", NAME)
    ids, positions = row()
    with pytest.raises(ValueError, match="could see each other"):
        model(input_ids=ids, position_ids=positions, use_cache=False)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_generation_with_padding_equals_sdpa(made: Path, name: str) -> None:
    """The same model evaluates by generating: there it takes sdpa's masks, sliding window included."""
    ids, _ = row()
    ids = ids[:, :24].reshape(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    ours, theirs = (load(made, name, attention).eval() for attention in (NAME, "sdpa"))
    with torch.no_grad():
        a, b = (m(input_ids=ids, attention_mask=mask, use_cache=False).logits for m in (ours, theirs))
    torch.testing.assert_close(a[:, 6:], b[:, 6:], rtol=0, atol=2e-6)


def classes(config: Any) -> Any:
    return AutoModelForCausalLM._model_mapping[type(config)]


def test_the_choice_says_why() -> None:
    soft_capped = Gemma2Config()
    choice = choose_attention("auto", classes(soft_capped), soft_capped, "cpu", False)
    assert choice.implementation == "eager"
    assert "soft-capped" in choice.reason
    with pytest.raises(UserError, match=r"model.attention: `documents` does not fit Gemma2ForCausalLM"):
        choose_attention("documents", classes(soft_capped), soft_capped, "cpu", False)
    with pytest.raises(UserError, match="needs a CUDA device"):
        choose_attention("flash_attention_2", classes(soft_capped), soft_capped, "cpu", True)


def test_an_architecture_that_carries_state_gets_one_document_per_forward() -> None:
    config = MambaConfig()
    choice = choose_attention("auto", classes(config), config, "cpu", False)
    assert not choice.isolates_documents
    assert "carries state along the row" in choice.reason
