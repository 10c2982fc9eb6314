"""Attacks on many images: what is kept of each, and that finished work is not repeated."""

import contextlib
import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load, load_file, save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import mmlda
from mmlda.attacks import BIM, FGSM, ILCM, JSMA, PGD, CarliniWagner, WorstCase, compiled
from mmlda.attacks.adapters import from_foolbox
from mmlda.data import stratified
from mmlda.evaluation import robustness
from mmlda.evaluation.robustness import adversarial_images, attack_images, describe_attack
from mmlda.models import build
from mmlda.paper.expected import built_attack
from mmlda.results import Result


class Counting(nn.Module):
    """Counts the images that go through."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.images = inner, 0

    def forward(self, x):
        self.images += len(x)
        return self.inner(x)


def test_the_success_that_is_shown_is_of_all_images_so_far(model, digits, tmp_path, monkeypatch):
    shown = []

    @contextlib.contextmanager
    def progress(*_, **__):
        yield lambda done, **numbers: shown.append((done, numbers["success"]))

    monkeypatch.setattr(robustness, "progress", progress)
    attack_images(model, digits[1], FGSM(eps=0.06), out=tmp_path, n=90, chunk=10)
    won = FGSM(eps=0.06)(model, stratified(digits[1], 90).pixels(), stratified(digits[1], 90).labels).success.double()
    assert shown == [(n, pytest.approx(float(won[:n].mean()), abs=0.02)) for n in range(10, 91, 10)]
    alone = [float(part.mean()) for part in won.split(10)]
    assert max(abs(one - success) for one, (_, success) in zip(alone, shown)) > 0.1  # and not of the last chunk


def test_the_summary_is_what_the_attack_did(model, digits, tmp_path):
    attack = PGD(eps=0.06, steps=10)
    summary = attack_images(model, digits[1], attack, out=tmp_path, n=90, chunk=40, show=False)
    x, y = stratified(digits[1], 90).pixels(), stratified(digits[1], 90).labels
    whole = attack(model, x, y)
    numbers = summary.numbers
    assert 0.05 < summary.value < 0.95
    # a chunk's noise belongs to its images, so chunks and the whole agree but for rounding
    assert summary.value == pytest.approx(float((whole.prediction == y).double().mean()), abs=0.02)
    right = model(x).argmax(1) == y
    assert numbers["clean_accuracy"] == pytest.approx(float(right.double().mean()))
    broken = right & whole.success
    assert numbers["mean_l2"] == pytest.approx(float(whole.l2[broken].double().mean()), rel=0.02)
    assert numbers["success_rate"] == pytest.approx(1 - summary.value / numbers["clean_accuracy"])
    assert summary.interval[0] < summary.value < summary.interval[1]
    assert Result.load(tmp_path / "result.json") == summary
    assert (summary.eps, summary.attack, summary.attack_steps) == (0.06, "PGD", 10) and summary.versions["torch"]
    kept = load(summary.read_outcomes(tmp_path))
    assert float(((kept["clean"] == y) & ~kept["success"]).double().mean()) == pytest.approx(summary.value)
    torch.testing.assert_close(kept["l2"].float(), whole.l2, rtol=0.02, atol=0.01)
    assert (tmp_path / "examples.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert torch.equal(model(adversarial_images(tmp_path)).argmax(1), kept["prediction"].long())


def test_an_image_that_missed_its_target_is_not_counted_as_held(model, digits, tmp_path):
    """ILCM pushes towards the least likely class; on the way most images end in another wrong one."""
    found = attack_images(model, digits[1], ILCM(eps=0.2), out=tmp_path, n=80, show=False)
    x, y = stratified(digits[1], 80).pixels(), stratified(digits[1], 80).labels
    result = ILCM(eps=0.2)(model, x, y)
    held = (result.prediction == y) & (model(x).argmax(1) == y)
    missed = (result.prediction != y) & ~result.success
    assert missed.any() and found.value == pytest.approx(float(held.double().mean()))


def test_finished_chunks_are_not_attacked_again(model, digits, tmp_path):
    attack, counting = BIM(eps=0.1), Counting(model).eval()
    first = attack_images(counting, digits[1], attack, out=tmp_path, n=60, chunk=20, show=False)
    one_chunk = counting.images // 3
    (tmp_path / "images-000020.safetensors").unlink()
    counting.images = 0
    again = attack_images(counting, digits[1], attack, out=tmp_path, n=60, chunk=20, show=False)
    assert counting.images == one_chunk > 0
    assert replace(first, seconds=0) == replace(again, seconds=0)
    counting.images = 0
    attack_images(counting, digits[1], attack, out=tmp_path, n=60, chunk=20, show=False)
    assert counting.images == 0


def test_another_attack_network_or_data_in_the_same_folder_is_refused(model, digits, tmp_path):
    attack_images(model, digits[1], BIM(eps=0.1), out=tmp_path, n=20, show=False)
    with pytest.raises(ValueError, match="other attack"):
        attack_images(model, digits[1], BIM(eps=0.2), out=tmp_path, n=20, show=False)
    other = build(model.config, seed=1)
    with pytest.raises(ValueError, match="other network"):
        attack_images(other, digits[1], BIM(eps=0.1), out=tmp_path, n=20, show=False)


def test_a_failed_minimum_norm_attack_is_infinite_in_the_file_and_left_out_of_the_mean(digits, tmp_path):
    """A network that always says 3 and hears nothing can't be broken: infinite distances, no mean, valid JSON."""
    deaf = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).eval()
    nn.init.zeros_(deaf[1].weight)
    deaf[1].bias.data = 100.0 * nn.functional.one_hot(torch.tensor(3), 10).float()
    attack = CarliniWagner(search_steps=2, steps=20)
    summary = attack_images(deaf, digits[1], attack, out=tmp_path, n=30, chunk=30, show=False)
    saved = load_file(tmp_path / "images-000000.safetensors")
    threes = stratified(digits[1], 30).labels == 3
    assert threes.any() and saved["l2"][threes].isinf().all()
    assert summary.numbers["success_rate"] == 0 and summary.numbers["mean_l2"] is None
    assert summary.value == pytest.approx(float(threes.double().mean()))


def test_a_chunk_cut_short_is_done_again(model, digits, tmp_path):
    first = attack_images(model, digits[1], BIM(eps=0.1), out=tmp_path, n=40, chunk=20, show=False)
    path = tmp_path / "images-000020.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.warns(UserWarning, match="damaged chunk"):
        again = attack_images(model, digits[1], BIM(eps=0.1), out=tmp_path, n=40, chunk=20, show=False)
    assert again.value == first.value


def test_a_chunk_copied_from_elsewhere_is_done_again(model, digits, tmp_path):
    def attacked(eps, out):
        return attack_images(
            model, digits[1], BIM(eps=eps), out=tmp_path / out, n=40, chunk=20, picture=False, show=False
        )

    first, _ = attacked(0.1, "a"), attacked(0.3, "b")
    name, other = "images-000000.safetensors", "images-000020.safetensors"
    for source in (tmp_path / "b" / name, tmp_path / "a" / other):  # of other work, and of other images
        (tmp_path / "a" / name).write_bytes(source.read_bytes())
        with pytest.warns(UserWarning, match="must be a chunk of this work and place, got another"):
            assert attacked(0.1, "a").numbers == first.numbers


def test_a_chunk_with_a_flipped_bit_is_done_again(model, digits, tmp_path):
    first = attack_images(model, digits[1], BIM(eps=0.1), out=tmp_path, n=40, chunk=20, show=False)
    path = tmp_path / "images-000020.safetensors"
    whole = path.read_bytes()
    for at in range(0, len(whole), len(whole) // 30):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.warns(UserWarning, match="damaged chunk, computed again"):
            again = attack_images(
                model, digits[1], BIM(eps=0.1), out=tmp_path, n=40, chunk=20, picture=False, show=False
            )
        assert replace(again, seconds=0) == replace(first, seconds=0)
    save_file(load_file(path), path)  # without a checksum, as older versions wrote it
    with pytest.warns(UserWarning, match="got no SHA-256"):
        attack_images(model, digits[1], BIM(eps=0.1), out=tmp_path, n=40, chunk=20, picture=False, show=False)


def test_a_chunk_has_images(model, digits, tmp_path):
    for work in (
        lambda: attack_images(model, digits[1], BIM(eps=0.1), out=tmp_path, n=20, chunk=0, show=False),
        lambda: mmlda.evaluate(model, digits[1], n=20, chunk=0, out=tmp_path, show=False),
    ):
        with pytest.raises(ValueError, match="chunk must be an integer >= 1, got 0"):
            work()
    assert not list(tmp_path.rglob("*"))


def test_compiled_is_told_and_finds_the_same(model, digits, tmp_path, monkeypatch):
    made = []

    def eager(network):
        made.append(network)
        return compiled(network, backend="eager")

    monkeypatch.setattr(robustness, "compiled", eager)
    attack, where = BIM(eps=0.06), {"n": 60, "chunk": 30, "show": False, "picture": False}
    plain = attack_images(model, digits[1], attack, out=tmp_path / "plain", **where)
    fast = attack_images(model, digits[1], attack, out=tmp_path / "fast", compile=True, **where)
    assert made == [model]
    assert (plain.compiled, fast.compiled) == (False, True)
    assert plain.attack == fast.attack == "BIM" and fast.attack_settings == describe_attack(attack)["settings"]
    assert fast.network_sha256 == plain.network_sha256
    assert fast.value == pytest.approx(plain.value, abs=0.02)
    attack_images(model, digits[1], attack, out=tmp_path / "fast", compile=True, **where)
    assert made == [model]  # there is nothing left to attack
    with pytest.raises(ValueError, match=r"without other work, .* \(other attack\)"):
        attack_images(model, digits[1], attack, out=tmp_path / "fast", **where)


@pytest.mark.parametrize(
    "attack",
    [
        FGSM(eps=0.1),
        BIM(eps=0.1),
        ILCM(eps=0.1),
        JSMA(eps=0.5, target="random"),
        CarliniWagner(steps=7),
        WorstCase(eps=0.1),
        WorstCase(eps=0.1, attacks=(FGSM(eps=0.1), PGD(eps=0.1, restarts=2))),
    ],
)
def test_an_attack_comes_back_from_its_description(attack):
    described = json.loads(json.dumps(describe_attack(attack)))
    assert describe_attack(built_attack(described["name"], described["settings"])) == describe_attack(attack)


def module_level_loss(model, x, y):
    return nn.functional.cross_entropy(model(x), y, reduction="none")


def test_saved_results_need_a_loss_with_a_name(model, digits, tmp_path):
    def local(model, x, y):
        return -module_level_loss(model, x, y)

    wrong = "loss must be a named loss or a module-level function where results are saved, got "
    for loss, got in ((lambda model, x, y: model(x).sum(1), "<lambda>"), (local, "<locals>.local")):
        attack = BIM(eps=0.2, loss=loss)
        for work in (attack_images, mmlda.evaluate):
            with pytest.raises(ValueError, match=f"^{wrong}.*{got}$"):
                work(model, digits[1], WorstCase(eps=0.2, attacks=(attack,)), n=20, out=tmp_path, show=False)
    assert not list(tmp_path.rglob("*"))
    both = mmlda.evaluate(model, digits[1], [BIM(eps=0.2, loss=local), BIM(eps=0.2)], n=40, show=False).attacks
    assert both[0].value > both[1].value  # without saving, any function will do
    first = attack_images(model, digits[1], BIM(eps=0.2, loss=module_level_loss), n=40, out=tmp_path, show=False)
    assert first.value == both[1].value and first.attack_settings["loss"].endswith("test_robustness.module_level_loss")
    again = attack_images(model, digits[1], BIM(eps=0.2, loss=module_level_loss), n=40, out=tmp_path, show=False)
    assert again == first  # resumed, with the seconds of the first
    with pytest.raises(ValueError, match="other attack"):
        attack_images(model, digits[1], BIM(eps=0.2), n=40, out=tmp_path, show=False)


def test_attacks_of_other_libraries_are_saved_by_their_settings(model, digits, tmp_path):
    foolbox = pytest.importorskip("foolbox")
    for steps, refused in ((2, False), (2, False), (3, True)):
        attack = from_foolbox(foolbox.attacks.LinfPGD(steps=steps), eps=0.1)
        with pytest.raises(ValueError, match="other attack") if refused else contextlib.nullcontext():
            attack_images(model, digits[1], attack, n=10, out=tmp_path, show=False, picture=False)


def test_without_a_folder_nothing_is_written(model, digits, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved = attack_images(model, digits[1], BIM(eps=0.1), n=30, chunk=10, out=tmp_path / "saved", show=False)
    found = attack_images(model, digits[1], BIM(eps=0.1), n=30, chunk=10, show=False)
    assert found.outcomes is None and found.value == saved.value and found.interval == saved.interval
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_any_function_and_any_kind_of_data_can_be_attacked(model, digits, tmp_path):
    x, y = digits[1].pixels(slice(50)), digits[1].labels[:50]
    sources = (digits[1].subset(slice(50)), (x, y), TensorDataset(x, y), DataLoader(TensorDataset(x, y), batch_size=9))
    values = {
        attack_images(net, data, BIM(eps=0.1), n=10**9, show=False).value
        for net, data in zip((model, model, lambda x: model(x), model), sources)
    }
    assert len(values) == 1
    with pytest.raises(ValueError, match=r"^name must be given for a model without weights where results are saved"):
        attack_images(lambda x: model(x), sources[0], BIM(eps=0.1), out=tmp_path, show=False)
    attack_images(lambda x: model(x), sources[0], BIM(eps=0.1), out=tmp_path, name="mine", n=10, show=False)
    with pytest.raises(ValueError, match="other network"):
        attack_images(lambda x: model(x), sources[0], BIM(eps=0.1), out=tmp_path, name="other", n=10, show=False)
