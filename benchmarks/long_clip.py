"""Memory that a long clip takes: two hours at 44.1 kHz in stereo, as wav, flac and mp3.

    python benchmarks/long_clip.py --json benchmarks/results/long_clip.json

The files are written in blocks. For each, in a process of its own: the peak of the resident memory above what the
imports take, after the clip has been checked as a row (all of its samples are read), after it is loaded at 16 kHz, and
after its features are made, for families that take clips of any length. The others refuse it as a bad row, which is
printed with the memory that this took.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]
KINDS = ("wav", "flac", "mp3")
FAMILIES = ("qwen2_audio", "voxtral", "qwen3_asr", "qwen3_omni_moe_thinker")
RATE = 44_100
BANDS = 128  # of the published extractors of all four


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)  # kind, family, folder
    arguments = parser.parse_args()
    if arguments.measure:
        kind, family, folder = arguments.measure
        print(json.dumps(measured(kind, family, Path(folder))))
        return
    with tempfile.TemporaryDirectory(prefix="finetune-bench-") as name:
        folder = Path(name)
        save_models(folder, arguments.families)
        cells = []
        for kind in arguments.kinds:
            path = write_clip(folder / f"long.{kind}", arguments.hours)
            for family in arguments.families:
                command = [sys.executable, __file__, "--measure", kind, family, str(folder)]
                out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
                cells.append({"kind": kind, "file_mb": path.stat().st_size / 1e6, **json.loads(out.splitlines()[-1])})
                print(line(cells[-1]), flush=True)
            path.unlink()
    if arguments.json:
        result = {"command": "python benchmarks/long_clip.py " + " ".join(sys.argv[1:]), "cells": cells}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def line(cell: dict[str, Any]) -> str:
    """A row of a markdown table."""
    steps = " | ".join(f"{cell[key]:,.0f}" if key in cell else "-" for key in ("checked", "loaded", "features"))
    return f"| {cell['kind']}, {cell['file_mb']:,.0f} MB | {cell['family']} | {steps} | {cell.get('refused', '')} |"


def write_clip(path: Path, hours: float) -> Path:
    """Writes a tone with noise, a second at a time."""
    import numpy as np
    import soundfile

    noise = np.random.default_rng(0).normal(0, 0.01, (RATE, 2)).astype(np.float32)
    tone = 0.3 * np.sin(2 * np.pi * 220 * np.arange(RATE, dtype=np.float32) / RATE)[:, None]
    with soundfile.SoundFile(path, "w", RATE, 2, format=path.suffix[1:].upper()) as file:
        for second in range(round(hours * 3600)):
            file.write(np.roll(noise, 101 * second, axis=0) + tone)
    return path


def save_models(folder: Path, families: list[str]) -> None:
    """Writes tiny models whose extractors have the published number of bands, and pieces of 30 s."""
    import hearing

    for name in families:
        row = hearing.HEARING[name]
        audio = {**row.config["audio_config"], "num_mel_bins": BANDS}
        if name in ("qwen2_audio", "voxtral"):
            audio["max_source_positions"] = 1500
        model = hearing.save_hearing(folder, name, audio_config=audio)
        settings = {**row.extractor, "feature_size": BANDS}
        if "chunk_length" in settings:
            settings["chunk_length"] = 30
        (model / "preprocessor_config.json").write_text(json.dumps(settings), encoding="utf-8")


def measured(kind: str, family: str, folder: Path) -> dict[str, Any]:
    """Returns the peaks, in MB above the imports, and the reason if the clip is refused."""
    from finetune.data.media.audio_files import load_clip
    from finetune.data.media.families import media_family
    from finetune.data.samples import BadRow
    from finetune.models.tokenizer import load_tokenizer
    from finetune.recipe.schema import Audio, Model

    model = Model(name=str(folder / f"{family}_hears"))
    ear: Any = media_family(model, Audio(max_seconds=1e6), load_tokenizer(model))
    wave = load_clip(*short(folder), ear.rate)  # what the first clip imports and allocates once
    ear.features_of(wave)
    imports, found = peak(), {"family": family}
    begun = time.perf_counter()
    (folder / "rows.jsonl").touch()
    stored = ear.find(f"long.{kind}", str(folder / "rows.jsonl"))
    found |= {"checked": peak() - imports, "seconds": time.perf_counter() - begun}
    try:
        found["tokens"] = ear.written(stored).count
    except BadRow as error:
        return {**found, "refused": str(error)}
    wave = load_clip(stored.source, stored.samples, stored.rate, ear.rate)
    found["loaded"] = peak() - imports
    features = ear.features_of(wave)
    sizes = sum(values.nbytes for values in features.values()) / 1e6
    return {**found, "features": peak() - imports, "of_them": sizes, "seconds": time.perf_counter() - begun}


def short(folder: Path) -> tuple[str, int, int]:
    import hearing

    path = hearing.write_wav(folder / "short.wav", hearing.tone(300, 1.0, RATE), RATE)
    return str(path), RATE, RATE


def peak() -> float:
    """Returns the most memory that this process had resident, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


if __name__ == "__main__":
    main()
