"""benchmarks/prepare_speed.py runs and says what it promises; never how long anything took."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from conftest import script


@pytest.fixture(scope="module")
def speed() -> ModuleType:
    return script("benchmarks/prepare_speed.py")


@pytest.fixture(scope="module")
def folder(speed: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("speed")
    rows = [{"question": f"What is {i} and {i + 1}?", "answer": f"{i} + {i + 1} = {2 * i + 1}"} for i in range(40)]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    speed.save_tokenizer(rows, folder / "tokenizer", 400)
    speed.write_chat(rows, folder / "chat.jsonl", 2)
    speed.write_documents(rows, folder / "documents.jsonl", 3)
    return folder


@pytest.mark.long
def test_ours_and_trl_do_the_same_work(speed: ModuleType, folder: Path) -> None:
    """In processes of their own, as it measures."""
    contenders = ["ours", *(["trl"] if importlib.util.find_spec("trl") else [])]
    task = {"processes": 1, "folder": str(folder), "name": "chat"}
    found = [speed.run({"who": who, "cache": str(folder / who), **task}) for who in contenders]
    assert {one["rows"] for one in found} == {80}
    assert len({(one["tokens"], one["supervised_tokens"], one["efficiency"]) for one in found}) == 1
    assert found[0]["peak_rss"] >= found[0]["peak_rss_of_main"] > 0


def test_ours_and_a_plain_map_do_the_same_work(speed: ModuleType, folder: Path) -> None:
    for name, rows in (("chat", 80), ("documents", 3)):
        task = {"processes": 1, "folder": str(folder), "name": name, "cache": str(folder / "map")}
        ours, plain = speed.contend(who="ours", **task), speed.contend(who="map", **task)
        assert ours["rows"] == plain["rows"] == rows
        assert ours["tokens"] == plain["tokens"]


def test_ratios_are_taken_within_a_round(speed: ModuleType) -> None:
    def cell(number: int, who: str, first: float, second: float) -> dict:
        return {
            "set": "chat",
            "round": number,
            "contender": who,
            "first": {"seconds": first},
            "second": {"seconds": second},
        }

    cells = [
        cell(number, who, slow * seconds, slow * again)
        for number, slow in enumerate((1.0, 5.0, 2.0))
        for who, seconds, again in (
            ("ours", 2.0, 0.1),
            ("trl, 1 proc", 8.0, 4.0),
            ("trl, 2 proc", 6.0, 6.0),
            ("map, 1 proc", 3.0, 1.0),
        )
    ]
    assert speed.summary("chat", cells) == {
        "set": "chat",
        "speed_over_best_trl": 3.0,
        "speed_over_best_map": 1.5,
        "first_over_second_start": 20.0,
        "trl_first_over_second_start": 1.5,
    }


def test_it_wants_rows(speed: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["prepare_speed.py"])
    with pytest.raises(SystemExit):
        speed.main()
    assert "--rows is needed" in capsys.readouterr().err
