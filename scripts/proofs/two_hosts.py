"""Two hosts on one machine: a run loses one of them, goes on, and gets it back, and the curve does not show it.

    sudo python scripts/proofs/two_hosts.py       # two network namespaces, a bridge between them, two ranks in each
    python scripts/proofs/two_hosts.py --loopback      # two launchers on 127.0.0.1, needs no root: frozen, not cut off
    python scripts/proofs/two_hosts.py --only fsdp2 cut # scenarios whose names contain all of the words
    python scripts/proofs/two_hosts.py --pairs          # four of the eight: each two of their words are together in one

In each scenario the second host is lost in the middle: all its processes are killed, or its port at the bridge goes
down, of which the first host hears nothing. The first host's ranks notice, leave, and form a group again: when the
second one is back, or at once by themselves, to be joined by it later. Every step's loss and rows must be those of a
run of the same recipe that was never interrupted. Exit status 1 if they are not, 77 if namespaces cannot be made.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import psutil

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "support"))

import bitwise
import parity
from parity import ROOT, train_lines

from finetune.checkpoints.folder import step_of

SKIPPED = 77  # automake's status of a test that could not be run
RANKS = 2  # of each host
STEPS = 400
LOST_AFTER = 50  # steps
TIMEOUT_S = 15  # that ranks wait for each other: what a cut link costs
GIVE_UP_S = 240.0  # for any one thing that is waited for
RECIPE = (
    f"train.max_steps={STEPS}",
    "train.epochs=100",
    "schedule.warmup_steps=10",
    "optimizer.lr=3e-4",
    "data.eval=[]",
    "checkpoint.every_steps=10",
    "checkpoint.keep=1000",
    "tracking.samples=true",
)

Loss = Literal["killed", "cut"]


class Failed(Exception):
    """Something that was waited for did not happen."""


@dataclass(frozen=True)
class Host:
    """Where a launcher runs. prefix: of its commands, which puts them into a namespace."""

    name: str
    address: str
    prefix: tuple[str, ...] = ()
    interface: str = "lo"


@dataclass(frozen=True)
class Scenario:
    config: str
    loss: Loss
    fewer: bool  # whether the first host goes on alone until the second is back

    @property
    def name(self) -> str:
        return f"{self.config} {self.loss} {'fewer' if self.fewer else 'waits'}"

    @property
    def launcher(self) -> str:
        """accelerate's starts a fixed number of machines."""
        return "torchrun" if self.fewer else "accelerate launch"


SCENARIOS = tuple(
    Scenario(config, loss, fewer)
    for config in ("ddp", "fsdp2")
    for loss in ("killed", "cut")
    for fewer in (False, True)
)
# Each config, loss and way to go on with each other one.
PAIRS = tuple(s for s in SCENARIOS if ((s.config == "ddp") + (s.loss == "killed") + s.fewer) % 2 == 0)


@dataclass
class Outcome:
    scenario: str
    launcher: str
    lost_at_step: int = 0
    went_on_from: list[int] = field(default_factory=list)  # checkpoints, in order
    ranks: list[tuple[int, int]] = field(default_factory=list)  # how many wrote checkpoints, and the last that they did
    again_after_s: float = 0.0  # from the loss to the first step of those that are left, or of all
    loss: float = 0.0  # largest relative difference to the run that was never interrupted
    identical: bool = False  # losses and rows, to the last bit
    same_rows: bool = False
    problems: list[str] = field(default_factory=list)


# --- hosts


@contextlib.contextmanager
def namespaces() -> Iterator[tuple[list[Host], Callable[[bool], None]]]:
    """Two hosts behind a switch of their own, and a function that takes the second one's port up or down."""
    mark = f"ft{os.getpid()}"
    switch, *names = (f"{mark}-{what}" for what in ("s", "a", "b"))
    hosts = [Host(name, f"10.77.0.{i}", ("ip", "netns", "exec", name), "eth0") for i, name in enumerate(names, 1)]
    try:
        ip("netns", "add", switch)
        ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        for i, host in enumerate(hosts):
            ip("netns", "add", host.name)
            ip("-n", switch, "link", "add", f"port{i}", "type", "veth", "peer", "eth0", "netns", host.name)
            ip("-n", switch, "link", "set", f"port{i}", "master", "bridge", "up")
            ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", host.name, "link", "set", device, "up")
        yield hosts, lambda up: ip("-n", switch, "link", "set", "port1", "up" if up else "down")
    finally:
        for name in (switch, *names):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def ip(*words: str) -> None:
    """iproute2. Raises CalledProcessError, OSError if it is not installed."""
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def loopback() -> list[Host]:
    return [Host("a", "127.0.0.1"), Host("b", "127.0.0.1")]


# --- launchers


class Launcher:
    """A launcher of one host with its ranks, to be ended together."""

    def __init__(self, host: Host, command: list[str], log: Path):
        own = {
            "GLOO_SOCKET_IFNAME": host.interface,
            "PET_LOCAL_ADDR": host.address,  # torchrun's --local_addr, which accelerate's launcher does not have
            "OMP_NUM_THREADS": "1",
            "FINETUNE_TIMEOUT_S": str(TIMEOUT_S),
            # A launcher that comes back would wait for an address that the others have long agreed on
            # (https://github.com/pytorch/pytorch/issues/135712).
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        self.log = log
        with log.open("ab") as file:
            self._process = psutil.Popen(
                [*host.prefix, *command],
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **own},
                start_new_session=True,
            )
        self._below: list[psutil.Process] = []

    def status(self) -> int | None:
        """None while it runs."""
        self._look()
        return self._process.poll()

    def kill(self) -> None:
        """As a host dies: launcher and ranks at once, without a word."""
        self.signal(signal.SIGKILL)
        self._process.wait()

    def has_ranks(self) -> bool:
        try:
            return any(process.status() != psutil.STATUS_ZOMBIE for process in self._process.children())
        except psutil.NoSuchProcess:
            return False

    def tail(self) -> str:
        return self.log.read_text(encoding="utf-8")[-3000:]

    def signal(self, number: int) -> None:
        """To launcher and ranks. SIGSTOP is as good as a cut link: connections stay, and nothing comes."""
        self._look()
        for process in (self._process, *self._below):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def gone(self) -> bool:
        """The launcher and everything that it started."""
        return self.status() is not None and not any(process.is_running() for process in self._below)

    def _look(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            known = set(self._below)
            self._below += [process for process in self._process.children(recursive=True) if process not in known]


@dataclass(frozen=True)
class Job:
    """One run on hosts."""

    folder: Path
    hosts: list[Host]
    config: str
    name: str
    port: int
    ranks: int = RANKS
    overrides: tuple[str, ...] = RECIPE

    @property
    def run(self) -> Path:
        return self.folder / "runs" / self.name

    def start(self, which: int, launcher: str, nodes: str = "2", rendezvous: str = "c10d") -> Launcher:
        """On one host, by `torchrun` or `accelerate launch`. nodes: how many, or MIN:MAX for torchrun."""
        host, first = self.hosts[which], self.hosts[0]
        conf = f"is_host={1 - which},last_call_timeout=3,read_timeout=20"
        common = ["--rdzv_backend", rendezvous, "--monitor_interval", "0.2"]
        if rendezvous != "static":
            common += ["--max_restarts", "20", "--rdzv_conf", conf]
        file = str(ROOT / "accelerate_configs" / f"{self.config}.yaml")
        train = ["-m", "finetune", "train", str(self.folder / "recipe.yaml"), *self.overrides, f"run.name={self.name}"]
        if launcher == "torchrun":
            command = ["torch.distributed.run", "--nnodes", nodes, "--nproc_per_node", str(self.ranks)]
            command += ["--rdzv_endpoint", f"{first.address}:{self.port}", *common, *train, "--config-file", file]
        else:
            command = ["accelerate.commands.launch", "--config_file", file, "--num_machines", nodes]
            command += ["--num_processes", str(self.ranks * int(nodes)), "--machine_rank", str(which), *common]
            command += ["--main_process_ip", first.address, "--main_process_port", str(self.port), *train]
        log = self.folder / f"{self.name}-{host.name[-1]}.log"
        return Launcher(host, [sys.executable, "-m", *command], log)

    def last_step(self) -> int:
        """Of metrics.jsonl, which a run that goes on cuts back to where it goes on from."""
        file = self.run / "metrics.jsonl"
        steps = re.findall(r'"step": (\d+), "epoch"', file.read_text(encoding="utf-8")) if file.exists() else []
        return int(steps[-1]) if steps else 0

    def went_on_from(self) -> list[int]:
        text = "".join(log.read_text(encoding="utf-8") for log in self.folder.glob(f"{self.name}-?.log"))
        return sorted({int(step) for step in re.findall(r"resuming from [^:]*step-0*(\d+): ", text.replace("\n", ""))})

    def written_by(self) -> list[tuple[int, int]]:
        """In order: how many ranks wrote the checkpoints up to which step."""
        found: list[tuple[int, int]] = []
        for path in sorted((self.run / "checkpoints").glob("step-*/state.json")):
            size = json.loads(path.read_text(encoding="utf-8"))["written"]["world_size"]
            if found and found[-1][0] == size:
                found.pop()
            found.append((size, step_of(path.parent)))
        return found


def wait_for(what: str, happened: Callable[[], bool], *running: Launcher) -> float:
    """Seconds until it has. Raises Failed if it does not, or if one of `running` ends before."""
    began = time.monotonic()
    while not happened():
        ended = [launcher for launcher in running if launcher.status() is not None]
        if time.monotonic() - began > GIVE_UP_S or (ended and not happened()):
            raise Failed("\n".join([f"waited for {what}", *(launcher.tail() for launcher in running)]))
        time.sleep(0.05)
    return time.monotonic() - began


def uninterrupted(job: Job) -> None:
    """By `accelerate launch` with a static rendezvous. Raises Failed."""
    launchers = [job.start(which, "accelerate launch", rendezvous="static") for which in (0, 1)]
    try:
        wait_for(f"the end of {job.name}", lambda: all(launcher.gone() for launcher in launchers))
        if any(launcher.status() for launcher in launchers):
            raise Failed(f"{job.name} failed\n{launchers[0].tail()}")
    finally:
        for launcher in launchers:
            launcher.kill()


def interrupted(job: Job, scenario: Scenario, link: Callable[[bool], None] | None, outcome: Outcome) -> None:
    """Run a scenario to its end. Raises Failed."""
    nodes = "1:2" if scenario.fewer else "2"
    first, second = (job.start(which, scenario.launcher, nodes) for which in (0, 1))
    started = [first, second]

    def reach(up: bool) -> None:
        if link:
            link(up)
        else:
            second.signal(signal.SIGCONT if up else signal.SIGSTOP)  # up: those that are dead already do not mind

    try:
        wait_for("the first steps", lambda: job.last_step() >= LOST_AFTER, first, second)
        outcome.lost_at_step = job.last_step()
        began = time.monotonic()
        if scenario.loss == "killed":
            second.kill()
        else:
            reach(False)
        if scenario.fewer:
            wait_for("the first host to go on alone", lambda: job.went_on_from() != [], first)
            wait_for("its first steps", lambda: job.last_step() > outcome.lost_at_step, first)
            outcome.again_after_s = time.monotonic() - began
        else:
            wait_for("the first host's ranks to leave", lambda: not first.has_ranks(), first)
        if scenario.loss == "cut":
            # As a host that is restarted. It must not come back with its old launcher: that finds its connections
            # broken, ends, and closes the rendezvous for all (https://github.com/pytorch/pytorch/issues/147064).
            second.kill()
            reach(True)
        second = job.start(1, scenario.launcher, nodes)
        started.append(second)
        if not scenario.fewer:
            wait_for("both to go on", lambda: job.last_step() > outcome.lost_at_step, first, second)
            outcome.again_after_s = time.monotonic() - began
        wait_for("the end", lambda: first.gone() and second.gone())
        if first.status() or second.status():
            raise Failed(f"exit status {first.status()} and {second.status()}\n{first.tail()}\n{second.tail()}")
    finally:
        for launcher in started:
            launcher.kill()
        if link:
            link(True)


def compare(reference: Job, job: Job, outcome: Outcome) -> None:
    """What was trained, against the run that was never interrupted."""
    ours, theirs = train_lines(job.run), train_lines(reference.run)
    relative = [abs(a["loss"] / b["loss"] - 1) for a, b in zip(ours, theirs, strict=False)]
    outcome.loss = max(relative)
    outcome.same_rows = bitwise.samples(job.run) == bitwise.samples(reference.run)
    outcome.identical = outcome.same_rows and outcome.loss == 0.0
    outcome.went_on_from, outcome.ranks = job.went_on_from(), job.written_by()
    steps = list(range(1, len(theirs) + 1))
    if [line["step"] for line in ours] != steps or [line["step"] for line in theirs] != steps:
        outcome.problems.append("steps are missing, or there twice")
    if not outcome.loss <= parity.LOSS_RELATIVE:
        outcome.problems.append(f"a loss differs by {outcome.loss:.1e}, allowed {parity.LOSS_RELATIVE:.0e}")
    if not outcome.same_rows:
        outcome.problems.append("other rows were trained on")
    if not outcome.went_on_from:
        outcome.problems.append("nothing was resumed")


def play(
    folder: Path, hosts: list[Host], link: Callable[[bool], None] | None, scenarios: list[Scenario], **job: int
) -> list[Outcome]:
    """Run scenarios, and before them the run of each config that they are compared with."""
    outcomes, references = [], dict[str, Job]()
    for number, scenario in enumerate(scenarios):
        if scenario.config not in references:
            name = f"{scenario.config}-uninterrupted"
            references[scenario.config] = Job(folder, hosts, scenario.config, name, 29600 + number, **job)
            uninterrupted(references[scenario.config])
        outcome = Outcome(scenario.name, scenario.launcher)
        this = Job(folder, hosts, scenario.config, scenario.name.replace(" ", "-"), 29650 + number, **job)
        try:
            interrupted(this, scenario, link, outcome)
            compare(references[scenario.config], this, outcome)
        except Failed as failed:
            outcome.problems.append(str(failed))
        outcomes.append(outcome)
        print(f"{scenario.name}: {'; '.join(outcome.problems) or 'passed'} {asdict(outcome)}", flush=True)
    return outcomes


def report(outcomes: list[Outcome], ranks: int) -> dict[str, object]:
    from finetune.training.run_plan import versions

    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {ranks} ranks on each of two hosts",
        "steps": STEPS,
        "timeout_s": TIMEOUT_S,
        "versions": versions(),
        "scenarios": [asdict(outcome) for outcome in outcomes],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--loopback", action="store_true", help="launchers on 127.0.0.1; frozen instead of cut off")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="scenarios whose names have all of these")
    parser.add_argument("--pairs", action="store_true", help="half of the scenarios, in which any two words meet once")
    parser.add_argument("--folder", type=Path, help="keep everything there; default: a temporary one")
    parser.add_argument("--json", type=Path, help="write the outcomes there")
    options = parser.parse_args()
    chosen = [s for s in (PAIRS if options.pairs else SCENARIOS) if set(options.only) <= set(s.name.split())]
    if not options.loopback and (os.geteuid() != 0 or not shutil.which("ip")):
        print("skipped: network namespaces need root and iproute2 (ip); --loopback needs neither", file=sys.stderr)
        return SKIPPED
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="two-hosts-")))
        folder.mkdir(parents=True, exist_ok=True)
        parity.prepare(folder)
        if options.loopback:
            outcomes = play(folder, loopback(), None, chosen)
        else:
            try:
                hosts, link = stack.enter_context(namespaces())
            except subprocess.CalledProcessError as error:
                print(f"skipped: {' '.join(error.cmd)}: {error.stderr.strip()}", file=sys.stderr)
                return SKIPPED
            outcomes = play(folder, hosts, link, chosen)
    if options.json:
        options.json.write_text(json.dumps(report(outcomes, RANKS), indent=1) + "\n", encoding="utf-8")
    return int(any(outcome.problems for outcome in outcomes))


if __name__ == "__main__":
    raise SystemExit(main())
