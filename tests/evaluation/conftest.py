"""The data and the network of the evaluation's tests."""

import pytest
from attack_models import classifier

import mmlda


@pytest.fixture(scope="module")
def digits():
    return mmlda.data.load("digits")


@pytest.fixture(scope="module")
def model():
    return classifier()
