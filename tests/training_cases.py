"""Helpers for the tests of training: small networks and recipes, runs that are cut short."""

import signal
import time

import torch

import mmlda
from mmlda.models import build
from mmlda.training import Options, Recipe, Run, fit
from mmlda.training.loop import training_steps

SMALL = {"backbone": "conv_net", "width": 4, "head": "mmlda", "dim": 12}
QUICK = Recipe(steps=24, optimizer="adam", lr=1e-3, batch_size=32, milestones=(16,))
CPU = torch.device("cpu")


class Slow(torch.utils.data.Dataset):
    """64 digits, each of which takes `seconds` to read."""

    def __init__(self, seconds=0.0):
        self.data, self.seconds = mmlda.data.load("digits")[0].subset(slice(64)), seconds

    def __len__(self):
        return len(self.data)

    def __getitem__(self, n):
        time.sleep(self.seconds)
        return self.data[n]


def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name].cpu(), b[name].cpu()) for name in a)


def train(data, recipe=QUICK, config=SMALL, **options):
    """(weights, run) of a network trained from seed 0."""
    model = build(config, seed=0)
    run = fit(model, data, recipe, show=False, **options)
    return weights(model), run


def break_off(data, recipe, out, step, model=None, **options):
    """Train and stop after a step as a kill would: nothing more is written."""
    run = Run(build(SMALL, seed=0) if model is None else model, recipe, out)
    for done in training_steps(run, data, Options(**options), report=lambda done, **numbers: None):
        if done == step:
            return


def interrupt_at(model, step):
    """Ctrl-C in the forward pass of a step, counted from 1."""
    count = 0

    def hook(module, inputs):
        nonlocal count
        count += module.training  # not the pass that checks whether the data fits
        if count == step and module.training:
            signal.raise_signal(signal.SIGINT)

    model.register_forward_pre_hook(hook)
    return model


def robust(model, data, eps):
    """Accuracy under PGD."""
    return float((~mmlda.attacks.PGD(eps=eps, steps=20)(model, data.pixels(), data.labels).success).float().mean())
