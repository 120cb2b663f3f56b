"""The head that predicts a token further ahead: loss and gradients equal a plain loop over documents, on modules of
transformers alone; documents of a packed row do not see each other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mtp_bases
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from trainers import prepared_run, ready_trainer, started_engine
from usual import usual

from finetune.data.batch import Batch, TokenShare, collate, token_shard, with_ahead
from finetune.data.samples import Example
from finetune.data.samples import Sequence as TokenSequence
from finetune.models.head.token_loss import HeadLosses
from finetune.models.wrapped import Outputs
from finetune.objectives.ahead import accepted
from finetune.objectives.objective import ONE_RANK, TokenRanks

WEIGHT = 0.3
NAMES = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "end"}


def plain_losses(base: Path, batches: list[Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the loss of a step and the gradients by name, one document after the other."""
    model, head = mtp_bases.load_plain(base)
    total, ahead, targets = torch.zeros(()), torch.zeros(()), 0
    for batch in batches:
        ids, trained = batch.inputs["input_ids"][0], torch.zeros(batch.inputs["input_ids"].shape[1], dtype=torch.bool)
        trained[batch.targets.positions + 1] = True
        for document, mask in zip(*(x.split(batch.sequence_lengths) for x in (ids, trained)), strict=True):
            hidden = model.model(document[None], use_cache=False)[0]
            total = total + cross_entropy(
                model.lm_head(hidden)[0, :-1][mask[1:]], document[1:][mask[1:]], reduction="sum"
            )
            guesses = model.lm_head(head(model, document[None], hidden))[0]  # of t_2, t_3, ... and one beyond the end
            ahead = ahead + cross_entropy(guesses[:-1][mask[2:]], document[2:][mask[2:]], reduction="sum")
        targets += len(batch.targets.ids)
    loss = total / targets + WEIGHT * ahead / targets
    loss.backward()
    parameters = {**dict(model.named_parameters()), **{f"head.{n}": p for n, p in head.named_parameters()}}
    return loss.detach(), {name: p.grad for name, p in parameters.items() if p.grad is not None}


def plain_name(name: str) -> str:
    if not name.startswith("mtp."):
        return name
    rest = name.removeprefix("mtp.")
    first, _, tail = rest.partition(".")
    return f"head.layer.{rest.removeprefix('layers.0.')}" if first == "layers" else f"head.{NAMES[first]}.{tail}"


@pytest.mark.parametrize("name", usual(list(mtp_bases.BASES), "deepseek_v3"))
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
    expected, gradients = plain_losses(base, batches)
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


@pytest.mark.parametrize("name", usual(mtp_bases.BEHIND_LAST, "glm4_moe"))
def test_the_plain_loop_is_what_transformers_computes(name: str, tmp_path: Path) -> None:
    """By its own class for drafts, from the same files: order of the inputs, norms, names."""
    layers = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(layers, "MtpModel"):
        pytest.skip("this transformers has no class for heads")
    model, head = mtp_bases.load_plain(mtp_bases.save_base(tmp_path, name))
    model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.2.*"]  # by which it knows them; its own is layer 61
    drafts = layers.MtpModel.from_pretrained(model)
    ids, places = torch.randint(3, 300, (1, 12)), torch.arange(1, 12)[None]
    with torch.no_grad():
        hidden = model.model(ids, use_cache=False)[0]
        theirs = drafts.forward_layer(0, hidden[:, :-1], places, None, input_ids=ids[:, 1:])
        torch.testing.assert_close(head(model, ids, hidden), theirs, rtol=1e-5, atol=2e-6)


# --- targets and guesses


def example(*lengths: int, first: int = 1) -> Example:
    """Sequences of counting tokens, trained from their second token on; the last one from its third on."""
    sequences, begin = [], first
    for i, length in enumerate(lengths):
        ids = np.arange(begin, begin + length, dtype=np.int32)
        sequences.append(TokenSequence(ids, np.arange(length) >= (2 if i == len(lengths) - 1 else 1)))
        begin += length
    return Example("rows", 0, 0, tuple(sequences))


def test_targets_are_two_ahead_and_stay_in_their_sequence() -> None:
    batch = with_ahead(collate([example(4, 2, 3)], padded_to=12))
    ahead = batch.ahead
    assert ahead is not None
    assert batch.targets.ids.tolist() == [2, 3, 4, 6, 9]
    assert ahead.ids.tolist() == [3, 4, 9]  # not 2 and 6, the second of theirs
    assert ahead.positions.tolist() == [0, 1, 6]
    assert ahead.target.tolist() == [1, 2, 4]
    assert ahead.next_ids.tolist() == [[2, 3, 4, 4, 6, 6, 8, 9, 9, 0, 0, 0]]


@pytest.mark.parametrize("share", [(2, 1), (1, 2), (2, 2)])
def test_parts_of_a_row_have_all_of_it(share: tuple[int, int]) -> None:
    whole = with_ahead(collate([example(7, 2, 7)]))
    assert whole.ahead is not None
    found = []
    for rank in range(share[0] * share[1]):
        place = TokenShare(*share, rank // share[1], rank % share[1])
        part = token_shard(whole, place).ahead
        assert part is not None
        places = torch.from_numpy(place.places(16))
        assert torch.equal(part.next_ids, whole.ahead.next_ids[:, places])
        found += list(zip(places[part.positions].tolist(), part.ids.tolist(), part.target.tolist(), strict=True))
    rows = zip(*(one.tolist() for one in whole.ahead[:3]), strict=True)
    assert sorted(found) == sorted(rows)


def outputs(batch: Batch, model: list[int], head: list[int]) -> Outputs:
    """Outputs with the guesses of each target, by its number in the row."""
    assert batch.ahead is not None
    here = batch.row_targets.here if batch.row_targets is not None else torch.arange(len(batch.targets.ids))
    own, ahead = torch.tensor(model)[here], torch.tensor(head)[batch.ahead.target]
    zeros = torch.zeros(())
    return Outputs(zeros, zeros, (own,), ahead=HeadLosses(zeros, torch.zeros(len(ahead)), (ahead,)))


def test_a_guess_is_accepted_if_the_model_makes_it_too() -> None:
    """Whether or not it is right; ranks that share a row put both together."""
    batch = with_ahead(collate([example(7, 2, 7)]))
    count = len(batch.targets.ids)
    model, head = list(range(count)), [i if i % 3 else 99 for i in range(count)]
    assert batch.ahead is not None
    expected = sum(1 for i in batch.ahead.target.tolist() if i % 3)
    assert 0 < expected < len(batch.ahead.target)
    assert accepted(outputs(batch, model, head), batch, ONE_RANK).item() == expected
    parts = [token_shard(batch, TokenShare(2, 1, rank, 0)) for rank in range(2)]
    sent: list[list[Tensor]] = []
    for part in parts:  # what each rank sums, in the order of its calls
        mine: list[Tensor] = []
        accepted(
            outputs(part, model, head), part, TokenRanks(2, lambda tensor, mine=mine: mine.append(tensor) or tensor)
        )
        sent.append(mine)
    totals = [sum(both[1:], both[0]) for both in zip(*sent, strict=True)]
    for part in parts:
        answers = iter(totals)
        ranks = TokenRanks(2, lambda _, answers=answers: next(answers))
        assert accepted(outputs(part, model, head), part, ranks).item() == expected
