"""Carries out a Dockerfile in a plain folder: debootstrap for the base, a chroot for every RUN. Needs root.

Not a container engine: no layers, no image, and of the instructions only those that our CPU image uses.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from .dockerfile import Instruction, Stage, read

SUITE = "bookworm"
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")  # this machine's, which may know its proxy's
INSIDE = "/run/host-certificates.crt"
SHELL_IN_ROOT = """
mount -t proc proc "$1/proc"
mount --rbind /dev "$1/dev"
exec chroot --userspec="$2" "$1" /bin/sh -ec "$3"
"""


def missing_tools() -> list[str]:
    """What this machine lacks for it."""
    missing = [tool for tool in ("debootstrap", "unshare", "chroot") if shutil.which(tool) is None]
    if os.geteuid() != 0:
        missing.append("root")
    return missing


class ImageRoot:
    """The file system that a Dockerfile makes.

    Args:
        name: the Dockerfile.
        work: folder for the roots of all stages.
        context: what `COPY` copies from.
        caches: folders of this machine for `--mount=type=cache`, by their place in the root.
    """

    def __init__(self, name: str, work: Path, context: Path, caches: dict[str, Path]) -> None:
        self.work, self.context, self.caches = work, context, caches
        self.stages = read(name)
        self.roots: dict[str, Path] = {}

    def build(self) -> Path:
        """Carry out all stages; the root of the last one."""
        for number, stage in enumerate(self.stages):
            self.roots[stage.name or str(number)] = self._stage(stage, self.work / f"stage{number}")
        return self.work / f"stage{len(self.stages) - 1}"

    def _stage(self, stage: Stage, root: Path) -> Path:
        assert stage.base.startswith("debian:" + SUITE), stage.base
        base = self.work / "base"
        if not base.exists():
            run(["debootstrap", "--variant=minbase", SUITE, str(base)])
        run(["cp", "-a", str(base), str(root)])
        folder = "/"
        for item in stage.instructions:
            if item.name == "WORKDIR":
                folder = item.text
                (root / folder.lstrip("/")).mkdir(parents=True, exist_ok=True)
            elif item.name == "COPY":
                self._copy(item, root, folder)
            elif item.name == "RUN":
                self._run(item, root, folder)
        return root

    def _copy(self, item: Instruction, root: Path, folder: str) -> None:
        *sources, target = item.words
        origin = self.roots[item.flags["from"]] if "from" in item.flags else self.context
        place = root / os.path.normpath(f"{folder}/{target}" if target[0] != "/" else target).lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        for source in sources:
            # Hard links where a stage hands on gigabytes; both roots are thrown away together.
            link = ["--link"] if "from" in item.flags else []
            run(["cp", "-a", *link, str(origin / source.lstrip("/")), str(place)])

    def _run(self, item: Instruction, root: Path, folder: str) -> None:
        mount = dict(pair.split("=", 1) for pair in item.flags.get("mount", "").split(",") if pair)
        if mount.get("type") == "cache":
            place = root / mount["target"].lstrip("/")
            if not place.exists():  # hard links: the installer links from it into the environment
                place.parent.mkdir(parents=True, exist_ok=True)
                run(["cp", "-a", "--link", str(self.caches[mount["target"]]), str(place)])
        self.execute(root, f"cd {folder}\n{item.text}")

    def execute(self, root: Path, script: str, user: str = "0:0") -> str:
        """Run a shell script inside a root; of this machine's environment only its way to the network."""
        if CERTIFICATES.exists():
            shutil.copy(CERTIFICATES, root / INSIDE.lstrip("/"))
        for file in ("resolv.conf", "pip.conf"):
            if (Path("/etc") / file).exists():
                shutil.copy(Path("/etc") / file, root / "etc" / file)
        variables = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/root",
            "DEBIAN_FRONTEND": "noninteractive",
            **dict.fromkeys(("SSL_CERT_FILE", "PIP_CERT", "REQUESTS_CA_BUNDLE"), INSIDE),
        }
        command = ["unshare", "--mount", "sh", "-ec", SHELL_IN_ROOT, "sh", str(root), user, script]
        return run(command, variables)


def run(command: list[str], environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        tail = (done.stdout + done.stderr)[-3000:]
        raise AssertionError(f"{' '.join(command)[:300]} ended with {done.returncode}:\n{tail}")
    return done.stdout
