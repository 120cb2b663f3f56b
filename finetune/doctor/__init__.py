"""A launch: its topology, bandwidth, clocks, disks and versions, and what to change."""
