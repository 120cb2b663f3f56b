"""GGUF: hf -> gguf -> transformers is the same model with the same tokens; Ollama's Modelfile; what is refused."""

from __future__ import annotations

import copy
import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import yaml
from conftest import train_here
from gguf_files import write_gguf
from rich.console import Console
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoTokenizer,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
)
from usual import usual

from finetune.checkpoints.trained import find_trained
from finetune.errors import RunFailure, UserError
from finetune.models.config import model_config
from finetune.recipe.schema import Model
from finetune.release.export.commands import ExportOptions, export_run, verify_run
from finetune.release.export.gguf_file import gguf_tensors, other_tensors
from finetune.release.export.gguf_settings import check_architecture, other_settings
from finetune.release.export.gguf_tokenizer import gguf_tokenizer, other_tokens, sentencepiece_prefix, split_name
from finetune.release.export.streamed import StreamedModel
from finetune.release.export.verify_answers import as_llama

gguf = pytest.importorskip("gguf")

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8, "tie_word_embeddings": True}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama_tied", {}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "gemma2": ("llama", {"model_type": "gemma2", **GEMMA, "num_hidden_layers": 2}),
    "gemma3": ("llama", {"model_type": "gemma3_text", **GEMMA, "num_hidden_layers": 7}),
}


def ministral(**changes: Any) -> dict[str, Any]:
    """The text config of a tiny Ministral 3 with other YaRN."""
    text = tiny.MULTIMODAL["ministral3"]["text_config"]
    return {**text, "rope_parameters": {**text["rope_parameters"], **changes}}


def saved(folder: Path, name: str, changes: dict[str, Any]) -> Path:
    save = tiny.save_multimodal if name in tiny.MULTIMODAL else tiny.save_model
    model = save(folder, name, **changes)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    (model / "recipe.txt").write_text("")
    return model


@torch.no_grad()
def log_probs(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(model.eval()(input_ids=ids).logits.double(), dim=-1)


def read(file: Path, config: Any) -> Any:
    config = as_llama(config) if config.model_type == "mistral" else copy.deepcopy(config)
    load: Any = AutoModelForCausalLM.from_pretrained
    model, report = load(file.parent, gguf_file=file.name, config=config, dtype=torch.float32, output_loading_info=True)
    assert not any(report.values()), report
    return model


@pytest.mark.parametrize("name", usual(KINDS, "llama", "gemma3"))
def test_round_trip(tmp_path: Path, name: str) -> None:
    base, changes = KINDS[name]
    folder = saved(tmp_path, base, changes)
    ids = torch.randint(3, 350, (4, 60), generator=torch.Generator().manual_seed(1))
    expected = log_probs(AutoModelForCausalLM.from_pretrained(folder), ids)
    for kind, mean in {"f32": 1e-12, "bf16": 1e-3, "q8_0": 1e-2}.items():
        file = write_gguf(folder, tmp_path / kind, kind)
        found = log_probs(read(file, AutoConfig.from_pretrained(folder)), ids)
        assert float((expected.exp() * (expected - found)).sum(-1).mean()) < mean, kind
        if kind == "f32":
            assert float((expected - found).abs().max()) < 1e-6


def test_a_window_is_the_longest_text(tmp_path: Path) -> None:
    """llama.cpp has none for Mistral: up to a window each token sees all before it, beyond it does not."""
    folder = saved(tmp_path, "mistral", {"sliding_window": 32})
    file = write_gguf(folder, tmp_path / "out", "f32")
    fields = gguf.GGUFReader(file).fields
    assert fields["llama.context_length"].contents() == 32
    ids = torch.randint(3, 350, (2, 60), generator=torch.Generator().manual_seed(1))
    expected = log_probs(AutoModelForCausalLM.from_pretrained(folder), ids)
    difference = (expected - log_probs(read(file, AutoConfig.from_pretrained(folder)), ids)).abs()
    assert float(difference[:, :32].max()) < 1e-6
    assert float(difference[:, 32:].max()) > 1e-3


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_text_parts_of_qwen_vl_are_read_back(tmp_path: Path, name: str) -> None:
    """transformers knows neither in GGUF: the file's tensors in the text model, beside the base's own class."""
    folder = saved(tmp_path, name, {})
    ids = torch.randint(3, 350, (2, 60), generator=torch.Generator().manual_seed(1))
    expected = log_probs(AutoModelForMultimodalLM.from_pretrained(folder), ids)
    file = write_gguf(folder, tmp_path / "out", "f32")
    fields = {key: field.contents() for key, field in gguf.GGUFReader(file).fields.items()}
    arch = {"qwen2_5_vl": "qwen2vl", "qwen3_vl": "qwen3vl"}[name]
    assert fields["general.architecture"] == arch
    assert fields[f"{arch}.rope.dimension_sections"] == [4, 2, 2, 0]
    model = StreamedModel(find_trained(tmp_path / "out-run"))
    assert model.text_part is not None
    assert not other_tensors(model, file)
    config = model_config(Model(name=str(folder)))
    assert not other_settings(config, AutoConfig.from_pretrained(folder), file)
    state = {name: one.read() for name, one in gguf_tensors(model, file).items()}
    found = type(model.text_part.text).from_pretrained(None, config=config, state_dict=state)
    assert float((expected - log_probs(found, ids)).abs().max()) < 1e-6
    theirs, ours = gguf_tokenizer(file), AutoTokenizer.from_pretrained(folder)
    assert theirs("river 1234 it's")["input_ids"] == ours("river 1234 it's")["input_ids"]


SIX_LAYERS = {**tiny.MULTIMODAL["gemma3"]["text_config"], "num_hidden_layers": 6, "query_pre_attn_scalar": 16}
SIX_LAYERS["layer_types"] = ["sliding_attention"] * 5 + ["full_attention"]


@pytest.mark.parametrize(
    ("name", "changes"), [("mistral3", {}), ("smolvlm", {}), ("gemma3", {"text_config": SIX_LAYERS})]
)
def test_of_a_multimodal_base_the_text_part_is_written(tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    """And read as a text model, whose log-probabilities are those of the base's own class."""
    folder = saved(tmp_path, name, changes)
    ids = torch.randint(3, 350, (2, 60), generator=torch.Generator().manual_seed(1))
    expected = log_probs(AutoModelForMultimodalLM.from_pretrained(folder), ids)
    file = write_gguf(folder, tmp_path / "out", "f32")
    found = log_probs(read(file, model_config(Model(name=str(folder)))), ids)
    assert float((expected - found).abs().max()) < 1e-6


def test_the_scale_of_the_larger_gemmas_is_llama_cpp_s() -> None:
    """Which it takes from the number of layers, so that one which only looks alike is refused."""
    for name, layers in {"gemma2": 46, "gemma3_text": 62}.items():
        settings = {**tiny.MODELS["llama"], **GEMMA, "model_type": name, "head_dim": 32, "num_hidden_layers": layers}
        check_architecture(AutoConfig.for_model(**settings), is_scoring=False)
        for changes in ({"num_hidden_layers": layers - 2}, {"query_pre_attn_scalar": 32}):
            with pytest.raises(UserError, match=r"--to gguf: attention scaled by (16|32), or"):
                check_architecture(AutoConfig.for_model(**{**settings, **changes}), is_scoring=False)


# llama.cpp turns neighbouring rows of a head together, transformers row i and i + half of a head
TURNED = [16 * head + i + 8 * half for head in range(4) for i in range(8) for half in range(2)]


def test_mixtral_is_read_back_tensor_by_tensor(tmp_path: Path) -> None:
    """transformers does not read its experts from GGUF: names and rows are compared with the format's definition."""
    folder = saved(tmp_path, "mixtral", {})
    state = load_file(folder / "model.safetensors")
    file = write_gguf(folder, tmp_path / "f32", "f32")
    tensors = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in gguf.GGUFReader(file).tensors}
    assert len(tensors) == 3 + 2 * (2 + 4 + 1 + 3)
    layer = "model.layers.1."
    q = state[f"{layer}self_attn.q_proj.weight"]
    assert torch.equal(tensors["blk.1.attn_q.weight"], q[TURNED])
    assert torch.equal(tensors["blk.1.attn_v.weight"], state[f"{layer}self_attn.v_proj.weight"])
    assert torch.equal(tensors["blk.1.ffn_gate_inp.weight"], state[f"{layer}block_sparse_moe.gate.weight"])
    for ours, theirs in {"gate": "w1", "down": "w2", "up": "w3"}.items():
        experts = [state[f"{layer}block_sparse_moe.experts.{e}.{theirs}.weight"] for e in range(8)]
        assert torch.equal(tensors[f"blk.1.ffn_{ours}_exps.weight"], torch.stack(experts))
    fields = gguf.GGUFReader(file).fields
    assert [fields[f"llama.expert_{key}"].contents() for key in ("count", "used_count")] == [8, 2]
    ids = torch.randint(3, 350, (2, 40))
    expected = log_probs(AutoModelForCausalLM.from_pretrained(folder), ids)
    for kind, mean in {"f32": 1e-12, "bf16": 1e-3, "q8_0": 1e-2}.items():
        file = file if kind == "f32" else write_gguf(folder, tmp_path / kind, kind)
        tensors = gguf_tensors(StreamedModel(find_trained(tmp_path / f"{kind}-run")), file)
        back = {name: one.read() for name, one in tensors.items()}
        assert kind != "f32" or (back.keys() == state.keys() and all(torch.equal(back[n], state[n]) for n in state))
        model = MixtralForCausalLM.from_pretrained(None, config=AutoConfig.from_pretrained(folder), state_dict=back)
        assert float((expected.exp() * (expected - log_probs(model, ids))).sum(-1).mean()) < mean, kind


@pytest.mark.long
def test_ministral_3_is_written_for_llama_cpp_and_compared(made: Path, tmp_path: Path) -> None:
    """transformers knows no `mistral3`: settings, tokens and tensors are read from the file, and its model compared."""
    folder = saved(tmp_path, "ministral3", {})
    run = tmp_path / "out-run"
    file = write_gguf(folder, tmp_path / "out", "f32")
    fields = {key: field.contents() for key, field in gguf.GGUFReader(file).fields.items()}
    assert fields["general.architecture"] == "mistral3"
    scaling = {key.rpartition(".")[2]: value for key, value in fields.items() if ".rope.scaling." in key}
    assert scaling == {
        "type": "yarn",
        "factor": 4.0,
        "original_context_length": 16,
        "yarn_beta_fast": 32.0,
        "yarn_beta_slow": 1.0,
        "yarn_log_multiplier": 1.0,
    }
    assert fields["mistral3.attention.temperature_scale"] == pytest.approx(0.1)
    state = load_file(folder / "model.safetensors")
    (name,) = (key for key in state if "vision" not in key and key.endswith("layers.1.self_attn.q_proj.weight"))
    (q,) = (tensor for tensor in gguf.GGUFReader(file).tensors if tensor.name == "blk.1.attn_q.weight")
    assert torch.equal(torch.from_numpy(q.data.copy()), state[name][TURNED])
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    recipe["data"]["train"] = [{"path": str(made / "rows.jsonl"), "format": "messages"}]
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    figures = verify_run(tmp_path / "out", run, None, None, 8, Console(quiet=True))
    assert figures.kl_mean < 1e-12
    assert figures.greedy == 1
    reader = gguf.GGUFReader(file, "r+")
    q = next(tensor for tensor in reader.tensors if tensor.name == "blk.0.attn_q.weight")
    q.data[:] = q.data.reshape(4, 8, 2, -1).swapaxes(1, 2).reshape(q.data.shape).copy()  # as transformers has them
    other(reader.fields["mistral3.rope.scaling.factor"])
    reader.data.flush()
    with pytest.raises(RunFailure, match=r"factor is 8.0, and 4.0 in the run\n +weights: .*q_proj.*\n(.*\n)*.*KL"):
        verify_run(tmp_path / "out", run, None, None, 8, Console(quiet=True))


def test_gemma_s_settings_are_those_that_it_computes_by(tmp_path: Path) -> None:
    """What transformers takes from the config and llama.cpp from the file."""
    for name, window in {"gemma2": 8, "gemma3": 8}.items():
        base, changes = KINDS[name]
        rope = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
        ropes = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
        more = {"rope_parameters": ropes} if name == "gemma3" else {}
        file = write_gguf(saved(tmp_path / name, base, {**changes, **more}), tmp_path / f"{name}-out", "f32")
        fields = {key: field.contents() for key, field in gguf.GGUFReader(file).fields.items()}
        assert fields[f"{name}.attention.sliding_window"] == window
        if name == "gemma2":
            assert (fields["gemma2.attn_logit_softcapping"], fields["gemma2.final_logit_softcapping"]) == (50, 30)
        else:
            assert (fields["gemma3.rope.freq_base"], fields["gemma3.rope.freq_base_swa"]) == (1e6, 1e4)
            assert (fields["gemma3.rope.scaling.type"], fields["gemma3.rope.scaling.factor"]) == ("linear", 8)


def other(field: Any) -> None:
    """Change a field of a file in its place."""
    part = field.parts[field.data[0]]
    part[0] = part[0] ^ 1 if field.types[0] == gguf.GGUFValueType.STRING else part[0] * 2


@pytest.mark.parametrize(
    "name", ["gemma3", "ministral3", *(pytest.param(name, marks=pytest.mark.long) for name in ("llama3", "qwen3_moe"))]
)
def test_any_setting_of_a_file_is_seen(tmp_path: Path, name: str) -> None:
    """Also those that transformers does not read, or that act beyond the length of held-out rows."""
    kinds = {"llama3": ("llama", {"rope_parameters": LLAMA3_ROPE}), "ministral3": ("ministral3", {}), **KINDS}
    folder = saved(tmp_path, *kinds[name])
    file = write_gguf(folder, tmp_path / "out", "f32")
    model, config = StreamedModel(find_trained(tmp_path / "out-run")), model_config(Model(name=str(folder)))
    assert [*other_settings(config, None, file), *other_tensors(model, file), *other_tokens(folder, file)] == []
    changed, content = tmp_path / "changed.gguf", file.read_bytes()
    settings = [key for key in gguf.GGUFReader(file).fields if not key.startswith(("GGUF.", "general.", "tokenizer."))]
    assert len(settings) > 11
    for key in settings:
        changed.write_bytes(content)
        reader = gguf.GGUFReader(changed, "r+")
        other(reader.fields[key])
        reader.data.flush()
        assert key.partition(".")[2] in " ".join(other_settings(config, None, changed)), key
    changed.write_bytes(content)
    reader = gguf.GGUFReader(changed, "r+")
    kinds_of_tokens = reader.fields["tokenizer.ggml.token_type"]
    kinds_of_tokens.parts[kinds_of_tokens.data[2]][0] = gguf.TokenType.NORMAL
    if name == "llama3":
        factors = next(tensor for tensor in reader.tensors if tensor.name == "rope_freqs.weight")
        factors.data[-1] = 8
    reader.data.flush()
    assert "token 2, '<|im_end|>', is no special one" in other_tokens(folder, changed)[0]
    assert name != "llama3" or "are not the factors of the run's RoPE" in other_tensors(model, changed)[0]
    with changed.open("rb") as opened:
        missing = opened.read().replace(b"blk.1.attn_v.weight", b"blk.1.attn_w.weight")
    changed.write_bytes(missing)
    assert [problem.partition(": has ")[2] for problem in other_tensors(model, changed)[:2]] == [
        *("no blk.1.attn_v.weight", "blk.1.attn_w.weight, which the run's model has not"),
    ]


def sentencepiece(prefix: str, folder: Path) -> None:
    """A vocabulary of merges over bytes, as SentencePiece's become in tokenizer.json, trained on the rows."""
    backend = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    replaces = normalizers.Replace(" ", "▁")
    if prefix == "first":
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)  # pyright: ignore
    else:
        backend.normalizer = (
            normalizers.Sequence([normalizers.Prepend("▁"), replaces]) if prefix == "always" else replaces
        )
    special = ["<pad>", "<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>"]
    special += [f"<0x{byte:02X}>" for byte in range(256)]
    texts = [m["content"].replace(" ", "▁") for row in tiny.conversations(40) for m in row["messages"]]
    learner = Tokenizer(models.BPE())
    learner.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=90, special_tokens=special[:6]))
    learnt = json.loads(learner.to_str())["model"]
    merges = [tuple(m) for m in learnt["merges"]]
    letters = [t for t in learnt["vocab"] if len(t) == 1]
    vocab = {t: i for i, t in enumerate(dict.fromkeys([*special, *letters, *("".join(m) for m in merges)]))}
    backend.model = models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    backend.add_special_tokens(special[:3] + special[4:6])
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    tokenizer.chat_template = tiny.CHATML
    tokenizer.save_pretrained(folder)


@pytest.mark.parametrize("prefix", ["first", "never", "always"])
def test_scores_of_sentencepiece_say_the_same_as_its_merges(tmp_path: Path, prefix: str) -> None:
    """llama.cpp merges the neighbours whose token has the best score, again and again: here in Python."""
    folder = saved(tmp_path, "llama", {})
    for path in folder.glob("token*"):
        path.unlink()
    sentencepiece(prefix, folder)
    file = write_gguf(folder, tmp_path / "out", "f32")
    fields = {key: field.contents() for key, field in gguf.GGUFReader(file).fields.items()}
    tokens, scores = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.scores"]
    assert fields["tokenizer.ggml.model"] == "llama"
    assert fields["tokenizer.ggml.add_space_prefix"] == (prefix == "always")
    assert [fields["tokenizer.ggml.token_type"][i] for i in (1, 3, 10, 300)] == [3, 2, 6, 1]
    ids = {token: i for i, token in enumerate(tokens)}

    def by_scores(text: str) -> list[int]:
        parts = list(text.replace(" ", "▁"))
        while pairs := [(scores[ids[a + b]], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ids]:
            at = -max(pairs)[1]
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        known = [[ids[p]] if p in ids else [ids[f"<0x{b:02X}>"] for b in p.encode()] for p in parts]
        return [i for one in known for i in one]

    ours = AutoTokenizer.from_pretrained(folder)
    rng = random.Random(0)
    pieces = ["river", " stone", "  ", "\n", "é", "日本", "1234", "it's", "quick", " table", "the light"]
    texts = ["".join(rng.choices(pieces, k=rng.randint(1, 9))) for _ in range(1000)]
    for text in texts:
        # "first": at the beginning of a text that has none, where llama.cpp has none either way
        space = "" if prefix == "never" or (prefix == "first" and text.startswith(" ")) else " "
        assert ours(text, add_special_tokens=False)["input_ids"] == by_scores(space + text), text
    chat = ours.apply_chat_template([{"role": "user", "content": "river"}], return_dict=False)
    segment = by_scores((" " if prefix == "always" else "") + "user\nriver")
    assert chat == [ids["<|im_start|>"], *segment, ids["<|im_end|>"]]


@pytest.mark.parametrize("digits", [False, True])
def test_the_same_tokens_on_a_thousand_strings(tmp_path: Path, digits: bool) -> None:
    folder = saved(tmp_path, "llama", {})
    ours = AutoTokenizer.from_pretrained(folder)
    if digits:
        before = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        ours.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(before)
        ours.save_pretrained(folder)
        ours = AutoTokenizer.from_pretrained(folder)
        assert len(ours("1234")["input_ids"]) == 4
    file = write_gguf(folder, tmp_path / "out", "f32")
    theirs = gguf_tokenizer(file)
    rng = random.Random(0)
    pieces = [
        "river",
        " stone",
        "  ",
        "\n",
        "\t",
        "é",
        "日本",
        "🙂",
        "1234",
        "it's",
        "<|im_end|>",
        "x" * 30,
        "\x00",
        "ﬁ",
    ]
    texts = ["".join(rng.choices(pieces, k=rng.randint(1, 9))) for _ in range(1000)]
    assert [ours(text)["input_ids"] for text in texts] == [theirs(text)["input_ids"] for text in texts]
    assert theirs.chat_template == tiny.CHATML


def test_frequency_factors_of_llama_3(tmp_path: Path) -> None:
    """transformers takes them from the config, llama.cpp from the file: theta^(-2i/d) / factor."""
    changes = {"rope_parameters": LLAMA3_ROPE}
    folder = saved(tmp_path, "llama", changes)
    file = write_gguf(folder, tmp_path / "out", "f32")
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(file).tensors}
    model = AutoModelForCausalLM.from_pretrained(folder)
    factors = torch.from_numpy(tensors["rope_freqs.weight"].copy())
    plain = 1.0 / 10000.0 ** (torch.arange(0, 16, 2) / 16)
    torch.testing.assert_close(plain / factors, model.model.rotary_emb.inv_freq)
    assert (factors[0], factors[-1]) == (1, 4)  # high frequencies stay
    ids = torch.randint(3, 350, (2, 60))
    found = log_probs(read(file, AutoConfig.from_pretrained(folder)), ids)
    assert float((log_probs(model, ids) - found).abs().max()) < 1e-6


def lora_run(folder: Path, base: Path, rows: Path, steps: int) -> None:
    """A run `lora` of a few steps."""
    recipe = {
        "run": {"name": "lora", "dir": str(folder)},
        "model": {"name": str(base)},
        "mode": "lora",
        "lora": {"rank": 4},
        "data": {"train": [{"path": str(rows), "format": "messages"}], "max_length": 64},
        "batch": {"rows": 2},
        "optimizer": {"lr": 2e-2},
        "train": {"max_steps": steps, "precision": "fp32"},
        "checkpoint": {"every_steps": steps},
    }
    (folder / "lora.yaml").write_text(yaml.safe_dump(recipe))
    train_here(folder / "lora.yaml")


def test_a_run_is_exported_for_ollama_and_compared(made: Path, tmp_path: Path) -> None:
    """Of a base with a window, up to which rows are compared."""
    lora_run(tmp_path, tiny.save_model(tmp_path, "mistral", sliding_window=40), made / "rows.jsonl", 3)
    out = tmp_path / "out"
    quiet = Console(quiet=True)
    export_run(tmp_path / "lora", ExportOptions(to="ollama", out=out, dtype="q8_0"), quiet)
    assert sorted(path.name for path in out.iterdir()) == [
        *("Modelfile", "README.md", "export.json", "lora-q8_0.gguf", "verify.json"),
    ]
    assert (out / "Modelfile").read_text() == 'FROM ./lora-q8_0.gguf\nPARAMETER stop "<|im_end|>"\n'
    figures = json.loads((out / "verify.json").read_text())
    assert (figures["passed"], figures["format"]) == (True, "q8_0")
    assert 1e-9 < figures["kl_mean"] < 1e-2
    with pytest.raises(UserError, match=r"--dtype q4: .*\. Fix: give one of f32, bf16, f16, q8_0, q6_k"):
        export_run(tmp_path / "lora", ExportOptions(to="gguf", dtype="q4"), quiet)
    # rows of q and k in transformers' order, and another end token, are caught
    options = ExportOptions(to="gguf", out=tmp_path / "f32", dtype="f32")
    export_run(tmp_path / "lora", options, quiet)
    (file,) = (tmp_path / "f32").glob("*.gguf")
    reader = gguf.GGUFReader(file, "r+")
    q = next(tensor for tensor in reader.tensors if tensor.name == "blk.0.attn_q.weight")
    q.data[:] = q.data.reshape(4, 8, 2, -1).swapaxes(1, 2).reshape(q.data.shape).copy()
    reader.fields["tokenizer.ggml.eos_token_id"].parts[-1][0] = 5
    reader.data.flush()
    with pytest.raises(RunFailure) as error:
        verify_run(tmp_path / "f32", tmp_path / "lora", None, None, 8, quiet)
    assert "KL" in str(error.value)
    assert "[2] end an answer in the run" in str(error.value)


@pytest.mark.long
def test_a_run_of_a_multimodal_base_is_compared_by_its_text(made: Path, tmp_path: Path) -> None:
    lora_run(tmp_path, tiny.save_multimodal(tmp_path, "mistral3"), made / "rows.jsonl", 2)
    for step in (None, "2"):
        out = tmp_path / f"out-{step}"
        export_run(tmp_path / "lora", ExportOptions(to="gguf", out=out, dtype="f32", step=step), Console(quiet=True))
        figures = json.loads((out / "verify.json").read_text())
        assert figures["passed"]
        assert figures["kl_mean"] < 1e-10 < figures["kl_base"]


@pytest.mark.long
def test_a_run_of_mixtral_is_compared_by_its_tensors(made: Path, tmp_path: Path) -> None:
    lora_run(tmp_path, made / "mixtral", made / "rows.jsonl", 2)
    export_run(tmp_path / "lora", ExportOptions(to="gguf", out=tmp_path / "out", dtype="f32"), Console(quiet=True))
    figures = json.loads((tmp_path / "out" / "verify.json").read_text())
    assert figures["passed"]
    assert figures["kl_mean"] < 1e-10 < figures["kl_base"]
    (file,) = (tmp_path / "out").glob("*.gguf")
    reader = gguf.GGUFReader(file, "r+")
    stack = next(tensor for tensor in reader.tensors if tensor.name == "blk.1.ffn_up_exps.weight")
    stack.data[:] = stack.data[::-1].copy()  # experts in another order
    reader.data.flush()
    with pytest.raises(RunFailure, match="KL"):
        verify_run(tmp_path / "out", tmp_path / "lora", None, None, 8, Console(quiet=True))


@pytest.mark.parametrize(
    ("name", "changes", "fragment"),
    [
        ("granite_hybrid", {}, "--to gguf: granitemoehybrid is not written here (only llama, mistral, qwen2, qwen3,"),
        ("llama", {"model_type": "gemma2", **GEMMA, "head_dim": 32}, "llama.cpp scales that of 2 layers by 32"),
        (
            "llama",
            {"model_type": "gemma3_text", **GEMMA, "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2},
            "a layer without a window every 6",
        ),
        (
            "ministral3",
            {"text_config": ministral(mscale=2.0)},
            "llama.cpp takes YaRN's mscale for 1, and here it is 2.0",
        ),
        ("ministral3", {"text_config": ministral(attention_factor=1.5)}, "is not written here, only plain YaRN"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
            "RoPE of type linear",
        ),
        ("qwen3_moe", {"norm_topk_prob": False}, "llama.cpp normalizes"),
    ],
)
def test_what_is_not_written_is_refused_by_name(
    tmp_path: Path, name: str, changes: dict[str, Any], fragment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the converter as the way out; not if llama.cpp computes otherwise: it would be written all the same."""
    monkeypatch.delenv("LLAMA_CPP_DIR", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError) as error:
        write_gguf(saved(tmp_path, name, changes), tmp_path / "out", "f32")
    assert fragment in str(error.value)
    is_converted = fragment.startswith(("--to gguf: granite", "RoPE"))
    assert ("convert_hf_to_gguf.py is used then" in str(error.value)) == is_converted
    assert not (tmp_path / "out.partial").exists()


def test_a_tokenizer_that_splits_text_otherwise_is_refused() -> None:
    content = json.loads(tiny.tokenizer().backend_tokenizer.to_str())
    assert split_name(content) == "gpt-2"
    byte_level = content["pre_tokenizer"]
    for individual, name in ((True, "smollm"), (False, None)):
        digits = {"type": "Digits", "individual_digits": individual}
        content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, byte_level]}
        assert split_name(content) == name
    content["model"] |= {"byte_fallback": True}
    assert split_name(content) is None
    assert sentencepiece_prefix(content) is None


def test_a_unigram_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    folder = saved(tmp_path, "llama", {})
    pieces = [("<unk>", 0.0), *((chr(i), -float(i)) for i in range(97, 123))]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.Unigram(pieces, 0)), unk_token="<unk>")
    tokenizer.save_pretrained(folder)
    with pytest.raises(UserError, match=r"tokenizer, of type Unigram, does\. Fix: give --llama-cpp DIR"):
        write_gguf(folder, tmp_path / "out", "f32")
