"""Accept length of a draft without a server: greedy, one dialogue at a time; DFlash and SpecBlock beside.

A greedy target's answer is known beforehand, so the tree of every round can be walked against it and no
verification is run. The tree is SGLang's: `topk` continuations of each of the `topk` best nodes per step, the
`slots - 1` best-scoring of all of them verified.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from sgl_graft.config import SpecBlockConfig
from sgl_graft.draft_training import dialogues, features, simulate_dflash, specblock_simulate
from sgl_graft.draft_training.dflash import ARCHITECTURE
from sgl_graft.draft_training.dflash_recipe import load_dflash
from sgl_graft.draft_training.eagle3 import Eagle3Draft, chain_attention
from sgl_graft.draft_training.eagle3_recipe import load_eagle3
from sgl_graft.draft_training.features import Sample
from sgl_graft.draft_training.generate import Generate, Generator, Script, Text
from sgl_graft.draft_training.prompts import read_prompts
from sgl_graft.draft_training.vocab import DraftVocab
from sgl_graft.specblock import checkpoint
from sgl_graft.specblock.drafting import Drafter, DraftShape
from sgl_graft.specblock.startup import rule_of


@dataclass(frozen=True)
class TreeShape:
    steps: int = 5
    topk: int = 4
    slots: int = 16


@torch.no_grad()
def accept_lengths(
    draft: Eagle3Draft, vocab: DraftVocab, embedding: Tensor, sample: Sample, shape: TreeShape | None = None
) -> list[int]:
    """Tokens committed by each verify of the answer in `sample` (greedy, one turn), bonus included.

    The token that the prefill yields is not counted, and rounds so near the end that the known answer could
    cut them short are left out. embedding `[vocab, hidden]` is the target's.
    """
    shape = shape or TreeShape()
    attention = draft.midlayer.self_attn
    ids = sample.ids
    fused = draft.fc(sample.features.to(embedding.dtype))  # [tokens, hidden]
    wide = draft.layer_input(embedding[ids.roll(-1)], fused)
    cos, sin = draft.angles(torch.arange(len(ids)))
    keys, values = attention.keys_values(wide, cos, sin)
    queries = attention.queries(wide, cos, sin)
    lengths = []
    row = int(sample.rows[0])  # the last position whose features the draft has; ids[row + 1] is committed
    while row + 2 + shape.steps < len(ids):
        attended = chain_attention(queries[row : row + 1], keys, values, torch.tensor([row]), [])
        hidden = draft.after_attention(attended, fused[row : row + 1])
        tree = _draft_tree(draft, vocab, embedding, keys, values, row, hidden, shape)
        accepted = _walk(tree, ids[row + 2 : row + 2 + shape.steps].tolist())
        lengths.append(accepted + 1)
        row += accepted + 1
    return lengths


@dataclass
class _Tree:
    tokens: list[int]
    parents: list[int]  # index of the parent node, -1 for children of the root


def _draft_tree(
    draft: Eagle3Draft,
    vocab: DraftVocab,
    embedding: Tensor,
    keys: Tensor,
    values: Tensor,
    row: int,
    hidden: Tensor,
    shape: TreeShape,
) -> _Tree:
    """The verified nodes of one round; hidden `[1, hidden]` is the draft's output at `row`."""
    attention = draft.midlayer.self_attn
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    frontier = torch.tensor([-1])  # [nodes] node behind each row of `hidden`
    frontier_scores = torch.ones(1)
    chain: list[tuple[Tensor, Tensor]] = []
    for step in range(shape.steps):
        probs = draft.lm_head(draft.norm(hidden)).float().softmax(-1)  # [nodes, draft_vocab]
        top = probs.topk(shape.topk, dim=-1)
        candidate_scores = (frontier_scores[:, None] * top.values).flatten()  # [nodes * topk]
        candidates = vocab.draft_to_target[top.indices].flatten()
        first = len(tokens)
        tokens += candidates.tolist()
        parents += frontier.repeat_interleave(shape.topk).tolist()
        scores += candidate_scores.tolist()
        if step + 1 == shape.steps:
            break
        best = candidate_scores.topk(min(shape.topk, len(candidate_scores))).indices
        behind = best // shape.topk  # [topk] row of `hidden` each chosen node continues
        frontier, frontier_scores, hidden = best + first, candidate_scores[best], hidden[behind]
        wide = draft.layer_input(embedding[candidates[best]], hidden)
        cos, sin = draft.angles(torch.full((len(best),), row + step + 1))
        chain = [(k[behind], v[behind]) for k, v in chain]
        chain.append(attention.keys_values(wide, cos, sin))
        rows = torch.full((len(best),), row)
        attended = chain_attention(attention.queries(wide, cos, sin), keys, values, rows, chain)
        hidden = draft.after_attention(attended, hidden)
    kept = torch.tensor(scores).topk(min(shape.slots - 1, len(scores))).indices.sort().values.tolist()
    place = {node: i for i, node in enumerate(kept)} | {-1: -1}
    # A parent scores at least as much as its child, but on a tie topk may keep the child alone.
    whole = [node for node in kept if parents[node] in place]
    place = {node: i for i, node in enumerate(whole)} | {-1: -1}
    return _Tree([tokens[n] for n in whole], [place.get(parents[n], -2) for n in whole])


def _walk(tree: _Tree, truth: Sequence[int]) -> int:
    """How many tokens of `truth` the tree holds along one path."""
    node = -1
    for depth, token in enumerate(truth):
        found = [i for i, p in enumerate(tree.parents) if p == node and tree.tokens[i] == token]
        if not found:
            return depth
        node = found[0]
    return len(truth)


def measure(
    target: Path,
    draft_folder: Path,
    prompts: Sequence[Path],
    cache: Path,
    *,
    num_prompts: int,
    tokens: int,
    shape: TreeShape,
    block_size: int | None = None,
    specblock: SpecBlockConfig | None = None,
) -> dict[str, float]:
    """Mean accept length per prompt file (first `num_prompts` rows, first turn, greedy, chat template).

    `shape` is an EAGLE-3 draft's tree, `block_size` a DFlash draft's block (default: the one it names),
    `specblock` with `shape.slots` a SpecBlock draft's tree.

    The target's answers and features are kept in `cache` and reused by the next draft. They are used to
    measure, never to train.
    """
    from sgl_graft.draft_training.eagle3_job import compute_features

    tokenizer = AutoTokenizer.from_pretrained(target)
    answers = [cache / f"{p.stem}-{num_prompts}x{tokens}{dialogues.SUFFIX}" for p in prompts]
    for file, answer_file in zip(prompts, answers, strict=True):
        if answer_file.is_file():
            continue
        model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
        scripts = []
        for i, prompt in enumerate(read_prompts(file)[:num_prompts]):
            chat = [{"role": "user", "content": prompt}]
            ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
            scripts.append(Script((Text(tuple(ids)), Generate(tokens, 0.0, answer=True)), file.stem, i))
        longest = max(s.max_len for s in scripts)
        end = tokenizer.eos_token_id
        generator = Generator(model, end_of_turn=end, slots=min(32, len(scripts)), max_len=longest)
        dialogues.save(answer_file, list(generator.run(scripts)), {"use": "measuring only"})
    compute_features(target, tuple(answers), cache)
    lengths_of = _measured(draft_folder, target, shape, block_size, specblock or SpecBlockConfig())
    means = {}
    for file, answer_file in zip(prompts, answers, strict=True):
        name = answer_file.name.removesuffix(dialogues.SUFFIX) + features.SUFFIX
        shard = features.FeatureShard(cache / name)
        lengths: list[int] = []
        for i in range(len(shard)):
            sample = shard.sample(i)
            if len(sample.rows):
                lengths += lengths_of(sample)
        means[file.stem] = sum(lengths) / len(lengths)
    return means


def _measured(
    folder: Path, target: Path, shape: TreeShape, block_size: int | None, specblock: SpecBlockConfig
) -> Callable[[Sample], list[int]]:
    """The accept lengths of a sample's rounds with the draft in `folder`, whichever kind it is."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    embedding, head = model.get_input_embeddings().weight.detach(), model.lm_head.weight.detach()
    (architecture,) = json.loads((folder / "config.json").read_text())["architectures"]
    if architecture in checkpoint.ARCHITECTURES:
        module, own = checkpoint.load(folder)
        drafter = Drafter(module, embedding, own.draft_to_target, rule_of(specblock, folder))
        whole = DraftShape(specblock.blocks, specblock.leaves, shape.slots)
        return lambda sample: specblock_simulate.accept_lengths(drafter, sample, whole)
    if architecture == ARCHITECTURE:
        block_draft = load_dflash(folder)
        size = block_size or int(block_draft.config.block_size)
        low = embedding.to(torch.bfloat16)
        low_head = low if head is embedding else head.to(torch.bfloat16)
        return lambda sample: simulate_dflash.accept_lengths(block_draft, low, low_head, sample, size)
    draft, vocab = load_eagle3(folder)
    return lambda sample: accept_lengths(draft, vocab, embedding, sample, shape)
