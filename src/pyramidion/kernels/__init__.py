"""What a GPU should do in one go: each function is plain torch on a CPU, and one or two Triton kernels on a GPU.

`registration` makes an operator of a function and its gradient, `launching` starts kernels, `tiles` takes them through
the rows of a matrix; the other modules are named for the part of a model that they compute.
"""
