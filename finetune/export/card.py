"""The model card, written from the plan and the metrics: nothing in it is typed by hand."""

from __future__ import annotations

from typing import Any

import yaml

from finetune.recipe import Recipe, dump_recipe
from finetune.recipe.urls import without_credentials


def model_card(
    recipe: Recipe, plan: dict[str, Any], state: dict[str, int], loss: float | None, evaluation: dict[str, float]
) -> str:
    """Markdown with the hub's metadata block. plan: plan.json; state: steps and tokens done; loss: of the last step."""
    head: dict[str, Any] = {
        "library_name": "transformers" if recipe.mode == "full" else "peft",
        "tags": ["finetune", "sft"],
    }
    if recipe.model.name:
        head["base_model"] = recipe.model.name
    rows = [
        ("Base", recipe.model.name or f"from scratch ({(recipe.model.config or {}).get('model_type')})"),
        ("Method", recipe.mode + (f", rank {recipe.lora.rank}" if recipe.lora else "")),
        ("Parameters", f"{plan['parameters']:,} ({plan['trainable_parameters']:,} trained)"),
        ("Training data", ", ".join(without_credentials(source.path) for source in recipe.data.train)),
        ("Steps", f"{state['step']:,} of {recipe.batch.rows} rows of up to {recipe.data.max_length:,} tokens"),
        ("Tokens", f"{state['tokens']:,} ({state['supervised_tokens']:,} supervised)"),
        ("Precision", recipe.train.precision),
        *((("Last training loss", f"{loss:.4f}"),) if loss is not None else ()),
        *((name.replace("_", " ").capitalize(), f"{value:.4f}") for name, value in evaluation.items()),
        ("Ran on", f"{plan['where']}, {plan['world_size']} x {plan['device']}"),
        ("Code", plan["git_commit"] or "-"),
        ("Versions", ", ".join(f"{name} {version}" for name, version in plan["versions"].items())),
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    return (
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n\n# {recipe.run.name}\n\n"
        f"| | |\n| --- | --- |\n{table}\n\n"
        f"<details><summary>Recipe</summary>\n\n```yaml\n{dump_recipe(recipe)}```\n\n</details>\n"
    )
