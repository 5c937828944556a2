"""pass-export build: TensorRT engines for a bundle."""
