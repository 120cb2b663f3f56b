"""Every mistake in `rewards` has its message: in the recipe by file and line, in what it names when rewards start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from completions import completion, reward

from finetune.errors import UserError
from finetune.features import load_recipe
from finetune.recipe import RecipeError
from finetune.recipe.objective_settings import OBJECTIVE_SECTIONS
from finetune.rl.rewards.scoring import Rewards

RECIPE = """run: {{name: a}}
model: {{name: org/model}}
mode: full
data: {{train: [{{path: a.jsonl, format: messages}}], max_length: 64}}
batch: {{rows: 8}}
optimizer: {{lr: 1e-4}}
train: {{epochs: 1}}
rewards:
{rewards}
"""
TAKES_NONE = "`objective.name: sft` takes no rewards, only `grpo`: remove this"
JUDGE = "judge: http://host/v1, model: m"

IN_THE_RECIPE = {  # rewards, one a line: problem with the place that `:9` is for the first
    "name: exactmatch": ":9: rewards[0].name: expected 'exact_match', 'number', 'boxed', 'regex', 'json_schema', "
    "'length', 'tests' or 'environment', got \"exactmatch\" (text); did you mean `exact_match`?",
    "weigth: 1, name: number": ":9: rewards[0].weigth: unknown key; did you mean `weight`?",
    "name: number, weight: heavy": ':9: rewards[0].weight: expected a number, got "heavy" (text)',
    "name: number, weight: .nan": ":9: rewards[0].weight: expected a finite number, got nan",
    "name: number, weight: 0": ":9: rewards[0].weight: is 0, so the reward has no effect: remove the reward",
    "name: number, on_failure: .inf": ":9: rewards[0].on_failure: expected a finite number, got inf",
    "name: number, seconds: 0": ":9: rewards[0].seconds: expected a number > 0, got 0",
    "name: number, processes: 0": ":9: rewards[0].processes: expected a number >= 1, got 0",
    "name: number, metric: a/b": ":9: rewards[0].metric: expected letters, digits, `.`, `_` and `-`, starting with a "
    'letter or digit, got "a/b" (text)',
    "weight: 1": ":9: rewards[0]: a reward is one of `name`, `file`, `reward_model` and `judge`, and this has none",
    "name: number, judge: http://host/v1": ":9: rewards[0]: a reward is one of `name`, `file`, `reward_model` and "
    "`judge`, and this has `name` and `judge`: keep one",
    "name: number}\n  - {name: number, weight: 2": ":10: rewards[1].metric: rewards[0] is called 'number' as well: "
    "give one of them a `metric`",
    "name: number, pattern: a": ":9: rewards[0].pattern: has no effect on `number`, only on `exact_match` and `regex` "
    "and `judge`: remove it",
    "name: number, function: f": ":9: rewards[0].function: has no effect on `number`, only on `file`: remove it",
    "name: length, target: 8, model: m": ":9: rewards[0].model: has no effect on `length`, only on `judge`: remove it",
    "name: length": ":9: rewards[0]: `length` needs `target: 512`, the tokens that cost nothing",
    "name: length, target: 0": ":9: rewards[0].target: expected a number >= 1, got 0",
    "name: regex": ":9: rewards[0]: `regex` needs `pattern: '^<answer>.+</answer>$'`",
    "name: regex, pattern: '('": ":9: rewards[0].pattern: is not a valid regular expression: missing ), unterminated "
    "subpattern at position 0",
    "name: regex, pattern: ''": ":9: rewards[0].pattern: is empty, so it is found in every text: give a pattern",
    "name: exact_match, pattern: a": ":9: rewards[0].pattern: needs a group for the answer, such as `#### (.+)`",
    "name: json_schema": ":9: rewards[0]: `json_schema` needs `answer_schema: {type: object}`, or the path of a schema",
    "name: boxed": ":9: rewards[0].on_failure: sympy needs longer than `seconds` for some answers, such as towers of "
    "powers: say what they get, such as `on_failure: 0.0`",
    "name: tests, memory_mb: 8": ":9: rewards[0].memory_mb: expected a number >= 64, got 8",
    "name: tests, partial: 1": ":9: rewards[0].partial: expected true or false, got 1",
    "file: rewards.py": ":9: rewards[0]: `file` needs `function: correct`, the function in it",
    "reward_model: runs/a, seconds: 1": ":9: rewards[0].seconds: has no effect on `reward_model`, which scores in the "
    "run's own process: remove it",
    "judge: http://host/v1": ":9: rewards[0]: `judge` needs `model: NAME`, as the server calls it",
    "judge: host/v1, model: m": ":9: rewards[0].judge: expected http://HOST:PORT/v1, or https://",
    "judge: 'https://me:secret@host/v1', model: m": ":9: rewards[0].judge: must not hold a user, a password or a "
    "query: name the variable that has the key, `key: NAME`",
    "judge: 'https://host/v1?key=secret', model: m": ":9: rewards[0].judge: must not hold a user, a password or a "
    "query: name the variable that has the key, `key: NAME`",
    f"{JUDGE}, prompt: 'Rate {{reference}}.'": ":9: rewards[0].prompt: lacks {completion}, so every completion would "
    "be judged alike; there are {prompt}, {completion}, {reference}",
    f"{JUDGE}, scale: [5, 1]": ":9: rewards[0].scale: is the lowest and the highest number, and 5 is not below 1",
    f"{JUDGE}, scale: [1]": ":9: rewards[0].scale: expected 2 items, got a list of 1",
    f"{JUDGE}, pattern: '\\d'": ":9: rewards[0].pattern: needs a group for the answer, such as `#### (.+)`",
    f"{JUDGE}, key: sk-secret": ":9: rewards[0].key: expected the name of an environment variable in capitals, such as "
    "JUDGE_KEY; not the key itself",
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "recipe.yaml"


def told(error: RecipeError, path: Path) -> list[str]:
    """Returns the problems of a message, without its heading and the path."""
    return [line.strip().removeprefix(str(path)) for line in str(error).splitlines()[1:]]


@pytest.mark.parametrize("written", IN_THE_RECIPE, ids=lambda text: text.replace("\n", " "))
def test_a_mistake_in_the_recipe(written: str, path: Path) -> None:
    path.write_text(RECIPE.format(rewards=f"  - {{{written}}}"))
    with pytest.raises(RecipeError) as error:
        load_recipe(path)
    problems = [one for one in told(error.value, path) if TAKES_NONE not in one]
    assert problems == [IN_THE_RECIPE[written]]
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ("rewards: {name: number}", "rewards: expected a list, got a section"),
        ("rewards: number", 'rewards: expected a list, got "number" (text)'),
        ("rewards: [number]", 'rewards[0]: expected a section, got "number" (text); did you mean `rewards[0].name`?'),
        ("rewards: null", "rewards: expected a list, got null; `rewards=[]` on the command line removes them"),
        ("reward: [{name: number}]", "reward: unknown key; did you mean `rewards`?"),
        ("rewards: [{name: number}]", f"rewards: {TAKES_NONE}"),
    ],
)
def test_a_mistake_in_the_list(written: str, problem: str, path: Path) -> None:
    path.write_text(RECIPE.partition("rewards:")[0].format() + written + "\n")
    with pytest.raises(RecipeError) as error:
        load_recipe(path)
    assert told(error.value, path) == [f":8: {problem}"]


def test_good_rewards_break_no_rule_but_that_no_objective_takes_them(path: Path) -> None:
    path.write_text(
        RECIPE.format(
            rewards="  - {name: exact_match, pattern: '#### (.+)', weight: -1}\n"
            "  - {file: r.py, function: f, seconds: 5}\n"
            f"  - {{{JUDGE}, scale: [1, 5], key: JUDGE_KEY}}\n  - {{reward_model: runs/a, metric: taste}}\n"
            "  - {name: tests, column: unit_tests, partial: true}\n  - {name: length, target: 512, margin: 128}"
        )
    )
    with pytest.raises(RecipeError) as error:
        load_recipe(path)
    assert told(error.value, path) == [f":8: rewards: {TAKES_NONE}"]
    assert [name for name, one in OBJECTIVE_SECTIONS.items() if one.takes_rewards] == ["grpo"]


# --- what the recipe names

FILES = {  # source of rewards.py, or None: message behind `rewards[0] (f): `
    "none": (None, "no such file: {path}. Relative paths start at {cwd}. Fix: correct the path"),
    "folder": ("folder", "{path} cannot be read: Is a directory"),
    "syntax": ("x = 1\ndef f(:\n", "{path}:2: "),
    "import": ("import os\n\nimport nonesuch\n", "{path}:3: ModuleNotFoundError: No module named 'nonesuch'"),
    "raises": ("def g():\n    raise ValueError('no')\ng()\n", "{path}:2: ValueError: no"),
    "exits": ("import sys\nsys.exit('bye')\n", "{path}:2: SystemExit: bye"),
    "ends": (
        "import os\nprint('before')\nos._exit(3)\n",
        "ended its process (status 3) while it was loaded. Fix: correct it, so that it loads within 120 s and does not "
        "end its process\nIt printed:\nbefore",
    ),
    "null byte": ("x\0", "{path}"),
    "no function": ("def g(completion): return 1\nimport os\n", "{path} has no function `f`; it has g"),
    "empty": ("", "{path} has no function `f`; it has none"),
    "number": ("f = 3\n", "{path}: `f` is int, not a function"),
    "async": (
        "async def f(completion): return 1\n",
        "{path}: `f` is an `async def`, and nothing awaits it. Fix: write it",
    ),
    "unknown": (
        "def f(completion, answer): return 1\n",
        "`f` asks for `answer`, which is not given. Fix: ask only for completion, reference, row, prompt, messages, "
        "num_tokens, is_truncated; a column of the row is `row['answer']`",
    ),
    "completions": (
        "def f(completions): return 1\n",
        "`f` asks for `completions`, which is not given. It is called for one answer, not for lists as TRL does. Fix: ",
    ),
    "TRL's": (
        "def f(prompts, completions, **kwargs): return [1.0 for _ in completions]\n",
        "`f` asks for `prompts`, which is not given. It is called for one answer, not for lists as TRL does. Fix: ask",
    ),
    "nothing": ("def f(): return 1\n", "`f` asks for nothing, so it cannot tell answers apart. Fix: let it"),
    "positional": ("def f(completion, /): return 1\n", "`f` takes `completion` by position only; arguments are given"),
    "no signature": (
        "import builtins\nf = builtins.min\n",
        "`min` does not say which arguments it takes. Fix: wrap it in a",
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_a_file_that_cannot_be_used(case: str, tmp_path: Path) -> None:
    source, message = FILES[case]
    path = tmp_path / "rewards.py"
    if source == "folder":
        path.mkdir()
    elif source is not None:
        path.write_bytes(source.encode())
    with pytest.raises(UserError) as error:
        Rewards((reward(file=str(path), function="f"),), None).__enter__()
    assert str(error.value).startswith(f"rewards[0] (f): {message.format(path=path, cwd=Path.cwd())}")
    assert "child.py" not in str(error.value)


SCHEMAS: dict[str, tuple[Any, str]] = {
    "not JSON": ("{", "answer_schema: {path} is not JSON: Expecting property name"),
    "a list": ("[]", "{path}: a JSON Schema is an object, not list"),
    "no type": (
        '{"type": "integre"}',
        "{path}: not a JSON Schema: $.type: 'integre' is not valid under any of the given",
    ),
    "none": (None, "answer_schema: no such file: {path}. Relative paths start at {cwd}. Fix: correct the path"),
}


@pytest.mark.parametrize("case", SCHEMAS)
def test_a_schema_that_cannot_be_used(case: str, tmp_path: Path) -> None:
    content, message = SCHEMAS[case]
    path = tmp_path / "schema.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError) as error:
        Rewards((reward(name="json_schema", answer_schema=str(path)),), None).__enter__()
    assert str(error.value).startswith(f"rewards[0] (json_schema): {message.format(path=path, cwd=Path.cwd())}")


def test_a_package_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an environment without the extra: neither package is found on the path of the processes."""
    import sys

    from finetune.rl.rewards import builtin

    kept = [entry for entry in sys.path if "site-packages" not in entry]
    monkeypatch.setattr(sys, "path", [*kept, str(Path(builtin.__file__).parents[2])])
    for keys, package in (
        (
            {"name": "boxed", "on_failure": 0.0},
            "`boxed` needs the package math-verify. Fix: pip install 'math-verify>=0.8'",
        ),
        (
            {"name": "json_schema", "answer_schema": {}},
            "`json_schema` needs the package jsonschema. Fix: pip install 'jsonschema>=4.23'",
        ),
    ):
        with pytest.raises(UserError) as error:
            Rewards((reward(**keys),), None).__enter__()
        assert str(error.value) == f"rewards[0] ({keys['name']}): {package}"


# --- rows

ROWS = {
    "no reference": (
        completion("a", None),
        {"name": "exact_match"},
        "the row has no reference: its last turn is not an",
    ),
    "no number": (completion("a", "none"), {"name": "number"}, "the reference has no number"),
    "no pattern": (
        completion("a"),
        {"name": "exact_match", "pattern": "#(.)"},
        "`pattern` (#(.)) does not occur in the",
    ),
    "no column": (
        completion("a", price=1, when=2),
        {"name": "tests"},
        "the row has no column `tests` with tests; it has price, when",
    ),
    "no tests": (
        completion("a", t=3),
        {"name": "tests", "column": "t"},
        "column `t`: expected Python code, or a list of",
    ),
    "reference in a schema": (
        completion("1"),
        {"name": "json_schema", "answer_schema": {"$ref": "https://elsewhere.example/schema"}},
        "the schema's reference 'https://elsewhere.example/schema' leads nowhere; only the schema itself is read",
    ),
}


@pytest.mark.parametrize("case", ROWS)
def test_a_row_that_cannot_be_judged(case: str) -> None:
    row, keys, message = ROWS[case]
    with Rewards((reward(**keys),), None) as rewards, pytest.raises(UserError) as error:
        rewards.score([row])
    assert str(error.value).startswith(f"rewards[0] ({keys['name']}): completion 1 of 1: {message}")
