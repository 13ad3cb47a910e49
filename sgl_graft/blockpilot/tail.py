"""Graft-TAIL's state on a server: its successor table, each request's last tokens, and the counters."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from ..config import BlockPilotConfig
from ..cuda_graph.prompt_update import observe_prompt
from ..cuda_graph.successor_table import SuccessorTable, contexts_within, next_contexts
from ..cuda_graph.table_update import write_successors
from ..cuda_graph.top_successors import TopSuccessors, top_successors
from ..cuda_graph.value_rule import ValueMaps
from ..files import write_or_warn
from ..graft.counters import CandidateCounters
from ..serving.request_settings import settings_of
from .tail_rule import chain_template, chains_from_every_start, graft_tail

COLLECT_EVERY = 20  # rounds between two writes of the calibration counters


class TailGraft:
    """Replaces the weak tail of drafted blocks, and learns successors from every verify.

    Args:
        config: its ``table`` and ``collect``.
        maps: acceptance maps.
        b_max: largest block.
        num_rows: rows of the engine's request pool.
        vocab_size: the target's.
    """

    def __init__(
        self,
        config: BlockPilotConfig,
        maps: ValueMaps,
        b_max: int,
        num_rows: int,
        vocab_size: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.config = config
        self.maps = maps
        self.vocab_size = vocab_size
        self.device = device
        self.private = config.table.scope == "request"
        self.table = SuccessorTable.create(
            vocab_size,
            k=config.table.row_width,
            num_tables=num_rows if self.private else 1,
            context_rows=config.table.context_rows,
            context_len=config.table.context_len,
            device=device,
        )
        self.templates = {width: chain_template(width - 1, device) for width in range(2, b_max + 1)}
        self.candidates = CandidateCounters.create(b_max - 1, device) if config.collect else None
        self.rounds = 0
        self.writes_counts = True  # every rank counts the same; one writes
        # One entry per row of the request pool: its last committed token, what stands before it, its table.
        self.root_buf = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.context_buf = torch.full((num_rows,), -1, dtype=torch.int64, device=device)
        self.table_of_row = torch.zeros(num_rows, dtype=torch.int64, device=device)
        # The request itself, not its id, which the next one may use again.
        self.owner: dict[int, Any] = {}
        self.proposed: tuple[Tensor, Tensor, Any] | None = None
        self.blocks = torch.zeros((), dtype=torch.int64, device=device)
        self.grafted = torch.zeros((), dtype=torch.int64, device=device)  # blocks with a tail
        self.grafted_slots = torch.zeros((), dtype=torch.int64, device=device)

    # ---- a round ---------------------------------------------------------------------------------------

    def propose(
        self,
        hidden: Tensor,  # [batch * (width - 1), hidden]
        lm_head: Any,
        rows: Tensor,  # [batch]
        verify_lens: Tensor,  # [batch] int32, root included
    ) -> Tensor:  # [batch * (width - 1)] int64
        """Drafted tokens, with tails from the table."""
        rows = rows.long()
        batch = rows.numel()
        tokens, confidence = greedy_with_confidence(hidden, lm_head)
        drafted, confidence = tokens.view(batch, -1), confidence.view(batch, -1)
        template = self.templates[drafted.shape[1] + 1]
        chains = chains_from_every_start(
            self.table,
            template,
            self.table_of_row[rows],
            self.root_buf[rows],
            self.context_buf[rows],
            drafted,
        )
        limits = verify_lens.long() - 1
        block = graft_tail(chains, self.maps, drafted, confidence, limits)
        self.blocks += batch
        slots = (limits - block.start).clamp(min=0)
        self.tail_starts = block.start  # [batch] drafted tokens before the tail
        self.grafted += (slots > 0).sum()
        self.grafted_slots += slots.sum()
        if self.candidates is not None:
            self.proposed = drafted, confidence, chains
        return block.tokens.flatten()

    def tap(self, target: Any, batch: Any) -> _VerifyTap:
        """Stands for the target worker during a round, and looks at the raw logits of its verify."""
        self.in_flight = _VerifyTap(target, self)
        return self.in_flight

    def learn(self, rows: Tensor, committed: Tensor, accept_lens: Tensor, width: int) -> None:
        """Write the successors of every verified token, and remember each request's last tokens.

        Args:
            rows: [batch]
            committed: [batch * width] committed tokens, packed to the front of each row.
            accept_lens: [batch], bonus included.
        """
        tap = self.in_flight
        rows, accept_lens = rows.long(), accept_lens.long()
        committed = committed.view(-1, width).long()
        tokens = tap.tokens.view(-1, width).long()
        slot = torch.arange(width, device=tokens.device)
        write_successors(
            self.table,
            self.table_of_row[rows],
            tokens,
            (slot - 1).expand_as(tokens).contiguous(),
            slot.expand_as(tokens).contiguous(),
            self.context_buf[rows],
            slot < accept_lens.unsqueeze(1),
            tap.best,
        )
        self._count(committed, accept_lens)
        num_new = accept_lens.unsqueeze(1)
        context, root = self.context_buf[rows].unsqueeze(1), self.root_buf[rows].unsqueeze(1)
        known = torch.cat((context, root, committed), dim=1)  # a context's lowest field is a token
        further, nearest, last = (known.gather(1, num_new + back).squeeze(1) for back in (-1, 0, 1))
        self.context_buf[rows] = next_contexts(self.table, further, nearest)
        self.root_buf[rows] = last

    def _count(self, committed: Tensor, accept_lens: Tensor) -> None:
        if self.candidates is None or self.proposed is None:
            return
        (drafted, confidence, chains), self.proposed = self.proposed, None
        batch, offsets = drafted.shape
        depths = torch.arange(1, offsets + 1, device=drafted.device)
        parents = (depths - 2).expand_as(drafted)
        outcome = (committed, accept_lens)
        self.candidates.record_level_order(0, drafted, parents, confidence.cumprod(1), depths, *outcome)
        from_root = (x.view(batch, offsets, -1)[:, 0] for x in chains)
        tokens, probs = from_root
        self.candidates.record_level_order(1, tokens, parents, probs, depths, *outcome)
        self.rounds += 1
        assert self.config.collect is not None
        if self.writes_counts and self.rounds % COLLECT_EVERY == 0:
            content = {
                "seen": self.candidates.seen.tolist(),
                "true": self.candidates.true.tolist(),
                "vocab_size": self.vocab_size,
                "rounds": self.rounds,
            }
            write_or_warn(self.config.collect, json.dumps(content), "blockpilot.collect")

    # ---- a prefill -------------------------------------------------------------------------------------

    def observe_prompts(self, batch: Any, next_tokens: Tensor) -> None:
        """Learn the observed successors of each request's prefill chunk, which the host holds anyway."""
        last_two = []
        for req, prefix, extend in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True):
            row = req.kv.req_pool_idx
            tokens = (list(req.origin_input_ids) + list(req.output_ids))[: prefix + extend]
            last_two.append(([-1, *tokens])[-2:])
            start = max(prefix - 3, 0)  # a context row needs the tokens before the chunk
            enabled = settings_of(req.sampling_params.custom_params).enabled
            index = (row if self.private else 0) if enabled else -1
            if self.owner.get(row) is not req:
                self.owner[row] = req
                self.table_of_row[row] = index
                if self.private:
                    self.table.clear_table(row)
                    start = 0  # what a cached prefix taught others is not ours to read
            if enabled and self.config.table.seed_prompts and len(tokens) - start >= 2:
                self._observe(index, torch.tensor(tokens[start:], dtype=torch.int64, device=self.device))
        rows = batch.req_pool_indices.long()
        pair = torch.tensor(last_two, dtype=torch.int64, device=self.device)
        self.context_buf[rows] = next_contexts(self.table, pair[:, 0], pair[:, 1])
        self.root_buf[rows] = next_tokens.long()

    def _observe(self, index: int, tokens: Tensor) -> None:
        which = torch.full_like(tokens, index)
        following = torch.cat((tokens[1:], tokens.new_full((1,), -1)))
        observe_prompt(self.table, which, contexts_within(self.table, tokens), tokens, following)

    def clear(self) -> None:
        """Forget everything learned."""
        self.table.clear()

    def see(self, logits: Tensor) -> TopSuccessors:
        return top_successors(logits, self.table.k, self.vocab_size)


class _VerifyTap:
    """The target worker of one round; keeps the verified tokens and what the target would have said next."""

    tokens: Tensor  # [batch * width]
    best: TopSuccessors

    def __init__(self, worker: Any, tail: TailGraft) -> None:
        self._worker = worker
        self._tail = tail

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    def forward_batch_generation(self, *args: Any, **kwargs: Any) -> Any:
        output = self._worker.forward_batch_generation(*args, **kwargs)
        self.tokens = kwargs["forward_batch"].input_ids
        self.best = self._tail.see(output.logits_output.next_token_logits)
        return output


def greedy_with_confidence(hidden: Tensor, lm_head: Any) -> tuple[Tensor, Tensor]:
    """The draft's likeliest token of every row [rows] and its probability [rows] float32.

    Ranks hold shards of the vocabulary; equal maxima go to the lower token, as one argmax over all would.
    """
    from sglang.srt.runtime_context import get_parallel

    shard = getattr(lm_head, "shard_indices", None)
    rows = lm_head.weight.shape[0] if shard is None else shard.num_org_elements
    first = 0 if shard is None else shard.org_vocab_start_index
    # The head's own method, which is the fast one where a platform brings its own.
    product = lm_head.quant_method.apply(lm_head, hidden.to(lm_head.weight.dtype))
    logits = product[:, :rows].float()
    best = logits.max(dim=1)
    mass = logits.logsumexp(dim=1)
    group = get_parallel().tp_group
    if group.world_size == 1:
        return best.indices + first, (best.values - mass).exp()
    mine = torch.stack((best.values.double(), (best.indices + first).double(), mass.double()), dim=1)
    every = group.all_gather(mine.unsqueeze(0), dim=0)  # [ranks, rows, 3]
    value, token, masses = every.unbind(dim=2)
    winner = value.argmax(dim=0, keepdim=True)  # the first of equal maxima: the lower shard
    confidence = (value.gather(0, winner).squeeze(0) - masses.logsumexp(dim=0)).exp()
    return token.gather(0, winner).squeeze(0).long(), confidence.float()
