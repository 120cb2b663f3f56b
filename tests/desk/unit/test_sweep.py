"""Files of sweeps, and studies that continue; nothing is launched here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import optuna
import pytest
import yaml
from conftest import ROOT
from filelock import FileLock

from finetune.errors import UserError
from finetune.features import load_recipe
from finetune.sweep import main, read_sweep, run_sweep, show_trials, suggest
from finetune.tracking.trackers import grouped

SWEEP = """\
recipe: recipes/quickstart/lora.yaml
metric: eval_loss
parameters:
  optimizer.lr: {low: 1e-5, high: 1e-3, log: true}
  lora.rank: [8, 16, 32]
overrides: [train.max_steps=3]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "sweep.yaml"
    path.write_text(SWEEP, encoding="utf-8")
    return path


def test_a_sweep_is_read_with_the_overrides_of_the_command(file: Path) -> None:
    sweep = read_sweep(file, "run.seed=7")
    assert (sweep.recipe, sweep.metric) == ("recipes/quickstart/lora.yaml", "eval_loss")
    assert sweep.parameters["optimizer.lr"] == {"low": 1e-5, "high": 1e-3, "log": True}
    assert sweep.overrides == ("train.max_steps=3", "run.seed=7")


@pytest.mark.parametrize(
    ("line", "changed", "message"),
    [
        (1, "recipe: 7", "sweep.yaml:1: recipe: is missing or of another type. Fix: give text"),
        (2, "metric: eval_los", "sweep.yaml:2: metric: no evaluation measures 'eval_los'"),
        (2, "metrics: eval_loss", "sweep.yaml:2: metrics: not a key of a sweep. Fix: use recipe, metric"),
        (4, "  optimizer.rate: [1, 2]", "sweep.yaml:4: optimizer.rate: not a key of a recipe"),
        (4, "  optimizer.lr: 1e-3", "sweep.yaml:4: optimizer.lr: neither a list of values nor a range. Fix: write ["),
        (4, "  optimizer.lr: {min: 1, max: 2}", "sweep.yaml:4: optimizer.lr: neither a list of values nor a range"),
        (4, "  optimizer.lr: {low: 1e-5}", "sweep.yaml:4: optimizer.lr: neither a list of values nor a range"),
        (
            4,
            "  optimizer.lr: {low: 1e-5, high: .inf}",
            "sweep.yaml:4: optimizer.lr: neither a list of values nor a range",
        ),
        (4, "  optimizer.lr: {low: 1e-3, high: 1e-5}", "Fix: set low (0.001) below high (1e-05)"),
        (4, "  optimizer.lr: {low: 0, high: 1, log: true}", "`log: true` needs low above 0"),
        (5, "  lora.rank: []", "sweep.yaml:5: lora.rank: neither a list of values nor a range"),
        (5, "  lora.targets: [[q_proj], [k_proj]]", "sweep.yaml:5: lora.targets: neither a list of values nor a range"),
        (
            6,
            "overrides: train.max_steps=3",
            "sweep.yaml:6: overrides: is missing or of another type. Fix: give a list of `key",
        ),
    ],
)
def test_a_mistake_is_named_with_its_line(file: Path, line: int, changed: str, message: str) -> None:
    lines = SWEEP.splitlines()
    lines[line - 1] = changed
    file.write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(UserError) as caught:
        read_sweep(file)
    assert message in str(caught.value)


def test_a_trial_gives_overrides(file: Path) -> None:
    fixed: Any = optuna.trial.FixedTrial({"optimizer.lr": 3e-4, "lora.rank": 16})
    assert suggest(fixed, read_sweep(file)) == ["optimizer.lr=0.0003", "lora.rank=16"]
    file.write_text(
        "recipe: r\nmetric: eval_loss\nparameters:\n  lora.rank: {low: 8, high: 64, step: 8}\n"
        "  data.packing: [true, false]\n  schedule.name: [cosine, linear]\n",
        encoding="utf-8",
    )
    fixed = optuna.trial.FixedTrial({"lora.rank": 24, "data.packing": False, "schedule.name": "linear"})
    assert suggest(fixed, read_sweep(file)) == ["lora.rank=24", "data.packing=false", "schedule.name=linear"]


def test_a_study_continues_only_as_it_was(file: Path) -> None:
    assert run_sweep(file, 0).user_attrs["sweep"]["metric"] == "eval_loss"
    file.write_text(SWEEP.replace("[8, 16, 32]", "[8, 16]"), encoding="utf-8")
    with pytest.raises(UserError, match=r"sweep\.db: its trials are of other parameters and overrides"):
        run_sweep(file, 0, ["run.seed=7"])


def test_one_sweep_at_a_time(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FileLock(f"{file.with_suffix('.db')}.lock"):
        assert main([str(file), "--trials", "0"]) == 2
    assert "sweep.db: another sweep is running" in capsys.readouterr().err


def test_a_trial_whose_sweep_was_killed_is_taken_up_again(file: Path) -> None:
    study = run_sweep(file, 0)
    trial = study.ask()
    suggest(trial, read_sweep(file))
    trial.set_user_attr("run", "run-0")
    study.ask()  # killed before its run began: nothing to take up
    first, second, again = run_sweep(file, 0).trials
    assert [first.state.name, second.state.name, again.state.name] == ["FAIL", "FAIL", "WAITING"]
    assert again.user_attrs == {"run": "run-0"}
    assert again.system_attrs["fixed_params"] == first.params


def test_the_table_has_the_best_first(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    study = run_sweep(file, 0)
    for value in (0.5, 0.25):
        trial = study.ask()
        suggest(trial, read_sweep(file))
        study.tell(trial, value)
    study.tell(study.ask(), state=optuna.trial.TrialState.FAIL)
    show_trials(study, Console(width=120))
    rows = [line.split()[:3] for line in capsys.readouterr().out.splitlines()]
    assert [row[:2] for row in rows] == [["trial", "state"], ["1", "complete"], ["0", "complete"], ["2", "fail"]]


def shown(name: str) -> str:
    """A YAML file of the guide."""
    page = (ROOT / "docs" / "guides" / "sweeps.md").read_text(encoding="utf-8")
    found = re.search(rf"```yaml\n# {name}\n(.+?)```", page, re.DOTALL)
    assert found is not None
    return found[1]


def test_the_guide_shows_a_sweep_that_is_read(file: Path) -> None:
    file.write_text(shown("rates.yaml"), encoding="utf-8")
    sweep = read_sweep(file)
    fixed: Any = optuna.trial.FixedTrial({"optimizer.lr": 3e-4, "batch.rows": 16})
    recipe = load_recipe(ROOT / sweep.recipe, [*sweep.overrides, *suggest(fixed, sweep)])
    assert (recipe.run.name, recipe.batch.rows) == ("rate-0.0003-rows-16", 16)


@pytest.mark.long  # imports more of W&B than a run
def test_wandb_makes_a_launch_of_the_sweep_in_the_guide() -> None:
    """By the functions that its agent calls: none of them is documented, and they may move."""
    from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

    config = yaml.safe_load(shown("wandb-sweep.yaml"))  # with PyYAML's numbers, as W&B reads it
    assert config["parameters"]["optimizer.lr"]["min"] == 1e-4
    chosen = {name: {"value": value} for name, value in (("optimizer.lr", 0.00123), ("batch.rows", 32))}
    words = create_sweep_command(config["command"])
    assert words[:5] == ["${env}", "python", "-m", "finetune", "launch"]
    assert words[-1] == "${args_no_hyphens}"
    recipe = load_recipe(
        ROOT / words[5], [*words[6:-1], *create_sweep_command_args({"args": chosen})["args_no_hyphens"]]
    )
    assert recipe.run.name == "wandb-0.00123-32"
    assert (recipe.optimizer.lr, recipe.batch.rows) == (0.00123, 32)
    assert grouped("eval_loss") == config["metric"]["name"]
