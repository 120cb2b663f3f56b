"""`export --to hf --quantize int8|fp8`: weights of linear layers in eight bits, in compressed-tensors' format, without
calibration: each row is rounded to nearest after division by its scale.

    int8    scale = max |row| / 127, stored four to an int32     format `pack-quantized`
    fp8     scale = max |row| / 448, E4M3                         format `float-quantized`

Activations keep their type. vLLM loads both as they are: W8A16 of its compressed-tensors schemes
(https://github.com/vllm-project/vllm, .../quantization/compressed_tensors), transformers by the package
`compressed-tensors`. Experts, which transformers stacks, are a matrix each in files, and are written as such, in int8.
Heads, embeddings, routers and norms keep the type of the export, and so does all of a multimodal model but its language
model. Names of layers are those in memory, by which both libraries know them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from finetune.checkpoints.weight_files import TensorFiles
from finetune.errors import UserError
from finetune.models.checkpoint_files import loaded_names
from finetune.models.damage import read_object
from finetune.models.text_part import is_multimodal
from finetune.models.towers import tower_modules
from finetune.release.export.streamed import StreamedModel

_LARGEST = {"int8": 127.0, "fp8": 448.0}
_PER_INT32 = 4
_EXPERT = re.compile(r".*\.experts\.\d+\.\w+\.weight")


class QuantizedModel:
    """Same interface as `StreamedModel`: shapes of all tensors, and the values of one at a time. Raises UserError for a
    model with other layers than linear ones, and for experts that are not linear layers in its files."""

    def __init__(self, model: StreamedModel, kind: str):
        self._model, self.kind = model, kind
        # A matrix of each expert and projection, as vLLM's WNA16 reads them. Refused if no server, or nothing here,
        # reads it in 8 bits.
        stacked = stacked_experts(model.model)
        own = {name: tensor for name, tensor in model.shapes.items() if name not in model.kept}
        experts = [name for name in own if _EXPERT.fullmatch(name)]
        elsewhere = "run llm-compressor on the folder that `export --to hf` writes"
        if stacked and kind == "fp8":
            raise UserError(
                f"--quantize fp8: vLLM loads experts ({stacked[0]}) only with activations in fp8. Fix: give int8, or "
                + elsewhere
            )
        what = "a model of scores" if model.is_scoring else ""
        if stacked and (not experts or any(tensor.ndim > 2 for tensor in own.values())):
            what = f"a model whose files have tensors of three dimensions ({stacked[0]})"
        if stacked and any(model.shapes[name].shape[-1] % _PER_INT32 for name in experts):
            what = f"a model with experts ({stacked[0]}) whose rows are no multiple of {_PER_INT32}"
        if what:
            raise UserError(f"--quantize {kind}: {what} is not quantized here. Fix: {elsewhere}")
        chosen = text_layers(model.model)
        others = {name for name, module in model.model.named_modules() if type(module) is torch.nn.Linear}
        # Routers, which are linear layers to vLLM.
        routers = {f"{name.partition('.experts.')[0]}.gate" for name in experts}
        kept = {name.removesuffix(".weight") for name in model.kept if model.shapes[name].ndim == 2}
        routers = {one for one in routers if f"{one}.weight" in model.shapes}
        self.ignored = sorted((others - chosen.keys()) | routers | kept)
        in_files = {*experts, *(model.name_in_files(f"{name}.weight") for name in chosen)}
        if None in in_files:
            raise UserError(f"--quantize {kind}: the files do not name layers as transformers does. Fix: {elsewhere}")
        self.shapes: dict[str, Tensor] = {}
        self._sources: dict[str, str] = {}  # of a part, the weight
        for name, weight in model.shapes.items():
            if name not in in_files:
                self.shapes[name] = weight
                continue
            rows, columns = weight.shape
            scale = torch.empty(rows, 1, dtype=weight.dtype, device="meta")
            if kind == "fp8":
                parts = {"weight": weight.to(torch.float8_e4m3fn), "weight_scale": scale}
            else:
                packed = torch.empty(rows, columns // _PER_INT32, dtype=torch.int32, device="meta")
                shape = torch.empty(2, dtype=torch.int64, device="meta")
                parts = {"weight_packed": packed, "weight_scale": scale, "weight_shape": shape}
            parts = {name.removesuffix("weight") + part: tensor for part, tensor in parts.items()}
            self.shapes |= parts
            self._sources |= dict.fromkeys(parts, name)
        self._ready: dict[str, Tensor] = {}

    def make(self, name: str) -> Tensor:
        """Returns the values of a tensor."""
        if (source := self._sources.get(name)) is None:
            return self._model.make(name)
        if name not in self._ready:
            parts = quantize(self._model.make(source), self.kind)
            self._ready |= {source.removesuffix("weight") + part: tensor for part, tensor in parts.items()}
        return self._ready.pop(name)


def stacked_experts(model: Any) -> list[str]:
    """Returns the parameters (experts, out, in) of a language model that hold the experts of a layer."""
    inside, of_towers = language_path(model), {id(p) for tower in tower_modules(model) for p in tower.parameters()}
    named = [(name, p) for name, p in model.named_parameters() if p.ndim > 2 and name.startswith(inside)]
    return [name for name, p in named if id(p) not in of_towers]  # Phi-4's are inside


def settings_of(kind: str, ignored: list[str]) -> dict[str, Any]:
    """Returns `quantization_config` of config.json, as compressed-tensors and vLLM read it. ignored: layers that keep
    their type."""
    layout = "pack-quantized" if kind == "int8" else "float-quantized"
    weights = {
        "num_bits": 8,
        "type": "int" if kind == "int8" else "float",
        "symmetric": True,
        "strategy": "channel",
        "dynamic": False,
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "format": layout}},  # vLLM looks for that of experts here
        "ignore": ignored,
    }


def language_path(model: Any) -> str:
    """Returns the prefix of a multimodal model's language model, "model.language_model."; "" for other models. Raises
    UserError if the model does not say which part it is."""
    if not is_multimodal(model.config):
        return ""
    decoder = model.get_decoder()
    name = next((name for name, module in model.named_modules() if module is decoder), "")
    if not name:
        raise UserError(
            f"--quantize: {type(model).__name__} does not say which of its parts is the language model. Fix: export "
            "without --quantize, and run llm-compressor on that folder"
        )
    return f"{name}."


def text_layers(model: Any) -> dict[str, torch.nn.Linear]:
    """Returns the layers that are quantized: the linear ones of a language model, except its head."""
    inside, head = language_path(model), model.get_output_embeddings()
    of_towers = {module for tower in tower_modules(model) for module in tower.modules()}  # Phi-4's are inside
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) is torch.nn.Linear
        and name.startswith(inside)
        and module is not head
        and module not in of_towers
        and module.in_features % _PER_INT32 == 0
    }


def quantize(weight: Tensor, kind: str) -> dict[str, Tensor]:
    """Returns a weight (out, in) in eight bits, with its scale (out, 1) in the weight's own type."""
    values = weight.float()
    scale = (values.abs().amax(dim=1, keepdim=True) / _LARGEST[kind]).to(weight.dtype)
    scale[scale == 0] = 1  # a row of zeros
    divided = values.div_(scale.float())
    if kind == "fp8":
        return {"weight": divided.clamp_(-448, 448).to(torch.float8_e4m3fn), "weight_scale": scale}
    whole = divided.round_().clamp_(-127, 127).add_(128).to(torch.uint8)  # the first of four is the lowest byte
    shape = torch.tensor(weight.shape)
    return {"weight_packed": whole.contiguous().view(torch.int32), "weight_scale": scale, "weight_shape": shape}


def other_layers(folder: Path, model: Any) -> str | None:
    """Returns how the layers of an export's files that are in eight bits differ from those in its config. model: the
    export's."""
    ignored = read_object(folder / "config.json")["quantization_config"]["ignore"]
    names = TensorFiles(sorted(folder.glob("*.safetensors"))).names()
    scaled = [name.removesuffix("_scale") for name in names if name.endswith(".weight_scale")]
    loaded, _ = loaded_names(model, scaled)
    held = {(loaded[name] or name).removesuffix(".weight") for name in scaled}
    linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    if not (differing := held ^ ((linear - set(ignored)) | {*stacked_experts(model)})):
        return None
    name = min(differing)
    is_held = "is" if name in held else "is not"
    return f"{name} {is_held} in eight bits, and config.json says otherwise (`quantization_config.ignore`)"
