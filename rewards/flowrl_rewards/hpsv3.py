"""HPSv3 (2508.03789): Qwen2-VL reads picture and prompt; an MLP on its state at a reward token is the score.

(mu, sigma) = MLP(h_reward);   HPSv3 = mu, unbounded
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from huggingface_hub import hf_hub_download
from torch import Tensor, nn

from flowrl.rewards import Media
from flowrl.types import Prompt
from flowrl_rewards._weights import absent_file, absent_packages, device_of, exactly, located

FILE = "HPSv3.safetensors"
REWARD = "<|Reward|>"
INSTRUCTION = f"""Judge this generated picture as a person would who asked for it.
Weigh how well it is made: plausible shapes, clear details, pleasing light, colour and composition.
Weigh how faithfully it shows what was asked for: every subject, attribute, number, relation and style.
It was asked for: {{prompt}}
One overall rating from 0, the worst, to 10, the best: {REWARD}"""
EMBEDDING = "model.embed_tokens.weight"
WORDS = "lm_head.weight"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class HPSv3:
    """Human preference as a mean of a normal law; the other output, its spread, is not used."""

    columns: ClassVar[tuple[str, ...]] = ("score",)
    needs: ClassVar[frozenset[str]] = frozenset()
    scope: ClassVar[str] = "sample"
    weights: str = "MizzenAI/HPSv3"  # or a local file, or a folder with HPSv3.safetensors
    base: str = "Qwen/Qwen2-VL-7B-Instruct"  # configuration and processor, or a local folder with both
    instruction: str = INSTRUCTION
    pixels: int = 256 * 28 * 28  # a picture is brought to about as many, its aspect ratio kept
    dtype: str = "bfloat16"  # of the backbone; the head is float32
    device: str = "auto"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"reward hpsv3: dtype is {self.dtype!r}; give one of {', '.join(DTYPES)}")
        if self.pixels < 28 * 28:
            raise ValueError(f"reward hpsv3: pixels is {self.pixels}, less than the 784 of one token; 200704 is usual")
        for mark in ("{prompt}", REWARD):
            if self.instruction.count(mark) != 1:
                times = self.instruction.count(mark)
                raise ValueError(f"reward hpsv3: instruction holds {mark} {times} times; write it exactly once")

    def missing(self) -> Sequence[str]:
        return [
            *absent_packages("torchvision", extra="rewards"),
            *absent_file("weights", self.weights, FILE),
            *absent_file("base", self.base),
        ]

    def __call__(self, media: Media, prompts: Sequence[Prompt]) -> Tensor:
        for prompt in prompts:
            if REWARD in prompt.text:
                raise ValueError(f"prompt {prompt.id} holds {REWARD}, which marks where the score is read; remove it")
        backbone, head = self._network
        inputs = self._inputs(media, prompts).to(device_of(self.device))
        states = backbone(**inputs).last_hidden_state
        return head(states[inputs["input_ids"] == self._reward].float())[:, 0]

    def _inputs(self, media: Media, prompts: Sequence[Prompt]) -> Any:
        """Tokens and patches of N conversations of one turn."""
        asked = [self.instruction.replace("{prompt}", prompt.text) for prompt in prompts]
        turns = [[{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}] for text in asked]
        return self._processor(
            text=self._processor.apply_chat_template(turns, add_generation_prompt=True),
            images=media.pil(),
            padding=True,
            return_tensors="pt",
        )

    @property
    def _reward(self) -> int:
        return self._processor.tokenizer.convert_tokens_to_ids(REWARD)

    @cached_property
    def _processor(self) -> Any:
        from transformers import AutoProcessor

        pixels = {"min_pixels": self.pixels, "max_pixels": self.pixels}  # transformers 4 takes them here only
        processor = AutoProcessor.from_pretrained(self.base, padding_side="right", **pixels)
        processor.tokenizer.add_special_tokens({"additional_special_tokens": [REWARD]})
        return processor

    @cached_property
    def _network(self) -> tuple[nn.Module, nn.Module]:
        from safetensors.torch import load_file
        from transformers import Qwen2VLConfig

        path = located(self.weights, FILE) or hf_hub_download(self.weights, FILE)
        config = Qwen2VLConfig.from_pretrained(self.base)
        backbone, head = read(load_file(path), config, DTYPES[self.dtype], str(path))
        device = device_of(self.device)
        return backbone.to(device), head.to(device)


def head_of(width: int) -> nn.Sequential:
    """The MLP of states [N, width] -> (mu, sigma) [N, 2]; the authors' dropout stands at 2."""
    return nn.Sequential(
        nn.Linear(width, 1024), nn.ReLU(), nn.Identity(), nn.Linear(1024, 16), nn.ReLU(), nn.Linear(16, 2)
    )


def published(name: str) -> str:
    """What a parameter of the backbone is called in the published file."""
    return name.replace("language_model.", "model.")


def read(state: dict[str, Tensor], config: Any, dtype: torch.dtype, source: str) -> tuple[nn.Module, nn.Module]:
    """(backbone, head) of a published state. ValueError: its keys or shapes are others."""
    from transformers import Qwen2VLModel

    state = {key: value for key, value in state.items() if key != WORDS}
    config.text_config.vocab_size = len(state.get(EMBEDDING, ()))
    with torch.device("meta"):
        names = {name: (published(name), value) for name, value in Qwen2VLModel(config).state_dict().items()}
        head = head_of(config.text_config.hidden_size)
    wanted = {f"rm_head.{name}": value for name, value in head.state_dict().items()}
    exactly(state, dict(names.values()) | wanted, source)
    backbone = Qwen2VLModel.from_pretrained(
        None,
        config=config,
        state_dict={name: state[key] for name, (key, _) in names.items()},
        dtype=dtype,
        attn_implementation="sdpa",
    )
    head.load_state_dict({name: state[f"rm_head.{name}"].float() for name in head.state_dict()}, assign=True)
    return backbone, head
