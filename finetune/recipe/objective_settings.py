"""The objective of a recipe: a class for each, with its keys and their defaults, the rows that it takes, and what the
trainer asks of every objective.

The maths is in `finetune/objectives/` and, of an objective on samples of the model, in `finetune/rl/policy.py`. A new
objective is a class here, a member of `ObjectiveSettings` and a row in `finetune/objectives/table.py`, or, if it trains
on a wing's rows, in `finetune/features.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, get_args

from pydantic import Field

from finetune.recipe.section import (
    Answers,
    Bounds,
    Count,
    Float,
    Names,
    NonNegative,
    OrDefault,
    Positive,
    Variant,
    own_values,
)


class RowKind(NamedTuple):
    """The rows that an objective takes."""

    formats: tuple[str, ...]
    sequences: tuple[str, ...] = ()  # names of an example's sequences, if it has two
    # Numbers of each example. label: 1 or 0, or the index of the class; margin: 0 if the row has none.
    columns: tuple[str, ...] = ()
    is_unpaired: bool = False  # the answers of a pair are two examples, each next to another row's answer
    is_text: bool = False  # the text is read, whoever says it

    @property
    def has_turns(self) -> bool:
        """Whether `train_on` chooses among the turns of a row."""
        return "messages" in self.formats


ANSWERS = RowKind(get_args(Answers))
PROMPTS = RowKind(("messages", "sharegpt", "alpaca", "prompt_completion", "prompt"))
PAIRS = RowKind(("preference", "comparison", "ranked"), ("chosen", "rejected"))

Smoothing = Annotated[Float, Field(ge=0, lt=1)]


class ObjectiveSection(Variant):
    """The training loss. All terms below are part of `loss`; z-loss and label smoothing are not part of `eval_loss`."""

    row_kind: ClassVar[RowKind] = ANSWERS
    takes_rewards: ClassVar[bool] = False  # and trains on `rollouts`
    # Of a model with a head of scores in place of an LM head: its description for the model card.
    score_model: ClassVar[str | None] = None

    name: str
    # Supervised tokens. assistant: every assistant turn with its end-of-turn; last_assistant: the last one; all: all.
    # Pairs, marked answers and labels support `assistant` only.
    train_on: Literal["assistant", "last_assistant", "all"] = "assistant"
    # Mixture of experts: coefficient of the load-balancing loss (Fedus et al. 2021, https://arxiv.org/abs/2101.03961,
    # section 2.2), which is `num_experts_per_tok` under perfect balance. null: the model config's
    # `router_aux_loss_coef` if its `output_router_logits` is true, else 0.
    router_aux_loss_coef: NonNegative | None = None

    @classmethod
    def kind(cls) -> str:
        return cls.model_fields["name"].default

    @classmethod
    def unread(cls, readers: Sequence[str]) -> str:
        return f"has no effect under `name: {cls.kind()}`, only under {' and '.join(readers)}: remove it"

    @property
    def label(self) -> str:
        """Returns the name for a model card."""
        return self.kind()

    @property
    def drops_nothing(self) -> bool:
        """Whether the dropout of config and adapters is off."""
        return False

    @property
    def reads_reference(self) -> bool:
        """Whether log-probabilities of a reference are part of the loss."""
        return False

    @property
    def precomputes_reference(self) -> bool:
        """Whether those are computed before the first step."""
        return False

    @property
    def score_labels(self) -> tuple[str, ...]:
        """Returns what the model's head of scores is to score, in the order of its outputs."""
        return ()

    @property
    def scores_sequences(self) -> bool:
        """Whether the model has a head of scores, in place of an LM head."""
        return self.score_model is not None

    @property
    def other_models(self) -> dict[str, str]:
        """Returns the models that are read besides the trained one, by their keys."""
        return {}

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yields keys, and what is wrong with them by these settings alone."""
        yield from ()


# --- parts of several objectives


class WithoutDropout(ObjectiveSection):
    # Apply the dropout of the model's config and of the adapters in training. false: the config's is set to 0 and
    # `lora.dropout` above 0 is an error, so that a pair's two answers are compared under equal weights. References and
    # mismatched answers are computed without dropout either way
    dropout: bool = False

    @property
    def drops_nothing(self) -> bool:
        return not self.dropout


class SharesPrompts(ObjectiveSection):
    # Compute the beginning that the two sequences of a pair share once; of samples (`rollouts`) the prompt of those in
    # a micro-batch. Equal to rounding. auto: if the attention supports it
    share_prompts: Literal["auto"] | bool = "auto"


class AgainstReference(WithoutDropout):
    # Strength of the pull to the reference, in 1/nats (per token under ipo, sigmoid_norm, simpo)
    beta: OrDefault[Positive] = 0.1
    # Origin of the reference's log-probabilities. precomputed: before the first step, cached next to the tokens;
    # adapters_off: in each step, by the base of the adapters (lora, qlora). null: precomputed
    reference: Literal["precomputed", "adapters_off"] | None = None
    # Another reference than the initial model, a hub id or a local folder with the same vocabulary;
    # `finetune reference` computes its log-probabilities before
    reference_model: str | None = None

    @property
    def reads_reference(self) -> bool:
        return True

    @property
    def precomputes_reference(self) -> bool:
        return self.reads_reference and self.reference != "adapters_off"

    @property
    def other_models(self) -> dict[str, str]:
        return {} if self.reference_model is None else {"reference_model": self.reference_model}


# --- single answers


class Sft(ObjectiveSection):
    """Every target token alike."""

    name: Literal["sft"] = "sft"
    # Added to each token's loss, z_loss * log(sum(exp(logits)))^2 (Chowdhery et al. 2022,
    # https://arxiv.org/abs/2204.02311, section 5).
    z_loss: NonNegative = 0.0
    # Probability mass moved from the target evenly to the vocabulary (Szegedy et al. 2015,
    # https://arxiv.org/abs/1512.00567, section 7).
    label_smoothing: Smoothing = 0.0


class Focal(ObjectiveSection):
    """Tokens that the model predicts well already count less."""

    name: Literal["focal"] = "focal"
    # A factor of (1 - probability)^gamma (Lin et al. 2017, https://arxiv.org/abs/1708.02002)
    gamma: OrDefault[NonNegative] = 2.0


class Distill(SharesPrompts):
    """The distribution of a teacher."""

    name: Literal["distill"] = "distill"
    # Required. The teacher, a local folder or hub id of a model with the same vocabulary (`finetune reference` computes
    # its log-probabilities before; `train` refuses to start without them), or a .parquet file with ids and
    # log-probabilities of each token. With `rollouts` a model, which each process holds in full, beside the student
    teacher: str | None = None
    # forward_kl: KL(teacher, student); reverse_kl: KL(student, teacher); jsd: the generalized one between the two, with
    # `jsd_beta` (https://arxiv.org/abs/2306.13649)
    divergence: OrDefault[Literal["forward_kl", "reverse_kl", "jsd"]] = "forward_kl"
    temperature: OrDefault[Positive] = 1.0  # of both; the divergence is multiplied by its square
    # Weight of KL(teacher, mixture), and share of the teacher in the mixture. null: 0.5
    jsd_beta: Annotated[Float, Field(gt=0, lt=1)] | None = None
    nll_weight: Annotated[Float, Field(ge=0, lt=1)] = 0.0  # of -log p(target); the divergence has the rest
    # Ids kept of each of the teacher's distributions, the likeliest; all others are one more event. null: 64, or as
    # many as the file has
    top_k: Count | None = None
    # In place of `top_k`, ids drawn from each of the teacher's distributions: an unbiased estimate of forward_kl, 12
    # are enough in https://arxiv.org/abs/2503.16870
    samples: Count | None = None

    @property
    def kept_ids(self) -> int:
        """Returns the number of likeliest ids of a teacher that is a model."""
        return self.top_k or 64

    @property
    def other_models(self) -> dict[str, str]:
        return {} if self.teacher is None else {"teacher": self.teacher}

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.teacher is None:
            needed = "a model with the same vocabulary, or a .parquet file of its predictions"
            yield "teacher", f"`name: distill` needs a teacher: {needed}"
        if self.samples is not None and self.top_k is not None:
            yield "samples", "replaces `top_k`: remove one of the two"
        if self.samples is not None and self.divergence != "forward_kl":
            other = f"not {self.divergence}: use `top_k`"
            yield "samples", f"draws from the teacher estimate forward_kl only, {other}"
        if self.jsd_beta is not None and self.divergence != "jsd":
            yield "jsd_beta", "has an effect under `divergence: jsd` only: remove it"


# --- pairs of answers, marked answers

PreferenceLoss = Literal["sigmoid", "robust", "hinge", "ipo", "sigmoid_norm", "apo_zero", "apo_down", "simpo"]
# Keys of `dpo` that only some losses read.
LOSS_KEYS: dict[str, tuple[str, ...]] = {
    "label_smoothing": ("sigmoid", "robust"),
    "margin": ("simpo",),
    **dict.fromkeys(
        ("reference", "reference_model"),
        ("sigmoid", "robust", "hinge", "ipo", "sigmoid_norm", "apo_zero", "apo_down"),
    ),
}


class Dpo(AgainstReference, SharesPrompts):
    """The better of two answers is to gain probability on the worse one, compared with a reference model."""

    row_kind: ClassVar[RowKind] = PAIRS

    name: Literal["dpo"] = "dpo"
    # A row of the table in objectives/preference.py, which has formula and paper
    loss: OrDefault[PreferenceLoss] = "sigmoid"
    # Loss sigmoid or robust: probability that a pair is the wrong way round (cDPO: Mitchell 2023,
    # https://ericmitchell.ai/cdpo.pdf; robust: https://arxiv.org/abs/2403.00409).
    label_smoothing: Smoothing = 0.0
    # Loss simpo: gamma, in the units of beta times log-probability per token (not gamma / beta); null: 0.5
    margin: NonNegative | None = None
    # Weight of the mean negative log-likelihood of the chosen answers' tokens (RPO: Pang et al. 2024,
    # https://arxiv.org/abs/2404.19733, equation 2)
    sft_weight: NonNegative = 0.0

    @property
    def reads_reference(self) -> bool:
        return self.loss in LOSS_KEYS["reference"]

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.label_smoothing >= 0.5 and self.loss in LOSS_KEYS["label_smoothing"]:
            yield (
                "label_smoothing",
                f"{self.label_smoothing:g} says that most pairs are the wrong way round: use less than 0.5, or swap "
                "`chosen` and `rejected` with `columns`",
            )
        for key, losses in LOSS_KEYS.items():
            if self.loss not in losses and getattr(self, key) != type(self).model_fields[key].default:
                yield key, f"has no effect under `loss: {self.loss}`, only under {', '.join(losses)}: remove it"


class Kto(AgainstReference):
    """Single answers, each marked as good or bad."""

    # A pair gives a good and a bad answer.
    row_kind: ClassVar[RowKind] = RowKind(
        ("unpaired", "preference", "comparison"), ("answer", "another row's answer"), ("label",), is_unpaired=True
    )

    name: Literal["kto"] = "kto"
    desirable_weight: OrDefault[NonNegative] = 1.0  # of the good answers
    undesirable_weight: OrDefault[NonNegative] = 1.0  # of the bad answers


class Orpo(WithoutDropout, SharesPrompts):
    """Pairs, without a reference, together with sft on the better answer."""

    row_kind: ClassVar[RowKind] = PAIRS

    name: Literal["orpo"] = "orpo"
    beta: OrDefault[Positive] = 0.1  # weight of the odds ratio (lambda in the paper)


# --- scores


class RewardObjective(WithoutDropout, SharesPrompts):
    """A score for an answer, from pairs."""

    row_kind: ClassVar[RowKind] = PAIRS._replace(columns=("margin",))
    score_model: ClassVar[str | None] = (
        "A reward model: the score of a prompt with its answer; higher is better. Scores compare answers to the same "
        "prompt."
    )

    name: Literal["reward"] = "reward"
    # Weight of the squared sum of a pair's scores, which centres them (https://arxiv.org/abs/2312.09244)
    centering: NonNegative = 0.0

    @property
    def score_labels(self) -> tuple[str, ...]:
        return ("reward",)


class Classify(WithoutDropout):
    """A label for a text."""

    row_kind: ClassVar[RowKind] = RowKind(("classification",), columns=("label",), is_text=True)
    score_model: ClassVar[str | None] = "A classifier of texts."

    name: Literal["classify"] = "classify"
    # Required. Names of the labels, in the order of the model's outputs; rows have a name or its index
    labels: Names | None = None

    @property
    def score_labels(self) -> tuple[str, ...]:
        return self.labels or ()

    def problems(self) -> Iterator[tuple[str, str]]:
        if len(self.score_labels) < 2:
            yield (
                "labels",
                "name the labels of the rows, two at least, in the order of the model's outputs, such as `[no, yes]`",
            )
        elif len(set(self.score_labels)) < len(self.score_labels):
            yield "labels", "has a name twice: keep one of each"


# --- samples of the model

PolicyLoss = Literal["grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp", "cispo", "gspo"]


class Grpo(WithoutDropout, SharesPrompts):
    """The model's own answers to the rows' prompts, weighted by their rewards (needs `rollouts` and `rewards`)."""

    row_kind: ClassVar[RowKind] = PROMPTS
    takes_rewards: ClassVar[bool] = True

    name: Literal["grpo"] = "grpo"
    # A row of the table in rl/policy.py, which has formula and paper
    loss: OrDefault[PolicyLoss] = "dr_grpo"
    # Divide advantages by the standard deviation of the rewards of their prompt, or of the step. null: as the paper of
    # the loss does
    scale_rewards: Literal["none", "group", "batch"] | None = None
    # Samples that `rollouts.max_new_tokens` ended. keep: like all others; mask: their tokens have no gradient, of no
    # term (https://arxiv.org/abs/2503.14476, section 3.4), and count in the loss's divisor all the same
    overlong: OrDefault[Literal["keep", "mask"]] = "keep"
    # With `rollouts.reuse` or `rollouts.staleness`: [low, high]: ratios of new to old probabilities count between
    # 1 - low and 1 + high; [1, high] has no lower bound. null: as the paper of the loss, in rl/policy.py
    clip: Bounds | None = None
    # Coefficient of the KL divergence from the initial weights, estimated at each sampled token (k3:
    # http://joschu.net/blog/kl-approx.html) and weighted by the ratio. Above 0 the initial trained weights (few with
    # adapters) are kept in host memory, and the samples of each step pass through the model once more
    kl: NonNegative = 0.0
    # For a sampler that rounds otherwise than the trainer: weigh each sampled token's loss by the ratio of the
    # trainer's to the sampler's probability. tis: of each token, truncated; icepop: of each token, 0 outside the
    # bounds; sequence_mask: of the whole sample, 0 outside the bounds; see rl/rollouts/correction.py. null: none, and
    # to be chosen under `engine: vllm`
    correction: Literal["none", "tis", "icepop", "sequence_mask"] | None = None
    correction_bounds: Bounds | None = None  # [low, high] of that ratio; null: see rl/rollouts/correction.py

    @property
    def corrects(self) -> bool:
        return self.correction not in (None, "none")


# --- functions of the user's


class Own(ObjectiveSection):
    """A function of your own of the targets' losses, such as `{file: my_loss.py, function: my_loss}`."""

    name: Literal["own"] = "own"
    # Required. A Python file of your own, which is run in every process: only code that you trust
    file: str | None = None
    # Required. The function in it, which returns a sum and its unit: docs/reference/objectives.md
    function: str | None = None

    @property
    def label(self) -> str:
        return f"{self.name}: `{self.function}` in {self.file}"

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.file is None:
            yield "file", "`name: own` needs a Python file, such as `file: my_loss.py`"
        if self.function is None:
            yield "function", "name the function in `file`, such as `function: my_loss`"


ObjectiveSettings = Sft | Focal | Dpo | Kto | Orpo | RewardObjective | Classify | Distill | Grpo | Own
OBJECTIVE_SECTIONS: dict[str, type[ObjectiveSection]] = {one.kind(): one for one in get_args(ObjectiveSettings)}


def named_objective(values: Any) -> Any:
    """Returns a section's values with the name of its objective, by default sft."""
    if not isinstance(values, dict):
        return values
    values = {"name": "sft", **values}
    own = OBJECTIVE_SECTIONS.get(values["name"]) if isinstance(values["name"], str) else None
    return values if own is None else own_values(values, own, OBJECTIVE_SECTIONS.values())


def objective_of_rows(format: str) -> str:
    """Returns the first objective that takes rows of a format; sft if none does."""
    return next((name for name, one in OBJECTIVE_SECTIONS.items() if format in one.row_kind.formats), "sft")
