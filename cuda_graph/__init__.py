"""Static-shape, sync-free tree operations: torch references and Triton kernels (torch and Triton only)."""
