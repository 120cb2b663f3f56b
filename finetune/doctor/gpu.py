"""`doctor --gpu`: what CPU processes cannot show, checked and measured on this machine's GPUs, most valuable first.

A piece consists of cases. The result of a case is a line of OUT/results.jsonl as soon as there is one, and stays, so
that a machine that is lent for minutes at a time continues from there. A command starts no case that may take longer
than the time it has left. A case that is left out because a package or a device is missing has that as its result; one
that fails is tried again after those without a result. OUT/report.md is written after every case.
"""

from __future__ import annotations

import json
import math
import random
import re
import subprocess
import time
from importlib import metadata
from pathlib import Path

from finetune.doctor.gpu_cases import (
    PIECES,
    TINY,
    GpuCheck,
    Result,
    in_clone,
    installed_version,
    parity_choices,
    reference,
)
from finetune.errors import UserError

OPTIONAL = ("bitsandbytes", "deepspeed", "ninja", "wandb")  # requirements that only their own cases need
EXPERTS: Result = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32, "initializer_range": 0.1}
# Seconds that a case may take, an estimate. Of the first case of an 8B model most is making weights.
LONGEST = {"tests": 180, "resume": 150, "speed": 400, "benchmark": 400}
USUALLY = 120
TIMES = 2  # of that a case may take before it is ended: a hang costs one case
# Whatever goes wrong in one case must not keep the others from running.
PROBLEMS = (RuntimeError, OSError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError, ImportError)
PROBLEMS += (subprocess.SubprocessError, AssertionError)


def check_gpu(check: GpuCheck, pieces: list[str], names: list[str], seconds: float) -> int:
    """Runs the cases that have no result yet, then those that have failed; returns the exit status.

    names: of cases; none: all. seconds: after which no case is started; 0: only write the report. Raises UserError."""
    if unknown := [piece for piece in pieces if piece not in PIECES]:
        raise UserError(f"--pieces {','.join(unknown)}: choose from {', '.join(PIECES)}")
    if missing := missing_requirements():
        listed = " ".join(missing)
        raise UserError(f"not installed, or in another version: {listed} (docs/proofs/gpu.md has the commands)")
    cases = [(piece, *case) for piece in pieces or PIECES for case in PIECES[piece](check)]
    if unknown := set(names) - {case for _, case, _ in cases}:
        raise UserError(f"--case {sorted(unknown)[0]!r}: choose from {', '.join(repr(case) for _, case, _ in cases)}")
    if seconds and not check.num_devices:
        raise UserError("no GPU here: --rehearse 2 tries everything out on two CPU processes")
    check.out.mkdir(parents=True, exist_ok=True)
    if seconds:
        write_inputs(check)
    check.until = time.monotonic() + seconds
    results = read_results(check.out)
    statuses = {(one["piece"], one["case"]): one["status"] for one in results}
    waiting = [
        (piece, case, measure)
        for status in (None, "failed")
        for piece, case, measure in cases
        if statuses.get((piece, case)) == status and (not names or case in names)
    ]
    started = 0
    for piece, case, measure in waiting:
        check.case_until = math.inf  # of the case before
        if not seconds or (started and check.seconds_left < LONGEST.get(piece, USUALLY)):
            continue
        started += 1
        began, status, values = time.monotonic(), "ok", {}
        check.case_until = began + TIMES * LONGEST.get(piece, USUALLY)
        check.again = statuses.get((piece, case)) == "failed"
        try:
            values = measure()
        except UserError as why:
            status, values = "left out", {"why": str(why)}
        except PROBLEMS as error:
            status, values = "failed", {"why": f"{type(error).__name__}: {error}"[:600]}
        took = round(time.monotonic() - began, 1)
        with open(check.out / "results.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps({"piece": piece, "case": case, "status": status, "seconds": took, **values}) + "\n")
        results = read_results(check.out)
        write_report(check, results)
        print(f"{piece}, {case}: {status} {values.get('why', '')}", flush=True)
    if seconds and started < len(waiting):
        print(f"no time left for {len(waiting) - started} cases; the same command continues from here")
    write_report(check, results)
    failed = sum(one["status"] == "failed" for one in results)
    print(f"{len(results)} results, {failed} failed: {check.out / 'report.md'}")
    return 1 if failed else 0


def make_references(check: GpuCheck) -> int:
    """Trains what `parity` compares a GPU with, on processors, into the folder that is carried to the GPU machine;
    returns the exit status. A reference that is there is kept."""
    check.out.mkdir(parents=True, exist_ok=True)
    write_inputs(check)
    failed = 0
    for name, (overrides, _) in parity_choices(check).items():
        try:
            said = f"last loss {reference(check, name, overrides)['losses'][-1]:.4f}"
        except (UserError, *PROBLEMS) as error:
            failed, said = failed + 1, f"failed: {error}"
        print(f"reference, {name}: {said}", flush=True)
    print(f"{check.out}: take this folder along, and give it as --out")
    return 1 if failed else 0


def missing_requirements() -> list[str]:
    """Returns what a run needs and this Python lacks, or has in another version; read from a clone's pyproject.toml if
    finetune is not installed. Requirements of requirements only if they are missing: wheels that are carried to a
    machine without an index are easily one too few."""
    from packaging.requirements import Requirement

    try:
        lines = metadata.requires("finetune") or []
    except metadata.PackageNotFoundError:
        text = in_clone("pyproject.toml").read_text(encoding="utf-8")
        listed = text.partition("\ndependencies = [")[2].partition("\n]")[0]
        lines = re.findall(r'"(.+)",$', listed, re.MULTILINE)
    missing, seen, waiting = [], set[str](), [(line, "finetune") for line in lines]
    while waiting:
        line, needed_by = waiting.pop(0)
        one = Requirement(line)
        if one.name in seen or one.name in OPTIONAL or (one.marker and not one.marker.evaluate({"extra": ""})):
            continue
        seen.add(one.name)
        version = installed_version(one.name)
        if version is None:
            missing.append(f"{one.name}{one.specifier}" + (f" (of {needed_by})" if needed_by != "finetune" else ""))
        elif needed_by == "finetune" and not one.specifier.contains(version, prereleases=True):
            missing.append(f"{one.name}{one.specifier}")
        else:
            waiting += [(further, one.name) for further in metadata.requires(one.name) or []]
    return missing


def write_inputs(check: GpuCheck) -> None:
    """Makes tiny models and rows, unless an earlier command has, and the recipe: the folder may have been moved."""
    if not (check.out / "pairs.jsonl").exists():
        write_models_and_rows(check)
    import yaml

    recipe = {
        "run": {"name": "base", "dir": str(check.out / "runs")},
        "model": {"name": str(check.out / "llama"), "chat_template": "chatml"},
        "mode": "full",
        "data": {"train": [{"path": str(check.out / "rows.jsonl"), "format": "messages"}], "max_length": 64},
        "batch": {"rows": 4, "rows_per_device": 1},
        "optimizer": {"lr": 1e-3, "weight_decay": 0.01},
        "schedule": {"warmup_steps": 2},
        "train": {"max_steps": 3 if check.rehearse else 20, "precision": "fp32"},
    }
    (check.out / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")


def write_models_and_rows(check: GpuCheck) -> None:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    from finetune.models.remote_code import from_config

    rng, rows = random.Random(0), []
    words = ("river", "stone", "light", "cloud", "paper", "green", "seven", "house", "under", "table", "quick", "stars")
    for _ in range(300 if check.rehearse else 20_000):  # answers of very different length, so that a wrong mean shows
        question = rng.choices(words, k=rng.randint(1, 9))
        answer = question[::-1] if rng.random() < 0.5 else question[:1]
        said = (("user", question), ("assistant", answer))
        rows.append(json.dumps({"messages": [{"role": role, "content": " ".join(text)} for role, text in said]}))
    (check.out / "rows.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<pad>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=350, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(rows[:300], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<|im_end|>")
    for name, values in (("llama", TINY), ("mixtral", TINY | EXPERTS | {"model_type": "mixtral"})):
        torch.manual_seed(0)
        from_config(AutoModelForCausalLM, AutoConfig.for_model(**values)).save_pretrained(check.out / name)
        tokenizer.save_pretrained(check.out / name)
    pairs = []
    for row in map(json.loads, rows[:400]):
        prompt, chosen = row["messages"]
        rejected = chosen["content"]
        while rejected == chosen["content"]:  # a pair of equal answers is refused
            rejected = " ".join(rng.choices(words, k=rng.randint(1, 9)))
        rejected_answer = {"role": "assistant", "content": rejected}
        pairs.append(json.dumps({"prompt": [prompt], "chosen": [chosen], "rejected": [rejected_answer]}))
    (check.out / "pairs.jsonl").write_text("\n".join(pairs) + "\n", encoding="utf-8")  # last: all is there


def read_results(out: Path) -> list[Result]:
    """Returns the last result of each case. A line that was cut off is none."""
    latest: dict[tuple[str, str], Result] = {}
    file = out / "results.jsonl"
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        try:
            result = json.loads(line)
        except ValueError:
            continue
        latest[result["piece"], result["case"]] = result
    return list(latest.values())


def write_report(check: GpuCheck, results: list[Result]) -> None:
    device = next((one["device"] for one in results if "device" in one), "CPU" if check.rehearse else "CUDA")
    lines = [f"# GPU check: {device}", ""]
    if check.rehearse:
        lines += ["A rehearsal on the CPU: no figure here is a GPU's.", ""]
    for piece in PIECES:
        of_piece = [one for one in results if one["piece"] == piece]
        if not of_piece:
            continue
        lines += [f"## {piece}", "", "| case | result | figures | s |", "| --- | --- | --- | --- |"]
        for one in of_piece:
            values = {k: v for k, v in one.items() if k not in ("piece", "case", "status", "seconds")}
            figures = ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in values.items())
            figures = figures.replace("|", "/").replace("\n", " ")
            lines.append(f"| {one['case']} | {one['status']} | {figures} | {one['seconds']} |")
        lines.append("")
    (check.out / "report.md").write_text("\n".join(lines), encoding="utf-8")
