"""The first screens of the report: headline, curve, key numbers, cards, definitions, and what is folded."""

import re
from pathlib import Path

import pytest
import report_results
from report_page import Tree, data_of, said, text

from mmlda import report
from mmlda.report import figures, glossary, summary, tables
from mmlda.report.entries import Entry
from mmlda.results import Result


def test_the_verdict_and_the_figures_come_first_then_numbers_cards_and_claims(page):
    order = [n for n in page.all() if n["name"] in ("h2", "h3") or "lead" in (n["at"].get("class") or "").split()]
    assert [said(n).replace("\u2011", "-") for n in order[:6]] == [
        "Summary",
        "MM-LDA is not robust on digits at ε = 0.04. MM-LDA only looks robust on CIFAR-10 at ε = 0.04.",
        "Table 2 at a glance",
        "Key numbers",
        "Which networks are robust",
        "What the paper claims",
    ]
    summary_ = page.one("section", id="summary")
    drawings = [n["at"]["aria-label"] for n in page.all(role="img", node=summary_)]
    assert drawings[:2] == [
        f"Line chart: accuracy on {data} under BIM against the perturbation, by network"
        for data in ("digits", "CIFAR-10")
    ]
    claims = [said(n) for n in page.one("ul", class_="claims")["in"] if isinstance(n, dict)]
    assert any("class-biased" in c and "✓ holds" in c for c in claims)
    assert any("semantic" in c and "✕ does not hold" in c and "○ not decided" in c for c in claims)


def test_the_curve_shows_the_paper_beside_ours_for_each_network(built):
    attack, lines = tables.curves(report.load(built[0] / "results"))
    assert attack == "BIM" and list(lines) == ["digits", "CIFAR-10"]
    by_model = {line.model: line for line in lines["CIFAR-10"]}
    assert list(by_model) == ["SR", "SR + SAT", "SR + HAT", "MM-LDA"]
    assert by_model["MM-LDA"].ours == {0.0: 92.8, 0.04: 0.0, 0.12: 0.0, 0.2: 0.0}
    assert by_model["MM-LDA"].paper == {0.0: 100 - 8.04, 0.04: 91.2, 0.12: 90.1, 0.2: 89.7}
    assert all(not line.paper for line in lines["digits"])
    drawn = figures.robustness([(line.model, line.ours, line.paper) for line in lines["CIFAR-10"]], "p")
    words = ["".join(n["in"]) for n in Tree(drawn).all("text")]
    assert {"SR", "SR + SAT", "SR + HAT", "MM-LDA", "ours", "paper"} <= set(words)


@pytest.mark.parametrize("term", ["SR", "SAT", "HAT", "ILCM", "BP1", "BP2"])
def test_abbreviations_are_defined_where_they_first_appear_and_in_the_glossary(page, term):
    meant = glossary.TERMS[term]
    main = text(page.one("main"))
    first = re.search(rf"(?<![\w-]){term}(?![\w-])", main)
    assert main[first.start() :].startswith(f"{term}: {meant}")
    assert term in [said(dt) for dt in page.all("dt", page.one("dl", class_="glossary"))]


def test_audits_and_rules_are_folded(page):
    folds = list(page.all("details", page.one("section", id="audit")))
    assert len(folds) == 4 and not any("open" in fold["at"] for fold in folds)
    assert all(
        any(ul is each for fold in folds for each in page.all("ul", fold)) for ul in page.all("ul", class_="evidence")
    )
    for claim in page.one("ul", class_="claims")["in"]:
        if isinstance(claim, dict) and "Rule: " in said(claim):
            fold = page.one("details", claim)
            assert "open" not in fold["at"] and said(claim).count("Rule: ") == said(fold).count("Rule: ")


def audit(name, dataset, **fields):
    return Result(**{"name": name, "kind": "audit", "what": "", "dataset": dataset, "eps": 0.1, **fields})


@pytest.mark.parametrize(
    ("verdicts", "words"),
    [
        ({("digits", "MM-LDA"): "real"}, "MM-LDA is robust on digits at ε = 0.1."),
        ({("digits", "SR"): "mixed"}, "SR may or may not be robust on digits at ε = 0.1."),
        (
            {("digits", "SR"): "real", ("digits", "MM-LDA"): "none", ("mnist", "MM-LDA"): "none"},
            "MM-LDA is not robust on digits at ε = 0.1 and MNIST at ε = 0.1.",
        ),
    ],
)
def test_the_headline_is_about_mm_lda_in_plain_words(verdicts, words):
    entries = [
        Entry(k, audit("a", d, value=v, **report_results.network(m, d)), Path(), "a.json")
        for k, ((d, m), v) in enumerate(verdicts.items())
    ]
    assert summary.headline(entries, summary.verdicts(entries)).replace("\u2011", "-") == words


def test_cards_name_every_audited_network_robust_ones_first(tmp_path):
    for k, (model, verdict) in enumerate(
        [("SR", "none"), ("MM-LDA", "none"), ("SR (Adam)", "real"), ("SR + HAT", "odd")]
    ):
        left = {"clean_accuracy": 0.9 + k / 100, "standard_accuracy": 0.05, "worst_accuracy": 0.005}
        audit(f"a{k}", "mnist", numbers=left, value=verdict, **report_results.network(model, "mnist")).save(tmp_path)
    page = Tree(report.build(tmp_path, tmp_path / "report.html").read_text(encoding="utf-8"))
    cards = [said(li) for li in page.all("li", page.one("ul", class_="cards"))]
    start = "accuracy, % clean standard attacks all attacks"
    assert cards == [
        f"MNIST, ε = 0.1 robust {start} SR (Adam) 92.0 5.0 0.5",
        f"MNIST, ε = 0.1 not robust {start} SR 90.0 5.0 0.5 MM-LDA 91.0 5.0 0.5",
        f"MNIST, ε = 0.1 odd {start} SR + HAT 93.0 5.0 0.5",
    ]


def evaluation(name, count, n, attack="", eps=None, **fields):
    about = {"kind": "evaluation", "what": "", "dataset": "digits", "network": "runs/mine", "head": "mmlda"}
    return Result.counted(count, n, name=name, attack=attack, eps=eps, **{**about, **fields})


def test_a_users_own_run_has_its_own_title_headline_and_key_numbers(tmp_path):
    evaluation("clean", 99, 100).save(tmp_path)
    evaluation("bim", 17, 100, "BIM", 0.12).save(tmp_path)
    evaluation("worst", 7, 100, "WorstCase", 0.12).save(tmp_path)
    evaluation("result", 86, 360, "BIM", 0.12).save(tmp_path / "attack")
    (tmp_path / "attack" / "work.json").write_text("{}")
    page = Tree(report.build(tmp_path, tmp_path / "report.html").read_text(encoding="utf-8"))
    assert said(page.one("h1")) == "runs/mine on digits" and "paper" not in said(page.one("header"))
    lead = said(page.one("p", class_="lead")).replace("\xa0", " ")
    assert lead == (
        "runs/mine: clean accuracy: 99.0% (100 images). "
        "runs/mine: accuracy in the worst case, ε = 0.12: 7.0% (100 images)."
    )
    tiles = [said(div).replace("\xa0", " ") for div in page.all("div", page.one("dl", class_="tiles"))]
    assert [tile.partition("%")[0] for tile in tiles] == [
        "runs/mine: clean accuracy 99.0",
        "runs/mine: accuracy in the worst case, ε = 0.12 7.0",
    ]
    assert tiles[1].endswith("100 images · the lowest of 3 attacks at this ε")
    rows = [
        [said(c) for c in r["in"] if isinstance(c, dict)] for r in page.all("tr", page.one("table", id="evaluation"))
    ]
    assert [[row[2], row[4][:4], row[5]] for row in rows[1:]] == [
        ["clean", "99.0", "100"],
        ["BIM", "17.0", "100"],
        ["BIM", "23.9", "360"],
        ["worst case", "7.0 ", "100"],
    ]


def test_key_numbers_mix_neither_perturbations_nor_settings(tmp_path):
    evaluation("small", 80, 100, "BIM", 8 / 255).save(tmp_path)
    for steps, count in ((10, 30), (100, 20)):
        evaluation(f"pgd{steps}", count, 100, "PGD", 0.3, attack_settings={"steps": steps, "norm": "linf"}).save(
            tmp_path
        )
    evaluation("l2", 40, 100, "PGD", 0.3, attack_settings={"norm": "l2"}).save(tmp_path)
    evaluation("cw", 0, 50, "CarliniWagner").save(tmp_path)
    page = Tree(report.build(tmp_path, tmp_path / "report.html").read_text(encoding="utf-8"))
    tiles = [said(div).replace("\xa0", " ") for div in page.all("div", page.one("dl", class_="tiles"))]
    assert [tile.partition("%")[0].removeprefix("runs/mine: accuracy under ") for tile in tiles] == [
        "BIM, ε = 8/255 80.0",
        "PGD, steps=100, ε = 0.3 20.0",
        "PGD, ε = 0.3 (L2) 40.0",
        "C&W, any distance 0.0",
    ]
    rows = page.all("tr", page.one("table", id="evaluation"))
    assert sum(said(row).count("PGD") for row in rows) == 3


@pytest.mark.parametrize(
    "changed", [{"priors": "uniform"}, {"temperature": True}], ids=lambda fields: next(iter(fields))
)
def test_evaluations_with_other_priors_or_a_temperature_are_not_averaged(changed, tmp_path):
    for folder, count, how in (("own", 70, {}), ("changed", 80, changed)):
        evaluation("clean", count, 100, **how).save(tmp_path / folder)
        evaluation("fgsm", count - 50, 100, "FGSM", 0.1, **how).save(tmp_path / folder)
    page = Tree(report.build(tmp_path, tmp_path / "report.html").read_text(encoding="utf-8"))
    own, other = "runs/mine", f"runs/mine, {'uniform priors' if 'priors' in changed else 'fitted temperature'}"
    assert said(page.one("h1")) == "runs/mine on digits"  # one network
    rows = [
        [said(c) for c in r["in"] if isinstance(c, dict)] for r in page.all("tr", page.one("table", id="evaluation"))
    ]
    assert [(row[1], row[2], row[4][:4]) for row in rows[1:]] == [
        (own, "clean", "70.0"),
        (own, "FGSM", "20.0"),
        (other, "clean", "80.0"),
        (other, "FGSM", "30.0"),
    ]
    tiles = [said(div).replace("\xa0", " ") for div in page.all("div", page.one("dl", class_="tiles"))]
    assert [tile.partition("%")[0] for tile in tiles] == [
        f"{own}: clean accuracy 70.0",
        f"{own}: accuracy under FGSM, ε = 0.1 20.0",
        f"{other}: clean accuracy 80.0",
        f"{other}: accuracy under FGSM, ε = 0.1 30.0",
    ]
    assert "runs" not in " ".join(tiles).replace("runs/mine", "")


def test_scaled_calibration_has_its_own_columns(tmp_path):
    numbers = {"nll": 1.5, "ece": 0.2, "nll_scaled": 1.25, "ece_scaled": 0.1, "temperature": 2.0}
    evaluation("clean", 70, 100, numbers=numbers, temperature=True).save(tmp_path)
    page = Tree(report.build(tmp_path, tmp_path / "report.html").read_text(encoding="utf-8"))
    head, row = ([said(c) for c in r["in"] if isinstance(c, dict)] for r in page.all("tr", page.one("table")))
    shown = dict(zip(head, row, strict=True))
    assert (shown["NLL"], shown["NLL, scaled"], shown["ECE, scaled"]) == ("1.500", "1.250", "0.100")


def test_the_key_number_of_a_network_is_on_the_most_images(tmp_path):
    for folder, count, n in (("try", 7, 10), ("whole", 300, 360)):
        evaluation("clean", count, n).save(tmp_path / folder)
    page = Tree(report.build(tmp_path, tmp_path / "report.html").read_text(encoding="utf-8"))
    (tile,) = (said(div) for div in page.all("div", page.one("dl", class_="tiles")))
    assert tile.startswith("runs/mine: clean accuracy 83.3%") and tile.endswith("360 images")


def test_trained_networks_without_results_are_named(tmp_path):
    for name in ("mine", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text("{}")
    with pytest.raises(ValueError, match=r"without any; measure the network in it with mmlda evaluate .*mine --out"):
        report.build(tmp_path, tmp_path / "report.html")
    evaluation("clean", 99, 100, **{"network": str(tmp_path / "mine")}).save(tmp_path)
    page = report.build(tmp_path, tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Trained networks without results" in page
    assert f"<code>{tmp_path}/other</code>" in page and f"<code>{tmp_path}/mine</code>" not in page


def test_results_without_a_place_on_the_page_are_named(tmp_path):
    evaluation("clean", 99, 100).save(tmp_path)
    for k in range(2):
        Result(name=f"odd{k}", kind="odd", what="", value=1.0, dataset="mnist").save(tmp_path)
    page = Tree(report.build(tmp_path, tmp_path / "report.html").read_text(encoding="utf-8"))
    (left,) = page.all("li", page.one("ul", class_="unplaced"))
    assert said(left) == "odd on MNIST (2)"
    ids = page.one("button", left)["at"]["data-results"].split()
    assert [data_of(page)["results"][k]["name"] for k in ids] == ["odd0", "odd1"]


def test_random_and_black_box_numbers_are_marked(tmp_path):
    evaluation("clean", 50, 100, numbers={"passes": 16}).save(tmp_path)
    evaluation("worst", 40, 100, "WorstCase", 0.12, numbers={"black_box": 1.0, "zero_gradient": 0.0}).save(tmp_path)
    page = Tree(report.build(tmp_path, tmp_path / "report.html").read_text(encoding="utf-8"))
    table = page.one("table", id="evaluation")
    rows = [[said(c) for c in r["in"] if isinstance(c, dict)] for r in page.all("tr", table)]
    assert rows[1][4].startswith("50.0‡") and rows[2][4].startswith("40.0§")
    tiles = [said(div) for div in page.all("div", page.one("dl", class_="tiles"))]
    assert "50.0%‡" in tiles[0] and "40.0%§" in tiles[1]
    notes = [said(note) for note in page.all("ul", class_="notes")]
    marks = "‡ The network is random: judged by the mean probabilities of several passes. § The network has no gradient"
    assert sum(note.startswith(marks) for note in notes) == 2, "under the key numbers and under the table"
