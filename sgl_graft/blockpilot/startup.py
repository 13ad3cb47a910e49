"""What BLOCKPILOT refuses before a model is loaded; every message names the value and the remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..config import BlockPilotConfig, current_config
from ..files import check_writable
from ..graft.calibration import read_calibration
from ..startup_checks import check_shared
from .costs import read_costs
from .policy import read_replay
from .policy_file import read_policy
from .shape import BlockShape, block_shape

CANNOT_COMBINE = {
    "enable_dp_attention": "ranks without requests would have to run rounds of a width they do not know",
    "speculative_adaptive": "it switches between chains of EAGLE",
    "enable_lora": "adapters were never tried with it",
}


def settle_slots(args: Any) -> None:
    """Fill in ``--speculative-num-draft-tokens``: the largest block size the configuration needs.

    Runs before SGLang resolves its arguments, which would take the size the draft was trained at and so leave
    no room for the larger candidates.
    """
    given = args.speculative_num_draft_tokens or args.speculative_dflash_block_size
    shape = block_shape(current_config().blockpilot, trained_block(args), given)
    if given is None:
        args.speculative_num_draft_tokens = shape.b_max


def check_blockpilot(args: Any) -> BlockShape:
    """Check the configuration against the server's arguments.

    Args:
        args: SGLang's ``ServerArgs``, before resolution.

    Raises:
        ValueError: with the value and the remedy.
    """
    for field, why in CANNOT_COMBINE.items():
        if getattr(args, field, False):
            raise ValueError(
                f"BLOCKPILOT cannot run with --{field.replace('_', '-')}: {why}. Leave the flag out."
            )
    check_shared(args, "BLOCKPILOT")
    config = current_config().blockpilot
    if config.tail_graft and args.disaggregation_mode != "null":
        raise ValueError(
            f"blockpilot.tail_graft cannot run with --disaggregation-mode {args.disaggregation_mode}: which "
            "table a request may read is settled by its prefill, which would run on another server. Leave "
            "it out there"
        )
    if config.collect is not None:
        check_writable(config.collect, "blockpilot.collect")
    slots = args.speculative_num_draft_tokens or args.speculative_dflash_block_size
    shape = block_shape(config, trained_block(args), slots)
    _check_files(config, shape, args)
    return shape


def _check_files(config: BlockPilotConfig, shape: BlockShape, args: Any) -> None:
    """A file that the user named and that is missing or damaged stops the server here."""
    if config.costs is not None:
        read_costs(config.costs)
    if config.policy_file is not None:
        if config.policy == "replay":
            read_replay(config.policy_file, shape.default)
        else:
            read_policy(config.policy_file)
    if config.policy == "mlp" and config.policy_file is None and _is_local(args):
        from .policy_file import FILE_NAME

        if not (Path(args.speculative_draft_model_path) / FILE_NAME).is_file():
            raise ValueError(
                "blockpilot.policy mlp needs a predictor, and none ships with this draft: name one in "
                "blockpilot.policy_file, or train one with `sgl-graft train blockpilot`"
            )
    if config.policy == "ewma" and config.costs is None and _is_local(args):
        from .costs import FILE_NAME as COSTS_NAME

        if not (Path(args.speculative_draft_model_path) / COSTS_NAME).is_file():
            raise ValueError(
                "blockpilot.policy ewma needs a cost table, and none ships with this draft: measure one with "
                "`sgl-graft train blockpilot` and name it in blockpilot.costs"
            )
    if config.tail_calibration is not None and Path(args.model_path).is_dir():
        from sglang.srt.utils.hf_transformers_utils import get_config, get_hf_text_config

        text = get_hf_text_config(get_config(args.model_path, trust_remote_code=args.trust_remote_code))
        read_calibration(config.tail_calibration, text.vocab_size)


def _is_local(args: Any) -> bool:
    draft = args.speculative_draft_model_path
    return draft is not None and Path(draft).is_dir()


def trained_block(args: Any) -> int | None:
    """The block size in a local draft's configuration; None for a name on a model hub."""
    if not _is_local(args):
        return None
    from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config
    from sglang.srt.utils.hf_transformers_utils import get_config

    config = get_config(args.speculative_draft_model_path, trust_remote_code=args.trust_remote_code)
    size = parse_dflash_draft_config(draft_hf_config=config).resolve_block_size(default=None)
    return None if size is None else int(size)
