"""Probes that are never optimised: cheap numbers of pictures that drift when a reward is hacked."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F


def sharpness(images: Tensor) -> Tensor:
    """[N] root mean square of the grey Laplacian, in 8-bit levels; images [N, 3, H, W] uint8."""
    grey = images.float().mean(1, keepdim=True)
    kernel = torch.tensor([[0.0, 1, 0], [1, -4, 1], [0, 1, 0]]).view(1, 1, 3, 3)
    return F.conv2d(grey, kernel).square().mean((1, 2, 3)).sqrt()


def colour_entropy(images: Tensor) -> Tensor:
    """[N] entropy in bits of the colours, 8 levels a channel."""
    level = images.long() // 32
    code = (level[:, 0] * 64 + level[:, 1] * 8 + level[:, 2]).flatten(1)
    share = torch.zeros(len(images), 512).scatter_add(1, code, torch.ones(code.shape)) / code.shape[1]
    return -(share * share.clamp(min=1e-12).log2()).sum(1)


def saturation(images: Tensor) -> Tensor:
    """[N] mean of (max - min over RGB) in [0, 1]."""
    return (images.amax(1) - images.amin(1)).float().mean((1, 2)) / 255


def brightness(images: Tensor) -> Tensor:
    """[N] mean grey level in [0, 1]."""
    return images.float().mean((1, 2, 3)) / 255


PROBES: dict[str, Callable[[Tensor], Tensor]] = {
    "sharpness": sharpness,
    "colour_entropy": colour_entropy,
    "saturation": saturation,
    "brightness": brightness,
}


def diversity(images: Tensor) -> Tensor:
    """[P] mean distance between the pictures of a prompt, in 8-bit levels per pixel; images [P, K, 3, H, W], K > 1.

    Pictures are compared at 1/4 size, so that edges weigh less than places.
    """
    small = F.avg_pool2d(images.flatten(0, 1).float(), 4).unflatten(0, images.shape[:2]).flatten(2)
    apart = torch.cdist(small, small) / small.shape[-1] ** 0.5
    k = images.shape[1]
    return apart.sum((1, 2)) / (k * (k - 1))
