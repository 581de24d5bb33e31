"""Ways to send rows to their experts' ranks and back, one per file; `protocol` is what they have in common."""
