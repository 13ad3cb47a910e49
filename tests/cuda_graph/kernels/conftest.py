"""These tests run kernels in Triton's interpreter, which must be on before Triton is imported.

So `test_cg_kernels.py` runs them in a process of their own; a session without the interpreter skips the
folder.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
