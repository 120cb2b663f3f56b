"""`generate` and `chat`: prompts, histories, sampling, files; checked against plain transformers."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from conftest import finetune, full_disk, train_here
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.errors import RunFailure, UserError
from finetune.release.export.commands import ExportOptions, export_run, verify_run
from finetune.release.inference.answering import StopFilter, answer_file, answers, chat_with, load_answerer
from finetune.release.inference.chat import as_messages
from finetune.release.inference.sampling import Sampling

ANSWERS = {"stones": "stone river", "lights": "green light cloud"}


@pytest.fixture(scope="session")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two adapters of one base, each of which has learned to answer the same to all."""
    folder = tmp_path_factory.mktemp("taught")
    base = tiny.save_model(folder, "llama", initializer_range=0.1)  # a frozen head that few steps can use
    for name, said in ANSWERS.items():
        rows = [
            {"messages": [row["messages"][0], {"role": "assistant", "content": said}]} for row in tiny.conversations(64)
        ]
        recipe = {
            "run": {"name": name, "dir": str(folder)},
            "model": {"name": str(base)},
            "mode": "lora",
            "lora": {"rank": 8, "targets": ["q_proj", "v_proj", "up_proj", "down_proj"]},
            "data": {
                "train": [{"path": str(tiny.write_rows(folder / f"{name}.jsonl", rows)), "format": "messages"}],
                "max_length": 64,
            },
            "batch": {"rows": 4},
            "optimizer": {"lr": 1e-2},
            "schedule": {"name": "constant"},
            "train": {"max_steps": 20, "precision": "fp32"},
        }
        path = folder / f"{name}.json"
        path.write_text(json.dumps(recipe), encoding="utf-8")
        train_here(path)
    return folder


def plain(folder: Path, messages: list[dict[str, str]], **arguments: Any) -> str:
    """The answer by transformers alone, a prompt at a time."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    asked = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    torch.manual_seed(3)
    output = model.generate(**asked, **{"do_sample": False, **arguments})
    return tokenizer.decode(output[0, asked["input_ids"].shape[1] :], skip_special_tokens=True)


def test_answers_are_those_of_plain_transformers(taught: Path) -> None:
    run = taught / "lights"
    assert answers(run, ["river stone"], Sampling(12)) == [ANSWERS["lights"]]
    question = {"role": "user", "content": "green"}
    asked = [{"role": "system", "content": "seven stars"}, question]
    assert answers(run, ["green"], Sampling(12), "seven stars") == [plain(run / "model", asked, max_new_tokens=12)]
    drawn = plain(
        *(run / "model", [question]),
        max_new_tokens=12,
        do_sample=True,
        temperature=5.0,
        top_p=0.9,
        top_k=30,
        repetition_penalty=1.3,
    )
    sampling = Sampling(12, 5.0, 0.9, 30, 1.3, 3)
    assert answers(run, ["green"], sampling) == [drawn] != answers(run, ["green"], Sampling(12))
    assert answers(run, ["green"], Sampling(12, stop=("light",))) == ["green "]
    with pytest.raises(UserError, match="--top-p: greedy answers are not drawn"):
        answers(run, ["green"], Sampling(top_p=0.5))


@pytest.mark.parametrize(
    ("pieces", "shown"),
    [(["gre", "en st", "op it"], ["gre", "en ", ""]), (["a s", "tone", "s"], ["a ", "stone", ""]), (["st"], [""])],
)
def test_a_stop_is_seen_across_pieces(pieces: list[str], shown: list[str]) -> None:
    kept = StopFilter(["stop", "s!"])
    assert [kept.feed(piece) for piece in pieces] == shown
    rest = kept.feed("", is_last=True)
    assert "".join(shown) + rest == "".join(pieces).partition("stop")[0]


def test_a_file_of_rows_is_answered_and_resumed(taught: Path, tmp_path: Path) -> None:
    """Batches are padded; each answer is that of its row alone. A stop in mid-batch leaves no trace."""
    rows: list[dict[str, Any]] = [{"prompt": "river " * (1 + i % 4), "id": i} for i in range(7)]
    rows.append({"messages": [{"role": "user", "content": "stars"}, {"role": "assistant", "content": "not seen"}]})
    source = tiny.write_rows(tmp_path / "rows.jsonl", rows)
    run, out, console = taught / "stones", tmp_path / "out.jsonl", Console(quiet=True)
    sampling = Sampling(12, 9.0, seed=5)
    assert answer_file(run, source, out, sampling, "seven", 3, console) == 8
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [one["id"] for one in found[:7]] == list(range(7))
    assert found[7]["messages"] == rows[7]["messages"]
    assert {one["finish_reason"] for one in found} == {"length", "stop"}
    with pytest.raises(UserError, match="exists already"):
        answer_file(run, source, out, sampling, "seven", 3, console)

    torn = tmp_path / "torn.jsonl.partial"
    torn.write_text("".join(out.read_text().splitlines(keepends=True)[:4]) + '{"prompt": "ri', encoding="utf-8")
    settings = {"max_new_tokens": 12, "temperature": 9.0, "top_p": None, "top_k": None, "repetition_penalty": None}
    about = {"model": str(run), "system": "seven", "batch_size": 3}
    known = tmp_path / "torn.jsonl.partial.json"
    from finetune.utils import sha256_file

    about |= {"rows": sha256_file(source), "sampling": {**settings, "seed": 5, "stop": []}}
    known.write_text(json.dumps(about), encoding="utf-8")
    with pytest.raises(UserError, match="begun with other batch_size"):
        answer_file(run, source, tmp_path / "torn.jsonl", sampling, "seven", 2, console)
    answer_file(run, source, tmp_path / "torn.jsonl", sampling, "seven", 3, console)
    assert (tmp_path / "torn.jsonl").read_bytes() == out.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "rows.jsonl", "torn.jsonl"]

    long = tiny.write_rows(tmp_path / "long.jsonl", [{"prompt": "river", "note": "x" * 50_000}] * 4)
    full, message = tmp_path / "full.jsonl", r"full\.jsonl could not be written: .*run the same command again"
    with full_disk(130_000), pytest.raises(RunFailure, match=message):
        answer_file(run, long, full, sampling, None, 1, console)
    assert not full.exists()
    assert answer_file(run, long, full, sampling, None, 1, console) == 4
    assert [json.loads(line)["note"] for line in full.read_text().splitlines()] == ["x" * 50_000] * 4
    assert not list(tmp_path.glob("full.jsonl.*"))

    greedy = tmp_path / "greedy.jsonl"
    answer_file(run, source, greedy, Sampling(12), None, 8, console)
    alone = answers(run, [row["prompt"] for row in rows[:7]], Sampling(12))
    assert [json.loads(line)["answer"] for line in greedy.read_text().splitlines()][:7] == alone


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("green", "rows.jsonl:2: not JSON"),
        ('{"text": "green"}', 'rows.jsonl:2: no question. Fix: write {"prompt": ...}'),
        ('{"prompt": "green", "answer": "red"}', "rows.jsonl:2: has `answer` already"),
        ('{"messages": [{"role": "ant", "content": "x"}]}', "rows.jsonl, row 2: messages[0].role is 'ant'"),
        ('{"prompt": 3}', "rows.jsonl, row 2: messages[0].content is a number"),
    ],
)
def test_a_bad_row_leaves_nothing(taught: Path, tmp_path: Path, row: str, message: str) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "green"}\n' + row + "\n", encoding="utf-8")
    with pytest.raises(UserError) as caught:
        answer_file(taught / "stones", tmp_path / "rows.jsonl", tmp_path / "out", Sampling(), None, 2, Console())
    assert message in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_what_the_model_cannot_take_is_refused_before_the_work(taught: Path, tmp_path: Path) -> None:
    """A prompt beyond the context, which positions were never made for; a picture for a model of text."""
    answerer = load_answerer(taught / "lights")
    words = "river " * answerer.context
    with pytest.raises(UserError, match=rf"[\d,]+ tokens, and the model takes {answerer.context}\. Fix: shorten"):
        answerer.prompt(as_messages(words, None))
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("green", words)), encoding="utf-8")
    with pytest.raises(UserError, match=r"rows\.jsonl, row 2: the prompt has "):
        answer_file(taught / "lights", rows, tmp_path / "out.jsonl", Sampling(8), None, 2, Console())
    picture = {"type": "image", "image": "a.png"}
    with pytest.raises(UserError, match=r"this model \(llama\) takes no images\. Fix: use one of "):
        answerer.prompt(as_messages("green", None, files=[picture]))
    long = answerer.prompt(as_messages("river " * (answerer.context // 2), None))
    (answer,) = answerer.answer([long], Sampling(10 * answerer.context))
    tokens = len(answerer.tokenizer(answer.text, add_special_tokens=False)["input_ids"])
    assert len(long.ids) + tokens <= answerer.context


def test_a_chat_has_a_history(taught: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    saved = tmp_path / "saved.jsonl"
    typed = f"/system seven\ngreen\nstars\n/save {saved}\n/clear\n/what\ncloud\n/save {saved}\n/exit\nnot asked\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    chat_with(taught / "stones", Sampling(12), None)
    shown = capsys.readouterr().out.splitlines()
    first, second = ([*json.loads(line)["messages"]] for line in saved.read_text().splitlines())
    assert [one["role"] for one in first] == ["system", "user", "assistant", "user", "assistant"]
    assert [one["content"] for one in second[:2]] == ["seven", "cloud"]
    answerer = load_answerer(taught / "stones")
    for said in (first[:3], first, second):
        (wanted,) = answerer.answer([answerer.prompt(said[:-1])], Sampling(12))
        assert said[-1]["content"] == wanted.text
    assert shown[0] == first[2]["content"]
    assert shown[3].startswith("/clear forgets the conversation")


def test_the_command_line(taught: Path, tmp_path: Path) -> None:
    source, out = tiny.write_rows(tmp_path / "rows.jsonl", [{"prompt": "green"}]), tmp_path / "out.jsonl"
    done = finetune("generate", taught / "stones", "--input", source, "--output", out, "--max-new-tokens", 12)
    assert (done.returncode, done.stdout) == (0, f"1 answers in {out}\n"), done.stderr
    assert json.loads(out.read_text())["answer"] == ANSWERS["stones"]
    done = finetune("generate", taught / "stones", "green", "--input", source, "--output", out)
    assert (done.returncode, "give prompts, or --input" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no result here"),
        ({"config.json": "hello"}, "config.json: damaged: not valid JSON"),
        ({"config.json": '{"layers": 2}'}, "not the settings of a model (no `model_type`)"),
        ({"adapter_config.json": '{"r": 4}'}, "not the settings of a model (no `base_model_name_or_path`)"),
        ({"config.json": '{"model_type": "llama"}'}, "no weights here"),
        (
            {"config.json": '{"model_type": "llama"}', "model.safetensors": ""},
            "model.safetensors: damaged or incomplete",
        ),
        ({"config.json": '{"model_type": "llama"}', "model.safetensors": "\2" + "\0" * 7 + "{}"}, "no tokenizer here"),
    ],
)
def test_a_foreign_folder(taught: Path, tmp_path: Path, files: dict[str, str], message: str) -> None:
    """No command leaves anything, or shows a traceback."""
    folder, out, quiet = tmp_path / "foreign", tmp_path / "out", Console(quiet=True)
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    for command in (
        lambda: answers(folder, ["x"], Sampling(3)),
        lambda: chat_with(folder, Sampling(3), None),
        lambda: export_run(folder, ExportOptions(out=out), quiet),
        lambda: verify_run(taught / "llama", folder, None, None, 4, quiet),
    ):
        with pytest.raises(UserError) as caught:
            command()
        assert message in str(caught.value)
    with pytest.raises(UserError, match="a plain model folder without a run"):
        export_run(taught / "llama", ExportOptions(out=out), quiet)
    with pytest.raises(UserError, match=r"no recipe.yaml here, so there are no rows"):
        verify_run(taught / "llama", taught / "llama", None, None, 4, quiet)
    assert not out.exists()
