"""The training loop: what it computes, and what survives a kill, a full disk, a damaged file and Ctrl-C."""

import copy
import dataclasses
import json
import re
import subprocess
import sys
import textwrap
import time

import pytest
import torch
import torch.nn.functional as F

import mmlda
from mmlda.attacks.replay import compile_quietly
from mmlda.data import ImageData, augment
from mmlda.models import build
from mmlda.training import Diverged, Options, Run, checkpoints, fit, sitting
from mmlda.training.recipes import RECIPES, Adversary, Recipe, hat, network, sat
from mmlda.training.step import Batches, craft, craft_once

SMALL = {"backbone": "conv_net", "width": 4, "head": "mmlda", "dim": 12}
QUICK = Recipe(steps=24, optimizer="adam", lr=1e-3, batch_size=32, milestones=(16,))
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def digits():
    return mmlda.data.load("digits")


def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def break_off(data, recipe, out, step, model=None, **options):
    """Train and break off after a step, as a kill would: nothing more is written."""
    run = Run(build(SMALL, seed=0) if model is None else model, recipe, out)
    for done in sitting(run, data, Options(**options), report=lambda done, **numbers: None):
        if done == step:
            return


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def train(data, recipe=QUICK, config=SMALL, **options):
    model = build(config, seed=0)
    run = fit(model, data, recipe, show=False, **options)
    return weights(model), run


# ----------------------------------------------------------------------------------------------- what it computes


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_the_loop_is_the_plain_loop(digits, optimizer):
    """The same batches through torch's own modules, written out, give the same network."""
    data = digits[0]
    recipe = Recipe(
        steps=50, optimizer=optimizer[:4].rstrip("w"), lr=0.05 if optimizer == "sgd" else 1e-3, batch_size=64,
        milestones=(30,), warmup=10, decoupled=optimizer == "adamw", weight_decay=1e-2, seed=5, pad=1, flip=True,
    )  # fmt: skip
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


def test_an_epoch_shows_each_image_once_and_the_next_in_another_order(digits):
    batches = Batches(digits[0], QUICK, CPU)
    batches.seek(0)
    first = batches.order.clone()
    assert first.flatten().unique().numel() == first.numel() == len(digits[0]) // 32 * 32
    batches.seek(batches.per_epoch)
    assert not torch.equal(first, batches.order)
    batches.seek(0)
    assert torch.equal(first, batches.order)


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
    with pytest.raises(ValueError, match="loss = 'centre'"):
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


def test_accumulating_parts_of_a_batch_is_the_whole_batch_without_batch_norm(digits):
    config = dict(SMALL, batch_norm=False)
    recipe = Recipe(steps=20, lr=0.01, batch_size=64)
    whole, whole_run = train(digits[0], recipe, config)
    for accumulate in (4, 5):  # 5 parts of 64 are not of one size
        parts, run = train(digits[0], dataclasses.replace(recipe, accumulate=accumulate), config)
        assert run.loss == pytest.approx(whole_run.loss, rel=1e-4)
        for name in whole:
            torch.testing.assert_close(parts[name], whole[name], rtol=1e-4, atol=1e-5)


# ----------------------------------------------------------------------------------------------- adversarial


@pytest.mark.parametrize("attack", ["fgsm", "bim", "ilcm"])
def test_crafting_is_the_attack(digits, attack):
    model = build(SMALL, seed=0).eval()
    x, y = digits[0].pixels(slice(20)), digits[0].labels[:20]
    kind = {"fgsm": mmlda.attacks.FGSM, "bim": mmlda.attacks.BIM, "ilcm": mmlda.attacks.ILCM}[attack]
    adversary = Adversary(attack=attack, eps=0.1, steps=1 if attack == "fgsm" else 10)
    got = craft(model.train(), x, y, torch.full((20,), 0.1), x, adversary)
    assert all(p.requires_grad and p.grad is None for p in model.parameters()) and model.training
    expected = kind(eps=0.1)(model.eval(), x, y).x_adv
    assert (got - x).abs().max() > 0.09
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)


def test_hybrid_training_draws_a_perturbation_for_each_image(digits):
    recipe = dataclasses.replace(hat("fgsm"), batch_size=32)
    batches = Batches(digits[0], recipe, CPU)
    craft_once(build(SMALL, seed=0), batches)
    moved = (batches.adversarial - digits[0].pixels()).abs().flatten(1).amax(1)
    assert 0.02 - 1e-6 <= moved.min() and moved.max() <= 0.2 + 1e-6
    assert moved.std() > 0.03  # uniform in [0.02, 0.20] has 0.052


def robust(model, data, eps):
    return float((~mmlda.attacks.PGD(eps=eps, steps=20)(model, data.pixels(), data.labels).success).float().mean())


@pytest.mark.parametrize("attack", ["pgd", "trades"])
def test_adversarial_training_from_scratch_makes_robust(digits, attack):
    adversary = Adversary(attack=attack, eps=0.15, steps=5, step=0.3, random_start=True, share=1.0)
    recipe = Recipe(steps=150, optimizer="adam", lr=3e-3, batch_size=64)
    config = dict(SMALL, head="softmax", width=16, dim=32)
    scores = []
    for value in (recipe, dataclasses.replace(recipe, adversary=adversary)):
        model = build(config, seed=0)
        fit(model, digits[0], value, show=False)
        scores.append(robust(model, digits[1], 0.15))
    assert scores[1] > scores[0] + 0.15


@pytest.mark.parametrize("how", ["once", "online"])
def test_fine_tuning_as_in_the_paper(digits, how, tmp_path):
    """SAT on a trained network: online training resists the attack on the network itself; crafting once, at least
    the examples it saw. Killed half-way, it goes on to the same weights, though the crafting network has changed."""
    start = build(dict(SMALL, head="softmax", width=16, dim=32), seed=0)
    fit(start, digits[0], RECIPES["digits-sr"].scaled(150), show=False)
    recipe = dataclasses.replace(sat("fgsm", 0.12, steps=100, craft=how), batch_size=64)
    x, y = digits[0].pixels(), digits[0].labels
    moved = mmlda.attacks.FGSM(eps=0.12)(start, x, y).x_adv
    before = (start(moved).argmax(1) == y).float().mean()
    a, b = copy.deepcopy(start), copy.deepcopy(start)
    fit(a, digits[0], recipe, show=False)
    if how == "once":
        assert (a(moved).argmax(1) == y).float().mean() > before + 0.2
    else:
        assert robust(a, digits[0], 0.12) > robust(start, digits[0], 0.12) + 0.05
    break_off(digits[0], recipe, tmp_path, 60, model=b, checkpoint_every=25)
    fresh = copy.deepcopy(start)
    fit(fresh, digits[0], recipe, out=tmp_path, show=False, checkpoint_every=25)
    assert same(weights(fresh), weights(a))


class Seen(torch.nn.Module):
    """A linear network that keeps the images it was trained on."""

    def __init__(self):
        super().__init__()
        self.layer, self.images = torch.nn.Linear(64, 10), []

    def forward(self, x):
        if self.training:
            self.images.append(x.detach().clone())
        return self.layer(x.flatten(1))


@pytest.mark.parametrize("share, attacked", [(0.05, 2), (0.5, 16), (1.0, 32)])
def test_a_share_of_each_batch_is_attacked(digits, share, attacked):
    net = Seen()
    adversary = Adversary(attack="fgsm", eps=0.1, steps=1, share=share)
    fit(net, digits[0], dataclasses.replace(QUICK, steps=1, milestones=(), adversary=adversary), show=False)
    bytes_ = 255 * net.images[0]
    assert int(((bytes_ - bytes_.round()).abs().flatten(1).amax(1) > 1e-3).sum()) == attacked
    tiny = dataclasses.replace(QUICK, adversary=dataclasses.replace(adversary, share=0.01))
    with pytest.raises(ValueError, match=r"share = 0\.01: expected one image or more of a part of 32"):
        fit(net, digits[0], tiny, show=False)


def test_one_compiled_program_takes_the_batches_of_data_sets_of_every_length(digits):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for length in range(400, 1300, 90):  # ten: more than the compiler would take one by one
        batches = Batches(digits[0].subset(slice(length)), dataclasses.replace(QUICK, pad=1, flip=True), CPU)
        batches.seek(3)
        batches.for_any_length()
        take = compile_quietly(batches.take, dynamic=False, backend="aot_eager")
        for one, other in zip(take(0, 1), batches.take(0, 1), strict=True):
            assert one is other is None or torch.equal(one, other)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


# ----------------------------------------------------------------------------------------------- checkpoints


def test_checkpoints_nobody_asked_for_are_seconds_apart_and_leave_the_metrics_alone(digits, tmp_path, monkeypatch):
    saved, histories = [], []
    monkeypatch.setattr(checkpoints, "save", lambda out, step, *rest: saved.append(step))
    recipe = dataclasses.replace(QUICK, steps=250)  # a line every 2 steps; a twentieth is 12
    for pause, expected in ((0.0, [*range(12, 250, 12), 250]), (1e9, [250])):
        monkeypatch.setattr("mmlda.training.PAUSE", pause)
        model = build({"backbone": "conv_net", "head": "softmax"}, seed=0)
        run = fit(model, digits[0].subset(slice(64)), recipe, out=tmp_path / str(pause), show=False)
        assert saved == expected
        histories.append([(entry["step"], entry["loss"]) for entry in run.history])
        saved.clear()
    assert histories[0] == histories[1] and len(histories[0]) == 125
    fit(build(SMALL, seed=0), digits[0], QUICK, out=tmp_path / "asked", show=False, checkpoint_every=5)
    assert saved == [5, 10, 15, 20, 24]


def test_a_run_goes_on_to_the_same_bits_and_the_same_metrics(digits, tmp_path):
    whole, run = train(digits[0], out=tmp_path / "a", log_every=4, checkpoint_every=5)
    break_off(digits[0], QUICK, tmp_path / "b", 18, log_every=4, checkpoint_every=5)
    again, rerun = train(digits[0], out=tmp_path / "b", log_every=4, checkpoint_every=5)
    assert same(whole, again)
    drop = ("seconds", "steps_per_second")
    plain = [[{k: v for k, v in entry.items() if k not in drop} for entry in r.history] for r in (run, rerun)]
    assert plain[0] == plain[1]
    lines = [json.loads(line) for line in (tmp_path / "b" / "metrics.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in lines] == [entry["step"] for entry in rerun.history]


def test_a_finished_run_is_loaded_not_repeated(digits, tmp_path):
    first, run = train(digits[0], out=tmp_path)
    stamp = (tmp_path / "model.safetensors").stat().st_mtime_ns
    second, again = train(digits[0], out=tmp_path)
    assert same(first, second) and again.step == 24 and again.loss == run.loss
    assert (tmp_path / "model.safetensors").stat().st_mtime_ns == stamp
    loaded = mmlda.load(tmp_path)
    assert not loaded.training and same(weights(loaded), first)


def test_another_recipe_network_or_data_in_the_same_folder_is_refused(digits, tmp_path):
    train(digits[0], out=tmp_path)
    with pytest.raises(ValueError, match=r"recipe\.lr is 0\.001 there, and 0\.01 was asked for"):
        train(digits[0], dataclasses.replace(QUICK, lr=0.01), out=tmp_path)
    with pytest.raises(ValueError, match=r"model\.C"):
        train(digits[0], config=dict(SMALL, C=10.0), out=tmp_path)
    with pytest.raises(ValueError, match=r"data\."):
        train(digits[1], out=tmp_path)
    with pytest.raises(ValueError, match=r"model\.priors"):
        train(digits[0], config=dict(SMALL, priors=[0.55] + [0.05] * 9), out=tmp_path)
    assert mmlda.load(tmp_path)


def test_two_processes_do_not_train_in_one_folder(digits, tmp_path):
    script = f"""
        import mmlda, sys
        from mmlda.models import build
        from mmlda.training.recipes import Recipe
        print("ready", flush=True)
        mmlda.fit(build({SMALL!r}, seed=0), mmlda.data.load("digits")[0], Recipe(steps=10**6), out={str(tmp_path)!r})
    """
    other = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE,
                             stderr=subprocess.DEVNULL)  # fmt: skip
    try:
        other.stdout.readline()
        while not (tmp_path / "run.json").is_file():
            time.sleep(0.05)
        with pytest.raises(ValueError, match="another process is training there"):
            train(digits[0], Recipe(steps=10**6), out=tmp_path)
    finally:
        other.kill()
        other.wait()
    (tmp_path / ".step-00000001.json.x.tmp").write_text("half")
    with pytest.raises(ValueError, match="holds another run"):  # the dead one's lock is gone, its folder is not ours
        train(digits[0], out=tmp_path)
    assert not list(tmp_path.glob(".*.tmp"))


@pytest.mark.parametrize("damage", ["truncated", "altered", "record", "step", "loss", "no seconds", "missing"])
def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_used(digits, tmp_path, damage):
    whole, _ = train(digits[0])
    break_off(digits[0], QUICK, tmp_path, 18, checkpoint_every=6)
    newest = tmp_path / "step-00000018.safetensors"
    content = bytearray(newest.read_bytes())
    assert sorted(p.name for p in tmp_path.glob("step-*.json")) == ["step-00000012.json", "step-00000018.json"]
    if damage == "truncated":
        newest.write_bytes(content[:-100])
    elif damage == "altered":
        content[-1] ^= 1
        newest.write_bytes(content)
    elif damage == "record":
        newest.with_suffix(".json").write_text('{"format": 1, "step"')
    elif damage == "step":  # a record that claims the run is over
        record = json.loads(newest.with_suffix(".json").read_text())
        newest.with_suffix(".json").write_text(json.dumps({**record, "step": 24}))
    elif damage in ("loss", "no seconds"):
        record = json.loads(newest.with_suffix(".json").read_text())
        changed = {"loss": 0.5} if damage == "loss" else {"seconds": None}
        newest.with_suffix(".json").write_text(json.dumps({**record, **changed}))
    else:
        newest.unlink()
    with pytest.warns(UserWarning, match="checkpoint refused: .*step-00000018"):
        again, _ = train(digits[0], out=tmp_path)
    assert same(whole, again)


@pytest.mark.parametrize("damage", [lambda b: b[:-50], lambda b: b[:-50] + bytes([b[-50] ^ 1]) + b[-49:]])
def test_a_truncated_or_altered_network_is_refused_and_made_again_from_the_checkpoint(digits, tmp_path, damage):
    whole, _ = train(digits[0], out=tmp_path)
    path = tmp_path / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(damage(content))
    with pytest.warns(UserWarning, match="network refused"):
        assert same(weights(mmlda.load(tmp_path)), whole)
    with pytest.warns(UserWarning, match="network refused"):
        again, _ = train(digits[0], out=tmp_path)
    assert same(again, whole) and path.read_bytes() == content


def test_a_line_of_metrics_that_lost_its_end_does_not_spoil_the_next(digits, tmp_path):
    break_off(digits[0], QUICK, tmp_path, 12, log_every=4, checkpoint_every=4)
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(metrics.read_text().rstrip("\n"))
    train(digits[0], out=tmp_path, log_every=4, checkpoint_every=4)
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == [4, 8, 12, 16, 20, 24]
    metrics.unlink()
    assert train(digits[0], out=tmp_path)[1].step == 24  # the network is there all the same


def test_tied_weights_are_saved_and_go_on(digits, tmp_path):
    def tied():
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Flatten(), *(torch.nn.Linear(64, 64) for _ in range(2)),
                                  torch.nn.Dropout(0.2), torch.nn.Linear(64, 10))  # fmt: skip
        net[2].weight = net[1].weight
        return net

    whole = tied()
    fit(whole, digits[0], QUICK, show=False)
    torch.manual_seed(QUICK.seed)
    with torch.random.fork_rng():
        start = tied()
        torch.manual_seed(QUICK.seed)
        break_off(digits[0], QUICK, tmp_path, 14, model=start, checkpoint_every=6)
    again = tied()
    fit(again, digits[0], QUICK, out=tmp_path, show=False)
    assert same(weights(again), weights(whole)) and again[1].weight is again[2].weight


def test_only_damaged_checkpoints_is_an_error_not_a_fresh_start(tmp_path):
    checkpoints.save(tmp_path, 3, {"a": torch.ones(3)}, {})
    (tmp_path / "step-00000003.safetensors").write_bytes(b"")
    with pytest.warns(UserWarning), pytest.raises(ValueError, match="no checkpoint can be used"):
        checkpoints.newest(tmp_path)


def test_a_diverging_run_stops_and_says_where(digits, tmp_path):
    """An image of NaN can't happen with bytes; a rate of 1e18 does it."""
    recipe = dataclasses.replace(QUICK, optimizer="sgd", lr=1e18, steps=50, milestones=(), warmup=0, weight_decay=0.0)
    words = r"not finite (at|after) step (\d+); the last finite loss was [\d.e+]+; the checkpoint of step (\d+) is kept"
    with pytest.raises(Diverged, match=words) as error:
        train(digits[0], recipe, out=tmp_path, checkpoint_every=1, log_every=50)
    bad, kept = (int(number) for number in re.search(words, str(error.value)).group(2, 3))
    tensors, record = checkpoints.newest(tmp_path)
    assert record["step"] == kept == bad - 1
    assert all(t.isfinite().all() for name, t in tensors.items() if name.startswith("model."))


def test_the_same_process_goes_on_while_it_keeps_the_error(digits, tmp_path):
    """As a notebook does, with its traceback and all that it refers to; and the last finite loss is known again."""
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


def test_a_run_keeps_to_its_precision(digits, tmp_path):
    break_off(digits[0], QUICK, tmp_path, 12, checkpoint_every=6, amp=True)
    with pytest.raises(ValueError, match="amp is True there, and False was asked for"):
        train(digits[0], out=tmp_path, amp=False)
    whole, _ = train(digits[0], amp=True)
    assert same(whole, train(digits[0], out=tmp_path)[0]) and not same(whole, train(digits[0])[0])


@pytest.mark.parametrize("text", ['{"recipe": ', "[1, 2]"])
def test_a_damaged_description_is_named(digits, tmp_path, text):
    break_off(digits[0], QUICK, tmp_path, 12, checkpoint_every=6)
    (tmp_path / "run.json").write_text(text)
    for call in (lambda: train(digits[0], out=tmp_path), lambda: mmlda.load(tmp_path)):
        with pytest.raises(ValueError, match=r"run.json is damaged"):
            call()


def test_the_weights_that_examples_were_crafted_on_are_checked(digits, tmp_path):
    recipe = dataclasses.replace(QUICK, adversary=Adversary(attack="fgsm", eps=0.1, steps=1, craft="once"))
    break_off(digits[0], recipe, tmp_path, 12, checkpoint_every=6)
    path = tmp_path / "start.safetensors"
    content = bytearray(path.read_bytes())
    for damaged in (content[:-50], content[:-1] + bytes([content[-1] ^ 1])):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"start.safetensors"):
            train(digits[0], recipe, out=tmp_path)
    path.write_bytes(content)
    assert same(train(digits[0], recipe)[0], train(digits[0], recipe, out=tmp_path)[0])


def test_strange_lines_of_metrics_are_left_out(digits, tmp_path):
    break_off(digits[0], QUICK, tmp_path, 12, checkpoint_every=6)
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b"\xff\xfe\n[1]\n7\n")
    _, run = train(digits[0], out=tmp_path)
    assert [entry["step"] for entry in run.history] == list(range(1, 25))


def test_the_exact_step_of_a_divergence_is_known_without_logging_every_step(digits):
    recipe = dataclasses.replace(QUICK, optimizer="sgd", lr=1e18, steps=40, milestones=(), weight_decay=0.0)
    steps = []
    for log_every in (1, 40):
        with pytest.raises(Diverged) as error:
            train(digits[0], recipe, log_every=log_every)
        steps.append(str(error.value))
    assert steps[0] == steps[1]


def test_ctrl_c_saves_and_says_how_to_go_on(digits, tmp_path):
    script = f"""
        import mmlda, os, signal, threading, time
        from mmlda.models import build
        from mmlda.training.recipes import Recipe
        def interrupt():
            while not os.path.exists({str(tmp_path / "run.json")!r}):
                time.sleep(0.05)
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGINT)
        threading.Thread(target=interrupt).start()
        mmlda.fit(build({SMALL!r}, seed=0), mmlda.data.load("digits")[0], Recipe(steps=10**6, milestones=()),
                  out={str(tmp_path)!r}, show=False, checkpoint_every=10**6)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and "KeyboardInterrupt" in done.stderr
    assert "and saved" in done.stderr and f"out={str(tmp_path)!r} goes on" in done.stderr
    _, record = checkpoints.newest(tmp_path)
    assert 0 < record["step"] < 10**6


def test_a_full_disk_loses_nothing_that_was_saved(tmp_path):
    """A limit on file size stands for the full disk: the write of the new checkpoint fails half-way."""
    checkpoints.save(tmp_path, 1, {"a": torch.arange(1000.0)}, {})
    script = f"""
        import resource, signal, torch
        from mmlda.training import checkpoints
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        try:
            checkpoints.save({str(tmp_path)!r}, 2, {{"a": torch.arange(100_000.0)}}, {{}})
        except OSError as error:
            print("failed:", error.errno)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60)
    assert "failed: 27" in done.stdout, done.stderr
    tensors, record = checkpoints.newest(tmp_path)
    assert record["step"] == 1 and torch.equal(tensors["a"], torch.arange(1000.0))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000001.json", "step-00000001.safetensors"]


KILLER = """
    import json, os, random, signal, sys, time
    import torch
    torch.set_num_threads(1)
    import mmlda
    from mmlda.models import build
    from mmlda.training.recipes import Recipe
    from mmlda.training import fit

    folder, config, steps = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
    recipe = Recipe(steps=steps, optimizer="adam", lr=1e-3, batch_size=32, pad=1, flip=True)
    data = mmlda.data.load("digits")[0]

    def train():
        fit(build(config, seed=0), data, recipe, out=folder, show=False, checkpoint_every=5)

    draw, kills = random.Random(int(sys.argv[4])), 0
    while not os.path.exists(folder + "/model.safetensors"):
        child = os.fork()
        if child == 0:
            train()
            os._exit(0)
        if kills < 25:
            time.sleep(draw.uniform(0.02, 0.4))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        kills += os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    print(kills)
"""


@pytest.mark.long
def test_killed_at_random_moments_it_comes_to_the_same_weights(tmp_path):
    """At least 20 SIGKILLs of a real process, some while a checkpoint is written."""
    config = dict(SMALL, channels=1)
    steps = 3000
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(KILLER), str(tmp_path / "killed"), json.dumps(config),
                           str(steps), "0"], capture_output=True, text=True, timeout=600)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 20, "the run was over before it had been killed 20 times"
    reference = subprocess.run([sys.executable, "-c", textwrap.dedent(KILLER).replace("kills < 25", "False"),
                                str(tmp_path / "whole"), json.dumps(config), str(steps), "0"],
                               capture_output=True, text=True, timeout=600)  # fmt: skip
    assert reference.returncode == 0 and int(reference.stdout) == 0, reference.stderr
    a, b = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("killed", "whole"))
    assert a == b


# ----------------------------------------------------------------------------------------------- the rest


def test_progress_is_one_line_now_and_then_off_a_terminal_and_nothing_when_hidden(digits, capsys):
    fit(build(SMALL, seed=0), digits[0], QUICK)
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1 and "24/24 steps" in shown.err and "loss" in shown.err
    fit(build(SMALL, seed=0), digits[0], QUICK, show=False)
    assert capsys.readouterr().err == ""


def test_the_rate_of_a_run_that_is_gone_on_with_leaves_out_what_was_done_before(capsys):
    with mmlda._utils.progress.progress("x", 1000, every=0.0) as report:
        report(900, start=True)
        time.sleep(0.1)
        report(910)
    rate = float(re.search(r"910/1000 steps  ([\d.]+) steps/s", capsys.readouterr().err).group(1))
    assert 10 < rate <= 100


@pytest.mark.parametrize(
    "model, word",
    [(torch.nn.Flatten(), "expected a parameter to train"),
     (build(dict(SMALL, num_classes=5), seed=0), "model has 5 classes: expected at least the 10"),
     (build(SMALL, seed=0).requires_grad_(False), "expected a parameter to train")],
)  # fmt: skip
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
        recipe = Recipe(steps=150, optimizer=optimizer, lr=0.05 if optimizer == "sgd" else 2e-3, batch_size=64,
                        milestones=(100,))  # fmt: skip
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

    def test_a_run_goes_on_after_a_break(self, digits, tmp_path):
        whole, _ = train(digits[0], device="cuda", deterministic=True)
        break_off(digits[0], QUICK, tmp_path, 18, device="cuda", deterministic=True, checkpoint_every=5)
        again, _ = train(digits[0], device="cuda", deterministic=True, out=tmp_path)
        for name in whole:
            torch.testing.assert_close(again[name], whole[name], rtol=1e-4, atol=1e-5)
