"""Rows with sound and videos, prepared: ours next to transformers' own processors, called row by row in a loop.

    python benchmarks/media_speed.py --json benchmarks/results/media_speed.json

Clips of 3 to 20 s (a third each wav at 16 kHz, flac and mp3 at 44.1 kHz in stereo) and videos of 3 to 10 s (640 x 360,
25 frames a second, H.264) are generated; models are tiny, their extractors have the published sizes.

    loop           the file as transformers loads it (`load_audio` by soundfile, `load_video` by PyAV), then its
                   processor for text and file; of Voxtral, whose texts another library writes, its tokenizer and the
                   pieces of its processor
    ours           sound: `prepare` with `data.audio.cache: true`, every clip checked, its features on the disk at the
                   end; videos: each decoded once to check it (`prepare`), and then read as a training step reads it
    ours, again    the same, which finds all in the cache

Each measurement is a process of its own, on one core or on all of them, contenders in turns; the time is without
imports and models (but for those of worker processes), by the clock and by the processors, which other work on the
machine does not change. Ratios are taken within a round, medians over rounds. Tokens and features have to agree.
The videos' own processor needs torchvision: `--torchvision FOLDER` names a folder that has it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent))
sys.path.append(str(Path(__file__).resolve().parent.parent))
sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "support"))

import numpy as np
import psutil
from prepare_speed import Watch

FAMILIES = ("qwen2_audio", "voxtral", "qwen3_vl")
LABELS = {"loop": "its processor in a loop", "ours": "ours", "again": "ours, again"}
# https://huggingface.co/Qwen/Qwen2-Audio-7B-Instruct/blob/main/preprocessor_config.json and
# https://huggingface.co/mistralai/Voxtral-Mini-3B-2507/blob/main/preprocessor_config.json: 128 bands, 30 s
EXTRACTOR = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 128, "chunk_length": 30}
# https://huggingface.co/Qwen/Qwen3-VL-4B-Instruct/blob/main/video_preprocessor_config.json
VIDEOS = {"patch_size": 16, "size": {"shortest_edge": 4096, "longest_edge": 25165824}}
STEP_VIDEOS = 4  # that are read together, as those of a step
Cell = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--clips", type=int, default=200)
    parser.add_argument("--videos", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cores", type=int, nargs="+", default=sorted({1, len(os.sched_getaffinity(0))}))
    parser.add_argument("--torchvision", type=Path, help="a folder that has torchvision, if it is not installed")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--contend", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contend:
        print(json.dumps(contend(**json.loads(arguments.contend))))
        return
    with tempfile.TemporaryDirectory(prefix="finetune-bench-") as name:
        result = measure(arguments, Path(name))
    print("\n".join(table(result)))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    counts = {name: arguments.videos if name == "qwen3_vl" else arguments.clips for name in arguments.only}
    seconds = {name: write_rows(folder, name, counts[name]) for name in arguments.only}
    cells = [
        cell
        for name in arguments.only
        for cores in arguments.cores
        for number in range(arguments.rounds)
        for cell in one_round(arguments, folder, name, cores, number)
    ]
    packages = ("transformers", "torch", "numpy", "soundfile", "soxr", "av")
    return {
        "command": "python benchmarks/media_speed.py " + " ".join(sys.argv[1:]),
        "versions": {name: metadata.version(name) for name in packages} | {"python": platform.python_version()},
        "rows": counts,
        "seconds": seconds,
        "cells": cells,
        "summary": [
            summary(name, cores, who, cells, counts[name])
            for name in arguments.only
            for cores in arguments.cores
            for who in LABELS
        ],
    }


def one_round(arguments: argparse.Namespace, folder: Path, name: str, cores: int, number: int) -> Iterator[Cell]:
    """Yields a cell for each contender; raises SystemExit if they made other tokens or features."""
    cache, made = folder / "cache", {}
    for who in ("loop", "ours") if number % 2 == 0 else ("ours", "loop"):
        task = {"name": name, "who": who, "cores": cores, "folder": str(folder), "torchvision": arguments.torchvision}
        for label in (who, "again") if who == "ours" else (who,):
            cell = run(task, cache)
            made[label] = cell.pop("tokens"), cell.pop("features")
            print(
                f"{name}, {cores} cores, round {number + 1}, {label}: {cell['seconds']:.2f} s, {cell['cpu_s']:.2f}",
                file=sys.stderr,
            )
            yield {"name": name, "cores": cores, "round": number, "contender": label, **cell}
        shutil.rmtree(cache, ignore_errors=True)
    tokens, features = zip(*made.values(), strict=True)
    if len(set(tokens)) > 1 or not np.allclose(features, features[0], rtol=1e-5):
        raise SystemExit(f"{name}: other tokens or features: {made}")


def run(task: dict[str, Any], cache: Path) -> Cell:
    """Returns a contender's figures, from a process of its own."""
    command = [sys.executable, str(Path(__file__).resolve()), "--contend", json.dumps(task, default=str)]
    environment = {**os.environ, "FINETUNE_CACHE": str(cache), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
        watch = Watch(process.pid)
        out, _ = process.communicate()
        watch.stop()
        if process.returncode:
            errors.seek(0)
            raise SystemExit(f"{task} failed:\n{errors.read()}")
    return {**json.loads(out.splitlines()[-1]), "peak_rss": watch.peaks["peak_rss"]}


def summary(name: str, cores: int, who: str, cells: list[Cell], rows: int) -> Cell:
    """Medians over rounds; ratios to the loop of the same round."""
    of_it = {one["contender"] + str(one["round"]): one for one in cells if (one["name"], one["cores"]) == (name, cores)}
    mine = [one for one in of_it.values() if one["contender"] == who]

    def over_loop(key: str) -> dict[str, float]:
        ratios = sorted(of_it[f"loop{one['round']}"][key] / one[key] for one in mine)
        return {"median": statistics.median(ratios), "lowest": ratios[0], "highest": ratios[-1]}

    return {
        "name": name,
        "cores": cores,
        "contender": who,
        "rows_per_s": rows / statistics.median(one["seconds"] for one in mine),
        "rows_per_cpu_s": rows / statistics.median(one["cpu_s"] for one in mine),
        "peak_gb": statistics.median(one["peak_rss"] for one in mine) / 1e9,
        "over_loop": over_loop("seconds"),
        "over_loop_by_cpu": over_loop("cpu_s"),
        "parts": {key: statistics.median(one["parts"][key] for one in mine) for key in mine[0]["parts"]},
    }


def table(result: dict[str, Any]) -> list[str]:
    """A markdown table."""
    head = ["", "cores", "", "rows/s", "over the loop", "rows by processor time", "over the loop", "peak memory"]
    shown = ["| " + " | ".join(head) + " |", "| " + " | ".join(["---"] * len(head)) + " |"]
    for one in result["summary"]:
        cells = [one["name"], str(one["cores"]), LABELS[one["contender"]]]
        for rate, ratio in (("rows_per_s", "over_loop"), ("rows_per_cpu_s", "over_loop_by_cpu")):
            over = one[ratio]
            cells += [f"{one[rate]:,.1f}", f"{over['median']:.2f} ({over['lowest']:.2f} to {over['highest']:.2f})"]
        shown.append("| " + " | ".join([*cells, f"{one['peak_gb']:.2f} GB"]) + " |")
    return shown


# --- rows and models


def write_rows(folder: Path, name: str, count: int) -> float:
    """Writes model and rows of a family; returns the seconds of its files."""
    import filming
    import hearing
    import tiny

    text = {"text_config": {**hearing.HEARING["voxtral"].config["text_config"], "max_position_embeddings": 32768}}
    if name == "qwen3_vl":
        vision = {**tiny.MULTIMODAL[name]["vision_config"], "patch_size": 16}
        model = filming.save_filming(folder, name, vision_config=vision)
        (model / "video_preprocessor_config.json").write_text(json.dumps(VIDEOS), encoding="utf-8")
        return write_videos(folder, count)
    config = hearing.HEARING[name].config
    audio = {**config["audio_config"], "num_mel_bins": 128, "max_source_positions": 1500}
    text["text_config"]["model_type"] = config["text_config"]["model_type"]
    model = hearing.save_hearing(folder, name, audio_config=audio, **text)
    (model / "preprocessor_config.json").write_text(json.dumps(EXTRACTOR), encoding="utf-8")
    return write_clips(folder, count)


def write_clips(folder: Path, count: int) -> float:
    import soundfile
    import tiny

    (folder / "clips").mkdir(exist_ok=True)
    rng, rows, seconds = np.random.default_rng(0), [], 0.0
    for i in range(count):
        kind, rate = (("wav", 16_000), ("flac", 44_100), ("mp3", 44_100))[i % 3]
        length = int(rng.uniform(3, 20) * rate)
        at = np.arange(length) / rate
        loudness = 0.3 * np.abs(np.sin(2 * np.pi * rng.uniform(1, 4) * at))  # as of syllables
        wave = loudness * np.sin(2 * np.pi * rng.uniform(100, 300) * at) + rng.normal(0, 0.02, length)
        channels = wave if kind == "wav" else np.stack([wave, 0.8 * wave], axis=1)
        soundfile.write(folder / "clips" / f"{i}.{kind}", channels, rate)
        rows.append({"audio": f"clips/{i}.{kind}", "prompt": "what is said", "text": "river stone light"})
        seconds += length / rate
    tiny.write_rows(folder / "rows.jsonl", rows)
    return seconds


def write_videos(folder: Path, count: int, rate: int = 25) -> float:
    import filming
    import tiny

    (folder / "videos").mkdir(exist_ok=True)
    rng, rows, seconds = random.Random(0), [], 0.0
    ground = np.random.default_rng(0).integers(0, 256, (45, 80, 3), np.uint8).repeat(16, 0).repeat(16, 1)
    for i in range(count):
        frames = int(rng.uniform(3, 10) * rate)
        film = np.stack([np.roll(ground, 3 * n, axis=1)[:360, :640] for n in range(frames)])
        filming.write_video(folder / "videos" / f"{i}.mp4", film, rate)
        said = [{"type": "video", "video": f"videos/{i}.mp4"}, {"type": "text", "text": "what is seen"}]
        rows.append({"messages": [{"role": "user", "content": said}, {"role": "assistant", "content": "river stone"}]})
        seconds += frames / rate
    tiny.write_rows(folder / "films.jsonl", rows)
    return seconds


# --- the contenders, each in a process of its own


def contend(name: str, who: str, cores: int, folder: str, torchvision: str | None) -> Cell:
    """Returns seconds, and tokens and features of all rows, which the contenders have to agree on."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])  # before torch counts them
    if who != "loop":
        return ours(Path(folder), name)
    if name != "qwen3_vl":
        return sound_loop(Path(folder), name)
    sys.path += [torchvision] if torchvision else []
    return video_loop(Path(folder), name)


class Clock:
    """Seconds by the clock and by the processors, of this process and those that it has started."""

    def __init__(self) -> None:
        self._begun, self._cpu = time.perf_counter(), self._processors()

    def so_far(self) -> dict[str, float]:
        return {"seconds": time.perf_counter() - self._begun, "cpu_s": self._processors() - self._cpu}

    @staticmethod
    def _processors() -> float:
        """Workers that have ended count by the process that has waited for them."""
        me = psutil.Process()
        return sum(sum(one.cpu_times()[:4]) for one in (me, *me.children(recursive=True)))


def ours(folder: Path, name: str) -> Cell:
    """`prepare`, and for videos what a training step waits for."""
    from rich.console import Console

    from finetune.data.dataset import build_training, on_disk
    from finetune.data.examples import media_reader
    from finetune.data.media.feature_cache import FeatureCache, make_features
    from finetune.models.base_model import Base
    from finetune.recipe import Recipe

    recipe = Recipe.model_validate(recipe_values(folder, name))
    base = Base.of(recipe)
    renderer, reader = base.renderer(recipe.objective), media_reader(base.media)
    assert base.media is not None
    assert reader is not None
    clock = Clock()
    examples = on_disk(build_training(recipe, renderer)).examples
    rows = clock.so_far()
    total = 0.0
    if recipe.data.audio is not None:
        make_features(FeatureCache.of(base.media.family), examples.media(), Console(stderr=True))
    else:
        media = list(examples.media())
        for at in range(0, len(media), STEP_VIDEOS):
            some = media[at : at + STEP_VIDEOS]
            total += sum(of_features(one) for one in reader.pool.map(reader.read, some))
    taken = clock.so_far()
    if recipe.data.audio is not None:  # of what lies on the disk now
        total = sum(of_features(reader.read(one)) for one in examples.media())
    tokens = sum(int(np.sum(one.sequences[0].input_ids == base.media.family.token_id)) for one in examples)
    parts = {"rows": rows["cpu_s"], "features": taken["cpu_s"] - rows["cpu_s"]}
    return {**taken, "parts": parts, "tokens": tokens, "features": total}


def of_features(features: Any) -> float:
    """A number by which two sets of features differ."""
    name = next(name for name in ("input_features", "pixel_values_videos") if name in features)
    return float(np.abs(np.asarray(features[name], np.float64)).sum())


def recipe_values(folder: Path, name: str) -> dict[str, Any]:
    films = name == "qwen3_vl"
    source = {"path": str(folder / ("films.jsonl" if films else "rows.jsonl"))}
    kind = {"video": {"fps": 2}} if films else {"audio": {"cache": True}}
    return {
        "run": {"name": "benchmark"},
        "model": {"name": str(folder / (f"{name}_films" if films else f"{name}_hears"))},
        "mode": "full",
        "data": {"train": [{**source, "format": "messages" if films else "speech"}], "max_length": 32768, **kind},
        "batch": {"rows": 1},
        "optimizer": {"lr": 1e-3},
        "train": {"epochs": 1},
    }


def sound_loop(folder: Path, name: str) -> Cell:
    from transformers import PreTrainedTokenizerFast, Qwen2AudioProcessor, WhisperFeatureExtractor
    from transformers.audio_utils import load_audio

    extractor = WhisperFeatureExtractor.from_pretrained(folder / f"{name}_hears")
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(folder / f"{name}_hears")
    call: Any = pieces_of_voxtral(extractor, tokenizer)
    if name == "qwen2_audio":
        call = Qwen2AudioProcessor(extractor, tokenizer, chat_template=tokenizer.chat_template)
    token = tokenizer.convert_tokens_to_ids("[AUDIO]" if name == "voxtral" else "<|AUDIO|>")
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    clock, tokens, total = Clock(), 0, 0.0
    for row in rows:
        said = [{"type": "audio"}, {"type": "text", "text": row["prompt"]}]
        chat = [{"role": "user", "content": said}, {"role": "assistant", "content": row["text"]}]
        text = tokenizer.apply_chat_template(chat, tokenize=False)
        wave = load_audio(str(folder / row["audio"]), 16_000, backend="soundfile")
        inputs = call(text=[text], audio=[wave], sampling_rate=16_000, return_tensors="pt")
        tokens, total = tokens + int((inputs["input_ids"] == token).sum()), total + of_features(inputs)
    return {**clock.so_far(), "parts": {}, "tokens": tokens, "features": total}


def pieces_of_voxtral(extractor: Any, tokenizer: Any) -> Any:
    """Its processor's pieces of 30 s, and 375 placeholders for each."""

    def call(text: list[str], audio: list[Any], sampling_rate: int, return_tensors: str) -> dict[str, Any]:
        found = extractor(
            audio[0],
            sampling_rate=sampling_rate,
            padding=True,
            truncation=False,
            pad_to_multiple_of=480_000,
            return_tensors=return_tensors,
        )
        mel = found["input_features"].reshape(128, -1, 3000).transpose(0, 1)
        written = text[0].replace("[AUDIO]", "[AUDIO]" * 375 * len(mel))
        return {"input_features": mel, **tokenizer([written], return_tensors=return_tensors)}

    return call


def video_loop(folder: Path, name: str) -> Cell:
    import contextlib

    import torch
    from video_processor import OPERATORS, PROCESSORS, VIDEO_PROCESSORS, found

    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in OPERATORS:  # of a wheel for a torch with CUDA, beside one without
        with contextlib.suppress(RuntimeError):
            library.define(operator)
    from transformers import PreTrainedTokenizerFast
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.video_utils import load_video

    model = folder / f"{name}_films"
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(model)
    films = found(VIDEO_PROCESSORS, name).from_pretrained(model, fps=2)
    images = Qwen2VLImageProcessorPil.from_pretrained(model)
    processor = found(PROCESSORS, name)(image_processor=images, tokenizer=tokenizer, video_processor=films)
    token = tokenizer.convert_tokens_to_ids("<|video_pad|>")
    rows = [json.loads(line) for line in (folder / "films.jsonl").read_text(encoding="utf-8").splitlines()]
    clock, tokens, total = Clock(), 0, 0.0
    for row in rows:
        path = folder / row["messages"][0]["content"][0]["video"]
        text = tokenizer.apply_chat_template(row["messages"], tokenize=False)
        film, about = load_video(
            str(path), backend="pyav", sample_indices_fn=lambda metadata, **_: films.sample_frames(metadata, fps=2)
        )
        inputs = processor(
            text=[text],
            videos=[film],
            video_metadata=[about],
            do_sample_frames=False,
            cap_pixels_per_frame=False,
            return_tensors="pt",
        )
        tokens, total = tokens + int((inputs["input_ids"] == token).sum()), total + of_features(inputs)
    return {**clock.so_far(), "parts": {}, "tokens": tokens, "features": total}


if __name__ == "__main__":
    main()
