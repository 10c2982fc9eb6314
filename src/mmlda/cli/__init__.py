"""The command line: parse, call one function, print. Exit codes: 0 done, 1 failed, 2 bad input, 130 interrupted."""

from __future__ import annotations

import itertools
import sys
from typing import Annotated

import typer

from mmlda.cli import networks  # isort: skip (the help lists commands in the order of these imports)
from mmlda.cli import judging, tools
from mmlda.cli.options import app

__all__ = ["app", "judging", "main", "networks", "tools"]


def main() -> None:
    """Run the command line; user errors are one line instead of a traceback."""
    from mmlda.data.download import FetchError
    from mmlda.training import Diverged
    from mmlda.training.sweeps import JobsFailed

    try:
        sys.exit(app(standalone_mode=False) or 0)  # what a command's typer.Exit asked for
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(130)
    except ValueError as error:
        _fail(error, 2)
    except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
        _fail(f"{error.filename}: wrong kind of path: {error.strerror}", 2)
    except (Diverged, FetchError, JobsFailed, OSError) as error:
        _fail(error, 1)
    except Exception as error:  # click's own errors: unknown options, missing arguments
        if not hasattr(error, "exit_code"):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":  # the help, which is no error
            print(error.format_message())  # type: ignore[attr-defined]
            sys.exit(error.exit_code)
        words, given = error.format_message() or str(error), _given(error)  # type: ignore[attr-defined]
        _fail(words if given is None or repr(given) in words else f"{words}, got {given!r}", error.exit_code)


def _given(error: Exception) -> str | None:
    """The value given to the option that an error is about; None if it cannot be found."""
    options, found = getattr(getattr(error, "param", None), "opts", ()), None
    for word, after in itertools.pairwise([*sys.argv[1:], ""]):
        name, equals, value = word.partition("=")
        if name in options:
            found = value if equals else after
    return found


def _fail(error: BaseException | str, code: int) -> None:
    print(f"mmlda: {error}", file=sys.stderr)
    sys.exit(code)


def _version(value: bool) -> None:
    if value:
        from mmlda import __version__

        print(__version__)
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...
