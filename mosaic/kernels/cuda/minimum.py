"""minimum on CUDA: y = min(x, other), PyTorch's own kernel."""

from mosaic.kernels.minimum import launch as launch
