"""The results in the repository: whole, told in the README as they are, and true where the data is here."""

import hashlib
import re
import statistics
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

import mmlda
from mmlda._utils.tensors import packed
from mmlda.paper import numbers
from mmlda.paper.tables import difference
from mmlda.paper.verification import verify
from mmlda.results import load_all

ROOT = Path(__file__).parents[2]
RESULTS = load_all(ROOT / "results")
KINDS = ("table1", "table2", "table3", "worst")  # with every image's outcome


SHIPPED = {hashlib.sha256(packed(mmlda.load(name).state_dict())).hexdigest() for name in mmlda.zoo.names()}


def ships(result):
    return result.network is not None and result.network.get("sha256") in SHIPPED


def test_every_result_is_whole_and_says_where_it_comes_from():
    assert len(RESULTS) > 40
    for result in RESULTS:
        assert result.versions["torch"] and result.device and re.fullmatch(r"[0-9a-f]{12}", result.commit), result.name
        if result.kind in ("table1", "table2"):
            outcomes = load(result.read_outcomes(ROOT / "results"))
            assert len(outcomes["clean"]) == result.n
            assert ships(result) or result.seed or result.cell["model"] not in ("SR", "MM-LDA"), result.name
            assert result.seed is not None and result.steps and result.recipe and result.data["sha256"]


def test_papers_numbers_beside_ours_are_the_papers():
    for result in RESULTS:
        if result.kind == "table2":
            cell = result.cell
            assert result.paper == numbers.table2(cell["data"], cell["model"], cell["attack"], cell["eps"])


def test_the_readme_says_what_the_results_say():
    text = (ROOT / "README.md").read_text()
    shown, heads = {}, {"softmax": "SR", "MM-LDA": "MM-LDA", "MM-LDA, Adam": "MM-LDA (Adam)"}
    line = r"^\| (CIFAR-10|MNIST), (0\.\d+): Resnet-32 \((softmax|MM-LDA|MM-LDA, Adam)\) \| (.*) \|$"
    for row in re.findall(line, text, re.M):
        data, eps, head, cells = row
        for attack, cell in zip(("FGSM", "BIM", "ILCM"), cells.replace("*", "").split(" | ")):
            ours, paper = map(float, cell.split(" / "))
            key = data.lower().replace("-", ""), heads[head], attack, float(eps)
            shown[key] = ours, paper
    assert len(shown) == 21
    cells = [r for r in RESULTS if r.kind == "table2"]
    found = {tuple(r.cell[key] for key in ("data", "model", "attack", "eps")): r for r in cells}
    for key, (ours, paper) in shown.items():
        assert (round(found[key].value, 1), found[key].paper) == (ours, paper), key
    audited = [r for r in RESULTS if r.kind == "audit" and ships(r)]
    plain, hardened = ([r for r in audited if bool(r.recipe["adversary"]) == robust] for robust in (False, True))
    assert {r.value for r in plain} == {"none"} and {r.value for r in hardened} == {"real"}
    assert (len(plain), len(hardened)) == (5, 2) and {r.n for r in audited} == {200}
    assert "audit (200 images each; 0.04 on CIFAR-10, 0.12 on MNIST) calls all five networks" in " ".join(text.split())


@pytest.mark.parametrize("page", ["README.md", "docs/training.md"])
def test_the_test_errors_on_the_pages_are_those_of_the_results(page):
    rows = {"Resnet-32 (softmax)": "SR", "Resnet-32 (softmax, Adam)": "SR (Adam)", "Resnet-32 (MM-LDA)": "MM-LDA",
            "Resnet-32 (MM-LDA, Adam)": "MM-LDA (Adam)", "SR (momentum SGD)": "SR", "SR (Adam)": "SR (Adam)",
            "MM-LDA": "MM-LDA", "MM-LDA (Adam), `cifar10-mmlda-adam`": "MM-LDA (Adam)"}  # fmt: skip
    text = (ROOT / page).read_text().split("| test error, % |")[1].split("\n\n")[0]
    shown = 0
    for line in text.splitlines()[2:]:
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        for data, ours, paper in (("mnist", *cells[:2]), ("cifar10", *cells[2:])):
            here = [r for r in RESULTS if r.kind == "table1" and r.cell["data"] == data]
            found = [r for r in here if r.cell["model"] == rows[name]]
            values = [r.value for r in found]
            if "±" in ours:
                assert sorted(r.seed for r in found) == [0, 1, 2]
                assert ours == f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}", (name, data)
                assert paper in ({"", "–"} if found[0].paper is None else {f"{found[0].paper:.2f}"})
                shown += 1
    assert shown == 7


def test_the_readmes_figures_and_numbers_are_drawn_from_the_results(tmp_path, monkeypatch):
    matplotlib = pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(ROOT / "docs")
    import make_result_figures as maker

    text, of = " ".join((ROOT / "README.md").read_text().split()), {r.name: r for r in RESULTS}
    for name in ("robustness", "distortions"):
        assert f"(docs/figures/{name}.svg)" in text
        getattr(maker, name)(tmp_path)
        drawn, there = ((folder / f"{name}.svg").read_text() for folder in (tmp_path, ROOT / "docs" / "figures"))
        if f"Matplotlib v{matplotlib.__version__}," not in there:
            pytest.skip("another matplotlib draws other paths")
        assert drawn == there, "run python tools/make_result_figures.py"
    fit = of["latent-cifar10-mm-lda-0"].numbers
    assert f"lie {fit['mean_offset']:.1f} from means of norm 10" in text and f"of {fit['variance']:.3f} where" in text
    cells = ("cifar10", "0.007843"), ("cifar10", "0.01569"), ("mnist", "0.12")
    left = [[of[f"worst-{data}-{row}-{eps}-0"].value for row in ("sr", "mm-lda")] for data, eps in cells]
    assert left == [[0.1, 0.1], [0.0, 0.0], [0.0, 0.0]]
    assert "both keep 0.1% of CIFAR-10 at 2/255 and nothing at 4/255, and nothing of MNIST at 0.12" in text
    keeps = [of[f"worst-mnist-{row}-0.04-0"].value for row in ("sr", "mm-lda")]
    assert f"of MNIST at 0.04 softmax keeps {keeps[0]:.1f}% and MM-LDA {keeps[1]:.1f}%" in text
    tables = [f"table3-{data}-{row}-untargeted-0" for data in ("mnist", "cifar10") for row in ("sr", "mm-lda")]
    assert all(of[name].numbers["success_rate"] == 1.0 for name in tables)
    assert of["claim-cifar10-table3-untargeted"].interval[0] < 1
    assert f"on MNIST {of['claim-mnist-table3-untargeted'].value:.2f} times as far" in text
    biased = of["claim-cifar10-fig3"]
    assert f"above softmax on {biased.numbers['better']}, by {biased.value:.2f} points in the mean" in text
    control = of["claim-cifar10-fig3-recipe"]
    better = sum(gap > 0 for gap in control.series["differences"])
    assert f"trained with MM-LDA's optimizer, on {better}, by {control.value:.2f}" in text
    tuned = [r for r in RESULTS if r.kind == "worst" and r.cell["model"].startswith("SR +")]
    assert len(tuned) == 72
    small = {r.cell["model"]: r.value for r in tuned if r.cell["data"] == "cifar10" and r.cell["eps"] == 2 / 255}
    made = max(value for model, value in small.items() if "SAT" in model)
    assert max(r.value for r in tuned if r.cell["data"] == "cifar10" and r.cell["eps"] >= 8 / 255) == 0.0
    assert f"keeps at most {max(small.values())}% of CIFAR-10 at 2/255 (SAT made for it at most {made}%)" in text
    assert "and nothing at 8/255 and beyond, and on MNIST" in text
    most = [max(r.value for r in tuned if r.cell["data"] == "mnist" and r.cell["eps"] == e) for e in (0.04, 0.12)]
    assert f"on MNIST at most {most[0]}% at 0.04 and {most[1]}% at 0.12" in text
    assert biased.numbers["sets"] == 20 and {r.steps for r in RESULTS if r.kind == "fig3"} == {10_000}


def test_what_was_counted_from_stored_outcomes_is_what_they_say():
    of = {r.name: r for r in RESULTS}
    for r in RESULTS:
        if r.kind == "table2" and r.cell["attack"] in ("FGSM", "BIM"):  # no target: a success is a wrong label
            broken = load(r.read_outcomes(ROOT / "results"))["success"].double().mean().item()
            assert r.numbers["plain_accuracy"] == pytest.approx(1 - broken), r.name
    for data in numbers.DATASETS:
        alike, limit = {}, {}
        for row in ("mm-lda", "sr"):
            r = of[f"fig4-{data}-{row}-0"]
            alike[row] = load(r.read_outcomes(ROOT / "results"))["correlation"].abs()
            limit[row] = torch.tensor(r.numbers["correlation_limit"]).half()  # as the correlations are kept
            assert int((alike[row] > limit[row]).sum()) == r.numbers["semantic"]
        for one in ("mm-lda", "sr"):
            ours, base = (100 * float((alike[row] > limit[one]).double().mean()) for row in ("mm-lda", "sr"))
            assert f"limit for both {ours:.2f}% for MM-LDA and {base:.2f}% for SR" in of[f"claim-{data}-fig4"].what
    errors = [of[f"fig5-cifar10-C{c}-0"].series["errors"] for c in ("2", "1.5")]
    gaps = [a - b for a, b in zip(*errors)]
    half = 2.776 * statistics.stdev(gaps) / 5**0.5  # t for 4 degrees of freedom
    mean = statistics.mean(gaps)
    assert f"{mean:+.2f} points (95% interval over the folds {mean - half:+.2f} to {mean + half:+.2f})" in (
        of["claim-cifar10-fig5"].what)  # fmt: skip
    assert of["claim-cifar10-fig5"].holds is None and of["claim-mnist-fig4"].holds is None


def test_what_the_page_of_suspects_says_of_the_networks_that_ship():
    text, of = " ".join((ROOT / "docs" / "suspects.md").read_text().split()), {r.name: r for r in RESULTS}

    def cell(data, row, view, attack, eps):
        return of[f"suspect-{data}-{row}-ships-{view}-{attack}-{eps}-0"]

    def still(data, row):
        found = [cell(data, row, "clipped-probabilities", "bim", eps) for eps in ("0.12", "0.2")]
        assert len({r.value for r in found} | {round(100 * r.numbers["zero_gradient"], 6) for r in found}) == 1
        return f"{found[0].value:.1f}%"

    mnist, adam, sr = still("mnist", "mm-lda"), still("cifar10", "mm-lda-adam"), still("cifar10", "sr")
    logits = [f"{cell('mnist', 'mm-lda', 'logits', 'bim', eps).value:.1f}%" for eps in ("0.12", "0.2")]
    assert f"MM-LDA on MNIST {mnist} at 0.12 and at 0.2 (its logits: {logits[0]} and {logits[1]})" in text
    assert cell("cifar10", "mm-lda-adam", "clipped-probabilities", "bim", "0.04").value == float(adam[:-1])
    assert f"on CIFAR-10 {adam} at 0.04, 0.12 and 0.2 alike (its logits: nothing)" in text
    assert {cell("cifar10", "mm-lda-adam", "logits", "bim", eps).value for eps in ("0.04", "0.12", "0.2")} == {0.0}
    assert cell("cifar10", "mm-lda-adam", "clipped-probabilities", "bim", "0.04").n == 250
    base = [f"{cell('mnist', 'sr', 'clipped-probabilities', 'bim', eps).value:.1f}%" for eps in ("0.12", "0.2")]
    assert f"SR keeps {base[0]} and {base[1]} on MNIST and {sr} on CIFAR-10" in text
    own = {row: [cell("cifar10", row, "predicted-labels", "bim", eps).value for eps in ("0.04", "0.12", "0.2")]
           for row in ("sr", "mm-lda", "mm-lda-adam")}  # fmt: skip
    assert "SR on CIFAR-10 has {}%, {}% and {}% at 0.04, 0.12 and 0.2".format(*own["sr"]) in text
    assert f"there the view has {max(own['mm-lda'] + own['mm-lda-adam'])}% and less" in text
    for data, row, eps in (("mnist", "mm-lda", "0.12"), ("cifar10", "mm-lda-adam", "0.04")):
        narrow, wide = (cell(data, row, view, "fgsm", eps).value for view in ("logits", "logits-float64"))
        assert re.search(rf"{narrow:.1f}%.{{0,25}} and {wide:.1f}%", text)


def test_what_the_pages_say_of_the_ten_suspects():
    page, of = (ROOT / "docs" / "suspects.md").read_text(), {r.name: r for r in RESULTS}
    text, readme = (" ".join(words.split()) for words in (page, (ROOT / "README.md").read_text()))
    eps = [f"{e:g}" for e in numbers.EPS]

    def cell(data, row, view, attack, at):
        return of[f"suspect-{data}-{row}-{view}-{attack}-{at}-0"]

    def six(data, row, view):
        return [cell(data, row, view, attack, at).value for attack in ("fgsm", "bim") for at in eps]

    def left(data, row):
        return [cell(data, row, "worst-case", "worstcase", at).value for at in eps]

    for data, name in (("mnist", "MNIST"), ("cifar10", "CIFAR-10")):
        theirs = [numbers.table2(data, "MM-LDA", kind, e) for kind in ("FGSM", "BIM") for e in numbers.EPS]
        assert f"| {name}, the paper's MM-LDA | {' | '.join(f'{v:.1f}' for v in theirs)} | |" in page
        plain = " | ".join(f"{v:.1f}" for v in six(data, "centre-loss", "logits"))
        assert f"| {name}, centre loss, its logits as they are | {plain} |" in page
        wide = " | ".join(f"{v:.1f}" for v in six(data, "centre-loss", "logits-float64"))
        assert f"| the same in float64 | {wide} | |" in page
        assert left(data, "centre-loss")[1:] == [0.0, 0.0]
        words = {(m, v): word for m, v, word in of[f"claim-{data}-suspects"].series["verdicts"]}
        found = {cell for cell, word in words.items() if word != "no"}
        views = ("logits", "probabilities", "clipped probabilities", "predicted labels")
        assert found == ({("centre loss", view) for view in views} | {("C = 10000", "clipped probabilities")}
                         if data == "mnist" else {("centre loss", "clipped probabilities")})  # fmt: skip
        assert len(words) == 9 * 6 and {words[cell] for cell in found} == {"explains"}
        same = {cell(data, row, "logits", "bim", "0.04").network["sha256"] for row in ("mm-lda", "soft-targets")}
        assert len(same) == 1
    clipped = six("cifar10", "centre-loss", "clipped-probabilities")
    shown = " | ".join(f"{v:.1f}" for v in clipped)
    assert f"CIFAR-10, centre loss, clipped probabilities | {shown} | 0.0, 0.0 |" in page
    for data, view, words in (("mnist", "logits", "{}% of the images have a gradient of exactly zero"),
                              ("cifar10", "logits", "(zero gradients: {}%)"),
                              ("cifar10", "clipped-probabilities", "within 7 points ({}%)")):  # fmt: skip
        zero = 100 * cell(data, "centre-loss", view, "bim", "0.12").numbers["zero_gradient"]
        assert words.format(f"{zero:.1f}") in text
    assert min(six("mnist", "c-10000", "clipped-probabilities")) == 97.5 and left("mnist", "c-10000")[1:] == [0.0, 0.0]
    longer = [cell("cifar10", "four-times-the-steps", "clipped-probabilities", "bim", at).value for at in eps]
    assert f"with clipped probabilities BIM leaves {max(longer)}% and less" in text
    for name, words in (("mnist-centre-loss-0.12", "MNIST at 0.12 (standard gradient attacks leave {}%, all attacks "
                         "together {}%)"), ("cifar10-centre-loss-0.04", "CIFAR-10 at 0.04 ({}% and {}%)")):  # fmt: skip
        r = of[f"audit-{name}-0"]
        assert r.value == "masked" and r.n == 200
        assert words.format(*(f"{r.numbers[key]:.1f}" for key in ("standard_accuracy", "worst_accuracy"))) in text
    assert of["audit-mnist-c-10000-0.12-0"].value == "none"
    ten = {(r.n, r.device) for r in RESULTS if r.kind == "suspect" and "-ships-" not in r.name}
    assert ten == {(1000, "NVIDIA H200")}
    bim = cell("mnist", "centre-loss", "logits", "bim", "0.12").value
    assert f"on MNIST at 0.12 BIM leaves it {bim}% (paper 98.6; 1,000 images), and the worst case 0.0%" in readme
    bim = cell("cifar10", "centre-loss", "logits", "bim", "0.04").value
    assert f"On CIFAR-10 at 0.04 BIM leaves it {bim}%, and {clipped[3]}% (paper 91.2; 1,000 images)" in readme
    assert left("cifar10", "centre-loss")[0] == 0.0
    sr, mm = (of[f"worst-cifar10-{row}-pgd-0.03137-0"] for row in ("sr", "mm-lda"))
    assert f"softmax keeps {sr.value}% of CIFAR-10 at 8/255 and MM-LDA {mm.value}%" in readme
    low, high = difference([sr, mm], "MM-LDA (PGD)", "SR (PGD)")
    assert f"(95% interval of the difference {low:+.1f} to {high:+.1f})" in readme
    assert {sr.steps, mm.steps} == {20_000}
    audits = [of[f"audit-{name}-0"].numbers for name in ("mnist-centre-loss-0.12", "cifar10-centre-loss-0.04")]
    assert "{:.1f} nats on MNIST and {:.1f} on CIFAR-10".format(*(a["median_gap"] for a in audits)) in text
    assert f"it gets {audits[1]['clean_accuracy']}% of the audit's 200 clean images right" in text


def quick(result):
    """Whether images can be attacked again in seconds on a CPU: all but C&W, and of JSMA and the worst case some."""
    cell = result.cell
    if cell.get("attack") == "JSMA":
        return (cell["eps"], cell["surface"], cell["target"]) == (0.12, "softmax", "least-likely")
    some = (0.12,) if cell["data"] == "mnist" else (8 / 255, 0.12)  # where images break: those that hold take minutes
    return result.kind != "table3" and (result.kind != "worst" or cell["eps"] in some)


@pytest.mark.long
@pytest.mark.parametrize("name", [r.name for r in RESULTS if r.kind in KINDS and ships(r) and quick(r)])
def test_a_number_is_true_where_the_data_is_here(name):
    data = name.split("-")[1]
    if mmlda.data.find(data) is None:
        pytest.skip(f"{data} is not here: mmlda data fetch {data}")
    assert verify(ROOT / "results" / f"{name}.json", n=40, seed=0).agrees


@pytest.mark.long
@pytest.mark.parametrize("data", numbers.DATASETS)
def test_accuracies_are_those_of_the_outcomes_where_the_data_is_here(data):
    """Of the views, all that is right under attack; elsewhere what was right before too, and all of it beside."""
    if mmlda.data.find(data) is None:
        pytest.skip(f"{data} is not here: mmlda data fetch {data}")
    labels, seen = mmlda.data.load(data)[1].labels, 0
    for r in RESULTS:
        if r.kind in ("table2", "worst", "suspect") and r.cell["data"] == data:
            outcomes = load(r.read_outcomes(ROOT / "results"))
            right = outcomes["prediction"].long() == labels[: r.n]
            before = outcomes["clean"].long() == labels[: r.n]
            kept = right if r.kind == "suspect" else right & before
            assert r.value == pytest.approx(100 * kept.double().mean().item()), r.name
            if r.kind != "suspect":
                assert r.numbers["plain_accuracy"] == pytest.approx(right.double().mean().item()), r.name
            seen += 1
    assert seen > 150
