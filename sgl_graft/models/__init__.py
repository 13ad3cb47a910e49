"""Models that need no model hub: the embedded target, shipped drafts, and tiny random models for tests.

from sgl_graft import models
folder = models.get("smollm2-135m-instruct")   # fetch and convert once, then instant and offline
"""

from sgl_graft.models.store import ModelEntry, entries, get, home, path
from sgl_graft.models.store import names as list  # public name: models.list()

__all__ = ["ModelEntry", "entries", "get", "home", "list", "path"]
