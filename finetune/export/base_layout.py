"""A result in the layout of the multimodal base whose text part was trained: its names, its `config.json`, and its
other tensors, unchanged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import PretrainedConfig

from finetune.checkpoints.safetensors_writer import save_tensors
from finetune.export.weight_files import DiskLayout, State, WeightsWriter
from finetune.models.base_checkpoint import BaseCheckpoint
from finetune.models.text_part import TextPart
from finetune.utils import pattern_of


class BaseLayout:
    """`DiskLayout` of a model that is the text part of a base. copied: the file of each other tensor."""

    def __init__(self, base: BaseCheckpoint, in_memory: State):
        """in_memory: every tensor that will be converted, in order, by its name in the text part."""
        self._base, self._part = base, base.part
        tied = base.part.text.get_expanded_tied_weights_keys(all_submodels=True).items()
        stored = {*base.part.files.values()}
        # A tied weight is one tensor in memory; files may have it twice.
        self._again = {source: target for target, source in tied if base.part.in_base(target) in stored}
        shapes = {own: tensor for name, tensor in in_memory.items() for own in self._names(name)}
        self._layout = DiskLayout(base.part.base, shapes)
        self.expected = self._layout.expected
        self.copied = {name: file for name, file in base.places.items() if name not in self.expected}

    def convert(self, name: str, tensor: Tensor) -> State:
        """Returns the folder's tensors that this one completes; none until its group is complete."""
        converted: State = {}
        for own in self._names(name):
            converted |= self._layout.convert(own, tensor)
        return converted

    def copy_untouched(self, writer: WeightsWriter) -> None:
        """Write the tensors of the base's files that are not the text part's. Raises as `WeightsWriter.add`."""
        for name, file in self.copied.items():
            with safe_open(file, framework="pt") as tensors:
                writer.add(name, tensors.get_tensor(name))

    def _names(self, name: str) -> list[str]:
        names = [name, *([self._again[name]] if name in self._again else [])]
        return [self._part.in_base(one) for one in names]


def write_base_settings(base: BaseCheckpoint, text: PretrainedConfig, dtype: torch.dtype, folder: Path) -> None:
    """Write the base's config.json, with what training changed of it, and the settings of its processors.

    text: the config of the trained text part; dtype: of its weights.
    """
    settings = json.loads(base.config.read_text(encoding="utf-8"))
    config = base.part.base.config
    name = next(name for name in config.sub_configs if getattr(config, name) is config.get_text_config(decoder=True))
    sections = [settings, *([settings[name]] if isinstance(settings.get(name), dict) else [])]
    for section in sections:
        for key in ("dtype", "torch_dtype"):
            if section.get(key) is not None:
                section[key] = str(dtype).removeprefix("torch.")
    if text.vocab_size != config.get_text_config(decoder=True).vocab_size:
        for section in (settings.setdefault(name, {}), *(s for s in sections[:1] if "vocab_size" in s)):
            section["vocab_size"] = text.vocab_size
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    for file in base.processors:
        shutil.copyfile(file, folder / file.name)


def name_in_adapter(part: TextPart, name: str) -> str:
    """Returns the name, in an adapter for the base's own class, of a tensor of one for the text part alone."""
    ahead = "base_model.model."
    return ahead + part.in_base(name.removeprefix(ahead))


def adapter_for_base(model: Any, part: TextPart, folder: Path) -> None:
    """Rewrite the adapter in a folder, as peft has written it for the text part alone, for the base's own class.

    model: peft's. `target_modules` match what was adapted and nothing else: other parts have modules of the same names.
    """
    path = folder / "adapter_model.safetensors"
    state = {name_in_adapter(part, name): tensor for name, tensor in load_file(path).items()}
    save_tensors(path, state)
    settings = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    modules = [name for name, _ in part.base.named_modules()]
    settings["target_modules"] = pattern_of([part.in_base(n) for n in model.base_model.targeted_module_names], modules)
    if settings.get("modules_to_save"):
        whole = [name for name, module in model.get_base_model().named_modules() if hasattr(module, "modules_to_save")]
        settings["modules_to_save"] = [part.in_base(name) for name in whole]
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=2, sort_keys=True), encoding="utf-8")
