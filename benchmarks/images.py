"""SFT on images: tokens per second and peak memory of ours and of TRL, in turns on the same rows in the same steps.

    python benchmarks/images.py --json benchmarks/results/images.json            # the language model trains
    python benchmarks/images.py --train language projector vision --json benchmarks/results/images_all_parts.json

With TRL and what its vision path needs in the same environment (`pip install 'trl==1.16.*' torchvision`); without them,
ours alone. A small Qwen2.5-VL with random weights, its tower in proportion to the language model as in the 7B; chats of
one to eight turns about none to three generated pictures. fp32, only answers are trained. A batch of TRL has the
documents of our packed sequence, padded (it refuses packing and padding-free batches of images); `trl_default`
recomputes activations, as it comes. The processors are transformers' own: ours for Pillow, TRL's for torchvision.

In turns by benchmarks/rounds.py, by processor time as well, which other work on the machine moves less. Tokens are
those of the documents, without padding. Exit status 1 where a first loss is another than ours.
"""

from __future__ import annotations

import json
import random
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))
sys.path.append(str(Path(__file__).resolve().parent))

import contenders
import workload
import yaml
from rounds import Cell, Rounds, spread
from workload import Work

PARTS = ("language", "projector", "vision")
LABELS = {"ours": "ours, packed", "trl": "TRL, padded", "trl_default": "TRL as it comes"}
ROUNDS = Rounds(Path(__file__).resolve(), LABELS, "tokens", over="ours", over_key="ours_over_it", digits=0)
IMAGE = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>")
TEMPLATE = workload.TEMPLATE.replace(
    "{{ m.content }}",
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{% if p.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}",
)
SHAPE = workload.llama(256, 6, 4, 2, 704, 16384, tied=True)
# https://huggingface.co/Qwen/Qwen2.5-VL-7B-Instruct/blob/main/config.json, smaller: for a token of an image (4 patches)
# the tower multiplies 0.4 times as often as the language model's layers.
TOWER = {
    "model_type": "qwen2_5_vl",
    "depth": 4,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_heads": 4,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "window_size": 112,
    "fullatt_block_indexes": [1, 3],
}


def main() -> None:
    parser = ROUNDS.parser(__doc__, steps=4, row_tokens=2048, threads=1)
    parser.add_argument("--train", nargs="+", choices=PARTS, default=["language"], help="parts that train")
    arguments = parser.parse_args()
    cells = ROUNDS.run(arguments, SHAPE, partial(prepare, trained=arguments.train), work_as, lines, waits)
    first = cells[0]["losses"][0]
    wrong = {cell["contender"]: cell["losses"][0] for cell in cells if abs(cell["losses"][0] - first) > 1e-3}
    raise SystemExit(f"first losses {wrong}, not {first}" if wrong else 0)


# --- rows and model


def rows_of(folder: Path, count: int) -> list[dict[str, Any]]:
    """Rows as TRL takes them, {"messages": texts, "images": paths}: the pictures stand before the first question."""
    rng, stories = random.Random(workload.SEED), workload.synthetic_conversations(8 * count)
    (folder / "pictures").mkdir()
    rows = []
    for i in range(count):
        turns = [turn for _ in range(min(8, 1 + int(rng.expovariate(0.7)))) for turn in stories.pop()["messages"]]
        names = [f"pictures/{i}-{n}.png" for n in range(rng.choice((0, 1, 1, 1, 2, 3)))]
        for name in names:
            draw(folder / name, rng)
        rows.append({"messages": turns, "images": names})
    return rows


def draw(path: Path, rng: random.Random) -> None:
    """A picture of 4 by 4 to 16 by 16 tokens: rectangles in colours."""
    from PIL import Image

    def colour() -> tuple[int, ...]:
        return tuple(rng.randrange(256) for _ in range(3))

    size = rng.randint(112, 448), rng.randint(112, 448)
    picture = Image.new("RGB", size, colour())
    for _ in range(12):
        left, top = rng.randrange(size[0]), rng.randrange(size[1])
        picture.paste(colour(), (left, top, left + rng.randint(8, 200), top + rng.randint(8, 200)))
    picture.save(path)


def as_parts(row: dict[str, Any]) -> dict[str, Any]:
    """The row as ours reads it."""
    question, *others = row["messages"]
    parts = [{"type": "image", "image": name} for name in row["images"]]
    content = [*parts, {"type": "text", "text": question["content"]}]
    return {"messages": [{**question, "content": content}, *others]}


def save_model(folder: Path, shape: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, int]:
    """Model, tokenizer and processor; returns the parameters of the language model and of the tower."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer

    workload.save_tokenizer(rows, folder, shape["vocab_size"] - 64)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": list(IMAGE)})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    image, begin, end = tokenizer.convert_tokens_to_ids(list(IMAGE))
    half = shape["head_dim"] // 2
    text = {key: value for key, value in shape.items() if key != "rope_theta"} | {
        "model_type": "qwen2_5_vl_text",
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": [half - 2 * (3 * half // 8), 3 * half // 8, 3 * half // 8],
        },
    }
    config = AutoConfig.for_model(
        "qwen2_5_vl",
        text_config=text,
        vision_config={**TOWER, "out_hidden_size": shape["hidden_size"]},
        tie_word_embeddings=True,
        image_token_id=image,
        vision_start_token_id=begin,
        vision_end_token_id=end,
    )
    torch.manual_seed(workload.SEED)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    limits = {"patch_size": 14, "size": {"shortest_edge": 56 * 56, "longest_edge": 448 * 448}}
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor"} | limits)
    )
    tower = sum(one.numel() for one in model.model.visual.parameters())
    return {"language": sum(one.numel() for one in model.parameters()) - tower, "tower": tower}


def prepare(folder: Path, work: Work, trained: list[str]) -> Cell:
    """Model, rows and recipe; returns what the steps hold. The others read the rows in the order of our steps."""
    from finetune.data.dataset import build_dataset
    from finetune.features import load_recipe
    from finetune.models.base_model import Base

    rows = rows_of(folder, work.steps * work.row_tokens // 200 + 20)
    workload.write_rows(folder / "rows.jsonl", map(as_parts, rows))
    parameters = save_model(folder / "model", work.shape, rows)
    recipe = workload.recipe(folder, work, "messages")
    recipe["model"]["train"], recipe["data"]["image"] = trained, {}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    loaded = load_recipe(folder / "recipe.yaml")
    ordered = build_dataset(loaded, loaded.data.train, Base.of(loaded).renderer(loaded.objective)).in_order(loaded)
    steps = [list(ordered.row(step)) for step in range(work.steps)]
    workload.write_rows(folder / "in_order.jsonl", [rows[one.row - 1] for step in steps for one in step])
    lengths = [[len(one.sequences[0].input_ids) for one in step] for step in steps]
    images = [[image for one in step for image in one.sequences[0].media] for step in steps]
    return {
        "parameters": parameters,
        "trained": trained,
        "documents": [len(step) for step in steps],
        "tokens": [sum(step) for step in lengths],
        "padded_tokens": [len(step) * max(step) for step in lengths],  # of TRL
        "images": [len(step) for step in images],
        "image_tokens": [sum(image.end - image.begin for image in step) for step in images],
    }


# --- in a process of its own


def work_as(name: str, folder: Path, work: Work) -> Cell:
    """Trains as a contender; returns its result."""
    return contenders.ours(folder, work) if name == "ours" else trl(folder, work, as_it_comes=name == "trl_default")


def trl(folder: Path, work: Work, as_it_comes: bool) -> Cell:
    """SFTTrainer with its own collator for images and its own processor, on the documents of our steps."""
    from datasets import Dataset, Image, List
    from stopwatch import Stopwatch
    from torch.utils.data import DataLoader
    from transformers import AutoModelForImageTextToText, AutoProcessor
    from trl import SFTConfig, SFTTrainer

    steps = json.loads((folder / "steps.json").read_text(encoding="utf-8"))
    ends = [sum(steps["documents"][: i + 1]) for i in range(work.steps)]
    batches = [list(range(end - count, end)) for end, count in zip(ends, steps["documents"], strict=True)]

    class Batched(SFTTrainer):
        def get_train_dataloader(self) -> Any:
            return DataLoader(self.train_dataset, batch_sampler=batches, collate_fn=self.data_collator)

    watch = Stopwatch(work.steps)
    model = AutoModelForImageTextToText.from_pretrained(folder / "model", dtype="float32")
    for name, parameter in model.named_parameters():
        part = "projector" if "merger" in name else "vision" if ".visual." in name else "language"
        parameter.requires_grad_(part in steps["trained"])
    rows = [json.loads(line) for line in (folder / "in_order.jsonl").read_text(encoding="utf-8").splitlines()]
    for row in rows:
        row["images"] = [str(folder / name) for name in row["images"]]
    trainer = Batched(
        model=model,
        args=SFTConfig(
            **contenders.common_arguments(folder, work),
            max_length=None,
            assistant_only_loss=True,
            logging_steps=work.steps,
            remove_unused_columns=False,
            **({} if as_it_comes else {"gradient_checkpointing": False}),
        ),
        train_dataset=Dataset.from_list(rows).cast_column("images", List(Image())),
        processing_class=AutoProcessor.from_pretrained(folder / "model"),
    )
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return {**watch.result(), "losses": losses}


# --- the result


def waits(result: Cell) -> Cell:
    shares = [cell["metrics"]["share/data"] for cell in result["cells"] if cell["contender"] == "ours"]
    return {"waiting_for_batches": spread(shares)} if shares else {}


def lines(result: Cell) -> list[str]:
    """A markdown table."""
    steps = result["steps"]
    tokens, padded, seen = (sum(steps[key]) for key in ("tokens", "padded_tokens", "image_tokens"))
    shown = [
        f"Qwen2.5-VL of {steps['parameters']['language'] / 1e6:.1f} M parameters, its tower of "
        f"{steps['parameters']['tower'] / 1e6:.1f} M; trained: {', '.join(steps['trained'])}. "
        f"{tokens / len(steps['tokens']):,.0f} tokens of {sum(steps['documents']) / len(steps['tokens']):.1f} "
        f"documents a step, {seen / tokens:.0%} of images; TRL's padding is {1 - tokens / padded:.0%} of its batches",
        "",
        *ROUNDS.table(result),
    ]
    if (found := result.get("waiting_for_batches")) is not None:
        share = f"{found['median']:.1%}"
        shown += ["", f"ours waited for batches, pixels included, in {share} of the last step's time"]
    return shown


if __name__ == "__main__":
    main()
