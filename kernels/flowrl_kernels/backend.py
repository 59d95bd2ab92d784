"""Which implementation of an operation runs: named by the caller, else by FLOWRL_KERNELS, else `auto`."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

log = logging.getLogger(__name__)
VARIABLE = "FLOWRL_KERNELS"
NAMES = ("naive", "fold", "triton", "xformers", "sdpa")


def chosen(asked: str | None, why_not: Mapping[str, str], auto: Sequence[str]) -> str:
    """The back end that is asked for, else the first of `auto` that does not decline.

    `why_not` has the reason of each back end of the operation to decline these arguments, "" where it takes them. One
    that is asked for and declines is told once; a name that the operation has no use for is `auto`. ValueError: no such
    name.
    """
    asked = asked or os.environ.get(VARIABLE) or "auto"
    if asked not in ("auto", *NAMES):
        raise ValueError(f"{VARIABLE} or back_end is {asked!r}: it must be auto or one of {', '.join(NAMES)}")
    if asked in why_not and not why_not[asked]:
        return asked
    taken = next(name for name in auto if not why_not[name])
    if asked in why_not:
        _tell(f"the back end {asked!r} is not used, {taken!r} is: {why_not[asked]}")
    return taken


def why_not_triton(x: Tensor) -> str:
    """Why Triton's kernels decline a tensor like x, "" where they do not; nothing is imported."""
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"triton's kernel has no {x.dtype}"
    if not _installed("triton"):
        return "triton is not installed"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return "" if x.is_cuda or interpreted else f"triton has no kernels for {x.device.type} tensors"


@cache
def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


@cache
def _tell(message: str) -> None:
    log.warning(message)
