"""Text from a checkpoint, on one rank or folded."""
