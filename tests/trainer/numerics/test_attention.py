"""Documents of one packed row are strangers: every attention path, exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from inspect import signature
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    DeepseekV3Config,
    DynamicCache,
    Gemma2Config,
    GPT2Config,
    GptOssConfig,
    GraniteSWAConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Qwen3NextConfig,
)

from finetune.errors import UserError
from finetune.models.activations import recompute_activations
from finetune.models.attention import (
    DOCUMENTS,
    FLEX,
    VARLEN,
    Kernels,
    choose_attention,
    kernels,
    per_document,
    pieces,
)

LENGTHS = (7, 21, 3, 12)
MODELS = ("llama", "mistral", "gemma2", "gpt_oss")
# A path that a model cannot take is refused by the choice: sdpa has neither soft-capping nor sinks, and transformers'
# own masks of gpt-oss do not know where documents begin.
CANNOT = (("gemma2", "sdpa"), ("gpt_oss", "sdpa"), ("gpt_oss", "eager"))
PATHS = [(name, path) for name in MODELS for path in (DOCUMENTS, "sdpa", "eager") if (name, path) not in CANNOT]
EAGER = ("gemma2", "gpt_oss")  # what alone says the truth
TINY = {
    "vocab_size": 384,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture(scope="session")
def folders(made: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Grouped queries, grouped queries in a window; soft-capped scores, and sinks, both in every second layer."""
    folder = tmp_path_factory.mktemp("attention")
    configs = {
        "gemma2": Gemma2Config(
            **TINY, head_dim=8, sliding_window=8, attn_logit_softcapping=0.05, query_pre_attn_scalar=8, pad_token_id=0
        ),
        "gpt_oss": GptOssConfig(
            **{**TINY, "intermediate_size": 32}, head_dim=8, sliding_window=8, num_local_experts=4, pad_token_id=0
        ),
    }
    for name, config in configs.items():
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(config)
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("sinks"):
                torch.nn.init.normal_(parameter)  # those of a new model are near 0
        model.save_pretrained(folder / name)
    return {"llama": made / "llama", "mistral": made / "mistral", **{name: folder / name for name in configs}}


def load(folder: Path, attention: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention, dtype=torch.float32).train()


def row(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 380, (1, sum(LENGTHS)), generator=generator)
    return ids, torch.cat([torch.arange(length) for length in LENGTHS])[None]


def arguments(attention: str) -> dict[str, Any]:
    return per_document.prepare(LENGTHS) if attention == DOCUMENTS else {}


def logits(model: Any, ids: torch.Tensor, positions: torch.Tensor, attention: str) -> torch.Tensor:
    return model(input_ids=ids, position_ids=positions, use_cache=False, **arguments(attention)).logits[0]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("name", "attention"), PATHS)
def test_a_changed_token_moves_nothing_in_another_document(
    folders: dict[str, Path], name: str, attention: str, checkpointing: bool
) -> None:
    model = load(folders[name], attention)
    if checkpointing:
        recompute_activations(model, True)
    ids, positions = row()
    before = logits(model, ids, positions, attention)
    changed = ids.clone()
    changed[0, 2] = 5 if ids[0, 2] != 5 else 6
    after = logits(model, changed, positions, attention)
    assert not torch.equal(before[2:7], after[2:7]), "the changed document itself must change"
    assert torch.equal(before[7:], after[7:]), "bitwise: nothing of document 1 may enter documents 2 to 4"


@pytest.mark.parametrize(("name", "attention"), PATHS)
def test_no_gradient_crosses_a_document(folders: dict[str, Path], name: str, attention: str) -> None:
    model = load(folders[name], attention)
    ids, positions = row()
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    output = model(inputs_embeds=embedded, position_ids=positions, use_cache=False, **arguments(attention)).logits[
        0, 7:28
    ]
    output.square().sum().backward()
    touched = embedded.grad[0].abs().sum(-1) > 0
    assert touched[7:28].all()
    assert not touched[:7].any()
    assert not touched[28:].any()


@pytest.mark.parametrize(("name", "attention"), PATHS)
def test_packed_equals_one_document_at_a_time(folders: dict[str, Path], name: str, attention: str) -> None:
    """Logits, and the gradient of every weight."""
    model, alone = load(folders[name], attention), load(folders[name], "eager" if name in EAGER else "sdpa")
    ids, positions = row()
    packed = logits(model, ids, positions, attention)
    apart = torch.cat([alone(input_ids=piece, use_cache=False).logits[0] for piece in ids.split(LENGTHS, dim=1)])
    torch.testing.assert_close(packed, apart, rtol=0, atol=2e-6)
    for output in (packed, apart):
        output.logsumexp(-1).sum().backward()
    for (weight, ours), (_, theirs) in zip(model.named_parameters(), alone.named_parameters(), strict=True):
        torch.testing.assert_close(
            ours.grad, theirs.grad, rtol=2e-5, atol=2e-6, msg=lambda text, w=weight: f"{w}: {text}"
        )


def test_the_soft_cap_of_the_test_matters(folders: dict[str, Path]) -> None:
    model, free = load(folders["gemma2"], DOCUMENTS), load(folders["gemma2"], DOCUMENTS)
    for layer in free.model.layers:
        layer.self_attn.attn_logit_softcapping = None
    ids, positions = row()
    assert (logits(model, ids, positions, DOCUMENTS) - logits(free, ids, positions, DOCUMENTS)).abs().max() > 1e-4


def test_the_sinks_of_the_test_matter(folders: dict[str, Path]) -> None:
    model, free = load(folders["gpt_oss"], DOCUMENTS), load(folders["gpt_oss"], DOCUMENTS)
    for layer in free.model.layers:
        torch.nn.init.constant_(layer.self_attn.sinks, -torch.inf)
    ids, positions = row()
    assert (logits(model, ids, positions, DOCUMENTS) - logits(free, ids, positions, DOCUMENTS)).abs().max() > 1e-4


def test_the_trap_itself_with_a_cache_documents_see_each_other(made: Path) -> None:
    """Why every training forward says use_cache=False; if this fails, transformers has mended it."""
    model = load(made / "llama", "sdpa")
    ids, positions = row()
    cached = model(input_ids=ids, position_ids=positions, past_key_values=DynamicCache(config=model.config)).logits[0]
    assert (cached - logits(model, ids, positions, "sdpa")).abs().max() > 1e-3


@pytest.mark.parametrize("attention", [DOCUMENTS, VARLEN, FLEX])
def test_our_ways_refuse_to_guess(made: Path, attention: str) -> None:
    model = load(made / "llama", attention)
    ids, positions = row()
    with pytest.raises(ValueError, match="could see each other"):
        model(input_ids=ids, position_ids=positions, use_cache=False)


@pytest.mark.parametrize("attention", [DOCUMENTS, VARLEN, FLEX])
@pytest.mark.parametrize("name", MODELS)
def test_generation_with_padding_equals_transformers(folders: dict[str, Path], name: str, attention: str) -> None:
    """The same model evaluates by generating: there every way takes masks, sliding window and soft cap included."""
    ids, _ = row()
    ids = ids[:, :24].reshape(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    ours, theirs = (load(folders[name], way).eval() for way in (attention, "eager"))
    with torch.no_grad():
        a, b = (m(input_ids=ids, attention_mask=mask, use_cache=False).logits for m in (ours, theirs))
    torch.testing.assert_close(a[:, 6:], b[:, 6:], rtol=0, atol=2e-6)


def inputs_of_attention(with_sinks: bool, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Query, key, value and sinks."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, sum(LENGTHS), 8) for heads in (4, 2, 2)] + [(4,)] * with_sinks
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("softcap", [None, 0.5])
def test_the_opaque_operation_of_compiled_layers(window: int | None, softcap: float | None, with_sinks: bool) -> None:
    """Its output, and its gradients against autograd's through the same documents."""
    tensors = inputs_of_attention(with_sinks)
    generator = torch.Generator().manual_seed(1)
    ends = per_document.prepare(LENGTHS, compiled=True)["documents"].ends
    query, key, value, sinks = (*tensors, None)[:4]
    ours = per_document.per_document(query, key, value, sinks, ends, 0.3, window, softcap)
    call = kernels.AttentionCall(query, key, value, 0.0, 0.3, window, softcap, sinks)
    theirs = per_document.one_by_one(call, per_document.DocumentLengths(LENGTHS))
    assert torch.equal(ours, theirs)
    weights = torch.randn(ours.shape, generator=generator)
    for a, b in zip(
        torch.autograd.grad((ours * weights).sum(), tensors),
        torch.autograd.grad((theirs * weights).sum(), tensors),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-6)


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("way", ["kernel", "formula", "dropout"])
def test_sinks_of_a_document_are_a_column_of_scores(
    window: int | None, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Output and gradients in fp64; by a kernel that returns the log-sum-exp, by the formula where none does, and as
    autograd computes it for dropout."""
    tensors = inputs_of_attention(True, torch.float64)
    query, key, value, sinks = tensors
    if way == "formula":
        monkeypatch.setattr(pieces, "_kernel", lambda *_: None)
    monkeypatch.setattr(kernels, "drop", lambda weights, _share: weights)
    call = kernels.AttentionCall(query, key, value, float(way == "dropout"), 0.3, window, None, sinks)
    ours = per_document.per_document_attention(call, per_document.DocumentLengths(LENGTHS))
    expected = []
    for q, k, v in zip(*(tensor[0].split(LENGTHS, dim=1) for tensor in tensors[:3]), strict=True):
        scores = q @ k.repeat_interleave(2, dim=0).mT * 0.3
        hidden = ~per_document.seen(q.shape[1], k.shape[1], window, q.device)
        scores = torch.cat([scores.masked_fill(hidden, -torch.inf), sinks[:, None, None].expand(-1, len(q[0]), 1)], -1)
        weights = torch.softmax(scores, dim=-1)[..., :-1]
        expected.append((weights @ v.repeat_interleave(2, dim=0)).transpose(0, 1))
    theirs = torch.cat(expected)[None]
    gradient = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    # The softmax of the formula is in fp32.
    close = 1e-12 if way != "dropout" else 1e-6
    torch.testing.assert_close(ours, theirs, rtol=0, atol=close)
    for a, b in zip(*(torch.autograd.grad(out, tensors, gradient) for out in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=close)


# --- the ways of a GPU, with torch's kernels replaced by what their documentation says of them


def by_the_documentation(
    query: torch.Tensor,  # (T, H, D)
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool = False,
) -> torch.Tensor:
    """torch.nn.attention.varlen.varlen_attn: `(W, 0)` is W tokens to the left and none to the right, -1 no bound."""
    assert (cu_seq_q.dtype, window_size[1], enable_gqa) == (torch.int32, 0, query.shape[1] != key.shape[1])
    ends, pieces = cu_seq_q.tolist(), []
    assert torch.equal(cu_seq_q, cu_seq_k)
    assert max_q == max_k == max(b - a for a, b in pairwise(ends))
    for a, b in pairwise(ends):
        back = torch.arange(b - a)[:, None] - torch.arange(b - a)[None, :]
        seen = (back >= 0) & ((window_size[0] < 0) | (back <= window_size[0]))
        q, k, v = (tensor[a:b].transpose(0, 1)[None] for tensor in (query, key, value))
        piece = scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=enable_gqa)
        pieces.append(piece[0].transpose(0, 1))
    return torch.cat(pieces)


def of_torch_2_11(*tensors: Any, scale: float, window_size: tuple[int, int]) -> torch.Tensor:
    """Its varlen_attn: no `enable_gqa`, and nothing that compares the numbers of heads."""
    grouped = tensors[0].shape[1] != tensors[1].shape[1]
    return by_the_documentation(*tensors, scale=scale, window_size=window_size, enable_gqa=grouped)


def check_equals_the_documents(folder: Path, implementation: str, made: dict[str, Any]) -> None:
    """Outputs and gradients under an attention, with what it prepared, are those under `documents`."""
    ours, theirs = load(folder, implementation), load(folder, DOCUMENTS)
    ids, positions = row()
    a = ours(input_ids=ids, position_ids=positions, use_cache=False, **made).logits[0]
    b = logits(theirs, ids, positions, DOCUMENTS)
    torch.testing.assert_close(a, b, rtol=0, atol=2e-6)
    a.logsumexp(-1).sum().backward()
    b.logsumexp(-1).sum().backward()
    for x, y in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("of_torch", [by_the_documentation, of_torch_2_11])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_varlen_says_to_the_kernel_what_it_means(
    folders: dict[str, Path], name: str, of_torch: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "varlen_attn", of_torch)
    monkeypatch.setattr(kernels, "_TAKES_GROUPS", "enable_gqa" in signature(of_torch).parameters)
    assert choose("varlen", LLAMA, "cuda", True).implementation == VARLEN
    check_equals_the_documents(folders[name], VARLEN, kernels.prepare_varlen(LENGTHS, device="cpu"))


@pytest.fixture
def flash_kernels_here() -> Iterator[None]:
    """Flash attention's operators on the CPU, by their published formulas (https://arxiv.org/abs/2307.08691, section
    3.1): the backward makes weights of the lse that it gets, and D = rowsum(gradient * out) of the output."""

    def parts(query: Any, key: Any, ends: Any, key_ends: Any, scale: float, left: int) -> Iterator[Any]:
        share = query.shape[1] // key.shape[1]
        for (a, b), (c, d) in zip(pairwise(ends.tolist()), pairwise(key_ends.tolist()), strict=True):
            q, k = query[a:b].transpose(0, 1), key[c:d].transpose(0, 1).repeat_interleave(share, 0)
            hidden = ~per_document.seen(b - a, d - c, None if left < 0 else left + 1, q.device)
            yield slice(a, b), slice(c, d), q, k, (q @ k.mT * scale).masked_fill(hidden, -torch.inf)

    def forward(query: Any, key: Any, value: Any, *ends: Any, scale: float, **options: Any) -> Any:
        out, lse = torch.empty_like(query), query.new_empty(query.shape[1], query.shape[0])
        for at, keys, _, _, scores in parts(query, key, *ends[:2], scale, options["window_size_left"]):
            v = value[keys].transpose(0, 1).repeat_interleave(query.shape[1] // key.shape[1], 0)
            out[at], lse[:, at] = (torch.softmax(scores, -1) @ v).transpose(0, 1), torch.logsumexp(scores, -1)
        unused = query.new_empty(0)
        return out, lse, unused, unused, unused

    def backward(
        gradient: Any, query: Any, key: Any, value: Any, out: Any, lse: Any, *ends: Any, scale: float, **options: Any
    ) -> Any:
        groups, gradients = key.shape[1], [torch.empty_like(t) for t in (query, key, value)]
        for at, keys, q, k, scores in parts(query, key, *ends[:2], scale, options["window_size_left"]):
            weights = torch.exp(scores - lse[:, at, None])
            v, g = (value[keys].transpose(0, 1).repeat_interleave(len(q) // groups, 0), gradient[at].transpose(0, 1))
            products = (g * out[at].transpose(0, 1)).sum(-1, keepdim=True)
            of_scores = weights * (g @ v.mT - products) * scale
            gradients[0][at] = (of_scores @ k).transpose(0, 1)
            for into, each in ((gradients[1], of_scores.mT @ q), (gradients[2], weights.mT @ g)):
                into[keys] = each.unflatten(0, (groups, -1)).sum(1).transpose(0, 1)
        return tuple(gradients)

    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    yield
    library._destroy()


@pytest.mark.usefixtures("flash_kernels_here")
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss"])
def test_varlen_with_torchs_own_function(folders: dict[str, Path], name: str) -> None:
    """All of torch's varlen attention but the kernels, forward and backward."""
    check_equals_the_documents(folders[name], VARLEN, kernels.prepare_varlen(LENGTHS, device="cpu"))


@pytest.mark.usefixtures("flash_kernels_here")
@pytest.mark.parametrize("window", [None, 8])
def test_varlen_with_sinks_of_documents_that_share_their_beginning(window: int | None) -> None:
    tensors, prefixes = inputs_of_attention(True), (0, 5, 0, 2)
    query, key, value, sinks = tensors
    call = kernels.AttentionCall(query, key, value, 0.0, 0.3, window, None, sinks)
    ways = (
        (kernels.varlen_attention, kernels.prepare_varlen(LENGTHS, prefixes, device="cpu")),
        (per_document.per_document_attention, per_document.prepare(LENGTHS, prefixes)),
    )
    outputs = [attend(call, made["documents"]) for attend, made in ways]
    torch.testing.assert_close(*outputs, rtol=0, atol=2e-6)
    for a, b in zip(*(torch.autograd.grad(out.square().sum(), tensors) for out in outputs), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=5e-6)


@pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")  # torch's own compiler does
@pytest.mark.usefixtures("flash_kernels_here")
def test_compiled_varlen_with_sinks_is_one_graph() -> None:
    tensors = inputs_of_attention(True)
    made = kernels.prepare_varlen(LENGTHS, device="cpu", longest=64)["documents"]

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
        return kernels.varlen_attention(kernels.AttentionCall(query, key, value, 0.0, 0.3, 8, None, sinks), made)

    outputs = [way(*tensors) for way in (attend, torch.compile(attend, backend="aot_eager", fullgraph=True))]
    torch.testing.assert_close(*outputs)
    for a, b in zip(*(torch.autograd.grad(out.square().sum(), tensors) for out in outputs), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.usefixtures("flash_kernels_here")
def test_why_varlen_has_a_backward_of_our_own_for_sinks() -> None:
    """torch's leaves the gradient of the log-sum-exp out, without a word; if this fails, torch has mended it."""
    query, key, value = (tensor[0].transpose(0, 1) for tensor in inputs_of_attention(False))
    ends = kernels.prepare_varlen(LENGTHS, device="cpu")["documents"].ends
    _, lse = kernels.varlen_attn(
        *(query, key, value, ends, ends, max(LENGTHS), max(LENGTHS)),
        return_aux=kernels.VarlenRequest(lse=True),
        scale=0.3,
        window_size=(-1, 0),
        enable_gqa=True,
    )
    assert not torch.autograd.grad(lse.sum(), query)[0].any()


@pytest.mark.filterwarnings(
    "ignore:flex_attention called without torch.compile", "ignore:The .grad attribute of a Tensor"
)
@pytest.mark.parametrize("name", MODELS)
def test_flex_equals_the_documents(folders: dict[str, Path], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mask and soft cap, forward and backward, computed plainly: the kernel that inductor writes takes half a
    minute here. torch refuses a backward on CPUs, for which that kernel has none; its plain one has."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    monkeypatch.setattr(kernels, "_compiled", lambda: flex_attention)
    check_equals_the_documents(folders[name], FLEX, kernels.prepare_flex(LENGTHS, device="cpu", windows=(None, 8)))


# --- what is made once for a micro-batch


@pytest.mark.parametrize("lengths", [(1000,), (128, 128, 256), (7, 300, 1, 130, 5, 255), (640, 3)])
@pytest.mark.parametrize("window", [None, 1, 100, 129, 300])
def test_the_blocks_of_a_mask_are_those_that_torch_finds_by_trying_every_pair(
    lengths: tuple[int, ...], window: int | None
) -> None:
    ours = kernels.block_mask(lengths, window, "cpu")
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))

    def seen(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (document[q] == document[k]) & (k <= q) & (q - k < (window or 10**6))

    theirs = create_block_mask(seen, 1, 1, sum(lengths), sum(lengths), "cpu")
    assert ours.shape == theirs.shape
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    for name in ("kv", "full_kv", "q", "full_q"):
        counts, expected = getattr(ours, f"{name}_num_blocks"), getattr(theirs, f"{name}_num_blocks")
        if name.startswith("full"):  # a full block that is called partial would be correct too, but slow
            assert torch.equal(counts, expected)
        assert torch.equal(getattr(ours, f"{name}_indices"), getattr(theirs, f"{name}_indices"))


def test_boundaries_of_documents() -> None:
    made = kernels.prepare_varlen(LENGTHS, device="cpu")["documents"]
    assert made.ends.tolist() == [0, 7, 28, 31, 43]
    assert made.ends.dtype == torch.int32
    assert made.longest == 21
    assert kernels.prepare_varlen(LENGTHS, device="cpu", longest=64)["documents"].longest == 64


# --- the choice

HOPPER = Kernels(capability=(9, 0), flash_kernels=True, triton=True)
TURING = Kernels(capability=(7, 5), flash_kernels=True, triton=True)
BARE = Kernels(capability=(9, 0))
PACKAGE = Kernels(capability=(7, 5), flash_attn=True, triton=True)
LLAMA = LlamaConfig(**TINY)


def choose(asked: str, config: Any, device: str, half: bool, kernels: Kernels = HOPPER) -> Any:
    return choose_attention(asked, AutoModelForCausalLM._model_mapping[type(config)], config, device, half, kernels)


@pytest.mark.parametrize(
    ("config", "device", "half", "kernels", "chosen", "reason"),
    [
        (LLAMA, "cpu", False, HOPPER, DOCUMENTS, "no work across documents"),
        (LLAMA, "cpu", True, HOPPER, DOCUMENTS, "no work across documents"),
        (LLAMA, "cuda", True, HOPPER, VARLEN, "one kernel for all documents"),
        (LLAMA, "cuda", False, HOPPER, DOCUMENTS, "flash kernels compute in 16 bit"),
        (LLAMA, "cuda", True, TURING, FLEX, "compute capability 8.0 or newer"),
        (LLAMA, "cuda", True, PACKAGE, "flash_attention_2", "flash-attn is installed; not varlen: torch's flash"),
        (LLAMA, "cuda", True, BARE, DOCUMENTS, "no work across documents"),
        (LlamaConfig(**TINY, head_dim=10), "cuda", True, HOPPER, FLEX, "a multiple of 8 up to 256, not 10"),
        (LlamaConfig(**TINY, head_dim=320), "cuda", True, HOPPER, FLEX, "a multiple of 8 up to 256, not 320"),
        (LlamaConfig(**TINY, attention_dropout=0.1), "cuda", True, HOPPER, DOCUMENTS, "no work across documents"),
        (MistralConfig(**TINY), "cuda", True, HOPPER, VARLEN, "one kernel"),
        (GPT2Config(), "cuda", True, HOPPER, DOCUMENTS, "no work across documents"),  # drops attention
        (GPT2Config(attn_pdrop=0.0), "cuda", True, HOPPER, VARLEN, "one kernel"),
        (DeepseekV3Config(), "cuda", True, HOPPER, FLEX, "one head size, a multiple of 8 up to 256, not 192 and 128"),
        (Gemma2Config(), "cpu", False, HOPPER, DOCUMENTS, "no work across documents"),
        (Gemma2Config(), "cuda", True, HOPPER, FLEX, "no soft-capping"),
        (Gemma2Config(), "cuda", False, HOPPER, DOCUMENTS, "flash kernels compute in 16 bit"),
        (GptOssConfig(), "cpu", False, HOPPER, DOCUMENTS, "no work across documents"),
        (GptOssConfig(), "cuda", True, HOPPER, VARLEN, "one kernel for all documents"),
        (GptOssConfig(), "cuda", True, TURING, FLEX, "compute capability 8.0 or newer"),
        (GptOssConfig(), "cuda", True, PACKAGE, FLEX, "compute capability 8.0 or newer"),  # flash-attn has no sinks
        (GptOssConfig(), "cuda", True, BARE, DOCUMENTS, "no work across documents"),
        (GraniteSWAConfig(), "cuda", True, HOPPER, VARLEN, "one kernel for all documents"),
    ],
)
def test_auto_takes_the_fastest_that_can_and_says_why(
    config: Any, device: str, half: bool, kernels: Kernels, chosen: str, reason: str
) -> None:
    choice = choose("auto", config, device, half, kernels)
    assert (choice.implementation, choice.isolates_documents) == (chosen, True)
    assert reason in choice.reason


@pytest.mark.parametrize(
    ("asked", "config", "device", "half", "reason"),
    [
        (
            "varlen",
            LLAMA,
            "cpu",
            True,
            "`varlen` does not fit LlamaForCausalLM here: it needs a CUDA device",
        ),
        ("varlen", LLAMA, "cuda", False, "needs a CUDA device and 16-bit precision"),
        ("varlen", Gemma2Config(), "cuda", True, "no soft-capping"),
        ("varlen", LlamaConfig(**TINY, attention_dropout=0.1), "cuda", True, "the model's attention_dropout is 0.1"),
        ("flex", LLAMA, "cpu", False, "FlexAttention has no backward on the device `cpu`"),
        ("flex", GPT2Config(), "cuda", True, "the model's attn_pdrop is 0.1"),
        ("flash_attention_2", LLAMA, "cpu", True, "needs a CUDA device"),
        ("flash_attention_2", LLAMA, "cuda", True, "pip install flash-attn"),
        ("flash_attention_3", LLAMA, "cuda", False, "needs a CUDA device and 16-bit precision"),
        ("flash_attention_3", LLAMA, "cuda", True, "FlashAttention-3 is not there"),
        ("sdpa", Gemma2Config(), "cpu", False, "soft-capped"),
        ("flash_attention_2", GptOssConfig(), "cuda", True, "has not all of the architecture's attention (sinks"),
        ("documents", BloomConfig(), "cpu", False, "more than scaled_dot_product_attention can do"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(
    asked: str, config: Any, device: str, half: bool, reason: str
) -> None:
    with pytest.raises(UserError, match=r"^model.attention: ") as refused:
        choose(asked, config, device, half)
    assert reason in str(refused.value)
    assert str(refused.value).endswith("use `auto`")


@pytest.mark.parametrize("asked", ["documents", "varlen", "flex", "sdpa", "eager", "flash_attention_2"])
def test_the_requested_implementation_is_taken(asked: str) -> None:
    everything = Kernels(capability=(9, 0), flash_kernels=True, flash_attn=True, triton=True)
    choice = choose(asked, LLAMA, "cuda", True, everything)
    assert choice.implementation in (asked, f"finetune_{asked}")
    assert choice.reason == "asked for in the recipe"


def test_flash_attention_3_is_varlen_with_kernels_that_torch_activates() -> None:
    for capability in ((8, 9), (10, 0)):
        elsewhere = Kernels(capability, flash_kernels=True, triton=True, no_flash_3=None)
        with pytest.raises(UserError, match="needs a Hopper GPU"):
            choose("flash_attention_3", LLAMA, "cuda", True, elsewhere)
    there = replace(HOPPER, no_flash_3=None)
    for config, kernels_there, flash_3 in (
        (LLAMA, there, True),
        (LLAMA, HOPPER, False),  # not installed
        (LLAMA, replace(there, capability=(8, 9)), False),
        (LlamaConfig(**{**LLAMA.to_dict(), "attention_dropout": 0.1}), there, None),  # refused, as by varlen
    ):
        auto = choose("auto", config, "cuda", True, kernels_there)
        assert (auto.implementation == VARLEN) == (flash_3 is not None)
        assert auto.reason.startswith("FlashAttention-3 is installed") == bool(flash_3)
        assert getattr(auto.prepare, "keywords", {}).get("flash_3") == flash_3
    choice = choose("flash_attention_3", LLAMA, "cuda", True, there)
    assert (choice.implementation, choice.reason) == (VARLEN, "FlashAttention-3, asked for in the recipe")
    assert kernels.flash_3_missing() is not None
    with pytest.raises((ModuleNotFoundError, AttributeError)):  # torch looks for the package, which is not here
        choice.forward_arguments((3, 4))


def test_masks_are_made_for_the_windows_of_the_layers() -> None:
    for config, windows in (
        (LLAMA, {None}),
        (MistralConfig(sliding_window=9), {None, 9}),
        (Gemma2Config(), {None, 4096}),
    ):
        assert set(choose("flex", config, "cuda", True).prepare.keywords["windows"]) == windows


def test_an_architecture_that_carries_state_runs_it_per_document_also_on_a_gpu() -> None:
    """Mamba has no attention, and no number of heads in its config."""
    everything = Kernels(capability=(9, 0), flash_kernels=True, flash_attn=True, triton=True)
    for choice in (
        choose("auto", MambaConfig(), "cpu", False),
        choose("auto", MambaConfig(), "cuda", True, everything),
    ):
        assert choice.isolates_documents
        assert list(choice.mixers) == ["MambaMixer"]
    hybrid = choose("auto", Qwen3NextConfig(), "cuda", True, everything)
    assert (hybrid.implementation, list(hybrid.mixers)) == ("finetune_varlen", ["Qwen3NextGatedDeltaNet"])
