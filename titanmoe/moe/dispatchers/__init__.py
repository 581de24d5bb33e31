"""Dispatchers, a file each; `dispatcher` is their interface."""
