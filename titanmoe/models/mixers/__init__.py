"""What mixes the tokens of a block: attention, or a layer that a family has in its place."""
