"""Mistral's own encoder as the oracle: the same ids, and trained are its tokens of the assistant's messages.

`mistral-common` ships Mistral's tokenizer files. Each is made a fast tokenizer here, with the template of its version.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import mistral_common
import pytest
import sentencepiece
from data_helpers import family_template
from hypothesis import given, settings
from hypothesis import strategies as st
from mistral_common.integrations.chat_templates.chat_templates import convert_tokenizer_to_chat_template
from mistral_common.protocol.instruct.messages import AssistantMessage, SystemMessage, ToolMessage, UserMessage
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.protocol.instruct.tool_calls import FunctionCall, Tool, ToolCall
from mistral_common.protocol.instruct.validator import ValidationMode
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.integrations.mistral import convert_tekken_tokenizer

from finetune.data.chat.renderer import UNTRAINED, Renderer, build_renderer, labels_of
from finetune.data.chat.template import Template
from finetune.data.samples import Conversation, Message

FILES = Path(mistral_common.__file__).parent / "data"


@dataclass(frozen=True)
class Version:
    file: str
    template: str
    legacy: bool = False  # the first conversions put a space before every piece between special tokens
    at_last: bool = False  # tools and system message stand at the last question
    tools: bool = False


VERSIONS = {
    "v1": Version("tokenizer.model.v1", "mistral_v1"),
    "v1, built-in template": Version("tokenizer.model.v1", "built-in mistral", legacy=True),
    "v2": Version("mistral_instruct_tokenizer_240216.model.v2", "built-in mistral-v3", at_last=True),
    "v3": Version("mistral_instruct_tokenizer_240323.model.v3", "built-in mistral-v3", at_last=True, tools=True),
    "tekken": Version("tekken_240718.json", "built-in mistral-tekken", at_last=True, tools=True),
}


def from_sentencepiece(path: Path, legacy: bool) -> PreTrainedTokenizerFast:
    """A fast tokenizer of a SentencePiece BPE: the pieces that make the one with the best score merge first."""
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(path))
    vocab = {pieces.id_to_piece(i): i for i in range(pieces.get_piece_size())}
    controls = [piece for piece, i in vocab.items() if pieces.is_control(i) or pieces.is_unknown(i)]
    merges = [
        (whole[:cut], whole[cut:])
        for whole, i in sorted(vocab.items(), key=lambda item: -pieces.get_score(item[1]))
        if not (pieces.is_control(i) or pieces.is_byte(i))
        for cut in range(1, len(whole))
        if whole[:cut] in vocab and whole[cut:] in vocab
    ]
    backend = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if legacy:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in controls])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@lru_cache
def ours(name: str) -> Renderer:
    version = VERSIONS[name]
    path, template = FILES / version.file, family_template(version.template)
    if path.suffix == ".json":
        tokenizer = convert_tekken_tokenizer(str(path), chat_template=template)
    else:
        tokenizer = from_sentencepiece(path, version.legacy)
        tokenizer.chat_template = template
    return build_renderer(tokenizer)


@lru_cache
def oracle(name: str) -> MistralTokenizer:
    return MistralTokenizer.from_file(str(FILES / VERSIONS[name].file), mode=ValidationMode.finetuning)


def theirs(name: str, sample: Conversation, first_trained: int = 0) -> tuple[list[int], list[int]]:
    """(ids, labels) of a conversation by Mistral's encoder, with the assistant messages from `first_trained` on."""
    tools = [Tool.model_validate(tool) for tool in sample.tools] or None
    messages = [_message(message) for message in sample.messages]
    encoder = oracle(name).instruct_tokenizer
    system = sample.messages[0].content if sample.messages[0].role == "system" else None
    users = [i for i, message in enumerate(messages) if isinstance(message, UserMessage)]
    pieces = [(False, encoder.start())]
    for i, message in enumerate(messages):
        if isinstance(message, UserMessage):
            ids, *_ = encoder.encode_user_message(message, tools, i == users[-1], i == users[0], system_prompt=system)
        elif isinstance(message, ToolMessage):
            ids, *_ = encoder.encode_tool_message(message, i < users[-1])
        elif isinstance(message, AssistantMessage):
            ids = encoder.encode_assistant_message(message, i < users[-1])
        else:
            continue
        pieces.append((isinstance(message, AssistantMessage) and i >= first_trained, ids))
    request = ChatCompletionRequest(messages=messages, tools=tools)
    ids = [i for _, piece in pieces for i in piece]
    assert ids == oracle(name).encode_chat_completion(request).tokens
    return ids, [i if trained else UNTRAINED for trained, piece in pieces for i in piece]


def _message(message: Message) -> SystemMessage | UserMessage | AssistantMessage | ToolMessage:
    if message.role == "system":
        return SystemMessage(content=message.content)
    if message.role == "user":
        return UserMessage(content=message.content)
    if message.role == "tool":
        return ToolMessage(content=message.content, tool_call_id=message.tool_call_id)
    calls = [
        ToolCall(
            id=call["id"],
            function=FunctionCall(
                name=call["function"]["name"], arguments=json.dumps(call["function"]["arguments"], ensure_ascii=False)
            ),
        )
        for call in message.tool_calls
    ]
    return AssistantMessage(tool_calls=calls) if calls else AssistantMessage(content=message.content)


def examples_by_oracle(name: str, sample: Conversation) -> list[tuple[list[int], list[int]]]:
    """Where tools and system message stand at the last question, each question's answers are an example."""
    questions = [i for i, message in enumerate(sample.messages) if message.role == "user"]
    if not (VERSIONS[name].at_last and (sample.tools or sample.messages[0].role == "system")):
        return [theirs(name, sample)]
    ends = [*questions[1:], len(sample.messages)]
    return [
        theirs(name, replace(sample, messages=sample.messages[:end]), begin)
        for begin, end in zip(questions, ends, strict=True)
    ]


def assert_same(name: str, sample: Conversation, made: Renderer | None = None) -> None:
    made = made or ours(name)
    found = [
        (ids.tolist(), labels_of(ids, mask).tolist())
        for group in made.draw(sample)
        for ids, mask in made.tokenize(group)
    ]
    assert found == examples_by_oracle(name, sample)


ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds é.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
    },
}


def called(number: int, result: str) -> tuple[Message, ...]:
    """A call of `add` and what it gave."""
    call = {"type": "function", "id": f"call{number:05}", "function": {"name": "add", "arguments": {"a": 1, "b": "é"}}}
    return (
        Message("assistant", "", tool_calls=(call,)),
        Message("tool", result, name="add", tool_call_id=call["id"]),
    )


HELLO = (Message("user", "Hello, how are you?"), Message("assistant", "I am fine.\nThanks!"))
AGAIN = (Message("user", "  two spaces, 漢字 🦊?"), Message("assistant", "def f():\n    return 'naïve'"))
FIXED: dict[str, Callable[[], Conversation]] = {
    "one turn": lambda: Conversation(HELLO),
    "two turns": lambda: Conversation(HELLO + AGAIN),
    "system": lambda: Conversation((Message("system", "Be brief."), *HELLO)),
    "system, two turns": lambda: Conversation((Message("system", "Be brief."), *HELLO, *AGAIN)),
    "leading newline": lambda: Conversation((Message("user", "\nHi\n"), Message("assistant", "\n\nYes\n"))),
}
WITH_TOOLS: dict[str, Callable[[], Conversation]] = {
    "a call": lambda: Conversation((HELLO[0], *called(1, "4"), AGAIN[1]), (ADD,)),
    "calls, two turns": lambda: Conversation(
        (*HELLO, AGAIN[0], *called(1, "four: é"), *called(2, "17"), AGAIN[1], *HELLO), (ADD,)
    ),
    "ends with a call": lambda: Conversation((HELLO[0], called(1, "4")[0]), (ADD,)),
}


@pytest.mark.parametrize("made", FIXED.values(), ids=FIXED.keys())
@pytest.mark.parametrize("name", VERSIONS)
def test_as_mistral_encodes(name, made):
    assert_same(name, made())


@pytest.mark.parametrize("made", WITH_TOOLS.values(), ids=WITH_TOOLS.keys())
@pytest.mark.parametrize("name", [name for name, version in VERSIONS.items() if version.tools])
def test_as_mistral_encodes_tools(name, made):
    assert_same(name, made())


@pytest.mark.parametrize("made", [*FIXED.values(), WITH_TOOLS["a call"]], ids=[*FIXED, "a call"])
@pytest.mark.parametrize("name", ["v1", "v3", "tekken"])
def test_under_mistrals_own_template(name, made):
    """mistral-common writes a chat template for each of its tokenizers; it has macros, and no generation tags."""
    if made().tools and not VERSIONS[name].tools:
        return
    assert_same(name, made(), under_their_template(name))


@lru_cache
def under_their_template(name: str) -> Renderer:
    text = convert_tokenizer_to_chat_template(str(FILES / VERSIONS[name].file))
    return build_renderer(ours(name).tokenizer, Template(text, "theirs"))


texts = st.text(
    st.sampled_from("ab Z \n é漢\n\t🦊.,!?'0_ 1{}[]<|>") | st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"])
)
contents = texts.map(lambda text: text.strip("\x00")).filter(lambda text: text.strip())


@st.composite
def conversations(draw: st.DrawFn, tools: bool) -> Conversation:
    system = (Message("system", draw(contents)),) if draw(st.booleans()) else ()
    turns: list[Message] = []
    for turn in range(draw(st.integers(1, 3))):
        turns.append(Message("user", draw(contents)))
        if tools and draw(st.booleans()):
            turns += called(turn, draw(contents.filter(_is_no_json)))
        turns.append(Message("assistant", draw(contents)))
    return Conversation((*system, *turns), (ADD,) if tools else ())


def _is_no_json(text: str) -> bool:
    """Mistral's encoder reads a result that is JSON; no template can."""
    try:
        json.loads(text)
    except json.JSONDecodeError:
        return True
    return False


@pytest.mark.parametrize("name", VERSIONS)
def test_random_conversations(name):
    @settings(max_examples=60, derandomize=True, database=None)
    @given(st.data())
    def check(data):
        tools = VERSIONS[name].tools and data.draw(st.booleans())
        assert_same(name, data.draw(conversations(tools)))

    check()
