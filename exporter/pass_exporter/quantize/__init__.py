"""Quantization: schemes, the codes of weights, static scales of activations, and the graph over
them."""
