import pytest

import mmlda


@pytest.fixture(scope="session")
def digits():
    return mmlda.data.load("digits")
