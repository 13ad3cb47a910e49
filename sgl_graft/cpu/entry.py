"""Decides whether the CPU platform is the one SGLang should run on; imported by every SGLang process."""

from __future__ import annotations

import logging
import os
import sys

from ..patches import ContractError, require
from ..plugin import disabled, patches_of, selected

logger = logging.getLogger(__name__)

PLATFORM = "sgl_graft.cpu.platform:GraftCpuPlatform"
SPINS = "5000"  # of libgomp, about 0.1 ms


def _accelerator_present() -> bool:
    import torch

    if torch.cuda.is_available():
        return True
    return any(
        getattr(getattr(torch, name, None), "is_available", lambda: False)()
        for name in ("xpu", "npu", "musa", "mps")
    )


def activate() -> str | None:
    """The platform's dotted path on a machine without an accelerator, else None.

    ``SGLANG_PLATFORM=sgl_graft_cpu`` asks for it on any machine.
    """
    asked = os.environ.get("SGLANG_PLATFORM") == "sgl_graft_cpu"
    if disabled():
        return None
    if not asked and (os.environ.get("SGLANG_USE_CPU_ENGINE") == "1" or _accelerator_present()):
        return None
    needed = asked or selected()
    try:
        patches = patches_of("cpu", "cpu_front", "penalties")
        # On the supported release a tree on a CPU needs this platform: staying out of a changed SGLang would
        # end in a failure of its own that hides the reason.
        needed |= any(word.startswith("--speculative-algo") for word in sys.argv)
        require(patches)
    except ContractError as error:
        if needed:
            sys.exit(f"sgl_graft's CPU platform refuses to start: {error}")
        logger.warning("sgl_graft's CPU platform stays out of this server: %s", error)
        return None
    # Compiling the engine's few small functions needs Python's headers, which a plain Debian lacks, and takes
    # longer than they ever run here. Children inherit it; torch reads it where a function is decorated.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    # A thread that waits for the others spins for milliseconds by default: on a core that the one it waits
    # for may need, and long after the kernels are done. This covers the gaps between kernels.
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    return PLATFORM
