"""Names, files and sizes of a backbone's weights, and whether a download is needed."""

from pathlib import Path

from fczoo.backbones.names import BUNDLED_NAME, canonical_backbone, full_name

SUFFIXES = (".safetensors", ".npz", ".pth", ".bin", ".pt", ".ckpt", ".tar")
HUB_FILES = ("model.safetensors", "pytorch_model.bin")  # names under which timm's hub keeps weights
MEGABYTES = {"tiny": 23, "small": 88, "base": 346, "large": 1217}  # fp32, 1,000 classes or no head
MEGABYTES_IN21K = {"tiny": 39, "small": 120, "base": 410, "large": 1303}  # a head of 21,843 classes


def split_spec(spec: str) -> tuple[str, Path | None]:
    """Split a backbone's ``NAME``, ``FILE`` or ``NAME:FILE`` into name and file.

    A known name is returned in the spelling of its list.
    """
    spec = canonical_backbone(spec)
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
    if path is not None or name == BUNDLED_NAME:
        return ""
    tagged = full_name(name)
    return "" if _in_cache(tagged) else tagged


def download_megabytes(name: str) -> int | None:
    """Return about how large the download of a timm ViT with its tag is, in MB; None if unknown."""
    sizes = MEGABYTES_IN21K if name.endswith(".augreg_in21k") else MEGABYTES
    return next((size for width, size in sizes.items() if width in name.split("_")), None)


def weights_needed(spec: str) -> str:
    """Say how to get the weights of a backbone; empty where they are on this machine."""
    _, path = split_spec(spec)
    if path is not None:
        return "" if path.is_file() else f"there is no weight file at {path} either"
    missing = weights_to_download(spec)
    if not missing:
        return ""
    size, short = download_megabytes(missing), missing.partition(".")[0]
    asked = short if full_name(short) == missing else missing
    download = f"--backbone {asked} downloads them{f' ({size} MB)' if size else ''}"
    return f"the weights {missing} are not on this machine; {download}, --backbone FILE reads a copy"


def _in_cache(name: str) -> bool:
    """Return whether the hub's client has the weights of a timm model in its cache."""
    from huggingface_hub import try_to_load_from_cache

    return any(isinstance(try_to_load_from_cache(f"timm/{name}", file), str) for file in HUB_FILES)
