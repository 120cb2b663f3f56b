"""What several pages state is what docs/facts.yaml states: devices that ran, what is untested, results, counts."""

from __future__ import annotations

import re

import pytest
import yaml
from repository import ROOT

from finetune.data.formats.converters import FORMATS

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
    r"\b(no|not|never|untested)\b",
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
    ["No GPU has run it.", "Not run on a GPU here.", "**No GPU run has been verified.**", "Multi-GPU is untested."],
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
