"""Tiny bases with a head that predicts one token further ahead, in the layout of published files; and the plain
computation of that head, on modules of transformers."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import tiny
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

_SHAPE: dict[str, Any] = {**tiny.MODELS["llama"], "initializer_range": 0.1}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LINEAR: dict[str, Any] = {"head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
_LINEAR |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
_LINEAR |= {"layer_types": ["linear_attention", "full_attention"]}
_GROUPED: dict[str, Any] = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
BASES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {**_SHAPE, **_EXPERTS, **_GROUPED, "model_type": "deepseek_v3", "num_key_value_heads": 4}
    | {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
    | {"n_shared_experts": 1, "num_nextn_predict_layers": 1},
    "glm4_moe": {**_SHAPE, **_EXPERTS, **_GROUPED, "model_type": "glm4_moe", "head_dim": 16, "n_shared_experts": 1}
    | {"num_nextn_predict_layers": 1},
    "qwen3_next": {**_SHAPE, **_EXPERTS, **_LINEAR, "model_type": "qwen3_next", "num_experts": 4}
    | {"shared_expert_intermediate_size": 32, "mtp_num_hidden_layers": 1},
    "qwen3_5_text": {**_SHAPE, **_LINEAR, "model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1},
    "qwen3_5_moe_text": {**_SHAPE, **_EXPERTS, **_LINEAR, "model_type": "qwen3_5_moe_text", "num_experts": 4}
    | {"shared_expert_intermediate_size": 32, "mtp_num_hidden_layers": 1},
}
BEHIND_LAST = ("deepseek_v3", "glm4_moe")  # `model.layers.2.*`; the others have `mtp.*`


class PlainHead(nn.Module):
    """The head on its own: norms of both inputs, one matrix, one decoder layer, a norm."""

    def __init__(self, model: Any):
        super().__init__()
        config = copy.deepcopy(model.config.get_text_config())
        if getattr(config, "layer_types", None):
            vars(config)["layer_types"] = [*config.layer_types, "full_attention"]
        width, norm = config.hidden_size, type(model.model.norm)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.enorm, self.hnorm, self.end = (norm(width, eps=config.rms_norm_eps) for _ in range(3))
        self.layer = type(model.model.layers[-1])(config, config.num_hidden_layers)

    def forward(self, model: Any, ids: Tensor, hidden: Tensor) -> Tensor:
        """Returns the hidden states (1, n - 1, D) of a document of n tokens: that of place i has read ids[: i + 2].
        hidden: of the base model, after its final norm, (1, n, D)."""
        embedded = model.model.embed_tokens(ids[:, 1:])
        x = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden[:, :-1])], -1))
        count = x.shape[1]
        places = torch.arange(count)[None]
        mask = torch.full((count, count), torch.finfo(x.dtype).min).triu(1)[None, None]
        rotations = model.model.rotary_emb(x, places)
        return self.end(self.layer(x, position_embeddings=rotations, attention_mask=mask, position_ids=places))


def save_base(folder: Path, name: str, **changes: Any) -> Path:
    """Returns a base of `BASES` in a folder, with its head's tensors in the layout of published files."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**BASES[name], **changes}))
    head = PlainHead(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)  # nothing is zero or one
        for parameter in (*head.parameters(), *head.buffers()):
            parameter.copy_(torch.randn_like(parameter) * 0.1 + (parameter.ndim == 1))
    base = folder / name
    model.save_pretrained(base)
    tiny.tokenizer().save_pretrained(base)
    add_tensors(base, head_tensors(model, head, name))
    return base


def add_tensors(base: Path, tensors: dict[str, Tensor]) -> None:
    file = base / "model.safetensors"
    save_file({**load_file(file), **tensors}, file, metadata={"format": "pt"})


def head_tensors(model: Any, head: PlainHead, name: str) -> dict[str, Tensor]:
    """Returns a head's tensors by their names in files."""
    prefix = f"model.layers.{model.config.get_text_config().num_hidden_layers}."
    if name in BEHIND_LAST:
        own = {"eh_proj": "eh_proj", "enorm": "enorm", "hnorm": "hnorm", "end": "shared_head.norm", "layer": ""}
    else:
        prefix = "mtp."
        own = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "end": "norm"}
        own |= {"layer": "layers.0"}
    tensors: dict[str, Tensor] = {}
    for key, tensor in head.state_dict().items():
        first, _, rest = key.partition(".")
        name_in_files = prefix + ".".join(part for part in (own[first], rest) if part)
        tensors |= _by_expert(name_in_files, tensor.detach())
    if name in BEHIND_LAST:
        tensors[f"{prefix}embed_tokens.weight"] = model.model.embed_tokens.weight.detach().clone()
        tensors[f"{prefix}shared_head.head.weight"] = model.lm_head.weight.detach().clone()
    return {key: tensor.clone().contiguous() for key, tensor in tensors.items()}


def _by_expert(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Returns stacked experts one by one, as files have them."""
    stem, _, last = name.rpartition(".")
    if last == "gate_up_proj":
        halves = [(i, part) for i, one in enumerate(tensor) for part in zip(("gate", "up"), one.chunk(2), strict=True)]
        return {f"{stem}.{i}.{which}_proj.weight": half for i, (which, half) in halves}
    if last == "down_proj" and stem.endswith("experts"):
        return {f"{stem}.{i}.down_proj.weight": one for i, one in enumerate(tensor)}
    return {name: tensor}


def load_plain(base: Path) -> tuple[Any, PlainHead]:
    """Returns transformers' model of a folder, and its head as plain modules, read from the files."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    name = json.loads((base / "config.json").read_text(encoding="utf-8"))["model_type"]
    head, files = PlainHead(model), load_file(base / "model.safetensors")
    head.layer.self_attn.config = model.config
    state = {}
    for key, tensor in head.state_dict().items():
        one = PlainHead.__new__(PlainHead)
        nn.Module.__init__(one)
        names = list(head_tensors(model, _only(one, key, tensor), name))
        names = [each for each in names if "embed_tokens" not in each and "shared_head.head" not in each]
        values = [files[each].float() for each in names]
        state[key] = _stacked(key, tensor, values)
    head.load_state_dict(state)
    return model, head


def _only(module: nn.Module, key: str, tensor: Tensor) -> Any:
    module.state_dict = lambda: {key: tensor}  # type: ignore[method-assign]
    return module


def _stacked(key: str, like: Tensor, values: list[Tensor]) -> Tensor:
    if key.endswith("gate_up_proj"):
        halves = [torch.cat(values[i : i + 2]) for i in range(0, len(values), 2)]
        return torch.stack(halves)
    return torch.stack(values) if len(values) > 1 else values[0].reshape(like.shape)
