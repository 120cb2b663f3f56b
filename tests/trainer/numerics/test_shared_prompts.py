"""What a pair's sequences begin with is computed once, and nothing else changes: losses, gradients, isolation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import peft
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.data.batch import Batch, collate, row_places
from finetune.data.samples import Example, Sequence, SharedPrompt, shared_prefix
from finetune.models.activations import recompute_activations
from finetune.models.attention import DOCUMENTS, FLEX, VARLEN, AttentionChoice, choose_attention, kernels
from finetune.models.attention.per_document import seen
from finetune.models.loss_model import CausalLMWithLoss, Outputs
from finetune.objectives.forward import ForwardPass
from finetune.objectives.objective import NLL, Objective, Term
from finetune.objectives.preference import pairs

WINDOW = 8  # shorter than most answers
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "mistral": {"model_type": "mistral", "sliding_window": WINDOW},
    "gemma2": {"model_type": "gemma2", "head_dim": 16, "sliding_window": WINDOW}
    | {"attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 16},
    "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 64}
    | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}
Shape = tuple[int, int, int]  # of a pair: tokens that both begin with, of the first's rest, of the second's
SHAPES: list[Shape] = [(20, 9, 14), (1, 3, 2), (0, 5, 7), (33, 1, 1)]
quick = settings(derandomize=True, max_examples=40)


def pair(shape: Shape, seed: int = 0) -> Example:
    """The last tokens of the shared beginning are trained, too: both answers begin alike."""
    rng, (shared, *rests) = np.random.default_rng(seed), shape
    prefix = rng.integers(3, 380, shared)
    sequences = []
    for first, rest in zip((380, 381), rests, strict=True):  # they differ from there on
        ids = np.concatenate([prefix, [first], rng.integers(3, 380, rest - 1)]).astype(np.int32)
        sequences.append(Sequence(ids, np.arange(len(ids)) >= max(1, shared - 4)))
    return Example("f", seed, 0, tuple(sequences))


def row_of(shapes: list[Shape]) -> list[Example]:
    return [pair(shape, seed) for seed, shape in enumerate(shapes)]


# Tokens of a prompt, and of each of its samples; the last is alone in its micro-batch.
GROUPS: list[tuple[int, tuple[int, ...]]] = [(20, (9, 14, 1, 6)), (1, (3, 2)), (33, (1, 1, 5)), (7, (4,))]


def samples_of(groups: list[tuple[int, tuple[int, ...]]]) -> list[Example]:
    """Samples of prompts, some of which begin alike: only the prompt counts as shared."""
    examples = []
    for key, (length, samples) in enumerate(groups):
        rng = np.random.default_rng(key)
        prompt = rng.integers(3, 380, length)
        for sample, count in enumerate(samples):
            answer = np.concatenate([[380 + sample % 2], rng.integers(3, 380, count - 1)])
            ids = np.concatenate([prompt, answer]).astype(np.int32)
            sequence = Sequence(ids, np.arange(len(ids)) >= length)
            examples.append(Example("f", key, 0, (sequence,), prompt=SharedPrompt(key, length)))
    return examples


def weighted(outputs: Outputs, batch: Batch) -> dict[str, Term]:
    """Sum of the sequences' losses, each with another weight, also negative."""
    weights = torch.linspace(-1, 2, len(batch.sequence_tokens)).to(outputs.token_losses.dtype)
    return {"loss": Term((sequence_losses(outputs, batch) * weights).sum(), "examples", 1.0)}


def config_of(name: str) -> Any:
    return AutoConfig.for_model(**{**tiny._SHAPE, **CONFIGS[name]})


def model_of(name: str, implementation: str = DOCUMENTS, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config_of(name), attn_implementation=implementation, dtype=dtype).train()


def choice_of(name: str, asked: str = "documents") -> AttentionChoice:
    config = config_of(name)
    return choose_attention(asked, AutoModelForCausalLM._model_mapping[type(config)], config, "cpu", False)


def log_odds(outputs: Outputs, batch: Batch) -> dict[str, Term]:
    """Not linear in the losses of tokens, as objectives on pairs are."""
    first, second = pairs(sequence_losses(outputs, batch))
    return {"loss": Term(torch.nn.functional.softplus(first - second).sum() + 0.1 * first.sum(), "examples", 1.0)}


def sequence_losses(outputs: Outputs, batch: Batch) -> Tensor:  # (D,)
    zeros = outputs.token_losses.new_zeros(len(batch.sequence_tokens))
    return zeros.index_add(0, batch.targets.sequence, outputs.token_losses)


def losses_of(
    model: Any, choice: AttentionChoice, examples: list[Example], shares: bool, head: str = "plain"
) -> tuple[Tensor, Tensor]:
    """Returns the losses of each sequence (D,), and that of the objective."""
    batch, terms = collate(examples, shares_prompts=shares), weighted if examples[0].prompt else log_odds
    forward = ForwardPass(choice, Objective(terms, token_loss=NLL, differentiable=True))
    outputs = forward(CausalLMWithLoss(model, head), batch)
    return sequence_losses(outputs, batch), forward.objective.loss(terms(outputs, batch), batch.counts)


def check_equal(
    model: Any, choice: AttentionChoice, examples: list[Example], tolerance: float, head: str = "plain"
) -> None:
    """Losses and gradients of both layouts; relative to the largest of each tensor."""
    found = []
    for shares in (True, False):
        model.zero_grad(set_to_none=True)
        each, loss = losses_of(model, choice, examples, shares, head)
        loss.backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.requires_grad and p.grad is not None]
        found.append([each.detach(), loss.detach(), *gradients])
    assert len(found[0]) == len(found[1]) > 4
    largest = max(gradient.abs().max().item() for gradient in found[1][2:])
    for ours, theirs in zip(*found, strict=True):
        scale = max(theirs.abs().max().item(), 1e-2 * largest)
        assert (ours - theirs).abs().max().item() <= tolerance * scale


# --- gradients


@pytest.mark.parametrize("checkpointing", [False, True, "selective"])
@pytest.mark.parametrize("mode", ["full", "lora"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_losses_and_gradients_are_those_of_whole_sequences(name: str, mode: str, checkpointing: Any) -> None:
    model, choice = model_of(name), choice_of(name)
    assert choice.not_shared is None
    if mode == "lora":
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    if checkpointing:
        model.enable_input_require_grads()
        recompute_activations(model, checkpointing)
    check_equal(model, choice, row_of(SHAPES), 5e-6, "chunked" if mode == "full" else "plain")


@pytest.mark.parametrize("head", ["plain", "chunked"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_samples_of_a_prompt_have_the_losses_and_gradients_of_whole_sequences(name: str, head: str) -> None:
    examples = samples_of(GROUPS)
    whole, shared = collate(examples), collate(examples, shares_prompts=True)
    assert shared.prefix_lengths == (0, 20, 20, 20, 0, 1, 0, 33, 33, 0)
    assert shared.inputs["input_ids"].shape[1] == whole.inputs["input_ids"].shape[1] - 3 * 20 - 1 - 2 * 33
    places = row_places(shared.sequence_lengths, shared.prefix_lengths)
    for column, values in shared.inputs.items():
        assert torch.equal(values[:, places], whole.inputs[column])
    check_equal(model_of(name), choice_of(name), examples, 5e-6, head)


@pytest.fixture(scope="module")
def in_fp64() -> tuple[Any, AttentionChoice]:
    """GPT-2, whose norms do not round to fp32."""
    return model_of("gpt2", dtype=torch.float64), choice_of("gpt2")


@quick
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=4))
def test_any_pairs(in_fp64: tuple[Any, AttentionChoice], shapes: list[Shape]) -> None:
    """To rounding of fp64; and the layout holds the same sequences."""
    shapes = [(max(shared, 2 - min(rests)), *rests) for shared, *rests in shapes]  # of two tokens at least
    examples = row_of(shapes)
    check_equal(*in_fp64, examples, 1e-12)
    whole, shared = collate(examples), collate(examples, shares_prompts=True)
    assert shared.counts == whole.counts
    assert shared.num_padding == 0
    assert shared.inputs["input_ids"].shape[1] == whole.inputs["input_ids"].shape[1] - sum(shared.prefix_lengths)
    assert sum(shared.prefix_lengths) == shared.counts["shared_tokens"] >= sum(shape[0] for shape in shapes)
    places = row_places(shared.sequence_lengths, shared.prefix_lengths)
    for name, values in shared.inputs.items():
        assert torch.equal(values[:, places], whole.inputs[name])
    assert torch.equal(shared.targets.ids, whole.targets.ids)
    assert whole.distinct_targets is None
    check_distinct(shared, examples)


def check_distinct(batch: Batch, examples: list[Example]) -> None:
    """Each target is among the distinct ones, and trained tokens that a pair has in common are one of these."""
    in_common = [example.sequences[0].loss_mask[: example.shared_tokens].sum() for example in examples]
    if (distinct := batch.distinct_targets) is None:
        assert not any(in_common)
        return
    assert torch.equal(distinct.positions[distinct.of_target], batch.targets.positions)
    assert torch.equal(distinct.ids[distinct.of_target], batch.targets.ids)
    assert len(distinct.ids) == len(batch.targets.ids) - sum(in_common)


@pytest.mark.parametrize("head", ["plain", "chunked"])
@pytest.mark.parametrize("differentiable", [True, False])
def test_the_head_computes_what_answers_share_once(head: str, differentiable: bool) -> None:
    model, batch, rows = model_of("llama"), collate(row_of(SHAPES), shares_prompts=True), []
    loss_model = CausalLMWithLoss(model, head)
    model.lm_head.register_forward_pre_hook(lambda module, given: rows.append(given[0].shape[1]))
    forward = ForwardPass(choice_of("llama"), Objective(log_odds, differentiable=differentiable))
    outputs = forward(loss_model, batch)
    assert batch.counts["target_tokens"] == len(outputs.token_losses) == 56
    assert rows == [48 if differentiable else 56]  # four of each of two pairs
    torch.testing.assert_close(outputs.total, outputs.token_losses.sum())


# --- isolation


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize(
    ("sequence", "token", "moved"),
    [
        ((0,), 22, {0}),  # of the first answer's rest
        ((1,), 22, {1}),
        ((0, 1), 19, {0, 1}),  # the end of what both begin with; a window sees it
    ],
)
def test_a_changed_token_moves_the_answers_that_have_it(
    name: str, sequence: tuple[int, ...], token: int, moved: set[int]
) -> None:
    model = model_of(name)
    examples = row_of([SHAPES[1], SHAPES[0], (20, 9, 14)])  # the changed pair is in the middle
    changed = []
    for i, one in enumerate(examples[1].sequences):
        ids = one.input_ids.copy()
        ids[token] = 7 if i in sequence else ids[token]
        changed.append(replace(one, input_ids=ids, loss_mask=np.arange(len(ids)) > 23))
    before = replace(
        examples[1],
        sequences=tuple(
            replace(one, loss_mask=other.loss_mask) for one, other in zip(examples[1].sequences, changed, strict=True)
        ),
    )
    after = replace(examples[1], sequences=tuple(changed))
    choice = choice_of(name)
    with torch.no_grad():
        a, b = (losses_of(model, choice, [examples[0], one, examples[2]], True)[0] for one in (before, after))
    assert {i - 2 for i in range(6) if a[i] != b[i]} == moved


def test_no_gradient_reaches_the_other_answer() -> None:
    model, examples = model_of("llama"), row_of([(6, 5, 4), (3, 4, 4)])
    batch = collate(examples, shares_prompts=True)
    assert batch.sequence_lengths == (11, 4, 7, 4)
    embedded = model.get_input_embeddings()(batch.inputs["input_ids"]).detach().requires_grad_()
    made = choice_of("llama").forward_arguments(batch.sequence_lengths, batch.prefix_lengths)
    positions = batch.inputs["position_ids"]
    logits = model(inputs_embeds=embedded, position_ids=positions, use_cache=False, **made).logits[0]
    logits[14].sum().backward()  # the last token of the first pair's second answer
    reached = embedded.grad[0].abs().sum(1) > 0
    assert reached.nonzero()[:, 0].tolist() == [*range(6), *range(11, 15)]


# --- the layout


def test_the_worked_example_of_a_shared_prompt() -> None:
    sequences = [Sequence(np.array([1, 11, last, 2], np.int32), np.arange(4) >= 2) for last in (12, 13)]
    example = Example("f", 1, 0, tuple(sequences))
    batch = collate([example], padded_to=8, shares_prompts=True)
    # fmt: off
    assert batch.inputs["input_ids"].tolist()    == [[1, 11, 12, 2, 13, 2,  0, 0]]
    assert batch.inputs["position_ids"].tolist() == [[0,  1,  2, 3,  2, 3,  0, 1]]
    # fmt: on
    assert [column.tolist() for column in batch.targets] == [[1, 2, 1, 4], [12, 2, 13, 2], [0, 0, 1, 1]]
    assert (batch.sequence_lengths, batch.prefix_lengths) == ((4, 2, 2), (0, 2, 0))
    assert batch.sequence_tokens == (4, 4)
    assert batch.ends.positions.tolist() == [3, 5]
    assert (batch.counts["tokens"], batch.counts["shared_tokens"], batch.num_padding) == (8, 2, 2)
    assert example.shared_tokens == 2


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [([1, 5, 6, 7], [1, 5, 8], 2), ([1, 5, 6], [1, 5, 6, 2], 2), ([1, 5], [1, 5], 1), ([1], [1, 2], 0), ([1], [2], 0)],
)
def test_each_sequence_keeps_a_token_of_its_own(first: list[int], second: list[int], expected: int) -> None:
    both = [Sequence(np.array(ids, np.int32), np.zeros(len(ids), bool)) for ids in (first, second)]
    assert shared_prefix(both) == shared_prefix(both[::-1]) == expected
    assert shared_prefix(both[:1]) == shared_prefix([*both, both[0]]) == 0


def test_attention_that_cannot_share_does_not() -> None:
    choice = choice_of("llama", "sdpa")
    batch = collate(row_of(SHAPES), shares_prompts=True)
    with pytest.raises(ValueError, match="sdpa: transformers' own attention"):
        choice.forward_arguments(batch.sequence_lengths, batch.prefix_lengths)


@pytest.mark.parametrize(
    ("config", "longest", "reason"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, None, "in a trial"),
        ({}, 64, "compiled layers"),
    ],
)
def test_what_cannot_be_shared_is_seen(config: dict[str, Any], longest: int | None, reason: str) -> None:
    """The angles of `dynamic` RoPE follow the length of each answer, and so does all that its prompt computes."""
    shape = AutoConfig.for_model(**{**tiny._SHAPE, "model_type": "llama", **config})
    kind = AutoModelForCausalLM._model_mapping[type(shape)]
    choice = choose_attention("documents", kind, shape, "cpu", False, longest=longest)
    assert choice.isolates_documents
    assert reason in (choice.not_shared or "")


# --- kernels that need a GPU, by what they are told


def masks(batch: Batch, window: int | None) -> Tensor:  # (T, T), True where a token of the row sees another
    places = np.split(
        row_places(batch.sequence_lengths, batch.prefix_lengths),
        np.cumsum(np.add(batch.sequence_lengths, batch.prefix_lengths))[:-1],
    )
    tokens = sum(batch.sequence_lengths)
    expected = torch.zeros(tokens, tokens, dtype=torch.bool)
    for of_sequence in places:
        index = torch.from_numpy(of_sequence)
        expected[index[:, None], index] |= seen(len(index), len(index), window, torch.device("cpu"))
    return expected


@pytest.mark.parametrize("window", [None, 1, 8, 130])
@pytest.mark.parametrize(
    "examples",
    [
        *(row_of(shapes) for shapes in (SHAPES, [(300, 20, 200), (0, 90, 3), (128, 128, 128)], [(5, 3, 4)])),
        *(samples_of(groups) for groups in (GROUPS, [(300, (20, 200, 1, 90)), (2, (3, 4)), (128, (128, 128))])),
    ],
    ids=["pairs", "long pairs", "a pair", "samples", "long samples"],
)
def test_the_mask_of_flex_is_that_of_the_sequences(examples: list[Example], window: int | None) -> None:
    batch = collate(examples, padded_to=1200, shares_prompts=True)
    ours = kernels.block_mask(batch.sequence_lengths, window, "cpu", batch.prefix_lengths)
    expected = masks(batch, window)
    theirs = create_block_mask(lambda b, h, q, k: expected[q, k], 1, 1, 1200, 1200, "cpu")
    assert (ours.to_dense() >= theirs.to_dense()).all()
    index = torch.arange(1200)
    nothing = torch.zeros((), dtype=torch.int64)
    assert torch.equal(ours.mask_mod(nothing, nothing, index[:, None], index[None, :]), expected)


def test_flex_forward_equals_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    monkeypatch.setattr(kernels, "_compiled", lambda: torch.compile(flex_attention, backend="eager"))
    batch = collate(row_of(SHAPES), shares_prompts=True)
    made = kernels.prepare_flex(batch.sequence_lengths, batch.prefix_lengths, device="cpu", windows=(None, WINDOW))
    check_logits("gemma2", FLEX, batch, made)


def by_the_documentation(
    query: Tensor,  # (queries, H, D)
    key: Tensor,  # (keys, K, D)
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool = False,
) -> Tensor:
    """varlen_attn where there are more keys than queries: "the causal mask is aligned to the bottom right corner of the
    attention matrix" (README of flash-attention, 2.1)."""
    lengths = [ends.diff().tolist() for ends in (cu_seq_q, cu_seq_k)]
    assert (max_q, max_k) == tuple(map(max, lengths))
    out = []
    parts = zip(query.split(lengths[0]), key.split(lengths[1]), value.split(lengths[1]), strict=True)
    for one in parts:
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in one)
        mask = seen(q.shape[2], k.shape[2], None if window_size[0] < 0 else window_size[0] + 1, q.device)
        piece = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa
        )
        out.append(piece[0].transpose(0, 1))
    return torch.cat(out)


@pytest.mark.parametrize("examples", [row_of(SHAPES), samples_of(GROUPS)], ids=["pairs", "samples"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_varlen_says_to_the_kernel_what_it_means(
    name: str, examples: list[Example], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "varlen_attn", by_the_documentation)
    batch = collate(examples, padded_to=140, shares_prompts=True)
    check_logits(
        name, VARLEN, batch, kernels.prepare_varlen(batch.sequence_lengths, batch.prefix_lengths, device="cpu")
    )


def check_logits(name: str, implementation: str, batch: Batch, made: dict[str, Any]) -> None:
    ours, theirs = model_of(name, implementation), model_of(name)
    arguments = choice_of(name).forward_arguments(batch.sequence_lengths, batch.prefix_lengths)
    with torch.no_grad():
        a, b = (
            model(**batch.inputs, use_cache=False, **given).logits
            for model, given in ((ours, made), (theirs, arguments))
        )
    torch.testing.assert_close(a, b, rtol=0, atol=5e-6)
