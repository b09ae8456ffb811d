"""Sites as nodes of a Flower federation: the app that its server and its nodes run.

Flower carries one array of bytes there and one back for each exchange. A node is a site by its key, which
the server has registered, so none answers for another.
"""

import logging
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fczoo.core.errors import FczooError
from fczoo.core.files import read_json, write_json
from fczoo.sites.agreement import read_agreement
from fczoo.sites.folders import open_server, open_site
from fczoo.sites.messages import REFUSAL, Refusal, written
from fczoo.sites.site import Site

log = logging.getLogger("fczoo")

BYTES = "bytes"
TRY = 60.0  # seconds after which a site that has not answered is asked once more; then twice as many


def answer(message: Message, context: Context) -> Message:
    """What this node's site answers."""
    told = context.node_config
    try:
        site = _site(str(told["agreement"]), str(told["site"]), str(told["images"]), str(told["folder"]))
        said = site.answer(_bytes(message))
    except FczooError:  # whose text may name files, which are nobody else's business
        log.exception("the site cannot be opened")
        said = written(REFUSAL, Refusal("it cannot be opened any more, see what it has logged"))
    return Message(_record(said), reply_to=message)


@cache
def _site(agreement: str, name: str, images: str, folder: str) -> Site:
    return open_site(read_agreement(Path(agreement)), name, Path(images), Path(folder))


def serve(grid: Grid, context: Context) -> None:
    """The whole run; its result, or why there is none, is in the server's folder."""
    told = context.run_config
    folder, images = Path(str(told["folder"])), Path(str(told["images"]))
    try:
        agreement = read_agreement(Path(str(told["agreement"])))
        numbers = read_json(folder / "nodes.json", "list of nodes")
        nodes = {k: int(numbers[name]) for k, name in enumerate(agreement.sites)}
        way = Nodes(grid, nodes, float(str(told["patience"])))
        open_server(agreement, images, way, folder).run_to(folder / "result.json")
    except FczooError as error:
        write_json(folder / "failed.json", {"reason": str(error)})
        raise


class Nodes:
    """The way to sites that are nodes, of which any may be gone for a while."""

    def __init__(self, grid: Grid, nodes: Mapping[int, int], patience: float):
        self.grid, self.nodes, self.patience = grid, nodes, patience

    def __call__(self, questions: Mapping[int, bytes], /) -> Mapping[int, bytes]:
        """Answers of the sites, each of which is waited for ``patience`` seconds.

        A question that comes to a site twice has the same answer, so asking again changes nothing.
        """
        answers: dict[int, bytes] = {}
        end, wait = time.monotonic() + self.patience, TRY
        while (missing := questions.keys() - answers.keys()) and (left := end - time.monotonic()) > 0:
            online = {*self.grid.get_node_ids()}
            asked = {self.nodes[k]: k for k in sorted(missing) if self.nodes[k] in online}
            if not asked:
                time.sleep(1)
                continue
            wait = min(wait, left)
            messages = [
                Message(_record(questions[k]), dst_node_id=node, message_type=MessageType.TRAIN, ttl=wait)
                for node, k in asked.items()
            ]
            for reply in self.grid.send_and_receive(messages, timeout=wait):
                if reply.has_content() and reply.metadata.src_node_id in asked:
                    answers[asked[reply.metadata.src_node_id]] = _bytes(reply)
            wait *= 2
        return answers


def _record(content: bytes) -> RecordDict:
    return RecordDict({BYTES: ArrayRecord({BYTES: Array(np.frombuffer(content, np.uint8))})})


def _bytes(message: Message) -> bytes:
    content: bytes = message.content.array_records[BYTES][BYTES].numpy().tobytes()
    return content


client, server = ClientApp(), ServerApp()
client.train()(answer)
server.main()(serve)
