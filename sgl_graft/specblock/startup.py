"""What SPECBLOCK refuses before a model is loaded, and the engine arguments it settles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..config import Config, GraftConfig, SpecBlockConfig, TableConfig, current_config
from ..graft.shape import PAPER_DEPTH, GraftShape
from ..graft.startup import check_shape
from ..startup_checks import check_shared
from .adaptation.store import check_writable
from .checkpoint import read_config
from .model import block_size, check_config, features_width
from .tree import MAX_LEVELS, BranchRule

# Arguments the engine drops without a word, or only with a warning, for an algorithm it does not know.
CANNOT_COMBINE = {
    "speculative_adaptive": "it moves EAGLE's chain length, which SPECBLOCK does not have",
    "speculative_draft_window_size": "the draft attends to the whole context",
    "speculative_draft_sink_size": "the draft attends to the whole context",
    "speculative_use_rejection_sampling": "it needs the draft's probabilities of a chain",
    "speculative_use_block_verification": "it needs the draft's probabilities of a chain",
    "speculative_token_map": "a SpecBlock draft names its own tokens",
    "speculative_num_steps": "name the blocks in the configuration, specblock.blocks",
    "speculative_eagle_topk": "name the beam in the configuration, specblock.beam",
    "enable_multi_layer_eagle": "it builds EAGLE's own draft layers",
    "enable_lora": "the adapters of a draft are EAGLE's",
    "enable_dp_attention": "its idle ranks are not written",
    "enable_hierarchical_cache": "the draft's keys and values are not copied to the host with the target's",
    "enable_mixed_chunk": "its batches mix prefill and decode",
    "enable_kv_cache_sharding": "the draft's pool holds several entries per token",
}
# Settings of the sections graft and graft.table that `specblock.graft` does not honour.
NOT_GRAFTED = {
    "rule": "the table's nodes and the draft's compete by their probabilities",
    "base": "the draft is SPECBLOCK's",
    "calibration": "probabilities are taken as they are",
    "collect": "only GRAFT's own trees are counted",
    "thresholds": "there are no gates",
    "verify": "a CPU verifies coupled and a GPU by SGLang's own rule",
    "check_ranks": "the ranks are not compared",
    "load_cap": "SPECBLOCK has no load cap",
}
NOT_KEPT = {
    "path": "the table is kept in memory only",
    "save_path": "the table is kept in memory only",
    "save_every_s": "the table is kept in memory only",
    "folder": "the table is kept in memory only",
    "retain_days": "the table is kept in memory only, and POST /flush_cache empties it",
}
DEFAULT_SLOTS = 16
MAX_REQUESTS = 48  # as SGLang sets it for its own speculative algorithms


def rule_of(config: SpecBlockConfig, draft: Path) -> BranchRule:
    """How proposals branch.

    Raises:
        ValueError: ``branching: fitted`` and the draft in this folder says nothing about it.
    """
    fitted = config.branching == "fitted" and config.children is None
    children = fitted_children(draft) if fitted else config.children_by_class
    return BranchRule(children, config.beam, config.spare_sure)


def fitted_children(draft: Path) -> tuple[int, int, int, int]:
    """Children per rank class that paid on held-out answers, from the draft's card."""
    card = draft / "training_card.json"
    try:
        a, b, c, d = (int(count) for count in json.loads(card.read_text())["fitted_children"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"specblock.branching fitted needs fitted_children in {card}, as `sgl-graft train specblock` "
            "writes it: use such a draft, another branching, or name four numbers in specblock.children"
        ) from error
    return a, b, c, d


def check_specblock(args: Any) -> None:
    """Check the arguments before SGLang resolves them.

    Raises:
        ValueError: with the value and the remedy.
    """
    for field, why in CANNOT_COMBINE.items():
        if getattr(args, field, None):
            raise ValueError(
                f"SPECBLOCK cannot run with --{field.replace('_', '-')}: {why}. Leave the flag out."
            )
    for field in ("pp_size", "dcp_size", "attn_cp_size"):
        if (getattr(args, field, 1) or 1) > 1:
            raise ValueError(
                f"SPECBLOCK cannot run with --{field.replace('_', '-')} {getattr(args, field)}: use 1"
            )
    if getattr(args, "disaggregation_mode", "null") != "null":
        raise ValueError(
            "SPECBLOCK cannot run with --disaggregation-mode: the draft's state is not sent along"
        )
    if args.kv_cache_dtype not in ("auto", "bfloat16", "bf16"):
        raise ValueError(
            f"SPECBLOCK cannot run with --kv-cache-dtype {args.kv_cache_dtype}: its draft writes plain "
            "values; use auto"
        )
    check_shared(args, "SPECBLOCK")
    _check_grafting(current_config())
    state_dir = current_config().specblock.adaptation.state_dir
    if current_config().specblock.adaptation.enabled and state_dir is not None:
        check_writable(state_dir)
    draft = args.speculative_draft_model_path
    if draft is None:
        raise ValueError(
            "SPECBLOCK needs a draft: name its folder with --speculative-draft-model-path "
            "(`sgl-graft train specblock` makes one)"
        )
    if Path(draft).is_dir():
        _check_draft(args, Path(draft))


def _check_grafting(config: Config) -> None:
    """Refuse what ``specblock.graft`` would ignore; without it the section is not read at all."""
    if not config.specblock.graft:
        return
    graft = config.graft
    for name, given, default, reasons in (
        ("graft", graft, GraftConfig(), NOT_GRAFTED),
        ("graft.table", graft.table, TableConfig(), NOT_KEPT),
    ):
        for key, why in reasons.items():
            value = getattr(given, key)
            if value != getattr(default, key):
                raise ValueError(f"specblock.graft cannot use {name}.{key} {value}: {why}. Leave it out.")


def _check_draft(args: Any, folder: Path) -> None:
    config = read_config(folder)
    check_config(config)
    rule_of(current_config().specblock, folder)
    levels = current_config().specblock.blocks * block_size(config)
    if levels > MAX_LEVELS:
        raise ValueError(
            f"specblock.blocks {current_config().specblock.blocks} times {block_size(config)} slots makes "
            f"trees of {levels} levels, more than {MAX_LEVELS}: use fewer blocks"
        )
    if not Path(args.model_path).is_dir():
        return
    from sglang.srt.utils.hf_transformers_utils import get_config, get_hf_text_config

    target = get_hf_text_config(get_config(args.model_path, trust_remote_code=args.trust_remote_code))
    if config.hidden_size != target.hidden_size:
        raise ValueError(
            f"the draft {folder} is {config.hidden_size} wide and shares the target's embedding, which is "
            f"{target.hidden_size} wide: use a draft that was trained for {args.model_path}"
        )
    if features_width(config) % target.hidden_size:
        raise ValueError(
            f"the draft {folder} reads states of {features_width(config)} numbers, which are no multiple of "
            f"the target's {target.hidden_size}: use a draft that was trained for {args.model_path}"
        )


def settle(args: Any) -> None:
    """Give the engine the tree's size (called while SGLang resolves its arguments).

    The engine reserves slots for `topk * steps` draft tokens and for paths of `steps`; a topk above 1 tells
    it that the verify input is a tree.

    Raises:
        ValueError: the slots hold no draft, or no tree of GRAFT's table, with the value and the remedy.
    """
    whole = current_config()
    config = whole.specblock
    block = block_size(read_config(Path(args.speculative_draft_model_path)))
    if args.speculative_num_draft_tokens is None:
        args.speculative_num_draft_tokens = DEFAULT_SLOTS
    slots = args.speculative_num_draft_tokens
    if slots < 2:
        raise ValueError(f"--speculative-num-draft-tokens {slots} leaves no room for a draft: use 2 or more")
    levels = config.blocks * block
    if config.graft:  # the table's paths must fit as well
        levels = max(levels, whole.graft.depth or PAPER_DEPTH)
    args.speculative_num_steps = steps = min(levels, slots - 1)
    if config.graft:
        check_shape(whole.graft, GraftShape(slots=slots, topk=2, steps=steps, num_rows=1, vocab_size=1))
    args.speculative_eagle_topk = 2
    args.enable_mixed_chunk = False
    if args.max_running_requests is None:
        args.max_running_requests = MAX_REQUESTS
