"""A small trained network for the tests of the command line."""

import json

import pytest
from command_line import mmlda


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli") / "run"
    done = mmlda("train", "--data", "digits", "--steps", 120, "--model", "width=8", "--out", folder, "--json")
    return folder, json.loads(done.stdout)
