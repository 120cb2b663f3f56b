#!/usr/bin/env bash
# Builds the documentation as a site in site/ (open site/index.html); a link that leads nowhere is an error.
#   serve    instead: shows it at http://127.0.0.1:8000 and follows changes
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
# What mkdocs needs is installed once; an environment that has it, such as one of `[dev]`, stays as it is.
if [ -x .venv/bin/mkdocs ]; then PATH="$PWD/.venv/bin:$PATH"; else environment "[docs]"; fi
exec mkdocs "${1:-build}" --strict
