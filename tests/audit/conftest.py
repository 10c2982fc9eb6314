"""Networks on the embedded digits that the audit's tests share: those of docs/audit.md's table."""

import make_audit_table
import pytest
import torch
from torch import nn

import mmlda


@pytest.fixture(scope="session")
def digits():
    return mmlda.data.load("digits")


@pytest.fixture(scope="session")
def maker():
    return make_audit_table


@pytest.fixture(scope="session")
def plain(maker):
    return maker.sr()


@pytest.fixture(scope="session")
def other(maker):
    return maker.mm()


@pytest.fixture(scope="session")
def robust(maker):
    return maker.robust()


@pytest.fixture(scope="session")
def linear(digits):
    """A linear classifier, which an audit takes a tenth of a second for."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    for _ in range(100):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(digits[0].pixels()), digits[0].labels).backward()
        optimizer.step()
    return net.eval()
