"""Where the weights and packages of a learned scorer are, without loading or fetching any."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

import torch
from huggingface_hub import try_to_load_from_cache
from torch import Tensor

from flowrl.zoo import embedded

DISTRIBUTION = "flowrl-posttrain"


def absent_packages(*modules: str, extra: str) -> Iterator[str]:
    """A sentence for each module that is not installed."""
    for module in modules:
        if find_spec(module) is None:
            yield f"the package {module} is not installed: pip install '{DISTRIBUTION}[{extra}]'"


def absent_file(option: str, source: str, name: str = "config.json") -> Iterator[str]:
    """A sentence where `source`, a file, a folder with `name` in it or a hub id, is not on this machine."""
    if located(source, name) is None:
        yield (
            f"{option} = {source} is not on this machine: give a local path, or fetch it once with "
            f"`hf download {source}`"
        )


def resolved(source: str) -> str:
    """The folder of an embedded model, else the path or hub id as a library takes it."""
    return str(embedded(source) or (Path(source).expanduser() if source.startswith("~") else source))


def located(source: str, name: str = "config.json") -> Path | None:
    """The local path of a file, of a folder's file `name`, or of that file of a hub id in the cache."""
    path = Path(resolved(source))
    if path.is_file():
        return path
    if path.is_dir():
        return path / name if (path / name).is_file() else None
    if source.count("/") != 1 or source.startswith((".", "/", "~")):
        return None
    cached = try_to_load_from_cache(source, name)
    return Path(cached) if isinstance(cached, str) else None


def device_of(name: str) -> torch.device:
    """The device that an option names; "auto" is the current CUDA device, or the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def exactly(state: Mapping[str, Tensor], wanted: Mapping[str, Tensor], source: str) -> None:
    """ValueError: the keys or shapes of a weight file are not those that its reader was written for."""
    lacking, odd = sorted(set(wanted) - set(state)), sorted(set(state) - set(wanted))
    shapes = [f"{k} {list(state[k].shape)} for {list(wanted[k].shape)}" for k in wanted if k in state
              and state[k].shape != wanted[k].shape]  # fmt: skip
    told = [
        f"{what}: {', '.join(keys[:4])}{' ...' if len(keys) > 4 else ''}"
        for what, keys in (("missing keys", lacking), ("unexpected keys", odd), ("wrong shapes", shapes))
        if keys
    ]
    if told:
        raise ValueError(f"{source} is not the file that this scorer reads ({'; '.join(told)}); give the published one")
