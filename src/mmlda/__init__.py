"""Max-Mahalanobis LDA networks."""

from mmlda._version import __version__

__all__ = ["__version__"]
