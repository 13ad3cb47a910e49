"""Replays recorded greedy answers under a tree rule: which rounds would a server have made?

Uses the worker's own operations (retrieval, gates, merge, selection, table update), one request at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sgl_graft.bench.recording import Answer, Recording, Shape
from sgl_graft.config import GraftConfig, TableConfig
from sgl_graft.cuda_graph.chain import GraftChain
from sgl_graft.cuda_graph.eagle_tree import DraftPool, stock_tree
from sgl_graft.cuda_graph.gate import entropy_confidence, path_confidence, staged_gate
from sgl_graft.cuda_graph.prompt_update import observe_prompt
from sgl_graft.cuda_graph.stages import StagePlan, custom_stage_plan, paper_stage_plan
from sgl_graft.cuda_graph.successor_table import SuccessorTable, contexts_within
from sgl_graft.cuda_graph.table_update import write_successors
from sgl_graft.cuda_graph.templates import template_for_budget
from sgl_graft.cuda_graph.top_successors import TopSuccessors
from sgl_graft.cuda_graph.value_rule import ValueMaps
from sgl_graft.graft.shape import VALUE_ENVELOPE, rank_prior

Rule = Literal["eagle", "table", "split", "prune", "staged", "value"]
PAPER_THRESHOLDS = (0.14, 0.14, 0.49)
ENTROPY_THRESHOLD = 0.7  # SVIP stops when the square root of 0.15 times the entropy exceeds 0.3
PAPER_DEPTH, PAPER_WIDTH = 9, 8
SPLIT_DRAFT_SHARE = 24 / 60  # the paper's middle stage, whatever the gate would say


@dataclass(frozen=True)
class Setting:
    """One line of the ablation."""

    name: str
    rule: Rule
    slots: int = 16
    gate: Literal["path", "entropy"] = "path"
    checkpoints: Literal["paper", "every", "root"] = "paper"
    row_width: int = 8
    context_rows: int = 65536
    context_len: int = 3
    seed_prompts: bool = True
    warm_up: int = 0  # answers to other prompts met before the first one
    depth: int | None = None  # levels of the retrieval template
    template_width: int | None = None  # ranks the template may use
    calibrated: bool = True  # else probabilities are taken as they are
    scope: Literal["shared", "request"] = "shared"  # request: every answer starts with an empty table

    @property
    def uses_table(self) -> bool:
        return self.rule not in ("eagle", "prune")


@dataclass(frozen=True)
class Calibrated:
    """What calibration fitted; the paper's thresholds and identity maps without one."""

    maps: ValueMaps
    thresholds: dict[int, float]

    @classmethod
    def none(cls) -> Calibrated:
        return cls(ValueMaps.identity(1), {})


@dataclass(frozen=True)
class Replayed:
    """What one answer took."""

    dataset: str
    index: int
    num_tokens: int  # committed by verifies
    num_rounds: int

    @property
    def accept_length(self) -> float:
        return self.num_tokens / self.num_rounds


class Replay:
    """One setting's trees and table."""

    def __init__(self, setting: Setting, shape: Shape, vocab_size: int, calibrated: Calibrated) -> None:
        self.setting = setting
        self.plan = stage_plan(setting, shape.steps)
        self.chain = GraftChain.create(self.plan, shape.topk, shape.steps)
        self.maps = calibrated.maps if setting.calibrated else ValueMaps.identity(1)
        self.thresholds = torch.tensor([self._threshold(d, calibrated) for d in self.plan.checkpoints])
        context_rows = setting.context_rows if setting.uses_table else 0
        self.table = SuccessorTable.create(
            vocab_size, setting.row_width, 1, context_rows, setting.context_len
        )

    def _threshold(self, depth: int, calibrated: Calibrated) -> float:
        if self.setting.gate == "entropy":
            return ENTROPY_THRESHOLD
        place = min(self.plan.checkpoints.index(depth), len(PAPER_THRESHOLDS) - 1)
        return calibrated.thresholds.get(depth, PAPER_THRESHOLDS[place])

    def run_all(self, recording: Recording, warm_up: Sequence[Answer] = ()) -> list[Replayed]:
        """All answers in order; at each data set the table starts empty or warmed up, as in a bench cell."""
        results: list[Replayed] = []
        at: str | None = None
        for (dataset, index), answer in zip(recording.names, recording.answers, strict=True):
            if dataset != at:
                at = dataset
                self.table.clear()
                for number, met in enumerate(warm_up):
                    self.run("warm-up", number, met)
            if self.setting.scope == "request":
                self.table.clear()
            if len(answer.tokens) > 1:
                results.append(self.run(dataset, index, answer))
        return results

    def run(self, dataset: str, index: int, answer: Answer) -> Replayed:
        if self.setting.uses_table and self.setting.seed_prompts:
            self._observe(answer.prompt)
        truth = answer.tokens.tolist()
        contexts = contexts_within(self.table, torch.cat([answer.prompt, answer.tokens]))
        contexts = contexts[len(answer.prompt) :]  # [n], what stands before each root
        position, rounds = 0, 0
        while position + 1 < len(truth):
            root = answer.tokens[position : position + 1]
            context = contexts[position : position + 1]
            tokens, parents, depths = self._grow(answer.pool(position), root, context)
            path = accepted_path(tokens[0].tolist(), parents[0].tolist(), truth[position + 1 :])
            if self.setting.uses_table:
                self._learn(answer, position, tokens, parents, depths, path, context)
            num_committed = min(len(path), len(truth) - 1 - position)  # the root's slot stands for the bonus
            rounds += 1
            position += num_committed
        return Replayed(dataset, index, len(truth) - 1, rounds)

    def _grow(self, pool: DraftPool, root: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, parents and depths of the tree to verify, each [1, slots]."""
        if self.setting.rule == "eagle":
            tokens, parents = stock_tree(pool, root, self.setting.slots)
            return tokens, parents, torch.zeros_like(tokens)
        retrieved = self.chain.retrieve(self.table, torch.zeros_like(root), root, context)
        if self.setting.rule == "value":
            tree = self.chain.graft_value(pool, retrieved, root, self.maps)
        else:
            tree = self.chain.graft_staged(pool, retrieved, root, self._stage(pool))
        return tree.tokens, tree.parents, tree.depths

    def _stage(self, pool: DraftPool) -> Tensor:
        topk, steps = self.chain.topk, self.chain.steps
        if self.setting.gate == "entropy":
            confidence = entropy_confidence(pool.scores, pool.parents, topk, steps)
        else:
            confidence = path_confidence(pool.scores, topk, steps)
        return staged_gate(confidence, self.plan.checkpoints, self.thresholds)

    def _observe(self, prompt: Tensor) -> None:
        after = torch.cat([prompt[1:], prompt.new_full((1,), -1)])
        observe_prompt(
            self.table, torch.zeros_like(prompt), contexts_within(self.table, prompt), prompt, after
        )

    def _learn(
        self,
        answer: Answer,
        position: int,
        tokens: Tensor,
        parents: Tensor,
        depths: Tensor,
        path: Sequence[int],
        context: Tensor,  # [1]
    ) -> None:
        """Write what the target would have said after each node, as far as the recording knows it."""
        width, slots = self.table.k, tokens.shape[1]
        ids = torch.zeros(slots, width, dtype=torch.int32)
        probs = torch.zeros(slots, width, dtype=torch.float16)
        known = torch.zeros(slots, dtype=torch.bool)
        recorded = _recorded_paths(answer.tree_tokens[position], answer.tree_parents[position])
        paths = _paths(tokens[0].tolist(), parents[0].tolist())
        for slot, node_path in enumerate(paths):
            if slot in path:
                row = position + path.index(slot)
                ids[slot], probs[slot] = answer.next_ids[row, :width], answer.next_probs[row, :width]
                known[slot] = True
            elif node_path is not None and (place := recorded.get(node_path)) is not None:
                ids[slot] = answer.tree_ids[position, place, :width]
                probs[slot] = answer.tree_probs[position, place, :width]
                known[slot] = True
        accepted = torch.zeros(1, slots, dtype=torch.bool)
        accepted[0, list(path)] = True
        # A token outside the vocabulary is how a node is kept from being written.
        visible = tokens.masked_fill(~known, -1)
        write_successors(
            self.table,
            torch.zeros(1, dtype=torch.long),
            visible,
            parents,
            depths,
            context,
            accepted,
            TopSuccessors(ids, probs),
        )


def stage_plan(setting: Setting, steps: int) -> StagePlan:
    """The stage table of a setting, on the paper's proportions."""
    slots = setting.slots
    width = min(setting.template_width or setting.row_width, setting.row_width)
    served_as: Literal["value", "staged"] = "value" if setting.rule == "value" else "staged"
    prior = rank_prior(GraftConfig(rule=served_as, table=TableConfig(row_width=width)))
    depth = setting.depth or max(steps, min(PAPER_DEPTH, slots - 1))
    if len(prior) < PAPER_WIDTH and depth == PAPER_DEPTH:
        depth += 1  # the paper's own templates, used at its depth and 60 slots, need eight ranks
    if setting.rule in ("table", "split"):
        num_draft = 0 if setting.rule == "table" else round(slots * SPLIT_DRAFT_SHARE) - 1
        num_retrieved = slots - 1 - num_draft
        envelope = template_for_budget(num_retrieved, depth, prior)
        fills = setting.rule == "split"
        return custom_stage_plan(slots, steps, (), (num_draft,), (num_retrieved,), envelope, backfill=fills)
    plan = paper_stage_plan(slots, steps, depth, prior, VALUE_ENVELOPE if setting.rule == "value" else 0)
    if setting.checkpoints != "paper":
        checkpoints = range(steps) if setting.checkpoints == "every" else range(1)
        # Deeper gates keep more of the draft, in a straight line between the paper's first stage and all.
        first, full = plan.num_draft[0], slots - 1
        kept_of = [first + (full - first) * i // len(checkpoints) for i in range(len(checkpoints))] + [full]
        released = [full - kept for kept in kept_of]
        plan = custom_stage_plan(slots, steps, tuple(checkpoints), kept_of, released, plan.envelope)
    return plan.prune_only() if setting.rule == "prune" else plan


def accepted_path(tokens: Sequence[int], parents: Sequence[int], truth: Sequence[int]) -> list[int]:
    """Slots of the accepted path, root first; its length is what the round commits, bonus included."""
    path = [0]
    for token in truth:
        child = next(
            (slot for slot in range(1, len(tokens)) if parents[slot] == path[-1] and tokens[slot] == token),
            None,
        )
        if child is None:
            break
        path.append(child)
    return path


def _paths(tokens: Sequence[int], parents: Sequence[int]) -> list[tuple[int, ...] | None]:
    """Each slot's tokens from below the root; None for empty slots."""
    paths: list[tuple[int, ...] | None] = [()]
    for slot in range(1, len(tokens)):
        above = paths[parents[slot]] if parents[slot] >= 0 else None
        paths.append(None if above is None else (*above, tokens[slot]))
    return paths


def _recorded_paths(tokens: Tensor, parents: Tensor) -> dict[tuple[int, ...], int]:
    paths = _paths(tokens.tolist(), parents.tolist())
    return {path: slot for slot, path in enumerate(paths) if path is not None}


def replay(
    setting: Setting,
    recording: Recording,
    calibrated: Calibrated,
    warm_up: Recording | None = None,
) -> list[Replayed]:
    """One setting over a recording; see `Replay.run_all`."""
    have = 0 if warm_up is None else len(warm_up.answers)
    if have < setting.warm_up:
        raise ValueError(f"{setting.name} warms up on {setting.warm_up} answers, the recording has {have}")
    runner = Replay(setting, recording.shape, recording.vocab_size, calibrated)
    return runner.run_all(recording, warm_up.answers[: setting.warm_up] if warm_up else ())


def loops(tokens: Iterable[int], size: int = 8, times: int = 3) -> bool:
    """Whether an answer repeats itself: some n-gram of this size occurs this often."""
    ids = list(tokens)
    seen: dict[tuple[int, ...], int] = {}
    for start in range(len(ids) - size + 1):
        gram = tuple(ids[start : start + size])
        seen[gram] = seen.get(gram, 0) + 1
        if seen[gram] >= times:
            return True
    return False
