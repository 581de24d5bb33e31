"""Ways for rows to travel to their experts' ranks and back, a file each; `protocol` is what they have in common."""
