"""Two consecutive tokens of many seeds at once, through a verify function, over trees or over no tree.

The model is a table: the logits after token ``t`` at position ``p`` are ``table[p, t]``. A tree of drafts is
verified round by round, as a server does, until every seed has its two tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from sgl_graft.cuda_graph.coupled import walk_accepted

from sgl_graft.cpu.noise import race_speeds
from sgl_graft.cpu.sampler import draw
from sgl_graft.cpu.verify import target_tokens

VOCAB = 7
START = 40  # absolute position of the root
ROOT = 0

# Verifies one round: logits of every node, tree and sampling parameters in, tokens committed out.
Verify = Callable[["Round"], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Filters:
    temperature: float = 1.0
    top_k: int = 1 << 30
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass(frozen=True)
class Round:
    """One verify of ``batch`` requests that share the tree's shape."""

    logits: torch.Tensor  # [batch * slots, vocab]
    tokens: torch.Tensor  # [batch, slots]
    parents: torch.Tensor  # [batch, slots]
    positions: torch.Tensor  # [batch * slots]
    info: SimpleNamespace


def logits_table() -> torch.Tensor:  # [2, vocab, vocab]
    return torch.randn(2, VOCAB, VOCAB, generator=torch.Generator().manual_seed(5)) * 1.5


def sampling_info(seeds: torch.Tensor, filters: Filters) -> SimpleNamespace:
    batch = seeds.numel()
    return SimpleNamespace(
        is_all_greedy=False,
        temperatures=torch.full((batch, 1), filters.temperature),
        top_ks=torch.full((batch,), filters.top_k, dtype=torch.int32),
        top_ps=torch.full((batch,), filters.top_p),
        min_ps=torch.full((batch,), filters.min_p),
        sampling_seed=seeds,
    )


def exact_pairs(filters: Filters) -> torch.Tensor:  # [vocab, vocab] fp64
    """Probability of every pair of tokens, by the definition of the filters."""

    def distribution(logits: torch.Tensor) -> torch.Tensor:
        probs = (logits.double() / filters.temperature).softmax(0)
        kept = torch.zeros(VOCAB, dtype=torch.bool)
        mass = 0.0
        for rank, token in enumerate(probs.argsort(descending=True).tolist()):
            kept[token] = rank < filters.top_k and mass <= filters.top_p
            mass += probs[token].item()
        kept &= probs >= probs.max() * filters.min_p
        probs = probs * kept
        return probs / probs.sum()

    table = logits_table()
    first = distribution(table[0, ROOT])
    return torch.stack([first[token] * distribution(table[1, token]) for token in range(VOCAB)])


def coupled(verify_round: Round) -> tuple[torch.Tensor, torch.Tensor]:
    """The worker's own verify: draw the target's token at every node, walk the tree by equality."""
    batch, slots = verify_round.tokens.shape
    drawn = target_tokens(verify_round.logits, verify_round.info, verify_round.positions, slots)
    path = walk_accepted(verify_round.tokens, verify_round.parents, drawn, max_path=3)
    committed = path.predicts.view(batch, slots).gather(1, _local(path.accept_index, slots))
    return committed.long(), path.num_correct_drafts.long() + 1


def noise_by_column(verify_round: Round) -> tuple[torch.Tensor, torch.Tensor]:
    """Wrong on purpose: a node's noise is keyed by its column in the tree instead of its position."""
    batch, slots = verify_round.tokens.shape
    columns = torch.arange(slots).repeat(batch)
    drawn = target_tokens(verify_round.logits, verify_round.info, columns, slots)
    path = walk_accepted(verify_round.tokens, verify_round.parents, drawn, max_path=3)
    committed = path.predicts.view(batch, slots).gather(1, _local(path.accept_index, slots))
    return committed.long(), path.num_correct_drafts.long() + 1


def ratio_test(verify_round: Round) -> tuple[torch.Tensor, torch.Tensor]:
    """Wrong on purpose: accepts a draft with probability p / q for a made-up q, as if it had been sampled."""
    made_up_q = 0.4
    batch, slots = verify_round.tokens.shape
    probs = verify_round.logits.softmax(1).view(batch, slots, VOCAB)
    committed = torch.zeros(batch, 3, dtype=torch.long)
    lengths = torch.ones(batch, dtype=torch.long)
    for row in range(batch):
        generator = torch.Generator().manual_seed(int(verify_round.info.sampling_seed[row]))
        node, residual = 0, probs[row, 0].clone()
        while True:
            accepted = None
            for child in (verify_round.parents[row] == node).nonzero().flatten().tolist():
                token = int(verify_round.tokens[row, child])
                if child and torch.rand((), generator=generator) < residual[token] / made_up_q:
                    accepted = child
                    break
                residual[token] = (residual[token] - made_up_q).clamp(min=0.0)
            if accepted is None:
                committed[row, lengths[row] - 1] = torch.multinomial(residual, 1, generator=generator)
                break
            committed[row, lengths[row] - 1] = verify_round.tokens[row, accepted]
            lengths[row] += 1
            node, residual = accepted, probs[row, accepted].clone()
    return committed, lengths


def plain(seeds: torch.Tensor, filters: Filters) -> torch.Tensor:  # [seeds, 2]
    """No speculation: the sampler draws a token, then the next."""
    table = logits_table()
    info = sampling_info(seeds, filters)
    token = torch.full_like(seeds, ROOT)
    drawn = []
    for step in range(2):
        probs = (table[step][token] / filters.temperature).softmax(1)
        speeds = race_speeds([(seed, START + step) for seed in seeds.tolist()], VOCAB)
        rows = torch.arange(seeds.numel())
        token = draw(probs, speeds, rows, info.top_ks, info.top_ps, info.min_ps)
        drawn.append(token)
    return torch.stack(drawn, dim=1)


def speculated(
    seeds: torch.Tensor,
    filters: Filters,
    verify: Verify,
    tokens: list[int],  # of the tree's slots; slot 0 is replaced by each request's root
    parents: list[int],
) -> torch.Tensor:  # [seeds, 2]
    """Two tokens per seed from as many rounds as it takes, with the same tree in each round."""
    result = torch.full((seeds.numel(), 3), -1, dtype=torch.long)
    done = torch.zeros(seeds.numel(), dtype=torch.long)
    roots = torch.full_like(seeds, ROOT)
    for have in range(2):
        rows = (done == have).nonzero().squeeze(1)
        if not rows.numel():
            continue
        committed, lengths = verify(_round(seeds[rows], roots[rows], have, filters, tokens, parents))
        for column in range(2 - have):
            reached = rows[lengths > column]
            result[reached, have + column] = committed[lengths > column, column]
        roots[rows] = committed[:, 0]
        done[rows] += lengths
    return result[:, :2]


def _round(
    seeds: torch.Tensor,
    roots: torch.Tensor,
    have: int,
    filters: Filters,
    tokens: list[int],
    parents: list[int],
) -> Round:
    batch, slots = seeds.numel(), len(tokens)
    tree = torch.tensor(tokens).repeat(batch, 1)
    tree[:, 0] = roots
    depth = [0] * slots
    for slot in range(1, slots):
        depth[slot] = depth[parents[slot]] + 1
    at = torch.tensor(depth) + have  # tokens already drawn before each node's own
    # Nodes past the second token see logits too, as in a server; nothing of theirs is read.
    logits = logits_table()[at.clamp(max=1).expand(batch, slots), tree]
    return Round(
        logits=logits.reshape(batch * slots, VOCAB),
        tokens=tree,
        parents=torch.tensor(parents).repeat(batch, 1),
        positions=(START + at).repeat(batch),
        info=sampling_info(seeds, filters),
    )


def _local(accept_index: torch.Tensor, slots: int) -> torch.Tensor:
    """Flat accepted rows as slots of their own request; padding reads slot 0."""
    return torch.where(accept_index >= 0, accept_index.long() % slots, 0)
