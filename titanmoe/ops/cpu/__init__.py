"""Code for CPUs alone. `titanmoe.ops.device.choose` says where it is used; the plain formulas are with its callers."""
