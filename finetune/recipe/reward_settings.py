"""The rewards of a recipe: a class for each, with its keys and their defaults.

What they compute is in `finetune/rl/rewards/`, their rules in `finetune/rl/reward_rules.py`. A new built-in is a class
here, a member of `BuiltInReward` and a row in `finetune/rl/rewards/builtin.py`.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Discriminator, Field, Tag, field_serializer

from finetune.recipe.section import RUN_NAME, Count, Float, OrDefault, Positive, Scale, Variable, Variant, own_values
from finetune.recipe.urls import without_credentials

# Keys that say which reward it is; one of them is given.
KIND_KEYS = ("name", "file", "reward_model", "judge")


class RewardSection(Variant):
    """One reward of the list. A completion gets the sum of `weight` times value; see docs/reference/rewards.md.

    Give one of `name`, `file`, `reward_model` and `judge`.
    """

    metric: Annotated[str, Field(pattern=RUN_NAME)] | None = None  # name in metrics and records; null: that of its kind
    weight: Float = 1.0  # factor of the value; negative for a penalty
    # Value of a completion for which the reward fails: it raises, exceeds `seconds`, ends its process, returns no
    # finite number. null: the run stops with the row and the reason
    on_failure: Float | None = None
    seconds: Positive = 10.0  # limit for one completion, of `tests` for its program; not for `reward_model`
    processes: Count = 2  # processes that compute this reward, or requests to the judge at once; no value depends on it

    @classmethod
    def kind(cls) -> str:
        key = next(key for key in KIND_KEYS if key in cls.model_fields)
        return get_args(cls.model_fields["name"].annotation)[0] if key == "name" else key

    @classmethod
    def unread(cls, readers: Sequence[str]) -> str:
        return f"has no effect on `{cls.kind()}`, only on {' and '.join(f'`{one}`' for one in readers)}: remove it"

    @classmethod
    def parameters(cls) -> tuple[str, ...]:
        """Returns the keys that this reward reads and not every one, besides the one that says which it is."""
        return tuple(key for key in cls.model_fields if key not in (*RewardSection.model_fields, *KIND_KEYS))

    @property
    def label(self) -> str:
        """Returns the name in metrics and records."""
        return self.metric or self.kind()


# --- built-ins


class ExactMatchReward(RewardSection):
    """Equal to the reference."""

    name: Literal["exact_match"]
    # A regular expression. Its first group, where it occurs last, is the answer, in completion and reference
    pattern: str | None = None


class NumberReward(RewardSection):
    """The last numbers are equal."""

    name: Literal["number"]


class BoxedReward(RewardSection):
    """The last boxed expressions are mathematically equal."""

    name: Literal["boxed"]


class RegexReward(RewardSection):
    """`pattern` is found."""

    name: Literal["regex"]
    pattern: str | None = None  # required: a regular expression that is to be found


class JsonSchemaReward(RewardSection):
    """JSON that fits `answer_schema`."""

    name: Literal["json_schema"]
    answer_schema: dict[str, Any] | str | None = None  # required: a JSON Schema, or the path of one


class LengthReward(RewardSection):
    """Tokens beyond `target` cost."""

    name: Literal["length"]
    target: Count | None = None  # required: tokens that cost nothing
    margin: Count | None = None  # tokens beyond `target` that cost 1, the most; null: as many as `target`


class TestsReward(RewardSection):
    """The code passes the row's tests."""

    name: Literal["tests"]
    column: OrDefault[str] = "tests"  # column with Python code, or a list of it
    partial: bool = False  # the share of tests that pass, rather than 1 for all and 0 otherwise
    memory_mb: OrDefault[Annotated[int, Field(ge=64, le=10**9)]] = 1024  # address space of a program, in MiB
    # required: a system without namespaces for programs is refused; none: programs run there all the same, and can read
    # the environment of the run and reach the network
    isolation: OrDefault[Literal["required", "none"]] = "required"


class EnvironmentReward(RewardSection):
    """What `reward` of `rollouts.environment` returns."""

    name: Literal["environment"]


BuiltInReward = (
    ExactMatchReward
    | NumberReward
    | BoxedReward
    | RegexReward
    | JsonSchemaReward
    | LengthReward
    | TestsReward
    | EnvironmentReward
)

# --- others


class FileReward(RewardSection):
    """A function of your own."""

    file: str  # a Python file of your own, which is run: only code that you trust
    function: str | None = None  # required: the function in it

    @property
    def label(self) -> str:
        return self.metric or self.function or self.kind()


class ModelReward(RewardSection):
    """The score of a reward model."""

    reward_model: str  # run directory or model folder of `objective.name: reward`


class JudgeReward(RewardSection):
    """A number from the reply of a model on a server."""

    judge: str  # URL of an OpenAI-compatible server, up to /v1: prompts and completions are sent there
    model: str | None = None  # required: the model's name on the server
    # Text of the request, with {prompt}, {completion} and {reference}; null: asks for a number from 0 to 10
    prompt: str | None = None
    # A regular expression. Its first group, where it occurs last in a reply, is the answer
    pattern: str | None = None
    scale: OrDefault[Scale] = (0.0, 10.0)  # lowest and highest number of a reply, which become 0 and 1
    # Environment variable with the judge's key; null: none is sent. The key itself never stands in a recipe
    key: Variable | None = None
    max_new_tokens: OrDefault[Count] = 256  # of a reply

    @field_serializer("judge")
    def _shown_judge(self, judge: str) -> str:
        """Removes passwords from recipes that are saved or sent to a tracker."""
        return without_credentials(judge)


REWARD_SECTIONS: dict[str, type[RewardSection]] = {
    one.kind(): one for one in (*get_args(BuiltInReward), FileReward, ModelReward, JudgeReward)
}


def _kind_key(values: Any) -> str | None:
    """Returns the key that says which reward it is, in backticks: the tag is no key of the section itself."""
    given = values if isinstance(values, dict) else dict(values) if isinstance(values, RewardSection) else {}
    return next((f"`{key}`" for key in KIND_KEYS if given.get(key) is not None), None)


def _one_kind(values: Any) -> Any:
    """Returns a section's values without unset keys of other kinds; raises ValueError unless it is of one kind."""
    if not isinstance(values, dict):
        return values
    given = [key for key in KIND_KEYS if values.get(key) is not None]
    if len(given) != 1:
        has = f"has {' and '.join(f'`{key}`' for key in given)}: keep one" if given else "has none"
        close = difflib.get_close_matches("name", map(str, values), n=1, cutoff=0.7) if not given else []
        hint = f"; `{close[0]}` looks like a misspelling of `name`" if close and close[0] not in KIND_KEYS else ""
        raise ValueError(f"a reward is one of `name`, `file`, `reward_model` and `judge`, and this {has}{hint}")
    kind = values["name"] if given == ["name"] else given[0]
    own = REWARD_SECTIONS.get(kind) if isinstance(kind, str) else None
    return values if own is None else own_values(values, own, REWARD_SECTIONS.values())


RewardSettings = Annotated[
    Annotated[BuiltInReward, Field(discriminator="name"), Tag("`name`")]
    | Annotated[FileReward, Tag("`file`")]
    | Annotated[ModelReward, Tag("`reward_model`")]
    | Annotated[JudgeReward, Tag("`judge`")],
    Discriminator(_kind_key),
    BeforeValidator(_one_kind),
]
