"""Special tokens that are typed are text; those of a template, and all other texts, have the ids of training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoConfig, PreTrainedTokenizerFast

from finetune.data.chat.renderer import build_renderer
from finetune.data.samples import Conversation, Message
from finetune.models.base_config import without_weights
from finetune.release.inference.answering import Answerer, chat_template
from finetune.release.inference.control_tokens import ControlTokens

MODEL = without_weights(AutoConfig.for_model(**tiny.MODELS["llama"] | {"max_position_embeddings": 4096}))
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<unk>", "<s>", "<|im_start|>", "<|im_end|>", "<|im_end|>>")  # one begins like another


def trained(change: Callable[[Tokenizer], None], **added: bool) -> PreTrainedTokenizerFast:
    """A tokenizer of some words, whose special tokens have these settings."""
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    change(backend)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=["<unk>"], initial_alphabet=alphabet)
    backend.train_from_iterator(["<|im_end|> green stars say <s> seven im_end user assistant"] * 9, trainer)
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True, **added) for text in SPECIAL])
    backend.add_tokens([AddedToken("<think>", normalized=False, special=False)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="<|im_end|>")
    tokenizer.unk_token, tokenizer.chat_template = "<unk>", TEMPLATE
    return tokenizer


def byte_level(backend: Tokenizer) -> None:
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()


def metaspace(backend: Tokenizer) -> None:
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])


def prepended(backend: Tokenizer) -> None:
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])


TOKENIZERS: dict[str, Callable[[], Any]] = {
    "tiny": tiny.tokenizer,
    "byte level": lambda: trained(byte_level),
    "metaspace": lambda: trained(metaspace),
    "a prepended space": lambda: trained(prepended),
    "white space around tokens": lambda: trained(byte_level, lstrip=True, rstrip=True),
}
WORDS = st.sampled_from([*SPECIAL, "<think>", "green", " ", "\n", "<", "|im_end|>", "\ue000", "im_end", "é\0", "🟢"])


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return TOKENIZERS[request.param]()


def special_ids(tokenizer: Any) -> set[int]:
    unknown = tokenizer.unk_token
    return {i for i, token in tokenizer.added_tokens_decoder.items() if token.special and token.content != unknown}


@settings(max_examples=60, deadline=None)
@given(words=st.lists(WORDS, max_size=12))
def test_the_template_s_tokens_are_all_there_is(tokenizer: Any, words: list[str]) -> None:
    answerer = Answerer(MODEL, tokenizer, chat_template(tokenizer))
    text = "a" + "".join(words) + "a"
    ids = answerer.prompt([{"role": "user", "content": text}]).ids
    bare = answerer.prompt([{"role": "user", "content": "green"}]).ids
    special = special_ids(tokenizer)
    assert [i for i in ids if i in special] == [i for i in bare if i in special]


@settings(max_examples=60, deadline=None)
@given(words=st.lists(WORDS, max_size=12))
def test_both_ways_give_the_same_tokens(tokenizer: Any, words: list[str]) -> None:
    """Of any text, the special tokens of which are meant."""
    control, text = ControlTokens(tokenizer), "".join(words)
    assert control.ids(text, {"\uf000": "not in it"}) == control.ids(text, {})


def test_other_texts_have_the_ids_of_training(tokenizer: Any) -> None:
    said = (Message("user", "say <think> im_end 🟢"), Message("assistant", "green"))
    renderer = build_renderer(tokenizer)
    ((rendered,),) = renderer.draw(Conversation(said))
    ((trained_ids, *_),) = renderer.tokenize([rendered])
    prompt = Answerer(MODEL, tokenizer, chat_template(tokenizer)).prompt([{"role": "user", "content": said[0].content}])
    assert prompt.ids == trained_ids[: len(prompt.ids)].tolist()


def test_typed_tokens_are_spelt_in_letters() -> None:
    tokenizer = trained(byte_level)
    answerer = Answerer(MODEL, tokenizer, chat_template(tokenizer))
    ids = answerer.prompt([{"role": "user", "content": "say <|im_end|>"}]).ids
    assert tokenizer.decode(ids) == "<s><|im_start|>user\nsay <|im_end|><|im_end|>\n<|im_start|>assistant\n"
    call = {"type": "function", "function": {"name": "f", "arguments": {"<s>": ["<|im_end|>"]}}}
    tools = ({"type": "function", "function": {"name": "f", "description": "<|im_end|>"}},)
    messages = (Message("assistant", "", tool_calls=(call,), reasoning="<s>"), Message("tool", "x", name="<|im_end|>"))
    hidden = ControlTokens(tokenizer).hide(Conversation(messages, tools))
    assert not any(token in repr(hidden.conversation) for token in SPECIAL[1:])
    assert sorted(hidden.typed.values()) == ["<s>", "<|im_end|>"]
