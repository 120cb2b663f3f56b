"""`quickstart.sh --audio`: the clips are the same in every run, none is trained and tested, and a model learns them."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import wave
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
from conftest import ROOT, metrics, script

pytest.importorskip("soundfile")
pytest.importorskip("soxr")


def loudest(content: bytes) -> float:
    """The loudest frequency of a clip, in Hz."""
    with wave.open(io.BytesIO(content)) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(float)
        rate = file.getframerate()
    return float(np.argmax(np.abs(np.fft.rfft(samples))) * rate / len(samples))


def test_clips_are_the_same_each_time_and_sound_as_they_are_named(tmp_path: Path) -> None:
    tones = script("scripts/make_tones.py")
    tones.NUM_TRAIN, tones.NUM_TEST = 64, 32
    for name in ("one", "other"):
        tones.write_rows(tmp_path / name)
    files = sorted(path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*") if path.is_file())
    assert len(files) == 34
    assert all((tmp_path / "one" / file).read_bytes() == (tmp_path / "other" / file).read_bytes() for file in files)
    rows = [json.loads(line) for line in (tmp_path / "one" / "test.jsonl").read_text().splitlines()]
    tested = {}
    for row in rows:
        content = (tmp_path / "one" / row["messages"][0]["content"][0]["audio"]).read_bytes()
        tested[content] = row["messages"][1]["content"][0]["text"]
    for content, answer in tested.items():
        tone, _, rhythm = answer.rpartition(" ")
        assert loudest(content) == pytest.approx(tones.TONES[tone], rel=0.015)
        assert rhythm in tones.RHYTHMS
    assert sorted(tested.values()) == sorted(f"{tone} {rhythm}" for tone in tones.TONES for rhythm in tones.RHYTHMS)
    table = pyarrow.parquet.read_table(tmp_path / "one" / "train.parquet").to_pydict()
    assert not tested.keys() & {clips[0]["bytes"] for clips in table["audios"]}


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_model_learns_what_it_hears(tmp_path: Path) -> None:
    """By the commands of the script; from chance, one of 32 answers, to more than 95 % of clips that it never heard."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for command in (
        [str(ROOT / "scripts/make_tones.py")],
        ["-m", "finetune", "train", str(ROOT / "recipes/quickstart/audio-full.yaml")],
        [str(ROOT / "scripts/quickstart_report.py"), "runs", "audio-full"],
    ):
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    found = [line["exact_match"] for line in metrics(tmp_path / "runs/quickstart-audio-full") if "exact_match" in line]
    assert found[0] < 0.1
    assert found[-1] > 0.95
