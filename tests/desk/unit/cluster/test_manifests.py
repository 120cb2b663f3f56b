"""Jobs of clusters: what each manifest says, what is refused, and that nothing is submitted unasked. What the targets'
own tools think of them: scripts/proofs/manifests.py."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT

from finetune.desk.cluster.job import JobOptions, plan_job
from finetune.desk.cluster.manifest import launch_on, render
from finetune.desk.cluster.targets import TARGETS
from finetune.engine.launch import PROCESSES_VARIABLE, check_started, read_config_file
from finetune.errors import UserError

IN_CONTAINERS = {"image": "registry.example.com/finetune:1", "shared": "volume", "secret": "HF_TOKEN"}
OF_TARGET: dict[str, dict[str, Any]] = {
    "slurm": {"devices": "2x2xH100-80", "secret": "HF_TOKEN"},
    "kubeflow": {"devices": "2x2xH100-80", **IN_CONTAINERS},
    "skypilot": {"devices": "2x2xH100-80", **IN_CONTAINERS},
    "hf-jobs": {"devices": "4xA100-80", **IN_CONTAINERS, "shared": "user/bucket"},
}


@pytest.fixture
def own(
    recipe: dict[str, Any], write_recipe: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A recipe in the current folder, which stands for the volume."""
    monkeypatch.chdir(tmp_path)
    write_recipe({**recipe, "run": {"name": "My_run.1", "dir": "runs"}})
    return Path("recipe.yaml")


@pytest.fixture
def manifest(own: Path) -> Callable[..., str]:
    def write(name: str, *overrides: str, **options: Any) -> str:
        given = JobOptions(**{**OF_TARGET[name], "hours": 5.0, **options})
        return render(name, plan_job(own, overrides, TARGETS[name], given)[0])

    return write


def scripts_of(name: str, text: str) -> list[str]:
    """The shell scripts of a manifest: itself, and what runs on each machine."""
    if name in ("slurm", "hf-jobs"):
        inner = re.findall(r"<<'SCRIPT'\n(.*?)\nSCRIPT\n", text, re.DOTALL)
        return [text, *inner]
    objects = list(yaml.safe_load_all(text))
    return objects[1]["spec"]["trainer"]["args"] if name == "kubeflow" else [objects[0]["run"]]


@pytest.mark.parametrize("name", TARGETS)
def test_every_target_starts_all_processes_saves_and_is_read_by_its_language(
    name: str, manifest: Callable[..., str], tmp_path: Path
) -> None:
    text = manifest(name, "optimizer.lr=2e-4")
    assert "FINETUNE_PROCESSES" in text
    assert "{{" not in text.replace("${{ secrets.HF_TOKEN }}", "")
    scripts = scripts_of(name, text)
    assert scripts
    for script in scripts:
        done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr
        if shutil.which("shellcheck"):
            subprocess.run(["shellcheck", "--shell=bash", "-"], input=script, text=True, check=True)
    command = scripts[-1]
    assert "recipe.yaml optimizer.lr=2e-4" in command
    several = "launch torchrun " in command
    assert several == (name != "hf-jobs")
    assert "--nproc_per_node 2" in command if several else "--num-processes 4" in command
    assert "accelerate launch" not in command  # it ignores PET_*, and trains alone
    if name not in ("slurm", "hf-jobs"):
        assert all(isinstance(one, dict) for one in yaml.safe_load_all(text))


def test_what_the_manifests_say(manifest: Callable[..., str]) -> None:
    slurm = manifest("slurm")
    for line in ("--nodes=2", "--gpus-per-node=2", "--time=5:00:00", "--requeue", "--signal=B:USR1@300", "--mem="):
        assert f"#SBATCH {line}" in slurm
    assert ': "${HF_TOKEN:?' in slurm
    runtime, job = yaml.safe_load_all(manifest("kubeflow"))
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}} in pod["volumes"]
    assert {"name": PROCESSES_VARIABLE, "value": "4"} in pod["containers"][0]["env"]
    assert job["spec"]["activeDeadlineSeconds"] == 5 * 3600
    assert job["spec"]["trainer"]["resourcesPerNode"]["limits"] == {"nvidia.com/gpu": 2}
    sky = yaml.safe_load(manifest("skypilot"))
    assert sky["resources"]["accelerators"] == "H100:2"
    assert sky["resources"]["job_recovery"] == {"recover_on_exit_codes": [75]}
    assert sky["secrets"] == {"HF_TOKEN": None}
    jobs = manifest("hf-jobs")
    assert "--flavor a100x4 --timeout 18000s" in jobs  # the default is half an hour
    assert "--signal=USR1 17700" in jobs
    amd = manifest("kubeflow", devices="2xMI300X")
    assert "amd.com/gpu: 2" in amd


@pytest.mark.long
def test_sizes_that_no_shipped_config_has_are_written_by_the_job(
    manifest: Callable[..., str], made: Path, tmp_path: Path
) -> None:
    deep = f"model.name={made / 'llama_deep'}"
    text = manifest(
        "slurm", deep, "batch.rows_per_device=1", devices="4xH100-80", config_file=Path("accelerate_configs/pp.yaml")
    )
    path = re.search(r"--config-file (\S+)", text)
    assert path is not None
    assert path[1].startswith("runs/accelerate-pp-")
    body = re.search(rf"cat >{re.escape(path[1])} <<'YAML'\n(.*?)\nYAML\n", text, re.DOTALL)
    assert body is not None
    (tmp_path / "written.yaml").write_text(body[1], encoding="utf-8")
    launch = read_config_file(str(tmp_path / "written.yaml"))
    assert (launch.processes, launch.parallelism.pipeline) == (4, 4)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("lsf", {}, "not a known target. Fix: use one of slurm, kubeflow, skypilot, hf-jobs"),
        ("slurm", {"devices": "8xH1000"}, "no device 'H1000'"),
        ("slurm", {"devices": "2x8"}, "--devices 2x8"),
        ("slurm", {"image": "i"}, "--image has no effect there"),
        ("slurm", {"hours": 0.1}, "half an hour to 720"),
        ("slurm", {"config_file": Path("accelerate_configs/pp.yaml")}, "pp.yaml: cannot be used on 2 x 2 H100-80: "),
        ("slurm", {"hours": None, "devices": "2xcpu"}, "--hours 12"),
        ("kubeflow", {"image": None}, "--image is required"),
        ("skypilot", {"shared": None}, "Fix: give --shared the name of a SkyPilot volume"),
        ("skypilot", {"devices": "1xMI250X-64"}, "SkyPilot offers no 1 x MI250X-64"),
        ("hf-jobs", {"devices": "2x4xA100-80"}, "a job there is one machine. Fix: give --devices 4xA100-80"),
        ("hf-jobs", {"devices": "3xA100-80"}, "offers no 3 x A100-80 in a machine"),
        ("hf-jobs", {"secret": "hf_abc=d"}, "not its value"),
    ],
)
def test_what_cannot_be_is_refused(name: str, changes: dict[str, Any], message: str, own: Path) -> None:
    options = JobOptions(**{**OF_TARGET.get(name, {"devices": "1xH100-80"}), "hours": 5.0, **changes})
    with pytest.raises(UserError, match=re.escape(message)):
        launch_on(name, own, (), options, None, False)


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("file", ["a\nrm -rf x.yaml", "a\r.yaml", "a\u2028b.yaml", "a\x1b[2J.yaml", 'a""".yaml'])
def test_names_that_would_end_a_line_are_refused(name: str, file: str, own: Path) -> None:
    options = JobOptions(**{**OF_TARGET[name], "hours": 5.0})
    own.rename(file)
    with pytest.raises(UserError, match=r"has a character that no manifest can hold\. Fix: rename it") as error:
        launch_on(name, Path(file), (), options, None, False)
    assert "\n" not in str(error.value)
    Path(file).rename(own)
    with pytest.raises(UserError, match="has a character that no manifest can hold"):
        launch_on(name, own, ("run.name=a\n#SBATCH --exclusive",), options, None, False)


@pytest.mark.parametrize("run", ["no", "on", "2024", "0x10", "1e3"])
def test_names_stay_texts(run: str, manifest: Callable[..., str]) -> None:
    for name, keys in (("kubeflow", ("metadata", "name")), ("skypilot", ("name",))):
        value = next(yaml.safe_load_all(manifest(name, f"run.name={run}")))
        for key in keys:
            value = value[key]
        assert value == run


@pytest.mark.long
def test_a_model_that_does_not_fit_and_runs_that_would_be_lost(own: Path, tmp_path: Path) -> None:
    large = ROOT / "recipes" / "llama3.3-70b" / "qlora.yaml"
    alone = JobOptions("1xT4-16", hours=5.0, config_file=Path("accelerate_configs/single.yaml"))
    with pytest.raises(UserError, match=r"does not fit 1 T4-16\. single comes nearest and needs [\d.]+ GiB more"):
        launch_on("slurm", large, (), alone, None, False)
    options = JobOptions(**OF_TARGET["kubeflow"], hours=5.0)
    with pytest.raises(UserError, match=r"run\.dir: /data/runs is lost with the container"):
        launch_on("kubeflow", own, ("run.dir=/data/runs",), options, None, False)
    with pytest.raises(UserError, match="start in a folder above the recipe"):
        launch_on("kubeflow", Path(os.path.relpath(large)), (), options, None, False)


def test_it_is_submitted_only_if_asked(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    options = JobOptions(**OF_TARGET["slurm"], hours=5.0)
    assert launch_on("slurm", own, ("train.precision=fp32",), options, Path("job.sbatch"), False) == 0
    said = capfd.readouterr().err
    assert "wrote job.sbatch" in said
    slow = "train.precision: fp32 leaves most of H100 SXM unused. By its tables it multiplies 15 times faster in bf16."
    assert f"{slow} Fix: train.precision=bf16" in said
    tools = tmp_path / "tools"
    tools.mkdir()
    monkeypatch.setenv("PATH", str(tools))
    with pytest.raises(
        UserError, match=r"`sbatch` is not installed here\. my-run-1\.sbatch is written\. Fix: run `sbatch my"
    ):
        launch_on("slurm", own, ("train.precision=bf16",), options, None, True)
    (tools / "sbatch").write_text('#!/bin/sh\necho "Submitted $1"\nexit 3\n', encoding="utf-8")
    (tools / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    assert launch_on("slurm", own, ("train.precision=bf16",), options, None, True) == 3
    said = capfd.readouterr()
    assert "train.precision" not in said.err
    assert "running sbatch my-run-1.sbatch" in said.err
    assert "Submitted my-run-1.sbatch" in said.out


def test_a_job_that_finds_itself_alone_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = read_config_file(None, 1)
    check_started(launch, 1, "replicated")
    monkeypatch.setenv(PROCESSES_VARIABLE, "16")
    with pytest.raises(UserError, match=r"FINETUNE_PROCESSES=16, but 1 is running\. The launchers of this job did not"):
        check_started(launch, 1, "replicated")
