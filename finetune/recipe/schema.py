"""The recipe's schema: every setting that can change a loss, and nothing about where the run happens.

Each field has its unit and effect as a comment. The models are strict and frozen: an unknown key, a wrong type or an
invalid combination is an error at load (see `load.py`), never a silent default.
"""

from __future__ import annotations

import difflib
import json
import re
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, field_serializer, field_validator, model_validator

from finetune.recipe.objective_settings import PROMPTS, ObjectiveSettings, RowKind, Sft, named_objective
from finetune.recipe.reward_settings import RewardSettings
from finetune.recipe.section import (
    RUN_NAME,
    Betas,
    Count,
    Float,
    Format,
    Names,
    NonNegative,
    Positive,
    Section,
    Share,
    Variable,
    list_to_tuple,
)
from finetune.recipe.shorthands import SHORTHANDS
from finetune.recipe.urls import without_credentials

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


def _distinct(names: tuple[str, ...]) -> tuple[str, ...]:
    if twice := [name for i, name in enumerate(names) if name in names[:i]]:
        raise ValueError(f"{twice[0]!r} is given twice")
    if any(not name.strip() for name in names):
        raise ValueError("a token needs a character that is not white space")
    return names


TemplateArguments = Annotated[dict[str, Any], Field(min_length=1), AfterValidator(check_template_arguments)]

CHECKPOINT_NAME = r"^(aside-)?step-\d{8}(-\d+)?$"
RUN_NAME_WITH_VALUES = r"^([A-Za-z0-9]|\{[A-Za-z0-9._]+\})([A-Za-z0-9._-]|\{[A-Za-z0-9._]+\})*$"


class HubPush(Section):
    """Repository of the Hugging Face Hub that gets the last checkpoint while training, and the result at the end."""

    repo: Annotated[
        str, Field(pattern=r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")
    ]  # its name, as org/name; created if absent
    private: bool = True  # false: public, also one that exists and is
    # The base's name on the hub, if model.name is a local folder: files that name the base are sent with it.
    base_model: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")] | None = None


class Run(Section):
    """Output folder and seed."""

    # Run directory: <dir>/<name>. It may hold values, for sweeps: `lr-{optimizer.lr}`.
    name: Annotated[str, Field(min_length=1, pattern=RUN_NAME_WITH_VALUES)]
    dir: str = "runs"
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 42  # of initial weights, adapters, order of samples, dropout
    push: HubPush | None = None  # to the hub, in the background; `org/name` is short for `{repo: org/name}`


def _parts(value: Any) -> Any:
    """Converts a list; `vision` is the name that `tower` had when all towers saw images."""
    parts = list_to_tuple(value)
    return tuple("tower" if part == "vision" else part for part in parts) if isinstance(parts, tuple) else parts


Part = Literal["language", "projector", "tower"]
Parts = Annotated[tuple[Part, ...], BeforeValidator(_parts), Field(strict=False, min_length=1)]


class Model(Section):
    """The initial model: `name` (pretrained) or `config` (from scratch)."""

    name: str | None = None  # hub id or local folder, with weights and tokenizer
    config: dict[str, Any] | None = None  # a Hugging Face model config with `model_type`: random weights, seeded
    tokenizer: str | None = None  # hub id or local folder; null: that of `name`
    revision: str | None = None  # branch, tag or commit of `name` on the hub
    # Type of frozen weights and of the saved result; trained weights follow `train.precision`.
    # auto: the compute type of train.precision.
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    # Weights of a base that is published in 8 or 4 bits: fp8 blocks, mxfp4, compressed-tensors' nvfp4 and w4a16, gptq,
    # awq. keep: they stay as they are stored, frozen under `mode: lora`, and are unpacked for each product; unpack:
    # they become plain weights in `dtype` as they are read
    stored: Literal["keep", "unpack"] = "keep"
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
    # Trained parts of a model that sees or hears: adapters in them, or all of their weights under `mode: full`.
    # projector: turns the tower's output into tokens; tower: the encoder of the files, also called vision. null:
    # language, and without `data.image`, `data.audio` and `data.video` the language model by itself.
    train: Parts | None = None
    # The head of a base that predicts a token further ahead, for speculative decoding (DeepSeek-V3, GLM-4 MoE,
    # Qwen3-Next, Qwen3.5). keep: copied as it is, and stale after training; train: trained together with the model, on
    # the same targets; drop: the result has neither its tensors nor their declaration in config.json
    mtp: Literal["keep", "train", "drop"] = "keep"
    # Under `mtp: train`: weight of the head's loss, its sum over the number of targets (DeepSeek-V3 2024,
    # https://arxiv.org/abs/2412.19437, equations 24 and 25). null: 0.1, which that model had last (section 4.2)
    mtp_weight: Positive | None = None
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


Sources = Annotated[tuple[Source, ...], BeforeValidator(list_to_tuple), Field(strict=False)]


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


class Audio(Section):
    """Sound in the rows: its bounds, and the folder of its files."""

    max_seconds: Positive = 1800.0  # of a clip; longer ones are bad rows, and are not decoded
    # Hub id or local folder with the processor and its settings, which the result gets; null: that of `model.name`.
    processor: str | None = None
    folder: str | None = None  # paths in rows start here; null: at the folder of the data file that has the row
    outside: bool = False  # paths may lead out of that folder
    allow_urls: bool = False  # http:// and https:// addresses in rows are fetched, once, into the cache
    # Part of a clip that is read when rows are tokenized. samples: all of it, so that a broken, silent or cut clip is a
    # bad row; header: its length, and whatever is broken ends the run that trains on it
    verify: Literal["header", "samples"] = "samples"
    threads: Count = 4  # of each process, which decode and resample clips ahead of the steps
    # Features of clips are computed once, before the run, and kept in the cache: 51 KB for a second of sound of most
    # models. false: in each epoch anew, by the threads.
    cache: bool = False


class Videos(Section):
    """Videos in the rows: the frames that are seen of them, and the folder of their files."""

    fps: Positive | None = None  # frames a second that are seen; null: as in the model's own processor, or 2
    # Frames that are seen of a video, at most, from its beginning to its end. null: as in the model's own processor
    max_frames: Annotated[int, Field(ge=2)] | None = None
    # Pixels after frames are scaled down, at most: each costs memory, and tokens of `max_length`. Qwen3-VL: of all
    # frames of a video together; Qwen2.5-VL: of a frame. null: as in the model's own processor
    max_pixels: Count | None = None
    max_seconds: Positive = 600.0  # of a video; longer ones are bad rows, and are not decoded
    # Frames a second of videos that are a folder or a list of pictures. null: `fps`, so that all of them are seen
    frame_rate: Positive | None = None
    # Hub id or local folder with the processor and its settings, which the result gets; null: that of `model.name`.
    processor: str | None = None
    folder: str | None = None  # paths in rows start here; null: at the folder of the data file that has the row
    outside: bool = False  # paths may lead out of that folder
    allow_urls: bool = False  # http:// and https:// addresses in rows are fetched, once, into the cache
    # Part of a video that is read when rows are tokenized. frames: all of them are decoded, so that a broken one is a
    # bad row; header: their number and the first one, and whatever is broken ends the run that trains on it
    verify: Literal["header", "frames"] = "frames"
    threads: Count = 4  # of each process, which decode and scale frames ahead of the steps
    # Frames are decoded and scaled once, by processes on all cores before the run, and kept in the cache: 3 bytes for a
    # pixel that is seen. false: in each epoch anew, by the threads.
    cache: bool = False


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
    # Rows have sound, and the model is trained with its tower, `audio: {}` with all defaults; see
    # docs/reference/audio.md. null: rows with sound are refused.
    audio: Audio | None = None
    # Rows have videos, and the model is trained with its tower, `video: {}` with all defaults; see
    # docs/reference/video.md. null: rows with videos are refused.
    video: Videos | None = None

    @property
    def media(self) -> tuple[Images | Audio | Videos, ...] | None:
        """Returns the settings of each kind of files that rows have; None without."""
        return tuple(rules for rules in (self.image, self.audio, self.video) if rules is not None) or None

    @property
    def media_kind(self) -> Literal["image", "audio", "video"] | None:
        """Returns the kind of files that rows have, the first of several; None without."""
        return next(iter(self.media_kinds), None)

    @property
    def media_kinds(self) -> tuple[Literal["image", "audio", "video"], ...]:
        """Returns the kinds of the files that rows have, in the order of `media`."""
        given: dict[Literal["image", "audio", "video"], object] = {
            "image": self.image,
            "audio": self.audio,
            "video": self.video,
        }
        return tuple(kind for kind, rules in given.items() if rules is not None)

    @property
    def eval_sources(self) -> tuple[Source, ...]:
        """Returns the sources that evaluation reads; those of `train` if a share of their rows is held out."""
        return self.train if isinstance(self.eval, HeldOut) else self.eval

    @property
    def own_eval_sources(self) -> tuple[Source, ...]:
        """Returns the sources that only evaluation reads."""
        return () if isinstance(self.eval, HeldOut) else self.eval


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
    key: Variable | None = None
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


RewardList = Annotated[tuple[RewardSettings, ...], BeforeValidator(list_to_tuple), Field(strict=False)]


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


# Metrics of an evaluation, and the better direction; `*` stands for the name of a source. Objectives, `Evaluator.run`
# and rollouts compute them; which of them a run has is known at its first evaluation.
METRICS: dict[str, Literal["lower", "higher"]] = {
    "eval_loss": "lower",
    "eval_loss/*": "lower",
    "exact_match": "higher",
    "word_error_rate": "lower",
    "normalized_word_error_rate": "lower",
    "character_error_rate": "lower",
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
    "eval_mtp_loss": "lower",
    "eval_mtp_acceptance": "higher",
}


def metric_direction(name: str) -> Literal["lower", "higher"]:
    """Returns the better direction of a metric. Raises ValueError for an unknown metric."""
    for pattern, direction in METRICS.items():
        if fnmatchcase(name, pattern):
            return direction
    nearest = difflib.get_close_matches(name, METRICS, n=1)
    hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
    raise ValueError(f"no evaluation measures {name!r}{hint}. Fix: use one of {', '.join(METRICS)}")


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
    # auto: CUDA graphs of the decoder layers where shapes can be constant, on one GPU and ddp: packed rows, nothing
    # recomputed; the plan says whether, or why not. Rows are padded to one length.
    graphs: Literal["auto", "off"] = "off"

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
    # Examples whose greedy answer is a transcript: its word and character error rates against the reference, by jiwer
    word_error_rate: Annotated[int, Field(ge=0)] = 0
    answer: str | None = None  # regular expression whose first group is the answer, in output and reference
    max_new_tokens: Count = 128
    # With `rewards`: held-out prompts, the first ones, that are answered as `rollouts` says and rewarded. null: all
    prompts: Annotated[int, Field(ge=0)] | None = None
    samples: Count = 1  # with `rewards`: answers to each of these prompts

    @property
    def answered(self) -> int:
        """Returns the number of examples that are answered."""
        return max(self.generate, self.exact_match, self.word_error_rate)


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
    # word_error_rate (lowest), exact_match or reward (highest). Saves at every improvement.
    best: Metric | None = None
    asynchronous: bool = True  # write files while training continues; needs a copy of the state in CPU memory
    on_failure: Literal["stop", "continue"] = "stop"  # if a save fails (a full disk): stop the run, or only warn
    # auto: from the newest valid checkpoint in the run directory; never: start over; or a checkpoint by name, such as
    # step-00000200 (each launch then begins there). Other checkpoints are renamed to aside-*, never deleted.
    resume: Literal["auto", "never"] | Annotated[str, Field(pattern=CHECKPOINT_NAME)] = "auto"
    # Keys that may differ from the checkpoint's although weights or the order of samples depend on them; and of what
    # the run reads under the same paths: data (rows), tokenizer (with its chat template), config, base (weights).
    accept_changes: Annotated[tuple[Acceptable, ...], BeforeValidator(list_to_tuple), Field(strict=False)] = ()


class Profile(Section):
    """A trace of a few steps, a memory snapshot and a table of time by operation, in <run>/profile/."""

    # First and last step to trace (1-based); choose steps after compilation and warm-up.
    steps: Annotated[tuple[Count, Count], BeforeValidator(list_to_tuple), Field(strict=False)]
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


def _uri(uri: str) -> str:
    """Refuses an address with credentials, without showing it."""
    if without_credentials(uri) != uri:
        raise ValueError(
            "must not hold a user, a password or a query: set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, "
            "or all of it in MLFLOW_TRACKING_URI"
        )
    return uri


class Mlflow(Section):
    experiment: Annotated[str, Field(min_length=1)] = "finetune"
    # Address of a server, or of a database such as sqlite:///mlflow.db. null: that of the variable MLFLOW_TRACKING_URI,
    # or mlflow's default, a database in the current folder
    uri: Annotated[str, AfterValidator(_uri)] | None = None


class Tracking(Section):
    """Trackers in addition to metrics.jsonl, which is always written."""

    wandb: Wandb | None = None  # `true` is short for `{}`, a name for `{project: name}`
    mlflow: Mlflow | None = None  # `true` is short for `{}`, a name for `{experiment: name}`
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
    objective: Annotated[ObjectiveSettings, Field(discriminator="name")] = Sft()
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

    @field_validator("objective", mode="before")
    @classmethod
    def _named_objective(cls, values: Any) -> Any:
        return named_objective(values)

    @model_validator(mode="after")
    def _files_need_the_tower(self) -> Recipe:
        """With files in rows the model includes its tower, and every copy of the recipe names the trained parts."""
        if self.data.media is not None and self.model.train is None:
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
    def mtp_weight(self) -> float | None:
        """Returns the weight of the loss of a head that predicts ahead; None if it does not train."""
        return (self.model.mtp_weight or 0.1) if self.model.mtp == "train" else None

    @property
    def row_kind(self) -> RowKind:
        """Returns the rows that are taken: those of the objective, or prompts, with or without an answer."""
        return self.objective.row_kind if self.rollouts is None else PROMPTS


def _without_tags(schema: Any) -> None:
    """Lets a section be any of several: with `extends`, the name that chooses one may come from the base."""
    for inner in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        _without_tags(inner)
    if isinstance(schema, dict) and "oneOf" in schema:
        schema.pop("discriminator", None)
        schema["anyOf"] = schema.pop("oneOf")


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
    _without_tags(schema)
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"
