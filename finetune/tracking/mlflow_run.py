"""A run at an MLflow server or in its database.

By `MlflowClient` with the run's id: the functions of `mlflow` itself, which accelerate's tracker calls, have a run for
each thread, and a run log writes from a thread of its own.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from finetune.errors import UserError
from finetune.recipe.schema import Mlflow
from finetune.recipe.urls import scrubbed

log = logging.getLogger(__name__)

_NOT_IN_NAMES = re.compile(r"[^\w./: -]")  # of metrics and parameters (mlflow/utils/validation.py)
_MOST_PARAMETERS, _LONGEST = 100, 6000  # of a request, and characters of a value (as above)
# Codes of a server that does not answer or has a fault of its own; others refuse the request.
_AWAY = ("INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED")
_PAUSE_S = 60.0
# A checkpoint waits for what is logged: a server that is away may not hold it for the minutes of mlflow's defaults.
_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}


def mlflow_problem(settings: Mlflow) -> str | None:
    """Returns why a store cannot be used that is no server, and what to do; None if it may work. Imports nothing."""
    uri = settings.uri or os.environ.get("MLFLOW_TRACKING_URI")
    scheme = urlsplit(uri or "sqlite://").scheme
    is_folder = scheme == "file" or (uri is not None and not scheme and not uri.startswith("databricks"))
    if is_folder and os.environ.get("MLFLOW_ALLOW_FILE_STORE", "").lower() not in ("true", "1"):
        return (
            f"tracking.mlflow: {uri} is a folder, which mlflow no longer develops. Fix: set tracking.mlflow.uri to a "
            "server or sqlite:///mlflow.db, or set MLFLOW_ALLOW_FILE_STORE=true"
        )
    is_database = scheme.partition("+")[0] in ("sqlite", "postgresql", "mysql", "mssql")
    if is_database and importlib.util.find_spec("sqlalchemy") is None:
        return (
            "tracking.mlflow: a database needs all of mlflow. Fix: pip install mlflow, or set tracking.mlflow.uri to a "
            "server"
        )
    return None


class MlflowRun:
    """One run. What a server that is away does not take is kept, and sent when it is back."""

    name = "mlflow"

    def __init__(self, settings: Mlflow, run_name: str, run_id: str | None):
        """run_id: of a run to go on with; None begins one. Raises UserError."""
        for variable, value in _ENVIRONMENT.items():
            os.environ.setdefault(variable, value)
        from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]
        from mlflow.exceptions import MlflowException  # pyright: ignore[reportMissingImports]

        self._uri, self._mlflow_error = settings.uri or "", MlflowException
        self._pending, self._next_try = deque[Callable[[], object]](), 0.0
        try:
            self._client = MlflowClient(settings.uri)
            self.id = self._resumed(run_id) or self._begun(settings.experiment, run_name)
        except (MlflowException, OSError) as error:
            raise UserError(
                f"tracking.mlflow: {self._reason(error)}. Fix: check tracking.mlflow.uri and that the server runs"
            ) from None

    def _resumed(self, run_id: str | None) -> str | None:
        """Returns the id of a run that is there, which is running again."""
        if run_id is None:
            return None
        try:
            self._client.update_run(run_id, status="RUNNING")
        except self._mlflow_error as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":  # of another server
                raise
            return None
        return run_id

    def _begun(self, experiment: str, run_name: str) -> str:
        known = self._client.get_experiment_by_name(experiment)
        experiment_id = known.experiment_id if known else self._client.create_experiment(experiment)
        return self._client.create_run(experiment_id, run_name=run_name).info.run_id

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Stores parameters. They cannot be changed, so a run that goes on keeps those that it has."""
        from mlflow.entities import Param  # pyright: ignore[reportMissingImports]

        def send() -> None:
            stored = self._client.get_run(self.id).data.params
            named = {_name(name): _shortened(str(value)) for name, value in values.items()}
            new = [Param(name, value) for name, value in named.items() if name not in stored]
            for first in range(0, len(new), _MOST_PARAMETERS):
                self._client.log_batch(self.id, params=new[first : first + _MOST_PARAMETERS])

        self._send(send)

    def log(self, values: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]

        now = int(time.time() * 1000)
        metrics = [Metric(_name(name), float(value), now, step) for name, value in values.items()]
        self._send(lambda: self._client.log_batch(self.id, metrics=metrics))

    def log_table(self, name: str, columns: Sequence[str], data: Sequence[Sequence[str]], step: int) -> None:
        """Adds rows to the artifact NAME.json, which MLflow shows as a table."""
        table: dict[str, Any] = {"step": [step] * len(data)}
        table |= {column: [row[i] for row in data] for i, column in enumerate(columns)}
        self._send(lambda: self._client.log_table(self.id, table, f"{name}.json"))

    def finish(self, status: str = "FINISHED") -> None:
        self._next_try = 0.0
        self._send(lambda: self._client.set_terminated(self.id, status))
        if self._pending:
            log.warning("tracking.mlflow: %d requests were not sent; metrics.jsonl has all values", len(self._pending))

    def _send(self, request: Callable[[], object]) -> None:
        """Sends what is pending, in order; after a failure of the server not before `_PAUSE_S` have passed."""
        self._pending.append(request)
        while self._pending and time.monotonic() >= self._next_try:
            try:
                self._pending[0]()
            except (self._mlflow_error, OSError) as error:
                if isinstance(error, OSError) or error.error_code in _AWAY:
                    self._next_try = time.monotonic() + _PAUSE_S
                    kept = f"trying again after {_PAUSE_S:.0f} s"
                else:
                    self._pending.popleft()
                    kept = "this is left out"
                log.warning("tracking.mlflow: %s; %s, and training goes on", self._reason(error), kept)
            else:
                self._pending.popleft()

    def _reason(self, error: Exception) -> str:
        return scrubbed(" ".join(str(error).split())[:300], self._uri).rstrip(".")


def _name(name: str) -> str:
    return _NOT_IN_NAMES.sub("_", name)


def _shortened(value: str) -> str:
    return value if len(value) <= _LONGEST else f"{value[: _LONGEST - 3]}..."
