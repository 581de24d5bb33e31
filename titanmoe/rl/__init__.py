"""Reinforcement learning: a model answers prompts, and learns from rewards of its answers (docs/reinforcement.md)."""
