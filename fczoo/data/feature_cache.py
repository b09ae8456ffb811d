"""Frozen features on disk: one file per part of a data set, which later processes load.

The name of a file is a hash of everything that the features depend on: pixels, view, weights,
precision, and the machine, which affects the last bits. A file is written under another name and
moved into place, so that a reader finds a complete file or none. It holds a checksum; features of
a damaged or foreign file are computed again.
"""

import hashlib
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fczoo.core.files import encode_json, home
from fczoo.core.tree import sha256_of

log = logging.getLogger("fczoo")

FORMAT = "fczoo-features-2"
MAX_CACHE_BYTES = 4 << 30  # bytes of all files together; those unused for longest are removed
HASH_BLOCK = 1 << 26  # bytes of pixels that are hashed at once


class FeatureFile:
    """File of the features that belong to ``key``, the plain values on which they depend.

    ``cache`` replaces the user's cache folder.
    """

    def __init__(self, key: Mapping[str, Any], cache: Path | None = None):
        """Set the path of the file by its key.

        Args:
            key: Plain values on which the features depend.
            cache: Cache folder. Default: the user's.
        """
        self.key = encode_json({"format": FORMAT, **key}, sort_keys=True)
        name = hashlib.sha256(self.key.encode()).hexdigest()[:32]
        self.path = (cache or home() / "cache") / "features" / f"{name}.safetensors"

    def load(self) -> Tensor | None:
        """Load the features [N, D], or None if they are not cached.

        Warns about a damaged file.
        """
        try:
            with safe_open(self.path, "pt") as file:
                metadata = file.metadata() or {}
                features: Tensor = file.get_tensor("features").clone()
            is_valid = metadata == self._metadata(features)
        except FileNotFoundError:
            return None
        except (SafetensorError, OSError, RuntimeError, ValueError):
            is_valid = False
        if not is_valid:
            log.warning(
                "%s is damaged or was not written by fczoo; computing its features again", self.path
            )
            return None
        _touch(self.path)
        return features

    def save(self, features: Tensor) -> None:
        """Store features of at most ``MAX_CACHE_BYTES``; warn if the disk does not accept them.

        Args:
            features: Features [N, D].
        """
        features = features.detach().cpu().contiguous()
        if features.nbytes > MAX_CACHE_BYTES:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle, draft = tempfile.mkstemp(dir=self.path.parent, suffix=".tmp")
            try:
                with open(handle, "wb") as file:
                    file.write(save({"features": features}, self._metadata(features)))
                os.replace(draft, self.path)
            finally:
                Path(draft).unlink(missing_ok=True)
            _make_room(self.path.parent)
        except OSError as error:
            advice = "set FCZOO_HOME to a writable folder"
            log.warning(
                "cannot cache features in %s: %s; %s", self.path.parent, error.strerror, advice
            )

    def _metadata(self, features: Tensor) -> dict[str, str]:
        return {"key": self.key, "sha256": sha256_of({"features": features})}


def pixels_sha256(pixels: np.ndarray) -> str:
    """Hash images and their shape; a data set on disk need not fit into memory.

    Args:
        pixels: uint8 [N, S, S, 3].
    """
    digest = hashlib.sha256(f"{pixels.shape}".encode())
    step = max(1, HASH_BLOCK // max(1, pixels[:1].nbytes))
    for start in range(0, len(pixels), step):
        digest.update(np.ascontiguousarray(pixels[start : start + step]).data)
    return digest.hexdigest()


def _make_room(folder: Path) -> None:
    """Remove the least recently used files until the others have at most ``MAX_CACHE_BYTES``.

    Other processes may do so at the same time.
    """
    files = []
    for file in folder.glob("*.safetensors"):
        try:
            files.append((file.stat().st_mtime_ns, file.stat().st_size, file))
        except FileNotFoundError:
            continue
    total_bytes = 0
    for _, size, file in sorted(files, reverse=True):
        total_bytes += size
        if total_bytes > MAX_CACHE_BYTES:
            file.unlink(missing_ok=True)


def _touch(file: Path) -> None:
    try:
        os.utime(file)
    except OSError:  # someone else's folder, or just removed
        return
