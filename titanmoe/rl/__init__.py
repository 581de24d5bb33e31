"""Reinforcement learning: a model completes prompts and learns from the rewards (docs/reinforcement.md)."""
