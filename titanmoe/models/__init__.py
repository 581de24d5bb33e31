"""The transformer, its families' shapes, and their parameter and FLOP counts."""
