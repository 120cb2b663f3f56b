"""Gradients of a packed row with files, as a run reads them, are those of plain transformers for each document."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import filming
import numpy as np
import pytest
import several
import torch
from transformers import AutoModelForMultimodalLM
from usual import usual

from finetune.data.batch import collate
from finetune.data.examples import media_reader, prepare_examples
from finetune.models.attention import attention_for, with_unread_mask
from finetune.models.attention.isolation import Computed, compare
from finetune.models.base_model import Base
from finetune.models.towers import attention_of_parts, row_positions

RUNS = {
    "gemma4": ("image", "audio", "video"),
    "gemma4_whole": ("image", "video"),
    "qwen3_vl_films": ("image", "video"),
}


def saved(folder: Path, name: str) -> None:
    if name == "qwen3_vl_films":
        filming.save_filming(folder, "qwen3_vl")
    else:
        several.save_gemma4(folder, name, whole=name == "gemma4_whole")


@pytest.mark.parametrize("name", usual(RUNS, "gemma4"))
def test_a_row_has_the_gradients_of_its_documents(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses to 1e-6 and gradients to 1e-5, of images that are longer than a window, too; see `isolation.compare`."""
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    saved(tmp_path, name)
    several.write_rows(tmp_path, "rows", 4, RUNS[name], seed=5, numbers=(0, 1, 2))
    recipe = several.recipe_of(tmp_path, name, "rows", RUNS[name], data={"max_length": 4000})
    base = Base.of(recipe)
    reader, attention = media_reader(base.media), attention_for(recipe, base.config, "cpu")
    assert reader is not None
    examples = list(prepare_examples(recipe, recipe.data.train, base.renderer(recipe.objective)))
    assert {type(one).__name__ for e in examples for one in e.sequences[0].media} >= {"Image", "Video"}
    plain, ours = (
        AutoModelForMultimodalLM.from_pretrained(
            tmp_path / name, dtype=torch.float32, attn_implementation=attention_of_parts(base.config, one)
        ).train()
        for one in ("sdpa", attention.implementation)
    )

    def computed(model: Any, logits: list[torch.Tensor]) -> Computed:
        sequences = [example.sequences[0] for example in examples]
        losses = [losses_of(one, sequence) for one, sequence in zip(logits, sequences, strict=True)]
        torch.cat(losses).sum().backward()
        return Computed(tuple(one.detach() for one in losses), {key: p.grad for key, p in model.named_parameters()})

    def losses_of(logits: torch.Tensor, sequence: Any) -> torch.Tensor:
        targets = torch.from_numpy(sequence.loss_mask[1:])
        ids = torch.from_numpy(sequence.input_ids[1:].astype(np.int64))
        return torch.nn.functional.cross_entropy(logits[0, :-1][targets], ids[targets], reduction="none")

    alone = []
    for example in examples:
        (sequence,) = example.sequences
        ids = torch.from_numpy(sequence.input_ids[None].astype(np.int64))
        alone.append(plain(input_ids=ids, use_cache=False, **reader.plain_inputs(sequence.media, ids)).logits)
    batch, positions = collate(examples, media_inputs=reader), row_positions(base.config)
    batch = positions(batch) if positions else batch
    arguments = attention.forward_arguments(batch.sequence_lengths, (), batch.inputs["input_ids"])
    row = ours(**batch.inputs, **with_unread_mask(arguments, torch.device("cpu")), use_cache=False).logits
    found = compare(computed(plain, alone), computed(ours, list(row.split(list(batch.sequence_lengths), dim=1))))
    assert found.within_rounding, found
