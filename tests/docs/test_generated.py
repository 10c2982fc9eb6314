"""The generated parts of the pages are up to date, and their scripts show what results say."""

import importlib
import re

import from_results
import make_benchmark_tables
import make_claims
import make_model_cards
import pytest

from mmlda import zoo
from mmlda.paper import numbers
from mmlda.paper.rows import ADAM, MMLDA, SR
from mmlda.results import Result, weights_digest

SCRIPTS = ("make_readme", "make_claims", "make_model_cards", "make_benchmark_tables")


def result(kind, value, *, data="cifar10", row=SR, name="x", cell=None, **fields):
    fields = {**row.fields(data), **fields}
    return Result(
        name=name, kind=kind, what=kind, value=value, **{**fields, "cell": {**fields["cell"], **(cell or {})}}
    )


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_page_is_what_its_script_writes_now(script):
    maker = importlib.import_module(script)
    for page, parts in maker.pages().items():
        text = page.read_text()
        assert text == from_results.put(text, maker.SCRIPT, parts), f"run python tools/{script}.py"


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_row_of_a_table_has_as_many_cells_as_its_head(script):
    for page in importlib.import_module(script).pages():
        tables = re.findall(r"(?:^\|.*\n)+", page.read_text(), re.M)
        assert tables
        for table in tables:
            assert re.match(r"\|.*\n\|[-| ]+\|\n\|", table), table[:200]
            assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1, table[:200]


def test_a_part_without_markers_is_an_error():
    begin = "<!-- begin: tools/s.py: a -->\n"
    assert from_results.put(f"{begin}old\n<!-- end -->\nkept\n", "s.py", {"a": "new\n"}) == (
        f"{begin}new\n<!-- end -->\nkept\n"
    )
    for page in ("", begin, f"{begin}<!-- begin: tools/s.py: b -->\n<!-- end -->\n"):
        with pytest.raises(ValueError, match=r"page must have <!-- begin: tools/s\.py: a -->"):
            from_results.put(page, "s.py", {"a": "x\n"})


def test_results_are_selected_by_fields_coordinates_and_row():
    found = [
        result("table2", 0.1, attack="BIM", eps=0.04),
        result("table2", 0.2, attack="BIM", eps=0.12, row=MMLDA),
        result("table2", 0.3, attack="JSMA", eps=0.12, cell={"surface": "logits"}),
    ]

    def values(**wanted):
        return [r.value for r in from_results.select(found, "table2", **wanted)]

    assert values() == [0.1, 0.2, 0.3] and values(row=SR) == [0.1, 0.3] and values(eps=0.12, row=MMLDA) == [0.2]
    assert values(surface="logits") == [0.3] and values(eps=0.2) == [] and from_results.select(found, "table3") == []


def test_numbers_are_rounded_with_a_true_minus():
    assert from_results.fixed(-0.04) == "0.0" and from_results.fixed(-91.25, 1, sign=True) == "−91.3"
    assert from_results.fixed(0.15) == "0.2" and from_results.fixed(11.35) == "11.4"
    assert from_results.percent(0.07, 2) == "7.00" and from_results.percent(None) == "–"
    assert [from_results.size(eps) for eps in (0.04, 0.2, 8 / 255)] == ["0.04", "0.2", "8/255"]


def test_verdicts_name_their_places_only_where_they_differ():
    claims = [result("claim", 1.0, data=data, row=MMLDA, claim="table1", holds=True) for data in numbers.DATASETS]
    assert make_claims.verdict(claims, "table1") == "**holds**"
    claims.append(result("claim", 1.0, row=ADAM, claim="table1", holds=None))
    assert make_claims.verdict(claims, "table1") == "**holds** (Adam: not decided)"
    tied = [
        result("claim", 1.0, data=d, claim="fig4", holds=False if d == "cifar10" else None) for d in numbers.DATASETS
    ]
    assert make_claims.verdict(tied, "fig4") == "**does not hold** (MNIST: not decided)"


def test_jsma_is_read_in_the_way_that_fits_the_row_best():
    paper = numbers.table2("cifar10", SR, "JSMA", 0.12)
    found = [
        result("table2", paper + apart, attack="JSMA", eps=0.12, target=target, cell={"surface": surface})
        for surface, target, apart in (("logits", "random", 0.3), ("softmax", "random", 0.02))
    ]
    gaps = make_claims.gaps([*found, result("table2", 0.6, attack="BIM", eps=0.04)], "cifar10", SR)
    assert gaps == pytest.approx({"JSMA 0.12": 0.02, "BIM 0.04": 0.545}) and make_claims.within("cifar10", gaps) == 1


def test_cells_are_counted_above_and_below_sr_by_the_interval():
    found = [
        result("table2", value, row=row, attack=attack, eps=0.04, n=1000)
        for attack, values in {"FGSM": (0.2, 0.3), "BIM": (0.6, 0.3), "ILCM": (0.3, 0.301)}.items()
        for row, value in zip((SR, MMLDA), values, strict=True)
    ]
    assert make_claims.sides(found, "cifar10", MMLDA) == "1 above, 1 below of 3"


def test_the_overview_has_every_sentence_that_is_judged():
    template = (from_results.ROOT / "tools" / "claims-overview.md").read_text()
    assert set(numbers.SENTENCES) - {"suspects", "fig3-recipe"} <= set(re.findall(r"\{([\w-]+)\}", template))


def test_a_card_has_the_results_of_its_own_weights(tmp_path):
    own = weights_digest(zoo.load("mnist-sr").state_dict())
    for name, value, sha in (("own", 0.12, own), ("foreign", 0.77, "0" * 64)):
        result("worst", value, data="mnist", name=name, eps=0.12, network_sha256=sha).save(tmp_path)
    result("audit", "masked", data="mnist", name="audit", eps=0.12, network_sha256=own).save(tmp_path)
    made = make_model_cards.cards(tmp_path)
    mine = made["cards"].split("## mnist-sr\n")[1]
    assert "| worst case, % | 12.0 at 0.12 |" in mine and "although gradient attacks make it look so" in mine
    assert "77.0" not in made["cards"] and "robustness not audited" in made["cards"].split("## mnist-sr\n")[0]
    assert [line.split("]")[0] for line in made["networks"].splitlines()[2:]] == [f"| [{name}" for name in zoo.names()]


def test_a_robust_network_has_autoattacks_number_and_its_cost_on_its_card(tmp_path, monkeypatch):
    about = zoo.about("mnist-sr")
    foe = {"attack": "pgd", "eps": 0.3, "steps": 5, "step": 0.4, "random_start": True, "pairing": 0.5}
    recipe = about["recipe"] | {"schedule": "cosine", "milestones": [], "average": 0.999, "adversary": foe}
    robust = [
        {"attack": kind, "eps": 0.3, "n": 10_000, "robust": n} for kind, n in (("autoattack", 9321), ("worst", 9333))
    ]
    about |= {"recipe": recipe, "robust": robust, "seconds": 1200.0, "trained_together": 4}
    monkeypatch.setattr(zoo, "names", lambda: ("mnist-sr",))
    monkeypatch.setattr(zoo, "about", lambda name: about)
    card = make_model_cards.cards(tmp_path)["cards"]
    assert "| AutoAttack, all test images, % | 93.21 at 0.3 |" in card
    assert "| worst case, all test images, % | 93.33 at 0.3 |" in card
    assert "| cost | 5.0 minutes on one NVIDIA H200 (20 minutes together with 3 others) |" in card
    for words in ("rate along a cosine to 0", "averaged with decay 0.999", "logits paired with weight 0.5"):
        assert words in card


def test_training_from_a_loader_is_shown_beside_training_from_memory(monkeypatch):
    seconds = {"plain": 0.02, "ours": 0.001, "ours, from a DataLoader": 0.00102}
    found = {"training-h200": {"seconds": seconds, "batch_size": 128, "device": "GPU"}}
    monkeypatch.setattr(make_benchmark_tables, "read", lambda name: found.get(name, {"seconds": {}}))
    rows = {row[0]: row[2:] for row in make_benchmark_tables.training()}
    assert rows["training step, Resnet-32, batch 128, from a DataLoader of random images, read in batches"] == [
        "1.02 ms",
        "from memory 1 ms (0.98 x); plain 20 ms (20 x)",
    ]


def test_scikit_learns_classifiers_are_columns(monkeypatch):
    rows = [
        {"dataset": data, "estimator": name, "accuracy": 0.95, "sd": 0.01, "cpu_seconds": 0.5}
        for data in ("iris", "breast_cancer")
        for name in ("Ours", "Theirs")
    ]
    about = {"repeats": 2, "splits": 5, "scikit-learn": "1", "torch": "2"}
    monkeypatch.setattr(make_benchmark_tables, "read", lambda name: {"result": rows, **about})
    lines = make_benchmark_tables.scikit_learn().splitlines()
    assert lines[0] == "| data | Ours | Theirs |"
    assert lines[3] == "| breast cancer | 95.0 ± 1.0, 0.5 s | 95.0 ± 1.0, 0.5 s |"


def test_long_tailed_results_are_averaged_over_seeds(monkeypatch):
    monkeypatch.setattr(make_benchmark_tables, "read", lambda name: {})
    assert make_benchmark_tables.long_tailed() == ""
    about = {"device": "GPU", "versions": {"torch": "2"}, "commit": "1", "task": "cifar10-lt-100"}
    about |= {"measured_on": "test images", "train_steps": 9, "variant": "sgd"}
    records = [about | {"method": "softmax", "measured_on": "held-out training images", "train_steps": 3}]
    # chosen before the others
    records.append(about | {"method": "softmax", "variant": "adam", "seed": 0, "balanced": 0.1, "adjusted": {}})
    for seed, balanced in enumerate((0.7, 0.72, 0.71)):
        adjusted = {"adjusted": {"balanced": balanced + 0.05}}
        records.append({**about, "method": "softmax", "seed": seed, "balanced": balanced, **adjusted})
    records.append({**about, "method": "mmlda-priors", "seed": 0, "balanced": 0.78})
    monkeypatch.setattr(make_benchmark_tables, "read", lambda name: records)
    lines = make_benchmark_tables.long_tailed().splitlines()
    assert lines[2].endswith("| – | – | 71.0 ± 1.0 | – | – | – |") and "| 76.0 ± 1.0 |" in lines[3]
    assert lines[6].startswith("| MM-LDA, priors in training |") and "| 78.0 |" in lines[6]
    assert "seeds 0, 1, 2" in lines[-1] and "; 9 steps; " in lines[-1] and "of 3 steps" in lines[-1]


def test_cifar_100_is_a_row_of_many_classes(monkeypatch):
    about = {"device": "GPU", "versions": {"torch": "2"}, "commit": "1", "measured_on": "test images"}
    about |= {"train_steps": 9, "head_parameters": 0, "head_bytes": 1000, "seconds_per_step": 0.002, "variant": "sgd"}
    strings = [about | {"task": "strings-3", "head": "mmlda", "seed": n, "error": 0.02, "at_once": 3} for n in (0, 1)]
    cifar = [
        about | {"task": "cifar100", "method": method, "seed": n, "accuracy": accuracy, "trained_together": 8}
        for n in (0, 1)
        for method, accuracy in (("softmax", 0.7), ("mmlda-64", 0.69), ("mmlda-128", 0.5))
    ]
    found = {"many-classes-learning-h200": strings, "long-tailed-h200": cifar}
    monkeypatch.setattr(make_benchmark_tables, "read", found.__getitem__)
    lines = make_benchmark_tables.learning().splitlines()
    assert lines[3] == "| CIFAR-100 | 100 | softmax | 30.00 ± 0.00 | 0, 1 kB | 9 | 2.00 ms |"
    assert lines[4].startswith("| CIFAR-100 | 100 | MM-LDA | 31.00 ± 0.00 |") and "3 to 8 networks" in lines[-1]
