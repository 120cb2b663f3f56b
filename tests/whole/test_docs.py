"""The documentation names only what exists: keys, files, commands and their options, messages, examples that load."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer.main
import yaml
from conftest import script
from repository import ROOT
from rich.console import Console

from finetune.data.formats.converters import FORMATS
from finetune.data.formats.detect import detect_format, parse_row
from finetune.desk.cli import app
from finetune.desk.setup.other_tools import write_converted
from finetune.features import load_recipe
from finetune.objectives.own import Documents, load_own
from finetune.recipe import Recipe
from finetune.recipe.load import key_is_known
from finetune.recipe.objective_settings import Own

FILES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "AGENTS.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in FILES}
NOTEBOOKS = {path.name: json.loads(path.read_text(encoding="utf-8")) for path in (ROOT / "docs").rglob("*.ipynb")}
PAGES |= {name: "\n".join("".join(cell["source"]) for cell in one["cells"]) for name, one in NOTEBOOKS.items()}
GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
README, CONTRIBUTING = PAGES["README"], PAGES["CONTRIBUTING"]
LINKED = [*FILES, ROOT / "benchmarks" / "README.md"]
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]  (typer says Command, it is a group)
OURS = "finetune|recipes|scripts|tests|accelerate_configs|docs|benchmarks"  # folders of the repository
PLACEHOLDERS = ("recipes/mine/",)  # what a reader would make
WRITTEN_BY_RUNS = {"summary.md"}
MODULES = {"model.layers"}  # paths in a model, which begin as the section of a recipe
LIBRARIES_SAY = {"CalledProcessError", "ChildFailedError"}  # not messages of ours

every_page = pytest.mark.parametrize("page", PAGES.values(), ids=PAGES.keys())


@every_page
def test_keys_exist(page: str) -> None:
    sections = "|".join(Recipe.model_fields)
    named = set(re.findall(rf"(?<![\w/.-])((?:{sections})\.[a-z_.]*[a-z_])(?![\w/(-])", page))
    keys = {key for key in named - MODULES if not key.endswith((".yaml", ".jsonl", ".py", ".md"))}
    assert sorted(key for key in keys if not key_is_known(key)) == []


@every_page
def test_files_exist(page: str) -> None:
    named = set(re.findall(rf"(?<![\w<.-])(?<!\w/)(?:\./)?((?:{OURS})/[\w./-]*\w/?)(?![\w<*-])", page))
    named |= set(re.findall(r"`(\w+\.(?:md|toml|txt|sh|py|svg))`", page)) - WRITTEN_BY_RUNS
    wanted = {name for name in named if not name.startswith(PLACEHOLDERS)}
    assert sorted(name for name in wanted if not (ROOT / name).exists()) == []


@every_page
def test_commands_and_options_exist(page: str) -> None:
    for command, rest in re.findall(r"-m finetune (\w+)([^\n`]*)", page):
        assert command in COMMANDS
        if command == "launch" and "-m finetune" in rest:
            continue  # options of accelerate or torchrun
        group = getattr(COMMANDS[command], "commands", None)  # such as `cache`, whose commands are list and clean
        named = group[rest.split()[0]] if group and rest.split() else COMMANDS[command]
        known = {option for parameter in named.params for option in parameter.opts}
        words = rest.partition("#")[0]
        assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", words)) <= known, f"{command}{rest}"


def test_overrides_in_commands_have_keys() -> None:
    for page in PAGES.values():
        for rest in re.findall(r"-m finetune (?:train|launch) (?!.*-m finetune)([^\n`]*)", page):
            keys = re.findall(r"(?<!\S)([a-z][\w.]*)=", rest)
            assert [key for key in keys if not key_is_known(key)] == []


def commands_of(page: str) -> Iterator[list[str]]:
    """Yields the words of each command of finetune that a page shows, without `python -m finetune`."""
    for line in re.findall(r"python -m finetune ([^\n`]+)", page.replace("\\\n", " ")):
        yield shlex.split(line, comments=True)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the shipped recipes, and those that guides show as files."""
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "recipes", folder / "recipes")
    (folder / "recipes" / "mine").mkdir()
    for path in GUIDES:
        for name, text in re.findall(r"```yaml\n# recipes/mine/([\w-]+\.yaml)\n(.+?)```", PAGES[path.stem], re.DOTALL):
            written = folder / "recipes" / "mine" / name
            assert not written.exists(), f"{name} is shown twice"
            written.write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.stem)
def test_guides_show_commands_that_parse_and_recipes_that_load(path: Path, checkout: Path) -> None:
    commands = [words for words in commands_of(PAGES[path.stem]) if len(words) > 1]
    assert len(commands) >= 5
    group = typer.main.get_command(app)
    for words in commands:
        context = COMMANDS[words[0]].make_context(words[0], words[1:], parent=group.make_context("finetune", words))
        recipe, *overrides = context.params.get("words") or [
            str(context.params.get("recipe")),
            *(context.params.get("overrides") or []),
        ]
        if recipe.startswith("recipes/"):
            load_recipe(checkout / recipe, overrides)


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.stem)
def test_guides_show_rows_of_a_format(path: Path) -> None:
    for block in re.findall(r"```json\n(.+?)```", PAGES[path.stem], re.DOTALL):
        for line in block.splitlines():
            assert detect_format([json.loads(line)]).columns is None  # every name is the format's own


def test_configs_of_other_tools_that_are_shown_become_the_recipes_that_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    faq = {"file_name": "faq.jsonl", "formatting": "sharegpt", "columns": {"messages": "messages"}, "tags": tags}
    Path("dataset_info.json").write_text(json.dumps({"faq": faq}), encoding="utf-8")
    page = PAGES["coming-from-other-tools"]
    shown = dict(re.findall(r"```yaml\n# from (\S+)\n(.+?)```", page, re.DOTALL))
    theirs = dict(re.findall(r"```(?:yaml|python)\n# (\w+\.(?:yaml|py))\n(.+?)```", page, re.DOTALL))
    assert len(shown) == 5
    for name, text in shown.items():
        Path(name).write_text(theirs[name], encoding="utf-8")
        ours = write_converted(name, Path(f"ours-{Path(name).stem}.yaml"), None, 1, (), Console(quiet=True))
        assert text in ours.read_text(encoding="utf-8")


def test_the_own_objective_that_is_shown_passes_its_trial(tmp_path: Path) -> None:
    (file, text), *others = re.findall(r"```python\n# (\w+\.py)\n(.+?)```", PAGES["objectives"], re.DOTALL)
    (shown,) = re.findall(r"```yaml\n(objective: .+?)```", PAGES["objectives"], re.DOTALL)
    (tmp_path / file).write_text(text, encoding="utf-8")
    settings = yaml.safe_load(shown)["objective"]
    assert (settings["file"], others) == (file, [])
    own = load_own(Own(file=str(tmp_path / file), function=settings["function"]))
    assert dict(own.units) == {"objective": "sequences"}
    named = re.findall(r"^\| `(\w+)` \| ", PAGES["objectives"].partition("by name. Each")[2], re.MULTILINE)
    assert tuple(named[: len(Documents._fields)]) == Documents._fields


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_of_the_format(name: str) -> None:
    """Version 4.5: each cell has an id of its own, and one of code has outputs, none of them kept."""
    notebook = NOTEBOOKS[name]
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    for cell in notebook["cells"]:
        own = {"outputs", "execution_count"} if cell["cell_type"] == "code" else set()
        assert cell.keys() == {"cell_type", "id", "metadata", "source"} | own
        assert (cell.get("outputs", []), cell.get("execution_count")) == ([], None)


def test_tables_are_where_contributing_says() -> None:
    rows = re.findall(r"^\| [^|]+ \| (`[^|]+`) \| `([^|`]+\.py)` \|$", CONTRIBUTING, re.MULTILINE)
    assert len(rows) >= 7
    for names, path in rows:
        code = (ROOT / path).read_text(encoding="utf-8")
        missing = [name for name in re.findall(r"`(\w+)`", names) if not re.search(rf"^{name}\b", code, re.MULTILINE)]
        assert missing == []


def anchors(text: str) -> set[str]:
    """Returns the names that headings have as targets of links, on GitHub and on the site."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", LINKED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_links_lead_somewhere(path: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        name, _, anchor = link.partition("#")
        target = path if not name else (path.parent / name)
        if name.startswith(("https://", "http://")):
            continue
        if not target.exists() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            broken.append(link)
    assert broken == []


def test_made_pages_are_current() -> None:
    made = script("scripts/docs/make_docs.py")
    for path, text in made.pages().items():
        assert text == PAGES[path.stem], "what the code says has changed: python scripts/docs/make_docs.py"
    recipes = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "recipes").glob("*/*.yaml"))
    table = re.findall(r"\]\(\.\./\.\./(recipes/[^)]+)\)", PAGES["recipes"])
    assert sorted(table) == [name for name in recipes if "/base/" not in name and "/tasks/" not in name]


def test_every_key_has_its_place_on_the_page() -> None:
    named = re.findall(r"^##+ ([\w.]+)$", PAGES["recipe-keys"], re.MULTILINE)
    assert len(named) > 110
    assert len(set(named)) == len(named)
    assert [key for key in named if key != "extends" and not key_is_known(key)] == []


def test_the_site_has_every_page() -> None:
    listed = re.findall(r"^ +- ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    pages = script("scripts/docs/docs_pages.py").PAGES.values()
    docs = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(listed) == sorted([*pages, *docs])


def test_llms_txt_lists_every_page_by_its_title(tmp_path: Path) -> None:
    """The hook's part: a page's markdown lies beside it, here as its source."""
    hook, site = script("scripts/docs/docs_pages.py"), yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    shutil.copytree(ROOT / "docs", tmp_path, dirs_exist_ok=True)
    for source, page in hook.PAGES.items():
        shutil.copy(ROOT / source, tmp_path / page)
    hook.on_post_build(SimpleNamespace(**site | {"site_dir": str(tmp_path)}))
    text = (tmp_path / "llms.txt").read_text(encoding="utf-8")
    assert text.startswith("# finetune\n\n> Fine-tune language models")
    listed = {page: title for title, page in re.findall(r"^- \[(.+)\]\((.+)\)$", text, re.MULTILINE)}
    assert sorted(listed) == sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.md"))
    assert listed["reference/recipe-keys.md"] == "Recipe keys"


def test_the_site_fetches_nothing_from_elsewhere() -> None:
    """Its `offline` plugin adds a script of a CDN unless one of that name is given."""
    extra = re.search(
        r"^extra: \{polyfills: \[([\w/.-]+)\]\}$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert extra is not None
    assert "iframe-worker" in extra[1]
    assert "Permission is hereby granted" in (ROOT / "docs" / extra[1]).read_text(encoding="utf-8")


def test_parallelism_knows_every_accelerate_config() -> None:
    listed = set(re.findall(r"^\| `(\w+)` \| [^`|]*(?:`\w+`[^`|]*)* \|", PAGES["parallelism"], re.MULTILINE))
    assert {path.stem for path in (ROOT / "accelerate_configs").glob("*.yaml")} <= listed


@pytest.mark.parametrize("name", FORMATS)
def test_data_shows_a_row_of_every_format(name: str) -> None:
    row = re.search(rf"^\| `{name}` \| `(\{{.+\}})` \|", PAGES["data"], re.MULTILINE)
    assert row is not None
    parse_row(json.loads(row[1]), name)


def test_shown_recipe_loads(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "recipes" / "base", tmp_path / "base")
    path = tmp_path / "mine" / "lora.yaml"
    path.parent.mkdir()
    shown = re.search(r"```yaml\n# recipes/mine/lora.yaml\n(.+?)```", PAGES["recipes"], re.DOTALL)
    assert shown is not None
    path.write_text(shown[1], encoding="utf-8")
    recipe = load_recipe(path)
    assert (recipe.run.name, recipe.data.train[0].path) == ("my-lora", "data/train.jsonl")


def test_troubleshooting_quotes_messages_that_the_code_has() -> None:
    code = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "finetune").rglob("*.py")))
    cells = re.findall(r"^\| ([^|]+) \|", PAGES["troubleshooting"], re.MULTILINE)
    quoted = [text for cell in cells for text in re.findall(r"`([^`]+)`", cell)]
    assert len(quoted) >= 12
    assert [text for text in quoted if text not in code and text not in LIBRARIES_SAY] == []
