"""Exact ids under the published chat formats: each expected text is written out by hand, « » around what is trained.

The templates of `templates/` are written for these tests after the formats' documentation. Each is tried as published
(without `{% generation %}` tags) and with tags: the masks must be the same.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import pytest
from data_helpers import byte_level, family_template
from repository import ROOT
from transformers import PreTrainedTokenizerFast

from finetune.data.chat.renderer import UNTRAINED, build_renderer, labels_of
from finetune.data.chat.template_check import check_template, last_question, turn_end_ids
from finetune.data.chat.template_choice import built_in_templates, own_template
from finetune.data.chat.template_traits import CALL_ID, Traits
from finetune.data.samples import BadRow, Conversation, Message
from finetune.recipe import load_recipe

ADD = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}},
}
ADD_JSON = (
    '{"type": "function", "function": {"name": "add", "description": "Adds.", '
    '"parameters": {"type": "object", "properties": {}}}}'
)
ADD_INDENTED = """{
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {}
        }
    }
}"""
CALL = {"type": "function", "id": CALL_ID, "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}

ONE = Conversation((Message("user", "what is two?"), Message("assistant", "four")))
TWO = Conversation(
    (
        Message("user", "hello"),
        Message("assistant", "I am fine"),
        Message("user", "and you?"),
        Message("assistant", "so am I"),
    )
)
SYSTEM = Conversation((Message("system", "Be quick."), *ONE.messages))
TOOLS = Conversation(
    (
        Message("user", "two and two?"),
        Message("assistant", "", tool_calls=(CALL,)),
        Message("tool", "4", name="add", tool_call_id=CALL_ID),
        Message("assistant", "four"),
    ),
    (ADD,),
)
THOUGHTS = Conversation(
    tuple(replace(m, reasoning=f"quick {i}") if m.role == "assistant" else m for i, m in enumerate(TWO.messages))
)

NO_TOOLS, NO_REASONING = "does not support tools", "does not write the `reasoning`"
QWEN_SYSTEM = "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
QWEN_TOOLS = (
    f"# Tools\n\nYou may call one or more functions.\n\n<tools>\n{ADD_JSON}\n</tools>\n\n"
    "Return a JSON object within <tool_call></tool_call>.<|im_end|>\n"
)
QWEN_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call><|im_end|>'
LLAMA31_SYSTEM = "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
HARMONY = (
    "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n\nReasoning: medium<|end|>"
)


@dataclass(frozen=True)
class Family:
    """What a family's texts look like. Each is one example or several; `refused`: the reason, where it cannot be."""

    specials: tuple[str, ...]
    eos: str
    one: str
    two: str | list[str]
    system: str
    tools: str | list[str]
    thoughts: str | list[str]
    bos: str | None = None
    words: tuple[str, ...] = ()  # added tokens that are not special
    greedy: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()  # names of conversations, whose text above is then the reason

    def tokenizer(self, template: str | None) -> PreTrainedTokenizerFast:
        named = {"eos_token": self.eos, **({"bos_token": self.bos} if self.bos else {})}
        return byte_level(self.specials, template=template, words=self.words, greedy=self.greedy, **named)


def texts(family: Family, name: str) -> list[str]:
    found = getattr(family, name)
    return [found] if isinstance(found, str) else found


CHATML = Family(
    ("<|im_start|>", "<|im_end|>"),
    "<|im_end|>",
    "<|im_start|>user\nwhat is two?<|im_end|>\n<|im_start|>assistant\n«four<|im_end|>»\n",
    "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n«I am fine<|im_end|>»\n"
    "<|im_start|>user\nand you?<|im_end|>\n<|im_start|>assistant\n«so am I<|im_end|>»\n",
    "<|im_start|>system\nBe quick.<|im_end|>\n"
    "<|im_start|>user\nwhat is two?<|im_end|>\n<|im_start|>assistant\n«four<|im_end|>»\n",
    NO_TOOLS,
    NO_REASONING,
    refused=("tools", "thoughts"),
)
LLAMA3 = Family(
    ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
    "<|eot_id|>",
    "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nwhat is two?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n«four<|eot_id|>»",
    "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nhello<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n«I am fine<|eot_id|>»"
    "<|start_header_id|>user<|end_header_id|>\n\nand you?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n«so am I<|eot_id|>»",
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe quick.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nwhat is two?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n«four<|eot_id|>»",
    NO_TOOLS,
    NO_REASONING,
    bos="<|begin_of_text|>",
    refused=("tools", "thoughts"),
)


def _llama31(text: str, system: str = "") -> str:
    """The Llama 3 text with the dates that 3.1 always writes."""
    start = f"<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n{LLAMA31_SYSTEM}{system}<|eot_id|>"
    return start + text.removeprefix("<|begin_of_text|>").replace(
        "<|start_header_id|>system<|end_header_id|>\n\nBe quick.<|eot_id|>", ""
    )


LLAMA31_TOOLS = (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nEnvironment: ipython\n"
    f"{LLAMA31_SYSTEM}<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"
    "Given the following functions, please respond with a JSON for a function call.\n\n"
    f"{ADD_INDENTED}\n\ntwo and two?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    '«{"name": "add", "parameters": {"a": 2, "b": 2}}<|eot_id|>»'
    '<|start_header_id|>ipython<|end_header_id|>\n\n"4"<|eot_id|>'
    "<|start_header_id|>assistant<|end_header_id|>\n\n«four<|eot_id|>»"
)
LLAMA31 = replace(
    LLAMA3,
    one=_llama31(LLAMA3.one),
    two=_llama31(str(LLAMA3.two)),
    system=_llama31(LLAMA3.system, "Be quick."),
    tools=LLAMA31_TOOLS,
    refused=("thoughts",),
)
MISTRAL_V1 = Family(
    ("<s>", "</s>"),
    "</s>",
    "<s> [INST] what is two? [/INST]« four</s>»",
    "<s> [INST] hello [/INST]« I am fine</s>» [INST] and you? [/INST]« so am I</s>»",
    "<s> [INST] Be quick.\n\nwhat is two? [/INST]« four</s>»",
    "Only user, assistant and system roles",
    NO_REASONING,
    bos="<s>",
    refused=("tools", "thoughts"),
)
MISTRAL_V3 = Family(
    (
        *("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
        *("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    ),
    "</s>",
    "<s>[INST] what is two?[/INST]« four</s>»",
    "<s>[INST] hello[/INST]« I am fine</s>»[INST] and you?[/INST]« so am I</s>»",
    "<s>[INST] Be quick.\n\nwhat is two?[/INST]« four</s>»",
    f"<s>[AVAILABLE_TOOLS] [{ADD_JSON}][/AVAILABLE_TOOLS][INST] two and two?[/INST]"
    f'«[TOOL_CALLS] [{{"name": "add", "arguments": {{"a": 2, "b": 2}}, "id": "{CALL_ID}"}}]</s>»'
    f'[TOOL_RESULTS] {{"content": 4, "call_id": "{CALL_ID}"}}[/TOOL_RESULTS]« four</s>»',
    NO_REASONING,
    bos="<s>",
    refused=("thoughts",),
)


def _tekken(text: str) -> str:
    return re.sub(r"(\[INST\]|\[/INST\]«|\[AVAILABLE_TOOLS\]|\[TOOL_CALLS\]|\[/?TOOL_RESULTS\]«?) ", r"\1", text)


QWEN25 = replace(
    CHATML,
    words=("<tool_call>", "</tool_call>"),
    one=QWEN_SYSTEM + CHATML.one,
    two=QWEN_SYSTEM + str(CHATML.two),
    tools=QWEN_SYSTEM.removesuffix("<|im_end|>\n")
    + f"\n\n{QWEN_TOOLS}<|im_start|>user\ntwo and two?<|im_end|>\n<|im_start|>assistant\n«{QWEN_CALL}»\n"
    "<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n«four<|im_end|>»\n",
    refused=("thoughts",),
)
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"
QWEN3_TOOLS = f"<|im_start|>system\n{QWEN_TOOLS}<|im_start|>user\ntwo and two?<|im_end|>\n<|im_start|>assistant\n"
QWEN3_TWO = (
    "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nI am fine<|im_end|>\n"
    "<|im_start|>user\nand you?<|im_end|>\n<|im_start|>assistant\n"
)
QWEN3 = replace(
    CHATML,
    words=("<think>", "</think>", "<tool_call>", "</tool_call>"),
    one=CHATML.one.replace("«", "«" + EMPTY_THOUGHT),
    two=[
        f"<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n«{EMPTY_THOUGHT}I am fine<|im_end|>»\n",
        f"{QWEN3_TWO}«{EMPTY_THOUGHT}so am I<|im_end|>»\n",
    ],
    system=CHATML.system.replace("«", "«" + EMPTY_THOUGHT),
    tools=[
        f"{QWEN3_TOOLS}«{EMPTY_THOUGHT}{QWEN_CALL}»\n",
        f"{QWEN3_TOOLS}{QWEN_CALL}\n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n"
        f"<|im_start|>assistant\n«{EMPTY_THOUGHT}four<|im_end|>»\n",
    ],
    thoughts=[
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
        "«<think>\nquick 1\n</think>\n\nI am fine<|im_end|>»\n",
        f"{QWEN3_TWO}«<think>\nquick 3\n</think>\n\nso am I<|im_end|>»\n",
    ],
    refused=(),
)


def _prompted(text: str | list[str]) -> list[str]:
    """With the opening of the thought given by the prompt."""
    return [one.replace("«<think>\n", "<think>\n«") for one in ([text] if isinstance(text, str) else text)]


def _given(text: str | list[str]) -> list[str]:
    """With an empty thought given by the prompt; a thought that is not empty is written behind the prompt's own."""
    return [
        one.replace("«" + EMPTY_THOUGHT, EMPTY_THOUGHT + "«") for one in ([text] if isinstance(text, str) else text)
    ]


GEMMA2 = Family(
    ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    "<eos>",
    "<bos><start_of_turn>user\nwhat is two?<end_of_turn>\n<start_of_turn>model\n«four<end_of_turn>»\n",
    "<bos><start_of_turn>user\nhello<end_of_turn>\n<start_of_turn>model\n«I am fine<end_of_turn>»\n"
    "<start_of_turn>user\nand you?<end_of_turn>\n<start_of_turn>model\n«so am I<end_of_turn>»\n",
    "System role not supported",
    "Conversation roles must alternate",
    NO_REASONING,
    bos="<bos>",
    refused=("system", "tools", "thoughts"),
)
PHI3_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
PHI3 = Family(
    ("<|endoftext|>", *PHI3_TOKENS),
    "<|endoftext|>",
    "<|user|>\nwhat is two?<|end|>\n<|assistant|>\n«four<|end|>»\n<|endoftext|>",
    "<|user|>\nhello<|end|>\n<|assistant|>\n«I am fine<|end|>»\n"
    "<|user|>\nand you?<|end|>\n<|assistant|>\n«so am I<|end|>»\n<|endoftext|>",
    "<|system|>\nBe quick.<|end|>\n<|user|>\nwhat is two?<|end|>\n<|assistant|>\n«four<|end|>»\n<|endoftext|>",
    NO_TOOLS,
    NO_REASONING,
    refused=("tools", "thoughts"),
)
ZEPHYR = Family(
    ("<s>", "</s>"),
    "</s>",
    "<|user|>\nwhat is two?</s>\n<|assistant|>\n«four</s>»\n",
    "<|user|>\nhello</s>\n<|assistant|>\n«I am fine</s>»\n<|user|>\nand you?</s>\n<|assistant|>\n«so am I</s>»\n",
    "<|system|>\nBe quick.</s>\n<|user|>\nwhat is two?</s>\n<|assistant|>\n«four</s>»\n",
    NO_TOOLS,
    NO_REASONING,
    refused=("tools", "thoughts"),
)
DEEPSEEK_V3 = Family(
    (
        *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁sep｜>"),
        *(f"<｜tool▁{what}▁{side}｜>" for what in ("calls", "call", "outputs", "output") for side in ("begin", "end")),
    ),
    "<｜end▁of▁sentence｜>",
    "<｜begin▁of▁sentence｜><｜User｜>what is two?<｜Assistant｜>«four<｜end▁of▁sentence｜>»",
    "<｜begin▁of▁sentence｜><｜User｜>hello<｜Assistant｜>«I am fine<｜end▁of▁sentence｜>»"
    "<｜User｜>and you?<｜Assistant｜>«so am I<｜end▁of▁sentence｜>»",
    "<｜begin▁of▁sentence｜>Be quick.<｜User｜>what is two?<｜Assistant｜>«four<｜end▁of▁sentence｜>»",
    # This template writes no schemas: they are put into the system message, and the row has none.
    "<｜begin▁of▁sentence｜><｜User｜>two and two?<｜Assistant｜>"
    '«<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 2, "b": 2}\n```'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>»"
    "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>4<｜tool▁output▁end｜><｜tool▁outputs▁end｜>"
    "«four<｜end▁of▁sentence｜>»",
    NO_REASONING,
    bos="<｜begin▁of▁sentence｜>",
    refused=("thoughts",),
)
R1 = "<｜begin▁of▁sentence｜><｜User｜>"
R1_TWO = f"{R1}hello<｜Assistant｜>I am fine<｜end▁of▁sentence｜><｜User｜>and you?<｜Assistant｜>"
R1_DISTILL = replace(
    DEEPSEEK_V3,
    words=("<think>", "</think>"),
    one=f"{R1}what is two?<｜Assistant｜><think>\n«\n</think>\n\nfour<｜end▁of▁sentence｜>»",
    two=[
        f"{R1}hello<｜Assistant｜><think>\n«\n</think>\n\nI am fine<｜end▁of▁sentence｜>»",
        f"{R1_TWO}<think>\n«\n</think>\n\nso am I<｜end▁of▁sentence｜>»",
    ],
    system="<｜begin▁of▁sentence｜>Be quick.<｜User｜>what is two?<｜Assistant｜>"
    "<think>\n«\n</think>\n\nfour<｜end▁of▁sentence｜>»",
    thoughts=[
        "<｜begin▁of▁sentence｜><｜User｜>hello<｜Assistant｜><think>\n"
        "«quick 1\n</think>\n\nI am fine<｜end▁of▁sentence｜>»",
        f"{R1_TWO}<think>\n«quick 3\n</think>\n\nso am I<｜end▁of▁sentence｜>»",
    ],
    tools=NO_TOOLS,
    refused=("tools",),
)


def _v31(text: str | list[str]) -> list[str]:
    """With no white space about thoughts, and `</think>` kept in earlier turns."""
    texts = [text] if isinstance(text, str) else text
    texts = [one.replace("<think>\n«", "<think>«").replace("\n</think>\n\n", "</think>") for one in texts]
    return [one.replace("<｜Assistant｜>I am fine", "<｜Assistant｜></think>I am fine") for one in texts]


NEMOTRON_SYSTEM = "<|im_start|>system\n<|im_end|>\n"
NEMOTRON_TOOLS = (
    "<|im_start|>system\n\n\n# Tools\n\n<tools>\n<function>\n<name>add</name>\n</function>\n</tools><|im_end|>\n"
    "<|im_start|>user\ntwo and two?<|im_end|>\n<|im_start|>assistant\n"
)
NEMOTRON_CALL = (
    "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>\n"
    "</tool_call>\n<|im_end|>"
)
NEMOTRON_TWO = (
    f"{NEMOTRON_SYSTEM}<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n<think></think>I am fine<|im_end|>\n"
    "<|im_start|>user\nand you?<|im_end|>\n<|im_start|>assistant\n"
)
NEMOTRON3 = replace(
    QWEN3,
    one=NEMOTRON_SYSTEM + CHATML.one.replace("«", "<think>\n«\n</think>\n"),
    two=[
        f"{NEMOTRON_SYSTEM}<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
        "<think>\n«\n</think>\nI am fine<|im_end|>»\n",
        f"{NEMOTRON_TWO}<think>\n«\n</think>\nso am I<|im_end|>»\n",
    ],
    system=CHATML.system.replace("«", "<think>\n«\n</think>\n"),
    tools=[
        f"{NEMOTRON_TOOLS}<think>\n«\n</think>\n{NEMOTRON_CALL}»\n",
        f"{NEMOTRON_TOOLS}<think></think>{NEMOTRON_CALL}\n<|im_start|>user\n<tool_response>\n4\n</tool_response>\n"
        "<|im_end|>\n<|im_start|>assistant\n<think>\n«\n</think>\nfour<|im_end|>»\n",
    ],
    thoughts=[
        f"{NEMOTRON_SYSTEM}<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
        "<think>\n«quick 1\n</think>\nI am fine<|im_end|>»\n",
        f"{NEMOTRON_TWO}<think>\n«quick 3\n</think>\nso am I<|im_end|>»\n",
    ],
)
OSS_TOOLS = (
    f"{HARMONY}<|start|>developer<|message|>\n\n# Tools\n\n## functions\n\nnamespace functions {{\n\n// Adds.\n"
    'type add = (_: {"type": "object", "properties": {}}) => any;\n\n} // namespace functions<|end|>'
    "<|start|>user<|message|>two and two?<|end|><|start|>assistant"
)
OSS_CALL = ' to=functions.add<|channel|>commentary json<|message|>{"a": 2, "b": 2}<|call|>'
OSS_RESULT = '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"4"<|end|><|start|>assistant'
OSS_TWO = (
    f"{HARMONY}<|start|>user<|message|>hello<|end|>"
    "<|start|>assistant<|channel|>final<|message|>I am fine<|end|>"
    "<|start|>user<|message|>and you?<|end|><|start|>assistant"
)
GPT_OSS = Family(
    ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>", "<|endoftext|>"),
    "<|return|>",
    f"{HARMONY}<|start|>user<|message|>what is two?<|end|>"
    "<|start|>assistant«<|channel|>final<|message|>four<|return|>»",
    [
        f"{HARMONY}<|start|>user<|message|>hello<|end|>"
        "<|start|>assistant«<|channel|>final<|message|>I am fine<|return|>»",
        f"{OSS_TWO}«<|channel|>final<|message|>so am I<|return|>»",
    ],
    f"{HARMONY}<|start|>developer<|message|># Instructions\n\nBe quick.<|end|>"
    "<|start|>user<|message|>what is two?<|end|><|start|>assistant«<|channel|>final<|message|>four<|return|>»",
    f"{OSS_TOOLS}«{OSS_CALL}»{OSS_RESULT}«<|channel|>final<|message|>four<|return|>»",
    [
        f"{HARMONY}<|start|>user<|message|>hello<|end|><|start|>assistant"
        "«<|channel|>analysis<|message|>quick 1<|end|><|start|>assistant"
        "<|channel|>final<|message|>I am fine<|return|>»",
        f"{OSS_TWO}«<|channel|>analysis<|message|>quick 3<|end|><|start|>assistant"
        "<|channel|>final<|message|>so am I<|return|>»",
    ],
)


MISTRAL4 = Family(
    (
        *("<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]"),
        *("[/AVAILABLE_TOOLS]", "[MODEL_SETTINGS]", "[/MODEL_SETTINGS]", "[TOOL_CALLS]", "[ARGS]", "[TOOL_RESULTS]"),
        *("[/TOOL_RESULTS]", "[THINK]", "[/THINK]"),
    ),
    "</s>",
    "<s>{}[INST]what is two?[/INST]«four</s>»",
    "<s>{}[INST]hello[/INST]«I am fine</s>»[INST]and you?[/INST]«so am I</s>»",
    "<s>[SYSTEM_PROMPT]Be quick.[/SYSTEM_PROMPT]{}[INST]what is two?[/INST]«four</s>»",
    f"<s>[AVAILABLE_TOOLS][{ADD_JSON}][/AVAILABLE_TOOLS]"
    '{}[INST]two and two?[/INST]«[TOOL_CALLS]add[ARGS]{"a": 2, "b": 2}</s>»[TOOL_RESULTS]4[/TOOL_RESULTS]«four</s>»',
    "<s>{}[INST]hello[/INST]«[THINK]quick 1[/THINK]I am fine</s>»"
    "[INST]and you?[/INST]«[THINK]quick 3[/THINK]so am I</s>»",
    bos="<s>",
)
MISTRAL4_SETTINGS = '[MODEL_SETTINGS]{"reasoning_effort": "none"}[/MODEL_SETTINGS]'
GEMMA4_PROMPT = "<|turn>model\n<|channel>thought\n<channel|>"
GEMMA4_TOOLS = (
    '<bos><|turn>system\n<|tool>declaration:add{description:<|"|>Adds.<|"|>}<tool|><turn|>\n'
    "<|turn>user\ntwo and two?<turn|>\n"
)
GEMMA4 = Family(
    (
        *("<bos>", "<eos>", "<|turn>", "<turn|>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>"),
        *("<|tool_response>", "<tool_response|>", "<|channel>", "<channel|>", '<|"|>', "<|think|>"),
    ),
    "<eos>",
    f"<bos><|turn>user\nwhat is two?<turn|>\n{GEMMA4_PROMPT}«four<turn|>»\n",
    [
        f"<bos><|turn>user\nhello<turn|>\n{GEMMA4_PROMPT}«I am fine<turn|>»\n",
        "<bos><|turn>user\nhello<turn|>\n<|turn>model\nI am fine<turn|>\n"
        f"<|turn>user\nand you?<turn|>\n{GEMMA4_PROMPT}«so am I<turn|>»\n",
    ],
    f"<bos><|turn>system\nBe quick.<turn|>\n<|turn>user\nwhat is two?<turn|>\n{GEMMA4_PROMPT}«four<turn|>»\n",
    [
        f"{GEMMA4_TOOLS}{GEMMA4_PROMPT}«<|tool_call>call:add{{a:2,b:2}}<tool_call|>»",
        f"{GEMMA4_TOOLS}<|turn>model\n<|tool_call>call:add{{a:2,b:2}}<tool_call|>"
        '<|tool_response>response:add{value:<|"|>4<|"|>}<tool_response|>«four<turn|>»\n',
    ],
    NO_REASONING,
    bos="<bos>",
    refused=("thoughts",),
)
NEMOTRON2_TWO = (
    "<SPECIAL_10>System\n\n<SPECIAL_11>User\nhello\n<SPECIAL_11>Assistant\nI am fine\n<SPECIAL_12>\n"
    "<SPECIAL_11>User\nand you?\n<SPECIAL_11>Assistant\n<think>\n"
)
NEMOTRON2_ONE = "<SPECIAL_10>System\n\n<SPECIAL_11>User\nhello\n<SPECIAL_11>Assistant\n<think>\n"
NEMOTRON2_TOOLS = (
    "<SPECIAL_10>System\n\n\nTools:\n<AVAILABLE_TOOLS>["
    '{"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}]</AVAILABLE_TOOLS>\n'
    "<SPECIAL_11>User\ntwo and two?\n<SPECIAL_11>Assistant\n"
)
NEMOTRON2_CALL = '<TOOLCALL>[{"name": "add", "arguments": {"a": 2, "b": 2}}]</TOOLCALL>\n<SPECIAL_12>'
NEMOTRON2 = Family(
    ("<s>", "<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>"),
    "<SPECIAL_12>",
    "<SPECIAL_10>System\n\n<SPECIAL_11>User\nwhat is two?\n<SPECIAL_11>Assistant\n"
    "<think>\n«\n</think>\n\nfour\n<SPECIAL_12>»\n",
    [
        f"{NEMOTRON2_ONE}«\n</think>\n\nI am fine\n<SPECIAL_12>»\n",
        f"{NEMOTRON2_TWO}«\n</think>\n\nso am I\n<SPECIAL_12>»\n",
    ],
    "<SPECIAL_10>System\nBe quick.\n<SPECIAL_11>User\nwhat is two?\n<SPECIAL_11>Assistant\n"
    "<think>\n«\n</think>\n\nfour\n<SPECIAL_12>»\n",
    [
        f"{NEMOTRON2_TOOLS}<think>\n«\n</think>\n\n{NEMOTRON2_CALL}»\n",
        f"{NEMOTRON2_TOOLS}{NEMOTRON2_CALL}\n<SPECIAL_11>User\n<TOOL_RESPONSE>[4]</TOOL_RESPONSE>\n"
        "<SPECIAL_11>Assistant\n<think>\n«\n</think>\n\nfour\n<SPECIAL_12>»\n",
    ],
    [
        f"{NEMOTRON2_ONE}«quick 1\n</think>\n\nI am fine\n<SPECIAL_12>»\n",
        f"{NEMOTRON2_TWO}«quick 3\n</think>\n\nso am I\n<SPECIAL_12>»\n",
    ],
    words=("<think>", "</think>"),
)


def _llama4(text: str) -> str:
    text = text.replace("<|start_header_id|>", "<|header_start|>").replace("<|end_header_id|>", "<|header_end|>")
    return text.replace("<|eot_id|>", "<|eot|>")


def _granite4(text: str) -> str:
    text = text.replace("<|im_start|>user\n<tool_response>", "<|im_start|>user\n\n<tool_response>")
    text = re.sub(r"<\|im_start\|>(\w+)\n", r"<|start_of_role|>\1<|end_of_role|>", text)
    text = text.replace("<|im_end|>", "<|end_of_text|>")
    named = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
    return text.replace(
        named, "You are a helpful assistant. Please ensure responses are professional, accurate, and safe."
    )


FAMILIES = {
    "chatml": CHATML,
    "llama2": replace(
        MISTRAL_V1,
        tools="Only user, assistant and system roles",
        one="<s>[INST] what is two? [/INST]« four </s>»",
        two="<s>[INST] hello [/INST]« I am fine </s>»<s>[INST] and you? [/INST]« so am I </s>»",
        system="<s>[INST] <<SYS>>\nBe quick.\n<</SYS>>\n\nwhat is two? [/INST]« four </s>»",
    ),
    "llama3": LLAMA3,
    "llama31": LLAMA31,
    "llama31_code": replace(LLAMA31, tools=LLAMA31_TOOLS.replace("}}<|eot_id|>»", "}}<|eom_id|>»")),
    "mistral_v1": MISTRAL_V1,
    "built-in mistral-v3": MISTRAL_V3,
    "built-in mistral-tekken": replace(
        MISTRAL_V3,
        **{name: _tekken(str(getattr(MISTRAL_V3, name))) for name in ("one", "two", "system", "tools")},
    ),
    "built-in voxtral": replace(
        MISTRAL_V1,
        specials=("<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
        one="<s>[INST]what is two?[/INST]«four</s>»",
        two="<s>[INST]hello[/INST]«I am fine</s>»[INST]and you?[/INST]«so am I</s>»",
        system="<s>[SYSTEM_PROMPT]Be quick.[/SYSTEM_PROMPT][INST]what is two?[/INST]«four</s>»",
    ),
    "mixtral": replace(
        MISTRAL_V1,
        one="<s>[INST] what is two? [/INST]«four</s>»",
        two="<s>[INST] hello [/INST]«I am fine</s>»[INST] and you? [/INST]«so am I</s>»",
        system="Conversation roles must alternate",
        tools="Conversation roles must alternate",
        refused=("system", "tools", "thoughts"),
    ),
    "llama4": replace(
        LLAMA3,
        specials=("<|begin_of_text|>", "<|header_start|>", "<|header_end|>", "<|eot|>"),
        eos="<|eot|>",
        **{name: _llama4(str(getattr(LLAMA3, name))) for name in ("one", "two", "system")},
    ),
    "lfm2": replace(
        CHATML,
        specials=(*CHATML.specials, "<|startoftext|>"),
        bos="<|startoftext|>",
        **{name: "<|startoftext|>" + str(getattr(CHATML, name)) for name in ("one", "two", "system")},
    ),
    "granite4": replace(
        QWEN25,
        specials=("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"),
        eos="<|end_of_text|>",
        **{name: _granite4(str(getattr(QWEN25, name))) for name in ("one", "two", "system", "tools")},
    ),
    "qwen25": QWEN25,
    "qwen3": QWEN3,
    "qwen3_thinking": replace(
        QWEN3, **{name: _prompted(getattr(QWEN3, name)) for name in ("one", "two", "system", "tools", "thoughts")}
    ),
    "given qwen3": replace(QWEN3, **{name: _given(getattr(QWEN3, name)) for name in ("one", "two", "system", "tools")}),
    "qwen3_vl": replace(
        CHATML,
        specials=(*CHATML.specials, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"),
        words=("<tool_call>", "</tool_call>"),
        tools=f"{QWEN3_TOOLS}«{QWEN_CALL}»\n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n«four<|im_end|>»\n",
        refused=("thoughts",),
    ),
    "smolvlm": Family(
        ("<|im_start|>", "<end_of_utterance>", "<image>"),
        "<end_of_utterance>",
        "<|im_start|>User: what is two?<end_of_utterance>\nAssistant:« four<end_of_utterance>»\n",
        "<|im_start|>User: hello<end_of_utterance>\nAssistant:« I am fine<end_of_utterance>»\n"
        "User: and you?<end_of_utterance>\nAssistant:« so am I<end_of_utterance>»\n",
        "<|im_start|>System: Be quick.<end_of_utterance>\n"
        "User: what is two?<end_of_utterance>\nAssistant:« four<end_of_utterance>»\n",
        NO_TOOLS,
        NO_REASONING,
        bos="<|im_start|>",
        refused=("tools", "thoughts"),
    ),
    "mistral4": replace(
        MISTRAL4,
        **{
            name: str(getattr(MISTRAL4, name)).replace("{}[INST]", MISTRAL4_SETTINGS + "[INST]")
            for name in ("one", "two", "system", "tools", "thoughts")
        },
    ),
    "nemotron2": NEMOTRON2,
    "nemotron3": NEMOTRON3,
    "gemma2": GEMMA2,
    "gemma4": GEMMA4,
    "built-in gemma": replace(
        GEMMA2,
        system="<bos><start_of_turn>user\nBe quick.\n\nwhat is two?<end_of_turn>\n"
        "<start_of_turn>model\n«four<end_of_turn>»\n",
        refused=("tools", "thoughts"),
    ),
    "phi3": PHI3,
    "phi4": replace(
        CHATML,
        specials=(*CHATML.specials, "<|im_sep|>"),
        **{
            name: re.sub(r"(<\|im_start\|>\w+)\n", r"\1<|im_sep|>", str(getattr(CHATML, name)))
            .replace("»\n", "»")
            .replace("<|im_end|>\n", "<|im_end|>")
            for name in ("one", "two", "system")
        },
    ),
    "zephyr": ZEPHYR,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_r1": replace(DEEPSEEK_V3, tools=NO_TOOLS, refused=("tools", "thoughts")),
    "r1_distill": R1_DISTILL,
    "given r1_distill": replace(
        R1_DISTILL,
        **{
            name: [one.replace("«\n</think>\n\n", "\n</think>\n\n«") for one in texts(R1_DISTILL, name)]
            for name in ("one", "two", "system")
        },
    ),
    "deepseek_v31": replace(
        R1_DISTILL, **{name: _v31(getattr(R1_DISTILL, name)) for name in ("one", "two", "system", "thoughts")}
    ),
    "gpt_oss": GPT_OSS,
    "built-in chatml": replace(
        CHATML,
        words=("<tool_call>", "</tool_call>"),
        tools=f"<|im_start|>system\n# Tools\n\nYou may call these functions:\n<tools>\n{ADD_JSON}\n</tools>\n\n"
        "For each call, write its name and arguments as JSON:\n"
        '<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call><|im_end|>\n'
        f"<|im_start|>user\ntwo and two?<|im_end|>\n<|im_start|>assistant\n«{QWEN_CALL}»\n"
        "<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n«four<|im_end|>»\n",
        refused=("thoughts",),
    ),
    "built-in llama3": replace(
        LLAMA3,
        tools="<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n"
        "Given the following functions, answer with a function call as JSON where one helps:\n"
        f'{{"name": function name, "parameters": dictionary of arguments}}\n\n{ADD_INDENTED}\n\ntwo and two?<|eot_id|>'
        + LLAMA31_TOOLS.partition("two and two?<|eot_id|>")[2],
        refused=("thoughts",),
    ),
    "built-in mistral": replace(
        MISTRAL_V1,
        **{name: re.sub(r" \[INST\]", "[INST]", str(getattr(MISTRAL_V1, name))) for name in ("one", "two", "system")},
        tools=NO_TOOLS,
    ),
    "built-in zephyr": ZEPHYR,
    "built-in plain": Family(
        ("<s>", "</s>"),
        "</s>",
        "<s>User:\nwhat is two?\n\nAssistant:\n«four</s>»\n",
        "<s>User:\nhello\n\nAssistant:\n«I am fine</s>»\nUser:\nand you?\n\nAssistant:\n«so am I</s>»\n",
        "<s>System:\nBe quick.\n\nUser:\nwhat is two?\n\nAssistant:\n«four</s>»\n",
        NO_TOOLS,
        NO_REASONING,
        bos="<s>",
        refused=("tools", "thoughts"),
    ),
}
CONVERSATIONS = {"one": ONE, "two": TWO, "system": SYSTEM, "tools": TOOLS, "thoughts": THOUGHTS}


def conversation_of(name: str, family: str) -> Conversation:
    """The conversation, without what a family has to be given in another way."""
    found = CONVERSATIONS[name]
    return replace(found, tools=()) if family == "deepseek_v3" else found


def expected(tokenizer: PreTrainedTokenizerFast, shown: str) -> tuple[list[int], list[int]]:
    """(ids, labels) of a text with « » around what is trained, tokenized piece by piece."""
    pieces = [(mark, tokenizer.encode(piece, add_special_tokens=False)) for mark, piece in _pieces(shown)]
    ids = [i for _, piece in pieces for i in piece]
    assert ids == tokenizer.encode(re.sub("[«»]", "", shown), add_special_tokens=False)
    return ids, [i if mark else UNTRAINED for mark, piece in pieces for i in piece]


def _pieces(shown: str) -> list[tuple[bool, str]]:
    return [(i % 2 == 1, piece) for i, piece in enumerate(re.split("[«»]", shown))]


def drawn(tokenizer: PreTrainedTokenizerFast, sample: Conversation, train_on: str = "assistant", template=None):
    made = build_renderer(tokenizer, template, train_on)
    return [
        (ids.tolist(), labels_of(ids, trained).tolist())
        for group in made.draw(sample)
        for ids, trained in made.tokenize(group)
    ]


def only_last(shown: str) -> str:
    """With the last trained part alone."""
    context, last = shown.rsplit("«", 1)
    return re.sub("[«»]", "", context) + "«" + last


WORKING = [(f, n) for f, family in FAMILIES.items() for n in CONVERSATIONS if n not in family.refused]
REFUSED = [(f, n) for f, family in FAMILIES.items() for n in family.refused]


@pytest.mark.parametrize("tags", [False, True], ids=["as published", "tagged"])
@pytest.mark.parametrize(("name", "which"), WORKING, ids=[f"{f}-{n}" for f, n in WORKING])
def test_exact_ids_and_labels(name, which, tags):
    family = FAMILIES[name]
    tokenizer = family.tokenizer(family_template(name, tags=tags))
    wanted = [expected(tokenizer, shown) for shown in texts(family, which)]
    assert drawn(tokenizer, conversation_of(which, name)) == wanted


@pytest.mark.parametrize("tags", [False, True], ids=["as published", "tagged"])
@pytest.mark.parametrize("name", FAMILIES)
def test_one_turn_alone(name, tags):
    """By `train: false` on the first answer, and by train_on: last_assistant, which are the same here."""
    family = FAMILIES[name]
    tokenizer = family.tokenizer(family_template(name, tags=tags))
    wanted = [expected(tokenizer, only_last(texts(family, "two")[-1]))]
    first, answer, *rest = TWO.messages
    assert drawn(tokenizer, Conversation((first, replace(answer, train=False), *rest))) == wanted
    assert drawn(tokenizer, TWO, "last_assistant") == wanted


def in_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]


def as_given(name: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns messages as whoever applies the template has to give them: SmolVLM's takes contents as parts alone."""
    return in_parts(messages) if name == "smolvlm" else messages


# Whose generation prompt opens a thought that a rendered answer without reasoning does not have.
OPENED = ("r1_distill", "given r1_distill", "deepseek_v31", "nemotron2", "nemotron3", "gemma4")


@pytest.mark.parametrize("name", FAMILIES)
def test_ids_are_those_of_apply_chat_template(name):
    tokenizer = FAMILIES[name].tokenizer(family_template(name))
    for sample in (ONE, TWO):
        theirs = tokenizer.apply_chat_template(as_given(name, Traits().as_dicts(sample)))["input_ids"]
        if name not in OPENED:
            assert drawn(tokenizer, sample)[-1][0] == theirs
        assert drawn(tokenizer, sample, "all") == [(theirs, [UNTRAINED, *theirs[1:]])]


@pytest.mark.parametrize(("name", "which"), REFUSED, ids=[f"{f}-{n}" for f, n in REFUSED])
def test_what_a_template_has_no_grammar_for_is_a_bad_row(name, which):
    family = FAMILIES[name]
    tokenizer = family.tokenizer(family_template(name))
    with pytest.raises(BadRow, match=re.escape(getattr(family, which))):
        drawn(tokenizer, conversation_of(which, name))


def test_tokens_that_swallow_white_space():
    """Phi 3's tokens take the newline behind them; an answer keeps the spaces that it begins with."""
    tokenizer = replace(PHI3, specials=("<|endoftext|>",), greedy=PHI3_TOKENS).tokenizer(family_template("phi3"))
    assert drawn(tokenizer, TWO)[0][0] == tokenizer.encode(re.sub("[«»]", "", str(PHI3.two)), add_special_tokens=False)
    for answer in ("four", "  four", "\n\nfour\n"):
        ((_, labels),) = drawn(tokenizer, Conversation((Message("user", "hello"), Message("assistant", answer))))
        trained = [i for i in labels if i != UNTRAINED]
        assert tokenizer.convert_ids_to_tokens(trained[-1]) == "<|end|>"
        assert tokenizer.decode(trained[:-1]) == answer


def test_a_call_and_its_thought_are_what_the_model_saw_when_it_wrote_them():
    """gpt-oss: the thought before a call is there while the tool's answer is read, and gone once the answer follows."""
    call = replace(TOOLS.messages[1], reasoning="quick")
    answer = replace(TOOLS.messages[3], reasoning="fox")
    sample = replace(TOOLS, messages=(TOOLS.messages[0], call, TOOLS.messages[2], answer))
    thought = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant"
    whole = (
        f"{OSS_TOOLS}«{thought.format('quick')}{OSS_CALL}»{OSS_RESULT}"
        f"«{thought.format('fox')}<|channel|>final<|message|>four<|return|>»"
    )
    for tags in (False, True):
        tokenizer = GPT_OSS.tokenizer(family_template("gpt_oss", tags=tags))
        assert drawn(tokenizer, sample) == [expected(tokenizer, whole)]


@pytest.mark.parametrize("tags", [False, True], ids=["as published", "tagged"])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_tokens_that_end_a_turn(name, tags):
    """Those that the texts above end with, of answers and of calls; no matter which token is `eos_token`."""
    family = FAMILIES[name]
    which = [which for which in ("one", "tools") if which not in family.refused]
    for eos in (family.eos, family.specials[0]):
        tokenizer = replace(family, eos=eos).tokenizer(family_template(name, tags=tags))
        if "eos_token" in str(tokenizer.chat_template) and eos != family.eos:
            continue  # its text is another one then
        ends = {shown.split("»")[0] for one in which for text in texts(family, one) for shown in text.split("«")[1:]}
        wanted = {tokenizer.encode(end, add_special_tokens=False)[-1] for end in ends}
        template = own_template(tokenizer)
        assert template is not None
        assert turn_end_ids(tokenizer, template) == wanted


@pytest.mark.parametrize("name", FAMILIES)
def test_the_question_in_a_prompt_is_what_the_user_said_last(name):
    tokenizer = FAMILIES[name].tokenizer(family_template(name, tags=False))
    asked = [{"role": "user", "content": "the fox"}]
    for before in ([], [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]):
        given = as_given(name, [*before, *asked])
        prompt = tokenizer.apply_chat_template(given, add_generation_prompt=True, tokenize=False)
        assert last_question(prompt, tokenizer) == "the fox"
    tokenizer.chat_template = None
    assert last_question("the fox", tokenizer) == "the fox"


@pytest.mark.parametrize("name", ["built-in mistral-v3", "built-in mistral-tekken"])
def test_calls_without_ids_get_them_where_a_template_writes_them(name):
    """The same each time, others for other calls, and the answer names the call; an id that a row has stays."""
    tokenizer = FAMILIES[name].tokenizer(family_template(name))
    question, call, answer, last = TOOLS.messages
    bare = {key: value for key, value in CALL.items() if key != "id"}
    twice = replace(call, tool_calls=(bare, bare))
    answers = replace(answer, tool_call_id=None)
    sample = replace(TOOLS, messages=(question, twice, answers, answers, last))
    texts = [tokenizer.decode(drawn(tokenizer, sample)[0][0]) for _ in range(2)]
    first, second, *answered = re.findall(r'id": "(\w{9})"', texts[0])
    assert texts[0] == texts[1]
    assert first != second
    assert answered == [first, second]
    unnamed = replace(TOOLS, messages=(question, call, answers, last))
    assert drawn(tokenizer, unnamed) == drawn(tokenizer, TOOLS)


def test_every_built_in_template_is_tested():
    assert {f"built-in {name}" for name in built_in_templates()} < set(FAMILIES)


# What recipes train with a base's own template, and the one of these that is written after it.
PUBLISHED = {
    "meta-llama/Llama-3.1": "llama31",
    "meta-llama/Llama-3.2": "llama31",
    "meta-llama/Llama-3.3": "llama31",
    "meta-llama/Llama-4": "llama4",
    "mistralai/Mistral-7B-Instruct-v0.3": "built-in mistral-v3",
    "mistralai/Mistral-Small-3.1": "built-in mistral-tekken",
    "google/gemma-3": "built-in gemma",
    "LiquidAI/LFM2.5": "lfm2",
    "openai/gpt-oss": "gpt_oss",
    "ibm-granite/granite-4.0": "granite4",
}
# Whose own templates are not among these.
NOT_WRITTEN = ("google/gemma-4", "mistralai/Mistral-Large-4", "nvidia/NVIDIA-Nemotron", "Hugging")
NOT_WRITTEN += ("./Qwen3-Omni", "Qwen/Qwen3-VL", "Qwen/Qwen3.6", "Qwen/Qwen3.8", "Qwen/Qwen2-Audio", "deepseek-ai")
RECIPES = [path for path in sorted((ROOT / "recipes").rglob("*.yaml")) if path.parent.name not in ("base", "tasks")]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_the_template_of_every_recipe_is_tested(path):
    """Each family's tests say what is trained, behind the prompt that `apply_chat_template` gives in use."""
    model = load_recipe(path).model
    if model.name is None or model.chat_template is not None:
        assert model.name is None or f"built-in {model.chat_template}" in FAMILIES
        return
    if "/model" in model.name or model.name.startswith(NOT_WRITTEN):
        return
    whose = model.tokenizer or model.name
    (family,) = {written for name, written in PUBLISHED.items() if whose.startswith(name)}
    assert family in FAMILIES


REWRITES = ("qwen3", "qwen3_thinking", "given qwen3", "gpt_oss", *OPENED)


@pytest.mark.parametrize("tags", [False, True], ids=["as published", "tagged"])
@pytest.mark.parametrize("name", FAMILIES)
def test_check_template_finds_no_problem(name, tags):
    found = check_template(FAMILIES[name].tokenizer(family_template(name, tags=tags)))
    assert [text for text in found if text.startswith("problem")] == []
    assert any("once more turns follow" in text for text in found) == (name in REWRITES)
