"""The command line, called in the test's own process."""

import contextlib
import io
import sys
from types import SimpleNamespace

import pytest

from mmlda import cli


def mmlda(*words, code=0):
    """The command line in this process; what it printed."""
    out, err = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as stop,
    ):
        patch.setattr(sys, "argv", ["mmlda", *map(str, words)])
        cli.main()
    assert (stop.value.code or 0) == code, err.getvalue()
    return SimpleNamespace(stdout=out.getvalue(), stderr=err.getvalue())
