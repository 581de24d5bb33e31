"""Saving, loading under any mapping, and the commands that look at checkpoints."""
