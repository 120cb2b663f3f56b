"""Losses of other tools' own trainers on the examples of docs/guides/coming-from-other-tools.md, beside the recipes'.

    python scripts/docs/other_trainers.py FOLDER ours
    PYTHONPATH=LIBRARIES python scripts/docs/other_trainers.py FOLDER llama_factory   # or axolotl, torchtune, unsloth

The first trains the converted recipes on one CPU process, 36 steps of the same eight rows, so that order says nothing,
and keeps how their adapters begin. The second trains the tool's config in the same way, and keeps its losses and their
largest difference in benchmarks/results/other_trainers.json. Each tool wants other versions of transformers and more:
LIBRARIES is a folder of `pip install --no-deps --target`, of what docs/proofs/first-day.md lists.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import converted_curves
import torch
import yaml
from converted_curves import OF_A_STEP, RATE, SEED, STEPS, inside, recipe_losses, write_inputs
from safetensors.torch import load_file, save_file

# What a converted recipe leaves out here, as its tool does below: warm-up, which begins at another rate; packing, whose
# steps have other rows; four bits, which Unsloth has on GPUs alone, with its defaults of warm-up and decay.
PLAIN = ("schedule.warmup_ratio=null", "schedule.warmup_steps=0")
CHANGES = {
    "llama_factory": (),
    "axolotl": (*PLAIN, "data.packing=false"),
    "torchtune": PLAIN,
    "unsloth_qlora": (*PLAIN, "mode=lora", "quantization=null", "optimizer.weight_decay=0", f"run.seed={SEED}"),
}
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RESULTS = converted_curves.ROOT / "benchmarks" / "results" / "other_trainers.json"
BEGIN = "begin.safetensors"
COMMON = {"learning_rate": RATE, "max_steps": STEPS, "logging_steps": 1, "seed": SEED, "bf16": False}


def ours() -> None:
    """Trains the recipes, and writes losses and the matrices A that adapters of rank 16 begin with."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(SEED + 1)  # as the recipe draws them
    settings = LoraConfig(r=16, lora_alpha=32, target_modules=list(LINEAR))
    model = get_peft_model(AutoModelForCausalLM.from_pretrained("llama"), settings)
    save_file({key(name): p.detach() for name, p in model.named_parameters() if "lora_A" in name}, BEGIN)
    small = converted_curves.SMALL
    for stem, changes in CHANGES.items():
        converted_curves.SMALL = (*small, *changes)
        name = f"{stem}.py" if stem == "unsloth_qlora" else f"{stem}.yaml"
        Path(f"{stem}.json").write_text(json.dumps(recipe_losses(name)), encoding="utf-8")


def key(name: str) -> str:
    """Returns layer and module of a parameter of peft's: `0.self_attn.q_proj`."""
    return name.partition("model.layers.")[2].partition(".lora_A")[0]


def begin_alike(model: Any) -> Any:
    """Gives adapters of peft's the matrices that ours began with."""
    begin = load_file(BEGIN)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_A" in name:
                parameter.copy_(begin[key(name)])
    return model


def adapting(module: Any) -> None:
    """Lets a module's `get_peft_model` begin alike."""
    theirs = module.get_peft_model
    module.get_peft_model = lambda *given, **more: begin_alike(theirs(*given, **more))


def logged() -> list[float]:
    """Returns a list that gets each loss which transformers' trainer logs."""
    from transformers import Trainer

    losses, log = list[float](), Trainer.log

    def keep(trainer: Any, logs: dict[str, float], *rest: Any, **more: Any) -> None:
        losses.extend([float(logs["loss"])] if "loss" in logs else [])
        log(trainer, logs, *rest, **more)

    Trainer.log = keep
    return losses


def llama_factory() -> list[float]:
    os.environ["DISABLE_VERSION_CHECK"] = "1"
    adapting(importlib.import_module("llamafactory.model.adapter"))
    losses, given = logged(), yaml.safe_load(Path("llama_factory.yaml").read_text(encoding="utf-8"))
    del given["template"]  # the tokenizer's own
    small = {"model_name_or_path": "llama", "cutoff_len": 128, "use_cpu": True, "do_train": True, "report_to": "none"}
    small |= {"save_strategy": "no", "disable_gradient_checkpointing": True, "overwrite_output_dir": True}
    importlib.import_module("llamafactory.train.tuner").run_exp(args={**given, **COMMON, **small})
    return losses


def axolotl() -> list[float]:
    adapting(importlib.import_module("axolotl.loaders.adapter"))
    losses, given = logged(), yaml.safe_load(Path("axolotl.yaml").read_text(encoding="utf-8"))
    for name in ("num_epochs", "warmup_ratio"):
        del given[name]
    small = {"base_model": "llama", "sequence_len": 128, "sample_packing": False, "val_set_size": 0, "warmup_steps": 0}
    small |= {"optimizer": "adamw_torch", "device": "cpu", "chat_template": "tokenizer_default", "sdp_attention": True}
    small |= {"save_strategy": "no", "gradient_checkpointing": False, "dataset_prepared_path": "prepared"}
    small |= {"micro_batch_size": OF_A_STEP, "gradient_accumulation_steps": 1}  # of several it takes the mean of means
    small |= dict.fromkeys(("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel"), False)  # Triton's, for GPUs
    Path("axolotl-small.yaml").write_text(yaml.safe_dump({**given, **COMMON, **small}), encoding="utf-8")
    importlib.import_module("axolotl.cli.train").do_cli("axolotl-small.yaml")
    return losses


def unsloth() -> list[float]:
    """Runs the page's script. Unsloth changes transformers and TRL as it is imported, so it comes first."""
    fast = importlib.import_module("unsloth").FastLanguageModel
    from datasets import load_dataset
    from trl import SFTConfig, SFTTrainer

    losses, made = logged(), list[Any]()

    class Fast:
        @staticmethod
        def from_pretrained(*_given: Any, **_more: Any) -> Any:
            made.extend(fast.from_pretrained("llama", max_seq_length=128, load_in_4bit=False, dtype=torch.float32))
            return made

        @staticmethod
        def get_peft_model(*given: Any, **more: Any) -> Any:
            return begin_alike(fast.get_peft_model(*given, **more))

    def config(**given: Any) -> SFTConfig:
        small = {"optim": "adamw_torch", "fp16": False, "report_to": "none", "save_strategy": "no", "max_length": 128}
        return SFTConfig(**{**given, **COMMON, **small})

    def trainer(**given: Any) -> SFTTrainer:
        return SFTTrainer(processing_class=made[1], **given)

    names = {"FastLanguageModel": Fast, "SFTTrainer": trainer, "SFTConfig": config, "load_dataset": load_dataset}
    script = Path("unsloth_qlora.py").read_text(encoding="utf-8") + "\ntrainer.train()\n"
    exec(compile(script, "unsloth_qlora.py", "exec"), names)
    return losses


# --- torchtune, which has tokenizers of its own: it gets the ids and masks of the template


class Rows(torch.utils.data.Dataset[dict[str, list[int]]]):
    """Conversations of a question and an answer."""

    def __init__(self, tokenizer: Any, data_files: str):
        from transformers import AutoTokenizer

        llama, self._rows = AutoTokenizer.from_pretrained("llama"), list[dict[str, list[int]]]()
        for line in Path(data_files).read_text(encoding="utf-8").splitlines():
            turns = json.loads(line)["messages"]
            whole = llama.apply_chat_template(turns, return_dict=False)
            asked = llama.apply_chat_template(turns[:-1], add_generation_prompt=True, return_dict=False)
            self._rows.append({"tokens": whole, "labels": [-100] * len(asked) + whole[len(asked) :]})

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return self._rows[index]


class Padding:
    pad_id = 0


IN_TORCHTUNE = dict(
    zip(
        LINEAR,
        ("attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.output_proj", "mlp.w1", "mlp.w3", "mlp.w2"),
        strict=True,
    )
)


def torchtune() -> list[float]:
    """Runs its recipe for LoRA on one device."""
    omega = importlib.import_module("omegaconf").OmegaConf
    package = find_spec("torchtune")
    assert package is not None
    assert package.origin is not None
    file = Path(package.origin).parents[1] / "recipes" / "lora_finetune_single_device.py"  # no package, it says
    recipe = runpy.run_path(str(file))["LoRAFinetuneRecipeSingleDevice"]
    config = omega.create(_torchtune_config())
    running = recipe(config)
    running.setup(config)
    own, losses = dict(running._model.named_parameters()), list[float]()
    with torch.no_grad():
        for name, begin in load_file(BEGIN).items():
            layer, module = name.partition(".")[0], name.rpartition(".")[2]
            own[f"layers.{layer}.{IN_TORCHTUNE[module]}.lora_a.weight"].copy_(begin)
    running._metric_logger.log_dict = lambda payload, step: losses.append(float(payload["loss"]))
    running.save_checkpoint = lambda epoch: None
    running.train()
    return losses


def _torchtune_config() -> dict[str, Any]:
    given = yaml.safe_load(Path("torchtune.yaml").read_text(encoding="utf-8"))
    shape = json.loads(Path("llama/config.json").read_text(encoding="utf-8"))
    model = {
        name: given["model"][name] for name in ("lora_attn_modules", "apply_lora_to_mlp", "lora_rank", "lora_alpha")
    }
    model |= {
        "_component_": "torchtune.models.llama3.lora_llama3",
        "vocab_size": shape["vocab_size"],
        "max_seq_len": 256,
    }
    model |= {"num_layers": shape["num_hidden_layers"], "num_heads": shape["num_attention_heads"]}
    model |= {"num_kv_heads": shape["num_key_value_heads"], "embed_dim": shape["hidden_size"]}
    model |= {"intermediate_dim": shape["intermediate_size"], "norm_eps": shape["rms_norm_eps"], "rope_base": 10_000}
    files = {"checkpoint_dir": "llama", "checkpoint_files": ["model.safetensors"], "model_type": "LLAMA3"}
    logger = {"_component_": "torchtune.training.metric_logging.DiskLogger", "log_dir": "out/logs"}
    return {
        **given,
        "model": model,
        "tokenizer": {"_component_": "other_trainers.Padding"},
        "checkpointer": {**given["checkpointer"], **files, "output_dir": "out", "recipe_checkpoint": None},
        "dataset": {"_component_": "other_trainers.Rows", "data_files": "faq.jsonl"},
        "optimizer": {**given["optimizer"], "lr": RATE},
        "lr_scheduler": {**given["lr_scheduler"], "num_warmup_steps": 0},
        "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},  # of the version that is installed
        "metric_logger": logger,
        "epochs": STEPS,  # of one step each
        "max_steps_per_epoch": None,
        "resume_from_checkpoint": False,
        "enable_activation_checkpointing": False,
        "dtype": "fp32",
        "device": "cpu",
        "seed": SEED,
        "shuffle": True,
        "compile": False,
    }


THEIRS: dict[str, tuple[Callable[[], list[float]], str]] = {  # with the name of their config
    "llama_factory": (llama_factory, "llama_factory"),
    "axolotl": (axolotl, "axolotl"),
    "torchtune": (torchtune, "torchtune"),
    "unsloth": (unsloth, "unsloth_qlora"),
}


def main() -> None:
    folder, name = Path(sys.argv[1]), sys.argv[2]
    folder.mkdir(exist_ok=True)
    with inside(str(folder)):
        if name == "ours":
            write_inputs(Path(), OF_A_STEP)
            ours()
            return
        train, config = THEIRS[name]
        expected, losses = json.loads(Path(f"{config}.json").read_text(encoding="utf-8")), train()
        differs = max(abs(one - other) for one, other in zip(expected, losses, strict=True))
    kept = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    kept[name] = {"losses": losses, "differs": differs}
    RESULTS.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n", encoding="utf-8")
    print(f"{name}: from {losses[0]:.4f} to {losses[-1]:.4f}, largest difference {differs:.1e}")


if __name__ == "__main__":
    main()
