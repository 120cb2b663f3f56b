"""Answers to videos: of `generate`, `chat` and a server, against plain transformers, a prompt at a time."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import filming
import pytest
import torch
from conftest import finetune, serving
from plain_documents import likeliest_answer
from rich.console import Console
from test_video_runs import train_on_films
from transformers import AutoModelForMultimodalLM
from usual import usual

from finetune.checkpoints.trained import find_trained
from finetune.data.media.family_table import SEE_VIDEOS
from finetune.errors import UserError
from finetune.release.inference import api_requests
from finetune.release.inference.answering import answer_file, answers, chat_with, load_answerer
from finetune.release.inference.chat import chat_with_server, image_part, video_part
from finetune.release.inference.evaluate import EvaluateOptions, evaluate_runs
from finetune.release.inference.live import verify_url
from finetune.release.inference.sampling import Sampling

pytest.importorskip("av")

TOKENS = 5
QUIET = Console(quiet=True)


def made_sure(path: Path) -> None:
    """Changes a model's random weights so that its answers depend on what it sees."""
    model: Any = AutoModelForMultimodalLM.from_pretrained(path)
    with torch.no_grad():
        model.get_decoder().norm.weight.mul_(20)
        for place, parameter in model.named_parameters():
            if any(f".{part}." in f".{place}" for part in SEE_VIDEOS[model.config.model_type].projector):
                parameter.mul_(10)
    model.save_pretrained(path)


@pytest.fixture(scope="module")
def films(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, and rows with videos that are files; the first row has one."""
    folder = tmp_path_factory.mktemp("video-answers")
    for name in filming.FILMING:
        made_sure(filming.save_filming(folder, name))
    filming.write_films(folder, "films", 8, seed=4)
    return folder


def plain_answer(folder: Path, messages: list[dict[str, Any]], rows: Path) -> str:
    return likeliest_answer(load_answerer(folder), folder, messages, rows, TOKENS)


@pytest.mark.parametrize("name", usual(filming.FILMING, "qwen3_vl"))
def test_rows_with_videos_are_answered_as_plain_transformers_does(name: str, films: Path, tmp_path: Path) -> None:
    """As one batch of prompts with and without videos, which are padded, and one with an image."""
    rows, out = films / "films.jsonl", tmp_path / "out.jsonl"
    asked = [json.loads(line)["messages"][:1] for line in rows.read_text().splitlines()]
    picture = filming.write_frames(films / "pictures", filming.noise(1, 56, 84, 0)) / "0.png"
    asked.append([{"role": "user", "content": [{"type": "image", "image": str(picture)}]}])
    mixed = films / "mixed.jsonl"
    mixed.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in asked))
    answer_file(films / f"{name}_films", mixed, out, Sampling(TOKENS), None, 9, QUIET)
    wanted = [plain_answer(films / f"{name}_films", messages, mixed) for messages in asked]
    assert [json.loads(line)["answer"] for line in out.read_text().splitlines()] == wanted
    assert len(set(wanted)) > 4


def test_videos_of_the_command_are_seen_and_bad_ones_told(films: Path, tmp_path: Path) -> None:
    folder, clips = films / "qwen3_vl_films", sorted((films / "films").iterdir())[:2]
    seen = [answers(folder, ["which?"], Sampling(TOKENS), videos=[clip])[0] for clip in clips]
    assert seen[0] != seen[1]
    content = [{"type": "video", "video": str(clips[0])}, {"type": "text", "text": "which?"}]
    assert seen[0] == plain_answer(folder, [{"role": "user", "content": content}], clips[0])
    said = finetune("generate", folder, "which?", "--video", clips[0], "--max-new-tokens", TOKENS, "--json")
    assert json.loads(said.stdout) == {"prompt": "which?", "answer": seen[0]}
    text = tmp_path / "text.mp4"
    text.write_text("no video")
    for path, message in (
        (tmp_path / "gone.mp4", "this video cannot be read: No such file"),
        (tmp_path, "this video cannot be read: Is a directory"),
        (text, "the video cannot be used .*not a video of a kind that is read"),
    ):
        with pytest.raises(UserError, match=message):
            answers(folder, ["what?"], Sampling(TOKENS), videos=[path])
    picture = filming.write_frames(films / "shown", filming.noise(1, 56, 84, 0)) / "0.png"
    both = [{"type": "image", "image": str(picture)}, *content]
    (answer,) = answers(folder, ["which?"], Sampling(TOKENS), images=[picture], videos=[clips[0]])
    assert answer == plain_answer(folder, [{"role": "user", "content": both}], films / "films.jsonl")
    refused = finetune("generate", folder, "--input", text, "--output", tmp_path / "o", "--video", clips[0])
    assert "generate: --video is only for prompts" in refused.stderr


@pytest.fixture(scope="module")
def run(films: Path) -> Path:
    """A run that has learned words, which a server's text keeps; its frames are not the defaults."""
    filming.save_filming(films / "untaught", "qwen3_vl")
    rows = [{"path": str(films / "films.jsonl"), "format": "messages"}]
    return train_on_films(
        *(films, "qwen3_vl", "answers"),
        model={"name": str(films / "untaught" / "qwen3_vl_films"), "train": ["language", "projector", "tower"]},
        data={"train": rows, "eval": rows, "max_length": 256, "video": {"max_frames": 4}},
        train={"max_steps": 25, "precision": "fp32"},
        optimizer={"lr": 1e-2},
        tracking={},
        evaluate={"at_start": False, "exact_match": 6, "max_new_tokens": TOKENS},
    )


@pytest.fixture(scope="module")
def url(run: Path) -> Iterator[str]:
    from finetune.release.inference.serve import load_served

    with serving(load_served([("eye", run)], "cpu")) as address:
        yield address


def test_a_client_gets_the_greedy_answers_to_videos(
    run: Path, films: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import openai

    clips = sorted((films / "films").iterdir())[:2]
    with openai.OpenAI(base_url=url, api_key="-") as client:

        def asked(*parts: Any, **more: Any) -> Any:
            messages: list[Any] = [{"role": "user", "content": [*parts, {"type": "text", "text": "which?"}]}]
            return client.chat.completions.create(model="eye", messages=messages, max_tokens=TOKENS, **more)

        for seen in ([clips[0]], clips, []):
            (wanted,) = answers(run, ["which?"], Sampling(TOKENS), videos=seen)
            assert asked(*map(video_part, seen)).choices[0].message.content == wanted
            pieces = asked(*map(video_part, seen), stream=True)
            streamed = "".join(piece.choices[0].delta.content or "" for piece in pieces)
            assert streamed.rstrip("\ufffd") == wanted.rstrip("\ufffd")  # a part of a character is not streamed
        for address in ("films/0-0.mp4", "file:///etc/passwd", "http://127.0.0.1/a.mp4", "/etc/passwd"):
            with pytest.raises(openai.BadRequestError, match=r"videos must be data URLs.*no file is read"):
                asked({"type": "video_url", "video_url": {"url": address}})
        with pytest.raises(openai.BadRequestError, match=r"videos must be data URLs.*no file is read"):
            asked({"type": "video", "video": ["/etc/a.png", "/etc/b.png"]})  # frames
        playlist = base64.b64encode(b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n").decode()
        with pytest.raises(openai.BadRequestError, match="not a video of a kind that is read"):
            asked({"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{playlist}"}})
        picture = filming.write_frames(films / "one", filming.noise(1, 56, 84, 0)) / "0.png"
        (wanted,) = answers(run, ["which?"], Sampling(TOKENS), images=[picture], videos=[clips[0]])
        assert asked(image_part(picture), video_part(clips[0])).choices[0].message.content == wanted
        monkeypatch.setattr(api_requests, "MAX_VIDEO_PIXELS", 10_000)
        with pytest.raises(
            openai.BadRequestError, match=r"the videos have [\d,]+ pixels in all frames; at most 10,000"
        ):
            asked(video_part(clips[0]))


def test_rows_are_evaluated_as_the_run_evaluated_them(run: Path, films: Path) -> None:
    (scores,) = evaluate_runs([run], EvaluateOptions(rows=films / "films.jsonl", batch_size=3, limit=6), QUIET)
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = [line["exact_match"] for line in logged if "exact_match" in line][-1]
    score = scores["films/exact_match"]
    assert (score.rows, score.trained) == (6, last)
    assert score.base is not None
    assert score.base < score.trained


def test_a_server_of_the_run_is_verified(run: Path, url: str) -> None:
    live = verify_url(url, find_trained(run), "eye", None, 6, QUIET)
    assert (live.rows, live.top1, live.prompts, live.gap_max) == (6, 1, 1, 0)


def test_a_chat_shows_files_here_and_on_a_server(
    run: Path,
    films: Path,
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    clip = min((films / "films").iterdir())
    typed = f"/video {clip}\n/video {tmp_path / 'gone'}\nwhich?\nand now?\n"
    shown = []
    for chat, saved in ((partial(chat_with, run), "here"), (partial(chat_with_server, url, "eye"), "there")):
        monkeypatch.setattr("sys.stdin", io.StringIO(f"{typed}/save {tmp_path / saved}\n"))
        chat(Sampling(TOKENS), None)
        shown.append(capsys.readouterr().out.rpartition("saved to")[0].replace("\ufffd", ""))
    assert shown[0] == shown[1]
    assert "gone: this video cannot be read" in shown[0]
    first = json.loads((tmp_path / "here").read_text())["messages"][0]["content"]
    assert first == [video_part(clip), {"type": "text", "text": "which?"}]
