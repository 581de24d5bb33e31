"""`titanmoe train`: start the ranks of a run, and report a failure in one message."""
