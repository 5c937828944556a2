"""`pass-export build`: TensorRT and TensorRT-RTX engines for a bundle."""
