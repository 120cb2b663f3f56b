"""Writes the table of docs/reference/experts.md: which modules of every mixture of experts get adapters.

    python scripts/docs/experts_table.py      # after a new version of transformers or peft; half a minute

A model of each causal class with experts, tiny and without values, gets adapters by `lora.targets: all-linear`.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

sys.path.append(str(Path(__file__).resolve().parents[1] / "proofs"))

import architectures

from finetune.errors import UserError
from finetune.models.checkpoint_files import check_names_kept
from finetune.models.lora_targets import adapted_paths
from finetune.models.tiny_config import tiny_config
from finetune.models.trials import FAILURES
from finetune.models.weights import add_adapters
from finetune.recipe.schema import Lora

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "experts.md"
BEGINS, ENDS = "<!-- adapters: made by scripts/docs/experts_table.py -->", "<!-- /adapters -->"
KINDS = ("attention and others", "dense layers", "shared experts", "routed experts")
# Switches without which a class has no experts, or no dense layers, in its tiny model.
SETTINGS: dict[str, dict[str, Any]] = {
    "gemma4_text": {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 128},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "qwen2_moe": {"mlp_only_layers": [0]},
    "qwen3_moe": {"mlp_only_layers": [0]},
    "qwen3_next": {"mlp_only_layers": [0]},
}
_DENSE = re.compile(r"\.(mlp|mlps\.\d+|feed_forward|shared_mlp)\.\w+$|\.(gate_proj|up_proj|down_proj|gate_up_proj)$")


@dataclass(frozen=True)
class Row:
    """What `all-linear` does to a class."""

    name: str
    adapted: dict[str, list[str]]  # by kind: last names
    left_out: str


def tiny(name: str) -> Any:
    """Returns the config of a tiny model of a `model_type`."""
    settings = {**architectures.SETTINGS.get(name, {}), **SETTINGS.get(name, {})}
    config = tiny_config(CONFIG_MAPPING[name](**settings))
    config.dtype = torch.float32
    return config


def with_experts() -> Iterator[tuple[str, Any]]:
    """Yields the `model_type` of every causal class with experts, and its tiny model without values."""
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        if name in architectures.NO_MODEL:
            continue
        try:
            with torch.device("meta"):
                model: Any = AutoModelForCausalLM.from_config(tiny(name))
        except FAILURES:  # has no tiny model, as docs/reference/models.md says
            continue
        if any("Expert" in type(module).__name__ for module in model.modules()):
            yield name, model


def row(name: str, model: Any) -> Row:
    """Returns what `all-linear` does to the model, in place."""
    adapted: dict[str, list[str]] = {kind: [] for kind in KINDS}
    try:
        with torch.device("meta"):
            wrapped = add_adapters(model, Lora(rank=4, alpha=8), torch.float32)
        layers, stacked = adapted_paths(wrapped)
        check_names_kept(model, [*layers, *(path.rpartition(".")[0] for path in stacked)])
    except UserError as error:
        return Row(name, adapted, f"refused: {error}")
    for path in [*layers, *stacked]:
        if "shared" in path:
            kind = "shared experts"
        elif path in stacked:
            kind = "routed experts"
        else:
            kind = "dense layers" if _DENSE.search(path) and "attn" not in path else "attention and others"
        adapted[kind].append(path.rpartition(".")[2] if not path.endswith(".weight") else path.split(".")[-2])
    return Row(name, adapted, "; ".join(wrapped.left_out))


def table(rows: list[Row]) -> list[str]:
    """Returns the lines of the table."""
    lines = [
        f"transformers {transformers.__version__}, peft {peft.__version__}; {len(rows)} classes.",
        "",
        f"| `model_type` | {' | '.join(KINDS)} | left out |",
        f"| --- |{' --- |' * (len(KINDS) + 1)}",
    ]
    for one in rows:
        cells = [", ".join(f"`{name}`" for name in dict.fromkeys(one.adapted[kind])) for kind in KINDS]
        lines.append(f"| {one.name} | {' | '.join(cells)} | {one.left_out.replace('|', '/')} |")
    return lines


def main() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    text = PAGE.read_text(encoding="utf-8")
    before, after = text.split(BEGINS)[0], text.split(ENDS)[1]
    made = "\n".join([BEGINS, *table([row(name, model) for name, model in with_experts()]), ENDS])
    PAGE.write_text(f"{before}{made}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
