"""Noise of samples, as a function of (seed, draw of a prompt, sample, position, column): equal on any number of
processes, whatever is decoded together.

An integer hash (splitmix64: Steele et al. 2014, https://doi.org/10.1145/2660193.2660195) in int64 arithmetic, which has
the same bits on every device. Its upper 52 bits make a number in (0, 1), and that Gumbel noise g, in fp64: the largest
of log p + g is at a token with its probability (https://arxiv.org/abs/1611.01144, section 2).

Letters: B sequences, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Unsigned constants of splitmix64, as int64.
_STEP, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
_BITS = 52  # 53 would round the number next to 1 to 1, whose noise is infinite


def mixed(x: Tensor) -> Tensor:
    """Returns splitmix64 of int64 numbers; products wrap around."""
    x = x + _STEP
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def sample_keys(seed: int, draws: Tensor, samples: Tensor) -> Tensor:  # (B,), (B,) -> (B,) int64
    """Returns the key of each sequence: sample `samples` of the prompt that was drawn as number `draws` of the run."""
    return mixed(mixed(mixed(torch.full_like(draws, seed)) ^ draws) ^ samples)


def gumbel(keys: Tensor, position: int | Tensor, columns: int) -> Tensor:  # (B,) -> (B, V) fp64
    """Returns the noise of the token at a position (from 0) of each sequence: of all, or (B,) of each."""
    of_token = mixed(keys ^ position)[:, None]
    hashed = mixed(of_token ^ torch.arange(columns, device=keys.device))
    uniform = (_shifted(hashed, 64 - _BITS).double() + 0.5) * 2.0**-_BITS
    return uniform.log_().neg_().log_().neg_()


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Returns a shift to the right that fills with zeros, unlike that of signed numbers."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
