#!/usr/bin/env bash
# Installs what is missing and passes the tests: linters, types, layers, pytest. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
environment "[dev]"

ruff check .
ruff format --check .
pyright
lint-imports
exec python -m pytest "$@"
