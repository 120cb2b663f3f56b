"""Arguments and options that several commands take."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from finetune.release.inference.sampling import Sampling


def _recipe_keys(incomplete: str) -> Iterator[str]:
    """Yields keys of a recipe that begin with `incomplete`, for the completion of overrides."""
    from finetune.recipe.schema import Recipe

    schema = Recipe.model_json_schema()
    for section, described in schema["properties"].items():
        of_section = [part.get("$ref") for part in (described, *described.get("anyOf", ()))]
        fields = [name for ref in of_section if ref for name in schema["$defs"][ref.rpartition("/")[2]]["properties"]]
        for key in [f"{section}.{name}" for name in fields] or [section]:
            if key.startswith(incomplete):
                yield f"{key}="


RecipePath = Annotated[Path, typer.Argument(help="Recipe file (YAML).", metavar="RECIPE")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Override recipe keys: section.key=value.", metavar="KEY=VALUE", autocompletion=_recipe_keys),
]
RunDir = Annotated[Path, typer.Argument(help="Run directory, such as runs/quickstart-full.", metavar="RUN_DIR")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
BaseModel = Annotated[str | None, typer.Option(help="Read the base model from here, if it has moved since the run.")]
ConfigFile = Annotated[
    Path | None, typer.Option(help="Use this accelerate config, if torchrun launches the processes.")
]
ServerUrl = Annotated[
    str | None, typer.Option(metavar="http://HOST:PORT/v1", help="Use a live server instead of a folder.")
]
ServedModel = Annotated[
    str | None, typer.Option(help="Ask for this model of that server. Default: its only one, or the run's.")
]
System = Annotated[str | None, typer.Option(metavar="TEXT", help="Begin with this system prompt.")]

NewModel = Annotated[str | None, typer.Option(help="Train this model: hub id or local folder.")]
NewData = Annotated[str | None, typer.Option(help="Train on this file, folder, URL or dataset of the hub.")]
NewMode = Annotated[str | None, typer.Option(help="Train by full, lora or qlora.")]
NewName = Annotated[str | None, typer.Option(help="Name the run. Default: from data and mode.")]
NewFormat = Annotated[str | None, typer.Option(help="Read rows of this format. Default: by the rows.")]
NewColumns = Annotated[
    str | None, typer.Option(metavar="FIELD=COLUMN,...", help="Read these columns: prompt=question,completion=answer.")
]
NewObjective = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|FILE.py:FUNCTION",
        help="Train by this objective: dpo, kto, orpo, grpo, ..., or a loss of your own; `own` writes a file with one. "
        "Default: by the rows.",
    ),
]
NewRewards = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME|FILE.py:FUNCTION", help="Reward of --objective grpo, such as number; may be repeated."),
]

_SAMPLING = {
    "max_new_tokens": Annotated[int, typer.Option(min=1, help="End answers after this many tokens.")],
    "temperature": Annotated[float, typer.Option(min=0.0, help="Sample at this temperature; 0 is greedy.")],
    "top_p": Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Draw from the likeliest tokens of this mass.")
    ],
    "top_k": Annotated[int | None, typer.Option(min=0, help="Draw from this many likeliest tokens; 0: all.")],
    "repetition_penalty": Annotated[
        float | None, typer.Option(min=0.01, help="Make tokens that occurred less likely, if above 1.")
    ],
    "seed": Annotated[
        int | None, typer.Option(min=0, help="Sample with this seed: the same seed draws the same answers.")
    ],
    "stop": Annotated[list[str] | None, typer.Option(metavar="TEXT", help="End an answer here; may be repeated.")],
}


def with_sampling(command: Callable[..., None]) -> Callable[..., None]:
    """Returns a command with the options of `Sampling` in place of its parameter `sampling`, whose default holds
    their defaults."""
    expanded: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        if parameter.name != "sampling":
            expanded.append(parameter)
            continue
        for name, option in _SAMPLING.items():
            default = getattr(parameter.default, name)
            default = None if default == () else default
            expanded.append(inspect.Parameter(name, parameter.kind, default=default, annotation=option))

    @functools.wraps(command)
    def run(**given: Any) -> None:
        chosen = {name: given.pop(name) for name in _SAMPLING}
        command(**given, sampling=Sampling(**{**chosen, "stop": tuple(chosen["stop"] or ())}))

    run.__signature__ = inspect.Signature(expanded)  # type: ignore[attr-defined]  (what typer reads)
    return run
