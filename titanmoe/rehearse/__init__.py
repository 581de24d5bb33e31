"""One step of any rank of any world in one process: the real code on fake tensors, and what it sends and holds."""
