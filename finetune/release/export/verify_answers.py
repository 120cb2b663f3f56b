"""The gate for small models, which are loaded whole: answers of the run's model and of its export on held-out rows.

    AnswerReference   models that write: the tokens of documents, and greedy texts
    ScoreReference    models of scores (`reward`, `classify`): sequences, by transformers' own forward for the export,
                      with padding at the end, as in a batch: it looks for the last token that is not padding

A reference keeps what the run's model says while the export is loaded in its place.

Letters: T tokens of a document, S of them trained, V vocabulary; d sequences of an example, N labels.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig

from finetune.checkpoints.trained import Trained
from finetune.data.building import OpenedSources
from finetune.data.dataset import build_dataset, build_held_out, until_end
from finetune.data.samples import Example, Medium
from finetune.data.samples import Sequence as Document
from finetune.data.sources.source import SourceReader
from finetune.errors import UserError
from finetune.models.added_tokens import start_rows, train_rows
from finetune.models.base_config import first_line
from finetune.models.base_model import Base
from finetune.models.base_weights import compute_stored, load_stored
from finetune.models.checkpoint_files import renamed
from finetune.models.mtp import in_head, places_of_head
from finetune.models.remote_code import from_config, load_auto
from finetune.models.score_model import labelled
from finetune.models.stored_config import stored_format
from finetune.models.towers import targets_in_parts, trained_parts
from finetune.models.weights import add_adapters
from finetune.models.wrapped import output_head
from finetune.recipe import Recipe
from finetune.recipe.schema import HeldOut
from finetune.release.export.figures import AS_BASE, Figures
from finetune.release.export.gguf_file import gguf_of, other_tensors
from finetune.release.export.gguf_places import Places
from finetune.release.export.gguf_settings import UNREAD, is_written, open_gguf
from finetune.release.export.loading import class_of_result, load_trained
from finetune.release.export.streamed import StreamedModel, auto_class, base_model
from finetune.release.export.verify_tensors import stored_tensors
from finetune.release.export.weight_types import EIGHT_BITS
from finetune.utils import unwrap_peft

_KEPT_BYTES = 2**28  # of the run's log-probabilities, fp32
_GREEDY_ROWS, _GREEDY_TOKENS = 4, 24
# Images, ids (1, T) -> inputs of a forward; None without images.
Pictures = Callable[[Sequence[Medium], Tensor], dict[str, Tensor]] | None
_LOADERS = (
    "transformers.modeling_utils",
    "transformers.loading_report",
    "transformers.distributed.tensor_parallel",  # looks, and warns, only if the first one is this quiet
)
# Text that tokenizers split in different ways: digits, runs of spaces, contractions, letters beyond ASCII.
_CHAT = [{"role": "user", "content": "How many days has a week?  It's 1234567,\n\n\tI'D say: naïve 日本 🙂 x1"}]


# --- rows


def replace_settings(recipe: Recipe, tokenizer: Path, name: str | None) -> Recipe:
    """Returns the recipe with the tokenizer and template of a folder. name: of the model whose processor prepares its
    files; None: the recipe's."""
    changes = {"tokenizer": str(tokenizer), "chat_template": None, "chat_template_arguments": None}
    if recipe.data.media is not None and name is not None:
        changes |= {"name": name, "revision": None}
    return recipe.model_copy(update={"model": recipe.model.model_copy(update=changes)})


def check_rows(trained: Trained) -> None:
    """Raises UserError if the rows that an export is compared on are gone: before hours of writing."""
    if (recipe := trained.recipe) is None:
        return
    data = recipe.data
    for source in data.train if isinstance(data.eval, HeldOut) else data.eval_sources or data.train:
        try:
            SourceReader(source)
        except UserError as error:
            raise UserError(
                f"{trained.run_dir}: the run's rows to compare the export on cannot be read: {error}\n"
                "Or use `export --no-verify`, which compares nothing"
            ) from None


def held_out_examples(recipe: Recipe, tokenizer: Path, rows: int, name: str | None = None) -> list[Example]:
    """Returns the first rows of `data.eval`, or of `data.train`, as a tokenizer's folder renders them. name: see
    `replace_settings`. Raises UserError."""
    recipe = replace_settings(recipe, tokenizer, name)
    overlong = "drop" if recipe.row_kind.sequences else "truncate"  # answers stay whole
    data = recipe.data.model_copy(update={"streaming": False, "mixture": None, "overlong": overlong})
    recipe = recipe.model_copy(update={"data": data})
    # The folder's tokenizer has the tokens that the recipe adds.
    base, opened = Base(recipe.model, image=data.media), OpenedSources(recipe)
    renderer = base.renderer(recipe.objective)
    if isinstance(data.eval, HeldOut):
        held_out = build_held_out(recipe, renderer, opened)
    else:
        sources = tuple(
            source.model_copy(update={"limit": min(rows, source.limit or rows), "weight": 1.0, "max_epochs": None})
            for source in data.eval_sources or data.train
        )
        held_out = build_dataset(recipe, sources, renderer, opened=opened)
    assert held_out is not None
    return [held_out.examples[i] for i in range(min(rows, len(held_out.examples)))]


def training_texts(recipe: Recipe, tokenizer: Path, rows: int, name: str | None = None) -> tuple[list[str], int]:
    """Returns the first rows of `data.train` as texts with their special tokens, and the number of their tokens. name:
    see `replace_settings`. Raises UserError."""
    recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"eval": ()})})
    examples = [drop_images(one) for one in held_out_examples(recipe, tokenizer, rows, name)]
    reader: Any = load_auto(AutoTokenizer, tokenizer)
    sequences = [one.input_ids for example in examples for one in example.sequences]
    return [reader.decode(ids, skip_special_tokens=False) for ids in sequences], sum(map(len, sequences))


def compare_tokens(
    figures: Figures, recipe: Recipe, settings: Path, export: Path, examples: list[Example], rows: int
) -> None:
    """Compare rows as both tokenizers and templates write them."""
    # A model's own processors prepare files, with their own bounds.
    bounds = ("processor", "max_pixels", "min_pixels", "fps", "max_frames")
    changed = {
        kind: rules.model_copy(update={key: None for key in bounds if hasattr(rules, key)})
        for kind, rules in zip(recipe.data.media_kinds, recipe.data.media or (), strict=True)
    }
    recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update=changed)})
    try:
        theirs = held_out_examples(recipe, export, rows, str(export))
        tokenizers: list[Any] = [load_auto(AutoTokenizer, folder) for folder in (settings, export)]
    except (UserError, OSError, ValueError, KeyError) as error:
        figures.problems.append(f"the export's tokenizer does not render the run's rows: {first_line(error)}")
        return
    for ours, their in zip(examples, theirs, strict=False):
        pairs = zip(ours.sequences, their.sequences, strict=True)
        if not all(
            np.array_equal(a.input_ids, b.input_ids) and np.array_equal(a.loss_mask, b.loss_mask) for a, b in pairs
        ):
            figures.problems.append(f"{ours.path}:{ours.row} has other tokens: another tokenizer or chat template")
            break
    for one in (one for example in examples for one in example.sequences):
        if len({tokenizer.decode(one.input_ids, skip_special_tokens=True) for tokenizer in tokenizers}) > 1:
            figures.problems.append("the same tokens are another text: another decoder, or other special tokens")
            break
    if len(theirs) != len(examples):
        figures.problems.append(f"{len(theirs)} of {len(examples)} rows are rendered: another chat template")
    compare_prompts(figures, settings, export, tokenizers)


def compare_prompts(figures: Figures, settings: Path, export: Path, tokenizers: list[Any]) -> None:
    """Compare a prompt as a server tokenizes it, with the special tokens that a tokenizer adds itself, and the tokens
    that end an answer."""
    chats = [
        one.apply_chat_template(_CHAT, add_generation_prompt=True, tokenize=False) if one.chat_template else ""
        for one in tokenizers
    ]
    ours, theirs = (one(chat or "How many?")["input_ids"] for one, chat in zip(tokenizers, chats, strict=True))
    if chats[0] != chats[1]:
        figures.problems.append("a prompt is rendered otherwise: another chat template")
    elif ours != theirs:
        figures.problems.append(
            f"a prompt has other tokens: it begins with {theirs[:3]} in the export, {ours[:3]} in the run"
        )
    ends, other_ends = (end_tokens(folder) for folder in (settings, export))
    if ends - other_ends:
        figures.problems.append(f"{sorted(ends - other_ends)} end an answer in the run, and do not in the export")
    if other_ends - ends:
        figures.problems.append(f"{sorted(other_ends - ends)} end an answer in the export, and do not in the run")


def drop_images(example: Example) -> Example:
    """Returns an example for a GGUF file, which has the language model alone."""

    def text(one: Document) -> Document:
        kept = np.ones(len(one.input_ids), np.bool_)
        for image in one.media:
            kept[image.begin : image.end] = False
        return Document(one.input_ids[kept], one.loss_mask[kept])

    return replace(example, sequences=tuple(map(text, example.sequences)))


# --- the two models: the run's, as training computed with it, and the export's, as anyone loads it


def load_reference(trained: Trained, base: str | None = None) -> Any:
    """Returns the trained model in fp32, with adapters next to their base, as in training. Raises UserError."""
    if not trained.is_checkpoint:
        return load_trained(trained.folder, base, dtype=torch.float32).float().eval()
    recipe = trained.recipe
    assert recipe is not None  # as a checkpoint has
    about, first_added = base_model(trained, base), 0
    of_run, auto = Base(about, recipe.tokens), auto_class(about, trained.labels)
    config = labelled(of_run.config, trained.labels) if trained.labels else of_run.config
    if about.name is None or about.config is not None:  # the schema wants one of the two
        model: Any = from_config(auto, config, about.trust_remote_code)
    elif stored_format(config) is not None:
        model = load_stored(about, config, torch.float32, auto)
    else:  # of a multimodal one its text part
        files = of_run.files
        more: dict[str, Any] = {"config": config, "key_mapping": files.renames} if files is not None else {}
        more |= {"config": config} if trained.labels or about.train is not None else {}  # also of a thinker
        revision = about.revision or "main"
        try:
            model = load_auto(
                *(auto, about.name, about.trust_remote_code), revision=revision, dtype=torch.float32, **more
            )
        except (OSError, ValueError) as error:
            raise UserError(
                f"the base model {about.name!r} cannot be loaded: {first_line(error)}. Fix: give --base FOLDER"
            ) from None
    if recipe.tokens is not None:
        first_added = len(of_run.tokenizer) - len(of_run.pieces)
        start_rows(model, first_added, of_run.pieces)
    if trained.is_adapter:
        assert recipe.lora is not None
        parts = trained_parts(recipe, model.config)
        targets = targets_in_parts(model, *parts, recipe.lora) if parts is not None else None
        model = add_adapters(model.float(), recipe.lora, torch.float32, recipe.tokens, targets)
        if recipe.tokens is not None and recipe.tokens.train != "all":
            train_rows(model, first_added, len(recipe.tokens.add), torch.float32)
    compute_stored(model)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name in trained.shapes:
            if not in_head(name):  # transformers' model answers without the head that predicts ahead
                parameters[name].copy_(trained.read(name))
    return model.float().eval()


def load_export(
    export: Path, figures: Figures, config: Any, written: StreamedModel, places: Places | None = None
) -> Any | None:
    """Returns the export in fp32; None if transformers cannot load it. config: of a GGUF file's model, which states
    only some of it; written: the run's tensors; places: of a GGUF file's tensors."""
    file, is_decoded, more = gguf_of(export), False, dict[str, Any]()
    if file is not None:
        config = copy.deepcopy(config)
        config.tie_word_embeddings = not any(one.name == "output.weight" for one in open_gguf(file).tensors)
        if is_written(config):
            figures.problems += (others := other_tensors(written, file))
            is_decoded = config.model_type in UNREAD
            if is_decoded and others:
                return None
        elif places is not None and not places.unplaced:
            is_decoded = True  # each tensor by its name: transformers reads few architectures
        # llama.cpp has no Mistral: without a window it is the same as Llama.
        config = as_llama(config) if config.model_type == "mistral" else config
        more = {"gguf_file": file.name, "config": config}
    elif figures.format in EIGHT_BITS:
        config = more["config"] = load_auto(AutoConfig, export)
        is_decoded = find_spec("compressed_tensors") is None
        if is_decoded:
            del config.quantization_config
        else:
            config.quantization_config["dequantize"] = True
    elif figures.format in AS_BASE:  # transformers reads some formats on GPUs alone, and rounds others to bfloat16
        try:
            return load_trained(export, dtype=torch.float32).eval()
        except UserError as error:
            figures.problems.append(f"it cannot be loaded: {first_line(error)}")
            return None
    try:
        if is_decoded:  # here, as the format says; auto classes want a folder
            kind = type(written.text_part.text if file is not None and written.text_part else written.model)
            state = {name: one.read() for name, one in stored_tensors(export, written, places).items()}
            settings: dict[str, Any] = {"config": config, "state_dict": state, "trust_remote_code": False}
            model, report = kind.from_pretrained(None, dtype=torch.float32, output_loading_info=True, **settings)
        else:
            auto = AutoModelForCausalLM if file is not None else class_of_result(export)
            model, report = load_auto(auto, export, dtype=torch.float32, output_loading_info=True, **more)
    except (ImportError, OSError, ValueError, RuntimeError, SafetensorError) as error:
        figures.problems.append(f"transformers cannot load it: {first_line(error)}")
        return None
    kept = {*written.kept, *renamed(written.model, written.kept)[0].values()}  # of the base, see `compare_tensors`
    of_head = tuple(places_of_head(written.model).values())  # which transformers' class does not read either
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        found = {str(name) for name in report.get(kind) or ()}
        if kind == "unexpected_keys":
            found = {name for name in found - kept if not name.startswith(of_head)}
        if names := sorted(found):
            figures.problems.append(f"{kind.replace('_', ' ')}: {', '.join(names[:3])} ({len(names)} in all)")
    return model.eval()


def as_llama(config: Any) -> LlamaConfig:
    """Returns Mistral's config as that of the same Llama."""
    return LlamaConfig(**{k: v for k, v in config.to_dict().items() if k not in ("model_type", "architectures")})


@contextlib.contextmanager
def quiet_loading() -> Iterator[None]:
    """Hides the messages of transformers and peft while they load: they are in the figures, or expected (tied heads,
    experts' patterns)."""
    loggers = [logging.getLogger(name) for name in _LOADERS]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`", UserWarning)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


# --- answers


def end_tokens(folder: Path) -> set[int]:
    """Returns the tokens that end an answer, by a folder's generation config."""
    try:
        ends = GenerationConfig.from_pretrained(folder).eos_token_id
    except OSError:
        return set()
    return set(ends) if isinstance(ends, list) else {ends} - {None}  # pyright: ignore[reportReturnType]


class _Sequence(NamedTuple):
    """A document of a held-out row, or its prompt."""

    ids: Tensor  # (T,)
    mask: Tensor  # (T,)
    media: tuple[Medium, ...]

    def inputs(self, pictures: Pictures, device: torch.device) -> dict[str, Tensor]:
        """Returns the inputs of a forward."""
        inputs = {"input_ids": self.ids[None], **(pictures(self.media, self.ids[None]) if pictures else {})}
        return {name: value.to(device) for name, value in inputs.items()}


@dataclass
class AnswerReference:
    """Log-probabilities and greedy texts of the run's model."""

    sequences: list[_Sequence]
    log_probs: list[Tensor]  # (S, V) each
    prompts: list[_Sequence]
    texts: list[list[int]]
    pictures: Pictures  # by the base's processor, whose settings the export has as well

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        model: Any,
        pictures: Pictures,
        ends: set[int],
        examples: list[Example],
        figures: Figures,
        context: int | None,
    ) -> AnswerReference:
        """ends: the tokens that end the run's answers; context: the tokens that the export takes; None: as the run's
        model."""
        sequences, log_probs, kl_base, room = list[_Sequence](), list[Tensor](), 0.0, _KEPT_BYTES
        adapted, cut = hasattr(model, "disable_adapter"), slice(context)
        for one in (one for example in examples for one in example.sequences if one.loss_mask[cut].any()):
            if room <= 0:
                break
            ids, mask = torch.from_numpy(one.input_ids[cut].astype("int64")), torch.from_numpy(one.loss_mask[cut])
            sequence = _Sequence(ids, mask, one.media)
            ours = _log_probs(model, sequence, pictures)
            if adapted:
                with model.disable_adapter():
                    kl_base += float(_kl(ours, _log_probs(model, sequence, pictures)).sum())
            room -= ours.nbytes
            sequences.append(sequence)
            log_probs.append(ours)
        figures.rows, figures.tokens = len(sequences), sum(map(len, log_probs))
        figures.kl_base = kl_base / figures.tokens if adapted and figures.tokens else None
        prompts = []
        for ids, mask, images in sequences:
            end = int(mask.int().argmax())
            if end and (context is None or end + _GREEDY_TOKENS <= context):
                prompts.append(_Sequence(ids[:end], mask[:end], tuple(one for one in images if one.end <= end)))
        prompts = prompts[:_GREEDY_ROWS]
        texts = [_greedy(model, prompt, pictures, ends) for prompt in prompts]
        return cls(sequences, log_probs, prompts, texts, pictures)

    @torch.no_grad()
    def compare(self, model: Any, ends: set[int], figures: Figures) -> None:
        """Fill in how the export's model differs. ends: the tokens that end its answers."""
        if _lacks_rows(model, [one.ids for one in self.sequences], figures):
            return
        head, embeddings = model.get_output_embeddings().weight, model.get_input_embeddings().weight
        ties = getattr(model.config.get_text_config(), "tie_word_embeddings", False)  # not all have the key
        if ties and not torch.equal(head, embeddings):
            figures.problems.append("config.json ties the head to the embeddings, and the files hold another head")
        total, worst, same = 0.0, 0.0, 0
        for sequence, ours in zip(self.sequences, self.log_probs, strict=True):
            theirs = _log_probs(model, sequence, self.pictures)
            width = min(ours.shape[1], theirs.shape[1])  # padding of the vocabulary, if any
            kl = _kl(ours[:, :width], theirs[:, :width])
            total += float(kl.sum())
            worst = max(worst, float(kl.max()) if kl.isfinite().all() else float("inf"))
            same += int((ours.argmax(1) == theirs.argmax(1)).sum())
        if figures.tokens:
            figures.kl_mean, figures.kl_max = max(0.0, total / figures.tokens), worst
            figures.top1 = same / figures.tokens
        pairs = zip(self.prompts, self.texts, strict=True)
        equal = [_greedy(model, prompt, self.pictures, ends) == text for prompt, text in pairs]
        figures.greedy = sum(equal) / len(equal) if equal else None


def _lacks_rows(model: Any, ids: list[Tensor], figures: Figures) -> bool:
    """Returns, and reports, whether a token has no embedding."""
    rows, highest = len(model.get_input_embeddings().weight), max((int(one.max()) for one in ids), default=0)
    if highest >= rows:
        figures.problems.append(f"token {highest} has no embedding: the export has {rows} rows, added ones are lost")
    return highest >= rows


def _log_probs(model: Any, sequence: _Sequence, pictures: Pictures) -> Tensor:  # (S, V) fp32, of the trained tokens
    inputs = sequence.inputs(pictures, model.device)
    logits = model(**inputs, use_cache=False).logits[0, :-1]
    return torch.log_softmax(logits[sequence.mask[1:].to(logits.device)].float(), dim=-1).cpu()


def _kl(ours: Tensor, theirs: Tensor) -> Tensor:  # (S,) nats
    """Returns KL(ours, theirs), normalized again in fp64: in fp32 a small divergence drowns in the rounding of its
    terms."""
    p, q = (torch.log_softmax(one.double(), dim=1) for one in (ours, theirs))
    return (p.exp() * (p - q)).sum(dim=1)


def _greedy(model: Any, prompt: _Sequence, pictures: Pictures, ends: set[int]) -> list[int]:
    """Returns the likeliest tokens after a prompt, up to and without an end token."""
    inputs = prompt.inputs(pictures, model.device)
    settings = GenerationConfig(
        max_new_tokens=_GREEDY_TOKENS, do_sample=False, eos_token_id=sorted(ends) or None, pad_token_id=0
    )
    mask = torch.ones_like(inputs["input_ids"])
    output = model.generate(**inputs, attention_mask=mask, generation_config=settings)[0, len(prompt.ids) :]
    return until_end(output.tolist(), ends)


# --- scores


@dataclass
class ScoreReference:
    """Scores of the run's model, read at the last token of each sequence, as in training."""

    ids: list[list[Tensor]]  # (T,) of each sequence of each example
    scores: list[Tensor]  # (d, N) fp32 of each example
    padding: int | None  # the token that the export's tokenizer puts behind shorter texts

    @classmethod
    @torch.no_grad()
    def of(cls, model: Any, padding: int | None, examples: list[Example], figures: Figures) -> ScoreReference:
        ids = [[torch.from_numpy(one.input_ids.astype("int64")) for one in e.sequences] for e in examples]
        run = cls(ids, _scores(model, ids), padding)
        figures.rows, figures.scored = len(ids), sum(map(len, ids))
        if hasattr(model, "disable_adapter") and figures.scored:
            with model.disable_adapter():
                figures.kl_base = float(_divergences(run.scores, _scores(model, ids)).mean())
        return run

    @torch.no_grad()
    def compare(self, model: Any, ends: set[int], figures: Figures) -> None:
        """Fill in how the export's scores differ. ends: the tokens that end an answer, of which there is none."""
        if _lacks_rows(model, [one for sequences in self.ids for one in sequences], figures):
            return
        theirs = []
        for sequences in self.ids:
            scores = []
            for ids in sequences:
                behind = ids.new_full((0 if self.padding is None else 2,), self.padding or 0)
                mask = torch.cat([torch.ones_like(ids), torch.zeros_like(behind)])[None].to(model.device)
                padded = torch.cat([ids, behind])[None].to(model.device)
                scores.append(model(input_ids=padded, attention_mask=mask, use_cache=False).logits.float().cpu())
            theirs.append(torch.cat(scores))
        if any(a.shape != b.shape for a, b in zip(self.scores, theirs, strict=True)):
            figures.problems.append(f"it has {theirs[0].shape[1]} labels, and the run {self.scores[0].shape[1]}")
        elif figures.scored:
            divergences = _divergences(self.scores, theirs)
            figures.kl_mean, figures.kl_max = float(divergences.mean()), float(divergences.max())
            same = [a == b for a, b in zip(_choices(self.scores), _choices(theirs), strict=True)]
            figures.top1 = sum(same) / len(same) if same else None
            figures.score_max = float((torch.cat(self.scores) - torch.cat(theirs)).abs().max())


def _scores(model: Any, examples: list[list[Tensor]]) -> list[Tensor]:  # (d, N) fp32 of each example
    body, head = unwrap_peft(model).base_model, output_head(model)

    def at_end(ids: Tensor) -> Tensor:  # (T,) -> (1, N)
        return head(body(input_ids=ids[None].to(model.device), use_cache=False)[0][:, -1]).float().cpu()

    return [torch.cat([at_end(ids) for ids in sequences]) for sequences in examples]


def _divergences(ours: list[Tensor], theirs: list[Tensor]) -> Tensor:  # (texts,) nats
    """Returns KL(ours, theirs) of the labels. For single scores it is the most that the KL of the probability that one
    answer is better than another, sigmoid(s - s'), can be: its second derivative is at most 1/4, so (difference)^2 / 8.
    """
    one, other = torch.cat(ours), torch.cat(theirs)
    return (one - other).double().square()[:, 0] / 8 if one.shape[1] == 1 else _kl(one, other)


def _choices(scores: list[Tensor]) -> list[int]:
    """Returns the label of each text; for single scores the best answer of each example that has several."""
    if any(one.shape[1] > 1 for one in scores):
        return [int(one[0].argmax()) for one in scores]
    return [int(one.argmax()) for one in scores if len(one) > 1]
