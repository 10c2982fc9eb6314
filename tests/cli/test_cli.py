"""The command line: what it prints, its exit codes, and one line for a user's mistake."""

import dataclasses
import errno
import json
import os
import subprocess
import sys

import pytest
from command_line import mmlda
from safetensors.torch import load_file, save

from mmlda.results import Result


def test_as_a_program():
    """A process of its own: exit code, one line, no traceback; nothing but the result on standard output."""
    command = [sys.executable, "-m", "mmlda"]
    good = subprocess.run([*command, "theory", "--json"], capture_output=True, text=True, timeout=120)
    assert good.returncode == 0 and json.loads(good.stdout)["delta"] > 0 and good.stderr == ""
    bad = subprocess.run([*command, "theory", "--C", "-1"], capture_output=True, text=True, timeout=120)
    assert bad.returncode == 2 and bad.stderr.startswith("mmlda: ") and bad.stderr.count("\n") == 1


def test_train_says_how_good_it_is_and_goes_on(run):
    folder, result = run
    assert result["accuracy"] > 0.8 and result["steps"] == 120 and len(result["per_class"]) == 10
    again = mmlda("train", "--data", "digits", "--steps", 120, "--model", "width=8", "--out", folder)
    assert f"test error {100 - 100 * result['accuracy']:.2f}% on 360 images" in again.stdout


def test_attack_prints_and_leaves_its_files(run, tmp_path):
    folder, clean = run
    words = ("attack", folder, "--attack", "pgd:0.15,steps=10", "--n", 80, "--out", tmp_path / "a")
    result = json.loads(mmlda(*words, "--json").stdout)
    assert result["value"] < clean["accuracy"] - 0.2 and result["attack_steps"] == 10
    assert (tmp_path / "a" / "result.json").is_file() and (tmp_path / "a" / "examples.png").is_file()
    assert f"{result['value']:.2f}% under attack" in mmlda(*words).stdout


def test_several_attacks_get_one_folder_each(run, tmp_path):
    specs = ("fgsm:8/255", "bim:0.1,steps=3,loss=margin")
    words = ("attack", run[0], "--attack", specs[0], "--attack", specs[1], "--n", 10, "--out", tmp_path)
    results = json.loads(mmlda(*words, "--json").stdout)
    assert [r["eps"] for r in results] == [pytest.approx(8 / 255), 0.1]
    assert {path.parent.name for path in tmp_path.rglob("result.json")} == {"fgsm-8-255", "bim-0.1-steps=3-loss=margin"}
    assert mmlda(*words).stdout.count("under attack") == 2


def test_a_folder_where_nothing_was_done_is_free_and_losses_can_be_named(run, tmp_path):
    words = ("attack", run[0], "--n", 20, "--out", tmp_path / "a")
    assert "targeted" in mmlda(*words, "--attack", "pgd:0.1,loss=targeted", code=2).stderr
    mmlda(*words, "--attack", 'worst:0.1,losses=["margin","ce"],seed=1')
    settings = json.loads((tmp_path / "a" / "result.json").read_text())["attack_settings"]
    assert settings["losses"] == ["margin", "ce"] and settings["seed"] == 1
    assert "other attack" in mmlda(*words, "--attack", "pgd:0.1", code=2).stderr


def test_fine_tuning_from_a_run(run, tmp_path):
    folder, _ = run
    adversary = json.dumps({"attack": "fgsm", "eps": [0.05, 0.1], "steps": 1, "craft": "once"})
    done = mmlda(
        "train",
        "--data",
        "digits",
        "--recipe",
        "digits-sr",
        "--steps",
        20,
        "--start",
        folder,
        "--out",
        tmp_path / "sat",
        "--set",
        f"adversary={adversary}",
        "--set",
        "lr=0.01",
    )
    assert "after 20 steps" in done.stdout
    recipe = json.loads((tmp_path / "sat" / "run.json").read_text())["recipe"]
    assert recipe["adversary"]["craft"] == "once" and recipe["lr"] == 0.01


def test_a_network_may_have_classes_to_spare(tmp_path):
    done = mmlda("train", "--model", "num_classes=12", "--model", "width=4", "--steps", 2, "--out", tmp_path / "run")
    assert "after 2 steps" in done.stdout


def test_fine_tuning_goes_by_the_head_of_the_network(tmp_path):
    for head, optimizer in (("softmax", "sgd"), ("mmlda", "adam")):
        first, second = tmp_path / head, tmp_path / f"{head}-tuned"
        mmlda("train", "--head", head, "--steps", 2, "--model", "width=4", "--out", first)
        mmlda("train", "--start", first, "--steps", 2, "--out", second)
        about = json.loads((second / "run.json").read_text())
        assert about["model"]["head"] == head and about["recipe"]["optimizer"] == optimizer
        mmlda("train", "--start", first, "--head", head, "--steps", 2, "--out", second)  # the same, said aloud


@pytest.mark.parametrize(
    "words, what",
    [
        ("train --head svm", "head must be one of mmlda, softmax, got 'svm'"),
        ("train --recipe x", "recipe must be one of mnist-sr, "),
        ("train --set lr", "--set must be KEY=VALUE, got 'lr'"),
        ("train --set speed=1", "setting of the recipe must be one of steps, "),
        ("train --set lr=-1", "lr"),
        ("train --device cuda:99", "device must be available, got 'cuda:99'"),
        ("train --data nowhere", "got 'nowhere'"),
        ("train --steps 0", "steps"),
        ("train --set lr=abc", "lr must be float, got 'abc'"),
        ("train --set seed=x", "seed must be int, got 'x'"),
        ("train --set milestones=['a']", "milestones must be tuple[int, ...], got"),
        ('train --set adversary={"foo":1}', "setting of the adversary must be one of attack, "),
        ("train --model depth=33 --data digits", "depth"),
        ("train --model size=33", "size"),
        ("train --model depth=xx", "depth must be int, got 'xx'"),
        ("train --model width=xx --data digits", "width must be int, got 'xx'"),
        ("train --model batch_norm=no --data digits", "batch_norm must be bool, got 'no'"),
        ("train --model mean=null --data digits", "model must be valid settings, got {'mean': None}"),
        ("train --model channels=3 --data digits", "images of 1 x 8 x 8"),
        ("train --model num_classes=5 --data digits", "data must have the 5 classes of the network, got 10"),
        ("train --start cifar10-sr --recipe cifar10-sat --data digits", "images of 1 x 8 x 8"),
        ("train --start cifar10-sr --head mmlda", "head must be 'softmax', that of the network to start from"),
        ("train --start cifar10-mmlda --head softmax", "head must be 'mmlda', that of the network to start from"),
        ("train --start cifar10-sr --model width=8", "model must be None where a network to start from is given"),
        ("attack nowhere --attack bim:0.1 --out OUT", "source must be a folder with a network, or one of cifar10-"),
        ("attack mnist-sr --attack magic --out OUT", "attack must be one of fgsm, bim"),
        ("attack mnist-sr --attack bim --out OUT", "attack must be given eps, as in bim:8/255, got 'bim'"),
        ("attack mnist-sr --attack bim:-1 --out OUT", "eps"),
        ("attack cifar10-sr --data digits --attack bim:0.1 --out OUT", "images of 1 x 8 x 8"),
        ("attack mnist-sr --attack bim,eps=abc --out OUT", "eps must be float, got 'abc'"),
        ("attack mnist-sr --attack bim:1/0 --out OUT", "eps must be float, got '1/0'"),
        ("attack mnist-sr --attack bim:0.1,eps=0.2 --out OUT", "attack must be given each setting once"),
        ("attack mnist-sr --attack bim:0.1,steps=2.5 --out OUT", "steps must be int, got 2.5"),
        ("attack mnist-sr --attack bim:0.1,speed=2 --out OUT", "setting of bim must be one of "),
        ("attack mnist-sr --attack bim:0.1,steps --out OUT", "eps must be float, got '0.1,steps'"),
        ("attack mnist-sr --attack worst:0.1,attacks=foo --out OUT", "attacks"),
        ("attack mnist-sr --attack bim:1,bounds=[0,255] --out OUT", "bounds must be left out"),
        ("attack mnist-sr --attack worst:0.1,losses=[1] --out OUT", "losses"),
        ("evaluate mnist-sr --attack magic:0.1", "attack must be one of fgsm, bim"),
        ("evaluate mnist-sr --attack bim:much", "eps must be float, got 'much'"),
        ("evaluate mnist-sr --attack bim", "attack must be given eps"),
        ("evaluate mnist-sr --attack cw:0.1", "setting of cw must be one of"),
        ("evaluate mnist-sr --data digits --temperature", "n must be given with --temperature (such as --n 100: "),
        ("audit mnist-sr --data digits --priors flat", "priors must be one of uniform, empirical, got 'flat'"),
        ("export mnist-sr model.pt2 --priors flat", "priors must be one of uniform, empirical, got 'flat'"),
        ("audit nowhere --eps 0.1", "source must be a folder with a network"),
        ("audit mnist-sr --data digits --eps -1", "eps"),
        ("theory --classes 1", "L"),
        ("means --dim 0", "dim"),
        ("data check imagenet", "imagenet"),
        ("reproduce --verify OUT --n 0", "path must be the JSON of a result"),
        ("reproduce", "name must be one of table1"),
        ("reproduce table9", "table9"),
        ("reproduce table1 --seeds a", "seeds must be comma-separated integers such as 0,1,2, got 'a'"),
        ("reproduce table1 --shipped", "shipped"),
        ("reproduce --verify OUT", "path must be the JSON of a result"),
        ("report OUT", "must be a folder with result files"),
        ("train --priors foo --out OUT", "priors must be one of uniform, empirical, got 'foo'"),
        ("train --keep-best --out OUT", "validation must be given with keep_best"),
        ("train --seed 99999999999999999999 --out OUT", "seed must be below 2**63, got 99999999999999999999"),
        ("audit mnist-sr --data digits --seed 99999999999999999999", "seed must be below 2**63"),
        ("pack nowhere", "folder must be a folder of results, got 'nowhere'"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(words, what, tmp_path):
    done = mmlda(*[tmp_path if word == "OUT" else word for word in words.split()], code=2)
    assert what in done.stderr and done.stderr.startswith("mmlda: ") and done.stderr.count("\n") == 1
    assert done.stdout == ""


@pytest.mark.parametrize(
    "words, what",
    [
        ("train --fast", "No such option"),
        ("attack", "Missing option '--attack'"),
        ("report", "Missing argument"),
        ("fly", "No such command"),
        ("theory --C abc", "'--C'"),
        ("theory --C abc", "got 'abc'; see mmlda theory --help"),
        ("theory --C=abc", "got 'abc'; see mmlda theory --help"),
    ],
)
def test_what_the_parser_refuses_is_one_line_too(words, what):
    done = mmlda(*words.split(), code=2)
    assert what in done.stderr and done.stderr.startswith("mmlda: ") and done.stderr.count("\n") == 1
    assert words not in done.stderr or " " not in words  # the whole command line is not repeated


def test_no_words_at_all_are_answered_with_the_help():
    done = mmlda(code=2)
    assert done.stdout.startswith("Usage: ") and "mmlda [OPTIONS] COMMAND" in done.stdout and done.stderr == ""


def test_a_file_in_the_place_of_a_folder_is_named(run, tmp_path):
    path = tmp_path / "a file"
    path.write_text("")
    done = mmlda("attack", run[0], "--attack", "fgsm:0.1", "--n", 4, "--out", path, code=2)
    assert done.stderr == f"mmlda: {path}: wrong kind of path: File exists\n"


def test_theory_and_means():
    values = json.loads(mmlda("theory", "--classes", 10, "--C", 100, "--json").stdout)
    assert values["robustness_bound"] == pytest.approx((10 * 100 / 18) ** 0.5)
    assert "7.4535" in mmlda("theory").stdout
    means = json.loads(mmlda("means", "--classes", 12, "--dim", 8, "--json").stdout)
    assert means["kind"] == "cross-polytope" and means["max_cosine"] == 0 and len(means["means"]) == 12


def test_data_and_models(tmp_path):
    names = [entry["name"] for entry in json.loads(mmlda("data", "list", "--root", tmp_path, "--json").stdout)]
    assert names == ["digits", "mnist", "fashion-mnist", "cifar10", "cifar100"]
    assert (
        "mnist          not found: get it with mmlda data fetch mnist"
        in mmlda("data", "list", "--root", tmp_path).stdout
    )
    for name, fetched in (("mnist", "mnist"), ("cifar100-coarse", "cifar100")):
        missing = mmlda("data", "check", name, "--root", tmp_path, code=1)
        assert f"mmlda data fetch {fetched}" in missing.stdout
    assert "as published" in mmlda("data", "check", "digits").stdout
    assert "cifar10-mmlda" in json.loads(mmlda("models", "--json").stdout)
    assert mmlda("--version").stdout.strip() == __import__("mmlda").__version__


def test_evaluate_is_a_table_or_json(run, tmp_path):
    words = (
        "evaluate",
        run[0],
        "--attack",
        "bim:0.1",
        "--attack",
        "fgsm:0.1",
        "--n",
        60,
        "--out",
        tmp_path,
        "--temperature",
    )
    text = mmlda(*words).stdout
    assert "BIM 0.1" in text and "95% interval" in text and "at temperature" in text
    results = json.loads(mmlda(*words, "--json").stdout)
    assert [r["attack"] for r in results] == ["", "BIM", "FGSM"]
    assert results[1]["value"] <= results[2]["value"] < results[0]["value"]
    assert {path.stem for path in tmp_path.glob("*.json")} == {r["name"] for r in results}


def test_audit_says_its_verdict_and_leaves_a_picture(run, tmp_path):
    folder, _ = run
    words = ("audit", folder, "--eps", 0.3, "--n", 30, "--out", tmp_path)
    text = mmlda(*words).stdout
    assert "\nNone at eps = 0.3: " in text and "zero gradients" in text
    assert (tmp_path / "audit.png").read_bytes()[:4] == b"\x89PNG"
    assert json.loads(mmlda(*words, "--json").stdout)["value"] == "none"


def test_a_report_of_deeply_nested_json_is_one_line(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"schema": 2, "shared": {}}\n' + "[" * 100_000)
    assert mmlda("report", tmp_path, code=2).stderr.count("\n") == 1
    (tmp_path / "x.jsonl").write_text("[" * 100_000)
    assert "Traceback" not in mmlda("report", tmp_path, code=2).stderr


def test_reproduce_verify_and_report_belong_together(tmp_path):
    results, page = tmp_path / "results", tmp_path / "page.html"
    text = mmlda("reproduce", "table1", "--steps", 40, "--out", results).stdout
    assert "test error of MM-LDA on digits" in text and "HOLDS: " in text and f"mmlda report {results}" in text
    found = json.loads(mmlda("reproduce", "table1", "--steps", 40, "--out", results, "--json").stdout)
    assert {r["kind"] for r in found} == {"table1", "claim"}
    one = results / "table1-digits-sr-0.json"
    assert "agrees on 360 of its 360 images" in mmlda("reproduce", "--verify", one).stdout
    assert json.loads(mmlda("reproduce", "--verify", one, "--n", 50, "--json").stdout)["n"] == 50
    assert "results packed" in mmlda("pack", results).stdout and not one.exists()
    packed = results / "digits" / "table1.jsonl#table1-digits-sr-0"
    assert "agrees on 360 of its 360 images" in mmlda("reproduce", "--verify", packed).stdout
    address = mmlda("report", results, "-o", page).stdout.strip()
    assert address == page.resolve().as_uri() and "Table 1" in page.read_text(encoding="utf-8")
    outcomes = load_file(results / "digits" / "table1.safetensors")["table1-digits-sr-0/clean"]
    dataclasses.replace(Result.load(packed), value=0.5).save(results, save({"clean": (outcomes + 1) % 10}))
    assert "table1-digits-sr-0 differs from the packed result" in mmlda("pack", results, code=1).stdout
    assert "DOES NOT AGREE" in mmlda("reproduce", "--verify", one, code=1).stdout


def test_theory_and_means_are_plotted(tmp_path):
    for words in (("theory", "--classes", 3), ("means", "--classes", 12, "--dim", 8)):
        for ending, start in ((".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")):
            path = tmp_path / f"{words[0]}{ending}"
            assert str(path) in mmlda(*words, "--plot", path).stdout and path.read_bytes().startswith(start)
    assert "path must be a .png, .svg or .pdf file, got" in mmlda("theory", "--plot", tmp_path / "x.bmp", code=2).stderr


@pytest.mark.long
def test_the_demo_is_a_report_in_the_end(tmp_path):
    text = mmlda("demo", "--out", tmp_path).stdout
    assert "audit of MM-LDA: None at eps" in text and (tmp_path / "report.html").resolve().as_uri() in text
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    for part in ("Table 1", "Table 2", "Table 3", "Figure 2", "Figure 3", "Figure 4", "Figure 5", "Theory"):
        assert part in page
    names = {result["kind"] for result in json.loads(mmlda("demo", "--out", tmp_path, "--json").stdout)}
    assert names == {"theory", "table1", "fig2", "table2", "worst", "audit", "table3", "fig4", "fig3", "fig5", "claim"}


COMMANDS = ("pack", "train", "attack", "demo", "theory", "means", "models", "evaluate", "audit", "reproduce", "report")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command):
    assert f"Example: mmlda {command}" in mmlda(command, "--help").stdout


@pytest.mark.parametrize(
    "words",
    [
        ("train", "--data", "digits", "--out"),
        ("evaluate", "mnist-sr", "--out"),
        ("attack", "mnist-sr", "--attack", "fgsm:0.1", "--out"),
        ("audit", "mnist-sr", "--out"),
        ("report", "results", "-o"),
        ("export", "mnist-sr"),
        ("demo", "--out"),
        ("reproduce", "table1", "--out"),
    ],
)
def test_a_path_that_cannot_be_written_is_refused_before_the_work(words, tmp_path, monkeypatch):
    def refused(path, mode=0o777):
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(os, "mkdir", refused)
    done = mmlda(*words, tmp_path / "new" / "x.onnx", code=2)
    assert done.stderr.count("\n") == 1 and "must be a path that can be written, got" in done.stderr
    assert "new/x.onnx' (Permission denied)" in done.stderr and not list(tmp_path.iterdir())
