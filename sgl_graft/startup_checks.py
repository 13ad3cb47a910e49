"""What is refused before a model is loaded; every message says what to do instead.

Each check takes SGLang's ``ServerArgs`` (or any object with the same fields) and raises ValueError.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

# The others bring their draft inside the target's checkpoint, or need none.
SEPARATE_DRAFT = ("EAGLE3", "STANDALONE", "DFLASH")
# Their draft reads the target's hidden states, so its input has the target's width.
READS_HIDDEN_STATES = ("EAGLE", "EAGLE3", "NEXTN")


def check_draft(args: Any) -> None:
    """The draft is there, was made for this target, and reaches as far as the server will serve.

    Raises:
        ValueError: with the remedy.
    """
    algorithm = (args.speculative_algorithm or "").upper()
    draft = args.speculative_draft_model_path
    if draft is None:
        if algorithm in SEPARATE_DRAFT:
            raise ValueError(
                f"{algorithm} needs a draft: name its folder with --speculative-draft-model-path "
                "(`sgl-graft serve` takes the one that ships for the embedded model)."
            )
        return
    if not Path(draft).is_dir():
        if _looks_like_a_folder(draft):
            raise ValueError(
                f"--speculative-draft-model-path {draft}: there is no such folder. "
                "Name an existing draft, or train one with `sgl-graft train`."
            )
        return  # a name on a model hub: SGLang fetches it
    if not (Path(draft) / "config.json").is_file():
        raise ValueError(
            f"--speculative-draft-model-path {draft}: the folder has no config.json, so it holds no draft. "
            "Name the folder that a training run wrote."
        )
    if Path(args.model_path).is_dir():
        _compare(args, algorithm, _config(args, draft), _config(args, args.model_path))


def _looks_like_a_folder(name: str) -> bool:
    return name.startswith(("/", ".", "~")) or name.count("/") != 1


def _config(args: Any, folder: str) -> Any:
    from sglang.srt.utils.hf_transformers_utils import get_config, get_hf_text_config

    return get_hf_text_config(get_config(folder, trust_remote_code=args.trust_remote_code))


def _compare(args: Any, algorithm: str, draft: Any, target: Any) -> None:
    path = args.speculative_draft_model_path
    remedy = f"Use a draft that was trained for {args.model_path}."
    if draft.vocab_size != target.vocab_size:
        raise ValueError(
            f"the draft {path} has a vocabulary of {draft.vocab_size} tokens, the target "
            f"{args.model_path} one of {target.vocab_size}. {remedy}"
        )
    reads = getattr(draft, "target_hidden_size", draft.hidden_size)
    if algorithm in READS_HIDDEN_STATES and reads != target.hidden_size:
        raise ValueError(
            f"the draft {path} reads hidden states of {reads} numbers, the target {args.model_path} "
            f"makes {target.hidden_size}. {remedy}"
        )
    architecture = (draft.architectures or [""])[0]
    if algorithm == "EAGLE3" and architecture == (target.architectures or [""])[0]:
        raise ValueError(
            f"the draft {path} is a whole language model ({architecture}), not an EAGLE-3 head. "
            "Use --speculative-algorithm STANDALONE with it, or name an EAGLE-3 draft."
        )
    _compare_context(args, draft, target)


def _compare_context(args: Any, draft: Any, target: Any) -> None:
    """Upstream starts, or fails late in a child process; a draft beyond its positions reads garbage."""
    from sglang.srt.environ import envs
    from sglang.srt.utils.hf_transformers_utils import get_context_length

    reach = get_context_length(draft)
    served = args.context_length or get_context_length(target)
    if reach >= served or envs.SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN.get():
        return
    raise ValueError(
        f"the draft {args.speculative_draft_model_path} has {reach} positions, but the server would serve a "
        f"context of {served}. Start it with --context-length {reach}, or use a draft made for {served} "
        "positions."
    )
