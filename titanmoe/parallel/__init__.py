"""Parallelise a model over the meshes: tensor, context, expert, data and pipeline parallel, and recomputation."""
