"""The text part of a multimodal model as a separate causal language model.

    from a text config        MistralForCausalLM                model.layers.0.self_attn.q_proj.weight
    in the base's own class   Mistral3ForConditionalGeneration  model.language_model.layers.0.self_attn.q_proj.weight
    in the base's files       as it was published               language_model.model.layers.0.self_attn.q_proj.weight

Names between the first two follow from the path of the text module in the base's class; those of files from
transformers' own conversions. Both are tried on device `meta`, for every tensor, before training begins.
"""

from __future__ import annotations

import copy
import importlib
import re
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING, AutoModelForCausalLM, PretrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightRenaming,
    revert_weight_conversion,
)
from transformers.initialization import no_init_weights
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from finetune.errors import UserError
from finetune.models.base_config import base_config
from finetune.models.checkpoint_files import loaded_names, tensor_names
from finetune.models.patches import set_attribute
from finetune.models.remote_code import from_config
from finetune.models.tiny_config import PRETRAINED_POSITIONS, VOCABULARY, tiny_config
from finetune.models.trials import FAILURES, quietly, randomize
from finetune.recipe.schema import Model

_LOGIT_TOLERANCE = 1e-5  # relative
_MULTIMODAL = {*MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, *MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES}
State = dict[str, Tensor]


def is_multimodal(config: PretrainedConfig) -> bool:
    """Returns whether a config is of a model that has a text model as a part."""
    if config.model_type not in _MULTIMODAL or not type(config).__module__.startswith("transformers."):
        return False
    return config.get_text_config(decoder=True) is not config and not getattr(config, "is_encoder_decoder", False)


def text_config(config: PretrainedConfig, has_head: bool) -> PretrainedConfig:
    """Returns the config of a multimodal model's text part, for which transformers' auto class then has a class.

    has_head: whether there is an LM head in the model's files. Raises UserError if transformers has no text model.
    """
    text = copy.deepcopy(config.get_text_config(decoder=True))
    if hasattr(config, "tie_word_embeddings"):
        # The base's class reads its own setting, whose default may be wrong: it unties weights that differ in files.
        text.tie_word_embeddings = config.tie_word_embeddings and (text.tie_word_embeddings or not has_head)
    if (crossed := getattr(text, "cross_attention_layers", None)) is not None:
        # They look at images; without one they are skipped, so for texts they are not part of the model.
        text.num_hidden_layers -= len(crossed)
        text.cross_attention_layers = []
    text.name_or_path = config.name_or_path
    if type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        extra: Any = MODEL_FOR_CAUSAL_LM_MAPPING
        # `register` passes over transformers' own configs (see the table of patches).
        classes = {**extra._extra_content, type(text): _causal_class(text)}
        set_attribute(extra, "_extra_content", classes, "text models")
    return text


def _causal_class(text: PretrainedConfig) -> Any:
    """Returns the causal class of a config that transformers' auto class does not have: its own, or a new one."""
    modeling = importlib.import_module(type(text).__module__.replace(".configuration_", ".modeling_"))
    for name, value in vars(modeling).items():
        if name.endswith("ForCausalLM") and value.config_class is type(text):
            return value
    body: Any = _text_body(text, modeling)
    family = next(base for base in body.__mro__ if base.__module__ == body.__module__ and base is not body)

    class TextForCausalLM(family, transformers.GenerationMixin):
        _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 (transformers' name and type)
        _tp_plan = {"lm_head": "colwise_gather_output"}  # noqa: RUF012

        def __init__(self, config: PretrainedConfig):
            super().__init__(config)
            self.model = body(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def forward(
            self, input_ids: Any = None, logits_to_keep: int | Tensor = 0, **arguments: Any
        ) -> CausalLMOutputWithPast:
            outputs = self.model(input_ids=input_ids, **arguments)
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.lm_head(outputs.last_hidden_state[:, kept])
            if cap := getattr(self.config, "final_logit_softcapping", None):
                logits = cap * torch.tanh(logits / cap)
            return CausalLMOutputWithPast(logits=logits, past_key_values=outputs.past_key_values)

    TextForCausalLM.__name__ = TextForCausalLM.__qualname__ = f"{body.__name__.removesuffix('Model')}ForCausalLM"
    TextForCausalLM.config_class = type(text)
    TextForCausalLM.base_model_prefix = "model"
    return TextForCausalLM


def _text_body(text: PretrainedConfig, modeling: Any) -> Any:
    """Returns the model without a head of a config's text, which transformers has only within a multimodal model: the
    one of its auto class, or the one in the same file (Qwen2.5-Omni). Raises UserError."""
    if type(text) in MODEL_MAPPING:
        return MODEL_MAPPING[type(text)]
    for name, value in vars(modeling).items():
        if name.endswith("TextModel") and value.config_class is type(text):
            return value
    raise UserError(f"{type(text).__name__} has no text model in transformers. Fix: choose another model")


def name_body(model: Any) -> None:
    """Let `base_model` of a causal class find the model below the head."""
    if not hasattr(model, model.base_model_prefix):
        set_attribute(type(model), "base_model_prefix", "model", "name of the body")


@dataclass(frozen=True)
class TextPart:
    """Location of the text part's tensors in a base. `base` and `text`: models of shapes alone, on `meta`."""

    base: Any
    text: Any
    files: dict[str, str | None]  # tensors of its files, and their names in the base, see `loaded_names`
    body: str  # path of the text model in the base, "model.language_model"
    head: str  # path of its LM head, "lm_head"
    layers: tuple[int, ...]  # of each layer of the text part, its number in the base

    def in_base(self, name: str) -> str:
        """Returns the base's name, in memory, of a tensor or module of the text part."""
        prefix = f"{self.text.base_model_prefix}."
        if not name.startswith(prefix):
            return name.replace(self._text_head, self.head, 1)
        return f"{self.body}.{_renumbered(name.removeprefix(prefix), self.layers)}"

    def base_without_weights(self) -> Any:
        """Returns the base's own model of shapes alone, its embeddings tied as they are in its files."""
        model = copy.deepcopy(self.base)
        model.config.tie_word_embeddings = self.text.config.tie_word_embeddings
        model.tie_weights()
        return model

    @cached_property
    def embedding(self) -> str:
        """Path of the embedding in the base."""
        return self.in_base(_path_of(self.text, self.text.get_input_embeddings()))

    @cached_property
    def _text_head(self) -> str:
        return _path_of(self.text, self.text.get_output_embeddings())


def _renumbered(name: str, layers: tuple[int, ...]) -> str:
    return re.sub(r"(?<=layers\.)\d+", lambda match: str(layers[int(match[0])]), name, count=1)


def _path_of(model: Any, module: Any) -> str:
    return next(name for name, one in model.named_modules() if one is module)


def text_part_of(model: Model) -> TextPart | None:
    """Returns the text part of the recipe's model; None if that is all of it, or other parts are trained, too. Raises
    UserError. The first call must be before an engine starts: ZeRO-3 changes how models are built."""
    if model.name is None or model.train is not None:
        return None
    return _text_part(model.name, model.revision, model.trust_remote_code)


@cache
def _text_part(name: str, revision: str | None, trust_remote_code: bool) -> TextPart | None:
    model = Model(name=name, revision=revision, trust_remote_code=trust_remote_code)
    config = base_config(model)
    if not is_multimodal(config):
        return None
    if getattr(config, "quantization_config", None) is not None:
        raise UserError(
            f"model.name: the weights of {name!r} are stored quantized. A multimodal model cannot be trained from them "
            "here. Fix: name a copy in 16 bits, as publishers have it for training"
        )
    with torch.device("meta"), no_init_weights():
        base = _of_base_class(config)
    tensors = tensor_names(model)
    files, conversions = loaded_names(base, tensors)
    set_attribute(base, "_weight_conversions", conversions, "read conversions")  # as after loading: the way back
    if (head := base.get_output_embeddings()) is None:
        raise _unclear(config, f"{type(base).__name__} has no LM head")
    head = _path_of(base, head)
    with torch.device("meta"), no_init_weights():
        text: Any = from_config(AutoModelForCausalLM, text_config(config, f"{head}.weight" in files.values()))
    name_body(text)
    body = getattr(text, text.base_model_prefix)
    bodies = [name for name, module in base.named_modules() if type(module) is type(body)]
    if len(bodies) != 1:
        raise _unclear(config, f"{type(base).__name__} has {len(bodies)} of {type(body).__name__}")
    crossed = getattr(config.get_text_config(decoder=True), "cross_attention_layers", None) or []
    count = text.config.num_hidden_layers + len(crossed)
    layers = tuple(i for i in range(count) if i not in crossed)
    part = TextPart(base, text, files, bodies[0], head, layers)
    ours = {part.in_base(name): tensor.shape for name, tensor in text.state_dict().items()}
    theirs = {name: tensor.shape for name, tensor in base.state_dict().items()}
    if differing := [name for name, shape in ours.items() if theirs.get(name) != shape]:
        raise _unclear(config, f"{type(base).__name__} has no {differing[0]} of that shape")
    tied = base.get_expanded_tied_weights_keys(all_submodels=True)
    for target, source in text.get_expanded_tied_weights_keys(all_submodels=True).items():
        if tied.get(part.in_base(target)) != part.in_base(source):
            raise _unclear(config, f"{target} is tied, in {type(base).__name__} it is not")
    return part


def _of_base_class(config: PretrainedConfig) -> Any:
    """Returns a new model of the class that the checkpoint says, else of the one that transformers has for it."""
    names = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES | MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
    name = (config.architectures or [str(names[config.model_type])])[0]
    try:
        return getattr(transformers, name)(copy.deepcopy(config))
    except (AttributeError, ImportError) as error:
        raise _unclear(config, " ".join(str(error).split())[:200]) from error


def check_text_part(model: Model) -> None:
    """Raises UserError if the text part of the recipe's model gives other logits than the base's class for text alone:
    a small one is tried within the base's class, whose other parts are on `meta` and would fail if called."""
    if (part := text_part_of(model)) is None:
        return
    config = copy.deepcopy(base_config(model))
    try:
        with quietly():
            small = tiny_config(part.text.config)
            torch.manual_seed(0)
            text: Any = from_config(AutoModelForCausalLM, small, dtype=torch.float32).eval()
            randomize(text)
            own = config.get_text_config(decoder=True)
            setattr(config, next(n for n in config.sub_configs if getattr(config, n) is own), copy.deepcopy(small))
            with torch.device("meta"), no_init_weights():
                base = _of_base_class(config).eval()
            base.set_submodule(part.body, getattr(text, text.base_model_prefix))
            base.set_submodule(part.head, text.get_output_embeddings())
            generator = torch.Generator().manual_seed(1)
            document = torch.randint(3, VOCABULARY, (1, PRETRAINED_POSITIONS + 5), generator=generator)
            with torch.no_grad():
                ours, theirs = (one(input_ids=document, use_cache=False).logits.double() for one in (text, base))
            difference = float((ours - theirs).abs().max() / theirs.abs().max())
    except FAILURES as error:
        raise _unclear(config, f"tried on a small copy, {type(error).__name__}: {str(error)[:200]}") from error
    if difference > _LOGIT_TOLERANCE:
        base_class = type(part.base).__name__
        raise _unclear(config, f"tried on a small copy, its logits differ from {base_class}'s by {difference:.0e}")


def _unclear(config: PretrainedConfig, why: str) -> UserError:
    return UserError(
        f"the text part of {type(config).__name__} cannot be trained by itself: {why}. Fix: choose another model"
    )


def key_mapping(part: TextPart) -> dict[str, str]:
    """Returns `from_pretrained`'s argument that maps names in the base's files to the text part's names. Raises
    UserError unless each tensor is built from exactly those from which the base's class would build it."""
    ours = {part.in_base(name): name for name in part.text.state_dict()}
    expected = {name: ours.get(loaded or "") for name, loaded in part.files.items()}
    tied = part.text.get_expanded_tied_weights_keys(all_submodels=True)
    if lacking := {name for name, _ in part.text.named_parameters()} - {*tied, *expected.values()}:
        raise _unclear(part.base.config, f"no tensor in its files is {min(lacking)}")
    # The renames of the base's class, and then those of its text part.
    of_base: dict[str, str] = {}
    for one in get_model_conversion_mapping(part.base, add_legacy=False):
        if isinstance(one, WeightRenaming) and one.scope_prefix is None:
            # transformers changes the public lists as it reads a model; these are as they were given.
            of_base |= dict(zip(one._original_source_patterns, one._original_target_patterns, strict=False))
    prefix = f"{part.text.base_model_prefix}."
    of_base |= {f"^{re.escape(part.in_base(prefix))}": prefix, f"^{re.escape(part.head)}\\.": f"{part._text_head}."}
    for renames in (_other_beginnings(part), of_base):
        if loaded_names(part.text, part.files, renames)[0] == expected:
            return renames
    raise _unclear(part.base.config, "transformers' names for it, alone and as a part, are not alike")


def _other_beginnings(part: TextPart) -> dict[str, str]:
    """Returns renames for files in which the same names begin differently: "^language_model\\." to ""."""
    in_base = revert_weight_conversion(part.base, {part.in_base(n): t for n, t in part.text.state_dict().items()})
    by_end = {end: name for name in in_base for end in _ends(name)}
    renames: dict[str, str] = {}
    for name in revert_weight_conversion(part.text, part.text.state_dict()):
        theirs = next((by_end[end] for end in _ends(_renumbered(name, part.layers)) if end in by_end), None)
        if theirs is None:
            return {}
        alike = max((end for end in _ends(name) if theirs == end or theirs.endswith(f".{end}")), key=len, default="")
        before, after = theirs.removesuffix(alike), name.removesuffix(alike)
        if before != after:
            renames[f"^{re.escape(before)}"] = after
    for number in {*range(max(part.layers))} - {*part.layers}:  # layers without a text part: out of the way
        like = next((before for before in renames if re.search(r"\.layers\\\.\d+\\\.$", before)), None)
        if like is not None:
            renames[re.sub(r"\d+(?=\\\.$)", str(number), like)] = f"no_text.{number}."
    return dict(sorted(renames.items(), key=lambda rename: -len(rename[0])))


def _ends(name: str) -> list[str]:
    """
    >>> _ends("model.norm.weight")
    ['model.norm.weight', 'norm.weight', 'weight']
    """
    pieces = name.split(".")
    return [".".join(pieces[i:]) for i in range(len(pieces))]
