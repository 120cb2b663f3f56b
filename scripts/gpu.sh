#!/usr/bin/env bash
# Tries this machine's GPUs with short runs and tests (tests/gpu), most valuable first; the same command continues.
# Uses `python` as it is and installs nothing. Results: runs/gpu-check/results.jsonl, a line a test.
#   --references      on a machine without a GPU, first: what GPUs are compared with; carry runs/gpu-check along
#   --rehearse N      the same tests on N CPU processes, with tiny shapes, in runs/gpu-check/rehearsal
#   --first           the first case of each test alone
#   --out FOLDER      results, logs and references; default runs/gpu-check
#   --seconds S       start no test that may take longer than what is left of them; default 570
#   other arguments   go to pytest: -k "devices or parity" chooses tests, --collect-only lists them
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ "${1:-}" = --references ]; then
  shift
  set -- -k test_reference --seconds 86400 "$@"
fi
export PYTHONPATH="$PWD:$PWD/tests/support${PYTHONPATH:+:$PYTHONPATH}"
# Without the settings and fixtures of the other tests: pytest is enough, none of its plugins is needed.
exec python -m pytest -c /dev/null --rootdir . --noconftest -p gpu_check -p no:randomly --tb=short -v \
  tests/gpu/runs.py "$@"
