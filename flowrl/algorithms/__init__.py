"""One file a method; each reads like its paper. They know rollouts and points, and nothing of models or training."""

from flowrl.algorithms._points import ForwardProcess, ReverseProcess

__all__ = ["ForwardProcess", "ReverseProcess"]
