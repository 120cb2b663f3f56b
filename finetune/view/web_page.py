"""Frame of the HTML pages of `inspect`, `plan` and `report`: single files whose policy blocks all requests."""

from __future__ import annotations

import base64
import hashlib
import html
from pathlib import Path

from markupsafe import Markup

_STYLE = Path(__file__).parent / "inspect" / "page.css"


def text(value: object) -> Markup:
    """Returns a value as escaped text for a page."""
    return Markup(html.escape(str(value)))


def head(title: str, style: str = "", script: str | None = None, refresh_s: int | None = None) -> Markup:
    """Returns the content of <head>: shared style, the page's own, and a policy by hashes.

    title: may be hostile; script: at the page's end; refresh_s: seconds until a browser reloads the page.
    """
    style = _STYLE.read_text(encoding="utf-8") + style
    runs = f"; script-src '{_hash(script)}'" if script is not None else ""
    loads = f"default-src 'none'; img-src data:; style-src '{_hash(style)}'{runs}; base-uri 'none'; form-action 'none'"
    refresh = f'\n<meta http-equiv="refresh" content="{refresh_s}">' if refresh_s else ""
    return Markup(f"""<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{loads}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">{refresh}
<title>{text(title)}</title>
<style>{style}</style>""")


def page(head: str, eyebrow: str, heading: str, intro: str, body: str) -> str:
    """Returns a page without scripts. heading: text; the others are HTML."""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
{head}
</head>
<body>
<main>
<header>
<p class="eyebrow">{eyebrow}</p>
<h1>{text(heading)}</h1>
{intro}
</header>
{body}
</main>
</body>
</html>
"""


def _hash(content: str) -> str:
    """Returns the hash for the content security policy (https://www.w3.org/TR/CSP3/#match-element-to-source-list)."""
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"
