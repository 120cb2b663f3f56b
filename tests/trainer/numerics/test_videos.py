"""Packed documents with videos against plain transformers on each alone; towers in forwards with and without videos."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import filming
import pytest
import tiny
import torch
from transformers import AutoConfig
from usual import usual

from finetune.data.media.family_table import SEE_VIDEOS, VIDEO_INPUT
from finetune.models.attention import isolation
from finetune.models.attention.isolation import isolation_problem
from finetune.models.towers import grids_of, part_of, patches_in


def config_of(name: str) -> Any:
    return AutoConfig.for_model(**tiny.MULTIMODAL[name])


@pytest.mark.parametrize("name", usual(filming.FILMING, "qwen3_vl"))
def test_packed_documents_with_videos_are_as_each_alone(name: str) -> None:
    assert isolation_problem(config_of(name), "video") is None


@pytest.mark.parametrize("name", usual(filming.FILMING, "qwen2_5_vl"))
def test_the_trial_sees_what_a_family_needs(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without positions in time, height and width, a model is refused."""
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    monkeypatch.setattr(isolation, "row_positions", lambda config: None)
    assert "differs from that of each document alone" in str(isolation_problem(config_of(name), "video"))


@pytest.mark.parametrize("name", filming.FILMING)
def test_the_parts_are_those_of_images(name: str) -> None:
    family = SEE_VIDEOS[name]
    assert part_of(family, "model.visual.merger.norm.weight") == "projector"
    assert part_of(family, "model.visual.blocks.0.norm1.weight") == "tower"
    inputs = family.pictures(config_of(name), [2, 3])
    assert patches_in(config_of(name), inputs, "video") == [8] * 5  # of two tokens each
    assert len(inputs[VIDEO_INPUT]) == 40
    of_documents = grids_of(inputs, (["video"], [], ["video"]))
    assert [{key: grid.tolist() for key, grid in one.items() if key == "video_grid_thw"} for one in of_documents] == [
        {"video_grid_thw": [[2, 2, 4]]},
        {},
        {"video_grid_thw": [[3, 2, 4]]},
    ]


def test_a_tower_runs_once_in_every_forward(tmp_path: Path) -> None:
    """Videos take the place of the smallest one that a rank without files sends through the tower."""
    from transformers import AutoModelForMultimodalLM

    from finetune.models.towers import TowerPart

    model: Any = AutoModelForMultimodalLM.from_pretrained(filming.save_filming(tmp_path, "qwen3_vl"))
    part, calls = TowerPart(model, always=True, kinds="video"), list[int]()
    model.base_model.visual.register_forward_hook(lambda *_: calls.append(1))
    token = model.config.video_token_id
    ids = torch.tensor([[5, token, token, 6, token, token, 7]])
    videos = SEE_VIDEOS["qwen3_vl"].pictures(model.config, [2])
    for inputs in ({"input_ids": ids[:, [0, 3, 6]]}, {"input_ids": ids, **videos}):
        calls.clear()
        with part.forward(model, inputs):
            types = 2 * (inputs["input_ids"] == token).int()
            model(**inputs, mm_token_type_ids=types, use_cache=False)
        assert calls == [1]
