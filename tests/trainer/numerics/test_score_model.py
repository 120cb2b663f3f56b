"""Models of scores against transformers' own, and where their heads come from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from finetune.data.batch import Batch, collate
from finetune.data.samples import Example, Sequence
from finetune.errors import UserError
from finetune.models.attention import attention_for
from finetune.models.base_model import Base
from finetune.models.config import model_config
from finetune.models.score_model import ScoreModel
from finetune.models.weights import Placement, load_model
from finetune.models.wrapped import trained_head
from finetune.objectives import make_objective
from finetune.objectives.forward import ForwardPass
from finetune.recipe import load_recipe
from finetune.recipe.schema import Recipe

CPU = Placement("load", torch.device("cpu"))
LORA = {"mode": "lora", "lora": {"rank": 2, "alpha": 4}}
QLORA = {**LORA, "mode": "qlora", "quantization": {"type": "nf4"}}
LABELS = ("bad", "fair", "good")


@pytest.fixture
def load(made: Path, recipe: dict[str, Any], write_recipe: Any) -> Any:
    """Returns the recipe and the model of some changes, with labels."""

    def loaded(labels: tuple[str, ...] = ("reward",), placement: Placement = CPU, **changes: Any) -> tuple[Recipe, Any]:
        data = {"train": [{"path": str(made / "rows.jsonl"), "format": "preference"}], "max_length": 64}
        values = {**recipe, "objective": {"name": "reward"}, "data": data, **changes}
        found = load_recipe(write_recipe(values), ())
        config = model_config(found.model)
        return found, load_model(found, Base.of(found, config), attention_for(found, config, "cpu"), placement, labels)

    return loaded


def packed(lengths: tuple[int, ...] = (5, 1, 13, 9)) -> Batch:
    """One row of documents, one of which is a single token."""
    generator = np.random.default_rng(0)
    ids = [generator.integers(3, 350, n).astype(np.int32) for n in lengths]
    return collate([Example("a", i, 0, (Sequence(one, np.zeros(len(one), bool)),)) for i, one in enumerate(ids)])


def scores_of(recipe: Recipe, model: Any, batch: Batch, **arguments: Any) -> torch.Tensor:
    attention = attention_for(recipe, model_config(recipe.model), "cpu")
    outputs = ForwardPass(attention, make_objective(recipe.objective))(ScoreModel(model, **arguments), batch)
    return outputs.scores


@pytest.mark.parametrize("labels", [("reward",), LABELS])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", "mixtral"])
def test_packed_documents_score_as_each_alone(
    made: Path, tmp_path: Path, load: Any, name: str, labels: tuple[str, ...]
) -> None:
    """By transformers' own forward, for which no token is padding."""
    recipe, model = load(labels, model={"name": str(made / name)})
    model.save_pretrained(tmp_path / "plain")
    batch = packed()
    ours = scores_of(recipe, model.eval(), batch)
    plain: Any = AutoModelForSequenceClassification.from_pretrained(tmp_path / "plain", dtype=torch.float32).eval()
    plain.config.pad_token_id = None
    with torch.no_grad():
        alone = [plain(input_ids=ids).logits[0] for ids in batch.inputs["input_ids"].split(batch.sequence_lengths, 1)]
    assert ours.shape == (4, len(labels))
    torch.testing.assert_close(ours.detach(), torch.stack(alone), rtol=0, atol=1e-6)
    assert ours.std() > 0.01


def test_a_new_head_depends_on_the_seed_alone(made: Path, load: Any) -> None:
    def head(**changes: Any) -> torch.Tensor:
        return trained_head(load(**changes)[1]).weight.detach().float()

    first = head()
    config = dict(model_config(load()[0].model).to_diff_dict(), model_type="llama")
    shape = {key: config[key] for key in ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")}
    for changes in (LORA, QLORA, {"model": {"config": shape, "tokenizer": str(made / "llama")}}):
        torch.testing.assert_close(head(**changes), first, rtol=0, atol=0)
    assert first.std().item() == pytest.approx(0.02, rel=0.3)
    other = head(run={"name": "other", "seed": 1})
    assert not torch.equal(other, first)
    assert trained_head(load(placement=Placement("meta", None))[1]).weight.is_meta


@pytest.mark.parametrize("mode", [LORA, QLORA], ids=["lora", "qlora"])
def test_adapters_train_the_head_in_full_and_never_in_4_bits(load: Any, mode: dict[str, Any]) -> None:
    recipe, model = load(**mode)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    heads = {name for name in trained if "lora_" not in name}
    assert heads == {"base_model.model.score.modules_to_save.default.weight"}
    assert len(trained) > len(heads)
    assert trained_head(model).weight.dtype == torch.float32
    assert type(trained_head(model)).__name__ == "Linear"
    assert scores_of(recipe, model, packed()).requires_grad


def test_scores_under_autocast_have_all_digits(load: Any) -> None:
    """Of 16 bits: the same hidden states and weight, and their product in fp32."""
    recipe, model = load()
    exact = scores_of(recipe, model, packed())
    scores = scores_of(recipe, model, packed(), autocast=torch.bfloat16)
    assert scores.dtype == torch.float32
    assert not torch.equal(scores, scores.bfloat16().float())
    torch.testing.assert_close(scores, exact, rtol=0.05, atol=0.01)


def test_a_checkpoint_with_labels_keeps_its_head(tmp_path: Path, made: Path, load: Any) -> None:
    _, model = load(LABELS)
    model.score.weight.data.fill_(0.5)
    model.save_pretrained(tmp_path / "labelled")
    changes = {"name": str(tmp_path / "labelled"), "tokenizer": str(made / "llama")}
    _, again = load(LABELS, model=changes)
    assert torch.equal(again.score.weight, model.score.weight)
    assert again.config.id2label == dict(enumerate(LABELS))
    with pytest.raises(UserError, match="its labels are bad, fair, good, and this run's are good, fair, bad"):
        load(LABELS[::-1], model=changes)
    with pytest.raises(UserError, match="begin with a model that has no labels yet"):
        load(("reward",), model=changes)


def test_an_architecture_without_such_a_class_is_refused(load: Any, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {"vocab_size": 384, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = AutoConfig.for_model("granite", intermediate_size=32, eos_token_id=2, **shape)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "granite")
    with pytest.raises(UserError, match="GraniteConfig has no sequence classification model in transformers"):
        load(model={"name": str(tmp_path / "granite")})
