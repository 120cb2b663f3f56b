"""Random recipes, overrides, files of rows and chat templates: each is read, or refused by one message, within seconds.

    python scripts/proofs/fuzz.py --recipes 20000 --files 5000 --templates 2000

prints how many were accepted and refused, and the slowest; exit status 1 with the smallest input that does something
else. tests/desk/unit/test_fuzz.py tries a few of each.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import seed as with_seed
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "support"))

import tiny

from finetune.data.building import OpenedSources, read_items
from finetune.data.chat.renderer import build_renderer
from finetune.data.chat.template import Template
from finetune.data.chat.template_check import check_template
from finetune.data.chat.template_choice import own_template
from finetune.data.sources.readers import READERS
from finetune.errors import UserError
from finetune.features import load_recipe
from finetune.recipe import Recipe, dump_recipe

# Large and slow inputs are meant here.
_UNCHECKED = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example)
LONGEST_S = 10.0  # that an input may take, on any machine

GOOD: dict[str, Any] = {
    "run": {"name": "a-{optimizer.lr}", "dir": "runs", "seed": 1},
    "model": {"name": "org/model", "chat_template_arguments": {"thinking": True}},
    "mode": "lora",
    "lora": {"rank": 8, "targets": ["q_proj"]},
    "data": {"train": [{"path": "a.jsonl", "columns": {"text": "b"}}], "eval": {"share": 0.1}, "max_length": 64},
    "batch": {"rows": 8, "rows_per_device": 2},
    "optimizer": {"lr": 1e-3, "betas": [0.9, 0.95]},
    "schedule": {"name": "cosine", "warmup_ratio": 0.1},
    "train": {"max_steps": 9},
    "evaluate": {"every_steps": 3, "answer": "#### (.+)", "exact_match": 2},
    "checkpoint": {"every_steps": 3, "best": "eval_loss", "resume": "auto"},
    "tracking": {"wandb": {"project": "x"}},
}
_ODD = ["", "~", "null", "0", "-1", "1e999", ".nan", "1" * 400, "2026-01-01", "[", "{", "&a [*a]", "<<", "!!int x"]
_ODD += ["\0", "é" * 300]
odd_texts = st.one_of(st.sampled_from(_ODD), st.text(max_size=20))
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), odd_texts, st.integers(min_value=2**62, max_value=10**30)
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(odd_texts, inner, max_size=4)),
    max_leaves=8,
)


# --- recipes and overrides


def _places(tree: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [at, *(place for key, inner in children for place in _places(inner, (*at, key)))]


@st.composite
def recipe_texts(draw: Any) -> str:
    """A good recipe with some values replaced, removed or added, and sometimes some characters of its text."""
    tree = json.loads(json.dumps(GOOD))
    for _ in range(draw(st.integers(0, 3))):
        *parents, last = draw(st.sampled_from(_places(tree)[1:]))
        target = tree
        for part in parents:
            target = target[part]
        match draw(st.integers(0, 2)):
            case 0:
                target[last] = draw(values)
            case 1:
                del target[last]
            case _ if isinstance(target, dict):
                target[draw(odd_texts)] = draw(values)
            case _:
                target.append(draw(values))
        if not tree:
            break
    text = yaml.dump(tree, allow_unicode=True, sort_keys=draw(st.booleans()))
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        at = draw(st.integers(0, len(text)))
        text = text[:at] + draw(odd_texts) + text[at + draw(st.integers(0, 3)) :]
    return text


keys = st.one_of(st.sampled_from([".".join(map(str, place)) for place in _places(GOOD)[1:]]), odd_texts)
overrides = st.one_of(
    st.just([]), st.lists(st.tuples(keys, st.one_of(odd_texts, values.map(json.dumps))).map("=".join), max_size=2)
)


def try_recipe(folder: Path, text: str, changes: list[str]) -> bool:
    """Whether a recipe loads; then it is written and loads to the same. Raises what is no UserError."""
    path, again = folder / "recipe.yaml", folder / "again.yaml"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    try:
        recipe = load_recipe(path, changes)
    except UserError:
        return False
    again.write_text(dump_recipe(recipe), encoding="utf-8")
    assert load_recipe(again) == recipe
    return True


# --- files of rows

_MESSAGES = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
ROWS: list[dict[str, Any]] = [
    {"messages": _MESSAGES},
    {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]},
    {"instruction": "Add.", "input": "2 and 2", "output": "4"},
    {"prompt": "2+2?", "completion": "4"},
    {"text": "Two and two is four."},
    {"input_ids": [3, 4, 5], "labels": [-100, 4, 5]},
    {"prompt": "2+2?", "chosen": "4", "rejected": "5"},
]


@st.composite
def files(draw: Any) -> tuple[str, bytes]:
    """(suffix, content): rows of one format, some with other values, and sometimes some bytes replaced."""
    suffix = draw(st.sampled_from([*READERS, ".jsonl.gz"]))
    good, rows = draw(st.sampled_from(ROWS)), []
    for _ in range(draw(st.integers(0, 4))):
        row = json.loads(json.dumps(good))
        if draw(st.sampled_from([False, False, True])):
            row[draw(st.one_of(st.sampled_from(list(row)), odd_texts))] = draw(values)
        rows.append(row)
    if suffix in (".csv", ".tsv"):
        comma = "\t" if suffix == ".tsv" else ","
        content = "\n".join(comma.join(map(str, line)) for line in (good, *(row.values() for row in rows))).encode(
            errors="replace"
        )
    else:
        written = json.dumps(rows) if suffix == ".json" and draw(st.booleans()) else "\n".join(map(json.dumps, rows))
        content = written.encode(errors="replace")
    for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
        at = draw(st.integers(0, len(content)))
        content = content[:at] + draw(st.binary(max_size=4)) + content[at + draw(st.integers(0, 3)) :]
    return suffix, content


def try_file(folder: Path, recipe: Recipe, tokenizer: Any, suffix: str, content: bytes) -> bool:
    """Whether all rows of a file are read and its first ones rendered. Raises what is no UserError."""
    path = folder / f"rows{suffix}"
    path.write_bytes(content)
    source = recipe.data.train[0].model_copy(update={"path": str(path), "columns": None})
    data = recipe.data.model_copy(update={"train": (source,), "eval": ()})
    try:
        opened = OpenedSources(recipe.model_copy(update={"data": data}))
        opened.check_heads(build_renderer(tokenizer, own_template(tokenizer), "assistant"))
        for _ in read_items(opened.open(source).reader):
            pass
    except UserError:
        return False
    return True


# --- templates

_PIECES = """{% for m in messages %}
{% endfor %}
{% if m.role == 'assistant' %}
{% endif %}
{{ m.content }}
{% generation %}
{% endgeneration %}
{% if add_generation_prompt %}
{{ bos_token }}
<|im_end|>
{{ messages[9] }}
{%
}}
{{ 'x' * 99999999999 }}
{{ 9 ** 999999999 }}
{{ 1 / 0 }}
{{ raise_exception('no') }}
{% macro f() %}{{ f() }}
{% endmacro %}{{ f() }}
{{ range(10 ** 9) }}
{{ m.__class__.__mro__ }}
{{ tools | tojson }}
{% set x = 0 %}
{{ -x }}
""".splitlines()


@st.composite
def templates(draw: Any) -> str:
    """A good template with some pieces of others, or random text, in it."""
    text = tiny.CHATML
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(text)))
        piece = draw(st.one_of(st.sampled_from(_PIECES), odd_texts))
        text = text[:at] + piece + text[at + draw(st.sampled_from([0, 0, 1, 10])) :]
    return text


def try_template(tokenizer: Any, text: str) -> bool:
    """Whether nothing is wrong with a template. Raises what is no UserError."""
    try:
        return not any(found.startswith("problem") for found in check_template(tokenizer, Template(text, "template")))
    except UserError:
        return False


# --- counts


@dataclass
class Counts:
    """Of the inputs of one kind."""

    outcomes: Counter[bool] = field(default_factory=Counter)
    longest_s: float = 0.0

    def count(self, attempt: Callable[[], bool]) -> None:
        """Raises what the attempt raises, and AssertionError if it takes too long."""
        begun = time.process_time()
        self.outcomes[attempt()] += 1
        seconds = time.process_time() - begun
        self.longest_s = max(self.longest_s, seconds)
        assert seconds < LONGEST_S

    def __str__(self) -> str:
        accepted, refused = self.outcomes[True], self.outcomes[False]
        return f"{accepted + refused:,}: {accepted:,} accepted, {refused:,} refused, slowest {self.longest_s:.2f} s"


def fuzz(folder: Path, counts: dict[str, int], seed: int = 0) -> dict[str, Counts]:
    """counts: inputs of each kind: recipes, files, templates. Raises at the first failure."""
    results = {kind: Counts() for kind in counts}
    (folder / "good.yaml").write_text(yaml.safe_dump(GOOD), encoding="utf-8")
    recipe, tokenizer = load_recipe(folder / "good.yaml"), tiny.tokenizer()

    def run(kind: str, attempt: Callable[..., bool], *strategies: Any) -> None:
        if not counts.get(kind):
            return

        @settings(max_examples=counts[kind], deadline=None, database=None, suppress_health_check=_UNCHECKED)
        @given(st.tuples(*strategies))
        def test(drawn: tuple[Any, ...]) -> None:
            results[kind].count(lambda: attempt(*drawn))

        with_seed(seed)(test)()

    run("recipes", lambda text, changes: try_recipe(folder, text, changes), recipe_texts(), overrides)
    run("files", lambda file: try_file(folder, recipe, tokenizer, *file), files())
    run("templates", lambda text: try_template(tokenizer, text), templates())
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for kind, count in (("recipes", 20_000), ("files", 5_000), ("templates", 2_000)):
        parser.add_argument(f"--{kind}", type=int, default=count)
    parser.add_argument("--seed", type=int, default=random.randrange(2**31))
    chosen = parser.parse_args()
    print(f"seed {chosen.seed}")
    with tempfile.TemporaryDirectory() as folder:
        counts = {kind: getattr(chosen, kind) for kind in ("recipes", "files", "templates")}
        for kind, count in ((kind, count) for kind, count in counts.items() if count):
            print(kind, fuzz(Path(folder), {kind: count}, chosen.seed)[kind], flush=True)


if __name__ == "__main__":
    main()
