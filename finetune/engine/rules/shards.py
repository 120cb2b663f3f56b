"""Shards, and replicas of them."""

from __future__ import annotations

from collections.abc import Iterator

from finetune.engine.rules.asked import Asked


def shards_and_replicas(asked: Asked) -> Iterator[str]:
    """HSDP is FSDP2's; plain replicas have no shards."""
    replicate, shard, kind = asked.parallelism.replicate, asked.parallelism.shard, asked.launch.kind
    if kind == "zero" and replicate > 1:
        yield f"{asked.key('replicate')}: DeepSpeed shards over all ranks here: use hsdp, or remove it"
    if kind == "replicated" and shard > 1:
        yield f"{asked.key('shard')}: `distributed_type: MULTI_GPU` shards nothing: use fsdp2 or hsdp, or remove it"
