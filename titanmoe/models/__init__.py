"""The transformer, its families' shapes, and what they count to."""
