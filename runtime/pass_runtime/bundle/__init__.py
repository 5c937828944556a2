"""What a bundle is: its manifest, the layouts of its windows, its random numbers, its sampling
parameters, and the buffers to which the tensors of its graphs are bound."""
