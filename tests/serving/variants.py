"""The servers that the serving tests compare. A later algorithm joins by one line in `SPECULATIVE`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Variant:
    """One way to serve a target.

    Attributes:
        name: shown in test ids.
        algorithm: value of ``--speculative-algorithm``; None for plain decoding.
        shape: steps, topk and slots of the tree.
        config: value of ``--graft-config``.
        soak: its tests run under ``make soak`` only.
    """

    name: str
    algorithm: str | None = None
    shape: tuple[int, int, int] = (0, 0, 0)
    config: str | None = None
    soak: bool = False

    def args(self, draft: str) -> list[str]:
        if self.algorithm is None:
            return []
        steps, topk, slots = map(str, self.shape)
        return [
            *("--speculative-algorithm", self.algorithm),
            *("--speculative-draft-model-path", draft),
            *("--speculative-num-steps", steps),
            *("--speculative-eagle-topk", topk),
            *("--speculative-num-draft-tokens", slots),
            *(("--graft-config", self.config) if self.config else ()),
        ]


PLAIN = Variant("none")
EAGLE_TREE = Variant("tree", "EAGLE3", (5, 4, 16))
SPECULATIVE = (
    Variant("chain", "EAGLE3", (5, 1, 6)),
    EAGLE_TREE,
    Variant("graft", "GRAFT", (5, 4, 16)),
    Variant("staged", "GRAFT", (5, 4, 16), config='{"graft": {"rule": "staged"}}', soak=True),
)
