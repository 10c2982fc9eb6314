"""keep_memory(): what a step has freed serves the next one."""

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
from mmlda.attacks.memory import keep_memory
torch.set_num_threads(1)
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
if {keep}:
    keep_memory()
x = torch.rand(4, 1 << 20)
before = resident()
for _ in range(3):
    parts = [x * 2 for _ in range(8)]  # 16 MiB each
    del parts
print(resident() - before >> 20)
"""


@pytest.mark.skipif(not GLIBC, reason="glibc's setting")
def test_freed_memory_stays():
    def kept(keep):
        own = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD", "MMLDA_KEEP_MEMORY")  # with these it leaves memory alone
        env = {k: v for k, v in os.environ.items() if not k.startswith(own)} | {"OMP_NUM_THREADS": "1"}
        code = KEPT.format(keep=keep)
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
        return int(run.stdout)

    assert kept(True) >= 100  # MiB of the 128 that a round takes
    assert kept(False) <= 50
