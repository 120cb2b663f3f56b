"""Packed documents train as plain transformers trains each of them alone; else one per forward, or not at all."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import architectures as sweep
import pytest
import torch
import transformers
from packaging.version import Version
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    DeepseekV32Config,
    DogeConfig,
    GptOssConfig,
    LlamaConfig,
    OPTConfig,
    PegasusConfig,
    PhimoeConfig,
    RobertaConfig,
)
from transformers.integrations import deepspeed, hub_kernels

from finetune.data.checksums import sealed
from finetune.errors import UserError
from finetune.models.attention import DOCUMENTS, AttentionChoice, choose_attention, per_document
from finetune.models.attention.isolation import verdict
from finetune.models.tiny_config import tiny_config
from finetune.models.trials import quietly

doge = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.18"), reason="Doge of transformers 5.17 sees what it is to predict"
)


def choose(asked: str, config: Any) -> AttentionChoice:
    return choose_attention(asked, AutoModelForCausalLM._model_mapping[type(config)], config, "cpu", False)


@pytest.mark.parametrize(
    ("asked", "config", "implementation", "isolates", "reason"),
    [
        ("auto", LlamaConfig(), DOCUMENTS, True, "no work across documents"),
        ("auto", LlamaConfig(vocab_size=30), DOCUMENTS, True, "no work across documents"),
        # transformers' masks are not handed the positions that say where documents begin.
        ("eager", GptOssConfig(), "eager", True, "GptOssAttention once for each document"),
        ("auto", GptOssConfig(), DOCUMENTS, True, "no work across documents"),
        ("auto", OPTConfig(), DOCUMENTS, True, "no work across documents"),
        ("sdpa", OPTConfig(), "sdpa", True, "OPTAttention once for each document"),
        ("eager", OPTConfig(), "eager", True, "OPTAttention once for each document"),
        ("auto", PegasusConfig(), "sdpa", False, "does not keep packed documents of PegasusForCausalLM apart"),
        ("auto", DeepseekV32Config(), "sdpa", False, "tokens that an index chooses, and ties fall otherwise"),
        pytest.param("auto", DogeConfig(), "sdpa", True, "this model brings a mask of its own", marks=doge),
        # The window is in its mask alone; its attention does not know it.
        ("auto", PhimoeConfig(sliding_window=2047), "sdpa", True, "does not compute what each document alone gives"),
        ("auto", PhimoeConfig(), DOCUMENTS, True, "no work across documents"),
    ],
)
def test_isolation_is_seen_not_believed(
    asked: str, config: Any, implementation: str, isolates: bool, reason: str
) -> None:
    choice = choose(asked, config)
    assert (choice.implementation, choice.isolates_documents) == (implementation, isolates)
    assert reason in choice.reason


@doge
def test_documents_requested_by_name_are_refused_where_they_would_leave_a_mask_out() -> None:
    with pytest.raises(UserError, match=r"`documents` does not fit DogeForCausalLM here: .*a mask of its own.*`auto`"):
        choose("documents", DogeConfig())


def test_a_mask_and_documents_together_raise() -> None:
    model: Any = AutoModelForCausalLM.from_config(tiny_config(DogeConfig()), attn_implementation=DOCUMENTS)
    with pytest.raises(ValueError, match="brings a mask of its own"):
        model(input_ids=torch.arange(3, 12)[None], use_cache=False, **per_document.prepare((4, 5)))


def test_a_model_that_sees_what_it_is_to_predict_is_refused() -> None:
    with pytest.raises(UserError, match=r"BertLMHeadModel sees the tokens that it should predict.*`is_decoder: true`"):
        choose("auto", BertConfig())
    assert choose("auto", BertConfig(is_decoder=True)).isolates_documents


def test_positions_are_left_to_a_model_that_counts_them_otherwise() -> None:
    """RoBERTa's begin after that of its padding token."""
    choice = choose("auto", RobertaConfig(is_decoder=True))
    assert not choice.isolates_documents
    assert choice.forward_arguments((5,)) == {"position_ids": None}


def test_a_verdict_is_kept_and_a_trial_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    before = torch.get_rng_state()
    assert verdict(LlamaConfig(), DOCUMENTS, per_document.prepare).packed is None
    assert torch.equal(before, torch.get_rng_state())
    [kept] = (tmp_path / "attention").iterdir()
    kept.write_text(sealed({"packed": "as it was read", "positions": None, "causal": None}), encoding="utf-8")
    assert verdict(LlamaConfig(), DOCUMENTS, per_document.prepare).packed == "as it was read"
    # A larger model of the same switches is the same trial, another switch is another.
    assert verdict(LlamaConfig(num_hidden_layers=80), DOCUMENTS, per_document.prepare).packed == "as it was read"
    assert verdict(LlamaConfig(attention_bias=True), DOCUMENTS, per_document.prepare).packed is None
    assert len(os.listdir(tmp_path / "attention")) == 2
    for damaged in (kept.read_text().replace("as it was", "as it wss"), "no JSON"):
        kept.write_text(damaged, encoding="utf-8")
        assert verdict(LlamaConfig(), DOCUMENTS, per_document.prepare).packed is None


def test_a_trial_runs_without_kernels_that_need_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As fla and mamba_ssm are where they are installed: transformers takes what they have in place of its own."""

    def kernel(*_arguments: Any, **_options: Any) -> str:
        raise ValueError("a tensor on the CPU")

    package: Any = ModuleType("scans_for_gpus")
    package.chunk_scan = kernel
    monkeypatch.setitem(sys.modules, package.__name__, package)
    scan = hub_kernels.use_kernel_func_from_hub_with_fallback("chunk_scan", package.__name__)(lambda: "plain torch")
    with pytest.raises(ValueError, match="on the CPU"):
        scan()
    with quietly():
        assert scan() == "plain torch"
    with pytest.raises(ValueError, match="on the CPU"):
        scan()


def test_zero_3_does_not_shard_the_tiny_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed trial would mean one document per forward, and would be kept for every later run."""
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    zero_3 = deepspeed.HfTrainerDeepSpeedConfig({"zero_optimization": {"stage": 3}})  # alive: transformers knows of it
    assert deepspeed.is_deepspeed_zero3_enabled()
    assert verdict(LlamaConfig(), DOCUMENTS, per_document.prepare).packed is None
    assert deepspeed.is_deepspeed_zero3_enabled()
    del zero_3


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("llama", "packed"),
        ("gpt_oss", "packed"),
        ("deepseek_v32", "single"),
        ("bert", "refused"),
        ("musicgen", "unbuilt"),
    ],
)
def test_the_sweep_tells_every_kind_of_verdict(tmp_path: Path, name: str, found: str) -> None:
    assert sweep.examine(name, tmp_path).verdict == found


def test_the_sweep_sees_documents_that_see_each_other() -> None:
    config = sweep.tiny("gpt_oss")
    wrong = AttentionChoice("eager", "as it was", isolates_documents=True)
    differences, moved = sweep.as_in_a_run(config, wrong, sweep.plain(config))
    assert differences.loss > 0.01
    assert differences.gradient > 0.01
    assert moved > 0.01


@pytest.mark.parametrize(("model_type", "head_size"), [("llama", 16), ("deepseek_v3", 8), ("gpt2", None)])
def test_a_tiny_config_keeps_the_switches(model_type: str, head_size: int | None) -> None:
    config = AutoConfig.for_model(model_type)
    tiny = tiny_config(config)
    assert getattr(tiny, "head_dim", None) == head_size
    assert tiny.hidden_size == 64
    assert tiny.tie_word_embeddings == config.tie_word_embeddings
    assert config.hidden_size > 64, "the model's own config is left as it is"
