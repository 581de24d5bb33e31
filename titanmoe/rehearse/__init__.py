"""Any rank of any world in one process: the real step on fake tensors, and all that it sends and keeps."""
