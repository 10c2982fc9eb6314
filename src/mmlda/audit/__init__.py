"""Is the robustness real? Attacks that are blind in different ways on one network, checks, and a verdict.

profile (before any attack) -> trials (attacks) -> checks -> verdict; text, figures and records apart
"""

from mmlda.audit.record import Audit, replay
from mmlda.audit.run import audit, default_eps

__all__ = ["Audit", "audit", "default_eps", "replay"]
