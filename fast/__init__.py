"""The round in Triton kernels and CUDA graphs; without a GPU the kernels run under Triton's interpreter."""
