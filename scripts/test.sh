#!/usr/bin/env bash
# Installs what is missing and passes the tests: linters, types, layers, pytest, whose last line says how it went.
#   --all            everything that this machine can run: full matrices, hosts that are lost, a GPU, a browser; hours
#   other arguments  go to pytest, which runs two test files at a time (`-n 0`: one, as a debugger wants it)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
environment "[dev]"

ruff check .
ruff format --check .
pyright
lint-imports
# A file stays on one worker: what it launches once is launched once. In the order they are collected, files with
# launches come first and the many short ones fill what is left at the end.
exec python -m pytest -p no:randomly -n 2 --dist loadfile --no-loadscope-reorder "$@"
