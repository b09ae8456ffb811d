"""Sites as nodes of a Flower federation: the app of its server and its nodes.

Flower carries one array of bytes in each direction per exchange. The server has registered the key
of each site's node, so no node can respond in another site's name.
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
from fczoo.sites.federation_config import read_agreement
from fczoo.sites.folders import open_server, open_site
from fczoo.sites.messages import REFUSAL, Refusal, serialize
from fczoo.sites.site import Site

log = logging.getLogger("fczoo")

BYTES = "bytes"
TRY = 60.0  # seconds until a site without a response is asked again; doubled after each try


def answer(message: Message, context: Context) -> Message:
    """Return the response of this node's site.

    Args:
        message: Flower's message with the request.
        context: Flower's context, whose ``node_config`` has the site's name and folders.

    Returns:
        Reply with the response, or with a refusal if the site cannot be opened.
    """
    config = context.node_config
    try:
        site = _site(
            str(config["agreement"]),
            str(config["site"]),
            str(config["images"]),
            str(config["folder"]),
        )
        response = site.answer(_bytes(message))
    except FczooError:  # its text may name private files
        log.exception("the site cannot be opened")
        response = serialize(
            REFUSAL, Refusal("it cannot be opened any more; its log has the reason")
        )
    return Message(_record(response), reply_to=message)


@cache
def _site(agreement: str, name: str, images: str, folder: str) -> Site:
    return open_site(read_agreement(Path(agreement)), name, Path(images), Path(folder))


def serve(grid: Grid, context: Context) -> None:
    """Run all rounds; the server's folder gets the result or the reason of a failure.

    Args:
        grid: Flower's connection to the nodes.
        context: Flower's context, whose ``run_config`` has folders and patience.

    Raises:
        FczooError: The run failed.
    """
    config = context.run_config
    folder, images = Path(str(config["folder"])), Path(str(config["images"]))
    try:
        agreement = read_agreement(Path(str(config["agreement"])))
        numbers = read_json(folder / "nodes.json", "list of nodes")
        nodes = {k: int(numbers[name]) for k, name in enumerate(agreement.sites)}
        way = Nodes(grid, nodes, float(str(config["patience"])))
        open_server(agreement, images, way, folder).run_to(folder / "result.json")
    except FczooError as error:
        write_json(folder / "failed.json", {"reason": str(error)})
        raise


class Nodes:
    """Connection to sites that are nodes and may be offline for a while."""

    def __init__(self, grid: Grid, nodes: Mapping[int, int], patience: float):
        self.grid, self.nodes, self.patience = grid, nodes, patience

    def __call__(self, questions: Mapping[int, bytes], /) -> Mapping[int, bytes]:
        """Return the responses of the sites; wait ``patience`` seconds for each.

        A site answers a repeated question in the same way, so asking again changes nothing.

        Args:
            questions: Request by number of the site.

        Returns:
            Response by number of the site, without sites that did not respond.
        """
        answers: dict[int, bytes] = {}
        end, wait = time.monotonic() + self.patience, TRY
        while (missing := questions.keys() - answers.keys()) and (
            seconds_left := end - time.monotonic()
        ) > 0:
            online = {*self.grid.get_node_ids()}
            sites_by_node = {self.nodes[k]: k for k in sorted(missing) if self.nodes[k] in online}
            if not sites_by_node:
                time.sleep(1)
                continue
            wait = min(wait, seconds_left)
            messages = [
                Message(
                    _record(questions[k]),
                    dst_node_id=node,
                    message_type=MessageType.TRAIN,
                    ttl=wait,
                )
                for node, k in sites_by_node.items()
            ]
            for reply in self.grid.send_and_receive(messages, timeout=wait):
                if reply.has_content() and reply.metadata.src_node_id in sites_by_node:
                    answers[sites_by_node[reply.metadata.src_node_id]] = _bytes(reply)
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
