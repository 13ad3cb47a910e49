"""Learning from what verifies show, while serving: see ``docs/specblock.md``."""
