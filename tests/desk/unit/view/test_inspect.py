"""What `inspect` shows: totals against a plain count, certain rows, packed rows, and the page of hostile data."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from rich.console import Console

from finetune.data.chat.renderer import UNTRAINED
from finetune.data.samples import Sequence
from finetune.data.token_text import tokens_of
from finetune.desk.view.inspect import InspectOptions, check_options, inspect
from finetune.desk.view.inspect.dataset_view import length_edges
from finetune.desk.view.inspect.page import tokens_html
from finetune.errors import UserError
from finetune.features import load_recipe

HOSTILE = [
    "</script><script>document.title='x'</script><img src=x onerror=alert(1)>",
    "</mark></div></body></html> <!-- {{ 7 * 7 }} {% raw %} ]]> &lt; &amp;amp; \"double\" 'single'",
    "\x00 \x1b[2J \r\n \u202eturned\u202c \u2066\u2028 \ufeff\u200b \U000e0041",
    "def f():\n\treturn 1   \n\n  end  ",
    "عاصمة فرنسا هي باريس; ירושלים; 你好; 👨\u200d👩\u200d👧 é ö",
    "\n\nstarts and ends with lines\n\n",
    "x" * 100_000,
]


def said(user: str, assistant: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]}


@pytest.fixture
def looked(recipe: dict[str, Any], write_recipe: Callable[..., Path], tmp_path: Path) -> Callable[..., str]:
    """`looked(files, changes of data, options)`: what is printed of an inspection of these files' rows."""
    tiny.tokenizer().save_pretrained(tmp_path / "tokenizer")
    recipe["model"] = {"config": {"model_type": "llama"}, "tokenizer": str(tmp_path / "tokenizer")}

    def look(
        files: dict[str, list[Any]],
        changes: dict[str, Any] | None = None,
        width: int = 200,
        tail: str = "",
        format: str = "messages",
        objective: dict[str, Any] | None = None,
        **asked: Any,
    ) -> str:
        paths = [tiny.write_rows(tmp_path / name, found) for name, found in files.items()]
        with paths[-1].open("a", encoding="utf-8") as file:
            file.write(tail)
        recipe["data"]["train"] = [{"path": str(path), "format": format} for path in paths]
        recipe["objective"] = objective or {}
        recipe["data"] |= changes or {}
        path = write_recipe(recipe)
        console = Console(file=io.StringIO(), width=width)
        inspect(load_recipe(path), path, InspectOptions(**asked), console)
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()

    return look


ROWS = {"rows.jsonl": tiny.conversations(40)}


# --- totals


def test_statistics_match_a_plain_count(looked, capsys):
    looked(ROWS, json=True, rows=1000)
    examples = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    looked(ROWS, json=True, totals=True)
    totals = json.loads(capsys.readouterr().out)
    lengths = [len(example["input_ids"]) for example in examples]
    trained = [sum(label != -100 for label in example["labels"]) for example in examples]
    assert totals["examples"] == totals["counts"]["rows"] == len(examples) == 40
    assert (totals["tokens"], totals["supervised_tokens"]) == (sum(lengths), sum(trained))
    assert totals["supervised"] == sum(trained) / sum(lengths)
    assert (totals["percentiles"]["min"], totals["percentiles"]["max"]) == (min(lengths), max(lengths))
    assert totals["percentiles"]["median"] == sorted(lengths)[19]
    edges, counts = totals["lengths"]["edges"], totals["lengths"]["counts"]
    assert counts == [sum(low < n <= high for n in lengths) for low, high in pairwise(edges)]
    assert sum(counts) == sum(totals["supervised_share"]["counts"]) == 40
    packing = totals["packing"]
    assert packing["efficiency"] == sum(lengths) / (packing["rows"] * 64)
    assert packing["documents_per_row"]["mean"] * packing["rows"] == pytest.approx(40)
    assert packing["attention_work_per_row"]["mean"] * packing["rows"] == pytest.approx(sum(n * n for n in lengths))
    assert [source["path"] for source in totals["sources"]] == [examples[0]["path"]]


@pytest.mark.parametrize(
    ("lengths", "max_length", "edges"),
    [
        ([5, 30, 60], 64, [0, 5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 55, 60, 64]),
        ([3, 4, 7], 4096, [0, 1, 2, 3, 4, 5, 6, 7]),
        ([100, 130, 498], 4096, [0, 50, 100, 150, 200, 250, 300, 350, 400, 450, 500]),
        ([10, 11, 12, 400], 4096, [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 400]),
        ([1], 2, [0, 1]),
    ],
)
def test_bins_of_lengths(lengths, max_length, edges):
    assert length_edges(np.array(lengths), max_length) == edges


def test_the_terminal_shows_what_was_dropped_and_why(looked):
    rows = [said("a", "fine"), {"messages": "no list"}, said("b", "x" * 200), said("c", "\x1b[31m")]
    out = looked({"rows.jsonl": rows}, {"on_bad_row": "skip", "max_bad_share": 0.5})
    text = " ".join(out.replace("│", " ").split())
    assert "rows read 4 bad 1 dropped overlong 1" in text
    assert "1 dropped, longer than max_length: raise `data.max_length`" in text
    assert "bad rows, the first 1 of 1:" in text
    assert "rows.jsonl:2: " in text
    assert "over 64 1 max_length; dropped" in text
    assert "\x1b" not in out


def test_no_source_is_cut_from_the_tables(looked):
    files = {f"source-{n}.jsonl": tiny.conversations(3, n) for n in range(8)}
    out = looked(files, width=600, totals=True)
    assert all(f"source-{n}.jsonl" in out for n in range(8))
    narrow = looked(files, width=80, totals=True)
    assert "…" not in narrow
    assert narrow.count("rows read") == 3


# --- which examples


def test_each_source_has_its_turn(looked, capsys):
    rows = {"a.jsonl": tiny.conversations(5), "b.jsonl": tiny.conversations(1, 1), "c.jsonl": tiny.conversations(5, 2)}
    out = looked(rows, rows=5)
    places = [line.split()[1].rpartition("/")[2] for line in out.splitlines() if line.startswith("╭")]
    assert places == ["a.jsonl:1", "a.jsonl:2", "b.jsonl:1", "c.jsonl:1", "c.jsonl:2"]
    looked(rows, rows=6, json=True)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["row"] for line in lines] == [1, 2, 3, 4, 5, 1], "programs get the first ones, in order"


def test_a_single_row(looked, capsys):
    looked(ROWS, row=("rows.jsonl:7", "rows.jsonl:3"), json=True)
    assert [json.loads(line)["row"] for line in capsys.readouterr().out.splitlines()] == [7, 3]


def test_a_split_row_shows_all_its_pieces(looked, capsys):
    looked({"rows.jsonl": [said("a", "x" * 150)]}, {"overlong": "split"}, row=("rows.jsonl:1",), json=True)
    assert len(capsys.readouterr().out.splitlines()) == 3


NEAREST = "(Fix:|Or) give a row that has an example; the nearest"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("rows.jsonl", "not of the form PATH:NUMBER. Fix: write it"),
        ("rows.jsonl:x", "not of the form PATH:NUMBER"),
        ("other.jsonl:1", r"no example is from other.jsonl. Fix: use one of .*rows.jsonl"),
        ("ows.jsonl:1", "no example is from ows.jsonl"),
        ("rows.jsonl:9", rf"there is no such row\n{NEAREST} is \S*rows.jsonl:5$"),
        (
            "rows.jsonl:2",
            rf"dropped: .*expected a list of messages\n{NEAREST} are \S*rows.jsonl:1 and \S*rows.jsonl:4$",
        ),
        (
            "rows.jsonl:3",
            rf"dropped: \S*rows.jsonl:3: \d+ tokens, but data.max_length is 64\W .*\n{NEAREST} .*jsonl:4$",
        ),
        ("rows.jsonl:6", rf"a bad row: not valid JSON: .*\n{NEAREST} is \S*rows.jsonl:5$"),
    ],
)
def test_a_row_that_is_not_there(looked, row, message):
    rows = [said("a", "fine"), {"messages": 3}, said("b", "x" * 200), said("c", "good"), said("d", "well")]
    with pytest.raises(UserError, match=message):
        looked({"rows.jsonl": rows}, {"on_bad_row": "skip", "max_bad_share": 0.5}, tail="{no", row=(row,))


def test_eval_shows_data_eval(looked, made, recipe):
    assert f"{made / 'held_out.jsonl'}:1" in looked(ROWS, eval=True)
    with pytest.raises(UserError, match=r"--eval: the recipe has no data\.eval"):
        looked(ROWS, {"eval": []}, eval=True)


def test_a_stream_shows_its_first_window(looked, capsys):
    looked(ROWS, {"streaming": True, "window": 10}, json=True, totals=True)
    totals = json.loads(capsys.readouterr().out)
    assert totals["counts"]["rows"] == 10
    assert "data.streaming: only the first 10 rows of each source are inspected" in totals["notes"]


def test_packed_sequences_show_documents_and_positions(looked):
    out = looked(ROWS, packed=1)
    assert "packed sequence 0 " in out
    assert "document 1 " in out
    assert out.count(", positions from 0") == out.count("document ")
    assert "tokens 0 to " in out


@pytest.mark.parametrize(
    "asked",
    [
        {"json": True, "html": Path("a.html")},
        {"json": True, "packed": 1},
        {"json": True, "full": True},
        {"json": True, "tokens": True},
        {"totals": True, "rows": 3},
        {"totals": True, "html": Path("a.html")},
        {"row": ("a:1",), "rows": 2},
    ],
)
def test_options_without_effect_are_refused(asked):
    with pytest.raises(UserError, match="has no effect with"):
        check_options(InspectOptions(**asked))


def test_a_page_has_the_name_of_a_page():
    with pytest.raises(UserError, match=r"--html recipe\.yaml: not the name of a page"):
        check_options(InspectOptions(html=Path("recipe.yaml")))


# --- the page

VOID = {"meta", "link", "br", "input", "img", "hr"}


class Page(HTMLParser):
    """A page taken apart: tags that are not closed, addresses, and the runs of each example."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.problems: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[list[tuple[bool, dict[str, str | None], str]]] = []  # (trained, attributes, text) of each run
        self.in_article = False
        self.depth = 0  # of the run at hand
        self.feed(text)
        self.close()
        self.problems += self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append((tag, found))
        if tag not in VOID:
            self.open.append(tag)
        self.in_article |= tag == "article"
        if self.in_article and found.get("class") == "text":
            self.texts.append([])
        if self.in_article and "data-i" in found:
            self.texts[-1].append((tag == "mark", found, ""))
            self.depth = len(self.open)
        if code := found.get("data-c"):
            self.handle_data(chr(int(code, 16)))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))  # of a drawing: <rect/>

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.problems.append(f"</{tag}> at {self.getpos()}")
        self.in_article &= tag != "article"
        self.depth *= len(self.open) >= self.depth

    def handle_data(self, data: str) -> None:
        if self.depth:
            trained, attributes, text = self.texts[-1][-1]
            self.texts[-1][-1] = (trained, attributes, text + data)


def numbers(attributes: dict[str, str | None], key: str) -> list[int]:
    return [int(number) for number in (attributes.get(key) or "").split()]


@pytest.fixture
def page(looked, tmp_path, capsys) -> tuple[Path, Page, list[dict[str, Any]]]:
    """Of rows that would break a page: the file, taken apart, and the examples that it must show."""
    rows = {"rows.jsonl": [said(text[::-1][:50], text) for text in HOSTILE] + [{"messages": ["<b>\u202e\x00"]}]}
    more = {"max_length": 120_000, "on_bad_row": "skip", "max_bad_share": 0.5}
    path = tmp_path / "page.html"
    looked(rows, more, html=path, rows=100, full=True)
    capsys.readouterr()
    looked(rows, more, json=True, rows=100)
    examples = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return path, Page(path.read_text(encoding="utf-8")), examples


def test_the_page_is_well_formed_and_makes_no_request(page):
    path, found, _ = page
    assert found.problems == []
    for tag, attributes in found.tags:
        assert tag not in ("img", "iframe", "link", "object", "b\u202e")
        assert not [name for name in attributes if name.startswith("on")], tag
        for name in ("src", "href", "action", "xlink:href", "style"):
            assert (attributes.get(name) or "#").startswith(("#", "data:")), (tag, attributes)
    assert [tag for tag, _ in found.tags].count("script") == 1
    text = path.read_text(encoding="utf-8")
    assert "http:" not in text
    assert "https:" not in text
    assert not set(text) & {"\0", "\x1b", "\r", "\u202e", "\u2028", "\ufeff"}
    policy = next(a["content"] for tag, a in found.tags if tag == "meta" and "http-equiv" in a)
    assert policy is not None
    assert policy.startswith("default-src 'none'")


def test_the_page_shows_what_the_model_sees(page):
    """Text, ids and labels of every example, exactly; then the same as documents of packed rows."""
    _, found, examples = page
    tokenizer = tiny.tokenizer()
    for example, runs in zip(examples, found.texts, strict=False):
        ids = [i for _, attributes, _ in runs for i in numbers(attributes, "data-i")]
        labels = [i if trained else UNTRAINED for trained, a, _ in runs for i in numbers(a, "data-i")]
        assert ids == example["input_ids"]
        assert labels == example["labels"]
        text = "".join(text for _, _, text in runs)
        assert text == tokenizer.decode(example["input_ids"], clean_up_tokenization_spaces=False)
        for _, attributes, text in runs:
            assert sum(numbers(attributes, "data-n")) in (0, len(text.encode("utf-16-le")) // 2)
        starts = [numbers(attributes, "data-p")[0] for _, attributes, _ in runs]
        sizes = [len(numbers(attributes, "data-i")) for _, attributes, _ in runs]
        assert starts == [sum(sizes[:n]) for n in range(len(sizes))]
    documents = found.texts[len(examples) :]
    assert sorted(map(str, documents)) == sorted(map(str, found.texts[: len(examples)]))


def test_a_page_of_many_examples_is_small(looked, tmp_path):
    looked({"rows.jsonl": tiny.conversations(150)}, html=tmp_path / "page.html", rows=100)
    assert (tmp_path / "page.html").stat().st_size < 300_000


PAIR = {"prompt": "2+2?", "chosen": "It is 4.", "rejected": "It is 5.", "margin": 0.5}
OF_PAIRS: dict[str, Any] = {"format": "preference", "objective": {"name": "reward"}}


@pytest.mark.parametrize("width", [200, 60])
def test_a_pair_is_shown_side_by_side_with_what_it_shares(looked, width):
    """`It is ` is shared as well: the prefix is one of token ids."""
    printed = looked({"pairs.jsonl": [PAIR]}, {"eval": []}, **OF_PAIRS, width=width)
    (first,) = [line for line in printed.splitlines() if "⟫[[4." in line]
    assert "]]⟫[[" in printed
    assert ("⟫[[5." in first, "margin 0.5" in printed) == (width == 200, width == 200)  # the title of a panel is cut


def test_the_page_shows_a_pair_side_by_side(looked, tmp_path):
    looked({"pairs.jsonl": [PAIR]}, {"eval": []}, **OF_PAIRS, html=tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    section = text[text.index('<div class="side">') :]
    for name in ("chosen", "rejected"):
        assert f"<h4><b>{name}</b>" in section
    assert section.count('<span class="p">') >= 2
    assert "margin 0.5" in text


def test_an_answer_marked_as_bad_is_called_so(looked):
    rows = [{"prompt": "2+2?", "completion": answer, "label": answer == "4"} for answer in ("4", "5")]
    printed = looked({"rows.jsonl": rows}, {"eval": []}, format="unpaired", objective={"name": "kto"})
    assert "a good answer" in printed
    assert "a bad answer" in printed
    assert "another row's answer" in printed


def test_a_page_that_cannot_be_written(looked, tmp_path):
    with pytest.raises(UserError, match=r"--html .*absent/page\.html: cannot be written"):
        looked(ROWS, html=tmp_path / "absent" / "page.html")


def test_runs_of_tokens_worked():
    """The module's example in letters: special alone, runs alike, a character of four tokens."""
    tokenizer = tiny.tokenizer()
    ids = tokenizer("<|im_start|>a🦊<|im_end|>", add_special_tokens=False)["input_ids"]
    assert len(ids) == 7
    sequence = Sequence(np.array(ids, np.int32), np.arange(7) > 0)
    start, *middle, end = ids
    assert tokens_html(tokens_of(sequence, tokenizer)) == (
        f'<span data-p="0" data-i="{start}" class="x">&lt;|im_start|&gt;</span>'
        f'<mark data-p="1" data-i="{" ".join(map(str, middle))}" data-n="1 0 0 0 2" '
        'data-b="1 ⟨F0⟩|2 ⟨9F⟩|3 ⟨A6⟩|4 ⟨8A⟩">a🦊</mark>'
        f'<mark data-p="6" data-i="{end}" class="x">&lt;|im_end|&gt;</mark>'
    )


_BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.long
@pytest.mark.skipif(_BROWSER is None, reason="no Chromium here")
def test_the_page_in_a_browser(page):
    """Its script runs under its own policy, and nothing else does."""
    path, found, _ = page
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    done = subprocess.run([_BROWSER, *flags, path.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    assert f'data-ready="{len(found.texts)}"' in done.stdout
    assert "<title>run: what the model sees</title>" in done.stdout
    assert "CONSOLE" not in done.stderr
