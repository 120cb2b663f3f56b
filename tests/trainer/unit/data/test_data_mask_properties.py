"""Random conversations under every template: trained is what the assistant writes, each turn once, and nothing else.

What it writes is given here for each family, from the content alone, not from renderings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby

import pytest
from data_helpers import family_template
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from finetune.data.chat.renderer import UNTRAINED, Renderer, build_renderer, labels_of
from finetune.data.chat.template_traits import CALL_ID
from finetune.data.samples import BadRow, Conversation, Message

from .test_data_templates import ADD, CALL, EMPTY_THOUGHT, FAMILIES, Family, drawn, in_parts, texts


def _plain(end: str, before: str = "", form: Callable[[str], str] = str) -> Callable[[Message], str]:
    return lambda message: before + form(message.content) + end


def _qwen3(message: Message) -> str:
    thought = (message.reasoning or "").strip("\n")
    return f"<think>\n{thought}\n</think>\n\n" + message.content.lstrip("\n") + "<|im_end|>"


def _r1(message: Message) -> str:
    return (message.reasoning or "").strip("\n") + f"\n</think>\n\n{message.content}<｜end▁of▁sentence｜>"


def _harmony(message: Message) -> str:
    thought = message.reasoning
    analysis = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant" if thought else ""
    return f"{analysis}<|channel|>final<|message|>{message.content}<|return|>"


WRITES: dict[str, Callable[[Message], str]] = {
    "chatml": _plain("<|im_end|>"),
    "llama2": _plain(" </s>", " ", str.strip),
    "llama3": _plain("<|eot_id|>", form=str.strip),
    "llama31": _plain("<|eot_id|>", form=str.strip),
    "llama31_code": _plain("<|eot_id|>", form=str.strip),
    "mistral_v1": _plain("</s>", " "),
    "built-in mistral-v3": _plain("</s>", " ", lambda text: text.rstrip(" ")),
    "built-in mistral-tekken": _plain("</s>", "", lambda text: text.rstrip(" ")),
    "built-in voxtral": _plain("</s>", "", lambda text: text.rstrip(" ")),
    "mixtral": _plain("</s>"),
    "llama4": _plain("<|eot|>", form=str.strip),
    "lfm2": _plain("<|im_end|>"),
    "granite4": _plain("<|end_of_text|>"),
    "qwen25": _plain("<|im_end|>"),
    "qwen3": _qwen3,
    "qwen3_thinking": lambda message: _qwen3(message).removeprefix("<think>\n"),
    "given qwen3": lambda message: _qwen3(message).removeprefix("" if message.reasoning else EMPTY_THOUGHT),
    "qwen3_vl": _plain("<|im_end|>"),
    "smolvlm": _plain("<end_of_utterance>", " "),
    "mistral4": lambda message: (
        (f"[THINK]{message.reasoning}[/THINK]" if message.reasoning else "") + f"{message.content}</s>"
    ),
    "gemma4": _plain("<turn|>", form=str.strip),
    "nemotron2": lambda message: (
        (message.reasoning or "").strip("\n") + f"\n</think>\n\n{message.content.strip()}\n<SPECIAL_12>"
    ),
    "nemotron3": lambda message: f"{message.reasoning or ''}\n</think>\n{message.content}<|im_end|>",
    "gemma2": _plain("<end_of_turn>", form=str.strip),
    "built-in gemma": _plain("<end_of_turn>", form=str.strip),
    "phi3": _plain("<|end|>"),
    "phi4": _plain("<|im_end|>"),
    "zephyr": _plain("</s>"),
    "deepseek_v3": _plain("<｜end▁of▁sentence｜>"),
    "deepseek_r1": _plain("<｜end▁of▁sentence｜>"),
    "r1_distill": _r1,
    "given r1_distill": lambda message: _r1(message).removeprefix("" if message.reasoning else "\n</think>\n\n"),
    "deepseek_v31": lambda message: f"{message.reasoning or ''}</think>{message.content}<｜end▁of▁sentence｜>",
    "gpt_oss": _harmony,
    "built-in chatml": _plain("<|im_end|>"),
    "built-in llama3": _plain("<|eot_id|>"),
    "built-in mistral": _plain("</s>", " "),
    "built-in zephyr": _plain("</s>"),
    "built-in plain": _plain("</s>"),
}


def written_call(name: str, message: Message) -> str:
    """What the family writes for `CALL`: the first trained part of its tools text, with the thought before it."""
    call = texts(FAMILIES[name], "tools")[0].split("«")[1].split("»")[0]
    if message.reasoning is None:
        return call
    if name == "gpt_oss":
        return f"<|channel|>analysis<|message|>{message.reasoning}<|end|><|start|>assistant{call}"
    if name == "mistral4":
        return f"[THINK]{message.reasoning}[/THINK]{call}"
    if name == "given qwen3":  # asked to think, its prompt has no empty thought
        call = EMPTY_THOUGHT + call
    before, after = call.split("\n</think>", 1)
    thought = message.reasoning if name == "nemotron3" else message.reasoning.strip("\n")
    return before + thought + "\n</think>" + after


@lru_cache
def made(name: str, tags: bool) -> Renderer:
    """With the markers as tokens that are not special, so that contents may hold them; but for BOS and EOS."""
    family = FAMILIES[name]
    named = tuple(token for token in (family.bos, family.eos) if token)
    words = tuple(token for token in family.specials if token not in named)
    tokenizer = replace(family, specials=named, words=family.words + words).tokenizer(family_template(name, tags=tags))
    return build_renderer(tokenizer)


MARKERS = [
    *("<|im_start|>", "<|im_end|>", "<|im_end|>\n", "<|im_start|>assistant\n", "<|eot_id|>", "assistant", "user\n"),
    *("[INST] ", " [/INST]", "[/INST]", "<<SYS>>", "<end_of_turn>\n", "<start_of_turn>model\n", "<|end|>"),
    *("<|assistant|>\n", "<｜Assistant｜>", "<|message|>", "<|channel|>final", "<tool_call>", "<think>", "{{ x }}"),
    "{% generation %}",
]
SPACES = [" ", "\n", "  ", "\n\n", "\t", "\u00a0", "\u2028"]
LETTERS = ["a", "b", "four", "I am fine", "é", "e\u0301", "漢字", "🦊", "👩‍👩‍👧", "'", '"', "\\", "0", "}", "<", "."]
inner = st.lists(st.sampled_from(MARKERS + SPACES + LETTERS) | st.characters(codec="utf-8"), max_size=8).map("".join)
edges = st.sampled_from(["", "", *SPACES])
contents = st.builds("{}{}{}".format, edges, inner, edges).filter(str.strip)


@st.composite
def conversations(draw: st.DrawFn, name: str) -> Conversation:
    """Turns with what the family has: a system message, tools, reasoning."""
    family = FAMILIES[name]
    # The end-of-text tokens alone are special here: what holds one is refused, which has a test of its own.
    said = contents.filter(lambda text: not any(token and token in text for token in (family.bos, family.eos)))
    thoughts = st.none() if "thoughts" in family.refused else st.none() | said
    messages: list[Message] = []
    if "system" not in family.refused and draw(st.booleans()):
        messages.append(Message("system", draw(said)))
    tools = "tools" not in family.refused and draw(st.booleans())
    for _ in range(draw(st.integers(1, 3))):
        messages.append(Message("user", draw(said)))
        if tools and draw(st.booleans()):
            thought = draw(thoughts)
            messages.append(Message("assistant", "", reasoning=thought, tool_calls=(CALL,), train=draw(st.booleans())))
            messages.append(Message("tool", draw(said), name="add", tool_call_id=CALL_ID))
        messages.append(Message("assistant", draw(said), reasoning=draw(thoughts), train=draw(st.booleans())))
    if not any(message.role == "assistant" and message.train for message in messages):
        messages[-1] = replace(messages[-1], train=True)
    return Conversation(tuple(messages), (ADD,) if tools and name != "deepseek_v3" else ())


@dataclass(frozen=True)
class Example:
    ids: list[int]
    labels: list[int]

    def runs(self) -> list[tuple[int, int]]:
        """[begin, end) of what is trained without a gap."""
        groups = groupby(range(len(self.ids)), key=lambda i: self.labels[i] != UNTRAINED)
        trained = [list(positions) for is_trained, positions in groups if is_trained]
        return [(run[0], run[-1] + 1) for run in trained]


def examples(maker: Renderer, sample: Conversation) -> list[Example]:
    tokens = maker.tokenize([text for group in maker.draw(sample) for text in group])
    return [Example(ids.tolist(), labels_of(ids, trained).tolist()) for ids, trained in tokens]


def in_use(maker: Renderer, sample: Conversation, i: int) -> list[int]:
    """The tokens that the model is given when it is to write message `i`, by transformers."""
    assert maker.chat is not None
    before = maker.chat.traits.as_dicts(sample)[:i]
    # Not apply_chat_template, which drops a content of null, by which DeepSeek V3 knows a call.
    rendered, _ = render_jinja_template(
        conversations=[in_parts(before) if maker.chat.jinja.wants_parts else before],
        tools=[dict(tool) for tool in sample.tools] or None,
        chat_template=maker.tokenizer.chat_template,
        add_generation_prompt=True,
        # Of a template that gives an empty thought: what asks it to think.
        **({"empty_thought": False} if sample.messages[i].reasoning else {}),
        **maker.tokenizer.special_tokens_map,
    )
    return maker.tokenizer(rendered[0], add_special_tokens=False)["input_ids"]


@settings(
    max_examples=400,
    derandomize=True,
    database=None,
    suppress_health_check=[*settings().suppress_health_check, HealthCheck.filter_too_much],
)
@given(st.data(), st.sampled_from(sorted(FAMILIES)))
def test_trained_is_what_the_assistant_writes(data: st.DataObject, name: str):
    sample = data.draw(conversations(name))
    maker = made(name, tags=False)
    found = examples(maker, sample)

    trained = [i for i, m in enumerate(sample.messages) if m.role == "assistant" and m.train]
    turns = [sample.messages[i] for i in trained]
    wanted = [written_call(name, turn) if turn.tool_calls else WRITES[name](turn) for turn in turns]
    decode = maker.tokenizer.decode
    runs = [(example, *run) for example in found for run in example.runs()]
    assert sorted(decode(example.ids[begin:end]) for example, begin, end in runs) == sorted(wanted)
    contexts = [in_use(maker, sample, i) for i in trained]
    assert sorted(decode(example.ids[:begin]) for example, begin, _ in runs) == sorted(map(decode, contexts))
    for example in found:
        # An answer cut from its prompt (both had a newline there) stays as it was written in later turns' context.
        is_cut = example.ids != maker.tokenizer(decode(example.ids), add_special_tokens=False)["input_ids"]
        for begin, _ in example.runs()[: 1 if is_cut else None]:
            assert example.ids[:begin] in contexts

    for example in found:
        assert example.labels[0] == UNTRAINED
        assert all(label in (UNTRAINED, token) for token, label in zip(example.ids, example.labels, strict=True))
        if FAMILIES[name].bos and name != "llama2":
            assert example.ids.count(maker.tokenizer.bos_token_id) == 1
    assert examples(made(name, tags=True), sample) == found


@pytest.mark.parametrize("name", FAMILIES)
def test_a_content_that_holds_a_special_token_is_a_bad_row(name):
    """It would be a token to the model: an end-of-turn in mid-answer, a turn that a user made up."""
    family: Family = FAMILIES[name]
    tokenizer = family.tokenizer(family_template(name))
    for token in family.specials:
        for said in ((f"a {token}", "b"), ("a", f"b{token}")):
            sample = Conversation((Message("user", said[0]), Message("assistant", said[1])))
            with pytest.raises(BadRow, match=r"message \d \(\w+\) contains '"):
                drawn(tokenizer, sample)
