"""The gate for models that write: what the run's model and its export say of held-out documents, token by token.

Letters: T tokens of a document, S of them trained, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig

from finetune.data.dataset import until_end
from finetune.data.samples import Example, Image
from finetune.export.figures import Figures
from finetune.export.trained import Trained

_KEPT_BYTES = 2**28  # of the run's log-probabilities, fp32
_GREEDY_ROWS, _GREEDY_TOKENS = 4, 24
Pictures = Callable[[Sequence[Image], Tensor], dict[str, Tensor]]  # images, ids (1, T) -> what a forward takes


def end_tokens(folder: Path) -> set[int]:
    try:
        ends = GenerationConfig.from_pretrained(folder).eos_token_id
    except OSError:
        return set()
    return set(ends) if isinstance(ends, list) else {ends} - {None}  # pyright: ignore[reportReturnType]


class _Sequence(NamedTuple):
    """A document of a held-out row, or its prompt."""

    ids: Tensor  # (T,)
    mask: Tensor  # (T,)
    images: tuple[Image, ...]

    @property
    def prompt(self) -> _Sequence:
        end = int(self.mask.int().argmax())
        return _Sequence(self.ids[:end], self.mask[:end], tuple(one for one in self.images if one.end <= end))

    def inputs(self, pictures: Pictures, device: torch.device) -> dict[str, Tensor]:
        """Returns what a forward takes."""
        found = {"input_ids": self.ids[None], **pictures(self.images, self.ids[None])}
        return {name: value.to(device) for name, value in found.items()}


@dataclass
class AnswerReference:
    """What the run's model says, kept while the export is in its place."""

    sequences: list[_Sequence]
    log_probs: list[Tensor]  # (S, V) each
    prompts: list[_Sequence]
    texts: list[list[int]]
    pictures: Pictures  # by the base's processor, whose settings the export has as well

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        model: Any,
        pictures: Pictures,
        trained: Trained,
        examples: list[Example],
        figures: Figures,
        context: int | None,
    ) -> AnswerReference:
        """context: the tokens that the export takes; None: as the run's model."""
        cut, whole = slice(context), [one for e in examples for one in e.sequences]
        sequences = [
            _Sequence(
                torch.from_numpy(one.input_ids[cut].astype("int64")), torch.from_numpy(one.loss_mask[cut]), one.images
            )
            for one in whole
            if one.loss_mask[cut].any()
        ]
        kept, log_probs, kl_base, room = [], [], 0.0, _KEPT_BYTES
        adapted = hasattr(model, "disable_adapter")
        for sequence in sequences:
            if room <= 0:
                break
            found = _log_probs(model, sequence, pictures)
            if adapted:
                with model.disable_adapter():
                    kl_base += float(_kl(found, _log_probs(model, sequence, pictures)).sum())
            room -= found.nbytes
            kept.append(sequence)
            log_probs.append(found)
        figures.rows, figures.tokens = len(kept), sum(map(len, log_probs))
        figures.kl_base = kl_base / figures.tokens if adapted and figures.tokens else None
        ends = end_tokens(trained.settings)
        prompts = [prompt for one in kept if len((prompt := one.prompt).ids)]
        prompts = [one for one in prompts if context is None or len(one.ids) + _GREEDY_TOKENS <= context][:_GREEDY_ROWS]
        texts = [_greedy(model, prompt, pictures, ends) for prompt in prompts]
        return cls(kept, log_probs, prompts, texts, pictures)

    @torch.no_grad()
    def compare(self, model: Any, ends: set[int], figures: Figures) -> None:
        """Fill in how the export's model differs. ends: the tokens that end its answers."""
        rows = model.get_input_embeddings().weight.shape[0]
        highest = max((int(one.ids.max()) for one in self.sequences), default=0)
        if highest >= rows:
            figures.problems.append(
                f"token {highest} has no embedding: the export has {rows} rows, added ones are lost"
            )
            return
        head, embeddings = model.get_output_embeddings().weight, model.get_input_embeddings().weight
        if model.config.get_text_config().tie_word_embeddings and not torch.equal(head, embeddings):
            figures.problems.append("config.json ties the head to the embeddings, and the files hold another head")
        total, worst, same = 0.0, 0.0, 0
        for sequence, ours in zip(self.sequences, self.log_probs, strict=True):
            theirs = _log_probs(model, sequence, self.pictures)
            width = min(ours.shape[1], theirs.shape[1])  # padding of the vocabulary, if any
            kl = _kl(ours[:, :width], theirs[:, :width])
            total += float(kl.sum())
            worst = max(worst, float(kl.max()) if kl.isfinite().all() else float("inf"))
            same += int((ours.argmax(1) == theirs.argmax(1)).sum())
        if figures.tokens:
            figures.kl_mean, figures.kl_max = max(0.0, total / figures.tokens), worst
            figures.top1 = same / figures.tokens
        pairs = zip(self.prompts, self.texts, strict=True)
        equal = [_greedy(model, prompt, self.pictures, ends) == text for prompt, text in pairs]
        figures.greedy = sum(equal) / len(equal) if equal else None


def _log_probs(model: Any, sequence: _Sequence, pictures: Pictures) -> Tensor:  # (S, V) fp32, of the trained tokens
    inputs = sequence.inputs(pictures, model.device)
    logits = model(**inputs, use_cache=False).logits[0, :-1]
    return torch.log_softmax(logits[sequence.mask[1:].to(logits.device)].float(), dim=-1).cpu()


def _kl(ours: Tensor, theirs: Tensor) -> Tensor:  # (S,) nats
    """Returns KL(ours, theirs), normalised again in fp64: in fp32 a small divergence drowns in the rounding of its
    terms."""
    p, q = (torch.log_softmax(one.double(), dim=1) for one in (ours, theirs))
    return (p.exp() * (p - q)).sum(dim=1)


def _greedy(model: Any, prompt: _Sequence, pictures: Pictures, ends: set[int]) -> list[int]:
    """Returns the likeliest tokens after a prompt, up to and without an end token."""
    inputs = prompt.inputs(pictures, model.device)
    settings = GenerationConfig(
        max_new_tokens=_GREEDY_TOKENS, do_sample=False, eos_token_id=sorted(ends) or None, pad_token_id=0
    )
    mask = torch.ones_like(inputs["input_ids"])
    output = model.generate(**inputs, attention_mask=mask, generation_config=settings)[0, len(prompt.ids) :]
    return until_end(output.tolist(), ends)
