"""An example of several sequences is never torn: not by packing, order, windows, mixtures, streams, limits, ranks or
the end of an epoch. Seen on pairs of a preference."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_helpers import prepare, recipe, renderer_of, text_tokenizer, write_jsonl
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.data.batch import Batch, TokenShare
from finetune.data.dataset import Dataset
from finetune.data.examples import Examples, prepare_examples
from finetune.data.loader import Loader
from finetune.data.packing import RowOrder, group_rows, one_per_row, pack, row_work
from finetune.data.samples import Example, ExampleSizes, Sequence, SharedPrompt, concatenate_sizes
from finetune.data.streaming import open_stream
from finetune.recipe import Recipe
from finetune.training.target_values import ExampleRows

PAIRS = 40
quick = settings(derandomize=True, max_examples=25)


def write_pairs(path: Path, count: int = PAIRS, seed: int = 0) -> Path:
    """Answers of very different length, so that a pair that is torn fits where it did not."""
    lengths = np.random.default_rng(seed).integers(1, 12, (count, 2))
    rows = [
        {"prompt": f"question {i}?", "chosen": "fox " * chosen + str(i), "rejected": "dog " * rejected + str(i)}
        for i, (chosen, rejected) in enumerate(lengths.tolist())
    ]
    return write_jsonl(path, rows)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Examples:
    path = write_pairs(tmp_path_factory.mktemp("pairs") / "pairs.jsonl")
    return prepare(path, "preference", tokenizer=text_tokenizer(), data__max_length=100)


def answers(examples: Any) -> dict[tuple[str, int], list[list[int]]]:
    """The tokens of both answers by file and row; fails where an example is not a pair."""
    found = {(one.path, one.row): [sequence.input_ids.tolist() for sequence in one.sequences] for one in examples}
    assert all(len(pair) == 2 and pair[0] != pair[1] for pair in found.values())
    return found


def check_pairs(batch: Batch, expected: dict[tuple[str, int], list[list[int]]]) -> list[tuple[str, int]]:
    """Every example of a batch is chosen and rejected, end to end; returns where they are from."""
    row, lengths = batch.inputs["input_ids"][0], list(batch.sequence_lengths)
    sequences = [part.tolist() for part in row.split(lengths)]
    origins = [(origin.path, origin.row) for origin in batch.origins]
    assert batch.example_of_sequence.tolist() == [i for i in range(len(origins)) for _ in range(2)]
    assert sequences[: 2 * len(origins)] == [ids for origin in origins for ids in expected[origin]]
    assert batch.counts["sequences"] == 2 * batch.counts["examples"] == 2 * len(origins)
    return origins


def test_a_row_of_a_file_is_one_example_of_two_sequences(pairs):
    totals = pairs.report.totals()
    assert len(pairs) == totals["rows"] == totals["examples"] == totals["taken"] == PAIRS
    assert pairs.lengths.tolist() == [one.num_tokens for one in pairs]
    assert pairs.num_targets.tolist() == [one.num_targets for one in pairs]
    assert len(answers(pairs)) == PAIRS


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, Any]:
    rows_per_device, world_size = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    return {
        "rows_per_device": rows_per_device,
        "world_size": world_size,
        "rows_per_step": rows_per_device * world_size * draw(st.integers(1, 2)),
        "max_length": draw(st.sampled_from([None, 100, 150, 1000])),  # None: not packed
        "seed": draw(st.integers(0, 100)),
        "balance": draw(st.integers(1, 8)),
        "total_rows": draw(st.integers(1, 60)),
        "tokens": draw(st.sampled_from([None, 1000])),
    }


@quick
@given(shape=shapes())
def test_batches_of_any_world_size_have_both_answers_next_to_each_other(pairs, shape):
    """Through packing, order, micro-batches and the end of an epoch; and every rank knows the counts of all."""
    rows = pack(pairs.lengths, shape["max_length"]) if shape["max_length"] else one_per_row(pairs.lengths)
    group = group_rows(shape["balance"], shape["rows_per_step"])
    order = RowOrder(len(rows), shape["seed"], row_work(rows, pairs.sizes.attention_work), group)
    per_device, total = shape["rows_per_device"], shape["total_rows"]
    ranks = [
        Loader(
            Dataset(pairs, rows, order=order),
            shape["rows_per_step"],
            per_device,
            rank,
            shape["world_size"],
            total,
            shape["tokens"],
        )
        for rank in range(shape["world_size"])
    ]
    expected, seen = answers(pairs), Counter[tuple[str, int]]()
    for step in range(-(-total // shape["rows_per_step"])):
        steps = [loader.step(step) for loader in ranks]
        counts: Counter[str] = Counter()
        for batch in (batch for one in steps for batch in one.batches):
            seen.update(check_pairs(batch, expected))
            counts.update(batch.counts)
        assert all(Counter(one.counts) == counts for one in steps)
    taken = Counter(pairs[int(member)].row for i in range(total) for member in rows[order.row_at(i)])
    assert Counter(row for (_, row), times in seen.items() for _ in range(times)) == taken


def test_shared_prompts_make_forwards_shorter_and_nothing_else(pairs):
    """The same pairs in the same micro-batches; padding is what is computed in addition."""
    rows = Dataset(pairs, pack(pairs.lengths, 150))
    steps = [Loader(rows, 6, 2, 0, 1, 6, shares_prompts=shares).step(0) for shares in (True, False)]
    assert steps[0].counts == steps[1].counts
    assert steps[0].counts["shared_tokens"] == sum(one.shared_tokens for i in range(6) for one in rows.row(i)) > 0
    lengths = [[batch.inputs["input_ids"].shape[1] for batch in step.batches] for step in steps]
    for shared, whole in zip(*(step.batches for step in steps), strict=True):
        assert (shared.origins, shared.counts, shared.row_lengths) == (whole.origins, whole.counts, whole.row_lengths)
        assert sum(shared.prefix_lengths) == shared.counts["shared_tokens"]
        assert sum(whole.prefix_lengths) == 0
    assert [sum(batch.num_padding for batch in step.batches) for step in steps] == [step.padding for step in steps]
    tokens = steps[0].counts["tokens"] - steps[0].counts["shared_tokens"]
    assert sum(lengths[0]) == tokens + steps[0].padding
    assert steps[0].padding == 0


@pytest.mark.parametrize("budget", [None, 130])
def test_samples_of_a_prompt_lie_together_and_share_it_within_a_micro_batch(budget):
    """The same rows in the same micro-batches on any number of ranks, whether the prompt is computed once or not."""
    rng, examples = np.random.default_rng(0), []
    for key in range(6):
        prompt = rng.integers(3, 90, rng.integers(1, 40))
        for sample in range(4):
            ids = np.concatenate([prompt, rng.integers(3, 90, rng.integers(1, 20))]).astype(np.int32)
            sequence = Sequence(ids, np.arange(len(ids)) >= len(prompt))
            examples.append(Example("f", sample, 0, (sequence,), prompt=SharedPrompt(key, len(prompt))))
    rows = ExampleRows(examples)
    steps = [
        [Loader(rows, 24, 6, rank, ranks, 24, budget, shares_prompts=shares).step(0) for rank in range(ranks)]
        for ranks, shares in ((1, False), (1, True), (2, True))
    ]
    ((whole,), (shared,), both) = steps
    assert whole.counts == shared.counts == both[0].counts == both[1].counts
    assert 0 < whole.counts["shared_tokens"] == sum(sum(batch.prefix_lengths) for batch in shared.batches)
    assert whole.counts["shared_tokens"] == sum(batch.counts["shared_tokens"] for batch in whole.batches)
    computed = [sum(batch.inputs["input_ids"].shape[1] for batch in step.batches) for step in (whole, shared)]
    assert computed == [whole.counts["tokens"], whole.counts["tokens"] - whole.counts["shared_tokens"]]
    assert [batch.origins for batch in whole.batches] == [batch.origins for batch in shared.batches]
    assert sum(batch.counts["examples"] for step in both for batch in step.batches) == 24
    assert sum(step.padding for step in both[:1]) == both[1].padding
    if budget is not None:
        assert all(batch.counts["tokens"] <= budget for batch in whole.batches)
        saved = whole.counts["shared_tokens"] / sum(3 * example.prompt.tokens for example in examples[::4])
        assert saved > 0.6  # of what could be: prompts whose samples are in several micro-batches are computed in each


@pytest.mark.parametrize("weight", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("mixture", [None, {"by": "rows"}, {"by": "tokens", "temperature": 2.0}])
def test_weights_mixtures_and_limits_take_pairs(tmp_path, weight, mixture):
    first, second = write_pairs(tmp_path / "a.jsonl"), write_pairs(tmp_path / "b.jsonl", 20, seed=1)
    sources = [
        {"path": str(first), "format": "preference", "limit": 31},
        {"path": str(second), "format": "preference", "weight": weight},
    ]
    made = recipe(first, "preference", data__train=sources, data__mixture=mixture, data__max_length=100)
    examples = prepare_examples(made, made.data.train, renderer_of(made))
    assert len(answers(examples)) <= 31 + 20
    assert max(row for path, row in answers(examples) if path == str(first)) <= 31
    counts = Counter((one.path, one.row) for one in examples)
    assert len(examples) == counts.total() == examples.report.totals()["taken"]
    if mixture is None:
        assert sum(times for (path, _), times in counts.items() if path == str(second)) == round(20 * weight)
    data = Dataset(examples, pack(examples.lengths, 100))
    assert sum(data.examples.lengths[data.rows[i]].sum() for i in range(len(data.rows))) == data.tokens


def streaming(*paths: Path, window: int) -> Recipe:
    sources = [{"path": str(path), "format": "preference"} for path in paths]
    data = {"train": sources, "max_length": 100, "streaming": True, "window": window}
    return Recipe.model_validate(
        {
            "run": {"name": "test"},
            "model": {"config": {"model_type": "llama"}, "tokenizer": "none"},
            "mode": "full",
            "data": data,
            "objective": {"name": "dpo"},
            "batch": {"rows": 4},
            "optimizer": {"lr": 1e-3},
            "train": {"max_steps": 30},
        }
    )


@pytest.mark.parametrize("window", [1, 7, 16])
def test_a_stream_emits_pairs(tmp_path, window):
    first, second = write_pairs(tmp_path / "a.jsonl", 20), write_pairs(tmp_path / "b.jsonl", 10, seed=1)
    made = streaming(first, second, window=window)
    rows = open_stream(made, renderer_of(made))
    expected = answers(
        [
            *prepare(first, "preference", tokenizer=text_tokenizer(), data__max_length=100),
            *prepare(second, "preference", tokenizer=text_tokenizer(), data__max_length=100),
        ]
    )
    end = next(i for i in range(100) if rows.epoch_at(i) >= 1)
    ranks = [Loader(rows, 4, 1, rank, 2, 4 * -(-end // 4)) for rank in range(2)]
    batches = [batch for step in range(-(-end // 4)) for loader in ranks for batch in loader.step(step).batches]
    seen = Counter(origin for batch in batches for origin in check_pairs(batch, expected))
    assert seen.keys() == expected.keys()


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (2, 2)])
def test_ranks_that_share_a_row_can_add_up_each_answer(pairs, sizes):
    """The log-probability of an answer whose tokens lie on several ranks is the sum of what each has."""
    shares = [TokenShare(*sizes, c, s) for c in range(sizes[0]) for s in range(sizes[1])]
    rows = Dataset(pairs, pack(pairs.lengths, 150))
    whole = Loader(rows, 4, 4, 0, 1, len(rows.rows)).step(0).batches[0]
    parts = [Loader(rows, 4, 4, 0, 1, len(rows.rows), share=share).step(0).batches[0] for share in shares]
    sums = [np.bincount(batch.targets.sequence, batch.targets.ids, len(batch.example_of_sequence)) for batch in parts]
    expected = np.bincount(whole.targets.sequence, whole.targets.ids, len(whole.example_of_sequence))
    assert np.sum(sums, axis=0).tolist() == expected.tolist()
    assert all(part.origins == whole.origins for part in parts)


# --- sizes


groups = st.lists(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 50)), min_size=1, max_size=3), max_size=12)


def sizes_of(examples: list[list[tuple[int, int]]]) -> ExampleSizes:
    flat = np.array([one for example in examples for one in example], np.int64).reshape(-1, 2)
    shared = np.array([7 * len(example) for example in examples], np.int64)
    return ExampleSizes(np.cumsum([0, *map(len, examples)]), flat[:, 0], flat[:, 1], shared)


@quick
@given(examples=groups.filter(bool), seed=st.integers(0, 1000))
def test_sizes_are_sums_over_the_sequences_of_each_example(examples, seed):
    sizes = sizes_of(examples)
    assert sizes.tokens.tolist() == [sum(length for length, _ in example) for example in examples]
    assert sizes.target_tokens.tolist() == [sum(targets for _, targets in example) for example in examples]
    assert sizes.attention_work.tolist() == [sum(length**2 for length, _ in example) for example in examples]
    chosen = np.random.default_rng(seed).integers(0, len(examples), 7)
    taken, expected = sizes.take(chosen), sizes_of([examples[i] for i in chosen])
    for ours in (taken, concatenate_sizes(sizes.take(np.array([i])) for i in chosen)):
        assert ours.counts() == expected.counts()
        assert ours.lengths.tolist() == expected.lengths.tolist()
        assert ours.offsets.tolist() == expected.offsets.tolist()
    assert expected.counts()["first_target_tokens"] == sum(examples[i][0][1] for i in chosen)
