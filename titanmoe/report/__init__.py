"""A run, or several beside each other, on one page."""
