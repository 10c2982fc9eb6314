"""What several test files ask for."""

import os
import subprocess

import pytest
from web import BODY, Server


@pytest.fixture
def server():
    made = Server()
    made.files["file"] = BODY
    yield made
    made.shutdown()
    made.server_close()


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = (
        os.geteuid() == 0
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=600k", "mmlda-test", folder], capture_output=True
        ).returncode
    )
    if not mounted:
        pytest.skip("can't mount a small tmpfs here: needs root")
    yield folder
    subprocess.run(["umount", folder], check=True)
