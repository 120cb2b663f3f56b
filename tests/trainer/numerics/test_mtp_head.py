"""The head that predicts a token further ahead: loss and gradients equal a plain loop over documents, on modules of
transformers alone; documents of a packed row do not see each other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mtp_bases
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from trainers import prepared_run, ready_trainer, started_engine
from usual import usual

WEIGHT = 0.3
NAMES = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "end"}


def plain_losses(base: Path, batches: list[Any]) -> tuple[Tensor, dict[str, Tensor], int]:
    """Returns the loss of a step and the gradients by name, one document after the other, and the head's targets."""
    model, head = mtp_bases.load_plain(base)
    total, ahead, targets, of_head = torch.zeros(()), torch.zeros(()), 0, 0
    for batch in batches:
        ids, trained = batch.inputs["input_ids"][0], torch.zeros(batch.inputs["input_ids"].shape[1], dtype=torch.bool)
        trained[batch.targets.positions + 1] = True
        for document, mask in zip(*(x.split(batch.sequence_lengths) for x in (ids, trained)), strict=True):
            hidden = model.model(document[None], use_cache=False)[0]
            total = total + cross_entropy(
                model.lm_head(hidden)[0, :-1][mask[1:]], document[1:][mask[1:]], reduction="sum"
            )
            guesses = model.lm_head(head(model, document[None], hidden))[0]  # of t_2, t_3, ... and one beyond the end
            own = cross_entropy(guesses[:-1][mask[2:]], document[2:][mask[2:]], reduction="sum")
            ahead, of_head = ahead + own, of_head + int(mask[2:].sum())
        targets += len(batch.targets.ids)
    loss = total / targets + WEIGHT * ahead / targets
    loss.backward()
    parameters = {**dict(model.named_parameters()), **{f"head.{n}": p for n, p in head.named_parameters()}}
    return loss.detach(), {name: p.grad for name, p in parameters.items() if p.grad is not None}, of_head


def plain_name(name: str) -> str:
    if not name.startswith("mtp."):
        return name
    rest = name.removeprefix("mtp.")
    first, _, tail = rest.partition(".")
    return f"head.layer.{rest.removeprefix('layers.0.')}" if first == "layers" else f"head.{NAMES[first]}.{tail}"


@pytest.mark.parametrize("name", usual(list(mtp_bases.BASES), "deepseek_v3", "qwen3_next"))
@pytest.mark.parametrize("recomputed", usual([False, True], False))
def test_loss_and_gradients_are_those_of_a_plain_loop(
    name: str, recomputed: bool, recipe: dict[str, Any], write_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    base = mtp_bases.save_base(tmp_path, name)
    recipe["model"] = {"name": str(base), "mtp": "train", "mtp_weight": WEIGHT}
    settings = [f"train.activation_checkpointing={str(recomputed).lower()}", "objective.router_aux_loss_coef=0"]
    prepared = prepared_run(str(write_recipe(recipe)), settings)
    engine = started_engine(prepared)
    trainer = ready_trainer(prepared, engine)
    batches = trainer.loader.step(0).batches
    assert max(len(batch.sequence_lengths) for batch in batches) > 2  # packed
    losses = list[Tensor]()
    counts = trainer.loader.step(0).counts

    def loss(outputs: Any, batch: Any) -> Tensor:
        terms = trainer.forward.objective.terms(outputs, batch)
        losses.append(trainer.forward.objective.loss(terms, counts))
        return losses[-1]

    engine.accumulate(batches, trainer.forward, loss)
    expected, gradients, _ = plain_losses(base, batches)
    torch.testing.assert_close(sum(losses, torch.zeros(())).detach(), expected, rtol=1e-6, atol=0)
    model = engine.unwrapped
    ours = {plain_name(one): p.grad for one, p in model.named_parameters() if p.grad is not None}
    assert ours.keys() == gradients.keys()
    assert any(one.startswith("head.layer.") for one in ours)
    largest = max(float(one.abs().max()) for one in gradients.values())
    for one, gradient in gradients.items():
        torch.testing.assert_close(
            ours[one], gradient, rtol=1e-5, atol=1e-6 * largest, msg=lambda text, n=one: f"{n}: {text}"
        )
    engine.close()
