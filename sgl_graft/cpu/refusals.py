"""What cannot run on the CPU platform, refused with the reason before a model is loaded."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..algorithms import selected_algorithm
from ..config import current_config
from ..startup_checks import check_draft

SUPPORTED_ALGORITHMS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "DFLASH")

CANNOT_RUN = {
    "NGRAM": "its worker imports a kernel library (sgl_kernel) that exists for CUDA only",
    "DSPARK": "its draft and its verify are CUDA kernels",
    "UNO": "upstream supports it on CUDA only",
    "FROZEN_KV_MTP": "its draft reads the target's KV cache through CUDA kernels",
}


class Flag(NamedTuple):
    """An argument that speculation on a CPU cannot honour."""

    field: str
    allowed: tuple[Any, ...]
    why: str


_BACKEND = (None, "graft_cpu", "intel_amx")  # the last is what upstream fills in on a CPU
_NO_TREES = "no other attention backend has tree masks on a CPU"
_COUPLED = "the CPU verifies by coupled sampling, which is exact and has no such setting"
FLAGS = (
    Flag("attention_backend", _BACKEND, _NO_TREES),
    Flag("prefill_attention_backend", _BACKEND, _NO_TREES),
    Flag("decode_attention_backend", _BACKEND, _NO_TREES),
    Flag("speculative_draft_attention_backend", _BACKEND, _NO_TREES),
    Flag("speculative_accept_threshold_single", (1.0,), _COUPLED),
    Flag("speculative_accept_threshold_acc", (1.0,), _COUPLED),
    Flag("speculative_use_rejection_sampling", (False,), _COUPLED),
    Flag("enable_multi_layer_eagle", (False,), "only the single-layer EAGLE worker runs on a CPU"),
)


def check_server_args(args: Any) -> None:
    """Refuse what the CPU platform cannot run.

    Raises:
        ValueError: the reason and what to use instead.
    """
    if args.speculative_algorithm is None:
        return
    if selected_algorithm() == "GRAFT" and current_config().graft.verify == "target_only":
        raise ValueError(f"graft.verify target_only is a rule for GPUs: {_COUPLED}. Leave graft.verify out.")
    name = args.speculative_algorithm.upper()
    if name in CANNOT_RUN:
        usable = ", ".join((*SUPPORTED_ALGORITHMS, "GRAFT"))
        raise ValueError(
            f"--speculative-algorithm {name} cannot run on a CPU: {CANNOT_RUN[name]}. "
            f"Use one of {usable}, or serve without speculation."
        )
    for flag in FLAGS:
        value = getattr(args, flag.field)
        if value not in flag.allowed:
            option = "--" + flag.field.replace("_", "-")
            raise ValueError(
                f"{option} {value} cannot be combined with speculation on a CPU: {flag.why}. "
                f"Leave {option} out."
            )
    if name in SUPPORTED_ALGORITHMS:
        check_draft(args)
