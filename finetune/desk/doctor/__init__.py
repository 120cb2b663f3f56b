"""Diagnosis of a launch: topology, bandwidth, clocks, disks, versions, and advice."""
