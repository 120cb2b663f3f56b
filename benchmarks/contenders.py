"""Who trains in a speed benchmark, each in a process of its own: ours, the bare loop, and the peers.

    python benchmarks/contenders.py NAME FOLDER       # FOLDER as workload.py makes it; writes FOLDER/result.json

All train the same model on the same documents in the same steps, with the same optimizer, rate and clipping. Ours and
the bare loop go over the rows packed, as one flat row of a step; so do the peers that can. What is not said about a
peer is its own default.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent))

from workload import UNTRAINED, StepRows, Work, read_steps

LAUNCHED = "BENCHMARK_LAUNCHED"  # environment: time.time() when the process was started; stopwatch.py reads it
# glibc asks the system for each block of 32 MiB or more and gives it back, and the page faults cost more than the
# arithmetic. Here freed memory stays with the process, and is not asked for in large pages, which `train` does: torch
# advises the kernel at every allocation, which costs more on kept memory than it saves.
KEPT = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**30), "THP_MEM_ALLOC_ENABLE": "0"}
RUN_SEED = 42  # the recipe's default
CLIP = 1.0
ABOUT = ("attention", "cross_entropy", "kernels", "graphs", "parameters", "trainable_parameters")  # of our plan.json
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]  # of a Llama: all-linear

Result = dict[str, Any]


# --- ours


def ours_frugal(folder: Path, work: Work) -> Result:
    """With activations recomputed, as TRL's defaults do."""
    return ours(folder, work, "train.activation_checkpointing=true")


def ours_graphs(folder: Path, work: Work) -> Result:
    """By CUDA graphs, where they are possible."""
    return ours(folder, work, "train.graphs=auto")


def ours(folder: Path, work: Work, *overrides: str) -> Result:
    """`python -m finetune train recipe.yaml`, the whole command."""
    from stopwatch import Stopwatch

    from finetune.desk.cli import main

    watch = Stopwatch(work.steps)
    sys.argv = ["finetune", "train", str(folder / "recipe.yaml"), *work.overrides, *overrides]
    try:
        with contextlib.redirect_stdout(sys.stderr):
            main()
    except SystemExit as end:
        if end.code:
            raise
    run = folder / "runs" / "speed"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if "loss" in line]
    totals = [0, *(line["supervised_tokens"] for line in steps)]
    plan = json.loads((run / "plan.json").read_text(encoding="utf-8"))
    return {
        **watch.result(),
        "losses": [line["loss"] for line in steps],
        "supervised": [b - a for a, b in itertools.pairwise(totals)],
        "about": {key: plan[key] for key in ABOUT},
        "metrics": {key: value for key, value in steps[-1].items() if isinstance(value, int | float)},
    }


# --- the bare loop


def bare(folder: Path, work: Work) -> Result:
    """Forward, backward and optimizer on batches that lie in memory: what ours is compared with. Only the attention
    function is ours, the rest is torch, transformers and peft."""
    import torch
    from stopwatch import Stopwatch
    from torch.nn.functional import cross_entropy

    watch = Stopwatch(work.steps)
    device = torch.device(work.device)
    model, attention = bare_model(folder, work, device)
    inner = model.get_base_model() if work.mode != "full" else model
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = bare_optimizer(trained, work)
    batches = [flat_batch(step, device) for step in read_steps(folder)]
    arguments = [attention.forward_arguments(tuple(map(len, step.ids))) for step in read_steps(folder)]
    autocast = torch.autocast(work.device, torch.bfloat16, enabled=work.precision == "bf16")
    losses = []
    for (input_ids, position_ids, selected, targets), extra in zip(batches, arguments, strict=True):
        with autocast:
            hidden = inner.model(input_ids=input_ids, position_ids=position_ids, use_cache=False, **extra)[0]
            logits = inner.lm_head(hidden[0, selected])
        loss = cross_entropy(logits.float(), targets, reduction="sum") / len(targets)
        del hidden, logits
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return {
        **watch.result(),
        "losses": torch.stack(losses).tolist(),
        "supervised": [len(targets) for _, _, _, targets in batches],
        "about": {"attention": attention.implementation, "trainable_parameters": trainable(model)},
    }


def bare_model(folder: Path, work: Work, device: Any) -> tuple[Any, Any]:
    """The model on its device, and our choice of attention for it."""
    import torch
    from transformers import AutoModelForCausalLM

    from finetune.features import load_recipe
    from finetune.models.attention import attention_for
    from finetune.models.config import model_config

    recipe = load_recipe(folder / "recipe.yaml", list(work.overrides))
    attention = attention_for(recipe, model_config(recipe.model), work.device)
    model = AutoModelForCausalLM.from_pretrained(
        folder / "model",
        dtype=weights_dtype(work),
        attn_implementation=attention.implementation,
        quantization_config=four_bits(work),
        device_map={"": device} if work.mode == "qlora" else None,
    ).to(device)
    model.config.use_cache = False
    if work.precision == "bf16":  # as autocast leaves it: the residual stream in bf16
        model.get_input_embeddings().register_forward_hook(lambda _module, _inputs, output: output.bfloat16())
    if work.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if work.mode != "full":
        torch.manual_seed(RUN_SEED + 1)  # the adapters that ours draws
        model = adapters(model)
    return model.train(), attention


def bare_optimizer(trained: list[Any], work: Work) -> Any:
    import torch

    settings: dict[str, Any] = {"lr": work.lr, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
    if work.optimizer == "adamw_8bit":
        import bitsandbytes

        return bitsandbytes.optim.AdamW8bit(trained, **settings)
    return torch.optim.AdamW(trained, fused=True, **settings)


def flat_batch(step: StepRows, device: Any) -> tuple[Any, ...]:
    """(input_ids (1, T), position_ids (1, T), positions whose next token is trained (S,), that token (S,))."""
    import numpy as np
    import torch

    labels = np.concatenate(step.labels)
    where = np.flatnonzero(labels != UNTRAINED)
    arrays = (
        np.concatenate(step.ids)[None],
        np.concatenate([np.arange(len(ids)) for ids in step.ids])[None],
        where - 1,
        labels[where],
    )
    return tuple(torch.from_numpy(array).to(device) for array in arrays)


def weights_dtype(work: Work) -> Any:
    """Of the weights in memory: fp32 where they are trained under autocast, the type of the forward where frozen."""
    import torch

    master = work.mode == "full" and work.precision != "bf16_true"
    return torch.float32 if master or work.precision == "fp32" else torch.bfloat16


def adapters(model: Any) -> Any:
    from peft import get_peft_model

    return get_peft_model(model, lora_config())


def lora_config() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")


def four_bits(work: Work) -> Any:
    if work.mode != "qlora":
        return None
    import torch
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32 if work.precision == "fp32" else torch.bfloat16,
    )


# --- TRL


def trl(folder: Path, work: Work) -> Result:
    """SFTTrainer at its best here: packed without padding, activations kept where they fit, logged once.

    Its loss is chunked over the vocabulary (`loss_type: nll`, since 1.16); entropy and accuracy cannot be switched off.
    """
    return sft(folder, work, packed=True, gradient_checkpointing=work.checkpointing, logging_steps=work.steps)


def trl_frugal(folder: Path, work: Work) -> Result:
    """The same with its default of recomputing activations: less memory, slower."""
    return sft(folder, work, packed=True, logging_steps=work.steps)


def trl_default(folder: Path, work: Work) -> Result:
    """SFTTrainer as it comes: padded, activations recomputed, a log line every 10 steps."""
    return sft(folder, work, packed=False)


def sft(folder: Path, work: Work, packed: bool, **settings: Any) -> Result:
    """The rows are tokens already, packed as ours (`seq_lengths` are what its own packing `bfd` leaves)."""
    from stopwatch import Stopwatch
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    watch = Stopwatch(work.steps)
    config = SFTConfig(
        **common_arguments(folder, work),
        max_length=None if not packed else work.row_tokens * work.rows_per_step,
        packing=packed,
        dataset_kwargs={"skip_prepare_dataset": True},
        model_init_kwargs={"dtype": str(weights_dtype(work)).removeprefix("torch."), **flash_attention(work)},
        use_liger_kernel=uses_liger(work),
        **settings,
    )
    trainer = SFTTrainer(
        model=str(folder / "model"),
        args=config,
        train_dataset=flat_dataset(folder) if packed else nested_dataset(folder),
        data_collator=None if packed else each_row_is_a_batch(DataCollatorForLanguageModeling(pad_token_id=0)),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        peft_config=lora_config() if work.mode != "full" else None,
        quantization_config=four_bits(work),
    )
    return trained_by(trainer, watch)


# --- transformers' Trainer


def trainer(folder: Path, work: Work) -> Result:
    """On the packed rows: documents are kept apart by their position_ids."""
    return plain_trainer(folder, work, packed=True)


def trainer_padded(folder: Path, work: Work) -> Result:
    """On the same documents, padded to the longest of the step."""
    return plain_trainer(folder, work, packed=False)


def plain_trainer(folder: Path, work: Work, packed: bool) -> Result:
    import torch
    from stopwatch import Stopwatch
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
    from transformers.data.data_collator import DataCollatorForTokenClassification

    watch = Stopwatch(work.steps)
    model = AutoModelForCausalLM.from_pretrained(
        folder / "model",
        dtype=weights_dtype(work),
        quantization_config=four_bits(work),
        **flash_attention(work),
    )
    model.config.use_cache = False  # with a cache, transformers lets packed documents see each other
    if work.mode != "full":
        torch.manual_seed(RUN_SEED + 1)
        model = adapters(model)
    arguments = TrainingArguments(
        **common_arguments(folder, work),
        gradient_checkpointing=work.checkpointing,
        logging_steps=work.steps,
        remove_unused_columns=False,
    )
    padding = DataCollatorForTokenClassification(tokenizer_of(folder))
    return trained_by(
        Trainer(
            model=model,
            args=arguments,
            train_dataset=nested_dataset(folder),
            data_collator=flat_collator if packed else each_row_is_a_batch(padding),
        ),
        watch,
    )


def tokenizer_of(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder / "model")


def flat_collator(rows: list[Any]) -> dict[str, Any]:
    import numpy as np

    step = StepRows(*([np.array(one) for one in rows[0][key]] for key in ("input_ids", "labels")))
    import torch

    input_ids, position_ids, *_ = flat_batch(step, torch.device("cpu"))
    return {
        "input_ids": input_ids,
        "position_ids": position_ids,
        "labels": torch.from_numpy(np.concatenate(step.labels))[None],
    }


# --- Unsloth


def unsloth(folder: Path, work: Work) -> Result:
    """Its model under TRL's trainer, which it patches; packed rows. From the sources of 2026.10, not run yet."""
    from unsloth import FastLanguageModel  # isort: skip  (before transformers and TRL, which it patches)
    import torch
    from stopwatch import Stopwatch
    from trl import SFTConfig, SFTTrainer

    watch = Stopwatch(work.steps)
    recompute: Any = "unsloth" if work.checkpointing else False
    model, tokenizer = FastLanguageModel.from_pretrained(
        str(folder / "model"),
        max_seq_length=work.row_tokens * work.rows_per_step,
        dtype=torch.float32 if work.precision == "fp32" else torch.bfloat16,
        load_in_4bit=work.mode == "qlora",
        full_finetuning=work.mode == "full",
        use_gradient_checkpointing=recompute,
    )
    if work.mode != "full":
        model = FastLanguageModel.get_peft_model(
            model,
            r=16,
            lora_alpha=32,
            target_modules=TARGETS,
            use_gradient_checkpointing=recompute,
            random_state=RUN_SEED,
        )
    config = SFTConfig(
        **common_arguments(folder, work),
        max_length=work.row_tokens * work.rows_per_step,
        packing=True,
        dataset_kwargs={"skip_prepare_dataset": True},
        logging_steps=work.steps,
    )
    return trained_by(
        SFTTrainer(model=model, args=config, train_dataset=flat_dataset(folder), processing_class=tokenizer), watch
    )


# --- what these have in common


def common_arguments(folder: Path, work: Work) -> dict[str, Any]:
    """Where, how long and the maths: equal for all. `adamw_torch_fused` is their default."""
    return {
        "output_dir": str(folder / "peer"),
        "use_cpu": work.device == "cpu",
        "max_steps": work.steps,
        "bf16": work.precision != "fp32",  # TRL's own default is bf16
        "per_device_train_batch_size": 1,
        "train_sampling_strategy": "sequential",
        "learning_rate": work.lr,
        "lr_scheduler_type": "constant",
        "adam_beta2": 0.95,
        "max_grad_norm": CLIP,
        "optim": "adamw_bnb_8bit" if work.optimizer == "adamw_8bit" else "adamw_torch_fused",
        "logging_first_step": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": work.device == "cuda",
        "seed": RUN_SEED,
    }


def flash_attention(work: Work) -> dict[str, str]:
    """For the peers: flash-attn where it is installed, else transformers' default (sdpa)."""
    usable = work.device == "cuda" and work.precision != "fp32" and importlib.util.find_spec("flash_attn")
    return {"attn_implementation": "flash_attention_2"} if usable else {}


def uses_liger(work: Work) -> bool:
    """For TRL: Liger's kernels where they are installed."""
    return work.device == "cuda" and importlib.util.find_spec("liger_kernel") is not None


def flat_dataset(folder: Path) -> Any:
    """A row is a step: all its documents end to end, and their lengths."""
    from datasets import Dataset

    steps = read_steps(folder)
    return Dataset.from_dict(
        {
            "input_ids": [[int(i) for ids in step.ids for i in ids] for step in steps],
            "labels": [[int(i) for labels in step.labels for i in labels] for step in steps],
            "seq_lengths": [[len(ids) for ids in step.ids] for step in steps],
        }
    )


def nested_dataset(folder: Path) -> Any:
    """A row is a step: a list of its documents."""
    from datasets import Dataset

    steps = read_steps(folder)
    return Dataset.from_dict(
        {
            "input_ids": [[ids.tolist() for ids in step.ids] for step in steps],
            "labels": [[labels.tolist() for labels in step.labels] for step in steps],
        }
    )


def each_row_is_a_batch(collate: Callable[[list[dict[str, Any]]], Any]) -> Callable[[list[Any]], Any]:
    """As many documents in a batch as our packed rows hold: steps differ in it, so that their documents need not."""

    def collate_documents(rows: list[Any]) -> Any:
        (row,) = rows
        return collate([{"input_ids": i, "labels": k} for i, k in zip(row["input_ids"], row["labels"], strict=True)])

    return collate_documents


def trained_by(trainer: Any, watch: Any) -> Result:
    """The trainer's own count of supervised tokens is read from its batches, after the clock has stopped.

    Its log has the first loss, and if it logged once more, at the end, the mean of all others.
    """
    with contextlib.redirect_stdout(sys.stderr):
        trainer.train()
    measured = watch.result()
    logged = [line for line in trainer.state.log_history if "loss" in line]
    batches = trainer.get_train_dataloader()
    supervised = [int((batch["labels"][:, 1:] != UNTRAINED).sum()) for batch in batches]
    model = trainer.model
    about = {
        "attention": getattr(model.config, "_attn_implementation", None),
        "liger": bool(getattr(trainer.args, "use_liger_kernel", False)),
        "trainable_parameters": trainable(model),
    }
    at_the_end = [line["step"] for line in logged[1:]] == [len(supervised)]
    return {
        **measured,
        "losses": [line["loss"] for line in logged[:1]],
        **({"later_loss": logged[1]["loss"]} if at_the_end else {}),
        "supervised": supervised,
        "about": about,
    }


def trainable(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


CONTENDERS: dict[str, Callable[[Path, Work], Result]] = {
    "ours": ours,
    "ours_frugal": ours_frugal,
    "ours_graphs": ours_graphs,
    "bare": bare,
    "trl": trl,
    "trl_frugal": trl_frugal,
    "trl_default": trl_default,
    "trainer": trainer,
    "trainer_padded": trainer_padded,
    "unsloth": unsloth,
}
LABELS = {
    "ours": "ours",
    "ours_frugal": "ours, recomputing",
    "ours_graphs": "ours, CUDA graphs",
    "bare": "bare loop",
    "trl": "TRL, packed",
    "trl_frugal": "TRL, packed, recomputing",
    "trl_default": "TRL's defaults",
    "trainer": "Trainer, packed",
    "trainer_padded": "Trainer, padded",
    "unsloth": "Unsloth",
}
GPU_ONLY = ("unsloth",)
NEEDS = {
    "trl": "trl",
    "trl_frugal": "trl",
    "trl_default": "trl",
    "unsloth": "unsloth",
}  # packages that are not the project's own


def missing(name: str, device: str) -> str | None:
    """Why a contender cannot take part here."""
    package = NEEDS.get(name)
    if package and importlib.util.find_spec(package) is None:
        return f"pip install {package}"
    return "needs a GPU" if name in GPU_ONLY and device != "cuda" else None


# --- a process of its own


def run(name: str, folder: Path, work: Work, command: list[str] | None = None, timeout: float | None = None) -> Result:
    """A contender in a fresh process. Raises RuntimeError, with the end of what it wrote, where it fails.

    command: what starts Python, where it is not this one (`accelerate launch ...`).
    """
    work.write(folder)
    (folder / "result.json").unlink(missing_ok=True)
    python([str(Path(__file__).resolve()), name, str(folder)], folder, work, name, command, timeout)
    return json.loads((folder / "result.json").read_text(encoding="utf-8"))


def python(
    script: list[str],
    folder: Path,
    work: Work,
    name: str,
    command: list[str] | None = None,
    timeout: float | None = None,
) -> str:
    """A script in a fresh process, with the threads of `work` and no way to a hub; returns what it printed."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(work.threads),
        "MKL_NUM_THREADS": str(work.threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "WANDB_MODE": "disabled",
        "FINETUNE_CACHE": str(folder / "cache"),
    }
    if work.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    if work.keeps_freed_memory:
        environment |= KEPT
    root = Path(__file__).resolve().parent.parent
    environment["PYTHONPATH"] = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    with tempfile.TemporaryFile("w+") as log:
        environment[LAUNCHED] = str(time.time())
        done = subprocess.run(
            [*(command or [sys.executable]), *script],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=log,
            timeout=timeout,
            cwd=folder,
            text=True,
        )
        if done.returncode:
            log.seek(0)
            raise RuntimeError(f"{name} failed:\n{done.stdout[-2000:]}{log.read()[-4000:]}")
    return done.stdout


def versions() -> dict[str, str]:
    """Of what took part, where installed."""
    names = (
        "finetune",
        "torch",
        "transformers",
        "accelerate",
        "peft",
        "trl",
        "bitsandbytes",
        "flash-attn",
        "liger-kernel",
    )
    return {name: metadata.version(name) for name in names if _installed(name)}


def _installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    result = CONTENDERS[name](folder, Work.read(folder))
    if int(os.environ.get("RANK", "0")) == 0:
        (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
