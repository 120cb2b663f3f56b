"""`verify --url`: compares a live server of any kind with the trained model, through the OpenAI API.

    prompts of held-out rows ── the server, greedy ──> text ── the run's model reads it ──> is each token its likeliest?

The run's model reads the server's text, so that one rounding does not change later tokens: a token that is not
its likeliest one is a flip, and its gap in log-probability shows whether rounding can explain it. Also compared:
the number of tokens of the prompt (template, a doubled beginning-of-text token), ends of answers, and whether the
base alone explains them better, as if the adapter were missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table

from finetune.checkpoints.trained import Trained
from finetune.data.building import OpenedSources
from finetune.data.formats.detect import parse_row
from finetune.data.samples import (
    BadRow,
    Conversation,
    Message,
    Preference,
    PromptCompletion,
    PromptOnly,
    Ranked,
    Reference,
)
from finetune.errors import RunFailure, UserError
from finetune.models.remote_code import load_auto
from finetune.recipe import Recipe
from finetune.recipe.schema import Audio, HeldOut, Images, Videos
from finetune.release.export.verify_answers import end_tokens, load_reference, quiet_loading
from finetune.release.inference.answering import Answerer, Prompt, chat_template, file_rules
from finetune.release.inference.chat import image_url_part, input_audio_part, video_url_part
from finetune.release.inference.server_client import Server

if TYPE_CHECKING:
    from finetune.data.media.stored_files import FileRules

# For any format of a server; docs/reference/export.md.
TOP1, GAP_MEAN, GAP_MAX = 0.95, 1e-2, 1.0  # share; nats for a token that is not the likeliest
_ROWS_PER_SOURCE = 100


@dataclass
class Live:
    """Comparison of a server with a run."""

    model: str
    rows: int = 0
    tokens: int = 0  # written by the server, including ends
    top1: float | None = None  # share of tokens that are the run's likeliest
    gap_mean: float | None = None  # nats: log-probability of the likeliest token, less that of the server's token
    gap_max: float | None = None
    base_top1: float | None = None  # same share for the base, with adapters
    prompts: float | None = None  # share of prompts with equal numbers of tokens; None: the server does not count
    problems: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {"passed": not self.problems, **asdict(self)}

    def judge(self) -> None:
        if self.top1 is not None and self.top1 < TOP1:
            self.problems.append(f"only {self.top1:.1%} of its tokens are the run's likeliest, less than {TOP1:.0%}")
        for name, gap, limit in (("mean", self.gap_mean, GAP_MEAN), ("largest", self.gap_max, GAP_MAX)):
            if gap is not None and gap > limit:
                self.problems.append(f"{name} gap to the run's likeliest token is {gap:.3g} nats, more than {limit:g}")
        if self.base_top1 is not None and self.top1 is not None and self.base_top1 > self.top1:
            self.problems.append(
                f"the base explains more of its tokens ({self.base_top1:.1%}) than the run: the adapter is missing"
            )
        if self.prompts is not None and self.prompts < 1:
            self.problems.append(
                f"only {self.prompts:.0%} of prompts have as many tokens as in the run: another chat template or "
                "tokenizer, or a doubled beginning-of-text token"
            )


def verify_url(url: str, trained: Trained, model: str | None, base: str | None, rows: int, console: Console) -> Live:
    """Compare a server with a run. Raises UserError, and RunFailure if its answers are invalid or do not match."""
    if trained.recipe is None:
        raise UserError(f"{trained.run_dir}: no recipe.yaml here, so there are no rows to compare on. Fix: give a run")
    if trained.recipe.objective.scores_sequences:
        raise UserError(
            f"{trained.run_dir}: reward models and classifiers have no answers to compare. Fix: verify an export's "
            "folder in place of a server"
        )
    from transformers import AutoTokenizer

    server = Server(url)
    comparison = Live(server.choose(model, trained.run_dir.resolve().name))
    conversations = list(islice(_questions(trained.recipe), rows))
    with quiet_loading():
        tokenizer, processor = load_auto(AutoTokenizer, trained.settings), trained.recipe.model
        if base:
            processor = processor.model_copy(update={"name": base, "revision": None})
        reference = load_reference(trained, base)
        rules = file_rules(trained.recipe.data)
        answerer = Answerer(reference, tokenizer, chat_template(tokenizer), processor, rules)
        if answerer.chat is None:
            raise UserError(
                f"{trained.run_dir}: no chat template, so there is nothing to ask a chat server. Fix: verify an "
                "export's folder in place of a server"
            )
    _compare(server, comparison, answerer, end_tokens(trained.settings), conversations)
    comparison.judge()
    show(console, comparison)
    if comparison.problems:
        problems = "\n  ".join(comparison.problems)
        raise RunFailure(
            f"{url} does not match the trained model:\n  {problems}\nFix: serve this run's export with its template"
        )
    return comparison


def _questions(recipe: Recipe) -> Iterator[list[dict[str, Any]]]:
    """Yields the messages of held-out rows up to their last answer. Raises UserError if there are none."""
    data, count = recipe.data, 0
    sources = data.train if isinstance(data.eval, HeldOut) else data.eval_sources or data.train
    for source in map(OpenedSources(recipe).open, sources):
        for path, number, row in islice(source.reader.rows(), _ROWS_PER_SOURCE):
            try:
                sample = parse_row(row, source.source.format, source.source.columns, recipe.rollouts is not None)
                messages = _request_messages(sample, file_rules(data), path)
            except BadRow as error:
                if data.on_bad_row == "skip":
                    continue
                raise UserError(f"{path}:{number}: {error}") from None
            if messages:
                count += 1
                yield messages
    if not count:
        raise UserError(
            "the run's rows have no questions for a chat server. Fix: verify an export's folder in place of a server"
        )


def _request_messages(sample: Any, rules: Sequence[FileRules], path: str) -> list[dict[str, Any]]:
    """Returns a sample's messages before its last answer, as the API expects them; [] for other samples."""
    if isinstance(sample, Preference):
        sample = sample.chosen
    if isinstance(sample, Ranked):
        sample = sample.answers[0]
    if isinstance(sample, PromptCompletion):
        sample = sample.as_conversation()
    if isinstance(sample, PromptOnly):
        sample = sample.conversation
    if not isinstance(sample, Conversation) or sample.tools or any(one.tool_calls for one in sample.messages):
        return []
    kept: list[Message] = list(sample.messages)
    while kept and kept[-1].role != "user":
        kept.pop()
    return [{"role": one.role, "content": _content(one, rules, path)} for one in kept]


def _content(message: Message, rules: Sequence[FileRules], path: str) -> str | list[dict[str, Any]]:
    """Returns the content as text, or as parts with files as base64."""
    if not message.media:
        return message.content
    parts: list[dict[str, Any]] = []
    for i, text in enumerate(message.texts):
        if i:
            parts.append(_file_part(message.media[i - 1], rules, path))
        parts += [{"type": "text", "text": text}] * bool(text)
    return parts


def _file_part(file: Reference, rules: Sequence[FileRules], path: str) -> dict[str, Any]:
    """Returns a file of a row of `path` as a part. Raises BadRow, UserError for a video that is pictures."""
    source = _source_of(file, rules, path)
    content = source if isinstance(source, bytes) else Path(source).read_bytes()
    if file.kind == "audio":
        return input_audio_part(content)
    as_part = video_url_part if file.kind == "video" else image_url_part
    return as_part(content, path if isinstance(source, bytes) else source)


def _source_of(file: Reference, rules: Sequence[FileRules], path: str) -> str | bytes:
    """Returns the path of a file of a row, or the file itself, if a run would read it. rules: of the run."""
    from finetune.data.media.audio_files import find_clip
    from finetune.data.media.image_files import find_image
    from finetune.data.media.video_files import find_video, is_listed

    reference, bounds = file.source or b"", dict[Any, Any]((type(one), one) for one in rules)
    if file.kind == "audio":
        return find_clip(reference, bounds.get(Audio) or Audio(), path).source
    if file.kind == "image":
        return find_image(reference, bounds.get(Images) or Images(), path).source
    source = find_video(reference, bounds.get(Videos) or Videos(), path, 1.0).source
    if is_listed(source):
        raise UserError(f"{path}: videos of pictures are not sent to servers. Fix: verify the export's folder instead")
    return source


# --- the comparison


@torch.no_grad()
def _compare(
    server: Server, result: Live, answerer: Answerer, ends: set[int], conversations: list[list[dict[str, Any]]]
) -> None:
    gaps: list[float] = []
    by_base: list[bool] = []
    same_prompts: list[bool] = []
    special = {token for token in answerer.tokenizer.all_special_tokens if token}
    for messages in conversations:
        prompt, reply = answerer.prompt(messages), server.answer(result.model, messages)
        if reply.prompt_tokens is not None:
            same_prompts.append(reply.prompt_tokens == len(prompt.ids))
        if shown := sorted(token for token in special if token in reply.text):
            result.problems.append(f"an answer contains {shown[0]!r}: the token does not end it")
        written: list[int] = answerer.tokenizer(reply.text, add_special_tokens=False)["input_ids"]
        first, is_ended = len(prompt.ids) - 1, reply.finish_reason == "stop"
        written = written if is_ended else written[:-1]  # the last token may be half a character
        if reply.has_thoughts or not (written or is_ended):
            continue
        inputs = answerer.inputs([Prompt(prompt.ids + written, prompt.media)])
        log_probs = _log_probs(answerer.model, inputs)[first:]  # (written + 1, V)
        gaps += _gaps(log_probs, written, ends, is_ended)
        if hasattr(answerer.model, "disable_adapter"):
            with answerer.model.disable_adapter():
                of_base = _log_probs(answerer.model, inputs)[first:]
            by_base += [gap == 0 for gap in _gaps(of_base, written, ends, is_ended)]
    result.rows, result.tokens = len(conversations), len(gaps)
    if gaps:
        result.top1 = sum(gap == 0 for gap in gaps) / len(gaps)
        result.gap_mean, result.gap_max = sum(gaps) / len(gaps), max(gaps)
        result.base_top1 = sum(by_base) / len(by_base) if by_base else None
    else:
        result.problems.append("it wrote nothing that can be compared (thoughts are not: servers cut them off)")
    result.prompts = sum(same_prompts) / len(same_prompts) if same_prompts else None


def _log_probs(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:  # (T, V) fp32
    return torch.log_softmax(model(**inputs, use_cache=False).logits[0].float(), dim=-1).cpu()


def _gaps(log_probs: torch.Tensor, written: list[int], ends: set[int], is_ended: bool) -> list[float]:
    """Returns for each token, and for the end, its gap to the likeliest one, in nats."""
    best = log_probs.max(dim=1).values
    gaps = [float(best[i] - log_probs[i, token]) for i, token in enumerate(written)]
    if is_ended and ends:
        gaps.append(float(best[len(written)] - log_probs[len(written), sorted(ends)].max()))
    return gaps


def show(console: Console, result: Live) -> None:
    table = Table(f"{result.model} compared with the run", "")
    values = {"questions": f"{result.rows:,}", "tokens that it wrote": f"{result.tokens:,}"}
    shares = {"the run's likeliest": result.top1, "the base's likeliest": result.base_top1}
    gaps = {"gap, mean (nats)": result.gap_mean, "gap, largest": result.gap_max}
    values |= {name: f"{value:.2%}" for name, value in shares.items() if value is not None}
    values |= {name: f"{value:.3g}" for name, value in gaps.items() if value is not None}
    values["prompts with as many tokens"] = "not counted" if result.prompts is None else f"{result.prompts:.0%}"
    for name, value in values.items():
        table.add_row(name, value)
    console.print(table)
