"""TensorRT and TensorRT-RTX, through cuda-python."""
