"""Every RUN line of the CPU image in a clean Debian root, and what the finished root can do."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from .dockerfile import read
from .image_root import ImageRoot, missing_tools

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(bool(missing_tools()), reason=f"not here: {', '.join(missing_tools())}"),
]
NAME = "Dockerfile.cpu"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ImageRoot, Path]]:
    """The image's file system, built from what is committed."""
    context = tmp_path_factory.mktemp("context")
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", context], input=archive, check=True)
    # Beside uv's cache, so that it can be linked instead of copied.
    work = Path("~/.cache/sgl_graft/image-roots").expanduser()
    subprocess.run(["rm", "-rf", work], check=True)
    work.mkdir(parents=True)
    image = ImageRoot(NAME, work, context, {"/root/.cache/uv": Path("~/.cache/uv").expanduser()})
    yield image, image.build()
    subprocess.run(["rm", "-rf", work], check=True)


def test_every_run_line_works_and_the_root_is_complete(image: tuple[ImageRoot, Path]) -> None:
    _, root = image
    last = read(NAME)[-1]
    for path in (
        "opt/sgl-graft/models/smollm2-135m-instruct/config.json",
        "usr/bin/tini",
        "opt/venv/bin/python3",
    ):
        assert (root / path).exists(), path
    draft = root / "opt/sgl-graft/drafts/smollm2-135m-instruct-eagle3"
    assert draft.is_symlink() and (root / str(draft.readlink()).lstrip("/") / "model.safetensors").exists()
    assert last.last("ENTRYPOINT").words[0] == "tini"


def test_doctor_is_content_as_the_images_user(image: tuple[ImageRoot, Path]) -> None:
    builder, root = image
    stage = read(NAME)[-1]
    exports = "\n".join(f"export {name}={value}" for name, value in stage.environment().items())
    user = stage.last("USER").text
    printed = builder.execute(
        root, f"{exports}\ncd {stage.last('WORKDIR').text}\nid -u; sgl-graft doctor", user
    )
    assert printed.startswith(user.split(":")[0])


def test_entry_point_parses_the_default_command(image: tuple[ImageRoot, Path]) -> None:
    """Up to the parser: `--help` behind the image's own arguments."""
    builder, root = image
    stage = read(NAME)[-1]
    exports = "\n".join(f"export {name}={value}" for name, value in stage.environment().items())
    words = [*stage.last("ENTRYPOINT").words, *stage.last("CMD").words, "--help"]
    printed = builder.execute(root, f"{exports}\n{' '.join(words)}", stage.last("USER").text)
    assert "--graft-config" in printed
