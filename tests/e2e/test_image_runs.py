"""Runs on rows with images, from recipe to a folder that plain transformers loads and generates from."""

from __future__ import annotations

import io
import json
import math
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import yaml
from conftest import metrics, serving, train_here
from PIL import Image
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, AutoTokenizer

from finetune.data.dataset import build_held_out, questions
from finetune.data.examples import image_reader
from finetune.errors import RunFailure, UserError
from finetune.export.answering import answer_file, answers, chat_with, load_answerer
from finetune.export.chat import chat_with_server, image_part
from finetune.export.commands import ExportOptions, export_run, load_trained, verify_run
from finetune.export.live import verify_url
from finetune.export.sampling import Sampling
from finetune.export.trained import find_trained
from finetune.models.config import load_tokenizer
from finetune.recipe import load_recipe
from finetune.training.run import _started
from finetune.training.signals import StopRequest


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("image-runs")
    for name in ("smolvlm", "qwen2_5_vl"):
        tiny.save_seeing(folder, name)
    tiny.write_pictures(folder, "pictures", 40)
    tiny.write_pictures(folder, "held_out", 6, seed=1)
    tiny.write_pictures(folder, "pairs", 24, seed=2, pairs=True)
    return folder


def train_on_pictures(folder: Path, name: str, **changes: Any) -> Path:
    recipe = {
        "run": {"name": f"{name}-{changes['mode']}", "dir": str(folder / "runs")},
        "model": {"name": str(folder / f"{name}_sees"), "train": ["language", "projector"]},
        "data": {
            "train": [{"path": str(folder / "pictures.jsonl"), "format": "messages"}],
            "eval": [{"path": str(folder / "held_out.jsonl"), "format": "messages"}],
            "max_length": 128,
            "image": {},
        },
        "batch": {"rows": 4},
        "optimizer": {"lr": 3e-3},
        "train": {"max_steps": 3, "precision": "fp32"},
        "evaluate": {"at_start": False, "generate": 6, "max_new_tokens": 4},
        "checkpoint": {"every_steps": 3},
        **changes,
    }
    path = folder / f"{name}-{changes['mode']}.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    train_here(path)
    return folder / "runs" / recipe["run"]["name"]


@torch.no_grad()
def plain_loss(model: Any, recipe: Path) -> float:
    """The mean over the held-out target tokens, one document at a time, by a plain forward."""
    loaded = load_recipe(recipe)
    tokenizer = load_tokenizer(loaded.model)
    held_out, reader = build_held_out(loaded, tokenizer), image_reader(loaded, tokenizer)
    assert held_out is not None
    assert reader is not None
    losses = []
    for example in held_out.examples:
        (sequence,) = example.sequences
        ids = torch.from_numpy(sequence.input_ids.astype("int64"))[None]
        pictures = reader(sequence.images, ids) if sequence.images else {}
        if "image_grid_thw" in pictures:
            pictures["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
        logits = model(input_ids=ids, **pictures).logits[0, :-1]
        targets = torch.from_numpy(sequence.loss_mask[1:])
        losses.append(torch.nn.functional.cross_entropy(logits[targets], ids[0, 1:][targets], reduction="none"))
    return torch.cat(losses).mean().item()


@torch.no_grad()
def plain_answer(model: Any, recipe: Path, count: int) -> list[list[int]]:
    """The likeliest next tokens of each held-out prompt, by whole forwards without a cache."""
    loaded = load_recipe(recipe)
    tokenizer = load_tokenizer(loaded.model)
    held_out, reader = build_held_out(loaded, tokenizer), image_reader(loaded, tokenizer)
    assert held_out is not None
    assert reader is not None
    answers = []
    for question in questions(held_out.examples, ()):
        ids = torch.tensor([question.prompt])
        for _ in range(count):
            pictures = reader(question.images, ids) if question.images else {}
            if "image_grid_thw" in pictures:
                pictures["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
            logits = model(input_ids=ids, use_cache=False, **pictures).logits
            ids = torch.cat([ids, logits[:, -1].argmax(-1)[:, None]], dim=1)
        answers.append(ids[0, len(question.prompt) :].tolist())
    return answers


def test_full_run_is_what_plain_transformers_computes(seeing: Path) -> None:
    run = train_on_pictures(seeing, "qwen2_5_vl", mode="full")
    model, report = AutoModelForImageTextToText.from_pretrained(run / "model", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    evaluated = [line["eval_loss"] for line in metrics(run) if "eval_loss" in line]
    assert plain_loss(model.eval(), seeing / "qwen2_5_vl-full.yaml") == pytest.approx(evaluated[-1], rel=1e-5)
    with _started(load_recipe(seeing / "qwen2_5_vl-full.yaml"), "", StopRequest(), console(), None) as trainer:
        assert trainer.evaluator is not None
        _, generations = trainer.evaluator.run()  # of the checkpoint, which is the result's
    (logged,) = [json.loads(line) for line in (run / "generations.jsonl").read_text().splitlines()]
    for generation, name, row in zip(generations, logged["pictures"], logged["rows"], strict=True):
        assert row[0] == generation.prompt
        assert row[0].count("pixels, ") == row[0].count("[image ") == len(generation.images)
        if generation.images:
            with Image.open(run / name) as picture:
                assert picture.width == sum(image.width + 8 for image in generation.images) - 8
    answers = plain_answer(model, seeing / "qwen2_5_vl-full.yaml", 4)
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    for generation, answer in zip(generations, answers, strict=True):
        assert tokenizer.decode(answer, skip_special_tokens=True).startswith(generation.output)
        assert generation.output or answer[0] in trainer.end_ids
    base, trained = (load_file(folder / "model.safetensors") for folder in (seeing / "qwen2_5_vl_sees", run / "model"))
    assert base.keys() == trained.keys()
    moved = {name for name in base if not torch.equal(base[name], trained[name])}
    assert moved
    assert not [name for name in moved if "visual" in name and "merger" not in name]
    assert (run / "model" / "preprocessor_config.json").is_file()
    assert json.loads((run / "plan.json").read_text())["parts"]["vision"][1] == 0


@pytest.fixture(scope="module")
def full_run(seeing: Path) -> Path:
    run = seeing / "runs" / "qwen2_5_vl-full"
    return run if run.exists() else train_on_pictures(seeing, "qwen2_5_vl", mode="full")


def test_rows_with_pictures_are_answered_as_plain_transformers_does(
    full_run: Path, seeing: Path, tmp_path: Path
) -> None:
    """As one batch, with columns of images, and by the bounds of the run."""
    rows, out = seeing / "held_out.jsonl", tmp_path / "out.jsonl"
    answer_file(full_run, rows, out, Sampling(4), None, 8, console())
    model = AutoModelForImageTextToText.from_pretrained(full_run / "model").eval()
    answerer = load_answerer(full_run)
    written = plain_answer(model, seeing / "qwen2_5_vl-full.yaml", 4)
    wanted = [answerer._read(ids, model.generation_config, ()).text for ids in written]
    assert [json.loads(line)["answer"] for line in out.read_text().splitlines()] == wanted
    messages = [json.loads(line)["messages"][:1] for line in rows.read_text().splitlines()]
    content = next(one["content"] for (one,) in messages if isinstance(one["content"], list))
    names = [part["image"] for part in content if part["type"] == "image"]
    columns = {"prompt": "<image>" * len(names) + content[-1]["text"], "images": names}
    source = tiny.write_rows(seeing / "columns.jsonl", [columns])
    answer_file(full_run, source, tmp_path / "columns.jsonl", Sampling(4), None, 8, console())
    assert json.loads((tmp_path / "columns.jsonl").read_text())["answer"] in wanted
    bounded = tmp_path / "bounded"
    shutil.copytree(full_run, bounded)
    recipe = (bounded / "recipe.yaml").read_text().replace("max_pixels: null", "max_pixels: 1568")
    (bounded / "recipe.yaml").write_text(recipe)
    asked, shorter = ([{"role": "user", "content": content}], load_answerer(bounded))
    sizes = [len(one.prompt(asked, data_file=str(rows)).ids) for one in (answerer, shorter)]
    assert sizes[1] < sizes[0]
    for path, message in ((tmp_path / "gone.png", "cannot be read: No such file"), (rows, "not an image of a kind")):
        with pytest.raises(UserError, match=message):
            answers(full_run, ["what?"], Sampling(4), images=[path])
    (seeing / "bad.jsonl").write_text(json.dumps({**columns, "images": ["../secret.png"] * len(names)}) + "\n")
    with pytest.raises(UserError, match=r"bad.jsonl, row 1: ../secret.png: leads out of"):
        answer_file(full_run, seeing / "bad.jsonl", tmp_path / "bad.jsonl", Sampling(4), None, 8, console())


def test_an_openai_client_gets_the_greedy_answers_to_pictures(
    full_run: Path, seeing: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a run and of a model folder; a chat on the terminal has the same, here and there, and `verify --url`, too."""
    import openai

    from finetune.export.serving import load_served

    pictures = sorted((seeing / "held_out").iterdir())[:2]
    folders = {"qwen": full_run, "smol": seeing / "smolvlm_sees"}
    with serving(load_served(list(folders.items()), "cpu")) as url, openai.OpenAI(base_url=url, api_key="-") as client:

        def asked(name: str, parts: list[Any], **more: Any) -> Any:
            content = [*parts, {"type": "text", "text": "which colour?"}]
            messages: list[Any] = [{"role": "user", "content": content}]
            return client.chat.completions.create(model=name, messages=messages, temperature=0, max_tokens=6, **more)

        for name, folder in folders.items():
            found = set()
            for seen in ([pictures[0]], [pictures[1]], pictures, []):
                (wanted,) = answers(folder, ["which colour?"], Sampling(6), images=seen)
                said = asked(name, [image_part(path) for path in seen])
                pieces = asked(name, [image_part(path) for path in seen], stream=True)
                streamed = "".join(piece.choices[0].delta.content or "" for piece in pieces)
                assert said.choices[0].message.content == wanted
                assert streamed.rstrip("\ufffd") == wanted.rstrip("\ufffd")  # a part of a character is not streamed
                found.add(wanted)
            assert len(found) > 2
        for reference in ("pictures/0-0.png", "file:///etc/passwd", "http://127.0.0.1/a.png"):
            with pytest.raises(openai.BadRequestError, match="pictures are taken as data URLs"):
                asked("qwen", [{"type": "image_url", "image_url": {"url": reference}}])
        with pytest.raises(openai.BadRequestError, match="not an image of a kind"):
            asked("qwen", [{"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}])

        typed = f"/image {pictures[0]}\n/image {tmp_path / 'gone'}\nwhich?\nand now?\n"
        shown = []
        for chat, saved in ((partial(chat_with, full_run), "here"), (partial(chat_with_server, url, "qwen"), "there")):
            monkeypatch.setattr("sys.stdin", io.StringIO(f"{typed}/save {tmp_path / saved}\n"))
            chat(Sampling(6), None)
            shown.append(capsys.readouterr().out.rpartition("saved to")[0].replace("\ufffd", ""))
        assert shown[0] == shown[1]
        assert "gone: this picture cannot be read" in shown[0]
        first = json.loads((tmp_path / "here").read_text())["messages"][0]["content"]
        assert first == [image_part(pictures[0]), {"type": "text", "text": "which?"}]
        live = verify_url(url, find_trained(full_run), "qwen", None, 6, console())
        assert (live.top1, live.prompts, live.gap_max) == (1, 1, 0)


@torch.no_grad()
def plain_preference(policy: Any, reference: Any, recipe: Path) -> float:
    """DPO's loss (arXiv:2305.18290, equation 7) over the held-out pairs, one answer at a time, by plain forwards."""
    loaded = load_recipe(recipe)
    tokenizer = load_tokenizer(loaded.model)
    held_out, reader = build_held_out(loaded, tokenizer), image_reader(loaded, tokenizer)
    assert held_out is not None
    assert reader is not None
    losses = []
    for example in held_out.examples:
        rewards = []
        for answer in example.sequences:
            ids = torch.from_numpy(answer.input_ids.astype("int64"))[None]
            pictures = reader(answer.images, ids) if answer.images else {}
            if pictures:
                pictures["mm_token_type_ids"] = (ids == policy.config.image_token_id).int()
            targets = torch.from_numpy(answer.loss_mask[1:])
            logits = (model(input_ids=ids, **pictures).logits[0, :-1][targets] for model in (policy, reference))
            mine, other = (one.log_softmax(-1).gather(1, ids[0, 1:][targets][:, None]).sum() for one in logits)
            rewards.append(0.1 * (mine - other))
        losses.append(-torch.nn.functional.logsigmoid(rewards[0] - rewards[1]))
    return torch.stack(losses).mean().item()


def test_preferences_of_pictures_are_what_plain_transformers_computes(seeing: Path) -> None:
    source = [{"path": str(seeing / "pairs.jsonl"), "format": "preference"}]
    run = train_on_pictures(
        seeing,
        "qwen2_5_vl",
        mode="full",
        run={"name": "dpo", "dir": str(seeing / "runs")},
        objective={"name": "dpo"},
        data={"train": source, "eval": source, "max_length": 256, "image": {}},
        evaluate={"at_start": False},
    )
    evaluated = [line["eval_loss"] for line in metrics(run) if "eval_loss" in line]
    folders = (run / "model", seeing / "qwen2_5_vl_sees")
    policy, reference = (AutoModelForImageTextToText.from_pretrained(folder).eval() for folder in folders)
    plain = plain_preference(policy, reference, seeing / "qwen2_5_vl-full.yaml")
    assert plain == pytest.approx(evaluated[-1], rel=1e-5)
    assert abs(plain - math.log(2)) > 1e-3  # the policy is another than the reference by now


def test_qlora_in_bf16_answers_as_its_adapter_on_the_base(seeing: Path) -> None:
    """To what packing and rounding change: the tower's weights are exact, 4 bits of the language model's are not."""
    run = train_on_pictures(
        seeing,
        "smolvlm",
        mode="qlora",
        model={"name": str(seeing / "smolvlm_sees"), "train": ["language", "projector", "vision"]},
        lora={"rank": 2, "alpha": 4},
        quantization={"type": "nf4"},
        train={"max_steps": 3, "precision": "bf16"},
    )
    losses = [line["loss"] for line in metrics(run) if "loss" in line]
    evaluated = [line["eval_loss"] for line in metrics(run) if "eval_loss" in line]
    assert losses[-1] < losses[0]
    plain = plain_loss(load_trained(run / "model").float().eval(), seeing / "smolvlm-qlora.yaml")
    assert plain == pytest.approx(evaluated[-1], rel=2**-6)


def test_adapter_is_merged_for_the_whole_model(seeing: Path, tmp_path: Path) -> None:
    run = train_on_pictures(seeing, "smolvlm", mode="lora", lora={"rank": 2, "alpha": 4})
    model = load_trained(run / "model").eval()
    evaluated = [line["eval_loss"] for line in metrics(run) if "eval_loss" in line]
    recipe = seeing / "smolvlm-lora.yaml"
    assert plain_loss(model, recipe) == pytest.approx(evaluated[-1], rel=1e-5)
    names = [name for name, _ in model.named_parameters() if "lora_" in name]
    assert {"connector" in name or "text_model" in name for name in names} == {True}
    assert any("connector" in name for name in names)
    for step in (None, "3"):  # the result, and its last checkpoint
        out = tmp_path / f"merged-{step}"
        compared = export_run(run, ExportOptions(out=out, step=step), console())
        assert compared["kl_mean"] < 1e-9
        merged = AutoModelForImageTextToText.from_pretrained(out).eval()
        assert plain_loss(merged, recipe) == pytest.approx(evaluated[-1], rel=1e-5)
        assert (out / "processor_config.json").is_file()
    figures = verify_run(tmp_path / "merged-3", run, None, None, 6, console())
    assert (figures.greedy, figures.top1) == (1.0, 1.0)


@pytest.mark.parametrize("broken", ["projector", "size", "missing"])
def test_an_export_that_sees_otherwise_is_found(broken: str, full_run: Path, tmp_path: Path) -> None:
    run = full_run
    out = tmp_path / "copy"
    shutil.copytree(run / "model", out)
    assert verify_run(out, run, None, None, 6, console()).greedy == 1
    settings, weights = out / "preprocessor_config.json", load_file(out / "model.safetensors")
    if broken == "projector":
        name = next(name for name in sorted(weights) if "visual.merger" in name and name.endswith("weight"))
        save_file({**weights, name: weights[name] * 1.5}, out / "model.safetensors", {"format": "pt"})
        message = "mean KL per trained token"
    elif broken == "size":
        smaller = json.loads(settings.read_text()) | {"size": {"shortest_edge": 784, "longest_edge": 1568}}
        settings.write_text(json.dumps(smaller))
        message = r"has other tokens[^$]*preprocessor_config.json: size is"
    else:
        settings.unlink()
        message = "preprocessor_config.json is missing"
    with pytest.raises(RunFailure, match=message):
        verify_run(out, run, None, None, 6, console())


def console() -> Console:
    return Console(quiet=True)
