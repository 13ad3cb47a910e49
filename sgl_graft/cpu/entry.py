"""Decides whether the CPU platform is the one SGLang should run on; imported by every SGLang process."""

from __future__ import annotations

import logging
import os
import sys
from importlib.metadata import version

from ..patches import ContractError, table_for
from ..plugin import disabled, selected

logger = logging.getLogger(__name__)

PLATFORM = "sgl_graft.cpu.platform:GraftCpuPlatform"


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
    # SGLang asks while its own modules are half imported, so only the release is compared here; the
    # platform compares the functions themselves before it touches them, and stops the server then.
    try:
        table_for(version("sglang"))
    except ContractError as error:
        if asked or selected():
            sys.exit(f"sgl_graft's CPU platform refuses to start: {error}")
        logger.warning("sgl_graft's CPU platform stays out of this server: %s", error)
        return None
    return PLATFORM
