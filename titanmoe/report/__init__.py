"""One run, or several side by side, on one page."""
