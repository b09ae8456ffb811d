"""Sites as clients of NVIDIA FLARE: the parts of a job that server and clients execute.

A job is three JSON files that name two classes of this module; it contains no code. A message in
either direction is one ``bytes`` value, which FLARE encodes with FOBS: msgpack with a fixed list of
types and without pickle. Other messages are invalid. A client's certificate names its site. Each
client's FLARE workspace has a folder ``fczoo`` with ``agreed`` (the three files of the agreement),
``images`` and its state.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from nvflare.apis.controller_spec import Task
from nvflare.apis.executor import Executor
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.app_common.logging.constants import is_log_streaming_allowed

from fczoo.core.errors import FczooError
from fczoo.core.files import write_json
from fczoo.sites.federation_config import read_agreement
from fczoo.sites.folders import open_server, open_site
from fczoo.sites.ledger import PrivacyLedger, default_ledger
from fczoo.sites.messages import REFUSAL, Refusal, serialize
from fczoo.sites.site import Site

BYTES = "bytes"


def write_job(out: Path, agreement_folder: Path, patience: float) -> None:
    """Write the job of a run between the sites of an agreement, for their FLARE server.

    Args:
        out: Folder of the job, which must not exist.
        agreement_folder: Folder of the agreement.
        patience: Seconds that the server waits for a site.

    Raises:
        FczooError: ``out`` exists already, or the agreement is invalid.
    """
    sites = list(read_agreement(agreement_folder).sites)
    if out.exists():
        raise FczooError(f"{out} exists already; choose another folder")
    (config := out / "app" / "config").mkdir(parents=True)
    needs = {"min_clients": len(sites), "mandatory_clients": sites, "resource_spec": {}}
    write_json(out / "meta.json", {"name": "fczoo", "deploy_map": {"app": ["@ALL"]}, **needs})
    rounds = {"id": "rounds", "path": f"{__name__}.Rounds", "args": {"patience": patience}}
    answers = {"tasks": ["*"], "executor": {"path": f"{__name__}.Answers", "args": {}}}
    server = {"server": {"task_request_interval": 0.5}, "workflows": [rounds]}  # seconds
    for name, part in (("server", server), ("client", {"executors": [answers]})):
        write_json(config / f"config_fed_{name}.json", {"format_version": 2, **part})


class Rounds(Controller):  # type: ignore[misc]
    """FLARE controller of the server; the job's log has the reason of a failure."""

    def __init__(self, patience: float):
        super().__init__()
        self.patience = int(patience)

    def start_controller(self, fl_ctx: FLContext) -> None: ...
    def stop_controller(self, fl_ctx: FLContext) -> None: ...

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """Run all rounds of the federation and write ``result.json`` into the job's run folder.

        Args:
            abort_signal: FLARE's signal, triggered when the job is stopped.
            fl_ctx: FLARE's context of the job.
        """
        folder, outcome = _folder(fl_ctx), fl_ctx.get_workspace().get_run_dir(fl_ctx.get_job_id())
        try:
            agreement = read_agreement(folder / "agreed")
            connection = partial(self._answers, agreement.sites, abort_signal, fl_ctx)
            open_server(agreement, folder / "images", connection, folder).run_to(
                Path(outcome) / "result.json"
            )
        except FczooError as error:
            self.system_panic(str(error), fl_ctx)

    def _answers(
        self,
        sites: Sequence[str],
        stop: Signal,
        fl_ctx: FLContext,
        questions: Mapping[int, bytes],
        limit: int,
        /,
    ) -> dict[int, bytes]:
        """Return the responses of sites within the time limit, without those above ``limit`` bytes.

        Sites with the same request get it at the same time. FLARE receives a response completely
        before its size is checked here.
        """
        answers: dict[int, bytes] = {}
        for question in dict.fromkeys(questions.values()):
            site_names = [
                sites[number] for number, content in questions.items() if content == question
            ]
            task = Task("answer", Shareable({BYTES: question}), timeout=self.patience)
            self.broadcast_and_wait(task, fl_ctx, site_names, len(site_names), abort_signal=stop)
            if stop.triggered:
                raise FczooError("the job has been stopped")
            finished_tasks = [
                client_task for client_task in task.client_tasks if client_task.result is not None
            ]
            answers |= {
                sites.index(client_task.client.name): _bytes(client_task.result)
                for client_task in finished_tasks
            }
        return {number: answer for number, answer in answers.items() if len(answer) <= limit}


class Answers(Executor):  # type: ignore[misc]
    """FLARE executor of a site, which answers the server's requests."""

    site: Site | None = None  # opened at the first request

    def execute(
        self, task_name: str, request: Shareable, fl_ctx: FLContext, abort_signal: Signal
    ) -> Shareable:
        """Return the site's response.

        Args:
            task_name: Name of FLARE's task; not used.
            request: Request, in ``bytes``.
            fl_ctx: FLARE's context of the job.
            abort_signal: FLARE's signal; not used.

        Returns:
            Response or refusal, in ``bytes``.
        """
        if is_log_streaming_allowed(fl_ctx):  # the log may describe private images
            return _refusal(
                "its log goes to the server; set allow_log_streaming = false in its resources.json"
            )
        try:
            if self.site is None:
                folder, name = _folder(fl_ctx), fl_ctx.get_identity_name()
                agreement = read_agreement(folder / "agreed")
                ledger = PrivacyLedger(default_ledger())
                self.site = open_site(agreement, name, folder / "images", folder / "kept", ledger)
            return Shareable({BYTES: self.site.answer(_bytes(request))})
        except FczooError:  # the error may name private files
            self.log_exception(fl_ctx, "the site cannot be opened")
            return _refusal("the site cannot be opened; see its log")


def _folder(fl_ctx: FLContext) -> Path:
    return Path(fl_ctx.get_workspace().get_root_dir()) / "fczoo"


def _refusal(reason: str) -> Shareable:
    return Shareable({BYTES: serialize(REFUSAL, Refusal(reason))})


def _bytes(shareable: Shareable) -> bytes:
    content = shareable.get(BYTES)
    return content if isinstance(content, bytes) else b""  # not a valid message
