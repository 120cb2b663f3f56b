"""The studio's server: its pages, and the requests of their buttons."""

from __future__ import annotations

import html
import json
import os
import secrets
import signal
import socket
import tempfile
import threading
import webbrowser
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from finetune.desk.studio import pages
from finetune.desk.studio.actions import ACTIONS, PAGES, Action, Form
from finetune.desk.studio.guard import FRAMED, Guard
from finetune.desk.studio.jobs import Jobs, StartedCommand, command_line
from finetune.desk.studio.project_folder import base_of, inside, inside_or_shipped, is_utf8, look
from finetune.desk.studio.recipe_form import form_fields, form_values, with_value
from finetune.desk.studio.row_table import film_of, role_names, row_table, sound_of
from finetune.desk.view import report, web_page
from finetune.errors import UserError
from finetune.plan.run_list import price_so_far
from finetune.recipe import recipe_json_schema
from finetune.release.inference.sampling import Sampling
from finetune.release.inference.server_client import Server
from finetune.release.local_server import LOCAL_HOSTS, HostCheck
from finetune.utils import write_atomically

_STATIC = Path(__file__).parent / "static"
_MOST_BODY = 2 * 2**20  # bytes


def build_app(folder: Path, token: str, port: int) -> Any:
    """Returns the application for the folder of this process (the working directory). port: that it listens on."""
    jobs = Jobs(folder)

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        yield
        for job in jobs.running():
            if job.action == "serve":  # no page can talk to it anymore, and it holds a GPU's memory
                jobs.stop(job)

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    _add_pages(app, jobs)
    _add_commands(app, jobs)
    _add_files(app, folder)
    _add_chat(app, jobs)

    @app.exception_handler(UserError)
    async def of_user(request: Request, error: UserError) -> Response:
        return refused(request, 400, str(error))

    @app.exception_handler(HTTPException)
    async def of_routes(request: Request, error: HTTPException) -> Response:
        return refused(request, error.status_code, str(error.detail))

    def refused(request: Request, status: int, message: str) -> Response:
        message = message.encode(errors="replace").decode()  # it may name a file whose name is no UTF-8
        if request.method != "GET" or "text/html" not in request.headers.get("accept", ""):
            return JSONResponse({"error": message}, status)
        return HTMLResponse(pages.render("refused.html.jinja", "Not here", "/", jobs, message=message), status)

    def other_name(name: str) -> Response:
        return PlainTextResponse(f"{name!r} is not a name of this server\n", 403, {"Connection": "close"})

    app.add_middleware(Guard, token=token, port=port)
    app.add_middleware(HostCheck, hosts=LOCAL_HOSTS, refusal=other_name)
    return app


async def _fields(request: Request) -> dict[str, Any]:
    """Returns a body. Raises UserError if it is no JSON object, or too large."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > _MOST_BODY:
            raise UserError(f"the request has more than {_MOST_BODY:,} bytes. Fix: send a shorter text")
    try:
        values = json.loads(bytes(body))
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise UserError("the request is not a JSON object. Fix: send fields and their values as JSON")
    return values


# --- pages


def _add_pages(app: FastAPI, jobs: Jobs) -> None:
    folder = jobs.folder

    def page(template: str, title: str, place: str, **values: Any) -> HTMLResponse:
        contents = look(folder)
        shown = {"runs": contents.runs, **pages.choices(contents), "notes": contents.left_out, **values}
        return HTMLResponse(pages.render(template, title, place, jobs, **shown))

    @app.get("/")
    def home() -> Any:
        return page("runs.html.jinja", "Runs", "/", **runs_values())

    @app.get("/parts/runs")
    def runs_part() -> Any:
        return HTMLResponse(pages.fragment("runs-part.html.jinja", **runs_values()))

    def runs_values() -> dict[str, Any]:
        rows = pages.run_rows(jobs, look(folder).runs)
        return {"rows": rows, "commands": [pages.job_row(jobs, job) for job in jobs.running()]}

    @app.get("/run")
    def run(path: str) -> Any:
        return page("run.html.jinja", Path(path).name, "/", **run_values(path))

    @app.get("/parts/run")
    def run_part(path: str) -> Any:
        configs = look(folder).configs
        return HTMLResponse(pages.fragment("run-part.html.jinja", configs=configs, **run_values(path)))

    def run_values(path: str) -> dict[str, Any]:
        run = str(inside(path, folder))
        if run not in jobs.last_launches() and not pages.has_files(folder / run):
            raise HTTPException(404, f"{path}: no run here: nothing has been written yet, or it was removed")
        return pages.run_values(jobs, run)

    @app.get("/data")
    def data(path: str = "", recipe: str = "") -> Any:
        table = row_table(path, folder) if path else None
        values = {"path": path, "recipe": recipe or newest(), "table": table, "roles": role_names()}
        return page("data.html.jinja", "Data", "/data", **values)

    @app.get("/sound")
    def sound(path: str, row: int, clip: int) -> Any:
        return Response(sound_of(path, row, clip, folder), media_type="audio/wav")

    @app.get("/film")
    def film(path: str, row: int, video: int) -> Any:
        return Response(film_of(path, row, video, folder), media_type="image/png")

    def newest() -> str:
        """Returns the recipe that one works on: not one that comes with the package."""
        contents = look(folder)
        return contents.recipes[0] if contents.has_own_recipes else ""

    @app.get("/recipe")
    def recipe(path: str = "") -> Any:
        text, version = pages.recipe_text(path, folder) if path else ("", "")
        values = {
            "path": path,
            "text": text,
            "version": version,
            "fields": form_fields(),
            "is_here": bool(path) and (folder / path).exists(),
        }
        new_name = pages.free_run_name(path, folder) if path else ""
        return page("recipe.html.jinja", path or "Recipe", "/recipe", new_name=new_name, **values)

    @app.get("/plan")
    def plan(recipe: str = "") -> Any:
        chosen = recipe or newest()
        return page("plan-form.html.jinja", "Plan", "/plan", recipe=chosen, devices=pages.devices())

    @app.get("/compare")
    def compare(request: Request) -> Any:
        chosen = [str(inside(run, folder)) for run in request.query_params.getlist("run")]
        rows = pages.run_rows(jobs, look(folder).runs)
        begun = [run for run in chosen if pages.has_files(folder / run)]
        values = {"chosen": begun, "rows": rows, "stamp": pages.stamp(jobs, begun)}
        return page("compare.html.jinja", "Compare", "/compare", **values)

    @app.get("/parts/compare")
    def compare_part(request: Request) -> Any:
        chosen = [str(inside(run, folder)) for run in request.query_params.getlist("run")]
        return HTMLResponse(pages.fragment("stamp-part.html.jinja", stamp=pages.stamp(jobs, chosen)))

    @app.get("/report")
    def of_runs(request: Request) -> Any:
        chosen = [folder / inside(run, folder) for run in request.query_params.getlist("run")]
        begun = [run for run in chosen if pages.has_files(run)]
        if not begun:
            raise HTTPException(404, "no run here: nothing has been written yet, or it was removed")
        read = [report.read_run(run, price_so_far(run)) for run in begun]
        content = report.render(read).encode("utf-8", "replace")
        # Its own policy allows its own script alone.
        return HTMLResponse(content, headers={"Content-Security-Policy": "frame-ancestors 'self'"})

    @app.get("/chat")
    def chat(run: str = "") -> Any:
        rows = [row for row in pages.run_rows(jobs, look(folder).runs) if row["has_result"]]
        bases = {row["path"]: base_of(folder / row["path"], folder) for row in rows}
        serving = [job for job in jobs.running() if job.action == "serve"]
        return page("chat.html.jinja", "Chat", "/chat", run=run, rows=rows, bases=bases, serving=serving)

    @app.get("/export")
    def export(run: str = "") -> Any:
        rows = pages.run_rows(jobs, look(folder).runs)
        return page("export.html.jinja", "Export", "/export", run=run, rows=rows)

    @app.get("/commands")
    def commands() -> Any:
        listed = [pages.job_row(jobs, job) for job in jobs.all()]
        damaged = [f"{file}: this command cannot be read. Fix: remove its folder" for file in jobs.damaged()]
        return page("commands.html.jinja", "Commands", "/commands", commands=listed, notes=damaged)

    @app.get("/command/{number}")
    def command(number: int) -> Any:
        job = _job(jobs, number)
        return page("command.html.jinja", f"Command {number}", "/commands", row=pages.job_row(jobs, job))


def _job(jobs: Jobs, number: int) -> StartedCommand:
    job = jobs.read(number)
    if job is None:
        raise HTTPException(404, f"there is no command {number} here")
    return job


# --- commands


def _add_commands(app: FastAPI, jobs: Jobs) -> None:
    folder = jobs.folder

    def known(action: str) -> Action:
        if action not in ACTIONS:
            raise HTTPException(404, f"there is no {action} here")
        return ACTIONS[action]

    @app.post("/preview/{action}")
    async def preview(action: str, request: Request) -> Any:
        one = known(action)
        try:
            words = await run_in_threadpool(one.words, Form(await _fields(request), folder))
        except UserError as error:  # of a form that is being filled in
            return {"command": "", "problem": str(error).encode(errors="replace").decode()}
        return {"command": command_line(words)}

    @app.post("/start/{action}")
    async def start(action: str, request: Request) -> Any:
        one = known(action)
        return await run_in_threadpool(started, action, one, Form(await _fields(request), folder))

    def started(action: str, one: Action, form: Form) -> dict[str, Any]:
        words = one.words(form)
        page = one.page(form) if one.page else None
        if page is not None:
            (folder / PAGES).mkdir(parents=True, exist_ok=True)
        job = jobs.start(action, words, page, one.about(form) or None)
        return {"job": job.number, "then": one.then(form) if one.then else None}

    @app.get("/jobs/{number}")
    def follow(number: int, start: int = 0) -> Any:
        return pages.job_answer(jobs, _job(jobs, number), min(max(0, start), 2**62))

    @app.post("/jobs/{number}/stop")
    def stop(number: int) -> Any:
        jobs.stop(_job(jobs, number))
        return {}

    @app.get("/jobs/{number}/page")
    def written(number: int) -> Any:
        job = _job(jobs, number)
        if job.page is None or not (folder / inside(job.page, folder)).is_file():
            raise HTTPException(404, "this command has written no page")
        headers = {"Content-Security-Policy": FRAMED}
        return FileResponse(folder / inside(job.page, folder), media_type="text/html", headers=headers)


# --- recipes and static files


def _add_files(app: FastAPI, folder: Path) -> None:
    saving = threading.Lock()  # a version is compared and replaced as one

    @app.post("/recipe/check")
    async def check(request: Request) -> Any:
        path, text = recipe_of(await _fields(request))
        return await run_in_threadpool(checked, str(inside_or_shipped(path, folder)), text)

    def checked(path: str, text: str) -> dict[str, Any]:
        problems = pages.recipe_problems(path, text)
        try:
            return {"problems": problems, "values": form_values(path, text)}
        except UserError:  # no YAML: a form has nothing to show
            return {"problems": problems, "values": None}

    @app.post("/recipe/set")
    async def set_value(request: Request) -> Any:
        values = await _fields(request)
        path, text = recipe_of(values)
        key, value = values.get("key"), values.get("value")
        if not isinstance(key, str) or not isinstance(value, str) or not is_utf8(value) or "\0" in value:
            raise UserError("the request lacks key or value of a field. Fix: send both as text")
        pages.check_length(path, text)
        return {"text": await run_in_threadpool(with_value, text, key, value.strip())}

    @app.post("/recipe/save")
    async def save(request: Request) -> Any:
        values = await _fields(request)
        path, text = recipe_of(values)
        version = values.get("version")
        if not isinstance(version, str):
            raise UserError("the request lacks the version that was edited. Fix: reload the page")
        return await run_in_threadpool(write, path, text, version)

    def write(path: str, text: str, version: str) -> dict[str, str]:
        """version: of the text that was edited; "": of a recipe that is not in the folder."""
        file = (folder / inside(path, folder)).resolve()
        if file.suffix not in (".yaml", ".yml"):
            raise UserError(f"{path}: not the name of a recipe. Fix: end it with .yaml")
        pages.check_length(path, text)
        if file.name == "recipe.yaml" and pages.has_files(file.parent):
            raise UserError(f"{path}: the record of what this run trained. Fix: save it under another name")
        with saving:
            if pages.version(file) != version:
                raise UserError(
                    f"{path}: was changed elsewhere after this page had read it, so it is not replaced. Fix: copy what "
                    "you wrote, reload the page, and put it into the newer text"
                )
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(file, text)
            except OSError as error:
                raise UserError(
                    f"{path}: cannot be written: {error.strerror}. Fix: make room or give another path"
                ) from None
            return {"path": path, "version": pages.version(file)}

    def recipe_of(values: dict[str, Any]) -> tuple[str, str]:
        path, text = values.get("path"), values.get("text")
        if not isinstance(path, str) or not isinstance(text, str):
            raise UserError("the request lacks path or text of a recipe. Fix: send both as text")
        if not is_utf8(text):
            raise UserError(f"{path}: the text has a character that UTF-8 cannot write. Fix: remove it")
        return path, text

    @app.get("/schema.json")
    def schema() -> Any:
        return Response(recipe_json_schema(), media_type="application/json")

    @app.get("/static/{name}")
    def static(name: str) -> Any:
        if name == "page.css":
            return Response(web_page.shared_style(), media_type="text/css")
        if name not in ("studio.css", "studio.js", "editor.js"):
            raise HTTPException(404, "no such file")
        return FileResponse(_STATIC / name)


# --- chat


def _add_chat(app: FastAPI, jobs: Jobs) -> None:
    def server_of(number: int) -> str:
        job = _job(jobs, number)
        url = pages.served_url(jobs, job)
        if url is None or jobs.status(job) is not None:
            raise UserError("this model is not loaded anymore. Fix: load it again")
        return url

    @app.get("/chat/{number}")
    def loaded(number: int) -> Any:
        job = _job(jobs, number)
        names = [word.partition("=")[0] for word in job.words if word.startswith(("trained=", "base="))]
        return {"ready": pages.served_url(jobs, job) is not None and jobs.status(job) is None, "models": names}

    @app.post("/chat/{number}")
    async def ask(number: int, request: Request) -> Any:
        values, url = await _fields(request), server_of(number)
        model, messages = values.get("model"), values.get("messages")
        temperature, most = values.get("temperature", 0), values.get("max_new_tokens", 256)
        if not isinstance(model, str) or not isinstance(messages, list) or not isinstance(most, int):
            raise UserError(
                "the request lacks model, messages or max_new_tokens, or has other types. Fix: send text, a list and a "
                "whole number"
            )
        if not isinstance(temperature, int | float):
            raise UserError("temperature: not a number. Fix: send a number, such as 0.7")
        sampling = Sampling(max_new_tokens=most, temperature=float(temperature))
        pieces = Server(url).stream(model, messages, sampling)
        return StreamingResponse(pages.as_events(pieces), media_type="application/x-ndjson")


# --- the program


def entry_page(folder: Path, address: str) -> Path:
    """Writes the page that takes a browser to the studio, for its owner alone: a browser's arguments, which would have
    the token, are shown to every user of the machine."""
    path = folder / "open.html"
    refresh = f'<meta http-equiv="refresh" content="0; url={html.escape(address)}">'
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(f'<!doctype html>{refresh}<a href="{html.escape(address)}">the studio</a>\n')
    return path


def run_studio(port: int, opens: bool, say: Callable[[str], object]) -> None:
    """Serves the working directory on 127.0.0.1 until Ctrl-C. port 0: any free one; opens: the browser. Raises
    UserError."""
    folder, token = Path.cwd(), secrets.token_urlsafe(32)
    try:
        listening = socket.create_server(("127.0.0.1", port))
    except OSError as error:
        raise UserError(
            f"studio: cannot listen on 127.0.0.1:{port}: {error.strerror}. Fix: give another --port"
        ) from None
    with listening, tempfile.TemporaryDirectory(prefix="finetune-studio-") as private:
        number = listening.getsockname()[1]
        address = f"http://127.0.0.1:{number}/?token={token}"
        say(f"{address}\nthe studio of {folder}, for this machine alone (Ctrl-C ends it)")
        if opens:
            page = entry_page(Path(private), address).as_uri()
            threading.Thread(target=webbrowser.open, args=(page,), daemon=True).start()
        config = uvicorn.Config(build_app(folder, token, number), log_level="warning", timeout_graceful_shutdown=3)
        with suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listening])
    left = [job for job in Jobs(folder).running() if job.action != "serve"]
    for job in left:
        say(f"goes on: {command_line(job.words)} (to stop it: kill -{signal.SIGINT.value} -- -{job.pid})")
