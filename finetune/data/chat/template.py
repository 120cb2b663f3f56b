"""Which chat template a run uses: the tokenizer's own, a built-in one, or a Jinja file."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from finetune.errors import UserError

TEMPLATES = Path(__file__).parent / "templates"
GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Template:
    """A chat template and what to call it in messages."""

    text: str
    name: str

    @cached_property
    def marks_generation(self) -> bool:
        """Whether the template says itself, by `{% generation %}`, what the assistant writes."""
        return GENERATION_TAG.search(self.text) is not None


def built_in_templates() -> list[str]:
    """Names that `model.chat_template` knows."""
    return sorted(path.stem for path in TEMPLATES.glob("*.jinja"))


def resolve_template(
    chat_template: str | None, tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any] | None = None
) -> Template | None:
    """`model.chat_template`: null is the tokenizer's own (None if it has none); else a built-in name or a Jinja file.

    arguments: `model.chat_template_arguments`, which become the values that the template begins with.
    Raises UserError for a name or file that does not exist, and for arguments that the template does not know.
    """
    template = _named_template(chat_template, tokenizer)
    if not arguments:
        return template
    if template is None:
        raise UserError("model.chat_template_arguments: the tokenizer has no chat template; give model.chat_template")
    return with_arguments(template, arguments)


def with_arguments(template: Template, arguments: Mapping[str, Any]) -> Template:
    """A template that sets variables which its caller does not.

    In its text, so that all who render it (training, evaluation, `generate`, servers of the result) do so alike:

    >>> print(with_arguments(Template("{{ x }}", "a"), {"x": False}).text)
    {%- if x is not defined %}{%- set x = false %}{%- endif %}
    {{ x }}
    """
    for name in arguments:
        known = set(re.findall(r"[A-Za-z_]\w*", template.text))
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean `{close[0]}`?" if close else ""
            raise UserError(f"model.chat_template_arguments: {template.name} has no variable `{name}`{hint}")
    settings = (
        f"{{%- if {name} is not defined %}}{{%- set {name} = {_literal(value)} %}}{{%- endif %}}"
        for name, value in sorted(arguments.items())
    )
    # Jinja drops the newline behind a block (trim_blocks, which transformers sets), and nothing of the template itself.
    prefix = "".join(settings) + "\n"
    return template if template.text.startswith(prefix) else Template(prefix + template.text, template.name)


def _literal(value: Any) -> str:
    """A JSON value as Jinja writes it."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_literal(str(key))}: {_literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def _named_template(chat_template: str | None, tokenizer: PreTrainedTokenizerBase) -> Template | None:
    if chat_template is None:
        return own_template(tokenizer)
    built_in = built_in_templates()
    if chat_template in built_in:
        return Template(_read_template(TEMPLATES / f"{chat_template}.jinja"), f"built-in template `{chat_template}`")
    path = Path(chat_template).expanduser()
    if path.suffix in (".jinja", ".j2") or path.is_file():
        return Template(_read_template(path), str(path))
    close = difflib.get_close_matches(chat_template.lower(), built_in, n=1)
    raise UserError(
        f"model.chat_template: no template `{chat_template}`{f'; did you mean `{close[0]}`?' if close else ''} "
        f"(built in: {', '.join(built_in)}; or the path of a .jinja file)"
    )


def own_template(tokenizer: PreTrainedTokenizerBase) -> Template | None:
    own: Any = tokenizer.chat_template
    if isinstance(own, dict):  # several, by name
        if "default" not in own:
            raise UserError(
                f"the tokenizer has several chat templates ({', '.join(own)}) and none is the default: save the one "
                "to use in a .jinja file and give its path as model.chat_template"
            )
        own = own["default"]
    return Template(own, "the tokenizer's chat template") if own else None


def _read_template(path: Path) -> str:
    try:
        # Jinja drops one newline at the end of a file; transformers compiles the text as it is.
        return path.read_text(encoding="utf-8").removesuffix("\n")
    except FileNotFoundError:
        raise UserError(f"model.chat_template: no such file: {path}; relative paths start at {Path.cwd()}") from None
    except UnicodeDecodeError:
        raise UserError(f"model.chat_template: {path} is not UTF-8 text") from None
    except OSError as error:
        raise UserError(f"model.chat_template: {path} cannot be read: {error.strerror}") from None
