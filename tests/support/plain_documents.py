"""The documents of a run with media, each alone through plain transformers: its losses, and a loop over its steps;
and answers to files."""

from __future__ import annotations

import json
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForMultimodalLM

from finetune.data.dataset import build_training, on_disk
from finetune.data.examples import Examples, media_reader
from finetune.data.media.family_table import family_of
from finetune.data.samples import Sequence
from finetune.features import load_recipe
from finetune.models.base_model import Base
from finetune.models.towers import part_of


def metric(run: Path, key: str) -> list[float]:
    """The values of a metric in a run's log, in order."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [line[key] for line in lines if key in line]


class Plain:
    """The examples of a run, each alone through plain transformers."""

    def __init__(self, run: Path):
        recipe = load_recipe(run / "recipe.yaml")
        base = Base.of(recipe)
        self.examples: Examples = on_disk(build_training(recipe, base.renderer(recipe.objective))).examples
        self.reader: Any = media_reader(base.media)

    def losses(self, model: Any, one: Sequence) -> torch.Tensor:  # (S,)
        ids = torch.from_numpy(one.input_ids[None].astype(np.int64))
        inputs = self.reader.plain_inputs(one.media, ids)
        logits = model(input_ids=ids, use_cache=False, **inputs).logits[0, :-1]
        targets = torch.from_numpy(one.loss_mask[1:])
        return torch.nn.functional.cross_entropy(logits[targets], ids[0, 1:][targets], reduction="none")

    def loss(self, model: Any) -> float:
        with torch.no_grad():
            return float(torch.cat([self.losses(model, one.sequences[0]) for one in self.examples]).mean())


def own_loop(run: Path, base: Path, trained: list[str], eps: float = 1e-8) -> list[float]:
    """The losses of a loop over plain transformers on the rows of the run's steps, one document at a time: AdamW of
    3e-3 and (0.9, 0.95), a decay of 0.1. trained: parts, as in `model.train`; eps: of AdamW."""
    plain, model = Plain(run), AutoModelForMultimodalLM.from_pretrained(base)
    family = family_of(model.config, load_recipe(run / "recipe.yaml").data.media_kinds)
    kept = (*(path for row in family.each for path in row.unused), *family.others)
    named = [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if part_of(family, name) in trained and not any(f".{path}." in name for path in kept)
    ]
    groups = [[p for _, p in named if (p.ndim >= 2) == matrices] for matrices in (True, False)]
    optimizer = torch.optim.AdamW(
        [{"params": params, "weight_decay": decay} for params, decay in zip(groups, (0.1, 0.0), strict=True)],
        lr=3e-3,
        betas=(0.9, 0.95),
        eps=eps,
    )
    by_row = {f"{example.path}:{example.row}": example.sequences[0] for example in plain.examples}
    losses = []
    for line in (run / "samples" / "rank-00000.jsonl").read_text(encoding="utf-8").splitlines():
        rows = [by_row[row] for row in json.loads(line)["rows"]]
        nll = torch.cat([plain.losses(model, row) for row in rows]).mean()
        optimizer.zero_grad()
        nll.backward()
        if not any(row.media for row in rows):  # Gemma 3n: zeros, of an id without use
            for name, parameter in named:
                parameter.grad = parameter.grad if part_of(family, name) == "language" else None
        optimizer.step()
        losses.append(nll.item())
    return losses


def likeliest_answer(answerer: Any, folder: Path, messages: list[dict[str, Any]], rows: Path, tokens: int) -> str:
    """The likeliest tokens by whole forwards of plain transformers without a cache, up to the first end token.

    answerer: `load_answerer` of the folder, for ids and inputs of files; rows: the file whose folder has them."""
    model = AutoModelForMultimodalLM.from_pretrained(folder).eval()
    prompt = answerer.prompt(messages, data_file=str(rows))
    ids = list(prompt.ids)
    for _ in range(tokens):
        batch = torch.tensor([ids])
        with torch.no_grad():
            logits = model(batch, use_cache=False, **answerer.file_inputs(prompt.media, batch)).logits
        ids.append(int(logits[0, -1].argmax()))
    ends = model.generation_config.eos_token_id
    kept = takewhile(lambda token: token != ends, ids[len(prompt.ids) :])
    return answerer.tokenizer.decode(list(kept), skip_special_tokens=True)
