"""What a run needs and this Python lacks, as `doctor` and the check of GPUs tell it."""

from __future__ import annotations

import re
from importlib import metadata

import pytest

from finetune.desk.doctor.requirements import missing_requirements


def test_missing_and_other_versions_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    version = metadata.version
    other = {"datasets": "4.9.0", "pydantic": None, "bitsandbytes": None}

    def installed(name: str) -> str:
        if (found := other.get(name, version(name))) is None:
            raise metadata.PackageNotFoundError(name)
        return found

    assert missing_requirements() == []
    monkeypatch.setattr(metadata, "version", installed)
    assert missing_requirements() == ["datasets<6,>=5.0", "pydantic<3,>=2.10"]
    other |= {"datasets": version("datasets"), "pydantic": version("pydantic"), "typing-inspection": None}
    (missing,) = missing_requirements()  # wheels carried to a machine without an index lacked this one
    assert re.fullmatch(r"typing-inspection>=[\d.]+ \(of pydantic\)", missing)


def test_those_of_the_clone_if_finetune_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "0.0.1")
    missing = missing_requirements()

    def absent(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", absent)
    assert sorted(missing_requirements()) == sorted(missing) != []
