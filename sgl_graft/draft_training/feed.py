"""Which samples come next: shuffled epochs over a folder of feature shards that may still be growing."""

from __future__ import annotations

import random
import zlib
from pathlib import Path

from sgl_graft.draft_training.features import SUFFIX, FeatureShard, Sample

Key = tuple[str, int]  # shard name, dialogue within it


class Feed:
    """Batches of samples in a reproducible order; new shards join in the middle of an epoch.

    One dialogue in `held_out_share` never trains: its shard's name and number decide, so that
    the split survives restarts and more data.
    """

    def __init__(
        self, folder: Path, *, batch_targets: int, max_len: int, seed: int, held_out_share: int = 40
    ) -> None:
        self.folder = folder
        self.batch_targets = batch_targets
        self.max_len = max_len
        self.seed = seed
        self.held_out_share = held_out_share
        self.shards: dict[str, FeatureShard] = {}
        self.epoch = -1
        self.order: list[Key] = []
        self.position = 0

    def refresh(self) -> int:
        """Open shards that appeared since the last call and mix them into what is left of this epoch.

        Returns how many are new.
        """
        new = [f for f in sorted(self.folder.glob(f"*{SUFFIX}")) if f.name not in self.shards]
        for file in new:
            self.shards[file.name] = FeatureShard(file)
        known = {name for name, _ in self.order}
        added = [k for f in new if f.name not in known for k in self._keys(f.name) if not self.is_held_out(k)]
        if added and self.epoch >= 0:
            left = self.order[self.position :] + added
            random.Random(f"{self.seed}:{self.epoch}:{len(self.order)}").shuffle(left)
            self.order[self.position :] = left
        return len(new)

    def next_batch(self) -> list[Sample]:
        """Samples with at least `batch_targets` target rows. Raises ValueError when there are none."""
        batch: list[Sample] = []
        targets = 0
        while targets < self.batch_targets:
            if self.position >= len(self.order):
                self._start_epoch()
            name, i = self.order[self.position]
            self.position += 1
            sample = self.shards[name].sample(i, self.max_len)
            if len(sample.rows):
                batch.append(sample)
                targets += len(sample.rows)
        return batch

    def training(self, limit: int) -> list[Sample]:
        """The first `limit` samples that may train, in shard order; what an initialisation looks at."""
        self.refresh()
        keys = [k for name in sorted(self.shards) for k in self._keys(name) if not self.is_held_out(k)]
        return [self.shards[name].sample(i, self.max_len) for name, i in keys[:limit]]

    def held_out(self, limit: int) -> list[Sample]:
        """The first `limit` held-out samples."""
        keys = [k for name in sorted(self.shards) for k in self._keys(name) if self.is_held_out(k)]
        samples = (self.shards[name].sample(i, self.max_len) for name, i in keys)
        return [s for s in samples if len(s.rows)][:limit]

    def is_held_out(self, key: Key) -> bool:
        return zlib.crc32(f"{key[0]}:{key[1]}".encode()) % self.held_out_share == 0

    @property
    def num_targets(self) -> int:
        """Target rows of all open shards."""
        return sum(shard.row_ends[-1] for shard in self.shards.values())

    def state(self) -> dict[str, object]:
        return {"epoch": self.epoch, "order": list(self.order), "position": self.position}

    def restore(self, state: dict[str, object]) -> None:
        """Continue where `state` was taken; its shards must still be there (else ValueError)."""
        self.refresh()
        self.epoch, self.position = int(state["epoch"]), int(state["position"])  # type: ignore[call-overload]
        self.order = [(name, i) for name, i in state["order"]]  # type: ignore[attr-defined]
        gone = {name for name, _ in self.order} - set(self.shards)
        if gone:
            raise ValueError(f"feature shards {sorted(gone)} are gone from {self.folder}: compute them again")
        known = {name for name, _ in self.order}
        for name in [n for n in self.shards if n not in known]:
            del self.shards[name]  # arrived since: the next refresh mixes them in

    def _keys(self, name: str) -> list[Key]:
        return [(name, i) for i in range(len(self.shards[name]))]

    def _start_epoch(self) -> None:
        self.epoch += 1
        self.order = [k for name in sorted(self.shards) for k in self._keys(name) if not self.is_held_out(k)]
        if not any(self.shards[name].num_targets(i) for name, i in self.order):
            raise ValueError(f"no training samples in {self.folder}: run `sgl-graft train features` first")
        random.Random(f"{self.seed}:{self.epoch}").shuffle(self.order)
        self.position = 0
