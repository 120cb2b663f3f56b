"""From a file of rows to packed rows of tokens: ours next to TRL's preparation and plain `datasets.map`.

    python benchmarks/prepare_speed.py --rows gsm8k.jsonl --repeat 100 --json benchmarks/results/prepare_speed.json

--rows: a jsonl with `question` and `answer`. Two sets are made of it: `chat`, every row as a conversation, repeated;
and `documents`, plain texts of joined rows, their lengths log-normal up to 32k tokens. All contenders use the same
byte-level BPE tokenizer, trained on the rows, and the same Llama-3-shaped template; each renders, tokenizes and masks
every row. Ours and TRL (its own `SFTTrainer`, built on a tiny model, packing `bfd`) also pack; `datasets.map` only
tokenizes.

Every measurement is a process of its own, in turns, first with an empty cache and then again with what it left; the
time is from opening the file to having packed rows, without imports. Ratios are taken within a round, because other
work may load the machine, and the median over rounds is what counts. Peak memory is the resident size of a process and
its children, sampled; pages that they share count for each.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import psutil

SPECIAL = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|end_of_text|>"]
# Llama 3's pre-tokenization, https://huggingface.co/meta-llama/Meta-Llama-3-8B/blob/main/tokenizer.json
NUMBERS_AND_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
WORDS = NUMBERS_AND_WORDS + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
MAX_LENGTH = {"chat": 2048, "documents": 32768}  # tokens
CHARACTERS_PER_TOKEN = 2.8  # of such a tokenizer on such rows, about; only decides how long the documents are
SAMPLE_EVERY_S = 0.1


def main() -> None:
    arguments = parse_arguments()
    if arguments.contend:
        print(json.dumps(contend(**json.loads(arguments.contend))))
        return
    with tempfile.TemporaryDirectory(prefix="prepare_speed") as name:
        result = measure(arguments, Path(name))
    print_table(result)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, help="jsonl with `question` and `answer`")
    parser.add_argument("--repeat", type=int, default=100, help="times that the rows are repeated")
    parser.add_argument("--documents", type=int, default=2000, help="long documents; 0: none")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=int, nargs="*", default=[10**7, 10**8], help="tokens of the runs of ours alone")
    parser.add_argument("--best", action="store_true", help="the peers on all cores only, where they are quickest")
    parser.add_argument("--quick", action="store_true", help="rows twice, 100 documents, one round, no scale run")
    parser.add_argument("--vocabulary", type=int, default=16384)
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--contend", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.repeat, arguments.documents, arguments.rounds, arguments.scale = 2, 100, 1, []
    if not arguments.contend and arguments.rows is None:
        parser.error("--rows is needed")
    return arguments


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    rows = [json.loads(line) for line in arguments.rows.read_text(encoding="utf-8").splitlines() if line.strip()]
    save_tokenizer(rows, folder / "tokenizer", arguments.vocabulary)
    write_chat(rows, folder / "chat.jsonl", arguments.repeat)
    sets = ["chat"]
    if arguments.documents:
        write_documents(rows, folder / "documents.jsonl", arguments.documents)
        sets.append("documents")
    cells = [cell for name in sets for cell in compare(folder, name, arguments.rounds, arguments.best)]
    return {
        "command": "python benchmarks/prepare_speed.py " + shlex.join(sys.argv[1:]),
        "note": "other work may have loaded the machine: compare within a round; ratios are medians over rounds",
        "cores": cores(),
        "versions": {name: metadata.version(name) for name in ("finetune-recipes", "trl", "datasets", "transformers")},
        "python": platform.python_version(),
        "repeat": arguments.repeat,
        "cells": cells,
        "summary": [summary(name, cells) for name in sets],
        "scale": [scale(folder, rows, tokens) for tokens in arguments.scale],
    }


def compare(folder: Path, name: str, rounds: int, best: bool) -> list[dict[str, Any]]:
    """A cell for every contender and round, the contenders in turns."""
    sizes = dict.fromkeys((cores(),) if best else (1, cores()))
    contenders = [("ours", 0)] + [(who, n) for who in ("trl", "map") for n in sizes]
    cells = []
    for number in range(rounds):
        for who, processes in contenders:
            cache = folder / f"cache-{name}-{number}-{who}-{processes}"
            task = {"who": who, "processes": processes, "folder": str(folder), "name": name, "cache": str(cache)}
            first, second = run(task), run(task)
            label = who if who == "ours" else f"{who}, {processes} proc"
            cells.append({"set": name, "round": number, "contender": label, "first": first, "second": second})
            print(
                f"{name} {number} {label}: {first['rows'] / first['seconds']:,.0f} rows/s", file=sys.stderr, flush=True
            )
            shutil.rmtree(cache)
    return cells


def summary(name: str, cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Ours next to the best of TRL in the same round, and its second start next to its first; medians over rounds."""
    mine = [cell for cell in cells if cell["set"] == name]
    rounds = sorted({cell["round"] for cell in mine})

    def seconds(number: int, who: str, which: str = "first") -> float:
        seconds = [c[which]["seconds"] for c in mine if c["round"] == number and c["contender"].startswith(who)]
        return min(seconds)

    def median(values: list[float]) -> float:
        return round(statistics.median(values), 2)

    return {
        "set": name,
        "speed_over_best_trl": median([seconds(n, "trl") / seconds(n, "ours") for n in rounds]),
        "speed_over_best_map": median([seconds(n, "map") / seconds(n, "ours") for n in rounds]),
        "first_over_second_start": median([seconds(n, "ours") / seconds(n, "ours", "second") for n in rounds]),
        "trl_first_over_second_start": median([seconds(n, "trl") / seconds(n, "trl", "second") for n in rounds]),
    }


def scale(folder: Path, rows: list[dict[str, str]], tokens: int) -> dict[str, Any]:
    """Ours alone on about so many tokens: does memory grow?"""
    characters = sum(len(row["question"]) + len(row["answer"]) for row in rows)
    repeat = max(1, round(tokens * CHARACTERS_PER_TOKEN / characters))
    write_chat(rows, folder / "scale.jsonl", repeat)
    cache = folder / f"cache-scale-{tokens}"
    task = {"who": "ours", "processes": 0, "folder": str(folder), "name": "scale", "cache": str(cache)}
    cell = {"asked_tokens": tokens, "first": run(task), "second": run(task)}
    shutil.rmtree(cache)
    return cell


def run(task: dict[str, Any]) -> dict[str, Any]:
    """A contender in a process of its own, and the most memory that it and its children had."""
    command = [sys.executable, str(Path(__file__).resolve()), "--contend", json.dumps(task)]
    environment = {
        **os.environ,
        "FINETUNE_CACHE": task["cache"],
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    }
    Path(task["cache"]).mkdir(exist_ok=True)
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
        watch = Watch(process.pid)
        out, _ = process.communicate()
        watch.stop()
        if process.returncode:
            errors.seek(0)
            raise SystemExit(f"{task} failed:\n{errors.read()}")
    return {**json.loads(out.splitlines()[-1]), **watch.peaks}


class Watch:
    """Samples a process and its children: resident memory in bytes, and CPU seconds, imports included."""

    def __init__(self, pid: int):
        self.peaks: dict[str, float] = {"peak_rss": 0, "peak_rss_of_main": 0, "cpu_s": 0.0}
        self._cpu: dict[int, float] = {}
        self._process, self._stopped = psutil.Process(pid), threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stopped.wait(SAMPLE_EVERY_S):
            try:
                family = [self._process, *self._process.children(recursive=True)]
                sizes = [process.memory_info().rss for process in family]
                self._cpu |= {process.pid: sum(process.cpu_times()[:2]) for process in family}
            except psutil.Error:  # one of them has just ended
                continue
            self.peaks["cpu_s"] = sum(self._cpu.values())
            self.peaks["peak_rss"] = max(self.peaks["peak_rss"], sum(sizes))
            self.peaks["peak_rss_of_main"] = max(self.peaks["peak_rss_of_main"], sizes[0])


# --- the data


def save_tokenizer(rows: list[dict[str, str]], folder: Path, vocabulary: int) -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from finetune.data.chat.template_choice import TEMPLATES

    backend = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(WORDS), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator((row["question"] + "\n" + row["answer"] for row in rows), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=SPECIAL[0], eos_token=SPECIAL[3], pad_token=SPECIAL[4]
    )
    tokenizer.chat_template = (TEMPLATES / "llama3.jinja").read_text(encoding="utf-8").removesuffix("\n")
    tokenizer.save_pretrained(folder)


def write_chat(rows: list[dict[str, str]], path: Path, repeat: int) -> None:
    lines = [json.dumps({"messages": messages(row)}) + "\n" for row in rows]
    with path.open("w", encoding="utf-8") as file:
        for _ in range(repeat):
            file.writelines(lines)


def messages(row: dict[str, str]) -> list[dict[str, str]]:
    return [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]


def write_documents(rows: list[dict[str, str]], path: Path, count: int) -> None:
    """Log-normal lengths, median 4k tokens; rows in an order of their own in each document."""
    random = np.random.Generator(np.random.PCG64(0))
    tokens = np.minimum(random.lognormal(np.log(4096), 1.0, count), 0.9 * MAX_LENGTH["documents"])
    with path.open("w", encoding="utf-8") as file:
        for wanted in tokens * CHARACTERS_PER_TOKEN:
            file.write(json.dumps({"text": "".join(text_of(rows, random, wanted))[: int(wanted)].strip()}) + "\n")


def text_of(rows: list[dict[str, str]], random: np.random.Generator, characters: float) -> Iterator[str]:
    while characters > 0:
        row = rows[int(random.integers(len(rows)))]
        yield (text := f"{row['question']}\n{row['answer']}\n\n")
        characters -= len(text)


# --- the contenders, each in a process of its own


def contend(who: str, processes: int, folder: str, name: str, cache: str) -> dict[str, Any]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(Path(folder) / "tokenizer")
    path, max_length = Path(folder) / f"{name}.jsonl", MAX_LENGTH.get(name, MAX_LENGTH["chat"])
    return {"ours": ours, "trl": trl, "map": plain_map}[who](path, max_length, tokenizer, processes, Path(cache))


def ours(path: Path, max_length: int, tokenizer: Any, processes: int, cache: Path) -> dict[str, Any]:
    from finetune.data.examples import prepare_examples, recipe_renderer
    from finetune.data.packing import pack
    from finetune.recipe import Recipe

    values: dict[str, Any] = {
        "run": {"name": "benchmark"},
        "model": {"config": {"model_type": "llama"}, "tokenizer": "here"},
        "mode": "full",
        "data": {
            "train": [{"path": str(path), "format": "text" if is_text(path) else "messages"}],
            "max_length": max_length,
        },
        "batch": {"rows": 1},
        "optimizer": {"lr": 1e-3},
        "train": {"epochs": 1},
    }
    recipe = Recipe.model_validate(values)
    begun = time.perf_counter()
    examples = prepare_examples(recipe, recipe.data.train, recipe_renderer(recipe.model, recipe.objective, tokenizer))
    tokenized = time.perf_counter()
    rows = pack(examples.lengths, max_length)
    return {
        "seconds": time.perf_counter() - begun,
        "packing_s": time.perf_counter() - tokenized,
        "rows": examples.report.totals()["rows"],
        "tokens": int(examples.lengths.sum()),
        "supervised_tokens": int(examples.num_targets.sum()),
        "efficiency": rows.efficiency(examples.lengths, max_length),
    }


def trl(path: Path, max_length: int, tokenizer: Any, processes: int, cache: Path) -> dict[str, Any]:
    """What SFTTrainer does to its dataset while it is built."""
    import datasets
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    shape: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **shape))
    config = SFTConfig(
        output_dir=str(cache / "out"),
        max_length=max_length,
        packing=True,
        packing_strategy="bfd",
        assistant_only_loss=not is_text(path),
        dataset_num_proc=processes,
        report_to="none",
        use_cpu=True,
        bf16=False,
    )
    taken: list[float] = []

    class Timed(SFTTrainer):
        def _prepare_dataset(self, *arguments: Any, **named: Any) -> Any:
            begun = time.perf_counter()
            prepared = super()._prepare_dataset(*arguments, **named)
            taken.append(time.perf_counter() - begun)
            return prepared

    begun = time.perf_counter()
    dataset: Any = datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=str(cache))
    taken.append(time.perf_counter() - begun)
    trainer = Timed(model=model, args=config, train_dataset=dataset, processing_class=tokenizer)
    packed: Any = trainer.train_dataset
    labels = packed.data.column("labels").combine_chunks().flatten()
    tokens = len(labels)
    return {
        "seconds": sum(taken),
        "rows": len(dataset),
        "tokens": tokens,
        "supervised_tokens": int((labels.to_numpy() != -100).sum()),
        "efficiency": tokens / (len(packed) * max_length),
    }


def plain_map(path: Path, max_length: int, tokenizer: Any, processes: int, cache: Path) -> dict[str, Any]:
    """Row by row, as the documentation of `datasets` and `transformers` has it. No packing."""
    import datasets

    def chat(row: dict[str, Any]) -> dict[str, Any]:
        tokenized = tokenizer.apply_chat_template(
            row["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return {"input_ids": tokenized["input_ids"], "assistant_masks": tokenized["assistant_masks"]}

    def text(row: dict[str, Any]) -> dict[str, Any]:
        return {"input_ids": tokenizer(row["text"] + tokenizer.eos_token)["input_ids"]}

    begun = time.perf_counter()
    dataset: Any = datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=str(cache))
    prepared = dataset.map(text if is_text(path) else chat, num_proc=processes, remove_columns=dataset.column_names)
    seconds = time.perf_counter() - begun
    lengths = prepared.data.column("input_ids").combine_chunks().value_lengths().to_numpy()
    return {"seconds": seconds, "rows": len(prepared), "tokens": int(lengths.sum()), "efficiency": None}


def is_text(path: Path) -> bool:
    return path.stem == "documents"


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# --- the table


def print_table(result: dict[str, Any]) -> None:
    print("| set | contender | rows/s | peak GB | full | second start s |\n| --- | --- | --- | --- | --- | --- |")
    for name, who in dict.fromkeys((cell["set"], cell["contender"]) for cell in result["cells"]):
        cells = [cell for cell in result["cells"] if (cell["set"], cell["contender"]) == (name, who)]

        def middle(of: Any, cells: list[dict[str, Any]] = cells) -> float:
            return statistics.median(of(cell) for cell in cells)

        speed = middle(lambda cell: cell["first"]["rows"] / cell["first"]["seconds"])
        memory = middle(lambda cell: cell["first"]["peak_rss"] / 1e9)
        full = cells[0]["first"]["efficiency"]
        again = middle(lambda cell: cell["second"]["seconds"])
        shown = "-" if full is None else f"{full:.1%}"
        print(f"| {name} | {who} | {speed:,.0f} | {memory:.2f} | {shown} | {again:.2f} |")
    for one in result["summary"]:
        print(
            f"{one['set']}: {one['speed_over_best_trl']}x TRL's best, {one['speed_over_best_map']}x the best map; "
            f"the second start is {one['first_over_second_start']}x faster than the first"
        )
    for one in result["scale"]:
        first, second = one["first"], one["second"]
        print(
            f"{first['tokens']:,} tokens: {first['seconds']:,.0f} s, peak {first['peak_rss'] / 1e9:.2f} GB "
            f"({first['peak_rss_of_main'] / 1e9:.2f} of the main process), second start {second['seconds']:.2f} s"
        )


if __name__ == "__main__":
    main()
