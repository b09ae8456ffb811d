"""Commands ``fczoo predict``, ``evaluate``, ``export`` and ``cite``: use of stored models."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fczoo.cli.data import HF_COLUMNS, resolve_place
from fczoo.cli.message_options import print_error
from fczoo.cli.options import GroupedCommand, Name, complete
from fczoo.core.errors import FczooError
from fczoo.core.files import encode_json
from fczoo.core.registry import DATASETS, METHODS

if TYPE_CHECKING:
    from fczoo.data.partition import Partition
    from fczoo.data.stream import Stream
    from fczoo.federation.benchmark import Benchmark
    from fczoo.models.classifier import Classifier
    from fczoo.models.export_checks import ExportFormat
    from fczoo.models.predict import Prediction

MAX_CONFUSION_CLASSES = 12  # classes above which a table leaves out the confusion matrix

FOLDER = click.argument("folder", type=click.Path(path_type=Path))
FORMAT = click.option(
    "--format",
    "style",
    type=Name(["table", "csv", "json"]),
    default="table",
    show_default=True,
    help="Format of the output.",
)
BACKBONE = click.option(
    "--backbone",
    metavar="NAME|FILE",
    help="Backbone: NAME, a weight file, or NAME:FILE (NAME with weights of FILE).  "
    "[default: the run's]",
)
DEVICE = click.option(
    "--device",
    type=Name(["auto", "cpu", "cuda", "mps"]),
    default="auto",
    show_default=True,
    help="Device to compute on; auto selects cuda, else mps, else cpu.",
)


def describe_models(folders: Iterable[Path]) -> str:
    """Describe the number and size of the models in run folders; empty without any.

    Args:
        folders: Run folders.
    """
    from fczoo.models.storage import models_in

    places, size = models_in(folders)
    if not places:
        return ""
    noun = "1 model" if len(places) == 1 else f"{len(places)} models"
    return f"\n{noun}, {size / 1e6:.1f} MB; use one with: fczoo predict {places[0]} IMAGE"


@click.command(cls=GroupedCommand)
@FOLDER
@click.argument("images", nargs=-1, required=True, metavar="IMAGES...")
@click.option(
    "--top",
    type=int,
    default=5,
    show_default=True,
    help="Number of classes per image, the best first.",
)
@FORMAT
@BACKBONE
@DEVICE
def predict(
    folder: Path,
    images: tuple[str, ...],
    top: int,
    style: str,
    backbone: str | None,
    device: str,
) -> None:
    """Classify IMAGES (files, folders, patterns) with the model in FOLDER.

    FOLDER is METHOD/seedN of a run folder, or a run folder with one model. Unreadable files are
    listed on stderr; the others are classified, and the exit code is not zero.
    """
    from fczoo.models.predict import Prediction, find_images, predict_files

    files = find_images(images)
    model = _load(folder, backbone, device)
    value = "probability" if model.method.training().gives_logits else "score"
    results = list(predict_files(model, files, top))
    predictions = [result for result in results if isinstance(result, Prediction)]
    if predictions:
        click.echo(_predictions(predictions, value, style), nl=style != "csv")
    errors = [result for result in results if not isinstance(result, Prediction)]
    for error in errors:
        print_error(str(error))
    if errors:
        click.get_current_context().exit(FczooError.exit_code)


def _load(folder: Path, backbone: str | None, device: str) -> "Classifier":
    from fczoo.federation.device import pick_device
    from fczoo.models.storage import load_model

    return load_model(folder, backbone=backbone, device=pick_device(device))


def _predictions(predictions: Sequence["Prediction"], value: str, style: str) -> str:
    if style == "json":
        return encode_json(
            [
                {
                    "file": p.file,
                    "classes": [
                        {"class": name, value: number}
                        for name, number in zip(p.classes, p.values, strict=True)
                    ],
                }
                for p in predictions
            ],
            indent=1,
        )
    rows: list[tuple[Any, ...]] = [
        (p.file if style == "csv" or rank == 1 else "", rank, name, number)
        for p in predictions
        for rank, (name, number) in enumerate(zip(p.classes, p.values, strict=True), 1)
    ]
    return _rows(rows, ["file", "rank", "class", value], style, ".3f")


def _rows(rows: Sequence[Sequence[Any]], head: Sequence[str], style: str, number: str) -> str:
    """Format rows as a table or as CSV, where numbers keep all digits."""
    if style == "csv":
        from fczoo.core.files import to_csv_text

        return to_csv_text([head, *rows])
    from tabulate import tabulate

    cells = [[format(c, number) if isinstance(c, float) else c for c in row] for row in rows]
    return tabulate(cells, head, disable_numparse=True)


@click.command(cls=GroupedCommand)
@FOLDER
@click.option(
    "--data-root",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Folder of labelled images with one folder per class; with --dataset, the folder that "
    "contains the data set.  [default: the data of the run]",
)
@click.option(
    "--dataset",
    metavar="NAME",
    shell_complete=complete(DATASETS),
    help="Data set whose test images are used; see `fczoo list datasets`.  [default: that of the "
    "run]",
)
@HF_COLUMNS
@FORMAT
@BACKBONE
@DEVICE
def evaluate(
    folder: Path,
    data_root: Path | None,
    dataset: str | None,
    hf_columns: str | None,
    style: str,
    backbone: str | None,
    device: str,
) -> None:
    """Evaluate the model in FOLDER.

    By default it evaluates again on the run's test images. --data-root or --dataset give other
    images, whose class names must be classes of the model.
    """
    if hf_columns is not None and dataset is None:
        raise FczooError("--hf-columns needs --dataset hf:PLACE; add it, or leave --hf-columns out")
    model = _load(folder, backbone, device)
    if dataset is not None:
        dataset, data_root = resolve_place(dataset, data_root, hf_columns)
    is_bundled = dataset is not None and not (
        DATASETS.get(dataset).source or DATASETS.get(dataset).folder
    )
    if data_root is not None and is_bundled:
        raise FczooError(
            f"{dataset} needs no data folder, so --data-root {data_root} has no effect; leave one "
            "of them out"
        )
    if data_root is None and dataset is None:
        click.echo(_repeat_evaluation(folder, model, style, backbone, device), nl=style != "csv")
        return
    from fczoo.models.predict import evaluate as evaluate_images
    from fczoo.models.predict import labelled_images

    result = evaluate_images(model, *labelled_images(model, dataset, data_root))
    if style == "json":
        click.echo(encode_json(result.plain(), indent=1))
        return
    is_wide = style == "table" and len(model.classes) > MAX_CONFUSION_CLASSES
    columns = () if is_wide else model.classes
    rows = [
        (name, accuracy, count, *result.confusion[model.classes.index(name)][: len(columns)])
        for name, (accuracy, count) in result.per_class.items()
    ]
    table = _rows(
        rows, ["class", "accuracy", "images", *(f"as {c}" for c in columns)], style, ".1f"
    )
    if style == "csv":
        click.echo(table, nl=False)
        return
    ece = "not defined for scores" if result.ece is None else f"{result.ece:.1f}"
    click.echo(f"accuracy {result.accuracy:.1f} on {result.images} images; ECE {ece}\n\n{table}")
    if is_wide:
        click.echo("\nTo print the confusion matrix: --format csv or json.")


def benchmark_of_run(
    folder: Path, model: "Classifier", backbone: str | None = None, device: str = "auto"
) -> "Benchmark":
    """Open the benchmark of a model's run, with its data and test images.

    Args:
        folder: Folder of the model, or a folder above it.
        model: The model.
        backbone: Weights of the backbone; None: those of the run.
        device: Device to compute on.
    """
    from fczoo.core.errors import silence_warnings
    from fczoo.core.options import build, flag
    from fczoo.federation.benchmark import Benchmark
    from fczoo.federation.data_setup import open_stream
    from fczoo.federation.model_record import find_model, settings_with_local_paths
    from fczoo.federation.settings import Settings

    def open_quietly(settings: Settings) -> "tuple[Stream, Partition]":
        with silence_warnings():  # the run has printed the warnings of its data and partition
            return open_stream(settings)

    values = {**settings_with_local_paths(find_model(folder), model.record), "device": device}
    values["backbone"] = backbone or values["backbone"]
    return Benchmark.open(build(Settings, "bench", values, flag), open_quietly)


def _repeat_evaluation(
    folder: Path, model: "Classifier", style: str, backbone: str | None, device: str
) -> str:
    """Repeat the last evaluation of a run on its data and test images."""
    from fczoo.models.predict import repeat_evaluation

    accuracy, row = repeat_evaluation(model, benchmark_of_run(folder, model, backbone, device))
    run_accuracy = model.record.metrics["A_N"]
    if style == "json":
        return encode_json(
            {"A_N": accuracy, "A_N of the run": run_accuracy, "accuracy": row}, indent=1
        )
    counts = model.record.test_counts
    rows = [(f"task {i + 1}", a, n) for i, (a, n) in enumerate(zip(row, counts, strict=True))]
    table = _rows(rows, ["task", "accuracy", "images"], style, ".1f")
    if style == "csv":
        return table
    same = "as in the run" if accuracy == run_accuracy else f"{run_accuracy} in the run"
    return f"A_N {accuracy} ({same})\n\n{table}"


@click.command(cls=GroupedCommand)
@FOLDER
@click.option(
    "--format",
    "style",
    type=Name(["timm", "torch", "onnx", "peft"]),
    required=True,
    help="timm: backbone weights with the trained tensors merged in, for timm.create_model. "
    "torch: a program of torch.export, for every method. onnx: for ONNX Runtime, if "
    "torch.onnx can translate the method. peft: "
    "LoRA pairs and head, in a folder.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="File to write; it must not exist.  [default: a file in FOLDER]",
)
@BACKBONE
def export(folder: Path, style: "ExportFormat", out: Path | None, backbone: str | None) -> None:
    """Export the model in FOLDER to a format of another library.

    The logits of the export are compared with the model's before it is written. If a format cannot
    express the method, the error gives the reason.
    """
    from fczoo.federation.model_record import find_model
    from fczoo.models.export import default_path, export_model
    from fczoo.models.export_checks import check_path

    path = out or default_path(find_model(folder), style)
    check_path(path, style)
    model = _load(folder, backbone, "cpu")
    code = export_model(model, style, path)
    config = model.backbone.config
    click.echo(
        f"{path}: {model.method.name} on {model.record.dataset}, {len(model.classes)} classes\n\n"
        f"{code}\n\nInput: images [B, 3, {config.image_size}, {config.image_size}] with mean "
        f"{config.mean} and std {config.std}.\nOutput: logits in the order of the classes in its "
        "metadata."
    )


@click.command(cls=GroupedCommand)
@click.argument(
    "methods", nargs=-1, required=True, metavar="METHODS...", shell_complete=complete(METHODS)
)
@click.option(
    "--format",
    "style",
    type=Name(["bibtex", "text"]),
    default="bibtex",
    show_default=True,
    help="BibTeX entries, or one line per work.",
)
def cite(methods: tuple[str, ...], style: str) -> None:
    """Print references of METHODS and of fczoo.

    METHODS are names of methods, separated by commas or spaces.
    """
    from fczoo.models.card import bibtex, references

    names = [name.strip() for word in methods for name in word.split(",")]
    if not all(names):
        raise FczooError("METHODS has an empty entry; remove it and its comma")
    write = bibtex if style == "bibtex" else references
    click.echo(write([METHODS.canonical_name(name) for name in names]))
