"""Weights for the stock pipeline: a LoRA that `load_lora_weights` reads, or the whole network."""

from __future__ import annotations

from pathlib import Path

from flowrl.policy import Slot
from flowrl.session import Session

LORA_FILE = "pytorch_lora_weights.safetensors"  # the name by which diffusers saves it; offline it must be told


def export(s: Session, folder: Path, slot: Slot = "average") -> Path:
    """Write the weights of a slot: <folder>/pytorch_lora_weights.safetensors, or <folder>/<network>/ in full."""
    network = s.accelerator.unwrap_model(s.adapter.network)
    with s.policy.reading(slot):
        if s.config.lora:
            from peft import get_peft_model_state_dict

            name, layers = s.adapter.export_name, get_peft_model_state_dict(network)
            settings = network.peft_config["default"].to_dict()  # alpha; without it a stock pipeline takes the rank
            s.adapter.pipeline.save_lora_weights(
                folder, weight_name=LORA_FILE,
                **{f"{name}_lora_layers": layers, f"{name}_lora_adapter_metadata": settings},
            )  # fmt: skip
        else:
            network.save_pretrained(folder / s.adapter.export_name)
    return folder
