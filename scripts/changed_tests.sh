#!/usr/bin/env bash
# Prints the tests that concern what differs from main (or from the commit given), one path a line; nothing: no change.
#   a wing                 its tests and those of the whole repository that take seconds
#   pages alone            the tests of pages
#   anything else          all: the trainer is below every wing
# CI runs all of them, whatever has changed: wings above the changed one may depend on it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

main=${1:-$(git rev-parse --verify -q origin/main || git rev-parse --verify -q main)}
changed=$(git diff --name-only "$(git merge-base HEAD "$main")" && git ls-files --others --exclude-standard)

declare -A folders=()
while read -r file; do
  case $file in
    "") ;;
    finetune/rl/* | tests/rl/*) folders[tests/rl]=1 ;;
    finetune/release/* | tests/release/*) folders[tests/release]=1 ;;
    finetune/plan/* | tests/plan/*) folders[tests/plan]=1 ;;
    finetune/desk/* | finetune/api.py | finetune/quickstart.py | finetune/sweep.py | tests/desk/*) folders[tests/desk]=1 ;;
    docs/* | *.md | mkdocs.yml) folders[pages]=1 ;;
    *) echo tests && exit ;;
  esac
done <<<"$changed"

if [ ${#folders[@]} = 0 ]; then exit; fi
if [ "${!folders[*]}" = pages ]; then echo tests/whole/test_docs.py && echo tests/whole/test_facts.py && exit; fi
unset 'folders[pages]'
printf '%s\n' "${!folders[@]}" tests/whole/recipe tests/whole/test_*.py
