"""The servers that the serving tests compare. A later algorithm joins by one line in `SPECULATIVE`."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Variant:
    """One way to serve a target.

    Attributes:
        name: shown in test ids.
        algorithm: value of ``--speculative-algorithm``; None for plain decoding.
        shape: steps, topk and slots of the tree.
        config: value of ``--graft-config``.
        draft: which of the tiny drafts: ``draft`` (EAGLE-3), ``dflash`` or ``specblock``.
        accept_length: what its constructed draft reaches at least; SGLang's kits ask for it.
        soak: its tests run under ``make soak`` only.
    """

    name: str
    algorithm: str | None = None
    shape: tuple[int, int, int] = (0, 0, 0)
    config: str | None = None
    draft: str = "draft"
    accept_length: float = 1.5
    soak: bool = False

    def args(self, draft: str) -> list[str]:
        if self.algorithm is None:
            return []
        steps, topk, slots = map(str, self.shape)
        tree = ("--speculative-num-steps", steps, "--speculative-eagle-topk", topk)
        return [
            *("--speculative-algorithm", self.algorithm),
            *("--speculative-draft-model-path", draft),
            *(tree if self.draft == "draft" else ()),  # a block has a size only
            *("--speculative-num-draft-tokens", slots),
            *(("--graft-config", self.config) if self.config else ()),
        ]


def _blockpilot(**settings: object) -> str:
    recording = str(Path(__file__).with_name("random_sizes.json"))
    return json.dumps({"blockpilot": {"policy": "replay", "policy_file": recording, **settings}})


PLAIN = Variant("none")
# Where the `graft` server keeps tables by name; each of pytest's workers has its own.
TABLES = Path(tempfile.gettempdir()) / f"sgl_graft_test_tables_{os.getpid()}"
EAGLE_TREE = Variant("tree", "EAGLE3", (5, 4, 16))
# Another size in every round of every request, and tails from the table.
BLOCKPILOT = Variant(
    "blockpilot", "BLOCKPILOT", (1, 1, 7), config=_blockpilot(tail_graft=True), draft="dflash"
)
SPECULATIVE = (
    Variant("chain", "EAGLE3", (5, 1, 6)),
    EAGLE_TREE,
    Variant("graft", "GRAFT", (5, 4, 16), config=json.dumps({"graft": {"table": {"folder": str(TABLES)}}})),
    # Its constructed draft repeats the first token of a block. `make test` has its worker under BLOCKPILOT.
    Variant("dflash", "DFLASH", (1, 1, 6), draft="dflash", accept_length=1.3, soak=True),
    BLOCKPILOT,
    Variant("sizes", "BLOCKPILOT", (1, 1, 7), config=_blockpilot(), draft="dflash", soak=True),
    # `make test` has its rounds in tests/specblock/test_rounds.py, in a scheduler without a server.
    Variant("specblock", "SPECBLOCK", (1, 1, 12), draft="specblock", soak=True),
    Variant("staged", "GRAFT", (5, 4, 16), config='{"graft": {"rule": "staged"}}', soak=True),
    Variant("private", "GRAFT", (5, 4, 16), config='{"graft": {"table": {"scope": "request"}}}', soak=True),
)
