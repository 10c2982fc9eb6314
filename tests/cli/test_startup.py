"""Help, the version and tab completion answer without importing torch; the names of `mmlda` come on first use."""

import os
import subprocess
import sys

import pytest

import mmlda
from mmlda.cli import judging, options, tools
from mmlda.data.fetch import available

TORCH_FREE = """
import sys
from mmlda.cli import main
sys.argv[0] = "mmlda"
try:
    main()
finally:
    heavy = {"torch", "numpy", "matplotlib", "rich", "safetensors"} & set(sys.modules)
    print("imported:", *sorted(heavy), file=sys.stderr)
"""


def python(code, *words, **environment):
    """Run code in a process of its own."""
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **environment})


@pytest.mark.parametrize("words", ["--help", "--version", "", "audit --help", "reproduce --help", "data --help"])
def test_help_and_version_import_no_torch(words):
    done = python(TORCH_FREE, *words.split())
    assert done.stdout.strip() and done.stderr.strip() == "imported:"
    assert "..." not in done.stdout.partition("Commands:")[2], "summaries are whole"


def complete(*words):
    """What bash would be offered, as it asks: through environment variables."""
    done = python(
        TORCH_FREE,
        _MMLDA_COMPLETE="complete_bash",
        COMP_WORDS=" ".join(("mmlda", *words)),
        COMP_CWORD=str(len(words)),
    )
    assert done.stderr.strip() == "imported:"
    return set(done.stdout.split())


def test_completion_offers_commands_options_and_names_without_torch():
    assert complete("re") == {"reproduce", "report"}
    assert {"cifar10-mmlda", "cifar10-sr"} <= complete("audit", "cifar")
    assert "table2" in complete("reproduce", "ta")
    assert complete("evaluate", "mnist-sr", "--attack", "p") == {"pgd"}
    assert complete("train", "--data", "c") == {"cifar10", "cifar100", "cifar100-coarse"}


def test_lists_that_are_known_without_torch_are_complete():
    assert judging.REPRODUCED == [*mmlda.paper.PARTS, "all"]
    assert list(mmlda.data.datasets.CLASSES) == options.DATASETS
    assert [one.name for one in available() if not one.embedded] == tools.FETCHED


def test_public_names_are_imported_on_first_use():
    code = "import sys, mmlda; assert 'torch' not in sys.modules; print(mmlda.fit.__name__, 'torch' in sys.modules)"
    assert python(code).stdout.split() == ["fit", "True"]
    assert set(mmlda.__all__) <= set(dir(mmlda)) and all(hasattr(mmlda, name) for name in mmlda.__all__)
    assert python("from mmlda import *; print(load.__name__, attacks.__name__)").stdout.split() == [
        "load",
        "mmlda.attacks",
    ]
    assert python("from mmlda.recipes import sat; print(sat.__name__)").stdout.split() == ["sat"]
    with pytest.raises(AttributeError, match="module 'mmlda' has no attribute 'fitt'"):
        mmlda.fitt  # noqa: B018


@pytest.mark.parametrize("first", ["mmlda", "mmlda.audit", "mmlda.audit.checks", "mmlda.paper.worst"])
def test_audit_is_the_function_whatever_is_imported_first(first):
    done = python(f"import {first}, mmlda; print(type(mmlda.audit).__name__)")
    assert done.stdout.strip() == "function", done.stderr


def test_a_warning_is_one_line():
    code = "import warnings, mmlda.cli as cli; cli.app = lambda **_: warnings.warn('beware'); cli.main()"
    assert python(code).stderr == "mmlda: warning: beware\n"
