"""The command line: what it prints, its exit codes, and one line for a user's mistake."""

import contextlib
import io
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from mmlda import cli


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
    assert result["value"] < 100 * clean["accuracy"] - 20 and result["attack"]["settings"]["steps"] == 10
    assert (tmp_path / "a" / "result.json").is_file() and (tmp_path / "a" / "examples.png").is_file()
    words = mmlda("attack", folder, "--attack", "pgd", "--eps", 0.15, "--n", 80, "--out", tmp_path / "a",
                  "--set", "steps=10").stdout  # fmt: skip
    assert f"{result['value']:.2f}% under attack" in words


def test_fine_tuning_from_a_run(run, tmp_path):
    folder, _ = run
    adversary = json.dumps({"attack": "fgsm", "eps": [0.05, 0.1], "steps": 1, "craft": "once"})
    done = mmlda("train", "--data", "digits", "--recipe", "digits-sr", "--steps", 20, "--start", folder, "--out",
                 tmp_path / "sat", "--set", f"adversary={adversary}", "--set", "lr=0.01")  # fmt: skip
    assert "after 20 steps" in done.stdout
    recipe = json.loads((tmp_path / "sat" / "run.json").read_text())["recipe"]
    assert recipe["adversary"]["craft"] == "once" and recipe["lr"] == 0.01


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
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(words, what, tmp_path):
    done = mmlda(*[tmp_path if word == "OUT" else word for word in words], code=2)
    assert what in done.stderr and done.stderr.startswith("mmlda: ") and done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_unknown_options_exit_with_2():
    assert "No such option" in mmlda("train", "--fast", code=2).stderr


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


@pytest.mark.parametrize("command", ["train", "attack", "demo", "theory", "means", "models"])
def test_help_has_an_example(command):
    assert f"Example: mmlda {command}" in mmlda(command, "--help").stdout
