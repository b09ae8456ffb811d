"""Find, offer and download data sets and weights that runs need."""

import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from fczoo.cli.options import OUTPUT, Command, grouped_option
from fczoo.core.errors import FczooError, InterruptedCommandError, first_line
from fczoo.core.files import home
from fczoo.core.registry import DATASETS
from fczoo.core.terminal import is_terminal
from fczoo.data.dataset import Archive, Dataset
from fczoo.federation.settings import Settings


@dataclass(frozen=True)
class MissingDownload:
    """Data set or weights that runs need and that are not on this machine.

    Attributes:
        name: Name in the question to the user.
        problem: Description in one line.
        download: Function that downloads it. None: the user must obtain it, see ``problem``.
        size: Function that returns the size in bytes, or None if it is unknown; it may send a
            request to a server.
        advice: Alternative to a download.
    """

    name: str
    problem: str
    download: Callable[[], object] | None = None
    size: Callable[[], int | None] = lambda: None
    advice: str = ""


def download_options() -> Callable[[Command], Command]:
    """Return the decorator that adds ``--download`` and ``--no-download``."""
    return grouped_option(
        OUTPUT,
        "--download/--no-download",
        default=None,
        help="Download missing data sets and weights without asking, or never  "
        "[default: ask on a terminal, else never]",
    )


def find_missing(settings: Iterable[Settings]) -> list[MissingDownload]:
    """Find the data sets and weights that some runs need and that are not on this machine.

    Args:
        settings: Settings of the runs.

    Raises:
        FczooError: A backbone does not exist.
    """
    from fczoo.backbones.timm_vit import architecture
    from fczoo.backbones.weights import weights_to_download

    settings_list = list(settings)
    weights = {name: s for s in settings_list if (name := weights_to_download(s.backbone))}
    data = [
        _missing_data(DATASETS.get(name)(), root)
        for name, root in {(s.dataset, s.root) for s in settings_list}
    ]
    for name in weights:
        architecture(name)  # an unknown name is an error, not a download
    return [*filter(None, data), *(_missing_weights(name, s) for name, s in weights.items())]


def provide(missing: Sequence[MissingDownload], consent: bool | None) -> None:
    """Download missing data sets and weights if the user agrees to one question on a terminal.

    Args:
        missing: Data sets and weights.
        consent: Answer to the question. None: ask on a terminal, otherwise no.

    Raises:
        FczooError: The user must obtain something or did not agree, or a download failed or was
            interrupted; the downloaded part remains.
    """
    if not missing:
        return
    files = [item for item in missing if item.download]
    complete = len(files) == len(missing)
    if complete and consent is None and is_terminal(sys.stdin) and is_terminal(sys.stderr):
        consent = _ask(f"Not on this machine: {_sizes(files)}. Download?")
    if not complete or not consent:
        problem = "; ".join(item.problem for item in missing)
        advice = "".join(f", or {item.advice}" for item in files if item.advice)
        names = " and ".join(item.name for item in files)
        raise FczooError(
            f"{problem}; add --download to fetch {names}{advice}" if files else problem
        )
    for item in files:
        assert item.download
        try:
            item.download()
        except KeyboardInterrupt as error:
            problem = f"the download of {item.name} was interrupted"
            raise InterruptedCommandError(
                f"{problem}; the same command resumes it", signal.SIGINT
            ) from error


def download_weights(name: str) -> Path:
    """Download the weights of a timm model from its hub into ``FCZOO_HOME``.

    An interrupted download resumes. The file is checked against the hub's SHA-256. ``HF_ENDPOINT``
    replaces the hub's address.

    Args:
        name: Name of the model.

    Returns:
        The file.

    Raises:
        FczooError: The download fails.
    """
    from filelock import FileLock, Timeout

    from fczoo.backbones.weights import weights_file
    from fczoo.data.fetch import download

    file = weights_file(name)
    part = file.with_name(f"{file.name}.part")
    archive = _published_weights(name)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{part}.lock", timeout=0):
            download(archive.url, part, archive, advice=_other_weights(name))
            part.replace(file)
    except Timeout as error:
        raise FczooError(f"another download of {name} is running; wait for it") from error
    except OSError as error:
        raise FczooError(f"cannot write {error.filename or part}: {error.strerror}") from error
    click.echo(f"the weights {name} are in {file}", err=True)
    return file


def _published_weights(name: str) -> Archive:
    """Fetch address, size and SHA-256 of the weights of a timm model from its hub.

    Raises FczooError if the hub does not answer.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError

    from fczoo.backbones.weights import hub_repository

    repository = hub_repository(name)
    url = hf_hub_url(repository, "model.safetensors")
    try:
        about = get_hf_file_metadata(url)
    except EntryNotFoundError as error:
        problem = f"{repository} at {constants.ENDPOINT} has no model.safetensors"
        raise FczooError(f"{problem}; {_other_weights(name)}") from error
    except Exception as error:  # the hub's client raises errors of several libraries
        problem = f"the download of the weights {name} failed: {first_line(error)}"
        raise FczooError(f"{problem}; run the command again, or {_other_weights(name)}") from error
    digest = about.etag or ""
    return Archive(url, size=about.size, sha256=digest if len(digest) == 64 else "")


def _missing_data(dataset: Dataset, root: Path | None) -> MissingDownload | None:
    """Return a data set that is missing below ``root``; None if it is there or in a package."""
    from fczoo.data.fetch import download_bytes, fetch

    data_root = root or home() / "data"
    if not dataset.folder:
        return None
    try:
        dataset.locate(data_root)
    except FczooError as error:
        if not dataset.can_download:
            return MissingDownload(dataset.name, str(error))
        parts = Path(dataset.folder).parts
        if data_root.name == parts[-1]:  # the user may give the data set's own folder
            data_root = data_root.parents[len(parts) - 1]
        return MissingDownload(
            dataset.name,
            str(error),
            lambda: click.echo(fetch(dataset.name, data_root), err=True),
            lambda: download_bytes(dataset),
        )
    return None


def _missing_weights(name: str, settings: Settings) -> MissingDownload:
    """Return the missing weights of a timm model, for runs with some settings."""
    from huggingface_hub import constants

    from fczoo.backbones.weights import download_megabytes
    from fczoo.federation.benchmark import replaced_backbone

    replacement_note = replaced_backbone(settings)
    problem = (
        f"{f'{replacement_note}; ' if replacement_note else ''}the weights {name} are not on "
        "this machine"
    )
    label, advice = f"weights {name}", _other_weights(name)
    if constants.HF_HUB_OFFLINE:
        return MissingDownload(label, f"{problem} and HF_HUB_OFFLINE is set; unset it, or {advice}")
    megabytes = download_megabytes(name)
    size = None if megabytes is None else megabytes * 10**6
    return MissingDownload(label, problem, lambda: download_weights(name), lambda: size, advice)


def _other_weights(name: str) -> str:
    return f"give a file: --backbone {name}:FILE"


def _sizes(missing: Sequence[MissingDownload]) -> str:
    """Format names with sizes and, if all sizes are known, their sum."""
    sizes = [item.size() for item in missing]
    words = ", ".join(
        f"{item.name} ({_size(size)})" for item, size in zip(missing, sizes, strict=True)
    )
    known_sizes = [size for size in sizes if size is not None]
    return (
        f"{words}, {_size(sum(known_sizes))} in all"
        if 1 < len(sizes) == len(known_sizes)
        else words
    )


def _size(count: int | None) -> str:
    return "size unknown" if count is None else f"{max(1, round(count / 1e6)):,} MB"


def _ask(question: str) -> bool:
    try:
        return click.confirm(question, default=True, err=True)
    except click.Abort as error:
        raise InterruptedCommandError(
            "interrupted; nothing was downloaded", signal.SIGINT
        ) from error
