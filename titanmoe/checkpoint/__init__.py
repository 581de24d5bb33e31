"""Save and load checkpoints independently of the parallel mapping; the commands that inspect and convert them."""
