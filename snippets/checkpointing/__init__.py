"""Gradient checkpointing on Qwen3: what a decoder layer stores for its backward, and what it computes again.

``policies`` holds every way of choosing, behind one interface; ``on_demand`` is the engine of the
finest of them.
"""
