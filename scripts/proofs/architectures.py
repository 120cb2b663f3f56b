"""Every causal class of the installed transformers: is its packed loss that of plain transformers on each document?

    python scripts/proofs/architectures.py [--only llama] [--only qwen3] [--out architectures.jsonl] \
        [--docs docs/reference/models.md]

`--out` has a line for each architecture as soon as it is known; those that it has already are not tried again.

One line an architecture (`model_type`), from a tiny config with the class's own defaults, in fp32 on the CPU:

    packed    documents share a row; loss and every gradient are those of each document alone (1e-6 and 1e-5; if
              rounding makes more of it, 1e-9 in fp64)
    single    one document per forward, which is refused to share; loss and gradients are those of plain transformers
    refused   `train` stops with this reason
    stops     its code raises in training, after whatever was chosen
    unbuilt   no tiny config: what a run of such a model does was not tried here
    WRONG     trained, and not as plain transformers would, or not saved as it was: exit status 1

Of those that are trained, the same with LoRA on all linear layers (losses, gradients of the adapters), whether the
result's files, as the run writes them, give a new model the same tensors to the last bit, and losses and gradients of
two processes under FSDP2, which read these files and have half of the documents each.

All are tried in one launch of two processes. If one of them fails or stands still under FSDP2, that is written down
and the rest is tried in another.

The verdict of `finetune.models.attention` is one thing that is compared here; the other is computed by the run's own
path, through the loss in the head, on other documents than the trial of that verdict had, changed and in another order.
"""

from __future__ import annotations

import argparse
import copy
import functools
import inspect
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from finetune.checkpoints.result import write_config
from finetune.checkpoints.weight_files import DiskLayout, WeightsWriter
from finetune.data.batch import collate
from finetune.data.samples import Example, Sequence
from finetune.engine.base import Engine, saved_tensors
from finetune.engine.launch import read_launch
from finetune.engine.sharding import full_tensor
from finetune.engine.start import leave_group, start_engine
from finetune.errors import UserError
from finetune.models.attention import AttentionChoice, choose_attention
from finetune.models.attention.isolation import Computed, Differences, compare
from finetune.models.attention.mixers import run_per_document
from finetune.models.attention.per_document import rotate_per_document
from finetune.models.base_checkpoint import base_checkpoint
from finetune.models.base_model import Base
from finetune.models.loss_model import CausalLMWithLoss
from finetune.models.tiny_config import VOCABULARY, tiny_config
from finetune.models.trials import FAILURES, randomize
from finetune.models.weights import add_adapters, load_model
from finetune.objectives import make_objective
from finetune.objectives.forward import ForwardPass
from finetune.recipe import Recipe
from finetune.recipe.objective_settings import Sft
from finetune.recipe.schema import Lora
from finetune.utils import unwrap_peft

# What a class wants that its config's defaults lack.
INDEXER = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": list(range(1, 32, 2))},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 16},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "ministral": {"head_dim": 16},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 8},
    "phimoe": {"sliding_window": 8},
    "qwen4_exp": {"text_config": INDEXER},
    "qwen4_exp_text": INDEXER,
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
}
LENGTHS = (19, 6, 27, 11)  # of the documents of a row; unlike those of the trial, and not in order
NO_MODEL = {  # of the class's own code or surroundings
    "blt": "reads bytes in patches that a second model finds; its widths depend on each other across four configs",
    "dbrx": "transformers 5.23 cannot create it: its attention reads `rope_theta` from a config that lacks it",
    "gemma3n": "its tower needs the package `timm`, which is not installed here (gemma3n_text is in the table)",
    "gemma4_assistant": "drafts tokens from another model's hidden states and keys: no language model of its own",
    "gemma4_unified_assistant": "drafts tokens from another model's hidden states and keys",
    "musicgen": "makes sound; its class takes the config of the decoder alone, which no checkpoint has",
    "musicgen_melody": "makes sound; its class takes the config of the decoder alone, which no checkpoint has",
}
STANDSTILL_S = 420.0  # without a line; the slowest took a quarter of it
DECODERS = ("bert", "roberta", "electra", "xlm-roberta")  # tried with `is_decoder: true` as well


@dataclass(frozen=True)
class Line:
    """What became of an architecture."""

    name: str
    verdict: str  # packed | single | refused | stops | unbuilt | WRONG
    attention: str | None = None  # transformers' name
    loss: float | None = None  # relative difference of a document's loss, the worst
    gradient: float | None = None  # of a parameter's gradient
    moved: float | None = None  # of other documents' losses, when one is changed
    mixers: tuple[str, ...] = ()  # that run once for each document
    lora: str | None = None  # "same", why peft adds no adapters, or how far off
    saved: str | None = None  # "same", what is not, or why the tiny config could not be read back
    fsdp2: str | None = None  # on two processes: "same", how far off, or what went wrong
    reason: str | None = None


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", action="append", metavar="NAME", help="a model_type; may be given several times")
    parser.add_argument("--out", type=Path, help="write the table as JSON")
    parser.add_argument("--docs", type=Path, help="write the table between its markers in this page")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    names = options.only or [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *(f"{name} (decoder)" for name in DECODERS)]
    if options.work:
        work(options.out, names)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        file = options.out or Path(folder) / "architectures.jsonl"
        while left := [name for name in names if name not in {line["name"] for line in read(file) if is_whole(line)}]:
            launch(file, left)
        lines = [line for line in read(file) if line["name"] in names]
    counts = Counter(line["verdict"] for line in lines)
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()))
    if options.docs:
        write_page(options.docs, lines)
    return int(counts["WRONG"] > 0)


def read(file: Path) -> list[dict[str, Any]]:
    """Returns the last line of each architecture."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return list({(line := json.loads(text))["name"]: line for text in lines}.values())


def is_whole(line: dict[str, Any]) -> bool:
    return line["fsdp2"] is not None or line["verdict"] not in ("packed", "single")


def write(file: Path, line: Line) -> None:
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps(asdict(line)) + "\n")


def launch(file: Path, names: list[str]) -> None:
    """Tries architectures until all are, or one ends the launch; that has a line then, too."""
    config = Path(__file__).resolve().parents[2] / "accelerate_configs" / "fsdp2.yaml"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", "--config_file", str(config)]
    command += [str(Path(__file__).resolve()), "--work", "--out", str(file)]
    command += [word for name in names for word in ("--only", name)]
    before, since = -1, time.monotonic()
    errors = file.with_suffix(".log")
    with errors.open("w", encoding="utf-8") as log:
        ranks = subprocess.Popen(command, stderr=log, start_new_session=True)
        while ranks.poll() is None and time.monotonic() - since < STANDSTILL_S:
            if (size := file.stat().st_size if file.exists() else 0) != before:
                before, since = size, time.monotonic()
            time.sleep(1)
        stands_still = ranks.poll() is None
        if stands_still:
            os.killpg(ranks.pid, 9)
            ranks.wait()
    lines = {line["name"]: line for line in read(file)}
    if not (left := [name for name in names if name not in lines or not is_whole(lines[name])]):
        return
    said = [text for text in errors.read_text(encoding="utf-8").splitlines() if text.startswith("fsdp2: ")]
    reason = f"stands still for {STANDSTILL_S:.0f} s" if stands_still else (said or ["fsdp2: the launch ended"])[0][7:]
    known = lines.get(left[0])
    line = Line(**{**known, "fsdp2": reason}) if known else Line(left[0], "stops", reason=reason)
    write(file, line)
    print(_text(line), flush=True)


def work(file: Path, names: list[str]) -> None:
    """Inside a launch: one architecture after another; the first process does what needs but one."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    ranks, folder = read_launch(), file.parent / f"{file.stem}-models"
    for name in names:
        model = folder / name.replace(" ", "-")
        recipe = tiny_recipe(model)
        engine = start_engine(recipe, ranks, tiny(name))
        found: list[Any] = [None]
        if engine.is_main:
            found = [examine(name, model)]
            write(file, found[0])
        dist.broadcast_object_list(found, src=0)
        line: Line = found[0]
        if line.verdict in ("packed", "single"):
            why_not = "" if line.saved == "same" else "not tried: its files cannot be read back"
            line = replace(line, fsdp2=why_not or on_two_ranks(engine, recipe, name))
            line = replace(line, verdict="WRONG") if line.fsdp2[:5] == "WRONG" else line
        if engine.is_main:
            write(file, line)
            print(_text(line), flush=True)
        engine.close()
    leave_group()


def tiny_recipe(model: Path) -> Recipe:
    return Recipe.model_validate(
        {
            "run": {"name": "tiny"},
            "model": {"name": str(model)},
            "mode": "full",
            "data": {"train": [{"path": "rows.jsonl", "format": "messages"}], "max_length": 64},  # never read
            "batch": {"rows": 2},
            "optimizer": {"lr": 1e-3, "max_grad_norm": None},
            "train": {"max_steps": 1, "precision": "fp32"},
        }
    )


def on_two_ranks(engine: Engine, recipe: Recipe, name: str) -> str:
    """Returns whether losses and gradients under FSDP2, of a model read from its files, are those of plain
    transformers. Collective; a rank that fails ends the launch."""
    try:
        config = Base.of(recipe).config if base_checkpoint(recipe.model) else tiny(name)
        choice = choose_attention("auto", causal_class(config), config, "cpu", False)
        loss_model = CausalLMWithLoss(load_model(recipe, Base.of(recipe, config), choice, engine.placement(recipe)))
        engine.wrap(loss_model, lambda trained: [torch.optim.SGD([tensor for _, tensor in trained])], 1)
        forward, own = ForwardPass(choice, make_objective(Sft())), range(engine.rank, len(LENGTHS), 2)
        mine = [documents()[i] for i in own]
        batches = [collate(part) for part in ([mine] if choice.isolates_documents else [[one] for one in mine])]
        token_losses: list[torch.Tensor] = []

        def total(outputs: Any, _batch: Any) -> torch.Tensor:
            token_losses.append(outputs.token_losses.detach())
            return outputs.total

        engine.accumulate(batches, forward, total)
        losses = dict(zip(own, torch.cat(token_losses).split([LENGTHS[i] - 2 for i in own]), strict=True))
        gathered: list[Any] = [None, None]
        dist.all_gather_object(gathered, losses)
        gradients = {
            name: full_tensor(p.grad if p.grad is not None else torch.zeros_like(p))
            for name, p in engine.unwrapped.named_parameters()
        }
        both = {**gathered[0], **gathered[1]}
        ours = Computed(tuple(both[i] for i in range(len(LENGTHS))), gradients)
        different = compare(_text_alone(alone(name), gradients), ours) if engine.is_main else None
    except (UserError, *FAILURES) as error:
        print(f"fsdp2: {_words(error)}", file=sys.stderr, flush=True)
        time.sleep(3)  # the other one may have words, too
        os._exit(1)
    if different is None or different.within_rounding:
        return "same"
    return f"WRONG: loss {different.loss:.1e}, gradient {different.gradient:.1e}"


def _text_alone(reference: Computed, gradients: dict[str, Any]) -> Computed:
    """Returns the reference by the names of a text part if that was trained, with zeros for None."""
    renamed = {name.replace("language_model.", ""): gradient for name, gradient in reference.gradients.items()}
    known = reference.gradients if gradients.keys() == reference.gradients.keys() else renamed
    filled = {name: torch.zeros(1) if known[name] is None else known[name] for name in gradients}
    return Computed(reference.losses, filled)


def examine(name: str, folder: Path) -> Line:
    """Returns all but FSDP2's part; leaves the model's files in `folder`."""
    if name in NO_MODEL:
        return Line(name, "unbuilt", reason=NO_MODEL[name])
    try:
        config, reference = tiny(name), alone(name)
    except FAILURES as error:
        return Line(name, "unbuilt", reason=_words(error))
    try:
        choice = choose_attention("auto", causal_class(config), config, "cpu", False)
        differences, moved = as_in_a_run(config, choice, reference)
    except UserError as error:
        return Line(name, "refused", reason=str(error))
    except FAILURES as error:
        return Line(name, "stops", reason=_words(error))
    lora, saved = adapted(config, choice), reloaded(config, folder)
    is_same = differences.within_rounding or is_same_in_fp64(config, choice, lora=False)
    is_right = is_same and moved <= 1e-6 and "WRONG" not in (lora, saved[:5])
    verdict = ("packed" if choice.isolates_documents else "single") if is_right else "WRONG"
    numbers = (differences.loss, differences.gradient, moved)
    reason = None if verdict == "packed" else choice.reason
    mixers = tuple(choice.mixers)
    return Line(name, verdict, choice.implementation, *numbers, mixers, lora, saved, reason=reason)


def adapted(config: Any, choice: AttentionChoice) -> str:
    """Returns whether LoRA's losses and gradients are those of each document alone, or why it cannot be."""
    try:
        differences, _ = as_in_a_run(config, choice, plain(config, lora=True), lora=True)
    except (UserError, *FAILURES) as error:
        return _words(error)
    if differences.within_rounding:
        return "same"
    in_fp32 = f"{differences.loss:.1e} and {differences.gradient:.1e} in fp32"
    return f"same in fp64; {in_fp32}" if is_same_in_fp64(config, choice, lora=True) else "WRONG"


class _InFp64(TorchFunctionMode):
    """Computes in fp64 what a model's code asks to compute in fp32, such as norms and Mamba's states."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        function = torch.Tensor.double if function is torch.Tensor.float else function
        args = [torch.float64 if value is torch.float32 else value for value in args]
        named = {name: torch.float64 if value is torch.float32 else value for name, value in (kwargs or {}).items()}
        return function(*args, **named)


def is_same_in_fp64(config: Any, choice: AttentionChoice, lora: bool) -> bool:
    """Returns whether losses and gradients that differ by more than rounding usually does are the same in fp64, to
    1e-9: gradients of random weights may be differences of large numbers."""
    wide = copy.deepcopy(config)
    wide.dtype, wide._experts_implementation = torch.float64, "eager"  # grouped products have no fp64
    with _InFp64():
        exact, _ = as_in_a_run(wide, choice, plain(wide, lora=lora), lora=lora)
    return max(exact.loss, exact.gradient) <= 1e-9


def reloaded(config: Any, folder: Path) -> str:
    """Returns whether a model's files give a new model the same tensors. Leaves them in `folder`."""
    model = model_of(config, None)
    state = saved_tensors(model, trainable_only=False)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        writer, layout = WeightsWriter(folder), DiskLayout(model, state)
        for name, tensor in state.items():
            for name_on_disk, converted in layout.convert(name, tensor).items():
                writer.add(name_on_disk, converted)
        writer.finish()
        write_config(model, torch.float32, folder)
        again = saved_tensors(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), False)
    except (UserError, *FAILURES) as error:
        return _words(error)
    if others := state.keys() ^ again.keys():
        return f"WRONG: other names, {', '.join(sorted(others)[:3])}"
    return next((f"WRONG: {name} differs" for name in state if not torch.equal(state[name], again[name])), "same")


def causal_class(config: Any) -> Any:
    with torch.device("meta"):
        return type(AutoModelForCausalLM.from_config(copy.deepcopy(config)))


def tiny(name: str) -> Any:
    model_type = name.removesuffix(" (decoder)")
    settings = {**SETTINGS.get(model_type, {}), **({"is_decoder": True} if model_type != name else {})}
    config = tiny_config(CONFIG_MAPPING[model_type](**settings))
    config.dtype = torch.float32
    return config


def documents(seed: int = 5) -> list[Example]:
    rng, examples = np.random.default_rng(seed), []
    for row, length in enumerate(LENGTHS):
        ids = rng.integers(3, VOCABULARY, length).astype(np.int32)
        examples.append(Example("a", row, 0, (Sequence(ids, np.arange(length) >= 2),)))
    return examples


def model_of(config: Any, implementation: str | None, lora: bool = False) -> Any:
    common = {} if implementation is None else {"attn_implementation": implementation}
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=config.dtype, **common)
    if lora:
        model = add_adapters(model, Lora(rank=4, alpha=8), config.dtype)
    randomize(model)
    return model.train()


@functools.lru_cache(1)
def alone(name: str) -> Computed:
    return plain(tiny(name))


def plain(config: Any, lora: bool = False) -> Computed:
    """Each document by itself: a new model, so that nothing of one is left for the next."""
    losses, gradients = [], {}
    for example in documents():
        model = model_of(config, None, lora)
        takes = inspect.signature(unwrap_peft(model).forward).parameters
        uncached = {"use_cache": False} if "use_cache" in takes or "kwargs" in takes else {}
        ids = torch.from_numpy(example.sequences[0].input_ids.astype(np.int64))[None]
        logits = model(input_ids=ids, **uncached).logits[0, 1:-1]  # of the tokens before those that are trained
        token_losses = torch.nn.functional.cross_entropy(logits.float(), ids[0, 2:], reduction="none")
        token_losses.sum().backward()
        losses.append(token_losses.detach())
        for parameter_name, parameter in model.named_parameters():
            known = gradients.get(parameter_name)
            both = [g for g in (known, parameter.grad) if g is not None]
            gradients[parameter_name] = torch.stack(both).sum(0) if both else None
    return Computed(tuple(losses), gradients)


def as_in_a_run(
    config: Any, choice: AttentionChoice, reference: Computed, lora: bool = False
) -> tuple[Differences, float]:
    model = model_of(config, choice.implementation, lora)
    rotate_per_document(model)
    run_per_document(model, choice.mixers)
    model.config.use_cache = False
    loss_model = CausalLMWithLoss(model)
    forward = ForwardPass(choice, make_objective(Sft()))
    num_targets = [n - 2 for n in LENGTHS]

    def losses(examples: list[Example], backward: bool) -> list[torch.Tensor]:
        token_losses = []
        for part in [examples] if choice.isolates_documents else [[example] for example in examples]:
            with torch.set_grad_enabled(backward):
                outputs = forward(loss_model, collate(part))
            if backward:
                outputs.total.backward()
            token_losses.append(outputs.token_losses)
        return list(torch.cat(token_losses).split(num_targets))

    ours = losses(documents(), backward=True)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    changed = [documents(seed=6)[0], *documents()[1:]]
    moved = max(
        ((after - before).abs().max() / before.mean()).item()
        for before, after in zip(ours[1:], losses(changed, backward=False)[1:], strict=True)
    )
    return compare(reference, Computed(tuple(ours), gradients)), moved


BEGINS, ENDS = "<!-- scripts/proofs/architectures.py: begins -->", "<!-- ends -->"
MEANING = {
    "packed": "documents share a row, each trained as plain transformers computes it alone",
    "single": "one document per forward, because of the reason; `data.packing` has no effect",
    "refused": "`train` stops with the reason",
    "stops": "its own code raises in training",
    "unbuilt": "no tiny config could be made of it: not tried here",
    "WRONG": "wrong",
}


def write_page(page: Path, lines: list[dict[str, Any]]) -> None:
    """Writes the table into a page of the docs."""
    text = page.read_text(encoding="utf-8")
    before, after = text.split(BEGINS)[0], text.split(ENDS)[1]
    counts = Counter(line["verdict"] for line in lines)
    tables = [
        f"transformers {transformers.__version__}, torch {torch.__version__}; "
        + ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
        + "."
    ]
    packed = [line for line in lines if line["verdict"] == "packed"]
    for title, some in (
        ("**Packed**, attention by the document", [x for x in packed if not x["mixers"]]),
        ("**Packed**, with modules that run once for each document", [x for x in packed if x["mixers"]]),
    ):
        tables += [
            "",
            f"{title} ({len(some)}):",
            "",
            "| `model_type` | attention | once for each document | LoRA | files | FSDP2 |",
        ]
        tables += ["| --- | --- | --- | --- | --- | --- |", *map(_row, some)]
    for verdict in ("single", "refused", "stops", "unbuilt", "WRONG"):
        if some := [line for line in lines if line["verdict"] == verdict]:
            tables += ["", f"**{verdict.capitalize()}** ({len(some)}): {MEANING[verdict]}.", ""]
            keys = ("reason", "fsdp2") if verdict == "single" else ("reason",)
            tables += ["| `model_type` | " + " | ".join(keys).replace("fsdp2", "FSDP2") + " |"]
            tables += ["| --- " * (1 + len(keys)) + "|"]
            tables += [f"| {line['name']} | {' | '.join(_cell(line[key]) for key in keys)} |" for line in some]
    page.write_text("\n".join([before + BEGINS, "", *tables, "", ENDS + after]), encoding="utf-8")


def _row(line: dict[str, Any]) -> str:
    attention, mixers = line["attention"].removeprefix("finetune_"), ", ".join(line["mixers"])
    cells = (line["name"], attention, mixers, *(_cell(line[name]) for name in ("lora", "saved", "fsdp2")))
    return f"| {' | '.join(cells)} |"


def _cell(text: str | None) -> str:
    """Parameters without `model.`, which would read like a key of recipes."""
    return " ".join((text or "").replace("|", "/").replace("<", "&lt;").replace("`model.", "`").split())[:240]


def _words(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:160]}" if lines else type(error).__name__


def _text(line: Line) -> str:
    numbers = " ".join("       " if x is None else f"{x:.1e}" for x in (line.loss, line.gradient, line.moved))
    checks = "" if line.lora is None else f"lora {line.lora}, saved {line.saved}, fsdp2 {line.fsdp2}  "
    return f"{line.name:28} {line.verdict:8} {line.attention or '':20} {numbers}  {checks}{line.reason or ''}"[
        :300
    ].rstrip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
