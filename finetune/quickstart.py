"""Makes the rows and the tokenizer of recipes/quickstart in runs/quickstart-data: `python -m finetune.quickstart`.

The same as scripts/make_quickstart.py of the repository, for an installed wheel.
"""

from __future__ import annotations

import runpy

from finetune.shipped import SHIPPED

if __name__ == "__main__":
    runpy.run_path(str(SHIPPED / "scripts" / "make_quickstart.py"), run_name="__main__")
