"""A run on samples in `check`: its rewards, environment and server are tried; nothing is sampled."""

from __future__ import annotations

from finetune.data.dataset import on_disk
from finetune.desk.setup.environment_rows import check_environment
from finetune.desk.setup.reward_rows import check_rewards
from finetune.recipe.reward_settings import EnvironmentReward
from finetune.rl.rollouts.vllm_server import VllmServer
from finetune.training.prepare import Prepared, Problems


def try_sampling(prepared: Prepared, problems: Problems) -> tuple[dict[str, str], tuple[str, ...]]:
    """Returns facts and notes of a recipe with `rollouts`; problems are collected."""
    recipe, rows, tokenizer = prepared.recipe, on_disk(prepared.training), prepared.base.tokenizer
    trial = environment = None
    if not all(isinstance(one, EnvironmentReward) for one in recipe.rewards):
        trial = problems.attempt(check_rewards, recipe, rows, tokenizer)
    rollouts = recipe.rollouts
    assert rollouts is not None  # the caller's condition
    if rollouts.environment is not None:
        environment = problems.attempt(check_environment, recipe, rows, tokenizer, prepared.renderer)
    if rollouts.engine == "vllm":
        problems.attempt(lambda: VllmServer(rollouts).base_model(recipe.data.max_length))
    said = {"rewards": trial.table().splitlines() if trial else (), "environment": environment or ()}
    facts = {name: "".join(f"\n    {line}" for line in lines) for name, lines in said.items() if lines}
    return facts, trial.notes if trial else ()
