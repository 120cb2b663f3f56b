"""Runs on rows with images, from recipe to a folder that plain transformers loads and generates from."""

from __future__ import annotations

import io
import json
import math
import shutil
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import yaml
from conftest import metrics, serving, train_here
from PIL import Image
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch.nn.functional import logsigmoid
from transformers import AutoModelForImageTextToText, AutoTokenizer

from finetune.checkpoints.trained import find_trained
from finetune.data.dataset import Dataset, build_held_out, build_training, questions
from finetune.data.examples import media_reader
from finetune.data.predictions import LOG_PROBS
from finetune.data.samples import Sequence
from finetune.errors import RunFailure, UserError
from finetune.features import load_recipe
from finetune.models.base_model import Base
from finetune.release.export.commands import ExportOptions, export_run, verify_run
from finetune.release.export.loading import load_trained
from finetune.release.inference.answering import answer_file, answers, chat_with, load_answerer
from finetune.release.inference.chat import chat_with_server, image_part
from finetune.release.inference.live import verify_url
from finetune.release.inference.sampling import Sampling
from finetune.training.run import compute_reference, started
from finetune.training.signals import StopRequest
from finetune.training.teacher import with_teacher


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("image-runs")
    for name in ("smolvlm", "qwen2_5_vl"):
        tiny.save_seeing(folder, name)
    tiny.write_pictures(folder, "pictures", 40)
    tiny.write_pictures(folder, "held_out", 6, seed=1)
    tiny.write_pictures(folder, "pairs", 24, seed=2, pairs=True)
    return folder


def train_on_pictures(folder: Path, name: str, mode: str = "full", **changes: Any) -> Path:
    """Returns the folder of the run, which has its recipe. changes: of the recipe's sections; keys of a section."""
    recipe: dict[str, Any] = {
        "run": {"name": f"{name}-{mode}", "dir": str(folder / "runs")},
        "model": {"name": str(folder / f"{name}_sees"), "train": ["language", "projector"]},
        "mode": mode,
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
    }
    for section, keys in changes.items():
        recipe[section] = {**recipe.get(section, {}), **keys}
    path = folder / f"{recipe['run']['name']}.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    if {"teacher", "reference_model"} & set(recipe.get("objective", {})):
        compute_reference(load_recipe(path), str(path), StopRequest(), console())
    train_here(path)
    return Path(recipe["run"]["dir"]) / recipe["run"]["name"]


OTHER_SETTINGS = '{"size": {"shortest_edge": 784, "longest_edge": 1568}}'  # of a processor of images


def surer(base: Path, folder: Path) -> Path:
    """Returns the folder of a copy that is sure of itself, unlike random weights."""
    shutil.copytree(base, folder)
    model: Any = AutoModelForImageTextToText.from_pretrained(folder)
    model.model.language_model.norm.weight.data.mul_(20)
    model.save_pretrained(folder)
    return folder


class Plain:
    """The examples of a run, each sequence alone through plain transformers."""

    def __init__(self, run: Path, part: str = "eval", differentiable: bool = False):
        self.differentiable = differentiable
        recipe = load_recipe(run / "recipe.yaml")
        base = Base.of(recipe)
        renderer = base.renderer(recipe.objective)
        data, reader = build_held_out(recipe, renderer), media_reader(base.media)
        if part == "train":
            data = with_teacher(recipe, build_training(recipe, renderer), base)
        assert isinstance(data, Dataset)
        assert reader is not None
        self.examples, self._reader = data.examples, reader

    def logits(self, model: Any, ids: Any, images: tuple[Any, ...]) -> torch.Tensor:  # (T, V)
        ids = torch.tensor(np.asarray(ids)[None], dtype=torch.int64)
        pictures = dict(self._reader(images, ids)) if images else {}
        if "image_grid_thw" in pictures:
            pictures["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
        with torch.set_grad_enabled(self.differentiable):
            return model(input_ids=ids, use_cache=False, **pictures).logits[0]

    def log_probs(self, model: Any, one: Sequence) -> tuple[torch.Tensor, torch.Tensor]:  # (S,), (S, V)
        """Returns those of the targets, and of all tokens in their places."""
        targets = torch.from_numpy(one.loss_mask[1:])
        every = self.logits(model, one.input_ids, one.media)[:-1][targets].log_softmax(-1)
        ids = torch.from_numpy(one.input_ids[1:].astype("int64"))[targets]
        return every.gather(1, ids[:, None])[:, 0], every

    def loss(self, model: Any) -> float:
        """The mean over all target tokens."""
        return -torch.cat([self.log_probs(model, e.sequences[0])[0] for e in self.examples]).mean().item()

    def pairs(self, model: Any, mean: bool = False) -> torch.Tensor:  # (E, 2) fp64
        """The log-probabilities of the two sequences of each example, or means over their targets."""
        found = [[self.log_probs(model, one)[0].double() for one in e.sequences] for e in self.examples]
        return torch.tensor([[x.mean() if mean else x.sum() for x in pair] for pair in found])


def plain_answer(model: Any, run: Path, count: int) -> list[list[int]]:
    """The likeliest next tokens of each held-out prompt, by whole forwards without a cache."""
    plain, answers = Plain(run), []
    for question in questions(plain.examples, ()):
        ids = list(question.prompt)
        for _ in range(count):
            ids.append(int(plain.logits(model, ids, question.media)[-1].argmax()))
        answers.append(ids[len(question.prompt) :])
    return answers


def evaluated(run: Path) -> float:
    """The last `eval_loss`."""
    return [line["eval_loss"] for line in metrics(run) if "eval_loss" in line][-1]


def test_full_run_is_what_plain_transformers_computes(seeing: Path) -> None:
    run = train_on_pictures(seeing, "qwen2_5_vl")
    model, report = AutoModelForImageTextToText.from_pretrained(run / "model", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert Plain(run).loss(model.eval()) == pytest.approx(evaluated(run), rel=1e-5)
    with started(load_recipe(run / "recipe.yaml"), "", StopRequest(), console(), None) as trainer:
        assert trainer.evaluator is not None
        _, generations = trainer.evaluator.run()  # of the checkpoint, which is the result's
    (logged,) = [json.loads(line) for line in (run / "generations.jsonl").read_text().splitlines()]
    assert logged["questions"] == [generation.question for generation in generations]
    for generation, name, row in zip(generations, logged["pictures"], logged["rows"], strict=True):
        assert row[0] == generation.prompt
        assert row[0].count("pixels, ") == row[0].count("[image ") == len(generation.media)
        if generation.media:
            with Image.open(run / name) as picture:
                assert picture.width == sum(image.width + 8 for image in generation.media) - 8
    answers = plain_answer(model, run, 4)
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
    assert json.loads((run / "plan.json").read_text())["parts"]["tower"][1] == 0


def test_steps_without_a_picture_leave_tower_and_projector_as_plain_torch_does(seeing: Path, tmp_path: Path) -> None:
    """Their gradient is None there: neither weight decay nor momentum moves them. Also after a resume before the first
    picture, where they have no state yet."""
    tiny.write_pictures(seeing, "rare", 40, seed=3, numbers=(0,) * 7 + (1,))
    changes = {
        "run": {"name": "rare", "dir": str(tmp_path)},
        "model": {"name": str(seeing / "smolvlm_sees"), "train": ["language", "projector", "tower"]},
        "data": {"train": [{"path": str(seeing / "rare.jsonl"), "format": "messages"}], "packing": False},
        "batch": {"rows": 2},
        "optimizer": {"lr": 3e-3, "weight_decay": 0.1, "max_grad_norm": None, "betas": [0.9, 0.95]},
        "schedule": {"name": "constant"},
        "train": {"max_steps": 10, "precision": "fp32"},
        "evaluate": {"at_start": False},
        "checkpoint": {"every_steps": 1, "keep": 20},
        "tracking": {"samples": True},
    }
    run = train_on_pictures(seeing, "smolvlm", **changes)
    losses = [line["loss"] for line in metrics(run) if "loss" in line]
    samples = [json.loads(line) for line in (run / "samples" / "rank-00000.jsonl").read_text().splitlines()]

    plain, model = Plain(run, "train", True), AutoModelForImageTextToText.from_pretrained(seeing / "smolvlm_sees")
    by_row = {f"{example.path}:{example.row}": example.sequences[0] for example in plain.examples}
    groups = [[p for p in model.parameters() if (p.ndim >= 2) == matrices] for matrices in (True, False)]
    optimizer = torch.optim.AdamW(
        [{"params": params, "weight_decay": decay} for params, decay in zip(groups, (0.1, 0.0), strict=True)],
        lr=3e-3,
        betas=(0.9, 0.95),
    )
    seen = []
    for line, loss in zip(samples, losses, strict=True):
        sequences = [by_row[row] for row in line["rows"]]
        seen.append(any(one.media for one in sequences))
        nll = -torch.cat([plain.log_probs(model, one)[0] for one in sequences]).mean()
        assert loss == pytest.approx(nll.item(), rel=2e-6)
        nll.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    assert not seen[0]
    assert seen[1:-1].count(True) >= 2
    assert False in seen[seen.index(True) :]
    for name, tensor in load_file(run / "model" / "model.safetensors").items():
        torch.testing.assert_close(tensor, model.state_dict()[name], rtol=0, atol=1e-5)

    for step in range(2, 11):
        shutil.rmtree(run / "checkpoints" / f"step-{step:08d}")
    train_here(seeing / "rare.yaml")
    again = [line["loss"] for line in metrics(run) if "loss" in line]
    assert again == losses


@pytest.fixture(scope="module")
def full_run(seeing: Path) -> Path:
    run = seeing / "runs" / "qwen2_5_vl-full"
    return run if run.exists() else train_on_pictures(seeing, "qwen2_5_vl")


def test_rows_with_pictures_are_answered_as_plain_transformers_does(
    full_run: Path, seeing: Path, tmp_path: Path
) -> None:
    """As one batch, with columns of images, and by the bounds of the run."""
    rows, out = seeing / "held_out.jsonl", tmp_path / "out.jsonl"
    answer_file(full_run, rows, out, Sampling(4), None, 8, console())
    model = AutoModelForImageTextToText.from_pretrained(full_run / "model").eval()
    answerer = load_answerer(full_run)
    written = plain_answer(model, full_run, 4)
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    kept = [list(takewhile(lambda token: token not in ends, ids)) for ids in written]
    wanted = [answerer.tokenizer.decode(ids, skip_special_tokens=True) for ids in kept]
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


@pytest.mark.long
def test_an_openai_client_gets_the_greedy_answers_to_pictures(
    full_run: Path, seeing: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a run and of a model folder; a chat on the terminal has the same, here and there, and `verify --url`, too."""
    import openai

    from finetune.release.inference.serve import load_served

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
            with pytest.raises(openai.BadRequestError, match="images must be data URLs"):
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
        assert "gone: this image cannot be read" in shown[0]
        first = json.loads((tmp_path / "here").read_text())["messages"][0]["content"]
        assert first == [image_part(pictures[0]), {"type": "text", "text": "which?"}]
        live = verify_url(url, find_trained(full_run), "qwen", None, 6, console())
        assert (live.top1, live.prompts, live.gap_max) == (1, 1, 0)


@pytest.mark.parametrize(
    ("objective", "another"),
    [
        ("dpo", False),
        pytest.param("kto", False, marks=pytest.mark.long),
        pytest.param("orpo", False, marks=pytest.mark.long),
        pytest.param("dpo", True, marks=pytest.mark.long),
    ],
)
def test_preferences_of_pictures_are_what_plain_transformers_computes(
    objective: str, another: bool, seeing: Path
) -> None:
    """DPO: arXiv:2305.18290, equation 7; KTO: arXiv:2402.01306, equations 7 and 8, with answers of other rows; ORPO:
    arXiv:2403.07691, equations 6 and 7. Each prompt is computed for each answer, and the plan says so.

    another: model is the reference, which must not see pictures by other settings."""
    base = seeing / "qwen2_5_vl_sees"
    compared_with = surer(base, seeing / "another") if another else base
    named: dict[str, Any] = {"reference_model": str(compared_with)} if another else {}
    source = {"path": str(seeing / "pairs.jsonl"), "format": "preference"}
    run = train_on_pictures(
        seeing,
        "qwen2_5_vl",
        run={"name": f"{objective}-{another}"},
        objective={"name": objective, **named},
        data={"train": [source], "eval": [{**source, "limit": 8}], "max_length": 256},
        evaluate={"generate": 0},
    )
    folders = (run / "model", compared_with)
    policy, reference = (AutoModelForImageTextToText.from_pretrained(folder).eval() for folder in folders)
    plain, beta = Plain(run), 0.1
    if objective == "orpo":
        averages = plain.pairs(policy, mean=True)
        odds = (averages - torch.log1p(-averages.exp())).T
        chosen = [plain.log_probs(policy, example.sequences[0])[0] for example in plain.examples]
        loss = -torch.cat(chosen).mean() - beta * logsigmoid(odds[0] - odds[1]).mean()
    else:
        first, second = (beta * (plain.pairs(policy) - plain.pairs(reference))).T
        if objective == "dpo":
            loss = -logsigmoid(first - second).mean()
        else:
            signs = torch.tensor([2 * example.columns["label"] - 1 for example in plain.examples])
            loss = (1 - (signs * (first - second.mean().clamp(min=0))).sigmoid()).mean()
            sources = [[[image.source for image in one.media] for one in e.sequences] for e in plain.examples]
            assert [own for own, _ in sources] == [mismatched for _, mismatched in sources]  # the prompt's
            assert any(own for own, _ in sources)
        assert abs(loss - {"dpo": math.log(2), "kto": 0.5}[objective]) > 1e-3  # the policy is another by now
    assert loss.item() == pytest.approx(evaluated(run), rel=1e-5)
    said = json.loads((run / "plan.json").read_text())["shared_prompts"]
    assert said == (None if objective == "kto" else "computed for each answer: documents have images")
    if another:
        (compared_with / "preprocessor_config.json").write_text(OTHER_SETTINGS)
        with pytest.raises(UserError, match=r"objective\.reference_model.*reads images in another way"):
            train_here(seeing / f"{objective}-{another}.yaml")


@pytest.mark.long
def test_a_teacher_that_sees_is_what_plain_transformers_says(seeing: Path, tmp_path: Path) -> None:
    """Of two rows whose pictures differ by colour alone, which are the same tokens, too. Who is taught by himself has
    nothing to learn: the student sees the same pictures."""
    teacher = surer(seeing / "qwen2_5_vl_sees", tmp_path / "teacher")
    model = AutoModelForImageTextToText.from_pretrained(teacher).eval()
    rows = [json.loads(line) for line in (seeing / "pictures.jsonl").read_text().splitlines()[:8]]
    for colour in ("red", "blue"):
        Image.new("RGB", (60, 90), colour).save(seeing / f"{colour}.png")
        asked = [{"type": "image", "image": f"{colour}.png"}, {"type": "text", "text": "which?"}]
        rows.append({"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": "this one"}]})
    source = [{"path": str(tiny.write_rows(seeing / "taught.jsonl", rows)), "format": "messages"}]
    changes: dict[str, Any] = {
        "run": {"name": "distill"},
        "model": {"name": str(teacher)},
        "data": {"train": source},
        "objective": {"name": "distill", "teacher": str(teacher), "top_k": 5},
        "evaluate": {"generate": 0},
    }
    run = train_on_pictures(seeing, "qwen2_5_vl", **changes)
    plain = Plain(run, "train")
    predicted = []
    for example in plain.examples:
        _, every = plain.log_probs(model, example.sequences[0])
        columns = {name: torch.from_numpy(values) for name, values in example.target_columns.items()}
        torch.testing.assert_close(columns[LOG_PROBS], every.topk(5).values, rtol=0, atol=1e-4)
        predicted.append(columns[LOG_PROBS])
    assert (predicted[-1] - predicted[-2]).abs().max() > 1e-2
    first = next(line for line in metrics(run) if "loss" in line)
    assert abs(first["divergence"]) < 1e-6
    (teacher / "preprocessor_config.json").write_text(OTHER_SETTINGS)
    with pytest.raises(UserError, match="reads images in another way than the trained model"):
        train_on_pictures(seeing, "qwen2_5_vl", **{**changes, "model": {}, "run": {"name": "distill-other"}})


@pytest.mark.long
def test_qlora_in_bf16_answers_as_its_adapter_on_the_base(seeing: Path) -> None:
    """To what packing and rounding change: the tower's weights are exact, 4 bits of the language model's are not."""
    run = train_on_pictures(
        seeing,
        "smolvlm",
        mode="qlora",
        model={"train": ["language", "projector", "tower"]},
        lora={"rank": 2, "alpha": 4},
        quantization={"type": "nf4"},
        train={"precision": "bf16"},
    )
    losses = [line["loss"] for line in metrics(run) if "loss" in line]
    assert losses[-1] < losses[0]
    plain = Plain(run).loss(load_trained(run / "model").float().eval())
    assert plain == pytest.approx(evaluated(run), rel=2**-6)


def test_adapter_is_merged_for_the_whole_model(seeing: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"lora": {"rank": 2, "alpha": 4}, "data": {"image": {"max_pixels": 56 * 56}}}
    run = train_on_pictures(seeing, "smolvlm", mode="lora", **changes)
    model = load_trained(run / "model").eval()
    plain = Plain(run)
    assert plain.loss(model) == pytest.approx(evaluated(run), rel=1e-5)
    names = [name for name, _ in model.named_parameters() if "lora_" in name]
    assert {"connector" in name or "text_model" in name for name in names} == {True}
    assert any("connector" in name for name in names)
    for step in (None, "3"):  # the result, and its last checkpoint
        out = tmp_path / f"merged-{step}"
        compared = export_run(run, ExportOptions(out=out, step=step), console())
        assert compared["kl_mean"] < 1e-9
        merged = AutoModelForImageTextToText.from_pretrained(out).eval()
        assert plain.loss(merged) == pytest.approx(evaluated(run), rel=1e-5)
        assert (out / "processor_config.json").is_file()
        for folder in (out, run / "model"):
            assert json.loads((folder / "preprocessor_config.json").read_text())["size"] == {"longest_edge": 56}
    figures = verify_run(tmp_path / "merged-3", run, None, None, 6, console())
    assert (figures.greedy, figures.top1) == (1.0, 1.0)


@pytest.mark.parametrize(
    "broken", ["projector", *(pytest.param(one, marks=pytest.mark.long) for one in ("size", "missing"))]
)
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


def result_of(folder: Path, name: str, out: Path) -> Path:
    """A full run on pictures as it ends, whose weights are still the base's."""
    base = folder / f"{name}_sees"
    shutil.copytree(base, out / "model")
    (out / "model" / "generation_config.json").write_text('{"eos_token_id": 2}')
    rows = [{"path": str(folder / "held_out.jsonl"), "format": "messages"}]
    recipe = {
        "run": {"name": name},
        "model": {"name": str(base), "train": ["language", "projector"]},
        "mode": "full",
        "data": {"train": rows, "max_length": 128, "image": {}},
        "batch": {"rows": 4},
        "optimizer": {"lr": 3e-3},
        "train": {"max_steps": 3, "precision": "fp32"},
    }
    (out / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return out


def test_of_a_run_on_pictures_gguf_has_the_language_model(seeing: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    run, said = result_of(seeing, "smolvlm", tmp_path / "run"), io.StringIO()
    options = ExportOptions("gguf", out=tmp_path / "out", dtype="f32")
    compared = export_run(run, options, Console(file=said, width=400))
    assert compared["kl_mean"] < 1e-12
    assert compared["top1"] == 1
    assert "has the language model alone: pictures need a second file, which llama.cpp's" in said.getvalue()
    assert "convert_hf_to_gguf.py FOLDER --mmproj" in said.getvalue()


@pytest.mark.parametrize(("name", "kind"), [("smolvlm", "int8"), ("qwen2_5_vl", "fp8")])
def test_eight_bits_leave_the_tower_as_it_is(name: str, kind: str, seeing: Path, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    run = result_of(seeing, name, tmp_path / "run")
    compared = export_run(run, ExportOptions(out=tmp_path / "out", quantized=kind), console())
    assert 1e-10 < compared["kl_mean"] < 1e-2
    before, after = (load_file(folder / "model.safetensors") for folder in (run / "model", tmp_path / "out"))
    scaled = {key.removesuffix("_scale") for key in after if key.endswith(".weight_scale")}
    assert len(scaled) == 14  # of two layers, q, k, v, o and three more
    kept = before.keys() - scaled
    assert all(torch.equal(before[key], after[key]) for key in kept)
    assert any("vision" in key or "visual" in key for key in kept)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    ignored = config["quantization_config"]["ignore"]
    assert "lm_head" in ignored
    assert all("vision" in one or "visual" in one or "connector" in one or one == "lm_head" for one in ignored)
    config["quantization_config"]["ignore"] = [*ignored, "model.text_model.layers.0.self_attn.q_proj"]
    if kind == "int8":
        (tmp_path / "out" / "config.json").write_text(json.dumps(config))
        with pytest.raises(RunFailure, match=r"q_proj is in eight bits, and config\.json says otherwise"):
            verify_run(tmp_path / "out", run, None, None, 6, console())


def console() -> Console:
    return Console(quiet=True)
