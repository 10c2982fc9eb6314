"""`fit`: what it computes, when it stops, and what it reports."""

import dataclasses
import re
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from training_cases import CPU, QUICK, SMALL, break_off, interrupt_at, robust, same, train, weights

import mmlda
from mmlda.data import ImageData, augment
from mmlda.models import build
from mmlda.training import RECIPES, Adversary, Diverged, Recipe, checkpoints, fit
from mmlda.training.batches import Batches
from mmlda.training.recipes import network


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_the_loop_is_the_plain_loop(digits, optimizer):
    """The same batches through torch's own modules, written out, give the same network."""
    data = digits[0]
    recipe = Recipe(
        steps=50,
        optimizer=optimizer[:4].rstrip("w"),
        lr=0.05 if optimizer == "sgd" else 1e-3,
        batch_size=64,
        milestones=(30,),
        warmup=10,
        decoupled=optimizer == "adamw",
        weight_decay=1e-2,
        seed=5,
        pad=1,
        flip=True,
    )
    got, run = train(data, recipe)

    model = build(SMALL, seed=0).train().to(memory_format=torch.channels_last)
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[optimizer]
    extra = {"momentum": 0.9} if optimizer == "sgd" else {}
    reference = kind(model.parameters(), lr=1.0, weight_decay=1e-2, **extra)
    batches, losses = Batches(data, recipe, CPU), []
    for step in range(50):
        if step % (len(data) // 64) == 0:
            batches.seek(step)
        row = step % (len(data) // 64)
        rows, (dy, dx, flip) = batches.order[row], batches.draws[:, row]
        x = augment(data.pixels(rows), dy, dx, flip == 1, pad=1).contiguous(memory_format=torch.channels_last)
        reference.param_groups[0]["lr"] = recipe.lr * min(1, (step + 1) / 10) * (0.1 if step >= 30 else 1)
        loss = F.cross_entropy(model(x), data.labels[rows])
        reference.zero_grad()
        loss.backward()
        reference.step()
        losses.append(loss.item())
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-4, atol=1e-5, msg=name)
    torch.testing.assert_close(run.loss, losses[-1], rtol=1e-4, atol=1e-6)  # 50 steps: every step is logged


def test_both_heads_learn_digits(digits):
    for name, head in (("digits-sr", "softmax"), ("digits-mmlda", "mmlda")):
        model = build(network(head, "digits", width=16), seed=0)
        fit(model, digits[0], RECIPES[name].scaled(150), show=False)
        assert mmlda.accuracy(model, digits[1]).accuracy > 0.95


@pytest.mark.parametrize("loss", ["soft", "centre"])
def test_the_heads_other_losses(digits, loss):
    """The joint objective pulls features to their means; cross-entropy alone need not."""
    recipe = dataclasses.replace(QUICK, loss=loss, steps=150, milestones=(), lr=1e-2)
    model = build(dict(SMALL, C=25.0, width=16), seed=0)
    z, y = model.eval().features(digits[0].pixels()), digits[0].labels
    before = (z - model.head.means[y]).square().sum(1).mean()
    fit(model, digits[0], recipe, show=False)
    z = model.features(digits[0].pixels())
    after = (z - model.head.means[y]).square().sum(1).mean()
    assert after < (0.5 if loss == "centre" else 1.0) * before


def test_any_module_trains_and_other_losses_ask_for_features(digits):
    torch.manual_seed(0)
    net = mmlda.swap_head(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)), num_classes=10)
    run = fit(net, digits[0], dataclasses.replace(QUICK, steps=120, lr=0.01, milestones=()), show=False)
    assert run.accuracy > 0.8
    with pytest.raises(ValueError, match=r"loss must be 'ce' for a model without features.*'centre'"):
        fit(net, digits[0], dataclasses.replace(QUICK, loss="centre"), show=False)


def test_the_same_seed_gives_the_same_bits_and_another_seed_others(digits):
    (a, _), (b, _) = train(digits[0]), train(digits[0])
    c, _ = train(digits[0], dataclasses.replace(QUICK, seed=1))
    assert same(a, b) and not same(a, c)


def test_bfloat16_on_the_cpu_learns_and_is_not_float32(digits):
    recipe = dataclasses.replace(QUICK, steps=150, lr=5e-3, milestones=())
    mixed, run = train(digits[0], recipe, amp=True)
    single, _ = train(digits[0], recipe)
    assert run.accuracy > 0.9 and not same(mixed, single)
    assert all(tensor.dtype != torch.bfloat16 for tensor in mixed.values())


def test_dropout_is_part_of_the_seed_and_the_callers_generator_is_not_moved(digits):
    class Net(torch.nn.Sequential): ...

    def once():
        torch.manual_seed(0)
        net = Net(torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.Dropout(0.5), torch.nn.Linear(32, 10))
        before = torch.get_rng_state()
        fit(net, digits[0], QUICK, show=False)
        assert torch.equal(torch.get_rng_state(), before)
        torch.manual_seed(123)
        return weights(net)

    assert same(once(), once())


def test_a_diverging_run_stops_and_reports_the_step(digits, tmp_path):
    """An image of NaN can't happen with bytes; a rate of 1e18 does it."""
    recipe = dataclasses.replace(QUICK, optimizer="sgd", lr=1e18, steps=50, milestones=(), warmup=0, weight_decay=0.0)
    words = r"not finite (at|after) step (\d+); the last finite loss was [\d.e+]+; the checkpoint of step (\d+) is kept"
    with pytest.raises(Diverged, match=words) as error:
        train(digits[0], recipe, out=tmp_path, checkpoint_every=1, log_every=50)
    bad, kept = (int(number) for number in re.search(words, str(error.value)).group(2, 3))
    tensors, record = checkpoints.newest(tmp_path)
    assert record["step"] == kept == bad - 1
    assert all(t.isfinite().all() for name, t in tensors.items() if name.startswith("model."))


def test_a_process_that_keeps_the_error_can_resume(digits, tmp_path):
    """A notebook keeps the traceback and all it refers to; the last finite loss is restored."""
    late = {"milestones": (10,), "gamma": 1e30, "weight_decay": 0.0}
    recipe = dataclasses.replace(QUICK, optimizer="sgd", lr=1e-3, steps=50, **late)
    kept = []
    for _ in range(2):
        with pytest.raises(Diverged, match=r"the last finite loss was [\d.e+]+;") as error:
            train(digits[0], recipe, out=tmp_path, checkpoint_every=1)
        kept.append(error)
    assert str(kept[0].value) == str(kept[1].value)
    with pytest.raises(Diverged, match="no loss before it was"):
        bad = ImageData(digits[0].images, digits[0].labels, digits[0].classes)
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
        torch.nn.init.constant_(model[1].weight, float("inf"))
        fit(model, bad, QUICK, show=False)


def test_the_exact_step_of_a_divergence_is_known_without_logging_every_step(digits):
    recipe = dataclasses.replace(QUICK, optimizer="sgd", lr=1e18, steps=40, milestones=(), weight_decay=0.0)
    steps = []
    for log_every in (1, 40):
        with pytest.raises(Diverged) as error:
            train(digits[0], recipe, log_every=log_every)
        steps.append(str(error.value))
    assert steps[0] == steps[1]


def test_ctrl_c_saves_after_the_step_and_the_same_call_resumes(digits, tmp_path, capsys):
    options = {"out": tmp_path, "show": False, "checkpoint_every": 1000}
    with pytest.raises(KeyboardInterrupt, match="stopped at step 7"):
        fit(interrupt_at(build(SMALL, seed=0), 7), digits[0], QUICK, **options)
    assert capsys.readouterr().err == f"stopped at step 7 and saved; the same call with out={str(tmp_path)!r} resumes\n"
    assert checkpoints.newest(tmp_path)[1]["step"] == 7
    model = build(SMALL, seed=1)
    assert fit(model, digits[0], QUICK, **options).step == 24
    assert same(weights(model), train(digits[0])[0])


def test_progress_is_one_line_now_and_then_off_a_terminal_and_nothing_when_hidden(digits, capsys):
    fit(build(SMALL, seed=0), digits[0], QUICK)
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1 and "24/24 steps" in shown.err and "loss" in shown.err
    fit(build(SMALL, seed=0), digits[0], QUICK, show=False)
    assert capsys.readouterr().err == ""


def test_the_rate_of_a_resumed_run_leaves_out_earlier_steps(capsys, monkeypatch):
    clock = iter([0.0, 100.0, 104.0])
    monkeypatch.setattr("mmlda._utils.progress.time", SimpleNamespace(monotonic=lambda: next(clock)))
    with mmlda._utils.progress.progress("x", 1000, every=0.0) as report:
        report(900, start=True)
        report(910)
    assert "910/1000 steps  2.5 steps/s" in capsys.readouterr().err


@pytest.mark.parametrize(
    "model, word",
    [
        (torch.nn.Flatten(), "model must have a parameter to train"),
        (build(dict(SMALL, num_classes=5), seed=0), "model must have at least the 10 classes of the data, got 5"),
        (build(SMALL, seed=0).requires_grad_(False), "model must have a parameter to train"),
    ],
)
def test_models_that_cannot_be_trained_are_named(digits, model, word):
    with pytest.raises(ValueError, match=word):
        fit(model, digits[0], QUICK, show=False)


def test_tensorboard_files(digits, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _, run = train(digits[0], out=tmp_path, tensorboard=True, log_every=8)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, round(e.value, 4)) for e in events.Scalars("loss")] == [
        (entry["step"], round(entry["loss"], 4)) for entry in run.history
    ]


def test_float_images_and_a_batch_larger_than_the_data():
    generator = torch.Generator().manual_seed(0)
    data = ImageData(torch.rand(20, 1, 8, 8, generator=generator), torch.arange(20) % 2, ("a", "b"))
    model = build(dict(SMALL, num_classes=2), seed=0)
    assert fit(model, data, dataclasses.replace(QUICK, batch_size=64), show=False).step == 24


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestCuda:
    def test_deterministic_gives_the_same_bits(self, digits):
        a, _ = train(digits[0], device="cuda", deterministic=True)
        b, _ = train(digits[0], device="cuda", deterministic=True)
        assert same(a, b)

    @pytest.mark.parametrize("options", [{}, {"deterministic": True}, {"eager": True}])
    @pytest.mark.parametrize("optimizer", ["sgd", "adam"])
    def test_captured_and_eager_steps_train_alike(self, digits, options, optimizer):
        recipe = Recipe(
            steps=150, optimizer=optimizer, lr=0.05 if optimizer == "sgd" else 2e-3, batch_size=64, milestones=(100,)
        )
        model = build(network("mmlda", "digits"), seed=0)
        run = fit(model, digits[0], recipe, device="cuda", show=False, **options)
        assert run.accuracy > 0.97 and mmlda.accuracy(model, digits[1]).accuracy > 0.93

    def test_rate_changes_reach_the_captured_step(self, digits):
        recipe = Recipe(steps=40, lr=0.05, gamma=0.0, milestones=(20,), weight_decay=0.0)
        long, _ = train(digits[0], recipe, device="cuda", deterministic=True)
        first = dataclasses.replace(recipe, steps=20, milestones=())
        short, _ = train(digits[0], first, device="cuda", deterministic=True)
        for name in long:  # with rate 0 nothing but the running statistics moves
            if "running" not in name and "tracked" not in name:
                assert torch.equal(long[name], short[name]), name

    @pytest.mark.parametrize("attack", ["pgd", "trades"])
    def test_adversarial_steps_are_captured_too(self, digits, attack):
        adversary = Adversary(attack=attack, eps=0.15, steps=5, step=0.3, random_start=True, share=1.0)
        recipe = Recipe(steps=200, optimizer="adam", lr=3e-3, batch_size=64, adversary=adversary)
        model = build(dict(SMALL, head="softmax", width=16, dim=32), seed=0)
        fit(model, digits[0], recipe, device="cuda", show=False)
        assert robust(model.cpu(), digits[1], 0.15) > 0.4

    def test_a_run_resumes(self, digits, tmp_path):
        whole, _ = train(digits[0], device="cuda", deterministic=True)
        break_off(digits[0], QUICK, tmp_path, 18, device="cuda", deterministic=True, checkpoint_every=5)
        again, _ = train(digits[0], device="cuda", deterministic=True, out=tmp_path)
        for name in whole:
            torch.testing.assert_close(again[name], whole[name], rtol=1e-4, atol=1e-5)
