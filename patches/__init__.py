"""Every place where SGLang is touched, as data: one folder per supported SGLang release.

A :class:`Patch` names its target, how it is touched, with what, why, and the fingerprint of the upstream
source it was written against. :func:`check` compares fingerprints; :func:`apply` refuses on a mismatch.
Nothing else in the project hooks SGLang.
"""

from .contract import (
    ContractError,
    Patch,
    apply,
    check,
    fingerprint,
    hook_exists,
    register,
    require,
    table_for,
)

__all__ = [
    "ContractError",
    "Patch",
    "apply",
    "check",
    "fingerprint",
    "hook_exists",
    "register",
    "require",
    "table_for",
]
