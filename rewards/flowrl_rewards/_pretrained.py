"""Networks of transformers, whole or not at all."""

from __future__ import annotations

from typing import Any

import torch


def pretrained(kind: Any, source: str, option: str, dtype: torch.dtype = torch.float32) -> Any:
    """The network of class `kind` of a hub id or a local folder. ValueError: its weights lack parameters."""
    network, info = kind.from_pretrained(source, dtype=dtype, output_loading_info=True)
    if info["missing_keys"]:  # transformers would draw them at random
        lacking = ", ".join(sorted(info["missing_keys"])[:4])
        raise ValueError(f"{option} = {source} is no complete {kind.__name__} (it lacks {lacking}); give another one")
    return network.eval()
