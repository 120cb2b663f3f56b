"""`generate` and `chat`: a trained model answers prompts, conversations and files of them.

A prompt is rendered as in training: the same reader of messages, the same template, the same tokens, and for
images, videos and sound the same features, within the bounds of the run's `data.image`, `data.video` or `data.audio`.
Sampling starts from the model's generation_config.json, as in transformers' servers; options take precedence.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from transformers import GenerationConfig, TextStreamer

from finetune.data.chat.renderer import chat_of, with_arguments
from finetune.data.chat.template_choice import own_template
from finetune.data.chat.trained_spans import Chat
from finetune.data.dataset import until_end
from finetune.data.formats.converters import with_files_of
from finetune.data.formats.messages import context_of, read_messages
from finetune.data.formats.tools import read_tools
from finetune.data.media.family_table import rows_of
from finetune.data.samples import BadRow, Conversation, MediaKind, Medium, Reference, kind_of
from finetune.errors import RunFailure, UserError
from finetune.models.clips_alone import run_clips_alone
from finetune.models.remote_code import trusts_code
from finetune.recipe import load_recipe
from finetune.recipe.schema import Audio, Data, Images, Model, Videos
from finetune.release.export.loading import load_result, model_folder
from finetune.release.inference.chat import as_messages, audio_part, converse, image_part, typed_lines, video_part
from finetune.release.inference.control_tokens import ControlTokens
from finetune.release.inference.sampling import Sampling
from finetune.utils import sha256_file, unwrap_peft, write_atomically

if TYPE_CHECKING:  # Pillow and transformers' processors are needed for files only
    from finetune.data.media.expansion import RowMedia
    from finetune.data.media.feature_reader import FeatureReader
    from finetune.data.media.stored_files import FileRules


_CONTEXT = 32_768  # tokens, for a model without a limit
_RULES: Mapping[MediaKind, Any] = {"image": Images, "audio": Audio, "video": Videos}
_NAMES: Mapping[MediaKind, str] = {"image": "images", "audio": "sound", "video": "videos"}


def generation_settings(config: GenerationConfig, sampling: Sampling) -> GenerationConfig:
    """Returns the model's generation config with these options."""
    settings = copy.deepcopy(config)
    if sampling.temperature:
        given = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
    else:  # transformers' defaults: it warns of others, which greedy search does not use
        given = {"temperature": 1.0, "top_p": 1.0, "top_k": 50}
    for name, value in {**given, "repetition_penalty": sampling.repetition_penalty}.items():
        if value is not None:
            setattr(settings, name, value)
    settings.do_sample, settings.max_new_tokens = bool(sampling.temperature), sampling.max_new_tokens
    settings.max_length = None
    settings.pad_token_id = 0 if settings.pad_token_id is None else settings.pad_token_id
    settings.stop_strings = list(sampling.stop) or None
    return settings


class StopFilter:
    """Text up to the first stop: holds back a possible beginning of one."""

    def __init__(self, stops: Sequence[str]):
        self._stops, self._held, self.ended = tuple(stops), "", False

    def feed(self, text: str, is_last: bool = False) -> str:
        """Returns the text that may be shown so far. is_last: the text is complete."""
        if self.ended:
            return ""
        text = self._held + text
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        self.ended = bool(places)
        if places or is_last:
            self._held = ""
            return text[: min(places)] if places else text
        starts = (n for stop in self._stops for n in range(len(stop) - 1, 0, -1) if text.endswith(stop[:n]))
        keep = len(text) - max(starts, default=0)
        self._held = text[keep:]
        return text[:keep]


class TerminalStreamer(TextStreamer):
    """Streams an answer to the terminal."""

    def __init__(self, tokenizer: Any, stops: Sequence[str]):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._filter = StopFilter(stops)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        print(self._filter.feed(text, stream_end), flush=True, end="\n" if stream_end else "")


@dataclass(frozen=True)
class Answer:
    text: str
    finish_reason: str  # stop (end token or stop text) or length


@dataclass(frozen=True)
class Prompt:
    """A conversation as tokens, up to the model's answer."""

    ids: list[int]
    media: tuple[Medium, ...] = ()  # in the order of their tokens


@dataclass(frozen=True)
class Answerer:
    """A trained model with its tokenizer and template."""

    model: Any  # transformers' or peft's
    tokenizer: Any
    chat: Chat | None  # None: no template, so that prompts are texts
    processor: Model | None = None  # base of the processor of files
    rules: tuple[FileRules, ...] = ()  # of the kinds of files that a run was on; others have the defaults

    def prompt(self, messages: Any, tools: Any = (), data_file: str = "") -> Prompt:
        """Returns the tokens of a conversation. data_file: its folder is the base of paths. Raises UserError."""
        return self.tokens(read_request(messages, tools), data_file)

    def tokens(self, request: Conversation, data_file: str = "") -> Prompt:
        """Returns the tokens of a parsed conversation; typed special tokens are text. Raises UserError."""
        if self.chat is None:
            return self.plain(render_prompt(None, request))
        hidden, references = self._control.hide(request), files_of(request)
        row_media = self._row_media(references) if references else None  # before the template, which may not know them
        text = render_prompt(self.chat, hidden.conversation)
        if row_media is None:
            return self._fitting(Prompt(self._control.ids(text, hidden.typed)))
        try:
            text, _, files = row_media.expand(text, (), references, data_file, self.chat.name)
        except BadRow as error:
            raise UserError(str(error)) from None
        ids = self._control.ids(text, hidden.typed)
        placed = row_media.place(np.array(ids, np.int32), np.zeros(len(ids), np.bool_), files)
        return self._fitting(Prompt(ids, placed))

    def plain(self, text: str) -> Prompt:
        """Returns the tokens of a text to continue, in which special tokens are tokens. Raises UserError."""
        return self._fitting(Prompt(self.tokenizer(text, verbose=False)["input_ids"]))

    def _fitting(self, prompt: Prompt) -> Prompt:
        if len(prompt.ids) >= self.context:
            raise UserError(
                f"the prompt has {len(prompt.ids):,} tokens, and the model takes {self.context:,}. Fix: shorten it"
            )
        return prompt

    @cached_property
    def context(self) -> int:
        """The model's limit of tokens, prompt and answer together."""
        config = self.model.config.get_text_config()
        rope = getattr(config, "rope_parameters", None) or {}
        stated = getattr(config, "max_position_embeddings", None) or _CONTEXT
        original = rope.get("original_max_position_embeddings") or stated
        return max(stated, int(original * (rope.get("factor") or 1)))

    @cached_property
    def _control(self) -> ControlTokens:
        return ControlTokens(self.tokenizer)

    def _row_media(self, references: Sequence[Reference]) -> RowMedia:
        """Returns the model's handling of these files. Raises UserError for a kind that it does not take."""
        from finetune.data.media.family_table import FAMILIES, kinds_taken

        model_type = self.model.config.model_type
        kinds: list[MediaKind] = list(dict.fromkeys(reference.kind for reference in references))
        refused: list[MediaKind] = [
            kind for kind in kinds if self.processor is None or kind not in kinds_taken(model_type)
        ]
        if refused:
            able = ", ".join(name for name in FAMILIES if refused[0] in kinds_taken(name))
            raise UserError(f"this model ({model_type}) takes no {_NAMES[refused[0]]}. Fix: use one of {able}")
        return self._handling(kinds)[0]

    def rules_of(self, kind: MediaKind) -> FileRules:
        """Returns the bounds of a kind of files: those of the run, or the defaults for what it was not trained on."""
        return next((rules for rules in self.rules if isinstance(rules, _RULES[kind])), None) or _RULES[kind]()

    @cached_property
    def _handlings(self) -> dict[tuple[MediaKind, ...], tuple[RowMedia, FeatureReader]]:
        return {}  # filled when kinds are first met: processors take time to load

    def _handling(self, kinds: Sequence[MediaKind]) -> tuple[RowMedia, FeatureReader]:
        """Returns what expands texts with files of these kinds, and what reads the files."""
        from finetune.data.media.expansion import RowMedia
        from finetune.data.media.families import media_family
        from finetune.data.media.feature_reader import feature_reader

        if (key := tuple(sorted(kinds))) not in self._handlings:
            assert self.processor is not None  # of a model that takes files
            rules = [self.rules_of(kind) for kind in key]
            first, *others = (media_family(self.processor, one, self.tokenizer) for one in rules)
            reader = feature_reader(first, rules[0].threads, also=[(one, False) for one in others])
            self._handlings[key] = RowMedia(first, rules[0], tuple(others)), reader
        return self._handlings[key]

    def file_inputs(self, files: Sequence[Medium], input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the inputs of transformers' forward for the files of texts (B, T), in order, whose kinds may differ.
        Raises UserError for a file that cannot be decoded."""
        kinds: list[MediaKind] = [*{kind_of(one): None for one in files}]
        return self._handling(kinds)[1].plain_inputs(files, input_ids) if kinds else {}

    def inputs(self, prompts: Sequence[Prompt]) -> dict[str, torch.Tensor]:
        """Returns inputs of transformers' `generate` for prompts as one batch (B, T), padded on the left. Raises
        UserError for a file that cannot be decoded."""
        width = max(len(prompt.ids) for prompt in prompts)
        ids = torch.zeros(len(prompts), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt.ids) :] = torch.tensor(prompt.ids, dtype=torch.int64)
            mask[row, width - len(prompt.ids) :] = 1
        inputs = {"input_ids": ids, "attention_mask": mask}
        if files := [one for prompt in prompts for one in prompt.media]:
            whole = unwrap_peft(self.model)
            for row in rows_of(whole.config.model_type).values():  # of several prompts
                run_clips_alone(whole, row)
            features = self.file_inputs(files, ids)
            # In the type of the weights, to which not every tower casts them itself (Qwen3-ASR's does not).
            inputs |= {name: v.to(self.model.dtype) if v.is_floating_point() else v for name, v in features.items()}
        return {name: value.to(self.model.device) for name, value in inputs.items()}

    @torch.no_grad()
    def answer(self, prompts: Sequence[Prompt], sampling: Sampling, shown: bool = False) -> list[Answer]:
        """Returns an answer to each prompt, as one batch, which ends with the model's context. shown: stream it to the
        terminal."""
        inputs = self.inputs(prompts)
        settings = generation_settings(self.model.generation_config, sampling)
        settings.max_new_tokens = min(sampling.max_new_tokens, self.context - inputs["input_ids"].shape[1])
        output = self.model.generate(
            **inputs,
            generation_config=settings,
            tokenizer=self.tokenizer,
            streamer=TerminalStreamer(self.tokenizer, sampling.stop) if shown else None,
        )
        ends: Any = settings.eos_token_id
        results = []
        for ids in output[:, inputs["input_ids"].shape[1] :].tolist():
            kept = until_end(ids, ends if isinstance(ends, list) else [ends])
            whole = self.tokenizer.decode(kept, skip_special_tokens=True)
            text = StopFilter(sampling.stop).feed(whole, is_last=True)
            results.append(Answer(text, "stop" if len(kept) < len(ids) or text != whole else "length"))
        return results


def load_answerer(run_dir: Path) -> Answerer:
    """Returns the model of a run directory or a model folder. Raises UserError if there is none."""
    model, tokenizer = load_result(run_dir)
    return answerer_of(run_dir, model, tokenizer)


def answerer_of(run_dir: Path, model: Any, tokenizer: Any) -> Answerer:
    """Returns a loaded result, which processes files as its run did, or as its folder says if there is no run."""
    folder = model_folder(run_dir)
    trusted = trusts_code(folder)
    processor = Model(name=str(folder), trust_remote_code=trusted)
    if (file := folder / "adapter_config.json").is_file():  # an adapter folder has no config of the model
        settings = json.loads(file.read_text(encoding="utf-8"))
        base, revision = settings["base_model_name_or_path"], settings.get("revision")
        processor = Model(name=base, revision=revision, trust_remote_code=trusted)
    recipe = run_dir / "recipe.yaml"
    rules = file_rules(load_recipe(recipe).data) if recipe.is_file() else ()
    return Answerer(model, tokenizer, chat_template(tokenizer), processor, rules)


def file_rules(data: Data) -> tuple[FileRules, ...]:
    """Returns the bounds of the files that a run was on."""
    return tuple(rules for rules in (data.image, data.audio, data.video) if rules is not None)


def chat_template(tokenizer: Any) -> Chat | None:
    template = own_template(tokenizer)
    return chat_of(tokenizer, template) if template else None


def read_request(messages: Any, tools: Any = ()) -> Conversation:
    """Returns a conversation that ends before the model's answer. Raises UserError otherwise."""
    try:
        conversation = context_of(read_messages(messages, "messages"), tools=read_tools(tools or None))
    except BadRow as error:
        raise UserError(str(error)) from None
    if conversation.messages[-1].role not in ("user", "tool"):
        raise UserError(
            f"the last message is from {conversation.messages[-1].role}, so there is nothing to answer. Fix: end with "
            "a message of the user or a tool"
        )
    return conversation


def files_of(request: Conversation) -> list[Reference]:
    """Returns a conversation's files, in order."""
    return [one for message in request.messages for one in message.media]


def render_prompt(chat: Chat | None, request: Conversation) -> str:
    """Returns a conversation as text, with the generation prompt and a placeholder for each file. Raises UserError."""
    if chat is None:
        first, *others = request.messages
        if others or request.tools or first.media:
            raise UserError(
                "this model has no chat template. Fix: give one text as the prompt, without system, history or files"
            )
        return first.content
    try:
        chat = chat.selected(request)
        chat = with_arguments(chat, request.template_arguments) if request.template_arguments else chat
        if request.tools and not chat.traits.writes_tools:
            raise UserError(
                "tools: the model's chat template does not show them. Fix: leave them out, or take a model whose "
                "template has them"
            )
        return chat.jinja.text(chat.traits.as_dicts(request), list(request.tools), prompt=True)
    except BadRow as error:
        raise UserError(str(error)) from None


# --- generate


@dataclass(frozen=True)
class Files:
    """Files that go with each prompt."""

    images: Sequence[Path] = ()
    audio: Sequence[Path] = ()
    videos: Sequence[Path] = ()

    def parts(self) -> list[Mapping[str, Any]]:
        """Returns them as parts of a message. Raises UserError."""
        return [*map(image_part, self.images), *map(audio_part, self.audio), *map(video_part, self.videos)]


def answer_prompts(
    run_dir: Path,
    prompts: Sequence[str],
    sampling: Sampling,
    system: str | None,
    files: Files,
    as_json: bool,
) -> None:
    """Print each prompt with its answer; without prompts, read them from standard input up to an empty line.

    files: placed before each prompt. Raises UserError.
    """
    sampling.check()
    parts = files.parts()
    answerer = load_answerer(run_dir)
    _seed(sampling)
    for prompt in prompts or takewhile(bool, typed_lines(not as_json)):
        if prompts and not as_json:
            print(f"> {prompt}")
        messages = as_messages(prompt, system, files=parts)
        (answer,) = answerer.answer([answerer.prompt(messages)], sampling, shown=not as_json)
        if as_json:
            print(json.dumps({"prompt": prompt, "answer": answer.text}, ensure_ascii=False), flush=True)


def answers(
    run_dir: Path,
    prompts: Sequence[str],
    sampling: Sampling,
    system: str | None = None,
    images: Sequence[Path] = (),
    audio: Sequence[Path] = (),
    videos: Sequence[Path] = (),
) -> list[str]:
    """Returns the answer to each prompt. images, audio, videos: placed before each. Raises UserError if there is no
    result."""
    sampling.check()
    parts = Files(images, audio, videos).parts()
    answerer = load_answerer(run_dir)
    _seed(sampling)
    conversations = [as_messages(prompt, system, files=parts) for prompt in prompts]
    return [answerer.answer([answerer.prompt(messages)], sampling)[0].text for messages in conversations]


def _seed(sampling: Sampling, row: int = 0) -> None:
    if sampling.seed is not None:
        torch.manual_seed(sampling.seed + row)


# --- from a file to a file


_RESULTS = ("answer", "finish_reason")


def answer_file(
    run_dir: Path, rows: Path, output: Path, sampling: Sampling, system: str | None, batch_size: int, console: Console
) -> int:
    """Answer every row of a JSONL file, and write the rows with `answer` and `finish_reason`; returns their number.

    Until it is complete the file is OUTPUT.partial, and the same command continues it: batches are written whole,
    and a seed draws the same as without a stop. Raises UserError, and RunFailure if the disk is full.
    """
    sampling.check()
    if output.exists():
        raise UserError(f"{output} exists already. Fix: remove it, or give another --output")
    conversations = _read_rows(rows, system)
    answerer = load_answerer(run_dir)
    prompts: list[Prompt] = []
    for messages, row in conversations:
        try:
            request = with_files_of(read_request(messages, row.get("tools")), row)
            prompts.append(answerer.tokens(request, str(rows)))
        except (BadRow, UserError) as error:
            raise UserError(f"{rows}, row {len(prompts) + 1}: {error}") from None
    unfinished = output.with_name(output.name + ".partial")
    about = {"model": str(run_dir), "rows": sha256_file(rows), "system": system, "batch_size": batch_size}
    try:
        done = _begin(unfinished, {**about, "sampling": {**asdict(sampling), "stop": list(sampling.stop)}}, batch_size)
        with unfinished.open("a", encoding="utf-8") as file, rows.open(encoding="utf-8") as source:
            lines = islice((line for line in source if line.strip()), done, None)
            starts = range(done, len(prompts), batch_size)
            for start in track(starts, "answering", console=console, disable=not console.is_terminal):
                batch = prompts[start : start + batch_size]
                _seed(sampling, start)
                for answer in answerer.answer(batch, sampling):
                    row = {**json.loads(next(lines)), "answer": answer.text, "finish_reason": answer.finish_reason}
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
                file.flush()
        unfinished.replace(output)
        _settings_file(unfinished).unlink()
    except OSError as error:
        raise RunFailure(
            f"{output} could not be written: {error}. The answers so far are in {unfinished}. Fix: free space, and run "
            "the same command again to continue"
        ) from None
    return len(prompts)


def _read_rows(path: Path, system: str | None) -> list[tuple[Any, dict[str, Any]]]:
    """Returns (messages, row) of each row: its `prompt`, or `messages` up to the last answer. Raises UserError."""
    if not path.is_file():
        raise UserError(f"{path}: no such file. Fix: check the path")
    conversations = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):  # a text may have U+2028
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"{path}:{number}: not JSON: {error}. Fix: write one JSON object a line") from None
        if not isinstance(row, dict) or not {"prompt", "messages"} & row.keys():
            raise UserError(f'{path}:{number}: no question. Fix: write {{"prompt": ...}} or {{"messages": [...]}}')
        if taken := [key for key in _RESULTS if key in row]:
            raise UserError(
                f"{path}:{number}: has `{taken[0]}` already, which the answer would replace. Fix: rename it"
            )
        messages = row["messages"] if "messages" in row else [{"role": "user", "content": row["prompt"]}]
        if isinstance(messages, list) and messages and dict(messages[-1]).get("role") == "assistant":
            messages = messages[:-1]
        has_system = isinstance(messages, list) and messages and dict(messages[0]).get("role") == "system"
        if system and isinstance(messages, list) and not has_system:
            messages = [{"role": "system", "content": system}, *messages]
        conversations.append((messages, row))
    if not conversations:
        raise UserError(f"{path}: has no rows. Fix: give a file with rows")
    return conversations


def _settings_file(unfinished: Path) -> Path:
    return unfinished.with_name(unfinished.name + ".json")


def _begin(unfinished: Path, about: dict[str, Any], batch_size: int) -> int:
    """Returns the number of finished rows; cuts off a partial batch. Raises UserError for another command's file."""
    settings = _settings_file(unfinished)
    if not unfinished.exists():
        write_atomically(settings, json.dumps(about, indent=1) + "\n")
        return 0
    before = json.loads(settings.read_text(encoding="utf-8")) if settings.is_file() else {}
    if other := sorted(key for key in about if about[key] != before.get(key)):
        raise UserError(
            f"{unfinished} was begun with other {', '.join(other)}. Fix: remove it to begin again, or give another "
            "--output"
        )
    with unfinished.open("r+b") as file:
        ends, size = [0], 0
        for line in file:
            size += len(line)
            if line.endswith(b"\n"):
                ends.append(size)
        done = (len(ends) - 1) // batch_size * batch_size
        file.truncate(ends[done])
        os.fsync(file.fileno())
    return done


# --- chat


def chat_with(run_dir: Path, sampling: Sampling, system: str | None) -> None:
    """Chat with the model of a run or a folder. Raises UserError."""
    sampling.check()
    answerer = load_answerer(run_dir)
    if answerer.chat is None:
        raise UserError(
            f"{run_dir}: no chat template, so there are no turns. Fix: use `finetune generate`, which continues a text"
        )
    _seed(sampling)
    converse(lambda messages: answerer.answer([answerer.prompt(messages)], sampling, shown=True)[0].text, system)
