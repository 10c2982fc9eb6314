"""The command line: parse, call one function, print. Exit codes: 0 done, 1 failed, 2 bad input, 130 interrupted.

No module here imports torch, directly or not, before a command runs: help and tab completion answer at once.
"""

from __future__ import annotations

import sys
import warnings
from typing import Annotated

import typer

from mmlda._version import __version__

from mmlda.cli import networks  # isort: skip (the help lists commands in the order of these imports)
from mmlda.cli import judging, tools
from mmlda.cli.options import app

__all__ = ["app", "judging", "main", "networks", "tools"]


def main() -> None:
    """Run the command line; warnings and user errors are one line each."""
    warnings.formatwarning = lambda message, *_: f"mmlda: warning: {message}\n"
    try:
        sys.exit(app(standalone_mode=False, prog_name="mmlda") or 0)  # the code of a command's typer.Exit
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(130)
    except ValueError as error:
        _fail(error, 2)
    except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
        _fail(f"{error.filename}: wrong kind of path: {error.strerror}", 2)
    except (ImportError, OSError) as error:
        _fail(error, 1)
    except Exception as error:
        if not hasattr(error, "exit_code"):
            from mmlda.data.download import FetchError
            from mmlda.integrations.export import ExportMismatch
            from mmlda.training import Diverged
            from mmlda.training.sweeps import JobsFailed

            if not isinstance(error, Diverged | ExportMismatch | FetchError | JobsFailed):
                raise
            _fail(error, 1)
        # the parser's own errors: unknown options, missing arguments
        if type(error).__name__ == "NoArgsIsHelpError":  # shows the help, which is not an error
            print(error.format_message())  # type: ignore[attr-defined]
            sys.exit(error.exit_code)
        words = (error.format_message() or str(error)).rstrip(".")  # type: ignore[attr-defined]
        path = getattr(getattr(error, "ctx", None), "command_path", "mmlda")
        _fail(f"{words}{_given(error)}; see {path} --help", error.exit_code)


def _fail(error: BaseException | str, code: int) -> None:
    print(f"mmlda: {error}", file=sys.stderr)
    sys.exit(code)


def _given(error: Exception) -> str:
    """The value that an option rejected, as in `, got 'x'`; empty for other errors."""
    options = getattr(getattr(error, "param", None), "opts", ())
    for word, value in zip(sys.argv, [*sys.argv[1:], None]):
        name, equals, attached = word.partition("=")
        if name in options and (equals or value is not None):
            return f", got {attached if equals else value!r}"
    return ""


def _version(value: bool) -> None:
    if value:
        print(__version__)
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None: ...
