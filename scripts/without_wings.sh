#!/usr/bin/env bash
# Runs the trainer's tests in a copy of this checkout that has no wing: what the trainer needs is all there.
#   arguments  tests to run instead of those without launches, or options of pytest; `tests/trainer` runs all
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents --no-dereference -t "$copy"
cd "$copy"

rm -r finetune/{rl,release,plan,desk} tests/{rl,release,plan,desk,whole}
rm finetune/{__main__,api,features,quickstart,sweep,unpack}.py
cp tests/support/trainer_alone.py finetune/__main__.py

if [ $# = 0 ]; then
  set -- tests/trainer/{unit,numerics}
fi
PYTHONPATH=$copy python -m pytest -q -p no:randomly -p no:cacheprovider "$@"
