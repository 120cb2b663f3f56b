"""Recipe changes on resume: which are allowed, and which are refused with their difference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune.checkpoints.inputs import Inputs, input_changes
from finetune.checkpoints.resume import changes_since
from finetune.errors import UserError
from finetune.recipe import Recipe, dump_recipe, load_recipe

INPUTS: Inputs = {
    "data": {
        "examples": 300,
        "rows": 78,
        "tokens": 4849,
        "train[0]": {"tokens": "d90b8bc78dd52f13", "loss masks": "01"},
    },
    "eval": {"eval[0]": {"tokens": "f0"}},
    "tokenizer": {"library": "0.22", "ids of tokens": "aa", "rules": "bb", "eos_token": "</s>"},
    "config": {"library": "5.17", "rms_norm_eps": 1e-5, "rope_parameters": {"rope_theta": 1e4}},
    "base": {"files": {"model.safetensors": "9 bytes, ab"}, "enters steps": True},
}


def having(part: str, **values: Any) -> Inputs:
    return {**INPUTS, part: {**INPUTS[part], **values}}


@pytest.fixture
def load(recipe: dict[str, Any], write_recipe: Any) -> Any:
    recipe.update(mode="lora", lora={"rank": 4})
    path = write_recipe(recipe)
    return lambda *overrides: load_recipe(path, overrides)


@pytest.fixture
def checkpoint(tmp_path: Path, load: Any) -> Path:
    (tmp_path / "recipe.yaml").write_text(dump_recipe(load()), encoding="utf-8")
    return tmp_path


def changes(recipe: Recipe, checkpoint: Path, now: Inputs = INPUTS) -> list[str]:
    return changes_since(recipe, checkpoint, input_changes(INPUTS, now))


def refusal(recipe: Recipe, checkpoint: Path, now: Inputs = INPUTS) -> str:
    with pytest.raises(UserError, match="belongs to another run") as refused:
        changes(recipe, checkpoint, now)
    return str(refused.value)


def test_nothing_changed(load: Any, checkpoint: Path) -> None:
    assert changes(load(), checkpoint) == []


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("optimizer.lr=0.5", "optimizer.lr: 0.001 -> 0.5"),
        ("train.max_steps=99", "train.max_steps: 6 -> 99"),
        ("schedule.name=linear", 'schedule.name: "cosine" -> "linear"'),
        ("evaluate.every_steps=3", "evaluate.every_steps: null -> 3"),
        ("tracking.tensorboard=true", "tracking.tensorboard: false -> true"),
        ("batch.rows_per_device=1", "batch.rows_per_device: 2 -> 1"),
        ("train.precision=bf16", 'train.precision: "fp32" -> "bf16"'),
        ("checkpoint.keep=7", "checkpoint.keep: 2 -> 7"),
    ],
)
def test_allowed_changes_are_reported(load: Any, checkpoint: Path, override: str, said: str) -> None:
    assert changes(load(override), checkpoint) == [said]


def test_shared_prompts_are_the_same_maths(load: Any, checkpoint: Path) -> None:
    rows = ("data.train=[{path: pairs.jsonl, format: preference}]", "data.eval=[]")
    (checkpoint / "recipe.yaml").write_text(dump_recipe(load(*rows, "objective.name=dpo")), encoding="utf-8")
    changed = load(*rows, "objective={name: dpo, share_prompts: false}")
    assert changes(changed, checkpoint) == ['objective.share_prompts: "auto" -> false']
    message = refusal(load(*rows, "objective={name: dpo, share_prompts: false, beta: 0.2}"), checkpoint)
    assert "objective.beta" in message
    assert "share_prompts" not in message


def test_a_checkpoint_of_before_each_objective_had_its_own_keys_is_resumed(load: Any, checkpoint: Path) -> None:
    rows = ("data.train=[{path: pairs.jsonl, format: preference}]", "data.eval=[]")
    recipe = load(*rows, "objective={name: kto, beta: 0.2}")
    recorded = yaml.safe_load(dump_recipe(recipe))
    recorded["objective"] |= {"desirable_weight": None, "gamma": None, "kl": 0.0, "share_prompts": "auto", "loss": None}
    (checkpoint / "recipe.yaml").write_text(yaml.safe_dump(recorded), encoding="utf-8")
    assert changes(recipe, checkpoint) == []
    assert "objective.beta: 0.2 -> 0.3" in refusal(load(*rows, "objective={name: kto, beta: 0.3}"), checkpoint)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("mode=full", 'mode: "lora" -> "full"'),
        ("lora.rank=8", "lora.rank: 4 -> 8"),
        ("optimizer.name=sgd", 'optimizer.name: "adamw" -> "sgd"'),
        ("batch.rows=8", "batch.rows: 4 -> 8"),
    ],
)
def test_keys_that_stored_tensors_depend_on_cannot_change(
    load: Any, checkpoint: Path, override: str, said: str
) -> None:
    overrides = [override, *(["lora=null"] if override == "mode=full" else [])]
    message = refusal(load(*overrides), checkpoint)
    assert said in message
    assert "accept_changes" not in message


def test_keys_that_an_earlier_version_did_not_have_are_no_change(load: Any, checkpoint: Path) -> None:
    file = checkpoint / "recipe.yaml"
    saved = yaml.safe_load(file.read_text(encoding="utf-8"))
    del saved["rewards"], saved["rollouts"], saved["model"]["kernels"]
    file.write_text(yaml.safe_dump(saved), encoding="utf-8")
    assert changes(load(), checkpoint) == []
    assert "model.kernels" in refusal(load("model.kernels=plain"), checkpoint)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("run.seed=7", "run.seed"),
        ("model.revision=abc", "model"),
        ("data.max_length=48", "data.max_length"),
        ("data.packing=false", "data.packing"),
        ("objective.train_on=all", "objective"),
    ],
)
def test_keys_that_the_order_depends_on_change_only_if_accepted(
    load: Any, checkpoint: Path, override: str, key: str
) -> None:
    assert f"checkpoint.accept_changes=[{key}]" in refusal(load(override), checkpoint)
    accepted = changes(load(override, f"checkpoint.accept_changes=[{key}]"), checkpoint)
    assert any(line.startswith(override.split("=")[0]) for line in accepted)


@pytest.mark.parametrize(
    ("part", "now", "said"),
    [
        ("data", having("data", examples=301), "data: examples: 300 -> 301"),
        (
            "data",
            having("data", **{"train[0]": {"tokens": "e1", "loss masks": "01"}}),
            'data: train[0].tokens: "d90b8bc78dd52f13',
        ),
        ("tokenizer", having("tokenizer", eos_token="<end>"), 'tokenizer: eos_token: "</s>" -> "<end>"'),
        ("config", having("config", rms_norm_eps=1e-6), "config: rms_norm_eps: 1e-05 -> 1e-06"),
        (
            "config",
            having("config", rope_parameters={"rope_theta": 5e5}),
            "config: rope_parameters.rope_theta: 10000.0 -> 500000.0",
        ),
        ("config", having("config", sliding_window=8), "config: sliding_window: null -> 8"),
        ("base", having("base", files={"model.safetensors": "9 bytes, cd"}), 'base: model.safetensors: "9 bytes, ab"'),
        ("base", having("base", reference="ab"), 'base: reference: null -> "ab"'),
        ("rewards", {**INPUTS, "rewards": {"rewards[0].file": "ab"}}, 'rewards: rewards[0].file: null -> "ab"'),
    ],
)
def test_other_content_is_another_run(load: Any, checkpoint: Path, part: str, now: Inputs, said: str) -> None:
    message = refusal(load(), checkpoint, now)
    assert said in message
    assert f"checkpoint.accept_changes=[{part}]" in message
    accepted = changes(load(f"checkpoint.accept_changes=[{part}]"), checkpoint, now)
    assert [line for line in accepted if said in line]


def test_every_part_that_changed_is_listed_and_accepted_by_name(load: Any, checkpoint: Path) -> None:
    now = {**having("data", examples=301), "config": {**INPUTS["config"], "rms_norm_eps": 1e-6}}
    message = refusal(load("run.seed=7"), checkpoint, now)
    assert all(said in message for said in ("run.seed: 42 -> 7", "data: examples", "config: rms_norm_eps"))
    assert "accept_changes=[run.seed,data,config]" in message
    assert "Fix: restore the rows, the config, or use another `run.name`" in message
    only_config = refusal(load("checkpoint.accept_changes=[data,run.seed]"), checkpoint, now)
    assert "config: rms_norm_eps" in only_config
    assert "data: examples" not in only_config


def texts(saved: Inputs, now: Inputs) -> list[tuple[str | None, str]]:
    return [(part, text) for part, text in input_changes(saved, now)]


def test_a_checkpoint_of_an_earlier_version_compares_sizes_and_says_so() -> None:
    old: Inputs = {"data": {"examples": 300, "rows": 78, "tokens": 4849}}
    ((part, text),) = texts(old, INPUTS)
    assert part is None
    assert "earlier version" in text
    assert texts(old, having("data", examples=301))[0] == ("data", "data: examples: 300 -> 301")


def test_libraries_of_another_version_refuse_nothing_by_themselves() -> None:
    now = having("config", library="5.18", new_key=None)
    assert texts(INPUTS, now) == []
    assert texts(INPUTS, having("config", library="5.18", rms_norm_eps=1))[0][0] == "config"
    ((part, text),) = texts(INPUTS, having("tokenizer", library="0.23", rules="cc"))
    assert part is None
    assert "tokenizers 0.22 and 0.23" in text
    assert texts(INPUTS, having("tokenizer", rules="cc"))[0][0] == "tokenizer"


def test_what_full_training_began_with_is_said_and_not_refused(load: Any, checkpoint: Path) -> None:
    saved = having("base", **{"enters steps": False})
    now = having("base", files={"model.safetensors": "9 bytes, cd"}, **{"enters steps": False})
    ((part, text),) = texts(saved, now)
    assert part is None
    assert text.endswith("(no effect: the weights are the checkpoint's)")
    assert changes_since(load(), checkpoint, input_changes(saved, now)) == []


def test_a_commit_of_the_hub_is_its_files_and_another_may_have_the_same() -> None:
    saved = having("base", commit="aa")
    assert texts(saved, having("base", commit="aa", files={})) == []
    assert texts(saved, having("base", commit="bb")) == []
    now = having("base", commit="bb", files={"model.safetensors": "9 bytes, cd", "adapter_config.json": "1"})
    assert [text.split(" ->")[0] for _, text in texts(saved, now)] == [
        'base: commit: "aa"',
        "base: adapter_config.json: null",
        'base: model.safetensors: "9 bytes, ab"',
    ]


def test_other_rows_to_evaluate_on_are_said() -> None:
    assert texts(INPUTS, having("eval", **{"eval[0]": {"tokens": "f1"}})) == [
        (None, 'data: eval[0].tokens: "f0" -> "f1"')
    ]


def test_all_differences_are_reported_at_once(load: Any, checkpoint: Path) -> None:
    message = refusal(load("run.seed=7", "lora.rank=8", "optimizer.lr=0.5"), checkpoint)
    assert "run.seed: 42 -> 7" in message
    assert "lora.rank: 4 -> 8" in message
    assert "optimizer.lr" not in message


def test_only_what_can_be_accepted_may_be_listed(load: Any) -> None:
    with pytest.raises(UserError, match=r"checkpoint\.accept_changes"):
        load("checkpoint.accept_changes=[lora]")
