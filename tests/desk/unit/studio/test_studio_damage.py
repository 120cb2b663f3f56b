"""The studio in folders with files that are damaged or hostile: only such a file is left out, by its name."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from studio_server import TOKEN, Browser, served
from usual import usual

from finetune.desk.studio.jobs import Jobs

PAGES = ["/", "/parts/runs", "/data", "/recipe", "/plan", "/compare", "/chat", "/export", "/commands"]
RECIPE = "run: {name: first}\nmodel: {name: org/small}\nmode: full\ndata: {train: rows.jsonl}\n"
DEEP = '{"a":' * 100_000
GOOD_JOB = {"number": 7, "action": "launch", "words": ["x"], "begun": 0, "pid": 4, "process": "x:0", "about": "runs/x"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a recipe, rows and a finished run."""
    run = tmp_path / "runs" / "good"
    run.mkdir(parents=True)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 1.5}\n')
    (run / "status.json").write_text(json.dumps({"status": "finished", "step": 1, "steps": 1}))
    (run / "plan.json").write_text("{}")
    (run / "recipe.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def browser(folder: Path) -> Iterator[Browser]:
    with served(folder) as port:
        yield Browser(port, f"finetune-studio-{port}={TOKEN}")


def write(folder: Path, name: str | bytes, content: str | bytes) -> None:
    path = os.fsencode(folder) + b"/" + (name.encode() if isinstance(name, str) else name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)


def job_file(**changed: object) -> Callable[[Path], None]:
    return lambda folder: write(folder, ".finetune-studio/jobs/7/job.json", json.dumps({**GOOD_JOB, **changed}))


def file(name: str | bytes, content: str | bytes) -> Callable[[Path], None]:
    return lambda folder: write(folder, name, content)


JOB = ".finetune-studio/jobs/7/job.json"
DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {  # what is written; what the page of its kind says
    "a command that is no JSON": (file(JOB, "{"), "/commands"),
    "a command of a deep list": (file(JOB, DEEP), "/commands"),
    "a command that is a list": (file(JOB, "[1]"), "/commands"),
    "a command without words": (file(JOB, '{"words": null}'), "/commands"),
    "a command whose words are numbers": (job_file(words=[1]), "/commands"),
    "a command whose process is a text": (job_file(pid="4"), "/commands"),
    "a command whose process is this group": (job_file(pid=0), "/commands"),
    "a command whose process is no number of one": (job_file(pid=10**30), "/commands"),
    "a command of another number": (job_file(number=8), "/commands"),
    "a command of half a character": (job_file(words=["\ud800"]), "/commands"),
    "a command about a list": (job_file(about=["runs/good"]), "/commands"),
    "rows whose name is not UTF-8": (file(b"caf\xe9.jsonl", "{}\n"), "/data"),
    "a recipe whose name is not UTF-8": (file(b"caf\xe9.yaml", RECIPE), "/data"),
    "a run whose name is not UTF-8": (file(b"runs/caf\xe9/status.json", "{}"), "/"),
    "a model whose name is not UTF-8": (file(b"caf\xe9/config.json", "{}"), "/"),
    "a run of deep JSON": (file("runs/deep/status.json", DEEP), "/"),
    "a run whose plan is deep JSON": (file("runs/deep/plan.json", DEEP), "/"),
    "a run whose metrics are deep JSON": (file("runs/deep/metrics.jsonl", f"{DEEP}\n"), "/"),
    "a run of a deep recipe": (file("runs/good/recipe.yaml", "[" * 50_000), "/"),
    "a run of a long recipe": (file("runs/good/recipe.yaml", "a: [\n" * 400_000), "/"),
}


@pytest.mark.parametrize("damage", usual(DAMAGE, *list(DAMAGE)[::3]))
def test_one_damaged_file_leaves_every_page(folder: Path, browser: Browser, damage: str) -> None:
    make, place = DAMAGE[damage]
    make(folder)
    for page in PAGES:
        text = browser.get(page)
    assert "runs/good" in browser.get("/export")
    if place == "/commands":
        assert "jobs/7/job.json: this command cannot be read. Fix: remove its folder" in browser.get(place)
        assert Jobs(folder).running() == []
    elif "not UTF-8" in damage:
        text = browser.get(place)
        assert "caf" in text
        assert "this name is not UTF-8, so the file is left out. Fix: rename it" in text
    elif "runs/deep" in browser.get("/export"):
        assert browser.get("/run?path=runs/deep")


ADDRESSES = ("/recipe?path=", "/data?path=", "/run?path=", "/parts/run?path=", "/report?run=", "/compare?run=")


@pytest.mark.parametrize(
    "path", [".", "runs/..", "runs", "x" * 300, "absent", "recipe.yaml/x", "\udcff", "/", "..", "~"]
)
def test_odd_paths_are_answered_in_a_sentence(browser: Browser, path: str) -> None:
    given = quote(path, errors="surrogatepass")
    for address in (*ADDRESSES, "/data?recipe=", "/plan?recipe=", "/chat?run=", "/export?run=", "/parts/compare?run="):
        status, _, text = browser.ask("GET", f"{address}{given}")
        assert status in (200, 400, 404), (address, text)
    for action, form in {
        "check": {"recipe": path},
        "new": {"model": path, "data": path, "mode": "lora", "output": path},
        "report": {"runs": [path], "output": "x.html"},
        "serve": {"run": path, "beside": True},
    }.items():
        assert browser.ask("POST", f"/preview/{action}", form)[0] == 200
    for values in ({"path": path, "text": "x", "version": ""}, {"path": path, "text": "\udcff", "version": ""}):
        assert browser.ask("POST", "/recipe/save", values)[0] == 400
    assert browser.ask("GET", f"/jobs/1?start={10**30}")[0] == 404


@pytest.mark.parametrize("body", ["[" * 100_000, DEEP, '{"path": "\\ud800", "recipe": "\\ud800"}', ""])
def test_a_body_that_is_no_form_is_refused(browser: Browser, body: str) -> None:
    for address in ("/recipe/save", "/recipe/check", "/start/check"):
        assert browser.ask("POST", address, body)[0] == 400


def test_a_long_recipe_is_refused_and_holds_up_no_other_page(folder: Path, browser: Browser) -> None:
    """Reading 40,000 characters takes seconds, in which other requests are answered."""
    long = "a: {b: [1, 2]}\n" * 120_000  # 1.8 MB
    (folder / "long.yaml").write_text(f"{RECIPE}{long}")
    for address in ("/recipe/check", "/recipe/save"):
        status, _, text = browser.ask("POST", address, {"path": "recipe.yaml", "text": long, "version": ""})
        assert (status, "longer than the studio reads (100,000 characters)" in text) == (400, True)
    assert browser.ask("GET", "/recipe?path=long.yaml")[0] == 400
    checked = threading.Thread(
        target=browser.post, args=("/recipe/check", {"path": "recipe.yaml", "text": "a: {b: [1, 2]}\n" * 2_500})
    )
    checked.start()
    answered = 0
    while checked.is_alive():
        browser.get("/schema.json")
        answered += 1
    checked.join()
    assert answered > 1


def test_the_older_of_two_texts_is_refused(folder: Path, browser: Browser) -> None:
    """Two tabs have read the same text; the second one to be saved would remove what the first one wrote."""
    page = browser.get("/recipe?path=recipe.yaml")
    version = page.partition('data-version="')[2].partition('"')[0]
    first, second = f"{RECIPE}# first\n", f"{RECIPE}# second\n"
    saved = browser.post("/recipe/save", {"path": "recipe.yaml", "text": first, "version": version})
    status, _, text = browser.ask("POST", "/recipe/save", {"path": "recipe.yaml", "text": second, "version": version})
    assert status == 400
    assert "was changed elsewhere after this page had read it" in text
    assert "Fix: copy what you wrote, reload the page" in text
    assert (folder / "recipe.yaml").read_text() == first
    browser.post("/recipe/save", {"path": "recipe.yaml", "text": second, "version": saved["version"]})
    assert (folder / "recipe.yaml").read_text() == second
    new = {"path": "new.yaml", "text": RECIPE, "version": ""}
    browser.post("/recipe/save", new)
    assert browser.ask("POST", "/recipe/save", {**new, "text": second})[0] == 400  # another tab had made it
    assert browser.ask("POST", "/recipe/save", {"path": "recipe.yaml", "text": second})[0] == 400


def test_the_recipe_in_a_run_is_its_record(folder: Path, browser: Browser) -> None:
    page = browser.get("/recipe?path=runs/good/recipe.yaml")
    values = {"path": "runs/good/recipe.yaml", "text": f"{RECIPE}# changed\n"}
    values["version"] = page.partition('data-version="')[2].partition('"')[0]
    status, _, text = browser.ask("POST", "/recipe/save", values)
    assert (status, "save it under another name" in text) == (400, True)
    assert (folder / "runs" / "good" / "recipe.yaml").read_text() == RECIPE


@pytest.mark.parametrize("name", ["--eval", "-h", "--html=x"])
def test_no_path_is_an_option_of_a_command(folder: Path, browser: Browser, name: str) -> None:
    (folder / f"{name}.yaml").write_text(RECIPE)
    (folder / f"{name}.jsonl").write_text("{}\n")
    path, rows = f"./{name}.yaml", f"./{name}.jsonl"
    forms = {
        "check": {"recipe": path},
        "inspect": {"recipe": path},
        "plan": {"recipe": path, "on": ["1xcpu"]},
        "launch": {"recipe": path},
        "new": {"model": f"./{name}", "data": rows, "mode": "lora", "output": path},
        "report": {"runs": [f"./{name}"], "output": f"./{name}.html"},
        "export": {"run": f"./{name}", "to": "hf", "output": f"./{name}"},
        "checkpoints": {"run": f"./{name}"},
    }
    for action, form in forms.items():
        shown = browser.post(f"/preview/{action}", form)["command"]
        assert f"./{name}" in shown, action
        assert f" {name}" not in shown, action


def test_pages_begin_with_the_newest_recipe_of_the_folder(folder: Path, browser: Browser) -> None:
    for number, name in enumerate(("b.yaml", "z.yaml", "a.yaml")):
        (folder / name).write_text(RECIPE)
        os.utime(folder / name, (2e9 + number, 2e9 + number))
        for page in ("/data", "/plan"):
            assert f"<option selected>{name}</option>" in browser.get(page)
    assert "/recipe?path=a.yaml" in browser.get("/")  # of "New run"
    assert "<option selected>b.yaml</option>" in browser.get("/plan?recipe=b.yaml")
    for recipe in folder.glob("*.yaml"):
        recipe.unlink()
    for page in ("/data", "/plan"):  # those that come with the package need models of the hub
        text = browser.get(page)
        assert '<option value="">choose a recipe</option>' in text
        assert "<option>recipes/quickstart/full.yaml</option>" in text
