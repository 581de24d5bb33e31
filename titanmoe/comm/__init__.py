"""Collectives with gradients, computations that take turns, and what FSDP needs on CPUs."""
