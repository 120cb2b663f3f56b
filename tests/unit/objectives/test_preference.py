"""Objectives on pairs: each loss against its formula in fp64, and on a model's own log-probabilities."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM

from finetune.data.dataset import Dataset, build_training
from finetune.data.loader import Loader
from finetune.models.attention import attention_for
from finetune.models.config import load_tokenizer, model_config
from finetune.models.loss_model import CausalLMWithLoss
from finetune.models.weights import Placement, load_model
from finetune.objectives import make_objective
from finetune.objectives.forward import ForwardPass
from finetune.objectives.objective import ONE_RANK, sequence_log_probs
from finetune.objectives.preference import REFERENCE
from finetune.recipe import load_recipe


def test_a_pair_equals_its_reference_before_the_first_step(
    made: Path, tmp_path: Path, recipe: dict[str, Any], write_recipe: Any
) -> None:
    """ln 2, by columns that were added to the examples; and log-probabilities of each sequence alone."""
    rows = tiny.write_rows(tmp_path / "pairs.jsonl", tiny.preferences(12))
    recipe["data"] = {"train": [{"path": str(rows), "format": "preference"}], "max_length": 128}
    recipe["objective"] = {"name": "dpo"}
    loaded = load_recipe(write_recipe(recipe))
    config = model_config(loaded.model)
    attention = attention_for(loaded, config, "cpu")
    model = CausalLMWithLoss(load_model(loaded, config, attention, Placement("load", torch.device("cpu"))))
    plain = AutoModelForCausalLM.from_pretrained(made / "llama")
    data = build_training(loaded, load_tokenizer(loaded.model))
    assert isinstance(data, Dataset)
    objective = make_objective(loaded.objective)
    forward, log_probs = ForwardPass(attention, objective), []
    with torch.no_grad():
        for example in data.examples:
            for sequence in example.sequences:
                ids, mask = torch.tensor(sequence.input_ids)[None].long(), torch.tensor(sequence.loss_mask)[1:]
                every = plain(input_ids=ids).logits[0, :-1].log_softmax(-1).double()
                log_probs.append(every.gather(1, ids[0, 1:, None])[mask].sum().item())
    with_reference = data.examples.with_columns({REFERENCE: torch.tensor(log_probs).numpy()})
    order = Dataset(with_reference, data.rows).in_order(loaded)
    batches = Loader(order, 4, 2, 0, 1, 10**6).step(0).batches
    assert max(len(batch.sequence_lengths) for batch in batches) > 4  # packed
    for batch in batches:
        outputs = forward(model, batch)
        torch.testing.assert_close(
            sequence_log_probs(outputs, batch, ONE_RANK), batch.columns[REFERENCE], rtol=1e-6, atol=0
        )
        loss = objective.loss(objective.terms(outputs, batch), batch.counts)
        assert loss.item() == pytest.approx(math.log(2), abs=1e-6)
