"""The recipe: every choice that can move a loss, and nothing about where the run happens.

Each field says its unit and where it acts. The models are strict and frozen: an unknown key, a wrong type or an
impossible combination is an error at load (see `load.py`), never a silent default.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_serializer, model_validator

from finetune.recipe.urls import without_credentials


class Section(BaseModel):
    """Base of every section: unknown keys are refused, values are never coerced across kinds, nothing changes later."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def _int_to_float(value: Any) -> Any:
    """`lr: 1` is a number as good as `1.0`; a bool is not."""
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _list_to_tuple(value: Any) -> Any:
    """YAML has lists only; a frozen recipe holds tuples."""
    return tuple(value) if isinstance(value, list) else value


# What rendering gives a template by itself.
_GIVEN = ("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "pad_token", "unk_token")


def _template_arguments(value: dict[str, Any]) -> dict[str, Any]:
    """Names that Jinja can set, and values that JSON has."""
    for name, item in value.items():
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise ValueError(f"`{name}` is no name of a variable")
        if name in _GIVEN:
            raise ValueError(f"`{name}` is given by whoever renders the template")
        try:
            json.dumps(item, allow_nan=False)
        except (TypeError, ValueError):
            raise ValueError(f"`{name}`: JSON has no such value; give it as text") from None
    return value


Float = Annotated[float, BeforeValidator(_int_to_float), Field(allow_inf_nan=False)]
Positive = Annotated[Float, Field(gt=0)]
NonNegative = Annotated[Float, Field(ge=0)]
Share = Annotated[Float, Field(ge=0, le=1)]  # of one
Betas = Annotated[tuple[Share, Share], BeforeValidator(_list_to_tuple), Field(strict=False)]
Names = Annotated[tuple[str, ...], BeforeValidator(_list_to_tuple), Field(strict=False, min_length=1)]
Count = Annotated[int, Field(ge=1)]

TemplateArguments = Annotated[dict[str, Any], Field(min_length=1), AfterValidator(_template_arguments)]

RUN_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"


class Run(Section):
    """Where the results go, and the seed of everything random."""

    name: Annotated[str, Field(min_length=1, pattern=RUN_NAME)]  # run directory: <dir>/<name>
    dir: str = "runs"
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 42  # initial weights, adapters, order of samples, dropout


class Model(Section):
    """The model that training starts from: `name` (pretrained) or `config` (from scratch)."""

    name: str | None = None  # hub id or local folder, with weights and tokenizer
    config: dict[str, Any] | None = None  # a Hugging Face model config with `model_type`: random weights, seeded
    tokenizer: str | None = None  # hub id or local folder; null: where `name` is
    revision: str | None = None  # branch, tag or commit of `name` on the hub
    # Of the weights that stay frozen and of the saved result; what is trained follows `train.precision`.
    # auto: the type that train.precision computes in.
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    # How documents of one packed row are kept apart. auto picks the fastest that can, and says which and why.
    attention: Literal["auto", "documents", "varlen", "flex", "sdpa", "eager", "flash_attention_2"] = "auto"
    # How the head's logits become losses; the same to rounding. plain: all at once; chunked: some tokens at a time, the
    # gradient too; torch: F.linear_cross_entropy (torch >= 2.13, fp32); liger: its kernels (CUDA). auto: chunked, where
    # the architecture lets it; which and why is said.
    cross_entropy: Literal["auto", "plain", "chunked", "torch", "liger"] = "auto"
    chat_template: str | None = None  # null: the tokenizer's own; else a built-in name or a Jinja file
    # Values of the template's variables, such as `enable_thinking: false`; the result's template begins with them.
    chat_template_arguments: TemplateArguments | None = None
    trust_remote_code: bool = False  # runs Python from the model's repository: only for one you have read

    @model_validator(mode="after")
    def _one_start(self) -> Model:
        if (self.name is None) == (self.config is None):
            raise ValueError(
                "give either `name` (pretrained weights) or `config` (from scratch), "
                + ("one of them is needed" if self.name is None else "not both")
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
    targets: Literal["all-linear"] | Names = "all-linear"  # module names; all-linear: every one but the LM head
    rslora: bool = False  # Kalajdzievski 2023, https://arxiv.org/abs/2312.03732
    dora: bool = False  # Liu et al. 2024, https://arxiv.org/abs/2402.09353
    modules_to_save: Names | None = None  # modules trained in full beside the adapters, such as lm_head


class Quantization(Section):
    """Storage of the frozen weights under qlora (Dettmers et al. 2023, https://arxiv.org/abs/2305.14314)."""

    type: Literal["nf4", "fp4"] = "nf4"
    double_quant: bool = True  # the block scales are quantised too: 0.37 bit a weight less


Format = Literal["auto", "messages", "sharegpt", "alpaca", "prompt_completion", "text", "tokens", "preference"]


class Source(Section):
    """One dataset: a file, a glob, a folder of files, a URL (s3://, gs://, https://, ...), or a hub id.

    Files: json, jsonl, csv, parquet, arrow, txt; compressed ones (.gz, .bz2, .xz, .zst) as well.
    """

    path: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(pattern=RUN_NAME)] | None = None  # in metrics and tables; null: made from `path`
    config: str | None = None  # the hub dataset's configuration
    split: str = "train"  # slices such as train[:1000] and train[10%:20%] work, of files as well; files are one split
    format: Format = "auto"  # auto: what the first rows fit, said aloud
    columns: dict[str, str] | None = None  # what the format calls a field: what the file calls it
    # Without `data.mixture` rows an epoch takes, as a multiple of what the source has (0.5: a fixed half, 2: twice);
    # with it, or with `data.streaming`, the source's share beside the weights of the others.
    weight: Positive = 1.0
    max_epochs: Positive | None = None  # most passes over this source in the whole run; what it may not give others do
    limit: Count | None = None  # rows read from the start of the source

    @field_serializer("path")
    def _shown_path(self, path: str) -> str:
        """A recipe that is written down, or goes to a tracker, holds no password and no signature."""
        return without_credentials(path)


Sources = Annotated[tuple[Source, ...], BeforeValidator(_list_to_tuple), Field(strict=False)]


class Mixture(Section):
    """Weights as shares of an epoch. A source of size n (its rows, or tokens) gets a share like weight * n^(1/T)."""

    by: Literal["rows", "tokens"] = "tokens"  # what shares are counted in
    # T. 1: in proportion to size; above: small sources get more; null: `weight` alone decides, whatever the size
    # (Conneau et al. 2020, https://arxiv.org/abs/1911.02116, section 3.1).
    temperature: Annotated[Float, Field(ge=1)] | None = None


class Data(Section):
    """What is trained and evaluated on, and how it becomes rows of tokens."""

    train: Annotated[Sources, Field(min_length=1)]
    eval: Sources = ()
    max_length: Annotated[int, Field(ge=2)]  # tokens in a packed row, and the longest example
    overlong: Literal["drop", "truncate", "split", "error"] = "drop"  # examples over max_length; always counted
    packing: bool = True  # rows are filled with whole documents (best fit); false: one document a row
    on_bad_row: Literal["error", "skip"] = "error"
    max_bad_share: Share = 0.01  # with on_bad_row: skip, more than this share of bad rows is an error all the same
    mixture: Mixture | None = None  # null: an epoch is every source, each as often as its `weight` says
    # Rows of like attention work (the sum of squared document lengths) that follow each other in the order, so that as
    # many processes work equally long (with rows_per_device: 2 half as many); 1: an order without regard to work.
    balance: Count = 8
    streaming: bool = False  # `train` is read as it is needed, not beforehand; needs `train.max_steps`
    window: Count = 10_000  # with streaming: source rows that are shuffled and packed together


class Objective(Section):
    """What `loss` is: all terms below are part of it, and not of `eval_loss`."""

    name: Literal["sft"] = "sft"
    # assistant: every answer and its end-of-turn; last_assistant: the last answer of a conversation; all: every token
    train_on: Literal["assistant", "last_assistant", "all"] = "assistant"
    # Added to each token's loss: z_loss * log(sum(exp(logits)))^2 (Chowdhery et al. 2022,
    # https://arxiv.org/abs/2204.02311, section 5).
    z_loss: NonNegative = 0.0
    # Share of the target's probability spread evenly over the vocabulary (Szegedy et al. 2015,
    # https://arxiv.org/abs/1512.00567, section 7).
    label_smoothing: Annotated[Float, Field(ge=0, lt=1)] = 0.0
    # Mixtures of experts: times the loss that keeps experts equally busy (Fedus et al. 2021,
    # https://arxiv.org/abs/2101.03961, section 2.2), which is `num_experts_per_tok` where they are. null: what the
    # model's config says, its `router_aux_loss_coef` where `output_router_logits` is true, else 0.
    router_aux_loss_coef: NonNegative | None = None


class Batch(Section):
    rows: Count  # packed rows (or examples) per optimizer step, over all processes
    # Rows in one forward; accumulation follows from the two and the world size. auto: the most that fit into memory,
    # found by trial at the first run on a kind of hardware.
    rows_per_device: Count | Literal["auto"] = 1
    # With `data.packing: false`, instead of rows_per_device: a step's examples are sorted by length and cut into
    # forwards of at most so many tokens.
    tokens_per_device: Count | None = None


class Optimizer(Section):
    name: Literal["adamw", "adamw_8bit", "paged_adamw", "paged_adamw_8bit", "muon", "sgd"] = "adamw"
    lr: Positive
    weight_decay: NonNegative = 0.0  # decoupled (AdamW, Muon); not on biases, norms and other vectors
    betas: Betas = (0.9, 0.95)  # adamw and its kin; muon: for what is not a matrix
    eps: Positive = 1e-8
    momentum: Share = 0.95  # muon and sgd only
    max_grad_norm: Positive | None = 1.0  # L2 over all trained parameters; null: no clipping
    # Each parameter is stepped as soon as its gradient is there, and the gradient let go: never all gradients at once.
    # Needs one forward a step on each process, and no clipping.
    in_backward: bool = False


class Schedule(Section):
    """Learning rate over steps, as a multiple of `optimizer.lr`."""

    name: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    warmup_steps: Annotated[int, Field(ge=0)] = 0  # linear from 0
    min_lr_ratio: Share = 0.0  # where the decay ends
    decay_ratio: Share = 0.1  # wsd: share of all steps that decays (Hu et al. 2024, https://arxiv.org/abs/2404.06395)


class Train(Section):
    epochs: Positive | None = None  # passes over the data; a fraction is allowed
    max_steps: Count | None = None  # optimizer steps; where both are given, the earlier end holds
    # Computation; under fp32, bf16 and fp16 what is trained is held, reduced and stepped in fp32.
    # bf16_true: everything in bf16, for memory.
    precision: Literal["fp32", "bf16", "fp16", "bf16_true"] = "bf16"
    # Recompute activations in the backward: true: all but each layer's input, less memory for about 1/3 more compute;
    # selective: all but the results of matrix products and attention.
    activation_checkpointing: Literal["selective"] | bool = False
    activation_offload: bool = False  # what a forward keeps for the backward waits in the host's memory
    compile: bool = False  # torch.compile for each decoder layer

    @model_validator(mode="after")
    def _has_an_end(self) -> Train:
        if self.epochs is None and self.max_steps is None:
            raise ValueError("give `epochs` or `max_steps`: the run needs an end")
        return self


class Evaluate(Section):
    """Held-out loss, and what the model writes, at the start, at intervals and at the end. Needs `data.eval`."""

    every_steps: Count | None = None  # null: only at the start and the end
    at_start: bool = True  # before the first step as well
    generate: Annotated[int, Field(ge=0)] = 0  # examples whose continuation is printed and logged
    exact_match: Annotated[int, Field(ge=0)] = 0  # examples on which greedy output is compared with the answer; 0: none
    answer: str | None = None  # regular expression whose first group is the answer, in output and reference alike
    max_new_tokens: Count = 128


Acceptable = Literal[
    "run.seed",
    "model",
    "quantization",
    "data.train",
    "data.max_length",
    "data.overlong",
    "data.packing",
    "data.mixture",
    "data.balance",
    "data.streaming",
    "data.window",
    "objective",
]


class Checkpoint(Section):
    """When a run saves what it needs to go on. A stop by a signal saves as well, whatever is said here."""

    every_steps: Count | None = None  # and after the last step; null: not by steps
    every_minutes: Positive | None = None  # at the end of the step in which this much time has passed since the last
    keep: Count = 2  # the newest ones
    # The metric by whose value one more is kept; each evaluation that betters it is saved. Lowest eval_loss, highest
    # exact_match.
    best: Literal["eval_loss", "exact_match"] | None = None
    asynchronous: bool = True  # files are written while steps go on; takes one copy in CPU memory of what is written
    on_failure: Literal["stop", "continue"] = "stop"  # where a save fails (a full disk): end the run, or say so only
    resume: Literal["auto", "never"] = "auto"  # auto: go on from the newest one in the run directory that verifies
    # What may differ from the checkpoint's although the weights or the order of samples depend on it.
    accept_changes: Annotated[tuple[Acceptable, ...], BeforeValidator(_list_to_tuple), Field(strict=False)] = ()


class Profile(Section):
    """A trace of a few steps, a memory snapshot and a table of where time went, in <run>/profile/."""

    # First and last step that is traced (1-based); one that compiled or warmed up says little.
    steps: Annotated[tuple[Count, Count], BeforeValidator(_list_to_tuple), Field(strict=False)]
    memory: bool = True  # a snapshot of the device's allocator as well, where there is a device

    @model_validator(mode="after")
    def _in_order(self) -> Profile:
        if self.steps[0] > self.steps[1]:
            raise ValueError(f"`steps` are the first and the last one: {self.steps[0]} is behind {self.steps[1]}")
        return self


class Wandb(Section):
    project: str
    entity: str | None = None
    group: str | None = None
    tags: Names | None = None
    mode: Literal["online", "offline", "disabled"] = "online"


class Tracking(Section):
    """Besides metrics.jsonl, which is always written."""

    wandb: Wandb | None = None
    tensorboard: bool = False
    trackio: str | None = None  # project name
    samples: bool = False  # samples/rank-*.jsonl: the rows that each step of each process trained on


class Recipe(Section):
    """One reproducible run."""

    run: Run
    model: Model
    mode: Literal["full", "lora", "qlora"]
    lora: Lora | None = None
    quantization: Quantization | None = None
    data: Data
    objective: Objective = Objective()
    batch: Batch
    optimizer: Optimizer
    schedule: Schedule = Schedule()
    train: Train
    evaluate: Evaluate = Evaluate()
    checkpoint: Checkpoint = Checkpoint()
    tracking: Tracking = Tracking()
    profile: Profile | None = None
