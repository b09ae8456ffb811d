"""Sites as clients of NVIDIA FLARE: what a job of its runs at the server and at each client.

A job is three JSON files that name two classes of this module; no code travels. Each way goes one ``bytes``
value: FLARE packs it by FOBS, msgpack with a fixed list of types and no pickle; anything else is no answer. A
client is a site by the name in its certificate. In its FLARE workspace each has a folder ``fczoo`` with
``agreed`` (the three files), ``images`` and what it keeps.
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
from fczoo.sites.agreement import read_agreement
from fczoo.sites.folders import open_server, open_site
from fczoo.sites.messages import REFUSAL, Refusal, written
from fczoo.sites.site import Site

BYTES = "bytes"


def write_job(out: Path, agreed: Path, patience: float) -> None:
    """Write the job of a run between the sites of an agreement, to be submitted to their FLARE server.

    Raises FczooError where ``out`` exists already, and for whatever is wrong with the agreement.
    """
    sites = list(read_agreement(agreed).sites)
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
    """The server's end. Its result is a file of the job; why there is none, the job's log says."""

    def __init__(self, patience: float):
        super().__init__()
        self.patience = int(patience)

    def start_controller(self, fl_ctx: FLContext) -> None: ...
    def stop_controller(self, fl_ctx: FLContext) -> None: ...

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """The whole run."""
        folder, outcome = _folder(fl_ctx), fl_ctx.get_workspace().get_run_dir(fl_ctx.get_job_id())
        try:
            agreement = read_agreement(folder / "agreed")
            way = partial(self._answers, agreement.sites, abort_signal, fl_ctx)
            open_server(agreement, folder / "images", way, folder).run_to(Path(outcome) / "result.json")
        except FczooError as error:
            self.system_panic(str(error), fl_ctx)

    def _answers(
        self, sites: Sequence[str], stop: Signal, fl_ctx: FLContext, questions: Mapping[int, bytes], /
    ) -> dict[int, bytes]:
        """What sites answer within the time; those that are asked the same are asked at once."""
        answers: dict[int, bytes] = {}
        for question in dict.fromkeys(questions.values()):
            asked = [sites[number] for number, content in questions.items() if content == question]
            task = Task("answer", Shareable({BYTES: question}), timeout=self.patience)
            self.broadcast_and_wait(task, fl_ctx, asked, len(asked), abort_signal=stop)
            if stop.triggered:
                raise FczooError("the job has been stopped")
            done = [sent for sent in task.client_tasks if sent.result is not None]
            answers |= {sites.index(sent.client.name): _bytes(sent.result) for sent in done}
        return answers


class Answers(Executor):  # type: ignore[misc]
    """A site's end."""

    site: Site | None = None  # opened as it is first asked

    def execute(self, task_name: str, asked: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """What the site answers."""
        if is_log_streaming_allowed(fl_ctx):  # and a log may say something of images
            return _refusal(
                "its log goes to the server; say allow_log_streaming = false in its resources.json"
            )
        try:
            if self.site is None:
                folder, name = _folder(fl_ctx), fl_ctx.get_identity_name()
                agreement = read_agreement(folder / "agreed")
                self.site = open_site(agreement, name, folder / "images", folder / "kept")
            return Shareable({BYTES: self.site.answer(_bytes(asked))})
        except FczooError:  # whose text may name files, which are nobody else's business
            self.log_exception(fl_ctx, "the site cannot be opened")
            return _refusal("it cannot be opened, see what it has logged")


def _folder(fl_ctx: FLContext) -> Path:
    return Path(fl_ctx.get_workspace().get_root_dir()) / "fczoo"


def _refusal(reason: str) -> Shareable:
    return Shareable({BYTES: written(REFUSAL, Refusal(reason))})


def _bytes(shareable: Shareable) -> bytes:
    content = shareable.get(BYTES)
    return content if isinstance(content, bytes) else b""  # which is no message
