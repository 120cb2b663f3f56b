"""What a recipe with rollouts refuses, with its message."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finetune.errors import UserError
from finetune.features import load_recipe

VLLM = ["rollouts.engine=vllm", "rollouts.url=http://gpu:8000", "objective.correction=tis"]


def test_the_recipe_is_valid_without_a_change(online: Path) -> None:
    assert load_recipe(online).objective.value("loss") == "dr_grpo"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["objective.name=sft"], "rollouts: `objective.name: sft` trains on rows, not on samples of the model"),
        (["rollouts=null"], "rollouts: `objective.name: grpo` trains on samples: add this"),
        (["rewards=[]"], "rewards: `objective.name: grpo` needs a reward"),
        (["rollouts.replay=runs/other/rollouts"], "rewards: have no effect under `rollouts.replay`"),
        (["rollouts.samples=1", "batch.rows=2"], "rollouts.samples: `loss: dr_grpo` compares the samples of a prompt"),
        (["rollouts.prompts=3"], "a row is one sample, and a step has 3 x 4 of them"),
        (["batch.rows=16"], "a row is one sample, and a step has 2 x 4 of them"),
        (["batch.rows_per_device=auto"], "batch.rows_per_device: `auto` tries the rows of the data"),
        (["rollouts.max_new_tokens=64"], "rollouts.max_new_tokens: 64 leaves no room for a prompt"),
        (["rollouts.top_k=1"], "rollouts.top_k: 1 makes all samples of a prompt equal"),
        (["rollouts.top_p=0"], "rollouts.top_p: expected a number > 0, got 0"),
        (["rollouts.top_p=1.5"], "rollouts.top_p: expected a number <= 1, got 1.5"),
        (["rollouts.temperature=0"], "rollouts.temperature: expected a number > 0, got 0"),
        (["rollouts.temperature=-1"], "rollouts.temperature: expected a number > 0, got -1"),
        (["rollouts.samples=0"], "rollouts.samples: expected a number >= 1, got 0"),
        (["rollouts.prompts=0"], "rollouts.prompts: expected a number >= 1, got 0"),
        (["rollouts.prompts=many"], 'rollouts.prompts: expected an integer, got "many" (text)'),
        (["rollouts.max_new_tokens=0"], "rollouts.max_new_tokens: expected a number >= 1, got 0"),
        (["rollouts.cohort=0"], "rollouts.cohort: expected a number >= 1, got 0"),
        (["rollouts=[]"], "rollouts: expected a section, got a list of 0"),
        (["rollouts.staleness=-1"], "rollouts.staleness"),
        (["rollouts.staleness=500"], "rollouts.staleness: 500: no batch is drawn from weights that were trained"),
        (["rollouts.reuse=0"], "rollouts.reuse"),
        (["rollouts.reuse=500"], "rollouts.reuse: 500 steps on the same samples, and the run has"),
        (["objective.clip=[0.2,0.3]"], "objective.clip: has no effect: every sample is trained on once"),
        (["objective.clip=[0.2]"], "objective.clip"),
        (["objective.clip=[1.5,2]", "rollouts.reuse=2"], "objective.clip: 1.5: ratios are above 0"),
        (["objective.loss=cispo"], "objective.loss: `cispo` is `dapo` if every sample is trained on once"),
        (["objective.loss=gspo"], "objective.loss: `gspo` is `grpo` if every sample is trained on once"),
        (["objective.kl=-0.1"], "objective.kl"),
        (["objective.correction=clip"], "objective.correction"),
        (["objective.correction_bounds=[0.5,2]"], "objective.correction_bounds: has no effect without"),
        (
            ["objective.correction=tis", "objective.correction_bounds=[1.5,2]"],
            "objective.correction_bounds: [1.5, 2] leaves out 1",
        ),
        ([*VLLM, "objective.correction=null"], "objective.correction: a server rounds otherwise than the trainer"),
        (["objective.correction=tis"], "objective.correction: has no effect: the modules that train sample, in fp32"),
        (["objective.name=sft", "objective.kl=0.1"], "objective.kl: has no effect under `name: sft`"),
        (["rollouts.engine=sglang"], "rollouts.engine"),
        (["rollouts.engine=vllm"], "rollouts.url: `engine: vllm` needs it, as http://HOST:PORT"),
        ([*VLLM, "rollouts.url=http://gpu:8000/v1"], "rollouts.url: `engine: vllm` needs it"),
        ([*VLLM, "rollouts.url=gpu:8000"], "rollouts.url: `engine: vllm` needs it"),
        ([*VLLM, "rollouts.url=http://me:secret@gpu:8000"], "rollouts.url: must not hold a user, a password"),
        (["rollouts.url=http://gpu:8000"], "rollouts.url: has no effect under `engine: own`, only under vllm"),
        (["rollouts.max_mismatch=1"], "rollouts.max_mismatch: has no effect under `engine: own`"),
        ([*VLLM, "rollouts.key=sk-secret"], "expected the name of an environment variable in capitals"),
        ([*VLLM, "rollouts.cohort=8"], "rollouts.cohort: has no effect under `engine: vllm`"),
        ([*VLLM, "rollouts.top_k=8"], "rollouts.top_k: a vLLM server gives log-probabilities among the likeliest"),
        ([*VLLM, "rollouts.top_p=0.9"], "rollouts.top_p: a vLLM server gives log-probabilities among the likeliest"),
        ([*VLLM, "rollouts.replay=runs/a/rollouts", "rewards=[]"], "rollouts.engine: has no effect under `rollouts.re"),
        ([*VLLM, "mode=lora", "lora={dora: true}"], "lora.dora: a vLLM server loads adapters of linear layers alone"),
        ([*VLLM, "mode=lora", "lora={modules_to_save: [lm_head]}"], "lora.modules_to_save: a vLLM server loads"),
        ([*VLLM, "mode=lora", "lora={}", "tokens={add: ['<t>']}"], "tokens: a vLLM server loads adapters of linear"),
        (["rollouts.max_tokens=9"], "did you mean `max_new_tokens`"),
        (["train.max_steps=null", "train.epochs=1"], "train.max_steps: the length of a run that samples its rows"),
        (["train.epochs=1"], "train.max_steps: the length of a run that samples its rows"),
        (["train.compile=true"], "train.compile: lengths of samples differ from step to step"),
        (["data.packing=true"], "data.packing: a row is one sample"),
        (["data.streaming=true"], "data.streaming: prompts are drawn from all rows"),
        (["data.overlong=split"], "data.overlong: `split` would cut prompts"),
        (["data.overlong=truncate"], "data.overlong: `truncate` would cut prompts"),
        (["objective.train_on=all"], "objective.train_on: under `all` a row has no prompt"),
        (["data.train.0.weight=2"], "prompts are drawn from all rows alike"),
        (["data.train.0.max_epochs=2"], "prompts are drawn from all rows alike"),
        (["objective.loss=sigmoid"], "objective.loss: `sigmoid` is not a loss of `name: grpo`: use grpo, dr_grpo"),
        (["objective.loss=ppo"], "objective.loss"),
        (["objective.beta=0.1"], "objective.beta: has no effect under `name: grpo`"),
        (["objective.loss=reinforce_pp", "objective.scale_rewards=group"], "objective.scale_rewards: `reinforce_pp`"),
        (["objective.dropout=true"], "objective.dropout: samples are drawn without dropout"),
        (["data.train.0.format=text"], "rows of format `text` are not for `objective.name: grpo`"),
        (["data.train.0.format=preference"], "rows of format `preference` are not for `objective.name: grpo`"),
        (["rewards.0.name=exact"], "did you mean `exact_match`"),
        (["data.eval.0.format=preference"], "rows of format `preference` are not for `objective.name: grpo`"),
        (["evaluate.prompts=-1"], "evaluate.prompts: expected a number >= 0, got -1"),
        (["evaluate.samples=0"], "evaluate.samples: expected a number >= 1, got 0"),
        (["data.eval=[]", "evaluate.prompts=3"], "evaluate.prompts: is of held-out prompts that are sampled: set"),
        (["evaluate.prompts=0", "evaluate.samples=2"], "evaluate.samples: has no effect under `evaluate.prompts: 0`"),
        (["data.eval=[]", "checkpoint.best=reward"], "checkpoint.best: `eval_reward` needs `rewards`, and held-out"),
        (
            ["evaluate.prompts=0", "checkpoint.best=eval_reward/exact_match"],
            "checkpoint.best: `eval_reward/exact_match` needs `rewards`, and held-out prompts to sample",
        ),
        (
            ["rewards=[]", "rollouts.replay=x", "train.stop_when={metric: eval_pass@1/x}", "evaluate.every_steps=1"],
            "train.stop_when: `eval_pass@1/x` needs `rewards`",
        ),
    ],
)
def test_a_mistake_is_refused_with_its_key(online: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(UserError) as error:
        load_recipe(online, overrides)
    assert message in str(error.value)


def test_the_best_checkpoint_may_be_that_of_the_reward(online: Path) -> None:
    assert load_recipe(online, ["checkpoint.best=reward"]).checkpoint.best == "eval_reward"
    for name in ("eval_reward/exact_match", "eval_pass@1/exact_match"):
        assert load_recipe(online, [f"checkpoint.best={name}"]).checkpoint.best == name


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["objective.teacher=t.parquet"], "objective.teacher: a file has predictions of the rows' answers"),
        (["objective.teacher=null"], "objective.teacher: `name: distill` needs a teacher"),
        (["objective.samples=12"], "objective.samples: the teacher's draws are not supported with `rollouts`"),
        (["objective.nll_weight=0.2"], "objective.nll_weight: with `rollouts` targets are the student's own samples"),
        (["mode=lora", "lora={rank: 4, alpha: 8, dropout: 0.1}"], "lora.dropout: samples are drawn without dropout"),
        (["rewards=[{name: exact_match}]"], "rewards: `objective.name: distill` takes no rewards"),
        (["rollouts=null", "objective.share_prompts=false"], "objective.share_prompts: has an effect with `rollouts`"),
        (["data.train.0.format=text"], "rows of format `text` are not for `objective.name: distill`"),
        (["objective.kl=0.1"], "objective.kl: has no effect under `name: distill`"),
    ],
)
def test_a_mistake_in_distillation_on_samples_is_refused(online: Path, overrides: list[str], message: str) -> None:
    distill = ["objective={name: distill, teacher: large}", "rewards=[]"]
    assert load_recipe(online, [*distill, "rollouts.samples=1", "batch.rows=2"]).rollouts is not None
    with pytest.raises(UserError) as error:
        load_recipe(online, [*distill, *overrides])
    assert message in str(error.value)


def test_rows_of_prompts_are_for_samples_only(online: Path) -> None:
    assert load_recipe(online, ["data.train.0.format=prompt"]).row_kind.formats[-1] == "prompt"
    with pytest.raises(UserError, match=r"rows of format `prompt` are not for `objective.name: sft`.* to grpo"):
        load_recipe(online, ["data.train.0.format=prompt", "objective.name=sft", "rollouts=null", "rewards=[]"])


@pytest.mark.parametrize(
    ("key", "message"),
    [("scale_rewards", "only under grpo"), ("overlong", "only under grpo")],
)
def test_keys_of_grpo_are_refused_under_other_objectives(
    key: str, message: str, recipe: dict[str, Any], write_recipe: Callable[..., Path]
) -> None:
    recipe["objective"] = {"name": "sft", key: {"scale_rewards": "none", "overlong": "mask"}[key]}
    with pytest.raises(UserError, match=message):
        load_recipe(write_recipe(recipe))
