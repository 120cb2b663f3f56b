"""Requirements of finetune that this Python lacks."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

DISTRIBUTION = "finetune-recipes"  # `finetune` on the index is another project
OPTIONAL = ("bitsandbytes", "deepspeed", "ninja", "wandb")  # only what asks for them needs them


def missing_requirements() -> list[str]:
    """Returns what a run needs and this Python lacks, or has in another version; read from a clone's pyproject.toml if
    finetune is not installed. Requirements of requirements only if they are missing: wheels that are carried to a
    machine without an index are easily one too few."""
    from packaging.requirements import Requirement

    try:
        lines = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        text = (Path(__file__).resolve().parents[3] / "pyproject.toml").read_text(encoding="utf-8")
        listed = text.partition("\ndependencies = [")[2].partition("\n]")[0]
        lines = re.findall(r'"(.+)",$', listed, re.MULTILINE)
    missing, seen, waiting = [], set[str](), [(line, "finetune") for line in lines]
    while waiting:
        line, needed_by = waiting.pop(0)
        one = Requirement(line)
        if one.name in seen or one.name in OPTIONAL or (one.marker and not one.marker.evaluate({"extra": ""})):
            continue
        seen.add(one.name)
        version = installed_version(one.name)
        if version is None:
            missing.append(f"{one.name}{one.specifier}" + (f" (of {needed_by})" if needed_by != "finetune" else ""))
        elif needed_by == "finetune" and not one.specifier.contains(version, prereleases=True):
            missing.append(f"{one.name}{one.specifier}")
        else:
            waiting += [(further, one.name) for further in metadata.requires(one.name) or []]
    return missing


def installed_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
