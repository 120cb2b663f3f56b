"""`merge`, `export` and `verify`, and the commands of servers that `export` prints: none of them is run here."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from finetune.checkpoints.trained import Trained, find_trained, is_scoring
from finetune.errors import RunFailure, UserError
from finetune.models.damage import read_object
from finetune.models.tokenizer import read_tokenizer
from finetune.release.export.combine import Merge, merge_runs
from finetune.release.export.figures import Figures, show_figures
from finetune.release.export.formats import EXPORTS, ExportOptions, check_options
from finetune.release.export.hf_folder import check_absent
from finetune.release.export.loading import model_folder
from finetune.release.export.verify import ROWS, find_against, verify_export
from finetune.release.export.verify_answers import check_rows
from finetune.utils import divisors, print_line

# Settings of an adapter that vLLM refuses or does not read (vllm/lora/peft_helper.py).
_UNREAD = {
    "use_dora": "DoRA",
    "modules_to_save": "modules trained in full",
    "target_parameters": "adapters on experts' tensors",
    "trainable_token_indices": "trained rows of added tokens",
    "rank_pattern": "ranks that differ by module",
    "alpha_pattern": "scales that differ by module",
}
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # of vLLM's `--max-lora-rank`


def merge_adapter(run_dir: Path, out: Path, base: str | None = None) -> Path:
    """Write base + adapter of a run's result as one plain model folder, complete or absent; returns `out`.

    The base is read unquantized also for qlora: merging into 4-bit weights would round the adapter away. The sum is
    computed in fp32 and saved in the base's type. Raises UserError.
    """
    if not (model_folder(run_dir) / "adapter_config.json").is_file():
        raise UserError(
            f"{run_dir}: no adapter here (no model/adapter_config.json). Fix: give the run of an adapter; a full run "
            "needs no merging"
        )
    check_absent(out)
    trained = find_trained(run_dir)
    read_tokenizer(trained.settings)
    check_rows(trained)
    console = Console(stderr=True)
    EXPORTS["hf"].write(
        *(trained, out, ExportOptions(base=base), lambda text: print_line(console, text, highlight=False)),
        lambda folder: gate(trained, folder, base, console),
    )
    return out


def merge_several(run_dirs: Sequence[Path], how: Merge, out: Path, base: str | None, console: Console) -> None:
    """Write the combination of several runs as one plain model folder. Raises UserError."""
    for run_dir in run_dirs:
        if not run_dir.is_dir():
            raise UserError(f"{run_dir}: no such run directory. Fix: check the path")
    merge_runs([find_trained(run_dir) for run_dir in run_dirs], how, out, base, console.print)


def gate(trained: Trained, export: Path, base: str | None, console: Console, rows: int = ROWS) -> Figures | None:
    """Compare an export with its run; returns the figures, None for a folder without its run.

    Raises RunFailure if the export does not match the trained model; verify.json has the reasons as well.
    """
    if trained.recipe is None:
        print_line(console, "not compared with the trained model: this folder has no run", highlight=False)
        return None
    figures = verify_export(export, trained, rows, base)
    show_figures(console, figures)
    if figures.problems:
        problems = "\n  ".join(figures.problems)
        fix = "Fix: export the run again, with the base and the tokenizer that it was trained with"
        raise RunFailure(f"{export} does not match the trained model:\n  {problems}\n{fix}")
    return figures


def export_run(run_dir: Path, options: ExportOptions, console: Console) -> dict[str, Any]:
    """Export a result or a checkpoint; returns its place and figures. Raises UserError."""
    export = check_options(options)
    if not run_dir.is_dir():
        raise UserError(f"{run_dir}: no such run directory. Fix: check the path")
    trained = find_trained(run_dir, options.step, options.average)
    if trained.recipe is None and not trained.is_adapter:
        raise UserError(
            f"{run_dir}: a plain model folder without a run has nothing to merge. Fix: use it as it is; llama.cpp's "
            "`convert_hf_to_gguf.py` makes a GGUF file of it"
        )
    read_tokenizer(trained.settings)  # before hours of writing
    if options.verify:
        check_rows(trained)
    suffix = f"-{options.quantized}" if options.quantized else ""
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
    if export.is_served and not is_scoring(out):
        config = read_object(out / "config.json")
        config = config.get("text_config") or config
        if "num_attention_heads" in config:
            adapter = trained.folder if trained.is_adapter and not trained.is_checkpoint else None
            commands = serve_commands(out, config, options.gpus or torch.cuda.device_count() or 1, adapter)
            for name, command in commands.items():
                console.print(f"{name}: {command}", highlight=False, markup=False, soft_wrap=True)
            exported["commands"] = commands
    return exported


def verify_run(
    export: Path, run_dir: Path, step: str | None, base: str | None, rows: int, console: Console
) -> Figures | None:
    """Compare an export with a run; returns the figures. Raises UserError, and RunFailure as `gate`."""
    for folder in (export, run_dir):
        if not folder.exists():
            raise UserError(f"{folder}: no such folder. Fix: check the path")
    trained = find_against(run_dir, export, step)
    if trained.recipe is None:
        raise UserError(
            f"{run_dir}: no recipe.yaml here, so there are no rows to compare on. Fix: give a run directory"
        )
    return gate(trained, export, base, console, rows)


# --- servers


def unread_by_vllm(settings: dict[str, Any]) -> str | None:
    """Returns why vLLM does not serve an adapter next to its base; None if it does. settings: the adapter's config."""
    reasons = [reason for key, reason in _UNREAD.items() if settings.get(key)]
    if settings.get("bias", "none") != "none":
        reasons.append("trained biases")
    if settings["r"] > _RANKS[-1]:
        reasons.append(f"a rank above {_RANKS[-1]}")
    return reasons[0] if reasons else None


def tensor_parallel_size(heads: int, kv_heads: int, gpus: int) -> int:
    """Returns the number of GPUs that vLLM can split attention over: heads are divided, heads of keys and values are
    divided or repeated (vllm/model_executor/models/llama.py).

    >>> [tensor_parallel_size(32, 8, gpus) for gpus in (1, 3, 8, 16)], tensor_parallel_size(12, 8, 6)
    ([1, 2, 8, 16], 4)
    """
    return [n for n in divisors(heads) if n <= gpus and (kv_heads % n == 0 or n % kv_heads == 0)][-1]


def serve_commands(export: Path, config: dict[str, Any], gpus: int, adapter: Path | None) -> dict[str, str]:
    """Returns the commands of servers for a folder of merged weights. config: of its text part; adapter: the folder of
    the adapter that was merged, if there is one."""
    heads = config["num_attention_heads"]
    size = tensor_parallel_size(heads, config.get("num_key_value_heads") or heads, gpus)
    folder, split = shlex.quote(str(export)), f" --tensor-parallel-size {size}" if size > 1 else ""
    commands = {"vLLM": f"vllm serve {folder}{split}"}
    if adapter is not None:
        settings = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
        command = f"not: it does not read {unread_by_vllm(settings)}"
        if unread_by_vllm(settings) is None:
            rank = next(rank for rank in _RANKS if rank >= settings["r"])
            modules = shlex.quote(f"{adapter.resolve().parent.name}={adapter}")
            how = f"--enable-lora --max-lora-rank {rank} --lora-modules {modules}"
            command = f"vllm serve {shlex.quote(settings['base_model_name_or_path'])} {how}{split}"
        commands["vLLM, the adapter next to its base"] = command
    return commands | {
        "SGLang": f"python -m sglang.launch_server --model-path {folder}{f' --tp {size}' if size > 1 else ''}",
        "MLX": f"mlx_lm.convert --hf-path {folder}",
        "llama.cpp": f"python convert_hf_to_gguf.py {folder}  # or: finetune export --to gguf",
    }
