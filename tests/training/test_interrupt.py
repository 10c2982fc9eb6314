"""Ctrl-C as a terminal sends it: to the process, and to the workers of its loaders."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from torch.utils.data import DataLoader
from training_cases import SMALL, Slow, same, weights

from mmlda.models import build
from mmlda.training import Recipe, checkpoints, fit

TESTS = Path(__file__).parents[1]
RECIPE = Recipe(steps=20, optimizer="adam", lr=1e-3, batch_size=16)
SCRIPT = """
    from torch.utils.data import DataLoader
    from training_cases import SMALL, Slow
    import mmlda

    def wait(module, inputs, z):  # until the loader is waited for, in the third epoch or in the first validation
        module.steps = getattr(module, "steps", 0) + module.training
        if module.steps == (10 if module.training else 7):
            print("wait", flush=True)

    if __name__ == "__main__":
        slow = DataLoader(Slow(0.03), batch_size=16, num_workers=1, **{options})
        if slow.persistent_workers:  # begun before `fit`: they do not ignore the signal
            next(iter(slow))
        fast = DataLoader(Slow(), batch_size=16)
        model = mmlda.models.build(SMALL, seed=0)
        model.register_forward_hook(wait)
        recipe = mmlda.Recipe(steps=20, optimizer="adam", lr=1e-3, batch_size=16)
        validation = dict(validation=slow, validate_every=7) if {validation} else dict()
        mmlda.fit(model, fast if validation else slow, recipe, out="run", show=False, **validation)
"""
SPAWN, PERSIST = {"multiprocessing_context": "spawn"}, {"persistent_workers": True}


@pytest.mark.parametrize(
    "options, validation",
    [
        (PERSIST, False),
        pytest.param(SPAWN, False, marks=pytest.mark.long),
        pytest.param(PERSIST, True, marks=pytest.mark.long),
    ],
)
def test_ctrl_c_that_ends_the_workers_saves_and_the_same_call_resumes(tmp_path, options, validation):
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT.format(options=options, validation=validation)))
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "script.py"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, start_new_session=True, **pipes) as process:
        try:
            assert process.stdout.readline() == "wait\n", process.communicate()[1]
            time.sleep(0.1)
            os.killpg(process.pid, signal.SIGINT)
            errors = process.communicate(timeout=60)[1]
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert "and saved; the same call with out='run' resumes" in errors and "exited unexpectedly" not in errors, errors
    assert checkpoints.newest(tmp_path / "run")[1]["step"] in ([7] if validation else [10, 11])
    loader, (model, whole) = DataLoader(Slow(), batch_size=16), (build(SMALL, seed=0) for _ in range(2))
    more = {"validation": loader, "validate_every": 7} if validation else {}
    assert fit(model, loader, RECIPE, out=tmp_path / "run", show=False, **more).step == 20
    fit(whole, loader, RECIPE, show=False)
    assert same(weights(model), weights(whole))
