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
from finetune.release.export.streamed import base_model
from finetune.release.export.verify import ROWS, find_against, verify_export
from finetune.release.export.verify_answers import check_rows
from finetune.utils import divisors, print_line

# What vLLM 0.33.0 reads of an adapter. vllm/lora/peft_helper.py: it refuses DoRA, biases and inits that change the base
# (lines 58 to 117), ranks and scales by pattern are peft's (137 to 173), the largest rank counts (216);
# vllm/lora/utils.py:233: other tensors than A, B and heads are refused.
_UNREAD = {"use_dora": "DoRA", "trainable_token_indices": "trained rows of added tokens"}
_PLAIN_INITS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")  # peft_helper.py:96
_HEADS = ("score", "classifier")  # peft_helper.py:63
# Of experts it needs both tensors of a layer: model_manager.py:970 asserts so.
_EXPERTS = {"gate_up_proj", "down_proj"}
# Models whose adapters on experts it reads as peft writes them: `is_3d_moe_weight` of gpt_oss.py:1372,
# qwen3_vl_moe.py:233, qwen3_5.py:707, interns1_pro.py:547 and qwen3_omni_moe_thinker.py:1621 in
# vllm/model_executor/models. Others need `--enable-mixed-moe-lora-format` (model_manager.py:1305).
_STACKED = ("gpt_oss", "qwen3_vl_moe", "qwen3_5_moe", "interns1_pro", "qwen3_omni_moe")
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # of vLLM's `--max-lora-rank` (vllm/config/lora.py:25)


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
    if export.is_served:
        exported["commands"] = commands = _commands(trained, out, options)
        for name, command in commands.items():
            console.print(f"{name}: {command}", highlight=False, markup=False, soft_wrap=True)
    return exported


def _commands(trained: Trained, out: Path, options: ExportOptions) -> dict[str, str]:
    """Returns the commands of servers for an exported folder; {} for models without attention."""
    config = read_object(out / "config.json")
    text = config.get("text_config") or config
    adapter = trained.folder if trained.is_adapter and not trained.is_checkpoint else None
    if is_scoring(out):
        named = Path(base_model(trained, options.base).name or "")
        return score_commands(out, config, adapter, named if (named / "config.json").is_file() else None)
    if "num_attention_heads" not in text:
        return {}
    return serve_commands(out, text, options.gpus or torch.cuda.device_count() or 1, adapter)


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


def unread_by_vllm(settings: dict[str, Any], has_head: bool = False) -> str | None:
    """Returns why vLLM does not serve an adapter next to its base; None if it does. settings: the adapter's config;
    has_head: whether the base has a head of scores, without which vLLM does not load it as a model of scores."""
    reasons = [reason for key, reason in _UNREAD.items() if settings.get(key)]
    if saved := settings.get("modules_to_save"):
        if {*saved} - {*_HEADS}:
            reasons.append("modules trained in full")
        elif not has_head:
            reasons.append("a head of scores next to a base that has none")
    if (experts := settings.get("target_parameters")) and {one.rpartition(".")[2] for one in experts} != _EXPERTS:
        reasons.append("adapters on other tensors than both of the experts")
    if isinstance(init := settings.get("init_lora_weights", True), str) and init.lower() not in _PLAIN_INITS:
        reasons.append(f"adapters that begin as {init}, which changes the base")
    if settings.get("bias", "none") != "none":
        reasons.append("trained biases")
    if _largest_rank(settings) > _RANKS[-1]:
        reasons.append(f"a rank above {_RANKS[-1]}")
    return reasons[0] if reasons else None


def _largest_rank(settings: dict[str, Any]) -> int:
    return max([settings["r"], *(settings.get("rank_pattern") or {}).values()])


def tensor_parallel_size(heads: int, kv_heads: int, gpus: int) -> int:
    """Returns the number of GPUs that vLLM can split attention over: heads are divided, heads of keys and values are
    divided or repeated (vllm/model_executor/models/llama.py).

    >>> [tensor_parallel_size(32, 8, gpus) for gpus in (1, 3, 8, 16)], tensor_parallel_size(12, 8, 6)
    ([1, 2, 8, 16], 4)
    """
    return [n for n in divisors(heads) if n <= gpus and (kv_heads % n == 0 or n % kv_heads == 0)][-1]


def score_commands(export: Path, config: dict[str, Any], adapter: Path | None, base: Path | None) -> dict[str, str]:
    """Returns the commands of a server for a model of scores. config: of the export; base: the folder of its base."""
    commands = {"vLLM": f"vllm serve {shlex.quote(str(export))} --runner pooling"}
    if adapter is not None:
        classes = read_object(base / "config.json").get("architectures") if base is not None else None
        has_head = any(name.endswith("ForSequenceClassification") for name in classes or ())
        labels = f" --runner pooling --max-lora-cls-labels {len(config.get('id2label') or (0, 1))}"
        commands["vLLM, the adapter next to its base"] = _adapter_command(adapter, config, labels, has_head)
    return commands


def _adapter_command(adapter: Path, config: dict[str, Any], more: str, has_head: bool = False) -> str:
    """Returns vLLM's command for an adapter next to its base, or why there is none. config: of the base's text part;
    more: further arguments."""
    settings = read_object(adapter / "adapter_config.json")
    if (reason := unread_by_vllm(settings, has_head)) is not None:
        return f"not: it does not read {reason}"
    rank = next(rank for rank in _RANKS if rank >= _largest_rank(settings))
    name, module = adapter.resolve().parent.name, ""
    if settings.get("target_parameters") and not str(config.get("model_type")).startswith(_STACKED):
        module = json.dumps({"name": name, "path": str(adapter), "is_3d_lora_weight": True})
        more = f" --enable-mixed-moe-lora-format{more}"
    how = f"--enable-lora --max-lora-rank {rank} --lora-modules {shlex.quote(module or f'{name}={adapter}')}"
    return f"vllm serve {shlex.quote(settings['base_model_name_or_path'])} {how}{more}"


def serve_commands(export: Path, config: dict[str, Any], gpus: int, adapter: Path | None) -> dict[str, str]:
    """Returns the commands of servers for a folder of merged weights. config: of its text part; adapter: the folder of
    the adapter that was merged, if there is one."""
    heads = config["num_attention_heads"]
    size = tensor_parallel_size(heads, config.get("num_key_value_heads") or heads, gpus)
    folder, split = shlex.quote(str(export)), f" --tensor-parallel-size {size}" if size > 1 else ""
    commands = {"vLLM": f"vllm serve {folder}{split}"}
    if adapter is not None:
        commands["vLLM, the adapter next to its base"] = _adapter_command(adapter, config, split)
    return commands | {
        "SGLang": f"python -m sglang.launch_server --model-path {folder}{f' --tp {size}' if size > 1 else ''}",
        "MLX": f"mlx_lm.convert --hf-path {folder}",
        "llama.cpp": f"python convert_hf_to_gguf.py {folder}  # or: finetune export --to gguf",
    }
