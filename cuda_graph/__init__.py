"""Static-shape, sync-free tree operations: torch references and Triton kernels (torch and Triton only).

A tree is two tensors: `tokens [batch, slots]` and `parents [batch, slots]`, both int64. Slot 0 is the root,
a parent stands before its children, and a parent of -1 marks an empty slot (the root's own entry is -1 too
and is never read). No function here reads a value back to the host, branches on data in Python, or has an
output whose shape depends on data, so every one of them may run inside a captured CUDA graph.

Each op exists twice: a torch reference, which is what runs on a CPU, and a Triton kernel in `<op>_kernel.py`.
"""
