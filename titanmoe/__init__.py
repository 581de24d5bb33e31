"""titanmoe trains Mixture-of-Experts language models, attention and experts folded differently over the same ranks."""

__version__ = "0.1.0"
