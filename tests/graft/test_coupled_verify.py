"""Coupled draws in place of the engine's sampling kernel: any tree commits what plain decoding draws."""

from types import SimpleNamespace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sgl_graft.cuda_graph.race import race_tokens
from sgl_graft.cuda_graph.tree_links import tree_links

from sgl_graft.graft.coupled_verify import Draws, drawing, sample_tree

VOCAB, SLOTS, MAX_PATH = 6, 7, 5


def random_tree(generator, batch):
    parents = torch.full((batch, SLOTS), -1)
    for slot in range(1, SLOTS):
        parents[:, slot] = torch.randint(0, slot, (batch,), generator=generator)
    return torch.randint(0, VOCAB, (batch, SLOTS), generator=generator), parents


def verify(tokens, parents, seq_lens, seeds, probs_of, min_ps=None):
    """The engine's call: probabilities of every node, from the path that leads to it."""
    batch = tokens.shape[0]
    links = tree_links(parents, seq_lens)
    probs = torch.stack(
        [
            probs_of(row, path_of(tokens[row], parents[row], slot))
            for row in range(batch)
            for slot in range(SLOTS)
        ]
    )
    out = SimpleNamespace(
        predicts=torch.zeros(batch * SLOTS, dtype=torch.int32),
        accept_index=torch.full((batch, MAX_PATH), -1, dtype=torch.int32),
        accept_token_num=torch.zeros(batch, dtype=torch.int32),
    )
    with drawing(lambda: Draws(seeds, links.positions, min_ps)):
        sample_tree(
            None,
            **vars(out),
            candidates=tokens,
            retrive_index=links.retrieve_index,
            retrive_next_token=links.retrieve_next_token,
            retrive_next_sibling=links.retrieve_next_sibling,
            target_probs=probs.view(batch, SLOTS, VOCAB),
        )
    return out


def path_of(tokens, parents, slot):
    path = []
    while slot > 0:
        path.append(int(tokens[slot]))
        slot = int(parents[slot])
    return tuple(reversed(path))


def committed(out, row):
    accepted = [index for index in out.accept_index[row].tolist() if index >= 0]
    assert len(accepted) == int(out.accept_token_num[row]) + 1
    return [int(out.predicts[index]) for index in accepted]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 3))
def test_any_tree_commits_a_prefix_of_what_plain_decoding_draws(seed, batch):
    generator = torch.Generator().manual_seed(seed)
    seq_lens = torch.randint(3, 90, (batch,), generator=generator)
    seeds = torch.randint(0, 2**60, (batch,), generator=generator)

    def probs_of(row, path):
        own = torch.Generator().manual_seed(hash((row, path)) % 2**31)
        return torch.rand(VOCAB, generator=own) ** 3

    for _ in range(2):
        tokens, parents = random_tree(generator, batch)
        out = verify(tokens, parents, seq_lens, seeds, probs_of)
        for row in range(batch):
            path, plain = (), []
            for step in range(MAX_PATH):
                position = seq_lens[row : row + 1] + step
                probs = probs_of(row, path).unsqueeze(0)
                drawn = int(race_tokens(probs, seeds[row : row + 1], position, torch.zeros(1)))
                plain.append(drawn)
                path += (drawn,)
            run = committed(out, row)
            assert run == plain[: len(run)]


def test_min_p_is_honoured_and_the_engines_rule_is_left_alone_outside():
    tokens, parents = random_tree(torch.Generator().manual_seed(1), 1)
    probs = torch.tensor([0.9, 0.02, 0.02, 0.02, 0.02, 0.02])
    length, zero = torch.tensor([4]), torch.zeros(1, dtype=torch.long)
    for position in range(40):
        out = verify(tokens, parents, length + position, zero, lambda *_: probs, torch.tensor([0.5]))
        assert set(committed(out, 0)) == {0}
    calls = []
    sample_tree(lambda *args, **kwargs: calls.append((args, kwargs)), 1, 2, 3, 4, target_probs=5)
    assert calls == [((1, 2, 3, 4), {"target_probs": 5})]
