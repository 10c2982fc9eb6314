"""Is the robustness real? Attacks of many kinds on one network, and a verdict."""

from mmlda.audit.verdict import audit, default_eps

__all__ = ["audit", "default_eps"]
