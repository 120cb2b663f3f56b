"""The matrix of configs and cases: the same recipe under every accelerate config, step by step against one process.

scripts/proofs/parity_matrix.py runs all of it. Each config is launched once and runs its cases in that one group. As a
program (FOLDER JOBS), this file is what such a launch runs.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import filming
import hearing
import several
import tiny
from repository import ROOT

STEPS = 20
ROWS = 8  # a step
LOSS_RELATIVE = 5e-6  # fp32: reordering the micro-batches of one process moves the loss by 2e-7 over 60 steps
PARAMETER = 1e-5
# An eighth of one rounding of fp16. One process differs by 5e-6 from itself with other rows in a forward, because
# weights between two fp16 values are rounded otherwise after a sum in another order; backends by 1.4e-5 at most.
FP16_LOSS_RELATIVE = 2.0**-14
BF16_LOSS_RELATIVE = 2.0**-8  # one rounding of bf16; backends that round in another order drift apart by less


@dataclass(frozen=True)
class Case:
    """A recipe, as overrides of the base one, and how close the backends must stay."""

    name: str
    overrides: tuple[str, ...]
    model: str = "llama"
    teacher: str | None = None  # a file of predictions, or a model, which each launch lets predict before it trains
    loss: float = LOSS_RELATIVE
    parameter: float = PARAMETER
    from_scratch: bool = False  # random weights of the model's shape instead of its folder's
    rows: str = "messages"  # format of the rows
    one_forward: bool = False  # all of a step's rows at once, on any number of processes
    on: tuple[str, ...] | None = None  # the configs that offer it; None: all


LORA = ("mode=lora", "lora={rank: 4, alpha: 8}", "optimizer.lr=5e-3")
# A fifth of LoRA's rate: gradients of the last layer's k_proj are 1e-6 of the whole here, so that AdamW, which divides
# each by its own size, makes steps of their rounding; the bound on parameters is for the rate's size of step.
QLORA = (*LORA, "mode=qlora", "quantization={type: nf4}", "optimizer.lr=1e-3")
DEEP = ("pp_interleaved", "pp_4", "pp_fsdp2_interleaved")  # four stages
DEEPEST = ("pp_4_fsdp2_interleaved",)  # eight
HYBRID = ("ddp", "fsdp2", "zero2", "zero3", "zero3_offload")
ATTENTION = "lora.targets=[q_proj, k_proj, v_proj, o_proj]"
OWN = f"objective={{{{file: {ROOT / 'tests/support/own_losses.py'}, function: {{}}}}}}"
CLASSIFY = (f"objective={{name: classify, labels: [{', '.join(tiny.LABELS)}]}}",)
PAIRS = ("data.max_length=128", "optimizer.lr=3e-4")
REWARD = (*PAIRS, "objective={name: reward, centering: 0.01}")
DISTILL = ("objective.name=distill", "objective.nll_weight=0.2")
# Two that the rows have, and more than the spare rows of the embedding.
TOKENS = f"tokens.add={json.dumps(['quick stars', 'under table', *(f'<{i}>' for i in range(40))])}"
BALANCE = "objective.router_aux_loss_coef=0.02"
IMAGES = ("data.image={}", "data.max_length=96")
SEES_IMAGES = ("ddp", "fsdp2", "zero2", "zero3", "hsdp", "fsdp2_offload", "zero2_offload", "zero3_offload")
SEES_IMAGES += ("zero3_gathering", "tp", "fsdp2_tp")
FP8 = (
    Case(
        "full fp8",
        ("train.precision=fp8",),
        on=("ddp", "fsdp2", "pp", "cp", "hsdp"),
        loss=BF16_LOSS_RELATIVE,
        parameter=float("inf"),
    ),
)  # with the extra alone
SOUND = ("data.audio={}", "data.max_length=96")
HEARS = (  # with the extra alone. Rows with none, one and two clips: in most steps some ranks have none.
    Case("full audio", SOUND, model="qwen2_audio_hears", rows="clips", on=SEES_IMAGES),
    Case(
        "full audio tower",
        (*SOUND, "model.train=[language, projector, tower]", "train.activation_checkpointing=true"),
        model="qwen3_asr_hears",
        rows="clips",
        on=SEES_IMAGES,
    ),
    Case(  # of seven steps in ten without a clip, which leave tower and projector as they are
        "full audio rare",
        (*SOUND, "data.packing=false", "optimizer.weight_decay=0.1", "model.train=[language, projector, tower]"),
        model="voxtral_hears",
        rows="rare_clips",
        on=SEES_IMAGES,
    ),
    Case(
        "lora audio tower",
        (*LORA, *SOUND, "optimizer.lr=1e-3", "model.train=[language, projector, tower]"),
        model="qwen2_audio_hears",
        rows="clips",
        on=SEES_IMAGES,
    ),
    Case(
        "qlora audio tower",
        (*QLORA, *SOUND, "model.train=[language, projector, tower]"),
        model="qwen2_audio_hears",
        rows="clips",
        on=SEES_IMAGES,
    ),
    # Each other family with its tower; some need packages that are not here. eps as for experts: Gemma 4's tower has
    # gradients of rounding alone.
    *(
        Case(
            f"full audio {name}",
            (*SOUND, "model.train=[language, projector, tower]", "optimizer.eps=1e-6"),
            model=f"{name}_hears",
            rows="single_clips" if name in hearing.ALONE else "clips",
            on=SEES_IMAGES,
        )
        for name in hearing.available()
        if name not in ("qwen2_audio", "qwen3_asr", "voxtral")
    ),
)
VIDEO = ("data.video={max_frames: 6}", "data.max_length=192")
FILMS = (  # of pictures, which need no extra
    Case(
        "full video tower",
        (*VIDEO, "model.train=[language, projector, tower]", "train.activation_checkpointing=true"),
        model="qwen3_vl_films",
        rows="films",
        on=SEES_IMAGES,
    ),
    Case(  # of most steps some ranks have no video, and some steps none at all
        "full video rare",
        (*VIDEO, "data.packing=false", "optimizer.weight_decay=0.1", "model.train=[language, projector, tower]"),
        model="qwen2_5_vl_films",
        rows="rare_films",
        on=SEES_IMAGES,
    ),
    Case("lora video", (*LORA, *VIDEO, "optimizer.lr=1e-3"), "qwen2_5_vl_films", rows="films", on=SEES_IMAGES),
)
MIXED = (
    *("data.image={}", "data.audio={}", "data.video={max_frames: 2}", "data.max_length=400", "optimizer.eps=1e-6"),
    "model.train=[language, projector, tower]",
)
MIXES = (  # with the extra for sound alone. Rows that mix three kinds: in most steps ranks have files of other kinds.
    Case("full images audio video", MIXED, model="gemma4_mixes", rows="mixed", on=SEES_IMAGES),
    Case(  # most steps leave some or all of the towers as they are
        "full images audio video rare",
        (*MIXED, "data.packing=false", "optimizer.weight_decay=0.1"),
        model="gemma4_mixes",
        rows="rare_mixed",
        on=SEES_IMAGES,
    ),
    Case(
        "lora images audio video",
        (*LORA, *MIXED, "optimizer.lr=1e-3", "train.activation_checkpointing=true"),
        model="gemma4_mixes",
        rows="mixed",
        on=SEES_IMAGES,
    ),
)
CASES = (
    Case("full", ()),
    Case("lora", LORA),
    Case("full accumulate 1", ("batch.rows_per_device=4",)),
    Case("lora accumulate 1", (*LORA, "batch.rows_per_device=4")),
    Case("full auto rows", ("batch.rows_per_device=auto",)),
    Case("full unpacked", ("data.packing=false",)),
    Case("lora unpacked", (*LORA, "data.packing=false")),
    Case(
        "full token budget",  # 3 to 8 forwards a step
        ("data.packing=false", "data.max_length=32", "batch.rows=9", "batch.tokens_per_device=40"),
    ),
    Case("full stream", ("data.streaming=true", "data.window=48")),
    Case("full tied", (), model="llama_tied"),
    Case("lora tied", LORA, model="llama_tied"),
    Case("full from scratch", (), model="llama_tied", from_scratch=True),
    Case("full mistral window", (), model="mistral"),
    Case("lora mistral window", LORA, model="mistral"),
    Case("full qwen3", (), model="qwen3"),
    Case("lora qwen3", LORA, model="qwen3"),
    Case("full text part", (), model="mistral3"),  # of a multimodal model
    Case("lora text part", (*LORA, "optimizer.lr=1e-3"), model="gemma3"),
    # Rows with none, one and two pictures: in most steps some ranks have none.
    Case("full images", IMAGES, model="smolvlm_sees", rows="pictures", on=SEES_IMAGES),
    Case(
        "full images tower",
        (*IMAGES, "model.train=[language, projector, tower]", "train.activation_checkpointing=true"),
        model="qwen2_5_vl_sees",
        rows="pictures",
        on=SEES_IMAGES,
    ),
    Case(  # of seven steps in ten without a picture, which leave tower and projector as they are
        "full images rare",
        (*IMAGES, "data.packing=false", "optimizer.weight_decay=0.1", "model.train=[language, projector, tower]"),
        model="smolvlm_sees",
        rows="rare_pictures",
        on=SEES_IMAGES,
    ),
    Case("full images projector", (*IMAGES, "model.train=[projector]"), "gemma3_sees", rows="pictures", on=SEES_IMAGES),
    Case("lora images", (*LORA, *IMAGES, "optimizer.lr=1e-3"), "qwen3_vl_sees", rows="pictures", on=SEES_IMAGES),
    Case(
        "lora images tower",
        (*LORA, *IMAGES, "optimizer.lr=1e-3", "model.train=[language, projector, tower]"),
        model="mistral3_sees",
        rows="pictures",
        on=SEES_IMAGES,
    ),
    # The language model is packed; tower and projector are not, and get adapters, too.
    Case(
        "qlora images",
        (*QLORA, *IMAGES, "model.train=[language, projector, tower]"),
        model="smolvlm_sees",
        rows="pictures",
        on=SEES_IMAGES,
    ),
    Case(
        "full images bf16",
        (*IMAGES, "train.precision=bf16", "model.train=[language, projector, tower]"),
        "qwen3_vl_sees",
        None,
        BF16_LOSS_RELATIVE,
        float("inf"),
        rows="pictures",
        on=SEES_IMAGES,
    ),
    Case(
        "full images dpo",
        (*IMAGES, *PAIRS, "data.max_length=192", "objective.name=dpo"),
        model="qwen2_5_vl_sees",
        rows="picture_pairs",
        on=SEES_IMAGES,
    ),
    Case(  # one more pass over each step, of which some ranks have no images
        "full images kto",
        (*IMAGES, *PAIRS, "data.max_length=192", "objective.name=kto", "model.train=[language, projector, tower]"),
        model="smolvlm_sees",
        rows="picture_pairs",
        on=SEES_IMAGES,
    ),
    Case(
        "full images distill",
        (*IMAGES, *DISTILL, "objective.top_k=8", "model.train=[language, projector, tower]"),
        model="qwen2_5_vl_sees",
        teacher="qwen2_5_vl_teacher",
        rows="pictures",
        on=SEES_IMAGES,
    ),
    Case(
        "lora images dpo adapters off",
        (*LORA, *IMAGES, *PAIRS, "data.max_length=192", "objective={name: dpo, reference: adapters_off}"),
        model="gemma3_sees",
        rows="picture_pairs",
        on=SEES_IMAGES,
    ),
    *FILMS,
    *((*HEARS, *MIXES) if importlib.util.find_spec("soundfile") else ()),
    # An evaluation leaves weights gathered, and pipelines of other rows have schedules of other shapes from a step on.
    Case(
        "full tied evaluated",
        ("run.seed=4", "data.max_length=48", "batch.rows_per_device=2", "evaluate.every_steps=1"),
        model="llama_tied",
        on=("pp_fsdp2",),
    ),
    Case("full checkpointing", ("train.activation_checkpointing=true",)),
    Case("full compile", ("train.compile=true",), on=("ddp", "fsdp2", "pp", "ulysses")),
    Case(
        "lora compile checkpointing",
        (*LORA, "train.compile=true", "train.activation_checkpointing=true"),
        on=("ddp", "fsdp2"),
    ),
    Case("full checkpointing selective", ("train.activation_checkpointing=selective",)),
    Case("full checkpointing offloaded", ("train.activation_checkpointing=true", "train.activation_offload=true")),
    Case("lora dropout offloaded", (*LORA, "lora.dropout=0.1", "train.activation_offload=true")),
    Case("qlora checkpointing selective", (*QLORA, "lora.dropout=0.1", "train.activation_checkpointing=selective")),
    Case(
        "full in backward",
        ("optimizer.in_backward=true", "optimizer.max_grad_norm=null"),
        one_forward=True,
        on=("fsdp2", "fsdp2_offload", "hsdp"),
    ),
    Case("lora dropout rslora", (*LORA, "lora.dropout=0.1", "lora.rslora=true", "optimizer.lr=1e-3")),
    Case("lora dora", (*LORA, "lora.dora=true")),
    Case("qlora dora", (*QLORA, "lora.dora=true"), on=("ddp", "fsdp2", "pp", "pp_fsdp2")),
    Case("lora and whole head", (*LORA, "lora.modules_to_save=[lm_head]", "optimizer.lr=1e-3")),
    Case("full tokens", (TOKENS,), on=("ddp", "fsdp2", "zero2", "zero3", "pp")),
    Case("lora tokens", (*LORA, TOKENS, "optimizer.lr=1e-3")),
    Case("lora tied tokens", (*LORA, TOKENS, "optimizer.lr=1e-3"), model="llama_tied"),
    Case("lora tokens whole", (*LORA, TOKENS, "tokens.train=all"), on=("ddp", "fsdp2", "zero2", "zero3", "pp")),
    # The trained copy of a tied table is one parameter with two names.
    Case("lora tied and whole head", (*LORA, "lora.modules_to_save=[lm_head]", "optimizer.lr=1e-3"), "llama_tied"),
    Case("lora tied tokens whole", (*LORA, TOKENS, "tokens.train=all", "optimizer.lr=1e-3"), "llama_tied"),
    Case("qlora tokens", (*QLORA, TOKENS), on=("fsdp2", "zero3")),
    # eps as for the experts below: one row of the router's adapter has gradients of rounding alone, of which the usual
    # eps makes changes of 1.0e-5 on four processes and 5.6e-6 on one with two rows in a forward; this one 7e-8.
    Case(
        "lora mixtral tokens", (*LORA, TOKENS, "optimizer.lr=1e-3", "optimizer.eps=1e-6"), model="mixtral", on=("ep",)
    ),
    Case(
        "lora text part tokens",  # an untied head that the config calls tied
        (*LORA, TOKENS, "optimizer.lr=1e-3"),
        model="mistral3",
        on=("ddp", "fsdp2", "zero2", "zero3"),
    ),
    Case("full chunked head", ("model.cross_entropy=chunked", "objective.z_loss=1e-3")),
    Case("full focal", ("objective.name=focal",)),  # the trained head's logits again in the backward
    Case("lora focal", (*LORA, "objective.name=focal")),  # the frozen head's gradients kept by token
    Case("full own", (OWN.format("mean_of_answers"),)),
    Case("lora own", (*LORA, OWN.format("mean_of_answers"))),
    Case("full own sft", (OWN.format("mean_of_tokens"),)),
    Case("full reward", REWARD, rows="preference"),
    Case("lora reward", (*LORA, *REWARD, "optimizer.lr=1e-3"), rows="preference"),
    Case("full classify", CLASSIFY, rows="classification"),
    Case("full dpo", (*PAIRS, "objective.name=dpo"), rows="preference"),
    Case("lora dpo", (*LORA, *PAIRS, "objective.name=dpo"), rows="preference"),
    Case("lora dpo adapters off", (*LORA, *PAIRS, "objective={name: dpo, reference: adapters_off}"), rows="preference"),
    Case(
        "full dpo ipo unpacked",
        (*PAIRS, "objective={name: dpo, loss: ipo, sft_weight: 0.5}", "data.packing=false"),
        rows="preference",
    ),
    Case(
        "full dpo plain head",
        (*PAIRS, "objective.name=dpo", "model.cross_entropy=plain"),
        rows="preference",
        on=("pp_zero_bubble",),
    ),
    Case("full deep dpo", (*PAIRS, "objective.name=dpo"), model="llama_deep", rows="preference", on=DEEP),
    Case("lora simpo", (*LORA, *PAIRS, "objective={name: dpo, loss: simpo, beta: 2}"), rows="preference"),
    Case("full orpo", (*PAIRS, "objective.name=orpo", "batch.rows_per_device=2"), rows="preference"),
    Case(
        "full orpo experts balance",
        (*PAIRS, BALANCE, "objective.name=orpo"),
        model="qwen3_moe",
        rows="preference",
        on=("ddp", "ep"),
    ),
    # Good answers have most of the weight, and mismatched ones are like them: the KL divergence is above 0.
    Case("full kto", (*PAIRS, "objective={name: kto, undesirable_weight: 0.1}"), rows="unpaired"),
    Case("full distill", DISTILL, teacher="teacher.parquet"),
    Case(
        "lora distill",
        (*LORA, *DISTILL, "objective.temperature=2", "objective.divergence=jsd"),
        teacher="teacher_2.parquet",
    ),
    Case("full plain head", ("model.cross_entropy=plain",)),
    Case("lora plain head", (*LORA, "model.cross_entropy=plain"), on=("pp_zero_bubble",)),
    Case("full deep plain head", ("model.cross_entropy=plain",), model="llama_deep", on=("pp_zero_bubble_2",)),
    Case("lora chunked head", (*LORA, "lora.targets=[lm_head, q_proj]", "optimizer.lr=1e-3")),
    Case(
        "lora tied chunked head",
        (*LORA, "lora.targets=[lm_head, q_proj]", "optimizer.lr=1e-3"),
        model="llama_tied",
    ),
    Case("full mixtral", (), model="mixtral"),
    Case("lora mixtral", (*LORA, ATTENTION), model="mixtral"),
    # Experts that no token chose in the first two steps: their rows of the router have gradients of rounding alone,
    # 3e-11, of which AdamW's usual eps of 1e-8 makes changes of 5e-6, also on one process with two rows in a forward.
    Case(
        "lora mixtral experts",
        (*LORA, "optimizer.lr=1e-3", "optimizer.eps=1e-6"),
        model="mixtral",
        on=("ddp", "fsdp2", "zero2", "zero3", "ep", "pp_ep", "tp", "pp_tp", "fsdp2_tp"),
    ),
    Case(
        "lora qwen3_moe experts checkpointing",
        (*LORA, "optimizer.lr=1e-3", "train.activation_checkpointing=true"),
        model="qwen3_moe",
        on=("ddp", "ep"),
    ),
    Case(
        "lora qwen2_moe experts",
        (*LORA, "optimizer.lr=1e-3", "optimizer.eps=1e-6"),
        model="qwen2_moe",
        on=("ddp", "fsdp2", "zero3", "ep", "tp", "fsdp2_tp", "pp_ep"),
    ),
    Case("full mixtral balance", (BALANCE, "batch.rows_per_device=2"), model="mixtral"),
    Case("full qwen3_moe", (), model="qwen3_moe"),
    Case("lora qwen3_moe balance", (*LORA, ATTENTION, BALANCE), model="qwen3_moe"),
    Case(
        "full qwen3_moe balance checkpointing",
        (BALANCE, "train.activation_checkpointing=true"),
        model="qwen3_moe",
    ),
    Case("full qwen3_moe balance unpacked", (BALANCE, "data.packing=false"), model="qwen3_moe"),
    Case("full mixtral offloaded", ("train.activation_offload=true",), model="mixtral", on=("ep",)),
    Case("full mixtral bf16", ("train.precision=bf16",), "mixtral", None, BF16_LOSS_RELATIVE, float("inf")),
    Case("full gpt_oss", (), model="gpt_oss", on=(*HYBRID, "ulysses")),
    Case("lora gpt_oss checkpointing", (*LORA, ATTENTION, "train.activation_checkpointing=true"), "gpt_oss", on=HYBRID),
    # Mixers run per document, of which ranks have different numbers.
    Case("full qwen3_5", (), model="qwen3_5", on=(*HYBRID, "pp", "tp")),
    Case("lora qwen3_5", LORA, model="qwen3_5", on=(*HYBRID, "pp", "tp")),
    Case("full qwen3_5 checkpointing", ("train.activation_checkpointing=true",), model="qwen3_5", on=(*HYBRID, "pp")),
    Case("full granite_hybrid", ("batch.rows_per_device=2",), model="granite_hybrid", on=HYBRID),
    Case(
        "lora granite_hybrid checkpointing selective",
        (*LORA, "train.activation_checkpointing=selective"),
        model="granite_hybrid",
        on=HYBRID,
    ),
    # A head that predicts ahead, next to experts; eps as for these above.
    Case("full mtp", ("model.mtp=train", "model.mtp_weight=0.5", "optimizer.eps=1e-6"), model="glm4_moe"),
    Case("lora mtp", (*LORA, "model.mtp=train", "optimizer.lr=1e-3", "optimizer.eps=1e-6"), model="glm4_moe"),
    Case("full paged_adamw", ("optimizer.name=paged_adamw",)),
    # Muon makes all directions of a gradient equally long, those of bf16's rounding too: at a rate of 1e-3, one process
    # with two rows in a forward moves weights by 1.8e-4 from those with one. This rate's steps are in the bound.
    # That parts are stepped as whole matrices to the last bit is in tests/trainer/distributed/test_muon.py.
    Case("full muon", ("optimizer={name: muon, lr: 3e-5, weight_decay: 0.1}",)),
    Case("full sgd no clip", ("optimizer={name: sgd, lr: 0.1, max_grad_norm: null}",)),
    Case("qlora", QLORA),
    Case("qlora wide", QLORA, model="llama_wide", on=("tp", "fsdp2_tp", "pp_tp")),
    Case("qlora fp8", (*QLORA, "quantization={type: fp8}")),
    Case(
        "qlora fp8 scaled",
        (*QLORA, "quantization={type: fp8, compute: scaled}", "train.precision=bf16"),
        on=("ddp", "fsdp2", "zero2", "zero3", "pp"),
        loss=BF16_LOSS_RELATIVE,
        parameter=float("inf"),
    ),
    Case("full deep", (), model="llama_deep", on=DEEP),
    Case("lora deep", LORA, model="llama_deep", on=DEEP),
    Case("full deepest", (), model="llama_deepest", on=DEEPEST),
    Case("lora deepest", LORA, model="llama_deepest", on=DEEPEST),
    Case(
        "full deep token budget",  # numbers of micro-batches that these schedules do not take as they come
        ("data.packing=false", "data.max_length=32", "batch.rows=9", "batch.tokens_per_device=40"),
        model="llama_deep",
        on=DEEP,
    ),
    Case("full bf16", ("train.precision=bf16",), loss=BF16_LOSS_RELATIVE, parameter=float("inf")),
    Case("full fp16", ("train.precision=fp16",), loss=FP16_LOSS_RELATIVE, parameter=float("inf")),
    Case("lora fp16", (*LORA, "train.precision=fp16"), loss=FP16_LOSS_RELATIVE, parameter=float("inf")),
    # Nothing overflows, and products are rounded alike. Not in full training, whose weights a sum in another order puts
    # between other values of fp16, nor where a product is in parts (tp, cp) or not fused (zero3).
    Case(
        "lora fp16 small scale",
        (*LORA, "train.precision=fp16"),
        parameter=float("inf"),
        on=("ddp", "fsdp2", "zero2", "pp"),
    ),
    Case(
        "full mixtral fp16",
        ("train.precision=fp16",),
        model="mixtral",
        loss=BF16_LOSS_RELATIVE,  # a token between two experts takes the other one
        parameter=float("inf"),
        on=("ddp", "fsdp2", "zero3"),  # not ep: products over the tokens of all ranks overflow earlier
    ),
    *(FP8 if importlib.util.find_spec("torchao") else ()),
    Case("lora bf16", (*LORA, "train.precision=bf16"), loss=BF16_LOSS_RELATIVE, parameter=float("inf")),
)
# Of pairs and of what a step has to know: on every config, and at every size of it.
OF_PAIRS = ("full dpo", "full dpo ipo unpacked", "full kto")
OBJECTIVES = (*OF_PAIRS, "full orpo", "full reward", "full classify", "full distill")
OF_IMAGES = ("full images tower", "lora images")
HALF = ("full fp16", "lora fp16")
PREFERENCES = (
    "full dpo",
    "lora dpo",
    "lora dpo adapters off",
    "full dpo ipo unpacked",
    "lora simpo",
    "full orpo",
    "full kto",
)
# Those that several ranks with tokens of the same row can run.
SHARED_TOKENS = (
    *("full", "lora", "full accumulate 1", "full auto rows", "full unpacked", "full token budget", "full stream"),
    *PREFERENCES,
    *("full tied", "lora tied", "full checkpointing", "lora chunked head", "full bf16", "full distill", "lora distill"),
    *("full reward", "full own", "full text part", "lora tokens", "full mtp"),
    *HALF,
)
UNDER_PIPELINES = tuple(
    case.name
    for case in CASES
    if not {"balance", "images", "audio", "video"} & set(case.name.split())  # towers are refused
)
FEW_SHARED = ("full", "lora", "full tied", "lora tied")
# Towers, which some ranks have no files for in most steps.
OF_MEDIA = tuple(case.name for case in CASES if {"images", "audio", "video"} & set(case.name.split()))
# Towers on every tensor rank in full. Not Gemma 3n, whose layers take the mean of features of which a rank has some.
MEDIA_OF_TENSOR_RANKS = (
    *("full images tower", "full images projector", "lora images", "lora images tower", "full images dpo"),
    *("full video tower", "lora video", "lora audio tower"),
    *(one.name for one in HEARS if one.name.startswith("full") and "gemma3n" not in one.name),
    *(one.name for one in MIXES if one.name.startswith("full")),
)
# Names of configs that have no file of their own: another's, with these sizes.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "cp_alltoall": ("cp", {"cp_size": 2, "cp_comm_strategy": "alltoall"}),
    "cp_ring": ("cp", {"cp_size": 2, "cp_comm_strategy": "ring"}),
    "cp_ring_of_4": ("cp", {"cp_size": 4, "cp_comm_strategy": "ring"}),
    "zero3_cp": ("zero3", {"cp_size": 2}),
    # Gathers every weight where it is used: those of tiny models are small enough to be kept from the first step on.
    "zero3_gathering": (
        "zero3",
        {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 3000},
    ),
    "ulysses_of_4": ("ulysses", {"sp_size": 4}),
    "cp_ulysses": ("cp", {"cp_size": 2, "sp_size": 2}),
    "pp_gpipe": ("pp", {"pp_size": 2, "pp_schedule": "gpipe"}),
    "pp_zero_bubble": ("pp", {"pp_size": 2, "pp_schedule": "zero_bubble"}),
    "pp_zero_bubble_2": ("pp", {"pp_size": 2, "pp_schedule": "zero_bubble", "pp_stages_per_rank": 2}),
    "pp_interleaved": ("pp", {"pp_size": 2, "pp_schedule": "interleaved", "pp_stages_per_rank": 2}),
    "pp_4": ("pp", {"pp_size": 4}),
    "pp_fsdp2_gpipe": ("pp_fsdp2", {"pp_size": 2, "pp_schedule": "gpipe"}),
    "pp_fsdp2_interleaved": ("pp_fsdp2", {"pp_size": 2, "pp_schedule": "interleaved", "pp_stages_per_rank": 2}),
    "pp_fsdp2_zero_bubble": ("pp_fsdp2", {"pp_size": 2, "pp_schedule": "zero_bubble"}),
    "pp_4_fsdp2_interleaved": ("pp_fsdp2", {"pp_size": 4, "pp_schedule": "interleaved", "pp_stages_per_rank": 2}),
    "pp_zero": ("fsdp2", {"pp_size": 2}),  # gathers in each micro-batch
    "pp_hsdp": ("pp_fsdp2", {"pp_size": 2, "pp_schedule": "gpipe", "dp_replicate_size": 2}),
    "pp_fsdp2_cp": ("pp_fsdp2", {"pp_size": 2, "cp_size": 2}),
    "pp_zero_cp": ("fsdp2", {"pp_size": 2, "cp_size": 2, "cp_comm_strategy": "ring"}),
    "pp_ulysses": ("pp_fsdp2", {"pp_size": 2, "sp_size": 2}),
    "pp_cp": ("pp", {"pp_size": 2, "cp_size": 2}),
    "pp_ep": ("pp_fsdp2", {"pp_size": 2, "ep_size": 2}),
    "pp_zero_tp": ("fsdp2", {"pp_size": 2, "tp_size": 2}),
}
# What tensor parallelism cuts: matrices in pairs, with adapters on each, norms between them, embedding and head.
TENSOR = (
    *("full", "lora", "full unpacked", "lora unpacked", "full tied", "lora tied", "full mistral window"),
    *("full checkpointing selective", "lora dropout rslora", "lora and whole head", "lora tied chunked head"),
    *("full plain head", "full bf16", "lora bf16", *HALF, "full qwen3", "lora qwen3"),
    *("full text part", "lora text part", "full mtp", "lora mtp"),
    *PREFERENCES,
    "lora reward",
    *("lora tokens", "lora tied tokens", "lora tied and whole head", "lora tied tokens whole", "full muon"),
    *("lora dora", "qlora wide", "qlora fp8"),
    # A vocabulary that ranks share: the losses of its parts.
    *("full chunked head", "lora chunked head", "full focal", "lora focal", "full own", "full distill", "lora distill"),
    "full classify",
    *("full mixtral", "lora mixtral", "lora mixtral experts", "full mixtral balance", "full mixtral bf16"),
    "lora qwen2_moe experts",
    *MEDIA_OF_TENSOR_RANKS,
)
EXPERTS = tuple(
    case.name
    for case in CASES
    if case.model in ("mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe") and (case.on is None or "ep" in case.on)
)
# (accelerate config, processes, words that select its cases). Four processes run a selection, for time.
LAUNCHES = (
    *((config, 1, OF_IMAGES) for config in ("ddp", "fsdp2", "zero2", "zero3")),
    ("ddp", 2, None),
    ("fsdp2", 2, None),
    (
        "fsdp2_offload",
        2,
        ("full", "lora", "qlora", "qlora fp8", "full in backward", "full muon", *OBJECTIVES, *OF_IMAGES),
    ),
    ("zero2", 2, None),
    ("zero2_offload", 2, ("full", "lora", "qlora", "full muon", *OF_PAIRS, *OF_IMAGES)),
    ("zero3", 2, None),
    ("zero3_offload", 2, None),
    ("pp", 2, UNDER_PIPELINES),
    ("pp_gpipe", 2, ("full", "lora", "full tied", "full token budget", *OF_PAIRS)),
    ("pp_zero_bubble", 2, ("full plain head", "lora plain head", "full dpo plain head")),
    ("pp_zero_bubble_2", 2, ("full deep plain head",)),
    ("pp_interleaved", 2, ("full deep", "lora deep", "full deep token budget", "full deep dpo")),
    ("pp_4", 4, ("full deep", "lora deep", "full deep token budget", "full deep dpo")),
    ("pp_dp", 4, ("full", "lora", *HALF, "full tied", "full unpacked", *OF_PAIRS, "full orpo", "full distill")),
    (
        "pp_fsdp2",
        4,
        (
            *("full", "lora", "qlora", "full tied", "lora tied", "full unpacked", "full token budget", "full bf16"),
            *("full checkpointing selective", "lora tied tokens", "lora tied and whole head", "full muon"),
            *HALF,
            *("qlora dora", "full tied evaluated", "full mtp", "lora mtp"),
            *OF_PAIRS,
            *("lora dpo adapters off", "full reward", "full distill"),
        ),
    ),
    ("pp_fsdp2_gpipe", 4, ("full", "lora")),
    ("pp_fsdp2_interleaved", 4, ("full deep", "lora deep", "full deep token budget", "full deep dpo")),
    ("pp_fsdp2_zero_bubble", 4, ("full plain head",)),
    ("pp_4_fsdp2_interleaved", 8, ("full deepest", "lora deepest")),
    (
        "pp_zero",
        4,
        ("full", "lora", "qlora", "full tied", "full bf16", "full fp16", "full dpo", "full token budget", "full muon"),
    ),
    ("pp_hsdp", 8, ("full", "lora", "full tied", "full unpacked", "full dpo")),
    (
        "pp_tp",
        4,
        (
            *(*FEW_SHARED, "lora dora", "qlora wide", "full unpacked", "full qwen3", "full dpo", "full muon"),
            *(*HALF, "full mixtral"),
        ),
    ),
    ("pp_fsdp2_tp", 8, (*FEW_SHARED, "full unpacked", "full token budget", "full bf16", "full dpo", "full muon")),
    ("pp_zero_tp", 8, FEW_SHARED),
    ("pp_cp", 4, (*FEW_SHARED, *HALF, "full dpo")),
    ("pp_fsdp2_cp", 8, (*FEW_SHARED, "full unpacked", "full dpo")),
    ("pp_zero_cp", 8, FEW_SHARED),
    ("pp_ulysses", 8, FEW_SHARED),
    (
        "pp_ep",
        4,
        ("full mixtral", "lora mixtral", "lora mixtral experts", "full mixtral bf16", "lora qwen2_moe experts"),
    ),
    ("ep", 2, EXPERTS),
    ("ep", 4, EXPERTS),
    ("ddp", 4, ("full", "lora", *HALF, "full tied", "lora dropout rslora", *OF_PAIRS, *OF_IMAGES)),
    ("fsdp2", 4, ("full", "lora", *HALF, "full tied", "lora dropout rslora", "full muon", *OBJECTIVES, *OF_IMAGES)),
    ("zero3", 4, ("full", "lora", *HALF, *OBJECTIVES, *OF_IMAGES)),
    ("fsdp2_offload", 4, ("full", "lora", "full fp16", *OF_PAIRS, *OF_IMAGES)),
    ("zero2", 4, ("full", "lora", *HALF, *OF_PAIRS, *OF_IMAGES)),
    ("zero2_offload", 4, ("full", "lora", *OF_PAIRS, *OF_IMAGES)),
    ("zero3_offload", 4, ("full", "lora", *OF_PAIRS, *OF_IMAGES)),
    ("cp", 2, SHARED_TOKENS),
    ("cp_alltoall", 2, (*FEW_SHARED, *OF_PAIRS)),
    ("cp_ring", 2, (*FEW_SHARED, *OF_PAIRS)),
    ("cp", 4, ("full", "lora", *HALF, *OF_PAIRS)),
    ("cp_ring_of_4", 4, ("full", "lora", *OF_PAIRS)),
    ("fsdp2_cp", 4, (*FEW_SHARED, *HALF, "full muon", *OF_PAIRS)),
    ("zero3_cp", 2, ("full", "lora", *HALF, *OF_PAIRS)),
    ("zero3_gathering", 2, OF_MEDIA),
    ("ulysses", 2, (*SHARED_TOKENS, "full mistral window", "full gpt_oss", "full compile")),
    ("ulysses_of_4", 4, (*FEW_SHARED, *OF_PAIRS)),
    ("cp_ulysses", 4, ("full", "lora", *HALF, *OF_PAIRS, "full orpo")),
    (
        "hsdp",
        4,
        (
            *("full", "lora", "full tied", "full unpacked", "full in backward", "lora dropout rslora", "full reward"),
            *("qlora", "qlora fp8", "lora tied tokens whole", "full images rare", "full muon"),
            "full images audio video rare",
            *HALF,
            *OF_PAIRS,
            *OF_IMAGES,
        ),
    ),
    ("tp", 2, TENSOR),
    (
        "tp",
        4,
        ("full", "lora", *HALF, "full tied", "lora tied tokens", "lora chunked head", *OF_PAIRS, "full distill"),
    ),
    (
        "fsdp2_tp",
        4,
        (
            "full",
            "lora",
            "full tied",
            "lora tied",
            "full qwen3",
            "full accumulate 1",
            *("lora dora", "qlora wide"),
            *("lora bf16", *HALF),
            "full muon",
            *("full mixtral", "lora mixtral experts", "lora qwen2_moe experts", "full mtp"),
            *(*OF_PAIRS, *OF_IMAGES, "full audio tower"),
        ),
    ),
)


@dataclass
class Difference:
    """One cell of the matrix."""

    config: str
    processes: int
    case: str
    loss: float  # largest relative difference of any step's loss
    bias: float  # mean signed relative difference: noise averages out, a wrong factor does not
    grad_norm: float  # of the steps that fp16 did not skip
    parameter: float  # largest absolute difference of any trained parameter at the end
    passed: bool
    steps: int = STEPS
    problems: list[str] = field(default_factory=list)


def base_recipe(folder: Path) -> dict[str, Any]:
    return {
        "run": {"name": "base", "dir": str(folder / "runs")},
        "model": {"name": str(folder / "llama")},
        "mode": "full",
        "data": {
            "train": [{"path": str(folder / "rows.jsonl"), "format": "messages"}],
            "eval": [{"path": str(folder / "held_out.jsonl"), "format": "messages"}],
            "max_length": 64,
        },
        "batch": {"rows": ROWS, "rows_per_device": 1},
        "optimizer": {"lr": 1e-3, "weight_decay": 0.01},
        "schedule": {"warmup_steps": 2},
        "train": {"max_steps": STEPS, "precision": "fp32"},
        "evaluate": {"at_start": False},
    }


def prepare(folder: Path, rows: int = 300) -> None:
    """Models, `rows` rows of each kind without images, teachers and the base recipe."""
    import mtp_bases

    for model in (*tiny.MODELS, "llama_wide"):
        tiny.save_model(folder, model)
    for model in {case.model for case in CASES} & tiny.MULTIMODAL.keys():
        tiny.save_multimodal(folder, model)
    for model in {case.model for case in CASES} & mtp_bases.BASES.keys():
        mtp_bases.save_base(folder, model)
    for model in sorted({case.model.removesuffix("_sees") for case in CASES if "picture" in case.rows}):
        tiny.save_seeing(folder, model)
    for name, pairs in (("pictures", False), ("picture_pairs", True)):
        tiny.write_pictures(folder, name, 120, pairs=pairs)
        tiny.write_pictures(folder, f"held_out_{name}", 16, seed=1, pairs=pairs)
    tiny.write_pictures(folder, "rare_pictures", 160, numbers=(0,) * 23 + (1,))
    tiny.write_pictures(folder, "held_out_rare_pictures", 16, seed=1)
    prepare_sound(folder, sorted({case.model.removesuffix("_hears") for case in CASES if "clips" in case.rows}), 120)
    hearing.write_clips(folder, "rare_clips", 160, numbers=(0,) * 23 + (1,))
    hearing.write_clips(folder, "held_out_rare_clips", 16, seed=1)
    for model in sorted({case.model.removesuffix("_films") for case in FILMS}):
        filming.save_filming(folder, model)
    filming.write_films(folder, "films", 60, listed=True)
    filming.write_films(folder, "rare_films", 160, numbers=(0,) * 23 + (1,), listed=True)
    for name in ("held_out_films", "held_out_rare_films"):
        filming.write_films(folder, name, 16, seed=1, listed=True)
    if any(case in CASES for case in MIXES):
        prepare_mixed(folder)
    tiny.write_rows(folder / "rows.jsonl", tiny.conversations(rows))
    tiny.write_rows(folder / "held_out.jsonl", tiny.conversations(24, seed=1))
    made_rows = {"preference": tiny.preferences, "unpaired": tiny.unpaired, "classification": tiny.texts}
    for format, made in made_rows.items():
        tiny.write_rows(folder / f"{format}.jsonl", made(rows))
        tiny.write_rows(folder / f"held_out_{format}.jsonl", made(24, seed=1))
    write_base_recipe(folder)
    write_teachers(folder)
    write_seeing_teacher(folder)


def prepare_sound(folder: Path, models: Sequence[str], rows: int, silent: int = 1) -> None:
    """Models of `hearing.HEARING`, and rows with none, one and two clips, or one at most. silent: more have none."""
    for model in models:
        hearing.save_hearing(folder, model)
    for name, numbers in (("clips", (1, 1, 2)), ("single_clips", (1, 1))):
        hearing.write_clips(folder, name, rows, numbers=(*[0] * silent, *numbers))
        hearing.write_clips(folder, f"held_out_{name}", 16, seed=1, numbers=(0, *numbers))


def prepare_mixed(folder: Path) -> None:
    """A Gemma 4, and rows with none, one and two files of three kinds."""
    several.save_gemma4(folder, "gemma4_mixes")
    for name, numbers in (("mixed", (0, 1, 1, 2)), ("rare_mixed", (0,) * 11 + (1,))):
        several.write_rows(folder, name, 120, ("image", "audio", "video"), numbers=numbers)
        several.write_rows(folder, f"held_out_{name}", 16, ("image", "audio", "video"), seed=1, numbers=(0, 1, 2))


def write_base_recipe(folder: Path) -> None:
    import yaml

    (folder / "recipe.yaml").write_text(yaml.safe_dump(base_recipe(folder)), encoding="utf-8")


def write_seeing_teacher(folder: Path) -> None:
    """qwen2_5_vl_sees with logits 20 times as large: sure of itself, so that divergences are not all rounding."""
    from transformers import AutoModelForImageTextToText

    student, teacher = folder / "qwen2_5_vl_sees", folder / "qwen2_5_vl_teacher"
    shutil.copytree(student, teacher, dirs_exist_ok=True)
    model = AutoModelForImageTextToText.from_pretrained(student)
    model.model.language_model.norm.weight.data.mul_(20)
    model.save_pretrained(teacher)


def write_teachers(folder: Path) -> None:
    """What qwen3 predicts of the training rows, for llama to learn, at two temperatures."""
    from finetune.data.dataset import Dataset, build_training
    from finetune.models.base_model import Base
    from finetune.recipe import load_recipe

    recipe = load_recipe(folder / "recipe.yaml", ())
    data = build_training(recipe, Base.of(recipe).renderer(recipe.objective))
    assert isinstance(data, Dataset)
    for name, temperature in (("teacher", 1.0), ("teacher_2", 2.0)):
        tiny.write_teacher(folder / f"{name}.parquet", folder / "qwen3", data.examples, 8, temperature)


def run_name(config: str, processes: int, case: str) -> str:
    return f"{config}-{processes}-{case.replace(' ', '_')}"


def work(folder: Path, jobs: Path, load: Callable[..., Any] | None = None, **features: Any) -> None:
    """Inside a launch: train recipes one after another in this process group. jobs: a JSON list of override lists.
    load, features: of recipes that need a wing; default: of the trainer alone."""
    from finetune.startup import quiet_libraries

    quiet_libraries()
    # An operation in place on a view would drop the hook that FSDP2 has on what a stage returns.
    warnings.filterwarnings("error", message=r"FSDP2-wrapped module \(FSDPCalledStage\) returned a view")
    from rich.console import Console

    from finetune.data.teacher_file import is_teacher_file
    from finetune.engine import optimizer_step
    from finetune.engine.start import leave_group
    from finetune.models.head import chunked
    from finetune.recipe import load_recipe
    from finetune.training.run import compute_reference, train
    from finetune.training.signals import StopRequest

    # Models so small would have all their logits in one chunk; like this every forward has several.
    chunked.FEWEST_ROWS, chunked.CHUNK_BYTES["cpu"] = 4, 0
    quiet = Console(file=open(os.devnull, "w"))  # noqa: SIM115 (lives as long as the process)
    shared_cache = os.environ["FINETUNE_CACHE"]
    for overrides in json.loads(jobs.read_text(encoding="utf-8")):
        recipe = (load or load_recipe)(folder / "recipe.yaml", overrides)
        # fp16 skips the first three steps, and then some of those before which the scale was doubled.
        optimizer_step.FIRST_SCALE, optimizer_step.GROWTH_INTERVAL = 2.0**23, 4
        if recipe.run.name.endswith("small_scale"):
            optimizer_step.FIRST_SCALE = 2.0**12
        os.environ["FINETUNE_CACHE"] = shared_cache
        if (teacher := recipe.objective.other_models.get("teacher")) is not None and not is_teacher_file(teacher):
            # A cache of its own: else it would find what the launch on one process has computed.
            os.environ["FINETUNE_CACHE"] = str(folder / f"cache-{recipe.run.name}")
            compute_reference(recipe, "recipe.yaml", StopRequest(), quiet)
        train(recipe, "recipe.yaml", StopRequest(), quiet, **features)
        print(f"done {overrides}", flush=True)
    leave_group()


def launch(folder: Path, config: str, processes: int, cases: list[str]) -> None:
    """Run cases, by name, in one launch."""
    launch_jobs(folder, config, processes, [job(folder, config, processes, c) for c in CASES if c.name in cases])


def job(folder: Path, config: str, processes: int, case: Case) -> list[str]:
    """Overrides of the base recipe."""
    start = [f"model.name={folder / case.model}"]
    if case.from_scratch:
        shape = json.dumps(tiny.MODELS[case.model])
        start = ["model.name=null", f"model.config={shape}", f"model.tokenizer={folder / case.model}"]
    if case.rows != "messages":
        sources = {"train": f"{case.rows}.jsonl", "eval": f"held_out_{case.rows}.jsonl"}
        kinds = ("pictures", "rare_pictures", "clips", "rare_clips", "single_clips", "films", "rare_films", "mixed")
        formats: dict[str, str] = dict.fromkeys((*kinds, "rare_mixed"), "messages")
        formats["picture_pairs"] = "preference"
        format = formats.get(case.rows, case.rows)
        start += [f"data.{key}=[{{path: {folder / name}, format: {format}}}]" for key, name in sources.items()]
    if case.teacher:
        start.append(f"objective.teacher={folder / case.teacher}")
    if case.one_forward:
        start.append(f"batch.rows_per_device={ROWS // processes}")
    if case.rows == "preference" and config == "single":  # so each other cell compares shared prompts with whole ones
        start.append("objective.share_prompts=false")
    return [*case.overrides, *start, f"run.name={run_name(config, processes, case.name)}"]


def launch_jobs(
    folder: Path,
    config: str,
    processes: int,
    jobs: list[list[str]],
    program: Sequence[object] = (__file__,),
) -> None:
    """Train under `accelerate launch`, as a user would. program: what calls `work`. Raises CalledProcessError with the
    output shown."""
    file = folder / f"{config}-{processes}.json"
    file.write_text(json.dumps(jobs), encoding="utf-8")
    done = start_ranks(config_file(folder, config), processes, *program, folder, file)
    output = done.stdout + (done.stderr or "")
    file.with_suffix(".log").write_text(output, encoding="utf-8")
    if done.returncode:
        print(output[-6000:], file=sys.stderr)
        done.check_returncode()


def accelerate_launch(config: Path, processes: int, *program: object) -> subprocess.CompletedProcess[str]:
    """Runs a program as a user would start it; what it writes to either output comes back as `stdout`."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", str(processes)]
    command += ["--config_file", str(config), *map(str, program)]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


# The tests start ranks in a cheaper way (tests/support/forks.py).
start_ranks: Callable[..., subprocess.CompletedProcess[str]] = accelerate_launch


def config_file(folder: Path, config: str) -> Path:
    """Of accelerate; that of a variant is made in `folder`."""
    if config not in VARIANTS:
        return ROOT / "accelerate_configs" / f"{config}.yaml"
    import yaml

    base, sizes = VARIANTS[config]
    values = yaml.safe_load(config_file(folder, base).read_text(encoding="utf-8"))
    if any(key.startswith("stage3_") for key in sizes):  # which DeepSpeed's own file alone can have
        own = folder / f"{config}.deepspeed.json"
        own.write_text(json.dumps({"zero_optimization": {"stage": 3, **sizes}}), encoding="utf-8")
        values["deepspeed_config"] = {"deepspeed_config_file": str(own), "zero3_init_flag": True}
    else:
        values["parallelism_config"] = {f"parallelism_config_{key}": value for key, value in sizes.items()}
    path = folder / f"{config}.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def compare(folder: Path, config: str, processes: int, case: Case) -> Difference:
    """One launch's case against the same case on one process."""
    reference, other = (folder / "runs" / run_name(*which, case.name) for which in (("single", 1), (config, processes)))
    ours, theirs = train_lines(reference), train_lines(other)
    pairs = list(zip(ours, theirs, strict=False))  # a missing step is a problem of its own, below
    relative = [(b["loss"] - a["loss"]) / a["loss"] for a, b in pairs]
    both = [(a["grad_norm"], b["grad_norm"]) for a, b in pairs if None not in (a["grad_norm"], b["grad_norm"])]
    norms = [abs(b / a - 1) for a, b in both]
    loss, bias = max(map(abs, relative)), statistics.fmean(relative)
    parameter = parameter_difference(reference / "model", other / "model")
    problems, (skipped, also) = [], (skipped_steps(lines) for lines in (ours, theirs))
    if also != skipped:
        problems.append(f"steps {also} were skipped instead of {skipped}")
    if bool(skipped) != ("fp16" in case.name and "small scale" not in case.name):
        problems.append(f"one process skipped {skipped}")
    if not loss <= case.loss:  # not a number is a problem too
        problems.append(f"loss differs by {loss:.1e}, allowed {case.loss:.0e}")
    if not abs(bias) <= case.loss / 5:
        problems.append(f"losses differ by {bias:.1e} on average, allowed {case.loss / 5:.0e}")
    if not parameter <= case.parameter:
        problems.append(f"parameters differ by {parameter:.1e}, allowed {case.parameter:.0e}")
    problems += [f"{len(lines)} steps instead of {STEPS}" for lines in (ours, theirs) if len(lines) != STEPS]
    return Difference(
        config,
        processes,
        case.name,
        loss,
        bias,
        max(norms, default=0.0),
        parameter,
        not problems,
        len(theirs),
        problems,
    )


def train_lines(run: Path) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [line for line in map(json.loads, lines) if "loss" in line]


def skipped_steps(lines: list[dict[str, Any]]) -> list[int]:
    """Steps whose gradient overflowed under fp16."""
    return [line["step"] for line in lines if line["grad_norm"] is None]


def parameter_difference(reference: Path, other: Path) -> float:
    """Over the saved weights or adapters; infinite where their names differ."""
    ours, theirs = tensors(reference), tensors(other)
    if ours.keys() != theirs.keys():
        return float("inf")
    import torch

    pairs = [(ours[name].float(), theirs[name].float()) for name in ours]
    differences = [torch.where(a == b, 0.0, (a - b).abs()).max() for a, b in pairs]  # bounds may be infinite
    return torch.stack(differences).max().item()  # not a number wherever one is; Python's max would lose it


def tensors(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    tensors: dict[str, Any] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(file))
    return tensors


def same_tensors(ours: Path, theirs: Path) -> bool:
    """The same names, types and values, to the last bit, in two folders."""
    import torch

    a, b = tensors(ours), tensors(theirs)
    return a.keys() == b.keys() and all(a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in b)


KINDS = {
    "pp": "pp",
    "ep": "ep",
    "tp": "tp",
    "cp": "cp",
    "ulysses": "cp",
    "zero2": "zero",
    "zero3": "zero",
    "ddp": "ddp",
}


def kind(config: str) -> str:
    """What decides how a config trains: the first of `KINDS` in its name or that of the config that it varies."""
    words = {*config.split("_"), *VARIANTS.get(config, (config,))[0].split("_")}
    return next((name for word, name in KINDS.items() if word in words), "fsdp2")


def covering(seed: int) -> list[tuple[str, int, list[Case]]]:
    """A selection of all launches and their cases that covers

    - every case;
    - every launch; of those of eight processes one for each config that they vary, and those that alone have a case;
    - every word of a case's name with every kind of config that has it.

    Greedy: next is what covers most that is not covered yet, for the number of its processes; the seed decides ties.
    """
    random = Random(seed)
    offered = [((config, processes), case) for config, processes, cases in selected([]) for case in cases]
    counts = Counter(case.name for _, case in offered)
    alike: dict[str, set[tuple[str, int]]] = {}
    for place, _ in offered:
        if place[1] == 8 and not any(counts[case.name] == 1 for other, case in offered if other == place):
            alike.setdefault(VARIANTS.get(place[0], (place[0],))[0], set()).add(place)
    left_out = {place for places in alike.values() for place in places - {random.choice(sorted(places))}}
    cells = [(place, case) for place, case in offered if place not in left_out]
    random.shuffle(cells)

    def covers(place: tuple[str, int], case: Case) -> list[object]:
        return [case.name, place, *((word, kind(place[0])) for word in case.name.split())]

    wanted = Counter({covered: 1 for cell in cells for covered in covers(*cell)})
    chosen: dict[tuple[str, int], list[Case]] = {}
    while any(number > 0 for number in wanted.values()):
        place, case = max(cells, key=lambda cell: sum(wanted[one] > 0 for one in covers(*cell)) / cell[0][1])
        cells.remove((place, case))
        chosen.setdefault(place, []).append(case)
        wanted.subtract(covers(place, case))
    return [(*place, cases) for place, cases in sorted(chosen.items(), key=lambda one: (one[0][1], one[0][0]))]


def selected(only: list[str]) -> list[tuple[str, int, list[Case]]]:
    """Launches and their cases, narrowed by words: a config's name, `x4`, or part of a case's name."""
    configs = {config for config, _, _ in LAUNCHES}
    wanted_configs = [word for word in only if word in configs]
    sizes = [int(word[1:]) for word in only if word[:1] == "x" and word[1:].isdigit()]
    words = [word for word in only if word not in configs and not (word[:1] == "x" and word[1:].isdigit())]
    chosen = []
    for config, processes, names in LAUNCHES:
        if (wanted_configs and config not in wanted_configs) or (sizes and processes not in sizes):
            continue
        cases = [
            case
            for case in CASES
            if (names is None or case.name in names)
            and (case.on is None or config in case.on)
            and (not words or any(word == case.name or word in case.name.split() for word in words))
        ]
        if cases:
            chosen.append((config, processes, cases))
    return chosen


def show(differences: list[Difference]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("config", "processes", "case", "loss, relative", "bias", "grad norm", "parameters", "")
    for d in differences:
        numbers = [f"{value:.1e}" for value in (d.loss, d.bias, d.grad_norm, d.parameter)]
        mark = "[green]same[/green]" if d.passed else f"[red]{'; '.join(d.problems)}[/red]"
        table.add_row(d.config, str(d.processes), d.case, *numbers, mark)
    Console(width=140).print(table)


def write_json(path: Path, script: str, cells: list[dict[str, Any]]) -> None:
    """Figures with the command that made them and what they ran on."""
    import torch

    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    hardware = torch.cuda.get_device_name() if device and device.type == "cuda" else "CPU processes (rehearsal)"
    result = {"command": f"python {script}", "hardware": hardware, "cells": cells}
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    work(Path(sys.argv[1]), Path(sys.argv[2]))
