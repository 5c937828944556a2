"""A bundle's description: manifest, window layouts, noise, sampling parameters, and the buffers of
its tensors."""
