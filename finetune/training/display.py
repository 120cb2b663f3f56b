"""Console output: the plan before step 1, each evaluation, and the totals at the end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from finetune.data.token_text import visible
from finetune.recipe import Recipe
from finetune.recipe.objective_settings import ObjectiveSettings
from finetune.recipe.schema import Data
from finetune.startup import is_verbose
from finetune.tracking.metrics import Totals
from finetune.training.evaluation import Generation
from finetune.training.run_plan import Plan
from finetune.utils import print_line

_PERCENTAGES = ("exact_match", "error_rate", "accuracy", "acceptance", "_share")


def show_plan(console: Console, recipe: Recipe, plan: Plan) -> None:
    """Prints the plan that follows from recipe, data and launch."""
    lines = {
        "runs on": f"{plan.where}: {plan.world_size} x {plan.device}",
        "model": f"{plan.parameters:,} parameters, {plan.trainable_parameters:,} trained ({recipe.mode})",
    }
    if plan.parts:
        sizes = {
            name: (f"{total:,}", f"{of:,} trained" if of else "frozen") for name, (total, of) in plan.parts.items()
        }
        lines["parts"] = " · ".join(f"{name} {total} ({trained})" for name, (total, trained) in sizes.items())
    lines |= {"precision": plan.precision, "attention": plan.attention, "cross entropy": plan.cross_entropy}
    lines |= {} if plan.kernels.startswith("plain (no GPU") else {"kernels": plan.kernels}
    lines |= {} if recipe.train.graphs == "off" else {"graphs": plan.graphs}
    if plan.shared_prompts:
        lines["shared prompts"] = plan.shared_prompts
    if plan.reference:
        lines["reference"] = escape(plan.reference)
    if plan.rows_per_epoch is None or not plan.tokens_per_epoch:
        lines["data"] = f"streamed in windows of {recipe.data.window:,} rows per source"
    else:
        supervised, full = (plan.supervised_tokens_per_epoch or 0) / plan.tokens_per_epoch, plan.packing_efficiency or 0
        lines["data"] = f"{plan.examples:,} examples, {plan.tokens_per_epoch:,} tokens, {supervised:.0%} supervised"
        lines["sequences"] = f"{plan.rows_per_epoch:,} of up to {recipe.data.max_length:,} tokens, {full:.1%} full"
    # Ranks that share sequences (tensor, context, pipeline) count once.
    if recipe.batch.tokens_per_device is not None:
        micro_batches = f"micro-batches of at most {recipe.batch.tokens_per_device:,} tokens"
    else:
        assert plan.rows_per_device is not None
        replicas = recipe.batch.rows // (plan.rows_per_device * plan.micro_batches)
        unit = "device" if replicas == plan.world_size else "replica"
        units = unit if replicas == 1 else f"{unit}s"
        micro_batches = f"{replicas} {units} x {plan.rows_per_device} per {unit} x {plan.micro_batches} accumulation"
    lines["training"] = f"{plan.steps:,} steps x {recipe.batch.rows} sequences ({micro_batches})"
    if "bubble_share" in plan.division:
        stages = " + ".join(str(count) for count in plan.division["layers_of_stages"])
        lines["pipeline"] = (
            f"stages of {stages} layers, {plan.division['schedule']}: each is idle for "
            f"{plan.division['bubble_share']:.1%} of a step"
        )
    if recipe.batch.rows_per_device == "auto":
        lines["sequences per device"] = f"{plan.rows_per_device} ({plan.rows_per_device_reason})"
    _show_table(console, recipe.run.name, lines)


def _show_table(console: Console, title: str, lines: Mapping[str, str]) -> None:
    table = Table(title=title, show_header=False, title_justify="left")
    for name, value in lines.items():
        table.add_row(name, value)
    console.print(table)


def show_evaluation(console: Console, step: int, metrics: dict[str, float], generations: list[Generation]) -> None:
    """Prints an evaluation: a line of its numbers, a table of those that have parts (`eval_rewards/chosen`, or
    `eval_loss/chat` of a source), and a table of answers."""
    numbers = {name: f"{v:.1%}" if name.endswith(_PERCENTAGES) else f"{v:.4f}" for name, v in metrics.items()}
    whole = [f"{name} {number}" for name, number in numbers.items() if "/" not in name]
    print_line(console, f"step {step}: {'  '.join(whole)}", highlight=False)
    parts = {tuple(name.split("/", 1)): number for name, number in numbers.items() if "/" in name}
    if parts:
        columns = dict.fromkeys(part for _, part in parts)
        table = Table("", *map(escape, columns))
        for name in dict.fromkeys(name for name, _ in parts):
            table.add_row(name, *(parts.get((name, part), "") for part in columns))
        console.print(table)
    if not generations:
        return
    table = Table(expand=True)
    for name in ("question", "answer", "expected"):  # one line each; in full with -v
        table.add_column(name, ratio=1, no_wrap=not is_verbose(), overflow="fold" if is_verbose() else "ellipsis")
    table.add_column("equal", no_wrap=True)
    for one in generations:
        texts = (visible(" ".join(text.split())) for text in (one.question, one.output, one.reference))
        table.add_row(*map(escape, texts), "yes" if one.matches else "no")
    console.print(table)


def next_command(objective: ObjectiveSettings, data: Data, folder: Path) -> str:
    """Returns the command that uses a result: what it can be asked depends on its objective and its rows."""
    if objective.scores_sequences:
        return f"python -m finetune score {folder} --data FILE"
    if data.media_kind is not None:
        return f"python -m finetune generate {folder} PROMPT --{data.media_kind} FILE"
    if all(source.format == "text" for source in data.train):
        return f"python -m finetune generate {folder} PROMPT"
    return f"python -m finetune chat {folder}"


def show_totals(console: Console, totals: Totals) -> None:
    """Prints the run's use of time and memory, unless no step ran."""
    if not totals.steps:
        return
    lines = totals.headlines() | {
        "tokens/s": f"{totals.mean('tokens_per_s') or 0:,.0f}",
        "supervised tokens/s": f"{totals.mean('supervised_tokens_per_s') or 0:,.0f}",
    }
    if (mfu := totals.mean("mfu")) is not None:
        hfu = totals.mean("hfu")
        lines["MFU"] = f"{mfu:.1%}" + ("" if hfu is None else f", HFU {hfu:.1%}")
    elif (tflops := totals.mean("tflops_per_device")) is not None:
        lines["TFLOP/s per device"] = f"{tflops:,.3g}"
    lines["time"] = ", ".join(f"{name} {share:.1%}" for name, share in totals.shares().items() if share >= 0.0005)
    memory = {key[7:-4]: value for key, value in totals.last.items() if key.startswith("memory/")}
    parts = ", ".join(f"{name} {size:,.2f}" for name, size in memory.items())
    lines["peak memory, GiB"] = f"{totals.last['memory_peak_gib']:,.2f}: {parts}"
    if (straggler := totals.straggler()) is not None:
        rank, often, spread = straggler
        lines["straggler"] = f"rank {rank} in {often:.0%} of the steps; slowest/median {spread:.3f}"
    if "energy_j" in totals.last:
        lines["energy"] = f"{totals.last['energy_j'] / 3.6e6:,.3g} kWh, {totals.last['tokens_per_j']:,.1f} tokens/J"
    _show_table(console, f"measured over {totals.steps:,} steps", lines)
