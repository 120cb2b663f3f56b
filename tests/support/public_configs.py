"""What public example configs of other tools say, and what that is in a recipe, by hand.

The keys and values are facts of the named files of July and August 2026, in an order of our own. A case is what its
tool does with the file, by the tool's sources; `open` names what a person has to decide.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class Case:
    """A config, the devices it ran on (0: not said), and the recipe: value by key."""

    tool: str
    file: str
    facts: dict[str, Any]
    recipe: dict[str, Any]
    devices: int = 0
    command: str = ""  # words before the options; else the facts are a file
    files: dict[str, Any] = field(default_factory=dict)  # that the command names
    open: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        return f"{self.tool} {self.file}".replace("examples/", "")


def _recipe(
    objective: str,
    trained: str | None,
    mode: str,
    rows: int,
    precision: str,
    length: int,
    optimizer: str,
    schedule: str,
    template: str | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Values that decide a run. trained: `train_on` of sft, the loss of pairs and policies; optimizer: name, rate and
    decay; schedule: name and warm-up, a share or steps."""
    name, rate, decay = optimizer.split()
    shape, warmup = schedule.split()
    key = "objective.train_on" if objective == "sft" else "objective.loss"
    is_share = "." in warmup
    return {
        "objective.name": objective,
        **({key: trained} if trained else {}),
        "mode": mode,
        "batch.rows": rows,
        "train.precision": precision,
        "data.max_length": length,
        "optimizer.name": name,
        "optimizer.lr": float(rate),
        "optimizer.weight_decay": float(decay),
        "schedule.name": shape,
        "schedule.warmup_ratio": float(warmup) if is_share else None,
        "schedule.warmup_steps": 0 if is_share else int(warmup),
        "model.chat_template": template,
        **{name.replace("__", "."): value for name, value in more.items()},
    }


# --- axolotl

_BF16 = {"bf16": "auto", "gradient_checkpointing": True, "warmup_ratio": 0.1, "lr_scheduler": "cosine"}
_LORA = {"lora_r": 32, "lora_alpha": 16, "lora_dropout": 0.05, "lora_target_linear": True}
_4BIT = {"adapter": "qlora", "load_in_4bit": True, "load_in_8bit": False}
_8BIT = {"adapter": "lora", "load_in_8bit": True, "load_in_4bit": False}
_BNB = {"optimizer": "adamw_bnb_8bit", "learning_rate": 0.0002}
_FUSED = {"optimizer": "adamw_torch_fused"}
_WRAP = {
    "fsdp": ["full_shard", "auto_wrap"],
    "fsdp_config": {"fsdp_offload_params": True, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
}
_FROM = {"message_property_mappings": {"role": "from", "content": "value"}, "field_messages": "conversations"}
_PAIR = {"field_messages": "conversation", "field_chosen": "chosen", "field_rejected": "rejected"}
_TURN = {"message_property_mappings": {"role": "role", "content": "content"}}
_ROLES = {"roles": {"user": ["user"], "system": ["system"], "assistant": ["assistant"]}}


def _axolotl(
    file: str, recipe: dict[str, Any], source: dict[str, Any] | list[Any], *facts: dict[str, Any], **more: Any
) -> Case:
    sizes = {
        "devices": more.pop("devices", 0),
        "open": more.pop("open", ()),
    }
    merged: dict[str, Any] = {}
    for part in (*facts, more):
        merged |= part
    datasets = source if isinstance(source, list) else [source]
    model = {"base_model": merged.pop("base_model", "org/base")}
    return Case("axolotl", f"examples/{file}", {**model, **merged, "datasets": datasets}, recipe, **sizes)


def _batch(micro: int, steps: int, length: int, epochs: int, packs: bool = True) -> dict[str, Any]:
    names = ("micro_batch_size", "gradient_accumulation_steps", "sequence_len", "num_epochs", "sample_packing")
    return dict(zip(names, (micro, steps, length, epochs, packs), strict=True))


_ALPACA = {"path": "tatsu-lab/alpaca", "type": "alpaca"}
_ALPACA_2K = {"path": "mhenrichsen/alpaca_2k_test", "type": "alpaca"}
_MESSAGES_2K = {"path": "fozziethebeat/alpaca_messages_2k_test", "type": "chat_template"}
_DPO_2K = {"path": "fozziethebeat/alpaca_messages_2k_dpo_test", "type": "chat_template.default", **_PAIR, **_TURN}
_FINETOME = {"path": "mlabonne/FineTome-100k", "type": "chat_template", "split": "train[:20%]", **_FROM}
_ORCA_PAIRS = {"path": "argilla/distilabel-intel-orca-dpo-pairs", "type": "bradley_terry.chat_template"}
_THINKING = {"path": "HuggingFaceH4/Multilingual-Thinking", "type": "chat_template"}
_BOOKS = [
    {
        "path": "togethercomputer/Long-Data-Collections",
        "type": "completion",
        "field": "text",
        "data_files": ["pretrain/rp_sub.jsonl.zst"],
    },
    {"path": "princeton-nlp/TextbookChapters", "type": "completion", "field": "chapter"},
]
_ALST = {"context_parallel_size": 8, "optimizer": "adamw_torch_8bit", "learning_rate": "2e-5", "warmup_steps": 100}
_FSDP2 = {"fsdp_version": 2, "fsdp_config": {"offload_params": False, "reshard_after_forward": True}}

AXOLOTL = [
    _axolotl(
        "llama-2/lora.yml",
        _recipe(
            "sft", "assistant", "qlora", 8, "bf16", 4096, "adamw_8bit 2e-4 0", "cosine 0.1", quantization__type="fp8"
        ),
        *(_ALPACA_2K, _BF16, _LORA, _8BIT, _BNB, _batch(2, 4, 4096, 4)),
        devices=1,
    ),
    _axolotl(
        "llama-2/qlora-fsdp.yml",
        _recipe("sft", "assistant", "qlora", 32, "bf16", 512, "adamw 1e-5 0", "cosine 0.1", data__packing=False),
        *({"path": "yahma/alpaca-cleaned", "type": "alpaca"}, _BF16, _LORA, _4BIT, _FUSED, _batch(4, 4, 512, 4, False)),
        **_WRAP,
        learning_rate=0.00001,
        devices=2,
    ),
    _axolotl(
        "llama-2/fft_optimized.yml",
        _recipe("sft", "assistant", "full", 1, "bf16_true", 4096, "adamw_8bit 2e-4 0.1", "cosine 0.1"),
        *(_ALPACA_2K, _BF16, _BNB, _batch(1, 1, 4096, 1)),
        weight_decay=0.1,
        devices=1,
    ),
    _axolotl(
        "llama-3/fft-8b.yaml",
        _recipe("sft", "assistant", "full", 8, "bf16_true", 8192, "paged_adamw_8bit 2e-5 0", "cosine 0.1"),
        *(_ALPACA, _BF16, _batch(1, 8, 8192, 1)),
        optimizer="paged_adamw_8bit",
        learning_rate="2e-5",
        devices=1,
    ),
    _axolotl(
        "llama-3/fft-8b-liger-fsdp.yaml",
        _recipe("sft", "assistant", "full", 32, "bf16", 4096, "adamw 2e-5 0", "cosine 0.1", "llama3"),
        *(_FINETOME, _BF16, _WRAP, _FUSED, _batch(2, 4, 4096, 1)),
        chat_template="llama3",
        learning_rate="2e-5",
        val_set_size=0.02,
        devices=4,
    ),
    _axolotl(
        "llama-3/instruct-lora-8b.yml",
        _recipe("sft", "assistant", "qlora", 8, "bf16", 4096, "adamw_8bit 2e-4 0", "cosine 0.1", "llama3"),
        *(_MESSAGES_2K, _BF16, _LORA, _8BIT, _BNB, _batch(2, 4, 4096, 4, False)),
        chat_template="llama3",
        devices=1,
    ),
    _axolotl(
        "llama-3/instruct-dpo-lora-8b.yml",
        _recipe(
            *("dpo", "sigmoid", "qlora", 8, "bf16", 4096, "adamw_8bit 2e-4 0", "cosine 0.1", "llama3"),
            objective__beta=0.1,
            objective__reference="adapters_off",
            lora__dropout=0.0,
        ),
        *({**_DPO_2K, **_ROLES}, _BF16, _LORA, _8BIT, _BNB, _batch(2, 4, 4096, 4, False)),
        chat_template="llama3",
        rl="dpo",
        devices=1,
    ),
    _axolotl(
        "llama-3/lora-1b.yml",
        _recipe(
            *("sft", "assistant", "lora", 4, "bf16", 2048, "adamw_8bit 2e-4 0", "cosine 0.1"),
            lora__rank=16,
            lora__targets=("gate_proj", "down_proj", "up_proj", "q_proj", "v_proj", "k_proj", "o_proj"),
        ),
        *({"path": "teknium/GPT4-LLM-Cleaned", "type": "alpaca"}, _BF16, _batch(2, 2, 2048, 1)),
        adapter="lora",
        lora_r=16,
        lora_alpha=32,
        lora_dropout=0.05,
        lora_target_modules=["gate_proj", "down_proj", "up_proj", "q_proj", "v_proj", "k_proj", "o_proj"],
        optimizer="adamw_8bit",
        learning_rate=0.0002,
        devices=1,
    ),
    _axolotl(
        "llama-3/qlora-1b-kto.yaml",
        _recipe(
            *("kto", None, "qlora", 2, "bf16", 2048, "adamw_8bit 2e-4 0", "cosine 0.1", "llama3"),
            objective__beta=0.5,
            objective__desirable_weight=0.2,
            objective__undesirable_weight=1.0,
        ),
        {"path": "argilla/ultrafeedback-binarized-preferences-cleaned-kto", "type": "llama3.ultra", "split": "train"},
        *(_BF16, _4BIT, _batch(2, 1, 2048, 1, False)),
        rl="kto",
        rl_beta=0.5,
        kto_desirable_weight=0.2,
        lora_r=32,
        lora_alpha=64,
        lora_dropout=0.05,
        lora_target_linear=True,
        optimizer="adamw_8bit",
        learning_rate=0.0002,
        devices=1,
    ),
    _axolotl(
        "llama-3/qlora-1b-gdpo.yaml",
        _recipe(
            *("grpo", "dapo", "full", 8, "bf16_true", 512, "adamw 5e-5 0.01", "cosine 10", "llama3"),
            rollouts__prompts=4,
            rollouts__samples=2,
            rollouts__max_new_tokens=128,
            rollouts__temperature=0.7,
            rollouts__top_p=0.95,
            objective__kl=0.001,
            objective__scale_rewards="group",
            train__max_steps=100,
        ),
        {"path": "openai/gsm8k", "name": "main", "split": "train[:1000]", "type": "rwd.gsm8k_transform"},
        *({"bf16": "auto", "lr_scheduler": "cosine"}, _FUSED, _batch(1, 8, 512, 1, False)),
        rl="gdpo",
        chat_template="llama3",
        trl={
            "beta": 0.001,
            "max_completion_length": 128,
            "num_generations": 2,
            "temperature": 0.7,
            "top_p": 0.95,
            "use_vllm": False,
            "scale_rewards": True,
            "reward_funcs": ["rwd.format_reward", "rwd.correctness_reward"],
            "reward_weights": [1.0, 2.0],
            "multi_objective_aggregation": "normalize_then_sum",
        },
        max_steps=100,
        warmup_steps=10,
        learning_rate="5e-5",
        weight_decay=0.01,
        open=("objective.name", "data.train", "rewards"),
        devices=1,
    ),
    _axolotl(
        "llama-3/qlora-fsdp-70b.yaml",
        _recipe("sft", "assistant", "qlora", 8, "bf16", 512, "adamw 1e-5 0", "cosine 0.1", lora__rank=8),
        *(_ALPACA, _BF16, _LORA, _4BIT, _FUSED, _WRAP, _batch(1, 4, 512, 4, False)),
        lora_r=8,
        learning_rate=0.00001,
        devices=2,
    ),
    _axolotl(
        "gemma2/qlora.yml",
        _recipe("sft", "assistant", "qlora", 4, "bf16", 2048, "adamw_8bit 2e-4 0", "cosine 0.1", "gemma"),
        {"path": "cgato/SlimOrcaDedupCleaned", "type": "chat_template", "drop_system_message": True, **_FROM},
        *(_BF16, _LORA, _4BIT, _BNB, _batch(1, 4, 2048, 4)),
        chat_template="gemma",
        open=("data.train",),
        devices=1,
    ),
    _axolotl(
        "gemma2/reward-model.yaml",
        _recipe("reward", None, "full", 8, "bf16_true", 2048, "adamw_8bit 2e-4 0", "cosine 0.1", "gemma"),
        *(_ORCA_PAIRS, _BF16, _BNB, _batch(2, 4, 2048, 4, False)),
        reward_model=True,
        num_labels=1,
        bf16=True,
        chat_template="gemma",
        devices=1,
    ),
    _axolotl(
        "qwen3/reward-model.yaml",
        _recipe(
            *("reward", None, "full", 8, "bf16", 8192, "adamw_8bit 2e-5 0.01", "linear 0.1"), objective__centering=0.01
        ),
        *(_ORCA_PAIRS, _BF16, _batch(1, 4, 8192, 3, False)),
        reward_model=True,
        num_labels=1,
        center_rewards_coefficient=0.01,
        chat_template="qwen3",
        deepspeed="deepspeed_configs/zero1.json",
        optimizer="adamw_bnb_8bit",
        lr_scheduler="linear",
        learning_rate=0.00002,
        weight_decay=0.01,
        devices=2,
    ),
    _axolotl(
        "gpt-oss/gpt-oss-20b-fft-fsdp2-offload.yaml",
        _recipe("sft", "assistant", "full", 16, "bf16", 4096, "adamw 2e-5 0", "constant 0.03"),
        *({**_THINKING, "field_thinking": "thinking", "template_thinking_key": "thinking"}, _FUSED),
        **_batch(1, 2, 4096, 1),
        fsdp_version=2,
        fsdp_config={"offload_params": True, "transformer_layer_cls_to_wrap": "GptOssDecoderLayer"},
        bf16=True,
        lr_scheduler="constant_with_warmup",
        warmup_ratio=0.03,
        learning_rate="2e-5",
        devices=8,
    ),
    _axolotl(
        "gpt-oss/gpt-oss-20b-sft-lora-singlegpu.yaml",
        _recipe("sft", "assistant", "lora", 8, "bf16", 4096, "adamw_8bit 2e-4 0", "constant 0.1", lora__alpha=16.0),
        *({**_THINKING, "field_thinking": "thinking", "template_thinking_key": "thinking"}, _batch(1, 8, 4096, 1)),
        adapter="lora",
        lora_r=8,
        lora_alpha=16,
        lora_dropout=0.0,
        lora_target_linear=True,
        optimizer="adamw_torch_8bit",
        lr_scheduler="constant_with_warmup",
        warmup_ratio=0.1,
        learning_rate="2e-4",
        bf16=True,
        devices=1,
    ),
    _axolotl(
        "mistral/config.yml",
        _recipe("sft", "assistant", "full", 8, "bf16_true", 8192, "adamw_8bit 5e-6 0", "cosine 0.1", train__epochs=4),
        *(_ALPACA_2K, _BF16, _BNB, _batch(2, 4, 8192, 4)),
        learning_rate=0.000005,
        devices=1,
    ),
    _axolotl(
        "mistral/dpo/mistral-dpo-qlora.yml",
        _recipe(
            *("dpo", "sigmoid", "qlora", 64, "bf16", 2048, "adamw_8bit 1e-4 0", "cosine 0.1", "chatml"),
            objective__reference=None,  # modules that are trained fully: the base is not the model without adapters
            lora__modules_to_save=("embed_tokens", "lm_head"),
        ),
        *({**_DPO_2K, "path": "olivermolenschot/alpaca_messages_dpo_test"}, _BF16, _LORA, _4BIT, _BNB),
        **_batch(16, 4, 2048, 6, False),
        rl="dpo",
        chat_template="chatml",
        lora_r=8,
        lora_dropout=0.2,
        lora_target_modules=ALL,
        lora_modules_to_save=["embed_tokens", "lm_head"],
        learning_rate=0.0001,
        devices=1,
    ),
    _axolotl(
        "mistral/mixtral/mixtral.yml",
        _recipe(
            *("sft", "assistant", "qlora", 8, "bf16", 4096, "adamw_8bit 2e-4 0", "cosine 0.1"),
            objective__router_aux_loss_coef=0.001,
        ),
        *(_ALPACA, _BF16, _LORA, _4BIT, _BNB, _batch(1, 2, 4096, 1)),
        model_config={"output_router_logits": True},
        deepspeed="deepspeed_configs/zero2.json",
        open=("objective.router_aux_loss_coef",),
        devices=4,
    ),
    _axolotl(
        "mistral/bigstral/bigstral-ds-zero3.yaml",
        _recipe(
            *("sft", "assistant", "full", 1, "bf16", 2048, "adamw_8bit 1e-4 0", "cosine 0.03"),
            tokens__add=("<|im_start|>",),
            checkpoint__keep=1,
        ),
        *(_ALPACA, _BNB, _batch(1, 1, 2048, 3)),
        bf16="auto",
        lr_scheduler="cosine",
        unfrozen_parameters=["^lm_head.weight$", "model.layers.5[0-5]+.block_sparse_moe.experts"],
        model_config={"output_router_logits": True},
        deepspeed="deepspeed_configs/zero3_bf16_cpuoffload_params.json",
        tokens=["<|im_start|>"],
        save_total_limit=1,
        learning_rate=0.0001,
        open=("mode", "objective.router_aux_loss_coef", "batch.rows"),
    ),
    _axolotl(
        "mistral/orpo/mistral-qlora-orpo.yml",
        _recipe(
            *("orpo", None, "qlora", 8, "bf16", 4096, "adamw_8bit 2e-4 0", "cosine 0.1", "chatml"), objective__beta=0.1
        ),
        {"path": "argilla/ultrafeedback-binarized-preferences-cleaned", "type": "chat_template.argilla"},
        *(_BF16, _LORA, _4BIT, _BNB, _batch(2, 4, 4096, 1, False)),
        rl="orpo",
        orpo_alpha=0.1,
        chat_template="chatml",
        lora_target_modules=ALL,
        devices=1,
    ),
    _axolotl(
        "phi/phi3-ft-fsdp.yml",
        _recipe(
            *("sft", "assistant", "full", 48, "bf16", 4096, "adamw 3e-6 0.1", "cosine 0.1"),
            optimizer__betas=(0.9, 0.95),
            optimizer__eps=1e-5,
        ),
        *(_ALPACA_2K, _BF16, _FUSED, _WRAP, _batch(12, 2, 4096, 2)),
        adam_beta2=0.95,
        adam_epsilon=0.00001,
        max_grad_norm=1.0,
        learning_rate=0.000003,
        weight_decay=0.1,
        devices=2,
    ),
    _axolotl(
        "phi/lora-3.5.yaml",
        _recipe("sft", "assistant", "qlora", 16, "bf16", 4096, "adamw_8bit 2e-4 0", "cosine 0.1"),
        *(_MESSAGES_2K, _BF16, _LORA, _8BIT, _BNB, _batch(4, 4, 4096, 2, False)),
        bfloat16=True,
        bf16=True,
        chat_template="phi_3",
        devices=1,
    ),
    _axolotl(
        "qwen2/dpo.yaml",
        _recipe("dpo", "sigmoid", "full", 8, "bf16_true", 2048, "adamw_8bit 2e-4 0", "cosine 0.1"),
        *({**_DPO_2K, **_ROLES}, _BF16, _BNB, _batch(2, 4, 2048, 4, False)),
        rl="dpo",
        chat_template="qwen_25",
        devices=1,
    ),
    _axolotl(
        "qwen3/32b-qlora.yaml",
        _recipe(
            *("sft", "assistant", "qlora", 2, "bf16", 2048, "adamw 2e-4 0", "cosine 0.1"),
            train__activation_offload=True,
        ),
        *(_FINETOME, _BF16, _4BIT, _batch(1, 2, 2048, 1)),
        lora_r=16,
        lora_alpha=32,
        lora_target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "down_proj", "up_proj"],
        optimizer="adamw_torch_4bit",
        learning_rate=0.0002,
        gradient_checkpointing="offload",
        chat_template="qwen3",
        open=("optimizer.name",),
        devices=1,
    ),
    _axolotl(
        "qwen3/qlora-fsdp.yaml",
        _recipe("sft", "assistant", "qlora", 32, "bf16", 2048, "adamw 2e-4 0", "cosine 0.1", lora__alpha=64.0),
        *(_ALPACA, _BF16, _LORA, _4BIT, _FUSED, _WRAP, _batch(1, 4, 2048, 1)),
        lora_alpha=64,
        learning_rate=0.0002,
        devices=8,
    ),
    _axolotl(
        "distributed-parallel/qwen3-8b-fsdp-tp-cp.yaml",
        _recipe("sft", "assistant", "full", 2, "bf16", 8192, "adamw 2e-6 0", "constant 0.1", train__epochs=2),
        *(_ALPACA, _FUSED, _FSDP2, _batch(1, 1, 8192, 2)),
        dp_shard_size=2,
        tensor_parallel_size=2,
        context_parallel_size=2,
        bf16=True,
        lr_scheduler="constant_with_warmup",
        warmup_ratio=0.1,
        learning_rate="2e-6",
        devices=8,
    ),
    _axolotl(
        "distributed-parallel/llama-3_1-8b-hsdp-tp.yaml",  # 4 x 2 x 2 processes, two of which share their rows
        _recipe("sft", "assistant", "full", 8, "bf16", 2048, "adamw 2e-6 0", "constant 0.1"),
        *(_ALPACA, _FUSED, _FSDP2, _batch(1, 1, 2048, 2)),
        dp_shard_size=4,
        dp_replicate_size=2,
        tensor_parallel_size=2,
        bf16=True,
        lr_scheduler="constant_with_warmup",
        warmup_ratio=0.1,
        learning_rate="2e-6",
    ),
    _axolotl(
        "alst/llama3-8b-deepspeed-alst.yaml",
        _recipe(
            *("sft", "assistant", "full", 1, "bf16", 500000, "adamw_8bit 2e-5 0", "cosine 100"), data__overlong="split"
        ),
        *(_BOOKS, _ALST, _batch(1, 1, 500000, 1)),
        bf16="auto",
        lr_scheduler="cosine",
        deepspeed="deepspeed_configs/zero3_bf16_cpuoffload_all.json",
        activation_offloading="legacy",
        devices=8,
    ),
    _axolotl(
        "alst/llama3-8b-fsdp2-alst.yaml",
        _recipe("sft", "assistant", "full", 1, "bf16", 500000, "adamw_8bit 2e-5 0", "cosine 100"),
        *(_BOOKS, _ALST, _FSDP2, _batch(1, 1, 500000, 1)),
        bf16="auto",
        lr_scheduler="cosine",
        open=("batch.rows",),
    ),
    _axolotl(
        "falcon-e/falcon-e-3b-dpo.yaml",
        _recipe(
            *("dpo", "sigmoid", "full", 32, "bf16", 8192, "adamw 1e-5 0.01", "cosine 128", "chatml"),
            optimizer__betas=(0.9, 0.95),
            checkpoint__every_steps=500,
        ),
        *({"path": "allenai/Dolci-Think-DPO-7B", "type": "chatml.ultra", "split": "train"}, _FSDP2),
        rl="dpo",
        chat_template="tokenizer_default",
        sequence_len=8192,
        micro_batch_size=1,
        gradient_accumulation_steps=4,
        num_epochs=3,
        optimizer="adamw_torch",
        adam_beta1=0.9,
        adam_beta2=0.95,
        weight_decay=0.01,
        learning_rate=0.00001,
        lr_scheduler="cosine",
        warmup_steps=128,
        save_steps=500,
        save_strategy="steps",
        bf16=True,
        devices=8,
    ),
]

# --- LLaMA-Factory; its data/dataset_info.json says of the datasets:

DATASETS: dict[str, Any] = {
    "identity": {"file_name": "identity.json"},
    "alpaca_en_demo": {"file_name": "alpaca_en_demo.json"},
    "c4_demo": {"file_name": "c4_demo.jsonl", "columns": {"prompt": "text"}},
    "dpo_en_demo": {
        "file_name": "dpo_en_demo.json",
        "formatting": "sharegpt",
        "ranking": True,
        "columns": {"rejected": "rejected", "chosen": "chosen", "messages": "conversations"},
    },
    "kto_en_demo": {
        "file_name": "kto_en_demo.json",
        "formatting": "sharegpt",
        "columns": {"kto_tag": "label", "messages": "messages"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
    },
    "mllm_demo": {
        "file_name": "mllm_demo.json",
        "formatting": "sharegpt",
        "columns": {"images": "images", "messages": "messages"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
    },
}
_COSINE = {"lr_scheduler_type": "cosine", "warmup_ratio": 0.1, "num_train_epochs": 3.0, "bf16": True}
_SAVED = {"save_steps": 500, "logging_steps": 10, "plot_loss": True, "report_to": "none", "do_train": True}


def _factory(
    file: str,
    recipe: dict[str, Any],
    stage: str = "sft",
    kind: str = "lora",
    steps: int = 8,
    rate: float = 0.0001,
    dataset: str = "identity,alpaca_en_demo",
    template: str | None = "qwen3_nothink",
    **more: Any,
) -> Case:
    sizes = {key: more.pop(key) for key in ("devices", "open", "command", "files") if key in more}
    facts = {
        "model_name_or_path": "org/base",
        "stage": stage,
        "finetuning_type": kind,
        **({"lora_rank": 8, "lora_target": "all"} if kind == "lora" else {}),
        "dataset": dataset,
        "template": template,
        "cutoff_len": 2048,
        "max_samples": 1000,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": steps,
        "learning_rate": rate,
        **_COSINE,
        **_SAVED,
        **more,
    }
    facts = {name: value for name, value in facts.items() if value is not None}
    return Case("LLaMA-Factory", f"examples/{file}", facts, recipe, **{"devices": 1, **sizes})


def _of_factory(objective: str, trained: str | None, mode: str, rows: int, rate: str, **more: Any) -> dict[str, Any]:
    given = {"precision": "bf16", "length": 2048, "optimizer": f"adamw {rate} 0", "schedule": "cosine 0.1"}
    parts = {key: more.pop(key, value) for key, value in given.items()}
    return _recipe(objective, trained, mode, rows, **parts, template=more.pop("template", None), **more)


LLAMA_FACTORY = [
    _factory(
        "train_full/qwen3_full_sft.yaml",
        _of_factory("sft", "assistant", "full", 8, "1e-5", data__overlong="truncate"),
        kind="full",
        steps=2,
        rate=0.00001,
        deepspeed="examples/deepspeed/ds_z3_config.json",
        devices=4,
    ),
    _factory(
        "train_full/qwen3vl_full_sft.yaml",
        _of_factory("sft", "assistant", "full", 4, "1e-5", model__train=("language",)),
        kind="full",
        steps=2,
        rate=0.00001,
        dataset="mllm_demo,identity,alpaca_en_demo",
        template="qwen3_vl_nothink",
        image_max_pixels=262144,
        freeze_vision_tower=True,
        freeze_multi_modal_projector=True,
        freeze_language_model=False,
        deepspeed="examples/deepspeed/ds_z3_config.json",
        devices=2,
    ),
    _factory(
        "train_lora/qwen3_lora_sft.yaml",
        _of_factory("sft", "assistant", "lora", 8, "1e-4", lora__alpha=16.0, lora__targets="all-linear"),
    ),
    _factory(
        "train_lora/qwen3_lora_sft_ds3.yaml",
        _of_factory("sft", "assistant", "lora", 2, "1e-4"),
        steps=2,
        deepspeed="examples/deepspeed/ds_z3_config.json",
        devices=0,
        open=("batch.rows",),
    ),
    _factory(
        "train_lora/qwen3_lora_dpo.yaml",
        _of_factory("dpo", "sigmoid", "lora", 8, "5e-6", objective__beta=0.1, objective__reference="adapters_off"),
        stage="dpo",
        rate=0.000005,
        dataset="dpo_en_demo",
        pref_beta=0.1,
        pref_loss="sigmoid",
    ),
    _factory(
        "train_lora/qwen3_lora_kto.yaml",
        _of_factory("kto", None, "lora", 8, "5e-6", objective__beta=0.1, objective__desirable_weight=1.0),
        stage="kto",
        rate=0.000005,
        dataset="kto_en_demo",
        pref_beta=0.1,
    ),
    _factory(
        "train_lora/qwen3_lora_reward.yaml",
        _of_factory("reward", None, "lora", 8, "1e-4", data__overlong="drop"),
        stage="rm",
        dataset="dpo_en_demo",
    ),
    _factory(
        "train_lora/qwen3_lora_pretrain.yaml",
        _of_factory("sft", "all", "lora", 8, "1e-4", data__packing=True, data__overlong="split"),
        stage="pt",
        dataset="c4_demo",
        template=None,
    ),
    _factory(
        "train_lora/qwen3vl_lora_sft.yaml",
        _of_factory("sft", "assistant", "lora", 8, "1e-4", data__image__max_pixels=262144),
        dataset="mllm_demo,identity,alpaca_en_demo",
        template="qwen3_vl_nothink",
        image_max_pixels=262144,
    ),
    _factory(
        "train_qlora/qwen3_lora_sft_otfq.yaml",
        _of_factory("sft", "assistant", "qlora", 8, "1e-4", quantization__type="nf4"),
        quantization_bit=4,
        quantization_method="bnb",
    ),
    _factory(
        "train_qlora/llama3_lora_sft_awq.yaml",
        _of_factory("sft", "assistant", "lora", 8, "1e-4", template="llama3"),
        template="llama3",
        model_name_or_path="TechxGenus/Meta-Llama-3-8B-Instruct-AWQ",
        open=("model.name",),
    ),
    _factory(
        "extras/muon/qwen2_full_sft.yaml",
        _of_factory("sft", "assistant", "full", 8, "1e-5", optimizer="muon 1e-5 0"),
        kind="full",
        rate=0.00001,
        template="qwen",
        use_muon=True,
    ),
    _factory(
        "extras/dft/qwen2_full_sft.yaml",
        _of_factory("sft", "assistant", "full", 8, "1e-5"),
        kind="full",
        rate=0.00001,
        template="qwen",
        use_dft_loss=True,
        open=("objective.name",),
    ),
    _factory(
        "extras/loraplus/llama3_lora_sft.yaml",
        _of_factory("sft", "assistant", "lora", 8, "1e-4", template="llama3"),
        template="llama3",
        loraplus_lr_ratio=16.0,
        open=("optimizer.lr",),
    ),
    _factory(
        "extras/badam/llama3_full_sft.yaml",  # neither bf16 nor fp16: fp32
        _of_factory("sft", "assistant", "full", 8, "1e-5", precision="fp32", template="llama3"),
        kind="full",
        rate=0.00001,
        template="llama3",
        bf16=None,
        use_badam=True,
        badam_mode="layer",
        open=("optimizer.name",),
    ),
    _factory(
        "extras/galore/llama3_full_sft.yaml",
        _of_factory("sft", "assistant", "full", 1, "1e-5", precision="bf16_true", template="llama3"),
        kind="full",
        steps=1,
        rate=0.00001,
        template="llama3",
        bf16=None,
        pure_bf16=True,
        use_galore=True,
        galore_rank=128,
        open=("optimizer.name",),
    ),
    _factory(
        "extras/llama_pro/llama3_freeze_sft.yaml",
        _of_factory("sft", "assistant", "lora", 8, "1e-4", template="llama3"),
        kind="freeze",
        template="llama3",
        freeze_trainable_layers=8,
        use_llama_pro=True,
        open=("lora.targets",),
    ),
    _factory(
        "extras/fp8/llama3_fp8_deepspeed_sft.yaml",
        _of_factory("sft", "assistant", "full", 64, "5e-5", precision="fp8", length=1024, template="llama3"),
        kind="full",
        rate=0.00005,
        dataset="identity",
        template="llama3",
        cutoff_len=1024,
        fp8=True,
        fp8_backend="torchao",
        deepspeed="examples/deepspeed/ds_z3_fp8_config.json",
        devices=8,
    ),
    _factory(
        "extras/fsdp_qlora/llama3_lora_sft.yaml",
        _of_factory("sft", "assistant", "qlora", 16, "1e-4", template="llama3"),
        template="llama3",
        quantization_bit=4,
        command="CUDA_VISIBLE_DEVICES=0,1 accelerate launch --config_file fsdp_config.yaml src/train.py theirs.yaml",
        files={
            "fsdp_config.yaml": {
                "distributed_type": "FSDP",
                "mixed_precision": "bf16",
                "num_processes": 2,
                "fsdp_config": {"fsdp_offload_params": False, "fsdp_sharding_strategy": "FULL_SHARD"},
            }
        },
        devices=0,
    ),
]

# --- TRL: the commands in the docstrings of its scripts

ZERO3 = {
    "distributed_type": "DEEPSPEED",
    "mixed_precision": "bf16",
    "num_processes": 8,
    "deepspeed_config": {"zero_stage": 3, "offload_optimizer_device": "none", "zero3_init_flag": True},
}
_TRAIN_ON = "objective.train_on"  # of messages all, of prompts and completions the completions


def _trl(file: str, recipe: dict[str, Any], options: dict[str, Any], command: str = "", **more: Any) -> Case:
    name = file.rpartition("/")[2]
    given = {"model_name_or_path": "org/base", "dataset_name": "org/rows", **options}
    return Case("TRL", file, given, recipe, command=command or f"python {name}", **{"devices": 1, **more})


TRL = [
    _trl(
        "trl/scripts/sft.py",
        _recipe("sft", "assistant", "full", 16, "bf16", 1024, "adamw 2e-5 0", "linear 0", data__packing=True),
        {
            "learning_rate": "2.0e-5",
            "num_train_epochs": 1,
            "packing": None,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 8,
            "eos_token": "<|im_end|>",
            "eval_strategy": "steps",
            "eval_steps": 100,
        },
        open=(_TRAIN_ON,),
    ),
    _trl(
        "trl/scripts/sft.py (LoRA)",
        _recipe(
            *("sft", "assistant", "lora", 16, "bf16", 1024, "adamw 2e-4 0", "linear 0"),
            lora__rank=32,
            lora__alpha=16.0,
            lora__dropout=0.05,
            evaluate__every_steps=100,
        ),
        {
            "learning_rate": "2.0e-4",
            "packing": None,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 8,
            "eval_strategy": "steps",
            "eval_steps": 100,
            "use_peft": None,
            "lora_r": 32,
            "lora_alpha": 16,
        },
        "python trl/scripts/sft.py",
        open=(_TRAIN_ON,),
    ),
    _trl(
        "trl/scripts/dpo.py",
        _recipe(
            *("dpo", "sigmoid", "full", 16, "bf16", 1024, "adamw 5e-7 0", "linear 0"),
            train__max_steps=1000,
            objective__beta=0.1,
        ),
        {
            "learning_rate": "5.0e-7",
            "max_steps": 1000,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 8,
            "no_remove_unused_columns": None,
        },
    ),
    _trl(
        "trl/scripts/dpo.py (LoRA)",
        _recipe("dpo", "sigmoid", "lora", 16, "bf16", 1024, "adamw 5e-6 0", "linear 0", lora__dropout=0.0),
        {
            "learning_rate": "5.0e-6",
            "max_steps": 1000,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 8,
            "use_peft": None,
            "lora_r": 32,
            "lora_alpha": 16,
        },
        "trl dpo",
    ),
    _trl(
        "trl/scripts/kto.py",
        _recipe("kto", None, "full", 16, "bf16", 1024, "adamw 5e-7 0", "cosine 0.1", train__epochs=1),
        {
            "learning_rate": "5e-7",
            "num_train_epochs": 1,
            "per_device_train_batch_size": 16,
            "lr_scheduler_type=cosine": None,
            "warmup_steps": 0.1,
            "logging_first_step": None,
        },
    ),
    _trl(
        "trl/scripts/kto.py (QLoRA)",  # adapters of quantized weights are in bf16 there
        _recipe("kto", None, "qlora", 8, "bf16_true", 1024, "adamw 5e-7 0", "cosine 0.1", lora__targets="all-linear"),
        {
            "learning_rate": "5e-7",
            "per_device_train_batch_size": 8,
            "lr_scheduler_type=cosine": None,
            "warmup_steps": 0.1,
            "use_peft": None,
            "load_in_4bit": None,
            "lora_target_modules=all-linear": None,
            "lora_r=16": None,
            "lora_alpha=16": None,
        },
        "trl kto",
    ),
    _trl(
        "examples/scripts/orpo.py",
        _recipe("orpo", None, "full", 4, "bf16", 1024, "adamw 8e-6 0", "linear 150", objective__beta=0.1),
        {"learning_rate": "8e-6", "per_device_train_batch_size": 4, "max_steps": 1000, "warmup_steps": 150},
    ),
    _trl(
        "examples/scripts/orpo.py (peft)",
        _recipe("orpo", None, "lora", 4, "bf16", 1024, "adamw 8e-5 0", "linear 150", lora__rank=16),
        {
            "learning_rate": "8e-5",
            "per_device_train_batch_size": 4,
            "max_steps": 1000,
            "warmup_steps": 150,
            "optim": "rmsprop",
            "use_peft": None,
            "lora_r": 16,
            "lora_alpha": 16,
        },
        "trl orpo",
        open=("optimizer.name",),
    ),
    _trl(
        "examples/scripts/cpo.py",
        _recipe("dpo", "simpo", "full", 4, "bf16", 1024, "adamw 8e-6 0", "linear 150", objective__sft_weight=1.0),
        {"learning_rate": "8e-6", "per_device_train_batch_size": 4, "max_steps": 1000, "warmup_steps": 150},
        open=("objective.loss",),
    ),
    _trl(
        "examples/scripts/reward_modeling.py",
        _recipe("reward", None, "full", 8, "bf16", 2048, "adamw 1e-5 0", "linear 0", evaluate__every_steps=50),
        {
            "learning_rate": "1.0e-5",
            "num_train_epochs": 1,
            "per_device_train_batch_size": 8,
            "max_length": 2048,
            "eval_strategy": "steps",
            "eval_steps": 50,
        },
    ),
    _trl(
        "examples/scripts/reward_modeling.py (LoRA)",
        _recipe("reward", None, "lora", 8, "bf16", 2048, "adamw 1e-4 0", "linear 0", lora__rank=32, lora__dropout=0.0),
        {
            "learning_rate": "1.0e-4",
            "per_device_train_batch_size": 8,
            "max_length": 2048,
            "use_peft": None,
            "lora_task_type": "SEQ_CLS",
            "lora_r": 32,
            "lora_alpha": 16,
        },
        "trl reward",
    ),
    _trl(
        "examples/scripts/gkd.py",
        _recipe(
            *("distill", None, "full", 32, "bf16", 1024, "adamw 2e-5 0", "linear 0"),
            objective__teacher="Qwen/Qwen2-1.5B-Instruct",
            objective__divergence="jsd",
            objective__jsd_beta=0.5,
            objective__temperature=0.9,
        ),
        {
            "teacher_model_name_or_path": "Qwen/Qwen2-1.5B-Instruct",
            "learning_rate": "2e-5",
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 8,
            "num_train_epochs": 1,
            "push_to_hub": None,
        },
        open=("objective.divergence",),
    ),
    _trl(
        "examples/scripts/gspo.py",  # 8 x 2 x 8 samples a step
        _recipe(
            *("grpo", "grpo", "lora", 128, "bf16", 1536, "adamw 1e-5 0", "linear 0"),
            rollouts__prompts=16,
            rollouts__samples=8,
            rollouts__max_new_tokens=1024,
            objective__kl=0.0,
            lora__targets=("q_proj", "v_proj"),
            lora__dropout=0.0,
        ),
        {
            "learning_rate": "1e-5",
            "dtype": "bfloat16",
            "max_completion_length": 1024,
            "use_peft": None,
            "lora_target_modules": ["q_proj,", "v_proj"],
            "log_completions": None,
            "per_device_train_batch_size": 8,
            "num_generations": 8,
            "importance_sampling_level": "sequence",
            "epsilon": "3e-4",
            "epsilon_high": "4e-4",
            "beta": 0.0,
            "loss_type": "grpo",
            "gradient_accumulation_steps": 2,
            "steps_per_generation": 8,
        },
        "accelerate launch --config_file deepspeed_zero3.yaml gspo.py",
        files={"deepspeed_zero3.yaml": ZERO3},
        devices=0,
        open=("objective.name", "rewards", "data.max_length", "rollouts.prompts", "train.max_steps"),
    ),
    _trl(
        "examples/scripts/sft_gpt_oss.py",
        _recipe(
            *("sft", "assistant", "full", 16, "bf16", 4096, "adamw 2e-5 0", "cosine 0.03"),
            schedule__min_lr_ratio=0.1,
            data__packing=True,
        ),
        {
            "dtype": "bfloat16",
            "packing": None,
            "run_name": "20b-full-eager",
            "attn_implementation": "kernels-community/vllm-flash-attn3",
            "max_length": 4096,
            "per_device_train_batch_size": 2,
            "num_train_epochs": 1,
            "warmup_steps": 0.03,
            "lr_scheduler_type": "cosine_with_min_lr",
            "lr_scheduler_kwargs": '{"min_lr_rate": 0.1}',
            "report_to": "trackio",
            "seed": 42,
        },
        "accelerate launch --config_file deepspeed_zero3.yaml sft_gpt_oss.py",
        files={"deepspeed_zero3.yaml": ZERO3},
        devices=0,
        open=("objective.name", _TRAIN_ON),
    ),
    _trl(
        "examples/scripts/online_dpo.py",
        _recipe("grpo", "dapo", "full", 128, "bf16", 1024, "adamw 5e-7 0", "linear 0.1"),
        {
            "reward_model_path": "trl-lib/pythia-1b-deduped-tldr-rm",
            "learning_rate": "5.0e-7",
            "per_device_train_batch_size": 8,
            "gradient_accumulation_steps": 16,
            "warmup_steps": 0.1,
            "missing_eos_penalty": 1.0,
        },
        open=("objective.name", "rewards", "data.max_length", "train.max_steps"),
    ),
]

# --- the alignment handbook's recipes for TRL, with its accelerate configs of eight processes

_ULTRA = {
    "id": "HuggingFaceH4/ultrafeedback_binarized",
    "config": "default",
    "columns": ["chosen", "rejected"],
    "weight": 1.0,
}
_ULTRACHAT = {"id": "HuggingFaceH4/ultrachat_200k", "config": "default", "columns": ["messages"], "weight": 1.0}
_ZEPHYR = "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}\n{{ message['content'] }}{% endfor %}"
_HANDBOOK = {
    "bf16": True,
    "seed": 42,
    "gradient_checkpointing": True,
    "warmup_ratio": 0.1,
    "lr_scheduler_type": "cosine",
}
_LAUNCH = "accelerate launch --config_file zero3.yaml scripts/{}.py --config theirs.yaml"


def _halves(source: dict[str, Any], held_out: float, kind: str) -> dict[str, Any]:
    datasets = [{**source, "split": f"{part}_{kind}".strip("_")} for part in ("train", "test")]
    return {"dataset_mixture": {"datasets": datasets, "test_split_size": held_out, "seed": 0}}


def _handbook(file: str, recipe: dict[str, Any], script: str = "dpo", **facts: Any) -> Case:
    sizes = {key: facts.pop(key) for key in ("open", "files", "devices") if key in facts}
    given = {"model_name_or_path": "org/base", **_HANDBOOK, **facts}
    files = sizes.pop("files", {"zero3.yaml": ZERO3})
    command = _LAUNCH.format(script) if files else f"python scripts/{script}.py --config theirs.yaml"
    return Case("TRL", f"handbook {file}", given, recipe, command=command, files=files, **sizes)


HANDBOOK = [
    _handbook(
        "zephyr-7b-beta/sft/config_full.yaml",
        _recipe("sft", "assistant", "full", 128, "bf16", 2048, "adamw 2e-5 0", "cosine 0.1", train__epochs=1),
        "sft",
        **_halves(_ULTRACHAT, 1000, "sft"),
        torch_dtype="bfloat16",
        chat_template=_ZEPHYR,
        learning_rate=0.00002,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=1,
        max_seq_length=2048,
        max_steps=-1,
        num_train_epochs=1,
        open=("model.chat_template", _TRAIN_ON, "data.eval"),
    ),
    _handbook(
        "zephyr-7b-beta/sft/config_qlora.yaml",
        _recipe("sft", "assistant", "qlora", 8, "bf16_true", 2048, "adamw 2e-4 0", "cosine 0.1", lora__alpha=16.0),
        "sft",
        **_halves(_ULTRACHAT, 1000, "sft"),
        torch_dtype="bfloat16",
        use_peft=True,
        load_in_4bit=True,
        lora_r=16,
        lora_alpha=16,
        lora_dropout=0.05,
        lora_target_modules=ALL,
        chat_template=_ZEPHYR,
        learning_rate=0.0002,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_seq_length=2048,
        open=("model.chat_template", _TRAIN_ON, "data.eval"),
        files={},
        devices=1,
    ),
    _handbook(
        "zephyr-7b-beta/dpo/config_full.yaml",
        _recipe("dpo", "sigmoid", "full", 128, "bf16", 1024, "adamw 5e-7 0", "cosine 0.1", objective__beta=0.01),
        **_halves(_ULTRA, 2000, "prefs"),
        beta=0.01,
        learning_rate=0.0000005,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        max_length=1024,
        max_prompt_length=512,
        optim="adamw_torch",
        open=("data.eval",),
    ),
    _handbook(
        "zephyr-7b-beta/dpo/config_qlora.yaml",
        _recipe(
            *("dpo", "sigmoid", "qlora", 16, "bf16_true", 1024, "paged_adamw 5e-6 0", "cosine 0.1"),
            lora__rank=128,
            lora__dropout=0.0,
            objective__reference="adapters_off",
            evaluate__every_steps=100,
        ),
        torch_dtype="bfloat16",
        use_peft=True,
        load_in_4bit=True,
        lora_r=128,
        lora_alpha=128,
        lora_dropout=0.05,
        lora_target_modules=ALL,
        dataset_mixer={"HuggingFaceH4/ultrafeedback_binarized": 1.0},
        dataset_splits=["train_prefs", "test_prefs"],
        beta=0.01,
        eval_strategy="steps",
        eval_steps=100,
        learning_rate=0.000005,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        optim="paged_adamw_32bit",
        files={},
        devices=1,
    ),
    _handbook(
        "zephyr-7b-gemma/dpo/config_full.yaml",
        _recipe("dpo", "sigmoid", "full", 128, "bf16", 1024, "adamw 5e-7 0", "cosine 0.1", objective__beta=0.05),
        **_halves({**_ULTRA, "id": "argilla/dpo-mix-7k"}, 500, ""),
        torch_dtype="bfloat16",
        beta=0.05,
        learning_rate=0.0000005,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=8,
        num_train_epochs=2,
        max_length=1024,
        open=("data.eval",),
    ),
    _handbook(
        "constitutional-ai/dpo/config_anthropic.yaml",
        _recipe("dpo", "sigmoid", "full", 16, "bf16", 1024, "adamw 5e-7 0", "linear 0.1", train__epochs=3),
        **_halves(_ULTRA, 3000, "prefs"),
        beta=0.1,
        learning_rate=0.0000005,
        lr_scheduler_type="linear",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=1,
        num_train_epochs=3,
        max_length=1024,
        optim="rmsprop",
        open=("optimizer.name", "data.eval"),
    ),
    _handbook(
        "smollm2/sft/config.yaml",
        _recipe("sft", "assistant", "full", 128, "bf16", 8192, "adamw 3e-4 0", "cosine 0.1", train__epochs=2),
        "sft",
        dataset_name="HuggingFaceTB/smoltalk",
        dataset_config="all",
        eval_strategy="epoch",
        torch_dtype="bfloat16",
        learning_rate=0.0003,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        max_seq_length=8192,
        num_train_epochs=2,
        save_strategy="no",
        open=(_TRAIN_ON,),
    ),
    _handbook(
        "smollm3/sft/mid.yaml",
        _recipe(
            *("sft", "assistant", "full", 16, "bf16", 32768, "adamw 2e-5 0", "cosine 0.03"),
            schedule__min_lr_ratio=0.1,
            optimizer__max_grad_norm=0.2,
            data__packing=True,
            checkpoint__every_steps=None,  # 0.05 of the run's steps, whose number is not known
        ),
        "sft",
        dataset_mixture={
            "datasets": [
                {"id": "HuggingFaceTB/smoltalk2", "config": "Mid", "split": "OpenThoughts3_1.2M", "weight": 1.0}
            ],
            "seed": 0,
        },
        torch_dtype="bfloat16",
        learning_rate=0.00002,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        warmup_ratio=0.03,
        max_grad_norm=0.2,
        packing=True,
        max_length=32768,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        num_train_epochs=5,
        save_strategy="steps",
        save_steps=0.05,
        open=(_TRAIN_ON,),
    ),
    _handbook(
        "smollm3/dpo/apo.yaml",
        _recipe(
            *("dpo", "apo_zero", "full", 16, "bf16", 24576, "adamw 1e-6 0", "cosine 0.1"),
            objective__beta=0.05,
            schedule__min_lr_ratio=0.1,
            optimizer__max_grad_norm=0.2,
        ),
        dataset_mixture={
            "datasets": [
                {
                    "id": "HuggingFaceTB/smoltalk2",
                    "config": "Preference",
                    "split": "llama_3.1_tulu_3_8b_preference_mixture_no_think",
                    "columns": ["chosen", "rejected", "prompt", "chat_template_kwargs"],
                    "weight": 0.5,
                }
            ]
        },
        torch_dtype="bfloat16",
        beta=0.05,
        loss_type="apo_zero",
        learning_rate=0.000001,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        max_grad_norm=0.2,
        max_length=24576,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        save_strategy="steps",
        save_steps=0.5,
        open=("data.train",),
    ),
    _handbook(
        "zephyr-141b-A35b/orpo/config_full.yaml",
        _recipe("orpo", None, "full", 8, "bf16", 2048, "adamw_8bit 5e-6 0", "cosine 100", objective__beta=0.05),
        "run_orpo",
        dataset_name="argilla/distilabel-capybara-dpo-7k-binarized",
        torch_dtype="bfloat16",
        beta=0.05,
        learning_rate=0.000005,
        lr_scheduler_type="inverse_sqrt",
        warmup_ratio=None,
        warmup_steps=100,
        optim="adamw_bnb_8bit",
        max_length=2048,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1,
        num_train_epochs=3,
        open=("schedule.name",),
    ),
]

# --- Unsloth: the arguments of its README and of its notebooks as YAML

_PEFT = {
    "r": 16,
    "lora_alpha": 16,
    "lora_dropout": 0,
    "bias": "none",
    "target_modules": ALL,
    "random_state": 3407,
    "use_gradient_checkpointing": "unsloth",
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "dataset_name": "org/rows",
}
UNSLOTH = [
    Case(
        "Unsloth",
        "README.md",
        {
            **_PEFT,
            "model_name": "unsloth/gpt-oss-20b",
            "max_seq_length": 2048,
            "load_in_4bit": True,
            "load_in_8bit": False,
            "load_in_16bit": False,
            "full_finetuning": False,
            "warmup_steps": 10,
            "max_steps": 60,
            "optim": "adamw_8bit",
            "seed": 3407,
        },
        _recipe("sft", "all", "qlora", 8, "bf16", 2048, "adamw_8bit 5e-5 0.001", "linear 10", run__seed=3407),
        open=("data.train",),
    ),
    Case(
        "Unsloth",
        "notebooks, Llama 3.1 8B Alpaca",
        {
            **_PEFT,
            "model_name": "unsloth/Meta-Llama-3.1-8B-bnb-4bit",
            "max_seq_length": 2048,
            "load_in_4bit": True,
            "dataset_text_field": "text",
            "warmup_steps": 5,
            "max_steps": 60,
            "learning_rate": 0.0002,
            "optim": "adamw_8bit",
            "weight_decay": 0.01,
            "lr_scheduler_type": "linear",
            "packing": False,
        },
        _recipe(
            *("sft", "all", "qlora", 8, "bf16", 2048, "adamw_8bit 2e-4 0.01", "linear 5"),
            model__name="unsloth/Meta-Llama-3.1-8B",
            lora__targets=tuple(ALL),
        ),
        open=("data.train",),
    ),
    Case(
        "Unsloth",
        "notebooks, Llama 3.1 8B GRPO",  # it raises the micro-batch to the number of generations
        {
            **_PEFT,
            "model_name": "meta-llama/meta-Llama-3.1-8B-Instruct",
            "r": 32,
            "lora_alpha": 32,
            "max_seq_length": 1024,
            "load_in_4bit": True,
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 1,
            "learning_rate": 0.000005,
            "adam_beta1": 0.9,
            "adam_beta2": 0.99,
            "weight_decay": 0.1,
            "warmup_ratio": 0.1,
            "lr_scheduler_type": "cosine",
            "optim": "paged_adamw_8bit",
            "num_generations": 6,
            "max_prompt_length": 256,
            "max_completion_length": 768,
            "max_steps": 250,
            "max_grad_norm": 0.1,
        },
        _recipe(
            *("grpo", "dapo", "qlora", 6, "bf16", 1024, "paged_adamw_8bit 5e-6 0.1", "cosine 0.1"),
            rollouts__samples=6,
            rollouts__max_new_tokens=768,
            optimizer__betas=(0.9, 0.99),
            optimizer__max_grad_norm=0.1,
            train__max_steps=250,
        ),
        open=("batch.rows", "rewards", "data.train"),
    ),
    Case(
        "Unsloth",
        "notebooks, Zephyr 7B DPO",
        {
            **_PEFT,
            "model_name": "unsloth/zephyr-sft-bnb-4bit",
            "r": 64,
            "lora_alpha": 64,
            "max_seq_length": 4096,
            "load_in_4bit": True,
            "warmup_ratio": 0.1,
            "num_train_epochs": 3,
            "learning_rate": 0.000005,
            "optim": "adamw_8bit",
            "weight_decay": 0.0,
            "lr_scheduler_type": "linear",
            "seed": 42,
            "beta": 0.1,
        },
        _recipe(
            *("dpo", "sigmoid", "qlora", 8, "bf16", 4096, "adamw_8bit 5e-6 0", "linear 0.1"),
            objective__beta=0.1,
            lora__rank=64,
            run__seed=42,
        ),
        open=("data.train",),
    ),
    Case(
        "Unsloth",
        "full_finetuning of its docs",
        {
            "model_name": "unsloth/Qwen3-4B",
            "full_finetuning": True,
            "load_in_4bit": False,
            "max_seq_length": 2048,
            "dataset_name": "org/rows",
            "train_on_responses_only": True,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 4,
            "warmup_steps": 5,
            "learning_rate": 0.0002,
        },
        _recipe("sft", "assistant", "full", 8, "bf16_true", 2048, "adamw_8bit 2e-4 0.001", "linear 5"),
        open=("data.train",),
    ),
]

CASES: list[Case] = [*AXOLOTL, *LLAMA_FACTORY, *TRL, *HANDBOOK, *UNSLOTH]
