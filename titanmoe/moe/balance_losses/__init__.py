"""Losses that act on the router, a file each; `protocol` is what they have in common."""
