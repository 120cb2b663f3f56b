"""The built-in reward functions, written as a user would write one; `REWARDS` has them by name.

Each takes of a completion what it names (see `child.ARGUMENTS`) and the recipe's parameters, and returns a number; a
row that it cannot judge raises Unanswerable. Imports nothing heavy: the functions run in processes of their own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from finetune.rl.rewards.program_runner import NAMESPACES
from finetune.rl.rewards.programs import Program, missing_limits, run_program
from finetune.utils import answer, no_constant


class Unanswerable(Exception):
    """Reason why a row has no reward, whatever was sampled."""


def _needed(reference: str | None) -> str:
    """Returns the reference. Raises Unanswerable if the row has none."""
    if reference is None:
        raise Unanswerable("the row has no reference: its last turn is not an assistant's")
    return reference


def exact_match(completion: str, reference: str | None, pattern: str | None = None) -> float:
    """1 if both are equal without their outer blanks; with `pattern`, if the last matches of its first group are equal.
    As `evaluate.exact_match`."""
    expected = answer(_needed(reference), pattern)
    if expected is None:
        raise Unanswerable(f"`pattern` ({pattern}) does not occur in the reference")
    return float(answer(completion, pattern) == expected)


# A number: digits with or without commas for thousands, a fraction, an exponent. A minus after a digit, a letter or a
# bracket is an operator.
_NUMBER = re.compile(
    r"(?:(?<![\w)\]}])[-+])?\$?(?:(?<!\d)(?<!\d,)[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?"
    r"(?:[eE][-+]?[0-9]{1,4}(?![0-9]))?|(?:(?<![\w)\]}])[-+])?(?<![0-9])\.[0-9]+"
)


def numbers_in(text: str) -> list[Decimal]:
    """
    >>> numbers_in("-1,234.50 and (3, 4), 9 - 4; 5-3")
    [Decimal('-1234.50'), Decimal('3'), Decimal('4'), Decimal('9'), Decimal('4'), Decimal('5'), Decimal('3')]
    """
    found = _NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))
    return [Decimal(re.sub(r"[$,]", "", number)) for number in found]


def last_number(text: str) -> Decimal | None:
    """Returns the number after the last `####` (GSM8K's form), or the last number if there is no mark; None without a
    number.

    >>> last_number("9 - 4 = 5 eggs, so $1,234.50 in all"), last_number("so 7\\n#### 42"), last_number("(3, 4)")
    (Decimal('1234.50'), Decimal('42'), Decimal('4'))
    """
    _, mark, behind = text.rpartition("####")
    numbers = numbers_in(behind)
    return None if not numbers else numbers[0] if mark else numbers[-1]


def number(completion: str, reference: str | None) -> float:
    """1 if the last numbers are equal: 42 = 42.0 = $42."""
    expected = last_number(_needed(reference))
    if expected is None:
        raise Unanswerable("the reference has no number")
    return float(last_number(completion) == expected)


def last_boxed(text: str) -> str | None:
    r"""Returns the content of the last \boxed{...}, with balanced braces; None if there is none.

    >>> last_boxed(r"so \boxed{1} or \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    begin = text.rfind(r"\boxed{")
    depth = 0
    for i in range(begin + len(r"\boxed"), len(text) if begin >= 0 else 0):
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return text[begin + len(r"\boxed{") : i]
    return None


def boxed(completion: str, reference: str | None) -> float:
    r"""1 if the last \boxed{...} is mathematically equal to that of the reference, or to the reference if it has none.

    By math_verify, https://github.com/huggingface/Math-Verify, on LaTeX alone: its reader of plain expressions
    evaluates Python. Its own time limits are off: they need a signal, and the caller has a limit.
    """
    from math_verify import LatexExtractionConfig, parse, verify

    expected = last_boxed(_needed(reference))
    expected, given = (_needed(reference) if expected is None else expected), last_boxed(completion)
    if given is None or given.strip() == expected.strip():
        return float(given is not None)
    gold, target = (
        parse(rf"\boxed{{{text.strip()}}}", [LatexExtractionConfig()], parsing_timeout=None)  # type: ignore[arg-type]
        for text in (expected, given)
    )
    return float(verify(gold, target, timeout_seconds=None))


def _with_math_verify(parameters: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    if find_spec("math_verify") is None:
        raise Unanswerable("`boxed` needs the package math-verify. Fix: pip install 'math-verify>=0.8'")
    import logging

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of limits that are off
    return parameters, []


def regex(completion: str, pattern: str) -> float:
    """1 if the pattern matches anywhere."""
    return float(re.search(pattern, completion) is not None)


def last_fenced(text: str) -> str:
    """Returns the last block between fences of three backticks, or all of the text if there is none."""
    blocks = re.findall(r"^[ \t]*```[^\n`]*\n(.*?)^[ \t]*```[ \t]*$", text, re.DOTALL | re.MULTILINE)
    return blocks[-1] if blocks else text


def json_schema(completion: str, validator: Any) -> float:
    """1 if the text, or the last fenced block in it, is JSON that fits the schema."""
    from referencing.exceptions import Unresolvable

    try:
        value = json.loads(last_fenced(completion), parse_constant=no_constant)
        return float(validator.is_valid(value))
    except Unresolvable as error:
        raise Unanswerable(
            f"the schema's reference {error.ref!r} leads nowhere; only the schema itself is read"
        ) from None
    except (ValueError, RecursionError):
        return 0.0


def _with_validator(parameters: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    """Reads and checks the schema; references to other files and to the net are not followed."""
    if find_spec("jsonschema") is None:
        raise Unanswerable("`json_schema` needs the package jsonschema. Fix: pip install 'jsonschema>=4.23'")
    from jsonschema import SchemaError, validators
    from referencing import Registry

    schema, where = parameters["answer_schema"], "answer_schema"
    if isinstance(schema, str):
        where = schema
        try:
            schema = json.loads(Path(schema).expanduser().read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise Unanswerable(
                f"answer_schema: no such file: {where}. Relative paths start at {Path.cwd()}. Fix: correct the path"
            ) from None
        except OSError as error:
            problem = f"{where} cannot be read: {error.strerror}"
            raise Unanswerable(f"answer_schema: {problem}. Fix: check the path and its permissions") from None
        except (ValueError, RecursionError) as error:
            raise Unanswerable(f"answer_schema: {where} is not JSON: {error}. Fix: correct the file") from None
    if not isinstance(schema, dict | bool):
        raise Unanswerable(f"{where}: a JSON Schema is an object, not {type(schema).__name__}. Fix: correct it")
    kind: Any = validators.validator_for(schema, default=validators.validator_for({}))
    try:
        kind.check_schema(schema)
        validator = kind(schema, registry=Registry())
    except SchemaError as error:
        raise Unanswerable(
            f"{where}: not a JSON Schema: {error.json_path}: {error.message[:200]}. Fix: correct it"
        ) from None
    return {"validator": validator}, []


def length(num_tokens: int, target: int, margin: int) -> float:
    """-min(1, max(0, num_tokens - target) / margin): 0 up to `target`, then down to -1.

    Equation 13 of DAPO (https://arxiv.org/abs/2503.14476), with target = L_max - L_cache and margin = L_cache.
    """
    return max(-1.0, min(0, target - num_tokens) / margin)


def tests(completion: str, row: Mapping[str, Any], program: Program) -> float:
    """1 if the code of the completion passes the row's tests; with `partial`, the share that passes.

    The code is the last fenced block, else all of the text; a test is Python that raises nothing. Code that does not
    compile, ends the process or goes beyond a limit passes none.
    """
    if program.column not in row:
        raise Unanswerable(f"the row has no column `{program.column}` with tests; it has {', '.join(row) or 'none'}")
    given = row[program.column]
    cases = [given] if isinstance(given, str) else list(given) if isinstance(given, list | tuple) else []
    if not cases or not all(isinstance(case, str) and case.strip() for case in cases):
        raise Unanswerable(
            f"column `{program.column}`: expected Python code, or a list of it, not {type(given).__name__}"
        )
    passed = run_program(last_fenced(completion), cases, program)
    return sum(passed) / len(cases) if program.partial else float(all(passed))


def _with_limits(parameters: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    program = Program(**parameters)
    missing = missing_limits(program)
    if missing is None:
        limits = f"{program.memory_mb} MB and {program.seconds:g} s"
        raise Unanswerable(f"even an empty program fails within {limits}. Fix: raise `memory_mb` or `seconds`")
    if NAMESPACES in missing and program.isolation == "required":
        raise Unanswerable(
            "this system forbids namespaces (Docker's default). A program could read this run's environment, tokens "
            "included, and reach the network. Fix: allow them (`docker run --security-opt seccomp=unconfined`), or set "
            "`isolation: none` where there is no secret"
        )
    notes = [f"programs of completions run without {' and without '.join(missing)}; see docs/reference/rewards.md"]
    return {"program": program}, notes if missing else []


@dataclass(frozen=True)
class BuiltIn:
    """A built-in reward. prepare: turns the recipe's parameters into the function's, once, with notes for the user;
    raises Unanswerable if they cannot be used."""

    function: Callable[..., float]
    prepare: Callable[[Mapping[str, Any]], tuple[Mapping[str, Any], list[str]]] | None = None


REWARDS: dict[str, BuiltIn] = {
    "exact_match": BuiltIn(exact_match),
    "number": BuiltIn(number),
    "boxed": BuiltIn(boxed, _with_math_verify),
    "regex": BuiltIn(regex),
    "json_schema": BuiltIn(json_schema, _with_validator),
    "length": BuiltIn(length),
    "tests": BuiltIn(tests, _with_limits),
}
