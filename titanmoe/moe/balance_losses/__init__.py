"""Losses that act on the router; `balance_loss` is what they have in common."""
