"""`report`: runs as one HTML page without requests, in the style of the inspect page; report.js redraws its curves.

Every number is from metrics.jsonl, plan.json, status.json, recipe.yaml, evaluate.json or verify.json, and every token
from examples.json; a curve keeps its values in `data-values`. Several runs are overlaid, with the differences of their
recipes.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

from finetune.checkpoints.folder import best_checkpoint, step_of
from finetune.data.visible_text import Token, visible
from finetune.desk.view import web_page
from finetune.desk.view.rollout_samples import read_samples
from finetune.desk.view.token_html import sequence_names, tokens_html
from finetune.errors import UserError
from finetune.release.local_server import is_allowed_host
from finetune.tracking.headline import EVALUATIONS, HEADLINES
from finetune.tracking.metrics import EXAMPLES, GENERATIONS, is_shown, read_metrics, read_steps
from finetune.utils import readable_hours, write_atomically

WIDTH, HEIGHT = 480, 150  # size of a chart, in SVG units
POINTS = 1000  # points per curve; longer ones show every n-th and the last
ANSWERED = 12  # evaluations per run, with their answers
COLOURS = ("#2f7fc1", "#c9772b", "#3f9a5f", "#a34fa8", "#b8433f", "#6b7280")
REFRESH_S = 5
_AXES = {"step", "epoch"}
_LARGEST = 1e300  # number that is drawn
_OF_A_RUN = ("metrics.jsonl", "recipe.yaml", "plan.json", "status.json")
# Errors of reading and showing a damaged file.
_DAMAGE = (
    OSError,
    UserError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    yaml.YAMLError,
)
_OF_SAMPLES = ("entropy", "sampler_kl", "truncated", "zero_variance", "margin", "completion_tokens")
_GROUPS: dict[str, Callable[[str], bool]] = {
    "Rollouts": lambda key: key in ("reward", *_OF_SAMPLES) or key.startswith(("reward/", "pass@", "reward_failures/")),
    "Held-out data": lambda key: key.startswith("eval_") or key == "exact_match" or key.endswith("error_rate"),
    "Speed": lambda key: key.endswith("_per_s") or key in ("step_s", "mfu", "tflops_per_device"),
    "Time by phase": lambda key: (
        key.startswith(("time/", "share/")) or (key.endswith("_s") and not key.endswith("_per_s"))
    ),
    "Memory": lambda key: "memory" in key or key.endswith("_gib"),
    "Counts": lambda key: "tokens" in key,
    "Ranks": lambda key: key in ("straggler", "rank_spread"),
}
_WITH_HELD_OUT = ("loss", "reward")  # drawn with `eval_` of the same name, in one chart
_FOLDED = ("Time by phase", "Memory", "Counts", "Ranks")  # groups whose charts one opens
Section = dict[str, Any]  # values of report.html.jinja
PriceOf = Callable[[Path], "str | None"]
_STYLE = """
polyline.held-out { stroke-dasharray: 7 3; }
#controls { display: flex; flex-wrap: wrap; gap: 0.4rem 1.4rem; margin-top: 0.8rem; font-size: 0.92rem; }
#controls[hidden], #tip[hidden] { display: none; }
#tip { position: fixed; left: 0; top: 0; z-index: 2; padding: 0.35rem 0.6rem; border-radius: 6px; font-size: 0.82rem; }
#tip { background: Canvas; color: CanvasText; border: 1px solid GrayText; pointer-events: none; max-width: 90vw; }
#tip i { display: inline-block; width: 0.7em; height: 0.7em; border-radius: 3px; margin-right: 0.4em; }
details summary { cursor: pointer; margin-bottom: 0.6rem; }
polyline { fill: none; stroke-width: 1.6; vector-effect: non-scaling-stroke; }
svg line.best { stroke-dasharray: 2 3; }
#contents { display: flex; flex-wrap: wrap; gap: 0.2rem 1.1rem; margin-top: 0.8rem; font-size: 0.92rem; }
#contents a { color: inherit; }
.runs { display: flex; flex-wrap: wrap; gap: 0.3rem 1.2rem; margin-top: 0.8rem; font-size: 0.92rem; }
.runs i { display: inline-block; width: 0.8em; height: 0.8em; border-radius: 3px; margin-right: 0.4em; }
article .text { white-space: pre-wrap; overflow-wrap: anywhere; }
td { overflow-wrap: anywhere; min-width: 12.5rem; }
td.n { text-align: left; white-space: nowrap; overflow-wrap: normal; min-width: 0; }
tbody th { min-width: 11rem; }
.answers td { min-width: 16rem; font-family: var(--mono); font-size: 0.82rem; white-space: pre-wrap; }
.answers td.n { min-width: 0; }
.answers .note { margin: 0 0 0.5rem; }
.answers img { max-width: 100%; height: auto; }
.samples details > summary { margin: 1rem 0 0; }
.samples .prompt { font-family: var(--mono); font-size: 0.82rem; white-space: pre-wrap; overflow-wrap: anywhere; }
.samples div.prompt, .samples .note { padding: 0.7rem 1.2rem; margin: 0; }
.samples ol { list-style: none; margin: 0; padding: 0; }
.samples li { display: grid; grid-template-columns: 3.6rem 1fr auto; gap: 0.2rem 0.8rem; padding: 0.45rem 1.2rem; }
.samples li { border-top: 1px solid var(--line); align-items: baseline; }
.samples li b { padding: 0 0.4rem; border-radius: 5px; text-align: right; color: #1d1c1a; font-size: 0.88rem; }
.samples li b { font-variant-numeric: tabular-nums; }
.samples .r0 { background: #f0a9a3; } .samples .r1 { background: #f3cda6; } .samples .r2 { background: #e8e0b0; }
.samples .r3 { background: #c9dfae; } .samples .r4 { background: #9fd3ab; }
.samples li small { margin: 0; text-align: left; overflow-wrap: anywhere; }
.samples li .failure { grid-column: 2 / -1; color: var(--chip); }
@media (max-width: 46rem) {
  .samples li { grid-template-columns: 3.6rem 1fr; } .samples li small { grid-column: 2; }
  .samples li, .samples div.prompt, .samples .note { padding-left: 0.8rem; padding-right: 0.8rem; }
}
@media (max-width: 46rem) { td { min-width: 9rem; } tbody th { min-width: 8rem; } .answers td { min-width: 13rem; } }
"""


@dataclass(frozen=True)
class RunData:
    """Contents of a run directory."""

    folder: Path
    name: str
    lines: list[dict[str, Any]]  # lines of metrics.jsonl
    recipe: dict[str, Any]
    plan: dict[str, Any]
    status: dict[str, Any]
    best_step: int | None  # by `checkpoint.best`
    verified: dict[str, dict[str, Any]]  # verify.json of exports, by folder
    evaluated: dict[str, dict[str, Any]]  # evaluate.json: scores by "task/metric"
    examples: list[dict[str, Any]]  # examples.json: training examples as text
    generations: list[dict[str, Any]]  # generations.jsonl: {"step": .., "columns": .., "rows": ..} of each evaluation
    samples: list[dict[str, Any]]  # of some steps, see `read_samples`
    problems: tuple[str, ...] = ()  # files that are missing or damaged, so the page is incomplete
    price: str | None = None  # so far, with its currency; None: its device has no price

    def curve(self, key: str) -> list[tuple[int, float]]:
        return [(line["step"], line[key]) for line in self.lines if _is_number(line.get(key))]


def _is_number(value: Any) -> bool:
    """Returns whether a value can be drawn."""
    return isinstance(value, int | float) and -_LARGEST < value < _LARGEST


def read_run(folder: Path, price: str | None = None) -> RunData:
    """Returns the readable files of a run, with notes on the others. Raises UserError if there are none."""
    if not any((folder / name).is_file() for name in _OF_A_RUN):
        raise UserError(
            f"{folder}: no run here (no metrics.jsonl). Fix: give a run directory, such as runs/quickstart-full"
        )
    problems = [f"{name} is missing" for name in _OF_A_RUN if not (folder / name).exists()]

    def read(name: str, load: Callable[[Path], Any], empty: Any) -> Any:
        """Returns the content of a file that may be damaged, of the type of `empty`."""
        try:
            if not (folder / name).exists():
                return empty
            content = load(folder / name)
            if type(content) is not type(empty):
                raise TypeError(f"expected {type(empty).__name__}, got {type(content).__name__}")
        except _DAMAGE as error:
            problems.append(f"{name} cannot be read: {' '.join(str(error).split())[:200] or type(error).__name__}")
            return empty
        return content

    def are_answers(rows: Any) -> bool:
        """Returns whether rows are [prompt, answer, expected or None], as a run writes them."""
        kinds = ([str, str, str], [str, str, type(None)])
        return isinstance(rows, list) and all(isinstance(r, list) and list(map(type, r)) in kinds for r in rows)

    lines, damage = read_metrics(folder / "metrics.jsonl")
    problems += [damage] if damage else []
    recipe = read("recipe.yaml", lambda path: yaml.safe_load(path.read_text(encoding="utf-8")), {})
    exports = []
    with contextlib.suppress(OSError):
        exports = sorted(path.parent.name for path in folder.glob("*/verify.json"))
    verified = {name: read(f"{name}/verify.json", _json, {}) for name in exports}
    scores = _section(read("evaluate.json", _json, {}), "scores")
    best = _section(recipe, "checkpoint").get("best")
    best_folder = read("checkpoints", lambda path: [best_checkpoint(path, best)], [])
    return RunData(
        folder=folder,
        name=folder.name,
        lines=lines,
        recipe=recipe,
        plan=read("plan.json", _json, {}),
        status=read("status.json", _json, {}),
        best_step=step_of(best_folder[0]) if any(best_folder) else None,
        verified={name: figures for name, figures in verified.items() if figures},
        evaluated={name: score for name, score in scores.items() if isinstance(score, dict)},
        examples=read(EXAMPLES, _json, []),
        generations=[entry for entry in read(GENERATIONS, read_steps, []) if are_answers(entry.get("rows"))],
        samples=read("rollouts", lambda path: read_samples(path.parent), []),
        problems=tuple(problems),
        price=price,
    )


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _section(values: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns a part of a file; {} if it is absent or damaged."""
    part = values.get(name)
    return part if isinstance(part, dict) else {}


def write_report(folders: Sequence[Path], out: Path, price_of: PriceOf = lambda folder: None) -> None:
    """Writes the page, atomically. Raises UserError if a folder is not a run, or the page cannot be written.

    price_of: what a run has cost so far, as text.
    """
    whole = _bytes(render([read_run(folder, price_of(folder)) for folder in folders]))
    try:
        if out.exists() and not out.is_file():
            out.write_bytes(whole)  # a device or pipe
        else:
            write_atomically(out, whole)
    except OSError as error:
        raise UserError(
            f"-o {out}: cannot be written: {error.strerror or error}. Fix: make room or give another path"
        ) from None


def _bytes(page: str) -> bytes:
    return page.encode("utf-8", "replace")  # damaged files may have half a surrogate


def watch(
    folders: Sequence[Path],
    port: int,
    ready: Callable[[str], object],
    price_of: PriceOf = lambda folder: None,
) -> None:
    """Serves the page on 127.0.0.1, rendered for each request, until interrupted. Raises UserError."""
    [read_run(folder) for folder in folders]  # raises at once for a folder that is not a run

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not is_allowed_host(self.headers.get("Host", "")):
                self.send_error(403, "this server is called localhost or 127.0.0.1")
                return
            if self.path != "/":
                self.send_error(404)
                return
            body = _bytes(render([read_run(folder, price_of(folder)) for folder in folders], REFRESH_S))
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Disables logs of each refresh."""

    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except OSError as error:
        raise UserError(f"--port {port}: {error.strerror}. Fix: give another one") from None
    with server:
        ready(f"http://127.0.0.1:{server.server_port}/")
        server.serve_forever()


def render(runs: Sequence[RunData], refresh_s: int | None = None) -> str:
    """Returns the page. refresh_s: seconds until a browser reloads it."""
    script = (Path(__file__).parent / "report.js").read_text(encoding="utf-8")
    legend = []
    for i, run in enumerate(runs):
        status, best = run.status, f", best step {run.best_step}" if run.best_step is not None else ""
        state = f"{status.get('status', 'unknown')}, step {status.get('step', '?')} of {status.get('steps', '?')}{best}"
        legend.append({"colour": _colour(i), "name": run.name, "state": state})
    sections, contents = list[Section](), list[dict[str, str]]()
    for heading, part in _PARTS.items():
        try:
            made = part(runs)
        except _DAMAGE as error:
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            made = [{"title": heading, "damage": reason}]
        for number, section in enumerate(made):
            sections.append({**section, "id": f"part-{len(sections)}"})
            if number == 0 or heading == "Curves":  # of many of a kind the first is enough
                title = heading if len(made) > 1 and heading != "Curves" else section["title"].partition(":")[0]
                contents.append({"id": sections[-1]["id"], "title": title})
    title = " / ".join(run.name for run in runs)
    colours = "".join(f".c{i} {{ stroke: {c}; }} i.c{i} {{ background: {c}; }}\n" for i, c in enumerate(COLOURS))
    # Tokens and epoch of the steps of each run, by which a curve can be drawn instead.
    axes: list[dict[str, str]] = []
    for one in runs:
        lines = [line for line in one.lines if _is_number(line.get("tokens")) and _is_number(line.get("epoch"))]
        kept = lines[:: -(-len(lines) // POINTS) or 1] + lines[-1:]
        columns = {f"{key}s": " ".join(json.dumps(line[key]) for line in kept) for key in ("step", "epoch")}
        axes.append({"run": one.name, **columns, "tokens": " ".join(json.dumps(line["tokens"]) for line in kept)})
    return web_page.render(
        "report.html.jinja",
        f"{title}: report",
        _STYLE + colours,
        script,
        refresh_s=refresh_s,
        axes=axes,
        eyebrow="Report",
        heading=title,
        runs=legend,
        problems=[f"{run.name}: {problem}" for run in runs for problem in run.problems],
        sections=sections,
        contents=contents,
        width=WIDTH,
        height=HEIGHT,
    )


def _colour(run: int) -> str:
    return f"c{run % len(COLOURS)}"


# --- curves


def _drawn(runs: Sequence[RunData]) -> list[str]:
    """Returns the metrics that are not always 0."""
    keys = list(dict.fromkeys(key for run in runs for line in run.lines for key in line if key not in _AXES))
    return [key for key in keys if is_shown(key) and any(value for run in runs for _, value in run.curve(key))]


def _charts(runs: Sequence[RunData]) -> list[Section]:
    grouped: dict[str, list[Any]] = {name: [] for name in ("Training", *_GROUPS)}
    drawn = _drawn(runs)
    for key in drawn:
        both = [key, f"eval_{key}"] if key in _WITH_HELD_OUT and f"eval_{key}" in drawn else [key]
        of = key.removeprefix("eval_")
        if of == key or of not in _WITH_HELD_OUT or of not in drawn:
            name = next((name for name, belongs in _GROUPS.items() if belongs(key)), "Training")
            grouped[name].append(_chart(both, runs))
    shown = [{"title": name, "charts": charts, "folded": name in _FOLDED} for name, charts in grouped.items() if charts]
    return sorted(shown, key=lambda section: section["folded"])


def _chart(keys: Sequence[str], runs: Sequence[RunData]) -> dict[str, Any]:
    """Returns a curve for each run and key, in SVG units, with the range and the run's best step."""
    owners = [(i, run, key) for key in keys for i, run in enumerate(runs)]
    curves = [run.curve(key) for _, run, key in owners]
    points = [point for curve in curves for point in curve if math.isfinite(point[1])]
    low, high = min(y for _, y in points), max(y for _, y in points)
    first, last = min(x for x, _ in points), max(x for x, _ in points)

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - first) / (last - first) if last > first else 0.5
        up = (y - low) / (high - low) if high > low else 0.5
        return round(across * WIDTH, 2), round(HEIGHT - up * HEIGHT, 2)

    drawn = []
    for (i, run, key), curve in zip(owners, curves, strict=True):
        if not curve:
            continue
        every = -(-len(curve) // POINTS)
        kept = [p for n, p in enumerate(curve) if (n % every == 0 or n == len(curve) - 1) and math.isfinite(p[1])]
        places = [place(x, y) for x, y in kept]
        if len(places) == 1:  # a single point would be invisible
            ((x, y),) = places
            places = [(x - 4, y), (x + 4, y)]
        best = None
        if key == keys[0] and run.best_step is not None and first <= run.best_step <= last:
            best = {"x": place(run.best_step, low)[0], "step": run.best_step}
        line = " ".join(f"{x},{y}" for x, y in places)
        steps, data = (" ".join(json.dumps(point[n]) for point in kept) for n in (0, 1))
        names = {"run": run.name, "key": key, "colour": _colour(i), "best": best, "is_held_out": key != keys[0]}
        drawn.append({**names, "points": line, "steps": steps, "data": data})
    # Which run, and which of two curves, a number belongs to is said wherever there is more than one.
    ends = []
    for (_, run, key), curve in zip(owners, curves, strict=True):
        words = [*([run.name] if len(runs) > 1 else []), *([key] if len(keys) > 1 else [])]
        ends += [" ".join([*words, _short(curve[-1][1])])] if curve else []
    heights = [_short(y) for y in (high, (low + high) / 2, low)]
    title = " and ".join(keys)
    return {"key": title, "ends": ", ".join(ends), "heights": heights, "first": first, "last": last, "curves": drawn}


# --- tables


def _summary(runs: Sequence[RunData]) -> list[Section]:
    """Returns what one asks of a run first: how far it is, its best evaluation, how fast it was."""
    headlines = [_headline_rows(run) for run in runs]
    of_any = dict.fromkeys(key for rows in headlines for key in rows)  # a run without one has an empty cell
    columns = list[dict[str, Any]]()
    for run, headline in zip(runs, headlines, strict=True):
        evaluations, losses = run.curve("eval_loss"), run.curve("loss")
        best = min(evaluations, key=lambda point: point[1]) if evaluations else None
        seconds = [line["step_s"] for line in run.lines if _is_number(line.get("step_s"))]
        speeds = sorted(value for _, value in run.curve("tokens_per_s"))
        shown = {
            "status": run.status.get("status"),
            "steps": f"{losses[-1][0] if losses else 0:,} of {run.status.get('steps', '?')}",
            "best eval_loss": f"{_short(best[1])} at step {best[0]}" if best else None,
            "last loss": _short(losses[-1][1]) if losses else None,
            **of_any,
            **headline,
            "tokens": f"{int(run.curve('tokens')[-1][1]):,}" if run.curve("tokens") else None,
            "tokens per second, median": _short(speeds[len(speeds) // 2]) if speeds else None,
            "time of steps": readable_hours(sum(seconds) / 3600) if seconds else None,
            "price": run.price,
        }
        columns.append(shown)
    kept = [row for row in _rows(columns) if any(value is not None for value in row[1:])]
    return [_table("Summary", ["", *(run.name for run in runs)], kept)]


def _headline_rows(run: RunData) -> dict[str, str]:
    """Returns what the objective is about, such as a reward: its last value, and the best one of held-out data."""
    rows = {f"last {key}": _short(curve[-1][1]) for key in HEADLINES if (curve := run.curve(key))}
    for key in EVALUATIONS:
        if key != "eval_loss" and (curve := run.curve(key)):
            step, value = max(curve, key=lambda point: point[1])
            rows[f"best {key}"] = f"{_short(value)} at step {step}"
    return rows


def _short(value: float, digits: int = 4) -> str:
    """
    >>> _short(15718.3), _short(0.00012345, 3), _short(2.93e-8)
    ('15,720', '0.000123', '2.93e-08')
    """
    return f"{float(f'{value:.{digits}g}'):,.10g}"


def _last_values(runs: Sequence[RunData]) -> list[Section]:
    rows: list[list[Any]] = []
    for key in _drawn(runs):
        curves = [run.curve(key) for run in runs]
        rows.append([key, *(curve[-1][1] if curve else None for curve in curves)])
    return [_table("Last values", ["", *(run.name for run in runs)], rows)]


def _recipes(runs: Sequence[RunData]) -> list[Section]:
    if len(runs) == 1:
        return []
    rows = [row for row in _rows([run.recipe for run in runs]) if any(value != row[1] for value in row[2:])]
    return [_table("Differences of their recipes", ["key", *(run.name for run in runs)], rows, exact=True)]


def _plans(runs: Sequence[RunData]) -> list[Section]:
    settled = [{key: run.plan[key] for key in run.plan if key not in ("predicted", "measured")} for run in runs]
    rows = sorted(_rows(settled), key=lambda row: all(value == row[1] for value in row[2:]))  # what differs first
    return [_table("Plan", ["", *(run.name for run in runs)], rows)]


def _comparisons(runs: Sequence[RunData]) -> list[Section]:
    """Returns planned and measured numbers: totals of the last line, by its epochs."""
    tables = []
    for run in runs:
        plan, rows = run.plan, list[list[Any]]()
        if run.lines and "steps" in plan:
            rows.append(["steps", plan["steps"], run.lines[-1]["step"]])
        predicted, measured = (_flat(_section(plan, side)) for side in ("predicted", "measured"))
        rows += [[key, predicted[key], measured[key]] for key in measured if key in predicted]
        line = next((line for line in reversed(run.lines) if line.get("epoch") and _is_number(line.get("tokens"))), {})
        for key in ("tokens", "supervised_tokens"):
            if f"{key}_per_epoch" in plan and _is_number(line.get(key)) and _is_number(line["epoch"]):
                rows.append([f"{key} per epoch", plan[f"{key}_per_epoch"], round(line[key] / line["epoch"])])
        if rows:
            tables.append(_table(f"Planned and measured: {run.name}", ["", "planned", "measured"], rows))
    return tables


def _tasks(runs: Sequence[RunData]) -> list[Section]:
    fields = [f"{name}{end}" for name in ("base", "trained", "difference") for end in ("", "_stderr")]
    fields = ["rows", *fields, "step", "fewshot", "limit"]
    titles = [title for one in ("base", "trained", "trained - base") for title in (one, "± standard error")]
    titles = ["run, task", "rows", *titles, "step", "fewshot", "limit"]
    scores = [(run, name, score) for run in runs for name, score in run.evaluated.items()]
    rows = [[f"{run.name}: {name}", *(score.get(field) for field in fields)] for run, name, score in scores]
    return [_table("Tasks", titles, rows)] if rows else []


def _exports(runs: Sequence[RunData]) -> list[Section]:
    titles = ["export", "format", "passed", "KL mean", "KL max", "same likeliest token", "same greedy text"]
    fields = ("format", "passed", "kl_mean", "kl_max", "top1", "greedy")
    exports = [(run, name, figures) for run in runs for name, figures in run.verified.items()]
    rows = [[f"{run.name}/{name}", *(figures.get(field) for field in fields)] for run, name, figures in exports]
    return [_table("Exports compared with their runs", titles, rows)] if rows else []


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(values, dict):
        return {prefix: values}
    return {
        k: v for key, value in values.items() for k, v in _flat(value, f"{prefix}.{key}" if prefix else key).items()
    }


def _rows(columns: Sequence[dict[str, Any]]) -> list[list[Any]]:
    """Returns a row for each key of nested dicts, with its value in each."""
    flat = [_flat(column) for column in columns]
    return [[key, *(column.get(key) for column in flat)] for key in dict.fromkeys(key for one in flat for key in one)]


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], exact: bool = False) -> Section:
    """Returns a table; the first value of a row is its name. Numbers that are no integers have four digits, unless
    exact."""

    def text(value: Any) -> str:
        if isinstance(value, float) and math.isfinite(value) and not exact:
            value = float(f"{value:.4g}")
        return "–" if value is None else value if isinstance(value, str) else json.dumps(value)

    shown = []
    for name, *values in rows:
        texts = [text(value) for value in values]
        shown.append((name, [(text, isinstance(x, int | float)) for text, x in zip(texts, values, strict=True)]))
    return {"title": title, "columns": columns, "rows": shown}


# --- examples and answers


def _examples(runs: Sequence[RunData]) -> list[Section]:
    """Returns the first training examples of each run, once for runs that share them."""
    alike: dict[str, list[RunData]] = {}
    for run in runs:
        alike.setdefault(json.dumps(run.examples), []).append(run)
    sections: list[Section] = []
    for group in alike.values():
        objective, examples = _section(group[0].recipe, "objective").get("name", "sft"), list[Any]()
        for example in group[0].examples:
            try:
                names = sequence_names(objective, len(example["sequences"]))
                sequences = []
                for name, one in zip(names, example["sequences"], strict=True):
                    begins = (0, one["tokens"] - len(one["pieces"][-1]))
                    pieces = [
                        tokens_html([Token(*token) for token in piece], begin)  # as `inspect` shows them
                        for piece, begin in zip(one["pieces"], begins, strict=False)
                    ]
                    place, counts = visible(f"{example['path']}:{example['row']}"), ("tokens", "supervised")
                    shown = {"place": place, "name": name, "pieces": pieces, **{key: f"{one[key]:,}" for key in counts}}
                    sequences.append({**shown, "left_out": one["left_out"]})
                examples.append(sequences)
            except _DAMAGE:
                examples.append([])
        if examples:
            title = f"First training examples: {', '.join(run.name for run in group)}"
            sections.append({"title": title, "examples": examples})
    return sections


def _answers(runs: Sequence[RunData]) -> list[Section]:
    """Returns a table for each prompt that every evaluation answers: its answers over time, for each run."""
    prompts: dict[str, list[list[Any]]] = {}
    questions: dict[str, str] = {}  # of each prompt, without the chat template
    pictures: dict[str, Path] = {}
    for run in runs:
        every = max(1, -(-len(run.generations) // ANSWERED))
        for entry in [*run.generations[:-1:every], *run.generations[-1:]]:
            rows, files = entry["rows"], entry.get("pictures")
            files = files if isinstance(files, list) and len(files) == len(rows) else [None] * len(rows)
            asked = entry.get("questions")
            if isinstance(asked, list) and len(asked) == len(rows):
                questions |= {row[0]: one for row, one in zip(rows, asked, strict=True) if isinstance(one, str)}
            for (prompt, output, expected), file in zip(rows, files, strict=True):
                answers = prompts.setdefault(prompt, [["expected", expected, ""]])
                answers.append([f"{run.name}, step {entry['step']}", output, output == expected])
                if isinstance(file, str):
                    pictures[prompt] = run.folder / file
    sections = []
    for number, (prompt, rows) in enumerate(prompts.items(), 1):
        path = pictures.get(prompt)
        picture = base64.b64encode(path.read_bytes()).decode() if path is not None and path.is_file() else ""
        table = _table(f"Answers over time {number}", ["", "answer", "equal"], rows)
        sections.append({**table, "prompt": questions.get(prompt, prompt), "picture": picture})
    return sections


def _samples(runs: Sequence[RunData]) -> list[Section]:
    """Returns sampled answers with their rewards, for each run that samples."""
    return [{"title": f"Samples: {run.name}", "samples": run.samples} for run in runs if run.samples]


_PARTS: dict[str, Callable[[Sequence[RunData]], list[Section]]] = {
    "Summary": _summary,
    "Curves": _charts,
    "Samples": _samples,
    "Answers over time": _answers,
    "Recipes": _recipes,
    "Tasks": _tasks,
    "Exports": _exports,
    "Examples": _examples,
    "Last values": _last_values,
    "Plan": _plans,
    "Planned and measured": _comparisons,
}
