"""From a sample to token ids and labels, with an exact mask under any chat template.

A conversation is rendered to one string, and the parts of it to train on are found as spans of characters; the string
is then tokenised once, with offsets, and a token is trained if it holds a character of a span. Nothing is tokenised in
pieces, so the ids are those that the model sees in use. Under a ChatML-shaped template:

    text    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello<|im_end|>\\n
    ids      1 872 198 13048 2 198            1 77091 198          9707 2          198
    labels   - - - - - -                      - - -                9707 2          -      (- is -100)

What is trained is what the model has to write in use: from the end of the generation prompt through the end-of-turn.
Neither the header before it nor the newline after it. Labels are aligned with the ids; `batch.py` shifts them.

The end-of-turn is found once, by rendering a short conversation (`_end_of_turn`). In a row it is trained
wherever it is what follows a content, with at most white space between; so a `{% generation %}` block that leaves it
out is extended to it, one that goes on after it is cut there, and a header that follows instead is never taken for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jinja2
import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from finetune.data.chat_template import Template, built_in_templates, own_template
from finetune.data.samples import BadRow, Conversation, PromptCompletion, Sample, Text
from finetune.errors import UserError

UNTRAINED = -100  # Hugging Face convention, the ignore_index of torch's cross entropy

Span = tuple[int, int]  # characters [begin, end) of the rendered text
Tokens = tuple[NDArray[np.int32], NDArray[np.bool_]]  # input_ids (T,), trained (T,)


@dataclass(frozen=True)
class Rendered:
    """A sample as the string that is tokenised, and the characters of it to train on."""

    text: str
    spans: list[Span]
    is_plain: bool = False  # no template wrote its BOS and its end


@dataclass(frozen=True)
class Renderer:
    """Turns samples into tokens and masks under one tokenizer, template and `train_on`. Build it with `renderer`."""

    tokenizer: PreTrainedTokenizerBase
    template: Template | None
    train_on: str  # assistant | all
    special: dict[str, str] = field(repr=False)  # bos_token, eos_token, ... as templates see them
    adds_bos: bool  # whether the tokenizer would put its BOS before a plain text
    end_of_turn: str = ""  # what the template writes after an assistant's content, such as <|eot_id|>; "" if nothing
    has_prompt: bool = False  # whether add_generation_prompt writes something

    def draw(self, sample: Sample) -> Rendered:
        """The string of a sample and the parts of it to train on.

        Raises BadRow where the template refuses the conversation, UserError for what no row could mend.
        """
        if isinstance(sample, Text):
            return Rendered(sample.text, [(0, len(sample.text))], is_plain=True)
        if isinstance(sample, PromptCompletion):
            if self.template is None:
                whole = sample.prompt + sample.completion
                return Rendered(whole, [(len(sample.prompt), len(whole))], is_plain=True)
            sample = sample.as_conversation()
        if self.template is None:
            raise UserError(
                "the tokenizer has no chat template, so messages cannot be rendered: set model.chat_template to "
                f"one of {', '.join(built_in_templates())} or to the path of a .jinja file"
            )
        return self._draw_conversation(sample, self.template)

    def tokenise(self, rendered: Sequence[Rendered]) -> list[Tokens]:
        """Ids and masks of many in one call, which the tokenizer spreads over the cores."""
        if not rendered:
            return []
        texts = [one.text for one in rendered]
        # add_special_tokens=False: the template writes its own, a second BOS would be one too many.
        batch = self.tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        found = zip(rendered, batch["input_ids"], batch["offset_mapping"], strict=True)
        return [self._tokens(one, ids, offsets) for one, ids, offsets in found]

    def _tokens(self, rendered: Rendered, ids: list[int], offsets: list[Span]) -> Tokens:
        input_ids, trained = np.asarray(ids, np.int32), tokens_in_spans(offsets, rendered.spans)
        if rendered.is_plain:
            input_ids, trained = self._with_ends(input_ids, trained)
        if self.train_on == "all":
            trained = np.ones(len(input_ids), bool)
        trained[:1] = False  # nothing predicts the first token
        return input_ids, trained

    def _with_ends(self, ids: NDArray[np.int32], trained: NDArray[np.bool_]) -> Tokens:
        """BOS before a plain text if the tokenizer would add it, EOS after; neither twice."""
        bos, eos = _token_id(self.tokenizer.bos_token_id), _token_id(self.tokenizer.eos_token_id)
        if eos is None:
            raise UserError("the tokenizer has no end-of-text token (eos_token), so plain text would never end: set it")
        if self.adds_bos and bos is not None and ids[0] != bos:
            ids, trained = np.append(np.int32(bos), ids), np.append(False, trained)
        if ids[-1] != eos:
            ids, trained = np.append(ids, np.int32(eos)), np.append(trained, True)
        return ids, trained

    def _draw_conversation(self, conversation: Conversation, template: Template) -> Rendered:
        messages = [{"role": message.role, "content": message.content} for message in conversation.messages]
        if template.marks_generation:
            text, marked = self.apply(template, messages, mark=True)
            spans = [self._close(text, span) for span in marked if span[1] > span[0]]
            return Rendered(text, self._of_completion(conversation, spans))
        text, _ = self.apply(template, messages)
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        trained = [i for i in turns if conversation.messages[i].train]
        return Rendered(text, [self._turn(text, messages, i, template) for i in trained])

    def apply(
        self, template: Template, messages: list[dict[str, str]], *, prompt: bool = False, mark: bool = False
    ) -> tuple[str, list[Span]]:
        """The rendered text, and the spans of its generation blocks if `mark`."""
        render_template: Any = render_jinja_template  # annotated as str, returns (texts, spans of each)
        try:
            texts, spans = render_template(
                conversations=[messages],
                chat_template=template.text,
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=mark,
                **self.special,
            )
        except jinja2.TemplateSyntaxError as error:
            raise UserError(f"{template.name}, line {error.lineno}: not a Jinja template: {error.message}") from None
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            # A template refuses what it has no grammar for (a system message, an order of roles) by raising.
            raise BadRow(f"{template.name} refuses this conversation: {error}") from None
        return texts[0], spans[0] if mark else []

    def _of_completion(self, conversation: Conversation, spans: list[Span]) -> list[Span]:
        """Of the generation blocks those of trained messages; needs one block a message to tell."""
        answers = [message for message in conversation.messages if message.role == "assistant"]
        if all(message.train for message in answers):
            return spans
        if len(spans) != len(answers):
            raise BadRow(
                f"the template marks {len(spans)} parts as generated for {len(answers)} assistant messages, so those "
                "of the prompt cannot be told from those of the completion"
            )
        return [span for span, message in zip(spans, answers, strict=True) if message.train]

    def _close(self, text: str, span: Span) -> Span:
        """A generation block made to end with its end-of-turn: extended to it, or cut behind it, if it does not."""
        begin, end = span
        if not self.end_of_turn:
            return span
        body = text[begin:end]
        if body.rstrip().endswith(self.end_of_turn):
            return begin, begin + len(body.rstrip())
        return begin, self._end_from(text, end)

    def _end_from(self, text: str, content_end: int) -> int:
        """Behind the end-of-turn if it is what comes next (white space may stand between), else where content ends."""
        at = content_end
        while at < len(text) and text[at].isspace():
            at += 1
        if self.end_of_turn and text.startswith(self.end_of_turn, at):
            return at + len(self.end_of_turn)
        return content_end

    def _turn(self, text: str, messages: list[dict[str, str]], i: int, template: Template) -> Span:
        """What the model writes for assistant message `i`, found by rendering what comes before it.

        Raises UserError where the conversation up to a turn is not rendered as the beginning of the whole.
        """
        prompt, _ = self.apply(template, messages[:i], prompt=True)
        if not text.startswith(prompt):
            raise UserError(_rewritten(template, i, prompt, text))
        begin, content_end = self._find_content(text, len(prompt), messages, i, template)
        end = self._end_from(text, content_end)
        if i + 1 < len(messages):
            so_far, _ = self.apply(template, messages[: i + 1])
            # Up to the end-of-turn only: some templates write a last token that a longer conversation does not have.
            if so_far[:end] != text[:end]:
                raise UserError(_rewritten(template, i, so_far[:end], text))
        return begin, end

    def _find_content(
        self, text: str, after_prompt: int, messages: list[dict[str, str]], i: int, template: Template
    ) -> Span:
        """(where training begins, where the content ends) of assistant message `i`.

        Between generation prompt and content the template may write something: the model has to write it too (the
        space of Mistral, an empty thought), so it is trained; unless the template has no generation prompt, when it
        is the header.
        """
        forms = _trimmed(messages[i]["content"])
        at = after_prompt
        form = next((form for form in forms if self.has_prompt and text.startswith(form, at)), None)
        if form is None:
            # Not right behind the prompt: a content that occurs nowhere else shows where the template puts one.
            shown, _ = self.apply(template, [*messages[:i], {"role": "assistant", "content": ANSWER}])
            at = shown.find(ANSWER, after_prompt)
            form = next((form for form in forms if at >= 0 and text.startswith(shown[:at] + form)), None)
        if form is None:
            raise UserError(
                f"{template.name} changes the content of message {i} (assistant), so what to train on cannot be "
                "told: mark it in the template with {% generation %}, or give another model.chat_template"
            )
        header = not self.has_prompt and text[after_prompt:at].strip()
        return (at if header else after_prompt), at + len(form)


def _trimmed(content: str) -> list[str]:
    """The forms in which a template may write a content, the longest first."""
    return list(dict.fromkeys((content, content.rstrip(), content.lstrip(), content.strip())))


def _rewritten(template: Template, i: int, expected: str, text: str) -> str:
    same = next(
        (k for k, (a, b) in enumerate(zip(expected, text, strict=False)) if a != b), min(len(expected), len(text))
    )
    begin = max(0, same - 20)
    return (
        f"{template.name} renders the conversation up to message {i} (assistant) differently once more messages follow "
        f"or its answer is known: {expected[begin : same + 30]!r} becomes {text[begin : same + 30]!r}. What the model "
        "would see in use is not what it would be trained on. Mark what the assistant writes in the template with "
        "{% generation %}, give another model.chat_template, or train on conversations of one turn"
    )


def _token_id(value: Any) -> int | None:
    """transformers types these attributes as anything."""
    return None if value is None else int(value)


def tokens_in_spans(offsets: Sequence[Span], spans: Sequence[Span]) -> NDArray[np.bool_]:
    """Tokens that hold a character of a span.

        offsets  (0,3) (3,8) (8,9) (9,13)      spans  (4,9)
        mask       no   yes   yes    no

    A token of no characters (a trimmed space) counts with what surrounds it.
    """
    begins, ends = np.asarray(offsets, np.int64).reshape(-1, 2).T  # (T,) each, ascending
    mask = np.zeros(len(begins), bool)
    for begin, end in spans:
        if end > begin:
            mask[np.searchsorted(ends, begin, "right") : np.searchsorted(begins, end, "left")] = True
    return mask


def renderer(
    tokenizer: PreTrainedTokenizerBase, template: Template | None = None, train_on: str = "assistant"
) -> Renderer:
    """A Renderer; `template` None is the tokenizer's own. Raises UserError for a tokenizer that has no offsets."""
    if not tokenizer.is_fast:
        raise UserError(
            f"{type(tokenizer).__name__} is a slow tokenizer: it cannot say which characters a token stands for, which "
            "the mask needs. Use a model folder with a tokenizer.json"
        )
    template = template or own_template(tokenizer)
    plain = tokenizer("a")["input_ids"]
    adds_bos = tokenizer.bos_token_id is not None and plain[:1] == [tokenizer.bos_token_id]
    special = {name: token for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    made = Renderer(tokenizer, template, train_on, special, adds_bos)
    return replace(made, end_of_turn=_end_of_turn(made), has_prompt=_has_prompt(made))


def render(
    sample: Sample, tokenizer: PreTrainedTokenizerBase, train_on: str = "assistant", template: Template | None = None
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """(input_ids (T,), labels (T,)) of one sample; labels are -100 where not trained. For many, keep a `renderer`.

    With a Llama-3-shaped template, user "2+2?" and assistant "4", where <|begin_of_text|> is 0, the two header tokens 1
    and 2, <|eot_id|> 3, "user" 10, "assistant" 11, an empty line 12, "2+2?" 20 and "4" 21:

        input_ids   0   1  10   2  12  20   3   1  11   2  12  21   3
        labels      -   -   -   -   -   -   -   -   -   -   -  21   3      (- is -100)

    Raises BadRow for a conversation the template refuses, UserError for a template that no mask fits.
    """
    made = renderer(tokenizer, template, train_on)
    input_ids, trained = made.tokenise([made.draw(sample)])[0]
    return input_ids, labels_of(input_ids, trained)


def labels_of(input_ids: NDArray[np.int32], trained: NDArray[np.bool_]) -> NDArray[np.int32]:
    """(T,) the id where trained, else -100."""
    return np.where(trained, input_ids, np.int32(UNTRAINED)).astype(np.int32)


# --- what a template is, found by trying it

QUESTION, ANSWER = "qUeStIoN", "aNsWeR"  # texts that no template contains


def _end_of_turn(made: Renderer) -> str:
    """What the template writes after an assistant's content: a token of the tokenizer, or else its first word.

    Found by rendering a short conversation. Of "<|end|>\\n<|endoftext|>" it is "<|end|>": a second token closes the
    conversation, not the turn. "" where nothing but white space follows.
    """
    if made.template is None:
        return ""
    try:
        text, _ = made.apply(made.template, probe(1))
    except BadRow:
        return ""
    if ANSWER not in text:
        return ""
    rest = text[text.rindex(ANSWER) + len(ANSWER) :].lstrip()
    known = [token for token in _added_tokens(made.tokenizer) if rest.startswith(token)]
    return max(known, key=len) if known else next(iter(rest.split()), "")


def _has_prompt(made: Renderer) -> bool:
    if made.template is None:
        return False
    question = probe(1)[:1]
    try:
        return made.apply(made.template, question, prompt=True) != made.apply(made.template, question)
    except BadRow:
        return False


def _added_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    added: dict[int, Any] = tokenizer.added_tokens_decoder
    return [str(token) for token in added.values()]


def probe(turns: int) -> list[dict[str, str]]:
    pair = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
    return pair * turns
