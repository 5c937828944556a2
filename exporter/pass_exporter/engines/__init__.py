"""Implements `pass-export build`: builds TensorRT or TensorRT-RTX engines for a bundle."""
