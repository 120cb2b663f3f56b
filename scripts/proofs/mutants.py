"""Wrong lines, put into a copy of the package one at a time: the tests named with each have to fail.

    python scripts/proofs/mutants.py                        # every one; a line for each, and which test caught it
    python scripts/proofs/mutants.py --only objectives z0   # names or topics that contain one of the words

The tests are run on the unchanged copy first, so that a failure is the wrong line's. Exit status 1 if a mutant
survives, if its line is not in the file exactly once, or if tests fail without it.

pytest runs in forks of this process, which has imported the large libraries, never the package itself.
"""

from __future__ import annotations

import argparse
import compileall
import importlib
import json
import os
import py_compile
import re
import shutil
import subprocess
import sys
import tempfile
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")  # read by what is imported next

import pytest

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Mutant:
    topic: str
    name: str  # what is wrong
    file: str
    old: str  # in the file exactly once
    new: str
    # Arguments of pytest, of which one test has to fail; or a script with its arguments, which has to exit with 1.
    tests: tuple[str, ...]


_PREFERENCE, _FORMULAS = "finetune/objectives/preference.py", "tests/trainer/unit/objectives/test_preference.py"
_PARITY = "scripts/proofs/parity_matrix.py"
_HEAD, _LOSS = "tests/trainer/numerics/test_head.py", "finetune/models/head/token_loss.py"
_BATCHES = "tests/trainer/unit/data/test_data_batches.py"
_ORDER = "tests/trainer/unit/data/test_data_order_properties.py"
_TEMPLATES, _SPANS = "tests/trainer/unit/data/test_data_templates.py", "finetune/data/chat/trained_spans.py"
_OPTIM, _OPTIMIZERS = "finetune/training/optim.py", "tests/trainer/numerics/test_optimizers_and_schedules.py"
_LOADER = "finetune/data/loader.py"
_ATTENTION = "tests/trainer/numerics/test_attention.py::test_packed_equals_one_document_at_a_time"
_PLAIN = "tests/trainer/numerics/test_plain_loop.py"
MUTANTS = (
    Mutant(
        "rollouts",
        "mean of means: of the samples of each micro-batch",
        "finetune/rl/policy.py",
        "Term(outputs.total, loss.unit, 1.0)",
        "Term(outputs.total / max(1, len(batch.sequence_tokens)), loss.unit, 1.0)",
        ("tests/rl/numerics/test_policy_losses.py", "-k", "dapo"),
    ),
    Mutant(
        "rollouts",
        "a sample that was cut has a divergence",
        "finetune/rl/policy.py",
        "away = kept(batch.target_columns[INITIAL] - log_probs, batch)",
        "away = batch.target_columns[INITIAL] - log_probs",
        ("tests/rl/unit/test_policy.py", "-k", "masked"),
    ),
    Mutant(
        "objectives",
        "accuracy: rounding decides between equal rewards",
        "finetune/objectives/ranking.py",
        "tolerance.clamp(min=smallest)[:, None]",
        "smallest",
        ("tests/trainer/unit/objectives/test_ranking.py",),
    ),
    Mutant(
        "heads that predict ahead",
        "the second token of a document is predicted from the one before",
        "finetune/data/batch.py",
        "has_place = batch.targets.positions > begins",
        "has_place = batch.targets.positions > 0",
        ("tests/trainer/numerics/test_mtp_head.py::test_targets_are_two_ahead_and_stay_in_their_sequence",),
    ),
    Mutant(
        "heads that predict ahead",
        "hidden states first, as in the paper",
        "finetune/models/mtp.py",
        "self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)",
        "self.pre_fc_norm_hidden(hidden), self.pre_fc_norm_embedding(embedded)",
        ("tests/trainer/numerics/test_mtp_head.py::test_loss_and_gradients_are_those_of_a_plain_loop",),
    ),
    Mutant(
        "training",
        "rounding is an improvement",
        "finetune/recipe/schema.py",
        "return ahead > LEAST_DIFFERENCE * max(1.0, abs(value), abs(best))",
        "return ahead > 0",
        ("tests/trainer/unit/objectives/test_ranking.py", "-k", "improvement"),
    ),
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
        "mean of means: by the counts of a micro-batch",
        "finetune/training/trainer.py",
        "objective.loss(terms, self.counts)",
        "objective.loss(terms, batch.counts)",
        ("tests/trainer/unit/training/test_auto_batch.py::test_the_maths_does_not_change",),
    ),
    Mutant(
        "objectives",
        "shift by one: a place is trained on its own token",
        "finetune/data/batch.py",
        "input_ids[trained].astype",
        "input_ids[trained - 1].astype",
        (f"{_FORMULAS}::test_a_pair_equals_its_reference_before_the_first_step",),
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
        "reference with dropout",
        "finetune/engine/base.py",
        "self.model.eval()",
        "pass",
        ("tests/trainer/e2e/test_reference_runs.py::test_dropout_only_where_asked",),
    ),
    Mutant(
        "objectives",
        "z0 per rank",
        "finetune/training/evaluation.py",
        "return Sums(engine.ranks.total(sums.totals, sums.largest), sums.terms, counts)",
        "ranks = engine.accelerator.num_processes\n"
        "    return Sums({name: total.cpu() * ranks for name, total in sums.totals.items()}, sums.terms, counts)",
        (_PARITY, "--only", "ddp", "x2", "full kto"),
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
        "masks",
        "the end of turn is not trained",
        _SPANS,
        "end = len(text) - len(traits.closing)",
        "end = len(text) - len(traits.tail)",
        (_TEMPLATES, "-k", "exact and chatml"),
    ),
    Mutant(
        "masks",
        "the last character of the prompt is trained",
        _SPANS,
        "before = len(written.prompt)",
        "before = len(written.prompt) - 1",
        (_TEMPLATES, "-k", "exact and chatml"),
    ),
    Mutant(
        "data",
        "packing loses a document",
        "finetune/data/packing.py",
        "open_rows.place(size, number)",
        "open_rows.place(size, max(1, number - 1))",
        (_ORDER,),
    ),
    Mutant(
        "data",
        "documents of a row are one",
        "finetune/data/batch.py",
        "sequence_lengths=(*layout.own_lengths, *layout.padding),",
        "sequence_lengths=(sum(layout.own_lengths), *layout.padding),",
        (_BATCHES,),
    ),
    Mutant(
        "data",
        "a step leaves its first row out",
        _LOADER,
        "return range(first, min(first",
        "return range(first + (step > 0), min(first",
        (_BATCHES,),
    ),
    Mutant(
        "data",
        "a micro-batch is run twice, another never",
        _LOADER,
        "rank if i % 2 == 0 else -1 - rank",
        "rank if i % 2 == 0 else 0",
        (_ORDER,),
    ),
    Mutant(
        "attention",
        "a document sees its own future",
        "finetune/models/attention/per_document.py",
        "                is_causal=mask is None,\n",
        "                is_causal=False,\n",
        (_ATTENTION,),
    ),
    Mutant(
        "attention",
        "a window is one token longer",
        "finetune/models/attention/per_document.py",
        "mask & (distance < window)",
        "mask & (distance <= window)",
        (_ATTENTION,),
    ),
    Mutant(
        "attention",
        "a token does not see itself",
        "finetune/models/attention/pieces.py",
        "dtype=torch.bool).triu(1)",
        "dtype=torch.bool).triu(0)",
        ("tests/trainer/numerics/test_pieces.py",),
    ),
    Mutant(
        "attention",
        "RoPE takes a row for one document",
        "finetune/models/attention/per_document.py",
        "starts = (positions == 0).nonzero()[:, 0].tolist()",
        "starts = [0]",
        ("tests/trainer/numerics/test_rope.py",),
    ),
    Mutant(
        "attention",
        "isolation is believed",
        "finetune/models/attention/isolation.py",
        "return self.loss <= LOSS_TOLERANCE and self.gradient <= GRADIENT_TOLERANCE",
        "return True",
        ("tests/trainer/numerics/test_isolation.py",),
    ),
    Mutant(
        "head",
        "z-loss: half of its gradient",
        _LOSS,
        "gradient.mul_(1 + 2 * self.z_loss * lse)",
        "gradient.mul_(1 + self.z_loss * lse)",
        (_HEAD, "-k", "formula"),
    ),
    Mutant(
        "head",
        "label smoothing has no gradient",
        _LOSS,
        "gradient.sub_(smoothing / logits.shape[1])",
        "gradient.sub_(0.0)",
        (_HEAD, "-k", "formula"),
    ),
    Mutant(
        "head",
        "bf16: the gradient of the head is rounded with each chunk",
        "finetune/models/head/chunked.py",
        "grad_weight = torch.empty_like(self.weight, dtype=sum_dtype)",
        "grad_weight = torch.empty_like(self.weight, dtype=compute)",
        (_HEAD, "-k", "bf16"),
    ),
    Mutant(
        "experts",
        "grouped products: an expert's last row goes to the next one",
        "finetune/models/grouped_experts.py",
        "right=True, out_int32=True)  # (E,), of the rows of each",
        "right=True, out_int32=True).sub(1).clamp_min(0)",
        ("tests/trainer/numerics/test_grouped_experts.py", "-k", "as_peft"),
    ),
    Mutant(
        "adapters",
        "LoRA is scaled twice",
        "finetune/models/weights.py",
        "lora_alpha=lora.alpha,",
        "lora_alpha=2 * lora.alpha,",
        ("tests/trainer/numerics/test_loading.py", "-k", "scaled"),
    ),
    Mutant(
        "adapters",
        "merged without their scale",
        "finetune/release/export/merging.py",
        "read(b).float() * scale, read(a)",
        "read(b).float(), read(a)",
        ("tests/release/numerics/test_added_tokens.py", "-k", "alike and llama-added"),
    ),
    Mutant(
        "optimizer",
        "weight decay on biases and norms",
        _OPTIM,
        "((True, weight_decay), (False, 0.0))",
        "((True, weight_decay), (False, weight_decay))",
        (_OPTIMIZERS,),
    ),
    Mutant(
        "optimizer",
        "the decay counts the warm-up",
        _OPTIM,
        "progress = (step - warmup) / (steps - warmup)",
        "progress = step / steps",
        (_OPTIMIZERS,),
    ),
    Mutant(
        "optimizer",
        "factors of the schedule are multiplied up",
        "finetune/engine/base.py",
        'group["initial_lr"] * lr_factor',
        'group["lr"] * lr_factor',
        (_PLAIN,),
    ),
    Mutant(
        "optimizer",
        "clipped to the limit times the norm",
        "finetune/engine/base.py",
        "self.max_grad_norm / (norm + 1e-6)",
        "self.max_grad_norm",
        (_PLAIN,),
    ),
    Mutant(
        "optimizer",
        "clipped by the last chunk's norm",
        "finetune/engine/optimizer_step.py",
        "total += torch.dot(wide, wide)",
        "total = torch.dot(wide, wide)",
        ("tests/trainer/numerics/test_norms.py",),
    ),
    Mutant(
        "backends",
        "fp16: the number of ranks is a factor of the loss",
        "finetune/engine/base.py",
        "return self.loss_scale.value if self.loss_scale.enabled else float(self.averaged_ranks)",
        "return self.loss_scale.value * self.averaged_ranks",
        (_PARITY, "--only", "ddp", "x2", "full fp16"),
    ),
    Mutant(
        "backends",
        "DDP's average is not undone",
        "finetune/engine/ddp.py",
        "self.averaged_ranks = self.world_size",
        "pass",
        (_PARITY, "--only", "ddp", "x2", "full tied"),
    ),
    Mutant(
        "backends",
        "FSDP2's average is not undone",
        "finetune/engine/fsdp2.py",
        "self.averaged_ranks = self.parallelism.data * self.parallelism.tokens",
        "pass",
        (_PARITY, "--only", "fsdp2", "x2", "full tied"),
    ),
    Mutant(
        "backends",
        "DeepSpeed's average is not undone",
        "finetune/engine/zero.py",
        "self.model.backward(loss * self.averaged_ranks, ",
        "self.model.backward(loss, ",
        (_PARITY, "--only", "zero2", "x2", "full tied"),
    ),
    Mutant(
        "checkpoints",
        "a resumed run repeats a step",
        "finetune/training/state.py",
        "state = TrainingState(**resumed.progress)",
        'state = TrainingState(**{**resumed.progress, "step": resumed.progress["step"] - 1})',
        ("tests/trainer/e2e/test_resume.py::test_resumed_on_one_process_is_bitwise_the_run_never_stopped",),
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="words in names or topics")
    parser.add_argument("--json", type=Path, help="the list with what caught each; lines of those not chosen stay")
    arguments = parser.parse_args()
    chosen = [
        mutant
        for mutant in MUTANTS
        if not arguments.only or any(word in f"{mutant.topic}: {mutant.name}" for word in arguments.only)
    ]
    for library in ("torch", "transformers", "peft"):  # once, for all forks
        importlib.import_module(library)
    with tempfile.TemporaryDirectory(prefix="finetune-mutants-") as name:
        copy = copied(Path(name) / "tree")
        # By the text's hash, not by its time, so that a changed file is compiled again.
        hashed = py_compile.PycInvalidationMode.CHECKED_HASH
        compileall.compile_dir(copy / "finetune", quiet=1, invalidation_mode=hashed)
        broken = unchanged_failures(copy, chosen)
        found: list[dict[str, Any]] = []
        for mutant in chosen:
            found.append({**asdict(mutant), "caught_by": caught_by(copy, mutant)})
            if arguments.json:
                write(arguments.json, found)
    survived = [one["name"] for one in found if one["caught_by"] is None]
    print(f"{len(found) - len(survived)} of {len(found)} caught")
    raise SystemExit("\n".join([*broken, *(f"survived: {name}" for name in survived)]) or 0)


def write(file: Path, found: list[dict[str, Any]]) -> None:
    """Writes results in the order of `MUTANTS`, and with them those that the file has of mutants that have not changed
    since."""
    known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    results = {(one["topic"], one["name"]): one for one in [*known, *json.loads(json.dumps(found))]}
    mutants = json.loads(json.dumps([asdict(mutant) for mutant in MUTANTS]))
    of_mutants = [(mutant, results.get((mutant["topic"], mutant["name"]))) for mutant in mutants]
    lines = [result for mutant, result in of_mutants if result is not None and result == {**result, **mutant}]
    file.write_text(json.dumps(lines, indent=1) + "\n", encoding="utf-8")


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
    environment = {
        **os.environ,
        "PYTHONPATH": str(copy),
        "PYTHONDONTWRITEBYTECODE": "1",  # by time: a line of the same length within a second would not be seen
        "FINETUNE_CACHE": str(copy.parent / "cache"),
    }
    if tests[0].startswith("scripts/"):
        command = [sys.executable, *tests]
        return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    return forked_pytest(copy, ["-n", "0", "-q", "-x", "-p", "no:randomly", *_IMPORTED, *tests], environment)


_IMPORTED = ("-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning")  # anyio, by transformers


def forked_pytest(copy: Path, arguments: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        sys.stdout.flush()
        process = os.fork()
        if process == 0:
            status = 3  # pytest's for an error of its own
            try:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                os.chdir(copy)
                os.environ.update(environment)
                sys.path[0], sys.dont_write_bytecode = str(copy), True
                status = int(pytest.main(arguments))
            finally:  # or it would go on as this script
                if sys.exc_info()[0] is not None:
                    traceback.print_exc()
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        _, waited = os.waitpid(process, 0)
        output.seek(0)
        return subprocess.CompletedProcess(arguments, os.waitstatus_to_exitcode(waited), output.read(), "")


if __name__ == "__main__":
    main()
