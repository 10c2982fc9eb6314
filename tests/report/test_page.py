"""The report: what it says is what the results say; and it works in a browser, from the disk, for everyone."""

import ast
import base64
import dataclasses
import io
import itertools
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import report_results
from PIL import Image
from report_page import Tree, data_of, said
from report_results import EVIL
from safetensors.numpy import load, save

from mmlda import report
from mmlda.report import figures
from mmlda.results import Result, wilson

GOLD = Path(__file__).parents[1] / "gold" / "report.json"
KINDS = ("table1", "table2", "table3", "worst", "fig2", "fig3", "fig4", "fig5", "theory", "audit", "evaluation")


def provenance_of(page, name):
    """What the page knows of one result, by its name."""
    data = data_of(page)
    found = next(row for row in data["results"].values() if row["name"] == name)
    return {key: data["pool"][value] if key in data["shared"] else value for key, value in found.items()}


def extracted(page):
    """All that the page says, as plain data, without the drawings."""

    def texts(name, **at):
        return [said(node) for node in page.all(name, **at)]

    rows = {
        t["at"]["id"]: [[said(c) for c in r["in"] if not isinstance(c, str)] for r in page.all("tr", t)]
        for t in page.all("table")
        if "id" in t["at"]
    }
    return {
        "title": texts("title"),
        "headings": [f"{n['name']} {said(n)}" for n in page.all() if n["name"] in ("h1", "h2", "h3", "h4")],
        "lead": texts("p", class_="lead"),
        "cards": [said(li) for li in page.all("li", page.one("ul", class_="cards"))],
        "scale": texts("details", class_="scale"),
        "claims": [said(n) for n in page.one("ul", class_="claims")["in"] if isinstance(n, dict)],
        "terms": texts("p", class_="terms"),
        "glossary": [said(div) for div in page.all("div", page.one("dl", class_="glossary"))],
        "numbers": [said(div) for dl in page.all("dl", class_="tiles") for div in page.all("div", dl)],
        "evidence": [said(ul) for ul in page.all("ul", class_="evidence")],
        "tables": rows,
        "figures": [n["at"]["aria-label"] for n in page.all(role="img")],
        "captions": texts("figcaption"),
        "findings": texts("ul", class_="findings"),
        "notes": texts("ul", class_="notes"),
        "tabs": texts("button", role="tab"),
        "pictures": texts("span", class_="names"),
        "sources": [said(div) for div in page.all("div", page.one("dl", class_="sources"))],
        "provenance": [
            provenance_of(page, name)
            for name in (
                "table2-cifar10-MM-LDA-BIM-0.04-0",
                "table1-digits-SR-1",
                "audit-cifar10-MM-LDA-0.04",
                "claim-digits-fig3",
            )
        ],
    }


def test_the_page_says_what_it_said(page):
    found = json.loads(json.dumps(extracted(page)))
    if os.environ.get("MMLDA_WRITE_GOLD"):
        GOLD.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    gold = json.loads(GOLD.read_text(encoding="utf-8"))
    assert found.keys() == gold.keys()
    for part in gold:
        assert found[part] == gold[part], f"{part} changed; MMLDA_WRITE_GOLD=1 writes {GOLD.name} anew"


def test_numbers_stand_beside_the_papers_with_the_difference_and_the_interval(page):
    rows = [[said(c) for c in r["in"] if isinstance(c, dict)] for r in page.all("tr", page.one("table", id="table2-1"))]
    row = next(r for r in rows if r[:2] == ["MM-LDA", "0.04"])
    low, high = (100 * end for end in wilson(0, 500))
    assert row[2] == f"0.0 {low:.1f} to {high:.1f}", "the worst case"
    assert row[6:9] == ["0.0 0.0 to 0.8", "91.2", "−91.2"], "BIM: ours, the paper's, the difference"
    assert row[3].startswith("33.2† "), "FGSM stood still on 31% of the images, which is marked"
    rows = [[said(c) for c in r["in"] if isinstance(c, dict)] for r in page.all("tr", page.one("table", id="table1"))]
    values = [7.02, 7.02, 7.13]
    mean, spread = statistics.fmean(values), statistics.stdev(values)
    assert ["CIFAR-10", "SR", f"{mean:.2f} ± {spread:.2f}, 3 runs", "7.13", "−0.07", "3", "10000"] in rows
    table3 = [[said(c) for c in r["in"] if isinstance(c, dict)] for r in page.all("tr", page.one("table", id="table3"))]
    assert [
        "CIFAR-10",
        "MM-LDA",
        "untargeted",
        "0.55",
        "2.80",
        "−2.25",
        "0.50",
        "100.0",
        "99.4",
    ] in table3


def test_worst_cases_of_networks_without_a_row_in_table_2_have_a_table(tmp_path):
    def save(kind, model, count, attack):
        fields = report_results.network(model, "mnist") | {"dataset": "mnist", "attack": attack, "eps": 0.04}
        if fields.get("fine_tuning"):
            fields["recipe_settings"] = {"adversary": {"attack": "bim", "eps": 0.04}}
        name = f"{kind}-{fields['recipe']}"
        made = Result.counted(count, 100, name=name, kind=kind, what="", **fields)
        dataclasses.replace(made, interval=None).save(tmp_path)

    for model in ("SR", "SR + SAT"):
        save("table2", model, 50, "BIM")
    save("worst", "SR", 10, "WorstCase")
    save("worst", "SR + SAT", 20, "WorstCase")
    page = Tree(report.build(tmp_path, tmp_path / "report.html").read_text(encoding="utf-8"))

    def rows(name):
        return [[said(c) for c in r["in"] if isinstance(c, dict)] for r in page.all("tr", page.one("table", id=name))]

    assert ["SR", "0.04", "10.0", "50.0"] in rows("table2-0") and ["SR + SAT", "0.04", "–", "50.0"] in rows("table2-0")
    assert ["MNIST", "SR", "10.0"] in rows("worst") and ["MNIST", "SR + SAT (BIM)", "20.0"] in rows("worst")


def test_how_often_the_paper_lies_in_our_interval_is_counted(built, page):
    inside = [r.interval[0] <= r.paper <= r.interval[1] for r in built[1] if r.kind == "table2" and r.paper is not None]
    words = f"inside our 95% interval in {sum(inside)} of {len(inside)} results"
    assert 0 < sum(inside) < len(inside) and any(words in said(n) for n in page.all("ul", class_="notes"))


def test_every_number_leads_to_its_provenance(built, page):
    data = data_of(page)
    named = {r.name: r for r in built[1]}
    assert sorted(row["name"] for row in data["results"].values()) == sorted(named)
    for node in page.all():
        for k in (node["at"].get("data-results") or "").split():
            assert k in data["results"]
    about = provenance_of(page, "table2-cifar10-MM-LDA-BIM-0.04-0")
    truth = named["table2-cifar10-MM-LDA-BIM-0.04-0"]
    for key in (
        "n",
        "seed",
        "train_steps",
        "attack_steps",
        "seconds",
        "recipe_settings",
        "attack_settings",
        "device",
        "versions",
        "commit",
        "data",
        "network",
        "network_sha256",
        "note",
    ):
        assert about[key] == getattr(truth, key), key
    assert about["value"] == 100 * truth.value and about["paper"] == 100 * truth.paper and about["unit"] == "%"
    assert len(json.dumps(data)) < 1000 * len(named), "what results share is there once"
    buttons = [b for b in page.all("button", page.one("table", id="table2-1"), class_="num")]
    for b in buttons:  # a number's provenance is of that number
        row = data["results"][b["at"]["data-results"]]
        assert f"{row['value']:.1f}" == said(b).rstrip("† ").strip()


def test_pictures_are_the_images_pixel_by_pixel(built, page):
    tensors = load((built[0] / "results" / "fig4-cifar10-MM-LDA.safetensors").read_bytes())
    panel = page.one("div", id="pictures-3")
    gain = int(panel["at"]["data-gain"])
    assert gain == 32  # of noises up to 0.015, doubled until they would pass 0.5
    for k, item in enumerate(page.all("li", panel)):
        image, noise, moved = (
            np.asarray(Image.open(io.BytesIO(base64.b64decode(n["at"]["src"].partition(",")[2]))), dtype=float)
            for n in page.all("img", item)
        )
        x, x_adv = (
            tensors["x"][k].transpose(1, 2, 0).astype(float),
            tensors["x_adv"][k].transpose(1, 2, 0).astype(float),
        )
        assert np.array_equal(image, x) and np.abs(moved - 255 * x_adv).max() <= 0.51
        assert np.abs(noise - 255 * np.clip(0.5 + gain * (x_adv - x / 255) / 2, 0, 1)).max() <= 0.51
        assert said(item).startswith(report_results.CIFAR[k]) and said(item).endswith(
            report_results.CIFAR[(k + 3) % 10]
        )


def test_the_same_results_give_the_same_bytes(built, tmp_path):
    again = report.build(built[0] / "results", tmp_path / "again.html")
    assert again.read_bytes() == built[2].read_bytes()


@pytest.mark.long
def test_the_same_results_give_the_same_bytes_in_any_process_and_folder(built, tmp_path):
    shutil.copytree(built[0] / "results", tmp_path / "elsewhere")
    code = "import sys; from mmlda import report; report.build(sys.argv[1], sys.argv[2])"
    subprocess.run(
        [sys.executable, "-c", code, tmp_path / "elsewhere", tmp_path / "again.html"],
        check=True,
        env=os.environ | {"PYTHONHASHSEED": "12345", "TZ": "Asia/Tokyo"},
        timeout=120,
    )
    assert (tmp_path / "again.html").read_bytes() == built[2].read_bytes()


def test_ids_are_unique_and_references_lead_somewhere(page, built):
    ids = [n["at"]["id"] for n in page.all() if "id" in n["at"]]
    assert len(ids) == len(set(ids)) > 30
    named = set(ids)
    for n in page.all():
        for key in ("aria-labelledby", "aria-controls"):
            assert n["at"].get(key, ids[0]) in named
        href = n["at"].get("href", "")
        assert not href or (href[0] == "#" and href[1:] in named)
    content = built[2].read_text(encoding="utf-8")
    assert set(re.findall(r"url\(#([^)]+)\)", content)) <= named
    assert not re.search(r"https?://|@import|src=\"(?!data:)", content), "nothing comes from elsewhere"
    assert not re.search(r"#0[123]0\w{3}\b", content.partition("<main")[2].partition("<script")[0]), (
        "a placeholder colour"
    )
    assert len(content) < 900_000


def test_headings_are_in_order_and_everything_has_a_name(page):
    levels = [int(n["name"][1]) for n in page.all() if re.fullmatch(r"h[1-6]", n["name"])]
    assert levels[0] == 1 and levels.count(1) == 1 and all(b <= a + 1 for a, b in itertools.pairwise(levels))
    assert page.one("html")["at"]["lang"] == "en"
    assert all(len(list(page.all(name))) == 1 for name in ("main", "header", "nav", "footer"))
    assert all(said(n) or n["at"].get("aria-label") for n in page.all("button"))
    assert all(n["at"].get("alt") for n in page.all("img"))
    assert all(len(n["at"]["aria-label"]) > 20 for n in page.all(role="img"))
    assert len(list(page.all("svg"))) == len(list(page.all(role="img"))) >= 20


PARTS = {
    "table1": {"tables"},
    "table2": {"tables"},
    "table3": {"tables"},
    "worst": {"tables"},
    "evaluation": {"tables"},
    "fig2": {"figures"},
    "fig3": {"figures"},
    "fig5": {"figures"},
    "theory": {"figures"},
    "fig4": {"gallery"},
    "audit": {"audit"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_missing_parts_are_left_out_without_empty_headings(kind, tmp_path):
    report_results.write(tmp_path, data=("digits",), kinds={kind})
    page = Tree(report.build(tmp_path, tmp_path / "r.html").read_text(encoding="utf-8"))
    sections = {n["at"]["id"] for n in page.all("section")}
    summed_up = set() if kind == "theory" else {"summary"}  # of theory alone there is nothing to sum up
    assert sections - {"glossary"} == {"sources"} | summed_up | PARTS[kind]
    linked = {n["at"]["href"] for n in page.all("a", page.one("nav"))}
    assert linked == {f"#{name}" for name in sections}
    for n in page.all():
        assert not (
            n["name"] in ("ul", "dl", "table", "section", "article", "h2", "h3")
            and not said(n)
            and n["at"].get("id") != "data"
        )
        elements = [child for child in n["in"] if isinstance(child, dict)]
        for node, following in zip(elements, [*elements[1:], None]):
            if re.fullmatch("h[234]", node["name"]) and n["at"].get("class") != "top":
                assert following and not re.fullmatch(f"h[1-{node['name'][1]}]", following["name"]), (
                    f"nothing under {said(node)}"
                )


def test_the_scale_is_stated_where_the_results_say_so(page):
    scale = said(page.one("details", class_="scale"))
    for where, note in report_results.SCALE.items():
        assert note in scale, where
    under = said(page.one("div", class_="scroll", node=page.one("section", id="tables")))
    assert under and all(
        any(note in said(a) for note in report_results.SCALE.values())
        for a in page.all("article", page.one("section", id="tables"))
    )


def test_bad_folders_and_bad_results_are_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="must be a folder of results"):
        report.build(tmp_path / "none", tmp_path / "r.html")
    (tmp_path / "other.json").write_text('{"a": 1}')
    with pytest.raises(ValueError, match="without any"):
        report.build(tmp_path, tmp_path / "r.html")
    common = {"what": "", "value": None}
    bad = {
        "fig2": {"x": [1.0, 2.0], "y": [1.0], "label": [0]},
        "theory": {"curves": [{"x": ["a"], "y": [1]}]},
        "audit": {"accuracies": [{"name": "no number"}]},
    }
    for kind, series in bad.items():
        Result(name=f"bad-{kind}", kind=kind, dataset="digits", head="softmax", series=series, **common).save(tmp_path)
        with pytest.raises(ValueError, match=f"bad-{kind} must be what its figure is drawn from"):
            report.build(tmp_path, tmp_path / "r.html")
        (tmp_path / f"bad-{kind}.json").unlink()
    (tmp_path / "odd.json").write_text(
        json.dumps({"schema": 1, "name": "odd", "kind": "fig2", "what": "", "cell": [], "value": 1})
    )
    with pytest.raises(ValueError, match=r"odd\.json: fields must be those of schema 1, got others"):
        report.build(tmp_path, tmp_path / "r.html")
    assert not (tmp_path / "r.html").exists()


def test_images_that_were_altered_are_refused_and_missing_ones_left_out(tmp_path):
    report_results.write(tmp_path, data=("digits",), kinds={"fig4"})
    for path in tmp_path.glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(ValueError, match="altered"):
        report.build(tmp_path, tmp_path / "r.html")
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    page = Tree(report.build(tmp_path, tmp_path / "r.html").read_text(encoding="utf-8"))
    assert not list(page.all("section", id="gallery")) and "Figure 4 on digits (2)" in said(page.one("main"))
    odd = save({"x": np.zeros((2, 2, 8, 8), np.uint8), "x_adv": np.zeros((2, 2, 8, 8), np.float16)})
    Result(name="odd", kind="fig4", what="", dataset="digits", value=1.0).save(tmp_path, odd)
    with pytest.raises(ValueError, match="outcomes of odd must be x and x_adv of one shape"):
        report.build(tmp_path, tmp_path / "r.html")


@pytest.fixture(scope="module")
def evil(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evil")
    return report.build(report_results.write_evil(folder / "results"), folder / "evil.html", title="T" + EVIL)


def test_nothing_in_a_result_becomes_markup(evil):
    page = Tree(evil.read_text(encoding="utf-8"))
    assert [n["at"].get("type") for n in page.all("script")] == ["application/json", None]
    assert all(n["at"]["src"].startswith("data:image/png;base64,") for n in page.all("img"))
    assert not [k for n in page.all() for k in n["at"] if k.startswith("on")]
    assert said(page.one("h1")) == "T" + EVIL.strip(), "shown as it is"
    assert EVIL.split("--")[0].strip()[:20] in "".join(
        t for n in page.all("text") for t in n["in"] if isinstance(t, str)
    )
    assert "<img" not in evil.read_text(encoding="utf-8").partition('id="data">')[2].partition("</script>")[0]
    assert any(EVIL.strip() in row["what"] for row in data_of(page)["results"].values())


def test_drawings_keep_their_texts_and_take_only_the_pages_colours():
    svg = figures.curves([{"x": [1e-4, 1.0], "y": [0, 1], "name": 'a<b & $c_1$ id="q" 0.00012', "xlabel": "x"}], "p")
    tree = Tree(svg)
    words = ["".join(n["in"]) for n in tree.all("text")]
    assert 'a<b & $c_1$ id="q" 0.00012' in words and "0.0001" in words
    colours = set(re.findall(r"(?:fill|stroke): ([^;\"]+)", svg))
    assert colours <= {"none", "currentColor"} | {c for c in colours if c.startswith("var(--")}
    assert "<style" not in svg and "DejaVu" not in svg and 'id="p-' in svg


def test_the_report_needs_no_model_no_data_and_no_torch():
    allowed = {
        "__future__",
        "mmlda._utils.files",
        "mmlda.results",
        "numpy",
        "PIL",
        "matplotlib",
        "jinja2",
        "markupsafe",
        "safetensors",
        "mmlda._utils.checks",
        "mmlda._utils.text",
    }
    for path in Path(report.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                own = name.startswith("mmlda.report") or name in allowed or name.split(".")[0] in allowed
                assert own or name.split(".")[0] in sys.stdlib_module_names, f"{path.name} imports {name}"
