"""Pictures, rows and an untrained model of the quickstart's stage with images: name the colour and the shape.

    python scripts/make_shapes.py                # into runs/quickstart-shapes
    python scripts/make_shapes.py --out DIR

    DIR/train.parquet                            pictures in the rows, as `datasets` writes them
    DIR/test.jsonl  DIR/pictures/                pictures as files, none of which is in train
    DIR/model/                                   SmolVLM's classes at 0.26 M parameters, random weights; tokenizer

Every run writes the same rows.
"""

from __future__ import annotations

import argparse
import io
import json
import random
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from make_quickstart import CHAT_TEMPLATE, END, PAD, START
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForMultimodalLM, PreTrainedTokenizerFast, set_seed

SEED = 2021
SIDE = 32  # pixels
NUM_TRAIN, NUM_TEST = 8000, 200
VOCAB_SIZE = 320
COLOURS = {
    "red": (215, 40, 40),
    "green": (40, 165, 70),
    "blue": (50, 90, 220),
    "yellow": (235, 205, 40),
    "purple": (150, 60, 190),
    "white": (245, 245, 245),
}
SHAPES = ("circle", "square", "triangle", "cross")
QUESTIONS = ("which colour and shape?", "what is this?", "name the colour and the shape")
TOKENS = {
    "image_token": "<image>",
    "fake_image_token": "<fake_token_around_image>",
    "global_image_token": "<global-img>",
}


def draw(shape: str, colour: str, rng: random.Random) -> Image.Image:
    """A shape of any size at any place, in a shade of its colour, on a dark ground."""
    ground = tuple(rng.randrange(70) for _ in range(3))
    picture = Image.new("RGB", (SIDE, SIDE), ground)
    paint = ImageDraw.Draw(picture)
    size = rng.randrange(18, 27)
    left, top = rng.randrange(SIDE - size), rng.randrange(SIDE - size)
    right, bottom, third = left + size, top + size, size // 3
    fill = tuple(min(255, max(0, value + rng.randrange(-12, 13))) for value in COLOURS[colour])
    if shape == "circle":
        paint.ellipse((left, top, right, bottom), fill)
    elif shape == "square":
        paint.rectangle((left, top, right, bottom), fill)
    elif shape == "triangle":
        paint.polygon([(left, bottom), (right, bottom), ((left + right) // 2, top)], fill)
    else:
        paint.rectangle((left + third, top, right - third, bottom), fill)
        paint.rectangle((left, top + third, right, bottom - third), fill)
    return picture


def rows(count: int, rng: random.Random) -> list[tuple[Image.Image, str, str]]:
    """(picture, question, answer), all answers equally often."""
    pairs = [(colour, shape) for colour in COLOURS for shape in SHAPES]
    wanted = [pairs[i % len(pairs)] for i in range(count)]
    rng.shuffle(wanted)
    return [(draw(shape, colour, rng), rng.choice(QUESTIONS), f"{colour} {shape}") for colour, shape in wanted]


def messages(question: str, answer: str, **where: str) -> list[dict[str, Any]]:
    said = [{"type": "image", **where}, {"type": "text", "text": question}]
    return [{"role": "user", "content": said}, {"role": "assistant", "content": [{"type": "text", "text": answer}]}]


def write_rows(out: Path) -> None:
    rng = random.Random(SEED)
    test, train = rows(NUM_TEST, rng), rows(NUM_TRAIN, rng)
    (out / "pictures").mkdir(parents=True, exist_ok=True)
    with (out / "test.jsonl").open("w", encoding="utf-8") as file:
        for i, (picture, question, answer) in enumerate(test):
            picture.save(out / "pictures" / f"{i:03}.png")
            file.write(json.dumps({"messages": messages(question, answer, image=f"pictures/{i:03}.png")}) + "\n")
    table: dict[str, list[Any]] = {"messages": [], "images": []}
    for picture, question, answer in train:
        file_of_picture = io.BytesIO()
        picture.save(file_of_picture, "png")
        table["messages"].append(messages(question, answer))
        table["images"].append([{"bytes": file_of_picture.getvalue(), "path": None}])
    pyarrow.parquet.write_table(pyarrow.table(table), out / "train.parquet")


CONTENT = """\
{%- macro said(content) %}
    {%- for part in ([{'type': 'text', 'text': content}] if content is string else content) %}
        {{- 'WRITTEN' if part['type'] == 'KIND' else part['text'] }}
    {%- endfor %}
{%- endmacro %}
"""


def chat_tokenizer(texts: list[str], tokens: dict[str, str], kind: str, written: str) -> PreTrainedTokenizerFast:
    """Byte-level BPE of a task's few words, and the tokens of its files. written: by the template for a file."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(tokens),
        special_tokens=[PAD, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator([f"user\n{text}\nassistant\n" for text in texts], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        bos_token=START,
        eos_token=END,
        extra_special_tokens=tokens,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )
    content = CONTENT.replace("WRITTEN", written).replace("KIND", kind)
    fast.chat_template = content + CHAT_TEMPLATE.replace("message['content']", "said(message['content'])")
    return fast


def write_model(folder: Path, fast: PreTrainedTokenizerFast) -> None:
    """SmolVLM (https://arxiv.org/abs/2504.05299) with every size reduced; an image is one tile and four tokens."""
    shape: dict[str, Any] = {"num_attention_heads": 4, "intermediate_size": 192, "initializer_range": 0.06}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    text = {"model_type": "llama", "vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": 2} | shape | ids
    text |= {"num_key_value_heads": 4, "max_position_embeddings": 128, "tie_word_embeddings": False}
    vision = {"model_type": "smolvlm_vision", "hidden_size": 64, "num_hidden_layers": 2} | shape
    vision |= {"image_size": SIDE, "patch_size": 8}  # 4 x 4 patches; the projector makes one token of 2 x 2
    set_seed(SEED)
    model = AutoModelForMultimodalLM.from_config(
        AutoConfig.for_model(
            "smolvlm",
            text_config=text,
            vision_config=vision,
            scale_factor=2,
            image_token_id=fast.convert_tokens_to_ids(TOKENS["image_token"]),
            tie_word_embeddings=False,
            **ids,
        )
    )
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    side = {"longest_edge": SIDE}
    settings = {"image_processor_type": "SmolVLMImageProcessor", "size": side, "max_image_size": side}
    files = {
        "preprocessor_config.json": settings | {"do_image_splitting": False},
        "processor_config.json": {"processor_class": "SmolVLMProcessor", "image_seq_len": 4},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make pictures, rows and model of the quickstart's stage with images.")
    parser.add_argument("--out", type=Path, default=Path("runs/quickstart-shapes"), help="default: %(default)s")
    out = parser.parse_args().out
    write_rows(out)
    answers = [f"{colour} {shape}" for colour in COLOURS for shape in SHAPES]
    write_model(out / "model", chat_tokenizer([*QUESTIONS, *answers], TOKENS, "image", TOKENS["image_token"]))
    print(f"{out}: {NUM_TRAIN} rows to train on, {NUM_TEST} held out; a model of random weights")


if __name__ == "__main__":
    main()
