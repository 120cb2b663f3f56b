"""What loads, and as what: YAML's words and numbers, `extends`, overrides, dump and back, frozen."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pydantic
import pytest
import yaml
from repository import ROOT

from finetune.features import load_recipe
from finetune.recipe import RecipeError, dump_recipe
from finetune.recipe.load import key_is_known
from finetune.recipe.schema import HeldOut, Mlflow, Source, Wandb

GOOD = """\
run: {name: a}
model: {name: org/model}
mode: lora
lora: {rank: 16, targets: [q_proj, v_proj]}
data: {train: [{path: a.jsonl, format: messages}], max_length: 64}
batch: {rows: 8}
optimizer: {lr: 1e-4}
train: {epochs: 1}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write(tmp_path / "recipe.yaml", GOOD)


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("1e-4", 1e-4),
        ("1E-4", 1e-4),
        ("2.5e-5", 2.5e-5),
        ("1.e-3", 1e-3),
        (".5", 0.5),
        ("+3", 3.0),
        ("1", 1.0),
    ],
)
def test_numbers(written: str, value: float, recipe: Path):
    assert load_recipe(write(recipe, GOOD.replace("lr: 1e-4", f"name: sgd, lr: {written}"))).optimizer.lr == value
    loaded = load_recipe(recipe, ["optimizer.name=sgd", f"optimizer.lr={written}"]).optimizer.lr
    assert (loaded, type(loaded)) == (value, float)


def test_a_leading_zero_is_not_octal(recipe: Path):
    assert load_recipe(recipe, ["batch.rows=010", "run.seed=089"]).batch.rows == 10


@pytest.mark.parametrize("word", ["yes", "no", "on", "off", "y", "2021-03-03", "0x10", "1_000", "12:30:00"])
def test_words(word: str, recipe: Path):
    """YAML 1.1 makes truths, dates and numbers of these."""
    assert load_recipe(write(recipe, GOOD.replace("org/model", word))).model.name == word


def test_merge_keys(recipe: Path):
    text = GOOD.replace("{path: a.jsonl, format: messages}", "&a {path: a.jsonl, format: messages}")
    text = text.replace("max_length", "eval: [{<<: *a, path: b.jsonl}], max_length")
    assert load_recipe(write(recipe, text)).data.eval[0].model_dump(exclude_defaults=True) == {
        "path": "b.jsonl",
        "format": "messages",
    }


def test_extends_nested(tmp_path: Path):
    write(tmp_path / "base.yaml", GOOD + "schedule: {name: linear, warmup_steps: 5}\n")
    write(
        tmp_path / "models/middle.yaml",
        "extends: ../base.yaml\nschedule: {warmup_steps: 7}\nlora: {targets: [k_proj]}\n",
    )
    top = write(tmp_path / "models/runs/top.yaml", "extends: ../middle.yaml\nrun: {name: top}\nlora: {rank: 4}\n")
    recipe = load_recipe(top)
    assert recipe.run.name == "top"
    assert (recipe.schedule.name, recipe.schedule.warmup_steps) == ("linear", 7)  # sections merge, key by key
    assert recipe.lora is not None
    assert (recipe.lora.rank, recipe.lora.targets) == (4, ("k_proj",))  # lists are replaced whole


def test_null_removes_a_section(recipe: Path):
    top = write(recipe.parent / "top.yaml", "extends: recipe.yaml\nmode: full\nlora: null\n")
    assert load_recipe(top).lora is None


def test_a_model_config_is_replaced_as_one(recipe: Path):
    config = "{config: {model_type: llama, hidden_size: 8}, tokenizer: t}"
    write(recipe, GOOD.replace("{name: org/model}", config).replace("mode: lora\nlora", "mode: full\n#"))
    top = write(recipe.parent / "top.yaml", "extends: recipe.yaml\nmodel: {config: {model_type: mistral}}\n")
    assert load_recipe(top).model.config == {"model_type": "mistral"}
    assert load_recipe(recipe, ["model.config.hidden_size=16"]).model.config == {
        "model_type": "llama",
        "hidden_size": 16,
    }


def test_problems_below_name_the_file_that_has_them(recipe: Path):
    write(recipe, GOOD.replace("rank: 16", "rank: many"))
    top = write(recipe.parent / "top.yaml", "extends: recipe.yaml\nbatch: {rows: few}\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(top)
    assert [str(problem.place) for problem in caught.value.problems] == [f"{top}:2", f"{recipe}:4"]


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("run.name=2024", "2024"),
        ("model.revision=1234567", "1234567"),
        ("model.revision=12e4567", "12e4567"),
        ("model.revision=null", None),
        ("model.revision=", None),
        ('model.revision="null"', "null"),
        ("evaluate.answer=#### (.+)", "#### (.+)"),
        ("evaluate.answer=a: (b)", "a: (b)"),
        ("batch.rows=16", 16),
        ("optimizer.weight_decay=3", 3.0),
        ("optimizer.betas=[0.9, 0.99]", (0.9, 0.99)),
        ("train.compile=true", True),
        ("train.max_steps=7", 7),
        ("schedule.name=wsd", "wsd"),
        ("data.train.0.path=b=c.jsonl", "b=c.jsonl"),
        ("data.train.0.limit=5", 5),
        ("lora.targets.1=o_proj", "o_proj"),
        ("lora.targets=all-linear", "all-linear"),
        ("tracking.wandb.project=x", "x"),
    ],
)
def test_overrides_are_typed_by_the_schema(override: str, value: object, recipe: Path):
    loaded: object = load_recipe(
        recipe, [override, *(["evaluate.exact_match=1", EVAL] if "answer" in override else [])]
    )
    for part in override.partition("=")[0].split("."):
        loaded = loaded[int(part)] if isinstance(loaded, tuple) else getattr(loaded, part)
    assert (loaded, type(loaded)) == (value, type(value))


EVAL = "data.eval=[{path: b.jsonl, format: messages}]"


def test_the_last_override_wins(recipe: Path):
    assert load_recipe(recipe, ["run.seed=1", "run={name: b, seed: 2}", "run.seed=3"]).run.seed == 3


def every_recipe() -> list[Path]:
    return [path for path in sorted((ROOT / "recipes").rglob("*.yaml")) if path.parent.name not in ("base", "tasks")]


@pytest.mark.parametrize("path", every_recipe(), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_dump_loads_to_an_equal_recipe(path: Path, tmp_path: Path):
    recipe = load_recipe(path)
    text = dump_recipe(recipe)
    again = load_recipe(write(tmp_path / "again.yaml", text))
    assert again == recipe
    assert dump_recipe(again) == text


@pytest.mark.parametrize(
    "text", ["1e-4", "12e4567", "089", "010", "1.", "yes", "null", "~", "", "a: b # c", "ü", "x" * 300]
)
def test_dump_keeps_text_text(text: str, recipe: Path, tmp_path: Path):
    loaded = load_recipe(recipe)
    changed = loaded.model_copy(update={"model": loaded.model.model_copy(update={"revision": text})})
    assert load_recipe(write(tmp_path / "again.yaml", dump_recipe(changed))) == changed


def test_frozen(recipe: Path):
    loaded = load_recipe(recipe)
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        loaded.run.seed = 1  # pyright: ignore
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        loaded.mode = "full"  # pyright: ignore


@pytest.mark.parametrize(
    ("key", "known"),
    [
        ("run", True),
        ("extends", True),
        ("optimizer.lr", True),
        ("lora.targets", True),
        ("data.train.path", True),
        ("tracking.wandb.project", True),
        ("optimizer.learning_rate", False),
        ("optim.lr", False),
        ("run.name.first", False),
        ("model.config.hidden_size", False),
    ],
)
def test_key_is_known(key: str, known: bool):
    assert key_is_known(key) is known


def test_advice_of_rules_names_keys_that_exist():
    rules = (ROOT / "finetune/recipe/rules.py").read_text()
    sections = "run|model|lora|quantization|data|objective|batch|optimizer|schedule|train|evaluate|checkpoint|tracking"
    named = re.findall(rf"[`\"]((?:{sections})\.[a-z_]+)", rules)
    assert len(named) > 10
    assert [key for key in named if not key_is_known(key)] == []


def test_what_a_url_holds_is_in_no_recipe_that_is_written_down(tmp_path):
    secret = GOOD.replace("a.jsonl", "'https://me:pass@host/a.jsonl?signature=x'")
    recipe = load_recipe(write(tmp_path / "recipe.yaml", secret))
    assert recipe.data.train[0].path == "https://me:pass@host/a.jsonl?signature=x"
    for written in (dump_recipe(recipe), str(recipe.model_dump(mode="json"))):
        assert "https://host/a.jsonl?..." in written
        assert "me:pass" not in written
        assert "signature" not in written


SHORT = """\
run: {name: a}
model: {name: org/model}
mode: lora
lora: {targets: "q_proj, v_proj"}
data: {train: a.jsonl, eval: 0.1, max_length: 64}
batch: {rows: 8}
optimizer: {lr: 1e-4}
train: {epochs: 1}
tracking: {wandb: mine}
"""


def test_short_forms_are_full_ones(recipe: Path):
    short, schema = load_recipe(write(recipe, SHORT)), json.loads((ROOT / "recipes/recipe.schema.json").read_text())
    assert short.data.train == (Source(path="a.jsonl"),)
    assert short.data.eval == HeldOut(share=0.1)
    assert (short.tracking.wandb, short.lora and short.lora.targets) == (Wandb(project="mine"), ("q_proj", "v_proj"))
    jsonschema.validate(yaml.safe_load(SHORT.replace("1e-4", "1.0e-4")), schema)
    assert load_recipe(write(recipe.parent / "again.yaml", dump_recipe(short))) == short
    for key, value in (("train", 5), ("eval", 1.5), ("train", [5]), ("eval", True)):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({"data": {key: value}}, schema)


@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        (["data.train=b.jsonl"], "data.train", (Source(path="b.jsonl"),)),
        (["data.train=[b.jsonl, {path: c.jsonl}]"], "data.train", (Source(path="b.jsonl"), Source(path="c.jsonl"))),
        (["data.train.0=b.jsonl"], "data.train", (Source(path="b.jsonl"),)),
        (["data.train.0.limit=5"], "data.train", (Source(path="a.jsonl", limit=5),)),
        (["data.eval=0.2"], "data.eval", HeldOut(share=0.2)),
        (["data.eval.share=0.2"], "data.eval", HeldOut(share=0.2)),
        (["data.eval=b.jsonl"], "data.eval", (Source(path="b.jsonl"),)),
        (["tracking.wandb=true"], "tracking.wandb", Wandb()),
        (["tracking.wandb=other"], "tracking.wandb", Wandb(project="other")),
        (["tracking.wandb.mode=offline"], "tracking.wandb", Wandb(project="mine", mode="offline")),
        (["tracking.wandb=false"], "tracking.wandb", None),
        (["tracking.mlflow=true"], "tracking.mlflow", Mlflow()),
        (["tracking.mlflow=mine"], "tracking.mlflow", Mlflow(experiment="mine")),
        (["tracking.mlflow=off"], "tracking.mlflow", None),
        (["lora.targets=q_proj,k_proj"], "lora.targets", ("q_proj", "k_proj")),
        (["lora.targets.1=o_proj"], "lora.targets", ("q_proj", "o_proj")),
    ],
)
def test_short_forms_and_overrides(overrides: list[str], key: str, value: object, recipe: Path):
    loaded: object = load_recipe(write(recipe, SHORT), overrides)
    for part in key.split("."):
        loaded = getattr(loaded, part)
    assert loaded == value


def test_short_forms_are_merged_as_full_ones(recipe: Path):
    write(recipe, SHORT)
    mine = write(recipe.parent / "mine.yaml", "extends: recipe.yaml\ntracking: {wandb: true}\ndata: {eval: 0.3}\n")
    merged = load_recipe(mine)
    assert (merged.tracking.wandb, merged.data.eval) == (Wandb(project="mine"), HeldOut(share=0.3))


def test_sgd_takes_any_rate(recipe: Path):
    assert load_recipe(recipe, ["optimizer.name=sgd", "optimizer.lr=50"]).optimizer.lr == 50


BASE = (
    GOOD
    + """\
schedule: {warmup_steps: 10}
evaluate: {every_steps: 50, generate: 4}
"""
)


def test_what_is_inherited_gives_way(tmp_path: Path):
    write(tmp_path / "base.yaml", BASE.replace("max_length: 64", "eval: [{path: b.jsonl}], max_length: 64"))
    mine = write(tmp_path / "mine.yaml", "extends: base.yaml\ndata: {eval: []}\nschedule: {warmup_ratio: 0.1}\n")
    recipe = load_recipe(mine)
    assert (recipe.schedule.warmup_steps, recipe.schedule.warmup(200)) == (0, 20)
    assert (recipe.evaluate.every_steps, recipe.evaluate.generate) == (None, 0)
    steps = load_recipe(mine, ["schedule.warmup_steps=7"]).schedule  # the command line is nearer than the file
    assert (steps.warmup_ratio, steps.warmup_steps) == (None, 7)
    with pytest.raises(RecipeError, match=r"evaluate\.every_steps: needs evaluation data"):
        load_recipe(mine, ["evaluate.every_steps=5"])  # said here, so it is meant


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("bf16=true", r"bf16: unknown key; set `train\.precision: bf16`"),
        ("train.early_stopping=3", r"unknown key; set `train\.stop_when`"),
        ("schedule.name=cosine_with_restarts", r"restarts are not offered; `cosine` decays once"),
        ("tracking=null", r"expected a section, got null; `tracking=\{\}` on the command line sets all of it to"),
        ("optimizer=null", r"expected a section, got null$"),
        ("checkpoint.resume=step-20", r"or the name of a checkpoint, such as step-00000200, got"),
    ],
)
def test_words_of_other_programs(override: str, hint: str, recipe: Path):
    with pytest.raises(RecipeError, match=hint):
        load_recipe(recipe, [override])


# The objective of a recipe that was recorded while every objective had the keys of all.
OF_ALL = """{gamma: null, train_on: assistant, z_loss: 0.0, label_smoothing: 0.0, loss: null, beta: null, margin: null,
  sft_weight: 0.0, reference: null, reference_model: null, share_prompts: auto, desirable_weight: null,
  undesirable_weight: null, centering: 0.0, labels: null, teacher: null, divergence: null, temperature: null,
  jsd_beta: null, nll_weight: 0.0, top_k: null, samples: null, scale_rewards: null, overlong: null, clip: null, kl: 0.0,
  correction: null, correction_bounds: null, dropout: false, router_aux_loss_coef: null}"""
# Each with the own keys that are given, and defaults of others that were null.
OBJECTIVES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sft": ({"z_loss": 1e-4}, {"label_smoothing": 0.0}),
    "focal": ({}, {"gamma": 2.0}),
    "dpo": ({"sft_weight": 0.5}, {"loss": "sigmoid", "beta": 0.1, "margin": None, "reference": None}),
    "kto": ({"beta": 0.3}, {"desirable_weight": 1.0, "undesirable_weight": 1.0}),
    "orpo": ({}, {"beta": 0.1, "share_prompts": "auto"}),
    "reward": ({"centering": 0.01}, {}),
    "classify": ({"labels": ["a", "b"]}, {}),
    "distill": ({"teacher": "t"}, {"divergence": "forward_kl", "temperature": 1.0, "jsd_beta": None, "top_k": None}),
    "grpo": ({"kl": 0.1}, {"loss": "dr_grpo", "overlong": "keep", "correction": None}),
    "own": ({"file": "loss.py", "function": "f"}, {"train_on": "assistant"}),
}
SAMPLES = "rollouts: {prompts: 2, samples: 4, max_new_tokens: 8}"
SAMPLED = GOOD.replace("epochs: 1", "max_steps: 4").replace("max_length", "packing: false, max_length") + SAMPLES


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_recipe_of_before_each_objective_had_its_own_keys(name: str, tmp_path: Path):
    given, defaults = OBJECTIVES[name]
    text = GOOD if name != "grpo" else f"{SAMPLED}\nrewards: [{{name: number}}]\n"
    text = text.replace(", format: messages", "").replace("{path: a.jsonl}", "{path: a.jsonl, format: auto}")
    recorded = {**yaml.safe_load(OF_ALL), "name": name, **given}
    before = load_recipe(write(tmp_path / "before.yaml", f"{text}objective: {json.dumps(recorded)}\n"))
    now = load_recipe(write(tmp_path / "now.yaml", f"{text}objective: {json.dumps({'name': name, **given})}\n"))
    assert before == now
    values = yaml.safe_load(dump_recipe(now))["objective"]
    assert values == {**values, **given, **defaults}
    assert set(yaml.safe_load(OF_ALL)) - set(values)  # keys of others are not written


REWARD_OF_ALL = """{name: null, file: null, function: null, reward_model: null, judge: null, metric: null, weight: 1.0,
  on_failure: null, seconds: 10.0, processes: 2, pattern: null, answer_schema: null, target: null, margin: null,
  column: null, partial: false, memory_mb: null, isolation: null, model: null, prompt: null, scale: null, key: null,
  max_new_tokens: null}"""
REWARDS: tuple[dict[str, Any], ...] = (
    {"name": "exact_match", "pattern": "(a)"},
    {"name": "number", "weight": 2.0},
    {"name": "boxed", "on_failure": 0.0},
    {"name": "regex", "pattern": "a"},
    {"name": "json_schema", "answer_schema": {"type": "object"}},
    {"name": "length", "target": 8},
    {"name": "tests", "partial": True},
    {"file": "r.py", "function": "f"},
    {"reward_model": "runs/a"},
    {"judge": "http://host/v1", "model": "m"},
)


def test_rewards_of_before_each_had_its_own_keys(tmp_path: Path):
    text = f"{SAMPLED}\nobjective: {{name: grpo}}\nrewards: "
    recorded = [{**yaml.safe_load(REWARD_OF_ALL), **one} for one in REWARDS]
    before = load_recipe(write(tmp_path / "before.yaml", text + json.dumps(recorded)))
    now = load_recipe(write(tmp_path / "now.yaml", text + json.dumps(REWARDS)))
    assert before == now
    assert load_recipe(write(tmp_path / "again.yaml", dump_recipe(now))) == now
    values = yaml.safe_load(dump_recipe(now))["rewards"]
    assert values[6] == {**values[6], "column": "tests", "memory_mb": 1024, "isolation": "required"}
    assert values[9] == {**values[9], "scale": [0.0, 10.0], "max_new_tokens": 256}
    assert all(set(one) < set(yaml.safe_load(REWARD_OF_ALL)) for one in values)


@pytest.mark.parametrize(
    ("objective", "problem"),
    [
        ("name: kto, gamma: 2.0", "objective.gamma: has no effect under `name: kto`, only under focal: remove it"),
        (
            "reference: null, beta: 0.1",
            "objective.beta: has no effect under `name: sft`, only under dpo and kto and orpo",
        ),
        ("name: dpo, loss: dapo", "objective.loss: `dapo` is not a loss of `name: dpo`: use sigmoid, robust, hinge"),
        ("name: orpo, kl: false", "objective.kl: has no effect under `name: orpo`, only under grpo: remove it"),
        ("name: focal, gamma: -1, beta: 2", "objective.gamma: expected a number >= 0, got -1"),
        ("name: [kto]", "objective.name: expected 'sft', 'focal', 'dpo'"),
        ("name: Kto", 'got "Kto" (text); did you mean `kto`?'),
        ("nam: kto", "objective.nam: unknown key; did you mean `name`?"),
        ("file: loss.py", "objective.function: name the function in `file`, such as `function: my_loss`"),
        ("name: own, function: f", "objective.file: `name: own` needs a Python file, such as `file: my_loss.py`"),
        ("name: sft, file: loss.py", "objective.file: has no effect under `name: sft`, only under own: remove it"),
        ("file: loss.py, function: f, gamma: 2", "objective.gamma: has no effect under `name: own`, only under focal"),
    ],
)
def test_a_key_of_another_objective(objective: str, problem: str, recipe: Path):
    text = GOOD.replace(", format: messages", "") + f"objective: {{{objective}}}\n"
    with pytest.raises(RecipeError) as error:
        load_recipe(write(recipe, text))
    assert problem in str(error.value)


def test_an_objective_with_a_file_needs_no_name(recipe: Path):
    """Whatever the recipe has that it extends; on the command line, whatever the recipe has."""
    base = write(recipe.with_name("base.yaml"), GOOD + "objective: {name: focal, train_on: last_assistant}\n")
    given = write(recipe, "extends: base.yaml\nobjective: {file: loss.py, function: f}\n")
    wanted = {"name": "own", "file": "loss.py", "function": "f"}
    for path, overrides, train_on in (
        (given, (), "last_assistant"),
        (base, ["objective={file: loss.py, function: f}"], "assistant"),
        (write(recipe.with_name("plain.yaml"), GOOD), ["objective.file=loss.py", "objective.function=f"], "assistant"),
    ):
        objective = load_recipe(path, overrides).objective
        assert objective.model_dump(exclude_none=True) == {**wanted, "train_on": train_on}


def test_a_key_of_another_objective_hides_no_rule(recipe: Path):
    with pytest.raises(RecipeError, match="3 problems") as error:
        load_recipe(write(recipe, GOOD + "objective: {name: kto, gamma: 1, train_on: all}\n"))
    keys = [(problem.place.line, problem.key[-1]) for problem in error.value.problems]
    assert keys == [(5, "format"), (9, "gamma"), (9, "train_on")]


def test_null_is_the_default_of_a_key(recipe: Path):
    overrides = ["data.train.0.format=unpaired", "objective={name: kto, beta: 0.4}"]
    assert load_recipe(recipe, overrides).objective.model_dump()["beta"] == 0.4
    assert load_recipe(recipe, [*overrides, "objective.beta=null"]).objective.model_dump()["beta"] == 0.1
