"""Trivium: the whole Kimi K3 system as one Python package. Names are loaded when they are first used."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trivium.api import Model, load
    from trivium.config import K3Config
    from trivium.model.trace import trace

__version__ = "0.1.0"
__all__ = ["K3Config", "Model", "__version__", "load", "trace"]

_HOME = {"K3Config": "trivium.config", "Model": "trivium.api", "load": "trivium.api", "trace": "trivium.model.trace"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'trivium' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
