"""HTML pages of `inspect`, `plan` and `report`: single files from templates, whose policy blocks all requests.

The pages of `studio` share their layout, style and filters.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import re
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from finetune.data.visible_text import visible

_FOLDER = Path(__file__).parent


def render(
    template: str, title: str, style: str = "", script: str = "", refresh_s: int | None = None, **values: Any
) -> str:
    """Returns a page. template: below this folder; title: may be hostile; style: in addition to the shared one;
    script: at the page's end; refresh_s: seconds until a browser reloads the page."""
    # The policy is by hashes: https://www.w3.org/TR/CSP3/#match-element-to-source-list
    style = shared_style() + style
    hashes = {
        name: f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
        for name, content in (("style-src", style), ("script-src", script))
        if content
    }
    policy = "; ".join(f"{name} {value}" for name, value in hashes.items())
    loads = f"default-src 'none'; img-src data:; media-src data:; {policy}; base-uri 'none'; form-action 'none'"
    refresh = f'\n<meta http-equiv="refresh" content="{refresh_s}">' if refresh_s else ""
    return (
        environment()
        .get_template(template)
        .render(
            head=Markup(f"""<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{loads}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">{refresh}
<title>{escape(title)}</title>
<style>{style}</style>"""),
            script=Markup(script),
            **values,
        )
    )


@functools.cache  # it keeps the templates compiled, of pages that are written again and again
def environment(*folders: Path) -> jinja2.Environment:
    """Returns the templates of some folders, before those of this one, and their filters."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([*folders, _FOLDER]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(
        visible=visible,
        count=lambda value: f"{value:,}",
        percent=lambda value: f"{value:.1%}",
        ticks=lambda text: Markup(re.sub("`([^`]*)`", r"<code>\1</code>", html.escape(text))),
        breakable=lambda name: escape(name).replace("_", Markup("_<wbr>")).replace(".", Markup(".<wbr>")),
    )
    return environment


def shared_style() -> str:
    return (_FOLDER / "inspect" / "page.css").read_text(encoding="utf-8")
