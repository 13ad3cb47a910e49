"""SGLang's platform object for machines without an accelerator."""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import KVPoolKind, PlatformCapabilities, SRTPlatform

from ..patches import apply
from ..plugin import patches_of
from .refusals import SUPPORTED_ALGORITHMS, check_server_args

logger = logging.getLogger(__name__)

ATTENTION_BACKEND = "graft_cpu"
SAMPLING_BACKEND = "graft_coupled"


class GraftCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Stock SGLang on a plain CPU, speculative trees included."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities(supports_triton=False, graph_capture=False)

    def __init__(self) -> None:
        from sglang.srt.arg_groups import choices

        if ATTENTION_BACKEND not in choices.ATTENTION_BACKEND_CHOICES:
            choices.add_attention_backend_choices([ATTENTION_BACKEND])
            choices.add_draft_attention_backend_choices([ATTENTION_BACKEND])
        choices.SAMPLING_BACKEND_CHOICES.add(SAMPLING_BACKEND)

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Refuse what cannot run here, and fill in what the user left open.

        Upstream's rules for ``--device cpu`` run before this one: they put ``intel_amx``, which needs a
        kernel library that no registry ships, where no attention backend was named, and ``pytorch`` in
        place of any sampling backend.
        """
        check_server_args(server_args)
        if server_args.device is None:
            server_args.device = "cpu"
        if server_args.attention_backend in (None, "intel_amx"):
            server_args.attention_backend = ATTENTION_BACKEND
        server_args.sampling_backend = SAMPLING_BACKEND
        # "auto" may give a target and its draft different types, which no layer here multiplies. What is
        # promised, above all losslessness, is promised for fp32.
        if server_args.dtype == "auto":
            server_args.dtype = "float32"
        # The scheduler polls without pause otherwise, on a core that the other processes need.
        server_args.sleep_on_idle = True
        # A CPU computes where it is called: nothing overlaps, each answer costs a step more to end, and
        # upstream's penalties come one token late.
        server_args.disable_overlap_schedule = True
        apply(patches_of("cpu_front"))

    def get_default_attention_backend(self) -> str:
        return ATTENTION_BACKEND

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        return ATTENTION_BACKEND

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        return backend == ATTENTION_BACKEND

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return algorithm.upper() in SUPPORTED_ALGORITHMS

    def get_kv_pool_cls(self, *, kind: KVPoolKind) -> type | None:
        if kind != "mha":
            return None
        from .kv_pool import CpuKVPool

        return CpuKVPool

    def get_speculative_cache_locs_fn(self) -> Any:
        from .spec_ops import speculative_cache_locs

        return speculative_cache_locs

    def get_speculative_worker_cls(self, algorithm: str) -> type | None:
        """Patch the engine's speculative modules just before the stock worker is built from them."""
        apply(patches_of("cpu", stage="worker"))
        return None

    def init_backend(self) -> None:
        from . import tree_kernels

        _register_factories()
        tree_kernels.register()
        apply(patches_of("cpu", "penalties", stage="load"))

    def post_load_model(self, model: torch.nn.Module) -> None:
        """Put our kernels behind the model's layers; another attention backend leaves them stock."""
        from sglang.srt.runtime_context import attention_backends

        from . import fused_layers, layer_stack

        if ATTENTION_BACKEND in attention_backends():
            fused_layers.register(self.get_dispatch_key_name())
            fused_layers.install(model)
            layer_stack.install(model)

    def get_device(self, device_id: int = 0) -> str:
        return "cpu"


def _register_factories() -> None:
    """Make the attention and sampling backends known to the engine."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.layers.sampler import register_sampler_backend

    from .attention import GraftCpuAttnBackend
    from .sampler import CoupledSampler

    register_attention_backend(ATTENTION_BACKEND)(GraftCpuAttnBackend)
    register_sampler_backend(SAMPLING_BACKEND, CoupledSampler)
