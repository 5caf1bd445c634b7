"""A tiny GLM-5.3 with true row sizes: configuration, weights, row codec, model and reference run."""
