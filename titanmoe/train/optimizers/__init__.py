"""Optimizers, one per file; `optimizer` has their base class."""
