"""The patch table for SGLang 0.5.23.

``python -m sgl_graft.patches.fingerprints`` prints the fingerprint of every target; a value is only
changed after reading what changed upstream.
"""

from __future__ import annotations

from ..contract import Patch

_CACHE_LOCS = "sglang.kernels.ops.speculative.cache_locs"
_EAGLE_OPS = "sglang.kernels.ops.speculative.eagle"
_TREE_OPS = "sglang.kernels.ops.speculative.spec_tree"
_NO_TRITON = "launches a Triton kernel, and there is no device to launch it on"

PATCHES: tuple[Patch, ...] = (
    # ---- always: the flag and the algorithm names -----------------------------------------------------
    Patch(
        target="sglang.srt.server_args.ServerArgs.add_cli_args",
        how="after",
        hook="flags:add_flags",
        why="adds --graft-config",
        fingerprint="f8e1950c62c33bee",
        feature="names",
    ),
    Patch(
        target="sglang.srt.server_args.ServerArgs.resolve_once",
        how="before",
        hook="flags:before_resolve",
        why="turns our algorithm names into the engine's own before arguments are resolved",
        fingerprint="1a6420af6f198548",
        feature="names",
    ),
    # ---- GRAFT ---------------------------------------------------------------------------------------
    Patch(
        target="sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker",
        how="around",
        hook="graft.select:select_worker",
        why="builds GRAFT's worker where GRAFT was asked for; the stock one otherwise",
        fingerprint="bd73f4e1a91a9046",
        feature="graft",
    ),
    Patch(
        target="sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker",
        how="replace",
        hook="graft.worker:GraftDraftWorker",
        why="the stock worker builds its draft worker by this name; ours is a subclass that grafts",
        fingerprint="eb1a75084f91c9ac",
        feature="graft",
        stage="worker",
    ),
    Patch(
        target="sglang.srt.speculative.eagle_utils.organize_draft_results",
        how="around",
        hook="graft.worker:organize",
        why="the only place where all scored draft nodes are at hand, inside the draft graph",
        fingerprint="dd862799bf87bf93",
        feature="graft",
        stage="worker",
    ),
    Patch(
        target="sglang.srt.speculative.eagle_utils.build_tree_kernel_efficient",
        how="around",
        hook="graft.worker:build_tree",
        why="upstream derives the tree from EAGLE's pool indices; a grafted tree brings its own parents",
        fingerprint="10235e37d04f54b8",
        feature="graft",
        stage="worker",
    ),
    Patch(
        target="sglang.srt.managers.scheduler.Scheduler.get_internal_state",
        how="after",
        hook="serving.status:add_graft_state",
        why="shows what GRAFT did in GET /server_info",
        fingerprint="f358e85f4621464b",
        feature="graft",
        stage="worker",
    ),
    # ---- the CPU platform ----------------------------------------------------------------------------
    Patch(
        target="sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch",
        how="after",
        hook="cpu.seeds:give_every_request_a_seed",
        why="coupled sampling needs a seed for every request; upstream reads them in deterministic mode only",
        fingerprint="d8e67ad342587177",
        feature="cpu",
    ),
    Patch(
        target="sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len",
        how="after",
        hook="cpu.kv_pool:room_for_drafts",
        why="a decode reserves more slots than upstream's rows have columns at the end of the context",
        fingerprint="3ec5827c11b9ba54",
        feature="cpu",
    ),
    Patch(
        target="sglang.srt.managers.tokenizer_manager.TokenizerManager._send_one_request",
        how="before",
        hook="cpu.seeds:give_every_sample_its_own_seed",
        why="upstream gives all samples of a seeded request with n > 1 the same seed, so they come out equal",
        fingerprint="c7f76df463817c8e",
        feature="cpu_front",
    ),
    Patch(
        target=f"{_CACHE_LOCS}.assign_draft_cache_locs_contiguous_func",
        how="replace",
        hook="cpu.spec_ops:assign_draft_cache_locs",
        why=_NO_TRITON,
        fingerprint="fac31ce1dfba5bb3",
        feature="cpu",
        stage="worker",
    ),
    Patch(
        target=f"{_CACHE_LOCS}.assign_extend_cache_locs_uniform_func",
        how="replace",
        hook="cpu.spec_ops:assign_extend_cache_locs_uniform",
        why=_NO_TRITON,
        fingerprint="5dae0027e73901e7",
        feature="cpu",
        stage="worker",
    ),
    Patch(
        target=f"{_CACHE_LOCS}.fill_front_out_cache_loc_func",
        how="replace",
        hook="cpu.spec_ops:fill_front_out_cache_loc",
        why=_NO_TRITON,
        fingerprint="6158d6e69f1d9406",
        feature="cpu",
        stage="worker",
    ),
    Patch(
        target=f"{_EAGLE_OPS}.fill_accept_out_cache_loc_func",
        how="replace",
        hook="cpu.spec_ops:fill_accept_out_cache_loc",
        why=_NO_TRITON,
        fingerprint="6dc07ee3c234da6f",
        feature="cpu",
        stage="worker",
    ),
    Patch(
        target=f"{_EAGLE_OPS}.fill_bonus_tokens_func",
        how="replace",
        hook="cpu.spec_ops:fill_bonus_tokens",
        why=_NO_TRITON,
        fingerprint="2d7129dfa09e2b02",
        feature="cpu",
        stage="worker",
    ),
    Patch(
        target=f"{_TREE_OPS}.build_tree_kernel_efficient_func",
        how="replace",
        hook="cpu.spec_ops:build_tree",
        why=_NO_TRITON,
        fingerprint="d439d875b62331d3",
        feature="cpu",
        stage="worker",
    ),
    Patch(
        target="sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func",
        how="replace",
        hook="cpu.spec_ops:assign_req_to_token_pool",
        why=_NO_TRITON,
        fingerprint="598fab3dd718a36d",
        feature="cpu",
        stage="worker",
    ),
    Patch(
        target="sglang.srt.speculative.eagle_utils.default_tree_mask_mode",
        how="replace",
        hook="cpu.spec_ops:tree_mask_mode",
        why="the CPU attention reads the slots-by-slots mask; upstream has it for its own CPU engine only",
        fingerprint="ee1172cc71be8b31",
        feature="cpu",
        stage="worker",
    ),
    Patch(
        target="sglang.srt.speculative.eagle_utils.eagle_sample",
        how="replace",
        hook="cpu.verify:sample_and_walk",
        why="verifies by coupled sampling; upstream needs CUDA kernels, or is greedy at T > 0",
        fingerprint="5ff624ffb3b93e21",
        feature="cpu",
        stage="worker",
    ),
    Patch(
        target="sglang.srt.speculative.draft_utils.DraftBackendFactory.create_decode_backend",
        how="replace",
        hook="cpu.draft_attention:create_decode_backend",
        why="upstream's list of draft attention backends cannot be extended",
        fingerprint="75b3ee47bff4bd37",
        feature="cpu",
        stage="worker",
    ),
    Patch(
        target="sglang.srt.speculative.draft_utils.DraftBackendFactory.create_draft_extend_backend",
        how="replace",
        hook="cpu.draft_attention:create_draft_extend_backend",
        why="upstream's list of draft attention backends cannot be extended",
        fingerprint="7b4b02e36e4de25c",
        feature="cpu",
        stage="worker",
    ),
)
