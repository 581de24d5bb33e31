"""Text generation from a checkpoint, on one rank or under any mapping of tp, ep and etp."""
