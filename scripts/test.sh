#!/usr/bin/env bash
# Installs what is missing and passes the tests: linters, types, layers, pytest, whose last line says how it went.
#   --all            everything that this machine can run: matrices, hosts that are lost, a GPU, a browser
#   --changed        what concerns the difference to main (scripts/changed_tests.sh), for people; CI always runs all
#   --lowest         unit and numerics tests and a launch of each kind, with the oldest versions that pyproject.toml allows
#                    but torch, which stays
#   other arguments  go to pytest, which runs two test files at a time (`-n 0`: one, as a debugger wants it)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
environment "[dev]"

if [ "${1:-}" = --lowest ]; then
  shift
  lowest_environment
  exec "$VIRTUAL_ENV/lowest/bin/python" -m pytest -p no:randomly -n 2 --dist loadfile \
    tests/*/unit tests/*/numerics tests/whole/recipe tests/trainer/distributed/test_modes.py tests/desk/e2e/test_run.py "$@"
fi

if [ "${1:-}" = --changed ]; then
  shift
  tests=$(scripts/changed_tests.sh)
  if [ -z "$tests" ]; then echo "nothing differs from main" && exit; fi
  echo "tests of what differs from main:" $tests
  set -- $tests "$@"
fi

ruff check .
ruff format --check .
lint-imports
# A minute on one core, so beside the tests; it has the last word if it finds something.
pyright >"$VIRTUAL_ENV/pyright.txt" &
types=$!
trap 'kill "$types" 2>/dev/null || true' EXIT
# A file stays on one worker: what it launches once is launched once. In the order of tests/conftest.py.
status=0
python -m pytest -p no:randomly -n 2 --dist loadfile --no-loadscope-reorder "$@" || status=$?
if [[ " $* " == *" --all "* ]]; then # Liger's kernels, interpreted: the variable is read as triton is imported
  kernels=$(kernels_folder)
  TRITON_INTERPRET=1 PYTHONPATH="$kernels${PYTHONPATH:+:$PYTHONPATH}" python -m pytest -p no:randomly tests/trainer/kernels || status=$?
fi
wait "$types" || { cat "$VIRTUAL_ENV/pyright.txt" && exit 1; }
exit "$status"
