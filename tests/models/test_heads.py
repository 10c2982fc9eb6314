"""The heads' logits, distances and priors by plain loops, and the softmax head beside them."""

import copy
import itertools
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from head_cases import F64, PRIORS, features, make
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from mmlda.models.heads import MaxMahalanobisHead, SoftmaxHead
from mmlda.theory import MaxMahalanobisDistribution, latent_fit
from mmlda.theory.means import generate_opt_means, separated_means


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.integers(1, 12).flatmap(lambda dim: st.tuples(st.integers(2, 2 * dim), st.just(dim))),
    C=st.floats(0.01, 1e4),
    precision=st.sampled_from([0.5, 1.0, 2.0]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, F64]),
    seed=st.integers(0, 100),
)
def test_logits_by_the_formula(sizes, C, precision, dtype, seed):
    num_classes, dim = sizes
    weights = torch.rand(num_classes, generator=torch.Generator().manual_seed(seed), dtype=F64) + 0.1
    pi = weights / weights.sum()
    head = MaxMahalanobisHead(num_classes=num_classes, dim=dim, C=C, priors=pi, precision=precision)
    z = features(4, dim, dtype, seed=seed)
    logits = head(z)
    assert logits.shape == (4, num_classes)
    assert logits.dtype == (F64 if dtype == F64 else torch.float32)
    mu = separated_means(num_classes, dim, C=C)
    for n, k in itertools.product(range(4), range(num_classes)):
        expected = precision * float(z[n].double() @ mu[k]) + math.log(pi[k])
        scale = precision * float(z[n].double().norm()) * math.sqrt(C) + abs(math.log(pi[k]))
        assert logits[n, k].item() == pytest.approx(expected, abs=1e-6 * scale)


def test_the_logits_are_the_distributions_posterior():
    """||z||^2 and C cancel: the linear head is Bayes' rule on the Gaussians."""
    dist = MaxMahalanobisDistribution(
        num_classes=5, dim=8, C=torch.tensor(6.0, dtype=F64), priors=PRIORS, precision=2.0
    )
    head = make(C=6.0, priors=PRIORS, precision=2.0).double()
    z = features(50, dtype=F64, scale=1.0)
    torch.testing.assert_close(head.predict_proba(z), dist.posterior(z), rtol=1e-6, atol=1e-9)
    assert torch.equal(head.predict(z), dist.posterior(z).argmax(1))
    assert len(set(head.predict(z).tolist())) > 2
    shifted = head(z) - head(z).logsumexp(1, keepdim=True)
    torch.testing.assert_close(head(z + 0).log_softmax(1), shifted)


def test_there_is_nothing_to_learn_and_the_buffers_are_named():
    head = make(priors=PRIORS, precision=2.0)
    assert list(head.parameters()) == []
    assert {name: tuple(t.shape) for name, t in head.named_buffers()} == {
        "means": (5, 8),
        "log_priors": (5,),
        "precision": (),
    }
    assert set(head.state_dict()) == {"means", "log_priors", "precision"}
    torch.testing.assert_close(head.means.double(), generate_opt_means(100.0, 8, 5), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(head.priors, torch.tensor(PRIORS))
    assert (head.num_classes, head.dim, head.C, float(head.precision)) == (5, 8, 100.0, 2.0)
    assert repr(head) == "MaxMahalanobisHead(num_classes=5, dim=8, C=100, precision=2)"


def test_gradient_of_the_input_is_the_means():
    head = make(precision=2.0)
    z = features().requires_grad_()
    head(z)[:, 3].sum().backward()
    torch.testing.assert_close(z.grad, 2 * head.means[3].expand(6, 8))
    assert not head.means.requires_grad and head.means.grad is None


def test_more_classes_than_dimensions_plus_one_uses_separated_means():
    head = make(num_classes=6, dim=3, C=4.0)  # p + 2 <= L <= 2p: pairs +-e_i
    torch.testing.assert_close(head.means.double(), separated_means(6, 3, C=4.0), rtol=1e-6, atol=1e-6)
    cosine = head.means @ head.means.T / 4
    assert cosine.fill_diagonal_(-1).max().item() == pytest.approx(0, abs=1e-6)


def test_given_means_are_scaled_to_C():
    directions = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    head = make(C=9.0, means=directions)
    torch.testing.assert_close(head.means.square().sum(1), torch.full((5,), 9.0))
    torch.testing.assert_close(F.cosine_similarity(head.means, directions), torch.ones(5))
    z = features()
    torch.testing.assert_close(head(z), z @ head.means.T - math.log(5))


def test_distances_by_the_formula():
    head = make(C=1e4, precision=4.0)
    z = torch.cat([features(), head.means[:2] + 1e-3])
    expected = torch.stack([2 * (z.double() - mu.double()).norm(dim=1) for mu in head.means], dim=1)
    torch.testing.assert_close(head.distances(z).double(), expected, rtol=1e-5, atol=1e-6)
    assert head.distances(head.means).diagonal().max() == 0
    z.requires_grad_()
    head.distances(z).sum().backward()
    assert z.grad.isfinite().all()


def test_with_priors_shares_the_means_and_moves_the_logits():
    head = make(priors=PRIORS, precision=2.0).eval()
    z = features()
    uniform = head.with_priors(None)
    assert isinstance(uniform, MaxMahalanobisHead) and uniform.means.data_ptr() == head.means.data_ptr()
    assert not uniform.training and uniform.C == head.C and set(uniform.state_dict()) == set(head.state_dict())
    torch.testing.assert_close(uniform.priors, torch.full((5,), 0.2))
    torch.testing.assert_close(uniform(z) - head(z), (uniform.log_priors - head.log_priors).expand(6, 5))
    torch.testing.assert_close(head.priors, torch.tensor(PRIORS))  # the old head keeps its own
    torch.testing.assert_close(uniform.with_priors(PRIORS)(z), head(z))
    torch.testing.assert_close(make(priors=PRIORS, precision=2.0)(z), head(z))
    assert copy.deepcopy(uniform).half().means.dtype == torch.float32


def test_empirical_priors_are_the_shares_of_the_labels():
    labels = torch.tensor([0] * 6 + [1] * 2 + [2] * 1 + [3] * 1)
    head = make().with_priors("empirical", labels=labels)
    torch.testing.assert_close(head.priors, torch.tensor([0.6, 0.2, 0.1, 0.1, 0.0]))


def test_the_true_priors_err_less_on_biased_data():
    pi = torch.tensor([0.9, 0.05, 0.05])
    dist = MaxMahalanobisDistribution(num_classes=3, dim=4, C=1.0, priors=pi)
    z, y = dist.sample_labeled((20_000,), torch.Generator().manual_seed(0))
    head = make(num_classes=3, dim=4, C=1.0)
    error = {
        name: (h.predict(z) != y).float().mean().item()
        for name, h in {"uniform": head, "true": head.with_priors("empirical", labels=y)}.items()
    }
    assert error["true"] < error["uniform"] - 0.05


@pytest.mark.parametrize("name", MaxMahalanobisHead.losses)
def test_a_prior_of_zero_rules_a_class_out_without_nan(name):
    head = make(C=1.0, priors=[0.5, 0.5, 0.0, 0.0, 0.0])
    z, y = features().requires_grad_(), torch.tensor([0, 1, 0, 1, 0, 1])
    assert (head(z)[:, 2:] == -math.inf).all() and set(head.predict(z).tolist()) <= {0, 1}
    loss = head.loss(z, y, name)
    loss.backward()
    assert loss.isfinite() and z.grad.isfinite().all() and z.grad.abs().max() > 0


def test_latent_fit_of_a_head_uses_its_means_and_precision():
    head = make(C=9.0, precision=2.0)
    dist = MaxMahalanobisDistribution(num_classes=5, dim=8, C=9.0, precision=2.0)
    z, y = dist.sample_labeled((4000,), torch.Generator().manual_seed(0))
    fit = head.latent_fit(z, y)
    assert fit == latent_fit(z, y, head.means, 2.0)
    assert fit.squared_distance == pytest.approx(4.0, rel=0.05) and fit.squared_distance_expected == 4.0
    assert head.latent_fit(2 * z, y).squared_distance > 10


def test_softmax_head_is_softmax_regression():
    head = SoftmaxHead(num_classes=5, dim=8)
    assert sum(p.numel() for p in head.parameters()) == 5 * 8 + 5
    z, y = features(), torch.arange(6) % 5
    expected = z @ head.weight.T + head.bias
    torch.testing.assert_close(head(z), expected)
    torch.testing.assert_close(head.loss(z, y), F.cross_entropy(expected, y))
    assert head.loss(z, y, reduction="none").shape == (6,)
    torch.testing.assert_close(head.predict_proba(z), expected.softmax(1))
    assert torch.equal(head.predict(z), expected.argmax(1))
    head.loss(z, y).backward()
    assert head.weight.grad.abs().sum() > 0 and head.bias.grad.abs().sum() > 0
    assert (head.num_classes, head.dim) == (5, 8)
    assert not hasattr(head, "distances")


def test_softmax_head_dtypes():
    head = SoftmaxHead(num_classes=5, dim=8, priors=PRIORS)
    z = features(dtype=torch.bfloat16)
    assert head(features(dtype=F64)).dtype == F64 and head(z).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert head(features()).dtype == torch.float32
        logits = head.with_priors(None)(features())
    assert logits.dtype == torch.float32
    assert torch.equal(logits, logits.bfloat16().float())  # the matmul ran in bfloat16
    half = copy.deepcopy(head).half()
    assert half.weight.dtype == torch.float16 and half.log_priors.dtype == torch.float32
    assert half(features(dtype=torch.half)).dtype == torch.float32
    assert half(features(dtype=torch.half)).isfinite().all()


def test_softmax_head_round_trips():
    head, fresh, z = SoftmaxHead(num_classes=5, dim=8, priors=PRIORS), SoftmaxHead(num_classes=5, dim=8), features()
    assert not torch.equal(head(z), fresh(z))
    fresh.load_state_dict(head.state_dict())
    assert torch.equal(head(z), fresh(z)) and torch.equal(head.log_priors, fresh.log_priors)
    assert torch.equal(copy.deepcopy(head)(z), head(z)) and torch.equal(pickle.loads(pickle.dumps(head))(z), head(z))


def gaussian_heads(pi, learned=None):
    """A MaxMahalanobisHead with priors pi, and a SoftmaxHead with the same means that has learned some priors."""
    mm = MaxMahalanobisHead(num_classes=3, dim=4, C=2.0, priors=pi)
    head = SoftmaxHead(num_classes=3, dim=4, priors=pi if learned is None else None)
    with torch.no_grad():
        head.weight.copy_(mm.means)
        head.bias.copy_(torch.zeros(3) if learned is None else learned.log())
    return mm, head


def test_softmax_head_has_priors_beside_what_it_learns():
    pi, new = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.1, 0.1, 0.8])
    mm, head = gaussian_heads(pi)
    z = features(dim=4)
    moved = head.with_priors(new)
    assert moved.weight is head.weight and moved.bias is head.bias and isinstance(moved, SoftmaxHead)
    torch.testing.assert_close(moved(z).softmax(1), mm.with_priors(new)(z).softmax(1))
    torch.testing.assert_close(head(z).softmax(1), mm(z).softmax(1))
    torch.testing.assert_close(moved.with_priors(pi)(z), head(z))
    assert torch.equal(moved.with_priors(None)(z), F.linear(z, head.weight, head.bias))
    labels = torch.tensor([0, 1, 2, 2])
    torch.testing.assert_close(head.with_priors("empirical", labels=labels).priors, torch.tensor([0.25, 0.25, 0.5]))
    assert len(list(moved.parameters())) == 2 and repr(moved) == repr(head)
    assert (head.with_priors([0.5, 0.5, 0.0])(z)[:, 2] == -math.inf).all()
    torch.testing.assert_close(copy.deepcopy(head).double()(z.double()).float(), head(z))


def test_priors_that_training_has_learned_are_taken_out():
    pi, new, z = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.1, 0.1, 0.8]), features(dim=4)
    mm, head = gaussian_heads(pi, learned=pi)
    for priors in (None, new):
        adjusted = head.with_priors(priors, old=pi)
        torch.testing.assert_close(adjusted(z).softmax(1), mm.with_priors(priors)(z).softmax(1))
    torch.testing.assert_close(mm.with_priors(None, old=pi).priors, torch.full((3,), 1 / 3))  # as its priors were pi
    torch.testing.assert_close(mm.with_priors(None).with_priors(pi, old=[1 / 3] * 3)(z), mm(z))


def test_priors_that_leave_no_class_are_refused():
    head = SoftmaxHead(num_classes=3, dim=4, priors=[0.5, 0.5, 0.0])
    with pytest.raises(ValueError, match="priors must be > 0 for a class whose prior in the head is not 0"):
        head.with_priors([0.0, 0.0, 1.0], old=[0.4, 0.3, 0.3])


def test_softmax_priors_stay_float32_and_need_no_values():
    head = SoftmaxHead(num_classes=5, dim=8, priors=PRIORS)
    state = {name: tensor.bfloat16() for name, tensor in head.state_dict().items()}
    head.load_state_dict(state, assign=True)
    assert head.log_priors.dtype == head.offset.dtype == torch.float32
    with FakeTensorMode():
        SoftmaxHead(num_classes=3, dim=4)
