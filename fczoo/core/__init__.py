"""The contract between methods, data sets, partitioners, aggregators and the engine."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
