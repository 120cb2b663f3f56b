"""CUDA devices that are not there, for torch's fake tensors: shapes, types and devices, without memory or compute.

    enable(H100)                                this process now has CUDA devices, until it ends
    with fake_cuda() as meter: ...              what runs in it runs on them; the meter counts

The project's own code runs unchanged as one rank of any number: it takes its CUDA branches, and wrong devices, types
and shapes are errors. Values do not exist, so that code which depends on them cannot run, streams do not order
anything, and collectives do nothing. Never in a process that trains: two tables of libtorch are changed, by their
offsets in one version of it.
"""

# Functions of libraries are replaced here.
# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import contextlib
import ctypes
import mmap
import platform
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from device_meter import DeviceMeter, waits
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from finetune.plan.meter import BLOCK

GIB = 2**30
KNOWN_TORCH = "2.13"  # whose tables `_change_tables` knows


@dataclass(frozen=True)
class FakeDevice:
    name: str
    capability: tuple[int, int]
    memory_bytes: int


H100 = FakeDevice("NVIDIA H100 80GB HBM3", (9, 0), 80 * GIB - 5 * 10**8)


def unsupported_reason() -> str | None:
    """Returns the reason why this process cannot have fake devices; None where it can."""
    if not str(torch.__version__).startswith(f"{KNOWN_TORCH}."):
        return f"the offsets in libtorch are those of torch {KNOWN_TORCH}, this is {torch.__version__}"
    if torch.version.cuda or torch.version.hip:
        return "this torch is built for GPUs, and has the real functions in place of those that are replaced"
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"only Linux on x86-64 is known, this is {sys.platform} on {platform.machine()}"
    return None


def enable(device: FakeDevice = H100, count: int = 8) -> None:
    """Give this process CUDA devices for fake tensors, for good. It must end by `os._exit`: libtorch's own teardown
    would call into the changed tables. Raises RuntimeError where `unsupported_reason` has a reason."""
    if reason := unsupported_reason():
        raise RuntimeError(f"no fake devices: {reason}")
    _change_tables()
    _add_kernels()
    _describe(device, count)
    _replace_streams()
    _compute_with_real_numbers()
    _keep_parameters()


# --- libtorch: autograd asks it for the guard of each device, and the hooks of CUDA whether there is one

_KEPT: list[Any] = []  # memory that libtorch points to from now on
_CUDA, _META = 1, 14  # c10::DeviceType
_GUARD_ENTRIES, _HOOK_ENTRIES = 40, 80


def _change_tables() -> None:
    """CUDA's guard becomes a copy of that of `meta`, which does nothing, but answers "CUDA 0"; CUDA's hooks answer that
    there is a device."""
    folder = Path(torch.__file__).parent / "lib"
    c10, cpu = (ctypes.CDLL(str(folder / name)) for name in ("libc10.so", "libtorch_cpu.so"))
    zero, one = _function_returning(0), _function_returning(1)
    guards = (ctypes.c_void_p * 22).in_dll(c10, "_ZN3c104impl26device_guard_impl_registryE")
    # type, exchangeDevice, getDevice, getStream
    entries = _changed_table(guards[_META], _GUARD_ENTRIES, dict.fromkeys((0, 1, 2, 5), one))
    guard = (ctypes.c_void_p * 1)(entries)
    _KEPT.append(guard)
    guards[_CUDA] = ctypes.addressof(guard)
    get_hooks = cpu["_ZN2at6detail12getCUDAHooksEv"]
    get_hooks.restype = ctypes.c_void_p
    hooks = get_hooks()
    # isBuilt, isAvailable, hasPrimaryContext, deviceCount, hasCUDA; init, and set, get and exchange the device
    answers = {**dict.fromkeys((2, 3, 4, 6, 16), one), **dict.fromkeys((5, 7, 8, 9, 10), zero)}
    ctypes.cast(hooks, ctypes.POINTER(ctypes.c_void_p))[0] = _changed_table(hooks, _HOOK_ENTRIES, answers)


def _changed_table(instance: Any, size: int, changes: dict[int, int]) -> int:
    """Returns the address of a copy of an object's table of virtual functions, some of them replaced."""
    first = ctypes.cast(instance, ctypes.POINTER(ctypes.c_void_p))[0]
    assert first is not None
    words = (ctypes.c_void_p * (size + 2)).from_address(first - 16)  # two words of type information come before it
    table = (ctypes.c_void_p * (size + 2))(*words)
    for slot, function in changes.items():
        table[2 + slot] = function
    _KEPT.append(table)
    return ctypes.addressof(table) + 16


def _function_returning(value: int) -> int:
    """Returns the address of machine code that returns `value`, and 0 in the second word of a result of two."""
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(b"\xb8" + value.to_bytes(4, "little") + b"\x31\xd2\xc3")  # mov eax, value; xor edx, edx; ret
    _KEPT.append(page)
    return ctypes.addressof(ctypes.c_char.from_buffer(page))


def _add_kernels() -> None:
    """CUDA has a kernel for this. A torch without CUDA would compose it of others in autograd, each of which is
    weighed."""
    kernels = torch.library.Library("aten", "IMPL")
    kernels.impl("silu_backward", lambda _gradient, x: torch.empty_like(x), "CUDA")  # fake tensors do not call it
    _KEPT.append(kernels)


# --- torch's Python side


def _describe(device: FakeDevice, count: int) -> None:
    major, minor = device.capability
    properties = types.SimpleNamespace(
        name=device.name,
        major=major,
        minor=minor,
        total_memory=device.memory_bytes,
        multi_processor_count=132,
        warp_size=32,
        uuid="0",
    )
    _answer(
        torch.cuda,
        {
            "is_available": True,
            "is_initialized": True,
            "device_count": count,
            "current_device": 0,
            "get_device_name": device.name,
            "get_device_capability": device.capability,
            "get_device_properties": properties,
            "mem_get_info": (device.memory_bytes, device.memory_bytes),
            "is_bf16_supported": None,
            "max_memory_allocated": 0,
            "memory_reserved": 0,
            "_lazy_init": None,
            "init": None,
            "set_device": None,
            "empty_cache": None,
            "cudart": types.SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0),
            "manual_seed_all": None,
            "reset_peak_memory_stats": None,
            "set_rng_state": None,
            "get_rng_state": torch.zeros(16).byte(),
        },
    )
    # A GPU before Ampere emulates bf16, which torch counts as support unless it is told not to.
    torch.cuda.is_bf16_supported = lambda including_emulation=True: including_emulation or device.capability >= (8, 0)
    _answer(torch.backends.cuda, {"is_flash_attention_available": True})
    _answer(torch.cuda.amp.common, {"amp_definitely_not_available": False})
    _answer(torch.accelerator, {"is_available": True, "current_accelerator": torch.device("cuda")})


def _answer(module: Any, answers: dict[str, Any]) -> None:
    for name, value in answers.items():
        setattr(module, name, lambda *_, _value=value, **__: _value)


class _Event:
    """Of a stream that runs nothing."""

    def __init__(self, *_: Any, **__: Any):
        pass

    def record(self, stream: Any = None) -> None:
        pass

    wait = record

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        waits("event.synchronize")

    def elapsed_time(self, _end: Any) -> float:
        return 1.0


class _Stream(contextlib.AbstractContextManager):
    device, cuda_stream, stream_id, priority = torch.device("cuda", 0), 0, 0, 0

    def __init__(self, *_: Any, **__: Any):
        pass

    def __exit__(self, *_: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    wait_event = wait_stream

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def synchronize(self) -> None:
        waits("stream.synchronize")


class _Nothing(contextlib.nullcontext):
    def __init__(self, *_: Any, **__: Any):
        super().__init__()


class _Graph:
    """Of a capture that computes, as all does here, shapes alone."""

    def replay(self) -> None:
        pass


def _replace_streams() -> None:
    current = _Stream()
    torch.cuda.CUDAGraph, torch.cuda.graph, torch.cuda.graph_pool_handle = _Graph, _Nothing, lambda: (0, 0)
    torch.cuda.Stream = torch.Stream = _Stream
    torch.cuda.Event = torch.Event = _Event
    torch.cuda.stream = torch.cuda.device = _Nothing
    torch.cuda.synchronize = lambda device=None: waits("cuda.synchronize")
    _answer(torch.cuda, {"current_stream": current, "default_stream": current})
    _answer(torch.accelerator, {"current_stream": current})
    _answer(torch.cuda.nvtx, {"range_push": 0, "range_pop": 0})
    torch.Tensor.record_stream = lambda self, stream: None
    torch.Tensor.pin_memory = lambda self, *_, **__: self
    torch.UntypedStorage.data_ptr = lambda self: self._cdata  # two storages are two addresses
    torch.Tensor.is_pinned = lambda self, *_, **__: self.device.type == "cpu"


def _compute_with_real_numbers() -> None:
    """Meshes, offsets of shards and what an architecture does to its logits are found on small tensors with values."""
    import torch.distributed.device_mesh as meshes
    import torch.distributed.tensor._utils as shards

    from finetune.engine import expert_parallel, sharding
    from finetune.models import experts_trial, fused_layers, loss_model
    from finetune.models.head import chunked
    from finetune.plan import stand_ins

    loss_model.logit_map = real(loss_model.logit_map)
    for name in ("_formula_of", "_gates", "_turns_halves", "_has_equal_halves", "kernel_problem"):
        setattr(fused_layers, name, real(getattr(fused_layers, name)))
    verdict = experts_trial.verdict
    experts_trial.verdict = real(lambda experts, _device, *others: verdict(experts, torch.device("cpu"), *others))
    fused_layers.rms_norm, fused_layers.liger_function = stand_ins.fused_norm, stand_ins.liger_function
    chunked.liger_cross_entropy = stand_ins.LigerKernel
    meshes.init_device_mesh = torch.distributed.init_device_mesh = real(meshes.init_device_mesh)
    sharding.init_device_mesh = expert_parallel.init_device_mesh = meshes.init_device_mesh
    for method in ("__getitem__", "get_coordinate", "get_local_rank", "size"):
        setattr(meshes.DeviceMesh, method, real(getattr(meshes.DeviceMesh, method)))
    meshes.DeviceMesh._concatenate = staticmethod(real(meshes.DeviceMesh._concatenate))
    offsets = real(shards._compute_local_shape_and_global_offset)
    shards._compute_local_shape_and_global_offset = offsets
    made = torch.tensor

    def tensor(data: Any, *arguments: Any, device: Any = None, **named: Any) -> Tensor:
        here = made(data, *arguments, **{**named, "pin_memory": False})
        return here if device is None or torch.device(device).type == "cpu" else here.to(device)

    torch.tensor = tensor


def real(call: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that computes with values, also where it is called on fake devices."""

    def without_modes(*arguments: Any, **named: Any) -> Any:
        with _disable_current_modes():
            return call(*arguments, **named)

    return without_modes


def _keep_parameters() -> None:
    """`Module.to` swaps the contents of two tensors, which weak references to fake ones forbid: the parameter is
    replaced instead. Tied ones stay tied."""

    def apply(self: Any, call: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        moved: dict[int, tuple[Tensor, Any]] = {}
        for module in self.modules():
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                if id(parameter) not in moved:
                    with torch.no_grad():
                        new = call(parameter)
                    moved[id(parameter)] = parameter, parameter if new is parameter else _replaced(parameter, new)
                module._parameters[name] = moved[id(parameter)][1]
            for name, buffer in module._buffers.items():
                module._buffers[name] = buffer if buffer is None else call(buffer)
        return self

    torch.nn.Module._apply = apply


def _replaced(parameter: Tensor, new: Tensor) -> Tensor:
    """Returns a parameter with the attributes that libraries have put on the old one."""
    made = torch.nn.Parameter(new, parameter.requires_grad)
    made.__dict__.update({name: value for name, value in vars(parameter).items() if name not in vars(made)})
    return made


# --- values


def _number_like(tensor: Tensor) -> Tensor:
    """Returns values that let a step continue: no flag is set, no number is 0, and of several the first is largest."""
    if tensor.dtype == torch.bool:
        return torch.zeros(tensor.shape, dtype=torch.bool)
    last = tensor.shape[-1] if tensor.ndim else 1
    return (
        torch.linspace(2, 1, last).expand(tensor.shape if tensor.ndim else (1,)).reshape(tensor.shape).to(tensor.dtype)
    )


@contextlib.contextmanager
def fake_cuda(block: int = BLOCK) -> Iterator[DeviceMeter]:
    """Everything within is on fake devices. A value that is read off the device is a wait, and made up where the
    meter says `may_read`; elsewhere torch's error for what depends on data is raised."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    meter = DeviceMeter(block)

    def reading(name: str) -> Callable[[Any], Any]:
        before = getattr(FakeTensor, name)

        def read(tensor: Any) -> Any:
            if not meter.may_read:
                return before(tensor)
            if tensor.device.type == "cuda":
                meter.wait(name)
            with _disable_current_modes():
                return getattr(_number_like(tensor), name)()

        return read

    for name in ("item", "tolist", "__bool__", "__float__", "__int__"):
        setattr(FakeTensor, name, reading(name))
    with FakeTensorMode(allow_non_fake_inputs=True), meter:
        yield meter
    meter.begin("end")
