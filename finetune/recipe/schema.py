"""The recipe's schema: every setting that can change a loss, and nothing about where the run happens.

Each field has its unit and effect as a comment. The models are strict and frozen: an unknown key, a wrong type or an
invalid combination is an error at load (see `load.py`), never a silent default.
"""

from __future__ import annotations

import difflib
import json
import re
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_serializer, model_validator

from finetune.recipe.shorthands import SHORTHANDS
from finetune.recipe.urls import without_credentials


class Section(BaseModel):
    """Base of every section: refuses unknown keys, does not coerce between types, is frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def _int_to_float(value: Any) -> Any:
    """Accepts `lr: 1` as `1.0`, but no bool."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < 2**63 else value


def _list_to_tuple(value: Any) -> Any:
    """Converts YAML's lists to the tuples of a frozen recipe."""
    return tuple(value) if isinstance(value, list) else value


# Variables that rendering sets itself.
_BUILT_IN = (
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "bos_token",
    "eos_token",
    "pad_token",
    "unk_token",
)


def check_template_arguments(value: dict[str, Any]) -> dict[str, Any]:
    """Checks for names that Jinja can set and values that JSON can represent."""
    for name, item in value.items():
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise ValueError(f"`{name}` is not a valid name of a variable")
        if name in _BUILT_IN:
            raise ValueError(f"`{name}` is set when the template is rendered")
        try:
            json.dumps(item, allow_nan=False)
        except (TypeError, ValueError):
            raise ValueError(f"`{name}`: not a JSON value; give it as text") from None
    return value


Float = Annotated[float, BeforeValidator(_int_to_float), Field(allow_inf_nan=False)]
Positive = Annotated[Float, Field(gt=0)]
NonNegative = Annotated[Float, Field(ge=0)]
Share = Annotated[Float, Field(ge=0, le=1)]
Beta = Annotated[Float, Field(ge=0, lt=1)]
Betas = Annotated[tuple[Beta, Beta], BeforeValidator(_list_to_tuple), Field(strict=False)]
Bounds = Annotated[tuple[NonNegative, Positive], BeforeValidator(_list_to_tuple), Field(strict=False)]
Names = Annotated[tuple[str, ...], BeforeValidator(_list_to_tuple), Field(strict=False, min_length=1)]
Count = Annotated[int, Field(ge=1, le=10**9)]


def _distinct(names: tuple[str, ...]) -> tuple[str, ...]:
    if twice := [name for i, name in enumerate(names) if name in names[:i]]:
        raise ValueError(f"{twice[0]!r} is given twice")
    if any(not name.strip() for name in names):
        raise ValueError("a token needs a character that is not white space")
    return names


TemplateArguments = Annotated[dict[str, Any], Field(min_length=1), AfterValidator(check_template_arguments)]

RUN_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
CHECKPOINT_NAME = r"^(aside-)?step-\d{8}(-\d+)?$"
RUN_NAME_WITH_VALUES = r"^([A-Za-z0-9]|\{[A-Za-z0-9._]+\})([A-Za-z0-9._-]|\{[A-Za-z0-9._]+\})*$"


class Run(Section):
    """Output folder and seed."""

    # Run directory: <dir>/<name>. It may hold values, for sweeps: `lr-{optimizer.lr}`.
    name: Annotated[str, Field(min_length=1, pattern=RUN_NAME_WITH_VALUES)]
    dir: str = "runs"
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 42  # of initial weights, adapters, order of samples, dropout


Part = Literal["language", "projector", "vision"]
Parts = Annotated[tuple[Part, ...], BeforeValidator(_list_to_tuple), Field(strict=False, min_length=1)]


class Model(Section):
    """The initial model: `name` (pretrained) or `config` (from scratch)."""

    name: str | None = None  # hub id or local folder, with weights and tokenizer
    config: dict[str, Any] | None = None  # a Hugging Face model config with `model_type`: random weights, seeded
    tokenizer: str | None = None  # hub id or local folder; null: that of `name`
    revision: str | None = None  # branch, tag or commit of `name` on the hub
    # Type of frozen weights and of the saved result; trained weights follow `train.precision`.
    # auto: the compute type of train.precision.
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    # Implementation of attention within the documents of a packed sequence. auto: the fastest one available; the choice
    # and its reason are shown in the plan. flash_attention_3: `varlen` with its kernels, on Hopper.
    attention: Literal[
        "auto", "documents", "varlen", "flex", "sdpa", "eager", "flash_attention_2", "flash_attention_3"
    ] = "auto"
    # Implementation of the LM head's loss; equal to rounding. plain: all logits at once; chunked: some tokens at a
    # time, gradient included; liger: its kernels (CUDA).
    # auto: liger on CUDA if it is installed, unless `kernels: plain`; else chunked if the architecture allows it. The
    # choice and its reason are shown in the plan.
    cross_entropy: Literal["auto", "plain", "chunked", "liger"] = "auto"
    # Kernels of norms, of feed-forwards gated by silu and of rotations; their rounding is another. plain: the
    # architecture's own operations; liger: Liger's (CUDA); auto: on a GPU torch's fused norm, and Liger's if it is
    # installed; not with `train.compile`, which fuses by itself. The choice and its reason are shown in the plan.
    kernels: Literal["auto", "plain", "liger"] = "auto"
    chat_template: str | None = None  # null: the tokenizer's own; else a built-in name or a Jinja file
    # Values of the template's variables, such as `enable_thinking: false`; the result's template begins with them.
    chat_template_arguments: TemplateArguments | None = None
    # For templates whose answers without reasoning begin with an empty thought (Qwen 3), or whose generation prompt
    # opens one (R1's distills). trained: the model learns to write the thought, as it has to in use; given: it is the
    # end of the generation prompt, also in the result's template, and not trained.
    empty_thought: Literal["trained", "given"] = "trained"
    # Trained parts of a model that sees images: adapters in them, or all of their weights under `mode: full`.
    # projector: turns the tower's output into tokens; vision: the tower. null: language, and without `data.image` the
    # language model by itself.
    train: Parts | None = None
    trust_remote_code: bool = False  # runs Python code from the model's repository: only if you trust it

    @model_validator(mode="after")
    def _one_start(self) -> Model:
        if (self.name is None) == (self.config is None):
            raise ValueError(
                "give either `name` (pretrained weights) or `config` (from scratch)"
                + ("" if self.name is None else ", not both")
            )
        if self.config is not None:
            if not isinstance(self.config.get("model_type"), str):
                raise ValueError("`config` needs a `model_type`, such as `llama` or `mistral`")
            if self.tokenizer is None:
                raise ValueError("a model from `config` has no tokenizer of its own: give `tokenizer`")
        return self


class Lora(Section):
    """Low-rank adapters (Hu et al. 2021, https://arxiv.org/abs/2106.09685), through peft."""

    rank: Count = 16
    alpha: Positive = 32.0  # the update is scaled by alpha / rank (rslora: alpha / sqrt(rank))
    dropout: Annotated[Float, Field(ge=0, lt=1)] = 0.0
    # Module names, a list or text with commas (`q_proj,v_proj`); all-linear: every linear layer but the LM head and
    # routers, and the tensors of all experts
    targets: Literal["all-linear"] | Names = "all-linear"
    rslora: bool = False  # Kalajdzievski 2023, https://arxiv.org/abs/2312.03732
    dora: bool = False  # Liu et al. 2024, https://arxiv.org/abs/2402.09353
    modules_to_save: Names | None = None  # modules trained fully in addition to the adapters, such as lm_head


class Tokens(Section):
    """Tokens that the tokenizer and the model get in addition."""

    # Each begins as the mean of its text's previous tokens, in the embedding and an LM head with weights of its own.
    add: Annotated[Names, AfterValidator(_distinct)]
    # lora, qlora: train the rows of the added tokens only, or embedding and head in full. null: added. `mode: full`
    # trains all.
    train: Literal["added", "all"] | None = None


class Quantization(Section):
    """Storage of frozen weights for qlora in 4 bits (Dettmers et al. 2023, https://arxiv.org/abs/2305.14314), or 8."""

    type: Literal["nf4", "fp4", "fp8"] = "nf4"  # fp8: float8_e4m3 with a scale for each row
    # 4 bits: quantizes the block scales, too: saves 0.37 bits per weight. null: true in 4 bits
    double_quant: bool | None = None
    # fp8: products with dequantized weights, or scaled products of 8 bits: inputs, and gradients of outputs, rounded to
    # fp8 with a scale for each token. scaled: precision bf16 or bf16_true; Hopper and later, emulated on CPUs
    compute: Literal["dequantised", "scaled"] = "dequantised"


Answers = Literal["messages", "sharegpt", "alpaca", "prompt_completion", "text", "tokens"]
Format = Literal["auto", Answers, "prompt", "preference", "comparison", "ranked", "unpaired", "classification"]


class Source(Section):
    """One dataset: a file, a glob, a folder of files, a URL (s3://, gs://, https://, ...), or a hub id.

    Files: json, jsonl, csv, parquet, arrow, xlsx, txt, md; compressed ones (.gz, .bz2, .xz, .zst) as well.
    """

    path: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(pattern=RUN_NAME)] | None = None  # in metrics and tables; null: derived from `path`
    config: str | None = None  # the hub dataset's configuration
    split: str = "train"  # slices such as train[:1000] and train[10%:20%] work, also for files, which are one split
    format: Format = "auto"  # auto: detected from the first rows and logged
    columns: dict[str, str] | None = None  # field of the format: column of the file
    # format ranked, pairs of a row's answers. best_worst: the one of the highest score against the one of the lowest;
    # all: every two whose scores differ
    pairs: Literal["best_worst", "all"] = "best_worst"
    # Without `data.mixture`: rows per epoch as a multiple of the source's size (2: twice; 0.5: a half, and in the next
    # epoch the other half). With it, or with `data.streaming`: sampling weight, relative to the other sources.
    weight: Positive = 1.0
    # Max passes over this source in the run, spread evenly over its epochs; other sources fill its share. 1: no row is
    # trained on twice.
    max_epochs: Positive | None = None
    limit: Count | None = None  # use only the first rows of the source
    # Row of a text: a line that is not blank, lines up to a blank one, or the whole file. null: line, of md files: file
    text_unit: Literal["line", "paragraph", "file"] | None = None

    @field_serializer("path")
    def _shown_path(self, path: str) -> str:
        """Removes passwords and signatures from recipes that are saved or sent to a tracker."""
        return without_credentials(path)


Sources = Annotated[tuple[Source, ...], BeforeValidator(_list_to_tuple), Field(strict=False)]


class Mixture(Section):
    """Sampling proportions of an epoch: a source of n rows (or tokens) gets one proportional to weight * n^(1/T)."""

    by: Literal["rows", "tokens"] = "tokens"  # unit of n
    # T. 1: proportional to size; above 1: small sources get more; null: proportional to `weight` alone
    # (Conneau et al. 2020, https://arxiv.org/abs/1911.02116, section 3.1).
    temperature: Annotated[Float, Field(ge=1)] | None = None


class HeldOut(Section):
    """Rows of `data.train` that are evaluated on and never trained on: chosen by row and `run.seed`, of each source."""

    share: Annotated[Float, Field(gt=0, lt=1)]  # of the rows


class Images(Section):
    """Images in the rows: their size for the model, and the folder of their files."""

    # Pixels of an image after it is scaled down, at most: each costs memory, and tokens of `max_length`. null: as in
    # the model's own processor. If that scales images to a square or cuts them into tiles, all tiles together.
    max_pixels: Count | None = None
    min_pixels: Count | None = None  # Qwen's models: smaller images are scaled up; null: as the processor has it
    # Hub id or local folder with the processor and its settings, which the result gets; null: that of `model.name`.
    processor: str | None = None
    folder: str | None = None  # paths in rows start here; null: at the folder of the data file that has the row
    outside: bool = False  # paths may lead out of that folder
    allow_urls: bool = False  # http:// and https:// addresses in rows are fetched, once, into the cache
    # Part of an image that is read when rows are tokenized. header: its size, and whether its file ends as it should;
    # pixels: the whole image, so that any broken image is a bad row, never an error during the run
    verify: Literal["header", "pixels"] = "header"
    threads: Count = 4  # of each process, which decode and scale images ahead of the steps


class Data(Section):
    """Training and evaluation data, and how it becomes packed sequences."""

    train: Annotated[Sources, Field(min_length=1)]  # a path is short for `[{path: ...}]`; so are paths in the list
    # Sources, as for `train`, or `{share: 0.05}` of the rows of `train`, for which `0.05` is short
    eval: HeldOut | Sources = ()
    max_length: Annotated[int, Field(ge=2, le=10**9)]  # tokens of a packed sequence; also the longest example
    overlong: Literal["drop", "truncate", "split", "error"] = "drop"  # examples over max_length; always counted
    packing: bool = True  # fill sequences with complete documents (best fit); false: one document per sequence
    on_bad_row: Literal["error", "skip"] = "error"
    max_bad_share: Share = 0.01  # with on_bad_row: skip, a larger share of bad rows is an error
    mixture: Mixture | None = None  # null: an epoch is every source, repeated by its `weight`
    # Packed sequences of similar attention work (sum of squared document lengths) are grouped by this number in the
    # order, so that as many processes (with rows_per_device: 2, half as many) finish together; 1: no grouping.
    balance: Count = 8
    streaming: bool = False  # read `train` during the run instead of before; needs `train.max_steps`
    window: Count = 10_000  # with streaming: source rows that are shuffled and packed together
    # Rows have images, and the model is trained with its tower, `image: {}` with all defaults; see
    # docs/reference/images.md. null: rows with images are refused.
    image: Images | None = None

    @property
    def eval_sources(self) -> tuple[Source, ...]:
        """Returns the sources that evaluation reads; those of `train` if a share of their rows is held out."""
        return self.train if isinstance(self.eval, HeldOut) else self.eval

    @property
    def own_eval_sources(self) -> tuple[Source, ...]:
        """Returns the sources that only evaluation reads."""
        return () if isinstance(self.eval, HeldOut) else self.eval


# Keys of `objective` that only some objectives read, with their defaults; all other keys are for every objective.
OBJECTIVE_KEYS: dict[str, dict[str, Any]] = {
    "sft": {"z_loss": 0.0, "label_smoothing": 0.0},
    "focal": {"gamma": 2.0},
    "dpo": {
        "loss": "sigmoid",
        "beta": 0.1,
        "label_smoothing": 0.0,
        "margin": 0.5,
        "sft_weight": 0.0,
        "reference": "precomputed",
        "reference_model": None,
        "share_prompts": "auto",
        "dropout": False,
    },
    "kto": {
        "beta": 0.1,
        "desirable_weight": 1.0,
        "undesirable_weight": 1.0,
        "reference": "precomputed",
        "reference_model": None,
        "dropout": False,
    },
    "orpo": {"beta": 0.1, "share_prompts": "auto", "dropout": False},
    "reward": {"centering": 0.0, "share_prompts": "auto", "dropout": False},
    "classify": {"labels": None, "dropout": False},
    "distill": {
        "teacher": None,
        "divergence": "forward_kl",
        "temperature": 1.0,
        "jsd_beta": 0.5,
        "nll_weight": 0.0,
        "top_k": 64,
        "samples": None,
        "share_prompts": "auto",  # with rollouts
    },
    "grpo": {
        "loss": "dr_grpo",
        "scale_rewards": None,
        "overlong": "keep",
        "clip": None,
        "kl": 0.0,
        "correction": "none",
        "correction_bounds": None,
        "share_prompts": "auto",
        "dropout": False,
    },
}


class RowKind(NamedTuple):
    """The rows that an objective takes."""

    formats: tuple[str, ...]
    sequences: tuple[str, ...] = ()  # names of an example's sequences, if it has two
    # Numbers of each example. label: 1 or 0, or the index of the class; margin: 0 if the row has none.
    columns: tuple[str, ...] = ()


_ANSWERS = RowKind(get_args(Answers))
_PROMPTS = RowKind(("messages", "sharegpt", "alpaca", "prompt_completion", "prompt"))
_PAIRS = RowKind(("preference", "comparison", "ranked"), ("chosen", "rejected"))
ROW_KINDS: dict[str, RowKind] = {
    "sft": _ANSWERS,
    "focal": _ANSWERS,
    "distill": _ANSWERS,
    "dpo": _PAIRS,
    "orpo": _PAIRS,
    "reward": _PAIRS._replace(columns=("margin",)),
    # A pair gives a good and a bad answer.
    "kto": RowKind(("unpaired", "preference", "comparison"), ("answer", "another row's answer"), ("label",)),
    "classify": RowKind(("classification",), columns=("label",)),
    "grpo": _PROMPTS,
}
# Objectives whose model has a head of scores in place of an LM head, with its description for the model card.
SCORE_MODELS = {
    "reward": "A reward model: the score of a prompt with its answer; higher is better. Scores compare answers to "
    "the same prompt.",
    "classify": "A classifier of texts.",
}
# Of the keys of `dpo`, those that only some losses read.
LOSS_KEYS: dict[str, tuple[str, ...]] = {
    "label_smoothing": ("sigmoid", "robust"),
    "margin": ("simpo",),
    **dict.fromkeys(
        ("reference", "reference_model"),
        ("sigmoid", "robust", "hinge", "ipo", "sigmoid_norm", "apo_zero", "apo_down"),
    ),
}
PreferenceLoss = Literal["sigmoid", "robust", "hinge", "ipo", "sigmoid_norm", "apo_zero", "apo_down", "simpo"]
PolicyLoss = Literal["grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp", "cispo", "gspo"]
LOSSES_OF: dict[str, tuple[str, ...]] = {"dpo": get_args(PreferenceLoss), "grpo": get_args(PolicyLoss)}


class ObjectiveSettings(Section):
    """The training loss. All terms below are part of `loss`; z-loss and label smoothing are not part of `eval_loss`."""

    # sft: every target token alike; focal: tokens that the model predicts well already count less; dpo: the better of
    # two answers is to gain probability on the worse one, compared with a reference model; orpo: likewise without a
    # reference, together with sft on the better one; kto: single answers, each marked as good or bad; reward: a score
    # for an answer, from pairs; classify: a label for a text; distill: the distribution of a teacher; grpo: the model's
    # own answers to the rows' prompts, weighted by their rewards (needs `rollouts` and `rewards`)
    name: Literal["sft", "focal", "dpo", "kto", "orpo", "reward", "classify", "distill", "grpo"] = "sft"
    # focal: a factor of (1 - probability)^gamma (Lin et al. 2017, https://arxiv.org/abs/1708.02002); null: 2
    gamma: NonNegative | None = None
    # Supervised tokens. assistant: every assistant turn with its end-of-turn; last_assistant: the last one; all: all.
    # Pairs, marked answers and labels support `assistant` only.
    train_on: Literal["assistant", "last_assistant", "all"] = "assistant"
    # sft: added to each token's loss, z_loss * log(sum(exp(logits)))^2 (Chowdhery et al. 2022,
    # https://arxiv.org/abs/2204.02311, section 5).
    z_loss: NonNegative = 0.0
    # sft: probability mass moved from the target evenly to the vocabulary (Szegedy et al. 2015,
    # https://arxiv.org/abs/1512.00567, section 7). dpo, loss sigmoid or robust: probability that a pair is the wrong
    # way round (cDPO: Mitchell 2023, https://ericmitchell.ai/cdpo.pdf; robust: https://arxiv.org/abs/2403.00409).
    label_smoothing: Annotated[Float, Field(ge=0, lt=1)] = 0.0
    # dpo, grpo: a row of the table in objectives/preference.py or objectives/policy.py, which has formula and paper;
    # null: sigmoid, dr_grpo
    loss: PreferenceLoss | PolicyLoss | None = None
    # dpo, kto: strength of the pull to the reference, in 1/nats (per token under ipo, sigmoid_norm, simpo); orpo:
    # weight of the odds ratio (lambda in the paper). null: 0.1
    beta: Positive | None = None
    # dpo, loss simpo: gamma, in the units of beta times log-probability per token (not gamma / beta); null: 0.5
    margin: NonNegative | None = None
    # dpo: weight of the mean negative log-likelihood of the chosen answers' tokens (RPO: Pang et al. 2024,
    # https://arxiv.org/abs/2404.19733, equation 2)
    sft_weight: NonNegative = 0.0
    # dpo, kto: origin of the reference's log-probabilities. precomputed: before the first step, cached next to
    # the tokens; adapters_off: in each step, by the base of the adapters (lora, qlora). null: precomputed
    reference: Literal["precomputed", "adapters_off"] | None = None
    # dpo, kto: another reference than the initial model, a hub id or a local folder with the same vocabulary;
    # `finetune reference` computes its log-probabilities before
    reference_model: str | None = None
    # dpo, orpo, reward: compute the beginning that the two sequences of a pair share once; grpo, and distill with
    # rollouts: the prompt of samples in a micro-batch. Equal to rounding. auto: if the attention supports it
    share_prompts: Literal["auto"] | bool = "auto"
    # kto: weights of the good and of the bad answers; null: 1
    desirable_weight: NonNegative | None = None
    undesirable_weight: NonNegative | None = None
    # reward: weight of the squared sum of a pair's scores, which centres them (https://arxiv.org/abs/2312.09244)
    centering: NonNegative = 0.0
    # classify (required): names of the labels, in the order of the model's outputs; rows have a name or its index
    labels: Names | None = None
    # distill: the teacher, a local folder or hub id of a model with the same vocabulary (`finetune reference` computes
    # its log-probabilities before; `train` refuses to start without them), or a .parquet file with ids and
    # log-probabilities of each token. With `rollouts` a model, which each process holds in full, beside the student
    teacher: str | None = None
    # distill: forward_kl: KL(teacher, student); reverse_kl: KL(student, teacher); jsd: the generalized one between the
    # two, with `jsd_beta` (https://arxiv.org/abs/2306.13649). null: forward_kl
    divergence: Literal["forward_kl", "reverse_kl", "jsd"] | None = None
    temperature: Positive | None = None  # distill: of both; the divergence is multiplied by its square. null: 1
    # distill: weight of KL(teacher, mixture), and share of the teacher in the mixture. null: 0.5
    jsd_beta: Annotated[Float, Field(gt=0, lt=1)] | None = None
    nll_weight: Annotated[Float, Field(ge=0, lt=1)] = 0.0  # distill: of -log p(target); the divergence has the rest
    # distill: ids kept of each of the teacher's distributions, the likeliest; all others are one more event. null: 64,
    # or as many as the file has
    top_k: Count | None = None
    # distill: in place of `top_k`, ids drawn from each of the teacher's distributions: an unbiased estimate of
    # forward_kl, 12 are enough in https://arxiv.org/abs/2503.16870
    samples: Count | None = None
    # grpo: divide advantages by the standard deviation of the rewards of their prompt, or of the step. null: as the
    # paper of the loss does
    scale_rewards: Literal["none", "group", "batch"] | None = None
    # grpo: samples that `rollouts.max_new_tokens` ended. keep: like all others; mask: their tokens have no gradient, of
    # no term (https://arxiv.org/abs/2503.14476, section 3.4), and count in the loss's divisor all the same
    overlong: Literal["keep", "mask"] | None = None
    # grpo, with `rollouts.reuse` or `rollouts.staleness`: [low, high]: ratios of new to old probabilities count between
    # 1 - low and 1 + high; [1, high] has no lower bound. null: as the paper of the loss, in objectives/policy.py
    clip: Bounds | None = None
    # grpo: coefficient of the KL divergence from the initial weights, estimated at each sampled token (k3:
    # http://joschu.net/blog/kl-approx.html) and weighted by the ratio. Above 0 the initial trained weights (few with
    # adapters) are kept in host memory, and the samples of each step pass through the model once more
    kl: NonNegative = 0.0
    # grpo: for a sampler that rounds otherwise than the trainer: weigh each sampled token's loss by the ratio of the
    # trainer's to the sampler's probability. tis: of each token, truncated; icepop: of each token, 0 outside the
    # bounds; sequence_mask: of the whole sample, 0 outside the bounds; see rollouts/correction.py. null: none, and to
    # be chosen under `engine: vllm`
    correction: Literal["none", "tis", "icepop", "sequence_mask"] | None = None
    correction_bounds: Bounds | None = None  # [low, high] of that ratio; null: see rollouts/correction.py
    # all but sft, focal and distill, which always apply it: apply the dropout of the model's config and of the adapters
    # in training. false: the config's is set to 0 and `lora.dropout` above 0 is an error, so that a pair's two answers
    # are compared under equal weights. A reference and `kto`'s z0 are computed without dropout either way
    dropout: bool = False
    # Mixture of experts: coefficient of the load-balancing loss (Fedus et al. 2021, https://arxiv.org/abs/2101.03961,
    # section 2.2), which is `num_experts_per_tok` under perfect balance. null: the model config's
    # `router_aux_loss_coef` if its `output_router_logits` is true, else 0.
    router_aux_loss_coef: NonNegative | None = None

    @property
    def reads_reference(self) -> bool:
        return "reference" in OBJECTIVE_KEYS[self.name] and self.value("loss") != "simpo"

    @property
    def drops_nothing(self) -> bool:
        """Whether the dropout of config and adapters is off."""
        return "dropout" in OBJECTIVE_KEYS[self.name] and not self.dropout

    @property
    def scores_sequences(self) -> bool:
        """Whether the model has a head of scores, in place of an LM head."""
        return self.name in SCORE_MODELS

    def value(self, key: str) -> Any:
        """Returns a key's value, or the objective's default if it is null."""
        given = getattr(self, key)
        return OBJECTIVE_KEYS[self.name].get(key) if given is None else given


def _variable(name: str) -> str:
    """Refuses what may be a key itself, without showing it."""
    if not re.fullmatch(r"[A-Z_][A-Z0-9_]*", name):
        raise ValueError(
            "expected the name of an environment variable in capitals, such as JUDGE_KEY; not the key itself"
        )
    return name


class EnvironmentSettings(Section):
    """Your environment, in whose turns an answer is sampled; see docs/reference/rollouts.md#environments."""

    file: str  # a Python file of your own, which is run: only code that you trust
    # The class in it, or a function that returns an environment: `reset` begins an episode, `step` answers a turn
    name: Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")] = "Environment"
    max_turns: Count = 8  # of the model in a sample
    seconds: Positive = 10.0  # limit for one call of `reset`, `step` or `reward`
    processes: Count = 2  # processes that share the episodes out
    # If a call fails: it raises, exceeds `seconds`, ends its process, or returns what cannot be used. stop: the run
    # stops with the row and the reason; end: the sample ends with the turn before, and is counted
    on_failure: Literal["stop", "end"] = "stop"


class Rollouts(Section):
    """Answers that the model samples during the run, and is trained on; see docs/reference/rollouts.md.

    Tokens depend on recipe and weights, not on processes or batches. A step's are in <run>/rollouts/ before the step.
    """

    prompts: Count  # of a step; a row of `data.train` gives one
    samples: Count  # of each prompt; `batch.rows` is prompts x samples
    # Of a sample, with an environment all turns and its messages; prompt and sample have at most `data.max_length`
    max_new_tokens: Count
    temperature: Positive = 1.0  # of the samples, and of their log-probabilities in the loss
    top_k: Count | None = None  # sample from the likeliest tokens only; null: from all
    top_p: Annotated[Float, Field(gt=0, le=1)] = 1.0  # sample from the likeliest tokens that have this probability
    cohort: Count = 64  # samples that are decoded together, on any number of processes: it bounds the cache
    reuse: Count = 1  # optimizer steps on the same samples, one after the other; each step has all of them
    # Batches of samples that lie between the weights that a batch is drawn from and those that it trains first: exactly
    # so many; the first ones are drawn from the initial weights. 0: from the weights that the step before has left
    staleness: Annotated[int, Field(ge=0, le=1000)] = 0
    # Answers turns of the model, as tools do, until the sample is over. null: a sample is one turn
    environment: EnvironmentSettings | None = None
    # Folder of recorded rollouts, such as runs/NAME/rollouts: they are trained on again, and nothing is sampled
    replay: str | None = None
    # own: the modules that train; vllm: a server (`vllm serve`), which gets the weights of each step through
    # <run>/sampler/, a folder that both see under the same path
    engine: Literal["own", "vllm"] = "own"
    url: str | None = None  # vllm, required: the server, as http://HOST:PORT; prompts are sent there
    requests: Count | None = None  # vllm: requests at once; no value depends on it. null: 64
    seconds: Positive | None = None  # vllm: limit for one request, a reload of weights included. null: 600
    # vllm: environment variable with the server's key; null: none is sent. The key itself never stands in a recipe
    key: Annotated[str, AfterValidator(_variable)] | None = None
    # vllm: mean difference, in nats per token, between the log-probabilities of server and trainer for a prompt above
    # which the run stops. null: 0.01 under `train.precision: fp32`, 0.3 with quantized weights or fp8, else 0.1
    max_mismatch: Positive | None = None

    def value(self, key: str) -> Any:
        """Returns a key's value, or the engine's default if it is null."""
        given = getattr(self, key)
        return ENGINE_KEYS[self.engine].get(key) if given is None else given


# Keys that only some engines read, with their defaults. None of those of `vllm` changes what is sampled.
ENGINE_KEYS: dict[str, dict[str, Any]] = {
    "own": {},
    "vllm": {"url": None, "requests": 64, "seconds": 600.0, "key": None, "max_mismatch": None},
}
# Objectives that train on `rollouts`, which take `rewards`.
TAKES_REWARDS: frozenset[str] = frozenset({"grpo"})
# Keys of a reward that only some kinds read, with their defaults; the other keys are for every reward.
REWARD_KEYS: dict[str, dict[str, Any]] = {
    "exact_match": {"pattern": None},
    "number": {},
    "boxed": {},
    "regex": {"pattern": None},
    "json_schema": {"answer_schema": None},
    "length": {"target": None, "margin": None},
    "tests": {"column": "tests", "partial": False, "memory_mb": 1024, "isolation": "required"},
    "environment": {},
    "file": {"function": None},
    "reward_model": {},
    "judge": {"model": None, "prompt": None, "pattern": None, "scale": (0.0, 10.0), "key": None, "max_new_tokens": 256},
}


Scale = Annotated[tuple[Float, Float], BeforeValidator(_list_to_tuple), Field(strict=False)]


class RewardSettings(Section):
    """One reward of the list. A completion gets the sum of `weight` times value; see docs/reference/rewards.md.

    Give one of `name`, `file`, `reward_model` and `judge`.
    """

    # A built-in. exact_match: equal to the reference; number: the last numbers are equal; boxed: the last boxed
    # expressions are mathematically equal; regex: `pattern` is found; json_schema: JSON that fits `answer_schema`;
    # length: tokens beyond `target` cost; tests: the code passes the row's tests; environment: what `reward` of
    # `rollouts.environment` returns
    name: Literal["exact_match", "number", "boxed", "regex", "json_schema", "length", "tests", "environment"] | None = (
        None
    )
    file: str | None = None  # a Python file of your own, which is run: only code that you trust
    function: str | None = None  # with `file`, required: the function in it
    reward_model: str | None = None  # run directory or model folder of `objective.name: reward`
    judge: str | None = None  # URL of an OpenAI-compatible server, up to /v1: prompts and completions are sent there
    metric: Annotated[str, Field(pattern=RUN_NAME)] | None = None  # name in metrics and records; null: that of its kind
    weight: Float = 1.0  # factor of the value; negative for a penalty
    # Value of a completion for which the reward fails: it raises, exceeds `seconds`, ends its process, returns no
    # finite number. null: the run stops with the row and the reason
    on_failure: Float | None = None
    seconds: Positive = 10.0  # limit for one completion, of `tests` for its program; not for `reward_model`
    processes: Count = 2  # processes that compute this reward, or requests to the judge at once; no value depends on it
    # A regular expression. In `regex` it is to be found; in `exact_match` and `judge` its first group, where it occurs
    # last, is the answer
    pattern: str | None = None
    answer_schema: dict[str, Any] | str | None = None  # of `json_schema`, required: a JSON Schema, or the path of one
    target: Count | None = None  # of `length`, required: tokens that cost nothing
    margin: Count | None = None  # of `length`: tokens beyond `target` that cost 1, the most; null: as many as `target`
    column: str | None = None  # of `tests`: column with Python code, or a list of it; null: tests
    partial: bool = False  # of `tests`: the share of tests that pass, rather than 1 for all and 0 otherwise
    # Address space of a program of `tests`, in MiB; null: 1024
    memory_mb: Annotated[int, Field(ge=64, le=10**9)] | None = None
    # Of `tests`. required: a system without namespaces for programs is refused; none: programs run there all the same,
    # and can read the environment of the run and reach the network; null: required
    isolation: Literal["required", "none"] | None = None
    model: str | None = None  # of `judge`, required: the model's name on the server
    # Text of the request to a judge, with {prompt}, {completion} and {reference}; null: asks for a number from 0 to 10
    prompt: str | None = None
    scale: Scale | None = None  # of `judge`: lowest and highest number of a reply, which become 0 and 1; null: 0, 10
    # Environment variable with the judge's key; null: none is sent. The key itself never stands in a recipe
    key: Annotated[str, AfterValidator(_variable)] | None = None
    max_new_tokens: Count | None = None  # of a judge's reply; null: 256

    @field_serializer("judge")
    def _shown_judge(self, judge: str | None) -> str | None:
        """Removes passwords from recipes that are saved or sent to a tracker."""
        return judge and without_credentials(judge)

    @property
    def kind(self) -> str:
        """Returns the key of `REWARD_KEYS`. For a valid reward: rules refuse none and several."""
        return self.name or next(kind for kind in ("file", "reward_model", "judge") if getattr(self, kind) is not None)

    @property
    def label(self) -> str:
        """Returns the name in metrics and records."""
        return self.metric or self.function or self.kind

    def value(self, key: str) -> Any:
        """Returns a key's value, or the kind's default if it is null."""
        given = getattr(self, key)
        return REWARD_KEYS[self.kind].get(key) if given is None else given


RewardList = Annotated[tuple[RewardSettings, ...], BeforeValidator(_list_to_tuple), Field(strict=False)]


class BatchSettings(Section):
    rows: Count  # global batch size: packed sequences (or examples) per optimizer step, over all processes
    # Micro-batch size; gradient accumulation follows from `rows` and the world size. auto: the largest that fits into
    # memory, measured before the first step.
    rows_per_device: Count | Literal["auto"] = 1
    # With `data.packing: false`, instead of rows_per_device: a step's examples are sorted by length and divided into
    # micro-batches of at most this many tokens.
    tokens_per_device: Count | None = None


class Optimizer(Section):
    name: Literal["adamw", "adamw_8bit", "paged_adamw", "paged_adamw_8bit", "muon", "sgd"] = "adamw"
    lr: Positive
    weight_decay: NonNegative = 0.0  # decoupled (AdamW, Muon); not on biases, norms and other vectors
    betas: Betas = (0.9, 0.95)  # adamw variants; muon: for embeddings, positions, head and vectors
    eps: Positive = 1e-8
    momentum: Share = 0.95  # muon and sgd only
    max_grad_norm: Positive | None = 1.0  # L2 over all trained parameters; null: no clipping
    # Step each parameter as soon as its gradient is computed and free the gradient. Needs one micro-batch per step and
    # process, and no clipping.
    in_backward: bool = False


class Schedule(Section):
    """Learning rate over steps, as a multiple of `optimizer.lr`."""

    name: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    # Linear: step i, from 1, has i / (warmup_steps + 1) of the rate, and the first step after the warm-up all of it
    warmup_steps: Annotated[int, Field(ge=0, le=10**9)] = 0
    warmup_ratio: Share | None = None  # instead: share of the run's steps
    min_lr_ratio: Share = 0.0  # at the end of the decay
    decay_ratio: Share = 0.1  # wsd: share of the steps that decay (Hu et al. 2024, https://arxiv.org/abs/2404.06395)

    def warmup(self, steps: int) -> int:
        """Returns the steps of warm-up in a run of `steps`."""
        return self.warmup_steps if self.warmup_ratio is None else round(self.warmup_ratio * steps)


# Metrics of an evaluation, and the better direction; `*` stands for the name of a source.
METRICS: dict[str, Literal["lower", "higher"]] = {
    "eval_loss": "lower",
    "eval_loss/*": "lower",
    "exact_match": "higher",
    "eval_rewards/accuracy": "higher",
    "eval_rewards/margin": "higher",
    "eval_rewards/chosen": "higher",
    "eval_rewards/rejected": "lower",
    "eval_log_probs/chosen": "higher",
    "eval_log_probs/rejected": "lower",
    "eval_reward": "higher",
    "eval_reward/*": "higher",
    "eval_pass@*": "higher",
    "eval_kl": "lower",
    "eval_nll": "lower",
    "eval_odds_ratio": "lower",
    "eval_accuracy": "higher",
}


def metric_direction(name: str) -> Literal["lower", "higher"]:
    """Returns the better direction of a metric. Raises ValueError for an unknown metric."""
    for pattern, direction in METRICS.items():
        if fnmatchcase(name, pattern):
            return direction
    nearest = difflib.get_close_matches(name, METRICS, n=1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    raise ValueError(f"no evaluation measures {name!r}: use one of {', '.join(METRICS)}{hint}")


# By how much a value has to be better, times the larger of it and 1: sums in another order differ by less.
LEAST_DIFFERENCE = 2.0**-16


def is_better(name: str, value: float, best: float) -> bool:
    """Returns whether a metric is better than the best value before, by more than rounding."""
    ahead = best - value if metric_direction(name) == "lower" else value - best
    return ahead > LEAST_DIFFERENCE * max(1.0, abs(value), abs(best))


def _metric(name: str) -> str:
    """Returns the name of a metric of an evaluation; `reward` is short for `eval_reward`."""
    name = "eval_reward" if name == "reward" else name
    return name if metric_direction(name) else ""


Metric = Annotated[str, AfterValidator(_metric)]  # of an evaluation


class StopWhen(Section):
    """Early stopping: the run ends when evaluations no longer improve, with the weights of that step.

    Better, here and for `checkpoint.best`, means by more than 1.5e-5 (of larger values: times the value).
    """

    metric: Metric = "eval_loss"
    patience: Count = 3  # evaluations in a row without a new best value


class Train(Section):
    epochs: Annotated[Positive, Field(le=10**6)] | None = None  # passes over the data; a fraction is allowed
    max_steps: Count | None = None  # optimizer steps; if both are given, whichever ends first
    stop_when: StopWhen | None = None  # end earlier, by a metric of the evaluations
    # Weights of the result, `model/`. last: those of the last step; best: of the best checkpoint by `checkpoint.best`.
    result: Literal["last", "best"] = "last"
    # Compute type. fp32, bf16 and fp16 store, reduce and step trained weights in fp32; bf16_true does all in bf16, to
    # save memory. fp8 is bf16 with products of the decoder layers in 8 bits: `mode: full`, Hopper and later.
    precision: Literal["fp32", "bf16", "fp16", "bf16_true", "fp8"] = "bf16"
    # Recompute activations in the backward. true: all but each layer's input, for about 1/3 more compute;
    # selective: all but the results of matrix products and attention.
    activation_checkpointing: Literal["selective"] | bool = False
    activation_offload: bool = False  # keep activations for the backward in host memory
    compile: bool = False  # torch.compile of each decoder layer

    @model_validator(mode="after")
    def _has_an_end(self) -> Train:
        if self.epochs is None and self.max_steps is None:
            raise ValueError("give `epochs` or `max_steps`: the run needs an end")
        return self


class Evaluate(Section):
    """Held-out loss and generations at the start, at intervals and at the end. Needs `data.eval`."""

    every_steps: Count | None = None  # null: only at the start and the end
    at_start: bool = True  # before the first step as well
    generate: Annotated[int, Field(ge=0)] = 0  # examples whose generated answer is printed and logged
    exact_match: Annotated[int, Field(ge=0)] = 0  # examples whose greedy answer is compared with the reference
    answer: str | None = None  # regular expression whose first group is the answer, in output and reference
    max_new_tokens: Count = 128
    # With `rewards`: held-out prompts, the first ones, that are answered as `rollouts` says and rewarded. null: all
    prompts: Annotated[int, Field(ge=0)] | None = None
    samples: Count = 1  # with `rewards`: answers to each of these prompts


Acceptable = Literal[
    "run.seed",
    "model",
    "quantization",
    "tokens",
    "data.train",
    "data.max_length",
    "data.overlong",
    "data.packing",
    "data.mixture",
    "data.balance",
    "data.streaming",
    "data.window",
    "objective",
    "rollouts",
    "rewards",
    # Contents of the recipe's paths, rather than a key of it: rows, tokenizer, model config, weights.
    "data",
    "tokenizer",
    "config",
    "base",
]


class Checkpoint(Section):
    """When checkpoints are saved and how many are kept. A stop by a signal always saves."""

    every_steps: Count | None = None  # and after the last step; null: not by steps
    every_minutes: Positive | None = None  # after the step in which this much time has passed since the last save
    keep: Count = 2  # number of newest checkpoints
    # Also keep the best checkpoint by this metric of the evaluations: eval_loss, eval_loss/<source> (lowest),
    # exact_match or reward (highest). Saves at every improvement.
    best: Metric | None = None
    asynchronous: bool = True  # write files while training continues; needs a copy of the state in CPU memory
    on_failure: Literal["stop", "continue"] = "stop"  # if a save fails (a full disk): stop the run, or only warn
    # auto: from the newest valid checkpoint in the run directory; never: start over; or a checkpoint by name, such as
    # step-00000200 (each launch then begins there). Other checkpoints are renamed to aside-*, never deleted.
    resume: Literal["auto", "never"] | Annotated[str, Field(pattern=CHECKPOINT_NAME)] = "auto"
    # Keys that may differ from the checkpoint's although weights or the order of samples depend on them; and of what
    # the run reads under the same paths: data (rows), tokenizer (with its chat template), config, base (weights).
    accept_changes: Annotated[tuple[Acceptable, ...], BeforeValidator(_list_to_tuple), Field(strict=False)] = ()


class Profile(Section):
    """A trace of a few steps, a memory snapshot and a table of time by operation, in <run>/profile/."""

    # First and last step to trace (1-based); choose steps after compilation and warm-up.
    steps: Annotated[tuple[Count, Count], BeforeValidator(_list_to_tuple), Field(strict=False)]
    memory: bool = True  # also a snapshot of the device's allocator, on GPUs

    @model_validator(mode="after")
    def _in_order(self) -> Profile:
        if self.steps[0] > self.steps[1]:
            raise ValueError(f"`steps` are the first and the last one: {self.steps[0]} is after {self.steps[1]}")
        return self


class Wandb(Section):
    project: Annotated[str, Field(min_length=1)] = "finetune"
    entity: str | None = None
    group: str | None = None
    tags: Names | None = None
    mode: Literal["online", "offline", "disabled"] = "online"
    log_model: Literal["none", "result", "best"] = "none"  # artifacts at the end: model/; best: its checkpoint as well


class Tracking(Section):
    """Trackers in addition to metrics.jsonl, which is always written."""

    wandb: Wandb | None = None  # `true` is short for `{}`, a name for `{project: name}`
    tensorboard: bool = False
    trackio: str | None = None  # project name
    samples: bool = False  # write samples/rank-*.jsonl: the rows of each step and process


Mode = Literal["full", "lora", "qlora"]
MODES: tuple[str, ...] = get_args(Mode)


class Recipe(Section):
    """One reproducible run."""

    run: Run
    model: Model
    mode: Mode
    lora: Lora | None = None
    quantization: Quantization | None = None
    tokens: Tokens | None = None
    data: Data
    objective: ObjectiveSettings = ObjectiveSettings()
    rollouts: Rollouts | None = None
    rewards: RewardList = ()
    batch: BatchSettings
    optimizer: Optimizer
    schedule: Schedule = Schedule()
    train: Train
    evaluate: Evaluate = Evaluate()
    checkpoint: Checkpoint = Checkpoint()
    tracking: Tracking = Tracking()
    profile: Profile | None = None

    @model_validator(mode="after")
    def _images_need_the_tower(self) -> Recipe:
        """With images the model includes its tower, and every copy of the recipe names the trained parts."""
        if self.data.image is not None and self.model.train is None:
            object.__setattr__(self, "model", self.model.model_copy(update={"train": ("language",)}))
        return self

    @property
    def samples_held_out(self) -> bool:
        """Whether evaluations sample answers to held-out prompts and reward them."""
        return bool(self.rollouts is not None and self.rewards and self.data.eval and self.evaluate.prompts != 0)

    @property
    def drops_nothing(self) -> bool:
        """Whether the dropout of config and adapters is off: samples are drawn without, and trained on alike."""
        return self.objective.drops_nothing or self.rollouts is not None

    @property
    def row_kind(self) -> RowKind:
        """Returns the rows that are taken: those of the objective, or prompts, with or without an answer."""
        return ROW_KINDS[self.objective.name] if self.rollouts is None else _PROMPTS


def recipe_json_schema() -> str:
    """Returns the content of recipes/recipe.schema.json, with which editors complete and check recipes."""
    schema = Recipe.model_json_schema(mode="validation")
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "finetune recipe"}
    schema["properties"] = {
        "extends": {
            "type": "string",
            "description": "another recipe, relative to this file; this file's keys take precedence",
        },
        **schema["properties"],
    }
    for (section, key), shorthand in SHORTHANDS.items():
        properties = schema["$defs"][section.title()]["properties"]
        described = properties[key]
        about = {name: described.pop(name) for name in ("title", "default") if name in described}
        properties[key] = {"anyOf": [*described.get("anyOf", [described]), *shorthand.schemas], **about}
    for section in (schema, *schema["$defs"].values()):
        section.pop("required", None)  # with `extends`, any required key may come from the base
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"
