"""Every set of values that cannot work is refused when it is rendered, and the message says why."""

import pytest

from .cases import REFUSED
from .chart import refusal


def test_enough_refusals() -> None:
    assert len(REFUSED) >= 15


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_reason(name: str) -> None:
    values, parts = REFUSED[name]
    message = refusal(values)
    for part in parts:
        assert part in message, message


def test_all_reasons_at_once() -> None:
    message = refusal({})
    for part in ("image.repository is empty", "model.path is empty", "draft.path is empty"):
        assert part in message
