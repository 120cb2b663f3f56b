"""Voxtral's repository as published, with Mistral's `tekken.json` alone: ids are those of Mistral's own encoder."""

from __future__ import annotations

import base64
import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import hearing
import mistral_common
import pytest
import tiny
from mistral_common.protocol.instruct.chunk import AudioChunk, TextChunk
from mistral_common.protocol.instruct.messages import AssistantMessage, SystemMessage, UserMessage
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.protocol.instruct.validator import ValidationMode
from mistral_common.protocol.transcription.request import TranscriptionRequest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
from transformers import PreTrainedTokenizerFast

from finetune.data.examples import prepare_examples
from finetune.models.base_model import Base
from finetune.models.tokenizer import load_tokenizer, read_tokenizer
from finetune.recipe import Recipe
from finetune.recipe.schema import Model

pytest.importorskip("soundfile")
pytest.importorskip("soxr")
SPECIAL, PIECES = 1000, 4000  # tokens: the first ranks merge as in the whole vocabulary, whose text is then longer
NAMES = {0: "<unk>", 1: "<s>", 2: "</s>", 3: "[INST]", 4: "[/INST]", 5: "[AVAILABLE_TOOLS]", 6: "[/AVAILABLE_TOOLS]"}
NAMES |= {7: "[TOOL_RESULTS]", 8: "[/TOOL_RESULTS]", 9: "[TOOL_CALLS]", 11: "<pad>", 17: "[SYSTEM_PROMPT]"}
NAMES |= {10: "[IMG]", 12: "[IMG_BREAK]", 13: "[IMG_END]", 14: "[PREFIX]", 15: "[MIDDLE]", 16: "[SUFFIX]"}
NAMES |= {18: "[/SYSTEM_PROMPT]", 19: "[TOOL_CONTENT]", 24: "[AUDIO]", 25: "[BEGIN_AUDIO]", 34: "[TRANSCRIBE]"}


@pytest.fixture(scope="module")
def voxtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of Voxtral's files, without weights, and clips of one to three pieces."""
    folder = tmp_path_factory.mktemp("voxtral")
    path = Path(mistral_common.__file__).parent / "data" / "tekken_240911.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    names = [NAMES.get(i, f"<SPECIAL_{i}>") for i in range(SPECIAL)]
    tekken = {
        "config": {**content["config"], "default_vocab_size": SPECIAL + PIECES, "version": "v7"},
        "vocab": content["vocab"][:PIECES],
        "special_tokens": [{"rank": i, "token_str": name, "is_control": True} for i, name in enumerate(names)],
        "audio": {
            "sampling_rate": 16_000,
            "frame_rate": 12.5,
            "audio_encoding_config": {"num_mel_bins": 8, "window_size": 400, "hop_length": 160},
            "chunk_length_s": 0.96,
        },
    }
    row = hearing.HEARING["voxtral"]
    text = {**row.config["text_config"], "vocab_size": SPECIAL + PIECES}
    config = {**row.config, "text_config": text, "audio_token_id": 24}
    for name, settings in {"tekken": tekken, "config": config, "preprocessor_config": row.extractor}.items():
        (folder / f"{name}.json").write_text(json.dumps(settings), encoding="utf-8")
    for i, seconds in enumerate((0.5, 1.3, 2.0)):
        hearing.write_wav(folder / f"{i}.wav", hearing.tone(300 + i, seconds))
    return folder


def ours(folder: Path, rows: list[dict[str, Any]], format: str, **arguments: str) -> list[tuple[list[int], list[int]]]:
    """(ids, trained ids) of each row."""
    recipe = Recipe.model_validate(
        {
            "run": {"name": "r"},
            "model": {
                "name": str(folder),
                "chat_template": "voxtral",
                "chat_template_arguments": arguments or None,
            },
            "data": {
                "train": [{"path": str(tiny.write_rows(folder / "rows.jsonl", rows)), "format": format}],
                "max_length": 1024,
                "audio": {},
            },
            "mode": "full",
            "train": {"max_steps": 1, "precision": "fp32"},
            "batch": {"rows": 1},
            "optimizer": {"lr": 1e-3},
        }
    )
    found = [
        one.sequences[0]
        for one in prepare_examples(recipe, recipe.data.train, Base.of(recipe).renderer(recipe.objective))
    ]
    return [(one.input_ids.tolist(), one.input_ids[one.loss_mask].tolist()) for one in found]


def encoder(folder: Path) -> MistralTokenizer:
    return MistralTokenizer.from_file(str(folder / "tekken.json"), mode=ValidationMode.finetuning)


def chunk(folder: Path, part: dict[str, str]) -> AudioChunk | TextChunk:
    if part["type"] == "text":
        return TextChunk(text=part["text"])
    return AudioChunk(input_audio=base64.b64encode((folder / part["audio"]).read_bytes()).decode())


def test_the_tokenizer_is_read_from_tekken_json(voxtral: Path) -> None:
    """Whether Mistral's library is installed or not: it is here, and transformers would take its class."""
    assert importlib.util.find_spec("mistral_common")
    tokenizer = load_tokenizer(Model(name=str(voxtral)))
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<s>", "</s>", "<pad>")
    theirs: Any = encoder(voxtral).instruct_tokenizer.tokenizer
    for text in ("Hello, wörld 123", "  two\n\n lines 漢字 🦊", "It's 10:30."):
        assert tokenizer(text, add_special_tokens=False).input_ids == theirs.encode(text, bos=False, eos=False)


def test_a_saved_one_is_read_as_it_was_with_the_base_s_file_beside_it(voxtral: Path, tmp_path: Path) -> None:
    """Which vLLM and transformers' processor want there."""
    tokenizer = load_tokenizer(Model(name=str(voxtral)))
    tokenizer.save_pretrained(tmp_path)
    for beside in (False, True):
        if beside:
            shutil.copy(voxtral / "tekken.json", tmp_path)
        again = read_tokenizer(tmp_path)
        assert isinstance(again, PreTrainedTokenizerFast)
        assert again.eos_token_id == 2
        text = "[INST][BEGIN_AUDIO][AUDIO] It's 10:30, é.[/INST]"
        assert again(text).input_ids == tokenizer(text).input_ids


CHATS: dict[str, list[Any]] = {
    "a clip": [["0.wav"], "Good morning."],
    "a clip and a question": [["1.wav", "What is said?"], "Good morning, é."],
    "a question and clips": [["What is said?", "2.wav", "0.wav"], "Twice\nthe same"],
    "turns": [["0.wav", "What?"], "That.", ["And here?", "1.wav"], "This."],
    "text": [["What is two?"], " four"],
}


@pytest.mark.parametrize("name", CHATS)
def test_chats_are_as_mistral_encodes_them(name: str, voxtral: Path) -> None:
    turns = [
        turn
        if isinstance(turn, str)
        else [{"type": "audio", "audio": p} if p.endswith(".wav") else {"type": "text", "text": p} for p in turn]
        for turn in CHATS[name]
    ]
    roles = ["user", "assistant"] * (len(turns) // 2)
    row = {"messages": [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=True)]}
    messages = [
        AssistantMessage(content=turn)
        if isinstance(turn, str)
        else UserMessage(content=[chunk(voxtral, part) for part in turn])
        for turn in turns
    ]
    mistral = encoder(voxtral)
    theirs = mistral.encode_chat_completion(ChatCompletionRequest(messages=messages)).tokens
    trained = [
        i
        for message in messages
        if isinstance(message, AssistantMessage)
        for i in mistral.instruct_tokenizer.encode_assistant_message(message, False)
    ]
    assert ours(voxtral, [row], "messages") == [(theirs, trained)]


def test_a_system_message_is_as_mistral_encodes_it(voxtral: Path) -> None:
    said = [("system", "Be brief."), ("user", "What is two?"), ("assistant", "Four.")]
    kinds = {"system": SystemMessage, "user": UserMessage, "assistant": AssistantMessage}
    request = ChatCompletionRequest(messages=[kinds[role](content=content) for role, content in said])
    row = {"messages": [{"role": role, "content": content} for role, content in said]}
    ((ids, _),) = ours(voxtral, [row], "messages")
    assert ids == encoder(voxtral).encode_chat_completion(request).tokens


@pytest.mark.parametrize("language", ["en", "auto"])
def test_transcripts_are_asked_for_as_mistral_does(language: str, voxtral: Path) -> None:
    """The prompt is that of a transcription request; the transcript and the end are trained."""
    mistral = encoder(voxtral)
    rows = [{"audio": f"{i}.wav", "text": f"Good morning {i}."} for i in range(3)]
    found = ours(voxtral, rows, "speech", transcribe=language)
    for row, (ids, trained) in zip(rows, found, strict=True):
        sound = base64.b64encode((voxtral / row["audio"]).read_bytes()).decode()
        asked = None if language == "auto" else language
        request = TranscriptionRequest(model="voxtral", audio=sound, language=asked)
        prompt = mistral.encode_transcription(request).tokens
        answer = mistral.instruct_tokenizer.tokenizer.encode(row["text"], bos=False, eos=True)
        assert ids == [*prompt, *answer]
        assert trained == answer
