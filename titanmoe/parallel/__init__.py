"""How a model is parallelised over the meshes."""
