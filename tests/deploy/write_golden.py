"""Stores the renders anew after a meant change: `python -m tests.deploy.write_golden`, then read the diff."""

from .cases import GOOD
from .chart import golden_text, render
from .test_render import GOLDEN


def main() -> None:
    GOLDEN.mkdir(exist_ok=True)
    for file in GOLDEN.glob("*.yaml"):
        file.unlink()
    for name, values in GOOD.items():
        (GOLDEN / f"{name}.yaml").write_text(golden_text(render(values)))


if __name__ == "__main__":
    main()
