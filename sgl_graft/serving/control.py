"""What a scheduler does when an operator asks: status, tables, calibration, adaptation.

SGLang hands control messages to every rank between two rounds, in the same order. Ours travel as its
``DumperControlReqInput``, the one message that carries a name and a JSON body and is answered with JSON;
names that begin with ``control_names.PREFIX`` are ours. Rank 0 answers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from ..algorithms import selected_algorithm
from ..graft.live_calibration import LiveCalibration
from ..graft.table_files import TableFiles
from .adaptation_port import Adaptation, adaptation_of
from .camera import TreePicture
from .control_names import PREFIX
from .live_status import live_status
from .ranks import from_first_rank

logger = logging.getLogger(__name__)

Body = dict[str, Any]


class Control:
    """One rank's actions.

    Args:
        worker: the speculative worker.
        target: name of the served model.
        alone: whether this is the only data-parallel rank.
    """

    def __init__(self, worker: Any, target: str, *, alone: bool) -> None:
        self._alone = alone
        self._worker = worker
        self._algorithm = selected_algorithm()
        self._files: TableFiles | None = None
        self._calibration: LiveCalibration | None = None
        if self._algorithm == "GRAFT":
            draft, state = worker.draft_worker, worker.state
            self._files = TableFiles(state, draft.keeper, from_first_rank)
            captured = draft.cuda_graph_runner is not None
            self._calibration = LiveCalibration(state, target, from_first_rank, captured=captured)

    def act(self, name: str, body: Body) -> Body:
        """Do it.

        Raises:
            ValueError: it cannot be done, and why.
        """
        actions: dict[str, Callable[[Body], Body]] = {
            "status": self._status,
            "tree": self._tree,
            "table/save": self._save,
            "table/saved": self._saved,
            "table/load": self._load,
            "table/clear": self._clear,
            "calibrate": self._calibrate,
            "adaptation/pause": self._pause,
            "adaptation/resume": self._resume,
            "adaptation/rollback": self._rollback,
        }
        return actions[name](body)

    # ---- looking ---------------------------------------------------------------------------------------

    def _status(self, _: Body) -> Body:
        calibration = self._calibration.status() if self._calibration is not None else None
        return live_status(self._worker, self._algorithm, calibration)

    def _tree(self, _: Body) -> Body:
        found: TreePicture | None = self._worker.camera.last()
        return {"tree": None if found is None else vars(found)}

    # ---- tables ----------------------------------------------------------------------------------------

    @property
    def _stored_table(self) -> TableFiles:
        if self._files is None:
            raise ValueError(f"{self._algorithm} keeps no table on disk; GRAFT does")
        return self._files

    def _save(self, body: Body) -> Body:
        if not self._alone:
            raise ValueError(
                "every data-parallel rank has a table of its own: save from a server with one rank"
            )
        self._stored_table.save(body["name"])
        return {}

    def _saved(self, _: Body) -> Body:
        return {"bytes": self._stored_table.saved()}

    def _load(self, body: Body) -> Body:
        self._stored_table.load(body["name"])
        return {}

    def _clear(self, _: Body) -> Body:
        if self._files is not None:
            self._files.clear()
            return {}
        clear = self._clear_of_others()
        if clear is None:
            raise ValueError(f"this {self._algorithm} server has no successor table")
        clear()
        return {}

    def _clear_of_others(self) -> Callable[[], None] | None:
        if self._algorithm == "BLOCKPILOT":
            tail = self._worker.tail
            return None if tail is None else tail.clear
        grafting = self._worker.draft_worker.grafting
        return None if grafting is None else grafting.state.clear

    # ---- calibration, adaptation -----------------------------------------------------------------------

    def _calibrate(self, body: Body) -> Body:
        if self._calibration is None:
            raise ValueError(
                f"{self._algorithm} is not calibrated while it serves, only GRAFT is; `sgl-graft train` and "
                "`sgl-graft calibrate` make its files"
            )
        if body.get("restore"):
            self._calibration.restore()
        else:
            self._calibration.start(body["rounds"])
        return self._calibration.status()

    @property
    def _adaptation(self) -> Adaptation:
        found = adaptation_of(self._worker)
        if found is None:
            raise ValueError(f"this {self._algorithm} server does not adapt its draft")
        return found

    def _pause(self, _: Body) -> Body:
        self._adaptation.pause()
        return self._adaptation.status()

    def _resume(self, _: Body) -> Body:
        self._adaptation.resume()
        return self._adaptation.status()

    def _rollback(self, body: Body) -> Body:
        self._adaptation.rollback(body.get("version"))
        return self._adaptation.status()


def handle_control(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    """Around ``Scheduler.handle_dumper_control``: our messages are ours, others go on."""
    if not request.method.startswith(PREFIX):
        return original(scheduler, request)
    from sglang.srt.managers.io_struct import DumperControlReqOutput

    worker = scheduler.draft_worker
    if not hasattr(worker, "graft_control"):
        worker.graft_control = Control(
            worker,
            scheduler.server_args.served_model_name or "",
            alone=scheduler.server_args.dp_size == 1,
        )
    name = request.method.removeprefix(PREFIX)
    try:
        answer = DumperControlReqOutput(success=True, response=[worker.graft_control.act(name, request.body)])
    except ValueError as error:
        answer = DumperControlReqOutput(success=False, response=[], error=str(error))
    except Exception as error:  # an administrator's mistake must not end the server
        logger.exception("sgl_graft could not do %s", name)
        answer = DumperControlReqOutput(success=False, response=[], error=f"failed: {type(error).__name__}")
    scheduler.ipc_channels.send_to_tokenizer.send_output(answer, request)
    return None
