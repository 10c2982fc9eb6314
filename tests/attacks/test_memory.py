"""keep_memory(): freed memory stays with the process, if the caller asks for it and never otherwise."""

import os
import platform
import subprocess
import sys

import pytest

GLIBC = platform.libc_ver()[0] == "glibc"

# The first mallopt turns off glibc's own, moving threshold: with that, whether a block goes back depends on what
# happens to lie above it.
KEPT = """
import ctypes, torch
ctypes.CDLL(None).mallopt(-3, 1 << 20)
import mmlda.attacks
torch.set_num_threads(1)
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
{before}
x = torch.rand(4, 1 << 20)
before = resident()
for _ in range(3):
    parts = [x * 2 for _ in range(8)]  # 16 MiB each
    del parts
print(resident() - before >> 20)
"""


@pytest.mark.skipif(not GLIBC, reason="glibc's setting")
@pytest.mark.parametrize(
    ("before", "setting", "kept"),
    [
        ("mmlda.attacks.keep_memory()", None, True),
        ("mmlda.attacks.keep_memory()", "0", False),
        ("", "1", True),
        # An attack alone changes nothing.
        (
            "mmlda.attacks.FGSM(eps=0.1)(torch.nn.Linear(4, 3).eval(), torch.rand(2, 4), torch.tensor([0, 1]))",
            None,
            False,
        ),
    ],
)
def test_freed_memory_stays_only_on_request(before, setting, kept):
    own = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD", "MMLDA_KEEP_MEMORY")  # with these it leaves memory alone
    env = {k: v for k, v in os.environ.items() if not k.startswith(own)} | {"OMP_NUM_THREADS": "1"}
    if setting is not None:
        env["MMLDA_KEEP_MEMORY"] = setting
    code = KEPT.format(before=before)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    grown = int(run.stdout)  # MiB, of the 128 that a round takes
    assert grown >= 100 if kept else grown <= 50
