"""Objectives beside TRL: the losses and final weights of 20 AdamW steps of both, in fp32 on one process; of policy
gradients, those of two SGD steps on the same recorded samples.

    python3 -m venv trlenv && trlenv/bin/pip install -c constraints.txt -e . 'trl==1.16.*'
    trlenv/bin/python scripts/proofs/against_trl.py --json benchmarks/results/against_trl.json

The same rows, unpacked, all of them in each step, no dropout, the reference's log-probabilities computed before. Exit
status 1 if a loss differs by more than 1e-6 (relative if it is above 1), or a weight by more than 1e-6. The
learning rate is small: AdamW divides each gradient by its own size, so that rounding in the smallest makes whole steps.

Conventions that differ, and what is done about them: ORPO's negative log-likelihood is over prompt and answer in TRL;
here it is over the answer, as ours is. KTO's mismatched answers are those of the previous row in TRL, of the next row
in ours: TRL gets the rows in reverse. cDPO has no counterpart: TRL's `sigmoid` ignores `label_smoothing` (ours is
tested against its formula).

Policy gradients: `GRPOTrainer._compute_loss` gets what a record of ours has: samples, rewards scaled as TRL does it,
log-probabilities of older weights and of the reference. The micro-batch is one, as TRL's `grpo` is a mean of means.
SGD steps, so that weights move by the gradient itself; the second is at other ratios than the first. `rloo` and
`reinforce_pp` are not in that trainer, or by other formulas (ours are tested against theirs).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "support"))

import parity
import tiny

STEPS, ROWS, LR, CLOSE = 20, 12, 5e-5, 1e-6


@dataclass(frozen=True)
class Case:
    name: str
    ours: dict[str, Any]  # keys of `objective`
    theirs: dict[str, Any]  # arguments of TRL's config
    trainer: str = "dpo"
    format: str = "preference"
    rows: str = "preference"  # name of the file
    model: str = "llama"


def of_dpo(loss: str, beta: float = 0.1, **smoothing: float) -> Case:
    ours = {"name": "dpo", "loss": loss, "beta": beta, **smoothing}
    return Case(loss, ours, {"loss_type": loss, "beta": beta, **smoothing})


CASES = (
    of_dpo("sigmoid"),
    of_dpo("robust", label_smoothing=0.1),
    of_dpo("hinge"),
    of_dpo("ipo"),
    of_dpo("sigmoid_norm", beta=5.0),
    of_dpo("apo_zero"),
    of_dpo("apo_down"),
    Case(
        "simpo",
        {"name": "dpo", "loss": "simpo", "beta": 2.0, "margin": 0.5},
        {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.5, "cpo_alpha": 0.0},
        trainer="cpo",
    ),
    Case("orpo", {"name": "orpo", "beta": 0.1}, {"beta": 0.1}, trainer="orpo"),
    Case(
        "kto",
        {"name": "kto", "beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 0.1},  # for a KL above 0
        {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 0.1},
        trainer="kto",
        format="unpaired",
        rows="unpaired",
    ),
    Case(
        "reward",
        {"name": "reward", "centering": 0.01},
        {"center_rewards_coefficient": 0.01},
        trainer="reward",
        rows="margins",
        model="reward",
    ),
)


@dataclass
class Comparison:
    case: str
    loss: float  # largest difference of any step's loss, relative if that is above 1
    parameter: float  # largest absolute difference of any weight at the end
    first: float = field(default=0.0)  # loss of the first step, and of the last
    last: float = field(default=0.0)

    @property
    def passed(self) -> bool:
        return self.loss <= CLOSE and self.parameter <= CLOSE  # neither if it is not a number


def ours(folder: Path, case: Case) -> tuple[list[float], dict[str, Any]]:
    """Returns the loss of each step, and the weights at the end."""
    recipe = {
        "run": {"name": case.name, "dir": str(folder / "runs")},
        "model": {"name": str(folder / case.model)},
        "mode": "full",
        "objective": case.ours,
        "data": {
            "train": [{"path": str(folder / f"{case.rows}.jsonl"), "format": case.format}],
            "max_length": 256,
            "packing": False,
        },
        "batch": {"rows": ROWS, "rows_per_device": ROWS},
        "optimizer": {"lr": LR, "weight_decay": 0.01},
        "schedule": {"name": "constant"},
        "train": {"max_steps": STEPS, "precision": "fp32"},
    }
    return trained(recipe, folder / f"{case.name}.yaml")


def trained(recipe: dict[str, Any], file: Path) -> tuple[list[float], dict[str, Any]]:
    """Returns the loss of each step of a run, and the weights at its end."""
    import yaml
    from rich.console import Console

    from finetune.features import all_features, load_recipe
    from finetune.training.run import train
    from finetune.training.signals import StopRequest

    file.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    quiet = Console(file=open(os.devnull, "w"))  # noqa: SIM115
    run = train(load_recipe(file), str(file), StopRequest(), quiet, features=all_features())
    return [line["loss"] for line in parity.train_lines(run)], parity.tensors(run / "model")


def theirs(folder: Path, case: Case) -> tuple[list[float], dict[str, Any]]:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    loaded = AutoModelForSequenceClassification if case.trainer == "reward" else AutoModelForCausalLM
    rows = [json.loads(line) for line in (folder / f"{case.rows}.jsonl").read_text(encoding="utf-8").splitlines()]
    chosen, config = TRAINERS[case.trainer]()
    losses: list[float] = []

    class Recorded(chosen):
        def compute_loss(self, *arguments: Any, **named: Any) -> Any:
            loss = super().compute_loss(*arguments, **named)
            losses.append(loss.item())
            return loss

    trainer = Recorded(
        model=loaded.from_pretrained(folder / case.model, dtype="float32"),
        args=config(
            output_dir=str(folder / "trl" / case.name),
            max_steps=STEPS,
            per_device_train_batch_size=ROWS,
            gradient_accumulation_steps=1,
            learning_rate=LR,
            lr_scheduler_type="constant",
            weight_decay=0.01,
            max_grad_norm=1.0,
            adam_beta1=0.9,
            adam_beta2=0.95,
            adam_epsilon=1e-8,
            optim="adamw_torch",
            bf16=False,
            fp16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            max_length=256,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            logging_steps=STEPS,
            **case.theirs,
        ),
        train_dataset=Dataset.from_list(rows[::-1]),
        processing_class=AutoTokenizer.from_pretrained(folder / case.model),
    )
    trainer.train()
    return losses, {name: tensor.detach() for name, tensor in trainer.model.state_dict().items()}


def _dpo() -> tuple[Any, Callable[..., Any]]:
    from trl import DPOConfig, DPOTrainer

    return DPOTrainer, lambda **arguments: DPOConfig(precompute_ref_log_probs=True, **arguments)


def _kto() -> tuple[Any, Callable[..., Any]]:
    from trl import KTOConfig, KTOTrainer

    fixed = {"precompute_ref_log_probs": True, "train_sampling_strategy": "sequential"}
    return KTOTrainer, lambda **arguments: KTOConfig(**fixed, **arguments)


def _cpo() -> tuple[Any, Callable[..., Any]]:
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    return CPOTrainer, CPOConfig


def _orpo() -> tuple[Any, Callable[..., Any]]:
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    class OverTheAnswer(ORPOTrainer):
        """With the negative log-likelihood of the answers' tokens alone."""

        def concatenated_forward(self, model: Any, batch: Any) -> Any:
            chosen, rejected, chosen_logits, rejected_logits, _ = super().concatenated_forward(model, batch)
            tokens = (batch["chosen_labels"] != -100).sum(1)  # chosen: log-probabilities averaged over these
            nll = -(chosen * tokens).sum() / tokens.sum()
            return chosen, rejected, chosen_logits, rejected_logits, nll

    return OverTheAnswer, ORPOConfig


def _reward() -> tuple[Any, Callable[..., Any]]:
    from trl import RewardConfig, RewardTrainer

    return RewardTrainer, RewardConfig


TRAINERS = {"dpo": _dpo, "kto": _kto, "cpo": _cpo, "orpo": _orpo, "reward": _reward}


def save_reward_model(folder: Path) -> None:
    """The Llama with a head of scores, so that both begin with the same."""
    import torch
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(0)
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder / "llama", num_labels=1)
    model.save_pretrained(folder / "reward")
    tiny.tokenizer().save_pretrained(folder / "reward")


Trained = tuple[list[float], dict[str, Any]]  # losses of the steps, final weights


def compare(name: str, of_ours: Trained, of_theirs: Trained) -> Comparison:
    (losses, weights), (other_losses, other_weights) = of_ours, of_theirs
    assert len(losses) == len(other_losses)
    assert weights.keys() == other_weights.keys()
    return Comparison(
        name,
        max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(losses, other_losses, strict=True)),
        max((weights[name] - other_weights[name]).abs().max().item() for name in weights),
        *(losses[0], losses[-1]),
    )


# --- policy gradients

PROMPTS, SAMPLES, MOST, TEMPERATURE, SGD_LR = 3, 4, 6, 0.7, 0.05


@dataclass(frozen=True)
class PolicyCase:
    name: str
    ours: dict[str, Any]
    theirs: dict[str, Any]


def of_policy(loss: str, clip: tuple[float, float] = (0.2, 0.2), kl: float = 0.0, **theirs: Any) -> PolicyCase:
    ours = {"name": "grpo", "loss": loss, "clip": list(clip), "kl": kl}
    same = {"loss_type": loss, "epsilon": clip[0], "epsilon_high": clip[1], "beta": kl}
    return PolicyCase(f"{loss}{', kl' * (kl > 0)}", ours, {**same, **theirs})


_GSPO = {"loss_type": "grpo", "importance_sampling_level": "sequence"}
POLICY_CASES = tuple(
    case
    for kl in (0.0, 0.1)
    for case in (
        of_policy("grpo", kl=kl),
        of_policy("dr_grpo", kl=kl, scale_rewards="none"),
        of_policy("dapo", (0.2, 0.28), kl),
        of_policy("cispo", (1.0, 0.1), kl, epsilon_high=1.1),  # TRL's is the largest ratio itself
        of_policy("gspo", (0.02, 0.03), kl, **_GSPO),
    )
)


def recorded_samples(folder: Path) -> list[Any]:
    """Writes and returns the record of a step: samples of unequal lengths, of a model near the one that is trained."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    from finetune.rl.rewards.completion import Reward
    from finetune.rl.rollouts.records import Sample, write_record

    random, model = np.random.Generator(np.random.PCG64(1)), AutoModelForCausalLM.from_pretrained(folder / "llama")
    samples = []
    for prompt in range(PROMPTS):
        prompt_ids = random.integers(3, 380, int(random.integers(4, 20))).tolist()
        for number in range(SAMPLES):
            ids = random.integers(3, 380, int(random.integers(1, MOST + 1))).tolist()
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([prompt_ids + ids])).logits[0, len(prompt_ids) - 1 : -1]
            log_probs = (logits / TEMPERATURE).log_softmax(1).gather(1, torch.tensor(ids)[:, None])[:, 0].numpy()
            old, initial = (log_probs + random.normal(0, 0.2, len(ids)) for _ in range(2))
            place = ("rows.jsonl", prompt + 1, 0, number)
            reward = Reward(float(random.normal()), {"made": 0.0}, ())
            tensors = (len(ids) == MOST, old, np.ones(len(ids)), reward, old, initial)
            samples.append(Sample(*place, prompt_ids, ids, "", *tensors))
    (folder / "recorded").mkdir()
    write_record(folder / "recorded", 1, samples, "made up")
    return samples


def our_policy(folder: Path, case: PolicyCase) -> tuple[list[float], dict[str, Any]]:
    name = f"policy-{POLICY_CASES.index(case)}"
    sampled = {"prompts": PROMPTS, "samples": SAMPLES, "max_new_tokens": MOST, "temperature": TEMPERATURE, "reuse": 2}
    return trained(
        {
            "run": {"name": name, "dir": str(folder / "runs")},
            "model": {"name": str(folder / "llama"), "dtype": "float32"},
            "mode": "full",
            "objective": case.ours,
            "rollouts": {**sampled, "replay": str(folder / "recorded")},
            "data": {
                "train": [{"path": str(folder / "rows.jsonl"), "format": "messages"}],
                "max_length": 64,
                "packing": False,
            },
            "batch": {"rows": PROMPTS * SAMPLES, "tokens_per_device": 1024},
            "optimizer": {"name": "sgd", "lr": SGD_LR, "momentum": 0.0, "weight_decay": 0.0, "max_grad_norm": None},
            "schedule": {"name": "constant", "warmup_steps": 0},
            "train": {"max_steps": 2, "precision": "fp32"},
        },
        folder / f"{name}.yaml",
    )


def their_policy(folder: Path, case: PolicyCase, samples: list[Any]) -> tuple[list[float], dict[str, Any]]:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "llama", dtype="float32"),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(
            output_dir=str(folder / "trl" / case.name),
            per_device_train_batch_size=PROMPTS * SAMPLES,
            num_generations=SAMPLES,
            max_completion_length=MOST,
            temperature=TEMPERATURE,
            num_iterations=2,
            bf16=False,
            fp16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            report_to="none",
            **case.theirs,
        ),
        train_dataset=Dataset.from_list([{"prompt": "a"}] * PROMPTS),
        processing_class=AutoTokenizer.from_pretrained(folder / "llama"),
    )
    trainer.current_gradient_accumulation_steps = 1
    rewards = torch.tensor([one.reward.total for one in samples]).view(PROMPTS, SAMPLES)
    advantages = rewards - rewards.mean(1, keepdim=True)
    if case.theirs.get("scale_rewards") != "none":
        advantages = advantages / (rewards.std(1, keepdim=True) + 1e-4)
    longest = max(len(one.prompt) for one in samples)

    def padded(of_samples: list[Any]) -> Any:
        return torch.tensor([[*one, *[0] * (MOST - len(one))] for one in of_samples])

    inputs = {
        "prompt_ids": torch.tensor([[0] * (longest - len(one.prompt)) + one.prompt for one in samples]),
        "prompt_mask": torch.tensor([[0] * (longest - len(one.prompt)) + [1] * len(one.prompt) for one in samples]),
        "completion_ids": padded([one.ids for one in samples]),
        "completion_mask": padded([[1] * len(one.ids) for one in samples]),
        "advantages": advantages.flatten(),
        "old_per_token_logps": padded([one.old.tolist() for one in samples]),
        "ref_per_token_logps": padded([one.initial.tolist() for one in samples]),
        "num_items_in_batch": torch.tensor(sum(len(one.ids) for one in samples)),
    }
    losses, model = [], trainer.model
    model.train()
    for _ in range(2):
        loss = trainer._compute_loss(model, inputs)
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= SGD_LR * parameter.grad
                parameter.grad = None
    return losses, {name: tensor.detach() for name, tensor in model.state_dict().items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[case.name for case in (*CASES, *POLICY_CASES)])
    parser.add_argument("--json", type=Path, help="write the results there")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="finetune-trl-"))
    os.environ.update(FINETUNE_CACHE=str(folder / "cache"), HF_HUB_OFFLINE="1", TQDM_DISABLE="1")
    tiny.save_model(folder, "llama")
    tiny.write_rows(folder / "preference.jsonl", tiny.preferences(ROWS))
    tiny.write_rows(folder / "unpaired.jsonl", tiny.unpaired(ROWS))
    margins = [{**row, "margin": i / ROWS} for i, row in enumerate(tiny.preferences(ROWS))]
    tiny.write_rows(folder / "margins.jsonl", margins)
    save_reward_model(folder)
    tiny.write_rows(folder / "rows.jsonl", tiny.conversations(PROMPTS))
    chosen = [case for case in CASES if case.name in arguments.only]
    compared = [compare(case.name, ours(folder, case), theirs(folder, case)) for case in chosen]
    samples = recorded_samples(folder)
    for case in POLICY_CASES:
        if case.name in arguments.only:
            of_theirs = their_policy(folder, case, samples)
            compared.append(compare(case.name, our_policy(folder, case), of_theirs))
    for one in compared:
        mark = "same" if one.passed else "DIFFERENT"
        print(
            f"{one.case:14} loss {one.loss:.1e} weights {one.parameter:.1e}  {one.first:.4f} -> {one.last:.4f} {mark}"
        )
    if arguments.json:
        parity.write_json(arguments.json, "scripts/proofs/against_trl.py", [vars(one) for one in compared])
    return 0 if all(one.passed for one in compared) else 1


if __name__ == "__main__":
    sys.exit(main())
