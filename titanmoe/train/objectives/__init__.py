"""What a run minimises, made from the cross-entropy of each label."""
