"""Answers to sound: of `generate`, `chat` and a server, against plain transformers, a prompt at a time."""

from __future__ import annotations

import base64
import io
import json
import shutil
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hearing
import pytest
import torch
from conftest import finetune, metrics, serving
from plain_documents import likeliest_answer
from rich.console import Console
from transformers import AutoModelForMultimodalLM

from finetune.checkpoints.trained import find_trained
from finetune.data.media.family_table import FAMILIES, family_of
from finetune.errors import UserError
from finetune.release.inference.answering import answer_file, answers, chat_with, load_answerer
from finetune.release.inference.chat import as_messages, audio_part, chat_with_server
from finetune.release.inference.evaluate import EvaluateOptions, evaluate_runs
from finetune.release.inference.live import verify_url
from finetune.release.inference.sampling import Sampling

pytest.importorskip("soundfile")
pytest.importorskip("soxr")

TOKENS = 5
QUIET = Console(quiet=True)
# Gemma 4 normalizes what its tower says: a random one answers all clips alike.
ANSWERING = [one for one in hearing.families("qwen2_audio") if one.values[0] != "gemma4"]


@pytest.fixture(scope="module")
def ears(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models that are sure of themselves, unlike random weights, and rows with clips."""
    folder = tmp_path_factory.mktemp("sound-answers")
    (folder / "untaught").mkdir()
    for name in hearing.available():
        path = hearing.save_hearing(folder, name)
        model: Any = AutoModelForMultimodalLM.from_pretrained(path)
        louder = [*family_of(model.config).projector]
        if (
            model.get_output_embeddings().weight is model.get_input_embeddings().weight
        ):  # or its last token is its next one
            louder.append("layers.0.self_attn.o_proj")
        with torch.no_grad():
            model.get_decoder().norm.weight.mul_(20)
            for place, parameter in model.named_parameters():
                if any(f".{part}." in f".{place}" for part in louder):
                    parameter.mul_(10)
        model.save_pretrained(path)
    hearing.write_clips(folder, "clips", 8, seed=4)
    hearing.write_clips(folder, "single", 8, seed=4, numbers=(0, 1, 1))
    return folder


def plain_answer(folder: Path, messages: list[dict[str, Any]], rows: Path) -> str:
    return likeliest_answer(load_answerer(folder), folder, messages, rows, TOKENS)


@pytest.mark.parametrize("name", ANSWERING)
def test_rows_with_clips_are_answered_as_plain_transformers_does(name: str, ears: Path, tmp_path: Path) -> None:
    """As one batch of prompts with and without clips, which are padded."""
    rows, out = ears / f"{'single' if name in hearing.ALONE else 'clips'}.jsonl", tmp_path / "out.jsonl"
    answer_file(ears / f"{name}_hears", rows, out, Sampling(TOKENS), None, 8, QUIET)
    asked = [json.loads(line)["messages"][:1] for line in rows.read_text().splitlines()]
    wanted = [plain_answer(ears / f"{name}_hears", messages, rows) for messages in asked]
    assert [json.loads(line)["answer"] for line in out.read_text().splitlines()] == wanted
    assert len(set(wanted)) > (1 if name == "granite_speech" else 4)  # whose random tower says little


@pytest.mark.parametrize("name", hearing.families("qwen3_asr"))
def test_a_result_in_bf16_hears(name: str, ears: Path, tmp_path: Path) -> None:
    """Features have the type of the weights, to which not every tower casts them: torch would refuse others."""
    folder = tmp_path / "half"
    shutil.copytree(ears / f"{name}_hears", folder)
    AutoModelForMultimodalLM.from_pretrained(folder).to(torch.bfloat16).save_pretrained(folder)
    answerer = load_answerer(folder)
    assert answerer.model.dtype == torch.bfloat16
    prompt = answerer.prompt(as_messages("which?", None, files=[audio_part(min((ears / "clips").iterdir()))]))
    inputs = answerer.inputs([prompt])
    assert inputs[FAMILIES[name].main_input].dtype == torch.bfloat16
    assert answerer.model(**inputs).logits.isfinite().all()


def test_files_of_the_command_are_heard_and_bad_ones_told(ears: Path, tmp_path: Path) -> None:
    folder, clips = ears / "qwen2_audio_hears", sorted((ears / "clips").iterdir())[:2]
    heard = [answers(folder, ["which?"], Sampling(TOKENS), audio=[clip])[0] for clip in clips]
    assert heard[0] != heard[1]
    content = [{"type": "audio", "audio": str(clips[0])}, {"type": "text", "text": "which?"}]
    assert heard[0] == plain_answer(folder, [{"role": "user", "content": content}], clips[0])
    said = finetune("generate", folder, "which?", "--audio", clips[0], "--max-new-tokens", TOKENS, "--json")
    assert json.loads(said.stdout) == {"prompt": "which?", "answer": heard[0]}
    text = tmp_path / "text.wav"
    text.write_text("no sound")
    silent = hearing.write_wav(tmp_path / "silent.wav", hearing.tone(0, 0.5) * 0)
    for path, message in (
        (tmp_path / "gone.wav", "this sound file cannot be read: No such file"),
        (text, "the sound file cannot be used"),
        (silent, "silent: every sample is zero"),
    ):
        with pytest.raises(UserError, match=message):
            answers(folder, ["what?"], Sampling(TOKENS), audio=[path])
    with pytest.raises(UserError, match=r"this model \(qwen2_audio\) takes no images\. Fix: use one of .*qwen3_vl"):
        answers(folder, ["what?"], Sampling(TOKENS), images=[clips[0]])
    film = [{"role": "user", "content": [{"type": "video", "video": "film.mp4"}]}]
    with pytest.raises(
        UserError, match=r"this model \(qwen2_audio\) takes no videos\. Fix: use one of qwen2_5_vl, qwen3_vl"
    ):
        load_answerer(folder).prompt(film)


@pytest.fixture(scope="module")
def run(ears: Path) -> Path:
    """A run that has learned words, which a server's text keeps; its bounds of clips are not the defaults."""
    from test_audio_runs import train_on_clips

    hearing.save_hearing(ears / "untaught", "qwen2_audio")
    rows = [{"path": str(ears / "clips.jsonl"), "format": "messages"}]
    return train_on_clips(
        *(ears, "qwen2_audio", "answers"),
        model={"name": str(ears / "untaught" / "qwen2_audio_hears"), "train": ["language", "projector", "tower"]},
        data={"train": rows, "eval": rows, "max_length": 128, "audio": {"max_seconds": 0.95}},
        train={"max_steps": 25, "precision": "fp32"},
        optimizer={"lr": 1e-2},
        tracking={},
        evaluate={"at_start": False, "word_error_rate": 6, "max_new_tokens": TOKENS} if find_spec("jiwer") else {},
    )


@pytest.fixture(scope="module")
def url(run: Path) -> Iterator[str]:
    from finetune.release.inference.serve import load_served

    with serving(load_served([("ear", run)], "cpu")) as address:
        yield address


def test_an_openai_client_gets_the_greedy_answers_to_sound(run: Path, ears: Path, url: str) -> None:
    import openai

    clips = sorted((ears / "clips").iterdir())[:2]
    with openai.OpenAI(base_url=url, api_key="-") as client:

        def asked(*parts: Any, **more: Any) -> Any:
            messages: list[Any] = [{"role": "user", "content": [*parts, {"type": "text", "text": "which?"}]}]
            return client.chat.completions.create(model="ear", messages=messages, max_tokens=TOKENS, **more)

        for heard in ([clips[0]], clips, []):
            (wanted,) = answers(run, ["which?"], Sampling(TOKENS), audio=heard)
            assert asked(*map(audio_part, heard)).choices[0].message.content == wanted
            pieces = asked(*map(audio_part, heard), stream=True)
            streamed = "".join(piece.choices[0].delta.content or "" for piece in pieces)
            assert streamed.rstrip("\ufffd") == wanted.rstrip("\ufffd")  # a part of a character is not streamed
        for address in ("clips/0-0.wav", "file:///etc/passwd", "http://127.0.0.1/a.wav"):
            with pytest.raises(openai.BadRequestError, match=r"sound must be base64.*no address fetched"):
                asked({"type": "audio_url", "audio_url": {"url": address}})
        long = hearing.write_wav(ears / "long.wav", hearing.tone(300, 0.99))
        for content, message in ((long.read_bytes(), "max_seconds. is 0.95"), (b"RIFFhello", "cannot be used")):
            part = {"data": base64.b64encode(content).decode(), "format": "wav"}
            with pytest.raises(openai.BadRequestError, match=message):
                asked({"type": "input_audio", "input_audio": part})
        with pytest.raises(openai.BadRequestError, match="not base64"):
            asked({"type": "input_audio", "input_audio": {"data": "../clips/0-0.wav", "format": "wav"}})


def test_error_rates_are_those_of_the_answers(run: Path, ears: Path, tmp_path: Path) -> None:
    """In the run's evaluation, and of `evaluate --rows` for the run and its base."""
    jiwer = pytest.importorskip("jiwer")
    rows = ears / "clips.jsonl"
    wanted = [json.loads(line)["messages"][1]["content"] for line in rows.read_text().splitlines()]
    base, told = ears / "untaught" / "qwen2_audio_hears", {}
    for name, model in (("trained", run), ("base", base)):
        out = tmp_path / f"{name}.jsonl"
        answer_file(model, rows, out, Sampling(TOKENS), None, 8, QUIET)
        told[name] = [" ".join(json.loads(line)["answer"].split()) for line in out.read_text().splitlines()]
    last = [line for line in metrics(run) if "word_error_rate" in line][-1]
    assert last["word_error_rate"] == jiwer.wer(wanted[:6], told["trained"][:6]) < 1
    assert last["character_error_rate"] == jiwer.cer(wanted[:6], told["trained"][:6])
    (scores,) = evaluate_runs([run], EvaluateOptions(rows=rows, batch_size=3), QUIET)
    for name, answers_of in told.items():
        pairs = list(zip(wanted, answers_of, strict=True))
        assert getattr(scores["clips/exact_match"], name) == sum(one == two for one, two in pairs) / len(pairs)
        rate = getattr(scores["clips/word_error_rate"], name)
        assert rate == pytest.approx(jiwer.wer(wanted, answers_of), abs=1e-12)
    assert (scores["clips/exact_match"].rows, scores["clips/exact_match"].base) == (8, 0)
    assert metrics(run)[-1]["eval_tasks/clips/word_error_rate"] == scores["clips/word_error_rate"].trained


def test_a_server_of_the_run_is_verified(run: Path, url: str) -> None:
    live = verify_url(url, find_trained(run), "ear", None, 6, QUIET)
    assert (live.rows, live.top1, live.prompts, live.gap_max) == (6, 1, 1, 0)


def test_a_chat_plays_files_here_and_on_a_server(
    run: Path, ears: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clip = min((ears / "clips").iterdir())
    typed = f"/audio {clip}\n/audio {tmp_path / 'gone'}\nwhich?\nand now?\n"
    shown = []
    for chat, saved in ((partial(chat_with, run), "here"), (partial(chat_with_server, url, "ear"), "there")):
        monkeypatch.setattr("sys.stdin", io.StringIO(f"{typed}/save {tmp_path / saved}\n"))
        chat(Sampling(TOKENS), None)
        shown.append(capsys.readouterr().out.rpartition("saved to")[0].replace("\ufffd", ""))
    assert shown[0] == shown[1]
    assert "gone: this sound file cannot be read" in shown[0]
    first = json.loads((tmp_path / "here").read_text())["messages"][0]["content"]
    assert first == [audio_part(clip), {"type": "text", "text": "which?"}]
