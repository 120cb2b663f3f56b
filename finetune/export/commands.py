"""`merge`, `export` and `verify`, and how what a run has trained is loaded."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
)

from finetune.errors import RunFailure, UserError
from finetune.export.adapter_files import FittingAdapter, read_lora
from finetune.export.scoring import is_scoring, read_labels
from finetune.export.trained import check_model_folder
from finetune.models.added_tokens import grow_to
from finetune.models.base_checkpoint import base_checkpoint
from finetune.models.base_config import NO_FOLDER, Parsing, is_missing_folder
from finetune.models.config import model_config
from finetune.models.damage import check_settings, check_weights, mismatched_sizes, read_object, why_no_weights
from finetune.models.remote_code import load_auto, trusts_code
from finetune.models.score_model import labelled
from finetune.models.text_part import is_multimodal
from finetune.models.tokenizer import read_tokenizer
from finetune.recipe.schema import Model
from finetune.utils import print_line


def model_folder(run_dir: Path) -> Path:
    """Returns the result of a run directory, or the folder itself. Raises UserError where there is none."""
    folder = run_dir / "model" if (run_dir / "model").is_dir() else run_dir
    if not any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise UserError(
            f"{run_dir}: no result here (no model/config.json or model/adapter_config.json); has the run finished?"
        )
    return check_model_folder(folder)


def load_result(run_dir: Path) -> tuple[Any, Any]:
    """Returns model and tokenizer of a run directory or a model folder. Raises UserError where there is none."""
    folder = model_folder(run_dir)
    if is_scoring(folder):
        raise UserError(f"{run_dir}: a model of scores generates nothing: `finetune score` is what it does")
    tokenizer = read_tokenizer(folder)
    model = load_trained(folder)
    if (folder / "generation_config.json").is_file():  # an adapter's model has its base's, which ends elsewhere
        model.generation_config = GenerationConfig.from_pretrained(folder)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    return model.to(device).eval(), tokenizer


def load_trained(folder: Path, base: str | None = None, adapter: str = "default", device_map: str | None = None) -> Any:
    """Returns the model of a result: an adapter through peft, under a name, on its base. Raises UserError.

    base: where that is, if not where the adapter says; device_map: of `from_pretrained`. transformers 5.23 loads
    adapters by itself as well, but not the magnitudes of DoRA, which it initialises again.
    """
    if not (folder / "adapter_config.json").is_file():
        with _LoadingModel(f"{folder} cannot be loaded", folder):
            return load_auto(class_of_result(folder), folder, dtype="auto", device_map=device_map)
    from peft import PeftModel

    with warnings.catch_warnings():
        # For patterns that peft 0.21 itself adds for stacked experts, and that do match: it looks for modules only.
        warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys did not match", RuntimeWarning)
        on = load_base(folder, base, device_map)
        read_lora(folder)
        with FittingAdapter(folder):
            return PeftModel.from_pretrained(on, str(folder), adapter)


def auto_class(name: str, trusted: bool | None = None) -> Any:
    """Returns transformers' auto class of a model that generates: another one if it is multimodal. trusted: see
    `load_auto`."""
    with Parsing(f"{name}: no model config can be read", name):
        config = load_auto(AutoConfig, name, trusted)
    return AutoModelForMultimodalLM if is_multimodal(config) else AutoModelForCausalLM


def class_of_result(folder: Path) -> Any:
    """Returns transformers' auto class of a full model, which may have a head of scores."""
    return AutoModelForSequenceClassification if is_scoring(folder) else auto_class(str(folder))


def merge_adapter(run_dir: Path, out: Path, base: str | None = None) -> Path:
    """Write base + adapter of a run's result as one plain model folder, complete or absent; returns `out`.

    The base is read unquantised also for qlora: merging into 4-bit weights would round the adapter away. The sum is
    computed in fp32 and saved in the base's type. Raises UserError.
    """
    from finetune.export.hf_folder import check_absent, export_folder
    from finetune.export.trained import find_trained

    if not (model_folder(run_dir) / "adapter_config.json").is_file():
        raise UserError(f"{run_dir}: no adapter here (no model/adapter_config.json); a full run needs no merging")
    check_absent(out)
    trained = find_trained(run_dir)
    read_tokenizer(trained.settings)
    export_folder(trained, out, base=base, check=lambda folder: gate(trained, folder, base, Console(stderr=True)))
    return out


def merge_several(run_dirs: Sequence[Path], how: Any, out: Path, base: str | None, console: Console) -> None:
    """Write what several runs make together as one plain model folder. how: a `combine.Merge`. Raises UserError."""
    from finetune.export.combine import merge_runs
    from finetune.export.trained import find_trained

    for run_dir in run_dirs:
        if not run_dir.is_dir():
            raise UserError(f"{run_dir}: no such run directory")
    merge_runs([find_trained(run_dir) for run_dir in run_dirs], how, out, base, console.print)


def gate(trained: Any, export: Path, base: str | None, console: Console, rows: int | None = None) -> Any:
    """Compare an export with its run; returns the figures, None if no run is around it.

    Raises RunFailure if the export is not what was trained; verify.json says why as well.
    """
    from finetune.export.figures import show_figures
    from finetune.export.verify import ROWS, verify_export

    if trained.recipe is None:
        print_line(console, "not compared with what was trained: no run is around it", highlight=False)
        return None
    figures = verify_export(export, trained, rows or ROWS, base)
    show_figures(console, figures)
    if not figures.passed:
        problems = "\n  ".join(figures.problems)
        raise RunFailure(f"{export} does not match the trained model:\n  {problems}")
    return figures


@dataclass(frozen=True)
class ExportOptions:
    """What `export` was asked for."""

    to: str = "hf"
    step: str | None = None
    out: Path | None = None
    dtype: str | None = None
    base: str | None = None
    verify: bool = True
    average: int | None = None  # checkpoints
    quantised: str | None = None  # int8 or fp8
    gpus: int | None = None  # of the server, for its command; None: those of this machine


_DTYPES = ("float32", "bfloat16", "float16")
FORMATS = ("hf", "vllm", "gguf", "ollama")
_FOLDERS = ("hf", "vllm")  # of transformers' layout


def export_run(run_dir: Path, options: ExportOptions, console: Console) -> dict[str, Any]:
    """Export a result or a checkpoint; returns where it is. Raises UserError."""
    from finetune.export.hf_folder import export_folder, export_gguf
    from finetune.export.trained import find_trained

    _check_options(options)
    if not run_dir.is_dir():
        raise UserError(f"{run_dir}: no such run directory")
    trained = find_trained(run_dir, options.step, options.average)
    if trained.recipe is None and not trained.is_adapter:
        raise UserError(
            f"{run_dir}: a plain model folder that no run is around: there is nothing to merge; llama.cpp's "
            "convert_hf_to_gguf.py makes a GGUF file of it"
        )
    read_tokenizer(trained.settings)  # before hours of writing
    suffix = f"-{options.quantised}" if options.quantised else ""
    suffix += f"-step-{trained.step}" if trained.is_checkpoint else ""
    suffix += f"-mean-of-{options.average}" if options.average else ""
    out = options.out or run_dir / f"export-{options.to}{suffix}"
    what = f"step {trained.step}" if trained.is_checkpoint else "the result"
    print_line(console, f"exporting {what} of {escape(str(run_dir))}", highlight=False)
    compared: dict[str, Any] = {}

    def check(folder: Path) -> None:
        if options.verify and (figures := gate(trained, folder, options.base, console)) is not None:
            compared.update(kl_mean=figures.kl_mean, top1=figures.top1, tensors=figures.tensors)

    if options.to in _FOLDERS:
        dtype = getattr(torch, options.dtype) if options.dtype else None
        export_folder(trained, out, dtype, options.base, console.print, quantised=options.quantised, check=check)
    else:
        kind, is_ollama = options.dtype or "bf16", options.to == "ollama"
        export_gguf(trained, out, kind, options.base, console.print, is_ollama, check)
    commands = _commands(trained, out, options.gpus) if options.to in _FOLDERS else {}
    for name, command in commands.items():
        console.print(f"{name}: {command}", highlight=False, markup=False, soft_wrap=True)
    more = {"commands": commands} if commands else {}
    return {"out": str(out), "to": options.to, "step": trained.step, **compared, **more}


def _check_options(options: ExportOptions) -> None:
    """Raises UserError for options that do not go together."""
    from finetune.export.gguf_file import TYPES
    from finetune.export.quantised import check_kind

    if options.to not in FORMATS:
        raise UserError(f"--to {options.to}: expected one of {', '.join(FORMATS)}")
    types = _DTYPES if options.to in _FOLDERS else TYPES
    if options.dtype is not None and options.dtype not in types:
        raise UserError(f"--dtype {options.dtype}: expected one of {', '.join(types)}")
    if options.quantised is not None:
        if options.to not in _FOLDERS:
            raise UserError(f"--quantize {options.quantised}: goes with --to hf or vllm; other formats have --dtype")
        check_kind(options.quantised)
    if options.gpus is not None and options.to not in _FOLDERS:
        raise UserError(f"--gpus is of the command for vLLM and SGLang, which --to {options.to} has not")


def _commands(trained: Any, out: Path, gpus: int | None) -> dict[str, str]:
    """Returns how servers are started with a folder; none for a model of scores."""
    from finetune.export.servers import serve_commands

    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    config = config.get("text_config") or config
    if is_scoring(out) or "num_attention_heads" not in config:
        return {}
    adapter = trained.folder if trained.is_adapter and not trained.is_checkpoint else None
    return dict(serve_commands(out, config, gpus or torch.cuda.device_count() or 1, adapter))


def verify_run(export: Path, run_dir: Path, step: str | None, base: str | None, rows: int, console: Console) -> Any:
    """Compare an export with a run; returns the figures. Raises UserError, and RunFailure as `gate`."""
    from finetune.export.verify import find_against

    for folder in (export, run_dir):
        if not folder.exists():
            raise UserError(f"{folder}: no such folder")
    trained = find_against(run_dir, export, step)
    if trained.recipe is None:
        raise UserError(f"{run_dir}: no recipe.yaml here, so there are no rows to compare on: give a run directory")
    return gate(trained, export, base, console, rows)


def load_base(adapter: Path, elsewhere: str | None = None, device_map: str | None = None) -> Any:
    """Returns the base of an adapter, with the head that the adapter is for. Raises UserError.

    elsewhere: where it is, if not where the adapter says.
    """
    settings = read_object(adapter / "adapter_config.json")
    name = elsewhere or settings["base_model_name_or_path"]
    size, trusted = len(read_tokenizer(adapter)), trusts_code(adapter)
    advice = (
        "is it where it was when this was trained? `base_model_name_or_path` in adapter_config.json says where it is"
    )
    with _LoadingModel(f"the adapter's base {name!r} cannot be loaded", Path(name).expanduser(), advice):
        if settings.get("task_type") != "SEQ_CLS":
            base = load_auto(auto_class(name, trusted), name, trusted, dtype="auto", device_map=device_map)
            return grow_to(base, size)
        about = Model(name=name, trust_remote_code=trusted)
        config = labelled(model_config(about), read_labels(adapter))
        config.get_text_config().pad_token_id = read_tokenizer(adapter).pad_token_id
        part = base_checkpoint(about)
        base = load_auto(
            *(AutoModelForSequenceClassification, name, trusted),
            config=config,
            dtype="auto",
            key_mapping=part and part.renames,
        )
        return grow_to(base, size)


class _LoadingModel(contextlib.AbstractContextManager[None]):
    """Turns what transformers raises for a model that is gone or damaged into a UserError.

    folder: of the model, whose files are checked first if it is here; a hub id is no folder.
    """

    def __init__(self, what: str, folder: Path, advice: str = ""):
        self._what, self._folder, self._advice = what, folder, f"; {advice}" if advice else ""
        check_settings(folder)
        check_weights(folder)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, UserError) and is_missing_folder(str(self._folder)):
            raise UserError(f"{self._what}: {NO_FOLDER}{self._advice}") from error
        # A name that is neither a folder's nor the hub's is a ValueError.
        if isinstance(error, OSError | ValueError | SafetensorError):
            raise UserError(f"{self._what}: {why_no_weights(error)}{self._advice}") from error
        if isinstance(error, RuntimeError) and mismatched_sizes(error):
            raise UserError(f"{self._what}: its weights have other shapes than its config.json says") from error
