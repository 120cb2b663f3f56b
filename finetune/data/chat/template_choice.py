"""The chat template of a run: the tokenizer's own, a built-in one, or a Jinja file, with the recipe's variables."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from finetune.data.chat.template import Jinja, Template, probe
from finetune.data.chat.template_traits import traits_of
from finetune.errors import UserError
from finetune.recipe.schema import Model

TOOL_USE = "tool_use"  # name of the template that transformers takes for conversations with tools
TEMPLATES = Path(__file__).parent / "templates"


def built_in_templates() -> list[str]:
    """Returns the names that `model.chat_template` knows."""
    return sorted(path.stem for path in TEMPLATES.glob("*.jinja"))


def template_of(model: Model, tokenizer: PreTrainedTokenizerBase) -> Template | None:
    """Returns the template of a recipe, with its arguments and empty thought."""
    given = model.empty_thought == "given"
    return resolve_template(model.chat_template, tokenizer, model.chat_template_arguments, gives_thought=given)


def resolve_template(
    chat_template: str | None,
    tokenizer: PreTrainedTokenizerBase,
    arguments: Mapping[str, Any] | None = None,
    *,
    gives_thought: bool = False,
) -> Template | None:
    """Returns the template of `model.chat_template`: null is the tokenizer's own (None if it has none); else a built-in
    name or a Jinja file.

    arguments: `model.chat_template_arguments`, set as variables at the beginning of the template.
    gives_thought: `model.empty_thought: given`, added to the end of its generation prompt.
    Raises UserError for a name or file that does not exist, and for unknown arguments.
    """
    template = own_template(tokenizer) if chat_template is None else _named_template(chat_template)
    if template is None and (arguments or gives_thought):
        key = "chat_template_arguments" if arguments else "empty_thought"
        raise UserError(f"model.{key}: the tokenizer has no chat template. Fix: give model.chat_template")
    if template is None or template.tool_use is None:
        return _changed(template, tokenizer, arguments, gives_thought)
    with_tools = Template(template.tool_use, f"{template.name} `{TOOL_USE}`")
    changed, with_tools = (
        _changed(one, tokenizer, arguments, gives_thought) for one in (replace(template, tool_use=None), with_tools)
    )
    assert changed is not None
    assert with_tools is not None
    return replace(changed, tool_use=with_tools.text)


def _changed(
    template: Template | None,
    tokenizer: PreTrainedTokenizerBase,
    arguments: Mapping[str, Any] | None,
    gives_thought: bool,
) -> Template | None:
    if template and arguments:
        template = with_arguments(template, arguments)
    return with_empty_thought(template, special_tokens(tokenizer)) if template and gives_thought else template


def _named_template(chat_template: str) -> Template:
    built_in = built_in_templates()
    if chat_template in built_in:
        path, name = TEMPLATES / f"{chat_template}.jinja", f"built-in template `{chat_template}`"
    elif re.search(r"[{\n]", chat_template) or len(chat_template) > 255:
        raise UserError(
            f"model.chat_template: {chat_template[:40]!r}... is a template, not the name of one. Fix: save it as a "
            ".jinja file and give its path"
        )
    else:
        path = Path(chat_template).expanduser()
        name = str(path)
        if path.suffix not in (".jinja", ".j2") and not path.is_file():
            close = difflib.get_close_matches(chat_template.lower(), built_in, n=1)
            hint = f"; did you mean `{close[0]}`?" if close else ""
            raise UserError(
                f"model.chat_template: no template `{chat_template}`. Fix: name one that is built in "
                f"({', '.join(built_in)}), or give the path of a .jinja file{hint}"
            )
    try:
        # Jinja drops one newline at the end of a file; transformers compiles the text as it is.
        return Template(path.read_text(encoding="utf-8").removesuffix("\n"), name)
    except FileNotFoundError:
        raise UserError(
            f"model.chat_template: no such file: {path}. Relative paths start at {Path.cwd()}. Fix: check the path"
        ) from None
    except UnicodeDecodeError:
        raise UserError(f"model.chat_template: {path} is not UTF-8 text. Fix: save it as UTF-8") from None
    except OSError as error:
        raise UserError(
            f"model.chat_template: {path} cannot be read: {error.strerror}. Fix: check the path and its permissions"
        ) from None


def own_template(tokenizer: PreTrainedTokenizerBase) -> Template | None:
    """Returns the tokenizer's own template; of several the default, and the one for tools. None if it has none."""
    own: Any = tokenizer.chat_template
    tool_use: str | None = None
    if isinstance(own, dict):  # several, by name
        if "default" not in own:
            raise UserError(
                f"the tokenizer has several chat templates ({', '.join(own)}) and none is the default. Fix: save the "
                "one to use in a .jinja file and give its path as model.chat_template"
            )
        own, tool_use = own["default"], own.get(TOOL_USE)
    return Template(own, "the tokenizer's chat template", tool_use) if own else None


def set_template(tokenizer: PreTrainedTokenizerBase, template: Template, replaces_all: bool) -> None:
    """Sets a template on the tokenizer, which keeps its other ones unless `replaces_all`."""
    own: Any = tokenizer.chat_template
    if replaces_all or not isinstance(own, dict):
        tokenizer.chat_template = template.text
    else:
        tool_use = {} if template.tool_use is None else {TOOL_USE: template.tool_use}
        tokenizer.chat_template = {**own, "default": template.text, **tool_use}


def with_arguments(template: Template, arguments: Mapping[str, Any]) -> Template:
    """Returns a template that sets variables which its caller does not.

    They are part of its text, so that training, evaluation, `generate` and servers of the result render alike:

    >>> print(with_arguments(Template("{{ x }}", "a"), {"x": False}).text)
    {%- if x is not defined %}{%- set x = false %}{%- endif %}
    {{ x }}
    """
    if problem := unknown_argument(template, arguments):
        raise UserError(f"model.chat_template_arguments: {problem}. Fix: correct the name, or remove it")
    settings = (
        f"{{%- if {name} is not defined %}}{{%- set {name} = {_literal(value)} %}}{{%- endif %}}"
        for name, value in sorted(arguments.items())
    )
    # Jinja drops the newline after a block (trim_blocks, which transformers sets), but none of the template itself.
    prefix = "".join(settings) + "\n"
    return template if template.text.startswith(prefix) else Template(prefix + template.text, template.name)


def unknown_argument(template: Template, arguments: Iterable[str]) -> str:
    """Returns the argument that a template has no variable for; "" if it has all."""
    variables = set(re.findall(r"[A-Za-z_]\w*", template.text))
    for name in arguments:
        if name not in variables:
            close = difflib.get_close_matches(name, variables, n=1)
            hint = f" (did you mean `{close[0]}`?)" if close else ""
            return f"{template.name} has no variable `{name}`{hint}"
    return ""


EMPTY_THOUGHT = "empty_thought"  # the variable with which one conversation omits the addition of `with_empty_thought`


def with_empty_thought(template: Template, special: Mapping[str, str]) -> Template:
    """Returns a template whose generation prompt ends with an empty thought, as `enable_thinking: false` is for Qwen 3.

    It is part of its text, like arguments: to let the result think, a server gives `empty_thought: false`.
    Raises UserError if the template's answers do not begin with one.
    """
    jinja = Jinja(template, special)
    thought = traits_of(jinja, special.values()).empty_thought
    if thought is None:
        raise UserError(
            f"model.empty_thought: given: {template.name} writes no empty thought before an answer. Fix: leave it out"
        )
    if not thought.text:  # its generation prompt ends with one
        return template
    # No newline of the template's own end gets lost or appears: Jinja drops the last one (keep_trailing_newline).
    suffix = f"{{%+ if add_generation_prompt and {EMPTY_THOUGHT} | default(true) %}}{{{{ {_literal(thought.text)} }}}}"
    given = Template(template.text.removesuffix("\n") + suffix + "{% endif %}", template.name)
    question = probe(1)[:1]
    for added, prompt in (("", False), (thought.text, True)):
        if Jinja(given, special).text(question, prompt=prompt) != jinja.text(question, prompt=prompt) + added:
            raise UserError(
                f"model.empty_thought: given: {template.name} does not end with its text. Fix: leave it out"
            )
    return given


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Returns special tokens by the names that templates know: bos_token, eos_token, ..."""
    return {name: token for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}


def _literal(value: Any) -> str:
    """Returns a JSON value as Jinja writes it."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_literal(str(key))}: {_literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return "none" if value is None else json.dumps(value, ensure_ascii=False)
