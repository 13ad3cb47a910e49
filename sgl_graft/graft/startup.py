"""What GRAFT refuses before a model is loaded; every message names the value and the remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..config import GraftConfig, current_config
from ..cuda_graph.select import MAX_DEPTH
from ..cuda_graph.stages import paper_stage_plan
from ..cuda_graph.successor_table import SuccessorTable
from ..files import check_writable
from ..serving.load_costs import misfit, read_load_costs
from ..startup_checks import check_shared
from .calibration import read_calibration
from .shape import CPU_TREE, DEFAULT_TREE, GraftShape, rank_prior
from .store import identity_of, load_table

CANNOT_COMBINE = {
    "enable_multi_layer_eagle": "its draft layers propose one chain, without the scored tree that is grafted",
    "speculative_adaptive": "it switches between chains (topk 1); GRAFT keeps one constant tree",
    "enable_dp_attention": "its idle ranks were never tried with a grafted tree",
    "enable_lora": "adapters were never tried with it",
}


def check_graft(args: Any) -> None:
    """Check the configuration against the server's arguments.

    Args:
        args: SGLang's ``ServerArgs``, before resolution.

    Raises:
        ValueError: with the value and the remedy.
    """
    for field, why in CANNOT_COMBINE.items():
        if getattr(args, field):
            raise ValueError(f"GRAFT cannot run with --{field.replace('_', '-')}: {why}. Leave the flag out.")
    check_shared(args, "GRAFT")
    if args.disaggregation_mode != "null":
        raise ValueError(
            f"GRAFT cannot run with --disaggregation-mode {args.disaggregation_mode}: which table a request "
            "may read is settled by its prefill, which would run on another server. Use EAGLE3 there"
        )
    config = current_config().graft
    _check_verify(config, args)
    if config.table.retain_days is not None and args.tp_size > 1:
        raise ValueError(
            f"graft.table.retain_days {config.table.retain_days} needs --tp 1: each rank has a table of its "
            "own, and they would be emptied at different moments. Leave it out, and delete the saved table "
            "with `sgl-graft forget` when it is old enough"
        )
    kind = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    shape = _settle_tree(args, kind)
    check_shape(config, shape)
    with_scope(config, args)
    _check_files(config, args)
    for path, key in ((config.collect, "graft.collect"), (config.load_cap.measure, "graft.load_cap.measure")):
        if path is not None:
            check_writable(path, key)
    if config.load_cap.costs is not None:
        path = config.load_cap.costs
        why_not = misfit(read_load_costs(path), path, shape.slots, shape.steps, kind)
        if why_not is not None:
            raise ValueError(f"{why_not}: measure them with `sgl-graft calibrate-load`, or leave it out")


def _settle_tree(args: Any, kind: str) -> GraftShape:
    """Fill in what of the tree was left out: SGLang would choose a chain for most models."""
    names = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
    for name, default in zip(names, CPU_TREE if kind == "cpu" else DEFAULT_TREE, strict=True):
        if getattr(args, name) is None:
            setattr(args, name, default)
    steps, topk, slots = (getattr(args, name) for name in names)
    return GraftShape(slots=slots, topk=topk, steps=steps, num_rows=1, vocab_size=1)


def with_scope(config: GraftConfig, args: Any) -> GraftConfig:
    """Settle who shares the table: nobody when API keys tell users apart, unless the configuration says so.

    Raises:
        ValueError: a table that would be private is to be kept on disk.
    """
    if config.table.scope is not None:
        return config
    scope = "request" if args.api_key or args.admin_api_key else "shared"
    if scope == "request" and (config.table.path or config.table.save_path or config.table.folder):
        raise ValueError(
            "with API keys every request has a private table, which is never stored: leave graft.table.path, "
            "save_path and folder out, or set graft.table.scope to shared if all keys may share what they "
            "teach"
        )
    table = config.table.model_copy(update={"scope": scope})
    return config.model_copy(update={"table": table})


def _check_verify(config: GraftConfig, args: Any) -> None:
    for field in ("speculative_accept_threshold_single", "speculative_accept_threshold_acc"):
        value = getattr(args, field)
        if config.verify == "coupled" and value != 1.0:
            raise ValueError(
                f"--{field.replace('_', '-')} {value} belongs to SGLang's own verify: set graft.verify to "
                "target_only, or leave the flag out"
            )


def check_shape(config: GraftConfig, shape: GraftShape) -> None:
    """Refuse trees that cannot be laid out.

    Raises:
        ValueError: topk, depth, thresholds or table sizes out of range.
    """
    if shape.topk < 2:
        raise ValueError(
            f"GRAFT needs --speculative-eagle-topk of at least 2, got {shape.topk}: a chain has no "
            "low-ranked nodes to swap. Use --speculative-eagle-topk 4, or serve the chain with "
            "--speculative-algorithm EAGLE3."
        )
    depth = shape.depth(config.depth)
    if depth > MAX_DEPTH:
        raise ValueError(
            f"trees of depth {depth} are beyond the limit {MAX_DEPTH}: lower --speculative-num-steps "
            f"({shape.steps}) or graft.depth ({config.depth})"
        )
    try:
        plan = paper_stage_plan(shape.slots, shape.steps, depth, rank_prior=rank_prior(config))
    except ValueError as error:
        raise ValueError(
            f"no tree of {shape.slots} slots and depth {depth} can be laid out with graft.table.row_width "
            f"{config.table.row_width}: {error}; row_width 8 fits every template"
        ) from error
    if config.thresholds is not None and len(config.thresholds) != len(plan.checkpoints):
        raise ValueError(
            f"graft.thresholds has {len(config.thresholds)} values; the {len(plan.checkpoints)} gates at "
            f"draft depths {list(plan.checkpoints)} need one each"
        )
    SuccessorTable.create(
        1,
        k=config.table.row_width,
        context_rows=config.table.context_rows,
        context_len=config.table.context_len,
    )


def _check_files(config: GraftConfig, args: Any) -> None:
    if not Path(args.model_path).is_dir() or (config.calibration is None and config.table.path is None):
        return  # a name on a model hub: the worker checks once it is there
    from sglang.srt.utils.hf_transformers_utils import get_config, get_hf_text_config

    vocab_size = get_hf_text_config(
        get_config(args.model_path, trust_remote_code=args.trust_remote_code)
    ).vocab_size
    if config.calibration is not None:
        read_calibration(config.calibration, vocab_size)
    if config.table.path is not None:
        table = SuccessorTable.create(
            vocab_size,
            k=config.table.row_width,
            context_rows=config.table.context_rows,
            context_len=config.table.context_len,
        )
        load_table(table, config.table.path, identity_of(Path(args.model_path)))
