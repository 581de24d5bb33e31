"""Ways to turn gradients into updates of the weights, a file each; `protocol` is what they have in common."""
