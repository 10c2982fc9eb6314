"""`evaluate`: the table of clean and robust accuracy; a killed evaluation resumes."""

import json
import multiprocessing
import os
import signal
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import mmlda
from mmlda.attacks import BIM, AttackWarning, WorstCase
from mmlda.data import stratified
from mmlda.evaluation import accuracy, attack_images
from mmlda.models import build
from mmlda.results import load_all, wilson


def test_evaluate_says_how_good_and_how_robust(model, digits, tmp_path):
    test = digits[1]
    weak, strong = BIM(eps=0.03), BIM(eps=0.15)
    found = mmlda.evaluate(
        model, test, [weak, strong], n=120, chunk=50, out=tmp_path, temperature=test, name="SR", show=False
    )
    part = stratified(test, 120)
    x, y = part.pixels(), part.labels
    z = model(x).detach()
    assert found.clean.value == pytest.approx(float((z.argmax(1) == y).double().mean()))
    assert found.clean.numbers["nll"] == pytest.approx(float(nn.functional.cross_entropy(z, y)), rel=1e-5)
    assert found.clean.series["per_class"] == pytest.approx(accuracy(model, part).per_class)
    assert found.attacks[1].value < found.attacks[0].value < found.clean.value
    for result, attack in zip(found.attacks, (weak, strong)):
        held = int((attack(model, x, y).prediction == y).sum())
        assert result.value == pytest.approx(held / 120, abs=0.01)
        assert result.interval == pytest.approx(wilson(round(result.value * 120), 120))
        assert (result.dataset, result.network, result.attack, result.eps) == ("digits", "SR", "BIM", attack.eps)
        assert result.head == "softmax" and result.attack_steps == attack.steps
    assert {r.name: r for r in load_all(tmp_path)}["clean"] == found.clean
    assert f"BIM 0.15                 {100 * found.attacks[1].value:12.2f}" in str(found)
    assert "at temperature" in str(found)
    again = mmlda.evaluate(model, test, [weak, strong], n=120, chunk=50, out=tmp_path, show=False)
    assert [r.value for r in again.results] == [r.value for r in found.results]
    with pytest.raises(ValueError, match="attacks must differ from each other"):
        mmlda.evaluate(model, test, [weak, weak], n=120, show=False)
    with pytest.raises(ValueError, match="n must be an integer >= 1, got 0"):
        mmlda.evaluate(model, test, n=0)


class Counting(nn.Module):
    """Counts the images that go through, in a file; kills its process, hard, when `limit` of them have."""

    def __init__(self, path, limit=10**9):
        super().__init__()
        self.inner, self.path, self.limit, self.seen = build(SMALL, seed=0).eval(), path, limit, 0

    def forward(self, x):
        self.seen += len(x)
        with open(self.path, "a") as file:
            file.write(f"{len(x)}\n")
        if self.seen >= self.limit:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.inner(x)


SMALL = {"backbone": "conv_net", "width": 4, "head": "softmax"}


def evaluate_counting(folder, limit=10**9):
    """Evaluate in chunks of 20 images: 10 of the clean images, 10 of the attacked ones."""
    attack, test = BIM(eps=0.1, steps=10), mmlda.data.load("digits")[1]
    return mmlda.evaluate(
        Counting(f"{folder}.count", limit).eval(), test, attack, n=200, chunk=20, out=folder, show=False
    )


def test_after_a_sigkill_finished_work_is_not_repeated(tmp_path):
    """Images through the network: a killed and resumed evaluation repeats at most the chunk it was killed in."""

    def images(folder):
        return sum(map(int, (tmp_path / f"{folder}.count").read_text().split()))

    whole = evaluate_counting(tmp_path / "whole")
    one_chunk = (images("whole") - 200) // 10  # of an attack: its steps, and the clean prediction
    for limit in (100, 100 + 3 * one_chunk + 60):  # among the clean images, then among the attacked ones
        process = multiprocessing.get_context("fork").Process(
            target=evaluate_counting, args=(tmp_path / "killed", limit)
        )
        process.start()
        process.join(120)
        assert process.exitcode == -signal.SIGKILL
    done = len(list((tmp_path / "killed").rglob("images-*.safetensors")))
    assert 10 < done < 20
    resumed = evaluate_counting(tmp_path / "killed")
    assert [r.value for r in resumed.results] == [r.value for r in whole.results]
    assert images("whole") < images("killed") <= images("whole") + 20 + one_chunk


@pytest.mark.parametrize(
    "net, what",
    [
        (lambda x: torch.full((len(x), 10), float("nan")), "NaN for 20 of 20"),
        (lambda x: x.flatten(1)[:, :3], r"logits \[20, 10\], got \[20, 3\]"),
        (lambda x: x.sum((1, 2, 3)), "must return logits"),
    ],
)
def test_what_is_no_classifier_of_the_data_is_refused(digits, net, what):
    class Network(nn.Module):
        def forward(self, x):
            return net(x)

    with pytest.raises(ValueError, match=what):
        mmlda.evaluate(Network().eval(), digits[1], n=20, show=False)


def test_more_images_than_there_are_means_all_of_them(model, digits):
    few = digits[1].subset(slice(30))
    found = mmlda.evaluate(model, few, BIM(eps=0.1), n=31, show=False)
    assert found.clean.n == found.attacks[0].n == accuracy(model, few, n=1000).n == 30


def test_evaluate_takes_any_function_and_any_data(model, digits):
    part = stratified(digits[1], 40)
    x, y = part.pixels(), part.labels
    plain = mmlda.evaluate(model, digits[1], BIM(eps=0.1), n=40, show=False)
    other = mmlda.evaluate(lambda x: model(x), (x, y), BIM(eps=0.1), temperature=digits[1], show=False)
    assert [r.value for r in other.results] == [r.value for r in plain.results]
    assert other.clean.network == other.clean.network_sha256 == "" and other.clean.numbers["temperature"] > 0


def test_the_plot_has_one_bar_per_result(model, digits, tmp_path):
    found = mmlda.evaluate(model, digits[1], BIM(eps=0.1), n=40, show=False)
    (axis,) = found.plot(tmp_path / "bars.png").axes
    assert [bar.get_width() for bar in axis.patches] == pytest.approx([100 * r.number for r in found.results])
    assert [label.get_text() for label in axis.get_yticklabels()] == ["clean", "BIM 0.1"]
    assert (tmp_path / "bars.png").read_bytes()[:4] == b"\x89PNG"


def test_an_infinite_likelihood_is_printed(digits):
    """A class of prior 0 that does occur has probability 0."""
    head = mmlda.MaxMahalanobisHead(num_classes=10, dim=32, priors=[0.0] + [1 / 9] * 9)
    net = mmlda.Classifier(mmlda.models.conv_net(), head)
    found = mmlda.evaluate(net, digits[1], n=100, show=False)
    assert found.clean.numbers["nll"] is None and "negative log-likelihood inf" in str(found)


def rounding(model):
    return lambda v: model((v * 4).round() / 4)


def test_attacks_are_objects_or_names(model, digits):
    found = mmlda.evaluate(model, digits[1], ["fgsm:8/255", BIM(eps=0.1)], n=30, show=False)
    assert [r.attack for r in found.attacks] == ["FGSM", "BIM"] and found.attacks[0].eps == 8 / 255
    assert mmlda.evaluate(model, digits[1], "bim:0.1,steps=3", n=30, show=False).attacks[0].attack_steps == 3
    with pytest.raises(ValueError, match="attack must be one of"):
        mmlda.evaluate(model, digits[1], "nothing:0.1", n=30, show=False)
    with pytest.raises(ValueError, match=r"eps must be at most 1\.0.*8/255"):
        mmlda.evaluate(model, digits[1], "pgd:8", n=30, show=False)


def test_a_blind_attack_is_marked_with_the_reason(model, digits):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = mmlda.evaluate(rounding(model), digits[1], ["bim:0.1", "square:0.1,queries=50"], n=40, show=False)
    lines = str(found).splitlines()
    assert lines[0].startswith("40 images, 10 classes")
    (row,) = [line for line in lines if line.startswith("BIM")]
    assert row.startswith("BIM 0.1 * ")
    (why,) = [line for line in lines if line.startswith("* ")]
    assert why.startswith("* BIM 0.1: blind, since the gradient was exactly zero for")
    assert not any("Square" in line and "*" in line for line in lines)


def test_chunks_of_a_blind_attack_warn_once(model, digits):
    with pytest.warns(AttackWarning, match="BIM: blind") as caught:
        attack_images(rounding(model), digits[1], BIM(eps=0.1), n=40, chunk=10, show=False)
    assert len(caught) == 1 and caught[0].filename == __file__


def test_a_random_model_is_marked_and_judged_on_average(model, digits):
    torch.manual_seed(0)
    found = mmlda.evaluate(
        lambda v: model(v + 0.1 * torch.randn_like(v)), digits[1], BIM(eps=0.0), n=60, chunk=30, show=False
    )
    (result,) = found.attacks
    assert result.numbers["passes"] == found.clean.numbers["passes"] == 16
    assert "* clean: the model is random" in str(found) and "* BIM 0: the model is random" in str(found)
    assert result.value == pytest.approx(result.numbers["clean_accuracy"], abs=0.1)
    assert result.value == pytest.approx(found.clean.value, abs=0.1)


def test_a_list_without_its_gradient_attacks_is_marked(model, digits):
    found = mmlda.evaluate(lambda v: model(v).detach(), digits[1], "worst:0.1", n=20, chunk=10, show=False)
    assert found.attacks[0].numbers["black_box"] == 1
    assert "* WorstCase 0.1: the model has no gradient: only the attacks that need none" in str(found)


def test_attacks_that_differ_in_settings_have_different_labels(model, digits):
    attacks = ["pgd:0.1,steps=1", "pgd:0.1,steps=2", "pgd:0.1,steps=2,seed=5", "fgsm:0.1"]
    attacks += [WorstCase(eps=0.1, attacks=[BIM(eps=0.1, steps=k)]) for k in (1, 2)]
    found = mmlda.evaluate(model, digits[1], attacks, n=10, show=False)
    names = [line.split("  ")[0] for line in str(found).splitlines()[1:8]]
    assert names[1:] == [
        "PGD 0.1, seed=0, steps=1",
        "PGD 0.1, seed=0, steps=2",
        "PGD 0.1, seed=5, steps=2",
        "FGSM 0.1",
        "WorstCase 0.1, list 1",
        "WorstCase 0.1, list 2",
    ]
    assert len(found.plot().axes[0].patches) == 7


def test_a_method_of_a_module_is_measured_in_eval_mode(digits):
    net = nn.Sequential(nn.Flatten(), nn.Dropout(0.9), nn.Linear(64, 10))
    expected = accuracy(net.eval(), digits[1]).accuracy
    net.train()
    assert accuracy(net.forward, digits[1]).accuracy == expected
    assert net.training and net[1].training


@pytest.mark.parametrize("wrong", [BIM, 0.1, None])
def test_what_is_no_attack_is_refused(model, digits, wrong):
    with pytest.raises(ValueError, match=r"^attacks must be attacks such as PGD\(eps=8/255\) or names"):
        mmlda.evaluate(model, digits[1], [wrong], show=False)
    with pytest.raises(ValueError, match=r"^attacks must be attacks such as PGD"):
        mmlda.evaluate(model, digits[1], wrong, show=False)


def test_rows_of_a_table_are_not_called_images(capsys):
    data = mmlda.data.table(torch.rand(30, 5, generator=torch.Generator().manual_seed(0)), torch.arange(30) % 3)
    model = build({"backbone": "mlp", "inputs": 5, "num_classes": 3}, seed=0)
    rows = DataLoader(list(zip(data.images, data.labels.tolist())), batch_size=10)
    for source in (data, rows):
        found = mmlda.evaluate(model, source, "fgsm:0.1")
        assert str(found).startswith("30 rows, 3 classes") and found.clean.what == "accuracy on 30 rows of the data"
        assert found.attacks[0].what == "accuracy under FGSM on 30 rows of the data"
    assert "clean rows: 30/30 rows" in capsys.readouterr().err


def test_other_priors_and_a_temperature_from_the_images_left_over(model, digits):
    test = digits[1]
    net = build({"backbone": "conv_net", "width": 4, "head": "softmax", "priors": [0.55, *[0.05] * 9]}, seed=0)
    net.eval()
    for priors, expected in (
        ("uniform", net.with_priors(None)),
        ("empirical", net.with_priors("empirical", test.labels)),
    ):
        found = mmlda.evaluate(net, test, priors=priors, show=False).clean
        own = mmlda.evaluate(expected, test, show=False).clean
        assert (found.value, found.numbers, found.network_sha256) == (own.value, own.numbers, own.network_sha256)
    rest, part = mmlda.data.holdout(test, 60)
    found = mmlda.evaluate(model, (test.pixels(), test.labels), n=60, temperature=True, show=False).clean
    own = mmlda.evaluate(model, part, temperature=rest, show=False).clean
    assert found.numbers == pytest.approx(own.numbers) and "temperature" in own.numbers
    with pytest.raises(ValueError, match="n must be from 1 to 359, as a temperature needs the other images, got 360"):
        mmlda.evaluate(model, test, n=360, temperature=True, show=False)
    with pytest.raises(
        ValueError, match=r"priors must be None for a network that is not an mmlda.Classifier, got 'uni"
    ):
        mmlda.evaluate(net.forward, test, priors="uniform", show=False)


@pytest.fixture(scope="module")
def unbalanced(model):
    """A network with priors."""
    return model.with_priors([0.55, *[0.05] * 9])


def test_results_and_table_say_which_priors_and_whether_a_temperature(unbalanced, digits, tmp_path):
    test = digits[1].subset(slice(60))
    loader = DataLoader(test, batch_size=30)
    for priors, other, data, out in (
        (None, None, test, tmp_path / "own"),
        ("uniform", None, test, tmp_path / "uniform"),
        ("empirical", digits[0], test, None),
        ("uniform", digits[0], loader, None),
    ):
        how = {"priors": priors, "temperature": other}
        found = mmlda.evaluate(unbalanced, data, "fgsm:0.1", out=out, show=False, **how)
        expected = (priors, other is not None)
        assert [(r.priors, r.temperature) for r in found.results] == [expected] * 2
        assert ("class priors" in str(found)) is (priors is not None)
        assert f"class priors: {priors}, in place of the network's own" in str(found) or priors is None
        if out is not None:
            assert [(r.priors, r.temperature) for r in load_all(out)] == [expected] * 2


def test_a_folder_of_other_priors_is_refused_by_that_name(model, unbalanced, digits, tmp_path):
    test = digits[1].subset(slice(60))
    first = mmlda.evaluate(unbalanced, test, priors="uniform", out=tmp_path, show=False).clean
    for priors in (None, "empirical"):
        with pytest.raises(ValueError, match=r"clean' \(other priors\)$"):
            mmlda.evaluate(unbalanced, test, priors=priors, out=tmp_path, show=False)
    with pytest.raises(ValueError, match=r"\(other network\)$"):
        mmlda.evaluate(build(model.config, seed=1).eval(), test, priors="uniform", out=tmp_path, show=False)
    again = mmlda.evaluate(unbalanced, test, priors="uniform", out=tmp_path, show=False, temperature=digits[0]).clean
    assert again.value == first.value and again.temperature


def test_work_from_before_priors_were_recorded_is_resumed(unbalanced, digits, tmp_path, capsys):
    test = digits[1].subset(slice(60))
    mmlda.evaluate(unbalanced, test, priors="uniform", out=tmp_path, show=False)
    path = tmp_path / "clean" / "work.json"
    work = json.loads(path.read_text())
    del work["priors"]
    path.write_text(json.dumps(work))
    with warnings.catch_warnings(action="error"):  # about damaged chunks
        mmlda.evaluate(unbalanced, test, priors="uniform", out=tmp_path)
    assert "60/60" not in capsys.readouterr().err  # nothing was computed again


@pytest.mark.parametrize("head", ["softmax", "mmlda"])
def test_uniform_priors_of_a_network_that_has_them_already_cause_a_warning(digits, head):
    net = build({"backbone": "conv_net", "width": 4, "head": head}, seed=0).eval()
    words = r"priors are uniform already, so priors='uniform' changes nothing; .* model.with_priors\(None, old="
    with pytest.warns(UserWarning, match=words) as caught:
        found = mmlda.evaluate(net, digits[1], n=60, priors="uniform", show=False).clean
    assert len(caught) == 1 and caught[0].filename == __file__
    assert found.numbers == mmlda.evaluate(net, digits[1], n=60, show=False).clean.numbers
    shares = [0.55, *[0.05] * 9]
    adjusted = net.with_priors(None, old=shares)  # "uniform" undoes this, as the docstring says
    with warnings.catch_warnings(action="error"):
        undone = mmlda.evaluate(adjusted, digits[1], n=60, priors="uniform", show=False).clean
        mmlda.evaluate(net, digits[1], n=60, priors="empirical", show=False)
    assert undone.numbers == found.numbers != mmlda.evaluate(adjusted, digits[1], n=60, show=False).clean.numbers
