"""The ops for GPUs, in Triton. `ops` is the backend; each other module holds a few kernels.

Every kernel has a plain torch counterpart in `penstock.ops` that it is tested against, on a GPU
and, on small shapes, under Triton's interpreter on a CPU.
"""
