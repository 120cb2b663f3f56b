#!/usr/bin/env bash
# Installs what is missing and passes the tests: linters, types, layers, pytest. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
environment "[dev]"

# NVMe offload is compiled against libaio; without it and without the right to install it, its test is skipped.
if [ ! -e /usr/include/libaio.h ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  (apt-get update -qq && apt-get install -y -qq libaio-dev) >/dev/null 2>&1 || echo "libaio-dev could not be installed"
fi

ruff check .
ruff format --check .
pyright
lint-imports
exec python -m pytest "$@"
