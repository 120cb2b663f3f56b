"""`finetune launch`: real launchers, whose mistakes end in one message and whose status is that of the processes."""

from __future__ import annotations

import io
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import forks
import psutil
import pytest
import tiny
from conftest import ROOT

from finetune.desk.cli import main
from finetune.errors import UserError
from finetune.features import load_recipe
from finetune.training.launcher import _split, _status, launch

CONFIGS = ROOT / "accelerate_configs"


def run(*arguments: object) -> tuple[int, str]:
    """Exit status, and all that a person sees."""
    command = [sys.executable, "-m", "finetune", "launch", *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600)
    return done.returncode, done.stdout


@pytest.mark.long  # test_cli.py has it of a launch by torchrun
@pytest.mark.parametrize("processes", [1, 2])
def test_a_mistake_is_one_line_of_each_process(recipe: dict[str, Any], write_recipe: Any, processes: int) -> None:
    """One that only the ranks can see: the launcher has started them, and ends all as soon as the first has left."""
    recipe["data"]["train"][0]["path"] = "absent.jsonl"
    options = ["--config-file", CONFIGS / "ddp.yaml", "--num_processes", processes]
    if processes == 1:
        options = []  # not described at all: one process here, without accelerate's warnings
    status, output = run(*options, write_recipe(recipe))
    lines = [line for line in output.splitlines() if "deepspeed" not in line.lower()]
    assert status == 2, output
    assert 1 <= len(lines) <= processes, output
    assert all(re.match(r"(\[rank 1\] )?error: absent\.jsonl: ", line) for line in lines), output


def test_what_is_wrong_with_the_command_starts_nothing(recipe: dict[str, Any], write_recipe: Any) -> None:
    path, before = write_recipe(recipe), psutil.Process().children()
    wrong = [
        ([str(path), "optimizer.lr=fast"], None, "optimizer.lr: expected a number"),
        ([str(path)], Path("absent.yaml"), "absent.yaml: cannot be read"),
        (["--num_machines", "2"], None, "no program"),
        (["torchrun", "--nnodes", "2"], None, "no program"),
        (["-m", "finetune", "train"], None, "`train` needs a recipe"),
    ]
    for words, config, fragment in wrong:
        with pytest.raises(UserError, match=fragment):
            launch(words, config)
    assert psutil.Process().children() == before


def _questions(folder: Path) -> Path:
    rows = [{"question": f"What is {i}?", "answer": f"It is {i}."} for i in range(40)]
    return tiny.write_rows(folder / "faq.jsonl", rows)


def test_a_launch_without_a_recipe(made: Path, tmp_path: Path) -> None:
    """The recipe lies beside the run, is shown, and trains; a second time it is left alone."""
    runs = tmp_path / "runs"
    words = ["--model", made / "llama", "--data", _questions(tmp_path), "--yes"]
    words += [f"run.dir={runs}", "train.max_steps=2", "schedule.warmup_steps=0"]
    status, output = run(*words)
    assert status == 0, output
    recipe = runs / "faq-lora.yaml"
    assert recipe.read_text(encoding="utf-8").rstrip() in output
    assert (load_recipe(recipe).mode, load_recipe(recipe).train.max_steps) == ("lora", 2)
    assert (runs / "faq-lora" / "status.json").is_file()
    done = forks.python("-m", "finetune", "launch", *words)
    assert done.returncode == 2
    assert (
        f"{recipe} exists already and is left as it is. Fix: python -m finetune launch {recipe} trains" in done.stderr
    )


def test_a_new_recipe_is_trained_if_it_is_wanted(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    given = ["--model", str(made / "llama"), "--data", str(_questions(tmp_path)), f"run.dir={tmp_path / 'runs'}"]
    for words, stdin, status, message in (
        (given, io.StringIO(), 2, "no terminal to ask on before the new recipe is trained. Fix: give --yes"),
        (["a.yaml", *given], Terminal(), 2, "launch a.yaml: --model is not used with a recipe"),
        (given[:2], Terminal(), 2, "launch --model: no recipe, and no --data. Fix: give it"),
        ([*given, "--on", "slurm"], Terminal(), 2, "launch --on slurm: --model is for this machine"),
        (given, Terminal("n\n"), 0, "faq-lora.yaml trains it"),
    ):
        monkeypatch.setattr(sys, "argv", ["finetune", "launch", *words])
        monkeypatch.setattr(sys, "stdin", stdin)
        with pytest.raises(SystemExit) as stop:
            main()
        shown = capsys.readouterr()
        assert (stop.value.code or 0, message in shown.out + shown.err) == (status, True), shown
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["faq-lora.yaml"]


def test_a_taken_port_is_named(recipe: dict[str, Any], write_recipe: Any) -> None:
    """Rank 0 of a group that environment variables describe, as Slurm's and torch's own do."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        group = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": port}
        done = forks.python("-m", "finetune", "train", write_recipe(recipe), **group, MASTER_ADDR="127.0.0.1")
    assert done.returncode == 2, done.stderr
    assert f"error: port {port} (MASTER_PORT) of rank 0's machine is taken" in done.stderr


def test_the_words_of_a_launch() -> None:
    torch, accelerate = "torch.distributed.run", "accelerate.commands.launch"
    assert _split(["a.yaml", "b=1"]) == (accelerate, [], ["train", "a.yaml", "b=1"])
    assert _split(["--num_machines", "2", "-m", "finetune", "doctor"]) == (
        accelerate,
        ["--num_machines", "2"],
        ["doctor"],
    )
    assert _split(["torchrun", "--nnodes", "1:4", "-m", "finetune", "train", "a.yaml"]) == (
        torch,
        ["--nnodes", "1:4"],
        ["train", "a.yaml"],
    )


def test_a_killed_process_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert _status("rank 1", -9) == 137
    assert "rank 1 was ended by SIGKILL. Most often the system does so for lack of memory" in capsys.readouterr().err
    assert _status("rank 1", 2) == 2
    assert capsys.readouterr().err == ""
