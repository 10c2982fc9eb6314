"""A committed number is recomputed, and a false one is found out."""

import dataclasses
import hashlib
import json
import re

import pytest
import torch
from safetensors.torch import load, save

from mmlda import paper, zoo
from mmlda.paper.rows import SR
from mmlda.paper.setup import networks
from mmlda.paper.verification import CHANCE, one_sided, verify


def test_a_number_is_verified_from_its_images(setup, table2):
    assert verify(setup.out / "table2-digits-mm-lda-bim-0.12-0.json", n=10).n == 10
    found = verify(setup.out / "table2-digits-sr-hat-bim-0.12-0.json")
    assert found.agrees and found.n == 24 and found.same_outcome == 1.0 and "agrees on 24" in str(found)


@pytest.fixture
def copied(setup, bim_on_sr, tmp_path):
    """Saves a changed copy of a result beside its networks; the path."""
    (tmp_path / "networks").symlink_to(setup.out / "networks")
    outcomes = bim_on_sr.read_outcomes(setup.out)

    def write(lied=None, **fields):
        content = outcomes if lied is None else save(lied)
        made = dataclasses.replace(bim_on_sr, **fields).save(tmp_path, content)
        return tmp_path / f"{made.name}.json"

    return write


def test_a_false_number_is_found_out(setup, bim_on_sr, copied):
    outcomes = load(bim_on_sr.read_outcomes(setup.out))
    lied = {**outcomes, "success": torch.zeros_like(outcomes["success"]), "prediction": outcomes["clean"].clone()}
    found = verify(copied(lied))
    assert not found.agrees and "DOES NOT AGREE" in str(found)
    assert not verify(copied(lied, value=1.0)).agrees  # a lie that agrees with itself
    found = verify(copied(value=0.912))  # true outcomes, and another number
    assert not found.agrees and found.same_outcome == 1.0 and "claimed 91.2%" in str(found)


def test_another_network_and_other_data_are_found_out(setup, bim_on_sr, copied, monkeypatch):
    with pytest.raises(ValueError, match="must be one with weights of SHA-256 000000000000"):
        verify(copied(network_sha256="0" * 64))
    with pytest.raises(ValueError, match="must be the test images"):
        verify(copied(data={**bim_on_sr.data, "sha256": "0" * 64}))
    with pytest.raises(ValueError, match=r"network \(--network\) must be the path of 'x'"):
        verify(copied(network="x"))
    net = networks(setup, (SR,))[0].model
    monkeypatch.setattr(zoo, "names", lambda: ["ships"])
    monkeypatch.setattr(zoo, "load", lambda name: net)
    assert verify(copied(network="x")).agrees  # it ships under another name


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"eps": 0.5}, "its eps is 0.5, that of its attack's settings 0.12"),
        ({"head": "mmlda"}, "its head is 'mmlda', that of its network 'softmax'"),
        ({"dataset": "mnist"}, "its dataset is 'mnist', its images are of 'digits'"),
        ({"interval": (0.99, 0.999)}, "its interval is 0.9900 to 0.9990"),
    ],
)
def test_fields_that_do_not_fit_are_found_out(fields, words, copied):
    found = verify(copied(**fields), seed=3)
    assert not found.agrees and words in str(found) and found.seed == 3


def test_incomplete_results_are_refused(setup, bim_on_sr, copied, tmp_path):
    settings = bim_on_sr.attack_settings
    for fields, words in (
        ({"attack": ""}, "attack must be the one it is about"),
        ({"attack_settings": None}, "settings of BIM must be some of"),
        ({"attack": "Attack"}, "attack must be one of this package, got 'Attack'"),
        ({"attack_settings": {**settings, "strength": 2}}, "'strength': 2"),
        ({"data": {**bim_on_sr.data, "images": "24"}}, "must be a whole number, got '24'"),
        ({"network_sha256": ""}, "network_sha256 must be"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            verify(copied(**fields))
    (tmp_path / "somebodys").mkdir()
    for name in (str(tmp_path / "somebodys"), "somebodys", ["digits"]):  # a dataset is a known name, never a path
        with pytest.raises(ValueError, match=r"dataset of a result must be one of digits, mnist"):
            verify(copied(data={**bim_on_sr.data, "name": name}))
    path = copied()
    path.with_suffix(".safetensors").write_bytes(b"damaged")
    about = {"file": path.with_suffix(".safetensors").name, "sha256": hashlib.sha256(b"damaged").hexdigest()}
    path.write_text(json.dumps({**json.loads(path.read_text()), "outcomes": about}))
    with pytest.raises(ValueError, match="must be a whole safetensors file"):
        verify(path)
    columns = load(bim_on_sr.read_outcomes(setup.out))
    for lied, words in (
        ({k: v for k, v in columns.items() if k != "prediction"}, "outcomes must have prediction"),
        ({k: v[:-1].clone() for k, v in columns.items()}, "outcomes must be of 24 images, got [23]"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            verify(copied(lied))
    theory = paper.theory_figure(setup)[0]
    with pytest.raises(ValueError, match=r"an outcome for each image.*got theory"):
        verify(setup.out / f"{theory.name}.json")


def test_rounding_changes_sides_both_ways_and_a_lie_only_one():
    assert one_sided(0, 0) == 1.0 and one_sided(7, 6) > 0.9
    assert one_sided(11, 0) < CHANCE < one_sided(9, 0)
