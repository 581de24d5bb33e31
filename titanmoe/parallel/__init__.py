"""How a model is laid on the meshes."""
