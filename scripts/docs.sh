#!/usr/bin/env bash
# Builds the documentation as a site in site/ (open site/index.html); a link that leads nowhere is an error.
#   serve    instead: shows it at http://127.0.0.1:8000 and follows changes
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
environment "[docs]"
exec mkdocs "${1:-build}" --strict
