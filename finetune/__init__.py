"""Fine-tune language models: the recipe fixes the maths, the accelerate config only decides where it runs.

`load_recipe`, `train`, `generate`, `evaluate`, `export` and `verify` (finetune/api.py) are what a notebook or a script
needs. They are imported when they are used: `import finetune` takes no time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from finetune.api import evaluate, export, generate, load_recipe, train, verify

__version__ = "0.1.0"
__all__ = ["__version__", "evaluate", "export", "generate", "load_recipe", "train", "verify"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from finetune import api

    return getattr(api, name)
