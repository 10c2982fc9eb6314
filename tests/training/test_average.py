"""Averaged weights: `Recipe.average`."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from training_cases import CPU, QUICK, SMALL, break_off, same, train, weights

import mmlda
from mmlda.models import build
from mmlda.training import checkpoints
from mmlda.training.batches import Batches

AVERAGED = dataclasses.replace(QUICK, average=0.6)


def test_the_network_is_the_average_of_weights_and_batch_norm_statistics_over_the_steps(digits):
    """A plain loop, with torch's own Adam."""
    model = build(SMALL, seed=0).train().to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=2e-4)
    batches = Batches(digits[0], AVERAGED, CPU)
    batches.seek(0)
    average = weights(model)
    for t in range(24):
        x, y = digits[0].pixels(batches.order[t]), digits[0].labels[batches.order[t]]
        optimizer.param_groups[0]["lr"] = 1e-3 if t < 16 else 1e-4
        optimizer.zero_grad()
        F.cross_entropy(model(x.contiguous(memory_format=torch.channels_last)), y).backward()
        optimizer.step()
        rate = 1 - min(0.6, (1 + t) / (10 + t))  # the decay of 0.6 is reached at t = 12.5
        for name, value in model.state_dict().items():
            average[name] = average[name] + rate * (value - average[name]) if value.is_floating_point() else value
    got, _ = train(digits[0], AVERAGED)
    for name, expected in average.items():
        torch.testing.assert_close(got[name], expected, rtol=1e-4, atol=1e-5, msg=name)
    moved = [name for name, value in model.state_dict().items() if not torch.allclose(got[name], value, atol=1e-4)]
    assert any("running_mean" in name for name in moved) and "latent.weight" in moved  # not the last weights


def test_a_resumed_run_has_the_same_average_and_a_checkpoint_has_both(digits, tmp_path):
    whole, _ = train(digits[0], AVERAGED)
    break_off(digits[0], AVERAGED, tmp_path, 15, checkpoint_every=6)
    tensors, record = checkpoints.newest(tmp_path)
    average = {name[8:]: tensor for name, tensor in tensors.items() if name.startswith("average.")}
    current = {name[6:]: tensor for name, tensor in tensors.items() if name.startswith("model.")}
    assert record["step"] == 12 and average.keys() == {name for name in current if "num_batches" not in name}
    assert not torch.equal(average["latent.weight"], current["latent.weight"])

    unfinished = weights(mmlda.load(tmp_path))
    assert all(torch.equal(unfinished[name], tensor) for name, tensor in average.items())
    again, _ = train(digits[0], AVERAGED, out=tmp_path)
    assert same(again, whole) and same(weights(mmlda.load(tmp_path)), whole)


def test_averaging_does_not_change_the_steps(digits):
    averaged, plain = train(digits[0], AVERAGED), train(digits[0])
    assert [e["loss"] for e in averaged[1].history] == [e["loss"] for e in plain[1].history]
    assert not same(averaged[0], plain[0])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_captured_steps_average_too(digits):
    slow, _ = train(digits[0], AVERAGED, device="cuda", deterministic=True, eager=True, amp=False)
    fast, _ = train(digits[0], AVERAGED, device="cuda", deterministic=True, amp=False)
    for name in slow:
        torch.testing.assert_close(fast[name], slow[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("head", ["mmlda", "softmax"])
def test_a_class_without_images_keeps_its_prior_of_zero(digits, head, tmp_path):
    data = digits[0].subset(digits[0].labels != 9)
    model = build({"backbone": "conv_net", "width": 4, "head": head}, seed=0).with_priors("empirical", data.labels)
    run = mmlda.fit(model, data, AVERAGED, out=tmp_path / "run", show=False)
    assert run.model.head.log_priors[9] == -torch.inf
    assert mmlda.load(tmp_path / "run").head.priors[9] == 0


def test_zero_priors_are_refused_where_logits_are_compared(digits):
    model = build(SMALL, seed=0).with_priors([1 / 9] * 9 + [0.0])
    adversary = mmlda.Adversary(attack="pgd", eps=0.1, share=1.0, pairing=0.5)
    with pytest.raises(ValueError, match="priors must be > 0 for TRADES, logit pairing and distillation, got 0"):
        mmlda.fit(model, digits[0], dataclasses.replace(QUICK, adversary=adversary), show=False)
