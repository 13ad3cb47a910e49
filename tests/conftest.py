"""Quick tests first: a mistake should show before a server has started."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("server") is not None)
