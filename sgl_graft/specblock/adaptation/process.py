"""The server's end of the learner: a child process that may be slow, wrong or dead without harm."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import subprocess
import sys
import threading
from dataclasses import asdict
from typing import Any

from torch import Tensor

from ..model import SpecBlockDraft
from . import wire
from .learner import LearnSettings, Update
from .weights import WeightArea

WAITING_JOBS = 4

logger = logging.getLogger(__name__)


class LearnerProcess:
    """Sends jobs and takes answers without ever waiting; both threads here only move bytes.

    Attributes:
        area: the weights that the last answer is about; read it only between an answer and the next job.
        problem: of the last answer's weights, if any; see `WeightArea.problem`.
    """

    def __init__(
        self,
        draft: SpecBlockDraft,
        draft_to_target: Tensor,
        served: WeightArea,
        learning: LearnSettings,
        share: float,
        nice: int,
    ) -> None:
        """`served` are the weights it begins with, and that new ones are compared with; `share` and `nice`
        bound the time it takes, as `config.AdaptationConfig` says."""
        self._served = served
        descriptor = os.memfd_create("specblock-weights")
        try:
            self.area = WeightArea.shared(draft, descriptor)
            self.area.copy_from(served)
            self._child = subprocess.Popen(
                [sys.executable, "-m", __name__.replace("process", "child"), str(descriptor)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=(descriptor,),
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
        finally:
            os.close(descriptor)
        self._jobs: queue.Queue[tuple[dict[str, Any], dict[str, Tensor]] | None] = queue.Queue(WAITING_JOBS)
        self._answers: queue.Queue[tuple[Update, str | None]] = queue.Queue()
        config = {k: v for k, v in draft.config.to_dict().items() if k != "transformers_version"}
        self.send(
            {"config": config, "learning": asdict(learning), "share": share, "nice": nice},
            {"draft_to_target": draft_to_target.cpu()},
        )
        for target in (self._write, self._read):
            threading.Thread(target=target, daemon=True, name="specblock-learner").start()

    @property
    def alive(self) -> bool:
        return self._child.poll() is None

    @property
    def pid(self) -> int:
        return self._child.pid

    def send(self, header: dict[str, Any], tensors: dict[str, Tensor] | None = None) -> bool:
        """Queue a job; False when too many wait already."""
        try:
            self._jobs.put_nowait((header, tensors or {}))
        except queue.Full:
            return False
        return True

    def answer(self) -> tuple[Update, str | None] | None:
        """The next finished update and what is wrong with its weights; None while there is none."""
        try:
            return self._answers.get_nowait()
        except queue.Empty:
            return None

    def close(self) -> None:
        """End the process; it may be in the middle of anything."""
        with contextlib.suppress(queue.Full):
            self._jobs.put_nowait(None)
        self._child.kill()
        self._child.wait()

    def _write(self) -> None:
        assert self._child.stdin is not None
        try:
            while (job := self._jobs.get()) is not None:
                wire.send(self._child.stdin, *job)
        except OSError:
            pass  # it is dead, which `alive` says

    def _read(self) -> None:
        assert self._child.stdout is not None
        try:
            while True:
                header, _ = wire.receive(self._child.stdout)
                self._answers.put((Update(**header["update"]), self.area.problem(self._served)))
        except (EOFError, OSError):
            pass
        except (ValueError, KeyError, TypeError) as error:
            logger.warning("SPECBLOCK ends its learner, whose answer makes no sense: %s", error)
            self._child.kill()
