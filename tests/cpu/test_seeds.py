"""Which seed a request draws by."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.sampling.sampling_params import SamplingParams

from sgl_graft.cpu import seeds


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=8, temperature=1.0, **fields)


def test_every_request_of_a_batch_has_a_seed() -> None:
    reqs = [
        SimpleNamespace(rid="a", sampling_params=params(sampling_seed=5)),
        SimpleNamespace(rid="b", sampling_params=params()),
        SimpleNamespace(rid="c", sampling_params=params()),
        SimpleNamespace(rid="d", sampling_params=params(sampling_seed=0)),
    ]
    info = seeds.give_every_request_a_seed(SimpleNamespace(), None, SimpleNamespace(reqs=reqs))
    named, unnamed, other, zero = info.sampling_seed.tolist()
    assert (named, zero) == (5, 0)
    assert len({named, unnamed, other, zero}) == 4


def expand(shared: SamplingParams) -> list[int | None]:
    """Seeds of a request's samples, sent the way SGLang's tokenizer manager sends them."""
    ahead = SimpleNamespace(sampling_params=SamplingParams(max_new_tokens=0, n=shared.n))
    ahead.sampling_params.sampling_seed = shared.sampling_seed
    seeds.give_every_sample_its_own_seed(None, ahead)
    assert ahead.sampling_params.sampling_seed == shared.sampling_seed
    sent = [SimpleNamespace(sampling_params=shared) for _ in range(shared.n)]
    for request in sent:
        seeds.give_every_sample_its_own_seed(None, request)
    return [request.sampling_params.sampling_seed for request in sent]


def test_samples_of_a_seeded_request_draw_by_seeds_of_their_own() -> None:
    first = expand(params(n=4, sampling_seed=9))
    assert first[0] == 9
    assert len(set(first)) == 4
    assert expand(params(n=4, sampling_seed=9)) == first
    assert not set(expand(params(n=4, sampling_seed=10))) & set(first)
    assert not seeds._half_sent


@pytest.mark.parametrize("fields", [{"n": 1, "sampling_seed": 9}, {"n": 3, "sampling_seed": None}])
def test_other_requests_are_left_alone(fields: dict[str, Any]) -> None:
    assert set(expand(params(**fields))) == {fields["sampling_seed"]}
