"""Print the current fingerprint of every target: ``python -m sgl_graft.patches.fingerprints [VERSION]``."""

from __future__ import annotations

import sys

from .contract import fingerprint, table_for


def main() -> None:
    version = sys.argv[1] if len(sys.argv) > 1 else "0.5.23"
    for patch in table_for(version):
        print(fingerprint(patch.target), patch.target)


if __name__ == "__main__":
    main()
