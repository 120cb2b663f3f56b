"""`chat`: a conversation on the terminal, with a model in this process (`answering.py`) or on a server.

No heavy imports, so that a conversation with a server begins at once.
"""

from __future__ import annotations

import base64
import json
import mimetypes
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from finetune.errors import UserError
from finetune.release.inference.sampling import Sampling
from finetune.release.inference.server_client import Server

Messages = Sequence[Mapping[str, Any]]
_HELP = (
    "/clear forgets the conversation, /system TEXT sets a system prompt, /image FILE, /audio FILE and /video FILE go "
    "with the next question, /save FILE writes the conversation, /exit ends"
)
MOST_BYTES = 1 << 28  # of a file: as of one within a row, see finetune/data/media/stored_files.py
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"  # https://ecma-international.org/publications-and-standards/standards/ecma-48/


def as_messages(
    prompt: str, system: str | None, history: Messages = (), files: Sequence[Mapping[str, Any]] = ()
) -> list[Mapping[str, Any]]:
    """Returns a prompt as messages, after a system prompt and the history. files: parts before its text."""
    first = [{"role": "system", "content": system}] if system else []
    content = [*files, {"type": "text", "text": prompt}] if files else prompt
    return [*first, *history, {"role": "user", "content": content}]


def image_part(path: Path) -> dict[str, Any]:
    """Returns a file as a part of a message, as OpenAI's clients send images. Raises UserError if it cannot be read."""
    return image_url_part(_content_of(path, "image"), path.name)


def audio_part(path: Path) -> dict[str, Any]:
    """Returns a file as a part of a message, as OpenAI's clients send sound. Raises UserError if it cannot be read."""
    return input_audio_part(_content_of(path, "sound file"))


def video_part(path: Path) -> dict[str, Any]:
    """Returns a file as a part of a message, as vLLM's clients send videos. Raises UserError if it cannot be read."""
    return video_url_part(_content_of(path, "video"), path.name)


def _content_of(path: Path, kind: str) -> bytes:
    try:
        if (size := path.stat().st_size) > MOST_BYTES:
            raise UserError(f"{path}: {size:,} bytes, and at most {MOST_BYTES:,} are sent. Fix: make the file smaller")
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: this {kind} cannot be read: {error.strerror}. Fix: check the path") from None


def image_url_part(content: bytes, name: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": _data_url(content, name, "image/png")}}


def video_url_part(content: bytes, name: str) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": _data_url(content, name, "video/mp4")}}


def _data_url(content: bytes, name: str, usual: str) -> str:
    """Returns a file as a data URL. usual: its media type, if its name says no other of that kind."""
    guessed = mimetypes.guess_type(name)[0] or ""
    kind = guessed if guessed.partition("/")[0] == usual.partition("/")[0] else usual
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


# First bytes of sound files; MP3 begins with a tag or with any frame.
_SOUNDS = {b"RIFF": "wav", b"RF64": "wav", b"fLaC": "flac", b"OggS": "ogg"}


def input_audio_part(content: bytes) -> dict[str, Any]:
    format = _SOUNDS.get(content[:4], "mp3")
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(content).decode(), "format": format}}


_PARTS = {"/image": image_part, "/audio": audio_part, "/video": video_part}  # what a file becomes, by command


def typed_lines(shows_prompt: bool = True) -> Iterator[str]:
    """Yields the lines of standard input, with a prompt for each on a terminal."""
    while True:
        if sys.stdin.isatty() and shows_prompt:
            print("> ", end="", flush=True)
        if not (line := sys.stdin.readline()):
            return
        yield line.rstrip("\n")


def converse(answer: Callable[[Messages], str], system: str | None) -> None:
    """Run a conversation on the terminal, or on standard input, one line per turn.

    answer: shows and returns the model's answer to a conversation. Raises UserError if `answer` does.
    """
    history: list[Mapping[str, Any]] = []
    files: list[Mapping[str, Any]] = []  # for the next question
    if sys.stdin.isatty():
        print(_HELP)
    for line in filter(None, map(str.strip, typed_lines())):
        command, _, rest = line.partition(" ")
        if command == "/exit":
            return
        if command == "/clear":
            history, files = [], []
        elif command == "/system":
            system, history = rest.strip() or None, []
        elif command in _PARTS:
            try:
                files.append(_PARTS[command](Path(rest.strip())))
            except UserError as error:
                print(error)
        elif command == "/save":
            path, first = Path(rest.strip() or "chat.jsonl"), [{"role": "system", "content": system}] if system else []
            try:  # as a row for training
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"messages": [*first, *history]}, ensure_ascii=False) + "\n")
                print(f"saved to {path}")
            except OSError as error:
                print(f"not saved: {error}")
        elif command.startswith("/"):
            print(_HELP)
        else:
            messages, files = as_messages(line, system, history, files), []
            try:
                text = answer(messages)
            except UserError as error:  # such as a conversation beyond the context: /save and /clear are still there
                if not sys.stdin.isatty():
                    raise
                print(error)
                continue
            if text.strip():  # a turn without an answer is no part of a conversation
                history = [*messages[1 if system else 0 :], {"role": "assistant", "content": text}]


def chat_with_server(url: str, model: str | None, sampling: Sampling, system: str | None) -> None:
    """Chat with a running server of any kind. Raises UserError, and RunFailure for an invalid answer."""
    sampling.check()
    server = Server(url)
    name = server.choose(model)
    dim, plain = (_DIM, _PLAIN) if sys.stdout.isatty() else ("", "")

    def answer(messages: Messages) -> str:
        text = ""
        for piece, is_thought in server.stream(name, messages, sampling):
            text += "" if is_thought else piece
            print(f"{dim}{piece}{plain}" if is_thought else piece, end="", flush=True)
        print()
        return text

    converse(answer, system)
