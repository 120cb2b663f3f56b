"""Completes Triton's interpreter (triton 3.7) for Liger's kernels (liger-kernel 0.8):

Python's floats       it hands them on as they are, without the type that kernels ask for
bf16                  it rounds by cutting off, and computes with the bits as integers: here by fp32, to the nearest,
                      as a GPU does
rsqrt, tanh           of CUDA's libdevice, which it does not have
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import liger_kernel.ops.cross_entropy as cross_entropy
import liger_kernel.ops.rms_norm as rms_norm
import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

_convert = interpreter._implicit_cvt


def _with_floats(argument: object) -> object:
    if isinstance(argument, float):
        return tl.tensor(interpreter.TensorHandle(np.array([argument], np.float32), tl.float32), tl.float32)
    return _convert(argument)


_convert_bits = interpreter._convert_float


def _rounded(values: np.ndarray, source: object, target: object, mode: object) -> np.ndarray:
    if (source, target) != (tl.float32, tl.bfloat16):
        return _convert_bits(values, source, target, mode)
    floats = torch.from_numpy(np.ascontiguousarray(values).view(np.float32))
    return floats.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


_binary_op = interpreter.InterpreterBuilder.binary_op


def _with_bf16(builder: object, left: object, right: object, operation: object) -> object:
    kind = left.dtype.scalar  # type: ignore[attr-defined]
    if kind != tl.bfloat16:
        return _binary_op(builder, left, right, operation)
    values = [_convert_bits(one.data, kind, tl.float32, None).view(np.float32) for one in (left, right)]  # type: ignore[attr-defined]
    return interpreter.TensorHandle(_rounded(operation(*values), tl.float32, kind, None), kind)  # type: ignore[operator]


@triton.jit
def _rsqrt(x):
    return 1 / tl.sqrt(x)


@triton.jit
def _tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


interpreter._implicit_cvt, interpreter._convert_float = _with_floats, _rounded
interpreter.InterpreterBuilder.binary_op = _with_bf16
rms_norm.rsqrt, cross_entropy.tanh = _rsqrt, _tanh
