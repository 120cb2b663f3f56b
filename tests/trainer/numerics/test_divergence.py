"""Divergences from a teacher of whom k ids are known: against torch's formulas over all tokens in fp64, gradients
through every way of the head, and what the tail as an event of its own is good for."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from largest import Largest
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, linear, log_softmax

from finetune.data.predictions import IDS, LOG_PROBS
from finetune.models.head import TokenLoss
from finetune.models.head.chunked import HeadDevice, HeadTask, matrix_losses, module_losses
from finetune.models.head.divergence import Divergence
from finetune.models.head.token_loss import LogitMap
from finetune.models.loss_model import choose_cross_entropy
from finetune.objectives import make_objective
from finetune.recipe.objective_settings import Distill

TARGETS, VOCABULARY, WIDTH = 9, 13, 5
KINDS = ("forward_kl", "reverse_kl", "jsd")
LOSSES = [
    Divergence(),
    Divergence("reverse_kl", temperature=2.0),
    Divergence("jsd", 0.7, 0.3, nll_weight=0.25),
    Divergence(nll_weight=0.4, sampled=True, temperature=1.5),
]
MAPS = [LogitMap(), LogitMap(scale=2.0, cap=3.0)]


def logits_of(seed: int, vocabulary: int = VOCABULARY, scale: float = 2.0) -> Tensor:
    return torch.randn(TARGETS, vocabulary, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


def top(teacher: Tensor, k: int, temperature: float = 1.0) -> dict[str, Tensor]:
    values, ids = log_softmax(teacher / temperature, 1).topk(k)
    return {IDS: ids, LOG_PROBS: values}


def drawn(teacher: Tensor, count: int, temperature: float = 1.0) -> dict[str, Tensor]:
    log_p = log_softmax(teacher / temperature, 1)
    ids = torch.multinomial(log_p.exp(), count, replacement=True, generator=torch.Generator().manual_seed(5))
    return {IDS: ids, LOG_PROBS: log_p.gather(1, ids)}


def known(loss: Divergence, teacher: Tensor, k: int) -> dict[str, Tensor]:
    return (drawn if loss.sampled else top)(teacher, k, loss.temperature)


def over_all_tokens(kind: str, teacher: Tensor, student: Tensor, beta: float = 0.5) -> Tensor:
    """The definitions, with torch's kl_div(log q, log p) = p * (log p - log q); jsd as in GKD, equation 1."""
    log_p, log_q = log_softmax(teacher, 1), log_softmax(student, 1)

    def kl(of: Tensor, to: Tensor) -> Tensor:
        return kl_div(to, of, reduction="none", log_target=True).sum(1)

    mixture = (beta * log_p.exp() + (1 - beta) * log_q.exp()).log()
    return {
        "forward_kl": lambda: kl(log_p, log_q),
        "reverse_kl": lambda: kl(log_q, log_p),
        "jsd": lambda: beta * kl(log_p, mixture) + (1 - beta) * kl(log_q, mixture),
    }[kind]()


def divergence(loss: Divergence, student: Tensor, columns: dict[str, Tensor]) -> Tensor:
    return loss.losses(student, torch.zeros(len(student), dtype=torch.int64), columns).details[1]


# --- what is computed


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("kind", KINDS)
def test_all_tokens_but_one_give_the_divergence_over_all(kind: str, temperature: float) -> None:
    """The tail is then the last token; the loss has T^2 and the negative log-likelihood at temperature 1."""
    teacher, student, targets = logits_of(0), logits_of(1), torch.arange(TARGETS)
    loss = Divergence(kind, temperature, 0.3, nll_weight=0.2)
    each, (nll, found) = loss.losses(student, targets, top(teacher, VOCABULARY - 1, temperature))
    wanted = over_all_tokens(kind, teacher / temperature, student / temperature, 0.3)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(nll, cross_entropy(student, targets, reduction="none"))
    torch.testing.assert_close(each, 0.2 * nll + 0.8 * temperature**2 * found)


@pytest.mark.parametrize("kind", KINDS)
def test_the_tail_gives_a_lower_bound_that_rises_with_k(kind: str) -> None:
    teacher, student = logits_of(0), logits_of(1)
    by_k = [divergence(Divergence(kind), student, top(teacher, k)) for k in range(1, VOCABULARY)]
    assert all((more - fewer > -1e-12).all() for fewer, more in pairwise(by_k))
    assert (over_all_tokens(kind, teacher, student) - by_k[3] > 1e-3).any()
    assert (by_k[0] >= 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_equal_distributions_have_no_divergence_and_no_gradient(kind: str) -> None:
    student = logits_of(0).requires_grad_()
    found = divergence(Divergence(kind), student.detach() + 3.0, top(student.detach(), 4))
    torch.testing.assert_close(found, torch.zeros(TARGETS, dtype=torch.float64), rtol=0, atol=1e-12)
    each = Divergence(kind).losses(student, torch.arange(TARGETS), top(student.detach(), 4)).each
    (gradient,) = torch.autograd.grad(each.sum(), student)
    assert gradient.abs().max() < 1e-12


def test_jsd_tends_to_the_two_divergences_at_its_ends() -> None:
    """So 0 and 1 themselves are 0 everywhere; TRL has forward and reverse KL in their place."""
    teacher, student = logits_of(0), logits_of(1)
    columns, small = top(teacher, 4), 1e-6
    for beta, kind in ((small, "forward_kl"), (1 - small, "reverse_kl")):
        found = divergence(Divergence("jsd", jsd_beta=beta), student, columns) / small
        torch.testing.assert_close(found, divergence(Divergence(kind), student, columns), rtol=1e-3, atol=1e-4)


def test_a_teacher_without_a_tail_stays_finite() -> None:
    """In fp32 the k probabilities of a sure teacher add up to 1, or a bit more."""
    log_probs = torch.tensor([[0.0, -20.0], [1e-7, -30.0]])
    columns = {IDS: torch.tensor([[3, 1], [0, 2]]), LOG_PROBS: log_probs}
    for kind in KINDS:
        student = torch.randn(2, 7).requires_grad_()
        each = Divergence(kind).losses(student, torch.zeros(2, dtype=torch.int64), columns).each
        (gradient,) = torch.autograd.grad(each.sum(), student)
        assert each.isfinite().all()
        assert gradient.isfinite().all()


def test_draws_from_the_teacher_are_unbiased_in_value_and_gradient() -> None:
    """The expectation over every id that can be drawn."""
    teacher, student = logits_of(0), logits_of(1).requires_grad_()
    log_p = log_softmax(teacher, 1)
    expected = sum(
        log_p[:, v].exp()
        * Divergence(sampled=True)
        .losses(
            student,
            torch.zeros(TARGETS, dtype=torch.int64),
            {IDS: torch.full((TARGETS, 1), v), LOG_PROBS: log_p[:, v : v + 1]},
        )
        .each
        for v in range(VOCABULARY)
    )
    assert isinstance(expected, Tensor)
    wanted = over_all_tokens("forward_kl", teacher, student)
    torch.testing.assert_close(expected, wanted)
    ours, theirs = (torch.autograd.grad(each.sum(), student, retain_graph=True)[0] for each in (expected, wanted))
    torch.testing.assert_close(ours, theirs)


# --- through the head


def head_inputs(trained: bool) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(TARGETS, WIDTH, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=torch.float64, requires_grad=trained)
    return hidden, weight


def task_of(loss: Divergence, logit_map: LogitMap, differentiable: bool, weights: Tensor | None = None) -> HeadTask:
    columns = known(loss, logits_of(0), 4)
    return HeadTask(torch.arange(TARGETS), loss, logit_map, 4, weights, differentiable, columns)


@pytest.mark.parametrize("differentiable", [False, True])
@pytest.mark.parametrize("way", ["matrix", "frozen matrix", "module"])
@pytest.mark.parametrize("logit_map", MAPS, ids=str)
@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_chunks_give_the_loss_and_gradient_of_all_logits_at_once(
    loss: Divergence, logit_map: LogitMap, way: str, differentiable: bool
) -> None:
    hidden, weight = head_inputs(trained=way != "frozen matrix")
    weights = torch.linspace(-1, 2, TARGETS, dtype=torch.float64)
    task = task_of(loss, logit_map, differentiable, weights)
    if way == "module":
        total, each, details = module_losses(hidden, lambda x: linear(x, weight), [weight], task)
    else:
        total, each, details = matrix_losses(hidden, weight, None, task)
    inputs = [x for x in (hidden, weight) if x.requires_grad]
    ours = torch.autograd.grad(total, inputs)
    plain = loss.losses(logit_map(hidden @ weight.t()), task.target_ids, task.columns)
    wanted = torch.autograd.grad((plain.each * weights).sum(), inputs)
    torch.testing.assert_close(each.detach(), plain.each.detach(), rtol=1e-12, atol=1e-12)
    for found, value in zip((*details, *ours), (*plain.details, *wanted), strict=True):
        assert not found.requires_grad
        torch.testing.assert_close(found, value, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_gradcheck(loss: Divergence, trained: bool) -> None:
    hidden, weight = head_inputs(trained)
    task = task_of(loss, MAPS[1], differentiable=True)
    inputs = (hidden, weight) if trained else (hidden,)
    assert torch.autograd.gradcheck(lambda *x: matrix_losses(hidden, weight, None, task).each, inputs)


@pytest.mark.parametrize("loss", [LOSSES[1], LOSSES[2], LOSSES[3]], ids=str)
def test_logits_of_all_targets_are_never_there_together(loss: Divergence) -> None:
    hidden, weight = torch.randn(64, 4).requires_grad_(), torch.randn(50, 4).requires_grad_()
    columns = {IDS: torch.arange(3).expand(64, 3), LOG_PROBS: torch.full((64, 3), -2.0)}
    task = HeadTask(torch.arange(64) % 50, loss, LogitMap(), 8, columns=columns)
    with Largest() as largest:
        matrix_losses(hidden, weight, None, task).total.backward()
    assert largest.numel == 8 * 50


def test_other_cross_entropies_are_refused() -> None:
    objective = make_objective(Distill())
    assert not objective.only_sums
    with pytest.raises(Exception, match=r"the objective needs more\. Fix: use `auto`"):
        choose_cross_entropy("liger", LogitMap(), True, 32_000, HeadDevice("cpu"), objective.only_sums)


# --- what it is good for


def student_of(loss: Callable[[Tensor], Tensor], vocabulary: int) -> Tensor:
    """Probabilities of a student with free logits that has minimised the loss."""
    logits = torch.zeros(1, vocabulary, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([logits], max_iter=500, tolerance_grad=1e-10, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(logits).sum()
        value.backward()
        return value

    optimizer.step(closure)  # pyright: ignore[reportArgumentType]
    return logits.detach().softmax(1)[0]


def test_the_tail_keeps_what_renormalised_top_k_loses() -> None:
    """A teacher with half of its mass on 4 of 40 ids, all others alike: the answer is known. With the tail the student
    finds it to 1e-4 in total variation; renormalised, it puts all on the four and is half of the mass off."""
    teacher = torch.tensor([[3.0, 2.8, 2.6, 2.4, *[0.45] * 36]], dtype=torch.float64)
    truth = teacher.softmax(1)[0]
    columns = top(teacher, 4)
    renormalised = columns[LOG_PROBS].log_softmax(1)
    with_tail = student_of(lambda x: Divergence().losses(x, torch.tensor([0]), columns).each, 40)
    without = student_of(
        lambda x: (renormalised.exp() * (renormalised - x.log_softmax(1).gather(1, columns[IDS]))).sum(1), 40
    )
    off = [0.5 * (found - truth).abs().sum().item() for found in (with_tail, without)]
    assert off[0] < 1e-4
    assert off[1] > 0.45
    top_id = truth.argmax()
    assert abs(with_tail[top_id] - truth[top_id]) < 1e-4 < 0.1 < without[top_id] - truth[top_id]  # too sure of itself


def test_token_losses_read_no_columns() -> None:
    """SFT on batches with a teacher's columns is SFT."""
    logits, ids = logits_of(0), torch.arange(TARGETS)
    assert torch.equal(TokenLoss().losses(logits, ids, {}).each, cross_entropy(logits, ids, reduction="none"))
