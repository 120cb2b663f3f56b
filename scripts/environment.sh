# Sourced by quickstart.sh and test.sh: a virtual environment with the pinned set, made once, in .venv of this checkout.
# PYTHON names the interpreter to start from (Python >= 3.10); default python3.

environment() { # environment EXTRAS: "" or "[dev]"
  local root extras=$1 stamp
  root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
  export VIRTUAL_ENV="$root/.venv"
  stamp="$VIRTUAL_ENV/.installed${extras}-$(cat "$root/pyproject.toml" "$root/constraints.txt" | cksum | tr -d ' ')"
  if [ ! -x "$VIRTUAL_ENV/bin/python" ]; then
    "${PYTHON:-python3}" -c 'import sys; sys.exit("finetune needs Python 3.10 or newer, this is " + sys.version.split()[0] if sys.version_info < (3, 10) else 0)'
    "${PYTHON:-python3}" -m venv "$VIRTUAL_ENV"
  fi
  export PATH="$VIRTUAL_ENV/bin:$PATH"
  if [ ! -e "$stamp" ]; then
    echo "installing into $VIRTUAL_ENV (once)"
    # torch first: by itself it is one file; required by others it may come in a build for GPUs with gigabytes around it.
    python -m pip install --quiet --constraint "$root/constraints.txt" torch
    python -m pip install --quiet --constraint "$root/constraints.txt" --editable "$root$extras"
    touch "$stamp"
  fi
}
