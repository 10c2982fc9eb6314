"""Write docs/reference.md from the docstrings: `python tools/make_reference.py`.

What a name's docstring does not say is not in the reference, so mend it there. The same sources always give the same
page; tests/test_docs.py compares.
"""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import typer

PAGE = Path(__file__).parents[1] / "docs" / "reference.md"
WIDTH = 100

# In the order in which data flows. A module's names are its __all__, or those listed here.
GROUPS: list[tuple[str, str, dict[str, tuple[str, ...] | None]]] = [
    ("Theory", "The theorems, Algorithm 1 and the distribution they speak of.",
     {"mmlda.theory": None, "mmlda.theory.means": None, "mmlda.theory.distribution": None}),
    ("Data", "Images as tensors, and how they get here.",
     {"mmlda.data": ("ImageData", "load", "as_images", "split", "holdout", "folds", "biased", "bp1", "bp2",
                     "draw_augmentation", "augment", "data_root", "find"),
      "mmlda.data.fetch": ("available", "fetch", "check", "Entry", "Check", "FetchError")}),
    ("Networks", "Heads, backbones, and the networks that ship.",
     {"mmlda.models.heads": None, "mmlda.models": None, "mmlda.zoo": None}),
    ("Training", "One network, or many.",
     {"mmlda.training.recipes": None, "mmlda.training": ("fit", "Run", "Options", "Diverged"), "mmlda.training.sweeps": None,
      "mmlda.training.checkpoints": ("load", "newest", "final")}),
    ("Attacks", "Any function from images to logits can be attacked.",
     {"mmlda.attacks": None, "mmlda.attacks.adapters": None}),
    ("Judging", "How good, how robust, and whether to believe it.",
     {"mmlda.evaluation": ("accuracy", "Accuracy", "evaluate", "Evaluation"),
      "mmlda.evaluation.robustness": ("attack_images", "adversarial_images", "predictions", "describe_attack"),
      "mmlda.evaluation.calibration": None, "mmlda.audit": None}),
    ("Results", "One file a number; the paper; the page.",
     {"mmlda.results": None, "mmlda.paper": None, "mmlda.paper.verification": None, "mmlda.report": None,
      "mmlda.paper.demo": None, "mmlda.evaluation.pictures": None, "mmlda.theory.pictures": None}),
]  # fmt: skip


def page() -> str:
    """The whole reference as Markdown."""
    import mmlda

    front = {id(getattr(mmlda, name)): name for name in mmlda.__all__ if name != "__version__"}
    parts = [
        "# Reference",
        "",
        "Made from the docstrings by `python tools/make_reference.py`, in the order in which data",
        "flows; [architecture.md](architecture.md) has the plan of the house. `make test` runs the examples.",
        "",
    ]
    parts += [f"- [{title}](#{anchor(title)}): {words}" for title, words, _ in GROUPS]
    parts += ["- [Command line](#command-line): every command and its options.", ""]
    for title, words, modules in GROUPS:
        parts += [f"## {title}", "", words, ""]
        for path, names in modules.items():
            module = importlib.import_module(path)
            front.pop(id(module), None)
            parts += module_section(module, names, front)
    if front:
        raise ValueError(f"GROUPS leaves out {', '.join(front.values())} of mmlda.__all__: expected all of them")
    parts += commands()
    return re.sub(r"\n{3,}", "\n\n", "\n".join(parts)).rstrip() + "\n"


def module_section(module: ModuleType, names: tuple[str, ...] | None, front: dict[int, str]) -> list[str]:
    """A module's docstring and names; those of `front` (the names of mmlda itself) are taken out of it."""
    parts = [f"### `{module.__name__}`", "", text(module), ""]
    for name in names or sorted(module.__all__, key=lambda name: order(module, name)):
        value = getattr(module, name)
        shown = f"mmlda.{front.pop(id(value))}" if id(value) in front else f"{module.__name__}.{name}"
        if not callable(value):
            parts += constant(shown, value)
        elif inspect.isclass(value):
            parts += class_section(shown, value)
        else:
            parts += ["#### `" + shown + "`", "", signature(name, value), "", text(value), ""]
    return parts


def order(module: ModuleType, name: str) -> tuple[str, int, str]:
    """By the place in the source; constants, which have none, come first."""
    value = getattr(module, name)
    if not (inspect.isclass(value) or inspect.isfunction(value)):
        return "", 0, name
    where = "" if value.__module__ == module.__name__ else value.__module__
    return where, inspect.getsourcelines(value)[1], name


def constant(shown: str, value: Any) -> list[str]:
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        words = "A dictionary with the keys " + ", ".join(f"`{key}`" for key in value) + "."
    else:
        words = f"`{value!r}`"
    return [f"#### `{shown}`", "", words, ""]


def class_section(shown: str, kind: type) -> list[str]:
    parts = [f"#### `{shown}`", "", signature(kind.__name__, kind), "", text(kind), ""]
    members = {}
    for owner in reversed(kind.__mro__):  # a private base's methods are the class's own; a public one has its section
        if owner is kind or (owner.__module__.startswith("mmlda") and owner.__name__.startswith("_")):
            members |= {name: value for name, value in vars(owner).items() if not name.startswith("_")}
    for name, value in members.items():
        inner = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if not inspect.isfunction(inner) or not (words := text(inner)):
            continue
        head = f"`.{name}`" if isinstance(value, property) else f"`.{call(name, inner, short=True)}`"
        parts += [f"- {head}: " + words.replace("\n", "\n  "), ""]
    return parts


def signature(name: str, value: Any) -> str:
    return f"```python\n{call(name, value)}\n```"


def call(name: str, value: Any, short: bool = False) -> str:
    """`name(arguments)` on one line where it fits, else over several; `short` without types."""
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return f"{name}(...)"
    parts, starred = [], False
    for parameter in found.parameters.values():
        if parameter.name == "self" or parameter.name == "cls":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            parts, starred = [*parts, "*"], True
        starred = starred or parameter.kind is parameter.VAR_POSITIONAL
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        kind = "" if short or parameter.annotation is parameter.empty else f": {plain(parameter.annotation)}"
        default = "" if parameter.default is parameter.empty else f"{' = ' if kind else '='}{default_of(parameter)}"
        parts.append(f"{stars}{parameter.name}{kind}{default}")
    back = "" if short or found.return_annotation in (found.empty, None, "None") or inspect.isclass(value) else (
        f" -> {plain(found.return_annotation)}")  # fmt: skip
    line = f"{name}({', '.join(parts)}){back}"
    if short or len(line) <= WIDTH:
        return line
    inside = textwrap.fill("\0, ".join(parts).replace(" ", "\1").replace("\0,\1", ", "), WIDTH - 4)
    return f"{name}(\n" + textwrap.indent(inside, "    ").replace("\1", " ") + f"\n){back}"


def plain(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def default_of(parameter: inspect.Parameter) -> str:
    words = repr(parameter.default)
    if " at 0x" in words:  # an address would differ every time
        words = getattr(parameter.default, "__name__", type(parameter.default).__name__)
    return "..." if words == "<factory>" else words


def text(value: Any) -> str:
    """A docstring as Markdown: examples in blocks of their own, arguments as a list."""
    words = inspect.cleandoc(value.__doc__ or "")
    if inspect.isclass(value) and words.startswith(f"{value.__name__}("):
        return ""  # what @dataclass writes where there is none
    lines, out, fence, args = words.split("\n"), [], False, False
    for line in lines:
        if line.startswith(">>>") and not fence:
            out, fence = [*out, "", "```pycon"], True
        if fence and not line.strip():
            out, fence = [*out, "```"], False
        if not fence and line.strip() == "Args:":
            out, args = [*out, ""], True
            continue
        if args and line.strip() and not line.startswith(" "):
            args = False
        if args and (found := re.fullmatch(r"    ([\w, *]+): (.*)", line)):
            line = f"- `{found[1]}`: {found[2]}"
        elif args:
            line = "  " + line.strip() if line.strip() else ""
        elif not fence and line.startswith("    ") and out and out[-1].strip() and not out[-1].startswith("    "):
            out.append("")  # an indented block needs an empty line before it
        out.append(line)
    return "\n".join([*out, "```"] if fence else out).strip()


def commands() -> list[str]:
    """The command line: its commands with their help, example and options."""
    from mmlda.cli import app

    parts = [
        "## Command line",
        "",
        "Exit codes: 0; 1 it failed; 2 bad input; 130 interrupted. A user's mistake is one",
        "line, without a traceback. `mmlda --install-completion` sets up tab completion.",
        "",
    ]
    root = typer.main.get_command(app)
    for path, command in walk(root, ("mmlda",)):
        parts += [f"### `{' '.join(path)}`", "", (command.help or "").strip(), ""]
        if command.epilog:
            parts += ["    " + command.epilog.removeprefix("Example: "), ""]
        for parameter in command.params:
            if parameter.name in ("help", "install_completion", "show_completion"):
                continue
            if hasattr(parameter, "is_flag"):
                name = ", ".join([*parameter.opts, *parameter.secondary_opts])
                words = getattr(parameter, "help", "") or ""
                default = parameter.default
                shown = "" if default is None or default is False or callable(default) else f" Default: {default}."
                needed = " Required." if parameter.required else ""
                parts.append(f"- `{name}`: {words}{shown}{needed}")
            else:
                words = getattr(parameter, "help", "") or ""
                parts.append(f"- `{(parameter.name or '').upper()}`: {words}")
        parts.append("")
    return parts


def walk(command: Any, path: tuple[str, ...]) -> list[tuple[tuple[str, ...], Any]]:
    """The commands below a group, with their full names."""
    inner = getattr(command, "commands", None)
    if inner is None:
        return [(path, command)]
    return [pair for name, sub in inner.items() for pair in walk(sub, (*path, name))]


def anchor(heading: str) -> str:
    """GitHub's anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


if __name__ == "__main__":
    PAGE.write_text(page())
    print(PAGE)
