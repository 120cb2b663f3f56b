"""`run.push`: the last checkpoint while training, and the result at the end, to a repository of the Hugging Face Hub.

    trainer  checkpoint(folder), result(folder): queue, and return        finish: wait, one more try
    thread                      send the newest of each  ->  or a warning

The repository has the result's files at its root, and checkpoints/step-N as in the run's folder, from which a download
resumes. A new checkpoint replaces one that still waits, and in the repository the one before it, in one commit.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

from rich.markup import escape

from finetune.errors import RunFailure, UserError
from finetune.recipe import Recipe
from finetune.release.export.upload import HUB_ID, check_privacy, collect, explained, send
from finetune.training.run_dir import run_folder
from finetune.training.signals import StopRequest

log = logging.getLogger(__name__)

_CHECKPOINT, _RESULT = "the last checkpoint", "the result"
_CHECKPOINTS = "checkpoints/"
_POLL_S = 0.2


def check_push(recipe: Recipe) -> None:
    """Raises UserError if the hub would refuse whatever is sent, or the result names its base by a local path."""
    from huggingface_hub import get_token

    assert recipe.run.push is not None
    name = recipe.model.name
    if name is not None and recipe.run.push.base_model is None and (not HUB_ID.fullmatch(name) or Path(name).exists()):
        raise UserError(
            f"run.push: model.name {name} is a local path, which means nothing on the hub. Fix: set "
            "run.push.base_model to the hub's name of the same model"
        )
    if get_token() is None:
        raise UserError(
            "run.push: no token of the hub. Fix: run `hf auth login`, or set HF_TOKEN to one that may write"
        )


class Pusher:
    """Sends what is queued, one thing at a time; an error is a warning, and at the end what `finish` returns."""

    def __init__(self, recipe: Recipe, stop: StopRequest, say: Callable[[str], None]):
        from huggingface_hub import HfApi

        assert recipe.run.push is not None
        self._settings, self._run, self._stop, self._say = recipe.run.push, run_folder(recipe.run), stop, say
        self._api, self._held = HfApi(), self._run / "push.partial"
        self._changed = threading.Condition()
        self._waiting: dict[str, Path] = {}
        self._failed: dict[str, tuple[Path, str]] = {}  # folder and reason
        self._sending: list[str] = []  # one thing, or none
        self._sent: dict[str, str] = {}  # in words
        self._folders = itertools.count()
        self._ends, self._retries = False, True
        shutil.rmtree(self._held, ignore_errors=True)  # of a launch that was killed
        self._thread = threading.Thread(target=self._work, name="push", daemon=True)
        self._thread.start()

    def checkpoint(self, folder: Path) -> None:
        self._queue(_CHECKPOINT, _linked(folder, self._held / str(next(self._folders)) / folder.name))

    def result(self, folder: Path) -> None:
        self._queue(_RESULT, folder)

    def finish(self) -> str | None:
        stops_already = self._stop.reason
        with self._changed:
            self._ends = True
            self._changed.notify()
        while self._thread.is_alive() and self._stop.reason == stops_already:
            self._thread.join(_POLL_S)
        with self._changed:
            reasons = {what: reason for what, (_, reason) in self._failed.items()}
            unsent = [*self._waiting, *self._sending]
            reasons |= dict.fromkeys(unsent, "it was not sent before this process was asked to end")
        self._say_sent()
        shutil.rmtree(self._held, ignore_errors=True)
        if not reasons:
            return None
        listed = "; ".join(f"{what}: {reason}" for what, reason in reasons.items())
        return (
            f"{self._settings.repo} on the hub lacks {' and '.join(reasons)}. {self._run} has everything. {listed}. "
            "Or run the same command again, which trains nothing and sends the result"
        )

    def abandon(self) -> None:
        with self._changed:
            self._ends, self._retries, self._waiting = True, False, {}
            self._changed.notify()
        self._say_sent()

    def _say_sent(self) -> None:
        sent = " and ".join(self._sent.values()) or "nothing of this launch"
        self._say(f"on the hub: {sent}, at {escape(f'{self._api.endpoint}/{self._settings.repo}')}")

    def _queue(self, what: str, folder: Path) -> None:
        with self._changed:
            outdated = self._waiting.pop(what, None), self._failed.pop(what, (None, ""))[0]
            self._waiting[what] = folder
            self._changed.notify()
        for path in outdated:
            self._drop(path)

    # --- in the thread

    def _work(self) -> None:
        while (one := self._next()) is not None:
            what, folder = one
            try:
                words = self._send_checkpoint(folder) if what == _CHECKPOINT else self._send_result(folder)
            except (UserError, RunFailure) as error:
                log.warning("%s is not on the hub: %s", what, error)
                with self._changed:
                    self._sending.clear()
                    if what not in self._waiting:  # else a newer one has come
                        self._failed[what] = folder, str(error)
                        continue
            else:
                with self._changed:
                    self._sending.clear()
                    self._sent[what] = words
            self._drop(folder)

    def _next(self) -> tuple[str, Path] | None:
        """Returns what to send next, and its folder; None at the end, after one more try of what has failed."""
        with self._changed:
            while not self._waiting:
                if self._ends and self._retries and self._failed:
                    self._retries = False
                    self._waiting = {what: folder for what, (folder, _) in self._failed.items()}
                    self._failed = {}
                elif self._ends:
                    return None
                else:
                    self._changed.wait()
            what = next(iter(self._waiting))
            self._sending.append(what)
            return what, self._waiting.pop(what)

    def _send_checkpoint(self, folder: Path) -> str:
        """Send a checkpoint in place of earlier ones. Raises UserError, RunFailure."""
        here = f"{_CHECKPOINTS}{folder.name}/"
        files: dict[str, Path | bytes] = {
            here + path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()
        }
        self._send(files)
        return f"the checkpoint of step {int(folder.name.rpartition('-')[2])}"

    def _send_result(self, folder: Path) -> str:
        self._send(collect(folder, self._settings.base_model).files)
        return _RESULT

    def _send(self, files: dict[str, Path | bytes]) -> None:
        """Send files in one commit, without earlier checkpoints if they are one. Raises UserError, RunFailure."""
        is_public, repo = not self._settings.private, self._settings.repo
        with explained("run.push"):
            fix = "set run.push.private: false to add to it, or another run.push.repo"
            there = check_privacy(self._api, repo, is_public, fix)
            is_checkpoint = all(name.startswith(_CHECKPOINTS) for name in files)
            older = [name for name in there if is_checkpoint and name.startswith(_CHECKPOINTS) and name not in files]
            send(self._api, repo, files, is_public, older)

    def _drop(self, folder: Path | None) -> None:
        if folder is not None and folder.parent.parent == self._held:
            shutil.rmtree(folder.parent, ignore_errors=True)


def _linked(folder: Path, to: Path) -> Path:
    """Returns a folder of links to a checkpoint's files, which stay when the run deletes it; itself if the file system
    has no links."""
    try:
        shutil.copytree(folder, to, copy_function=os.link, dirs_exist_ok=True)
    except (OSError, shutil.Error):
        with contextlib.suppress(OSError):
            shutil.rmtree(to)
        return folder
    return to
