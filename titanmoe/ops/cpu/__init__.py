"""What serves CPUs alone. `titanmoe.ops.device` says whether to take it; the plain formulas are with the callers."""
