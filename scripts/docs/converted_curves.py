"""The losses of the recipes that docs/guides/coming-from-other-tools.md shows, and those of TRL's own script.

    python scripts/docs/converted_curves.py    # writes benchmarks/results/converted_curves.json, docs/converted.svg

Each config is read from the page, converted by `new --from`, and trained on one CPU process, on the same rows and a
small model with random weights; so the rate is higher than theirs. TRL's trainer runs the page's script if it is
installed (extra `benchmarks`): once on all rows, in its own order, and once on as many as a step has, where each step
has them all and the losses must be the recipe's.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "support"))

import tiny

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "guides" / "coming-from-other-tools.md"
RESULTS = ROOT / "benchmarks" / "results" / "converted_curves.json"
PICTURE = ROOT / "docs" / "converted.svg"
ROWS, OF_A_STEP, STEPS, RATE = 96, 8, 36, 5e-3
SEED = 42  # TRL's default
CLOSE = 1e-5  # 36 steps of fp32 whose sums are added up in another order
NAMES = {"sft": "TRL", "axolotl": "axolotl", "llama_factory": "LLaMA-Factory"}
NAMES |= {"unsloth_qlora": "Unsloth", "torchtune": "torchtune"}
THEIR_OWN = "TRL, its own script"
# What a CPU and a model with random weights need; all else is the page's.
SMALL = (
    "train.epochs=null",
    f"train.max_steps={STEPS}",
    f"optimizer.lr={RATE}",
    "optimizer.name=adamw",
    "train.precision=fp32",
)
SMALL += ("data.eval=[]", "data.max_length=128", "model.name=llama", "model.chat_template=null")
TAGS = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}


@contextlib.contextmanager
def inside(folder: str) -> Iterator[None]:
    """Makes a folder the current one meanwhile; contextlib's is of Python 3.11."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def shown_configs() -> dict[str, str]:
    """Returns the page's configs by the names of their files."""
    page = PAGE.read_text(encoding="utf-8")
    shown = dict(re.findall(r"```(?:yaml|python)\n# (\w+\.(?:yaml|py))\n(.+?)```", page, re.DOTALL))
    return {name: text for name, text in shown.items() if Path(name).stem in NAMES}


def write_inputs(folder: Path, rows: int) -> None:
    """Writes model, rows and configs."""
    tiny.save_model(folder, "llama")
    tiny.write_rows(folder / "faq.jsonl", tiny.conversations(rows))
    faq = {"file_name": "faq.jsonl", "formatting": "sharegpt", "columns": {"messages": "messages"}, "tags": TAGS}
    (folder / "dataset_info.json").write_text(json.dumps({"faq": faq}), encoding="utf-8")
    for name, text in shown_configs().items():
        (folder / name).write_text(text, encoding="utf-8")


def recipe_losses(name: str) -> list[float]:
    """Returns the loss of each step of a config's recipe; in the current folder."""
    from rich.console import Console

    from finetune.api import load_recipe, train
    from finetune.desk.setup.other_tools import write_converted

    stem = Path(name).stem
    path = write_converted(name, Path(f"{stem}-ours.yaml"), None, 1, (), Console(quiet=True))
    run = train(load_recipe(str(path), f"run.name={stem}", *SMALL))
    lines = map(json.loads, (Path(run) / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def trl_losses(script: str) -> list[float]:
    """Returns the loss of each step that TRL logs for its script; in the current folder."""
    import torch
    from datasets import load_dataset
    from peft import LoraConfig, get_peft_model
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer
    from trl.trainer import sft_trainer

    losses: list[float] = []

    class Kept(SFTTrainer):
        def log(self, logs: dict[str, float], *rest: Any, **more: Any) -> None:
            losses.extend([logs["loss"]] if "loss" in logs else [])

    def config(**given: Any) -> SFTConfig:
        small = {"max_steps": STEPS, "learning_rate": RATE, "logging_steps": 1, "use_cpu": True, "bf16": False}
        small |= {"report_to": "none", "save_strategy": "no", "gradient_checkpointing": False}
        return SFTConfig(**{**given, **small, "dataloader_pin_memory": False})

    def adapted(*given: Any, **more: Any) -> Any:
        torch.manual_seed(SEED + 1)  # as those of the recipe are drawn, so that both begin alike
        return get_peft_model(*given, **more)

    def trainer(model: str, **given: Any) -> SFTTrainer:
        sft_trainer.get_peft_model = adapted
        return Kept(model="llama", processing_class=AutoTokenizer.from_pretrained("llama"), **given)

    names = {"SFTConfig": config, "LoraConfig": LoraConfig, "load_dataset": load_dataset, "SFTTrainer": trainer}
    exec(compile(script, "sft.py", "exec"), names)
    return losses


def draw(curves: Mapping[str, Sequence[float]]) -> None:
    """Writes the picture."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(
        {"svg.hashsalt": "finetune", "font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
    )
    figure, axes = plt.subplots(figsize=(7.6, 3.4), layout="constrained")
    for name, losses in curves.items():
        style = {"linestyle": "--", "color": "black"} if name == THEIR_OWN else {}
        axes.plot(range(1, len(losses) + 1), losses, label=name, linewidth=1.4, **style)
    axes.set(xlabel="step", ylabel="loss of the step")
    axes.legend(frameon=False, ncols=2)
    figure.savefig(PICTURE, metadata={"Date": None})


def main() -> None:
    """Trains all, and writes results and picture."""
    configs, curves, pair = shown_configs(), dict[str, list[float]](), list[list[float]]()
    with tempfile.TemporaryDirectory() as folder, inside(folder):
        write_inputs(Path(), ROWS)
        for name in configs:
            curves[NAMES[Path(name).stem]] = recipe_losses(name)
        if find_spec("trl"):
            curves[THEIR_OWN] = trl_losses(configs["sft.py"])
    if find_spec("trl"):
        with tempfile.TemporaryDirectory() as folder, inside(folder):
            write_inputs(Path(), OF_A_STEP)
            pair = [recipe_losses("sft.py"), trl_losses(configs["sft.py"])]
    differs = max((abs(one - other) for one, other in zip(*pair, strict=True)), default=None) if pair else None
    results = {"rows": ROWS, "steps": STEPS, "rate": RATE, "losses": curves, "differs_from_trl": differs}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    draw(curves)
    for name, losses in curves.items():
        print(f"{name:20}", *(f"{losses[step - 1]:8.4f}" for step in (1, 12, 24, 36)))
    print("recipe against TRL on the same rows in each step:", differs)
    if differs is not None and differs > CLOSE:
        sys.exit(1)


if __name__ == "__main__":
    main()
