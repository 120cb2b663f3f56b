"""A few of the random inputs of scripts/proofs/fuzz.py, and traps that are too rare to be drawn."""

from __future__ import annotations

import stat
import tempfile
from pathlib import Path
from typing import Any

import fuzz
import pytest
import tiny
from conftest import finetune

from finetune import errors
from finetune.data.chat import template_check
from finetune.data.chat.template import Template
from finetune.data.chat.template_choice import resolve_template
from finetune.desk import cli
from finetune.errors import UserError
from finetune.features import load_recipe
from finetune.models.config import check_sizes, model_config
from finetune.recipe import RecipeError
from finetune.recipe.schema import Model


def test_random_inputs_are_read_or_refused(tmp_path: Path) -> None:
    counts = {"recipes": 150, "files": 100, "templates": 80}
    for kind, result in fuzz.fuzz(tmp_path, counts, seed=1).items():
        assert result.outcomes[True] > 3, kind  # else it tries one kind of mistake only
        assert result.outcomes[False] > 3, kind


LAUGHS = "a: &a [x, x, x]\n" + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in ["ab", "bc", "cd", "de"])
MERGED = LAUGHS.replace("[x, x, x]", "{x: 1}").replace("[", "{<<: [").replace("]", "]}")
TRAPS = {
    "1,500 levels": ("a: " + "[" * 1500 + "]" * 1500, "nested too deeply"),
    "1,500 sections": ("\n".join(" " * depth + "a:" for depth in range(1500)), "nested too deeply"),
    "a section merged into itself": ("a: &a {<<: *a}", "unknown key"),
    "a billion laughs": (LAUGHS * 3, "more than 10,000 values|duplicate"),
    "sections merged nine times": (MERGED, "unknown key|more than 10,000"),
    "20,000 unknown keys": ("".join(f"key{i}: 1\n" for i in range(20_000)), "more than 10,000 values"),
    "9,000 unknown keys": ("".join(f"key{i}: 1\n" for i in range(9_000)), r"and 8,95\d more problems"),
    "an empty float": ("run: !!float ''", "'' does not match its tag 'float'"),
    "a date that is none": ("run: !!timestamp x", "'x' does not match its tag 'timestamp'"),
    "bytes": ("run: !!binary eA==", "the tag .*binary' is not supported"),
    "NUL": ('extends: "a\\0b"', r"extends: has the character U\+0000"),
    "half a character": ('run: {dir: "\\ud800"}', r"run\.dir: has the character U\+D800"),
    "no character": ('run: {dir: "\\U01e99900"}', "not valid YAML: an escape that stands for no character"),
    "no character at all": ('run: {dir: "\\UFFFFFFFF"}', "not valid YAML: an escape that stands for no character"),
    "a long name": ("extends: " + "a" * 5000, r"extends: .*\.\.\.: File name too long"),
    "400 digits": ("optimizer: {lr: " + "1" * 400 + "}", "1{57}... is too large for an integer"),
    "5,000 digits": ("optimizer: {lr: " + "1" * 5000 + "}", "'1{56}... does not match its tag 'int'"),
    "a huge batch": ("batch: {rows: 1000000001}", "batch.rows: expected a number <= 1000000000"),
    "a beta of one": ("optimizer: {lr: 1, betas: [0.9, 1.0]}", r"betas\[1\]: expected a number < 1, got 1.0"),
}


@pytest.mark.parametrize("name", TRAPS)
@pytest.mark.timeout(60)
def test_traps_of_recipes(name: str, tmp_path: Path) -> None:
    text, message = TRAPS[name]
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=message) as caught:
        load_recipe(path)
    assert len(str(caught.value)) < 100_000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "calls itself without end"),
        ("{{ 'x' * 10000000000 }}", "makes a text of more than 10,000,000 characters"),
        ("{{ [0] * 10000000000 }}", "makes a text of more than 10,000,000 characters"),
        ("{{ 9 ** 9 ** 9 ** 9 }}", "a number that is too large"),
        ("{{ range(10 ** 6) }}", "Range too big"),
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "takes more than 3,000,000 steps",
        ),
    ],
)
def test_traps_of_templates(text: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_check, "CHECK_S", 1)
    try:
        (found,) = template_check.check_template(tiny.tokenizer(), Template(text, "t"))
    except UserError as error:
        found = str(error)
    assert message in found


@pytest.mark.parametrize("text", [tiny.CHATML, "x" * 5000, "a\nb"])
def test_a_template_that_was_pasted(text: str) -> None:
    with pytest.raises(UserError, match=r"is a template, not the name of one. Fix: save it as a \.jinja file"):
        resolve_template(text, tiny.tokenizer())


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"hidden_size": -3}, "is not a multiple of the number of attention heads"),
        ({"hidden_size": "abc"}, "expected int, got str"),
        ({"num_attention_heads": 0}, "by zero"),
        ({"num_hidden_layers": -1}, "expected 1 to 1,000, got -1"),
        ({"num_hidden_layers": 10**9}, "expected 1 to 1,000, got 1,000,000,000"),
        ({"intermediate_size": -5}, "negative dimension"),
        ({"hidden_size": 2 * 10**9}, "overflowed"),
    ],
)
def test_sizes_of_no_model(sizes: dict[str, Any], message: str) -> None:
    config = {**tiny.MODELS["llama"], **sizes}
    model = Model(config=config, tokenizer="x")

    def check() -> None:
        check_sizes(model, model_config(model))

    with pytest.raises(UserError, match=message):
        check()


def test_weights_that_make_a_billion_examples(recipe: dict[str, Any], write_recipe: Any) -> None:
    recipe["data"]["train"][0]["weight"] = 1e9
    done = finetune("check", write_recipe(recipe))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "make an epoch of 1.2e+11 examples. Fix: lower `weight`" in done.stderr


@pytest.mark.parametrize("has_run", [False, True])
def test_what_nobody_foresaw_is_one_line_and_a_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], has_run: bool
) -> None:
    """The log is the owner's alone, in the run's folder or that of temporary files, and has no credentials."""
    here, run, temporary = (tmp_path / name for name in ("here", "run", "tmp"))
    for folder in (here, run, temporary):
        folder.mkdir()

    def fails() -> None:
        raise RuntimeError("a fault\nof s3://me:pass@host/a and gs://b/c?X-Signature=abcd and hf://d?token=efgh")

    monkeypatch.chdir(here)
    monkeypatch.setattr(errors, "_folder", run if has_run else None)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(cli, "app", fails)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    assert not [*here.iterdir(), *(temporary if has_run else run).iterdir()]
    (log,) = (run if has_run else temporary).glob("finetune-error-*.log")
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    assert "Traceback" in log.read_text()
    (line,) = capsys.readouterr().err.splitlines()
    for secret in ("pass", "abcd", "efgh"):
        assert secret not in log.read_text() + line
    fault = "If no other process and no machine failed, this is a fault of finetune"
    assert line.startswith("error: RuntimeError: a fault of s3://***@host/a and gs://b/c?*** and hf://d?***. ")
    assert line.endswith(f"{fault}; the traceback is in {log}")
