"""What a device says of itself: how busy, how much power, how much energy. NVIDIA's, through NVML."""

from __future__ import annotations

import importlib
import importlib.util
import math
from typing import Any, NamedTuple

import torch


class DeviceReading(NamedTuple):
    """Not a number where nobody says."""

    utilization: float = math.nan  # share of the driver's last sampling period in which a kernel ran
    power_w: float = math.nan
    energy_j: float = math.nan  # since the meter was made


class DeviceMeter:
    """Of one CUDA device, where `pip install nvidia-ml-py` was done and the driver answers; silent elsewhere."""

    def __init__(self, device: torch.device):
        self._handle: Any = None
        self._broken: tuple[type[Exception], ...] = ()
        if device.type != "cuda" or torch.version.hip or importlib.util.find_spec("pynvml") is None:
            return
        pynvml: Any = importlib.import_module("pynvml")
        self._nvml, self._broken = pynvml, (pynvml.NVMLError,)
        try:
            pynvml.nvmlInit()
            # NVML numbers devices by bus, CUDA as CUDA_VISIBLE_DEVICES says: only the UUID is the same.
            uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        except self._broken:
            return  # no driver library, or a slice of a device
        self._start = self._energy()

    def read(self) -> DeviceReading:
        if self._handle is None:
            return DeviceReading()
        return DeviceReading(self._utilization(), self._power(), self._energy() - self._start)

    def _utilization(self) -> float:
        try:
            return self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu / 100
        except self._broken:
            return math.nan

    def _power(self) -> float:
        try:
            return self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1000  # it says milliwatts
        except self._broken:
            return math.nan

    def _energy(self) -> float:
        """Volta and later."""
        try:
            return self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1000  # it says millijoules
        except self._broken:
            return math.nan
