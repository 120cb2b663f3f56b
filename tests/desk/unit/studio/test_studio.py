"""The studio over HTTP: who is let in, which paths it names, every page, and the commands of its buttons."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import typer.main
from studio_server import TOKEN, Browser, ended, served

from finetune.desk.cli import app as cli
from finetune.desk.studio.actions import ACTIONS
from finetune.desk.studio.app import entry_page
from finetune.desk.studio.jobs import Jobs
from finetune.desk.studio.project_folder import inside, look
from finetune.errors import UserError
from finetune.shipped import SHIPPED

PAGES = ["/", "/data", "/recipe", "/plan", "/compare", "/chat", "/export", "/commands"]
RECIPE = """\
run: {name: first}
model: {name: models/small}
mode: full
data:
  train: [{path: rows.jsonl, format: messages}]
  max_length: 64
batch: {rows: 4, rows_per_device: 2}
optimizer: {lr: 1.0e-3}
train: {max_steps: 6}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a recipe, rows, a model, two runs, of which one is damaged, and links that lead out of it."""
    place = tmp_path_factory.mktemp("studio")
    here, outside = place / "here", place / "outside"
    for path in (here / "models" / "small", outside, here / "runs" / "good", here / "runs" / "damaged"):
        path.mkdir(parents=True)
    (here / "recipe.yaml").write_text(RECIPE)
    (here / "rows.jsonl").write_text('{"prompt": "<b>hostile</b>", "completion": "fine"}\n')
    (here / "models" / "small" / "config.json").write_text("{}")
    (outside / "secret.yaml").write_text(f"{RECIPE}# outside\n")
    (outside / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    (here / "link").symlink_to(outside)
    (here / "link.yaml").symlink_to(outside / "secret.yaml")
    (here / "loop.yaml").symlink_to(here / "loop.yaml")
    good, damaged = here / "runs" / "good", here / "runs" / "damaged"
    lines = [{"step": n, "loss": 2 / n, "lr": 0.1, "step_s": 1.0, "tokens": n * 9, "epoch": n / 9} for n in range(1, 5)]
    (good / "metrics.jsonl").write_text(
        "".join(f"{json.dumps(line)}\n" for line in [*lines, {"step": 4, "eval_loss": 0.75}])
    )
    (good / "plan.json").write_text(json.dumps({"steps": 4, "world_size": 1, "device": "cpu"}))
    (good / "status.json").write_text(json.dumps({"status": "finished", "step": 4, "steps": 4}))
    (good / "recipe.yaml").write_text(RECIPE)
    (good / "model").mkdir()
    (good / "model" / "config.json").write_text("{}")
    (damaged / "metrics.jsonl").write_text('{"step": 1, "loss": "x"\nnothing')
    (damaged / "status.json").write_text("[")
    before = Path.cwd()
    os.chdir(here)
    yield here
    os.chdir(before)


@pytest.fixture(scope="module")
def browser(folder: Path) -> Iterator[Browser]:
    with served(folder) as port:
        status, headers, _ = Browser(port).ask("GET", f"/?token={TOKEN}")
        assert (status, headers["location"]) == (303, "/")
        cookie, *settings = headers["set-cookie"].split("; ")
        assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(settings)
        yield Browser(port, cookie)


# --- who is let in


def test_without_the_token_nothing_answers(browser: Browser) -> None:
    for stranger in (
        Browser(browser.port),
        Browser(browser.port, "finetune-studio-1=x"),
        Browser(browser.port, f"x={TOKEN}"),
    ):
        for path in [*PAGES, "/schema.json", "/static/studio.js", "/jobs/1", "/report?run=runs/good", "/absent"]:
            assert stranger.ask("GET", path)[0] == 403, path
        assert stranger.ask("POST", "/start/quickstart", {})[0] == 403
    assert Browser(browser.port).ask("GET", "/?token=wrong")[0] == 403
    assert browser.ask("GET", "/?token=wrong")[0] == 403
    assert browser.ask("POST", f"/start/quickstart?token={TOKEN}", {})[0] == 403


def test_the_browser_gets_the_address_by_a_file_of_its_owner(tmp_path: Path, browser: Browser) -> None:
    """Arguments of programs are shown to every user of a machine."""
    page = entry_page(tmp_path, f"http://127.0.0.1:{browser.port}/?token={TOKEN}")
    assert page.stat().st_mode & 0o777 == 0o600
    assert f"/?token={TOKEN}" in page.read_text(encoding="utf-8")
    headers = {"Sec-Fetch-Site": "cross-site"}  # a redirect from there would lack the cookie
    status, answered, body = Browser(browser.port).ask("GET", f"/?token={TOKEN}", **headers)
    assert (status, 'content="0; url=/"' in body) == (200, True)
    assert "finetune-studio" in answered["set-cookie"]


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "10.0.0.5:8766", ""])
def test_another_name_of_this_machine_is_refused(browser: Browser, host: str) -> None:
    assert browser.ask("GET", "/", Host=host or " ")[0] in (400, 403)
    assert browser.ask("GET", f"/?token={TOKEN}", Host=host or " ")[0] in (400, 403)


def test_what_has_an_effect_comes_from_a_page_of_the_studio(browser: Browser, folder: Path) -> None:
    """Not from another site, nor from another local server, whose requests have the cookie as well."""
    saved = {"path": "forged.yaml", "text": RECIPE}
    foreign: list[dict[str, str]] = [
        {"Origin": ""},
        {"Origin": "null"},
        {"Origin": "https://evil.example"},
        {"Origin": f"http://127.0.0.1:{browser.port + 1}"},
        {"Origin": f"http://localhost:{browser.port}"},
        {"Content_Type": "text/plain"},
        {"Content_Type": "application/x-www-form-urlencoded"},
        {"Content_Type": ""},
    ]
    for headers in foreign:
        for path in ("/recipe/save", "/start/quickstart", "/jobs/1/stop", "/preview/plan", "/chat/1"):
            assert browser.ask("POST", path, saved, **headers)[0] == 403, (headers, path)
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS"):
        assert browser.ask(method, "/recipe/save")[0] == 403
    for path in ("/start/quickstart", "/recipe/save", "/jobs/1/stop"):
        assert browser.ask("GET", path)[0] in (404, 405)
    assert not (folder / "forged.yaml").exists()
    assert not Jobs(folder).numbers()


def test_every_answer_has_the_headers_that_keep_others_out(browser: Browser) -> None:
    for path in [*PAGES, "/schema.json", "/static/studio.js", "/absent", "/report?run=runs/good"]:
        _, headers, _ = browser.ask("GET", path, Origin="https://evil.example")
        assert not [name for name in headers if name.startswith("access-control-")]
        assert "frame-ancestors 'none'" in headers["content-security-policy"] or path.startswith("/report")
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"
        assert headers["cross-origin-resource-policy"] == "same-origin"


# --- paths


OUTSIDE = ["../outside/secret.yaml", "/etc/passwd", "link/secret.yaml", "link.yaml", "models/../../outside/secret.yaml"]
ODD = ["", "loop.yaml", "-h", "a\0b", "~/x.yaml/../../../../.."]


@pytest.mark.parametrize("path", [*OUTSIDE, *ODD])
def test_paths_stay_in_the_folder(browser: Browser, folder: Path, path: str) -> None:
    with pytest.raises(UserError):
        inside(path, folder)
    before = {file: file.read_bytes() for file in folder.parent.rglob("*") if file.is_file()}
    for address in ("/recipe/save", "/recipe/check"):
        status, _, text = browser.ask("POST", address, {"path": path, "text": "x"})
        assert (status, "error" in json.loads(text)) == (400, True), address
    forms: dict[str, dict[str, Any]] = {
        "inspect": {"recipe": path},
        "check": {"recipe": path},
        "launch": {"recipe": path},
        "plan": {"recipe": path, "on": ["1xcpu"]},
        "new": {"model": "org/model", "data": "rows.jsonl", "mode": "lora", "output": path},
        "report": {"runs": ["runs/good"], "output": path},
        "export": {"run": path, "to": "hf"},
        "serve": {"run": path},
        "checkpoints": {"run": path},
    }
    for action, form in forms.items():
        assert browser.ask("POST", f"/start/{action}", form)[0] == 400, action
    assert before == {file: file.read_bytes() for file in folder.parent.rglob("*") if file.is_file()}


@pytest.mark.parametrize("path", OUTSIDE)
def test_nothing_outside_is_shown(browser: Browser, path: str) -> None:
    for address in ("/recipe?path=", "/data?path=", "/run?path=", "/parts/run?path=", "/report?run="):
        status, _, text = browser.ask("GET", f"{address}{path}")
        assert status in (400, 404), address
        assert "outside.yaml" not in text
        assert "# outside" not in text


def test_a_planted_command_shows_no_file_outside(browser: Browser, folder: Path) -> None:
    """A cloned folder may bring a `.finetune-studio` of its own."""
    jobs = Jobs(folder)
    place = folder / ".finetune-studio" / "jobs" / "7000"
    place.mkdir(parents=True)
    job = {"number": 7000, "action": "inspect", "words": ["x"], "begun": 0, "pid": os.getpid(), "process": "x:0"}
    (place / "job.json").write_text(json.dumps({**job, "page": "../outside/secret.yaml"}))
    assert browser.ask("GET", "/jobs/7000/page")[0] == 400
    planted = jobs.read(7000)
    assert planted is not None
    assert jobs.status(planted) == -1  # this process is no command of the studio's
    jobs.stop(planted)  # and is not signaled
    (place / "job.json").write_text("{")
    assert jobs.read(7000) is None
    assert browser.ask("GET", "/jobs/7000")[0] == 404


# --- pages


@pytest.mark.parametrize("path", PAGES)
def test_pages_render(browser: Browser, path: str) -> None:
    text = browser.get(path)
    assert "<title>" in text
    assert f'<a href="{path}" aria-current="page">' in text
    assert 'style="' not in text  # the policy allows no style and no script within a page
    assert "<script>" not in text


def test_pages_of_an_empty_folder_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    expected = {"/": "No runs here yet", "/data": "No files of rows", "/compare": "No runs to compare"}
    expected |= {"/chat": "Nothing to talk to yet", "/export": "Nothing to export yet", "/commands": "None yet"}
    with served(tmp_path) as port:
        empty = Browser(port, f"finetune-studio-{port}={TOKEN}")
        for path in PAGES:  # recipes that come with the package are there
            assert expected.get(path, "recipes/quickstart/full.yaml") in empty.get(path)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_run_is_shown_with_what_is_missing(browser: Browser) -> None:
    text = browser.get("/run?path=runs/damaged")
    assert "plan.json is missing" in text
    assert "damaged" in browser.get("/report?run=runs/damaged&run=runs/good")
    assert browser.get("/parts/runs").count("<tr>") == 3
    status, _, text = browser.ask("GET", "/run?path=runs/absent")
    assert (status, "no run here" in text) == (404, True)


def test_rows_and_names_cannot_be_markup(browser: Browser, folder: Path) -> None:
    assert "&lt;b&gt;hostile&lt;/b&gt;" in browser.get("/data?path=rows.jsonl")
    name = 'x"><script>alert(1)</script>.jsonl'
    (folder / "odd").mkdir()
    (folder / "odd" / name.replace("/", "_")).write_text("{}\n")
    text = browser.get("/data")
    assert "<script>alert" not in text
    assert "alert(1)" in text


def test_what_is_in_a_folder(folder: Path) -> None:
    found = look(folder)
    assert found.recipes == ["recipe.yaml"]
    assert "rows.jsonl" in found.data
    assert not [name for name in found.data if name.startswith(("runs/", "link", "models/"))]
    assert sorted(found.runs) == ["runs/damaged", "runs/good"]
    assert "models/small" in found.models
    assert "accelerate_configs/ddp.yaml" in found.configs


# --- recipes


def test_problems_of_a_recipe_come_with_their_lines_before_it_is_saved(browser: Browser, folder: Path) -> None:
    text = RECIPE.replace("lr: 1.0e-3", "lr: fast").replace("mode: full", "mode: fulll")
    found = browser.post("/recipe/check", {"path": "recipe.yaml", "text": text})["problems"]
    assert [(one["line"], one["text"].partition(":")[0]) for one in found] == [(3, "mode"), (8, "optimizer.lr")]
    assert browser.post("/recipe/check", {"path": "recipe.yaml", "text": RECIPE})["problems"] == []
    assert [one["line"] for one in browser.post("/recipe/check", {"path": "recipe.yaml", "text": "a: [\n"})["problems"]]
    assert (folder / "recipe.yaml").read_text() == RECIPE


def test_a_form_changes_the_text_and_the_text_the_form(browser: Browser, folder: Path) -> None:
    for key in ("optimizer.lr", "train.precision"):
        assert f'data-key="{key}"' in browser.get("/recipe?path=recipe.yaml")
    change = {"path": "recipe.yaml", "text": RECIPE, "key": "optimizer.lr", "value": " 1e-4 "}
    text = browser.post("/recipe/set", change)["text"]
    assert text == RECIPE.replace("lr: 1.0e-3", "lr: 1e-4")
    values = browser.post("/recipe/check", {"path": "recipe.yaml", "text": text})["values"]
    assert values["optimizer.lr"] == {"written": "1e-4", "holds": "0.0001"}
    assert browser.post("/recipe/check", {"path": "recipe.yaml", "text": "a: ["})["values"] is None
    for wrong in ({"key": "data"}, {"value": 3}, {"value": "1, x: 2"}, {"text": "a: ["}, {"text": "x" * 200_000}):
        assert browser.ask("POST", "/recipe/set", {**change, **wrong})[0] == 400
    assert (folder / "recipe.yaml").read_text() == RECIPE


def test_a_recipe_of_the_package_is_saved_as_a_copy(browser: Browser, folder: Path) -> None:
    path = "recipes/quickstart/lora.yaml"
    assert "saving writes a copy" in browser.get(f"/recipe?path={path}")
    text = (SHIPPED / path).read_text().replace("rank: 32", "rank: 33")
    assert browser.post("/recipe/check", {"path": path, "text": text})["problems"] == []
    saved = browser.post("/recipe/save", {"path": path, "text": text, "version": ""})
    assert f'data-version="{saved["version"]}"' in browser.get(f"/recipe?path={path}")
    assert (folder / path).read_text() == text
    assert "rank: 33" in browser.get(f"/recipe?path={path}")
    for wrong in ("rows.jsonl", "recipe", "recipe.yaml/x.yaml"):
        assert browser.ask("POST", "/recipe/save", {"path": wrong, "text": "x", "version": ""})[0] == 400
    assert browser.ask("POST", "/recipe/save", {"path": "big.yaml", "text": "x" * 3_000_000, "version": ""})[0] == 400
    assert browser.ask("POST", "/recipe/save", "[1]")[0] == 400


# --- commands


FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "quickstart": ({}, "python -m finetune.quickstart"),
    "new": (
        {"model": "org/model", "data": "rows.jsonl", "mode": "lora", "output": "my.yaml", "columns": "prompt=a b"},
        "python -m finetune new --model org/model --data rows.jsonl --mode lora -o my.yaml --columns 'prompt=a b'",
    ),
    "inspect": (
        {"recipe": "recipe.yaml", "rows": "5", "held_out": True, "overrides": "data.max_length=32"},
        "python -m finetune inspect recipe.yaml data.max_length=32 --rows 5 --eval "
        "--html .finetune-studio/pages/inspect-recipe-yaml.html",
    ),
    "check": ({"recipe": "recipe.yaml"}, "python -m finetune check recipe.yaml"),
    "plan": (
        {"recipe": "recipe.yaml", "on": ["8xH100-80", "2xcpu"], "by": "price"},
        "python -m finetune plan recipe.yaml --on 8xH100-80 --on 2xcpu --by price "
        "--html .finetune-studio/pages/plan-recipe-yaml.html",
    ),
    "launch": (
        {"recipe": "recipe.yaml", "config": "accelerate_configs/ddp.yaml", "processes": "2", "overrides": "run.seed=7"},
        "python -m finetune launch --config-file accelerate_configs/ddp.yaml --num-processes 2 recipe.yaml run.seed=7",
    ),
    "report": (
        {"runs": ["runs/good", "runs/damaged"], "output": "page.html"},
        "python -m finetune report runs/good runs/damaged -o page.html",
    ),
    "checkpoints": ({"run": "runs/good"}, "python -m finetune checkpoints runs/good --verify"),
    "export": (
        {"run": "runs/good", "to": "gguf", "dtype": "q8_0", "step": "best", "output": "out"},
        "python -m finetune export runs/good --to gguf --step best --dtype q8_0 -o out",
    ),
    "serve": (
        {"run": "runs/good", "beside": True},
        "python -m finetune serve trained=runs/good base=models/small --port 0",
    ),
}


@pytest.mark.parametrize("action", ACTIONS)
def test_the_command_beside_a_button_is_one_that_the_program_takes(browser: Browser, action: str) -> None:
    form, expected = FORMS[action]
    shown = browser.post(f"/preview/{action}", form)["command"]
    assert shown == expected
    if action == "quickstart":
        return
    words, group = shlex.split(shown)[3:], typer.main.get_command(cli)
    command = group.commands[words[0]]  # type: ignore[attr-defined]
    command.make_context(words[0], words[1:], parent=group.make_context("finetune", words))


@pytest.mark.parametrize(
    ("action", "form", "said"),
    [
        (
            "new",
            {"model": "org/model", "mode": "lora", "output": "x.yaml"},
            "data: nothing is chosen. Fix: choose data",
        ),
        (
            "new",
            {"model": "org/model", "data": "rows.jsonl", "mode": "half", "output": "x.yaml"},
            "mode: no such mode. Fix: choose one of",
        ),
        ("inspect", {"recipe": "absent.yaml"}, "no such file"),
        ("inspect", {"recipe": "recipe.yaml", "rows": "--html"}, "rows: --html is not a number"),
        ("check", {"recipe": "recipe.yaml", "overrides": "--json"}, "--json is not of the form section.key=value"),
        ("check", {"recipe": "recipe.yaml", "overrides": "'run.name=x"}, "No closing quotation"),
        ("launch", {"recipe": ["recipe.yaml"]}, "recipe: not one line of text"),
        ("plan", {"recipe": "recipe.yaml", "on": []}, "hardware: nothing is chosen"),
        ("plan", {"recipe": "recipe.yaml", "on": ["8x H100"]}, "hardware: 8x H100 is not a number and"),
        ("export", {"run": "runs/good", "to": "zip"}, "format: no such format. Fix: choose one of hf"),
        ("serve", {"run": "runs/damaged", "beside": True}, "no base model to compare it with"),
        ("report", {"runs": [], "output": "page.html"}, "runs: nothing is chosen"),
        ("report", {"runs": ["runs/good"], "output": "recipe.yaml"}, "not the name of a page. Fix: end it with .html"),
    ],
)
def test_a_form_that_makes_no_command_says_why(browser: Browser, action: str, form: dict[str, Any], said: str) -> None:
    status, _, text = browser.ask("POST", f"/start/{action}", form)
    assert (status, said in json.loads(text)["error"]) == (400, True), text
    assert browser.post(f"/preview/{action}", form) == {"command": "", "problem": json.loads(text)["error"]}
    assert browser.ask("POST", "/preview/absent", form)[0] == 404


def test_a_button_runs_the_command_that_it_shows(browser: Browser, folder: Path) -> None:
    form, expected = FORMS["checkpoints"]
    number = browser.post("/start/checkpoints", form)["job"]
    said = ended(browser, number)
    assert (said["kind"], said["state"], said["running"]) == ("finished", "done", False)
    assert "runs/good" in said["text"]
    assert "Traceback" not in said["text"]
    for path in ("/commands", f"/command/{number}"):
        assert expected in browser.get(path)


def finish(jobs: Jobs, number: int) -> int | None:
    job = jobs.read(number)
    assert job is not None
    while (status := jobs.status(job)) is None:
        time.sleep(0.02)
    return status


def wait_for(jobs: Jobs, number: int, text: str) -> None:
    job = jobs.read(number)
    assert job is not None
    while text not in jobs.output(job)[0]:
        time.sleep(0.02)


def test_a_command_outlives_the_studio_and_is_stopped_as_by_ctrl_c(tmp_path: Path) -> None:
    program = (
        "import signal, sys, time\n"
        "def save(*_):\n    print('saved'); sys.exit(75)\n"
        "signal.signal(signal.SIGINT, save)\nprint('begun')\n"
        "while True: time.sleep(0.02)\n"
    )
    first = Jobs(tmp_path)
    job = first.start("launch", ["-c", program], None, "runs/x")
    wait_for(first, job.number, "begun")
    later = Jobs(tmp_path)  # another studio, of the same folder
    assert [one.number for one in later.running()] == [job.number]
    later.stop(job)
    assert finish(first, job.number) == 75
    assert later.status(job) == 75
    assert later.output(job)[0] == "begun\nsaved\n"
    later.stop(job)  # it has ended


def test_output_comes_in_whole_lines_without_colours(tmp_path: Path) -> None:
    jobs = Jobs(tmp_path)
    program = "import sys; print('\\x1b[31mr\u00e9d\\x1b[0m'); sys.stdout.write('last'); sys.exit(3)"
    job = jobs.start("check", ["-c", program], None, None)
    assert finish(jobs, job.number) == 3
    text, end = jobs.output(job)
    assert text == "r\u00e9d\nlast"
    assert jobs.output(job, end) == ("", end)
    assert (tmp_path / ".finetune-studio" / ".gitignore").read_text() == "*\n"


def test_a_command_that_was_killed_with_its_shell_has_ended(tmp_path: Path) -> None:
    jobs = Jobs(tmp_path)
    job = jobs.start("launch", ["-c", "import time; time.sleep(600)"], None, None)
    os.killpg(job.pid, signal.SIGKILL)
    assert finish(jobs, job.number) == -1


def test_the_program_says_where_it_is_and_what_goes_on(tmp_path: Path) -> None:
    """On 127.0.0.1 alone, with a token of its own each time; at its end it names what it leaves running."""
    jobs = Jobs(tmp_path)
    job = jobs.start("launch", ["-c", "import time; time.sleep(600)"], None, None)
    command = [sys.executable, "-m", "finetune", "studio", "--port", "0"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as studio:
        assert studio.stdout is not None
        address = re.match(r"http://127\.0\.0\.1:(\d+)/\?token=([\w-]{43})\n", studio.stdout.readline())
        assert address is not None
        port, token = int(address[1]), address[2]
        listening = [one.laddr for one in psutil.Process(studio.pid).net_connections() if one.status == "LISTEN"]
        assert [(one.ip, one.port) for one in listening] == [("127.0.0.1", port)]
        while True:
            with contextlib.suppress(ConnectionError):
                assert Browser(port).ask("GET", f"/?token={token}")[0] == 303
                break
            time.sleep(0.05)
        studio.send_signal(signal.SIGINT)
        said = studio.stdout.read()
    assert f"goes on: python -c 'import time; time.sleep(600)' (to stop it: kill -2 -- -{job.pid})" in said
    assert jobs.status(job) is None
    os.killpg(job.pid, signal.SIGKILL)
    assert finish(jobs, job.number) == -1
