"""What GRAFT refuses before a model is loaded; every message names the value and the remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..config import GraftConfig, current_config
from ..cuda_graph.stages import paper_stage_plan
from ..cuda_graph.successor_table import SuccessorTable
from .calibration import read_calibration
from .shape import GraftShape, rank_prior
from .store import identity_of, load_table

CANNOT_COMBINE = {
    "enable_multi_layer_eagle": "its draft layers propose one chain, without the scored tree that is grafted",
    "speculative_adaptive": "it switches between chains (topk 1); GRAFT keeps one constant tree",
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
    config = current_config().graft
    given = (
        args.speculative_num_draft_tokens,
        args.speculative_eagle_topk,
        args.speculative_num_steps,
    )
    if None not in given:
        slots, topk, steps = given
        check_shape(config, GraftShape(slots=slots, topk=topk, steps=steps, num_rows=1, vocab_size=1))
    _check_files(config, args)


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
    SuccessorTable.create(1, k=config.table.row_width, order2_rows=config.table.order2_rows)


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
            vocab_size, k=config.table.row_width, order2_rows=config.table.order2_rows
        )
        load_table(table, config.table.path, identity_of(Path(args.model_path)))
