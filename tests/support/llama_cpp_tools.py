"""A folder that looks like a build of llama.cpp, with two small tools of the `gguf` package in the place of its own.

    convert_hf_to_gguf.py       Granite, whose rows of q and k llama.cpp has in another order
    build/bin/llama-quantize    q4_0, q5_0, q5_1, q4_1: what the package itself can write
    build/bin/llama-imatrix     a file with the texts that it was given, in the place of a matrix

They are run as llama.cpp's are, by the same arguments, and what they write is real.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np


def make_folder(folder: Path) -> Path:
    (tools := folder / "build" / "bin").mkdir(parents=True)
    shutil.copy(__file__, folder / "convert_hf_to_gguf.py")
    for name in ("llama-quantize", "llama-imatrix"):
        (program := tools / name).write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} {name} "$@"\n')
        program.chmod(0o755)
    return folder


def convert(arguments: list[str]) -> None:
    import gguf
    from safetensors.numpy import load_file

    from finetune.release.export.gguf_places import turned
    from finetune.release.export.gguf_tokenizer import add_tokenizer

    folder, how = Path(arguments[0]), dict(zip(arguments[1::2], arguments[2::2], strict=True))
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(how["--outfile"], "granite")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GRANITE, config["num_hidden_layers"])
    add_tokenizer(writer, gguf, folder, config["vocab_size"])
    writer.add_name(how["--model-name"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    assert how["--outtype"] == "f32"
    for name, values in load_file(folder / "model.safetensors").items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            import torch

            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            values = turned(torch.from_numpy(values), heads, 2, len(values) // heads // 2).numpy()
        short = names.get_name(name, try_suffixes=(".weight",))
        assert short is not None, name
        writer.add_tensor(short, values.astype(np.float32))
    _finish(writer)


def quantize(arguments: list[str]) -> None:
    import gguf

    source, out, kind = arguments[-3:]
    matrix = dict(zip(arguments[:-3:2], arguments[1:-3:2], strict=True)).get("--imatrix")
    reader = gguf.GGUFReader(source)
    own = gguf.GGMLQuantizationType[kind]
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(out, architecture)
    for key, field in reader.fields.items():
        if key not in ("general.architecture", "general.file_type") and not key.startswith("GGUF."):
            sub = field.types[-1] if field.types[1:] else None
            writer.add_key_value(key, field.contents(), field.types[0], sub)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind}"])
    if matrix is not None:
        writer.add_string("quantize.imatrix.file", matrix)
        writer.add_uint32("quantize.imatrix.chunks_count", len(Path(matrix).read_text().split("<|im_end|>")))
    for tensor in reader.tensors:
        values: Any = tensor.data
        if len(tensor.shape) > 1 and tensor.shape[0] % 32 == 0:
            writer.add_tensor(tensor.name, gguf.quants.quantize(np.array(values), own), raw_dtype=own)
        else:
            writer.add_tensor(tensor.name, values)
    _finish(writer)


def _finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    if "--print-supported-models" in sys.argv:
        print("Supported models:\n  - GraniteForCausalLM\n  - LlamaForCausalLM", file=sys.stderr)
    elif Path(sys.argv[0]).name.startswith("convert"):
        convert(sys.argv[1:])
    elif sys.argv[1] == "llama-imatrix":
        how = dict(zip(sys.argv[2:-2:2], sys.argv[3:-2:2], strict=True))
        assert Path(how["-m"]).is_file()
        assert int(how["-c"]) > 0
        assert sys.argv[-2:] == ["--parse-special", "--no-ppl"]
        shutil.copy(how["-f"], how["-o"])
    else:
        quantize(sys.argv[2:])
