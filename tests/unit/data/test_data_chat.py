"""Masks by exact ids: the trained ids are the assistant's words and its end-of-turn, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from data_helpers import byte_level, conversation, sentencepiece_like, word_level
from transformers import PreTrainedTokenizerFast

from finetune.data import (
    UNTRAINED,
    BadRow,
    Conversation,
    Message,
    PromptCompletion,
    Template,
    Text,
    built_in_templates,
    check_template,
    render,
    resolve_template,
)
from finetune.data.chat import tokens_in_spans
from finetune.errors import UserError

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
    return Conversation(tuple(Message(m["role"], m["content"]) for m in messages), first_trained)


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


@pytest.mark.parametrize("name", sorted(STYLES))
def test_built_in_templates_train_the_same_ids(name):
    style = STYLES[name]
    tokenizer = style.tokenizer(None)
    template = resolve_template(name, tokenizer)
    messages = CONVERSATIONS["three turns"]
    _, labels = render(as_conversation(messages), tokenizer, template=template)
    assert labels[labels != UNTRAINED].tolist() == expected_ids(tokenizer, style, ["I am fine", "so am I", "quick fox"])
    assert check_template(tokenizer, template) == []


def test_every_built_in_template_renders_a_system_message():
    tokenizer = byte_level(bos_token="<s>", eos_token="</s>")
    for name in built_in_templates():
        sample = as_conversation(conversation("hello", "fine", system="quick fox"))
        input_ids, _ = render(sample, tokenizer, template=resolve_template(name, tokenizer))
        assert "quick fox" in tokenizer.decode(input_ids)


def test_plain_template_ends_with_eos():
    tokenizer = byte_level(bos_token="<s>", eos_token="</s>")
    template = resolve_template("plain", tokenizer)
    input_ids, labels = render(as_conversation(conversation("hello", "fine")), tokenizer, template=template)
    assert tokenizer.decode(input_ids) == "<s>User:\nhello\n\nAssistant:\nfine</s>\n"
    assert tokenizer.decode(labels[labels != UNTRAINED]) == "fine</s>"
    assert check_template(tokenizer, template) == []


def test_the_worked_example_of_render():
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


def test_a_closing_token_of_the_whole_conversation_is_not_trained():
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


def test_content_that_the_template_trims_is_found():
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


QWEN3_LIKE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STRIPS_THOUGHT = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{{ (m['content'].split('</think>')[-1] if not loop.last else m['content']) + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
R1_LIKE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "messages"),
    [
        (QWEN3_LIKE, conversation("hello", "fine", "and you?", "good")),
        (STRIPS_THOUGHT, conversation("hello", "<think>quick</think>fine", "and you?", "good")),
        (R1_LIKE, conversation("hello", "fine")),
    ],
    ids=["adds a thought to the last turn", "strips earlier thoughts", "prompts for a thought that is not there"],
)
def test_rewritten_history_is_refused_with_the_reason(template, messages):
    tokenizer = STYLES["chatml"].tokenizer(template)
    with pytest.raises(UserError, match=r"message \d \(assistant\)[\s\S]*{% generation %}[\s\S]*model\.chat_template"):
        render(as_conversation(messages), tokenizer)


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
            "not the answer",
        ),
        (
            "{% for m in messages %}{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}{% endfor %}",
            "4 parts as generated in 2",
        ),
        (
            "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}<|im_end|>{% else %}{% generation %}"
            "<|im_start|>assistant\n{{ m['content'] }}<|im_end|>{% endgeneration %}{% endif %}{% endfor %}",
            "more than the answer",
        ),
        ("{{ messages[0]['content'] }}{% if false %}{% generation %}{% endgeneration %}{% endif %}", "marks nothing"),
        (QWEN3_LIKE, "differently once more messages follow"),
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


def test_an_end_that_only_the_last_turn_has_is_a_problem():
    template = (
        "{% for m in messages %}{{ m['role'] + '\n' + m['content'] + ('<|im_end|>' if loop.last else '\n') }}"
        "{% endfor %}{% if add_generation_prompt %}{{ 'assistant\n' }}{% endif %}"
    )
    tokenizer = byte_level(("<|im_start|>", "<|im_end|>"), template=template)
    assert any("problem" in text for text in check_template(tokenizer))


def test_check_template_notes():
    template = shaped("chatml", "none") + "{# strftime_now #}"
    tokenizer = byte_level(("<|im_start|>", "<|im_end|>"), template=template, pad_token="<|im_end|>")
    notes = check_template(tokenizer)
    assert len(notes) == 2
    assert "padding token is the end-of-turn '<|im_end|>'" in notes[0]
    assert "today's date" in notes[1]
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
    with pytest.raises(UserError, match=r"no chat template.*set model\.chat_template to one of chatml, llama3"):
        render(as_conversation(conversation("a", "b")), byte_level())


# --- choosing a template


def test_a_misspelt_template_suggests_the_right_one():
    with pytest.raises(UserError, match=r"did you mean `chatml`\? \(built in: chatml, llama3, mistral"):
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


def test_tokens_in_spans_is_its_docstring():
    offsets = [(0, 3), (3, 8), (8, 9), (9, 13)]
    assert tokens_in_spans(offsets, [(4, 9)]).tolist() == [False, True, True, False]
    assert tokens_in_spans(offsets, [(5, 5)]).tolist() == [False] * 4
    assert tokens_in_spans([], [(0, 0)]).tolist() == []
