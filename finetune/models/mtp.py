"""The head of a base that predicts one token further ahead (multi-token prediction, DeepSeek-V3, section 2.2,
https://arxiv.org/abs/2412.19437), as a module of the model: trained next to it under `model.mtp: train`.

    h_i        output of the base model at place i, after its final norm    predicts t_{i+1}, by the LM head
    x_i        fc [norm(embedding of t_{i+1}) ; norm(h_i)]                  D <- 2 D
    h'_i       norm(one decoder layer of x_0 .. x_i)                        predicts t_{i+2}, by the same LM head

Embedding and LM head are the model's own. The equations of the paper put h first; published weights have the embedding
first, and take h after the final norm: vLLM (deepseek_mtp.py, glm4_moe_mtp.py, qwen3_next_mtp.py) and transformers 5.23
(`MtpModel`) agree on both. vLLM also sets the embedding at a document's first place to zero for DeepSeek and GLM;
transformers and the paper do not, nor does training here.

In memory the head is `mtp` next to the base model, with Qwen's names, in every family; in files it has the family's.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.initialization import no_init_weights

from finetune.errors import UserError
from finetune.utils import unwrap_peft

HEAD = "mtp"  # its attribute in a causal model
_FULL = "full_attention"


class HeadCopy(NamedTuple):
    """A tensor of the head's files that is one of the model's."""

    name: str
    of_head: bool  # of the LM head; else of the embedding


@dataclass(frozen=True)
class HeadFamily:
    """Names of a head in files; `{n}`: the number of decoder layers."""

    fc: str = "mtp.fc"
    embedding_norm: str = "mtp.pre_fc_norm_embedding"
    hidden_norm: str = "mtp.pre_fc_norm_hidden"
    norm: str = "mtp.norm"
    layer: str = "mtp.layers.0"
    further: str = "mtp.layers.1."  # where one for a token still further ahead would be
    copies: tuple[HeadCopy, ...] = ()

    def places(self, layers: int) -> dict[str, str]:
        """Returns the place in files of each part of the head, by its place in memory; the layer's comes last, as its
        place in files begins those of the others."""
        places = {"fc": self.fc, "pre_fc_norm_embedding": self.embedding_norm, "pre_fc_norm_hidden": self.hidden_norm}
        places |= {"norm": self.norm, "layers.0": self.layer}
        return {f"{HEAD}.{part}.": f"{place.format(n=layers)}." for part, place in places.items()}


_QWEN = HeadFamily()  # https://huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct/blob/main/model.safetensors.index.json
_BEHIND_LAST = HeadFamily(  # https://github.com/deepseek-ai/DeepSeek-V3/blob/main/README_WEIGHTS.md
    fc="model.layers.{n}.eh_proj",
    embedding_norm="model.layers.{n}.enorm",
    hidden_norm="model.layers.{n}.hnorm",
    norm="model.layers.{n}.shared_head.norm",
    layer="model.layers.{n}",
    further="model.layers.{after}.",
    copies=(
        HeadCopy("model.layers.{n}.embed_tokens.weight", False),
        HeadCopy("model.layers.{n}.shared_head.head.weight", True),
    ),
)
FAMILIES = {  # by `model_type` of the text model
    "deepseek_v3": _BEHIND_LAST,
    "glm4_moe": _BEHIND_LAST,
    "qwen3_next": _QWEN,
    "qwen3_5_text": _QWEN,
    "qwen3_5_moe_text": _QWEN,
}
# Keys of config.json by which a server knows of a head.
DECLARATIONS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers", "mtp_num_layers")
_PREDICTS_AHEAD = re.compile(r"(^|[._])mtp|nextn|eh_proj|[eh]norm\.|shared_head")


def family_with_head(config: PretrainedConfig) -> HeadFamily:
    """Returns the row of a model's family. Raises UserError if its heads are not trained."""
    kind = config.get_text_config().model_type
    if (family := FAMILIES.get(kind)) is None:
        raise UserError(
            f"model.mtp: train: the head of `{kind}` cannot be trained. Those of {', '.join(FAMILIES)} can. Fix: use "
            "`model.mtp: keep`, which copies a head as it is"
        )
    return family


class MtpHead(nn.Module):
    """A head with one decoder layer, of the model's own kind."""

    def __init__(self, model: Any):
        """model: transformers' causal one, with its decoder layers."""
        super().__init__()
        base, config = model.base_model, model.config.get_text_config()
        width, norm = config.hidden_size, type(base.norm)
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.pre_fc_norm_embedding = norm(width, eps=config.rms_norm_eps)
        self.pre_fc_norm_hidden = norm(width, eps=config.rms_norm_eps)
        with _one_more_layer(config):
            self.layers = nn.ModuleList([type(base.layers[0])(config, config.num_hidden_layers)])
        self.norm = norm(width, eps=config.rms_norm_eps)
        self.copies: tuple[HeadCopy, ...] = ()  # of the base's files

    def inputs(self, embedded: Tensor, hidden: Tensor) -> Tensor:  # (1, T, D)
        """Returns the input of the decoder layer. embedded: of the next token at each place; hidden: of the base model
        there, both (1, T, D)."""
        parts = self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)
        return self.fc(torch.cat(parts, dim=-1))


@contextlib.contextmanager
def _one_more_layer(config: Any) -> Iterator[None]:
    """Lets a decoder layer behind the last be made, of full attention; a layer's classes keep this very config, whose
    attention is chosen later."""
    if (kinds := getattr(config, "layer_types", None)) is None:
        yield
        return
    kept = vars(config)["layer_types"]
    vars(config)["layer_types"] = [*kinds, _FULL]
    try:
        yield
    finally:
        vars(config)["layer_types"] = kept


def attach_head(model: Any, like: Any = None) -> None:
    """Give a causal model of transformers its head. like: its text part, if it is a multimodal one, whose layers lie
    elsewhere. Raises UserError if its family has none here."""
    family_with_head(model.config)
    model.add_module(HEAD, MtpHead(model if like is None else like))


def attach_without_weights(model: Any, dtype: torch.dtype, like: Any = None) -> None:
    """Do so with shapes alone, on `meta`."""
    with torch.device("meta"), no_init_weights():
        attach_head(model, like)
    head_of(model).to(dtype)


def head_of(model: Any) -> Any:
    """Returns the head of a transformers or peft model; None if it has none in memory."""
    return dict(unwrap_peft(model).named_children()).get(HEAD)


def in_head(name: str) -> bool:
    """Returns whether a parameter or module in memory is the head's, by its path in transformers' or peft's model."""
    return f".{HEAD}." in f".{name}."


def place_of_layer(config: Any) -> int:
    """Returns where a model's own list of layers has one that attends to all tokens: masks and rotations are made for
    it, and serve the head's layer."""
    kinds = getattr(config.get_text_config(), "layer_types", None)
    return 0 if kinds is None else list(kinds).index(_FULL)


# --- names in files


def places_of_head(model: Any) -> dict[str, str]:
    """Returns the place in files of each part of a head, by its place in memory; {} if a model has none there."""
    return {} if head_of(model) is None else places_by(unwrap_peft(model).config)


def places_by(config: PretrainedConfig) -> dict[str, str]:
    """Returns the same by the config alone. Raises UserError if heads of its family are not trained."""
    return family_with_head(config).places(config.get_text_config().num_hidden_layers)


def renames(places: dict[str, str]) -> dict[str, str]:
    """Returns `key_mapping` of `from_pretrained` for a head. places: see `HeadFamily.places`."""
    return {f"^{re.escape(there)}": here for here, there in places.items() if here != there}


def name_in_files(model: Any, name: str) -> str:
    """Returns the name in files of a tensor, or of a module, as transformers would save it."""
    here, there = next(((a, b) for a, b in places_of_head(model).items() if f"{name}.".startswith(a)), ("", ""))
    return f"{there}{f'{name}.'.removeprefix(here)}".removesuffix(".")


def named_as_in_files(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns tensors, named as transformers would save them, by their names in files."""
    return {name_in_files(model, name): tensor for name, tensor in tensors.items()}


def copies_in_result(model: Any) -> dict[str, str]:
    """Returns the tensors in the head's files that are copies of the embedding or the LM head, and the names under
    which these are saved."""
    if (head := head_of(model)) is None:
        return {}
    causal = unwrap_peft(model)
    layers = causal.config.get_text_config().num_hidden_layers
    return {copy.name.format(n=layers): name_of_table(causal, copy.of_head) for copy in head.copies}


def name_of_table(causal: Any, of_head: bool) -> str:
    """Returns the first name of the LM head's or the embedding's weight, under which a tied one is saved."""
    table = (causal.get_output_embeddings() if of_head else causal.get_input_embeddings()).weight
    return next(name for name, parameter in causal.named_parameters(remove_duplicate=False) if parameter is table)


def check_head(config: PretrainedConfig, names: Iterable[str], model: str | None) -> None:
    """Raises UserError unless files have one head of the model's family. names: of their tensors; model: its name."""
    layers, family = config.get_text_config().num_hidden_layers, family_with_head(config)
    here = tuple(family.places(layers).values())
    if not any(name.startswith(here) for name in names):
        raise UserError(
            f"model.mtp: train: {model!r} has no head that predicts several tokens. Its files have no tensors "
            f"`{here[-1]}*`. Fix: remove `model.mtp`, or name a copy that was saved with them"
        )
    if any(name.startswith(family.further.format(after=layers + 1)) for name in names):
        raise UserError(
            f"model.mtp: train: {model!r} has several heads, one behind the other. One for the next token but one is "
            "trained. Fix: use `model.mtp: keep`"
        )


def copies_in(config: PretrainedConfig, names: Any) -> tuple[HeadCopy, ...]:
    """Returns the copies that files have. names: of their tensors."""
    layers = config.get_text_config().num_hidden_layers
    return tuple(copy for copy in family_with_head(config).copies if copy.name.format(n=layers) in names)


def is_of_head(name: str, layers: float) -> bool:
    """Returns whether a tensor that transformers does not load is of a head that predicts several tokens. layers:
    of the model."""
    number = re.search(r"layers\.(\d+)\.", name)
    return bool(_PREDICTS_AHEAD.search(name)) or (number is not None and int(number[1]) >= layers)
