"""The locks of all packages, and the steps of the Dockerfile, which no daemon here can build."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from conftest import ROOT
from packaging.requirements import Requirement

LOCKS = sorted((ROOT / "locks").glob("*.txt"))


def pins(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    parts = [line.partition(";")[0].partition("==") for line in lines]  # without a marker of Python's version
    return {name.lower().replace("_", "-"): version for name, _, version in parts}


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.stem)
def test_a_lock_has_every_package_within_its_range_at_the_pinned_version(lock: Path) -> None:
    locked, pinned = pins(lock), pins(ROOT / "constraints.txt")
    assert {name: version for name, version in pinned.items() if locked.get(name, version) != version} == {}
    for text in metadata.requires("finetune-recipes") or []:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": "dev"}):
            assert requirement.specifier.contains(locked[requirement.name.lower().replace("_", "-")]), text


@pytest.mark.long
def test_the_steps_of_the_dockerfile_end_in_a_command_that_works(tmp_path: Path) -> None:
    """One by one, in a folder and an environment of their own; Debian's packages must be those of this machine."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    steps = [tuple(line.split(" ", 1)) for line in text.splitlines() if re.match(r"[A-Z]+ ", line)]
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    environment = {**os.environ, "PATH": f"{tmp_path / 'venv' / 'bin'}:{os.environ['PATH']}"}
    folder = tmp_path
    for step, words in steps:
        if step == "WORKDIR":
            folder = tmp_path / words.strip().lstrip("/")
            folder.mkdir(parents=True)
        elif step == "COPY":
            *sources, target = words.split()
            for source in sources:
                copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
                copy(ROOT / source, folder / (target if (ROOT / source).is_dir() else "."))
        elif step == "RUN" and words.startswith("apt-get"):
            listed = shlex.split(words.partition("--no-install-recommends")[2].partition("&&")[0])
            subprocess.run(["apt-cache", "show", "--no-all-versions", *listed], check=True, stdout=subprocess.DEVNULL)
        elif step == "RUN":
            subprocess.run(["bash", "-ec", words], cwd=folder, env=environment, check=True)
        elif step == "ENTRYPOINT":
            command = [word.strip(' "') for word in words.strip("[] ").split(",")]
            done = subprocess.run([*command, "--version"], cwd=folder, env=environment, capture_output=True, text=True)
            assert done.stdout.startswith("finetune "), done.stderr
            checked = ["check", "recipes/llama3.1-8b/lora.yaml", "--recipe-only"]
            subprocess.run([*command, *checked], cwd=folder, env=environment, check=True)
    assert {step for step, _ in steps} == {"FROM", "RUN", "WORKDIR", "COPY", "ENTRYPOINT"}
