"""Randomness as a pure function of a key, such as (seed, step, prompt id, sample index, time index).

No draw depends on another, so the world size, the split into batches and an interrupted run cannot change any.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

ROOT, EDGE, NOISING, ORDER, WINDOW, BRIDGE, COMMON = range(7)  # what a draw is for; part of every key


def generator(*key: int) -> torch.Generator:
    """A generator seeded by a hash of the key."""
    digest = hashlib.blake2b(b",".join(b"%d" % k for k in key), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)


def normal(shape: Sequence[int], keys: Iterable[Sequence[int]]) -> Tensor:
    """[len(keys), *shape] standard normal float32, row i from keys[i]."""
    return torch.stack([torch.randn(tuple(shape), generator=generator(*key)) for key in keys])


def uniform(shape: Sequence[int], keys: Iterable[Sequence[int]]) -> Tensor:
    """[len(keys), *shape] uniform in [0, 1), row i from keys[i]."""
    return torch.stack([torch.rand(tuple(shape), generator=generator(*key)) for key in keys])


def permutation(n: int, *key: int) -> Tensor:
    """[n] a random order."""
    return torch.randperm(n, generator=generator(*key))
