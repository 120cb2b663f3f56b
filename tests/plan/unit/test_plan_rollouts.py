"""Memory of sampling a cohort as `plan` calculates it, against the bytes of the real thing."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from trainers import prepared_run, ready_trainer, started_engine

from finetune.data.dataset import on_disk
from finetune.engine.base import StorageCounter
from finetune.engine.launch import Kind, Launch
from finetune.features import all_features, load_recipe
from finetune.models.base_model import Base
from finetune.plan import command
from finetune.plan.answer import as_dicts, show
from finetune.plan.command import PlanOptions
from finetune.plan.lengths import Lengths, read_lengths, widest
from finetune.plan.memory import Memory, Place, estimate_memory
from finetune.plan.meter import Meter
from finetune.plan.micro_batch import HeaviestBatch, How, examples_of
from finetune.plan.rollouts import CohortCosts, cohorts, sampling_of
from finetune.plan.search import Choice
from finetune.plan.teacher_memory import teacher_of
from finetune.recipe import Recipe
from finetune.rl.rollouts.drawing import Drawer
from finetune.rl.sample_teacher import SampleTeacher
from finetune.training.teacher import TeacherPass

PROMPT, NEW = 40, 24


@pytest.fixture
def recipe_file(made: Path, tmp_path: Path) -> Path:
    values = {
        "run": {"name": "run", "dir": str(tmp_path)},
        "model": {"name": str(made / "llama_deep")},
        "mode": "full",
        "data": {
            "train": [{"path": str(made / "rows.jsonl"), "format": "messages"}],
            "max_length": PROMPT + NEW,
            "packing": False,
        },
        "objective": {"name": "grpo"},
        "rollouts": {"prompts": 2, "samples": 16, "max_new_tokens": NEW, "cohort": 32},
        "rewards": [{"name": "exact_match"}],
        "batch": {"rows": 32, "tokens_per_device": 256},
        "optimizer": {"lr": 1e-3},
        "train": {"max_steps": 1, "precision": "fp32"},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    return tmp_path / "recipe.yaml"


def predicted(recipe: Recipe, prompt: int = PROMPT) -> CohortCosts:
    return sampling_of(recipe, Base.of(recipe).config, prompt, How("cpu", None))


@pytest.mark.parametrize("model", ["llama_deep", "qwen3", "mistral"])
def test_bytes_of_a_cohort_are_those_of_a_real_one(model: str, recipe_file: Path, made: Path) -> None:
    """No token ends a sample, so that caches grow to the last one."""
    prepared = prepared_run(str(recipe_file), [f"model.name={made / model}"], features=all_features())
    engine = started_engine(prepared)
    try:
        trainer, rollouts = ready_trainer(prepared, engine), prepared.recipe.rollouts
        assert rollouts is not None
        drawer = Drawer(engine, rollouts, seed=1, end_ids={-1}, pad_id=0)
        with Meter("cpu") as meter:
            weights = [tensor.detach() for tensor in engine.model.parameters()]  # views of them are results, too
            meter.begin("sampling")
            before = meter.now
            drawn = drawer.draw(0, [[5] * PROMPT, [6] * PROMPT], rollouts.samples)
        assert {len(one.ids) for one in drawn} == {NEW}
        assert before >= sum(weight.nbytes for weight in weights)
    finally:
        engine.close()
        del trainer
    expected = predicted(prepared.recipe)
    assert meter.peaks["sampling"] - before == pytest.approx(expected.peak, rel=0.02)


def test_the_cache_is_two_tensors_of_each_layer(recipe_file: Path, made: Path) -> None:
    recipe = load_recipe(recipe_file)
    text = Base.of(recipe).config.get_text_config()
    head = text.hidden_size // text.num_attention_heads
    tokens = PROMPT + NEW - 1  # the last one is sampled, and read by none
    of_layer = 2 * text.num_key_value_heads * head * tokens * 32 * 4
    assert predicted(recipe).cache == text.num_hidden_layers * of_layer
    stages = sampling_of(recipe, Base.of(recipe).config, PROMPT, How("cpu", None, pipeline=2))
    assert stages.cache == text.num_hidden_layers // 2 * of_layer


def test_a_window_bounds_the_cache(recipe_file: Path, made: Path) -> None:
    recipe = load_recipe(recipe_file, [f"model.name={made / 'mistral'}"])
    window = Base.of(recipe).config.get_text_config().sliding_window
    assert window
    assert predicted(recipe, window).cache == predicted(recipe, 4 * window).cache


def test_memory_grows_with_the_samples_and_says_which_cohort_fits(recipe_file: Path) -> None:
    sampling = {n: predicted(load_recipe(recipe_file, [f"rollouts.cohort={n}"])) for n in (8, 32)}
    assert sampling[32].peak == pytest.approx(4 * sampling[8].peak, rel=0.05)
    each = sampling[32].peak // 32
    assert [sampling[32].largest(n * each, 48) for n in (0, 1, 9, 33, 100)] == [0, 1, 8, 32, 48]


def test_cohorts_of_a_step_are_shared_out(recipe_file: Path) -> None:
    rollouts = load_recipe(recipe_file, ["rollouts.cohort=5"]).rollouts
    assert rollouts is not None
    assert cohorts(rollouts, 1) == (7, 7)
    assert cohorts(rollouts, 2) == (7, 4)


def no_page(*_: object) -> None:
    raise AssertionError("--html was not given")


def test_plan_names_cohorts_and_their_largest_size(
    recipe_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(recipe_file.parent)
    options = PlanOptions(("2xH100-80",), as_json=True)
    overrides = ["rollouts.cohort=4", "train.precision=bf16"]
    command.run(recipe_file, overrides, options, Console(quiet=True), load_recipe, no_page)
    first = next(one for one in json.loads(capsys.readouterr().out) if one["is_answer"])
    rollouts = first["rollouts"]
    assert {key: rollouts[key] for key in ("cohorts", "cohorts_of_a_rank", "largest_cohort")} == {
        "cohorts": 8,
        "cohorts_of_a_rank": 4,
        "largest_cohort": 32,
    }
    assert rollouts["cache_gib"] <= rollouts["cohort_gib"] <= first["phases_gib"]["sampling"]
    assert first["step_parts_s"]["generation"] > 0
    options = PlanOptions(("2xH100-80",))
    out = StringIO()
    command.run(recipe_file, overrides, options, Console(file=out, width=300), load_recipe, no_page)
    assert "rollouts: 8 cohorts of 4 samples, 4 on a rank one after another" in out.getvalue()
    assert "rollouts.cohort up to 32 fits" in out.getvalue()


@pytest.mark.long
def test_a_larger_cohort_samples_faster_and_takes_more(recipe_file: Path) -> None:
    """Each token of a cohort costs the host and the weights once."""

    def best(cohort: int) -> Choice:
        options = PlanOptions(("1xH100-80",))
        changes = [f"rollouts.cohort={cohort}", "train.precision=bf16"]
        return command.plan(recipe_file, changes, options, load_recipe)[1][0]

    small, large = best(8), best(32)
    assert small.step is not None
    assert large.step is not None
    assert small.step.parts["generation"] > 3 * large.step.parts["generation"]
    assert large.memory.phases["sampling"] > small.memory.phases["sampling"]


def test_rows_of_a_plan_are_prompts_with_the_longest_sample(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file)
    lengths = read_lengths(recipe)
    assert isinstance(lengths, Lengths)
    rows, sizes = lengths.rows(recipe, Base.of(recipe).config), lengths.examples.sizes
    prompts = [p for p in (sizes.tokens - sizes.target_tokens).tolist() if p <= PROMPT]
    assert rows.heaviest == (max(prompts) + NEW,)
    assert rows.targets_per_row == rows.most_targets == NEW
    assert widest(recipe, "no tokenizer", Base.of(recipe).config).heaviest == (PROMPT + NEW,)


def test_bytes_of_a_teacher_are_those_of_a_real_one(recipe_file: Path, made: Path) -> None:
    """Its weights, and the forward of a micro-batch of four samples."""
    teacher = f"objective={{name: distill, teacher: {made / 'qwen3'}, divergence: reverse_kl, top_k: 8}}"
    prepared = prepared_run(str(recipe_file), [teacher, "rewards=[]"], features=all_features())
    recipe, heaviest = prepared.recipe, HeaviestBatch((PROMPT + NEW,) * 4, 4 * NEW)
    expected = teacher_of(recipe, heaviest, How("cpu", None))
    assert expected is not None
    engine = started_engine(prepared)
    try:
        vocabulary = prepared.base.config.get_text_config().vocab_size
        beside = SampleTeacher(TeacherPass(recipe, on_disk(prepared.training), vocabulary), engine, 4)
        kept = StorageCounter(engine.device).add([*beside.model.parameters(), *beside.model.buffers()])
        with Meter("cpu") as meter:
            weights = [tensor.detach() for tensor in beside.model.parameters()]  # views of them are results, too
            meter.begin("forward")
            before = meter.now
            beside(examples_of(recipe.objective, heaviest))
        assert before >= sum(weight.nbytes for weight in weights)
    finally:
        engine.close()
    assert expected.kept == kept
    assert meter.peaks["forward"] - before == pytest.approx(expected.forward, rel=0.02)


def test_a_second_model_is_counted_where_it_is(recipe_file: Path, made: Path) -> None:
    """The initial weights of `kl` are divided as those that a rank trains, in the host's memory; on processors that is
    the device's. A teacher is whole on each device."""
    batch = HeaviestBatch((PROMPT + NEW,) * 4, 4 * NEW)

    def memory(kind: Kind, device: str, *changes: str) -> Memory:
        recipe = load_recipe(recipe_file, changes)
        # No step is weighed, as it takes more than a byte.
        return estimate_memory(recipe, Base.of(recipe).config, Place(Launch(kind, 2), 2, device), batch, most=1)

    trained = memory("replicated", "cpu").persistent["weights"]
    for kind, share in (("replicated", 1.0), ("fsdp2", 0.5)):
        without, on_gpu = (memory(kind, "cuda", *changes) for changes in ((), ("objective.kl=0.1",)))
        on_cpu = memory(kind, "cpu", "objective.kl=0.1")
        assert on_gpu.host == 2 * on_gpu.initial == 2 * on_cpu.persistent["initial weights"]
        assert on_gpu.initial == pytest.approx(share * trained, rel=0.01)
        assert on_gpu.phases == without.phases
        assert on_cpu.tensors - memory(kind, "cpu").tensors == on_gpu.initial
    distills = ("rewards=[]", f"objective={{name: distill, teacher: {made / 'qwen3'}, divergence: reverse_kl}}")
    one, other = (memory(kind, "cuda", *distills) for kind in ("replicated", "fsdp2"))
    assert one.persistent["teacher"] == other.persistent["teacher"] > 0


@pytest.mark.long
def test_plan_names_the_second_model(recipe_file: Path, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(recipe_file.parent)
    monkeypatch.setattr("finetune.plan.answer.GIB", 1 << 20)  # of models that are small
    distills = ["rewards=[]", f"objective={{name: distill, teacher: {made / 'qwen3'}, divergence: reverse_kl}}"]
    for changes, key, words in (
        (["objective.kl=0.1"], "initial_weights_gib", "in host memory of each process the initial weights, "),
        (distills, "teacher_gib", "on each device the teacher, "),
    ):
        out = StringIO()
        request, choices, results = command.plan(recipe_file, changes, PlanOptions(("2xH100-80",)), load_recipe)
        show(Console(file=out, width=400), request, choices, results)
        size = as_dicts(request, choices)[0]["rollouts"][key]
        assert size > 0
        assert f"{words}{size:.2f} GiB" in out.getvalue()
        assert ("teacher" in choices[0].memory.phases) == (changes is distills)
