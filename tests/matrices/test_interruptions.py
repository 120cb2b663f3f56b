"""Runs that are killed and hosts that are lost: four kills of each config by scripts/proofs/crash_test.py (which takes
thirty by itself), at other moments each time, and half of the scenarios of scripts/proofs/two_hosts.py."""

from __future__ import annotations

import crash_test
import pytest
import two_hosts
from conftest import run_script

pytestmark = pytest.mark.timeout(4 * 3600)


@pytest.mark.parametrize("config", crash_test.CONFIGS)
def test_nothing_is_lost_when_killed(config: str) -> None:
    """With another seed each time, which the output shows."""
    run_script("proofs/crash_test.py", "--only", config, "--kills", 4)


def test_nothing_is_lost_when_eight_processes_are_killed() -> None:
    """Stages x shards x tensors."""
    run_script("proofs/crash_test.py", "--only", "pp_fsdp2_tp", "--kills", 4, "--launched-kills", 1)


def test_a_host_is_lost_and_comes_back() -> None:
    """Cut off, where this machine lets us make network namespaces; else frozen."""
    if run_script("proofs/two_hosts.py", "--pairs", allowed=(0, two_hosts.SKIPPED)) == two_hosts.SKIPPED:
        run_script("proofs/two_hosts.py", "--pairs", "--loopback")
