"""A rendered pod as processes of this machine: what the kubelet does with container, probes and preStop."""

from __future__ import annotations

import contextlib
import ctypes
import json
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from sgl_graft import models
from sgl_graft.bench.server import free_port

from .chart import Object, Values, engine_pod, only, render
from .dockerfile import read

PR_SET_PDEATHSIG = 1
CONTAINER_PORT = "30000"


@dataclass(frozen=True)
class ProbeResult:
    """One check: HTTP status (0: no answer) and seconds it took."""

    status: int
    seconds: float

    @property
    def passed(self) -> bool:
        return 200 <= self.status < 400


class LocalPod:
    """The engine container of a render.

    Args:
        objects: the rendered objects.
        entry_point: the image's.
        image_files: paths of the image, and where this machine has the same.
        folder: becomes the pod's volumes.
        path: `PATH` inside the container.
    """

    def __init__(
        self,
        objects: list[Object],
        entry_point: list[str],
        image_files: Mapping[str, Path],
        folder: Path,
        path: str,
    ) -> None:
        self.spec = engine_pod(objects)
        (self.container,) = self.spec["containers"]
        self.port = free_port()
        self.folder = folder
        self._places = dict(image_files)
        self._volumes(objects)
        self._path = path
        if shutil.which(entry_point[0]) is None:  # tini; the server then gets its signals itself
            entry_point = entry_point[entry_point.index("--") + 1 :]
        self.command = [*entry_point, *map(self.here, self.container["args"])]
        self.command[self.command.index("--port") + 1] = str(self.port)
        self.log = folder / "log"
        self.started_after = 0.0
        self.process: subprocess.Popen[bytes] | None = None

    def _volumes(self, objects: list[Object]) -> None:
        """A new folder for each emptyDir; ConfigMaps as files, whose paths are this machine's."""
        volumes = {volume["name"]: volume for volume in self.spec["volumes"]}
        mounts = [mount for mount in self.container["volumeMounts"] if mount["mountPath"] != "/dev/shm"]
        for mount in mounts:
            place = self.folder / mount["name"]
            place.mkdir(parents=True, exist_ok=True)
            self._places[mount["mountPath"]] = place
        for mount in mounts:
            volume = volumes[mount["name"]]
            if "configMap" in volume:
                for name, text in only(objects, "ConfigMap", volume["configMap"]["name"])["data"].items():
                    content = yaml.safe_dump(self._everywhere(yaml.safe_load(text)))
                    (self.folder / mount["name"] / name).write_text(content)
            elif "emptyDir" not in volume:
                raise ValueError(f"no local counterpart of {volume}")

    def _everywhere(self, node: Any) -> Any:
        if isinstance(node, dict):
            return {key: self._everywhere(value) for key, value in node.items()}
        return self.here(node) if isinstance(node, str) else node

    def here(self, text: str) -> str:
        """A path of the container as this machine has it; other text as it is."""
        for inside in sorted(self._places, key=len, reverse=True):
            if text == inside or text.startswith(inside + "/"):
                return str(self._places[inside]) + text.removeprefix(inside)
        return text

    def environment(self, items: list[Object]) -> dict[str, str]:
        """Nothing of this machine's but what a process needs to find programs."""
        named = {item["name"]: self.here(item["value"]) for item in items}
        return {"PATH": self._path, "TMPDIR": self.here("/tmp"), **named}

    def start(self) -> None:
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                self.command,
                env=self.environment(self.container["env"]),
                cwd=self.here("/home/sgl-graft"),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
            )

    def probe(self, kind: str) -> ProbeResult:
        """One HTTP check as the kubelet makes it, with its own timeout."""
        probe = self.container[kind]
        url = f"http://127.0.0.1:{self.port}{probe['httpGet']['path']}"
        begin = time.monotonic()
        try:
            with urllib.request.urlopen(url, timeout=probe["timeoutSeconds"]) as answer:
                status = answer.status
        except urllib.error.HTTPError as error:
            status = error.code
        except OSError:
            status = 0
        return ProbeResult(status, time.monotonic() - begin)

    def wait_started(self) -> None:
        """Until the start-up probe passes; fails where the kubelet would restart the container."""
        probe = self.container["startupProbe"]
        begin = time.monotonic()
        for _ in range(probe["failureThreshold"]):
            assert self.process is not None and self.process.poll() is None, self.log_tail()
            if self.probe("startupProbe").passed:
                self.started_after = time.monotonic() - begin
                return
            time.sleep(probe["periodSeconds"])
        raise AssertionError(f"not started within the budget; {self.log_tail()}")

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """An open answer."""
        url, headers = f"http://127.0.0.1:{self.port}{path}", {"Content-Type": "application/json"}
        return urllib.request.urlopen(
            urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=240
        )

    def generate(self, tokens: int, text: str = "Once upon a time") -> dict[str, Any]:
        with self.post("/generate", request(text, tokens)) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def metrics(self) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as answer:
            text: str = answer.read().decode()
            return text

    def total(self, series: str) -> float:
        """Sum of a series over its labels."""
        lines = [
            line for line in self.metrics().splitlines() if line.startswith((series + "{", series + " "))
        ]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def run(self, container: Object, **environment: str) -> subprocess.CompletedProcess[str]:
        """Another container of the release, a test pod for example, with some of its variables replaced."""
        command = [*container["command"], *container.get("args", [])]
        variables = self.environment(container.get("env", [])) | environment
        return subprocess.run(
            command, env=variables, capture_output=True, text=True, check=False, timeout=300
        )

    def pre_stop(self) -> float:
        """Run the preStop command; returns its seconds."""
        begin = time.monotonic()
        command = self.container["lifecycle"]["preStop"]["exec"]["command"]
        subprocess.run(command, env=self.environment(self.container["env"]), check=True)
        return time.monotonic() - begin

    def terminate(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)

    def wait_ended(self, seconds: float) -> int:
        """Exit code; fails where the kubelet would kill."""
        assert self.process is not None
        return self.process.wait(seconds)

    def tree(self) -> list[psutil.Process]:
        assert self.process is not None
        if self.process.poll() is not None:
            return []
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]

    def kill(self) -> None:
        """End every process, as the end of a container's first process does."""
        if self.process is None:
            return
        members = self.tree()  # not one group: tini gives its child a group of its own
        for process in members:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(30)
        psutil.wait_procs(members, timeout=30)

    def log_tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])


def request(text: str, tokens: int) -> dict[str, Any]:
    """Exactly `tokens` tokens, greedily."""
    return {"text": text, "sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}}


class Stream:
    """A streamed answer that is read in the background."""

    def __init__(self, pod: LocalPod, tokens: int, text: str = "Tell me everything about") -> None:
        self.chunks = self.tokens = 0
        self.finish: dict[str, Any] | None = None
        self.done = False
        self.error: Exception | None = None
        self._pod, self._body = pod, request(text, tokens) | {"stream": True}
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        try:
            with self._pod.post("/generate", self._body) as answer:
                for line in answer:
                    data = line.decode().removeprefix("data:").strip()
                    if data == "[DONE]":
                        self.done = True
                    elif data:
                        self.chunks += 1
                        meta = json.loads(data)["meta_info"]
                        self.finish, self.tokens = meta["finish_reason"], meta["completion_tokens"]
        except Exception as error:
            self.error = error


def cpu_pod(values: Values, folder: Path, **drafts: Path) -> LocalPod:
    """The engine pod of CPU mode, with the embedded models where the image has them.

    Args:
        values: overlays CPU mode's.
        folder: becomes the pod's volumes.
        drafts: more drafts, by the name that `draft.path` gives them below /opt/sgl-graft/drafts.
    """
    target, draft = "smollm2-135m-instruct", "smollm2-135m-instruct-eagle3"
    files = {f"/opt/sgl-graft/models/{target}": Path(models.get(target))}
    for name, place in {draft: Path(models.get(draft)), **drafts}.items():
        files[f"/opt/sgl-graft/drafts/{name}"] = place
    entry_point = read("Dockerfile.cpu")[-1].last("ENTRYPOINT").words
    return LocalPod(
        render(values), entry_point, files, folder, f"{Path(sys.executable).parent}:/usr/bin:/bin"
    )


def eventually(check: Callable[[], Any], seconds: float, every: float = 0.2) -> Any:
    """The first true answer of `check`, or a failure after `seconds`."""
    end = time.monotonic() + seconds
    while not (answer := check()):
        assert time.monotonic() < end, f"still false after {seconds} s"
        time.sleep(every)
    return answer
