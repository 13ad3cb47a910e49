"""The attention backend against one query at a time, in every mode, with the kernel and with plain torch."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sgl_graft.cpu import kernels
from sgl_graft.cpu.attention import GraftCpuAttnBackend
from sgl_graft.cpu.draft_attention import DraftStepBackend

from .attention_cases import Case, Scene

SHAPES = [(9, 3, 64), (4, 4, 32), (8, 2, 128), (6, 1, 16)]  # heads, kv heads, head dim
LENGTHS = [[1], [70], [5, 130, 64, 63], [200, 3, 65, 1, 128]]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


@pytest.fixture(params=["kernel", "torch"])
def executor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(kernels, "attention_fits", lambda *_: False)
    elif not kernels.available(torch.float32):
        pytest.skip("no C++ compiler here")
    return str(request.param)


def check(scene: Scene, case: Case, backend: GraftCpuAttnBackend | None = None) -> None:
    out, expected = scene.run(backend or GraftCpuAttnBackend(scene.runner), case)
    assert out.dtype == scene.dtype
    torch.testing.assert_close(
        out.double(), expected, atol=TOLERANCE[scene.dtype], rtol=TOLERANCE[scene.dtype]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lens", LENGTHS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_mode(executor: str, shape: tuple[int, int, int], lens: list[int], dtype: torch.dtype) -> None:
    def scene() -> Scene:
        return Scene(lens, *shape, dtype)

    check(s := scene(), s.decode())
    check(s := scene(), s.verify(16, seed=1))
    check(s := scene(), s.chain_verify(5))
    check(s := scene(), s.prefill([n // 3 for n in lens]))
    check(s := scene(), s.prefill([0] * len(lens)))
    for step in (0, 3):
        s = scene()
        check(s, s.draft_step(4, 5, step), DraftStepBackend(s.runner, 4, 5, step))


@pytest.mark.parametrize("queries", [1, 2, 6])
def test_draft_extend(executor: str, queries: int) -> None:
    s = Scene([6, 90, 64, 70], 9, 3, 64, torch.float32)
    check(s, s.draft_extend(queries))


@pytest.mark.parametrize("mode", ["decode", "verify", "chain_verify", "prefill"])
def test_layers_without_causality(executor: str, mode: str) -> None:
    s = Scene([40, 7, 130], 4, 2, 32, torch.float32)
    case = {
        "decode": s.decode,
        "verify": lambda: s.verify(8),
        "chain_verify": lambda: s.chain_verify(8),
        "prefill": lambda: s.prefill([10, 0, 64]),
    }[mode]()
    check(s, s.everything_seen(case))


def test_long_context(executor: str) -> None:
    s = Scene([8000, 100, 90, 1], 3, 1, 64, torch.float32)
    check(s, s.verify(8))


def test_another_tree_gives_another_answer(executor: str) -> None:
    """Negative control: the comparison notices a mask that is wrong in one place."""
    s = Scene([20, 33], 4, 2, 32, torch.float32)
    case = s.verify(8)
    case.batch.spec_info.custom_mask[8 * 8 + 7 * 8 + 6] ^= True  # second request, last slot
    out, expected = s.run(GraftCpuAttnBackend(s.runner), case)
    wrong = ((out - expected).abs() > 1e-3).any(dim=1).nonzero().flatten().tolist()
    assert wrong == [15]


def test_a_verify_agrees_with_decoding_the_same_token(executor: str) -> None:
    """A chain's last slot and a plain decode step at that position see the same keys."""
    s = Scene([100, 9], 9, 3, 64, torch.float32)
    backend = GraftCpuAttnBackend(s.runner)
    case = s.chain_verify(6)
    torch.manual_seed(7)
    out, _ = s.run(backend, case)
    q = torch.randn(0)
    torch.manual_seed(7)
    qkv = torch.randn(12, 15 * 64)
    q = qkv[:, : 9 * 64]
    s.lens = [106, 15]
    step = s.decode().batch
    backend.init_forward_metadata(step)
    last = backend.forward_decode(q[[5, 11]], None, None, s.layer, step, save_kv_cache=False)
    torch.testing.assert_close(last, out[[5, 11]], atol=1e-6, rtol=1e-5)


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.calls += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", ["decode", "verify"])
def test_no_loop_over_requests(executor: str, mode: str) -> None:
    """Eight requests take as many torch calls as two."""

    def calls(requests: int) -> int:
        s = Scene([30 + r for r in range(requests)], 4, 2, 32, torch.float32)
        batch = (s.decode() if mode == "decode" else s.verify(8)).batch
        tokens = batch.out_cache_loc.numel()
        k = torch.randn(tokens, 2, 32)
        q = torch.randn(tokens, 4 * 32)
        backend = GraftCpuAttnBackend(s.runner)
        forward = backend.forward_decode if mode == "decode" else backend.forward_extend
        with _Counter() as counter:
            backend.init_forward_metadata(batch)
            for _ in range(3):
                forward(q, k, k, s.layer, batch)
        return counter.calls

    assert calls(8) == calls(2)
