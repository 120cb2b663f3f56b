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

# Files of the trainer's folders that need a wing.
rm tests/unit/data/test_{image_rows,teacher_file}.py tests/unit/engine/test_{costs,pipeline_stages}.py
rm tests/unit/recipe/test_{quickstart_data,recipe_bad,recipe_files,recipe_load,rollout_rules}.py
rm tests/unit/objectives/test_policy.py tests/unit/training/test_{auto_batch,prepare}.py
rm tests/numerics/test_{added_tokens,divergence,export_memory,head,lora_targets,mixers,mxfp4,policy_losses,text_part}.py

if [ $# = 0 ]; then
  set -- tests/unit/{checkpoints,data,engine,objectives,recipe,tracking,training} tests/numerics
fi
PYTHONPATH=$copy python -m pytest -q -p no:randomly -p no:cacheprovider "$@"
