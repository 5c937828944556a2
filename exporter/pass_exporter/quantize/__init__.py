"""Quantization: schemes, codes of weights, static scales of activations, and the graph."""
