"""Losses that act on the router; `balance_loss` is their interface."""
