"""Which weights a backbone needs, and whether they are on this machine."""

from pathlib import Path

from fczoo.backbones.names import BUNDLED_NAME, full_name

SUFFIXES = (".safetensors", ".npz", ".pth", ".bin")
HUB_FILES = ("model.safetensors", "pytorch_model.bin")  # names under which timm's hub keeps weights
MEGABYTES = {"tiny": 23, "small": 88, "base": 346, "large": 1217}  # downloads of timm's ViTs, fp32


def split_spec(spec: str) -> tuple[str, Path | None]:
    """Split a backbone's ``NAME``, ``FILE`` or ``NAME:FILE`` into name and file."""
    name, colon, file = spec.partition(":")
    if colon and (file.endswith(SUFFIXES) or "/" in file):
        return name, Path(file).expanduser()
    if spec.endswith(SUFFIXES) or "/" in spec:
        return "", Path(spec).expanduser()
    return spec, None


def weights_to_download(spec: str) -> str:
    """Return the timm name of the weights that a run with this backbone must download.

    Empty where nothing has to be downloaded: the weights are bundled, on this machine, or in a file.
    """
    name, path = split_spec(spec)
    if path is not None or name == BUNDLED_NAME or _cached(full_name(name)):
        return ""
    return full_name(name)


def download_megabytes(name: str) -> int | None:
    """Return the size of the download of a timm ViT in MB; None where its name does not tell it."""
    return next((size for word, size in MEGABYTES.items() if word in name.split("_")), None)


def weights_needed(spec: str) -> str:
    """Say how to get the weights of a backbone; empty where they are on this machine."""
    name, path = split_spec(spec)
    if path is not None:
        return "" if path.is_file() else f"there is no weight file at {path} either"
    if not weights_to_download(spec):
        return ""
    size = download_megabytes(name)
    download = f"its backbone {name} comes from timm's hub{f' ({size} MB)' if size else ''}"
    return f"{download} as the run starts, or from a file: --backbone {name}:FILE.safetensors"


def _cached(name: str) -> bool:
    """Whether the hub's client has kept the weights of a timm model."""
    from huggingface_hub import try_to_load_from_cache

    return any(isinstance(try_to_load_from_cache(f"timm/{name}", file), str) for file in HUB_FILES)
