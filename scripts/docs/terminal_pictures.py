"""Pictures of the commands on a terminal of 80 columns: docs/terminal-{new,check,train,plan,generate}.svg.

    python scripts/docs/terminal_pictures.py [--work FOLDER]

Real commands in a real terminal (tmux), on a table of 300 questions made here and the model of the quickstart, which
is trained first unless FOLDER/runs has it.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[2]
COLUMNS, LINES = 80, 120
COMMANDS = {
    "new": "python -m finetune new --model runs/quickstart-full/model --data years.csv --mode lora",
    "check": "python -m finetune check years-lora.yaml",
    "train": "python -m finetune launch years-lora.yaml evaluate.every_steps=50",
    "plan": "python -m finetune plan recipes/llama3.1-8b/lora.yaml --on 8xH100-80 train.max_steps=2000",
    "generate": "python -m finetune generate runs/years-lora '3 March 2021' 'July 4, 1999'",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=None, help="folder to work in; default: a new one")
    work = (parser.parse_args().work or Path(tempfile.mkdtemp())).resolve()
    prepare(work)
    for name, command in COMMANDS.items():
        (ROOT / "docs" / f"terminal-{name}.svg").write_text(picture(command, work), encoding="utf-8")


def prepare(work: Path) -> None:
    """Makes the quickstart's model and a table of questions and answers."""
    work.mkdir(exist_ok=True)
    for name in ("recipes", "scripts"):
        (work / name).unlink(missing_ok=True)
        (work / name).symlink_to(ROOT / name)
    (work / "years-lora.yaml").unlink(missing_ok=True)
    if not (work / "runs" / "quickstart-full" / "model").is_dir():
        run = [sys.executable, "-m", "finetune", "train", "recipes/quickstart/full.yaml"]
        subprocess.run([sys.executable, "scripts/make_quickstart.py"], cwd=work, check=True)
        subprocess.run(run, cwd=work, check=True)
    rows = (work / "runs" / "quickstart-data" / "train.jsonl").read_text(encoding="utf-8").splitlines()[:300]
    with (work / "years.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("question", "answer"))
        for question, answer in (json.loads(row)["messages"] for row in rows):
            writer.writerow((question["content"], answer["content"][:4]))  # of a date the year


def picture(command: str, work: Path) -> str:
    """Returns the terminal after a command as SVG."""
    tmux = ["tmux", "-L", "pictures"]
    shell = f"PS1= ; clear; {command} 2>&1; tmux -L pictures wait-for -S done; sleep 60"
    subprocess.run([*tmux, "new-session", "-d", "-x", str(COLUMNS), "-y", str(LINES), "-c", work, shell], check=True)
    subprocess.run([*tmux, "wait-for", "done"], check=True)
    shown = subprocess.run([*tmux, "capture-pane", "-e", "-p"], capture_output=True, text=True, check=True).stdout
    subprocess.run([*tmux, "kill-server"], check=True)
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text.from_ansi(f"$ {command}\n{shown.rstrip()}"))
    svg = console.export_svg(title="finetune")
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)  # nothing is fetched: the reader's own font


if __name__ == "__main__":
    main()
