"""`evaluate --head`: the acceptance of a head that predicts ahead is what the run's own evaluations measure, before and
after training."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mtp_bases
import pytest
import tiny
import yaml
from conftest import metrics, train_here
from rich.console import Console
from safetensors.torch import load_file
from usual import usual

from finetune.errors import UserError
from finetune.release.inference.evaluate import ACCEPTANCE, EvaluateOptions, Score, evaluate_runs, paired
from finetune.release.inference.head_acceptance import Drafts

LORA = ("mode=lora", "lora={rank: 4, targets: all-linear}", "optimizer.lr=5e-3")
# At both ends of the run, of weights that are far from where they were.
EVALUATED = ("evaluate={at_start: true, every_steps: 6}", "optimizer.lr=5e-3", "checkpoint.every_steps=3")
QUIET = Console(quiet=True)
Write = Callable[..., Path]


@pytest.fixture
def start(recipe: dict[str, Any], write_recipe: Write, tmp_path: Path) -> Callable[..., Path]:
    """Makes a base and a recipe that trains its head, and trains it."""

    def run(name: str, *settings: str, base: Path | None = None, mtp: str = "train") -> Path:
        base = base or mtp_bases.save_base(tmp_path, name)
        train_here(write_recipe({**recipe, "model": {"name": str(base), "mtp": mtp}}), *EVALUATED, *settings)
        return tmp_path / "runs" / "run"

    return run


def measured(run: Path, **options: Any) -> Score:
    (scores,) = evaluate_runs([run], EvaluateOptions((), head=True, **options), QUIET)
    assert {*scores} == {ACCEPTANCE}
    return scores[ACCEPTANCE]


CASES = [
    *(("deepseek_v3", LORA), ("glm4_moe", ()), ("glm4_moe", LORA), ("qwen3_5_moe_text", ()), ("qwen3_next", LORA)),
    *(("deepseek_v3", ()), ("qwen3_5_text", ("train.precision=bf16", *LORA))),
]


@pytest.mark.parametrize("case", usual(CASES, ("glm4_moe", LORA)))
def test_it_is_what_the_run_measured_before_and_after(case: tuple[str, tuple[str, ...]], start: Any) -> None:
    name, settings = case
    run = start(name, *settings)
    of_run = {line["step"]: line["eval_mtp_acceptance"] for line in metrics(run) if "eval_mtp_acceptance" in line}
    first, last = of_run[0], of_run[max(of_run)]
    assert first != last
    score = measured(run)
    within = 0.02 if "train.precision=bf16" in settings else 1e-9  # it is asked in bf16 all through, not by autocast
    assert (score.base, score.trained) == (pytest.approx(first, abs=within), pytest.approx(last, abs=within))
    assert score.base is not None
    assert score.difference == pytest.approx(score.trained - score.base, abs=1e-12)
    assert score.difference_stderr is not None
    written = json.loads((run / "evaluate.json").read_text(encoding="utf-8"))["scores"][ACCEPTANCE]
    assert (written["trained"], written["base"], written["rows"]) == (score.trained, score.base, score.rows)
    assert metrics(run)[-1]["eval_tasks/mtp/acceptance"] == score.trained
    assert ACCEPTANCE not in (run / "model" / "README.md").read_text(encoding="utf-8")
    of_checkpoint = measured(run, step=str(max(of_run)), base=False)
    assert of_checkpoint.trained == pytest.approx(last, abs=1e-9)
    assert of_checkpoint.base is None


@pytest.mark.long
@pytest.mark.parametrize("settings", [LORA, ()])
def test_a_kept_head_is_measured_as_it_is(settings: tuple[str, ...], start: Any) -> None:
    """The base's, beside a model that has changed: what `stale` means. The base's has learned, or it would draft
    nothing that the model accepts, before and after."""
    base = (run := start("qwen3_5_text", "train.max_steps=24")).rename(run.with_name("taught")) / "model"
    taught = measured(base.parent, base=False)
    score = measured(start("qwen3_5_text", *settings, base=base, mtp="keep"))
    assert score.base == pytest.approx(taught.trained, abs=1e-9)
    assert taught.trained > 0.1
    assert score.trained != score.base


@pytest.mark.long
@pytest.mark.parametrize("mode", ["full", "lora"])
def test_of_a_multimodal_base_it_is_the_text_part_s(
    mode: str, start: Any, recipe: dict[str, Any], tmp_path: Path
) -> None:
    base = tiny.save_multimodal(tmp_path, "qwen3_5")
    settings = tiny.MULTIMODAL["qwen3_5"]["text_config"]
    text = mtp_bases.save_base(tmp_path / "text", "qwen3_5_text", **settings)
    heads = {key: one for key, one in load_file(text / "model.safetensors").items() if key.startswith("mtp.")}
    mtp_bases.add_tensors(base, heads)
    run = start("qwen3_5", *(LORA if mode == "lora" else ()), base=base)
    of_run = [line["eval_mtp_acceptance"] for line in metrics(run) if "eval_mtp_acceptance" in line]
    score = measured(run)
    assert (score.base, score.trained) == (pytest.approx(of_run[0], abs=1e-9), pytest.approx(of_run[-1], abs=1e-9))


def test_models_without_a_head_that_can_be_measured(
    recipe: dict[str, Any], write_recipe: Write, start: Any, tmp_path: Path
) -> None:
    train_here(write_recipe(recipe), "train.max_steps=1")
    run = tmp_path / "runs" / "run"
    with pytest.raises(UserError, match=r"run has no head that can be measured\. The head of `llama` cannot be"):
        measured(run)
    with pytest.raises(UserError, match="nothing to measure"):
        evaluate_runs([run], EvaluateOptions(()), QUIET)
    settings = yaml.safe_load((run / "recipe.yaml").read_text(encoding="utf-8"))
    base = mtp_bases.save_base(tmp_path, "glm4_moe")
    pairs = {"train": [{"path": "pairs.jsonl", "format": "preference"}], "max_length": 64}
    for changes, problem in (
        ({"model": {"name": str(base), "mtp": "drop"}}, "`model.mtp: drop` removed it"),
        ({"model": {"name": str(base)}}, "It keeps copies of the base's embedding"),
        ({"objective": {"name": "reward"}, "data": pairs}, "scores texts"),
    ):
        (run / "recipe.yaml").write_text(yaml.safe_dump({**settings, **changes}), encoding="utf-8")
        with pytest.raises(UserError, match=problem):
            measured(run)
    (run / "recipe.yaml").unlink()
    with pytest.raises(UserError, match=r"It has no recipe\.yaml"):
        measured(run)


def test_the_error_is_that_of_tokens_that_come_row_by_row() -> None:
    """Of a mean of tokens whose rows are clusters: the root of the sum of squares of each row's sum of deviations, over
    the number of tokens; and of a difference the same of the tokens' differences."""
    tokens = [[1, 1, 0], [0], [1, 0, 0, 0, 1], [1, 1]]
    others = [[1, 0, 0], [1], [0, 0, 0, 0, 1], [1, 1]]

    def clustered(rows: list[list[int]]) -> tuple[float, float]:
        every = [one for row in rows for one in row]
        mean, count = sum(every) / len(every), len(rows)
        sums = [sum(one - mean for one in row) for row in rows]
        return mean, math.sqrt(count / (count - 1) * sum(one**2 for one in sums)) / len(every)

    ours, theirs = (Drafts({i: (sum(row), len(row)) for i, row in enumerate(rows)}) for rows in (tokens, others))
    assert (ours.acceptance, ours.stderr()) == pytest.approx(clustered(tokens))
    differences = [[a - b for a, b in zip(*pair, strict=True)] for pair in zip(tokens, others, strict=True)]
    assert paired(ours.values(), theirs.values()) == pytest.approx(clustered(differences))
