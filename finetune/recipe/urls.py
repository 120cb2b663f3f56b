"""URLs without credentials: messages and labels never hold a password, a token or a signature."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]*://")
_URL_IN_TEXT = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>]+")


def is_url(path: str) -> bool:
    """Whether a path has a scheme, as s3://bucket/key has."""
    return _URL.match(path) is not None


def without_credentials(url: str) -> str:
    """Returns a path or URL without user, password and, for http(s), without the query, which may hold a signature.

    https://me:secret@host/a.jsonl?token=x -> https://host/a.jsonl?...
    """
    if not is_url(url):
        return url
    scheme, _, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    query = "?..." if "?" in path and scheme.lower() in ("http", "https") else ""
    kept = path.partition("?")[0] if query else path
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{kept}{query}"


def scrubbed(text: str, url: str = "") -> str:
    """Returns a library's message without the secrets of the URLs in it; url: the one that was requested."""
    text = _URL_IN_TEXT.sub(lambda match: without_credentials(match.group()), text)
    if is_url(url):
        parts = urlsplit(url)
        for secret in (parts.netloc.rpartition("@")[0], parts.password, parts.query):
            text = text.replace(secret, "***") if secret else text
    return text
