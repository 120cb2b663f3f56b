"""The report page: every number is that of metrics.jsonl, nothing is loaded from elsewhere, runs are compared."""

from __future__ import annotations

import base64
import json
import re
import threading
import urllib.error
import urllib.request
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune.desk.view.report import POINTS, read_run, render, watch, write_report
from finetune.errors import UserError

HOSTILE = '</title><script>alert("x")</script>'


def make_run(folder: Path, lr: float, steps: int = 30, note: str = "") -> Path:
    (folder / "checkpoints" / "step-00000020").mkdir(parents=True)
    state = {"step": 20, "metrics": {"eval_loss": 0.5}}
    (folder / "checkpoints" / "step-00000020" / "state.json").write_text(json.dumps(state))
    lines: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        lines.append({"step": step, "epoch": step / 10, "loss": 3.1 / (step + lr), "step_s": 0.1, "time/other": 0.0})
        if step % 10 == 0:
            lines.append({"step": step, "eval_loss": 2.7 / step, "exact_match": None})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    recipe = {"run": {"name": note or folder.name}, "optimizer": {"lr": lr}, "checkpoint": {"best": "eval_loss"}}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (folder / "plan.json").write_text(json.dumps({"steps": steps, "versions": {"torch": "2.13"}, "device": note}))
    (folder / "status.json").write_text(json.dumps({"status": "finished", "step": steps, "steps": steps}))
    answers = [{"step": s, "columns": [], "rows": [["How?", f"so {s}", "so 30"]]} for s in range(10, steps + 1, 10)]
    (folder / "generations.jsonl").write_text("".join(json.dumps(one) + "\n" for one in answers))
    score = {"step": 30, "rows": 50, "trained": 0.62, "trained_stderr": 0.069, "base": 0.1, "base_stderr": None}
    score |= {"difference": 0.52, "difference_stderr": 0.05}
    (folder / "evaluate.json").write_text(json.dumps({"scores": {"maths/acc": score}}))
    tokens = [[1, False, True, "<s>", ""], [2, False, False, f"{HOSTILE}?", ""], [3, True, False, "ye\u202es\n", ""]]
    sequence = {"tokens": 9, "supervised": 4, "pieces": [tokens, [[4, True, False, "end", ""]]], "left_out": "5 more"}
    (folder / "examples.json").write_text(json.dumps([{"path": "a.jsonl", "row": 7, "sequences": [sequence]}]))
    (folder / "out").mkdir()
    (folder / "out" / "verify.json").write_text(json.dumps({"format": "bfloat16", "passed": True, "kl_mean": 1.25e-4}))
    return folder


class Page(HTMLParser):
    """Curves, cells and what a page would load."""

    def __init__(self, text: str):
        super().__init__()
        self.curves: list[dict[str, Any]] = []
        self.tags: set[str] = set()
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        values = dict(attrs)
        addresses = [str(value) for name, value in attrs if name in ("src", "href", "action", "data")]
        self.addresses += [one for one in addresses if not one.startswith("#")]  # places on the page itself
        if tag == "polyline":
            self.curves.append(values)


def numbers(curve: dict[str, Any]) -> list[tuple[int, float]]:
    steps, values = (curve[name].split() for name in ("data-steps", "data-values"))
    return [(int(step), float(value)) for step, value in zip(steps, values, strict=True)]


def row_of(text: str, name: str) -> list[str]:
    """The cells of the last row of this name."""
    row = text.rpartition(f'<th scope="row">{name}</th>')[2].partition("</tr>")[0]
    return re.findall(r"<td[^>]*>(.*?)</td>", row)


def test_every_number_is_that_of_the_metrics(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", 0.1)
    write_report([run], tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    page = Page(text)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = {curve["data-key"]: numbers(curve) for curve in page.curves}
    assert found == {
        key: [(line["step"], line[key]) for line in lines if line.get(key) is not None]
        for key in ("loss", "step_s", "eval_loss")
    }
    assert "best step 20" in text
    assert row_of(text, "loss") == [f"{found['loss'][-1][1]:.4g}"]
    assert row_of(text.replace("<wbr>", ""), "best eval_loss") == ["0.09 at step 30"]
    assert '<td class="n">0.000125</td>' in text
    assert row_of(text, "a: maths/acc") == ["50", "0.1", "–", "0.62", "0.069", "0.52", "0.05", "30", "–", "–"]
    assert row_of(text, "steps") == ["30", "30"]
    assert [row_of(text, f"a, step {step}") for step in (10, 30)] == [["so 10", "false"], ["so 30", "true"]]
    assert page.addresses == []
    assert not {"link", "iframe", "img"} & page.tags
    assert "default-src 'none'" in text


def test_contents_and_headlines_without_doubles(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", 0.1)
    more = {"share/data": 0.1, "tokens_per_s_per_device": 5.0, "tflops_per_device": 7.123456, "tokens_per_s": 10.0}
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line |= {"reward": line["step"] / 70, **more} if "loss" in line else {"eval_reward": 1 / line["step"]}
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = render([read_run(run)]).replace("<wbr>", "")
    assert row_of(text.partition("<h2>Last values")[0], "last reward") == ["0.4286"]
    assert row_of(text, "best eval_reward") == ["0.1 at step 10"]
    assert row_of(text, "tflops_per_device") == ["7.123"]
    assert not any(name in text for name in ("share/data", "tokens_per_s_per_device"))
    contents = re.findall(r'<a href="#([\w-]+)">([^<]+)</a>', text)
    assert [title for _, title in contents][:4] == ["Summary", "Training", "Rollouts", "Speed"]
    assert all(f'<section id="{place}"' in text for place, _ in contents)
    assert len({place for place, _ in contents}) == len(contents) >= 9


def test_answers_stand_below_their_pictures(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", 0.1)
    (run / "pictures").mkdir()
    (run / "pictures" / "x.png").write_bytes(b"a picture")
    rows = [["What?", "a cat", "a dog"], ["How?", "so", "so 30"], ["Gone?", "yes", "no"]]
    entry = {"step": 30, "columns": [], "rows": rows, "pictures": ["pictures/x.png", None, "pictures/gone.png"]}
    with (run / "generations.jsonl").open("a") as file:
        file.write(json.dumps(entry) + "\n")
    text = render([read_run(run)])
    assert Page(text).addresses == ["data:image/png;base64," + base64.b64encode(b"a picture").decode()]
    assert text.index("What?") < text.index("<img") < text.index("a cat")
    assert "img-src data:" in text


def test_a_heading_is_the_question_without_its_template(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", 0.1)
    rows = [["<|user|>What?<|end|>", "a cat", "a dog"], ["<|user|>Who?<|end|>", "me", "you"]]
    entries = [{"step": 20, "rows": rows}, {"step": 30, "rows": rows, "questions": ["What?", "Who?"]}]
    (run / "generations.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    text = render([read_run(run)])
    assert [question in text for question in (">What?<", ">Who?<", "|user|")] == [True, True, False]
    entries[1]["questions"] = ["What?"]  # not one for each row
    (run / "generations.jsonl").write_text(json.dumps(entries[1]) + "\n")
    assert "|user|" in render([read_run(run)])


def test_two_runs_are_laid_over_each_other(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, lr) for name, lr in (("a", 0.1), ("b", 0.25))]
    text = render([read_run(run) for run in runs]).replace("<wbr>", "")
    assert "a: best step 20" in text
    assert "b: best step 20" in text
    assert [c["data-run"] for c in Page(text).curves if c["data-key"] == "loss"] == ["a", "b"]
    differences = text.partition("<h2>Differences of their recipes")[2].partition("</section>")[0]
    rows = re.findall(r'<th scope="row">(.*?)</th><td[^>]*>(.*?)</td><td[^>]*>(.*?)</td>', differences)
    assert rows == [("optimizer.lr", "0.1", "0.25"), ("run.name", "a", "b")]


def test_a_value_stands_below_the_run_that_has_it(tmp_path: Path) -> None:
    first, second = (make_run(tmp_path / name, 0.1) for name in "ab")
    with (second / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 31, "loss": 1.0, "reward": 0.75}) + "\n")
    summary = render([read_run(first), read_run(second)]).replace("<wbr>", "").partition("<h2>Training")[0]
    assert row_of(summary, "last reward") == ["–", "0.75"]


def test_long_runs_are_thinned_and_stay_small(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", 0.1, steps=12_345)
    text = render([read_run(run)])
    (loss,) = [numbers(curve) for curve in Page(text).curves if curve["data-key"] == "loss"]
    assert len(loss) <= POINTS + 1
    assert loss[-1][0] == 12_345
    assert len(text) < 500_000


def test_what_a_run_is_called_is_text(tmp_path: Path) -> None:
    runs = [read_run(make_run(tmp_path / name, 0.1, note=HOSTILE + name)) for name in ("a", "b")]
    assert render(runs).count("<script") == 1  # its own


def test_examples_have_their_masks(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / name, 1.0) for name in ("a", "b", "c")]
    (folders[2] / "generations.jsonl").unlink()  # a run that generates nothing
    runs = [read_run(folder) for folder in folders]
    sequences = [{**runs[2].examples[0]["sequences"][0], "pieces": []} for _ in range(2)]
    runs[2].examples[0]["sequences"][:] = [{**one, "pieces": [[[5, True, False, "no", ""]]]} for one in sequences]
    runs[2].recipe["objective"] = {"name": "dpo"}
    page = render(runs)
    assert re.findall("First training examples: ([^<]*)<", page) == ["a, b", "c"]  # the same ones stand once
    assert '<mark data-p="2" data-i="3">ye<s data-c="202e" data-v="U+202E"></s>s<s></s>\n</mark>' in page
    assert '<em class="cut">5 more</em><mark data-p="8" data-i="4">end</mark>' in page
    assert re.findall(r"a\.jsonl:7</span> (\w*) <", page) == ["", "chosen", "rejected"]


def test_a_run_is_watched(tmp_path: Path) -> None:
    """The page is made anew for each request; nothing else is served."""
    run = make_run(tmp_path / "a", 0.1)
    urls, ready = list[str](), threading.Event()

    def tell(url: str) -> None:
        urls.append(url)
        ready.set()

    threading.Thread(target=watch, args=([run], 0, tell), daemon=True).start()
    assert ready.wait(30)
    assert urls[0].startswith("http://127.0.0.1:")

    def last_step() -> int:
        with urllib.request.urlopen(urls[0], timeout=30) as answer:
            text = answer.read().decode()
        assert 'http-equiv="refresh"' in text
        return next(numbers(curve)[-1][0] for curve in Page(text).curves if curve["data-key"] == "loss")

    assert last_step() == 30
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 31, "loss": 0.1}) + "\n")
    assert last_step() == 31
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(f"{urls[0]}recipe.yaml", timeout=30)
    other = urllib.request.Request(urls[0], headers={"Host": "evil.example"})  # a name that leads here
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(other, timeout=30)


def test_what_is_no_run_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no run here \(no metrics\.jsonl\)"):
        write_report([tmp_path], tmp_path / "page.html")
    run = make_run(tmp_path / "a", 0.1)
    with pytest.raises(UserError, match="cannot be written: Is a directory"):
        write_report([run], tmp_path)
    (run / "plan.json").write_text("{")
    write_report([run], tmp_path / "page.html")
    assert "a: plan.json cannot be read" in (tmp_path / "page.html").read_text(encoding="utf-8")
