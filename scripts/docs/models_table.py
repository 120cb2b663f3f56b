"""Writes the table by family of docs/reference/models.md: what was tried of each, and what is offered.

    python scripts/docs/models_table.py      # after a new version of transformers, or of a table below; minutes

Where a cell is from:

    packing, full, LoRA   the tables of the same page, which scripts/proofs/architectures.py made by trial
    tp, pp, ep            the rules of a launch with each, on a tiny model: tried here as `train` tries it
    matrix                cases of the parity matrix (tests/support/parity.py), each on every config that it names
    images                families of finetune/data/media/family_table.py
    GGUF                  written here, or by llama.cpp's converter and read back (scripts/proofs/gguf_architectures.py)
    recipes               recipes/*/
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

sys.path.append(str(Path(__file__).resolve().parents[1] / "proofs"))
sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "support"))

import architectures
import gguf_architectures
import tiny
from parity import CASES

from finetune.engine.parallelism_rules import Architecture
from finetune.features import load_recipe
from finetune.models.config import EXPERTS_STYLE
from finetune.plan.tables import shipped_config
from finetune.release.export.gguf_settings import ARCHITECTURES

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "models.md"
BEGINS, ENDS = "<!-- families: made by scripts/docs/models_table.py -->", "<!-- /families -->"
HEAD = "| family | `model_type` | packing | full | LoRA | tp | pp | ep | matrix | GGUF | recipes |"
FAMILIES: dict[str, tuple[str, ...]] = {
    "Llama 2, 3; SmolLM2": ("llama",),
    "Llama 4": ("llama4_text",),
    "Mistral": ("mistral",),
    "Ministral 3": ("ministral3",),
    "Mixtral": ("mixtral",),
    "Qwen2, Qwen2.5": ("qwen2",),
    "Qwen2-MoE": ("qwen2_moe",),
    "Qwen3": ("qwen3",),
    "Qwen3-MoE": ("qwen3_moe",),
    "Qwen3-Next": ("qwen3_next",),
    "Qwen3.5, 3.6, 3.8": ("qwen3_5_text",),
    "Qwen3.5, 3.6 with experts": ("qwen3_5_moe_text",),
    "Gemma 2": ("gemma2",),
    "Gemma 3": ("gemma3_text",),
    "Gemma 3n": ("gemma3n_text",),
    "Gemma 4": ("gemma4_text",),
    "Gemma 4 12B": ("gemma4_unified_text",),
    "gpt-oss": ("gpt_oss",),
    "DeepSeek V2, V3": ("deepseek_v2", "deepseek_v3"),
    "DeepSeek V3.2, V4": ("deepseek_v32", "deepseek_v4"),
    "GLM-4, GLM-4 MoE": ("glm4", "glm4_moe"),
    "Phi-3": ("phi3",),
    "Granite": ("granite",),
    "Granite 4": ("granitemoehybrid",),
    "Nemotron": ("nemotron",),
    "Nemotron Nano 2, 3, 3.5": ("nemotron_h",),
    "LFM2": ("lfm2",),
    "SmolLM3": ("smollm3",),
    "OLMo 2, 3": ("olmo2", "olmo3"),
    "Cohere": ("cohere", "cohere2"),
    "StableLM": ("stablelm",),
    "StarCoder2": ("starcoder2",),
    "Falcon-H1": ("falcon_h1",),
    "Mamba, Mamba 2": ("mamba", "mamba2"),
}


@dataclass(frozen=True)
class Row:
    """A line of the table; cells: those of HEAD behind the types."""

    family: str
    types: tuple[str, ...]
    cells: tuple[str, ...]


def verdicts(page: str) -> dict[str, tuple[str, str, str]]:
    """Returns packing, full training and LoRA of each `model_type` by the page's tables of architectures."""
    found, title = dict[str, tuple[str, str, str]](), ""
    for line in page.partition(architectures.BEGINS)[2].partition(architectures.ENDS)[0].splitlines():
        if heading := re.match(r"\*\*(\w+)\*\*", line):
            title = heading[1].lower()
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")] if line.startswith("| ") else []
        if len(cells) < 2 or cells[0].startswith(("`model_type`", "---")):
            continue
        if title == "packed":
            lora, files = line.split("|")[4].strip(), line.split("|")[5].strip()
            found[cells[0]] = ("packed", "yes" if files == "same" else "no", "yes" if lora == "same" else "no")
        elif title == "single":
            found[cells[0]] = ("a document per forward", "yes", "yes")
        elif title in ("refused", "stops", "unbuilt"):
            found[cells[0]] = (title, "no", "no")
    return found


def offered(name: str) -> tuple[str, str, str]:
    """Returns whether tensor, pipeline and expert parallel take a `model_type`: by trials of its tiny model."""
    config = CONFIG_MAPPING[name](**architectures.SETTINGS.get(name, {}))
    model = Architecture.of(config, in_stages=True, divided=True)
    of_experts = not model.experts or (
        EXPERTS_STYLE in model.tensor_styles and "packed_rowwise" not in model.tensor_styles
    )
    tensor = bool(model.tensor_styles) and model.not_divided is None and of_experts
    has_experts = bool(model.experts or getattr(config, "n_routed_experts", None))
    return _yes(tensor), _yes(model.not_in_stages is None), _yes(has_experts) if has_experts else ""


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "no"


def cases() -> dict[str, int]:
    """Returns how many cases of the parity matrix train each `model_type`, text parts by their own."""
    counts = dict[str, int]()
    for case in CASES:
        shape = tiny.MODELS.get(case.model) or tiny.MULTIMODAL.get(case.model.removesuffix("_sees")) or {}
        kind = shape.get("text_config", shape).get("model_type", "llama")
        counts[kind] = counts.get(kind, 0) + 1
    return counts


def recipes() -> dict[str, list[str]]:
    """Returns the folders of recipes by the `model_type` of their text model."""
    found = dict[str, list[str]]()
    for folder in sorted({path.parent for path in (ROOT / "recipes").glob("*/*.yaml")}):
        if folder.name in ("base", "tasks", "quickstart", "gsm8k"):
            continue
        name = load_recipe(sorted(folder.glob("*.yaml"))[0], []).model.name
        assert name is not None, folder
        config = shipped_config(name) or shipped_config(name, sees_images=True)
        kind = config.get_text_config().model_type if config is not None else ""
        found.setdefault(kind, []).append(folder.name)
    return found


def gguf(name: str) -> str:
    if name in ARCHITECTURES:
        return "here"
    return "llama.cpp" if name in gguf_architectures.MODELS else ""


def _each(values: list[str]) -> str:
    """Returns one value if all are the same, else all of them in the order of the types."""
    return values[0] if len({*values}) == 1 else ", ".join(value or "no" for value in values)


def rows(page: str, tried: dict[str, tuple[str, str, str]]) -> Iterator[Row]:
    """Yields the lines. tried: what is offered, by `model_type`."""
    by_type, counts, shipped = verdicts(page), cases(), recipes()
    for family, types in FAMILIES.items():
        kinds = [by_type[name] for name in types]
        own = [_each([kind[i] for kind in kinds]) for i in range(3)]
        split = [_each([tried[name][i] for name in types]) for i in range(3)]
        number = sum(counts.get(name, 0) for name in types)
        folders = [folder for name in types for folder in shipped.get(name, ())]
        links = ", ".join(f"[{folder}](../../recipes/{folder})" for folder in folders)
        yield Row(family, types, (*own, *split, str(number or ""), _each([gguf(name) for name in types]), links))


def table(page: str, tried: dict[str, tuple[str, str, str]]) -> str:
    lines = [f"transformers {transformers.__version__}.", "", HEAD, "| --- " * HEAD.count(" |") + "|"]
    for row in rows(page, tried):
        names = ", ".join(f"`{name}`" for name in row.types)
        lines.append(f"| {row.family} | {names} | {' | '.join(row.cells)} |")
    return "\n".join([BEGINS, "", *lines, "", ENDS])


def stated(page: str) -> dict[str, tuple[str, str, str]]:
    """Returns what the page says is offered, by `model_type`: for a test, which does not try all of them again."""
    found = dict[str, tuple[str, str, str]]()
    for line in page.partition(BEGINS)[2].partition(ENDS)[0].splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) != HEAD.count(" |") or not cells[1].startswith("`") or cells[1] == "`model_type`":
            continue
        types = re.findall(r"`(\w+)`", cells[1])
        split = [cell.split(", ") if ", " in cell else [cell] * len(types) for cell in cells[5:8]]
        for i, name in enumerate(types):
            tensor, pipeline, expert = (one[i] for one in split)
            found[name] = (tensor, pipeline, expert)
    return found


def main() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    text = PAGE.read_text(encoding="utf-8")
    before, after = text.split(BEGINS)[0], text.split(ENDS)[1]
    tried = {}
    for name in (name for types in FAMILIES.values() for name in types):
        tried[name] = offered(name)
        print(name, *tried[name], flush=True)
    PAGE.write_text(f"{before}{table(text, tried)}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
