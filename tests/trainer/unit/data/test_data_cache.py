"""The cache on disk: the same with any number of processes, complete or absent, never stale, listed and cleaned."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from data_helpers import (
    byte_level,
    conversation,
    ids,
    labels,
    prepare,
    recipe,
    renderer_of,
    text_tokenizer,
    write_jsonl,
)
from forks import start_forkserver
from transformers import PreTrainedTokenizerFast

from finetune.data.building import CHUNK_ROWS, DECODED, EntryBuild, OpenedSources, build_source, chunks_of
from finetune.data.cache_entries import age_in_seconds, list_entries, lock_of, not_used_for, remove
from finetune.data.chat.renderer import Rendered, Renderer, build_renderer
from finetune.data.examples import prepare_examples
from finetune.data.token_cache import ARRAYS, CacheEntry, EntryWriter, find_or_build, load
from finetune.data.tokenizing import ChunkResult, Item, RowSettings, tokenize_chunk, tokenize_chunks
from finetune.errors import RunFailure, UserError
from finetune.recipe import Recipe

WORDS = ["hello", "world", "the", "quick", "brown", "fox", "lazy", "dog", "two", "and", "four", "thanks", "jumps"]


def chat_tokenizer() -> PreTrainedTokenizerFast:
    return byte_level(("<|im_start|>", "<|im_end|>"), eos_token="<|im_end|>")


def build_with(workers: int, made: Recipe, tokenizer: PreTrainedTokenizerFast, folder: Path) -> CacheEntry:
    """An entry made by so many processes."""
    opened = OpenedSources(made).open(made.data.train[0])
    build = EntryBuild(made, opened, renderer_of(made, tokenizer), workers=workers)
    fill = partial(build_source, build=build, digest=opened.reader.digest())
    return find_or_build(folder, {"source": opened.source.path}, fill)[0]


def talk(count: int) -> list[dict[str, Any]]:
    """Conversations of 2 to 40 words; every 50th row is the same."""
    random = np.random.Generator(np.random.PCG64(0))
    rows = []
    for number in range(count):
        words = [" ".join(random.choice(WORDS, size)) for size in random.integers(1, 20, 2)]
        rows.append({"messages": conversation(*(words if number % 50 else ("hello", "world 🦊 é")))})
    return rows


# --- any number of processes


def test_an_entry_is_bitwise_the_same_with_two_processes(tmp_path):
    rows = talk(5 * CHUNK_ROWS + 7)
    rows[3] = rows[CHUNK_ROWS + 9] = {"messages": None}
    path = write_jsonl(tmp_path / "chat.jsonl", rows)
    path.write_text(path.read_text().replace("\n", "\nnot json\n", 1))
    made = recipe(
        path,
        "messages",
        model__chat_template="chatml",
        data__on_bad_row="skip",
        data__overlong="split",
        data__max_length=32,
    )
    one, two = (build_with(workers, made, chat_tokenizer(), tmp_path / str(workers)) for workers in (1, 2))
    assert one.report == two.report
    assert one.report.split > 0
    assert (one.report.rows, one.report.bad) == (len(rows) + 1, 3)
    assert [row.split(": ")[0] for row in one.report.bad_rows] == [
        f"{path}:{number}" for number in (2, 5, CHUNK_ROWS + 11)
    ]
    for name in ARRAYS:
        assert (tmp_path / "1" / f"{name}.npy").read_bytes() == (tmp_path / "2" / f"{name}.npy").read_bytes()
    assert one.sequence_offsets[-1] == one.report.tokens == len(one.input_ids)
    assert one.targets.tolist() == np.add.reduceat(one.loss_mask, one.sequence_offsets[:-1], dtype=np.int64).tolist()
    assert one.example_offsets.tolist() == list(range(len(one) + 1))


def test_rows_whose_files_are_decoded_come_in_small_chunks() -> None:
    """Ten thousand clips are little text: they would be decoded by one process, 256 of them at a time."""
    items = [("rows.jsonl", number, {"audio": "a.wav", "text": "hello"}) for number in range(100)]
    assert [len(chunk) for chunk in chunks_of(items, decoding=0)] == [100]
    assert [len(chunk) for chunk in chunks_of(items, DECODED["audio"])] == [25] * 4
    assert [len(chunk) for chunk in chunks_of(items[:7], DECODED["video"])] == [3, 3, 1]


@pytest.mark.parametrize("workers", [1, 2])
def test_the_first_error_in_the_file_is_the_one_that_is_reported(tmp_path, workers):
    lines = [json.dumps({"text": "hello"})] * (3 * CHUNK_ROWS)
    lines[CHUNK_ROWS + 20] = json.dumps({"text": "hello " * 100})  # too long: found after the next was drawn
    lines[CHUNK_ROWS + 30] = json.dumps({"text": None})
    lines[CHUNK_ROWS + 40] = "not json"
    lines[2 * CHUNK_ROWS + 1] = json.dumps({"text": None})
    path = tmp_path / "rows.jsonl"
    expected = ("tokens, but data.max_length is 64", "`text` is null", "not valid JSON", "`text` is null")
    for wrong, message in zip((20, 30, 40, CHUNK_ROWS + 1), expected, strict=True):
        path.write_text("\n".join(lines))
        with pytest.raises(UserError, match=rf"rows\.jsonl:{CHUNK_ROWS + wrong + 1}: .*{message}"):
            build_with(workers, recipe(path, data__overlong="error"), text_tokenizer(), tmp_path / "entry")
        lines[CHUNK_ROWS + wrong] = json.dumps({"text": "hello"})
    assert [child.name for child in tmp_path.iterdir() if child.suffix != ".lock"] == ["rows.jsonl"]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_row_before_an_error_of_the_file_itself_is_reported_first(tmp_path, workers):
    path = tmp_path / "rows.csv"
    path.write_text("text\n" + "hello\n" * 300 + '" "\nhello\n' + 'a stray " quote"\n')
    with pytest.raises(UserError, match=r"rows\.csv:302: .*`text` is empty"):
        build_with(workers, recipe(path), text_tokenizer(), tmp_path / "entry")
    path.write_text("text\n" + "hello\n" * 300 + '"a" stray\n')
    with pytest.raises(UserError, match=r"rows\.csv:302: not valid CSV"):
        build_with(workers, recipe(path), text_tokenizer(), tmp_path / "entry")


@dataclass(frozen=True)
class Deadly:
    """In place of a renderer: ends the worker that uses it, as a system without memory does."""

    def draw(self, sample: object, data_file: str) -> list[tuple[Rendered, ...]]:
        if multiprocessing.parent_process() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return []

    def tokenize_each(self, rendered: list[Rendered]) -> list[Any]:
        return []


@pytest.mark.long
def test_a_worker_that_is_killed_is_an_error_and_not_a_hang():
    made: Any = Deadly()
    settings = RowSettings(made, "text", None, 64, "drop", False)
    chunks: list[list[Item]] = [[("x", 1, {"text": "hello"})]] * 20
    with pytest.raises(RunFailure, match="one of the 2 processes that tokenize has died"):
        list(tokenize_chunks(settings, chunks, 2))


def build_and_stop(path: Path, tokenizer: Path, folder: Path, processes: Any) -> None:
    """Builds with two workers; stands still after the first chunk, when it says who its processes are."""

    def stop(_: int) -> None:
        processes.put([child.pid for child in psutil.Process().children(recursive=True)])
        time.sleep(600)

    made = recipe(path)
    opened = OpenedSources(made).open(made.data.train[0])
    renders = renderer_of(made, PreTrainedTokenizerFast.from_pretrained(tokenizer))
    build = EntryBuild(made, opened, renders, progress=stop, workers=2)
    find_or_build(folder, {}, partial(build_source, build=build, digest=opened.reader.digest()))


@pytest.mark.long
def test_a_builder_that_is_killed_leaves_nothing_that_loads_and_no_process(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": "hello world"}] * (4 * CHUNK_ROWS))
    text_tokenizer().save_pretrained(tmp_path / "tokenizer")
    folder = tmp_path / "cache" / "entry"
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    builder = context.Process(target=build_and_stop, args=(path, tmp_path / "tokenizer", folder, queue))
    builder.start()
    workers = [psutil.Process(pid) for pid in queue.get(timeout=120)]
    assert len(workers) >= 3  # the fork server and two forks
    builder.kill()
    builder.join()
    assert psutil.wait_procs(workers, timeout=60)[1] == []
    assert load(folder) is None
    assert len(list(folder.parent.glob("*.tmp"))) == 1
    assert len(build_with(1, recipe(path), text_tokenizer(), folder)) == 4 * CHUNK_ROWS
    assert list(folder.parent.glob("*.tmp")) == []


def prepare_in_process(
    path: Path, eval_path: Path, weight: float, tokenizer: Path, cache: Path, barrier: Any, results: Any
) -> None:
    os.environ["FINETUNE_CACHE"] = str(cache)  # the environment is that of the server that forks
    loaded = PreTrainedTokenizerFast.from_pretrained(tokenizer)
    made = recipe(
        path, source={"weight": weight}, data__max_length=64, data__eval=[{"path": str(eval_path), "format": "text"}]
    )
    barrier.wait()
    found = [
        prepare_examples(made, sources, renderer_of(made, loaded)) for sources in (made.data.train, made.data.eval)
    ]
    results.put([(examples.build_s[0] is not None, len(examples)) for examples in found])


@pytest.mark.long
def test_three_processes_and_two_recipes_build_each_entry_once(tmp_path, cache_folder):
    paths = [write_jsonl(tmp_path / f"{i}.jsonl", [{"text": "hello world"}] * 2000) for i in (1, 2)]
    text_tokenizer().save_pretrained(tmp_path / "tokenizer")
    start_forkserver()
    context = multiprocessing.get_context("forkserver")  # one import for all
    barrier, results = context.Barrier(3), context.Queue()
    processes = [
        context.Process(
            target=prepare_in_process,
            args=(*paths, weight, tmp_path / "tokenizer", cache_folder, barrier, results),
            daemon=True,
        )
        for weight in (1.0, 1.0, 2.0)
    ]
    for process in processes:
        process.start()
    found = [results.get(timeout=600) for _ in processes]
    for process in processes:
        process.join()
    for part in (0, 1):
        assert sorted(one[part][0] for one in found) == [False, False, True]
    assert sorted(one[0][1] for one in found) == [2000, 2000, 4000]
    assert len(list(cache_folder.rglob("report.json"))) == 2
    assert [path for path in cache_folder.rglob("*") if path.suffix in (".tmp", ".builder")] == []


def test_who_waits_says_for_whom(tmp_path, caplog):
    made, folder = recipe(write_jsonl(tmp_path / "rows.jsonl", [{"text": "hello"}])), tmp_path / "cache" / "entry"
    folder.parent.mkdir()
    folder.with_suffix(".builder").write_text(json.dumps({"pid": 4321, "host": "node7"}))
    with held(folder) as let_go:
        threading.Timer(0.3, let_go.set).start()
        assert len(build_with(1, made, text_tokenizer(), folder)) == 1
    assert f"waiting for process 4321 on node7, which tokenizes {tmp_path / 'rows.jsonl'}" in caplog.text


@contextlib.contextmanager
def held(folder: Path) -> Iterator[threading.Event]:
    """Within, another thread holds the entry's lock until the event; a lock belongs to who opened its file."""
    is_held, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        with lock_of(folder):
            is_held.set()
            let_go.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    assert is_held.wait(60)
    try:
        yield let_go
    finally:
        let_go.set()
        holder.join()


# --- complete or absent


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip_header(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[10] ^= 0xFF
    path.write_bytes(raw)


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def say_another_length(path: Path) -> None:
    np.save(path, np.load(path)[:-1])


DAMAGE = [
    ("input_ids.npy", truncate),
    ("loss_mask.npy", truncate),
    ("sequence_offsets.npy", flip_header),
    ("example_offsets.npy", truncate),
    ("rows.npy", Path.unlink),
    ("hashes.npy", lengthen),
    ("targets.npy", say_another_length),
    ("report.json", Path.unlink),
    ("report.json", truncate),
    ("report.json", lambda path: path.write_text("{}")),
]


@pytest.mark.parametrize(("name", "damage"), DAMAGE)
def test_a_damaged_entry_is_built_again(tmp_path, cache_folder, name, damage):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": f"hello {WORDS[i % 13]}"} for i in range(20)])
    before = [labels(example) for example in prepare(path)]
    (report,) = cache_folder.rglob("report.json")
    damage(report.with_name(name))
    assert load(report.parent) is None
    assert [labels(example) for example in prepare(path)] == before
    assert load(report.parent) is not None
    assert len(list(cache_folder.rglob("*.npy"))) == len(ARRAYS)


def test_a_full_disk_is_reported_and_leaves_nothing(tmp_path, cache_folder):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": " ".join(WORDS)}] * 3000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # no file may grow beyond it, as if the disk were full
    try:
        with pytest.raises(
            UserError, match=r"the data cache cannot be written: File too large\. Fix: set FINETUNE_CACHE"
        ):
            prepare(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [found for found in cache_folder.rglob("*") if found.is_file() and found.suffix != ".lock"] == []
    assert len(prepare(path)) == 3000


def test_a_file_that_changes_while_it_is_read_is_not_cached(tmp_path, cache_folder):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": "hello"}] * (2 * CHUNK_ROWS))
    made = recipe(path)

    def change(_: int) -> None:
        with path.open("a") as file:
            file.write('{"text": "world"}\n')

    with pytest.raises(UserError, match=r"rows\.jsonl: was changed while it was read"):
        prepare_examples(made, made.data.train, renderer_of(made), change)
    assert list_entries() == []


def test_nothing_is_tokenized_before_every_source_was_looked_at(tmp_path, cache_folder):
    good = write_jsonl(tmp_path / "good.jsonl", [{"text": "hello"}] * 5)
    bad = write_jsonl(tmp_path / "bad.jsonl", [{"text": "hello"}, {"txt": "hello"}])
    for last, message in (
        ({"path": str(bad)}, r"bad\.jsonl:2: .*no column `text`"),
        ({"path": str(tmp_path / "god.jsonl")}, "no such file"),
        ({"path": str(good), "columns": {"txt": "text"}}, "no field `txt`"),
    ):
        made = recipe(good, data__eval=[{"format": "text", **last}])
        with pytest.raises(UserError, match=message):
            prepare_examples(made, made.data.train, renderer_of(made))
    assert list_entries() == []


# --- what an entry holds


def test_the_same_tokens_again_are_counted_and_kept(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": text} for text in ("a", "b", "a", "c", "b", "a")])
    examples = prepare(path)
    assert len(examples) == 6
    assert examples.report.sources[0].duplicates == 3


def test_a_detected_format_shares_the_entry_of_a_given_one(tmp_path, cache_folder, caplog):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": "hello"}] * 3)
    assert prepare(path, "auto").report.sources[0].format == "text"
    assert f"{path}: format text" in caplog.text
    assert prepare(path, "text", source={"weight": 3.0, "name": "mine"}).report.sources[0].name == "mine"
    assert len(list_entries()) == 1


@dataclass(frozen=True)
class InParts:
    """A renderer that makes of "a|b" two texts: of a preference, or of a conversation that was unrolled."""

    of: Renderer
    is_preference: bool

    def draw(self, sample: Any, data_file: str) -> list[tuple[Rendered, ...]]:
        texts = [Rendered(text, [(0, len(text))], True) for text in sample.text.split("|")]
        return [tuple(texts)] if self.is_preference else [(text,) for text in texts]

    def tokenize_each(self, rendered: list[Rendered]) -> Any:
        return self.of.tokenize(rendered)


def in_parts(is_preference: bool, overlong: str, *texts: str) -> ChunkResult:
    made: Any = InParts(build_renderer(text_tokenizer()), is_preference)
    settings = RowSettings(made, "text", None, 10, overlong, False)
    return tokenize_chunk(settings, [("x", number, {"text": text}) for number, text in enumerate(texts, 1)])


LONG = "hello " * 10  # 22 tokens or so
SHORT = "hello"  # 3


def test_a_preference_is_one_example_and_is_kept_or_dropped_as_one():
    """Both answers together have at most max_length tokens, as a packed row has."""
    found = in_parts(True, "drop", f"{SHORT}|world", f"{SHORT}|{LONG}", f"{LONG}|world {LONG}", f"world|{SHORT}")
    assert found.arrays.rows.tolist() == [1, 4]
    assert found.arrays.sizes.tolist() == [2, 2]
    assert found.arrays.lengths.sum() == len(found.arrays.input_ids)
    assert dict(found.counts) == {"rows": 4, "dropped_overlong": 2}


def test_of_a_conversation_that_was_unrolled_each_piece_is_an_example():
    found = in_parts(False, "drop", f"{SHORT}|world", f"{SHORT}|{LONG}")
    assert found.arrays.rows.tolist() == [1, 1, 2]
    assert found.arrays.sizes.tolist() == [1, 1, 1]
    assert dict(found.counts) == {"rows": 2, "unrolled": 2, "dropped_overlong": 1}


def test_columns_of_numbers_are_kept_with_the_tokens(tmp_path):
    rows = [{"prompt": "q", "chosen": "a", "rejected": "b", "margin": margin} for margin in (0.5, 3, None)]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    examples = prepare(path, "preference", objective__name="reward")
    assert [example.columns for example in examples] == [{"margin": 0.5}, {"margin": 3.0}, {"margin": 0.0}]
    assert [example.columns for example in prepare(path, "preference")] == [{}] * 3  # another entry
    more = examples.with_columns({"reference": np.array([1.0, 2.0, 4.0])})
    assert more[1].columns == {"margin": 3.0, "reference": 2.0}
    write_jsonl(path, [*rows, {**rows[0], "margin": "much"}])
    with pytest.raises(UserError, match=r"rows\.jsonl:4: .*`margin` is 'much'; expected a number"):
        prepare(path, "preference", objective__name="reward")


# --- listed and cleaned


def test_entries_are_listed_and_cleaned_by_age(tmp_path, cache_folder):
    paths = [write_jsonl(tmp_path / f"{name}.jsonl", [{"text": "hello"}] * 3) for name in ("old", "new")]
    old, new = (Path(prepare_one(path).path) for path in paths)
    os.utime(old / "report.json", (time.time() - 3 * 86400,) * 2)
    listed = list_entries()
    assert [entry.path for entry in listed] == [str(new), str(old)]
    assert listed[0].of is not None
    assert (listed[0].of["source"], listed[0].of["format"], listed[0].of["max_length"]) == (str(paths[1]), "text", 64)
    assert (listed[0].examples, listed[0].is_whole) == (3, True)
    assert listed[0].bytes == sum(file.stat().st_size for file in new.iterdir())
    json.dumps([entry.as_dict() for entry in listed])
    aged = not_used_for(listed, age_in_seconds("2d"))
    assert remove(aged) == []
    assert [entry.path for entry in list_entries()] == [str(new)]
    assert list(cache_folder.rglob("*.tmp")) == []


def prepare_one(path: Path) -> Any:
    prepare(path)
    return list_entries()[0]


def test_use_keeps_an_entry_young(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": "hello"}])
    entry = prepare_one(path)
    os.utime(Path(entry.path) / "report.json", (0, 0))
    prepare(path)
    assert not_used_for(list_entries(), 3600) == []


def test_cleaning_leaves_what_is_being_built_and_takes_what_dead_builds_left(tmp_path, cache_folder):
    entry = prepare_one(write_jsonl(tmp_path / "rows.jsonl", [{"text": "hello"}]))
    folder = Path(entry.path)
    leftover = folder.with_name(f"{folder.name}.{'0' * 32}.tmp")
    leftover.mkdir()
    with EntryWriter(leftover):
        pass
    listed = list_entries()
    assert [one.is_whole for one in sorted(listed, key=lambda one: one.path)] == [True, False]
    with held(folder):
        assert remove(listed) == listed
    assert folder.is_dir()
    assert leftover.is_dir()
    assert remove(listed) == []
    assert list_entries() == []


def test_a_run_keeps_what_was_removed_while_it_reads(tmp_path):
    examples = prepare(write_jsonl(tmp_path / "rows.jsonl", [{"text": "hello"}] * 3))
    before = ids(examples[2])
    remove(list_entries())
    assert list_entries() == []
    assert ids(examples[2]) == before


@pytest.mark.parametrize("text", ["", "30", "d", "-3d", "3 years"])
def test_ages_that_mean_nothing(text):
    with pytest.raises(UserError, match="expected a number and a unit"):
        age_in_seconds(text)
