"""The block sizes a BLOCKPILOT server fixes at start."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import BlockPilotConfig

ASSUMED_BLOCK = 16  # upstream's, for a draft whose configuration does not say
REACH = 2  # sizes to either side of the default that are candidates (the paper's k)


@dataclass(frozen=True)
class BlockShape:
    """Sizes of blocks, root included.

    Attributes:
        b_max: verify slots per request.
        default: size of a request nobody chose for.
        candidates: what a policy chooses from, rising.
        widths: rows per request a round may have, rising; the last one is ``b_max``.
    """

    b_max: int
    default: int
    candidates: tuple[int, ...]
    widths: tuple[int, ...]


def block_shape(config: BlockPilotConfig, trained: int | None, slots: int | None) -> BlockShape:
    """Resolve the sizes.

    Args:
        trained: block size the draft was trained at, where it is known.
        slots: ``--speculative-num-draft-tokens``; None takes the largest size that is needed.

    Raises:
        ValueError: the value, the flag or key it came from, and what is allowed.
    """
    default = config.default or trained or ASSUMED_BLOCK
    if slots is not None and config.default is None:
        default = min(default, slots)
    given = config.candidates
    near = tuple(size for size in range(default - REACH, default + REACH + 1) if size >= 1)
    largest = max(default, *(given or near)) if slots is None else slots
    candidates = given or tuple(size for size in near if size <= largest)
    if largest < 2:
        raise ValueError(
            f"BLOCKPILOT needs at least 2 slots per request, got --speculative-num-draft-tokens {largest}: "
            "the first is the last committed token"
        )
    for name, size in (("default", default), *(("candidates", size) for size in candidates)):
        if not 1 <= size <= largest:
            raise ValueError(
                f"blockpilot.{name} has {size}, but --speculative-num-draft-tokens allows 1 to {largest}; "
                "raise the flag or choose a smaller size"
            )
    if default not in candidates:
        raise ValueError(
            f"blockpilot.candidates {list(candidates)} lack the default size {default}; add it, or set "
            "blockpilot.default to one of them"
        )
    if config.verify_len is not None and config.verify_len > largest:
        raise ValueError(
            f"blockpilot.verify_len is {config.verify_len}, but a block has at most {largest} rows"
        )
    return BlockShape(largest, default, candidates, _widths(config, largest))


def _widths(config: BlockPilotConfig, b_max: int) -> tuple[int, ...]:
    if config.widths is not None:
        if config.widths[-1] > b_max:
            raise ValueError(
                f"blockpilot.widths has {config.widths[-1]}, above --speculative-num-draft-tokens {b_max}"
            )
        return tuple(sorted({*config.widths, b_max}))
    return tuple(range(1, b_max + 1))
