"""CUDA Graph on Qwen3-8B: what a launch costs, three ways to capture, training steps and decode."""

from snippets import interpreter  # noqa: F401  isort:skip - before triton
