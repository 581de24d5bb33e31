"""Mixers, the layers in which tokens see each other: attention and linear attention, described without torch."""
