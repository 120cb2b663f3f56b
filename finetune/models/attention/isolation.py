"""Tests whether packed documents get the loss and the gradients that plain transformers gives each of them alone.

On a tiny copy of the model's config (`models.tiny_config`), on the CPU and in fp32; an architecture's claims of
support, and the name of a family, are not relied on. Verdicts are cached under all that they depend on.

Letters: T tokens of a row, N documents.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, PretrainedConfig

from finetune.data.batch import MediaPlace, collate, row_places
from finetune.data.media.family_table import Family, Kinds, family_of, file_token
from finetune.data.samples import Example
from finetune.data.samples import Sequence as Document
from finetune.models.attention import per_document
from finetune.models.attention.kernels import WITHIN_DOCUMENTS, with_unread_mask
from finetune.models.attention.mixers import (
    Mixer,
    Mixers,
    documents_of_forward,
    find_mixers,
    run_per_document,
    takes_batches,
)
from finetune.models.attention.per_document import DOCUMENTS, rotate_per_document, with_whole_images
from finetune.models.clips_alone import run_clips_alone
from finetune.models.remote_code import from_config
from finetune.models.tiny_config import CHUNK, PRETRAINED_POSITIONS, VOCABULARY, tiny_config, tiny_whole
from finetune.models.towers import GRIDS, attention_of_parts, row_positions, tower_modules
from finetune.models.trials import FAILURES, cached, failure_text, not_tried, randomize, tiny_problem
from finetune.models.wrapped import accepted, accepted_names

# Shorter and longer than windows and chunks, and than the length from which RoPE grows. In ascending order: `dynamic`
# RoPE of plain transformers, the reference, then has for each document what a new model would have.
LENGTHS = (CHUNK - 1, PRETRAINED_POSITIONS - 3, PRETRAINED_POSITIONS + 5)
# As they lie in a row: a long document first, if one chooses among tokens of the others that it should not see.
ORDER: tuple[int, ...] = (2, 0, 1)
ROW = tuple(LENGTHS[i] for i in ORDER)
LOSS_TOLERANCE = 1e-6  # relative, of a document's loss
GRADIENT_TOLERANCE = 1e-5  # of a parameter's gradient, relative to its norm
_SMALL = 1e-2  # of the largest norm of a gradient: smaller ones are compared with that, as their rounding is
_CAUSAL_TOLERANCE = 1e-4
_FIRST_TOKEN = 3  # below are the ids that mean something
_SHARED = LENGTHS[1] // 2  # tokens that the last two documents begin with

# (lengths of documents, tokens that each shares with the beginning of the one before) -> further inputs of a
# forward
Prepare = Callable[..., dict[str, Any]]


@dataclass(frozen=True)
class Verdict:
    """Reasons why not, in words; None if it is as in plain transformers."""

    packed: str | None  # several documents in a row, by this attention
    positions: str | None  # one document with `position_ids`, by plain attention; else they must be left out
    causal: str | None  # plain transformers: a token sees no later one
    shared: str | None = "no trial"  # documents whose common beginning is in the row once, by this attention
    mixers: Mixers = field(default_factory=dict)  # that run once for each document, so that `packed` is None


@dataclass(frozen=True)
class Differences:
    """Relative differences between documents computed in some way and each alone by plain transformers."""

    loss: float
    gradient: float
    parameter: str  # the one whose gradient differs most

    @property
    def within_rounding(self) -> bool:
        return self.loss <= LOSS_TOLERANCE and self.gradient <= GRADIENT_TOLERANCE


def verdict(config: PretrainedConfig, implementation: str | None, prepare: Prepare) -> Verdict:
    """Returns the verdict from the cache, or from a trial. implementation: of attention, transformers' name; None:
    documents do not share a row."""

    def trial() -> dict[str, Any]:
        plain = Trial(tiny, None)
        reference, causal = plain.alone(), plain.causality_problem()
        positions = trial_problem(lambda: compare(reference, Trial(tiny, None, plain).alone(with_positions=True)))
        if implementation is None:
            return asdict(Verdict("documents are not tried together", positions, causal))
        packed, mixers = _packing_problem(tiny, implementation, prepare, plain, reference)
        shared = f"{', '.join(mixers)} runs along each document whole" if mixers else "no trial"
        if packed is None and not mixers and implementation in WITHIN_DOCUMENTS:
            shared = trial_problem(lambda: compare(reference, Trial(tiny, implementation, plain).shared(prepare)))
        return asdict(Verdict(packed, positions, causal, shared, mixers=mixers))

    try:
        tiny = tiny_config(config)
        return Verdict(**cached(tiny, implementation, trial))
    except FAILURES as error:  # one document per forward is always right
        return Verdict(packed=not_tried(error), positions=not_tried(error), causal=None)


def isolation_problem(config: PretrainedConfig, kinds: Kinds = None) -> str | None:
    """Returns why packed documents with files differ from each alone; None if they do not. kinds: see `family_of`."""

    def differ(tiny: Any) -> str | None:
        alone, packed = ImageTrial(tiny, None, kinds), ImageTrial(tiny, DOCUMENTS, kinds)
        return trial_problem(lambda: compare(alone.alone(), packed.packed()))

    name = "images" if kinds is None else ", ".join((kinds,) if isinstance(kinds, str) else kinds)
    return tiny_problem(config, partial(tiny_whole, kinds=kinds), name, differ)


# --- trying


def _packing_problem(
    tiny: PretrainedConfig, implementation: str, prepare: Prepare, plain: Trial, reference: Computed
) -> tuple[str | None, Mixers]:
    """Returns (reason, {}) with the arguments of a run, or (None, mixers that run per document)."""

    def as_in_a_run(lengths: tuple[int, ...]) -> dict[str, Any]:
        return with_unread_mask(prepare(lengths), torch.device("cpu"))

    def packs(arguments: Prepare, mixers: Mixers) -> str | None:
        return trial_problem(lambda: compare(reference, Trial(tiny, implementation, plain, mixers).packed(arguments)))

    if (reason := packs(as_in_a_run, {})) is None:
        return None, {}
    try:
        trial = Trial(tiny, implementation, plain)
        mixers = find_mixers(trial.model, lambda: trial.row_logits(as_in_a_run), ROW)
    except FAILURES:
        return packs(prepare, {}) or reason, {}  # without the mask that must not be read the error is clearer
    if (still := packs(as_in_a_run, mixers)) is None:
        return None, batched_where_same(mixers, lambda tried: packs(as_in_a_run, tried) is None)
    return f"{reason}; with {', '.join(mixers)} once for each document: {still}", {}


def batched_where_same(mixers: Mixers, same: Callable[[Mixers], bool]) -> Mixers:
    """Returns the mixers, set to compute documents of like length as one batch if that gives the same: all of them, or
    each in addition to those before it."""
    able = [name for name, mixer in mixers.items() if takes_batches(mixer)]
    for names in (able, *([name] for name in able[: len(able) if len(able) > 1 else 0])):
        tried = {n: Mixer(**{**mixer, "batched": n in names or mixer["batched"]}) for n, mixer in mixers.items()}
        if names and same(tried):
            mixers = tried
            if names is able:
                break
    return mixers


def trial_problem(difference: Callable[[], Differences]) -> str | None:
    """Returns why a trial's result is not the same to rounding, or could not be computed."""
    try:
        differences = difference()
    except FAILURES as error:
        return failure_text(error)
    if differences.within_rounding:
        return None
    return (
        f"in a trial, the loss differs from that of each document alone by {differences.loss:.0e}, the gradient of "
        f"`{differences.parameter}` by {differences.gradient:.0e}"
    )


@dataclass(frozen=True)
class Computed:
    """Losses of the tokens of each document, and the gradients of their sum."""

    losses: tuple[Tensor, ...]  # N of (tokens - 1,)
    gradients: dict[str, Tensor | None]


class TinyModel:
    """A tiny model in training mode, and the documents that are tried on it, (1, t) ids each."""

    def __init__(self, model: Any, documents: list[Tensor]):
        self.model, self.documents = model, documents
        self.model.train()

    def losses(self, logits: Sequence[Tensor]) -> list[Tensor]:  # (1, t, V) of each document -> (t - 1,)
        return [
            cross_entropy(own[0, :-1].float(), document[0, 1:], reduction="none")
            for own, document in zip(logits, self.documents, strict=True)
        ]

    def computed(self, logits: Sequence[Tensor]) -> Computed:
        """Returns the losses, and their gradients by a backward."""
        losses = self.losses(logits)
        self.model.zero_grad(set_to_none=True)
        torch.stack([token_losses.sum() for token_losses in losses]).sum().backward()
        gradients = {name: p.grad for name, p in self.model.named_parameters()}
        return Computed(tuple(token_losses.detach() for token_losses in losses), gradients)


class Trial(TinyModel):
    """A tiny text model under one attention; implementation None: transformers' default."""

    def __init__(
        self,
        tiny: PretrainedConfig,
        implementation: str | None,
        like: Trial | None = None,
        mixers: Mixers | None = None,
    ):
        torch.manual_seed(0)
        config = copy.deepcopy(tiny)  # transformers writes the attention into it
        if implementation is None and getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None:
            implementation = "eager"  # transformers 5.17 takes sdpa, which leaves out the cap
        common: dict[str, Any] = {} if implementation is None else {"attn_implementation": implementation}
        if getattr(config.get_text_config(), "output_router_logits", False):
            config.get_text_config().output_router_logits = False  # `CausalLMWithLoss` does not request it, either
        model: Any = from_config(AutoModelForCausalLM, config, dtype=torch.float32, **common)
        self._takes = accepted_names(model)
        if like is None:
            randomize(model)
        else:
            model.load_state_dict(like.model.state_dict())
            rotate_per_document(model)
            run_per_document(model, mixers or {})
        generator = torch.Generator().manual_seed(1)
        documents = [torch.randint(_FIRST_TOKEN, VOCABULARY, (1, n), generator=generator) for n in LENGTHS]
        documents[-1][:, :_SHARED] = documents[-2][:, :_SHARED]
        super().__init__(model, documents)

    def alone(self, with_positions: bool = False) -> Computed:
        positions = [{"position_ids": _positions([n])} if with_positions else {} for n in LENGTHS]
        return self.computed([self._logits(d, **p) for d, p in zip(self.documents, positions, strict=True)])

    def packed(self, prepare: Prepare) -> Computed:
        """Returns the losses of all documents in one row, as in a run's forward."""
        by_document = dict(zip(ORDER, self.row_logits(prepare).split(ROW, dim=1), strict=True))
        return self.computed([by_document[i] for i in range(len(LENGTHS))])

    def row_logits(self, prepare: Prepare) -> Tensor:  # (1, T, V)
        row = torch.cat([self.documents[i] for i in ORDER], dim=1)
        inputs = {"position_ids": _positions(ROW), **prepare(ROW)}
        with documents_of_forward(ROW):
            return self._logits(row, **accepted(inputs, self._takes))

    def shared(self, prepare: Prepare) -> Computed:
        """Returns the losses if the last two documents share their beginning."""
        prefixes = (*(0 for _ in LENGTHS[1:]), _SHARED)
        own = [n - prefix for n, prefix in zip(LENGTHS, prefixes, strict=True)]
        row, positions = (
            torch.cat([whole[:, prefix:] for whole, prefix in zip(wholes, prefixes, strict=True)], dim=1)
            for wholes in (self.documents, [torch.arange(n)[None] for n in LENGTHS])
        )
        arguments = with_unread_mask(prepare(tuple(own), prefixes), row.device)
        logits = self._logits(row, position_ids=positions, **arguments)
        return self.computed(logits[:, row_places(own, prefixes)].split(LENGTHS, dim=1))

    def causality_problem(self) -> str | None:
        document = self.documents[-1].clone()
        with torch.no_grad():
            before = self._logits(document)
            document[0, -1] = _FIRST_TOKEN if document[0, -1] != _FIRST_TOKEN else _FIRST_TOKEN + 1
            moved = (self._logits(document) - before)[0, :-1].abs().max() / before.abs().max()
        return None if moved <= _CAUSAL_TOLERANCE else f"a changed last token moves earlier logits by {moved:.1e}"

    def _logits(self, input_ids: Tensor, **arguments: Any) -> Tensor:  # (1, T, V)
        without_cache = accepted({"use_cache": False}, self._takes)
        return self.model(input_ids=input_ids, **without_cache, **arguments).logits


def _positions(lengths: Sequence[int]) -> Tensor:  # (1, T)
    return torch.cat([torch.arange(length) for length in lengths])[None]


# Tokens of text, or an image of so many cells (negative), of each document. They begin and end with text.
IMAGE_DOCUMENTS: tuple[tuple[int, ...], ...] = ((4, -2, 9), (11,), (3, -3, 2, -2, 6))
ONE_CLIP_DOCUMENTS = ((4, -3, 9), (11,), (3, -6, 6))  # for `Family.alone`; Granite Speech has three tokens of a window


def _in_turns(documents: Sequence[Sequence[int]], rows: Sequence[Family]) -> list[list[Family]]:
    """Returns the kind of each document's files, each kind after the other."""
    turns = itertools.cycle(rows)
    return [[next(turns) for piece in pieces if piece < 0] for pieces in documents]


class ImageTrial(TinyModel):
    """A tiny model with its towers; implementation: of the language model's attention, None: transformers' own."""

    def __init__(self, tiny: Any, implementation: str | None, kinds: Kinds = None):
        torch.manual_seed(0)
        self.config, self.family = copy.deepcopy(tiny), family_of(tiny, kinds)
        self._documents = ONE_CLIP_DOCUMENTS if self.family.alone else IMAGE_DOCUMENTS
        self._kinds = _in_turns(self._documents, self.family.each)
        attention = attention_of_parts(self.config, implementation or "sdpa")
        model: Any = from_config(
            AutoModelForMultimodalLM, self.config, dtype=torch.float32, attn_implementation=attention
        )
        randomize(model)
        with torch.no_grad():
            for parameter in model.parameters():  # convolutions: as large as their inputs
                if parameter.dim() > 2:
                    parameter.mul_((parameter.shape[-1] / parameter[0].numel()) ** 0.5)
            for module in model.modules():  # Gemma 3n and 4 do not scale products of queries and keys: norms do
                if getattr(module, "scaling", None) == 1.0 and hasattr(module, "q_norm"):
                    module.q_norm.weight.mul_(module.head_dim**-0.5)
        generator = torch.Generator().manual_seed(1)

        def ids(piece: int, files: Iterator[Family]) -> Tensor:
            if piece > 0:
                return torch.randint(_FIRST_TOKEN, 100, (piece,), generator=generator)
            row = next(files)
            token = file_token(self.config, row)
            if row.kind == "video":  # of so many places in time, of two tokens each
                return torch.tensor([token, token, _FIRST_TOKEN] * -piece if row.frames_apart else [token] * 2 * -piece)
            return torch.full((row.tokens(self.config) if row.tokens else -piece,), token)

        each = zip(self._documents, map(iter, self._kinds), strict=True)
        super().__init__(model, [torch.cat([ids(piece, files) for piece in pieces])[None] for pieces, files in each])
        if self.family.steady:
            for module in tower_modules(model):
                module.eval()
        if implementation is not None:
            for row in self.family.each:
                run_clips_alone(model, row)
        # Of each document's files of each kind.
        self.cells = {row.kind: self._cells_of(row) for row in self.family.each}
        self.pictures: dict[str, Tensor] = {}
        for row in self.family.each:
            self.pictures |= row.pictures(self.config, [one for cells in self.cells[row.kind] for one in cells])

    def _cells_of(self, row: Family) -> list[list[int]]:
        sizes = [[-piece for piece in pieces if piece < 0] for pieces in self._documents]
        return [
            [size for size, one in zip(of_document, kinds, strict=True) if one.kind == row.kind]
            for of_document, kinds in zip(sizes, self._kinds, strict=True)
        ]

    def pictures_of(self, document: int) -> dict[str, Tensor]:
        """Returns views of a document's pictures among those of all, of which no two are equal."""
        found: dict[str, Tensor] = {}
        for row in self.family.each:
            cells = self.cells[row.kind]
            if cells[document]:
                found |= self._views(row, sum(map(len, cells[:document])), len(cells[document]))
        return found

    def _views(self, row: Family, first: int, count: int) -> dict[str, Tensor]:
        """Returns views of files [first, first + count) of a kind."""
        names = row.pictures(self.config, [2, 2]).keys()
        grids = {name: self.pictures[name].narrow(0, first, count) for name in names if name in GRIDS.get(row.kind, ())}
        pixels = self.pictures[row.main_input]
        if grids:
            patches = self.pictures[next(iter(grids))].prod(1).tolist()
            return {
                row.main_input: pixels.narrow(0, sum(patches[:first]), sum(patches[first : first + count])),
                **grids,
            }
        if (frames := self.pictures.get("num_frames_per_video")) is not None and row.kind == "video":
            begin, end = int(frames[:first].sum()), int(frames[: first + count].sum())
            parts = {name: (first, count) if name == "num_frames_per_video" else (begin, end - begin) for name in names}
            return {name: self.pictures[name].narrow(0, *part) for name, part in parts.items()}
        dimension = 1 if "pixel_attention_mask" in names else 0
        mine = {name: self.pictures[name].narrow(dimension, first, count) for name in names}
        if row.alone is None or row.ear is None:
            return mine
        (frames,) = row.ear.frames_in(mine)  # of one clip, without what is behind its end
        ends = {name: int(one.sum()) if one.dim() == 2 else frames for name, one in mine.items()}
        return {name: one[:, : ends[name]] if one.dim() > 1 else one for name, one in mine.items()}

    def alone(self) -> Computed:
        """Returns the losses of each document as plain transformers computes them."""
        logits = []
        for i, ids in enumerate(self.documents):
            inputs = self.pictures_of(i)
            types = sum((kind * (ids == token).int() for kind, token in self._types()), torch.zeros_like(ids))
            in_windows = any(row.in_windows_only for row in self.family.each)
            if in_windows or any(name in inputs for names in GRIDS.values() for name in names):
                inputs["mm_token_type_ids"] = types
            elif self.family.sees_whole_images:
                inputs["token_type_ids"] = types
            logits.append(self.model(input_ids=ids, use_cache=False, **inputs).logits)
        return self.computed(logits)

    def _types(self) -> list[tuple[int, int]]:
        """Returns transformers' number of each kind that is seen, and its token."""
        numbers = {"image": 1, "video": 2}
        rows = [row for row in self.family.each if row.kind in numbers]
        return [(numbers[row.kind], file_token(self.config, row)) for row in rows]

    def packed(self) -> Computed:
        return self.computed(self.row_logits())

    def row_logits(self) -> tuple[Tensor, ...]:  # (1, t, V) each
        """Returns the logits of all documents in one row with the pixels of all images, as in a run's forward."""
        rows = [ids[0].numpy().astype(np.int32) for ids in self.documents]
        batch = collate([Example("trial", 0, 0, (Document(ids, np.zeros(len(ids), bool)),)) for ids in rows])
        media = tuple(MediaPlace(i, 0, 0, kind=one.kind) for i, files in enumerate(self._kinds) for one in files)
        batch = replace(batch, inputs={**batch.inputs, **self.pictures}, media=media)
        if positions := row_positions(self.config):
            batch = positions(batch)
        arguments = with_unread_mask(per_document.prepare(batch.sequence_lengths), torch.device("cpu"))
        if whole := [row for row in self.family.each if row.sees_whole_images]:
            tokens = [file_token(self.config, row) for row in whole]
            with_whole_images(arguments, batch.inputs["input_ids"], tokens, whole[0].in_windows_only)
        logits = self.model(**batch.inputs, **arguments, use_cache=False).logits
        return logits.split(list(map(len, rows)), dim=1)


def compare(reference: Computed, other: Computed) -> Differences:
    """Returns the distance of documents computed in another way from the reference."""
    loss = max(
        _number((ours.double() - theirs.double()).abs().max() / theirs.double().mean())
        for ours, theirs in zip(other.losses, reference.losses, strict=True)
    )
    zero = torch.zeros((), dtype=torch.float64)
    before, after = (
        {name: zero if g is None else g.double() for name, g in computed.gradients.items()}
        for computed in (reference, other)
    )
    norms = {name: gradient.norm() for name, gradient in before.items()}
    smallest = _SMALL * max(norms.values())
    distances = {
        name: _number((gradient - after[name]).norm() / max(norms[name], smallest)) for name, gradient in before.items()
    }
    worst = max(distances, key=lambda name: distances[name])
    return Differences(loss, distances[worst], worst)


def _number(value: Tensor) -> float:
    return float("inf") if value.isnan() else value.item()
