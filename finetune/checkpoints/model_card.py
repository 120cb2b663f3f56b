"""README.md of a result: what was trained, on what, with what numbers."""

from __future__ import annotations

from typing import Any

import yaml

from finetune.checkpoints.inputs import short
from finetune.checkpoints.trained import LABELS
from finetune.data.sources.hub import is_hub_dataset
from finetune.recipe import Recipe, dump_recipe
from finetune.recipe.urls import without_credentials


def model_card(
    recipe: Recipe, plan: dict[str, Any], state: dict[str, Any], loss: float | None, evaluation: dict[str, float]
) -> str:
    """Returns Markdown with the hub's metadata block.

    plan: plan.json; state: steps and tokens done, and hashes of the inputs; loss: of the last step.
    """
    metadata: dict[str, Any] = {
        "library_name": "transformers" if recipe.mode == "full" else "peft",
        "tags": ["finetune", recipe.objective.name],
    }
    if recipe.objective.scores_sequences:
        metadata["pipeline_tag"] = "text-classification"
    if recipe.model.name:
        metadata["base_model"] = recipe.model.name
        metadata["base_model_relation"] = "finetune" if recipe.mode == "full" else "adapter"
    if datasets := list(dict.fromkeys(one.path for one in recipe.data.train if is_hub_dataset(one.path))):
        metadata["datasets"] = datasets
    rows = [
        ("Base", recipe.model.name or f"from scratch ({(recipe.model.config or {}).get('model_type')})"),
        ("Objective", recipe.objective.label),
        ("Method", recipe.mode + (f", rank {recipe.lora.rank}" if recipe.lora else "")),
        ("Parameters", f"{plan['parameters']:,} ({plan['trainable_parameters']:,} trained)"),
        ("Training data", ", ".join(without_credentials(source.path) for source in recipe.data.train)),
        ("Steps", f"{state['step']:,} of {recipe.batch.rows} sequences of up to {recipe.data.max_length:,} tokens"),
        ("Tokens", f"{state['tokens']:,} ({state['supervised_tokens']:,} supervised)"),
        ("Precision", recipe.train.precision),
        *((("Last training loss", f"{loss:.4f}"),) if loss is not None else ()),
        *((name.replace("_", " ").capitalize(), f"{value:.4f}") for name, value in evaluation.items()),
        ("Ran on", f"{plan['where']}, {plan['world_size']} x {plan['device']}"),
        *((("What was read", short(state["inputs"])),) if "inputs" in state else ()),
        ("Code", plan["git_commit"] or "-"),
        ("Versions", ", ".join(f"{name} {version}" for name, version in plan["versions"].items())),
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    scores = ""
    if recipe.objective.scores_sequences:
        load = 'pipeline("text-classification", model=folder)  # of transformers'
        if recipe.mode != "full":
            load = (
                "AutoPeftModelForSequenceClassification.from_pretrained(folder, num_labels=...)  # of peft: as many as "
                f"{LABELS} has\n# or `finetune merge`, for a folder that a pipeline loads"
            )
        scores = (
            f"{recipe.objective.score_model} The score is that of the last token: give the text as it was "
            "trained, which `finetune score` does. What a chat template wrote is given to a pipeline with "
            f"`add_special_tokens=False`.\n\n```python\n{load}\n```\n\n"
        )
    return (
        f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---\n\n# {recipe.run.name}\n\n"
        f"| | |\n| --- | --- |\n{table}\n\n{scores}"
        f"<details><summary>Recipe</summary>\n\n```yaml\n{dump_recipe(recipe)}```\n\n</details>\n"
    )
