"""What an adapter is, and what adapters share."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from flowrl.types import Cond, LatentSpec, Prompt
from flowrl.zoo import embedded


class Adapter(Protocol):
    """A stock pipeline behind a few methods, in the convention x_t = (1 - t) x0 + t eps, v = eps - x0.

    `network` is the only module that is trained; `lora_targets` are the layers of it that LoRA adapts by default.
    """

    pipeline: Any
    network: Any  # nn.Module, wrapped where several processes train it
    latent: LatentSpec
    size: tuple[int, int]  # height and width of a picture in pixels
    lora_targets: Sequence[str]
    t_range: tuple[float, float]
    vp: bool  # whether latents are states only once multiplied by `flow.vp_scale`, as of a variance-preserving model
    checkpoint: Callable | None  # how a block is recomputed in backward, None in the network's own way
    pipeline_call: dict[str, Any]  # the arguments that make the stock pipeline sample what this adapter samples
    export_name: ClassVar[str]  # what the stock pipeline calls the network

    def encode(self, prompts: Sequence[Prompt]) -> Cond:
        """The condition of P prompts, one row each, read in order."""
        ...

    def velocity(self, x: Tensor, t: Tensor, cond: Cond) -> Tensor:
        """v [B, *L] float32 at x [B, *L], t [B], guidance included."""
        ...

    def decode(self, x0: Tensor) -> Tensor:
        """[N, 3, H, W] uint8 on the CPU."""
        ...

    def latents(self, images: Tensor) -> Tensor:
        """x0 [N, *L] float32 of pictures [N, 3, H, W] uint8 of the adapter's size; the same each time."""
        ...

    def reconstruct(self, images: Tensor) -> Tensor:
        """[N, 3, H, W] uint8 through the autoencoder and back: the best any latent can do."""
        ...

    def noise(self, keys: Iterable[Sequence[int]]) -> Tensor:
        """[N, *L] float32, latents of noise alone, row i from keys[i]."""
        ...

    def first_order(self) -> Any:
        """The first-order scheduler of the stock pipeline's config, whose steps are those of `grid`."""
        ...

    def grid(self, steps: int) -> Tensor:
        """[steps + 1] float32 times of the stock pipeline, falling to 0, or to where a diffusion model's table ends."""
        ...


def locate(path: str) -> str:
    """The folder of an embedded model, else the path or hub id as it is."""
    if asset := embedded(path):
        return str(asset)
    if path.startswith((".", "/", "~")) and not Path(path).expanduser().is_dir():
        raise ValueError(
            f"model.path {path!r} is no folder (looked at {Path(path).expanduser().resolve()}): give a pipeline's "
            "folder, a hub id, or an embedded model (shapes-sd3, shapes-sana)"
        )
    return path


@contextmanager
def quiet_loading() -> Iterator[None]:
    """No progress bars for weights that are read from disk, no hints on other back ends."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    import diffusers

    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    with warnings.catch_warnings():
        # `dtype`, the new name, is not known to all releases in our range
        warnings.filterwarnings("ignore", message=".*torch_dtype.*deprecated", category=FutureWarning)
        yield


def guided(velocity, x: Tensor, t: Tensor, scale: float, cond: list[Tensor], negative: list[Tensor]) -> Tensor:
    """v_negative + scale (v_cond - v_negative) by one forward of 2B rows, in the stock pipelines' order."""
    both = [torch.cat(pair) for pair in zip(negative, cond, strict=True)]
    v_negative, v = velocity(torch.cat([x, x]), torch.cat([t, t]), *both).chunk(2)
    return v_negative + scale * (v - v_negative)


def to_uint8(images: Tensor) -> Tensor:
    """[N, 3, H, W] in [-1, 1] -> uint8 on the CPU, rounded as every scorer expects it."""
    return ((images.float() / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8).cpu()
