"""`merge`, `export` and `verify`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from finetune.errors import RunFailure, UserError
from finetune.export.combine import Merge, merge_runs
from finetune.export.figures import Figures, show_figures
from finetune.export.formats import EXPORTS, ExportOptions, check_options
from finetune.export.hf_folder import check_absent
from finetune.export.loading import model_folder
from finetune.export.scoring import is_scoring
from finetune.export.servers import serve_commands
from finetune.export.trained import Trained, find_trained
from finetune.export.verify import ROWS, find_against, verify_export
from finetune.models.tokenizer import read_tokenizer
from finetune.utils import print_line


def merge_adapter(run_dir: Path, out: Path, base: str | None = None) -> Path:
    """Write base + adapter of a run's result as one plain model folder, complete or absent; returns `out`.

    The base is read unquantised also for qlora: merging into 4-bit weights would round the adapter away. The sum is
    computed in fp32 and saved in the base's type. Raises UserError.
    """
    if not (model_folder(run_dir) / "adapter_config.json").is_file():
        raise UserError(f"{run_dir}: no adapter here (no model/adapter_config.json); a full run needs no merging")
    check_absent(out)
    trained = find_trained(run_dir)
    read_tokenizer(trained.settings)
    EXPORTS["hf"].write(
        *(trained, out, ExportOptions(base=base), lambda text: None),
        lambda folder: gate(trained, folder, base, Console(stderr=True)),
    )
    return out


def merge_several(run_dirs: Sequence[Path], how: Merge, out: Path, base: str | None, console: Console) -> None:
    """Write what several runs make together as one plain model folder. Raises UserError."""
    for run_dir in run_dirs:
        if not run_dir.is_dir():
            raise UserError(f"{run_dir}: no such run directory")
    merge_runs([find_trained(run_dir) for run_dir in run_dirs], how, out, base, console.print)


def gate(trained: Trained, export: Path, base: str | None, console: Console, rows: int = ROWS) -> Figures | None:
    """Compare an export with its run; returns the figures, None if no run is around it.

    Raises RunFailure if the export is not what was trained; verify.json says why as well.
    """
    if trained.recipe is None:
        print_line(console, "not compared with what was trained: no run is around it", highlight=False)
        return None
    figures = verify_export(export, trained, rows, base)
    show_figures(console, figures)
    if not figures.passed:
        problems = "\n  ".join(figures.problems)
        raise RunFailure(f"{export} does not match the trained model:\n  {problems}")
    return figures


def export_run(run_dir: Path, options: ExportOptions, console: Console) -> dict[str, Any]:
    """Export a result or a checkpoint; returns where it is. Raises UserError."""
    export = check_options(options)
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
    exported: dict[str, Any] = {"out": str(out), "to": options.to, "step": trained.step}

    def check(folder: Path) -> None:
        if options.verify and (figures := gate(trained, folder, options.base, console)) is not None:
            exported.update(kl_mean=figures.kl_mean, top1=figures.top1, tensors=figures.tensors)

    export.write(trained, out, options, console.print, check)
    if export.is_served and (commands := _commands(trained, out, options.gpus)):
        for name, command in commands.items():
            console.print(f"{name}: {command}", highlight=False, markup=False, soft_wrap=True)
        exported["commands"] = commands
    return exported


def _commands(trained: Trained, out: Path, gpus: int | None) -> dict[str, str]:
    """Returns how servers are started with a folder; none for a model of scores."""
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    config = config.get("text_config") or config
    if is_scoring(out) or "num_attention_heads" not in config:
        return {}
    adapter = trained.folder if trained.is_adapter and not trained.is_checkpoint else None
    return dict(serve_commands(out, config, gpus or torch.cuda.device_count() or 1, adapter))


def verify_run(
    export: Path, run_dir: Path, step: str | None, base: str | None, rows: int, console: Console
) -> Figures | None:
    """Compare an export with a run; returns the figures. Raises UserError, and RunFailure as `gate`."""
    for folder in (export, run_dir):
        if not folder.exists():
            raise UserError(f"{folder}: no such folder")
    trained = find_against(run_dir, export, step)
    if trained.recipe is None:
        raise UserError(f"{run_dir}: no recipe.yaml here, so there are no rows to compare on: give a run directory")
    return gate(trained, export, base, console, rows)
