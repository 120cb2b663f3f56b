"""The promise, measured: the same recipe on every accelerate config, step by step against one process.

    python scripts/proofs/parity_matrix.py                      # everything that fits this machine
    python scripts/proofs/parity_matrix.py --only zero3 lora    # configs or cases whose names contain one of the words
    python scripts/proofs/parity_matrix.py --covering 7         # a quarter that covers: `./scripts/test.sh --all`

The cases are in `tests/support/parity.py`. Each accelerate config is launched once and runs all its cases in that one
group. Exit status 1 if a difference exceeds its tolerance.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "support"))

import parity


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="names of configs, cases, or sizes such as x4")
    parser.add_argument("--covering", type=int, metavar="SEED", help="cells that `parity.covering` draws")
    parser.add_argument("--json", type=Path, help="write the matrix there")
    parser.add_argument("--folder", type=Path, help="work there and keep everything")
    arguments = parser.parse_args()
    if unknown := [word for word in arguments.only if not parity.selected([word])]:
        parser.error(f"--only: no config, case or size is called {', '.join(map(repr, unknown))}")
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="finetune-parity-"))
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["FINETUNE_CACHE"] = str(folder / "cache")
    os.environ["HF_HUB_OFFLINE"] = "1"
    parity.prepare(folder)
    launches = parity.selected(arguments.only) if arguments.covering is None else parity.covering(arguments.covering)
    needed = [case.name for case in parity.CASES if any(case in cases for _, _, cases in launches)]
    parity.launch(folder, "single", 1, needed)
    differences = []
    for config, processes, cases in launches:
        print(f"{config} x{processes}: {len(cases)} cases", file=sys.stderr, flush=True)
        parity.launch(folder, config, processes, [case.name for case in cases])
        differences += [parity.compare(folder, config, processes, case) for case in cases]
    parity.show(differences)
    if arguments.json:
        parity.write_json(arguments.json, "scripts/proofs/parity_matrix.py", [vars(d) for d in differences])
    if not arguments.folder:
        shutil.rmtree(folder)
    return 0 if all(d.passed for d in differences) else 1


if __name__ == "__main__":
    raise SystemExit(main())
