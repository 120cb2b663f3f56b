"""What transformers' own processor makes of videos, in a process that has torchvision, which this project needs not.

    python video_processor.py FOLDER TORCHVISION

reads FOLDER/chats.json, a list of {"model": folder, "text": ..., "videos": [{"file": FRAMES.npy, "fps": ...}],
"settings": of the processor}, and writes FOLDER/processed.npz with the tensors of each, `NUMBER.NAME`. TORCHVISION: a
folder that has the package, or `-`. With a torch that has no CUDA, a wheel of torchvision lacks its operators. Resizing
needs none of them; two names are made known, or it would not import.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

OPERATORS = tuple(f"{name}(Tensor dets, Tensor scores, float threshold) -> Tensor" for name in ("nms", "qnms"))
PROCESSORS = {
    "qwen2_5_vl": ("qwen2_5_vl.processing_qwen2_5_vl", "Qwen2_5_VLProcessor"),
    "qwen3_vl": ("qwen3_vl.processing_qwen3_vl", "Qwen3VLProcessor"),
    "gemma4": ("gemma4.processing_gemma4", "Gemma4Processor"),
}
VIDEO_PROCESSORS = {
    "qwen2_5_vl": ("qwen2_vl.video_processing_qwen2_vl", "Qwen2VLVideoProcessor"),
    "qwen3_vl": ("qwen3_vl.video_processing_qwen3_vl", "Qwen3VLVideoProcessor"),
    "gemma4": ("gemma4.video_processing_gemma4", "Gemma4VideoProcessor"),
}
QWEN_IMAGES = ("qwen2_vl.image_processing_pil_qwen2_vl", "Qwen2VLImageProcessorPil")
IMAGE_PROCESSORS = {
    "qwen2_5_vl": QWEN_IMAGES,
    "qwen3_vl": QWEN_IMAGES,
    "gemma4": ("gemma4.image_processing_pil_gemma4", "Gemma4ImageProcessorPil"),
}
# Of Qwen's processors; Gemma 4's takes no such setting.
OF_CALL = {"do_sample_frames": True, "cap_pixels_per_frame": False}


def found(table: dict[str, tuple[str, str]], name: str) -> Any:
    module, kind = table[name]
    return getattr(importlib.import_module(f"transformers.models.{module}"), kind)


def processed(call: dict[str, Any]) -> dict[str, np.ndarray]:
    from transformers import AutoConfig, AutoFeatureExtractor, PreTrainedTokenizerFast

    config = AutoConfig.from_pretrained(call["model"])
    name = config.model_type
    tokenizer = PreTrainedTokenizerFast.from_pretrained(call["model"])
    video_processor = found(VIDEO_PROCESSORS, name).from_pretrained(call["model"], **call["settings"])
    parts = {"image_processor": found(IMAGE_PROCESSORS, name).from_pretrained(call["model"])}
    if name == "gemma4":
        parts["feature_extractor"] = AutoFeatureExtractor.from_pretrained(call["model"])
    processor = found(PROCESSORS, name)(tokenizer=tokenizer, video_processor=video_processor, **parts)
    videos = [np.load(video["file"]) for video in call["videos"]]
    about = [
        {"total_num_frames": len(video), "fps": one["fps"], "height": video.shape[1], "width": video.shape[2]}
        for video, one in zip(videos, call["videos"], strict=True)
    ]
    settings = {} if name == "gemma4" else OF_CALL
    inputs = processor(text=[call["text"]], videos=videos, video_metadata=about, return_tensors="pt", **settings)
    if name == "gemma4":  # whose positions are places
        return {key: np.asarray(value) for key, value in inputs.items()}
    model = importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    whole = getattr(model, {"qwen2_5_vl": "Qwen2_5_VLModel", "qwen3_vl": "Qwen3VLModel"}[name])
    blank = object.__new__(whole)  # without weights: the method reads the config alone
    object.__setattr__(blank, "config", config)
    names = ("input_ids", "mm_token_type_ids", "video_grid_thw", "second_per_grid_ts")
    positions = blank.get_rope_index(**{key: inputs[key] for key in names if key in inputs})[0]
    return {key: np.asarray(value) for key, value in {**inputs, "position_ids": positions}.items()}


def main() -> None:
    folder, torchvision = Path(sys.argv[1]), sys.argv[2]
    if torchvision != "-":
        sys.path.append(torchvision)
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in OPERATORS:
        with contextlib.suppress(RuntimeError):  # it is there
            library.define(operator)
    calls = json.loads((folder / "chats.json").read_text(encoding="utf-8"))
    results = {f"{i}.{key}": value for i, call in enumerate(calls) for key, value in processed(call).items()}
    np.savez(folder / "processed.npz", **results)


if __name__ == "__main__":
    main()
