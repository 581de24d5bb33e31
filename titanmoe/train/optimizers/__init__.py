"""Optimizers, a file each; `optimizer` is what they have in common."""
