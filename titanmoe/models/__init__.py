"""The transformer, the shapes of its families, and counts of parameters and FLOPs."""
