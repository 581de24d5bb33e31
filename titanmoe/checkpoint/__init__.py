"""Runs that survive: saving, loading under any mapping, and what a person asks of a checkpoint."""
