"""Ways in which files of a model folder are damaged, by name: each changes a copy of the folder."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

Damage = Callable[[Path], object]
GARBAGE = bytes(range(256)) * 4


def header_of(file: Path) -> tuple[dict[str, Any], bytes]:
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def with_header(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Write a safetensors file again with another header before the same bytes."""
    header, data = header_of(file)
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def first_of(header: dict[str, Any]) -> dict[str, Any]:
    return next(entry for name, entry in header.items() if name != "__metadata__")


def with_tensors(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def narrow(tensors: dict[str, Any]) -> None:
    """Every tensor becomes one row shorter, which no model of this config has."""
    tensors.update({name: tensor[:-1].clone() for name, tensor in tensors.items()})


def cut(file: Path, at: float) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * at)])


WEIGHTS: dict[str, Callable[[Path], object]] = {
    "empty": lambda file: file.write_bytes(b""),
    "cut in its length": lambda file: file.write_bytes(file.read_bytes()[:5]),
    "cut in its header": lambda file: file.write_bytes(file.read_bytes()[:100]),
    "cut in its data": lambda file: cut(file, 0.7),
    "one byte short": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"\0" * 7),
    "garbage": lambda file: file.write_bytes(GARBAGE),
    "garbage in its header": lambda file: file.write_bytes(file.read_bytes()[:8] + GARBAGE + file.read_bytes()[1032:]),
    "an absurd length": lambda file: file.write_bytes(struct.pack("<Q", 1 << 62) + file.read_bytes()[8:]),
    "a header that is a list": lambda file: file.write_bytes(struct.pack("<Q", 2) + b"[]" + file.read_bytes()),
    "no offsets": lambda file: with_header(file, lambda header: first_of(header).pop("data_offsets")),
    "offsets of text": lambda file: with_header(file, lambda h: first_of(h).update(data_offsets=["a", "b"])),
    "offsets that overlap": lambda file: with_header(
        file, lambda h: [one.update(data_offsets=first_of(h)["data_offsets"]) for one in list(h.values())[-2:]]
    ),
    "offsets beyond the end": lambda file: with_header(
        file, lambda h: first_of(h).update(data_offsets=[1 << 40, (1 << 40) + 4])
    ),
    "another type": lambda file: with_header(file, lambda h: first_of(h).update(dtype="F64")),
    "an unknown type": lambda file: with_header(file, lambda h: first_of(h).update(dtype="X1")),
    "a shape of text": lambda file: with_header(file, lambda h: first_of(h).update(shape="large")),
    "another shape": lambda file: with_header(file, lambda h: first_of(h).update(shape=[3, 5])),
    "other shapes than the config": lambda file: with_tensors(file, narrow),
}


JSON: dict[str, bytes] = {
    "empty": b"",
    "cut": b'{"a": [1, 2',
    "garbage": GARBAGE,
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "a list": b"[1, 2]",
    "a number": b"7",
    "null": b"null",
    "nested without end": b"[" * 100_000,
}
SETTINGS = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")


def written(name: str, content: bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(content)


def changed(name: str, **values: Any) -> Damage:
    """Writes other values in a JSON object; None takes a key out."""

    def change(folder: Path) -> None:
        content = {**json.loads((folder / name).read_text(encoding="utf-8")), **values}
        content = {key: value for key, value in content.items() if value is not None}
        (folder / name).write_text(json.dumps(content), encoding="utf-8")

    return change


def indexed(index: bytes | dict[str, Any], move: bool = True) -> Damage:
    def change(folder: Path) -> None:
        content = index if isinstance(index, bytes) else json.dumps(index).encode()
        (folder / "model.safetensors.index.json").write_bytes(content)
        if move:
            (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")

    return change


def pickled(name: str, content: Any = None) -> Damage:
    def change(folder: Path) -> None:
        for file in folder.glob("*.safetensors"):
            file.unlink()
        (folder / name).write_bytes(pickle.dumps(content or {}))

    return change


SHAPES: dict[str, Damage] = {
    "config.json of sizes of text": changed("config.json", hidden_size="large"),
    "config.json of sizes below 0": changed("config.json", num_hidden_layers=-1),
    "config.json of an unknown type": changed("config.json", model_type="no_such_model"),
    "config.json without a type": changed("config.json", model_type=None, architectures=None),
    "config.json of a type that is a list": changed("config.json", model_type=["llama"]),
    "config.json of heads that do not divide": changed("config.json", num_attention_heads=5, num_key_value_heads=3),
    "config.json of no heads": changed("config.json", num_attention_heads=0),
    "config.json of rope that is text": changed("config.json", rope_parameters="default"),
    "config.json of a type of weights": changed("config.json", dtype="float99", torch_dtype="float99"),
    "config.json of a quantisation": changed("config.json", quantization_config={"quant_method": "none such"}),
    "config.json of a wide layer": changed("config.json", intermediate_size=256),
    "tokenizer.json without a model": changed("tokenizer.json", model=None),
    "tokenizer.json of another model": changed("tokenizer.json", model={"type": "BPE"}),
    "tokenizer.json of a model that is text": changed("tokenizer.json", model="BPE"),
    "tokenizer.json of a list of ids": changed("tokenizer.json", added_tokens=[1, 2]),
    "tokenizer.json of a decoder that is a number": changed("tokenizer.json", decoder=7),
    "tokenizer_config.json of another class": changed("tokenizer_config.json", tokenizer_class="NoSuchTokenizer"),
    "tokenizer_config.json of a length of text": changed("tokenizer_config.json", model_max_length="long"),
    "tokenizer_config.json of an end that is a list": changed("tokenizer_config.json", eos_token=["a"]),
    "tokenizer_config.json of a template that is a number": changed("tokenizer_config.json", chat_template=7),
    "generation_config.json of an end of text": changed("generation_config.json", eos_token_id="end"),
    "generation_config.json of a temperature of text": changed(
        "generation_config.json", temperature="hot", do_sample=True
    ),
}
INDEX: dict[str, Damage] = {
    "an index of garbage": indexed(GARBAGE),
    "an empty index": indexed(b""),
    "an index that is a list": indexed(b"[]"),
    "an index without weight_map": indexed({"metadata": {}}),
    "an index whose weight_map is a list": indexed({"metadata": {}, "weight_map": ["a"]}),
    "an index that names a missing file": indexed(
        {"metadata": {}, "weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}
    ),
    "an index of numbers": indexed({"metadata": {}, "weight_map": {"lm_head.weight": 3}}),
    "an index that leads out": indexed({"metadata": {}, "weight_map": {"lm_head.weight": "../other.safetensors"}}),
}
PICKLES: dict[str, Damage] = {
    "pickled weights": pickled("pytorch_model.bin"),
    "a pickle of torch": pickled("model.pt"),
    "no weights": lambda folder: [file.unlink() for file in folder.glob("*.safetensors")],
    "a pickle named safetensors": lambda folder: (folder / "model.safetensors").write_bytes(pickle.dumps({"a": 1})),
}
BASE: dict[str, Damage] = {
    **{f"weights {name}": lambda folder, damage=damage: damage(folder / "model.safetensors")
       for name, damage in WEIGHTS.items()},
    **{f"{file} {name}": written(file, content) for file in SETTINGS for name, content in JSON.items()},
    **SHAPES,
    **INDEX,
    **PICKLES,
}  # fmt: skip
ADAPTER: dict[str, Damage] = {
    **{f"adapter {name}": lambda folder, damage=damage: damage(folder / "adapter_model.safetensors")
       for name, damage in WEIGHTS.items()},
    **{f"adapter_config.json {name}": written("adapter_config.json", content) for name, content in JSON.items()},
    "adapter_config.json without a base": changed("adapter_config.json", base_model_name_or_path=None),
    "adapter_config.json of a base that is gone": changed("adapter_config.json", base_model_name_or_path="/no/such"),
    "adapter_config.json of a base that is a number": changed("adapter_config.json", base_model_name_or_path=7),
    "adapter_config.json of a rank of text": changed("adapter_config.json", r="large"),
    "adapter_config.json of another rank": changed("adapter_config.json", r=3),
    "adapter_config.json of an unknown type": changed("adapter_config.json", peft_type="NONE_SUCH"),
    "adapter_config.json without a type": changed("adapter_config.json", peft_type=None),
    "adapter_config.json of targets that are not there": changed("adapter_config.json", target_modules=["nothing"]),
    "adapter_config.json of targets that are a number": changed("adapter_config.json", target_modules=7),
    "a pickled adapter": lambda folder: (
        (folder / "adapter_model.safetensors").unlink(),
        (folder / "adapter_model.bin").write_bytes(pickle.dumps({"a": 1})),
    ),
    "no adapter weights": lambda folder: (folder / "adapter_model.safetensors").unlink(),
    **{f"{file} {name}": written(file, content) for file in SETTINGS[1:] for name, content in list(JSON.items())[:3]},
}  # fmt: skip
