"""Compute where rounds on many workers stop scaling, from costs measured on few.

    python benchmarks/simulate.py --client-seconds 5 --download-mb 22 --upload-mb 22 --merge-ms 30

A round as ``--cluster spread=clients`` has it: each worker gets the broadcast over the server's one
link, then takes the next client as soon as it is free; uploads come back over the same link, one
after another. The server hands out clients, and reads and merges uploads, one after another while
others still train. Clients are not equally fast: ``--spread`` is the standard deviation of the
logarithm of their seconds.

Measure the costs with ``scale.py round`` (seconds per round) and ``fczoo show METHOD`` (bytes per
client).
"""

import heapq
import itertools

import click
import numpy as np
from tabulate import tabulate


def parse_numbers(_: click.Context, __: click.Parameter, value: str) -> list[int]:
    """Return the numbers of a comma-separated list."""
    return [int(number) for number in value.split(",")]


@click.command(context_settings={"show_default": True})
@click.option("--workers", default="8,64,512", callback=parse_numbers)
@click.option(
    "--clients", default="10,100,1000,10000", callback=parse_numbers, help="Clients of a round."
)
@click.option("--client-seconds", default=5.0, help="Median time that a client trains.")
@click.option("--spread", default=0.2, help="Spread of clients' times, see above.")
@click.option("--download-mb", default=1.0, help="Size of the broadcast to a worker.")
@click.option("--upload-mb", default=1.0, help="Size of a client's upload.")
@click.option("--link-mb-s", default=1000.0, help="Rate of the server's link, MB/s.")
@click.option("--merge-ms", default=5.0, help="Time of the server to read and add one upload.")
@click.option(
    "--dispatch-ms", default=20.0, help="Time of the server to hand one client to a worker."
)
def main(workers: list[int], clients: list[int], **costs: float) -> None:
    """Print seconds and speed-up of one round, and its bottleneck."""
    rows = []
    for number in clients:
        for count in workers:
            seconds, single_seconds, busy = one_round(number, count, **costs)
            most = max(busy, key=lambda name: busy[name])
            shares = [f"{100 * part / seconds:.0f}" for part in busy.values()]
            rows.append(
                [number, count, f"{seconds:.1f}", f"{single_seconds / seconds:.1f}", *shares, most]
            )
    head = [
        "clients",
        "workers",
        "seconds",
        "speed-up",
        "workers busy, %",
        "link busy, %",
        "server busy, %",
    ]
    print(tabulate(rows, [*head, "busiest"], disable_numparse=True))


def one_round(
    clients: int,
    workers: int,
    *,
    client_seconds: float,
    spread: float,
    download_mb: float,
    upload_mb: float,
    link_mb_s: float,
    merge_ms: float,
    dispatch_ms: float,
) -> tuple[float, float, dict[str, float]]:
    """Return seconds of a round, seconds of one process, and the busy time of each part."""
    training_seconds = client_seconds * np.exp(
        spread * np.random.default_rng(0).standard_normal(clients)
    )
    waiting = iter(training_seconds.tolist())
    down, up, active_workers = download_mb / link_mb_s, upload_mb / link_mb_s, min(workers, clients)
    link, server, order = active_workers * down, 0.0, itertools.count()
    events = [((worker + 1) * down, next(order), "free") for worker in range(active_workers)]
    while events:
        time, _, event = heapq.heappop(events)
        if event == "trained":
            link = max(link, time) + up
            heapq.heappush(events, (link, next(order), "arrived"))
            event = "free"
        if event == "arrived":
            server = max(server, time) + merge_ms / 1000
        elif (seconds := next(waiting, None)) is not None:
            server = max(server, time) + dispatch_ms / 1000
            heapq.heappush(events, (server + seconds, next(order), "trained"))
    busy = {
        "workers": float(training_seconds.sum()) / active_workers,
        "link": active_workers * down + clients * up,
        "server": clients * (dispatch_ms + merge_ms) / 1000,
    }
    return server, float(training_seconds.sum()), busy


if __name__ == "__main__":
    main()
