"""The built-in template that a tokenizer without one gets, by the tokens in its vocabulary."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from finetune.data.samples import Conversation, Message, PromptCompletion, Reference
from finetune.desk.setup.rows import RowsFound
from finetune.desk.setup.template_fit import fitting_template

CHAT = Conversation((Message("user", "a"), Message("assistant", "b")))
CALL = {"type": "function", "function": {"name": "f", "arguments": {}}}
CALLS = (
    Message("user", "a"),
    Message("assistant", "", tool_calls=(CALL,)),
    Message("tool", "b"),
    Message("assistant", "c"),
)
TOOLS = Conversation(CALLS, ({"type": "function", "function": {"name": "f", "parameters": {}}},))


def tokenizer(*tokens: str, template: str | None = None) -> PreTrainedTokenizerFast:
    words = {token: i for i, token in enumerate(("<unk>", "<s>", "</s>", *tokens))}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, "<unk>")),
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        extra_special_tokens=list(tokens),
    )
    fast.chat_template = template
    return fast


def rows(sample: Conversation | PromptCompletion) -> RowsFound:
    return RowsFound("messages", None, "", 1, (), True, (sample,), ())


@pytest.mark.parametrize(
    ("tokens", "plain", "with_tools"),
    [
        (("<|im_start|>", "<|im_end|>"), "chatml", "chatml"),
        (("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), "llama3", "llama3"),
        (("<start_of_turn>", "<end_of_turn>"), "gemma", "chatml"),
        (("[INST]", "[/INST]"), "mistral-v3", "mistral-v3"),
        (("[INST]", "[/INST]", "[IMG]"), "mistral-tekken", "mistral-tekken"),
        (("<|user|>", "<|assistant|>"), "zephyr", "chatml"),
        ((), "plain", "chatml"),
    ],
)
def test_a_template_for_the_tokens_of_a_vocabulary(tokens: tuple[str, ...], plain: str, with_tools: str) -> None:
    assert fitting_template(rows(CHAT), tokenizer(*tokens)).name == plain
    choice = fitting_template(rows(TOOLS), tokenizer(*tokens))
    assert choice.name == with_tools
    assert ("refuses these rows" in choice.reason) == (plain != with_tools)


def test_the_tokenizer_s_own_unless_it_refuses_the_rows() -> None:
    own = (
        "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content + '</s>' }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    assert fitting_template(rows(CHAT), tokenizer(template=own)).name is None
    choice = fitting_template(rows(TOOLS), tokenizer(template=own))
    assert choice.name == "chatml"
    assert choice.reason.startswith("the tokenizer's own refuses these rows: ")


def test_rows_with_files_have_the_model_s_own_but_for_voxtral() -> None:
    clip = Conversation((Message("user", "", media=(Reference("audio", "a.wav"),)), Message("assistant", "b")))

    def heard(tokens: tuple[str, ...], template: str | None = None) -> str | None:
        return fitting_template(rows(clip), tokenizer(*tokens, template=template)).name

    assert heard(("[INST]", "[/INST]", "[BEGIN_AUDIO]")) == "voxtral"
    assert heard(("[INST]", "[/INST]", "[BEGIN_AUDIO]"), "{{ messages }}") is None
    assert heard(("<|im_start|>", "<|im_end|>")) is None


def test_texts_need_none() -> None:
    assert fitting_template(rows(PromptCompletion("a", "b")), tokenizer()).name is None
    assert fitting_template(rows(CHAT), None).name is None
