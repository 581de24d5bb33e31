"""What serves CPUs alone. `titanmoe.ops.device.way` says where it is taken; the plain formulas are with the callers."""
