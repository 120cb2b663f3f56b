"""All that doctor finds out, of every rank."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from finetune.engine.links import Group, Links, measure_links
from finetune.errors import UserError
from finetune.planning.doctor.disk import Disk, measure_disk
from finetune.planning.doctor.host import Host, look_around


@dataclass(frozen=True)
class Diagnosis:
    hosts: list[Host]  # by rank
    links: Links | None  # None for one process
    disks: list[Disk]  # of the folders that rank 0 was asked about

    @property
    def nodes(self) -> int:
        return len({host.node for host in self.hosts})

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def diagnose(group: Group, folders: list[Path]) -> Diagnosis:
    """Collective; takes seconds. Raises UserError where a folder cannot be written."""
    hosts = group.gather(look_around(group.rank, group.node, group.device))
    links = measure_links(group)
    try:
        disks = [measure_disk(folder) for folder in folders] if group.rank == 0 else []
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be written: {error.strerror}; name another with --folder") from None
    return Diagnosis(hosts, links, disks)
