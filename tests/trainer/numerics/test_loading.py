"""How weights come to be: from scratch, from a folder, as shapes only; and what is refused."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from usual import usual

from finetune.errors import UserError
from finetune.models.attention import attention_for
from finetune.models.base_model import Base
from finetune.models.config import model_config
from finetune.models.moe import adapts_experts
from finetune.models.tokenizer import check_token_ids, load_tokenizer
from finetune.models.weights import Placement, add_adapters, load_model, parameter_counts
from finetune.recipe import load_recipe
from finetune.recipe.schema import Lora, Model

CPU = torch.device("cpu")


def load(recipe: dict[str, Any], write_recipe: Any, weights: Any = "load") -> Any:
    loaded = load_recipe(write_recipe(recipe))
    config = model_config(loaded.model)
    return load_model(loaded, Base.of(loaded, config), attention_for(loaded, config, "cpu"), Placement(weights, CPU))


@pytest.mark.parametrize("lora", usual((False, True), True))
@pytest.mark.parametrize("name", tiny.MODELS)
def test_shapes_only_holds_no_weight_and_the_same_tensors(
    recipe: dict[str, Any], write_recipe: Any, made: Path, name: str, lora: bool
) -> None:
    """FSDP2's ranks above 0 load so, and take all values from rank 0: rotary frequencies, which are in no checkpoint,
    too (`tests/trainer/distributed/test_fill.py`). What is saved must be the same everywhere, or lists would differ."""
    recipe["model"]["name"] = str(made / name)
    if lora:
        recipe.update(mode="lora", lora={"rank": 4})
    shapes, real = load(recipe, write_recipe, "meta"), load(recipe, write_recipe)
    assert all(p.is_meta for p in shapes.parameters())
    assert [(n, p.shape, p.dtype) for n, p in shapes.named_parameters()] == [
        (n, p.shape, p.dtype) for n, p in real.named_parameters()
    ]
    ours, theirs = dict(shapes.named_buffers()), dict(real.named_buffers())
    assert ours.keys() == theirs.keys()
    assert all(ours[n].is_meta and ours[n].shape == theirs[n].shape for n in theirs)
    assert list(shapes.state_dict()) == list(real.state_dict())


def test_random_weights_follow_the_seed(recipe: dict[str, Any], write_recipe: Any, made: Path) -> None:
    recipe["model"] = {"config": tiny.MODELS["llama"], "tokenizer": str(made / "llama")}
    one, same = load(recipe, write_recipe), load(recipe, write_recipe)
    recipe["run"]["seed"] = 7
    other = load(recipe, write_recipe)
    weights = [model.get_output_embeddings().weight for model in (one, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_lora_trains_every_linear_layer_and_nothing_else(recipe: dict[str, Any], write_recipe: Any) -> None:
    recipe.update(mode="lora", lora={"rank": 4, "modules_to_save": ["lm_head"]})
    trained = [name for name, p in load(recipe, write_recipe).named_parameters() if p.requires_grad]
    adapted = {name.split(".lora_")[0].rpartition(".")[2] for name in trained if ".lora_" in name}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert [name for name in trained if ".lora_" not in name] == [
        "base_model.model.lm_head.modules_to_save.default.weight"
    ]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"model": {"name": "no/such/folder"}}, "model.name: 'no/such/folder'"),
    ({"model": {"config": {"model_type": "lama"}, "tokenizer": "x"}}, "model.config: no model config"),
    (
        {"model": {"config": {"model_type": "llama", "hiden_size": 8}, "tokenizer": "x"}},
        "hiden_size: not a setting of llama. Fix: write `hidden_size`",
    ),
    ({"mode": "lora", "lora": {"targets": ["q_prj"]}}, "lora.targets: the model has no module 'q_prj'"),
    ({"mode": "lora", "lora": {"modules_to_save": ["head"]}}, "lora.modules_to_save: the model has no module 'head'"),
]


@pytest.mark.parametrize(("changes", "fragment"), BAD, ids=[fragment for _, fragment in BAD])
def test_what_cannot_be_loaded_is_named(
    recipe: dict[str, Any], write_recipe: Any, changes: dict[str, Any], fragment: str
) -> None:
    with pytest.raises(UserError) as error:
        load({**recipe, **changes}, write_recipe)
    assert fragment in str(error.value)


@pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings=True")  # peft's, of merging
def test_dora_on_a_head_with_a_row_of_zeros_is_refused(recipe: dict[str, Any], write_recipe: Any, made: Path) -> None:
    """That of the padding token, in the embedding which the head is tied to."""
    recipe |= {"model": {"name": str(made / "llama_tied")}, "mode": "lora"}
    load(recipe | {"lora": {"rank": 4, "dora": True}}, write_recipe)
    with pytest.raises(UserError, match=r"1 outputs of lm_head are zero \(0\).*leave 'lm_head' out of lora.targets"):
        load(recipe | {"lora": {"rank": 4, "dora": True, "targets": ["lm_head", "q_proj"]}}, write_recipe)


def test_parameters_are_counted_in_full_also_in_4_bit(recipe: dict[str, Any], write_recipe: Any) -> None:
    whole, trained = parameter_counts(load(recipe, write_recipe))
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64  # q and o, k and v, the MLP, two norms
    assert whole == trained == 2 * 384 * 64 + 2 * layer + 64
    recipe.update(mode="qlora", lora={"rank": 4}, quantization={"type": "nf4"})
    with_adapters, adapters = parameter_counts(load(recipe, write_recipe))
    assert with_adapters - adapters == whole


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(made: Path) -> None:
    config = model_config(Model(name=str(made / "llama")))
    with pytest.raises(UserError, match="They do not belong together"):
        check_token_ids(config, config.vocab_size + 1)


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model\.name: no tokenizer from"):
        load_tokenizer(Model(name=str(tmp_path)))
    for load_part in (load_tokenizer, model_config):  # not what a hub says of such an id
        with pytest.raises(UserError, match=r"no such folder\. Fix: give one, or the id of a model on the hub"):
            load_part(Model(name=str(tmp_path / "absent")))
        with pytest.raises(UserError, match="neither a folder here nor in the hub's cache, and nothing is downloaded"):
            load_part(Model(name="somebody/absent"))


def test_a_tokenizer_without_pad_gets_its_end_token(tmp_path: Path) -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(Model(name=str(tmp_path))).pad_token == "<|im_end|>"


@pytest.mark.parametrize(("rslora", "divisor"), [(False, 4), (True, 2)], ids=["alpha / rank", "alpha / sqrt(rank)"])
def test_an_adapter_s_update_is_scaled(recipe: dict[str, Any], write_recipe: Any, rslora: bool, divisor: float) -> None:
    recipe.update(mode="lora", lora={"rank": 4, "alpha": 6, "rslora": rslora})
    module = load(recipe, write_recipe).get_submodule("base_model.model.model.layers.0.self_attn.q_proj")
    a, b = module.lora_A["default"].weight, module.lora_B["default"].weight
    torch.nn.init.normal_(b)
    x = torch.randn(3, a.shape[1])
    update = module(x) - module.base_layer(x)
    torch.testing.assert_close(update, x @ a.T @ b.T * (6 / divisor), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("targets", "adapted"), [("all-linear", True), (["q_proj"], False)])
def test_adapters_on_experts_are_known(
    recipe: dict[str, Any], write_recipe: Any, made: Path, targets: Any, adapted: bool
) -> None:
    """The run says then that servers want the merged model."""
    recipe["model"]["name"] = str(made / "mixtral")
    recipe.update(mode="lora", lora={"rank": 4, "targets": targets})
    assert adapts_experts(load(recipe, write_recipe, "meta")) == adapted


def gpt2_with_trained(name: str) -> Any:
    """Returns GPT-2, whose tables are tied, with adapters and a module that is trained whole."""
    config = AutoConfig.for_model("gpt2", vocab_size=40, n_embd=16, n_layer=1, n_head=2, eos_token_id=0, bos_token_id=0)
    lora = Lora.model_validate({"rank": 2, "targets": ["c_attn"], "modules_to_save": [name]})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fan_in_fan_out", UserWarning)  # peft's, of Conv1D
        return add_adapters(AutoModelForCausalLM.from_config(config), lora, torch.float32)


@pytest.mark.parametrize("name", ["wte", "lm_head"])
def test_a_trained_copy_of_a_tied_table_is_one_for_embedding_and_head(name: str) -> None:
    """By the name of either, also that of GPT-2's embedding, which peft does not know; and still after `tie_weights`,
    which sharding calls."""
    model = gpt2_with_trained(name)
    for _ in range(2):
        base = model.get_base_model()
        embedding, head = base.get_input_embeddings(), base.get_output_embeddings()
        trained = embedding.modules_to_save["default"].weight
        assert head.modules_to_save["default"].weight is trained
        assert trained.requires_grad
        assert head.original_module.weight is embedding.original_module.weight
        assert not head.original_module.weight.requires_grad
        base.to("meta")
        base.tie_weights()


def test_a_tied_table_is_not_trained_with_another_module() -> None:
    whole = [name for name, p in gpt2_with_trained("wpe").named_parameters() if p.requires_grad and "lora_" not in name]
    assert whole == ["base_model.model.transformer.wpe.modules_to_save.default.weight"]
