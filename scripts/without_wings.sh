#!/usr/bin/env bash
# Runs the trainer's tests in a copy of this checkout that has no wing: what the trainer needs is all there.
#   arguments  tests to run instead, or options of pytest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents --no-dereference -t "$copy"
cd "$copy"

rm -r finetune/{rl,release,plan,desk}
rm finetune/{__main__,api,features,quickstart,sweep}.py

# Tests of the trainer that still need a wing.
rm tests/trainer/unit/data/test_{image_rows,teacher_file}.py tests/trainer/unit/engine/test_pipeline_stages.py
rm tests/trainer/unit/training/test_auto_batch.py tests/trainer/numerics/test_{divergence,head}.py

if [ $# = 0 ]; then
  set -- tests/trainer/{unit,numerics}
fi
PYTHONPATH=$copy python -m pytest -q -p no:randomly -p no:cacheprovider "$@"
