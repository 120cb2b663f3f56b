"""The gate for small models, which are loaded whole: answers of the run's model and of its export on held-out rows.

    AnswerReference   models that write: the tokens of documents, and greedy texts
    ScoreReference    models of scores (`reward`, `classify`): sequences, by transformers' own forward for the export,
                      with padding at the end, as in a batch: it looks for the last token that is not padding

A reference keeps what the run's model says while the export is loaded in its place.

Letters: T tokens of a document, S of them trained, V vocabulary; d sequences of an example, N labels.
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
from finetune.models.wrapped import output_head
from finetune.release.export.figures import Figures
from finetune.utils import unwrap_peft

_KEPT_BYTES = 2**28  # of the run's log-probabilities, fp32
_GREEDY_ROWS, _GREEDY_TOKENS = 4, 24
# Images, ids (1, T) -> inputs of a forward; None without images.
Pictures = Callable[[Sequence[Image], Tensor], dict[str, Tensor]] | None


def end_tokens(folder: Path) -> set[int]:
    """Returns the tokens that end an answer, by a folder's generation config."""
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

    def inputs(self, pictures: Pictures, device: torch.device) -> dict[str, Tensor]:
        """Returns the inputs of a forward."""
        inputs = {"input_ids": self.ids[None], **(pictures(self.images, self.ids[None]) if pictures else {})}
        return {name: value.to(device) for name, value in inputs.items()}


@dataclass
class AnswerReference:
    """Log-probabilities and greedy texts of the run's model."""

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
        ends: set[int],
        examples: list[Example],
        figures: Figures,
        context: int | None,
    ) -> AnswerReference:
        """ends: the tokens that end the run's answers; context: the tokens that the export takes; None: as the run's
        model."""
        sequences, log_probs, kl_base, room = list[_Sequence](), list[Tensor](), 0.0, _KEPT_BYTES
        adapted, cut = hasattr(model, "disable_adapter"), slice(context)
        for one in (one for example in examples for one in example.sequences if one.loss_mask[cut].any()):
            if room <= 0:
                break
            ids, mask = torch.from_numpy(one.input_ids[cut].astype("int64")), torch.from_numpy(one.loss_mask[cut])
            sequence = _Sequence(ids, mask, one.images)
            ours = _log_probs(model, sequence, pictures)
            if adapted:
                with model.disable_adapter():
                    kl_base += float(_kl(ours, _log_probs(model, sequence, pictures)).sum())
            room -= ours.nbytes
            sequences.append(sequence)
            log_probs.append(ours)
        figures.rows, figures.tokens = len(sequences), sum(map(len, log_probs))
        figures.kl_base = kl_base / figures.tokens if adapted and figures.tokens else None
        prompts = []
        for ids, mask, images in sequences:
            end = int(mask.int().argmax())
            if end and (context is None or end + _GREEDY_TOKENS <= context):
                prompts.append(_Sequence(ids[:end], mask[:end], tuple(one for one in images if one.end <= end)))
        prompts = prompts[:_GREEDY_ROWS]
        texts = [_greedy(model, prompt, pictures, ends) for prompt in prompts]
        return cls(sequences, log_probs, prompts, texts, pictures)

    @torch.no_grad()
    def compare(self, model: Any, ends: set[int], figures: Figures) -> None:
        """Fill in how the export's model differs. ends: the tokens that end its answers."""
        if _lacks_rows(model, [one.ids for one in self.sequences], figures):
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


def _lacks_rows(model: Any, ids: list[Tensor], figures: Figures) -> bool:
    """Returns, and reports, whether a token has no embedding."""
    rows, highest = len(model.get_input_embeddings().weight), max((int(one.max()) for one in ids), default=0)
    if highest >= rows:
        figures.problems.append(f"token {highest} has no embedding: the export has {rows} rows, added ones are lost")
    return highest >= rows


def _log_probs(model: Any, sequence: _Sequence, pictures: Pictures) -> Tensor:  # (S, V) fp32, of the trained tokens
    inputs = sequence.inputs(pictures, model.device)
    logits = model(**inputs, use_cache=False).logits[0, :-1]
    return torch.log_softmax(logits[sequence.mask[1:].to(logits.device)].float(), dim=-1).cpu()


def _kl(ours: Tensor, theirs: Tensor) -> Tensor:  # (S,) nats
    """Returns KL(ours, theirs), normalized again in fp64: in fp32 a small divergence drowns in the rounding of its
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


# --- scores


@dataclass
class ScoreReference:
    """Scores of the run's model, read at the last token of each sequence, as in training."""

    ids: list[list[Tensor]]  # (T,) of each sequence of each example
    scores: list[Tensor]  # (d, N) fp32 of each example
    padding: int | None  # the token that the export's tokenizer puts behind shorter texts

    @classmethod
    @torch.no_grad()
    def of(cls, model: Any, padding: int | None, examples: list[Example], figures: Figures) -> ScoreReference:
        ids = [[torch.from_numpy(one.input_ids.astype("int64")) for one in e.sequences] for e in examples]
        run = cls(ids, _scores(model, ids), padding)
        figures.rows, figures.scored = len(ids), sum(map(len, ids))
        if hasattr(model, "disable_adapter") and figures.scored:
            with model.disable_adapter():
                figures.kl_base = float(_divergences(run.scores, _scores(model, ids)).mean())
        return run

    @torch.no_grad()
    def compare(self, model: Any, ends: set[int], figures: Figures) -> None:
        """Fill in how the export's scores differ. ends: the tokens that end an answer, of which there is none."""
        if _lacks_rows(model, [one for sequences in self.ids for one in sequences], figures):
            return
        theirs = []
        for sequences in self.ids:
            scores = []
            for ids in sequences:
                behind = ids.new_full((0 if self.padding is None else 2,), self.padding or 0)
                mask = torch.cat([torch.ones_like(ids), torch.zeros_like(behind)])[None].to(model.device)
                padded = torch.cat([ids, behind])[None].to(model.device)
                scores.append(model(input_ids=padded, attention_mask=mask, use_cache=False).logits.float().cpu())
            theirs.append(torch.cat(scores))
        if any(a.shape != b.shape for a, b in zip(self.scores, theirs, strict=True)):
            figures.problems.append(f"it has {theirs[0].shape[1]} labels, and the run {self.scores[0].shape[1]}")
        elif figures.scored:
            divergences = _divergences(self.scores, theirs)
            figures.kl_mean, figures.kl_max = float(divergences.mean()), float(divergences.max())
            same = [a == b for a, b in zip(_choices(self.scores), _choices(theirs), strict=True)]
            figures.top1 = sum(same) / len(same) if same else None
            figures.score_max = float((torch.cat(self.scores) - torch.cat(theirs)).abs().max())


def _scores(model: Any, examples: list[list[Tensor]]) -> list[Tensor]:  # (d, N) fp32 of each example
    body, head = unwrap_peft(model).base_model, output_head(model)

    def at_end(ids: Tensor) -> Tensor:  # (T,) -> (1, N)
        return head(body(input_ids=ids[None].to(model.device), use_cache=False)[0][:, -1]).float().cpu()

    return [torch.cat([at_end(ids) for ids in sequences]) for sequences in examples]


def _divergences(ours: list[Tensor], theirs: list[Tensor]) -> Tensor:  # (texts,) nats
    """Returns KL(ours, theirs) of the labels. For single scores it is the most that the KL of the probability that one
    answer is better than another, sigmoid(s - s'), can be: its second derivative is at most 1/4, so (difference)^2 / 8.
    """
    one, other = torch.cat(ours), torch.cat(theirs)
    return (one - other).double().square()[:, 0] / 8 if one.shape[1] == 1 else _kl(one, other)


def _choices(scores: list[Tensor]) -> list[int]:
    """Returns the label of each text; for single scores the best answer of each example that has several."""
    if any(one.shape[1] > 1 for one in scores):
        return [int(one[0].argmax()) for one in scores]
    return [int(one.argmax()) for one in scores if len(one) > 1]
