"""The predictor's two forms give the same scores; what cannot be folded is refused; loading is safe."""

import pickle

import pytest
import torch

from sgl_graft.blockpilot.predictor import Head, Predictor, fold, load_published, predictor_from_tensors

VOCAB, HIDDEN, WIDTH = 4096, 48, 96


@pytest.fixture
def published():
    torch.manual_seed(0)
    predictor = Predictor(VOCAB, 5, WIDTH).eval()
    torch.nn.init.normal_(predictor.layers[0].bias)
    torch.nn.init.normal_(predictor.layers[1].bias)
    return predictor


def make_head(rows=VOCAB, seed=1, **changes):
    generator = torch.Generator().manual_seed(seed)
    return Head(torch.randn(rows, HIDDEN, generator=generator) / 4, VOCAB, **changes)


@pytest.mark.parametrize(
    "changes",
    [{}, {"bias": True}, {"scale": 0.125}, {"bias": True, "scale": 3.0}],
    ids=["plain", "bias", "scale", "bias and scale"],
)
@torch.no_grad()
def test_folded_equals_unfolded_on_ten_thousand_inputs(published, changes):
    if changes.get("bias"):
        changes = changes | {"bias": torch.randn(VOCAB)}
    head = make_head(**changes)
    hidden = torch.randn(10_000, HIDDEN)
    logits = head.logits(hidden)
    folded = fold(published, head)
    wanted = published.double()(logits.double())
    torch.testing.assert_close(folded(hidden).double(), wanted, rtol=1e-3, atol=1e-3)
    assert torch.equal(folded(hidden).argmax(1), wanted.argmax(1))


@torch.no_grad()
def test_another_head_gives_other_scores(published):
    """The control: equality is not a property of the inputs."""
    hidden = torch.randn(200, HIDDEN)
    wanted = published(make_head().logits(hidden))
    other = fold(published, make_head(seed=2))(hidden)
    assert not torch.allclose(other, wanted, rtol=1e-2, atol=1e-2)
    assert not torch.equal(other.argmax(1), wanted.argmax(1))


@torch.no_grad()
def test_padding_rows_of_a_tied_embedding_are_left_out(published):
    padded = make_head(rows=VOCAB + 64)
    plain = Head(padded.weight[:VOCAB], VOCAB)
    padded.weight[VOCAB:] = 1e6
    hidden = torch.randn(20, HIDDEN)
    assert torch.equal(fold(published, padded)(hidden), fold(published, plain)(hidden))


@torch.no_grad()
def test_shards_of_two_ranks_sum_to_the_whole(published):
    head = make_head()
    bias = torch.randn(VOCAB)
    whole = fold(published, Head(head.weight, VOCAB, bias))
    half = VOCAB // 2
    collected: list[list[torch.Tensor]] = []
    for start in (0, half):
        mine: list[torch.Tensor] = []
        shard = Head(head.weight[start : start + half], VOCAB, bias[start : start + half], first_row=start)
        fold(published, shard, lambda x, mine=mine: mine.append(x) or x)
        collected.append(mine)
    sums = [a + b for a, b in zip(*collected, strict=True)]
    turns = iter(sums)
    both = fold(published, Head(head.weight[:half], VOCAB, bias[:half]), lambda x: next(turns))
    hidden = torch.randn(50, HIDDEN)
    torch.testing.assert_close(both(hidden), whole(hidden), rtol=1e-4, atol=1e-4)


def test_soft_capping_cannot_be_folded(published):
    with pytest.raises(ValueError, match=r"softcapping 30\.0.*fixed or ewma"):
        fold(published, make_head(soft_cap=30.0))


def test_another_vocabulary_is_refused(published):
    head = make_head()
    with pytest.raises(ValueError, match=r"reads 4096 logits.*vocabulary of 4000"):
        fold(published, Head(head.weight, 4000))


@torch.no_grad()
def test_a_bfloat16_checkpoint_with_the_published_names_loads(tmp_path, published):
    names = set(published.state_dict())
    assert names == {
        *("layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias"),
        *("fc_out.weight", "fc_out.bias"),
    }
    torch.save(published.bfloat16().state_dict(), tmp_path / "model.pt")
    loaded = load_published(tmp_path / "model.pt")
    hidden, head = torch.randn(500, HIDDEN), make_head()
    wanted = published.float()(head.logits(hidden))
    torch.testing.assert_close(fold(loaded, head)(hidden), wanted, rtol=1e-3, atol=1e-3)


class Evil:
    def __reduce__(self):
        return (open, ("/tmp/never-created-by-a-policy-file", "w"))


def test_code_in_a_checkpoint_is_not_run(tmp_path):
    (tmp_path / "model.pt").write_bytes(pickle.dumps({"layers.0.weight": Evil()}))
    with pytest.raises(ValueError, match="cannot be read"):
        load_published(tmp_path / "model.pt")
    torch.save({"layers.0.weight": Evil()}, tmp_path / "zip.pt")
    with pytest.raises(ValueError, match="cannot be read"):
        load_published(tmp_path / "zip.pt")


@pytest.mark.parametrize("damage", ["missing", "cut", "list", "shape", "key", "nan"])
def test_damaged_checkpoints_are_refused(tmp_path, published, damage):
    path = tmp_path / "model.pt"
    state = dict(published.state_dict())
    if damage == "shape":
        state["layers.1.weight"] = torch.zeros(3, 3)
    elif damage == "key":
        state["extra"] = torch.zeros(1)
    elif damage == "nan":
        state["fc_out.bias"] = torch.full((5,), torch.nan)
    if damage != "missing":
        torch.save([1] if damage == "list" else state, path)
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ValueError, match=r"model\.pt"):
        load_published(path)


def test_depth_and_width_are_read_from_the_tensors():
    deep = Predictor(7, 3, width=16, depth=3)
    again = predictor_from_tensors(dict(deep.state_dict()), "memory")
    assert len(again.layers) == 3 and again.inputs == 7 and again.fc_out.out_features == 3
    x = torch.randn(4, 7)
    assert torch.equal(again(x), deep.eval()(x))
