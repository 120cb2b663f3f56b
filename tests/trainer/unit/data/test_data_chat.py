"""Masks by exact ids: the trained ids are the assistant's words and its end-of-turn, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from data_helpers import (
    byte_level,
    conversation,
    family_template,
    recipe,
    render,
    sentencepiece_like,
    word_level,
    write_jsonl,
)
from transformers import PreTrainedTokenizerFast

from finetune.data.chat.renderer import UNTRAINED, build_renderer
from finetune.data.chat.template import Template, asks_for_today
from finetune.data.chat.template_check import check_template, turn_end_ids
from finetune.data.chat.template_choice import built_in_templates, resolve_template, set_template, with_arguments
from finetune.data.dataset import template_notes
from finetune.data.samples import BadRow, Conversation, Ids, Message, Preference, PromptCompletion, Text
from finetune.errors import UserError
from finetune.models.base_config import base_config
from finetune.recipe.schema import Model

from .test_data_templates import FAMILIES

# Templates in the shapes that the families publish. ANSWER is replaced by a plain or a generation-marked answer.
SHAPES = {
    "llama3": (
        "{% set loop_messages = messages %}{% for message in loop_messages %}"
        "{% set header = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' %}"
        "{% if loop.index0 == 0 %}{{ bos_token }}{% endif %}{{ header }}"
        "{% if message['role'] == 'assistant' %}ANSWER"
        "{% else %}{{ message['content'] | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
    ),
    "mistral": (
        "{{ bos_token }}{% for message in messages %}"
        "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
        "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}{% else %}ANSWER{% endif %}"
        "{% endfor %}"
    ),
    "chatml": (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
        "{% if message['role'] == 'assistant' %}ANSWER{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
        "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "zephyr": (
        "{% for message in messages %}{% if message['role'] == 'assistant' %}{{ '<|assistant|>\\n' }}ANSWER"
        "{% else %}{{ '<|' + message['role'] + '|>\\n' + message['content'] + eos_token }}{% endif %}{{ '\\n' }}"
        "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}{% endfor %}"
    ),
}


@dataclass(frozen=True)
class Style:
    specials: tuple[str, ...]
    end: str
    answer: str  # Jinja
    before: str = ""  # what the model writes before its answer
    bos: str | None = None

    def tokenizer(self, template: str | None, **options: bool) -> PreTrainedTokenizerFast:
        named = {"eos_token": self.end, **({"bos_token": self.bos} if self.bos else {})}
        return byte_level(self.specials, template=template, **options, **named)


STYLES = {
    "llama3": Style(
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|eot_id|>",
        "message['content'] | trim + '<|eot_id|>'",
        bos="<|begin_of_text|>",
    ),
    "mistral": Style(("<s>", "</s>"), "</s>", "' ' + message['content'] + eos_token", before=" ", bos="<s>"),
    "chatml": Style(("<|im_start|>", "<|im_end|>"), "<|im_end|>", "message['content'] + '<|im_end|>'"),
    "zephyr": Style(("<s>", "</s>"), "</s>", "message['content'] + eos_token"),
}


def shaped(shape: str, tags: str) -> str:
    """The template with no tags, with tags around answer and end-of-turn, or with tags that leave the end out."""
    answer, end = STYLES[shape].answer.rsplit(" + ", 1)
    written = {
        "none": f"{{{{ {answer} + {end} }}}}",
        "whole": f"{{% generation %}}{{{{ {answer} + {end} }}}}{{% endgeneration %}}",
        "without end": f"{{% generation %}}{{{{ {answer} }}}}{{% endgeneration %}}{{{{ {end} }}}}",
        "past end": f"{{% generation %}}{{{{ {answer} + {end} + '\\n' }}}}{{% endgeneration %}}",
    }
    return SHAPES[shape].replace("ANSWER", written[tags])


def as_conversation(messages: list[dict[str, str]], first_trained: int = 0) -> Conversation:
    return Conversation(
        tuple(Message(m["role"], m["content"], train=i >= first_trained) for i, m in enumerate(messages))
    )


def expected_ids(tokenizer: PreTrainedTokenizerFast, style: Style, answers: list[str]) -> list[int]:
    end = tokenizer.convert_tokens_to_ids(style.end)
    return [i for a in answers for i in (*tokenizer.encode(style.before + a, add_special_tokens=False), end)]


CONVERSATIONS = {
    "one turn": conversation("what is two and two?", "four"),
    "three turns": conversation("hello", "I am fine", "and you?", "so am I", "good", "quick fox"),
    "the question repeats the answer": conversation("four", "four", "four four", "four"),
    "code and no ASCII": conversation("add?", "def add(a, b):\n    return a + b", "é 漢字?", "naïve 🦊 漢"),
    "a trailing question": conversation("hello", "I am fine", "and you?"),
    "words of the header": conversation("user", "assistant", "assistant\n", "a"),
}


@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS.keys())
@pytest.mark.parametrize("tags", ["none", "whole", "without end", "past end"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("trim_offsets", [False, True])
def test_trained_ids_are_the_answers_and_their_ends(shape, tags, messages, trim_offsets):
    style = STYLES[shape]
    tokenizer = style.tokenizer(shaped(shape, tags), trim_offsets=trim_offsets)

    input_ids, labels = render(as_conversation(messages), tokenizer)

    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    assert labels[labels != UNTRAINED].tolist() == expected_ids(tokenizer, style, answers)
    assert (labels[labels != UNTRAINED] == input_ids[labels != UNTRAINED]).all()
    # the ids are those that everyone else gets from this template, with one BOS
    assert input_ids.tolist() == tokenizer.apply_chat_template(messages)["input_ids"]
    assert input_ids.tolist().count(tokenizer.bos_token_id) == (1 if style.bos else 0)


@pytest.mark.parametrize("shape", SHAPES)
def test_generation_tags_agree_with_transformers_mask(shape):
    tokenizer = STYLES[shape].tokenizer(shaped(shape, "whole"))
    messages = CONVERSATIONS["three turns"]
    theirs = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    _, labels = render(as_conversation(messages), tokenizer)
    assert (labels != UNTRAINED).astype(int).tolist() == theirs["assistant_masks"]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tags", ["none", "whole"])
def test_good_templates_have_no_problems(shape, tags):
    assert check_template(STYLES[shape].tokenizer(shaped(shape, tags))) == []


def test_every_built_in_template_renders_a_system_message():
    tokenizer = byte_level(bos_token="<s>", eos_token="</s>")
    for name in built_in_templates():
        sample = as_conversation(conversation("hello", "fine", system="quick fox"))
        input_ids, _ = render(sample, tokenizer, template=resolve_template(name, tokenizer))
        assert "quick fox" in tokenizer.decode(input_ids)


def test_the_labels_of_a_template_like_llama3s():
    vocab = {"?": 9, "user": 10, "assistant": 11, "\n\n": 12, "2+2?": 20, "4": 21}
    specials = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    tokenizer = word_level({**{s: i for i, s in enumerate(specials)}, **vocab}, specials, bos_token=specials[0])
    input_ids, labels = render(
        as_conversation(conversation("2+2?", "4")), tokenizer, template=resolve_template("llama3", tokenizer)
    )
    # fmt: off
    assert input_ids.tolist() == [0, 1, 10, 2, 12, 20, 3, 1, 11, 2, 12, 21, 3]
    assert labels.tolist() == [-100] * 11 + [21, 3]
    # fmt: on


def test_the_worked_example_of_the_module():
    vocab = {"<|im_start|>": 1, "<|im_end|>": 2, "?": 9, "user": 872, "assistant": 77091, "\n": 198}
    tokenizer = word_level({**vocab, "Hi": 13048, "Hello": 9707}, ["<|im_start|>", "<|im_end|>"])
    template = Template(shaped("chatml", "none"), "test")
    input_ids, labels = render(as_conversation(conversation("Hi", "Hello")), tokenizer, template=template)
    assert input_ids.tolist() == [1, 872, 198, 13048, 2, 198, 1, 77091, 198, 9707, 2, 198]
    assert labels.tolist() == [-100] * 9 + [9707, 2, -100]


def test_train_on_all_trains_everything_but_the_first_token():
    tokenizer = STYLES["chatml"].tokenizer(shaped("chatml", "none"))
    input_ids, labels = render(as_conversation(CONVERSATIONS["one turn"]), tokenizer, "all")
    assert labels.tolist() == [UNTRAINED, *input_ids[1:].tolist()]


def test_only_the_completion_of_a_prompt_is_trained():
    for tags in ("none", "whole"):
        tokenizer = STYLES["chatml"].tokenizer(shaped("chatml", tags))
        sample = as_conversation(CONVERSATIONS["three turns"], first_trained=5)
        _, labels = render(sample, tokenizer)
        assert labels[labels != UNTRAINED].tolist() == expected_ids(tokenizer, STYLES["chatml"], ["quick fox"])


# --- templates with habits


def test_header_is_not_trained_where_a_template_has_no_generation_prompt():
    template = shaped("chatml", "none").split("{% if add_generation_prompt")[0]
    tokenizer = STYLES["chatml"].tokenizer(template)
    _, labels = render(as_conversation(conversation("hello", "t", "user", "assistant")), tokenizer)
    assert labels[labels != UNTRAINED].tolist() == expected_ids(tokenizer, STYLES["chatml"], ["t", "assistant"])


def test_a_closing_token_of_the_full_conversation_is_not_trained():
    """Phi-3 writes <|endoftext|> behind the last <|end|>, which a longer conversation does not have."""
    template = (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
    )
    specials = ("<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>")
    tokenizer = byte_level(specials, template=template, eos_token="<|endoftext|>")
    _, labels = render(as_conversation(CONVERSATIONS["three turns"]), tokenizer)
    assert tokenizer.decode(labels[labels != UNTRAINED]) == "I am fine<|end|>so am I<|end|>quick fox<|end|>"
    assert check_template(tokenizer) == []


def test_content_that_the_template_trims_is_accepted():
    tokenizer = STYLES["llama3"].tokenizer(shaped("llama3", "none"))
    _, labels = render(as_conversation(conversation("hello", "  fine \n")), tokenizer)
    assert labels[labels != UNTRAINED].tolist() == expected_ids(tokenizer, STYLES["llama3"], ["fine"])


def test_an_empty_thought_is_trained_because_the_model_has_to_write_it():
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
        "{% if m['role'] == 'assistant' %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ m['content'] + '<|im_end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    tokenizer = STYLES["chatml"].tokenizer(template)
    _, labels = render(as_conversation(conversation("hello", "fine")), tokenizer)
    assert tokenizer.decode(labels[labels != UNTRAINED]) == "<think>\n\n</think>\n\nfine<|im_end|>"


PREFACED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\nOnce ' }}{% endif %}"
)


def test_a_prompt_that_the_answer_does_not_follow_is_refused_with_the_reason():
    """The model would be prompted with words that it was not trained on."""
    tokenizer = STYLES["chatml"].tokenizer(PREFACED)
    with pytest.raises(UserError, match=r"message 1 \(assistant\)[\s\S]*{% generation %}[\s\S]*model\.chat_template"):
        render(as_conversation(conversation("hello", "fine")), tokenizer)


def test_a_template_that_prompts_for_a_thought_gets_an_empty_one():
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
        "{{ '<think>\n' + m['reasoning_content'] + '\n</think>' if m['reasoning_content'] else '<think></think>' }}"
        "{% endif %}{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
    )
    tokenizer = STYLES["chatml"].tokenizer(template)
    hello = Message("user", "hello")
    _, labels = render(Conversation((hello, Message("assistant", "fine", reasoning="quick"))), tokenizer)
    assert tokenizer.decode(labels[labels != UNTRAINED]) == "quick\n</think>fine<|im_end|>"
    ids, labels = render(Conversation((hello, Message("assistant", "fine"))), tokenizer)
    assert tokenizer.decode(labels[labels != UNTRAINED]) == "\n</think>fine<|im_end|>"
    assert tokenizer.decode(ids[labels == UNTRAINED]).endswith("assistant\n<think>\n\n")  # and the last newline
    assert check_template(tokenizer)[0] == (
        "note: rows without `reasoning`: the empty thought '\\n</think>' is trained before the answer, which the model "
        "would have to write in use; model.empty_thought: given makes it the end of the generation prompt"
    )


def test_thoughts_in_the_content_are_not_lost_where_a_template_cuts_them_off():
    """As the rows of R1's answers are published. Under a template that writes them they stay as they are."""
    tokenizer = byte_level(("<s>", "<｜end▁of▁sentence｜>"), template=family_template("r1_distill"), eos_token="<s>")
    said = "<think>\nWell.\n</think>\n\nfour<three"
    for content, thought in ((said, "Well."), ("<think>\n\n</think>\n\nfour<three", ""), ("four<three", "")):
        sample = Conversation((Message("user", "two?"), Message("assistant", content)))
        _, labels = render(sample, tokenizer)
        assert tokenizer.decode(labels[labels != UNTRAINED]) == f"{thought}\n</think>\n\nfour<three<s>"
    (rendered,) = build_renderer(STYLES["chatml"].tokenizer(shaped("chatml", "none"))).draw(
        Conversation((Message("user", "two?"), Message("assistant", said)))
    )
    assert said in rendered[0].text


def test_a_system_message_that_the_template_refuses_is_a_bad_row():
    tokenizer = STYLES["mistral"].tokenizer(shaped("mistral", "none"))
    with pytest.raises(BadRow, match="refuses this conversation: Conversation roles must alternate"):
        render(as_conversation(conversation("hello", "fine", system="quick")), tokenizer)


def test_a_tokenizer_that_rewrites_spaces():
    """Llama 2 and Mistral v1: spaces become "▁", one is put before every piece; offsets still speak of the text."""
    tokenizer = sentencepiece_like(
        template=(
            "{% for m in messages %}{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + m['content'] + ' [/INST]' }}"
            "{% else %}{{ ' ' + m['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
        ),
    )
    messages = conversation("hello", "I am fine", "and you?", "4 é!")
    input_ids, labels = render(as_conversation(messages), tokenizer)
    assert input_ids.tolist() == tokenizer.apply_chat_template(messages)["input_ids"]
    trained = tokenizer.convert_ids_to_tokens(labels[labels != UNTRAINED].tolist())
    assert "".join(trained) == "▁I▁am▁fine▁</s>▁4▁é!▁</s>"
    assert check_template(tokenizer) == []


def test_an_end_of_turn_that_the_tokenizer_does_not_know():
    tokenizer = word_level({"?": 9, "\n": 198}, ["?"], unk_token="?")
    found = check_template(tokenizer, resolve_template("chatml", tokenizer))
    assert any("'<|im_end|>', which is" in text for text in found)


# --- borders of tokens


@pytest.mark.parametrize("trim_offsets", [False, True])
@pytest.mark.parametrize("answer", ["\nfine", "\n\nfine\n", "  fine ", " fine"])
def test_an_answer_keeps_its_white_space_and_the_header_its_own(answer, trim_offsets):
    """ "\\n\\n" is one token, but in use the first newline is given and the second written."""
    tokenizer = STYLES["chatml"].tokenizer(shaped("chatml", "none"), trim_offsets=trim_offsets)
    messages = conversation("hello", answer)
    input_ids, labels = render(as_conversation(messages), tokenizer)
    given = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True)["input_ids"]
    assert input_ids[: len(given)].tolist() == given
    assert (labels[: len(given)] == UNTRAINED).all()
    assert labels[labels != UNTRAINED].tolist() == expected_ids(tokenizer, STYLES["chatml"], [answer])


# --- nothing of a row is lost


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (
            "{% for m in messages if m['role'] != 'system' %}{{ m['content'] }}<|im_end|>{% endfor %}",
            "message 0 (system)",
        ),
        ("{% for m in messages if m['role'] != 'user' %}{{ m['content'] }}<|im_end|>{% endfor %}", "message 1 (user)"),
    ],
)
def test_a_message_that_the_template_leaves_out_is_a_bad_row(template, reason):
    tokenizer = STYLES["chatml"].tokenizer(template)
    with pytest.raises(BadRow, match=re.escape(f"does not write {reason}")):
        render(as_conversation(conversation("hello", "fine", system="quick")), tokenizer)


CALL = {"type": "function", "id": "123456789", "function": {"name": "add", "arguments": {"a": 1}}}
WITH_CALL = Conversation(
    (
        Message("user", "please add"),
        Message("assistant", "", tool_calls=(CALL,)),
        Message("tool", 'four "é"\n', name="add", tool_call_id="123456789"),
        Message("assistant", "four"),
    )
)
CALLS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['tool_calls'] %}"
    "{{ m['tool_calls'] | tojson }}{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_calls_and_results_that_the_template_leaves_out_are_a_bad_row():
    tokenizer = STYLES["chatml"].tokenizer(shaped("chatml", "none"))
    with pytest.raises(BadRow, match=r"does not support tool calls: it leaves out 'add' of message 1"):
        render(WITH_CALL, tokenizer)
    no_results = STYLES["chatml"].tokenizer(
        CALLS.replace("{% for m in messages %}", "{% for m in messages if m['role'] != 'tool' %}")
    )
    with pytest.raises(BadRow, match=r"does not write message 2 \(tool\)"):
        render(WITH_CALL, no_results)
    assert any("message 2 (tool)" in text for text in check_template(no_results))
    as_json = STYLES["chatml"].tokenizer(CALLS.replace("{{ m['content'] }}", "{{ m['content'] | tojson }}"))
    assert '"four \\"é\\"\\n"<|im_end|>' in as_json.decode(render(WITH_CALL, as_json)[0])


@pytest.mark.parametrize("opener", ["", "<|channel|>"])
def test_a_header_that_the_prompt_lacks_after_a_tools_result_is_not_in_the_example(opener: str):
    """Gemma 4: calls, results and the answer are one turn in use, and the answer is rendered as another one."""
    late = CALLS.replace(
        "{% if add_generation_prompt %}", "{% if add_generation_prompt and messages[-1]['role'] != 'tool' %}"
    ).replace("assistant\n' }}{% endif", f"assistant\n{opener}' }}}}{{% endif")
    tokenizer = byte_level(("<|im_start|>", "<|im_end|>", "<|channel|>"), template=late, eos_token="<|im_end|>")
    renderer = build_renderer(tokenizer)
    if opener:  # its answers do not begin with it, so rows are refused as ever
        with pytest.raises(UserError, match=r"renders what precedes message 1 \(assistant\) differently"):
            renderer.draw(WITH_CALL)
        return
    (last,), _ = renderer.draw(WITH_CALL)  # the call is trained in the other one
    ids, mask = renderer.tokenize([last])[0][:2]
    messages = build_renderer(tokenizer).chat.traits.as_dicts(WITH_CALL)  # type: ignore[union-attr]
    given = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True)["input_ids"]
    assert (ids[: len(given)].tolist(), tokenizer.decode(ids[mask])) == (given, "four<|im_end|>")


CUTS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% set content = m['content'] %}"
    "{% if '</think>' in content %}"
    "{{ '<think>\n' + content.split('</think>')[0].split('<think>')[-1].strip('\n') + '\n</think>\n\n' }}"
    "{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{ content.lstrip('\n') + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_an_answer_that_a_template_cuts_at_the_end_of_a_thought_is_a_bad_row():
    tokenizer = STYLES["chatml"].tokenizer(CUTS)
    with pytest.raises(BadRow, match=r"takes the text before '</think>' in message 1 \(assistant\) for a thought"):
        render(as_conversation(conversation("a", "Close it with </think> always")), tokenizer)
    _, labels = render(as_conversation(conversation("a", "<think>\nx\n</think>\n\nb")), tokenizer)
    assert tokenizer.decode(labels[labels != UNTRAINED]).endswith("</think>\n\nb<|im_end|>")


TEXT_AND_CALL = Conversation(
    (Message("user", "add"), Message("assistant", "I will", tool_calls=(CALL,)), *WITH_CALL.messages[2:])
)


def test_a_text_next_to_a_call_that_a_template_leaves_out_is_a_bad_row():
    """Llama 3.1: other rows fit, so `on_bad_row: skip` leaves it out."""
    tokenizer = STYLES["chatml"].tokenizer(CALLS)
    with pytest.raises(BadRow, match=r"changes the content of message 1 \(assistant\): 'I will' is not in"):
        render(TEXT_AND_CALL, tokenizer)


GLM = (
    "{{ '[gMASK]<sop>' }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '<|user|>\n' + m['content'] }}"
    "{% elif m['role'] == 'assistant' %}{{ '<|assistant|>\n<think></think>\n' + m['content'] }}"
    "{% for call in m['tool_calls'] or [] %}{{ '\n<tool_call>' + call['function']['name'] + '\n' }}"
    "{{ call['function']['arguments'] | tojson + '\n</tool_call>' }}{% endfor %}"
    "{% elif m['role'] == 'tool' %}{{ '<|observation|>\n' + m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n<think></think>\n' }}{% endif %}"
)
GLM_TOKENS = ("<|endoftext|>", "[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|observation|>")


def test_the_next_roles_token_ends_an_answer_where_no_other_does():
    """GLM 4, 4.5 and 4.6: the model ends its turn by <|user|>, or <|observation|> after a call."""
    tokenizer = byte_level(GLM_TOKENS, template=GLM, eos_token="<|endoftext|>")
    assert not [text for text in check_template(tokenizer) if text.startswith("problem")]

    def written(sample: Conversation) -> list[str]:
        ids, labels = render(sample, tokenizer)
        marks = "".join(
            f"«{tokenizer.decode(i)}»" if label != UNTRAINED else "\0" for i, label in zip(ids, labels, strict=True)
        )
        return [run.replace("«", "").replace("»", "") for run in marks.split("\0") if run]

    assert written(as_conversation(conversation("hello", "fine", "and you?", "so am I"))) == [
        "fine<|user|>",
        "so am I<|user|>",
    ]
    call, answer = written(WITH_CALL)
    assert call.endswith("</tool_call><|observation|>")
    assert answer == "four<|user|>"
    called = replace(WITH_CALL, messages=WITH_CALL.messages[:2])
    assert written(called) == [call]
    ends = turn_end_ids(tokenizer, Template(GLM, "GLM"))
    assert {tokenizer.decode(i) for i in ends} == {"<|user|>", "<|observation|>"}


def test_calls_without_schemas():
    tokenizer = STYLES["chatml"].tokenizer(CALLS)
    _, labels = render(WITH_CALL, tokenizer)
    call = '[{"type": "function", "id": "123456789", "function": {"name": "add", "arguments": {"a": 1}}}]'
    assert tokenizer.decode(labels[labels != UNTRAINED]) == f"{call}<|im_end|>four<|im_end|>"
    with pytest.raises(BadRow, match="does not support tools"):
        render(replace(WITH_CALL, tools=({"type": "function", "function": {"name": "add"}},)), tokenizer)


def test_a_conversation_with_nothing_to_train_is_one_example_without_a_target():
    tokenizer = STYLES["chatml"].tokenizer(shaped("chatml", "none"))
    _, labels = render(as_conversation(conversation("hello", "fine"), first_trained=2), tokenizer)
    assert (labels == UNTRAINED).all()


def test_one_bos_where_template_and_tokenizer_both_have_one():
    for shape in ("llama3", "mistral"):
        style = STYLES[shape]
        named = {"eos_token": style.end, "bos_token": style.bos}
        tokenizer = byte_level(style.specials, template=shaped(shape, "none"), adds_bos=True, **named)
        input_ids, _ = render(as_conversation(CONVERSATIONS["three turns"]), tokenizer)
        assert input_ids.tolist().count(tokenizer.bos_token_id) == 1


# --- model.chat_template_arguments

SWITCHED = (
    "{% macro end() %}{{ '<|im_end|>' if marked else '?' }}{% endmacro %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + end() + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if think is defined and think is false %}{{ name }}\n{% endif %}{% endif %}"
)


@pytest.mark.parametrize("own", [False, True], ids=["given", "the tokenizer's own"])
@pytest.mark.parametrize("text", [SWITCHED, "\n  {% if true %}\n" + SWITCHED + "{% endif %}"], ids=["plain", "blocks"])
def test_arguments_are_as_if_the_caller_gave_them(tmp_path: Path, own: bool, text: str):
    arguments = {"think": False, "marked": True, "name": 'a "é" \\n🦊'}
    tokenizer = STYLES["chatml"].tokenizer(text)
    (tmp_path / "a.jinja").write_text(text)
    named = None if own else str(tmp_path / "a.jinja")
    messages = conversation("hello", "fine")
    asked = {"add_generation_prompt": True, "tokenize": False}
    wanted = tokenizer.apply_chat_template(messages[:1], **asked, **arguments)
    for _ in range(2):  # once more changes nothing
        template = resolve_template(named, tokenizer, arguments)
        assert template is not None
        tokenizer.chat_template = template.text
        assert template.text.count("is not defined") == 3
    assert wanted != tokenizer.apply_chat_template(messages[:1], **asked, marked=False)
    assert tokenizer.apply_chat_template(messages[:1], **asked) == wanted
    ids, _ = render(as_conversation(messages), tokenizer, "all", template)
    assert ids.tolist() == tokenizer.apply_chat_template(messages)["input_ids"]


def test_values_of_all_kinds_reach_the_template():
    values = {"a": None, "b": [1, 2.5, True], "c": {"k": ["v", None]}, "d": "x"}
    text = "{{ [a, b, c, d] | tojson }}"
    tokenizer = byte_level(template=text)
    expected = tokenizer.apply_chat_template(conversation("q"), tokenize=False, **values)
    tokenizer.chat_template = with_arguments(Template(text, "t"), values).text
    assert tokenizer.apply_chat_template(conversation("q"), tokenize=False) == expected


def test_arguments_that_a_template_does_not_know():
    with pytest.raises(UserError, match=r"has no variable `enable_think` \(did you mean `enable_thinking`\?\)\. Fix: "):
        resolve_template(None, byte_level(template="{{ enable_thinking }}"), {"enable_think": True})
    with pytest.raises(UserError, match="the tokenizer has no chat template"):
        resolve_template(None, byte_level(), {"enable_thinking": True})


# --- model.empty_thought, and arguments of a row


@pytest.mark.parametrize("name", ["qwen3", "r1_distill", "nemotron3"])
def test_an_empty_thought_that_is_given_ends_the_prompt_of_all_who_use_the_template(name: str):
    """`resolve_template` with it: apply_chat_template gives it, the answer alone is trained, a thought behind none."""
    tokenizer = FAMILIES[name].tokenizer(family_template(name))
    question, asked = conversation("hello"), {"add_generation_prompt": True, "tokenize": False}
    without = tokenizer.apply_chat_template(question, **asked)
    for _ in range(2):  # once more changes nothing
        template = resolve_template(None, tokenizer, gives_thought=True)
        assert template is not None
        tokenizer.chat_template = template.text
    prompt = tokenizer.apply_chat_template(question, **asked)
    assert re.fullmatch(re.escape(without) + r"(<think>\n)?\n</think>\n+", prompt)
    assert tokenizer.apply_chat_template(question, **asked, empty_thought=False) == without
    ids, labels = render(as_conversation(conversation("hello", "fine")), tokenizer)
    first = int((labels != UNTRAINED).argmax())
    assert tokenizer.decode(ids[:first]) == prompt
    assert tokenizer.decode(ids[first:]).startswith("fine<")
    thoughtful = Conversation((Message("user", "hello"), Message("assistant", "fine", reasoning="Hm.")))
    ids, labels = render(thoughtful, tokenizer)
    assert tokenizer.decode(ids[: int((labels != UNTRAINED).argmax())]) == without
    (note, *_) = check_template(tokenizer)
    assert note.startswith("note: rows without `reasoning`: the answer alone is trained, after the prompt ")


def test_an_empty_thought_that_a_template_does_not_have():
    with pytest.raises(UserError, match=r"model.empty_thought: given: .* writes no empty thought before an answer"):
        resolve_template(None, STYLES["chatml"].tokenizer(shaped("chatml", "none")), gives_thought=True)
    with pytest.raises(UserError, match=r"model.empty_thought: the tokenizer has no chat template"):
        resolve_template(None, byte_level(), gives_thought=True)


@pytest.mark.parametrize("name", ["nemotron3", "deepseek_v31"])
def test_arguments_of_a_row_are_as_if_the_caller_gave_them(name: str):
    """Over those of the recipe, in the prompt and in what is trained behind it."""
    key = "enable_thinking" if name == "nemotron3" else "thinking"
    tokenizer = FAMILIES[name].tokenizer(family_template(name))
    recipes = resolve_template(None, tokenizer, {key: True})
    sample = as_conversation(conversation("hello", "fine"))
    for template in (None, recipes):
        maker = build_renderer(tokenizer, template)
        for value in (False, True):
            asked = {"add_generation_prompt": True, "tokenize": False, key: value}
            prompt = tokenizer.apply_chat_template(conversation("hello"), **asked)
            ((one,),) = maker.draw(replace(sample, template_arguments={key: value}))
            ((begin, _),) = one.spans
            assert one.text[:begin] == prompt
            assert one.text[begin:].startswith("fine") != value
    with pytest.raises(BadRow, match=r"chat_template_arguments: .* has no variable `enable_think`"):
        maker.draw(replace(sample, template_arguments={"enable_think": True}))


# --- special tokens in what a row says


def _with_call(call: Mapping[str, Any] | None = None, tools: tuple[Any, ...] = (), **tool: str) -> Conversation:
    call = call or {"type": "function", "id": "one", "function": {"name": "add", "arguments": {}}}
    answer = Message("tool", "4", **{"name": "add", "tool_call_id": str(call["id"]), **tool})
    turns = (Message("user", "a"), Message("assistant", "", tool_calls=(call,)), answer, Message("assistant", "b"))
    return Conversation(turns, tools)


def _call(id: str = "one", **function: Any) -> dict[str, Any]:
    return {"type": "function", "id": id, "function": {"name": "add", "arguments": {}, **function}}


SPECIAL = '<|"|>'  # a token that JSON would escape, as Gemma's latest tokenizers have it


@pytest.mark.parametrize(
    ("sample", "where"),
    [
        (Conversation((Message("user", SPECIAL), Message("assistant", "b"))), "message 0 (user)"),
        (
            Conversation((Message("user", "a"), Message("assistant", "b", reasoning=SPECIAL))),
            "the reasoning of message",
        ),
        (_with_call(name=SPECIAL), "the `name` of message 2 (tool)"),
        (_with_call(tool_call_id=SPECIAL), "the `tool_call_id` of message 2"),
        (_with_call(_call(id=SPECIAL), tool_call_id="one"), "a tool call of message 1"),
        (_with_call(_call(name=SPECIAL)), "a tool call of message 1"),
        (_with_call(_call(arguments={"a": [{"b": SPECIAL}]})), "a tool call of message 1"),
        (_with_call(_call(arguments={SPECIAL: 1})), "a tool call of message 1"),
        (_with_call(tools=({"type": "function", "function": {"name": "f", "description": SPECIAL}},)), "a tool"),
        (Conversation((Message("user", "a", name=SPECIAL), Message("assistant", "b"))), "the `name` of message 0"),
    ],
)
def test_special_tokens_are_refused_wherever_a_row_has_them(sample: Conversation, where: str):
    template = "{{ messages | tojson }}{{ tools | tojson }}<|im_end|>"
    made = build_renderer(byte_level(("<|im_end|>", SPECIAL), template=template))
    with pytest.raises(BadRow, match=re.escape(where) + ".* contains .*which this tokenizer reads as a special"):
        made.draw(sample)


# --- ids, and preferences


def test_ids_pass_through():
    tokenizer = byte_level(eos_token="</s>")
    for train_on in ("assistant", "last_assistant", "all"):
        input_ids, labels = render(Ids((5, 6, 7), (True, False, True)), tokenizer, train_on)
        assert input_ids.tolist() == [5, 6, 7]
        assert labels.tolist() == [UNTRAINED, UNTRAINED, 7]
    for wrong in (-1, len(tokenizer)):
        with pytest.raises(BadRow, match=rf"token id {wrong} is beyond this tokenizer's {len(tokenizer)} tokens"):
            render(Ids((5, wrong), (False, True)), tokenizer)


def test_a_preference_is_one_example_of_two_sequences():
    tokenizer = STYLES["chatml"].tokenizer(shaped("chatml", "none"))
    made = build_renderer(tokenizer)
    pair = Preference(PromptCompletion("hello", "fine"), as_conversation(conversation("hello", "four")))
    (drawn,) = made.draw(pair)
    assert [tokenizer.decode(ids[trained]) for ids, trained in made.tokenize(drawn)] == [
        "fine<|im_end|>",
        "four<|im_end|>",
    ]


def test_samples_of_all_kinds_keep_their_order():
    made = build_renderer(STYLES["chatml"].tokenizer(shaped("chatml", "none")))
    samples = [Ids((5, 6), (False, True)), PromptCompletion("a", "b"), Ids((7,), (False,)), Text("four")]
    drawn = [made.draw(sample)[0] for sample in samples]
    together = made.tokenize([text for group in drawn for text in group])
    alone = [made.tokenize(group)[0] for group in drawn]
    assert [ids.tolist() for ids, _ in together] == [ids.tolist() for ids, _ in alone]


ENDS_DIFFERENTLY = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
    "{{ '<|endoftext|>' if loop.last and m['role'] == 'assistant' else '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_a_turn_that_is_written_differently_later_is_an_example_of_its_own():
    tokenizer = byte_level(("<|im_start|>", "<|im_end|>", "<|endoftext|>"), template=ENDS_DIFFERENTLY)
    made = build_renderer(tokenizer)
    sample = as_conversation(conversation("hello", "fine", "and you?", "good"))
    tokens = [made.tokenize(group)[0] for group in made.draw(sample)]
    found = [(tokenizer.decode(ids), tokenizer.decode(ids[mask])) for ids, mask in tokens]
    assert found == [
        ("<|im_start|>user\nhello<|im_end|><|im_start|>assistant\nfine<|endoftext|>", "fine<|endoftext|>"),
        (
            "<|im_start|>user\nhello<|im_end|><|im_start|>assistant\nfine<|im_end|>"
            "<|im_start|>user\nand you?<|im_end|><|im_start|>assistant\ngood<|endoftext|>",
            "good<|endoftext|>",
        ),
    ]
    with pytest.raises(BadRow, match="'chosen' would become 2 examples"):
        made.draw(Preference(sample, sample))


# --- check_template


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (shaped("chatml", "none").replace("message['content'] + '<|im_end|>'", "message['content']"), "no end-of-turn"),
        ("<s>" + shaped("chatml", "none"), None),
        ("<s><s>" + shaped("chatml", "none"), "'<s>' twice"),
        (shaped("chatml", "none").replace("<|im_end|>", "<END>"), "'<END>', which is 5 tokens"),
        (
            shaped("chatml", "none").replace("{{ message['content'] + '<|im_end|>' }}{% else", "{{ 'x' }}{% else", 1),
            "changes the content of message 1",
        ),
        (
            "{% for m in messages %}{% if m['role'] == 'user' %}{% generation %}{{ m['content'] }}<|im_end|>"
            "{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>{% endif %}{% endfor %}",
            "marks nothing of message 1",
        ),
        (
            "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}<|im_end|>{% else %}{% generation %}"
            "<|im_start|>assistant\n{{ m['content'] }}<|im_end|>{% endgeneration %}{% endif %}{% endfor %}",
            "more than the answer",
        ),
        (shaped("chatml", "none") + "{% if false %}{% generation %}{% endgeneration %}{% endif %}", "marks nothing"),
        (PREFACED, "differently once its answer is known"),
        ("{{ raise_exception('no') }}", "refuses this conversation: no"),
        ("{% for m in messages %}", "line 1: not a Jinja template"),
    ],
)
def test_check_template_names_the_problem(template, problem):
    tokenizer = byte_level(("<s>", "<|im_start|>", "<|im_end|>"), template=template, bos_token="<s>")
    found = check_template(tokenizer)
    assert bool(found) == bool(problem)
    if problem:
        assert any(text.startswith("problem: ") and problem in text for text in found), found


def test_check_template_says_what_becomes_of_history():
    tokenizer = byte_level(("<|im_start|>", "<|im_end|>", "<|endoftext|>"), template=ENDS_DIFFERENTLY)
    for train_on, said in (
        ("assistant", "an example of its own"),
        ("all", "only what is left"),
        ("last_assistant", None),
    ):
        notes = check_template(tokenizer, None, train_on)
        assert [said is not None and said in note for note in notes] == [True] * (said is not None)


def test_check_template_says_that_no_bos_is_written():
    tokenizer = byte_level(
        ("<s>", "<|im_start|>", "<|im_end|>"), template=shaped("chatml", "none"), bos_token="<s>", adds_bos=True
    )
    assert [note for note in check_template(tokenizer) if "does not begin with '<s>'" in note]


def test_an_end_that_only_the_last_turn_has_is_a_problem():
    template = (
        "{% for m in messages %}{{ m['role'] + '\n' + m['content'] + ('<|im_end|>' if loop.last else '\n') }}"
        "{% endfor %}{% if add_generation_prompt %}{{ 'assistant\n' }}{% endif %}"
    )
    tokenizer = byte_level(("<|im_start|>", "<|im_end|>"), template=template)
    assert any("problem" in text for text in check_template(tokenizer))


def test_rows_are_the_same_on_every_day():
    tokenizer = byte_level(("<|im_start|>", "<|im_end|>"))
    for asked, told in (("'%d %b %Y'", "26 Jul 2024"), ('"%Y-%m-%d"', "2024-07-26")):
        template = Template("{{ strftime_now(" + asked + ") }}" + shaped("chatml", "none"), "dated")
        ids, _ = render(Conversation((Message("user", "a"), Message("assistant", "b"))), tokenizer, template=template)
        assert tokenizer.decode(ids).startswith(f"{told}<|im_start|>user")
        assert not asks_for_today(template.text)
    unknown = "{% set f = '%Y' %}{{ strftime_now(f) }}" + shaped("chatml", "none")
    assert asks_for_today(unknown)
    assert any("on another day differ" in note for note in check_template(tokenizer, Template(unknown, "dated")))


def test_check_template_notes():
    template = "{{ strftime_now('%d %b %Y') }}" + shaped("chatml", "none")
    tokenizer = byte_level(("<|im_start|>", "<|im_end|>"), template=template, pad_token="<|im_end|>")
    notes = check_template(tokenizer)
    assert len(notes) == 2
    assert "padding token is the end-of-turn '<|im_end|>'" in notes[0]
    assert "writes today's date: rows say 26 July 2024" in notes[1]
    assert all(note.startswith("note: ") for note in notes)


# --- text, and prompt and completion, without a template


@pytest.mark.parametrize("adds_bos", [False, True])
def test_text_has_its_ends_once(adds_bos):
    tokenizer = byte_level(bos_token="<s>", eos_token="</s>", adds_bos=adds_bos)
    words = tokenizer.encode("hello world", add_special_tokens=False)
    expected = [*([0] if adds_bos else []), *words, 1]
    for text in ("hello world", "hello world</s>"):
        input_ids, labels = render(Text(text), tokenizer)
        assert input_ids.tolist() == expected
        assert labels.tolist() == [UNTRAINED, *expected[1:]]
    if adds_bos:
        assert render(Text("<s>hello world"), tokenizer)[0].tolist() == expected


def test_prompt_and_completion_without_a_template():
    tokenizer = byte_level(bos_token="<s>", eos_token="</s>", adds_bos=True)
    input_ids, labels = render(PromptCompletion("hello", " world"), tokenizer)
    assert tokenizer.decode(input_ids) == "<s>hello world</s>"
    assert tokenizer.decode(labels[labels != UNTRAINED]) == " world</s>"


def test_prompt_and_completion_with_a_template():
    tokenizer = STYLES["chatml"].tokenizer(shaped("chatml", "none"))
    both = [render(s, tokenizer) for s in (PromptCompletion("a", "b"), as_conversation(conversation("a", "b")))]
    assert both[0][0].tolist() == both[1][0].tolist()
    assert both[0][1].tolist() == both[1][1].tolist()


def test_text_without_an_eos_is_refused():
    with pytest.raises(UserError, match="eos_token"):
        render(Text("hello"), byte_level())


def test_messages_without_a_template_are_refused():
    names = ", ".join(built_in_templates())
    with pytest.raises(UserError, match=rf"no chat template.*set model\.chat_template to one of {names}"):
        render(as_conversation(conversation("a", "b")), byte_level())


# --- choosing a template


def test_a_misspelt_template_suggests_the_right_one():
    names = ", ".join(built_in_templates())
    with pytest.raises(
        UserError, match=rf"no template `chat_ml`\. Fix: .*built in \({names}\), .*did you mean `chatml`\?"
    ):
        resolve_template("chat_ml", byte_level())


def test_a_template_file(tmp_path):
    file = tmp_path / "mine.jinja"
    with pytest.raises(UserError, match=r"no such file: .*mine\.jinja"):
        resolve_template(str(file), byte_level())
    file.write_bytes(b"\xff")
    with pytest.raises(UserError, match="not UTF-8"):
        resolve_template(str(file), byte_level())
    file.write_text("{{ messages }}\n")
    assert resolve_template(str(file), byte_level()) == Template("{{ messages }}", str(file))


def test_the_tokenizers_own_template():
    assert resolve_template(None, byte_level()) is None
    assert resolve_template(None, byte_level(template="x")) == Template("x", "the tokenizer's chat template")
    several = byte_level()
    several.chat_template = {"default": "x", "tools": "y"}
    assert resolve_template(None, several) == Template("x", "the tokenizer's chat template")
    several.chat_template = {"rag": "x", "tools": "y"}
    with pytest.raises(UserError, match=r"several chat templates \(rag, tools\)"):
        resolve_template(None, several)


TOOL_TEMPLATE = "{{ tools | tojson }}" + CALLS


def test_a_tokenizers_template_for_tools_is_kept_and_used_as_transformers_does(tmp_path: Path):
    tokenizer = STYLES["chatml"].tokenizer(None)
    tokenizer.chat_template = {"default": CALLS, "tool_use": TOOL_TEMPLATE, "rag": "R"}
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    for tools in ((), (tool,)):
        sample = replace(WITH_CALL, tools=tools)
        input_ids, _ = render(sample, tokenizer)
        messages = build_renderer(tokenizer).chat.traits.as_dicts(sample)  # type: ignore[union-attr]
        wanted = tokenizer.apply_chat_template(messages, tools=list(tools) or None)["input_ids"]
        assert input_ids.tolist() == wanted
    template = resolve_template(None, tokenizer)
    assert template is not None
    set_template(tokenizer, template, replaces_all=False)
    tokenizer.save_pretrained(tmp_path)
    kept = PreTrainedTokenizerFast.from_pretrained(tmp_path).chat_template
    assert kept == {"default": CALLS, "tool_use": TOOL_TEMPLATE, "rag": "R"}


@pytest.mark.parametrize(("completion", "is_told"), [("806", True), (" 806", False)])
def test_prompts_and_answers_that_meet_in_a_word_are_told(tmp_path: Path, completion: str, is_told: bool):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "The answer to 806", "completion": completion}])
    notes = template_notes(recipe(path, "prompt_completion"), byte_level(bos_token="<s>", eos_token="</s>"))
    told = ["prompts and answers are joined as they are, such as 'The answer to 806806'" in note for note in notes]
    assert told == [True] * is_told


def test_an_adapter_is_no_base(tmp_path: Path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"is an adapter without its base\. Fix: merge it"):
        base_config(Model(name=str(tmp_path)))
