"""Requests that would end the server are refused one by one."""

from types import SimpleNamespace

import pytest

from sgl_graft.cpu.request_checks import check_request

MANAGER = SimpleNamespace(model_config=SimpleNamespace(vocab_size=100))


def request(**changes: object) -> SimpleNamespace:
    nothing = {"return_sampling_mask": False, "input_embeds": None, "contains_mm_input": lambda: False}
    return SimpleNamespace(**(nothing | changes))


@pytest.mark.parametrize(
    ("changes", "ids", "message"),
    [
        ({}, [], "no tokens"),
        ({}, None, "no tokens"),
        ({}, [1, 100], r"token id 100 .* from 0 to 99"),
        ({}, [1, -5], "token id -5"),
        ({"return_sampling_mask": True}, [1], "return_sampling_mask"),
    ],
)
def test_refused(changes: dict, ids: list[int] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_request(MANAGER, request(**changes), ids)


def test_let_through() -> None:
    check_request(MANAGER, request(), [0, 99])
    check_request(MANAGER, request(input_embeds=[[0.5]]), None)
    check_request(MANAGER, request(contains_mm_input=lambda: True), [7, 10**9])
