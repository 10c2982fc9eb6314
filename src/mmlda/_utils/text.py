"""Numbers as text."""

from __future__ import annotations


def eps_text(eps: float, digits: int = 6) -> str:
    """A perturbation as people write it: a short decimal, else a fraction of 255 if it is one.

    >>> eps_text(8 / 255), eps_text(0.1), eps_text(51 / 255), eps_text(0.0313725)
    ('8/255', '0.1', '0.2', '0.0313725')
    """
    short, levels = f"{eps:.{digits}g}", round(255 * eps)
    return f"{levels}/255" if float(short) != eps and abs(255 * eps - levels) < 1e-9 else short
