"""`pass-export build`: builds TensorRT engines for a bundle."""
