"""fczoo: a benchmark zoo for Federated Class-Incremental Learning on pre-trained vision transformers."""

import lazy_loader

__version__ = "0.2.0.dev0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(
    __name__, __file__
)  # imports each name when it is first used
