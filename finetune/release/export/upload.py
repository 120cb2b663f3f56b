"""`upload`: a result or an export as a repository of the Hugging Face Hub, private unless --public is given.

Files are listed before anything is sent: those of a result or an export; a link, or any other file, is refused by name.
Files that name the base by a local path (README.md, adapter_config.json) are sent with its hub id; the local files stay
as they are. The hub keeps large files under their hash: a command that was stopped continues with those that it lacks.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from finetune.checkpoints.card_metadata import card_metadata, with_metadata
from finetune.errors import RunFailure, UserError
from finetune.utils import readable_bytes

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_BASE = "base_model_name_or_path"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


# The files of a result or an export; any other file in the folder is refused by name.
_WRITTEN = (
    *("config.json", "generation_config.json", "adapter_config.json", "labels.json", "README.md"),
    *("model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json", "*.gguf", "Modelfile"),
    *("adapter_model.safetensors", "export.json", "verify.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"),
    *("vocab.json", "merges.txt", "*.jinja", "additional_chat_templates/*.jinja"),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
)


@dataclass(frozen=True)
class Upload:
    """Files to upload, by their path there; bytes: changed from the local file."""

    folder: Path
    files: dict[str, Path | bytes]
    base: str | None


def collect(run_dir: Path, base_model: str | None) -> Upload:
    """Returns the files of a run's result, of an adapter's or a model's folder, or of an export. Raises UserError."""
    folder = run_dir / "model" if (run_dir / "model").is_dir() else run_dir
    has_model = any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))
    if not has_model and not list(folder.glob("*.gguf")):
        raise UserError(
            f"{run_dir}: no model here (no config.json, adapter_config.json or .gguf file). Fix: export one"
        )
    if base_model is not None and not HUB_ID.fullmatch(base_model):
        raise UserError(f"--base-model {base_model}: not a hub id. Fix: give one, as org/name")
    files: dict[str, Path | bytes] = {name: folder / name for name in _files(folder)}
    texts = {
        name: (folder / name).read_text(encoding="utf-8")
        for name in ("README.md", "adapter_config.json")
        if name in files
    }
    card, _ = card_metadata(texts.get("README.md", ""))
    settings = json.loads(texts.get("adapter_config.json", "{}"))
    names = [one for one in (settings.get(_BASE), card.get("base_model")) if isinstance(one, str)]
    local = sorted({name for name in names if not HUB_ID.fullmatch(name) or Path(name).exists()})
    base = base_model or next((name for name in names if name not in local), None)
    if local and base_model is None:
        raise UserError(
            f"{folder} was trained from {local[0]}, a path that means nothing elsewhere. Fix: give --base-model "
            "org/name, the hub's name of the same model"
        )
    for name, text in texts.items() if base is not None else ():  # the hub id in place of all local paths
        changed = text
        for path in local:
            changed = changed.replace(path, str(base))
        if name == "adapter_config.json":
            changed = json.dumps({**json.loads(changed), _BASE: base}, indent=2) + "\n"
        elif card_metadata(changed)[0].get("base_model") != base:
            changed = with_metadata(changed, {"base_model": base})
        files[name] = changed.encode() if changed != text else files[name]
    return Upload(folder, files, base)


def _files(folder: Path) -> list[str]:
    """Returns the files to send. Raises UserError for a link, and for a file that is no part of a model."""
    config = folder / "config.json"
    has_code = config.is_file() and '"auto_map"' in config.read_text(encoding="utf-8")
    patterns, names = (*_WRITTEN, *(("*.py",) if has_code else ())), []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            raise UserError(
                f"{path}: is a link, which uploads do not follow. Its target may not be part of the model. Fix: remove "
                "it, or put the file itself there"
            )
        if path.is_dir() or any(part.startswith(".") for part in Path(name).parts):
            continue
        if not any(Path(name).match(pattern) and name.count("/") == pattern.count("/") for pattern in patterns):
            raise UserError(
                f"{path}: not a file of a result or an export. Fix: remove it, or move it out of the folder"
            )
        names.append(name)
    return names


def show(console: Console, what: Upload, to: str, is_public: bool) -> None:
    """Print the files to upload, and their destination."""
    table, total = Table("file", "size", title=f"to {to}, {'public' if is_public else 'private'}"), 0
    for name, file in what.files.items():
        is_changed = isinstance(file, bytes)
        size = len(file) if is_changed else file.stat().st_size
        table.add_row(name + (" (with the base's hub id)" if is_changed else ""), f"{size:,}")
        total += size
    table.add_row(f"{len(what.files):,} files", readable_bytes(total))
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

    Raises UserError, and RunFailure if the hub cannot be reached or refuses.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HFValidationError

    what = collect(run_dir, base_model)
    if get_token() is None:
        raise UserError("upload: no token. Fix: run `hf auth login`, or set HF_TOKEN to one that may write")
    api = HfApi()
    with explained():
        to = to or f"{api.whoami()['name']}/{run_dir.resolve().name}"
        if "/" not in to:
            raise UserError(f"--to {to}: not the name of a repository. Fix: give org/name")
        try:
            check_privacy(api, to, is_public, "give --public to add to it, or another --to")
        except HFValidationError as error:
            raise UserError(f"--to {to}: not the name of a repository: {error}. Fix: give org/name") from None
    show(console, what, to, is_public)
    agrees()
    with explained():
        send(api, to, what.files, is_public)
    return f"{api.endpoint}/{to}"


def check_privacy(api: HfApi, to: str, is_public: bool, fix: str) -> list[str]:
    """Returns the files of a repository, none if it is absent. Raises UserError if it is public and must not be."""
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        info = api.model_info(to)
    except RepositoryNotFoundError:
        return []
    if not info.private and not is_public:
        raise UserError(f"{to} exists and is public. Fix: {fix}")
    return [file.rfilename for file in info.siblings or ()]


def send(api: HfApi, to: str, files: dict[str, Path | bytes], is_public: bool, removed: Sequence[str] = ()) -> None:
    """Add files to a repository in one commit, which creates it if it is absent. Raises errors of the hub."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    additions = [
        CommitOperationAdd(name, file if isinstance(file, bytes) else str(file)) for name, file in files.items()
    ]
    deletions = [CommitOperationDelete(name) for name in removed]
    api.create_repo(to, private=not is_public, exist_ok=True)
    api.create_commit(to, [*additions, *deletions], commit_message="Upload by finetune")


@contextlib.contextmanager
def explained(what: str = "upload", command: str = "run the same command again") -> Iterator[None]:
    """Raises RunFailure if the hub refuses, or cannot be reached. Its messages have no token."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled

    again = f"{command}, which goes on with what the hub lacks"
    try:
        yield
    except OfflineModeIsEnabled:
        raise UserError(f"{what}: HF_HUB_OFFLINE is set. Fix: unset it") from None
    except (HTTPError, OSError, RuntimeError) as error:  # the last: of a file, for a reason that is its cause
        cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
        if not isinstance(cause, HfHubHTTPError):
            raise RunFailure(
                f"{what}: the hub cannot be reached: {cause}. Fix: check the network; then {again}"
            ) from None
        status = cause.response.status_code  # not the message: addresses of large files are signed
        refused = status in (401, 403)
        why = (
            "The token may not write there. Fix: use one that may"
            if refused
            else "Fix: wait, or look at its status page"
        )
        raise RunFailure(f"{what}: the hub answers {status}. {why}; then {again}") from None
    except (ValueError, KeyError) as error:  # what answers is no hub
        raise RunFailure(f"{what}: what answers is no hub: {error}. Fix: check HF_ENDPOINT and the proxy") from None
