"""Fused operations for flow-matching networks, each next to the plain torch definition it must agree with."""

from flowrl_kernels.sde_step import sde_step
from flowrl_kernels.shared_context import shared_context_attention

__all__ = ["sde_step", "shared_context_attention"]
