"""Loss, loop, resumption, export: on the tiny target, in seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from sgl_graft.draft_training import eagle3_job
from sgl_graft.draft_training.eagle3 import Eagle3Draft, draft_config
from sgl_graft.draft_training.eagle3_recipe import Eagle3Recipe, Eagle3Settings, load_eagle3
from sgl_graft.draft_training.features import SUFFIX, FeatureShard
from sgl_graft.draft_training.feed import Feed
from sgl_graft.draft_training.loop import TrainSettings, split_evenly
from sgl_graft.draft_training.loss import soft_head_loss
from sgl_graft.draft_training.simulate import TreeShape, accept_lengths

FP32 = Eagle3Settings(steps=3, keep=0.5, bf16=False)


def job(target: Path, data: Path, run: Path, feature_folder: Path, **train: Any) -> eagle3_job.Eagle3Job:
    run.mkdir(parents=True, exist_ok=True)
    if not (run / "features").exists():
        (run / "features").symlink_to(feature_folder)
    settings = {"warmup": 2, "decay_steps": 4, "lr": 2e-3, "eval_every": 4, "save_every": 4, **train}
    sizes = {"draft_vocab_size": 128, "batch_targets": 64}
    return eagle3_job.Eagle3Job(target, (data,), run, **sizes, train=TrainSettings(**settings), eagle3=FP32)


def test_head_loss_equals_autograd() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(300, 16, requires_grad=True)
    weight = torch.randn(40, 16, requires_grad=True)
    ids = torch.stack([torch.randperm(40)[:5] for _ in range(300)])
    probs, row_weight = torch.rand(300, 5) * 0.2, torch.rand(300)
    loss = soft_head_loss(hidden, weight, ids, probs, row_weight, torch.float32)
    grads = torch.autograd.grad(loss * 3, (hidden, weight))
    plain = (hidden @ weight.T).log_softmax(-1).gather(1, ids)
    expected = -(row_weight[:, None] * probs * plain).sum()
    torch.testing.assert_close(loss, expected)
    for got, want in zip(grads, torch.autograd.grad(expected * 3, (hidden, weight)), strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


def test_loss_falls(target: Path, data: Path, feature_folder: Path, tmp_path: Path) -> None:
    records: list[dict[str, Any]] = []
    trainer = eagle3_job.make_trainer(job(target, data, tmp_path / "run", feature_folder, steps=24))
    trainer.run(records.append)
    first, last = (sum(r["loss"] for r in part) for part in (records[:4], records[-4:]))
    assert last < 0.9 * first
    figures = records[-1]["held_out"]
    assert len(figures["top1"]) == len(figures["top4"]) == 3
    assert 1.0 <= figures["chain"] <= 4.0


def test_killed_run_continues_bit_for_bit(
    target: Path, data: Path, feature_folder: Path, tmp_path: Path
) -> None:
    whole = eagle3_job.make_trainer(job(target, data, tmp_path / "whole", feature_folder, steps=12))
    whole.run()

    class KilledError(Exception):
        pass

    def kill(record: dict[str, Any]) -> None:
        if record["step"] == 7:
            raise KilledError

    with pytest.raises(KilledError):
        eagle3_job.make_trainer(job(target, data, tmp_path / "cut", feature_folder, steps=12)).run(kill)
    cut = eagle3_job.make_trainer(job(target, data, tmp_path / "cut", feature_folder, steps=12))
    assert cut.step == 4, "the last checkpoint, not the kill"
    cut.run()
    for a, b in zip([*whole.params, *whole.average], [*cut.params, *cut.average], strict=True):
        assert torch.equal(a, b)
    exported = [load_file(tmp_path / run / "export" / "model.safetensors") for run in ("whole", "cut")]
    assert all(torch.equal(exported[0][name], exported[1][name]) for name in exported[0])


def test_threads_only_split_the_work(target: Path, data: Path, feature_folder: Path, tmp_path: Path) -> None:
    """One worker or two: the same gradient, up to rounding and the random choice of kept chains."""
    config = draft_config(AutoConfig.from_pretrained(target), 128)
    shard = FeatureShard(sorted(feature_folder.glob("*"))[0])
    samples = [shard.sample(i) for i in range(6)]
    made = eagle3_job.make_trainer(job(target, data, tmp_path, feature_folder))
    recipe = made.recipe
    assert isinstance(recipe, Eagle3Recipe)
    recipe.settings = Eagle3Settings(steps=3, keep=1.0, bf16=False)
    denominator, random = sum(len(s.rows) for s in samples), torch.Generator()
    whole = recipe.loss(samples, denominator, random)
    parts = [recipe.loss(part, denominator, random) for part in split_evenly(samples, 2)]
    torch.testing.assert_close(whole, parts[0] + parts[1])
    assert config.draft_vocab_size == 128


def test_new_shards_join_a_running_epoch(feature_folder: Path, tmp_path: Path) -> None:
    first, second = sorted(feature_folder.glob("*"))
    (tmp_path / first.name).symlink_to(first)
    feed = Feed(tmp_path, batch_targets=32, max_len=64, seed=0, held_out_share=5)
    feed.refresh()
    feed.next_batch()
    state = feed.state()
    (tmp_path / second.name).symlink_to(second)
    assert feed.refresh() == 1
    coming = {name for name, _ in feed.order[feed.position :]}
    assert coming == {first.name, second.name}
    assert len(feed.order) == len(set(feed.order))
    assert not any(feed.is_held_out(key) for key in feed.order)
    assert feed.held_out(100)
    again = Feed(tmp_path, batch_targets=32, max_len=64, seed=0, held_out_share=5)
    again.restore(state)
    assert again.state() == state
    assert again.refresh() == 1
    assert again.order == feed.order


def test_vanished_shard_is_named(feature_folder: Path) -> None:
    feed = Feed(feature_folder, batch_targets=8, max_len=64, seed=0)
    with pytest.raises(ValueError, match=f"gone{SUFFIX}"):
        feed.restore({"epoch": 0, "order": [(f"gone{SUFFIX}", 0)], "position": 0})


def test_export_is_what_sglang_loads(target: Path, data: Path, feature_folder: Path, tmp_path: Path) -> None:
    trainer = eagle3_job.make_trainer(job(target, data, tmp_path, feature_folder, steps=1))
    trainer.run()
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": 128,
        "head_dim": 32,
        "vocab_size": 320,
        "draft_vocab_size": 128,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "num_aux_hidden_states": 2,  # a target of six layers; three would go without saying
    }
    assert {k: config[k] for k in expected} == expected
    tensors = load_file(tmp_path / "export" / "model.safetensors")
    h, wide, q, kv, mlp = 128, 256, 4 * 32, 2 * 32, 256
    assert {name: tuple(t.shape) for name, t in tensors.items()} == {
        "fc.weight": (h, 2 * h),
        "midlayer.self_attn.q_proj.weight": (q, wide),
        "midlayer.self_attn.k_proj.weight": (kv, wide),
        "midlayer.self_attn.v_proj.weight": (kv, wide),
        "midlayer.self_attn.o_proj.weight": (h, q),
        "midlayer.mlp.gate_proj.weight": (mlp, h),
        "midlayer.mlp.up_proj.weight": (mlp, h),
        "midlayer.mlp.down_proj.weight": (h, mlp),
        "midlayer.input_layernorm.weight": (h,),
        "midlayer.hidden_norm.weight": (h,),
        "midlayer.post_attention_layernorm.weight": (h,),
        "norm.weight": (h,),
        "lm_head.weight": (128, h),
        "d2t": (128,),
        "t2d": (320,),
    }
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].dtype == torch.bool
    assert int(tensors["t2d"].sum()) == 128


def test_export_round_trips(target: Path, data: Path, feature_folder: Path, tmp_path: Path) -> None:
    trainer = eagle3_job.make_trainer(job(target, data, tmp_path, feature_folder, steps=2))
    trainer.run()
    draft, vocab = load_eagle3(tmp_path / "export")
    names = [name for name, _ in trainer.recipe.module.named_parameters()]
    averaged = dict(zip(names, trainer.average, strict=True))
    for name, param in draft.named_parameters():
        torch.testing.assert_close(param, averaged[name].to(torch.bfloat16).float(), atol=0, rtol=0)
    assert len(vocab.draft_to_target) == 128
    (tmp_path / "export" / "config.json").write_text('{"architectures": ["Other"]}')
    with pytest.raises(ValueError, match="Other"):
        load_eagle3(tmp_path / "export")


def test_simulated_tree_never_beats_its_shape(target: Path, feature_folder: Path) -> None:
    """A draft that knows the answer fills every step; a random one seldom gets past the first."""
    shard = FeatureShard(sorted(feature_folder.glob("*"))[0])
    sample = shard.sample(3)
    sample.features = sample.features.float()
    model = AutoModelForCausalLM.from_pretrained(target)
    embedding = model.get_input_embeddings().weight.detach()
    draft = Eagle3Draft(draft_config(model.config, 320))
    vocab = eagle3_job.vocab.DraftVocab.of(torch.arange(320), 320)
    lengths = accept_lengths(draft, vocab, embedding, sample, TreeShape(steps=3, topk=2, slots=5))
    assert all(1 <= n <= 4 for n in lengths)
    everything = accept_lengths(draft, vocab, embedding, sample, TreeShape(steps=1, topk=320, slots=321))
    assert set(everything) == {2}, "with all tokens in the tree the next one is always found"
