"""URLs without credentials: messages and labels never hold a password, a token or a signature."""

from __future__ import annotations

import re
from urllib.parse import parse_qsl, urlsplit

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]*://")
_URL_IN_TEXT = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]*://[^\s'\"<>]+")


def is_url(path: str) -> bool:
    """Returns whether a path has a scheme, as s3://bucket/key has."""
    return _URL.match(path) is not None


def without_credentials(url: str) -> str:
    """Returns a path or URL without user, password and query, which may hold a key or a signature.

    https://me:secret@host/a.jsonl?token=x -> https://host/a.jsonl?...
    s3://bucket/a?.jsonl, a pattern, stays.
    """
    if not is_url(url):
        return url
    scheme, _, rest = url.partition("://")
    rest, _, query = rest.partition("?")
    host, slash, path = rest.partition("/")
    is_secret = "=" in query or scheme.lower() in ("http", "https")
    kept = f"?{'...' if is_secret else query}" if query else ""
    path = re.sub(r"(^|/)[^/@:]+:[^/@]+@", r"\1", path)  # hf://datasets/me:secret@org/name
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}{kept}"


def scrubbed(text: str, url: str = "") -> str:
    """Returns a library's message without the secrets of the URLs in it; url: the one that was requested."""
    text = _URL_IN_TEXT.sub(lambda match: without_credentials(match.group()), text)
    if is_url(url):
        parts = urlsplit(url)
        values = [value for _, value in parse_qsl(parts.query) if len(value) > 3]
        for secret in (parts.netloc.rpartition("@")[0], parts.password, parts.query, *values):
            text = text.replace(secret, "***") if secret else text
    return text
