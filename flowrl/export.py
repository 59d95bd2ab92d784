"""Weights for the stock pipeline: a LoRA that `load_lora_weights` reads, or the whole network."""

from __future__ import annotations

from pathlib import Path

from flowrl.policy import Slot
from flowrl.session import Session


def export(s: Session, folder: Path, slot: Slot = "average") -> Path:
    """Write the weights of a slot: <folder>/pytorch_lora_weights.safetensors, or <folder>/<network>/ in full."""
    network = s.accelerator.unwrap_model(s.adapter.network)
    with s.policy.reading(slot):
        if s.config.lora:
            from diffusers.utils import convert_state_dict_to_diffusers
            from peft import get_peft_model_state_dict
            from peft.utils import get_peft_config_dict  # noqa: F401

            layers = convert_state_dict_to_diffusers(get_peft_model_state_dict(network))
            s.adapter.pipeline.save_lora_weights(folder, **{f"{s.adapter.export_name}_lora_layers": layers})
        else:
            network.save_pretrained(folder / s.adapter.export_name)
    return folder
