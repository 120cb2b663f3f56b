"""All that doctor finds out, of every rank."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from finetune.engine.links import Group, Links, measure_links
from finetune.engine.shared_folder import blind_hosts
from finetune.errors import UserError
from finetune.planning.doctor.disk import Disk, measure_disk
from finetune.planning.doctor.host import Host, look_around


@dataclass(frozen=True)
class Diagnosis:
    hosts: list[Host]  # by rank
    links: Links | None  # None for one process
    disks: list[Disk]  # of the folders that rank 0 was asked about
    not_shared: dict[str, list[str]]  # folders that are others on some machines, and on which

    @property
    def nodes(self) -> int:
        return len({host.node for host in self.hosts})

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def diagnose(group: Group, folders: list[Path]) -> Diagnosis:
    """Collective; takes seconds. Raises UserError on all ranks where a folder cannot be written."""
    hosts = group.gather(look_around(group.rank, group.node, group.device))
    links = measure_links(group)
    disks = group.gather(_measured(folders) if group.rank == 0 else [])[0]
    if isinstance(disks, str):
        raise UserError(disks)
    several = len({host.node for host in hosts}) > 1
    not_shared = {str(f): blind for f in folders if several and (blind := blind_hosts(group.gather, group.rank, f))}
    return Diagnosis(hosts, links, disks, not_shared)


def _measured(folders: list[Path]) -> list[Disk] | str:
    """Or what is wrong."""
    try:
        return [measure_disk(folder) for folder in folders]
    except OSError as error:
        return f"{error.filename}: cannot be written: {error.strerror}; name another with --folder"
