"""Values of the built-in rewards, each from its own process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from completions import completion, reward, values

from finetune.recipe.reward_settings import REWARD_SECTIONS
from finetune.rl.rewards.builtin import REWARDS, last_boxed, last_fenced, last_number, numbers_in
from finetune.rl.rewards.child import ARGUMENTS
from finetune.rl.rewards.scoring import Rewards
from finetune.user_code import accepted


def test_the_table_has_every_name_of_the_schema() -> None:
    names = set(REWARD_SECTIONS) - {"file", "reward_model", "judge"}
    assert names - {"environment"} == set(REWARDS)  # no function: see `scoring.EnvironmentRewards`
    for name in names - {"json_schema", "tests", "environment"}:  # their parameters are prepared
        keys = REWARD_SECTIONS[name].parameters()
        assert set(keys) <= set(REWARDS[name].function.__code__.co_varnames), name


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("", None),
        ("no digits, ...", None),
        ("42", "42"),
        ("It is 42.", "42"),
        ("$1,234,567.50!", "1234567.50"),
        ("1,2,3", "3"),
        ("2024,100", "100"),
        ("10 - 4 = 6", "6"),
        ("(10)-4", "4"),
        ("x-4", "4"),
        ("so -4", "-4"),
        ("so \N{MINUS SIGN}4", "-4"),
        ("= +4", "4"),
        (".5", "0.5"),
        ("-.5", "-0.5"),
        ("1e3", "1000"),
        ("2e", "2"),
        ("9 eggs\n#### 42 in 7 days", "42"),
        ("#### 1 #### 2", "2"),
        ("7 ####", None),
        ("٤٢", None),  # digits of other scripts are not read
        ("1" * 5000, "1" * 5000),
    ],
)
def test_the_last_number(text: str, number: str | None) -> None:
    from decimal import Decimal

    assert last_number(text) == (None if number is None else Decimal(number))


def test_numbers_and_boxes_and_fences() -> None:
    assert [float(one) for one in numbers_in("8/10, 3 and -2")] == [8, 10, 3, -2]
    assert last_boxed(r"\boxed{a} \boxed{\frac{1}{2}} ok") == r"\frac{1}{2}"
    assert last_boxed(r"\boxed{never closed") is None
    assert last_boxed("none") is None
    assert last_fenced("a\n```python\nx = 1\n```\nb\n```\ny = 2\n```\n") == "y = 2\n"
    assert last_fenced("x = 1") == "x = 1"


def test_exact_match() -> None:
    texts = ["42", " 42\n", "42.", ""]
    assert values([completion(text) for text in texts], name="exact_match") == [1, 1, 0, 0]
    tagged = [completion(text, "<a>1</a><a> 2 </a>") for text in ("<a>2</a>", "2", "<a>1</a>", "<a>2</a> <a>3</a>")]
    assert values(tagged, name="exact_match", pattern="<a>(.+?)</a>") == [1, 0, 0, 0]


def test_number_regex_and_length() -> None:
    texts = ["42", "about 42.0", "I have $42", "#### 42", "41", "none", "42 or 43"]
    assert values([completion(text, "so\n#### 42") for text in texts], name="number") == [1, 1, 1, 1, 0, 0, 0]
    assert values([completion(text) for text in ("ab", "xaby", "ba")], name="regex", pattern="ab$|^x") == [1, 1, 0]
    lengths = [completion("x" * n) for n in (0, 4, 5, 6, 8, 100)]
    assert values(lengths, name="length", target=4) == [0, 0, -0.25, -0.5, -1, -1]
    assert values(lengths, name="length", target=4, margin=2) == [0, 0, -0.5, -1, -1, -1]


def test_boxed_compares_mathematically() -> None:
    texts = [r"\boxed{\frac{1}{2}}", r"so $\boxed{0.5}$", r"\boxed{1/2}", r"\boxed{2}", "0.5", r"\boxed{", r"\boxed{}"]
    gold = r"thus \boxed{\frac12}"
    assert values([completion(text, gold) for text in texts], name="boxed", on_failure=0.0, processes=1) == [
        1,
        1,
        1,
        0,
        0,
        0,
        0,
    ]
    bare = [completion(text, "x^2+2x+1") for text in (r"\boxed{(x+1)^2}", r"\boxed{(x-1)^2}")]
    assert values(bare, name="boxed", on_failure=0.0, processes=1) == [1, 0]


def test_boxed_never_evaluates_python(tmp_path: Path) -> None:
    """math_verify's reader of plain expressions goes through `eval`."""
    target = tmp_path / "written"
    code = f"__import__('pathlib').Path('{target}').write_text('x')"
    attacks = [completion(text, "1") for text in (rf"\boxed{{{code}}}", code, rf"$\boxed{{{code}}}$")]
    assert values(attacks, name="boxed", on_failure=0.0, processes=1) == [0, 0, 0]
    assert not target.exists()


@pytest.mark.long
def test_boxed_is_killed_at_its_limit() -> None:
    tower = completion(r"\boxed{9^{9^{9^{9^{9}}}} - 9^{9^{9^{9^{8}}}}}", r"\boxed{9^{9^{9^{9^{7}}}}}")
    with Rewards((reward(name="boxed", on_failure=-1.0, seconds=15.0, processes=1),), None) as rewards:
        slow, quick = rewards.score([tower, completion(r"\boxed{42}")])
    assert quick.total == 1
    assert (slow.total, slow.failures) in [(0, ()), (-1, ("boxed: gave no answer in 15 s",))]


def test_json_schema(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    texts = ['{"n": 1}', 'ok:\n```json\n{"n": 1}\n```', '{"n": "1"}', "n", '{"n": NaN}', "[" * 100_000, ""]
    assert values([completion(text) for text in texts], name="json_schema", answer_schema=schema) == [
        1,
        1,
        0,
        0,
        0,
        0,
        0,
    ]
    path = tmp_path / "schema.json"
    path.write_text(json.dumps({"$defs": {"n": {"type": "integer"}}, "$ref": "#/$defs/n"}))
    assert values([completion("1"), completion("x")], name="json_schema", answer_schema=str(path)) == [1, 0]


def test_built_ins_ask_only_for_what_exists() -> None:
    from functools import partial

    for name, built_in in REWARDS.items():
        prepared = {"json_schema": ("validator",), "tests": ("program",)}.get(name, REWARD_SECTIONS[name].parameters())
        assert accepted(partial(built_in.function, **dict.fromkeys(prepared)), ARGUMENTS)
