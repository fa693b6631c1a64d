"""What runs on each host of the testbed: an example's runs in JAX, and PyTorch's."""
