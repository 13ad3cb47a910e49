"""What every `sgl-graft train` recipe starts from: a target and the dialogues that it wrote."""

from pathlib import Path

from sgl_graft.embedded import EMBEDDED_MODEL


def target_and_data(target: Path | None, data: list[Path] | None) -> tuple[Path, tuple[Path, ...]]:
    """The target's folder and the dialogue files; left out, the embedded model and its shipped dialogues.

    Raises:
        ValueError: another target with the embedded model's dialogues.
    """
    from sgl_graft import models
    from sgl_graft.draft_training import dialogues

    if target is not None and not data:
        raise ValueError("--data is needed with --target: the shipped dialogues are the embedded model's")
    return target or models.get(EMBEDDED_MODEL), tuple(data or [dialogues.shipped(EMBEDDED_MODEL)])
