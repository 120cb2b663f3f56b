"""Multimodal models that are trained on images or sound: their parts, the trained ones, and the tower on every rank.

Of models that hear, the tower is audio_tower and the projector multi_modal_projector; of those that see:

    part        of SmolVLM             of Qwen2.5-VL and Qwen3-VL                       of Gemma 3 and Mistral 3
    language    text_model, lm_head    language_model, lm_head                          language_model, lm_head
    projector   connector              visual.merger, visual.deepstack_merger_list      multi_modal_projector
    tower       vision_model           the rest of visual                               vision_tower

Phi-4 multimodal's parts are within `embed_tokens_extend` of the base model, which itself has the layers of the language
model: `Family.language` is empty.

The model is transformers' own class with its own forward; its family is a row of data/media/family_table.py.

Letters: T tokens of the flat row, N images, P patches, D hidden size.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from finetune.data.batch import Batch
from finetune.data.media.family_table import FAMILIES, Family, Kinds, family_of, file_token, rows_of, tower_outputs
from finetune.data.samples import MediaKind
from finetune.errors import UserError
from finetune.models.checkpoint_files import check_names_kept
from finetune.models.clips_alone import run_clips_alone
from finetune.models.lora_targets import AdapterTargets, find_targets
from finetune.models.patches import set_attribute
from finetune.recipe.schema import Lora, Recipe
from finetune.utils import full_shape, unwrap_peft

PARTS = ("language", "projector", "tower")


def image_tokens(config: Any, cells: Sequence[int]) -> list[int]:
    """Returns the tokens of each image of `Family.pictures`."""
    tokens = family_of(config).tokens
    return list(cells) if tokens is None else [tokens(config)] * len(cells)


def patches_in(config: Any, inputs: Mapping[str, Tensor], kind: MediaKind | None = None) -> list[int]:
    """Returns the patches of each picture, or crop of one, among the inputs of a forward; or the positions of clips.
    kind: see `family_of`."""
    family = family_of(config, kind)
    if family.ear is not None:
        return [count for frames in family.ear.frames_in(inputs) for count in family.ear.positions(config, frames)]
    if (pixels := inputs.get(family.main_input)) is None:
        return []
    side = config.vision_config.patch_size
    if (grid := inputs.get(f"{family.kind}_grid_thw")) is not None:  # a tower sees a video's places in time apart
        return [height * width for frames, height, width in grid.tolist() for _ in range(frames)]
    if (places := inputs.get(f"{family.kind}_position_ids")) is not None:
        return [places.shape[1]] * len(places)  # those behind a picture's end are computed as well
    if (sizes := inputs.get("image_sizes")) is not None:
        return (sizes // side).prod(1).tolist()
    *pictures, _, height, width = pixels.shape
    return [(height // side) * (width // side)] * math.prod(pictures)


def patches_of(config: Any, tokens: Sequence[int], kind: MediaKind | None = None) -> list[int]:
    """Returns the patches of each picture, or the positions of clips by what sees each other. tokens: of each file;
    kind: see `family_of`."""
    if (ear := family_of(config, kind).ear) is not None:
        return [part for count in tokens for part in ear.positions(config, ear.frames(config, count))]
    ratio = patches_per_token(config, kind)
    if (of_image := family_of(config, kind).tokens) is None:
        return [count * ratio for count in tokens]
    return [of_image(config) * ratio] * (sum(tokens) // of_image(config))


def patches_per_token(config: Any, kind: MediaKind | None = None) -> int:
    """Returns the patches of an image, or the positions of sound, that the projector joins to one token. kind: see
    `family_of`."""
    family = family_of(config, kind)
    if family.ear is not None:
        return family.ear.per_token(config)
    vision = config.vision_config
    if (of_image := family.tokens) is not None:
        return (vision.image_size // vision.patch_size) ** 2 // of_image(config)
    sides = (getattr(config, "spatial_merge_size", None), *(getattr(vision, name, None) for name in _SIDES))
    return next(side for side in sides if side) ** 2


_SIDES = ("spatial_merge_size", "pooling_kernel_size")  # of a token, in patches


# --- parts


def part_of(family: Family, name: str) -> str:
    """Returns the part of a parameter or module of transformers' model, by its name.

    >>> part_of(FAMILIES["qwen3_vl"], "model.visual.merger.norm.weight")
    'projector'
    """
    inside = name.removeprefix("model.")
    if any(_is_in(inside, path) for row in family.each for path in row.projector):
        return "projector"
    is_in_tower = any(_is_in(inside, row.tower) for row in family.each)
    return "tower" if is_in_tower or is_of_others(family, name) else "language"


def is_of_others(family: Family, name: str) -> bool:
    """Returns whether a parameter or module is of a tower for files of another kind, which does not run."""
    return any(_is_in(name.removeprefix("model."), path) for path in family.others)


def _is_in(name: str, path: str) -> bool:
    return name == path or name.startswith(f"{path}.")


def _trains(family: Family, name: str, trained: Sequence[str]) -> bool:
    inside = name.removeprefix("model.")
    unused = [path for row in family.each for path in row.unused]
    is_unused = any(_is_in(inside, path) for path in unused) or is_of_others(family, name)
    return part_of(family, name) in trained and not is_unused


def trained_parts(recipe: Recipe, config: PretrainedConfig) -> tuple[Family, Sequence[str]] | None:
    """Returns a model's family and the parts of it that train; None for a text model, all of which does.

    A base model that has its language model's layers itself (Phi-4) has its towers also if it trains on text alone:
    they get no gradient, for which other ranks would wait.
    """
    if recipe.model.train is not None:
        return family_of(config, recipe.data.media_kinds), recipe.model.train
    has_towers = any(not row.language for row in rows_of(config.model_type).values())
    return (family_of(config), ("language",)) if has_towers else None


def freeze_parts(model: Any, family: Family, trained: Sequence[str]) -> None:
    """Freeze all but the trained parts. Raises UserError if layers of a tower would get no gradient."""
    _check_read(model, trained)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(_trains(family, name, trained))


def _check_read(model: Any, trained: Sequence[str]) -> None:
    layer = getattr(model.config, "vision_feature_layer", -1)
    if "tower" in trained and layer not in (-1, [-1]):
        raise UserError(
            f"model.train: the language model reads layer {layer} of the tower. Those after it would get no gradient. "
            "Fix: leave `tower` out"
        )


def targets_in_parts(model: Any, family: Family, trained: Sequence[str], lora: Lora) -> AdapterTargets:
    """Returns what gets adapters in the trained parts. Raises UserError if a part has nothing."""
    _check_read(model, trained)
    targets = find_targets(model, lora, lambda path: _trains(family, path, trained))
    paths = [*targets.layers, *targets.stacked]
    if without := [part for part in trained if not any(part_of(family, path) == part for path in paths)]:
        raise UserError(
            f"lora.targets: no target is in {without[0]!r}, which model.train names. Fix: leave the part out, or train "
            "it by `mode: full`"
        )
    check_names_kept(model, [*targets.layers, *(path.rpartition(".")[0] for path in targets.stacked)])
    return targets


def attention_of_parts(config: PretrainedConfig, of_language: str) -> dict[str, str]:
    """Returns `from_pretrained`'s argument: the language model's attention; a tower has transformers' own."""
    text = config.get_text_config(decoder=True)
    parts = {name: of_language if getattr(config, name) is text else "sdpa" for name in config.sub_configs}
    towers = {row.config: row.attention for row in rows_of(config.model_type).values()}
    return {"": of_language if text is config else "sdpa", **parts, **towers}


def part_sizes(model: Any) -> dict[str, tuple[int, int]]:
    """Returns, of each part of a multimodal model, its parameters and those that train; {} for a text model."""
    if not tower_modules(model):
        return {}
    family = family_of(model.config, tuple(rows_of(model.config.model_type)))
    sizes: dict[str, tuple[int, int]] = {part: (0, 0) for part in PARTS}  # noqa: C420 (typed)
    for name, parameter in unwrap_peft(model).named_parameters():
        part, numel = part_of(family, name), full_shape(parameter).numel()
        total, trained = sizes[part]
        sizes[part] = (total + numel, trained + numel * parameter.requires_grad)
    return sizes


def tower_modules(model: Any) -> list[nn.Module]:
    """Returns towers and projectors of transformers' or peft's model; [] for a text model."""
    whole = unwrap_peft(model)
    rows = rows_of(whole.config.model_type).values()
    if not any(hasattr(whole.base_model, row.tower.partition(".")[0]) for row in rows):
        return []
    paths = dict.fromkeys(path for row in rows for path in (row.tower, *row.projector, *row.others))
    return [module for path in paths if (module := part_at(whole.base_model, path)) is not None]


def part_at(base: Any, path: str) -> nn.Module | None:
    """Returns a part of a base model; None if this one has none, as of sound."""
    first, _, rest = path.partition(".")
    module = getattr(base, first)
    return module if module is None or not rest else module.get_submodule(rest)


def language_part(model: Any) -> Any:
    """Returns the module of the language model that has its layers, without a head. model: transformers'."""
    family = FAMILIES.get(model.config.model_type)
    whole = model.base_model
    return whole.get_submodule(family.language) if family and hasattr(whole, family.language) else whole


def decoder_layers(model: Any) -> nn.ModuleList:
    """Returns the layers of the language model. model: transformers'."""
    return language_part(model).layers


# --- a forward


class TowerPart:
    """The towers in a forward: frozen parts stay in evaluation mode, a micro-batch without images gets a dummy one.

    Parts that are never in training mode (`Family.steady`) stay so as well.

    Backends gather weights or add up gradients at the same place of every rank's forward. A rank without images would
    skip the tower, and all would wait for ever (DeepSpeed issue 7170). So it sends the smallest image there is through
    the tower and adds the result times 0 to its embeddings: the gradients are zero, and the waiting ranks meet. In a
    run on several kinds of files each kind has its turn, also if one tower computes two of them: right before the next
    kind that has files, or before the language model.

        ranks            a forward of Gemma 4
        with images      embed   images              nothing as sound   language model
        with sound       embed   nothing as an image   sound            language model
    """

    def __init__(self, model: Any, always: bool, kinds: Kinds = None):
        """model: transformers' or peft's. always: also a tower that is all frozen runs in every forward. kinds: see
        `family_of`."""
        whole = unwrap_peft(model)
        if (merge := getattr(whole.base_model, "inputs_merger", None)) is not None:

            def merged(input_ids: Tensor, inputs_embeds: Tensor, image_hidden_states: Tensor) -> Tensor:
                return merge(input_ids, inputs_embeds, image_hidden_states.to(inputs_embeds.dtype))

            set_attribute(whole.base_model, "inputs_merger", merged, "type of images")
        self.family = family_of(whole.config, kinds)
        self._smallest: list[tuple[Family, dict[str, Tensor]]] = []
        for row in self.family.each:
            run_clips_alone(whole, row)
            self._smallest.append((row, row.pictures(whole.config, [2])))  # Mistral 3 fails at an image of one token
        trained = {part_of(self.family, name) for name, p in whole.named_parameters() if p.requires_grad}
        self._always = always or bool(trained - {"language"})
        steady = any(row.steady for row in self.family.each)
        self._frozen = [
            module
            for name, module in whole.named_modules()
            if (part := part_of(self.family, name)) != "language" and (steady or part not in trained)
        ]
        self.evaluate_frozen()  # a model is in training mode from the start

    def evaluate_frozen(self) -> None:
        """Put the frozen modules of tower and projector into evaluation mode: without dropout."""
        for module in self._frozen:
            module.training = False

    @contextlib.contextmanager
    def forward(self, model: Any, inputs: dict[str, Any]) -> Iterator[None]:
        """A context for a forward with these inputs, in which the tower runs. model: transformers' or peft's.

        It runs where it would in transformers' own: ZeRO-3 gathers weights in the order of the forward before, which
        must be the same on all ranks. Gemma's embeddings by layer come before the towers.
        """
        cache = inputs.get("past_key_values")
        is_continued = cache is not None and cache.get_seq_length() > 0  # a generation: no rank has images then
        if not self._always or is_continued:
            yield
            return
        base, missing, ran = unwrap_peft(model).base_model, Missing(), list[list[Tensor]]()
        with contextlib.ExitStack() as turns:
            for row, smallest in self._smallest:
                if row.main_input not in inputs:
                    missing.append((row, smallest))
                elif missing:
                    ran.append(turns.enter_context(_nothing_before_call(base, row.call, missing)))
                    missing = Missing()
            if missing or ran:
                again = self.family.embeds_again and len(missing) == len(self._smallest)
                ids = inputs["input_ids"] if again else None
                turns.enter_context(_nothing_before_language(base, self.family, missing, ran, ids))
            yield


Missing = list[tuple[Family, dict[str, Tensor]]]  # towers without files, each with the smallest there is


def _nothing_of(base: Any, missing: Missing, device: torch.device, **more: Tensor) -> list[Tensor]:
    """Runs towers without files, and returns zeros that depend on their trained weights. more: inputs, see
    `Family.joined_in`."""
    outputs = [
        tower_outputs(row, base, {**{name: tensor.to(device) for name, tensor in smallest.items()}, **more})
        for row, smallest in missing
    ]
    return [tensor.sum() * 0 for tensor in _tensors(outputs) if tensor.requires_grad]


@contextlib.contextmanager
def _nothing_before_call(base: Any, name: str, missing: Missing) -> Iterator[list[Tensor]]:
    """A context in which towers without files run right before a method of the base model that runs one with files.
    Yields their zeros, which are there then."""
    own, outer, zeros = getattr(base, name), vars(base).get(name), list[Tensor]()

    def called(*args: Any, **kwargs: Any) -> Any:
        zeros.extend(_nothing_of(base, missing, next(_tensors([*args, *kwargs.values()])).device))
        return own(*args, **kwargs)

    vars(base)[name] = called
    try:
        yield zeros
    finally:
        del vars(base)[name]
        if outer is not None:
            vars(base)[name] = outer


@contextlib.contextmanager
def _nothing_before_language(
    base: Any, family: Family, missing: Missing, ran: list[list[Tensor]], ids: Tensor | None
) -> Iterator[None]:
    """A context in which towers without files run right before the language model, whose embeddings get all zeros.

    ran: zeros of those that have run. ids: of a model that embeds its tokens again, after its tower."""

    def with_nothing(embeddings: Tensor) -> Tensor:
        more = {"inputs_embeds": embeddings[:1, :1]} if family.joined_in is not None else {}
        zeros = [*itertools.chain(*ran), *_nothing_of(base, missing, embeddings.device, **more)]
        if ids is not None:
            embeddings = base.get_input_embeddings()(ids)
        return sum((zero.to(embeddings.dtype) for zero in zeros), embeddings)

    def add_nothing(_language: Any, arguments: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return arguments, {**named, "inputs_embeds": with_nothing(named["inputs_embeds"])}

    if family.joined_in is not None:
        joining = base.get_submodule(family.joined_in)
        hook = joining.register_forward_hook(lambda _module, _inputs, output: with_nothing(output), prepend=True)
    else:  # ahead of the backend's own hooks, which gather the language model
        language = base.get_submodule(family.language)
        hook = language.register_forward_pre_hook(add_nothing, prepend=True, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def whole_image_types(config: Any, ids: Tensor, files: Sequence[Sequence[MediaKind]]) -> dict[str, Tensor]:
    """Returns what transformers' own masks need for ids (B, T), if the tokens of an image or a frame see each other in
    windows (Gemma 4); else {}. files: kinds of each text's."""
    kinds: dict[MediaKind, None] = dict.fromkeys(kind for of_text in files for kind in of_text)
    rows = family_of(config, tuple(kinds)).each
    if not any(row.in_windows_only for row in rows):
        return {}
    seen = [ids == file_token(config, row) for row in rows if row.in_windows_only]
    return {"mm_token_type_ids": torch.stack(seen).any(0).int()}


# --- positions

# Inputs of a forward that have a row for each of its files of a kind, from which positions are counted.
GRIDS: Mapping[MediaKind, tuple[str, ...]] = {
    "image": ("image_grid_thw",),
    "video": ("video_grid_thw", "second_per_grid_ts"),
}
Grids = Mapping[str, Tensor]  # some of them
Positions = Callable[[Tensor, Grids], Tensor]  # ids (1, t) and the grids of their files -> (3, 1, t)


def grids_of(inputs: Mapping[str, Tensor], files: Sequence[Sequence[MediaKind]]) -> list[Grids]:
    """Returns the grids of each document's files among the inputs of a forward. files: kinds of each document's."""
    documents = [dict[str, Tensor]() for _ in files]
    for kind, names in GRIDS.items():
        counts = [sum(one == kind for one in of_document) for of_document in files]
        for name in (name for name in names if name in inputs):
            for document, grid, count in zip(documents, inputs[name].split(counts), counts, strict=True):
                if count:
                    document[name] = grid
    return [*documents]


def document_positions(config: Any) -> Positions | None:
    """Returns a function for a document's positions in time, height and width, by transformers' `get_rope_index`; None
    for models without such positions."""
    if not rows_of(config.model_type).keys() & GRIDS.keys():  # tokens of sound follow each other like those of text
        return None
    module = importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    causal = str(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[config.model_type])
    kind: Any = getattr(module, causal.replace("ForConditionalGeneration", "Model"))
    if not hasattr(kind, "get_rope_index"):
        return None
    model = object.__new__(kind)  # without weights: the method reads the config alone
    object.__setattr__(model, "config", config)

    def positions(ids: Tensor, grids: Grids) -> Tensor:
        if not grids:
            return torch.arange(ids.shape[1]).expand(3, 1, -1)
        types = (ids == config.image_token_id).int() + 2 * (ids == config.video_token_id).int()
        return model.get_rope_index(ids, mm_token_type_ids=types, **grids)[0]

    return positions


def row_positions(config: Any) -> Callable[[Batch], Batch] | None:
    """Returns a function for the positions of a batch with files, [4, 1, T]: indices in the document and its
    `document_positions`. None: indices suffice."""
    positions = document_positions(config)

    def with_positions(batch: Batch) -> Batch:
        documents = batch.inputs["input_ids"].split(list(batch.sequence_lengths), dim=1)
        files: list[list[MediaKind]] = [
            [place.kind for place in batch.media if place.sequence == i] for i in range(len(documents))
        ]
        grids = grids_of(batch.inputs, files)
        if not any(grids):
            return batch
        assert positions is not None  # below
        documents = [positions(ids, mine) for ids, mine in zip(documents, grids, strict=True)]
        whole = torch.cat([batch.inputs["position_ids"][None], torch.cat(documents, dim=2)])
        return replace(batch, inputs={**batch.inputs, "position_ids": whole})

    return with_positions if positions else None
