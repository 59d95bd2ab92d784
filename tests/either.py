"""What transformers 4 and 5 make in different ways."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import transformers
from transformers import CLIPTokenizer

# CLIP's pictures as Pillow resizes them
PilProcessor: Any = getattr(transformers, "CLIPImageProcessorPil", transformers.CLIPImageProcessor)

# Qwen2-VL's pictures as torchvision resizes them
QwenProcessor: Any = getattr(transformers, "Qwen2VLImageProcessorFast", transformers.Qwen2VLImageProcessor)


def byte_tokenizer(pieces: Sequence[str], kind: Any = CLIPTokenizer, **options: Any) -> Any:
    """Byte-pair encoding without merges: one token a byte."""
    with TemporaryDirectory() as folder:
        vocabulary, merges = Path(folder) / "vocab.json", Path(folder) / "merges.txt"
        vocabulary.write_text(json.dumps({piece: i for i, piece in enumerate(pieces)}))
        merges.write_text("#version: 0.2\n")
        return kind(str(vocabulary), str(merges), **options)
