#!/usr/bin/env bash
# Installs what is missing and trains the embedded default: dates in any writing become ISO dates (full fine-tuning of a
# small Llama from scratch), then a LoRA adapter on top teaches it another writing, and a second one to prefer it, by
# pairs of both. No GPU, no hub, a few minutes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
environment ""

run() { echo "+ $*"; "$@"; }
run python scripts/make_quickstart.py
for stage in full lora dpo-lora; do
  run accelerate launch --config_file accelerate_configs/single.yaml -m finetune train "recipes/quickstart/$stage.yaml" "$@"
done
for stage in full lora; do
  run python -m finetune generate "runs/quickstart-$stage" "the 3rd of March, 2021"
done
python - <<'REPORT'
import json
from pathlib import Path

print("\nheld-out exact match, before -> after")
passed = True
for stage, enough in (("full", 0.99), ("lora", 0.95)):  # the adapter's few hundred steps leave a date or two of 200
    lines = [json.loads(line) for line in Path(f"runs/quickstart-{stage}/metrics.jsonl").read_text().splitlines()]
    scores = [line["exact_match"] for line in lines if "exact_match" in line]
    print(f"  {stage}: {scores[0]:.1%} -> {scores[-1]:.1%}")
    passed &= scores[-1] >= enough
lines = [json.loads(line) for line in Path("runs/quickstart-dpo-lora/metrics.jsonl").read_text().splitlines()]
accuracy = [line["eval_rewards/accuracy"] for line in lines if "eval_rewards/accuracy" in line]
print(f"  dpo-lora, held-out preference accuracy: {accuracy[0]:.1%} -> {accuracy[-1]:.1%}")
passed &= accuracy[-1] > 0.9
raise SystemExit(0 if passed else "less than expected: please report this with the output above")
REPORT
