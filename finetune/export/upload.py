"""`upload`: a result or an export as a repository of the Hugging Face Hub, private unless asked otherwise.

Files are listed before anything goes: those that a result or an export has; a link, or any other file, is refused by
name. What names the base by a local path (README.md, adapter_config.json) goes up with
its hub id; the files here stay as they are. The hub keeps large files under their hash: a command that was stopped goes
on with those it lacks.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from finetune.errors import RunFailure, UserError
from finetune.utils import readable_bytes

_BASE = "base_model_name_or_path"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class Upload:
    """What would go up. files: by their path there; bytes: changed from what is here."""

    folder: Path
    files: dict[str, Path | bytes]
    base: str | None

    def sizes(self) -> dict[str, int]:
        return {n: len(f) if isinstance(f, bytes) else f.stat().st_size for n, f in self.files.items()}


def collect(run_dir: Path, base_model: str | None) -> Upload:
    """Returns the files of a run's result, of an adapter's or a model's folder, or of an export. Raises UserError."""
    folder = run_dir / "model" if (run_dir / "model").is_dir() else run_dir
    has_model = any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))
    if not has_model and not list(folder.glob("*.gguf")):
        raise UserError(f"{run_dir}: no model here (no config.json, adapter_config.json or .gguf file): export one")
    if base_model is not None and not _HUB_ID.fullmatch(base_model):
        raise UserError(f"--base-model {base_model}: expected a hub id, as org/name")
    files: dict[str, Path | bytes] = {name: folder / name for name in _written(folder)}
    named = _bases(folder)
    local = sorted({name for name in named if not _HUB_ID.fullmatch(name) or Path(name).exists()})
    base = base_model or next((name for name in named if name not in local), None)
    if local and base_model is None:
        raise UserError(
            f"{folder} was trained from {local[0]}, a path that means nothing elsewhere: give --base-model org/name, "
            "the hub's name of the same model"
        )
    for name in ("README.md", "adapter_config.json"):
        if name in files:
            text = (folder / name).read_text(encoding="utf-8")
            changed = _with_base(name, text, local, base)
            files[name] = changed.encode() if changed != text else files[name]
    return Upload(folder, files, base)


# What a result or an export is made of; anything else in its folder stays here, by name.
_WRITTEN = (
    *("config.json", "generation_config.json", "adapter_config.json", "labels.json", "README.md"),
    *("model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json", "*.gguf", "Modelfile"),
    *("adapter_model.safetensors", "export.json", "verify.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"),
    *("vocab.json", "merges.txt", "*.jinja", "additional_chat_templates/*.jinja"),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
)


def _written(folder: Path) -> list[str]:
    """Returns the files that are sent. Raises UserError for a link, and for a file that is no part of a model."""
    config = folder / "config.json"
    has_code = config.is_file() and '"auto_map"' in config.read_text(encoding="utf-8")
    patterns, names = (*_WRITTEN, *(("*.py",) if has_code else ())), []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            raise UserError(f"{path}: a link: uploads follow none, as what it leads to may not be part of the model")
        if path.is_dir() or any(part.startswith(".") for part in Path(name).parts):
            continue
        if not any(Path(name).match(pattern) and name.count("/") == pattern.count("/") for pattern in patterns):
            raise UserError(f"{path}: not a file of a result or an export: remove it, or move it out of the folder")
        names.append(name)
    return names


def _bases(folder: Path) -> list[str]:
    """Returns the base's names, by the adapter's settings and the card."""
    named = []
    if (file := folder / "adapter_config.json").is_file():
        named.append(json.loads(file.read_text(encoding="utf-8")).get(_BASE))
    if (file := folder / "README.md").is_file():
        named.append(_metadata(file.read_text(encoding="utf-8"))[0].get("base_model"))
    return [name for name in named if isinstance(name, str)]


def _metadata(card: str) -> tuple[dict[str, Any], str]:
    """Returns the card's metadata, and what follows."""
    match = re.match(r"---\n(.*?)\n---\n", card, re.DOTALL)
    if match is None:
        return {}, card
    found = yaml.safe_load(match[1])
    return found if isinstance(found, dict) else {}, card[match.end() :]


def _with_base(name: str, text: str, local: list[str], base: str | None) -> str:
    """Returns a file with the base's hub id in place of its paths, in all that it says."""
    if base is None:
        return text
    for path in local:
        text = text.replace(path, base)
    if name == "adapter_config.json":
        return json.dumps({**json.loads(text), _BASE: base}, indent=2) + "\n"
    metadata, rest = _metadata(text)
    if metadata.get("base_model") == base:
        return text
    return f"---\n{yaml.safe_dump({**metadata, 'base_model': base}, sort_keys=False)}---\n{rest}"


def show(console: Console, what: Upload, to: str, is_public: bool) -> None:
    """Print what would go up, and where to."""
    table = Table("file", "size", title=f"to {to}, {'public' if is_public else 'private'}")
    sizes = what.sizes()
    for name, size in sizes.items():
        table.add_row(name + (" (with the base's hub id)" if isinstance(what.files[name], bytes) else ""), f"{size:,}")
    table.add_row(f"{len(sizes):,} files", readable_bytes(sum(sizes.values())))
    console.print(table)


def upload(
    run_dir: Path,
    to: str | None,
    base_model: str | None,
    is_public: bool,
    console: Console,
    agrees: Callable[[], None],
) -> str:
    """Upload a result or an export; returns its address. agrees: asks whether the list is right, or raises.

    Raises UserError, and RunFailure where the hub cannot be reached or refuses.
    """
    from huggingface_hub import CommitOperationAdd, HfApi, get_token
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    what = collect(run_dir, base_model)
    if get_token() is None:
        raise UserError("upload: no token: run `hf auth login`, or set HF_TOKEN to one that may write")
    api = HfApi()
    with _explained():
        to = to or f"{api.whoami()['name']}/{run_dir.resolve().name}"
        if "/" not in to:
            raise UserError(f"--to {to}: expected org/name")
        try:
            if not api.model_info(to).private and not is_public:
                raise UserError(f"{to} exists and is public: give --public to add to it, or another --to")
        except RepositoryNotFoundError:
            pass
        except HFValidationError as error:
            raise UserError(f"--to {to}: {error}") from None
    show(console, what, to, is_public)
    agrees()
    additions = [
        CommitOperationAdd(name, file if isinstance(file, bytes) else str(file)) for name, file in what.files.items()
    ]
    with _explained():
        api.create_repo(to, private=not is_public, exist_ok=True)
        api.create_commit(to, additions, commit_message="Upload by finetune")
    return f"{api.endpoint}/{to}"


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Raises RunFailure where the hub refuses, or cannot be reached. Its messages have no token."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled

    again = "the same command goes on with what the hub lacks"
    try:
        yield
    except OfflineModeIsEnabled:
        raise UserError("upload: HF_HUB_OFFLINE is set: unset it to upload") from None
    except (HTTPError, OSError, RuntimeError) as error:  # the last: of a file, for a reason that is its cause
        cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
        if not isinstance(cause, HfHubHTTPError):
            raise RunFailure(f"upload: the hub cannot be reached: {cause}; {again}") from None
        status = cause.response.status_code  # not the message: addresses of large files are signed
        why = "the token may not write there" if status in (401, 403) else "try later, or look at its status page"
        raise RunFailure(f"upload: the hub answers {status}: {why}; {again}") from None
    except (ValueError, KeyError) as error:  # what answers is no hub
        raise RunFailure(f"upload: what answers is no hub: {error}") from None
