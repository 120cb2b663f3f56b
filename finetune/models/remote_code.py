"""Python code in a model's repository: run only if a recipe says `model.trust_remote_code: true`.

Without that argument, transformers asks on the terminal and takes a line `y` of standard input as consent, which may
be a prompt of `generate`. So auto classes are only loaded through these functions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from finetune.data.sources.hub import is_hub_model, offline_without_hub
from finetune.errors import UserError
from finetune.recipe import load_recipe


def trusts_code(folder: Path) -> bool:
    """Returns whether the run that a model folder belongs to trusts code of its model, by `recipe.yaml` in it or in
    its parent. Other folders are not trusted."""
    recipe = next((path for place in (folder, folder.parent) if (path := place / "recipe.yaml").is_file()), None)
    try:
        return recipe is not None and load_recipe(recipe).model.trust_remote_code
    except UserError:  # of another program, or damaged: the code that needs it reports that
        return False


def load_auto(auto: Any, name: str | Path, trusted: bool | None = None, **arguments: Any) -> Any:
    """Returns `auto.from_pretrained(name, ...)`. trusted: whether code in its repository may run; None: as the recipe
    of the run that the folder belongs to says. Raises UserError for a model that needs code that is not trusted."""
    trusted = trusts_code(Path(name)) if trusted is None else trusted
    if is_hub_model(str(name)):
        offline_without_hub()
    if auto is AutoTokenizer:  # with Mistral's library installed, it would take that one's, which knows no offsets
        arguments = {"mistral_format": False, **arguments}
    try:
        return auto.from_pretrained(name, trust_remote_code=trusted, **arguments)
    except ValueError as error:
        raise _refusal(str(name), error) from None


def from_config(auto: Any, config: Any, trusted: bool | None = None, **arguments: Any) -> Any:
    """Returns `auto.from_config(config, ...)`. trusted: None: if the config itself is of such code, which then was
    trusted. Raises UserError for a model that needs code that is not trusted."""
    if trusted is None:
        trusted = type(config).__module__.startswith("transformers_modules.")  # where transformers puts it
    try:
        return auto.from_config(config, trust_remote_code=trusted, **arguments)
    except ValueError as error:
        raise _refusal(config.name_or_path, error) from None


def _refusal(name: str, error: ValueError) -> Exception:
    """Returns the error for a model that needs code of its own; any other error as it is."""
    if "trust_remote_code" not in str(error):
        return error
    return UserError(
        f"{name}: this model runs Python code of its own repository, which is not trusted. Fix: read that code, then "
        "set `model.trust_remote_code: true` in the recipe (of a finished run: in its recipe.yaml)"
    )
