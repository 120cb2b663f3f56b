"""The page of `plan`: every phase of memory, nothing from elsewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from finetune.desk.view.memory_page import write_page
from finetune.features import load_recipe
from finetune.plan.answer import SHOWN
from finetune.plan.command import PlanOptions, plan
from finetune.plan.search import SearchResult
from finetune.plan.tables import parse_machines

SHORT = ("train.max_steps=60", "schedule.warmup_steps=6", "train.precision=bf16", "data.max_length=64", "batch.rows=4")


def test_the_page_draws_every_phase_and_asks_for_nothing(
    recipe: dict[str, Any], write_recipe: Any, tmp_path: Path
) -> None:
    request, choices, _ = plan(write_recipe(recipe), SHORT, PlanOptions(("2xH100-80",)), load_recipe)
    machines = choices[0].machines
    none = SearchResult(parse_machines("2xV100-16", 1, request.hardware), [], {"ddp": "a <rule>"})
    write_page(tmp_path / "plan.html", request, choices, [SearchResult(machines, choices), none])
    page = (tmp_path / "plan.html").read_text()
    assert page.count("<figure>") == 6
    assert all(f">{phase}</text>" in page for phase in choices[0].memory.phases)
    assert "a &lt;rule&gt;" in page
    assert page.count('<th scope="row">') == min(len(choices), SHOWN)
    assert page.count('<tr class="answer">') == 1
    assert f'<td class="n">{choices[0].price or 0:,.2f} USD</td>' in page
    assert f'<td class="n">{choices[0].hours or 0:.2f}</td>' in page
    assert "<script" not in page
    assert not re.search(r"(src|href)=|url\(", page)  # sources are text
