"""Losses that act on the router, one per file; `protocol` is what they have in common."""
