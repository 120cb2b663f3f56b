"""Wrong lines, put into a copy of the package one at a time: the tests named beside each have to fail.

    python scripts/mutants.py                        # every one; a line for each, and which test caught it
    python scripts/mutants.py --only objectives z0   # names or topics that contain one of the words

The tests are run on the unchanged copy first, so that a failure is the wrong line's. Exit status 1 where a mutant
survives, where its line is not in the file exactly once, or where tests fail without it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Mutant:
    topic: str
    name: str  # what is wrong
    file: str
    old: str  # in the file exactly once
    new: str
    # Arguments of pytest, of which one test has to fail; or a script with its arguments, which has to exit with 1.
    tests: tuple[str, ...]


_OBJECTIVE, _PREFERENCE = "finetune/objectives/objective.py", "finetune/objectives/preference.py"
_FORMULAS = "tests/unit/objectives/test_preference.py"
_SHARED = "tests/numerics/test_shared_prompts.py"
MUTANTS = (
    Mutant(
        "objectives",
        "mean of means: of the pairs of each micro-batch",
        _PREFERENCE,
        "settings).sum(), ",
        "settings).mean(), ",
        (f"{_FORMULAS}::test_a_loss_is_its_formula",),
    ),
    Mutant(
        "objectives",
        "mean of means: NLL of the chosen answers by pairs",
        _PREFERENCE,
        '"first_target_tokens")',
        '"examples")',
        (f"{_FORMULAS}::test_the_sft_term_is_over_the_chosen_tokens_of_the_step",),
    ),
    Mutant(
        "objectives",
        "mean of means: by the counts of a micro-batch",
        "finetune/training/trainer.py",
        "objective.loss(terms, self.counts)",
        "objective.loss(terms, batch.counts)",
        ("tests/unit/training/test_auto_batch.py::test_the_maths_does_not_change",),
    ),
    Mutant(
        "objectives",
        "shift by one: a place is trained on its own token",
        "finetune/data/batch.py",
        "input_ids[predicting + 1].astype",
        "input_ids[predicting].astype",
        (f"{_FORMULAS}::test_a_pair_equals_its_reference_before_the_first_step",),
    ),
    Mutant(
        "objectives",
        "shift by one: the second answer of a shared prompt one place later",
        "finetune/data/batch.py",
        "np.arange(begins[i - 1], begins[i - 1] + prefix)",
        "np.arange(begins[i - 1], begins[i - 1] + prefix) - 1",
        (f"{_SHARED}::test_losses_and_gradients_are_those_of_whole_sequences",),
    ),
    Mutant(
        "objectives",
        "label smoothing ignored",
        _PREFERENCE,
        "return -(1 - wrong) * logsigmoid(margin) - wrong * logsigmoid(-margin)",
        "return -logsigmoid(margin)",
        (f"{_FORMULAS}::test_a_loss_is_its_formula",),
    ),
    Mutant(
        "objectives",
        "torn pair: one answer is left where both are too long",
        "finetune/data/tokenizing.py",
        'counts["dropped_overlong"] += 1',
        'counts["dropped_overlong"] += 1\n        yield replace(example, sequences=example.sequences[:1])',
        ("tests/unit/data/test_bad_pairs.py::test_an_answer_that_is_too_long_takes_its_pair_along",),
    ),
    Mutant(
        "objectives",
        "torn pair: the chosen answer of one against the rejected of another",
        _PREFERENCE,
        "per_sequence.view(-1, 2).unbind(1)",
        "per_sequence.view(2, -1).unbind(0)",
        (f"{_FORMULAS}::test_a_loss_is_its_formula",),
    ),
    Mutant(
        "objectives",
        "reference with dropout",
        "finetune/engine/base.py",
        "self.model.eval()",
        "pass",
        ("tests/e2e/test_reference_runs.py::test_dropout_only_where_asked",),
    ),
    Mutant(
        "objectives",
        "policy with dropout that the recipe does not ask for",
        "finetune/models/config.py",
        "return without_dropout(config) if recipe.objective.drops_nothing else config",
        "return config",
        ("tests/e2e/test_reference_runs.py::test_dropout_only_where_asked",),
    ),
    Mutant(
        "objectives",
        "lengths with what is not trained",
        _OBJECTIVE,
        "torch.tensor(batch.sequence_targets, dtype=torch.float64)",
        "torch.tensor(batch.sequence_tokens, dtype=torch.float64)",
        (f"{_FORMULAS}::test_a_loss_is_its_formula",),
    ),
    Mutant(
        "objectives",
        "lengths with padding: all of a row as long as its longest answer",
        _OBJECTIVE,
        "return token_ranks.sum(local.to(batch.targets.ids.device, non_blocking=True))",
        "return token_ranks.sum(local.max() + 0 * local)",
        (f"{_FORMULAS}::test_a_loss_is_its_formula",),
    ),
    Mutant(
        "objectives",
        "z0 per rank",
        "finetune/training/statistics.py",
        "return Sums(engine.ranks.total(sums.totals), sums.terms, counts)",
        "ranks = engine.accelerator.num_processes\n"
        "    return Sums({name: total.cpu() * ranks for name, total in sums.totals.items()}, sums.terms, counts)",
        ("scripts/parity.py", "--only", "ddp", "x2", "full kto"),
    ),
    Mutant(
        "objectives",
        "z0 per micro-batch",
        "finetune/objectives/kto.py",
        "kl = batch.columns[MISMATCHED].clamp(min=0)",
        "kl = mismatched.detach().mean().clamp(min=0)",
        (f"{_FORMULAS}::test_kto_is_its_formula",),
    ),
    Mutant(
        "objectives",
        "z0 below 0",
        "finetune/objectives/kto.py",
        "batch.columns[MISMATCHED].clamp(min=0)",
        "batch.columns[MISMATCHED]",
        (f"{_FORMULAS}::test_kto_is_its_formula",),
    ),
    Mutant(
        "objectives",
        "IPO of sums",
        _PREFERENCE,
        "PairLoss(ipo, averages=True)",
        "PairLoss(ipo)",
        (f"{_FORMULAS}::test_a_loss_is_its_formula",),
    ),
    Mutant(
        "objectives",
        "margin of a reward added",
        "finetune/objectives/scores.py",
        "chosen - rejected - batch.columns.get(MARGIN, 0.0)",
        "chosen - rejected + batch.columns.get(MARGIN, 0.0)",
        ("tests/unit/objectives/test_scores.py::test_a_reward_is_its_formula",),
    ),
    Mutant(
        "objectives",
        "the second answer's positions go on behind the first",
        "finetune/data/batch.py",
        "np.concatenate([np.arange(length) for length in lengths])",
        "np.arange(sum(lengths))",
        (f"{_SHARED}::test_losses_and_gradients_are_those_of_whole_sequences",),
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="words in names or topics")
    parser.add_argument("--json", type=Path, help="write the list with what caught each there")
    arguments = parser.parse_args()
    chosen = [
        mutant
        for mutant in MUTANTS
        if not arguments.only or any(word in f"{mutant.topic}: {mutant.name}" for word in arguments.only)
    ]
    with tempfile.TemporaryDirectory(prefix="finetune-mutants-") as name:
        copy = copied(Path(name) / "tree")
        broken = unchanged_failures(copy, chosen)
        found = [{**asdict(mutant), "caught_by": caught_by(copy, mutant)} for mutant in chosen]
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    survived = [one["name"] for one in found if one["caught_by"] is None]
    print(f"{len(found) - len(survived)} of {len(found)} caught")
    raise SystemExit("\n".join([*broken, *(f"survived: {name}" for name in survived)]) or 0)


def copied(folder: Path) -> Path:
    """Returns a copy of the files that git knows of, or would."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for path in filter(None, listed.stdout.splitlines()):
        if (ROOT / path).is_file():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / path, folder / path)
    return folder


def unchanged_failures(copy: Path, mutants: list[Mutant]) -> list[str]:
    """Runs the tests of all mutants once on the unchanged copy; returns those that do not pass."""
    every = dict.fromkeys(mutant.tests for mutant in mutants)
    return [f"fails without a mutant: {' '.join(tests)}" for tests in every if run(copy, tests).returncode != 0]


def caught_by(copy: Path, mutant: Mutant) -> str | None:
    """Puts the line in, runs the tests and takes it out again; returns the test that failed."""
    path = copy / mutant.file
    text = path.read_text(encoding="utf-8")
    if (count := text.count(mutant.old)) != 1:
        raise SystemExit(f"{mutant.name}: {mutant.old!r} is {count} times in {mutant.file}")
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        done = run(copy, mutant.tests)
    finally:
        path.write_text(text, encoding="utf-8")
    test = None
    if done.returncode == 1:  # of pytest: tests failed; 2 and more: it could not run them
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
        test = failed[1] if failed else " ".join(mutant.tests)
    print(f"{mutant.topic}: {mutant.name}: {'SURVIVED' if test is None else f'caught by {test}'}", flush=True)
    if test is None:
        print(done.stdout[-2000:], done.stderr[-2000:], file=sys.stderr)
    return test


def run(copy: Path, tests: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    is_script = tests[0].endswith(".py") and tests[0].startswith("scripts/")
    command = list(tests) if is_script else ["-m", "pytest", "-n", "0", "-q", "-x", "-p", "no:randomly", *tests]
    environment = {
        **os.environ,
        "PYTHONPATH": str(copy),
        "PYTHONDONTWRITEBYTECODE": "1",  # a line of the same length within a second would not be compiled again
        "FINETUNE_CACHE": str(copy.parent / "cache"),
    }
    return subprocess.run([sys.executable, *command], cwd=copy, env=environment, capture_output=True, text=True)


if __name__ == "__main__":
    main()
