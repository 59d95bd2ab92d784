"""Probes that are never optimised: cheap numbers of pictures that drift when a reward is hacked."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F


def sharpness(images: Tensor) -> Tensor:
    """[N] root mean square of the grey Laplacian, in 8-bit levels; images [N, 3, H, W] uint8."""
    grey = images.float().mean(1)
    around = grey[:, 2:, 1:-1] + grey[:, :-2, 1:-1] + grey[:, 1:-1, 2:] + grey[:, 1:-1, :-2]
    return (around - 4 * grey[:, 1:-1, 1:-1]).square().mean((1, 2)).sqrt()


def colour_entropy(images: Tensor) -> Tensor:
    """[N] entropy in bits of the colours, 8 levels a channel."""
    red, green, blue = (images // 32).short().unbind(1)
    code = (red * 64 + green * 8 + blue).flatten(1)
    share = torch.stack([picture.bincount(minlength=512) for picture in code]) / code.shape[1]
    return -(share * share.clamp(min=1e-12).log2()).sum(1)


def saturation(images: Tensor) -> Tensor:
    """[N] mean of (max - min over RGB) in [0, 1]."""
    return (images.amax(1) - images.amin(1)).float().mean((1, 2)) / 255


def brightness(images: Tensor) -> Tensor:
    """[N] mean grey level in [0, 1]."""
    return images.float().mean((1, 2, 3)) / 255


AT_ONCE = 16  # pictures that are probed together: as large floats they take much memory
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


def panel(images: Tensor, group: Tensor) -> dict[str, Tensor]:
    """All probes of pictures [N, 3, H, W] uint8 in groups [N] of equal size: PROBES [N], diversity [groups].

    Pictures that are alone in their group have no diversity. Nothing random is drawn.
    """
    found = {name: torch.cat([probe(part) for part in images.split(AT_ONCE)]) for name, probe in PROBES.items()}
    groups = [images[group == g] for g in group.unique()]
    if len(groups) < len(images):
        found["diversity"] = torch.cat([diversity(members[None]) for members in groups])
    return found
