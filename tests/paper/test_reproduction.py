"""docs/reproduction.md and docs/models.md say what the results say, and fill as results arrive."""

import importlib
import re
from pathlib import Path

import pytest
from report_results import write

from mmlda import zoo
from mmlda.paper import numbers
from mmlda.paper.rows import ADAM, MMLDA, SAT, SR, Row
from mmlda.results import Result, weights_digest, wilson

DOCS = Path(__file__).parents[2] / "docs"
COMMON = {"device": "a device", "versions": {"torch": "2.0", "python": "3.11"}, "commit": "0" * 12}


@pytest.fixture
def page(monkeypatch):
    return importlib.import_module("make_reproduction")


@pytest.fixture
def cards(monkeypatch):
    return importlib.import_module("make_model_cards")


def save(folder, kind, value, *, data, row, n=1000, seed=0, attack="", eps=None, target="", more=None, **cell):
    """A made-up result, with the paper's number beside it where there is one."""
    paper = {
        "table1": numbers.TABLE1.get((data, row)),
        "table3": numbers.TABLE3.get((data, row)),
        "table2": numbers.table2(data, row, attack, eps),
    }.get(kind)
    fields = {**row.fields(data), "attack": attack, "eps": eps, "target": target, "seed": seed, "n": n, **COMMON}
    fields["cell"] = {**fields["cell"], **cell}
    if kind not in ("table3", "latent"):
        fields |= {"unit": "share", "interval": wilson(round(value * n), n)}
    words = [
        kind,
        data,
        row.label(data),
        attack,
        "" if eps is None else f"{eps:g}",
        target,
        *map(str, cell.values()),
        str(seed),
    ]
    name = "-".join(re.sub(r"[^\w.+-]", "", word) for word in words if word)
    made = Result(name=name, kind=kind, what=f"a {kind}", value=value, paper=paper, **fields, **(more or {}))
    return made.save(folder)


def claim(folder, data, key, holds, value=1.0, row=None, **more):
    fields = {**(row.fields(data) if row else {"dataset": data}), "claim": key, "paper": numbers.SENTENCES[key]}
    fields |= {"name": f"claim-{data}-{key}", "kind": "claim", "what": f"found for {key}", **COMMON, **more}
    return Result(value=value, holds=holds, **fields).save(folder)


def rows(text, *words):
    """The lines of a table that have all the words."""
    return [line for line in text.splitlines() if line.startswith("|") and all(word in line for word in words)]


def row(text, *words):
    (line,) = rows(text, *words)
    return line


# ---------------------------------------------------------------------------------------------------- the pages


@pytest.mark.parametrize("script", ["make_reproduction", "make_model_cards"])
def test_a_page_is_what_its_script_writes_now(script, monkeypatch):
    maker = importlib.import_module(script)
    text = maker.PAGE.read_text()
    assert text == maker.put(text, maker.SCRIPT, maker.parts()), f"run python tools/{script}.py"
    assert len(re.findall(rf"<!-- begin: tools/{script}.py: [\w ]+ -->\n(?!<!-- end)", text)) == len(maker.parts())


@pytest.mark.parametrize("name", ["reproduction.md", "models.md"])
def test_no_row_of_a_table_is_broken(name):
    tables = re.findall(r"(?:^\|.*\n)+", (DOCS / name).read_text(), re.M)
    assert len(tables) > 7
    for table in tables:
        assert re.match(r"\|.*\n\|[-| ]+\|\n\|", table), table[:200]  # a head, a rule and at least a row
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1, table[:200]


def test_the_headline_of_the_page_is_in_the_results(page):
    found = Result.load(page.RESULTS / "table2-cifar10-mm-lda-bim-0.04-0.json")
    said = f"BIM at 0.04 on CIFAR-10 leaves {100 * found.value:.2f}% for MM-LDA (paper: 91.2%)"
    assert said in page.PAGE.read_text()


def test_a_part_without_a_place_is_an_error(page):
    text = page.PAGE.read_text()
    with pytest.raises(ValueError, match="part = 'nowhere'"):
        page.put(text, page.SCRIPT, {"nowhere": ""})
    with pytest.raises(ValueError, match="part = 'a'"):  # its end is missing, and another part follows
        page.put("<!-- begin: tools/s.py: a -->\n<!-- begin: tools/s.py: b -->\n<!-- end -->\n", "s.py", {"a": "x\n"})
    assert page.put("<!-- begin: tools/s.py: a -->\nold\n<!-- end -->\nkept\n", "s.py", {"a": "new\n"}) == (
        "<!-- begin: tools/s.py: a -->\nnew\n<!-- end -->\nkept\n")  # fmt: skip


# ---------------------------------------------------------------------------------------------------- filling it


def test_a_folder_that_is_not_there_or_empty_is_an_error(page, cards, tmp_path):
    for maker in (page, cards):
        with pytest.raises(ValueError, match="must be a folder of results"):
            maker.parts(tmp_path / "no-such-folder")
        with pytest.raises(ValueError, match="must be a folder with result files"):
            maker.parts(tmp_path)


def test_verdicts_of_sentences(page, tmp_path):
    claim(tmp_path, "mnist", "success", True, 0.995, unit="share", n=700, note="C&W at 9 x 10, not 9 x 10000")
    claim(tmp_path, "cifar10", "success", False, 0.12, unit="share")
    claim(tmp_path, "cifar10", "priors", None, 0.98, interval=(0.97, 0.99), unit="share")
    made = page.parts(tmp_path)
    holds, fails = rows(made["claims"], "claim-mnist-success")[0], rows(made["claims"], "claim-cifar10-success")[0]
    assert "| **holds** |" in holds and "n = 700" in holds and "9 x 10, not" in holds and "nearly 100% success" in holds
    assert "| **does not hold** |" in fails and "(../results/claim-cifar10-success.json)" in fails
    assert "| not decided |" in row(made["claims"], "98 % (95% interval 97 to 99)")
    assert len(rows(made["claims"], "not measured yet")) == 30 - 3
    assert "holds: 1; does not hold: 1; not decided: 1; not measured yet: 27" in made["short"]


def test_several_seeds_are_a_mean_and_a_deviation(page, tmp_path):
    for seed, error in enumerate((0.07, 0.08, 0.09)):
        save(tmp_path, "table1", error, data="cifar10", row=MMLDA, seed=seed)
    save(tmp_path, "table1", 0.072, data="cifar10", row=SR)
    made = page.parts(tmp_path)
    line = row(made["table1"], "CIFAR-10", "| MM-LDA |")
    assert "8.00 ± 1.00, 3 runs" in line and "| 8.04 | −0.04 |" in line
    assert all(f"[seed {seed}](../results/table1-cifar10-MM-LDA-{seed}.json)" in line for seed in range(3))
    low, high = (100 * end for end in wilson(72, 1000))
    alone = f"[7.20](../results/table1-cifar10-SR-0.json) ({low:.2f} to {high:.2f})"
    assert f"| {alone} | 7.13 | +0.07 | 1,000 |" in made["table1"]
    line = row(made["numbers"], "test error of MM-LDA |", "CIFAR-10")
    assert "within 0.5 points of the paper (−0.04)" in line and "**holds**" in line
    assert "| 4 of 12 |" in made["missing"] and "seeds 0 / 1 / 2" in made["missing"]


def test_a_claim_older_than_its_numbers_is_marked(page, tmp_path):
    for row_, error in ((MMLDA, 0.08), (SR, 0.07)):
        save(tmp_path, "table1", error, data="cifar10", row=row_)
    claim(tmp_path, "cifar10", "table1", True, 0.01, MMLDA, unit="share difference")
    assert "have changed since" not in page.parts(tmp_path)["claims"]
    save(tmp_path, "table1", 0.06, data="cifar10", row=SR, seed=1)
    line = row(page.parts(tmp_path)["claims"], "claim-cifar10-table1")
    assert "have changed since" in line and "n = 1,000; seeds 0, 1" in line


def test_cells_of_table_2_and_what_is_counted(page, tmp_path):
    for kind, value in (("FGSM", 0.21), ("BIM", 0.6)):
        save(tmp_path, "table2", value, data="cifar10", row=SR, attack=kind, eps=0.04)
        save(tmp_path, "table2", 0.3, data="cifar10", row=MMLDA, attack=kind, eps=0.04)
    save(tmp_path, "table2", 0.24, data="cifar10", row=SAT, attack="FGSM", eps=0.04)
    made = page.parts(tmp_path)
    line = row(made["table2"], "0.04 | SR |", "(18.59 to 23.63) / 20.0", "/ 5.5 |")
    assert line.endswith("| not measured yet / 0.2 |")
    line = row(made["numbers"], "accuracies of SR |", "CIFAR-10", "**does not hold**")
    assert "1 of 2 within 5 points of the paper; the largest difference is +54.50 (BIM 0.04); 2 of 12 measured" in line
    assert "| not decided |" in row(made["numbers"], "accuracies of SR + SAT", "1 of 1 within 5", "1 of 9 measured")
    assert "MM-LDA is above SR in 1 and below it in 1 of 2 cells" in made["short"]
    assert "Above SR in 0 and below it in 0 of 1 cells" in row(made["claims"], "no rule was written")


def test_cells_that_differ_by_how_accuracy_is_counted_are_listed(page, tmp_path):
    for attack, plain in (("FGSM", 0.3), ("BIM", 0.205)):
        more = {"numbers": {"clean_accuracy": 0.92, "plain_accuracy": plain}}
        save(tmp_path, "table2", 0.2, data="cifar10", row=SR, attack=attack, eps=0.04, more=more)
    text = page.parts(tmp_path)["table2"].split("a point more")[1]
    assert row(text, "SR |", "FGSM 0.04").endswith("| 30.00 | 20.0 | 92.00 |") and not rows(text, "BIM 0.04")


def test_what_the_paper_leaves_open_is_read_in_the_way_that_fits_best_and_that_is_said(page, tmp_path):
    paper = numbers.table2("cifar10", SR, "JSMA", 0.12)
    for surface, target, apart in (
        ("logits", "random", 0.3),
        ("softmax", "random", 0.02),
        ("softmax", "least-likely", -0.09),
    ):
        save(tmp_path, "table2", paper + apart, data="cifar10", row=SR, attack="JSMA", eps=0.12, surface=surface,
             target=target)  # fmt: skip
    for target, value in (("untargeted", 0.3), ("random", 0.66)):
        save(tmp_path, "table3", value, data="cifar10", row=SR, attack="CarliniWagner", target=target)
    made = page.parts(tmp_path)["numbers"]
    line = row(made, "accuracies of SR |", "CIFAR-10")
    assert "1 of 1 within 5 points" in line and "+2.00" in line and "read as JSMA on softmax, random target" in line
    assert "| **holds** |" in row(made, "distortion of SR |", "CIFAR-10", "read as random;")


def test_fig_3_is_told_for_each_kind_of_bias(page, tmp_path):
    for k in range(1, 11):
        for family, gap in (("BP1", k), ("BP2", -k)):
            save(tmp_path, "fig3", 0.8, data="cifar10", row=SR, set=f"{family}-{k}", family=family, index=k)
            ours = 0.8 + gap / 100
            save(tmp_path, "fig3", ours, data="cifar10", row=MMLDA, set=f"{family}-{k}", family=family, index=k)
    text = page.parts(tmp_path)["figures"]
    assert "- BP1: MM-LDA is above SR on 10 of 10 sets, by +5.50 points in the mean (p = 0.002)" in text
    assert "- BP2: MM-LDA is above SR on 0 of 10 sets, by −5.50 points in the mean (p = 0.002)" in text
    assert re.search(r"of a set alone, [5-9] above and 0 below\.\n- BP2", text)
    assert re.findall(r"^\| (BP\d-\d+) ", text, re.M)[:3] == ["BP1-1", "BP1-2", "BP1-3"]


def test_every_kind_of_result_finds_its_place(page, tmp_path):
    write(tmp_path, data=("digits", "cifar10"))
    save(tmp_path, "latent", 81.0, data="cifar10", row=MMLDA)
    tuned = {"recipe_settings": {"adversary": {"attack": "fgsm", "eps": 0.12}}}
    save(tmp_path, "worst", 0.12, data="cifar10", row=SAT, attack="WorstCase", eps=0.12, more=tuned)
    for view, value in (("logits", 0.01), ("worst case", 0.02)):
        save(tmp_path, "suspect", value, data="cifar10", row=Row("mmlda", "mmlda-adam", variant="C = 10"), view=view,
             attack="BIM" if view == "logits" else "WorstCase", eps=0.04)  # fmt: skip
    made = page.parts(tmp_path)
    before = page.parts(page.RESULTS)
    assert made.keys() == before.keys() and not any("digits" in text for text in made.values())
    for part in ("table3", "worst", "audits", "figures", "suspects"):
        assert rows(made[part], "CIFAR-10") or "CIFAR-10" in made[part], part
        assert "../results/" in made[part], part
    assert row(made["worst"], "SR + SAT (FGSM)", "[12.00]").count("not measured yet") == 5
    assert "Fig. 3 set by set" in made["figures"]
    assert "[1.0]" in row(made["suspects"], "| C = 10 | logits |") and "[2.0]" in made["suspects"]
    assert "81.000" in row(made["other"], "a latent") and "MNIST |" in row(made["missing"], "Latent fit")
    for text in made.values():
        for table in re.findall(r"(?:^\|.*\n)+", text, re.M):
            assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1, table[:200]


def test_what_is_wanted_has_the_names_that_the_paper_part_writes(page):
    wanted = {part: cells for part, _, cells in page.wanted()}
    assert len(wanted["Audit of the fine-tuned networks"]) == 2 * (9 + 3)  # SAT for each perturbation, HAT for all
    assert len(wanted["Fig. 3"]) == 60 and len(wanted["Suspects behind Table 2"]) == 2 * 10 * 3 * 13
    assert {sentence.claim for sentence in page.CLAIMS} | {"suspects", "fig3-recipe"} == set(numbers.SENTENCES)
    apart = [sentence for sentence in page.CLAIMS if sentence.row == ADAM]
    assert len(apart) == 6 and {sentence.data for sentence in apart} == {("cifar10",)}


# ---------------------------------------------------------------------------------------------------- model cards


def part(text, name):
    return text.split(f"## `{name}`")[1].split("\n## ")[0]


def test_a_card_has_the_results_of_its_network_and_of_no_other(cards, tmp_path):
    digest = weights_digest(zoo.load("mnist-sr").state_dict())
    own, foreign = ({"network": "mnist-sr", "network_sha256": sha} for sha in (digest, "0" * 64))
    save(tmp_path, "worst", 0.12, data="mnist", row=SR, attack="WorstCase", eps=0.12, more=own)
    save(tmp_path, "table1", 0.005, data="mnist", row=SR, more=own)
    save(tmp_path, "table2", 0.77, data="mnist", row=SR, attack="BIM", eps=0.12, more=foreign)
    text = cards.parts(tmp_path)["cards"]
    mine = part(text, "mnist-sr")
    assert "[12.00](../results/" in mine and "99.50%" in mine and "77.00" not in text
    assert "| audit | not measured yet |" in mine
    assert "has not been audited" in mine and "Under attack: not measured yet." in part(text, "mnist-mmlda")
    fields = {**SR.fields("mnist"), "eps": 0.12, "n": 50, **COMMON, **own}
    Result(name="audit", kind="audit", what="Masked.", value="masked", **fields).save(tmp_path)
    mine = part(cards.parts(tmp_path)["cards"], "mnist-sr")
    assert "verdict is *masked*" in mine and "[masked](../results/audit.json) at eps 0.12 (50 images)" in mine


def test_every_network_that_ships_has_a_card_with_its_recipe(cards):
    text = cards.PAGE.read_text()
    for name in zoo.names():
        about, mine = zoo.about(name), part(text, name)
        assert f"{about['recipe']['steps']:,} steps of " in mine and f"{100 * about['accuracy']:.2f}%" in mine
        robust = "Audited at eps 8/255 only, where its" if about["recipe"]["adversary"] else "Not robust"
        assert "**Intended use:**" in mine and f"**Limits:** {robust}" in mine and "bf16" in mine
    assert "weight decay 0.5 (decoupled)" in part(text, "cifar10-mmlda") and "SGD at 0.1" in part(text, "mnist-sr")
