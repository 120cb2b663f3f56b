"""An objective that is a function in the user's file: its terms, the ranks that share its tokens, and what is refused
before a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import own_losses
import pytest
import torch

from finetune.data.batch import Batch, TokenShare, collate, dummy_batch, token_shard
from finetune.data.samples import Example, Sequence
from finetune.errors import UserError
from finetune.models.wrapped import Outputs
from finetune.objectives import Objective, make_objective
from finetune.objectives.objective import ONE_RANK, Sums, TermSums, TokenRanks
from finetune.objectives.own import load_own
from finetune.recipe.objective_settings import Focal, Own, Sft

OWN_LOSSES = own_losses.__file__


def own(function: str, token_ranks: TokenRanks = ONE_RANK, evaluating: bool = False) -> Objective:
    settings = Own(file=OWN_LOSSES, function=function)
    return make_objective(settings, evaluating=evaluating, token_ranks=token_ranks)


def examples_of(*lengths: int) -> list[Example]:
    sequences = [Sequence(np.arange(3, 3 + n, dtype=np.int32), np.arange(n) >= 2) for n in lengths]
    return [Example("a", row, 0, (one,)) for row, one in enumerate(sequences)]


def batch_of(*lengths: int) -> Batch:
    return collate(examples_of(*lengths))


def outputs_of(losses: torch.Tensor) -> Outputs:
    losses = losses.clone().requires_grad_()
    return Outputs(losses.sum(), losses)


def losses_of(batch: Batch, seed: int = 0) -> torch.Tensor:
    return torch.rand(len(batch.targets.ids), generator=torch.Generator().manual_seed(seed)) * 3


def step_of(objective: Objective, batches: list[tuple[Outputs, Batch]]) -> Sums:
    sums = TermSums()
    for outputs, batch in batches:
        sums.add(objective.terms(outputs, batch))
    counts = {unit: sum(batch.counts[unit] for _, batch in batches) for unit in batches[0][1].counts}
    return Sums(sums.totals, sums.terms, counts)


def test_sft_as_a_function_is_sft_to_the_last_bit() -> None:
    batch, ours, theirs = batch_of(5, 9, 13), own("mean_of_tokens"), make_objective(Sft())
    (one, of_one), (other, of_other) = (
        (outputs, objective.loss(objective.terms(outputs, batch), batch.counts))
        for objective, outputs in ((ours, outputs_of(losses_of(batch))), (theirs, outputs_of(losses_of(batch))))
    )
    assert of_one.item() == of_other.item()
    gradients = [torch.autograd.grad(of, outputs.token_losses)[0] for of, outputs in ((of_one, one), (of_other, other))]
    assert torch.equal(*gradients)
    assert own("mean_of_tokens", evaluating=True).only_sums  # the plain mean of all held-out tokens


def test_terms_and_metrics_of_a_step_however_it_is_divided() -> None:
    batch, objective = batch_of(5, 9, 13), own("mean_of_answers")
    losses = losses_of(batch)
    parts = losses.split(batch.sequence_targets)
    halves = [(batch_of(5), losses[:3]), (batch_of(9, 13), losses[3:])]
    answers = sum(part.mean().item() for part in parts) / 3
    confident = (0.1 * losses * (-losses).exp()).mean().item()
    for batches in ([(batch, losses)], halves):
        sums = step_of(objective, [(outputs_of(each), one) for one, each in batches])
        assert sums.loss() == pytest.approx(answers + confident, rel=1e-6)
        assert objective.metrics(sums) == pytest.approx(
            {
                "objective/answers": answers,
                "objective/confident": confident,
                "objective/certain": (losses < 0.1).float().mean().item(),
                "nll": losses.mean().item(),
            },
            rel=1e-6,
        )


def test_a_rank_without_outputs_and_a_dummy_have_the_same_terms_all_zero() -> None:
    batch, objective = batch_of(5, 9), own("mean_of_answers")
    terms = objective.terms(outputs_of(losses_of(batch)), batch)
    nothing = objective.no_terms(batch)
    assert [(name, term._replace(total=0)) for name, term in nothing.items()] == [
        (name, term._replace(total=0)) for name, term in terms.items()
    ]
    assert not any(term.total.any() for term in nothing.values())
    dummy = objective.terms(outputs_of(torch.zeros(0)), dummy_batch(examples_of(5)[0], 0, None))
    assert dummy.keys() == terms.keys()
    assert not any(term.total.any() for term in dummy.values())
    assert objective.loss(dummy, {"sequences": 2.0, "target_tokens": 9.0}).requires_grad


@pytest.mark.parametrize("share", [(2, 1), (1, 2), (2, 2)])
def test_ranks_that_share_tokens_see_whole_sequences(share: tuple[int, int]) -> None:
    context, sequence = share
    count = context * sequence
    whole = collate(examples_of(5, 9, 13), padded_to=TokenShare(context, sequence).padded(27))
    losses = losses_of(whole)
    shards = [token_shard(whole, TokenShare(context, sequence, c, s)) for c in range(context) for s in range(sequence)]
    assert all(shard.row_targets is not None for shard in shards)
    local = [losses[shard.row_targets.here] for shard in shards if shard.row_targets is not None]
    scattered = list[torch.Tensor]()
    for outputs, shard in zip(map(outputs_of, local), shards, strict=True):

        def kept(tensor: torch.Tensor) -> torch.Tensor:
            scattered.append(tensor.detach())
            return tensor

        own("mean_of_answers", TokenRanks(count, kept)).terms(outputs, shard)
    everywhere = torch.stack(scattered).sum(0)
    assert torch.equal(everywhere, losses)
    objective = own("mean_of_answers", TokenRanks(count, lambda mine: mine + (everywhere - mine).detach()))
    found = step_of(objective, [(outputs_of(each), shard) for each, shard in zip(local, shards, strict=True)])
    wanted = step_of(own("mean_of_answers"), [(outputs_of(losses), whole)])
    assert {name: total.item() for name, total in found.totals.items()} == pytest.approx(
        {name: total.item() for name, total in wanted.totals.items()}, rel=1e-6
    )


def test_focal_as_a_function_is_focal(tmp_path: Path) -> None:
    file = tmp_path / "loss.py"
    file.write_text(
        "import torch\n\ndef focal(token_losses):\n"
        '    return (-torch.expm1(-token_losses) * token_losses).sum(), "target_tokens"\n',
        encoding="utf-8",
    )
    batch, outputs = batch_of(5, 9), outputs_of(losses_of(batch_of(5, 9)))
    found, wanted = (
        step_of(make_objective(settings), [(outputs, batch)]).loss()
        for settings in (Own(file=str(file), function="focal"), Focal(gamma=1.0))
    )
    assert found == pytest.approx(wanted, rel=1e-6)


# --- refused before a run


def sums(value: str, unit: str = "target_tokens") -> str:
    return f"def f(token_losses, num_targets):\n    return {value}, {unit!r}\n"


REFUSED = {
    "mean": (sums("token_losses.mean()"), "gave 1.30202 for 4 sequences, and 4.36338 for each alone, added up"),
    "divided by a count of the batch": (sums("token_losses.sum() / len(num_targets)"), "how the step is divided"),
    "gradients of the batch": (
        sums("token_losses.sum() + (token_losses - token_losses.detach()).sum() * token_losses.numel()"),
        "`f` gave a token another gradient among other sequences",
    ),
    "largest of a batch": (sums("token_losses.amax()"), "each alone, added up"),
    "other sequences": (sums("(token_losses * token_losses.roll(1)).sum()"), "each alone, added up"),
    "a mean among the metrics": (
        """def f(token_losses):
    return {"a": (token_losses.sum(), "tokens"), "b": (token_losses.detach().mean(), "tokens")}
""",
        "each alone, added up",
    ),
    "unknown unit": (sums("token_losses.sum()", "batch"), "returned the unit 'batch'. Fix: use one of target_tokens"),
    "no unit": (
        "def f(token_losses):\n    return token_losses.sum()\n",
        "a tensor without its unit. Fix: add the unit",
    ),
    "no return": ("def f(token_losses):\n    token_losses.sum()\n", "None, not a sum (a tensor) and its unit; is a"),
    "a float": (sums("token_losses.sum().item()"), "returned (float, str), not a sum"),
    "not added up": (sums("token_losses"), "a tensor of shape (14,) and torch.float32, not one number. Fix: add up"),
    "detached": (sums("token_losses.detach().sum()"), "`f` has no gradient"),
    "not finite": (sums("token_losses.sum() / 0"), "returned inf for usual losses"),
    "no term": ("def f(token_losses):\n    return {}\n", "returned no term"),
    "name of a term": ('def f(token_losses):\n    return {"a/b": (token_losses.sum(), "tokens")}\n', "'a/b'"),
    "random": (sums("(token_losses.clone().uniform_() * token_losses).sum()"), "two values for the same batch"),
    "state": (f"n = []\n{sums('token_losses.sum() / (n.append(1) or len(n))')}", "two values for the same batch"),
    "terms of a batch": (
        """def f(token_losses, num_targets):
    return token_losses.sum(), "sequences" if len(num_targets) == 1 else "tokens"
""",
        "other terms for another batch",
    ),
    "raises": (sums("token_losses.summ()"), "loss.py:2: `f` raised AttributeError"),
    "fails as it is loaded": ("import no_such_module\n", "loss.py:1: ModuleNotFoundError"),
    "syntax": ("def f(:\n", "SyntaxError: invalid syntax. Fix: correct the file"),
    "another name": ("def g(token_losses):\n    return 0\n", "has no function `f`; it has g"),
    "unknown argument": (
        "def f(logits):\n    return 0\n",
        "`f` asks for `logits`, which is not given. Fix: ask only for",
    ),
    "no losses": ("def f(num_targets):\n    return 0\n", "does not ask for `token_losses`"),
    "async": ("async def f(token_losses):\n    return 0\n", "`async def`"),
}


@pytest.mark.parametrize(("text", "problem"), REFUSED.values(), ids=REFUSED)
def test_a_function_that_cannot_keep_the_promise(text: str, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "loss.py"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as error:
        load_own(Own(file=str(file), function="f"))
    message = str(error.value)
    assert message.startswith("objective: ")
    assert problem in message
    assert "Fix: " in message


def test_a_file_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"objective.file: no such file: .*/none.py. Relative paths start at .* Fix: "):
        load_own(Own(file=str(tmp_path / "none.py"), function="f"))


def test_what_a_function_does_later_in_the_run(tmp_path: Path) -> None:
    """Writes to its arguments reach nothing else; an error of some batch alone names its line."""
    file = tmp_path / "loss.py"
    file.write_text(
        "import helper_of_own_loss\n\n\ndef f(token_losses):\n    token_losses *= helper_of_own_loss.FACTOR\n"
        "    if len(token_losses) > 20:\n        raise ValueError('long')\n"
        "    if len(token_losses) > 15:\n        token_losses = token_losses.detach()\n"
        '    return token_losses.sum(), "target_tokens"\n',
        encoding="utf-8",
    )
    (tmp_path / "helper_of_own_loss.py").write_text("FACTOR = 3\n", encoding="utf-8")
    objective = make_objective(Own(file=str(file), function="f"))
    batch = batch_of(5, 9)
    sums = step_of(objective, [(outputs_of(losses := losses_of(batch)), batch)])
    assert sums.loss() == pytest.approx(3 * losses.mean().item())
    assert sums.mean("nll") == pytest.approx(losses.mean().item())
    for lengths, problem in (
        ((25,), r"loss.py:7: `f` raised ValueError: long. Fix"),
        ((19,), "a sum without a gradient"),
    ):
        batch = batch_of(*lengths)
        with pytest.raises(UserError, match=problem):
            objective.terms(outputs_of(losses_of(batch)), batch)
