"""Tensor parallel ranks of models that see or hear, whose towers are on each in full: losses and every gradient."""

from __future__ import annotations

from typing import Any

import hearing
import pytest
import tiny
import torch
from transformers import AutoConfig
from usual import usual

from finetune.data.media.family_table import FAMILIES, SEE_VIDEOS
from finetune.engine.split_trial import ThreadGroup, ThreadRanks, gradient_difference, token_split_problem
from finetune.engine.tensor_parallel import parallelize
from finetune.models.attention import per_document
from finetune.models.attention.isolation import ImageTrial
from finetune.models.tiny_config import tiny_whole

# Gemma 3n is refused: its layers take the mean of features of which a rank has some.
HEARS = [(name, "audio") for name in hearing.available() if name != "gemma3n"]
SEES = [(name, "image") for name, family in FAMILIES.items() if family.kind == "image"]
FILMS = [(name, "video") for name in SEE_VIDEOS]


def config_of(name: str) -> Any:
    if name in hearing.HEARING:
        return AutoConfig.for_model(**hearing.HEARING[name].config)
    if name == "idefics3":
        return AutoConfig.for_model(**{**tiny.MULTIMODAL["smolvlm"], **tiny.AS_IDEFICS3})
    return AutoConfig.for_model(**tiny.MULTIMODAL[name])


CASES = usual([*HEARS, *SEES, *FILMS], ("gemma4", "audio"), ("qwen2_audio", "audio"), ("qwen3_vl", "image"))


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_two_ranks_compute_what_one_process_does(case: tuple[str, Any]) -> None:
    name, kind = case
    small = tiny_whole(config_of(name))
    whole, *trials = [ImageTrial(small, per_document.DOCUMENTS, kind) for _ in range(3)]
    ranks, splits_tokens = ThreadRanks(2), token_split_problem(small) is None
    models = [trial.model for trial in trials]
    sharded = [
        parallelize(model, ThreadGroup(None, index, 2, ranks), splits_tokens=splits_tokens)
        for index, model in enumerate(models)
    ]
    expected = whole.packed()
    for found in ranks.run(ImageTrial.packed, trials):
        for ours, theirs in zip(found.losses, expected.losses, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert gradient_difference(whole.model, models, sharded) is None
    parts = {part for name in sharded[0].shards for part in name.split(".")}
    assert "o_proj" in parts
    assert {"q_proj", "qkv_proj"} & parts
    assert any(".experts." in name or ".down_proj." in name for name in sharded[0].shards)
