"""What a reward is: what it is shown, what it returns, and what it may say of itself.

Shape letters: N samples, C columns of one scorer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Protocol, runtime_checkable

from PIL import Image
from torch import Tensor

from flowrl.types import Prompt

Scope = Literal["sample", "group"]


@dataclass(frozen=True)
class Media:
    """What is judged: `images` [N, 3, H, W] uint8 on the CPU."""

    images: Tensor

    def __getitem__(self, rows: list[int]) -> Media:
        """A copy of some rows."""
        return Media(self.images[rows])

    def pil(self) -> list[Image.Image]:
        """Fresh copies as N PIL images."""
        return [Image.fromarray(image) for image in self.images.permute(0, 2, 3, 1).contiguous().numpy()]


@runtime_checkable
class Reward(Protocol):
    """A scorer: N samples -> [N, C], NaN = no verdict, never 0.

    `needs` are the metadata keys it reads; scope "group" asks for all samples of a group, and no others, in one call.
    The key "source" is the picture that an edit started from, a PIL image.
    """

    @property
    def columns(self) -> tuple[str, ...]: ...

    @property
    def needs(self) -> Set[str]: ...

    @property
    def scope(self) -> Scope: ...

    def __call__(self, media: Media, prompts: Sequence[Prompt]) -> Any: ...


@dataclass(frozen=True)
class Gold:
    """Samples whose scores are known to lie between `lower` and `upper`, both [N, C]; all of one group."""

    media: Media
    prompts: Sequence[Prompt]
    lower: Tensor
    upper: Tensor


@runtime_checkable
class Checkable(Protocol):
    """A scorer that can be checked before it is trusted; None: with these options it cannot."""

    def gold(self) -> Gold | None: ...


@runtime_checkable
class Provisioned(Protocol):
    """A scorer that runs on packages or files which may be absent."""

    def missing(self) -> Sequence[str]:
        """A sentence for each that is, with the way to get it; nothing is loaded or fetched."""
        ...


@dataclass(frozen=True)
class FunctionReward:
    """A plain function as a Reward; see `reward`."""

    function: Callable[..., Any]
    columns: tuple[str, ...] = ("score",)
    needs: Set[str] = frozenset()
    scope: Scope = "sample"
    case: Callable[[], Gold] | None = None

    def gold(self) -> Gold | None:
        return self.case() if self.case else None

    def bind(self, **options: Any) -> FunctionReward:
        """The same function with keyword arguments fixed. TypeError: it does not take them."""
        inspect.signature(self.function).bind(images=[], prompts=[], metadata=[], **options)
        return replace(self, function=partial(self.function, **options))

    def __call__(self, media: Media, prompts: Sequence[Prompt]) -> Any:
        texts, metadata = [p.text for p in prompts], [dict(p.metadata) for p in prompts]
        return self.function(images=media.pil(), prompts=texts, metadata=metadata)


def reward(function: Callable[..., Any] | None = None, /, **declared: Any) -> Any:
    """Decorator for `f(images, prompts, metadata)`: lists of N PIL images, strings and dicts -> N numbers.

    Bare, or with what it declares of `columns`, `needs`, `scope` and `case`, a function that returns its `Gold`.
    """
    return partial(reward, **declared) if function is None else FunctionReward(function, **declared)
