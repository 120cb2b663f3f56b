"""What several pages state is what docs/facts.yaml states: devices that ran, what is untested, results, counts."""

from __future__ import annotations

import json
import re

import make_smollm2
import pytest
import yaml
from repository import ROOT

from finetune.data.formats.converters import FORMATS
from finetune.desk.studio.recipe_form import KEYS

FACTS = yaml.safe_load((ROOT / "docs" / "facts.yaml").read_text(encoding="utf-8"))
PAGES = {
    path.relative_to(ROOT).as_posix(): re.sub(r"\s+", " ", path.read_text(encoding="utf-8"))
    for path in [
        ROOT / "README.md",
        ROOT / "CHANGELOG.md",
        ROOT / "benchmarks" / "README.md",
        *(ROOT / "docs").rglob("*.md"),
    ]
}
SUMMARIES = (
    "README.md",
    "CHANGELOG.md",
    *(f"docs/{name}.md" for name in ("proofs/verified", "proofs/gpu", "guides/eight-gpus", "guides/questions")),
)
# A sentence denies that something ran on a GPU if it has a word of each kind.
DENIES = (
    r"\b(no|not|never|untested|none|nobody|neither)\b",
    r"\b(ran|tried|verified|untested|reached|(?:has|have|been|not|never) run)\b",
    r"\bGPUs?\b",
)
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
NUMBERS += ("thirteen", "fourteen", "fifteen", "sixteen")


def denials(page: str) -> list[str]:
    """Returns the sentences of a page that deny a run on a GPU; the summary aside."""
    sentences = re.split(r"(?<=[.!?]) |\||; ", page.replace(FACTS["hardware"]["summary"], "").replace("**", ""))
    return [one.strip() for one in sentences if all(re.search(words, one, re.IGNORECASE) for words in DENIES)]


@pytest.mark.parametrize(
    "sentence",
    [
        "No GPU has run it.",
        "None of it has run on a GPU.",
        "Not run on a GPU here.",
        "**No GPU run has been verified.**",
        "Multi-GPU is untested.",
    ],
)
def test_denials_are_found(sentence: str) -> None:
    assert denials(f"It is fast. {sentence} So it is.")


@pytest.mark.parametrize("page", PAGES)
def test_no_page_denies_what_a_gpu_ran(page: str) -> None:
    assert sorted(denials(PAGES[page])) == sorted(FACTS["hardware"]["untested"].get(page, []))


@pytest.mark.parametrize("page", SUMMARIES)
def test_pages_quote_the_same_summary(page: str) -> None:
    assert FACTS["hardware"]["summary"] in PAGES[page]


@pytest.mark.parametrize("machine", FACTS["machines"], ids=lambda machine: machine["device"])
def test_machines_have_their_results(machine: dict[str, str]) -> None:
    page, _, anchor = machine["page"].partition("#")
    assert f"## {anchor.replace('-', ' ')} " in PAGES[page].lower()
    assert "results" not in machine or (ROOT / machine["results"]).exists()


def test_quickstart_results_are_the_same_everywhere() -> None:
    for name, value in FACTS["quickstart"].items():
        stage, _, measure = name.partition(" ")
        assert f"| {stage} | {measure} | 0 % | {value} |" in PAGES["README.md"]
    assert FACTS["quickstart"]["dpo-lora exact match"] in PAGES["docs/guides/preference-pairs.md"]


def test_the_first_screen_has_the_figures_of_the_gpus() -> None:
    """Speeds and memory of README's table, of ours and of others, in the rows of the same device."""
    measured = (ROOT / "docs" / "proofs" / "gpu.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"## On an (H\d+)\b[^\n]*\n(.+?)(?=\n## )", measured, re.DOTALL))
    rows = re.findall(r"(?m)^\| (H\d+): (.*)$", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(rows) >= 4
    numbers = [(device, one) for device, row in rows for one in re.findall(r"\d+,\d{3}|\d+\.\d\b", row)]
    rows_and_versions = {"4,096", "1.16"}
    assert [one for one in numbers if one[1] not in sections[one[0]] and one[1] not in rows_and_versions] == []


@pytest.mark.parametrize("quoted", FACTS["quoted"], ids=lambda quoted: quoted["says"][:40])
def test_numbers_are_those_of_the_file_that_they_are_from(quoted: dict[str, str]) -> None:
    said, had = re.search(quoted["says"], PAGES[quoted["page"]]), re.search(quoted["has"], PAGES[quoted["file"]])
    assert said is not None
    assert had is not None
    assert sorted(said.groups()) == sorted(had.groups())


def test_curves_of_converted_examples_are_those_that_were_run() -> None:
    page = PAGES["docs/guides/coming-from-other-tools.md"]
    results = json.loads((ROOT / "benchmarks" / "results" / "converted_curves.json").read_text(encoding="utf-8"))
    for name, losses in results["losses"].items():
        shown = " | ".join(f"{losses[step - 1]:.3f}" for step in (1, 12, 24, 36))
        assert f"| {name} | {shown} |" in page
    assert f"differ by at most {results['differs_from_trl']:.1e}." in page
    assert results["differs_from_trl"] < 1e-5
    assert [len(losses) for losses in results["losses"].values()] == [results["steps"]] * 6


def test_other_tools_have_the_losses_that_the_page_says() -> None:
    page = PAGES["docs/guides/coming-from-other-tools.md"]
    results = json.loads((ROOT / "benchmarks" / "results" / "other_trainers.json").read_text(encoding="utf-8"))
    for name, found in results.items():
        title = {"llama_factory": "LLaMA-Factory"}.get(name, name)
        (shown,) = re.findall(rf"\| {title} [\d.]+ \| ([\de.-]+) \|", page, re.IGNORECASE)
        assert (shown, len(found["losses"])) == (f"{found['differs']:.1e}", 36)
        assert found["differs"] < 1e-5


def test_counts_are_those_of_the_code() -> None:
    tour, changelog = PAGES["docs/tour.md"], PAGES["CHANGELOG.md"]
    (lines,) = re.findall(r"`finetune/engine/ddp\.py` \| The shortest backend, (\d+) lines", tour)
    assert abs(len((ROOT / "finetune/engine/ddp.py").read_text(encoding="utf-8").splitlines()) - int(lines)) < 10
    (files,) = re.findall(r"(\w+) files, in the order", tour)
    assert NUMBERS.index(files.lower()) == len(re.findall(r"\| \d+ \| `finetune/", tour))
    (fields,) = re.findall(r"a form of (\d+) keys", changelog)
    assert int(fields) == len(KEYS)
    for page in ("README.md", "docs/guides/own-rows.md"):
        (rows,) = re.findall(r"(?:fine-tunes it on|and) (\d+) (?:questions and answers|rows teach it)", PAGES[page])
        assert int(rows) == len(make_smollm2.TRAIN.split("|")) - 1


def test_an_extra_is_one_of_ours() -> None:
    """In pages, notebooks and messages: `finetune[serve]` would install another project."""
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    name = settings.partition("[project]")[2].split('"')[1]
    extras = re.findall(
        r"(?m)^(\w+) = \[", settings.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    )
    texts = [*PAGES.values(), *(path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.ipynb"))]
    texts += [path.read_text(encoding="utf-8") for path in (ROOT / "finetune").rglob("*.py")]
    named = [one for text in texts for one in re.findall(r"pip install (?:-\w+ )?'?([\w.-]+)\[([\w, ]+)\]", text)]
    assert len(named) > 10
    assert [one for one in named if one[0] not in (name, ".") or not set(one[1].split(",")) <= set(extras)] == []


def test_formats_are_counted_alike() -> None:
    found = {
        page: numbers
        for page, text in PAGES.items()
        if (numbers := re.findall(rf"\b({'|'.join(NUMBERS)}|\d+) (?:data )?formats\b", text))
    }
    assert found
    assert {number for numbers in found.values() for number in numbers} <= {NUMBERS[len(FORMATS)], str(len(FORMATS))}, (
        found
    )
