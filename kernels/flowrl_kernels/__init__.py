"""Fused operations for flow-matching networks, each next to the plain torch definition it must agree with."""
