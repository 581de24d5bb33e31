"""Dispatchers, a file each; `dispatcher` is their interface. `symm_mem` has two more, for its buffers and places."""
