"""Collectives with gradients, two computations interleaved on one device, numbers that the host waits for."""
