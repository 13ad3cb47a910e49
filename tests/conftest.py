"""Quick tests first: a mistake should show before a server has started.

With several workers (`make test` has two), a file's tests stay together, for its fixtures, and in
`tests/serving` the tests of one server do.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

SERVING = "tests/serving/"
TENSOR_PARALLEL = SERVING + "test_tensor_parallel.py"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("server") is not None)


def work_unit(test: str, variants: frozenset[str]) -> str:
    """What a worker takes at a time: the server that a test id names, else its file."""
    file = test.split("::")[0]
    if file.startswith(SERVING) and file != TENSOR_PARALLEL:
        for word in re.split(r"[:_\[\]-]+", test):
            if word in variants:
                return SERVING + word
    return file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    # xdist's own groups ("loadgroup") are not seen under pytest 9.2.
    from xdist.scheduler import LoadScopeScheduling

    from tests.serving.variants import SPECULATIVE

    variants = frozenset(variant.name for variant in SPECULATIVE)

    class ByServer(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return work_unit(nodeid, variants)

    return ByServer(config, log)
