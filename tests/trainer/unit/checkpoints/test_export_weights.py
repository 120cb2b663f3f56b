"""Tensors into files: where files end, how they are named, what is held, and what transformers would write."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import parity
import pytest
import tiny
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM

from finetune.checkpoints.weight_files import INDEX, DiskLayout, WeightsWriter, cast

MIXTRAL = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}


def numbers(count: int) -> Tensor:
    """count fp32 values: four bytes each."""
    return torch.arange(count, dtype=torch.float32)


def written(folder: Path, shard_bytes: int, *sizes: int) -> list[dict[str, int]]:
    """For each file in order: tensor -> values. The tensors are a, b, c ... with so many values."""
    writer = WeightsWriter(folder, shard_bytes)
    for name, size in zip("abcdefgh", sizes, strict=False):
        writer.add(name, numbers(size))
    writer.finish()
    return [{name: tensor.numel() for name, tensor in contents(file).items()} for file in files(folder)]


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def contents(file: Path) -> dict[str, Tensor]:
    with safe_open(file, framework="pt") as tensors:
        assert tensors.metadata() == {"format": "pt"}
        return {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118 (safe_open is no dict)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((10, 15), [{"a": 10, "b": 15}]),  # exactly full
        ((10, 15, 1), [{"a": 10, "b": 15}, {"c": 1}]),
        ((10, 16), [{"a": 10}, {"b": 16}]),  # one value too many
        ((5, 40, 5, 5), [{"a": 5}, {"b": 40}, {"c": 5, "d": 5}]),  # larger than a file by itself
        ((40,), [{"a": 40}]),
    ],
)
def test_a_file_ends_before_the_tensor_that_would_overfill_it(
    tmp_path: Path, sizes: tuple[int, ...], expected: list[dict[str, int]]
) -> None:
    assert written(tmp_path, 100, *sizes) == expected


def test_one_file_has_the_plain_name_and_no_index(tmp_path: Path) -> None:
    written(tmp_path, 100, 10, 15)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert torch.equal(contents(tmp_path / "model.safetensors")["b"], numbers(15))


def test_several_files_are_numbered_and_indexed(tmp_path: Path) -> None:
    written(tmp_path, 100, 10, 40, 5)
    names = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [*names, INDEX]
    index = json.loads((tmp_path / INDEX).read_text(encoding="utf-8"))
    assert index == {"metadata": {"total_size": 220}, "weight_map": dict(zip("abc", names, strict=True))}


@pytest.mark.usefixtures("nothing_alive")
def test_a_view_is_written_alone_and_does_not_hold_its_storage(tmp_path: Path) -> None:
    writer, whole = WeightsWriter(tmp_path), numbers(12).view(3, 4)
    writer.add("rows", whole[1:])
    writer.add("columns", whole[:, 1])
    del whole
    assert live_bytes() == (8 + 3) * 4
    writer.finish()
    saved = contents(tmp_path / "model.safetensors")
    assert torch.equal(saved["rows"], numbers(12).view(3, 4)[1:])
    assert torch.equal(saved["columns"], numbers(12).view(3, 4)[:, 1])


# --- as transformers would write it


@pytest.fixture(scope="module")
def sources(made: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model folders by name."""
    mixtral = tiny.save_model(tmp_path_factory.mktemp("mixtral"), "mistral", **MIXTRAL)
    return {**{name: made / name for name in tiny.MODELS}, "mixtral": mixtral}


def stream(model: Any, state: dict[str, Tensor], folder: Path, shard_bytes: int) -> None:
    layout = DiskLayout(model, {name: tensor.to("meta") for name, tensor in state.items()})
    writer = WeightsWriter(folder, shard_bytes)
    for name, tensor in state.items():
        for on_disk, values in layout.convert(name, cast(tensor, torch.bfloat16)).items():
            writer.add(on_disk, values)
    writer.finish()


def deduplicated(model: Any) -> dict[str, Tensor]:
    names = dict(model.named_parameters()).keys()  # tied tensors: the first name
    return {name: tensor for name, tensor in model.state_dict().items() if name in names}


def load(source: Path, from_scratch: bool) -> Any:
    loaded = AutoModelForCausalLM.from_pretrained(source)
    return AutoModelForCausalLM.from_config(loaded.config) if from_scratch else loaded


@pytest.mark.parametrize("shard_bytes", [10**9, 100_000, 1])
@pytest.mark.parametrize("from_scratch", [False, True], ids=["loaded", "from scratch"])
@pytest.mark.parametrize("name", [*tiny.MODELS, "mixtral"])
def test_tensor_for_tensor_what_save_pretrained_writes(
    sources: dict[str, Path], tmp_path: Path, name: str, from_scratch: bool, shard_bytes: int
) -> None:
    model = load(sources[name], from_scratch)
    (tmp_path / "ours").mkdir()
    stream(model, deduplicated(model), tmp_path / "ours", shard_bytes)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "theirs")
    ours, theirs = parity.tensors(tmp_path / "ours"), parity.tensors(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    assert all(ours[key].dtype == torch.bfloat16 and torch.equal(ours[key], theirs[key]) for key in theirs)
    count = len(files(tmp_path / "ours"))
    assert count == 1 if shard_bytes == 10**9 else count == len(ours) if shard_bytes == 1 else 1 < count < len(ours)
    assert ("model.layers.1.block_sparse_moe.experts.3.w2.weight" in ours) == (name == "mixtral")


def test_a_layer_comes_together_where_one_tensor_is_made_of_several(tmp_path: Path) -> None:
    """Reversed, this conversion makes one tensor of the queries, keys and values; another one renames."""
    from transformers.core_model_loading import Chunk, WeightConverter, WeightRenaming

    model = AutoModelForCausalLM.from_config(tiny_config())
    parts = [f".self_attn.{part}_proj.weight" for part in "qkv"]
    fused = WeightConverter(".self_attn.qkv.weight", parts, operations=[Chunk(dim=0)])
    model._weight_conversions = [fused, WeightRenaming(".mlp_block.", ".mlp.")]
    state = deduplicated(model)
    stream(model, state, tmp_path, 100_000)
    saved = parity.tensors(tmp_path)
    expected = torch.cat([state[f"model.layers.1{part}"] for part in parts]).to(torch.bfloat16)
    assert torch.equal(saved["model.layers.1.self_attn.qkv.weight"], expected)
    assert "model.layers.1.mlp_block.up_proj.weight" in saved
    assert len(saved) == len(state) - 2 * 2


def tiny_config(**changes: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(**{**tiny.MODELS["llama"], **changes})


# --- memory


@pytest.fixture
def nothing_alive() -> Iterator[None]:
    """What exists already does not count, and is not searched."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def live_bytes() -> int:
    """Of all CPU tensors made since, each storage once."""
    tensors = [found for found in gc.get_objects() if issubclass(type(found), Tensor) and found.device.type == "cpu"]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def fresh(state: dict[str, Tensor], between: list[int]) -> Iterator[tuple[str, Tensor]]:
    """fp32 tensors that no model holds, as a backend gathers them; notes what is alive before each."""
    for name, tensor in state.items():
        between.append(live_bytes())
        yield name, torch.ones(tensor.shape)


@pytest.mark.usefixtures("nothing_alive")
@pytest.mark.parametrize("changes", [{}, MIXTRAL], ids=["llama", "mixtral"])
def test_peak_memory_is_a_shard_and_one_tensor(tmp_path: Path, changes: dict[str, Any]) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config(num_hidden_layers=8, **changes))
    state, shard_bytes, between, within = deduplicated(model), 200_000, [], []
    layout, writer = DiskLayout(model, state), WeightsWriter(tmp_path, shard_bytes)
    for name, tensor in fresh(state, between):
        made = layout.convert(name, cast(tensor, torch.bfloat16))
        for on_disk in list(made):
            writer.add(on_disk, made.pop(on_disk))
            within.append(live_bytes())
        assert writer.held_bytes <= shard_bytes
        del tensor
    writer.finish()
    largest = max(tensor.numel() * 4 for tensor in state.values())
    whole = sum(tensor.numel() * 2 for tensor in state.values())
    assert shard_bytes / 2 < max(between) <= shard_bytes
    assert max(within) <= shard_bytes + 2 * largest  # as gathered, and once or twice in half the bytes
    assert max(within) < whole / 2
