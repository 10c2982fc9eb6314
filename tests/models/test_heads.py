"""The heads: formulas by plain loops, what the buffers survive, dtypes, losses, priors, bad input."""

import copy
import io
import itertools
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mmlda.models.heads import MaxMahalanobisHead, SoftmaxHead
from mmlda.theory.distribution import MaxMahalanobisDistribution, latent_fit
from mmlda.theory.means import generate_opt_means, separated_means

F64 = torch.float64
PRIORS = [0.4, 0.3, 0.2, 0.05, 0.05]


def make(num_classes=5, dim=8, C=100.0, **more):
    return MaxMahalanobisHead(num_classes=num_classes, dim=dim, C=C, **more)


def features(n=6, dim=8, dtype=torch.float32, scale=3.0, seed=0):
    return (torch.randn(n, dim, generator=torch.Generator().manual_seed(seed), dtype=F64) * scale).to(dtype)


def relative_error(found, expected):
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


# -- logits ----------------------------------------------------------------------------------------------------------


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
        "means": (5, 8), "log_priors": (5,), "precision": (),
    }  # fmt: skip
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


# -- what the buffers survive ----------------------------------------------------------------------------------------


def same(a, b):
    z = features()
    return torch.equal(a(z), b(z)) and torch.equal(a.means, b.means) and a.C == b.C


def test_survives_state_dict_deepcopy_and_pickle(tmp_path):
    head = make(C=50.0, priors=PRIORS, precision=2.0)
    fresh = make()
    assert not same(head, fresh)
    fresh.load_state_dict(head.state_dict())
    assert same(head, fresh) and fresh.C == 50.0
    torch.save(head.state_dict(), tmp_path / "head.pt")
    again = make()
    again.load_state_dict(torch.load(tmp_path / "head.pt", weights_only=True), assign=True)
    assert same(head, again)

    twin = copy.deepcopy(head)
    assert same(head, twin) and twin.means.data_ptr() != head.means.data_ptr()
    assert same(head, pickle.loads(pickle.dumps(head)))
    file = io.BytesIO()
    torch.save(head, file)
    file.seek(0)
    assert same(head, torch.load(file, weights_only=False))


def test_state_dict_inside_a_network():
    net, other = nn.Sequential(nn.Linear(3, 8), make(C=25.0)), nn.Sequential(nn.Linear(3, 8), make())
    assert set(net.state_dict()) == {"0.weight", "0.bias", "1.means", "1.log_priors", "1.precision"}
    other.load_state_dict(net.state_dict())
    x = torch.randn(4, 3)
    assert torch.equal(net(x), other(x)) and other[1].C == 25.0


def test_a_half_state_dict_does_not_make_the_head_half():
    state = {name: value.half() for name, value in make().state_dict().items()}
    for assign in (False, True):
        head = make()
        head.load_state_dict(state, assign=assign)
        assert {buffer.dtype for buffer in head.buffers()} == {torch.float32}


@pytest.mark.parametrize("name", ["means", "log_priors", "precision"])
def test_a_state_dict_with_nan_is_refused(name):
    state = make().state_dict()
    state[name] = torch.full_like(state[name], math.nan)
    with pytest.raises(RuntimeError, match="means, log_priors and precision must not be NaN"):
        make().load_state_dict(state)


def test_a_state_dict_of_another_shape_is_refused():
    with pytest.raises(RuntimeError, match="size mismatch for means"):
        make().load_state_dict(make(num_classes=4).state_dict())


LOWER = {
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "to(float16)": lambda m: m.to(torch.float16),
    "to(cpu, bfloat16)": lambda m: m.to("cpu", torch.bfloat16),
    "type": lambda m: m.type(torch.float16),
    "half of double": lambda m: m.double().half(),
    "float, half, float": lambda m: m.float().half().float(),
}


@pytest.mark.parametrize("lower", LOWER)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_means_stay_float32_when_the_network_is_lowered(lower, dtype):
    """The head inside a network that is made half: logits as from the float32 head on the same z."""
    reference = make(num_classes=10, dim=64, priors=[0.05] * 9 + [0.55], precision=1.3)
    net = LOWER[lower](nn.ModuleDict({"layer": nn.Linear(2, 2), "head": copy.deepcopy(reference)}))
    if lower in ("half", "bfloat16"):
        assert net["layer"].weight.dtype == getattr(torch, lower.replace("half", "float16"))
    head = net["head"]
    assert head.means.dtype == head.log_priors.dtype == head.precision.dtype == torch.float32
    z = features(20, 64, dtype)
    logits = head(z)
    assert logits.dtype == torch.float32
    assert relative_error(logits, reference(z.float())) < 1e-5
    # a head whose means had gone through half would not pass
    rounded = F.linear(z.float(), 1.3 * reference.means.half().float(), reference.log_priors)
    assert relative_error(rounded, reference(z.float())) > 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_leaves_the_logits_alone(dtype):
    head = make(num_classes=10, dim=64)
    layer = nn.Linear(16, 64)
    x = features(20, 16)
    with torch.autocast("cpu", dtype=dtype):
        z = layer(x)
        assert z.dtype == dtype  # autocast is on
        logits, losses = head(z), {name: head.loss(z, torch.arange(20) % 10, name) for name in head.losses}
        assert head.distances(z).dtype == torch.float32
        again = layer(x)
        assert again.dtype == dtype  # and still on
    assert logits.dtype == torch.float32
    assert relative_error(logits, head(z.float())) < 1e-5
    for name, loss in losses.items():
        assert loss.dtype == torch.float32
        assert loss.item() == pytest.approx(head.loss(z.float(), torch.arange(20) % 10, name).item(), rel=1e-5)
    logits.sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.isfinite().all()


def test_double_rebuilds_the_means_in_float64():
    head = make(num_classes=10, dim=64, C=3.0)
    assert head.means.dtype == torch.float32
    wide = copy.deepcopy(head).double()
    assert wide.means.dtype == wide.log_priors.dtype == F64
    gram = wide.means @ wide.means.T
    expected = torch.full((10, 10), -3 / 9, dtype=F64).fill_diagonal_(3.0)
    assert (gram - expected).abs().max() < 1e-12 * 3  # float32 means would be 1e-7 off
    assert torch.equal(wide.float().means, head.means)
    assert wide(features(3, 64, F64)).dtype == F64

    given_means = make(C=3.0, means=torch.randn(5, 8, generator=torch.Generator().manual_seed(0)))
    before = given_means.means.clone()
    assert torch.equal(given_means.double().means, before.double())  # not ours to rebuild


def test_the_default_dtype_is_respected():
    torch.set_default_dtype(F64)
    try:
        head, soft = make(), SoftmaxHead(num_classes=3, dim=2)
    finally:
        torch.set_default_dtype(torch.float32)
    assert head.means.dtype == soft.weight.dtype == soft.log_priors.dtype == F64
    assert torch.equal(head.means, separated_means(5, 8, C=100.0))


def test_wide_input_and_wide_head():
    head = make()
    z = features(dtype=F64)
    exact = z @ head.means.double().T + head.log_priors.double()
    torch.testing.assert_close(head(z), exact, rtol=1e-12, atol=1e-10)
    assert copy.deepcopy(head).double()(z.float()).dtype == F64


@pytest.mark.parametrize(("num_classes", "dim"), [(5, 8), (12, 8), (5, 2)])  # simplex, pairs, polygon
@pytest.mark.parametrize("priors", [None, "given"])
def test_built_on_the_default_device(num_classes, dim, priors):
    priors = priors and [1 / num_classes] * num_classes
    with torch.device("meta"):
        head = make(num_classes, dim, priors=priors)
    assert all(buffer.is_meta for buffer in head.buffers())


def test_moves_to_meta_and_back():
    head = make(C=50.0).to("meta")
    assert head.means.is_meta and head(torch.empty(3, 8, device="meta")).shape == (3, 5)
    head = head.to_empty(device="cpu")
    head.load_state_dict(make(C=50.0).state_dict())
    assert same(head, make(C=50.0))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_cuda():
    head = make(num_classes=10, dim=64, priors=[0.05] * 9 + [0.55])
    z, y = features(20, 64), torch.arange(20) % 10
    for lowered in (copy.deepcopy(head).cuda(), copy.deepcopy(head).to("cuda", torch.half)):
        assert lowered.means.is_cuda and lowered.means.dtype == torch.float32
        torch.testing.assert_close(lowered(z.cuda()).cpu(), head(z), rtol=1e-5, atol=1e-4)
        for name in head.losses:
            found = lowered.loss(z.cuda(), y.cuda(), name).cpu()
            torch.testing.assert_close(found, head.loss(z, y, name), rtol=1e-4, atol=1e-4)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            torch.testing.assert_close(lowered(z.cuda()).cpu(), head(z), rtol=1e-5, atol=1e-4)
        assert lowered.with_priors(None).log_priors.is_cuda
    wide = copy.deepcopy(head).to("cuda", F64)
    assert torch.equal(wide.means.cpu(), separated_means(10, 64, C=100.0))
    soft = SoftmaxHead(num_classes=10, dim=64).cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert soft(z.cuda()).dtype == torch.float32

    static, graph = z.cuda(), torch.cuda.CUDAGraph()  # no hidden synchronisation: a loss can be captured
    moved, labels = copy.deepcopy(head).cuda(), y.cuda()
    moved.loss(static, labels)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        losses = [moved.loss(static, labels, name) for name in head.losses]
    graph.replay()
    torch.testing.assert_close(losses[0].cpu(), head.loss(z, y), rtol=1e-4, atol=1e-4)


# -- transforms ------------------------------------------------------------------------------------------------------


def compiled(function):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("build", [make, lambda: SoftmaxHead(num_classes=5, dim=8)])
def test_compiles_whole(build):
    """fullgraph: one value check in the traced path and this raises. (The generated code itself: the long test.)"""
    head, y = build(), torch.arange(6) % 5
    z, w = features().requires_grad_(), features().requires_grad_()
    torch.testing.assert_close(compiled(head)(z), head(z))
    for name in head.losses:
        loss, expected = compiled(head.loss)(z, y, name), head.loss(w, y, name)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(torch.autograd.grad(loss, z)[0], torch.autograd.grad(expected, w)[0])
    torch.testing.assert_close(compiled(head.predict_proba)(features()), head.predict_proba(features()))
    assert torch.equal(compiled(head.predict)(features()), head.predict(features()))

    def lowered(z):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return head(z)

    assert compiled(lowered)(features()).dtype == torch.float32
    if isinstance(head, MaxMahalanobisHead):
        torch.testing.assert_close(compiled(lowered)(features()), head(features()))
        torch.testing.assert_close(compiled(head.distances)(features()), head.distances(features()))


@pytest.mark.long
def test_compiles_whole_with_inductor():
    torch._dynamo.reset()
    head, y = make(priors=PRIORS), torch.arange(6) % 5
    z, w = features().requires_grad_(), features().requires_grad_()
    torch.testing.assert_close(torch.compile(head, fullgraph=True)(z), head(z))
    for name in head.losses:
        loss, expected = torch.compile(head.loss, fullgraph=True)(z, y, name), head.loss(w, y, name)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(torch.autograd.grad(loss, z)[0], torch.autograd.grad(expected, w)[0])


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("build", [make, lambda: SoftmaxHead(num_classes=5, dim=8)])
def test_exports(build, strict):
    head = build()
    batch = torch.export.Dim("batch", min=2)
    program = torch.export.export(head, (features(),), dynamic_shapes=({0: batch},), strict=strict)
    torch.testing.assert_close(program.module()(features(9)), head(features(9)))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    torch.testing.assert_close(torch.export.load(file).module()(features(9)), head(features(9)))


def test_vmap_and_functional_call():
    head, y = make(), torch.arange(6) % 5
    z = features()

    def one(z, y):
        return head.loss(z.unsqueeze(0), y.unsqueeze(0))

    torch.testing.assert_close(torch.func.vmap(one)(z, y), head.loss(z, y, reduction="none"))
    gradients = torch.func.vmap(torch.func.grad(one))(z, y)  # [N, p]
    w = z.clone().requires_grad_()
    head.loss(w, y, reduction="sum").backward()
    torch.testing.assert_close(gradients, w.grad)
    other = make(C=1.0)
    swapped = torch.func.functional_call(head, dict(other.named_buffers()), (z,))
    torch.testing.assert_close(swapped, other(z))  # no cached copy of the means goes stale


def test_means_edited_in_place_take_effect():
    head = make()
    before = head(features())
    head.means.mul_(2)
    torch.testing.assert_close(head(features()) - head.log_priors, 2 * (before - head.log_priors))


def test_buffers_may_be_rewritten_between_forward_and_backward():
    """As DDP does when a loss is made of two forward passes."""
    head, z = make(), features().requires_grad_()
    first = head(z)
    with torch.no_grad():
        for buffer in head.buffers():
            buffer.copy_(buffer.clone())
    (first + head(z)).sum().backward()
    assert z.grad is not None


# -- losses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", [1.0, 2.0])
def test_cross_entropy_is_equation_5(precision):
    dist = MaxMahalanobisDistribution(
        num_classes=5, dim=8, C=torch.tensor(4.0, dtype=F64), priors=PRIORS, precision=precision
    )
    head = make(C=4.0, priors=PRIORS, precision=precision).double()
    z, y = dist.sample_labeled((30,), torch.Generator().manual_seed(0))
    expected = -dist.posterior(z)[torch.arange(30), y].log()
    torch.testing.assert_close(head.loss(z, y, reduction="none"), expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(head.loss(z, y), expected.mean(), rtol=1e-6, atol=1e-7)


def test_joint_is_the_negative_log_density_of_z_and_y():
    """joint = ce - log P(z): what Appendix B.1 truncates is put back, constant included."""
    dist = MaxMahalanobisDistribution(
        num_classes=5, dim=8, C=torch.tensor(4.0, dtype=F64), priors=PRIORS, precision=2.0
    )
    head = make(C=4.0, priors=PRIORS, precision=2.0).double()
    z, y = dist.sample_labeled((30,), torch.Generator().manual_seed(0))
    joint = head.loss(z, y, "centre", "none")
    torch.testing.assert_close(joint, head.loss(z, y, "ce", "none") - dist.log_prob(z), rtol=1e-6, atol=1e-6)
    for n in range(30):
        gaussian = torch.distributions.MultivariateNormal(dist.means[y[n]], torch.eye(8, dtype=F64) / 2)
        expected = -gaussian.log_prob(z[n]).item() - math.log(PRIORS[y[n]])
        assert joint[n].item() == pytest.approx(expected, rel=1e-6)


def test_soft_target_by_a_plain_loop():
    head = make(C=0.8, priors=PRIORS, precision=2.0).double()  # a small C, so that the target is far from one-hot
    z, y = features(10, dtype=F64, scale=1.0), torch.arange(10) % 5

    def posterior(v):
        weights = [math.exp(2 * float(v @ mu)) * pi for mu, pi in zip(head.means, PRIORS)]
        return [w / sum(weights) for w in weights]

    loss = head.loss(z, y, "soft", "none")
    for n in range(10):
        target, found = posterior(head.means[y[n]]), posterior(z[n])
        assert max(target) < 0.97
        assert loss[n].item() == pytest.approx(-sum(t * math.log(f) for t, f in zip(target, found)), rel=1e-6)
    assert (loss - head.loss(z, y, "ce", "none")).abs().max() > 0.05


def test_soft_is_smallest_on_the_mean_and_becomes_ce_at_a_large_C():
    head = make(C=0.8).double()
    y = torch.arange(5)
    z = head.means.clone().requires_grad_()
    head.loss(z, y, "soft", "sum").backward()
    assert z.grad.abs().max() < 1e-12  # the soft target is met exactly on the mean
    z = head.means.clone().requires_grad_()
    head.loss(z, y, "ce", "sum").backward()
    assert z.grad.abs().max() > 1e-2  # the one-hot label pushes on, past the mean

    wide, z, y = make(C=100.0).double(), features(10, dtype=F64), torch.arange(10) % 5
    torch.testing.assert_close(wide.loss(z, y, "soft", "none"), wide.loss(z, y, "ce", "none"), rtol=1e-9, atol=1e-9)


def test_joint_pulls_features_to_their_mean_and_cross_entropy_does_not():
    head, y = make(C=9.0), torch.arange(5)
    ends = {}
    for name in ("ce", "centre"):
        z = nn.Parameter(features(5, scale=1.0))
        optimizer = torch.optim.SGD([z], lr=0.3)
        for _ in range(300):
            optimizer.zero_grad()
            head.loss(z, y, name, "sum").backward()
            optimizer.step()
        ends[name] = (z - head.means).norm(dim=1)
        assert torch.equal(head.predict(z), y)
    assert ends["centre"].max() < 1e-3
    assert ends["ce"].min() > 0.3


def test_joint_gradient_does_not_vanish_where_cross_entropy_does():
    head = make()
    z = (head.means + 0.5).requires_grad_()
    y = torch.arange(5)
    head.loss(z, y, "ce", "sum").backward()
    assert (z.grad == 0).all()  # at C = 100 the float32 posterior is exactly 1
    z.grad = None
    head.loss(z, y, "centre", "sum").backward()
    torch.testing.assert_close(z.grad, torch.full((5, 8), 0.5), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MaxMahalanobisHead.losses)
def test_reductions_and_gradients(name):
    head = make(C=3.0, priors=PRIORS, precision=2.0).double()
    z, y = features(7, dtype=F64, scale=1.0).requires_grad_(), torch.arange(7) % 5
    each = head.loss(z, y, name, "none")
    assert each.shape == (7,)
    torch.testing.assert_close(head.loss(z, y, name, "sum"), each.sum())
    torch.testing.assert_close(head.loss(z, y, name, "mean"), each.mean())
    torch.testing.assert_close(head.loss(z, y, name), each.mean())
    assert torch.autograd.gradcheck(lambda z: head.loss(z, y, name), z)


@pytest.mark.parametrize("name", MaxMahalanobisHead.losses)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, F64])
def test_losses_are_float32_at_least_and_gradients_keep_the_dtype(name, dtype):
    z = features(7, dtype=dtype, scale=1.0).requires_grad_()
    loss = make(C=3.0).loss(z, torch.arange(7) % 5, name)
    assert loss.dtype == (F64 if dtype == F64 else torch.float32)
    loss.backward()
    assert z.grad.dtype == dtype and z.grad.abs().max() > 0


# -- priors ----------------------------------------------------------------------------------------------------------


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
    error = {name: (h.predict(z) != y).float().mean().item()
             for name, h in {"uniform": head, "true": head.with_priors("empirical", labels=y)}.items()}  # fmt: skip
    assert error["true"] < error["uniform"] - 0.05


@pytest.mark.parametrize("name", MaxMahalanobisHead.losses)
def test_a_prior_of_zero_rules_a_class_out_without_nan(name):
    head = make(C=1.0, priors=[0.5, 0.5, 0.0, 0.0, 0.0])
    z, y = features().requires_grad_(), torch.tensor([0, 1, 0, 1, 0, 1])
    assert (head(z)[:, 2:] == -math.inf).all() and set(head.predict(z).tolist()) <= {0, 1}
    loss = head.loss(z, y, name)
    loss.backward()
    assert loss.isfinite() and z.grad.isfinite().all() and z.grad.abs().max() > 0


# -- latent fit through the head -------------------------------------------------------------------------------------


def test_latent_fit_of_a_head_uses_its_means_and_precision():
    head = make(C=9.0, precision=2.0)
    dist = MaxMahalanobisDistribution(num_classes=5, dim=8, C=9.0, precision=2.0)
    z, y = dist.sample_labeled((4000,), torch.Generator().manual_seed(0))
    fit = head.latent_fit(z, y)
    assert fit == latent_fit(z, y, head.means, 2.0)
    assert fit.squared_distance == pytest.approx(4.0, rel=0.05) and fit.squared_distance_expected == 4.0
    assert head.latent_fit(2 * z, y).squared_distance > 10


# -- the softmax head ------------------------------------------------------------------------------------------------


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
        logits = head(features())
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


def test_softmax_head_takes_old_priors_out_and_new_ones_in():
    """On Gaussian classes the right W and b are known: after with_priors they are those of the new shares."""
    pi, new = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.1, 0.1, 0.8])
    mm = MaxMahalanobisHead(num_classes=3, dim=4, C=2.0, priors=pi)
    head = SoftmaxHead(num_classes=3, dim=4, priors=pi)
    with torch.no_grad():
        head.weight.copy_(mm.means)
        head.bias.copy_(mm.log_priors)
    z = features(dim=4)
    moved = head.with_priors(new)
    assert moved.weight is head.weight and isinstance(moved, SoftmaxHead)
    torch.testing.assert_close(moved(z), mm.with_priors(new)(z))
    torch.testing.assert_close(head(z), mm(z))
    torch.testing.assert_close(moved.with_priors(pi)(z), head(z))
    torch.testing.assert_close(moved.with_priors(None)(z).softmax(1), mm.with_priors(None)(z).softmax(1))
    labels = torch.tensor([0, 1, 2, 2])
    torch.testing.assert_close(head.with_priors("empirical", labels=labels).priors, torch.tensor([0.25, 0.25, 0.5]))
    assert len(list(moved.parameters())) == 2 and repr(moved) == repr(head)


# -- bad input -------------------------------------------------------------------------------------------------------

BAD = [
    ({"num_classes": 1}, "num_classes must be an integer >= 2, got 1"),
    ({"num_classes": 2.0}, "num_classes must be an integer >= 2, got 2.0"),
    ({"dim": 0}, "dim must be an integer >= 1, got 0"),
    ({"dim": -3}, "dim must be an integer >= 1, got -3"),
    ({"C": 0}, "C must be a finite number > 0, got 0"),
    ({"C": -2.0}, "C must be a finite number > 0, got -2.0"),
    ({"C": math.nan}, "C must be a finite number > 0, got nan"),
    ({"C": math.inf}, "C must be a finite number > 0, got inf"),
    ({"C": None}, "C must be a finite number > 0, got None"),
    ({"precision": 0.0}, "precision must be a finite number > 0, got 0.0"),
    ({"precision": math.inf}, "precision must be a finite number > 0, got inf"),
    ({"precision": 1e300}, "precision must be from .* in torch.float32, got 1e\\+300"),
    ({"precision": 1e-60}, "precision must be from .* in torch.float32, got 1e-60"),
    ({"C": 1e80}, "C must be from .* in torch.float32, got 1e\\+80"),
    ({"C": 1e30, "precision": 1e30}, r"precision \* C must be from .*, got 1\.?0*1?e\+60"),
    ({"priors": [0.5, 0.5]}, r"priors must have shape \[5\], one per class, got \[2\]"),
    ({"priors": [[0.2] * 5]}, r"priors must have shape \[5\], one per class, got \[1, 5\]"),
    ({"priors": [1.2, -0.2, 0, 0, 0]}, "priors must be >.* 0, got -0.2"),
    ({"priors": [0.2] * 4 + [math.nan]}, "priors must be finite, got .*nan"),
    ({"priors": [0.2] * 4 + [0.1]}, r"priors must sum to 1, got a sum of 0\.(9|8999)"),
    ({"priors": torch.full((5,), 2)}, "priors must sum to 1, got a sum of 10"),
    ({"priors": "empirical"}, "priors must be .*numbers, got 'empirical'"),
    ({"means": torch.ones(4, 8)}, r"means must be a floating tensor \[5, 8\], got torch.float32 \[4, 8\]"),
    ({"means": torch.ones(5, 8, dtype=torch.int64)}, "means must be a floating tensor .*got torch.int64"),
    ({"means": [[1.0]]}, "means must be a floating tensor .*got list"),
    ({"means": torch.zeros(5, 8)}, "means must have rows of finite norm > 0, got 0"),
    ({"means": torch.full((5, 8), math.nan)}, "means must have rows of finite norm > 0, got nan"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_bad_arguments(change, message):
    with pytest.raises(ValueError, match=message):
        make(**change)


@pytest.mark.parametrize(
    ("change", "message"),
    [(change, message) for change, message in BAD if set(change) <= {"num_classes", "dim", "priors"}]
    + [({"priors": [0.5, 0.5, 0, 0, 0]}, "priors must be > 0, got 0")],
)
def test_softmax_bad_arguments(change, message):
    with pytest.raises(ValueError, match=message):
        SoftmaxHead(**{"num_classes": 5, "dim": 8, **change})


def test_arguments_are_keyword_only():
    for kind in (MaxMahalanobisHead, SoftmaxHead):
        with pytest.raises(TypeError):
            kind(5, 8)


HEADS = [make, lambda: SoftmaxHead(num_classes=5, dim=8)]
Z_BAD = [
    (torch.zeros(3, 7), r"z must have shape \[N, 8\], got \[3, 7\]"),
    (torch.zeros(8), r"z must have shape \[N, 8\], got \[8\]"),
    (torch.zeros(2, 3, 8), r"z must have shape \[N, 8\], got \[2, 3, 8\]"),
    (torch.zeros(3, 8, dtype=torch.int64), "z must have a floating dtype, got torch.int64"),
    (torch.zeros(3, 8, dtype=torch.complex64), "z must have a floating dtype, got torch.complex64"),
    (torch.full((3, 8), math.nan), r"z must be finite, got NaN or infinity in \[3, 8\]"),
    (torch.full((3, 8), math.inf), r"z must be finite, got NaN or infinity in \[3, 8\]"),
    ([[0.0] * 8] * 3, "z must be a tensor, got list"),
    (None, "z must be a tensor, got NoneType"),
]


@pytest.mark.parametrize("build", HEADS)
@pytest.mark.parametrize(("z", "message"), Z_BAD)
def test_bad_features(build, z, message):
    head, y = build(), torch.zeros(3, dtype=torch.int64)
    calls = [head, head.predict, head.predict_proba, *(lambda z, n=name: head.loss(z, y, n) for name in head.losses)]
    if isinstance(head, MaxMahalanobisHead):
        calls.append(head.distances)
    for call in calls:
        with pytest.raises(ValueError, match=message):
            call(z)


def test_large_finite_features_are_not_mistaken_for_infinite():
    assert make(C=1.0)(torch.full((3, 8), 3e38)).shape == (3, 5)
    assert make(C=1.0)(torch.full((3, 8), 6e4, dtype=torch.half)).isfinite().all()


def test_nan_with_a_gradient_reaches_the_loss():
    """So that a training loop can stop with the step, in place of an error from inside the network."""
    z = torch.full((3, 8), math.nan, requires_grad=True)
    assert make().loss(z, torch.zeros(3, dtype=torch.int64)).isnan()


@pytest.mark.parametrize("build", HEADS)
@pytest.mark.parametrize(
    ("y", "message"),
    [
        (torch.tensor([0, 1, 5]), "y must be classes from 0 to 4, got 5"),
        (torch.tensor([0, 1, -100]), "y must be classes from 0 to 4, got -100"),
        (torch.tensor([0, 1]), r"y must be int64 \[3\], got torch.int64 \[2\]"),
        ([0, 1, 2], "y must be a tensor, got list"),
        (torch.tensor([[0], [1], [2]]), r"y must be int64 \[3\], got torch.int64 \[3, 1\]"),
        (torch.tensor([0.0, 1.0, 2.0]), r"y must be int64 \[3\], got torch.float32 \[3\]"),
        (torch.tensor([0, 1, 2], dtype=torch.int32), r"y must be int64 \[3\], got torch.int32 \[3\]"),
    ],
)
def test_bad_labels(build, y, message):
    head = build()
    for name in head.losses:
        with pytest.raises(ValueError, match=message):
            head.loss(torch.zeros(3, 8), y, name)


@pytest.mark.parametrize("build", HEADS)
def test_bad_loss_names_and_reductions(build):
    z, y = torch.zeros(3, 8), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"name must be one of .*'ce'.*, got 'hinge'"):
        build().loss(z, y, "hinge")
    with pytest.raises(ValueError, match="reduction must be 'none', 'mean' or 'sum', got 'max'"):
        build().loss(z, y, reduction="max")


@pytest.mark.parametrize("name", ["soft", "centre"])
def test_softmax_head_has_no_means_for_the_other_losses(name):
    with pytest.raises(ValueError, match=f"name must be one of \\('ce',\\) for a SoftmaxHead, got '{name}'"):
        SoftmaxHead(num_classes=5, dim=8).loss(torch.zeros(3, 8), torch.zeros(3, dtype=torch.int64), name)


@pytest.mark.parametrize("build", HEADS)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"priors": "true"}, "priors must be 5 numbers, None or 'empirical', got 'true'"),
        ({"priors": "empirical"}, "labels must be given where priors = 'empirical', got None"),
        ({"priors": "empirical", "labels": torch.tensor([0, 9])}, "labels must be classes from 0 to 4, got 9"),
        ({"priors": "empirical", "labels": []}, "labels must have at least one label, got none"),
        ({"priors": "empirical", "labels": "all"}, r"labels must be int64 \[N\], got 'all'"),
        ({"priors": None, "labels": [0, 1]}, "priors must be 'empirical' where labels are given, got None"),
        ({"priors": [0.5, 0.5]}, r"priors must have shape \[5\].*got \[2\]"),
        ({"priors": [0.3] * 5}, "priors must sum to 1, got a sum of 1.5"),
    ],
)
def test_with_priors_bad_input(build, arguments, message):
    with pytest.raises(ValueError, match=message):
        build().with_priors(**arguments)


# -- DDP -------------------------------------------------------------------------------------------------------------


def ddp_worker(rank, folder):
    """One of two processes: a Classifier under DDP on its half of a batch, one SGD step a loss."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    model = classifier(seed=rank)  # different weights: DDP takes rank 0's
    if rank:
        model.head.means.zero_()  # and rank 0's buffers
    x, y = batch()
    step(DistributedDataParallel(model), model, x[rank::2], y[rank::2])
    if rank == 1:
        torch.save(model.state_dict(), f"{folder}/rank1.pt")
    dist.barrier()  # nobody leaves while the other still talks
    dist.destroy_process_group()


def classifier(seed):
    from mmlda.models import Classifier, conv_net

    torch.manual_seed(seed)
    head = MaxMahalanobisHead(num_classes=4, dim=6, C=2.0, priors=[0.4, 0.3, 0.2, 0.1])
    return Classifier(conv_net(width=4, batch_norm=False), head)


def batch():
    generator = torch.Generator().manual_seed(0)
    return torch.rand(8, 1, 8, 8, generator=generator), torch.arange(8) % 4


def step(call, model, x, y):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        # two forward passes, one backward: DDP rewrites the buffers in between
        loss = F.cross_entropy(call(x), y) + F.cross_entropy(call(1 - x), y)
        loss.backward()
        optimizer.step()


def test_ddp_of_two_processes_trains_the_network_of_one(tmp_path):
    torch.multiprocessing.spawn(ddp_worker, args=(str(tmp_path),), nprocs=2)
    model, start = classifier(seed=0), classifier(seed=0)
    x, y = batch()
    step(model, model, x, y)
    found = torch.load(tmp_path / "rank1.pt", weights_only=True)
    assert set(found) == set(model.state_dict())
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    moved = [name for name, value in start.state_dict().items() if not torch.equal(value, found[name])]
    assert moved == [name for name, _ in model.named_parameters()]  # all of the network, none of the head
