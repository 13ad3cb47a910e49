"""SPECBLOCK: a draft that proposes a block of dependent tokens per forward (arXiv 2605.07243)."""
