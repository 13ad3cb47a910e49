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
from sgl_graft.cuda_graph.chain import GraftChain
from sgl_graft.cuda_graph.eagle_tree import DraftPool, stock_tree
from sgl_graft.cuda_graph.gate import entropy_confidence, path_confidence, staged_gate
from sgl_graft.cuda_graph.prompt_update import observe_prompt
from sgl_graft.cuda_graph.stages import StagePlan, custom_stage_plan, paper_stage_plan
from sgl_graft.cuda_graph.successor_table import SuccessorTable
from sgl_graft.cuda_graph.table_update import write_successors
from sgl_graft.cuda_graph.templates import assumed_rank_prior, template_for_budget
from sgl_graft.cuda_graph.top_successors import TopSuccessors
from sgl_graft.cuda_graph.value_rule import ValueMaps

Rule = Literal["eagle", "table", "split", "prune", "staged", "value"]
PAPER_THRESHOLDS = (0.14, 0.14, 0.49)
ENTROPY_THRESHOLD = 0.7  # SVIP stops when the square root of 0.15 times the entropy exceeds 0.3
VALUE_ENVELOPE = 48
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
    order2_rows: int = 65536
    seed_prompts: bool = True
    warm_up: int = 0  # answers to other prompts met before the first one
    depth: int | None = None  # levels of the retrieval template
    template_width: int | None = None  # ranks the template may use

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
        self.maps = calibrated.maps
        self.thresholds = torch.tensor([self._threshold(d, calibrated) for d in self.plan.checkpoints])
        order2_rows = setting.order2_rows if setting.uses_table else 0
        self.table = SuccessorTable.create(vocab_size, setting.row_width, 1, order2_rows)

    def _threshold(self, depth: int, calibrated: Calibrated) -> float:
        if self.setting.gate == "entropy":
            return ENTROPY_THRESHOLD
        place = min(self.plan.checkpoints.index(depth), len(PAPER_THRESHOLDS) - 1)
        return calibrated.thresholds.get(depth, PAPER_THRESHOLDS[place])

    def run(self, dataset: str, index: int, answer: Answer) -> Replayed:
        if self.setting.uses_table and self.setting.seed_prompts:
            self._observe(answer.prompt)
        truth = answer.tokens.tolist()
        previous, position, rounds = int(answer.prompt[-1]), 0, 0
        while position + 1 < len(truth):
            root = answer.tokens[position : position + 1]
            tokens, parents, depths = self._grow(answer.pool(position), root, torch.tensor([previous]))
            path = _accepted_path(tokens[0].tolist(), parents[0].tolist(), truth[position + 1 :])
            if self.setting.uses_table:
                self._learn(answer, position, tokens, parents, depths, path, previous)
            num_committed = min(len(path), len(truth) - 1 - position)  # the root's slot stands for the bonus
            rounds += 1
            previous = truth[position + num_committed - 1]
            position += num_committed
        return Replayed(dataset, index, len(truth) - 1, rounds)

    def _grow(self, pool: DraftPool, root: Tensor, previous: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, parents and depths of the tree to verify, each [1, slots]."""
        if self.setting.rule == "eagle":
            tokens, parents = stock_tree(pool, root, self.setting.slots)
            return tokens, parents, torch.zeros_like(tokens)
        retrieved = self.chain.retrieve(self.table, torch.zeros_like(root), root, previous)
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
        unknown = prompt.new_full((1,), -1)
        before, after = torch.cat([unknown, prompt[:-1]]), torch.cat([prompt[1:], unknown])
        observe_prompt(self.table, torch.zeros_like(prompt), before, prompt, after)

    def _learn(
        self,
        answer: Answer,
        position: int,
        tokens: Tensor,
        parents: Tensor,
        depths: Tensor,
        path: Sequence[int],
        previous: int,
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
            torch.tensor([previous]),
            accepted,
            TopSuccessors(ids, probs),
        )


def stage_plan(setting: Setting, steps: int) -> StagePlan:
    """The stage table of a setting, on the paper's proportions."""
    slots = setting.slots
    prior = assumed_rank_prior(min(setting.template_width or setting.row_width, setting.row_width))
    depth = max(steps, min(setting.depth or PAPER_DEPTH, slots - 1))
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


def _accepted_path(tokens: Sequence[int], parents: Sequence[int], truth: Sequence[int]) -> list[int]:
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
    """All answers in order; the table starts empty (or warmed up) at each data set, as in a bench cell."""
    if setting.warm_up and (warm_up is None or len(warm_up.answers) < setting.warm_up):
        have = 0 if warm_up is None else len(warm_up.answers)
        raise ValueError(f"{setting.name} warms up on {setting.warm_up} answers, the recording has {have}")
    runner = Replay(setting, recording.shape, recording.vocab_size, calibrated)
    results: list[Replayed] = []
    at: str | None = None
    for (dataset, index), answer in zip(recording.names, recording.answers, strict=True):
        if dataset != at:
            at = dataset
            runner.table.clear()
            for number in range(setting.warm_up):
                assert warm_up is not None
                runner.run("warm-up", number, warm_up.answers[number])
        if len(answer.tokens) > 1:
            results.append(runner.run(dataset, index, answer))
    return results


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
