"""The studio in a real browser: from rows to a chat, by its buttons, at the width of a desk and of a telephone."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny
from web_driver import CHROMIUM, DRIVER, Chromium, chromium

from finetune.desk.studio.jobs import Jobs

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="no Chromium, or no chromedriver, here"),
]
PAGES = (
    "/",
    "/data",
    "/recipe?path=my-recipe.yaml",
    "/plan",
    "/compare?run=runs/first",
    "/chat",
    "/export",
    "/commands",
)

WATCHED = """\
run: {{name: {name}}}
model: {{name: llama}}
mode: full
data: {{train: rows.jsonl, max_length: 128}}
batch: {{rows: 4, rows_per_device: 2}}
optimizer: {{lr: 1.0e-3}}
train: {{max_steps: 60, precision: fp32}}
"""


@pytest.fixture(scope="module")
def studio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """A folder with a tiny model and rows, and the address of its studio."""
    folder = tmp_path_factory.mktemp("project")
    tiny.save_model(folder, "llama")
    tiny.write_rows(folder / "rows.jsonl", tiny.conversations(40))
    command = [sys.executable, "-m", "finetune", "studio", "--port", "0"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as program:
        assert program.stdout is not None
        yield folder, program.stdout.readline().strip()
        program.send_signal(signal.SIGINT)
        program.stdout.read()
    jobs = Jobs(folder)
    for job in jobs.running():
        os.killpg(job.pid, signal.SIGKILL)


def fill(page: Chromium, form: str, values: dict[str, str]) -> None:
    """Fills fields of a form as a person does, and waits until its button is enabled and its command has the last."""
    page.run(
        "const form = document.querySelector(arguments[0]);"
        "for (const [name, value] of Object.entries(arguments[1])) form.elements[name].value = value;"
        "form.dispatchEvent(new Event('input', {bubbles: true}))",
        form,
        values,
    )
    words = "const said = document.querySelector(arguments[0] + ' .command').textContent;"
    page.until(f"{words} return arguments[1].every((value) => said.includes(value))", form, list(values.values()))


def pressed(page: Chromium, form: str) -> str:
    """Presses the button of a form; returns what its command has printed, when it has ended well."""
    page.click(f"{form} .go > button")
    chip = "const chip = document.querySelector(arguments[0] + ' .progress .chip');"
    done = "return chip.offsetParent && !chip.classList.contains('running') && chip.textContent"
    state, text = (
        page.until(f"{chip} {done}", form),
        page.run("return document.querySelector(arguments[0] + ' .output').textContent", form),
    )
    assert state == "done", text
    return text


def test_from_rows_to_a_chat(studio: tuple[Path, str], tmp_path: Path) -> None:
    folder, address = studio
    site = re.match(r"http://[^/]+", address)
    assert site is not None
    with chromium(tmp_path / "profile", 1280) as page:
        page.open(address)
        assert page.run("return location.href") == f"{site[0]}/"  # without the token
        page.open(f"{site[0]}/data")
        new = "form[data-action=new]"
        fill(page, new, {"data": "rows.jsonl", "model": "llama", "mode": "full", "output": "my-recipe.yaml"})
        assert "launch my-recipe.yaml" in pressed(page, new)

        page.open(f"{site[0]}/data?path=rows.jsonl")
        assert page.run("return document.querySelector('select.role').value") == "messages"
        fill(page, new, {"model": "llama"})  # a command is shown once it is complete
        page.click(".use-roles")
        page.until(
            "return document.querySelector('form[data-action=new] .command').textContent.includes('messages=messages')"
        )

        page.open(f"{site[0]}/data?recipe=my-recipe.yaml")
        inspect = "form[data-action=inspect]"
        fill(page, inspect, {"recipe": "my-recipe.yaml", "rows": "3"})
        pressed(page, inspect)
        page.until("return !!document.querySelector('form[data-action=inspect] iframe')")
        assert "<mark" in (folder / ".finetune-studio/pages/inspect-my-recipe-yaml.html").read_text()

        page.open(f"{site[0]}/recipe?path=my-recipe.yaml")
        page.until("return !!document.querySelector('#problems .fine')")
        page.run("const t = document.querySelector('#text'); t.focus(); t.setSelectionRange(0, 0)")
        page.type("#text", "optimi")
        assert "optimizer" in page.until("return document.querySelector('.completion:not([hidden])')?.textContent")
        page.type("#text", "\ue007")  # Enter takes it
        page.type("#text", "3\n")
        line = page.until("return document.querySelector('#problems li button')?.textContent")
        assert line.startswith("line ")
        assert page.run("return document.querySelectorAll('.gutter .wrong').length") >= 1
        page.run(
            "const t = document.querySelector('#text'); t.value = t.value.split('\\n').slice(1).join('\\n');"
            "t.dispatchEvent(new Event('input'))"
        )
        page.until("return !!document.querySelector('#problems .fine')")
        assert page.run("return document.querySelector('.save').disabled")  # as it is on the disk

        launch = "form[data-action=launch]"
        settings = "run.name=first train.max_steps=4 train.precision=fp32 batch.rows=4 batch.rows_per_device=2"
        fill(page, launch, {"config": "accelerate_configs/single.yaml", "overrides": settings})
        assert "saved runs/first/model" in pressed(page, launch)
        page.open(f"{site[0]}/run?path=runs/first")
        assert "finished" in page.run("return document.querySelector('.card').textContent")
        page.until("return !!document.querySelector('iframe.fits').contentDocument.querySelector('polyline')")

        page.open(f"{site[0]}/chat?run=runs/first")
        serve = "form[data-action=serve]"
        page.click(f"{serve} [name=beside]")
        page.until(
            "return document.querySelector('form[data-action=serve] .command').textContent.includes('base=llama')"
        )
        page.click(f"{serve} .go > button")
        page.until("return !document.querySelector('.talk').hidden")
        page.run("document.querySelector('[name=most]').value = 8")
        page.type(".ask textarea", "river stone")
        page.click(".ask button")
        page.until(
            "return document.querySelectorAll('.answers > div').length == 2"
            " && !document.querySelector('.ask button').disabled"
        )
        assert page.run("return [...document.querySelectorAll('.answers h3')].map((one) => one.textContent)") == [
            "trained",
            "base",
        ]
        assert page.run("return document.querySelectorAll('.answers .wrong').length") == 0
        page.click(f"{serve} .stop")
        page.until("return document.querySelector('.talk').hidden")
        assert page.log() == []


@pytest.mark.parametrize("width", [1280, 420])
def test_a_run_is_watched_from_its_start_to_its_end_without_a_reload(
    studio: tuple[Path, str], tmp_path: Path, width: int
) -> None:
    folder, address = studio
    site = address.partition("?")[0].rstrip("/")
    (folder / f"watch-{width}.yaml").write_text(WATCHED.format(name=f"watch-{width}"))
    words = "return document.querySelector(arguments[0])?.textContent ?? ''"
    state = "return document.querySelector('.number.state').textContent"
    with chromium(tmp_path / "profile", width) as page:
        page.open(address)
        page.open(f"{site}/recipe?path=watch-{width}.yaml")
        launch = "form[data-action=launch]"
        fill(page, launch, {"config": "accelerate_configs/single.yaml"})
        page.click(f"{launch} .go > button")
        page.until(f"return document.querySelector('{launch} .then:not([hidden])')?.href")
        page.click(f"{launch} .then")
        page.run("window.isTheSamePage = true")
        assert page.until(state) in ("starting", "running")
        page.click(".stop-job")  # in its start or its first steps
        page.until("return !!document.querySelector('form[data-action=launch] .go > button:not(:disabled)')")
        assert page.run(state) in ("stopped before its first step", "stopped and saved")
        page.click(f"{launch} .go > button")
        page.until("return document.querySelector('.told .output').textContent.length > 0")
        page.until("return !!document.querySelector('iframe.fits')?.contentDocument?.querySelector('polyline')")
        page.until(f"{state} == 'finished'")
        assert "saved runs/" in page.until(words, ".told .output")
        assert page.run("return document.querySelectorAll('.stop-job, form[data-action=launch]').length") == 0
        assert page.run("return window.isTheSamePage")
        assert page.run("return document.documentElement.scrollWidth <= window.innerWidth")
        assert page.log() == []


@pytest.mark.parametrize("width", [1280, 420])
def test_the_older_of_two_tabs_is_refused(studio: tuple[Path, str], tmp_path: Path, width: int) -> None:
    folder, address = studio
    site, file = address.partition("?")[0].rstrip("/"), folder / f"tabs-{width}.yaml"
    file.write_text(WATCHED.format(name=f"tabs-{width}"))
    steps = "return document.querySelector('[data-key=\"train.max_steps\"]').value == '60'"
    with chromium(tmp_path / "profile", width) as page:
        page.open(address)
        page.open(f"{site}/recipe?path={file.name}")
        page.until(steps)
        older = page.open_tab()
        page.open(f"{site}/recipe?path={file.name}")
        page.until(steps)
        page.type("#text", "# of the other tab")
        page.click(".save")
        page.until("return document.querySelector('.saved').textContent == 'saved'")
        page.to_tab(older)
        page.type('[data-key="train.max_steps"]', "1\ue007")  # 601: Enter changes it
        page.until("return document.querySelector('#text').value.includes('max_steps: 601')")
        page.type("#text", "# mine")
        page.click(".save")
        page.until("return document.querySelector('.saved').textContent.includes('was changed elsewhere')")
        assert "# mine" in page.run("return document.querySelector('#text').value")
    assert "# of the other tab" in file.read_text()
    assert "# mine" not in file.read_text()


@pytest.mark.parametrize("width", [1280, 420])
def test_pages_fit_their_width_and_log_nothing(studio: tuple[Path, str], tmp_path: Path, width: int) -> None:
    _, address = studio
    with chromium(tmp_path / "profile", width) as page:
        page.open(address)
        for path in PAGES:
            page.open(address.partition("?")[0].rstrip("/") + path)
            page.until("return document.readyState == 'complete'")
            assert page.run("return document.documentElement.scrollWidth <= window.innerWidth"), path
        assert page.log() == []
