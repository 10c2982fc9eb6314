"""The command line: what it prints, its exit codes, and one line for a user's mistake."""

import contextlib
import io
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file, save

from mmlda import cli
from mmlda.results import Result


def mmlda(*words, code=0):
    """The command line in this process; what it printed."""
    out, err = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as stop,
    ):
        patch.setattr(sys, "argv", ["mmlda", *map(str, words)])
        cli.main()
    assert (stop.value.code or 0) == code, err.getvalue()
    return SimpleNamespace(stdout=out.getvalue(), stderr=err.getvalue())


def test_as_a_program():
    """A process of its own: exit code, one line, no traceback; nothing but the result on standard output."""
    command = [sys.executable, "-m", "mmlda"]
    good = subprocess.run([*command, "theory", "--json"], capture_output=True, text=True, timeout=120)
    assert good.returncode == 0 and json.loads(good.stdout)["delta"] > 0 and good.stderr == ""
    bad = subprocess.run([*command, "theory", "--C", "-1"], capture_output=True, text=True, timeout=120)
    assert bad.returncode == 2 and bad.stderr.startswith("mmlda: ") and bad.stderr.count("\n") == 1


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli") / "run"
    done = mmlda("train", "--data", "digits", "--steps", 120, "--model", "width=8", "--out", folder, "--json")
    return folder, json.loads(done.stdout)


def test_train_says_how_good_it_is_and_goes_on(run):
    folder, result = run
    assert result["accuracy"] > 0.8 and result["steps"] == 120 and len(result["per_class"]) == 10
    again = mmlda("train", "--data", "digits", "--steps", 120, "--model", "width=8", "--out", folder)
    assert f"test error {100 - 100 * result['accuracy']:.2f}% on 360 images" in again.stdout


def test_attack_prints_and_leaves_its_files(run, tmp_path):
    folder, clean = run
    done = mmlda("attack", folder, "--attack", "pgd", "--eps", 0.15, "--n", 80, "--out", tmp_path / "a", "--json",
                 "--set", "steps=10")  # fmt: skip
    result = json.loads(done.stdout)
    assert result["value"] < clean["accuracy"] - 0.2 and result["attack_settings"]["steps"] == 10
    assert (tmp_path / "a" / "result.json").is_file() and (tmp_path / "a" / "examples.png").is_file()
    words = mmlda("attack", folder, "--attack", "pgd", "--eps", 0.15, "--n", 80, "--out", tmp_path / "a",
                  "--set", "steps=10").stdout  # fmt: skip
    assert f"{100 * result['value']:.2f}% under attack" in words


def test_a_folder_where_nothing_was_done_is_free_and_losses_can_be_named(run, tmp_path):
    words = ("attack", run[0], "--eps", 0.1, "--n", 20, "--out", tmp_path / "a")
    assert "targeted" in mmlda(*words, "--attack", "pgd", "--set", "loss=targeted", code=2).stderr
    mmlda(*words, "--attack", "worst", "--set", 'losses=["margin"]')
    settings = json.loads((tmp_path / "a" / "result.json").read_text())["attack_settings"]
    assert settings["losses"] == ["margin"]
    assert "holds other work" in mmlda(*words, "--attack", "pgd", code=2).stderr


def test_fine_tuning_from_a_run(run, tmp_path):
    folder, _ = run
    adversary = json.dumps({"attack": "fgsm", "eps": [0.05, 0.1], "steps": 1, "craft": "once"})
    done = mmlda("train", "--data", "digits", "--recipe", "digits-sr", "--steps", 20, "--start", folder, "--out",
                 tmp_path / "sat", "--set", f"adversary={adversary}", "--set", "lr=0.01")  # fmt: skip
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
        (("train", "--head", "svm"), "head = 'svm'"),
        (("train", "--recipe", "x"), "recipe = 'x'"),
        (("train", "--set", "lr"), "expected name=value"),
        (("train", "--set", "speed=1"), "speed"),
        (("train", "--set", "lr=-1"), "lr = -1"),
        (("train", "--device", "cuda:99"), "device"),
        (("train", "--data", "nowhere"), "nowhere"),
        (("train", "--steps", "0"), "steps = 0"),
        (("attack", "nowhere", "--attack", "bim", "--eps", "0.1", "--out", "OUT"), "source = 'nowhere'"),
        (("attack", "mnist-sr", "--attack", "magic", "--out", "OUT"), "attack = 'magic'"),
        (("attack", "mnist-sr", "--attack", "bim", "--out", "OUT"), "BIM needs eps"),
        (("attack", "mnist-sr", "--attack", "bim", "--eps", "-1", "--out", "OUT"), "eps"),
        (("theory", "--classes", "1"), "L"),
        (("means", "--dim", "0"), "dim"),
        (("data", "check", "imagenet"), "imagenet"),
        (("evaluate", "mnist-sr", "--attack", "magic:0.1"), "attack = 'magic'"),
        (("evaluate", "mnist-sr", "--attack", "bim:much"), "attack = 'bim:much'"),
        (("evaluate", "mnist-sr", "--attack", "bim"), "BIM needs eps"),
        (("evaluate", "mnist-sr", "--attack", "cw:0.1"), "eps = 0.1"),
        (("audit", "nowhere", "--eps", "0.1"), "source = 'nowhere'"),
        (("audit", "mnist-sr", "--eps", "-1"), "eps"),
        (("evaluate", "mnist-sr", "--temperature"), "n = None"),
        (("attack", "cifar10-sr", "--attack", "bim", "--eps", "0.1", "--out", "OUT"), "images of 1 x 8 x 8"),
        (("attack", "mnist-sr", "--attack", "bim", "--set", "eps=abc", "--out", "OUT"), "eps = 'abc': expected float"),
        (("attack", "mnist-sr", "--attack", "bim", "--set", "steps=2.5", "--out", "OUT"), "steps = 2.5"),
        (("attack", "mnist-sr", "--attack", "worst", "--set", "attacks=foo", "--out", "OUT"), "attacks"),
        (("attack", "mnist-sr", "--attack", "bim", "--eps", "1", "--set", "bounds=[0,255]", "--out", "OUT"), "bounds"),
        (("attack", "mnist-sr", "--attack", "worst", "--eps", "0.1", "--set", "losses=[1]", "--out", "OUT"), "losses"),
        (("train", "--set", "lr=abc"), "lr = 'abc'"),
        (("train", "--set", "seed=x"), "seed = 'x'"),
        (("train", "--set", 'milestones=["a"]'), "milestones = ['a']"),
        (("train", "--set", 'adversary={"foo": 1}'), "foo = 1"),
        (("train", "--model", "depth=33", "--data", "digits"), "depth"),
        (("train", "--model", "size=33"), "size"),
        (("train", "--model", "depth=xx"), "depth = 'xx': expected int"),
        (("train", "--model", "width=xx", "--data", "digits"), "width = 'xx': expected int"),
        (("train", "--model", "batch_norm=no", "--data", "digits"), "batch_norm = 'no': expected bool"),
        (("train", "--model", "mean=null", "--data", "digits"), "model = mean=null"),
        (("train", "--model", "channels=3", "--data", "digits"), "images of 1 x 8 x 8"),
        (("train", "--model", "num_classes=5", "--data", "digits"), "10 classes: expected 5"),
        (("train", "--start", "cifar10-sr", "--recipe", "cifar10-sat", "--data", "digits"), "images of 1 x 8 x 8"),
        (("train", "--start", "cifar10-sr", "--head", "mmlda"), "head = 'mmlda': expected 'softmax'"),
        (("train", "--start", "cifar10-mmlda", "--head", "softmax"), "head = 'softmax': expected 'mmlda'"),
        (("train", "--start", "cifar10-sr", "--model", "width=8"), "model = width=8"),
        (("reproduce", "--verify", "OUT", "--n", "0"), "got no file there"),
        (("reproduce",), "name is missing"),
        (("reproduce", "table9"), "got 'table9'"),
        (("reproduce", "table1", "--seeds", "a"), "seeds = 'a'"),
        (("reproduce", "table1", "--shipped"), "shipped"),
        (("reproduce", "--verify", "OUT"), "got no file there"),
        (("report", "OUT"), "must be a folder with result files"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(words, what, tmp_path):
    done = mmlda(*[tmp_path if word == "OUT" else word for word in words], code=2)
    assert what in done.stderr and done.stderr.startswith("mmlda: ") and done.stderr.count("\n") == 1
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("words", "what"),
    [(("train", "--fast"), "No such option"), (("attack",), "Missing argument"), (("fly",), "No such command"),
     (("attack", "mnist-sr", "--attack", "bim", "--eps", "abc", "--out", "x"), "'--eps'"),
     (("attack", "mnist-sr", "--eps", "abc"), "; it was 'abc'"), (("theory", "--classes=five"), "; it was 'five'")],
)  # fmt: skip
def test_what_the_parser_refuses_is_one_line_too(words, what):
    done = mmlda(*words, code=2)
    assert what in done.stderr and done.stderr.startswith("mmlda: ") and done.stderr.count("\n") == 1


def test_no_words_at_all_are_answered_with_the_help():
    done = mmlda(code=2)
    assert done.stdout.startswith("Usage: ") and "mmlda [OPTIONS] COMMAND" in done.stdout and done.stderr == ""


def test_a_file_in_the_place_of_a_folder_is_named(run, tmp_path):
    path = tmp_path / "a file"
    path.write_text("")
    done = mmlda("attack", run[0], "--attack", "fgsm", "--eps", 0.1, "--n", 4, "--out", path, code=2)
    assert done.stderr == f"mmlda: {path}: expected another kind of path: File exists\n"


def test_theory_and_means():
    values = json.loads(mmlda("theory", "--classes", 10, "--C", 100, "--json").stdout)
    assert values["robustness_bound"] == pytest.approx((10 * 100 / 18) ** 0.5)
    assert "7.4535" in mmlda("theory").stdout
    means = json.loads(mmlda("means", "--classes", 12, "--dim", 8, "--json").stdout)
    assert means["kind"] == "pairs" and means["max_cosine"] == 0 and len(means["means"]) == 12


def test_data_and_models(tmp_path):
    names = [entry["name"] for entry in json.loads(mmlda("data", "list", "--root", tmp_path, "--json").stdout)]
    assert names == ["digits", "mnist", "fashion-mnist", "cifar10"]
    missing = mmlda("data", "check", "mnist", "--root", tmp_path, code=1)
    assert "mmlda data fetch mnist" in missing.stdout
    assert "as published" in mmlda("data", "check", "digits").stdout
    assert "cifar10-mmlda" in json.loads(mmlda("models", "--json").stdout)
    assert mmlda("--version").stdout.strip() == __import__("mmlda").__version__


def test_evaluate_is_a_table_or_json(run, tmp_path):
    words = ("evaluate", run[0], "--attack", "bim:0.1", "--attack", "fgsm:0.1", "--n", 60, "--out", tmp_path,
             "--temperature")  # fmt: skip
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
    assert text.lower().startswith("none") and "zero gradients" in text
    assert (tmp_path / "audit.png").read_bytes()[:4] == b"\x89PNG"
    assert json.loads(mmlda(*words, "--json").stdout)["value"] == "none"


def test_reproduce_verify_and_report_belong_together(tmp_path):
    results, page = tmp_path / "results", tmp_path / "page.html"
    text = mmlda("reproduce", "table1", "--steps", 40, "--out", results).stdout
    assert "test error of MM-LDA on digits" in text and "HOLDS: " in text and f"mmlda report {results}" in text
    found = json.loads(mmlda("reproduce", "table1", "--steps", 40, "--out", results, "--json").stdout)
    assert {r["kind"] for r in found} == {"table1", "claim"}
    one = results / "table1-digits-sr-0.json"
    assert "agrees on 200 of its images" in mmlda("reproduce", "--verify", one).stdout
    assert json.loads(mmlda("reproduce", "--verify", one, "--n", 50, "--json").stdout)["n"] == 50
    address = mmlda("report", results, "-o", page).stdout.strip()
    assert address == page.resolve().as_uri() and "Table 1" in page.read_text(encoding="utf-8")
    outcomes = load_file(results / "table1-digits-sr-0.safetensors")
    lied = save({"clean": (outcomes["clean"] + 1) % 10})
    Result.load(one).save(results, lied)
    assert "DOES NOT AGREE" in mmlda("reproduce", "--verify", one, code=1).stdout


def test_theory_and_means_are_plotted(tmp_path):
    for words in (("theory", "--classes", 3), ("means", "--classes", 12, "--dim", 8)):
        for ending, start in ((".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")):
            path = tmp_path / f"{words[0]}{ending}"
            assert str(path) in mmlda(*words, "--plot", path).stdout and path.read_bytes().startswith(start)
    assert "expected a .png" in mmlda("theory", "--plot", tmp_path / "x.bmp", code=2).stderr


def test_tab_completion_offers_commands_options_and_names():
    """As the shell asks: through an environment variable, in a process of its own."""

    def complete(*words):
        asked = {"_MMLDA_COMPLETE": "complete_bash", "COMP_WORDS": "mmlda " + " ".join(words),
                 "COMP_CWORD": str(len(words))}  # fmt: skip
        code = "import sys; sys.argv[0] = 'mmlda'; from mmlda.cli import main; main()"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120,
                              env={**os.environ, **asked})  # fmt: skip
        return done.stdout.split()

    assert {"reproduce", "audit", "report"} <= set(complete("re")) | set(complete("au"))
    assert "cifar10-mmlda" in complete("audit", "cifar")
    assert "table2" in complete("reproduce", "ta")


@pytest.mark.long
def test_the_demo_is_a_report_in_the_end(tmp_path):
    text = mmlda("demo", "--out", tmp_path).stdout
    assert "audit of MM-LDA: NONE" in text and (tmp_path / "report.html").resolve().as_uri() in text
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    for part in ("Table 1", "Table 2", "Table 3", "Figure 2", "Figure 3", "Figure 4", "Figure 5", "Theory"):
        assert part in page
    names = {result["kind"] for result in json.loads(mmlda("demo", "--out", tmp_path, "--json").stdout)}
    assert names == {"theory", "table1", "fig2", "table2", "worst", "audit", "table3", "fig4", "fig3", "fig5", "claim"}


COMMANDS = ("train", "attack", "demo", "theory", "means", "models", "evaluate", "audit", "reproduce", "report")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command):
    assert f"Example: mmlda {command}" in mmlda(command, "--help").stdout
