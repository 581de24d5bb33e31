"""Rehearsals: run a step of any rank of any world in one process, on fake tensors, and report what it would do."""
