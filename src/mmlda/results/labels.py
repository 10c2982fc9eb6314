"""Names of networks in tables and figures. Labels are made from fields and never parsed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmlda._utils.text import eps_text
from mmlda.results.record import Result

HEADS = {"softmax": "SR", "mmlda": "MM-LDA"}
SHORT = {"softmax": "sr", "mmlda": "mmlda"}  # the head as recipes name it


def label(result: Result) -> str:
    """The network of a result, as tables and figures name it, and what was changed to predict.

    Parameters
    ----------
    result
        Any result.

    Returns
    -------
    str
        `network_label`, then exchanged priors and a fitted temperature.

    Examples
    --------
    >>> about = dict(name="x", kind="table1", what="", value=None, dataset="mnist", head="softmax", recipe="mnist-sr")
    >>> label(Result(**about)), label(Result(**about, priors="uniform"))
    ('SR', 'SR, uniform priors')
    """
    changed = [f"{result.priors} priors" if result.priors else "", "fitted temperature" if result.temperature else ""]
    return ", ".join(word for word in (network_label(result), *changed) if word)


def network_label(result: Result) -> str:
    """The network of a result: `label` without the changes.

    Parameters
    ----------
    result
        Any result.

    Returns
    -------
    str
        The paper's term, such as "SR" or "MM-LDA"; the network's own name if no recipe is known.
    """
    head = HEADS.get(result.head, result.network)
    if not result.recipe:
        return result.network or head
    if "variant" in result.cell:  # the suspects behind Table 2 share a recipe
        return str(result.cell["variant"]) or head
    return head + _training(result) + (" (ships)" if result.cell.get("shipped") else "")


def plain_head(result: Result) -> str:
    """The head of a network of the paper's two kinds, SR and MM-LDA, trained and measured plainly; "" for others.

    Parameters
    ----------
    result
        Any result.

    Returns
    -------
    str
        "softmax", "mmlda" or "".

    Examples
    --------
    >>> about = dict(name="x", kind="table1", what="", value=None, dataset="mnist", head="softmax")
    >>> plain_head(Result(**about, recipe="mnist-sr")), plain_head(Result(**about, recipe="mnist-sr-adam"))
    ('softmax', '')
    """
    if result.priors:
        return ""
    if not result.recipe:
        plain = result.network in ("", HEADS.get(result.head))  # the name an audit gives to a network without one
    elif "variant" in result.cell:
        plain = not result.cell["variant"]
    else:
        plain = not (result.cell.get("shipped") or _training(result))
    return result.head if plain and result.head in HEADS else ""


def _training(result: Result) -> str:
    """How the training of a network differs from its head's own recipe, as a suffix; "" if it does not."""
    if result.fine_tuning:
        return f" + {result.fine_tuning.upper()}{_made_for(result)}"
    if result.cell.get("priors") == "true":
        return ", true priors"
    if result.head == "softmax" and result.recipe == f"{result.dataset}-mmlda":
        return ", MM-LDA's recipe"
    own = f"{result.dataset}-{SHORT.get(result.head, '')}"
    return {f"{own}-adam": " (Adam)", f"{own}-robust": " (robust)"}.get(result.recipe, "")


def attack_labels(results: Sequence[Result]) -> list[str]:
    """Attacks as a table names them: "PGD 0.1", with the settings in which those of the same name and eps differ.

    Parameters
    ----------
    results
        Results under attack; "clean" stands for one without.

    Returns
    -------
    list of str
        One label per result, all different unless two attacks have the same settings.

    Examples
    --------
    >>> common = dict(name="x", kind="evaluation", what="", value=None, attack="PGD", eps=0.1)
    >>> attack_labels([Result(**common, attack_settings={"steps": k}) for k in (10, 100)])
    ['PGD 0.1, steps=10', 'PGD 0.1, steps=100']
    """
    plain = [" ".join([r.attack or "clean", *([] if r.eps is None else [eps_text(r.eps)])]) for r in results]
    settings = [r.attack_settings or {} for r in results]
    made = []
    for name, own in zip(plain, settings):
        same = [other for other, its in zip(settings, plain) if its == name]
        made.append(", ".join([name, *differing(own, same)]))
    return made


def differing(own: dict[str, Any], others: Sequence[dict[str, Any]]) -> list[str]:
    """Name the settings in which an attack differs from any of the `others`, such as "steps=10".

    Parameters
    ----------
    own
        Settings of the attack, by name.
    others
        Settings of the attacks to tell it from.

    Returns
    -------
    list of str
        The settings as text.
    """
    keys = [key for key in own if any(other.get(key) != own[key] for other in others)]
    short = [f"{key}={own[key]}" for key in keys if not isinstance(own[key], list | dict)]
    return short if len(short) == len(keys) else [*short, f"list {1 + list(others).index(own)}"]  # too long for a label


def _made_for(result: Result) -> str:
    """The attack used in fine-tuning, unless the result is about that attack; for SAT in audits, with its eps."""
    adversary = (result.recipe_settings or {}).get("adversary") or {}
    attack, eps = str(adversary.get("attack", "")).upper(), adversary.get("eps")
    if not attack or attack == result.attack:
        return ""
    audited = result.kind == "audit" and result.fine_tuning == "sat" and isinstance(eps, int | float)
    return f" ({attack} {eps:g})" if audited else f" ({attack})"
