"""Every causal class of the installed transformers: can stages of a pipeline hold its layers?

    python scripts/proofs/stages.py [llama qwen3 ...]

One line a class (`model_type`), from a tiny config with the class's own defaults: `same`, or the reason why not.
"""

from __future__ import annotations

import sys
from collections import Counter

from architectures import NO_MODEL, tiny
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from finetune.engine.stage_trial import stage_problem
from finetune.models.trials import FAILURES, failure_text


def main(names: list[str]) -> None:
    counts = Counter[bool]()
    for name in names or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        if name in NO_MODEL:
            continue
        try:
            reason = stage_problem(tiny(name))
        except FAILURES as error:
            reason = f"no tiny config ({failure_text(error)})"
        counts[reason is None] += 1
        print(f"{name:28} {reason or 'same'}", flush=True)
    print(f"{counts[True]} of {counts.total()} can be held")


if __name__ == "__main__":
    main(sys.argv[1:])
