"""`check` asks the server that rollouts are sampled by."""

from __future__ import annotations

import re
from pathlib import Path

from finetune.desk.setup.check import check_recipe


def test_a_server_that_is_not_there(online: Path) -> None:
    changes = ["rollouts.engine=vllm", "rollouts.url=http://127.0.0.1:9", "mode=lora", "lora={rank: 4}"]
    changes += ["rollouts.prompts=2", "objective.correction=sequence_mask"]
    message = r"127\.0\.0\.1:9 cannot be reached: .*\. Fix: start the server, such as .* vllm serve"
    assert re.search(message, check_recipe(online, changes, None).error or "")
