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
READS_HIDDEN_STATES = ("EAGLE", "EAGLE3", "NEXTN", "DFLASH")


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
    if algorithm == "DFLASH":
        _compare_dflash(path, architecture, draft, target, remedy)
    _compare_context(args, draft, target)


def _compare_dflash(path: str, architecture: str, draft: Any, target: Any, remedy: str) -> None:
    """Upstream would fail on the first long prompt, or look up a mask that is another model's token."""
    from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config

    if "DFlash" not in architecture:
        raise ValueError(
            f"the draft {path} is a {architecture or 'model without an architecture'}, not a DFlash draft. "
            "Name a DFlash draft, or use the algorithm that this draft was trained for."
        )
    config = parse_dflash_draft_config(draft_hf_config=draft)
    if config.mask_token_id is not None and config.mask_token_id >= target.vocab_size:
        raise ValueError(
            f"the draft {path} masks with token {config.mask_token_id}, and the target's vocabulary has "
            f"{target.vocab_size} tokens. {remedy}"
        )
    outside = [i for i in config.target_layer_ids or () if i >= target.num_hidden_layers]
    if outside:
        raise ValueError(
            f"the draft {path} reads the target's layers {outside}, and the target has "
            f"{target.num_hidden_layers}. {remedy}"
        )


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


# They can only go forward, and a verify masks the nodes of a tree by going down its paths and back.
NO_ROLLBACK = ("outlines",)


def check_shared(args: Any, algorithm: str) -> None:
    """What none of our algorithms can run with.

    Raises:
        ValueError: with the value and the remedy.
    """
    backend = args.grammar_backend
    if backend in NO_ROLLBACK:
        raise ValueError(
            f"{algorithm} cannot run with --grammar-backend {backend}: it cannot go back over rejected "
            "tokens. Use xgrammar or llguidance, or none to refuse grammars"
        )
