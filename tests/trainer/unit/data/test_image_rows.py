"""Rows with images: their forms, files that cannot be used, examples that are too long, and what the cache keeps."""

from __future__ import annotations

import base64
import http.server
import io
import json
import struct
import threading
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tiny
from PIL import Image
from transformers import AutoTokenizer

from finetune.data.examples import Examples, prepare_examples
from finetune.data.media.image_files import decode, find_image
from finetune.data.samples import BadRow
from finetune.errors import UserError
from finetune.models.base_model import Base, processor_settings
from finetune.recipe import Recipe
from finetune.recipe.schema import Images, Model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_seeing(tmp_path_factory.mktemp("seeing"), "qwen2_5_vl")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder with a picture of 60 x 90 pixels, 6 tokens."""
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    data = tmp_path / "data"
    data.mkdir()
    Image.new("RGB", (60, 90), "red").save(data / "a.png")
    return data


def examples_of(model: Path, path: Path, format: str = "auto", **data: Any) -> Examples:
    recipe = Recipe.model_validate(
        {
            "run": {"name": "r"},
            "model": {"name": str(model)},
            "data": {"train": [{"path": str(path), "format": format}], "max_length": 512, "image": {}, **data},
            "mode": "full",
            "train": {"max_steps": 1, "precision": "fp32"},
            "batch": {"rows": 1},
            "optimizer": {"lr": 1e-3},
        }
    )
    return prepare_examples(recipe, recipe.data.train, Base.of(recipe).renderer(recipe.objective))


def asked(*content: Any) -> dict[str, Any]:
    said = list(content) if len(content) > 1 or not isinstance(content[0], str) else content[0]
    return {"messages": [{"role": "user", "content": said}, {"role": "assistant", "content": "red"}]}


def png(folder: Path) -> bytes:
    return (folder / "a.png").read_bytes()


def test_all_forms_of_a_row_are_the_same(model: Path, folder: Path) -> None:
    url = "data:image/png;base64," + base64.b64encode(png(folder)).decode()
    part, text = {"type": "image"}, {"type": "text", "text": "\nwhich?"}
    turns = [{"from": "human", "value": "<image>\nwhich?"}, {"from": "gpt", "value": "red"}]
    rows = {
        "messages": [
            asked(part | {"image": "a.png"}, text),
            asked(part | {"path": "a.png"}, text),
            asked({"type": "image_url", "image_url": {"url": url}}, text),
            asked(part, text) | {"images": ["a.png"]},
            asked("<image>\nwhich?") | {"images": ["a.png"]},
            asked("<image>\nwhich?") | {"image": "a.png"},
        ],
        "sharegpt": [{"conversations": turns, "images": ["a.png"]}, {"conversations": turns, "image": "a.png"}],
        "prompt_completion": [{"prompt": "<image>\nwhich?", "completion": "red", "images": ["a.png"]}],
        "alpaca": [{"instruction": "<image>\nwhich?", "output": "red", "images": ["a.png"]}],
    }
    seen = []
    for format, of_format in rows.items():
        path = tiny.write_rows(folder / f"{format}.jsonl", of_format)
        seen += [example.sequences[0] for example in examples_of(model, path, format)]
    assert len(seen) == 10
    for sequence in seen:
        assert sequence.input_ids.tolist() == seen[0].input_ids.tolist()
        assert [(image.height, image.width, image.end - image.begin) for image in sequence.media] == [(90, 60, 6)]
        assert decode(sequence.media[0].source).getpixel((0, 0)) == (255, 0, 0)


def test_images_of_the_web_are_fetched_once_where_that_is_allowed(
    model: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_for: list[str] = []

    class Server(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            asked_for.append(self.path)
            super().do_GET()

        def log_message(self, *_: Any) -> None:
            pass

    handler = partial(Server, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        address = f"http://me:secret@127.0.0.1:{server.server_address[1]}"
        rules = Images(allow_urls=True)
        try:
            first, again = (find_image(f"{address}/a.png?key=hidden", rules, "rows.jsonl") for _ in range(2))
            assert (first, first.height, first.width) == (again, 90, 60)
            assert asked_for == ["/a.png?key=hidden"]
            assert Path(first.source).read_bytes() == png(folder)  # pyright: ignore[reportArgumentType]
            path = tiny.write_rows(folder / "web.jsonl", [asked({"type": "image", "image": f"{address}/a.png"})])
            (example,) = examples_of(model, path, "messages", image={"allow_urls": True})
            assert len(example.sequences[0].media) == 1
            (folder / "text.png").write_text("no picture")
            monkeypatch.setattr("finetune.data.media.stored_files.MAX_BYTES", 100)
            for name, why in (("gone.png?key=hidden", "cannot be fetched"), ("a.png?new", "more than 100 bytes")):
                with pytest.raises(BadRow, match=why) as refused:
                    find_image(f"{address}/{name}", rules, "rows.jsonl")
                assert "secret" not in str(refused.value)
                assert "hidden" not in str(refused.value)
            with pytest.raises(BadRow, match="not an image"):
                find_image(f"{address}/text.png", rules, "rows.jsonl")
        finally:
            server.shutdown()
            thread.join()
    with pytest.raises(BadRow, match="only http:// and https://"):
        find_image("ftp://127.0.0.1/a.png", rules, "rows.jsonl")
    with pytest.raises(BadRow, match="allow_urls"):
        find_image("https://example.org/a.png", Images(), "rows.jsonl")


def test_parquet_with_images_as_datasets_writes_them(model: Path, folder: Path) -> None:
    """Bytes in a column, several in a row, none in some."""
    images = [[{"bytes": png(folder), "path": None}], [], [{"bytes": png(folder), "path": "x.png"}] * 2]
    said = [[{"type": "image", "text": None}] * len(one) + [{"type": "text", "text": "which?"}] for one in images]
    messages = [
        [{"role": "user", "content": parts}, {"role": "assistant", "content": [{"type": "text", "text": "red"}]}]
        for parts in said
    ]
    table = pyarrow.table({"messages": messages, "images": images})
    pyarrow.parquet.write_table(table, folder / "rows.parquet")
    examples = examples_of(model, folder / "rows.parquet")
    assert [len(one.sequences[0].media) for one in examples] == [1, 0, 2]
    again = examples_of(model, folder / "rows.parquet")  # from the cache
    assert again.build_s == (None,)
    for one, other in zip(examples, again, strict=True):
        assert one.sequences[0].media == other.sequences[0].media
        assert all(image.source == png(folder) for image in other.sequences[0].media)


def test_datasets_own_image_column_is_not_decoded(model: Path, folder: Path) -> None:
    import datasets

    features = datasets.Features({"prompt": datasets.Value("string"), "completion": datasets.Value("string")})
    features["images"] = datasets.List(datasets.Image())
    rows = {"prompt": ["<image> which?"], "completion": ["red"], "images": [[str(folder / "a.png")]]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(folder / "saved"))
    (example,) = examples_of(model, folder / "saved", image={"outside": True, "folder": "/"})
    assert [(image.height, image.width) for image in example.sequences[0].media] == [(90, 60)]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (asked("which? <image>") | {"images": ["a.png", "a.png"]}, "2 images, but its messages 1 place"),
        (asked("which?") | {"images": ["a.png"]}, "1 images, but its messages 0 places"),
        (asked("<image> or <image>?") | {"images": ["a.png"]}, "1 images, but its messages 2 places"),
        (asked({"type": "image"}), "names no image"),
        (asked({"type": "image", "image": "missing.png"}), "no such image"),
        (asked({"type": "image", "image": "../outside.png"}), "leads out of"),
        (asked({"type": "image", "image": "/etc/hostname"}), "leads out of"),
        (asked({"type": "image", "image": "link.png"}), "leads out of"),
        (asked({"type": "image", "image": "linked/outside.png"}), "leads out of"),
        (asked({"type": "image", "image": "."}), "not a file"),
        (asked({"type": "image", "image": "https://example.org/a.png"}), "images are not fetched"),
        (asked({"type": "image", "image": "data:image/png;base64,%%"}), "not base64"),
        (asked({"type": "image", "image": 7}), "expected the path of an image"),
        (asked({"type": "image", "image": "a.png", "url": "b.png"}), "keep one"),
        (asked({"type": "video", "video": "a.mp4"}), "the row has a video, and `data.video` is not set"),
        (asked({"type": "image", "image": "a.png"}, {"type": "text", "text": "\ufffc"}), "U\\+FFFC"),
        (asked({"type": "image", "image": "a.png"}, {"type": "text", "text": "<|image_pad|>"}), "special token"),
        (asked({"type": "image", "image": "rows.jsonl"}), "not an image of a kind that is read"),
        (asked({"type": "image", "image": "cut.png"}), "cut off"),
        (asked({"type": "image", "image": "cut.jpg"}), "cut off"),
        (asked({"type": "image", "image": "cut.webp"}), "cannot be read"),
        (asked({"type": "image", "image": "animated.gif"}), "2 frames"),
        (asked({"type": "image", "image": "animated.png"}), "2 frames"),
        (asked({"type": "image", "image": "animated.webp"}), "2 frames"),
        (asked({"type": "image", "image": "pages.tif"}), "2 frames or pages"),
        (asked({"type": "image", "image": "empty.png"}), "not an image of a kind that is read"),
        (asked({"type": "image", "image": "cut.gif"}), "cannot be read"),
        (asked({"type": "image", "image": "bomb.png"}), "decompression bomb"),
        (asked({"type": "image", "image": "hundred.png"}), "10000 x 10000 pixels, more than 89,478,485"),
        (asked({"type": "image", "image": "thin.png"}), "aspect ratio"),
        (asked({"type": "image", "image": "float.tif"}), "32 bits"),
        (
            asked({"type": "image", "image": "round.png"}),
            r"round\.png: cannot be read: .*(loop|levels of symbolic links)",
        ),
    ],
)
def test_an_image_that_cannot_be_used_says_so_or_is_counted(
    row: dict[str, Any], why: str, model: Path, folder: Path
) -> None:
    write_bad_images(folder)
    path = tiny.write_rows(folder / "rows.jsonl", [asked({"type": "image", "image": "a.png"}), row])
    with pytest.raises(UserError, match=why) as error:
        examples_of(model, path, "messages")
    assert f"{path}:2" in str(error.value)
    kept = examples_of(model, path, "messages", on_bad_row="skip", max_bad_share=1.0)
    assert (len(kept), kept.report.sources[0].bad) == (1, 1)


def write_bad_images(folder: Path) -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8))
    noise.save(folder.parent / "outside.png")
    (folder / "link.png").symlink_to(folder.parent / "outside.png")
    (folder / "linked").symlink_to(folder.parent)
    (folder / "round.png").symlink_to(folder / "round.png")
    for kind in ("png", "jpg", "webp", "gif"):
        whole = io.BytesIO()
        noise.save(whole, {"jpg": "jpeg"}.get(kind, kind))
        (folder / f"cut.{kind}").write_bytes(whole.getvalue()[: len(whole.getvalue()) // 2])
    for name in ("animated.gif", "animated.png", "animated.webp", "pages.tif"):
        noise.save(folder / name, save_all=True, append_images=[Image.new("RGB", (64, 64))])
    (folder / "empty.png").touch()
    (folder / "bomb.png").write_bytes(_empty_png(30_000, 30_000))
    (folder / "hundred.png").write_bytes(_empty_png(10_000, 10_000))
    Image.new("RGB", (1000, 2)).save(folder / "thin.png")
    Image.fromarray(np.zeros((9, 9), np.float32)).save(folder / "float.tif")


def _empty_png(width: int, height: int) -> bytes:
    """A few bytes that unpack to `width x height` pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


def test_unusual_images_are_read(folder: Path) -> None:
    """CMYK, grey of 16 bits, one pixel, transparency on white, upright by EXIF, a palette, two pictures in an MPO."""
    rules, data_file = Images(), str(tiny.write_rows(folder / "rows.jsonl", [{}]))
    Image.new("CMYK", (8, 4), (0, 255, 255, 0)).save(folder / "cmyk.jpg")
    Image.fromarray(np.full((4, 8), 32896, np.uint16)).save(folder / "deep.png")
    Image.new("RGB", (1, 1), "blue").save(folder / "one.png")
    Image.new("RGBA", (8, 4), (0, 0, 0, 0)).save(folder / "clear.png")
    exif = Image.Exif()
    exif[0x0112] = 6
    for kind in ("jpg", "png", "webp"):
        Image.new("RGB", (8, 4), "green").save(folder / f"turned.{kind}", exif=exif)
    Image.new("P", (8, 4)).save(folder / "palette.gif")
    Image.new("RGB", (8, 4)).save(folder / "two.mpo", save_all=True, append_images=[Image.new("RGB", (8, 4))])
    for name, size in (
        *(("cmyk.jpg", (4, 8)), ("deep.png", (4, 8)), ("one.png", (1, 1)), ("clear.png", (4, 8))),
        *((f"turned.{kind}", (8, 4)) for kind in ("jpg", "png", "webp")),
        *(("palette.gif", (4, 8)), ("two.mpo", (4, 8))),
    ):
        found = find_image(name, rules, data_file)
        assert (found.height, found.width) == size, name
        assert decode(found.source).size == size[::-1], name
    assert decode(str(folder / "deep.png")).getpixel((0, 0)) == (128, 128, 128)
    assert decode(str(folder / "clear.png")).getpixel((0, 0)) == (255, 255, 255)
    assert decode(str(folder / "cmyk.jpg")).getpixel((0, 0))[0] > 200


def test_pixels_are_looked_at_where_it_is_asked(folder: Path) -> None:
    """A PNG with an end mark, but damaged within."""
    data_file, content = str(tiny.write_rows(folder / "rows.jsonl", [{}])), bytearray(png(folder))
    content[50:60] = b"\0" * 10
    (folder / "damaged.png").write_bytes(content)
    find_image("damaged.png", Images(), data_file)
    with pytest.raises(BadRow, match="cannot be read"):
        find_image("damaged.png", Images(verify="pixels"), data_file)


@pytest.mark.parametrize("overlong", ["drop", "split", "truncate", "error"])
def test_an_image_is_never_cut(overlong: str, model: Path, folder: Path) -> None:
    """Three turns with an image each, of which one fits, or two."""
    turn = asked({"type": "image", "image": "a.png"}, {"type": "text", "text": "which?"})["messages"]
    path = tiny.write_rows(folder / "rows.jsonl", [{"messages": turn * 3}, {"messages": turn}])
    whole = examples_of(model, path, "messages")
    of_one = whole.lengths[1]
    most = int(2 * of_one + 3)
    if overlong == "error":
        with pytest.raises(UserError, match=f"{path}:1.*data.max_length is {most}"):
            examples_of(model, path, "messages", max_length=most, overlong=overlong)
        return
    examples = examples_of(model, path, "messages", max_length=most, overlong=overlong)
    per_example = [len(example.sequences[0].media) for example in examples]
    assert per_example == {"drop": [1], "split": [2, 1, 1], "truncate": [2, 1]}[overlong]
    for example in examples:
        (sequence,) = example.sequences
        token = sequence.input_ids[sequence.media[0].begin]
        inside = np.concatenate([np.arange(image.begin, image.end) for image in sequence.media])
        assert np.flatnonzero(sequence.input_ids == token).tolist() == inside.tolist()
        assert len(sequence.input_ids) <= most
        assert sequence.num_targets
    report = examples.report.sources[0]
    assert (report.dropped_overlong, report.split, report.truncated) == (
        *(int(overlong == name) for name in ("drop", "split", "truncate")),
    )


def test_rows_with_images_are_refused_without_the_key(model: Path, folder: Path) -> None:
    path = tiny.write_rows(folder / "rows.jsonl", [asked({"type": "image", "image": "a.png"})])
    with pytest.raises(UserError, match=r"data\.image"):
        examples_of(model, path, "messages", image=None)


def test_a_processor_may_be_in_another_place(model: Path, folder: Path, tmp_path: Path) -> None:
    """Of a model whose own repository has none."""
    path = tiny.write_rows(folder / "rows.jsonl", [asked({"type": "image", "image": "a.png"})])
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in (file for file in model.iterdir() if "processor_config" not in file.name):
        (bare / file.name).symlink_to(file)
    with pytest.raises(UserError, match=r"no image processor that can be loaded: .*`data\.image\.processor`"):
        examples_of(bare, path, "messages")
    (one,), (other,) = (
        examples_of(folder, path, "messages", image=image)
        for folder, image in ((model, {}), (bare, {"processor": str(model)}))
    )
    assert one.sequences[0].input_ids.tolist() == other.sequences[0].input_ids.tolist()
    names = ("preprocessor_config.json", "processor_config.json")
    kept = processor_settings(Base(Model(name=str(bare)), image=(Images(processor=str(model)),)))
    assert kept == {name: (model / name).read_bytes() for name in names}


def test_the_same_words_about_another_image_are_another_example(model: Path, folder: Path) -> None:
    Image.new("RGB", (60, 90), "blue").save(folder / "b.png")
    rows = [asked({"type": "image", "image": name}, {"type": "text", "text": "which?"}) for name in ("a.png", "b.png")]
    examples = examples_of(model, tiny.write_rows(folder / "rows.jsonl", [*rows, rows[0]]), "messages")
    assert examples.report.sources[0].duplicates == 1
    assert json.loads(json.dumps([one.row for one in examples])) == [1, 2, 3]


def test_what_an_image_is_is_shown(model: Path, folder: Path) -> None:
    from finetune.data.token_text import render_rich

    rows = [asked({"type": "text", "text": "which "}, {"type": "image", "image": "a.png"})]
    (example,) = examples_of(model, tiny.write_rows(folder / "rows.jsonl", rows), "messages")
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    (sequence,) = example.sequences
    text = render_rich(sequence, tokenizer).plain
    assert f"which <|vision_start|>[image 1: {folder / 'a.png'}, 60 x 90 pixels, 6 tokens]<|vision_end|>" in text
