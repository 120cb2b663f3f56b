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
  unset PYTHONDONTWRITEBYTECODE # if bytecode is not kept, each process compiles torch and transformers again: 7 s
  if [ ! -e "$stamp" ]; then
    SECONDS=0
    echo "Installing into $VIRTUAL_ENV, once. It is the download that takes its time:"
    echo "  1. torch, 190 MB for CPUs; pip takes it from where it is set to, which may be a build for GPUs with some GB"
    pip_install torch # first: by itself it is one file; required by others it may come with gigabytes around it
    echo "  2. transformers, accelerate, peft, datasets, deepspeed, bitsandbytes and what they need: 80 packages, 200 MB"
    uv_install "$root$extras" || pip_install --editable "$root$extras"
    touch "$stamp"
    echo "Installed in $SECONDS s."
  fi
}

pip_install() { python -m pip install --quiet --no-compile --constraint "$root/constraints.txt" "$@"; }

uv_install() { # a quarter of pip's time; fails, for pip to take over, if uv cannot be had or does not reach what pip does
  if [ -n "$(python -m pip config get global.index-url 2>/dev/null || true)${PIP_INDEX_URL:-}" ]; then
    return 1 # a mirror, with credentials perhaps, that only pip knows
  fi
  pip_install 'uv>=0.5' 2>/dev/null &&
    "$VIRTUAL_ENV/bin/uv" pip install --quiet --constraint "$root/constraints.txt" --editable "$1"
}

kernels_folder() { # .venv/kernels: kernels for GPUs, for Triton's interpreter on a CPU; without what they depend on, which is here
  local folder="$VIRTUAL_ENV/kernels"
  if [ ! -e "$folder/.installed" ]; then
    python -m pip install --quiet --no-compile --no-deps --target "$folder" 'triton==3.7.*' 'liger-kernel==0.8.*'
    touch "$folder/.installed"
  fi
  echo "$folder"
}

lowest_environment() { # .venv/lowest: the oldest versions that pyproject.toml allows, and for all else what .venv has
  local lowest="$VIRTUAL_ENV/lowest"
  if [ ! -e "$lowest/.installed" ]; then
    python -m venv "$lowest"
    python -c "import sysconfig; print(sysconfig.get_path('purelib'))" >"$(echo "$lowest"/lib/python3*/site-packages)/rest.pth"
    # transformers 5.17 wants a huggingface_hub below 2.
    "$lowest/bin/python" -m pip install --quiet --no-deps \
      'transformers==5.17.*' 'peft==0.20.*' 'datasets==5.0.*' 'accelerate==1.15.*' 'huggingface_hub>=1.5,<2'
    touch "$lowest/.installed"
  fi
}
