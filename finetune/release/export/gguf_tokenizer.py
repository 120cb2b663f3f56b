"""A tokenizer in a GGUF file: tokens with their types, merges, llama.cpp's name of the way to split text before merges
(it has a list of them), the chat template, the tokens that end an answer, and whether one is written at the beginning.

A SentencePiece vocabulary has scores in place of merges: here each token's is the rank of its merges, which have to
follow each other.
"""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, GenerationConfig

from finetune.errors import UserError
from finetune.models.remote_code import load_auto
from finetune.models.tokenizer import read_tokenizer
from finetune.release.export.gguf_settings import ARCHITECTURES, UNKNOWN, WAY_OUT, NotWritten, open_gguf, package

_BYTE = re.compile("<0x[0-9A-F]{2}>")


def add_tokenizer(writer: Any, gguf: Any, folder: Path, rows: int) -> None:
    """Add tokens, merges or scores, the template and the ids of special tokens. Raises NotWritten if llama.cpp may
    split text otherwise, UserError if it does."""
    tokenizer: Any = read_tokenizer(folder)
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    model, kinds = content["model"], gguf.TokenType
    split, prefix = split_name(content), sentencepiece_prefix(content)
    if split is None and prefix is None:
        what = f"{folder}'s tokenizer" + (f", of type {model['type']}," if model["type"] != "BPE" else "")
        raise NotWritten(f"--to gguf: llama.cpp may not split text as {what} does")
    tokens = {index: token for token, index in tokenizer.get_vocab().items()}
    added = {one["id"]: one for one in content["added_tokens"]}
    texts = [tokens.get(index, f"[PAD{index}]") for index in range(max(rows, max(tokens) + 1))]

    def kind(index: int) -> Any:
        if index not in tokens:
            return kinds.UNUSED
        if model.get("byte_fallback") and tokens[index] == model.get("unk_token"):
            return kinds.UNKNOWN
        if index in added:
            return kinds.CONTROL if added[index]["special"] else kinds.USER_DEFINED
        return kinds.BYTE if model.get("byte_fallback") and _BYTE.fullmatch(tokens[index]) else kinds.NORMAL

    types = [kind(index) for index in range(len(texts))]
    if split is not None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(split)
        writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]])
    else:
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_scores(_scores(model["merges"], texts, folder))
        if prefix == "first":  # llama.cpp adds a space behind every special token, or none
            chat = [{"role": "user", "content": "a"}]
            ids = tokenizer.apply_chat_template(chat, return_dict=False) if tokenizer.chat_template else [-1]
            if ids[0] not in added:
                raise UserError(
                    f"--to gguf: conversations do not begin with a special token, which llama.cpp needs. {folder}'s "
                    f"tokenizer adds a space at the beginning of a text only. {WAY_OUT}"
                )
        writer.add_add_space_prefix(prefix == "always")
        # Tokens of users are found in text as it is, before spaces are replaced.
        texts = [t.replace("▁", " ") if one == kinds.USER_DEFINED else t for t, one in zip(texts, types, strict=True)]
    writer.add_token_list(texts)
    writer.add_token_types(types)
    if tokenizer.chat_template:
        own = tokenizer.chat_template
        several = [{"name": name, "template": text} for name, text in own.items()] if isinstance(own, dict) else None
        writer.add_chat_template(several or own)
    ends = GenerationConfig.from_pretrained(folder).eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    if len(ends) > 3:
        raise UserError(f"--to gguf: {len(ends)} tokens end an answer, and the format holds three. {WAY_OUT}")
    for name, index in (
        *zip(("eos", "eot", "eom"), ends, strict=False),
        *((name, getattr(tokenizer, f"{name}_token_id")) for name in ("bos", "pad", "unk")),
    ):
        if index is not None:
            getattr(writer, f"add_{name}_token_id")(index)
    first = tokenizer("a")["input_ids"]
    writer.add_add_bos_token(bool(first) and first[0] == tokenizer.bos_token_id)


def _scores(merges: list[Any], texts: list[str], folder: Path) -> list[float]:
    """Returns the order in which llama.cpp merges: pairs whose token has the highest score first. Raises UserError if
    merges that give one token do not follow each other: no scores say the same."""
    ranks: dict[str, float] = {}
    last = None
    for merge in merges:
        token = "".join(merge.split(" ") if isinstance(merge, str) else merge)
        if token != last and token in ranks:
            raise UserError(f"--to gguf: the merges of {folder}'s tokenizer are not those of SentencePiece. {WAY_OUT}")
        last, ranks[token] = token, ranks.get(token, -float(len(ranks) + 1))
    return [ranks.get(text, -1e4 if _BYTE.fullmatch(text) else 0.0) for text in texts]


def sentencepiece_prefix(content: dict[str, Any]) -> str | None:
    """Returns when a SentencePiece vocabulary of merges adds a space: never, first (at the beginning of a text) or
    always (also behind special tokens); None for another kind of tokenizer.json."""
    model, normalizer, before = content["model"], content["normalizer"], content["pre_tokenizer"]
    if model["type"] != "BPE" or not model.get("byte_fallback"):
        return None
    replaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    if normalizer is None and before is not None and before["type"] == "Metaspace":
        return before["prepend_scheme"] if before["replacement"] == "▁" and not before["split"] else None
    if normalizer == replaces and (
        before is None or (before["type"], before.get("pattern")) == ("Split", {"String": " "})
    ):
        return "never"  # no space is left that could be split at
    steps = (normalizer or {}).get("normalizers")
    return "always" if steps == [{"type": "Prepend", "prepend": "▁"}, replaces] and before is None else None


# SmolLM2's: single digits, then as GPT-2. transformers 5.23 does not know llama.cpp's name of it.
DIGITS = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ],
}


def split_name(content: dict[str, Any]) -> str | None:
    """Returns llama.cpp's name of a tokenizer.json's way to split text; None if it has none that is known here.

    The names and patterns are those by which transformers reads GGUF files.
    """
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    except ImportError:  # 5.17
        raise UserError(
            "--to gguf: this version of transformers lacks llama.cpp's names of tokenizers. Fix: pip install -U "
            "transformers"
        ) from None

    model, before = content["model"], content["pre_tokenizer"] or {}
    if model["type"] != "BPE" or model.get("byte_fallback") or content["normalizer"] not in (None, {"type": "NFC"}):
        return None
    if before == DIGITS:
        return "smollm"
    steps = before.get("pretokenizers", [before])
    if steps[-1].get("type") != "ByteLevel" or steps[-1]["add_prefix_space"]:
        return None
    if len(steps) == 1:
        return "gpt-2" if steps[0]["use_regex"] else None
    if len(steps) != 2 or steps[0].get("type") != "Split" or steps[-1]["use_regex"]:
        return None
    names = ("llama-bpe", "qwen2", "tekken", "gpt-4o")
    patterns = {pattern: name for name in names if (pattern := GGUF_PRE_TOKENIZER_SPLITS[name])}
    return patterns.get(steps[0]["pattern"].get("Regex")) if steps[0]["behavior"] == "Isolated" else None


# --- read back

_BY_NAME = ("phi3", "gemma")  # further architectures whose SentencePiece transformers reads by a way of its own
_KEYS = ("tokenizer.ggml.pre", "tokenizer.ggml.model")


def gguf_tokenizer(file: Path, own: Any = None) -> Any:
    """Returns the tokenizer of a GGUF file, which splits text as llama.cpp does by the name in the file. own: the
    run's, whose split is taken for names that transformers does not know: llama.cpp's converter chose them by its ids
    of a long text."""
    with _readable(file) as readable:
        tokenizer: Any = load_auto(AutoTokenizer, readable.parent, gguf_file=readable.name)
    fields = open_gguf(file).fields
    name, kind = (fields[key].contents() if key in fields else None for key in _KEYS)
    if name == "smollm":
        digits, of_gpt2 = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, of_gpt2])
    elif kind == "gpt2" and own is not None and name not in _known_splits():
        tokenizer.backend_tokenizer.pre_tokenizer = own.backend_tokenizer.pre_tokenizer
        tokenizer.backend_tokenizer.normalizer = own.backend_tokenizer.normalizer
    return tokenizer


def _known_splits() -> set[str]:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    return {"gpt-2", *GGUF_PRE_TOKENIZER_SPLITS}


def other_tokens(settings: Path, file: Path) -> list[str]:
    """Returns the difference between a file's vocabulary and the run's: a token, or a special one that llama.cpp would
    not find in text, as a template writes it. settings: the run's tokenizer."""
    tokenizer: Any = read_tokenizer(settings)
    fields = open_gguf(file).fields
    keys = ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type")
    texts, types = (fields[key].contents() if key in fields else [] for key in keys)
    special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    kinds = package().TokenType
    for token, index in tokenizer.get_vocab().items():
        if index >= len(texts) or texts[index].replace("▁", " ") != token.replace("▁", " "):
            held = repr(texts[index]) if index < len(texts) else "not there"
            return [f"{file}: token {index} is {held}, and {token!r} in the run"]
        kind = types[index] if index < len(types) else None
        if index in special and kind not in (kinds.CONTROL, kinds.USER_DEFINED, kinds.UNKNOWN):
            return [f"{file}: token {index}, {token!r}, is no special one, so llama.cpp does not find it in a text"]
    return []


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[Path]:
    """Yields a file that transformers reads a tokenizer from: for an architecture that it may not know, one without
    tensors under Llama's name."""
    gguf, arch = package(), "general.architecture"
    fields = open_gguf(path).fields
    if (own := fields[arch].contents()) in {*ARCHITECTURES.values(), *_BY_NAME} - {*UNKNOWN}:
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        writer = gguf.GGUFWriter(Path(folder) / path.name, "llama")
        for key, field in fields.items():
            if key != arch and not key.startswith("GGUF."):
                key = f"llama.{key.removeprefix(f'{own}.')}" if key.startswith(f"{own}.") else key
                writer.add_key_value(
                    key, field.contents(), field.types[0], field.types[-1] if field.types[1:] else None
                )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        yield Path(folder) / path.name
