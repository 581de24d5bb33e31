"""Dispatchers, a file each; `dispatcher` is what they have in common."""
