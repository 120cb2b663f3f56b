"""Tokens shared by tensor parallel ranks between matrices: which models may, and layers that are computed again."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PretrainedConfig,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.phi3.modeling_phi3 import Phi3MLP

from finetune.engine.split_trial import ThreadGroup, ThreadRanks, differ, tensor_split_problem, token_split_problem
from finetune.engine.tensor_parallel import parallelize
from finetune.models.tiny_config import tiny_config


@pytest.mark.parametrize("model_type", ["gemma3_text", "olmo2"])
def test_norms_around_matrices_take_any_tokens(model_type: str) -> None:
    assert token_split_problem(AutoConfig.for_model(model_type)) is None


def test_a_mixer_that_no_matrix_of_the_plan_feeds_takes_all_tokens() -> None:
    assert "could not be tried" in str(token_split_problem(AutoConfig.for_model("qwen3_5_text")))


def test_dropout_of_the_model_itself_keeps_all_tokens() -> None:
    why = token_split_problem(AutoConfig.for_model("phi", resid_pdrop=0.1))
    assert why == "the model's `resid_pdrop` would draw for other tokens than one process does"


@pytest.mark.parametrize(
    ("model_type", "difference"),
    [
        ("gemma3n_text", "other logits"),  # a threshold by mean and deviation of features, of which a rank has some
        ("inkling2_text", "another gradient of `model.embed_tokens.embed_norm.weight`"),  # of tokens that a rank has
        ("mixtral", None),
        ("qwen3_5_text", None),
        ("phi", None),
    ],
)
def test_ranks_that_would_compute_something_else_are_refused(model_type: str, difference: str | None) -> None:
    why = tensor_split_problem(AutoConfig.for_model(model_type))
    assert why == (difference and f"a tiny copy gives {difference}")


class MixingConfig(LlamaConfig):
    model_type = "llama_that_mixes"


class MixingLayer(LlamaDecoderLayer):
    """Looks at all tokens outside of its matrices."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(hidden_states, *args, **kwargs) - hidden_states.mean(1, keepdim=True)


class ScalingConfig(Phi3Config):
    model_type = "phi3_that_scales"


class ScalingMlp(Phi3MLP):
    """Has the right output on each rank, and reads its input by more than a column parallel matrix: each rank has all
    of that part of its gradient, not a part of it."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(hidden_states).chunk(2, dim=-1)
        return self.down_proj(up * self.activation_fn(gate) * (1 + hidden_states.mean()))


class MixingLlama(LlamaForCausalLM):
    config_class = MixingConfig

    def __init__(self, config: Any):
        super().__init__(config)
        for layer in self.model.layers:
            layer.__class__ = MixingLayer


class ScalingPhi3(Phi3ForCausalLM):
    config_class = ScalingConfig

    def __init__(self, config: Any):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp.__class__ = ScalingMlp


AutoModelForCausalLM.register(MixingConfig, MixingLlama)
AutoModelForCausalLM.register(ScalingConfig, ScalingPhi3)


@pytest.mark.parametrize(
    ("config", "difference"), [(MixingConfig, "other logits"), (ScalingConfig, "another gradient")]
)
def test_a_trial_finds_what_the_plan_does_not_say(config: type[PretrainedConfig], difference: str) -> None:
    assert difference in str(differ(tiny_config(config()), splits_tokens=True))


def test_a_layer_that_is_computed_again_after_another_row_has_its_own_row() -> None:
    """As under a pipeline: two forwards, then two backwards with recomputation; and none is left divided."""
    torch.manual_seed(0)
    tiny = tiny_config(AutoConfig.for_model("llama"))
    whole: Any = AutoModelForCausalLM.from_config(tiny, attn_implementation="eager")
    ranks, rows = ThreadRanks(2), [torch.arange(3, 3 + tokens)[None] for tokens in (11, 6)]
    models = [copy.deepcopy(whole) for _ in range(2)]
    sharded = [
        parallelize(model, ThreadGroup(None, index, 2, ranks), splits_tokens=True) for index, model in enumerate(models)
    ]

    def gradients(model: Any) -> dict[str, Tensor]:
        model.train().gradient_checkpointing_enable({"use_reentrant": False})
        losses = [model(input_ids=ids, labels=ids, use_cache=False).loss for ids in rows]
        for loss in losses:
            loss.backward()
        with torch.no_grad():
            assert model(input_ids=rows[0][:, :1], use_cache=False).logits.shape[1] == 1
        return {name: p.grad for name, p in model.named_parameters()}

    expected, found = gradients(whole), ranks.run(gradients, models)
    for name, wanted in expected.items():
        ours = [one[name] for one in found]
        if name in sharded[0].partial:
            ours = [ours[0] + ours[1]] * 2
        for one, parts in zip(ours, sharded, strict=True):
            part = parts.shards[name].take(wanted) if name in parts.shards else wanted
            assert torch.allclose(one, part, rtol=1e-4, atol=1e-6), name
