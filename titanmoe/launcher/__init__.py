"""`titanmoe train`: starts the ranks of a run, and says what went wrong in one message."""
