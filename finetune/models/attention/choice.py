"""Chooses a run's attention, with the reason: by architecture, device, precision and installed packages."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig
from transformers.modeling_utils import PreTrainedModel

from finetune.data.media.family_table import Kinds, family_of, file_token
from finetune.errors import UserError
from finetune.models.attention import kernels, per_document
from finetune.models.attention.isolation import Prepare, Verdict, isolation_problem, verdict
from finetune.models.attention.mixers import Mixers
from finetune.models.base_config import dtypes, head_sizes, layer_configs
from finetune.models.text_part import text_config
from finetune.recipe.schema import BatchSettings, Recipe


def _no_arguments(document_lengths: tuple[int, ...], prefix_lengths: tuple[int, ...] = ()) -> dict[str, Any]:
    """transformers finds documents in restarting position_ids; in most architectures (see `isolation`), and without a
    cache or an attention mask, hence `use_cache=False` in every training forward."""
    return {}


@dataclass(frozen=True)
class AttentionChoice:
    implementation: str  # transformers' name
    reason: str
    isolates_documents: bool  # False: one document per forward is the only safe layout
    prepare: Prepare = _no_arguments
    # Why two documents cannot share the beginning that they have in common; None if they can.
    not_shared: str | None = "transformers' own attention finds documents in positions that begin with 0"
    shares_prompts: bool = False  # pairs of this run do, see objectives/shared_prompts.py
    mixers: Mixers = field(default_factory=dict)  # modules that run once for each document of a row
    image_tokens: tuple[int, ...] = ()  # of models in which the tokens of an image see each other
    in_windows_only: bool = False  # see `Family.in_windows_only`

    def forward_arguments(
        self, document_lengths: tuple[int, ...], prefix_lengths: tuple[int, ...] = (), input_ids: Tensor | None = None
    ) -> dict[str, Any]:
        """Returns the arguments of a forward in addition to its tokens: created once, used by every layer.

        Lengths as in `Batch`; for prefixes see `not_shared`. input_ids: (1, T), for `image_tokens`.
        """
        if any(prefix_lengths):
            if self.not_shared is not None:
                raise ValueError(f"{self.implementation}: {self.not_shared}")
            return self.prepare(document_lengths, prefix_lengths)
        arguments = self.prepare(document_lengths)
        if self.image_tokens and input_ids is not None:
            per_document.with_whole_images(arguments, input_ids, self.image_tokens, self.in_windows_only)
        return arguments


@dataclass(frozen=True)
class Kernels:
    """Kernels in addition to plain torch's."""

    capability: tuple[int, int] | None = None  # of the CUDA device; None: no CUDA device, or one of AMD
    flash_kernels: bool = False  # torch's own, built in
    flash_attn: bool = False  # the package
    no_flash_3: str | None = "FlashAttention-3 is not there"  # the missing part; None if it is there
    triton: bool = False

    @classmethod
    def here(cls) -> Kernels:
        nvidia = torch.cuda.is_available() and torch.version.hip is None
        return cls(
            capability=torch.cuda.get_device_capability() if nvidia else None,
            flash_kernels=nvidia and torch.backends.cuda.is_flash_attention_available(),
            flash_attn=importlib.util.find_spec("flash_attn") is not None,
            no_flash_3=kernels.flash_3_missing(),
            triton=importlib.util.find_spec("triton") is not None,
        )


@dataclass(frozen=True)
class _Case:
    """Everything that the choice depends on."""

    model_class: type[PreTrainedModel]
    model_config: PretrainedConfig  # with the parts of a multimodal model
    config: PretrainedConfig  # the text part of it
    device: str
    half: bool
    kernels: Kernels
    longest: int | None  # tokens of a document, if layers are compiled

    @property
    def soft_capped(self) -> bool:
        return getattr(self.config, "attn_logit_softcapping", None) is not None

    @property
    def plain(self) -> str:
        """Returns the implementation that transformers takes by itself; but not sdpa if scores are capped, which
        transformers 5.17 takes nevertheless, and leaves out the cap."""
        # transformers' models declare by these flags what they support.
        return "sdpa" if getattr(self.model_class, "_supports_sdpa", False) and not self.soft_capped else "eager"

    def verdict(self, implementation: str | None) -> Verdict:
        """Returns the verdict of a trial. Raises UserError if the model sees the tokens that it should predict."""
        prepare = per_document.prepare if implementation == per_document.DOCUMENTS else _no_arguments
        outcome = verdict(self.model_config, implementation, prepare)
        if outcome.causal is not None:
            raise UserError(
                f"{self.model_class.__name__} sees the tokens that it should predict ({outcome.causal}). It would "
                "learn to copy them. Fix: set `is_decoder: true` in its config if it has that, or choose a causal "
                "model"
            )
        if outcome.mixers and self.longest is not None:  # they would be compiled again for each document
            why = f"compiled layers cannot run {', '.join(outcome.mixers)} once for each document"
            return replace(outcome, packed=why, mixers={})
        return outcome


def attention_for(
    recipe: Recipe, config: PretrainedConfig, device: str, there: Kernels | None = None
) -> AttentionChoice:
    """Returns the attention of a run; see `choose_attention`. there: kernels; by default those of this machine."""
    requested, half = recipe.model.attention, dtypes(recipe).compute != torch.float32
    if recipe.model.train is not None:
        return _with_images(requested, config, device, half, there, recipe.data.media_kinds)
    try:
        model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except KeyError:
        raise UserError(
            f"{type(config).__name__} is not a causal language model that transformers knows. Fix: choose a causal "
            "language model"
        ) from None
    longest = recipe.data.max_length if recipe.train.compile else None
    return choose_attention(requested, model_class, config, device, half, there, longest)


def _with_images(
    requested: str,
    config: PretrainedConfig,
    device: str,
    half: bool,
    there: Kernels | None,
    kinds: Kinds = None,
) -> AttentionChoice:
    """Returns the attention of a multimodal model's language model. kinds: see `family_of`.

    Raises UserError if it, or the family's handling of images, does not keep packed documents apart.
    """
    text, family = text_config(config, has_head=True), family_of(config, kinds)
    whole = [row for row in family.each if row.sees_whole_images]
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(text)]
    if requested in ("sdpa", "eager") or (whole and requested not in ("auto", "documents")):
        raise UserError(
            f"model.attention: `{requested}` cannot be used for documents with images. Our own attention keeps them "
            "apart. Fix: use `auto`"
        )
    if whole:
        requested = "documents"  # the kernels have no mask within a document
    choice = choose_attention(requested, model_class, text, device, half, there)
    why = None if choice.isolates_documents else choice.reason
    if (why := why or isolation_problem(config, kinds)) is not None:
        raise UserError(
            f"images: {config.model_type} cannot be trained on images here: {why}. Fix: leave out model.train to train "
            "on text alone, or choose another model"
        )
    tokens = tuple(file_token(config, row) for row in whole)
    reason = "one call a document, under a mask by which an image's tokens see each other" if whole else choice.reason
    only = any(row.in_windows_only for row in whole)
    return replace(choice, reason=reason, not_shared="documents have images", image_tokens=tokens, in_windows_only=only)


def check_rows_per_forward(batch: BatchSettings, attention: AttentionChoice) -> None:
    """Raises UserError if a forward would have several documents, and attention cannot keep them apart."""
    if attention.isolates_documents:
        return
    if batch.rows_per_device not in (1, "auto") or batch.tokens_per_device is not None:
        raise UserError(f"{attention.reason}. Fix: set batch.rows_per_device: 1, and no tokens_per_device")


def choose_attention(
    requested: str,
    model_class: type[PreTrainedModel],
    config: PretrainedConfig,
    device: str,
    half_precision: bool,
    kernels: Kernels | None = None,
    longest: int | None = None,
) -> AttentionChoice:
    """Returns the attention implementation for this architecture, device and precision, with the reason in words.

    kernels: None: those of this machine; longest: most tokens of a document, if layers are compiled. Raises UserError
    if the requested one is not possible.
    """
    text = config.get_text_config()
    case = _Case(model_class, config, text, device, half_precision, kernels or Kernels.here(), longest)
    if getattr(text, "index_topk", None):
        why = f"{model_class.__name__} attends to tokens that an index chooses, and ties fall otherwise within a row"
        return _one_per_forward(requested if requested in ("sdpa", "eager") else case.plain, why, case.verdict(None))
    if requested == "auto":
        return _fastest(case)
    if (why := _obstacle(requested, case)) is not None:
        raise UserError(
            f"model.attention: `{requested}` does not fit {model_class.__name__} here: {why}. Fix: use `auto`"
        )
    if requested in ("sdpa", "eager"):
        return _from_transformers(requested, case, "asked for in the recipe")
    kernel = "FlashAttention-3, " if requested == "flash_attention_3" else ""
    return _within_documents(requested, case, f"{kernel}asked for in the recipe")


def _fastest(case: _Case) -> AttentionChoice:
    if (why := _obstacle("documents", case)) is not None:
        return _from_transformers(case.plain, case, why)
    if case.device == "cuda" and case.half:
        if (not_varlen := _obstacle("varlen", case)) is None:
            if _obstacle("flash_attention_3", case) is None:
                reason = "FlashAttention-3 is installed: one kernel for all documents of a row"
                return _within_documents("flash_attention_3", case, reason)
            return _within_documents("varlen", case, "CUDA, 16 bit: one kernel for all documents of a row")
        if _obstacle("flash_attention_2", case) is None:
            reason = f"flash-attn is installed; not varlen: {not_varlen}"
            return _within_documents("flash_attention_2", case, reason)
        if _obstacle("flex", case) is None:
            return _within_documents(
                "flex", case, f"a kernel compiled for the documents' mask; not varlen: {not_varlen}"
            )
    in_16_bit = "; flash kernels compute in 16 bit" if case.device == "cuda" and not case.half else ""
    return _within_documents("documents", case, f"one call a document, no mask and no work across documents{in_16_bit}")


def _from_transformers(name: str, case: _Case, reason: str) -> AttentionChoice:
    """Returns `sdpa` or `eager`: packed if a trial showed that it keeps documents apart."""
    outcome = case.verdict(name)
    if outcome.packed is None:
        return AttentionChoice(name, _with_mixers(reason, outcome.mixers), True, mixers=outcome.mixers)
    model_class = case.model_class.__name__
    why = f"transformers' `{name}` does not keep packed documents of {model_class} apart ({outcome.packed})"
    return _one_per_forward(name, why, outcome)


def _one_per_forward(name: str, why: str, outcome: Verdict) -> AttentionChoice:
    # Some architectures count positions in another way than from 0.
    prepare = _no_arguments if outcome.positions is None else lambda *_lengths: {"position_ids": None}
    return AttentionChoice(name, f"{why}: one document per forward", False, prepare)


def _within_documents(requested: str, case: _Case, reason: str) -> AttentionChoice:
    """Returns the choice of an implementation that is given the documents."""
    outcome, device, longest = case.verdict(per_document.DOCUMENTS), case.device, case.longest
    choice = AttentionChoice(requested, _with_mixers(reason, outcome.mixers), True, mixers=outcome.mixers)
    if requested == "flash_attention_2":
        return replace(choice, prepare=partial(_flash_arguments, device=device, longest=longest))
    # RoPE whose angles follow the length of a document rules sharing out, as the trial of it shows.
    not_shared = None if outcome.shared is None else f"not what each document alone gives ({outcome.shared})"
    if longest is not None:
        not_shared = "compiled layers take each sequence whole"
    if requested == "documents":
        name, prepare = per_document.DOCUMENTS, partial(per_document.prepare, compiled=longest is not None)
    elif requested == "flex":
        window = getattr(case.config, "sliding_window", None)
        kinds = getattr(case.config, "layer_types", None) or ("sliding_attention", "full_attention")
        windows = tuple({window if kind == "sliding_attention" else None for kind in kinds})
        name, prepare = kernels.FLEX, partial(kernels.prepare_flex, device=device, windows=windows)
    else:
        name, flash_3 = kernels.VARLEN, requested == "flash_attention_3"
        prepare = partial(kernels.prepare_varlen, device=device, longest=longest, flash_3=flash_3)
    return replace(choice, implementation=name, prepare=prepare, not_shared=not_shared)


def _with_mixers(reason: str, mixers: Mixers) -> str:
    return f"{reason}; {', '.join(mixers)} once for each document" if mixers else reason


def _flash_arguments(
    document_lengths: tuple[int, ...], prefix_lengths: tuple[int, ...] = (), *, device: str, longest: int | None
) -> dict[str, Any]:
    """Returns the boundaries of documents. Without them transformers reads the position_ids back from the device, in
    every layer."""
    documents = kernels.prepare_varlen(document_lengths, device=device, longest=longest)["documents"]
    ends, most = documents.ends, documents.longest
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": most, "max_length_k": most}


def _obstacle(requested: str, case: _Case) -> str | None:
    """Returns why an implementation cannot be used here, or None."""
    return next(_obstacles(requested, case), None)


def _obstacles(requested: str, case: _Case) -> Iterator[str]:
    """Yields reasons, those without a trial first.

    Our implementations and flash-attn receive the documents in the same place and depend on the same of an
    architecture: the outcome of a trial of one of them, on the CPU and in fp32, holds for all.
    """
    config, here, is_varlen = case.config, case.kernels, requested in ("varlen", "flash_attention_3")
    if requested in ("sdpa", "eager"):
        if requested == "sdpa" and case.soft_capped:
            yield "its attention logits are soft-capped, which sdpa cannot do"
        return
    if (is_varlen or requested == "flash_attention_2") and not (case.device == "cuda" and case.half):
        yield "it needs a CUDA device and 16-bit precision"
    if is_varlen and not isinstance(getattr(config, "num_attention_heads", None), int):
        yield "the model's config has no number of attention heads"
    if is_varlen and case.soft_capped:
        yield "the kernel has no soft-capping of attention logits"
    # Models with sinks list the kernels that have them.
    flash_kernels = getattr(case.model_class, "_compatible_flash_implementations", None)
    if requested == "flash_attention_2" and flash_kernels is not None and requested not in flash_kernels:
        yield "flash-attn's kernel has not all of the architecture's attention (sinks, or sizes of heads)"
    # The flag by which transformers' models declare it.
    if requested == "flash_attention_2" and not getattr(case.model_class, "_supports_flash_attn", False):
        yield "the architecture does not support it"
    if requested == "flash_attention_2" and not here.flash_attn:
        yield "flash-attn is not installed: pip install flash-attn --no-build-isolation"
    if requested == "flex" and case.device != "cuda":
        yield f"FlexAttention has no backward on the device `{case.device}`; it needs CUDA"
    if requested == "flex" and not here.triton:
        yield "FlexAttention compiles with triton, which is not installed (pip install triton)"
    # Soft-capping and sinks, the usual reasons not to support sdpa, are something that our own implementations can do.
    # Where attention is handed all that it needs (`_supports_attention_backend`), a trial tells.
    is_handed_all = case.soft_capped or getattr(case.model_class, "_supports_attention_backend", False)
    if not is_handed_all and not getattr(case.model_class, "_supports_sdpa", False):
        yield "its attention is more than scaled_dot_product_attention can do (it does not support sdpa)"
    if (why := case.verdict(per_document.DOCUMENTS).packed) is not None:
        yield f"it does not compute what each document alone gives ({why})"
    if is_varlen or requested == "flex":
        for name in ("attention_dropout", "attn_pdrop", "attn_dropout", "attention_probs_dropout_prob"):
            if probability := getattr(config, name, 0.0):
                yield f"the kernel has no dropout, and the model's {name} is {probability}"
    if is_varlen:
        sizes = dict.fromkeys(size for layer in layer_configs(config) for size in head_sizes(layer) or ())
        if len(sizes) > 1 or max(sizes) > 256 or max(sizes) % 8:
            yield f"the kernel takes one head size, a multiple of 8 up to 256, not {' and '.join(map(str, sizes))}"
        if here.capability is None or here.capability < (8, 0) or not here.flash_kernels:
            yield "torch's flash-attention kernels need an NVIDIA GPU of compute capability 8.0 or newer"
    if requested == "flash_attention_3":  # the kernel of varlen, in torch's own place for it
        if here.capability is None or here.capability[0] != 9:
            yield "FlashAttention-3 needs a Hopper GPU (compute capability 9)"
        if here.no_flash_3 is not None:
            yield here.no_flash_3
