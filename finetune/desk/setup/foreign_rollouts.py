"""Training on a model's own samples, and on a teacher: TRL's GRPO, RLOO and GKD, whose keys axolotl and Unsloth have.

Keys and defaults: https://github.com/huggingface/trl, trl/trainer/grpo_config.py, rloo_config.py, trl/rewards and
trl/experimental/gkd.
"""

from __future__ import annotations

from typing import get_args

from finetune.desk.setup.conversion import TODO, Conversion
from finetune.desk.setup.foreign_keys import foreign_tool
from finetune.desk.setup.foreign_values import ForeignTable
from finetune.recipe.objective_settings import PolicyLoss

# Losses that are others if every sample is trained on once, by the weights that it was drawn from: all ratios are 1.
_ON_POLICY = {"cispo": "dapo", "gspo": "grpo"}
_SIGNATURE = f"{TODO}TRL calls it with the lists of a batch; here it gets one completion, see docs/reference/rewards.md"
_PROMPT_TOKENS = 512  # where the other tool has no limit; of GSM8K's prompts in verl's examples


def convert_grpo(c: Conversion, table: ForeignTable, trainer: str = "grpo", samples: int | None = None) -> None:
    """Objective, rollouts and rewards. table: the section with TRL's keys; trainer: TRL's; samples: of a prompt, if it
    has another default."""
    trl, row = foreign_tool("trl"), foreign_tool("trl").values["objective.name"][trainer]
    loss = row.sets["objective.loss"]
    c.set("objective.name", "grpo")
    reuse = table.count("num_iterations", default=1)
    given = str(table.word("loss_type", default=loss))
    ours = given if given in get_args(PolicyLoss) else None
    if table.word("importance_sampling_level", default="token") == "sequence":
        ours = "gspo" if given == "grpo" else None
    taken = ours or "dapo"
    if reuse == 1 and taken in _ON_POLICY:
        c.set("objective.loss", _ON_POLICY[taken], f"{taken} there: the same if every sample is trained on once")
    else:
        c.set("objective.loss", taken, "" if ours else f"{TODO}{given} is not offered; dapo comes nearest")
    scale = str(table.take("scale_rewards", default=row.defaults["scale_rewards"])).lower()
    scaled = trl.value("objective.scale_rewards", scale).ours
    c.set("objective.scale_rewards", scaled or "group", "" if scaled else f"{TODO}{scale} there")
    c.copy("objective.kl", "beta", default=row.defaults["beta"], table=table)
    if loss == "rloo" and c.value("objective.kl"):
        c.doubt("objective.kl", "there it is part of the reward, here of the loss")
    if table.is_on("mask_truncated_completions"):
        c.set("objective.overlong", "mask")
    _clip(c, table, reuse)
    c.copy("rollouts.samples", "num_generations", default=samples or row.defaults["num_generations"], table=table)
    c.copy("rollouts.max_new_tokens", "max_completion_length", default=512, table=table)
    c.copy("rollouts.temperature", *trl.names("rollouts.temperature"), default=1.0, table=table)
    if reuse > 1:
        c.set("rollouts.reuse", reuse)
    _engine(c, table)
    _rewards(c, table)
    prompt = table.count("max_prompt_length") or c.theirs.count("max_prompt_length")
    doubt = "" if prompt else f"{TODO}prompts have no limit there; here {_PROMPT_TOKENS} tokens and the sample"
    c.set("data.max_length", (prompt or _PROMPT_TOKENS) + c.value("rollouts.max_new_tokens"), doubt)


def fit_length(c: Conversion, *names: str) -> None:
    """Sets the length of prompt and sample, if the other tool has one that leaves room for a prompt."""
    length = c.theirs.count(*names)
    if length is not None and length > c.value("rollouts.max_new_tokens"):
        c.set("data.max_length", length, "prompt and sample")
        if "max_prompt_length" in c.theirs:
            c.theirs.leave("max_prompt_length", "prompts that leave no room for a sample are left out")
    elif length is not None:
        name = next(name for name in names if name in c.theirs)
        c.theirs.leave(name, "leaves no room for a prompt beside a sample: see `data.max_length`")


def _clip(c: Conversion, table: ForeignTable, reuse: int) -> None:
    low = float(table.number("epsilon", default=0.2))
    high = float(table.number("epsilon_high", default=low))
    if reuse > 1:
        c.set("objective.clip", [1.0 if c.value("objective.loss") == "cispo" else low, high])
        return
    for name in ("epsilon", "epsilon_high"):
        if name in table:
            table.leave(name, "has no effect: every sample is trained on once, so all ratios are 1")


def _engine(c: Conversion, table: ForeignTable) -> None:
    """What samples: the modules that train, or a vLLM server."""
    top_p, top_k = table.number("top_p", default=1.0), table.number("top_k", default=0)
    is_server = table.is_on("use_vllm") and table.word("vllm_mode", default="colocate") == "server"
    if top_p < 1 or top_k > 0:
        if is_server:
            table.leave("top_p" if top_p < 1 else "top_k", "a vLLM server samples from all tokens here")
        else:
            c.keys |= {"rollouts.top_p": (float(top_p), "")} if top_p < 1 else {}
            c.keys |= {"rollouts.top_k": (int(top_k), "")} if top_k > 0 else {}
    if not is_server:
        if "use_vllm" in table and table.is_on("use_vllm"):
            table.leave("use_vllm", "vLLM in the trainer's processes; here the modules that train sample")
        return
    host = table.word("vllm_server_host", default="0.0.0.0")
    url = table.word("vllm_server_base_url") or f"http://{host}:{table.count('vllm_server_port', default=8000)}"
    c.set("rollouts.engine", "vllm")
    c.set("rollouts.url", url, f"{TODO}start `vllm serve` there, not `trl vllm-serve`; see docs/reference/rollouts.md")
    mode = table.word("vllm_importance_sampling_mode", default="sequence_mask")
    is_corrected = table.is_on("vllm_importance_sampling_correction", default=True)
    correction = foreign_tool("trl").value("objective.correction", mode).ours if is_corrected else "none"
    c.set("objective.correction", correction or "sequence_mask", "" if correction else f"{TODO}{mode} is not offered")


def _rewards(c: Conversion, table: ForeignTable) -> None:
    """Reward functions and models, with their weights."""
    names = table.words("reward_funcs")
    models = table.words("reward_model_name_or_path", "reward_model_path")
    weights = table.listed("reward_weights")
    for model in models:
        c.rewards.append(({"reward_model": model}, f"{TODO}a run or a folder of `objective.name: reward`"))
    for name in names:
        module, _, function = name.rpartition(".")
        if (row := foreign_tool("trl").value("rewards.name", name)).ours:
            c.rewards.append(({"name": row.ours, **row.sets, "metric": name}, row.doubt and TODO + row.doubt))
        else:
            path = f"{module.replace('.', '/') or 'rewards'}.py"
            c.rewards.append(({"file": path, "function": function}, _SIGNATURE))
    if weights and len(weights) == len(c.rewards):
        c.rewards = [
            ({**reward, "weight": float(w)}, said) for (reward, said), w in zip(c.rewards, weights, strict=True)
        ]
    elif weights:
        table.leave("reward_weights", f"has {len(weights)} numbers for {len(c.rewards)} rewards")
    if not c.rewards:
        c.rewards.append(({"name": "exact_match"}, f"{TODO}no reward is named; see docs/reference/rewards.md"))


def convert_distillation(c: Conversion, table: ForeignTable) -> None:
    """TRL's GKD: a generalized Jensen-Shannon divergence to a teacher, on rows or on the student's samples."""
    c.set("objective.name", "distill")
    teacher = table.word(*foreign_tool("trl").names("objective.teacher"))
    c.set("objective.teacher", teacher or "org/teacher", "" if teacher else f"{TODO}no teacher is named")
    share = float(table.number("beta", default=0.5))  # of the teacher in the mixture
    kind = {0.0: "forward_kl", 1.0: "reverse_kl"}.get(share, "jsd")
    c.set("objective.divergence", kind)
    if kind == "jsd":
        c.set("objective.jsd_beta", share, "" if "beta" in table else f"the default of {c.tool}")
    c.copy("objective.temperature", "temperature", default=0.9, table=table)
    if (degrees := c.value("objective.temperature")) != 1:
        c.set("objective.temperature", degrees, "the divergence is multiplied by its square, which it is not there")
    c.set("objective.top_k", 64, "all of the vocabulary there; here the rest is one event")
    own = table.number("lmbda", default=0.5)
    if own:
        c.doubt("objective.divergence", f"{own:.0%} of the batches are the student's samples there: see `rollouts`")
    elif "max_new_tokens" in table:
        table.leave("max_new_tokens", "nothing is sampled under lmbda: 0")
    if table.is_on("seq_kd"):
        table.leave("seq_kd", "sample the teacher's answers before, and train on them with `objective.name: sft`")


def fit_rollouts(c: Conversion) -> None:
    """Keys that a run on samples decides otherwise: rows are samples, steps are counted, nothing is packed."""
    if "rollouts.samples" not in c.keys:
        return
    rows, samples = c.value("batch.rows"), int(c.value("rollouts.samples"))
    prompts = max(1, rows // samples)
    c.keys = {"rollouts.prompts": (prompts, "of a step"), **c.keys}
    if rows != prompts * samples:
        c.set("batch.rows", prompts * samples, f"{TODO}{rows} samples a step there, which {samples} do not divide")
    if c.theirs.count("steps_per_generation") or c.theirs.count("generation_batch_size"):
        for name in ("steps_per_generation", "generation_batch_size"):
            if name in c.theirs:
                c.theirs.leave(name, "samples are drawn for each step: see `rollouts.reuse` and `rollouts.staleness`")
        c.doubt("rollouts.prompts", "several steps divide a batch of samples there")
    if c.value("train.max_steps") is None:
        passes, _ = c.keys.pop("train.epochs")
        c.set("train.max_steps", 500, f"{TODO}{passes:g} epochs there: rows of the data x epochs / {prompts} prompts")
    if c.value("lora.dropout"):
        c.set("lora.dropout", 0.0, f"{c.value('lora.dropout')} there; samples are drawn, and trained on, without")
    c.theirs.ignore("disable_dropout")
    for name in ("packing", "sample_packing"):
        if name in c.theirs and c.theirs.is_on(name):
            c.theirs.leave(name, "a row is one sample")
    for key in ("train.compile", "data.streaming", "objective.train_on"):
        c.keys.pop(key, None)
    c.set("data.overlong", "drop")
    c.set("data.packing", False)
