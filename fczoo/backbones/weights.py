"""Weights of backbones: their files, downloads and dropped heads."""

from pathlib import Path

from fczoo.backbones.names import (
    BUNDLED_NAME,
    SUFFIXES,
    canonical_backbone,
    full_name,
    registered_backbone,
)
from fczoo.core.errors import FczooError
from fczoo.core.files import home

HUB_FILES = ("model.safetensors", "pytorch_model.bin")  # names under which timm's hub keeps weights
MEGABYTES = {"tiny": 23, "small": 88, "base": 346, "large": 1217}  # fp32, 1,000 classes or no head
MEGABYTES_IN21K = {"tiny": 39, "small": 120, "base": 410, "large": 1303}  # a head of 21,843 classes


def describe_head(name: str, outputs: int) -> str:
    """Describe the head of timm's weights, which fczoo drops; empty without one.

    Args:
        name: Name of a timm model with its tag.
        outputs: Number of outputs of the head.
    """
    if not outputs:
        return ""
    architecture, _, tag = name.partition(".")
    is_projector = "_clip_" in architecture and "_ft_" not in tag
    return (
        f"projector to {outputs:,} dimensions"
        if is_projector
        else f"classification head of {outputs:,} classes"
    )


def split_spec(spec: str) -> tuple[str, Path | None]:
    """Split a backbone's ``NAME``, ``FILE`` or ``NAME:FILE`` into name and file.

    Args:
        spec: Name, file, or both.

    Returns:
        The name, in its listed spelling if it is known, or empty; and the file, or None.

    Raises:
        FczooError: FILE does not have a suffix of weights, and is not in a folder.
    """
    spec = canonical_backbone(spec)
    if ":" in spec and "/" not in spec and not spec.endswith(SUFFIXES):
        file = spec.partition(":")[2] or "the text after the colon"
        raise FczooError(
            f"--backbone {spec} names no weight file: {file} must end with {' or '.join(SUFFIXES)}"
        )
    return split_stored_spec(spec)


def split_stored_spec(spec: str) -> tuple[str, Path | None]:
    """Split the spec of a run folder, which stores FILE without its folder, as ``split_spec`` does.

    A FILE that was read from a folder may lack a suffix of weights.

    Args:
        spec: Name, file, or both.
    """
    spec = canonical_backbone(spec)
    name, colon, file = spec.partition(":")
    if colon and (file.endswith(SUFFIXES) or "/" in file):
        return name, Path(file).expanduser()
    if spec.endswith(SUFFIXES) or "/" in spec:
        return "", Path(spec).expanduser()
    return (name, Path(file)) if colon else (spec, None)


def weights_to_download(spec: str) -> str:
    """Return the timm name of the weights that a run with this backbone must download.

    Args:
        spec: Name, file, or both.

    Returns:
        The name; empty if the weights are bundled, on this machine, or in a file.
    """
    name, path = split_spec(spec)
    if path is not None or name == BUNDLED_NAME or registered_backbone(name):
        return ""
    weights = full_name(name)
    return "" if weights_file(weights).is_file() or _is_cached(weights) else weights


def weights_file(name: str) -> Path:
    """Return the path at which ``fczoo bench --download`` stores the weights of a timm model.

    Args:
        name: Name of a timm model with its tag.
    """
    return home() / "weights" / f"{name}.safetensors"


def hub_repository(name: str) -> str:
    """Return the repository of a timm model's weights; QuickGELU is a variant of the same weights.

    Args:
        name: Name of a timm model with its tag.
    """
    return f"timm/{name.replace('_clip_quickgelu_', '_clip_')}"


def download_megabytes(name: str) -> int | None:
    """Return the approximate download size of a timm ViT, in MB; None if unknown.

    Args:
        name: Name of a timm model with its tag.
    """
    sizes, words = MEGABYTES_IN21K if name.endswith(".augreg_in21k") else MEGABYTES, name.split("_")
    return None if "plus" in words else next((sizes[w] for w in words if w in sizes), None)


def describe_missing_weights(spec: str, option: str = "") -> str:
    """Describe how to get the weights of a backbone; empty if they are on this machine.

    Args:
        spec: Name, file, or both.
        option: Option of a command that downloads them. Default: the name of the backbone, which is
            sufficient from Python.
    """
    _, path = split_spec(spec)
    if path is not None:
        return "" if path.is_file() else f"the weight file {path} does not exist"
    missing = weights_to_download(spec)
    if not missing:
        return ""
    size, short = download_megabytes(missing), missing.partition(".")[0]
    spelling = short if full_name(short) == missing else missing
    download = (
        f"{option or f'--backbone {spelling}'} downloads them{f' ({size} MB)' if size else ''}"
    )
    problem = f"the weights {missing} are not on this machine"
    return f"{problem}; {download}, or give a copy as --backbone FILE"


def _is_cached(name: str) -> bool:
    """Return whether the hub's client has the weights of a timm model in its cache."""
    from huggingface_hub import try_to_load_from_cache

    repository = hub_repository(name)
    return any(isinstance(try_to_load_from_cache(repository, file), str) for file in HUB_FILES)
