"""Losses that act on the router, one per file; `balance_loss` is what they have in common."""
