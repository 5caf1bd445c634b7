"""GPU kernels at the true dimensions of GLM-5.3; importing a module here needs Triton, and `topk` CuPy."""
