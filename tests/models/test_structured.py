"""Heads without a matrix of means, beside the matrix."""

import copy
import math
import os

import pytest
import torch
import torch.nn.functional as F
from head_cases import F64, features
from torch.autograd import forward_ad

from mmlda.models import (
    Classifier,
    MaxMahalanobisHead,
    SoftmaxHead,
    build,
    conv_net,
    structured,
    swap_head,
)
from mmlda.models.heads import max_mahalanobis
from mmlda.theory import separated_means
from mmlda.theory.codes import hadamard

# Parts of codes and whole ones: Kerdock with and without the standard basis, padded, punctured; others.
SIZES = [
    (24, 4),
    (288, 16),
    (250, 16),
    (281, 20),
    (2000, 16),
    (2080, 16),
    (2112, 32),
    (1999, 32),
    (4224, 64),
    (5000, 64),
    (3000, 61),
    (3000, 62),
]
SMALL = (281, 20)


@pytest.fixture(autouse=True)
def always_structured(monkeypatch):
    monkeypatch.setattr(max_mahalanobis, "PLAIN", 0)
    monkeypatch.setattr(structured, "BLOCK", 64)  # several blocks


def make(L, p, **more):
    if (L, p) == (24, 4):  # the optimiser would be asked
        head = MaxMahalanobisHead(L, p, means=torch.from_numpy(structured_means(24, 2)), **more)
        head._store_code(torch.from_numpy(code(24, 2).signs()), torch.tensor(head.C).sqrt())
        return head
    head = MaxMahalanobisHead(L, p, **more)
    assert head.structured
    return head


def code(L, m):
    from mmlda.theory.codes import BinaryCode

    return BinaryCode(L, m)


def structured_means(L, m):
    return code(L, m).means()


def matrix(head):
    """The same head with its matrix."""
    mu = head.class_means(torch.arange(head.num_classes))
    priors, precision = head.priors.double() / head.priors.double().sum(), float(head.precision)
    plain = MaxMahalanobisHead(head.num_classes, head.dim, C=head.C, priors=priors, precision=precision, means=mu)
    assert not plain.structured
    plain = plain.to(head.precision.dtype)
    plain.means = mu
    return plain


def uneven(L):
    priors = torch.arange(L, dtype=F64) % 7
    return priors / priors.sum()  # some are 0


@pytest.mark.parametrize("m", [*range(1, 11), 12])
def test_transform_is_the_product_with_the_hadamard_matrix(m):
    x = torch.randint(-8, 9, (3, 2, 2**m)).double()  # integers: exact
    expected = x @ torch.from_numpy(hadamard(2**m)).double()
    assert torch.equal(structured.transform(x, structured.core_matrix(2**m)), expected)


@pytest.mark.parametrize(("L", "p"), SIZES)
def test_equals_the_matrix(L, p):
    head = make(L, p, C=9.0, precision=2.0, priors=uneven(L)).double()
    mu = head.class_means(torch.arange(L))
    if L != 24:
        torch.testing.assert_close(mu, separated_means(L, p, C=9.0), rtol=0, atol=1e-12)
    z, plain = features(7, p, F64), matrix(head)
    torch.testing.assert_close(head(z), 2.0 * z @ mu.T + head.log_priors, rtol=0, atol=1e-11)
    torch.testing.assert_close(head.distances(z), plain.distances(z), rtol=1e-10, atol=0)
    torch.testing.assert_close(head.predict_proba(z), plain.predict_proba(z), rtol=0, atol=1e-6)
    assert torch.equal(head.predict(z), (2.0 * z @ mu.T + head.log_priors).argmax(1))
    values, classes = head.topk(z, 10)
    expected = (2.0 * z @ mu.T + head.log_priors).topk(10)
    torch.testing.assert_close(values, expected.values, rtol=0, atol=1e-11)
    torch.testing.assert_close(head(z).gather(1, classes), values, rtol=0, atol=1e-11)


@pytest.mark.parametrize(("L", "p"), SIZES)
@pytest.mark.parametrize("priors", [None, uneven])
def test_streamed_loss_and_gradient_are_the_plain_ones(L, p, priors):
    head = make(L, p, priors=priors and priors(L), precision=0.1).double()
    z = features(9, p, F64).requires_grad_()
    y = torch.tensor([1, 2, 3, 4, L - 1, L - 2, L // 2, 8, 9])
    y = torch.where(head.log_priors[y].isfinite(), y, 1)
    for reduction in ("none", "mean", "sum"):
        streamed, plain = head.loss(z, y, reduction=reduction), F.cross_entropy(head(z), y, reduction=reduction)
        torch.testing.assert_close(streamed, plain, rtol=1e-10, atol=1e-12)
        (found,), (expected,) = (torch.autograd.grad(loss.sum(), z) for loss in (streamed, plain))
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    _, hits = head.loss_and_hits(z, y)
    assert torch.equal(hits, head.predict(z) == y)
    mine = head.class_means(y) * 10  # features on the side of their own means
    assert bool(head.loss_and_hits(mine, y)[1].all())


def test_gradcheck():
    head = make(*SMALL, C=1.0).double()
    z, y = features(3, 20, F64).requires_grad_(), torch.tensor([0, 150, 280])
    assert torch.autograd.gradcheck(lambda z: head.loss(z, y, reduction="none"), z)
    assert torch.autograd.gradcheck(lambda z: head(z)[:, ::40], z)


def test_a_second_derivative_is_refused():
    head = make(*SMALL, C=1.0).double()
    z = features(2, 20, F64).requires_grad_()
    (gradient,) = torch.autograd.grad(head.loss(z, torch.tensor([0, 1])), z, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated once"):
        gradient.sum().backward()


def test_forward_mode_and_torch_func():
    head = make(*SMALL, C=1.0).double()
    z, t, y = features(3, 20, F64), features(3, 20, F64, seed=1), torch.tensor([0, 150, 280])
    streamed, plain = (lambda z, head=head: head.loss(z, y) for head in (head, matrix(head)))
    expected = torch.func.jvp(plain, (z,), (t,))[1]
    assert abs(expected) > 0.1
    torch.testing.assert_close(torch.func.jvp(streamed, (z,), (t,))[1], expected)
    compiled = torch.compile(lambda z, t: torch.func.jvp(streamed, (z,), (t,))[1], backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(z, t), expected)
    with forward_ad.dual_level():
        loss = streamed(forward_ad.make_dual(z, t))
        torch.testing.assert_close(forward_ad.unpack_dual(loss).tangent, expected)
    for transform in (torch.func.grad, torch.func.hessian):
        torch.testing.assert_close(transform(streamed)(z), transform(plain)(z))
    each = torch.func.vmap(torch.func.grad(lambda z, y: head.loss(z[None], y[None])))(z, y)
    torch.testing.assert_close(each.mean(0), torch.func.grad(plain)(z).sum(0))


@pytest.mark.parametrize(("L", "p"), [SMALL, (288, 16)])
def test_where_all_logits_are_equal_only_class_0_is_right(L, p):
    head, y = make(L, p), torch.arange(L)
    z = torch.zeros(L, p)
    assert torch.equal(head.loss_and_hits(z, y)[1], head(z).argmax(1) == y)
    assert torch.equal(head.predict(z), head(z).argmax(1))


def test_what_is_no_class_has_no_loss():
    head = make(*SMALL)
    y = torch.tensor([-(10**12), -100, -1, 0, 280, 281, 10**12])
    known = torch.tensor([False, False, False, True, True, False, False])
    z = features(7, 20).requires_grad_()
    compiled = torch.compile(lambda z, y: head.loss_and_hits(z, y), backend="aot_eager", fullgraph=True)
    losses, hits = compiled(z, y)
    (gradient,) = torch.autograd.grad(losses.sum(), z)
    assert torch.equal(losses.isnan(), ~known) and torch.equal(gradient.isnan().any(1), ~known)
    torch.testing.assert_close(losses[known], head.loss(z[known], y[known], reduction="none"))
    assert not hits[~known].any()
    soft = torch.compile(lambda z, y: head.loss(z, y, "soft", "none"), backend="aot_eager", fullgraph=True)
    assert torch.equal(soft(z, y).isnan(), ~known)


def test_class_means_refuse_what_is_no_class():
    head = make(*SMALL)
    for each in (head, matrix(head)):
        for wrong in (-1, 281, 10**9):
            with pytest.raises(ValueError, match=f"^classes must be classes from 0 to 280, got {wrong}$"):
                each.class_means(torch.tensor([0, wrong]))
        for wrong, got in ((3, "int"), (torch.tensor(3), r"torch.int64 \[\]"), (torch.ones(281) > 0, "torch.bool.*")):
            with pytest.raises(ValueError, match=rf"^classes must be int64 \[n\], got {got}$"):
                each.class_means(wrong)


def test_many_blocks_and_extreme_features():
    head = make(2000, 16, C=100.0)
    z = torch.cat([features(3, 16, scale=1e4), torch.zeros(1, 16), features(600, 16)]).requires_grad_()
    y = torch.arange(len(z)) % 2000
    losses = head.loss(z, y, reduction="none")
    torch.testing.assert_close(losses, F.cross_entropy(head(z), y, reduction="none"), rtol=1e-4, atol=1e-3)
    losses.sum().backward()
    assert bool(z.grad.isfinite().all())
    assert head.loss(z[:0], y[:0], reduction="none").shape == (0,)


def test_the_other_losses_and_the_fit():
    head = make(*SMALL, C=4.0).double()
    plain, z, y = matrix(head), features(400, 20, F64), torch.arange(400) % 281
    for name in ("soft", "centre"):
        torch.testing.assert_close(head.loss(z, y, name), plain.loss(z, y, name), rtol=1e-6, atol=0)
    assert head.latent_fit(z, y).mean_offset == pytest.approx(plain.latent_fit(z, y).mean_offset, rel=1e-6)


def test_a_million_classes_fit_into_a_small_state():
    head = MaxMahalanobisHead(1_000_000, 1024)
    state = head.state_dict()
    assert sorted(state) == ["log_priors", "precision", "scale", "signs"] and head.means is None
    assert sum(tensor.nbytes for tensor in state.values()) < 5e6
    z, y = head.class_means(torch.tensor([5, 999_998])).requires_grad_(), torch.tensor([5, 999_998])
    assert head.predict(z).tolist() == y.tolist()
    head.loss(z, y).backward()
    assert z.grad.shape == (2, 1024)


# ---- Files


def test_round_trips(tmp_path):
    from safetensors.torch import load_file, save_file

    head = make(*SMALL, C=7.0, precision=2.0, priors=uneven(281))
    z = features(4, 20)
    save_file(head.state_dict(), tmp_path / "head.safetensors")
    for assign in (False, True):
        fresh = make(*SMALL)
        fresh.load_state_dict(load_file(tmp_path / "head.safetensors"), assign=assign)
        assert torch.equal(fresh(z), head(z)) and fresh.C == 7.0
    assert torch.equal(copy.deepcopy(head)(z), head(z))
    assert head.with_priors(None).signs is head.signs


def test_a_matrix_and_a_code_load_into_each_other():
    head, z = make(*SMALL, C=7.0), features(4, 20)
    plain = matrix(head)
    for target, source in ((make(*SMALL), plain), (matrix(make(*SMALL)), head)):
        target.load_state_dict(source.state_dict())  # strictly
        assert target.structured is source.structured and target.C == 7.0
        assert torch.equal(target(z), source(z))
        assert torch.equal(target.predict(z), source.predict(z))


def test_a_file_of_another_size_is_refused():
    with pytest.raises(RuntimeError, match="size mismatch"):
        make(*SMALL).load_state_dict(make(2000, 16).state_dict())


def test_a_run_is_rebuilt_from_its_config(tmp_path):
    import mmlda

    train = mmlda.data.digit_strings(mmlda.data.load("digits")[0], length=2)
    net = {"backbone": "conv_net", "width": 4, "head": "mmlda", "num_classes": 281, "dim": 20, "C": 10.0}
    model = build(net, seed=0)
    assert model.head.structured
    run = mmlda.fit(model, train, mmlda.Recipe(steps=3, batch_size=32), out=tmp_path / "run", show=False)
    again = mmlda.load(tmp_path / "run")
    x = train.pixels(slice(5))
    assert again.head.structured and torch.allclose(again(x), model(x), atol=1e-5) and math.isfinite(run.loss)
    assert torch.equal(again.predict(x), model(x).argmax(1))


# ---- Dtypes, compile, export


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_lowered_networks_keep_the_code(dtype):
    head = make(*SMALL, C=7.0).to(dtype)
    assert head.scale.dtype == torch.promote_types(dtype, torch.float32) and head.signs.dtype == torch.int8
    if dtype == torch.float64:
        assert float(head.scale) == math.sqrt(7.0)
    z = features(4, 20, dtype).requires_grad_()
    assert head(z).dtype == head.scale.dtype
    head.loss(z, torch.arange(4)).backward()
    assert z.grad.dtype == dtype


def test_autocast_leaves_logits_and_loss_alone():
    head, z, y = make(*SMALL), features(4, 20), torch.arange(4)
    expected = head(z), head.loss(z, y), head.topk(z, 3)[0]
    with torch.autocast("cpu", torch.bfloat16):
        found = head(z), head.loss(z, y), head.topk(z, 3)[0]
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


def test_compiles_whole():
    head, y = make(*SMALL), torch.arange(4)
    z = features(4, 20).requires_grad_()

    def both(z):
        return head.loss(z, y) + head(z).logsumexp(1).mean()

    found = torch.compile(both, backend="aot_eager", fullgraph=True)(z)
    torch.testing.assert_close(found, both(z))
    (gradient,) = torch.autograd.grad(found, z)
    torch.testing.assert_close(gradient, torch.autograd.grad(both(z), z)[0])


def test_the_operator_keeps_torchs_rules():
    head = make(*SMALL)
    z, *rest = head._coded(features(4, 20).requires_grad_())
    arguments = (z.detach().requires_grad_(), torch.arange(4), *rest, True)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")  # the others derive the gradient's output
    torch.library.opcheck(structured.cross_entropy, arguments, test_utils=tests)


def test_buffers_may_be_rewritten_between_forward_and_backward():
    head, y = make(*SMALL), torch.arange(4)
    z = features(4, 20).requires_grad_()
    loss = head.loss(z, y) + head(z).logsumexp(1).sum()
    for buffer in head.buffers():
        buffer.copy_(buffer.clone())  # as DDP does
    loss.backward()


@pytest.mark.parametrize("strict", [False, True])
def test_a_bare_head_exports(strict):
    head, loaded = make(*SMALL), matrix(make(*SMALL))
    loaded.load_state_dict(head.state_dict())
    for each in (head, loaded, matrix(head)):
        program = torch.export.export(each, (features(6, 20),), strict=strict)
        torch.testing.assert_close(program.module()(features(6, 20)), head(features(6, 20)))


@pytest.mark.parametrize("suffix", [".pt2", ".onnx"])
def test_exports(tmp_path, suffix):
    if suffix == ".onnx":
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
    from mmlda.integrations.export import export

    model = Classifier(conv_net(width=4), make(*SMALL)).eval()
    assert export(model, tmp_path / f"model{suffix}", images=torch.rand(17, 1, 8, 8)).is_file()  # compared inside


def test_swap_head_and_clip_of_k():
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(8, 10))
    new = swap_head(net, num_classes=281, dim=20)
    assert new[1].head.structured and new(torch.rand(2, 8)).shape == (2, 281)
    new(torch.rand(2, 8)).sum().backward()
    assert new[1].latent.weight.grad is not None
    for head in (new[1].head, SoftmaxHead(5, 3)):
        with pytest.raises(ValueError, match=r"^k must be"):
            head.topk(torch.rand(2, head.dim), head.num_classes + 1)
    softmax = SoftmaxHead(5, 3)
    z = torch.rand(2, 3)
    assert torch.equal(softmax.topk(z, 2)[1], softmax(z).topk(2).indices)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    ("L", "p"), [SMALL, (288, 16), (1999, 32), (4224, 64), (20_000, 128), (50_000, 256), (9000, 512)]
)
@pytest.mark.parametrize("priors", [None, uneven])
def test_on_cuda(L, p, priors):
    head = make(L, p, priors=priors and priors(L), precision=0.1).cuda()
    z, y = features(300, p).cuda().requires_grad_(), torch.randint(L, (300,), device="cuda")
    y[:7] = torch.tensor([0, 1, 2, 3, L - 2, L - 1, 7])
    plain = F.cross_entropy(head(z), y, reduction="none")
    finite = plain.isfinite()  # not where the prior is 0
    (want,) = torch.autograd.grad(plain[finite].sum(), z)
    losses, hits = head.loss_and_hits(z, y)
    (slope,) = torch.autograd.grad(losses[finite].sum(), z)
    torch.testing.assert_close(losses, plain, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(slope, want, rtol=1e-4, atol=1e-5)
    assert (hits == (head(z).argmax(1) == y)).float().mean() > 0.99  # rounding may decide
    assert torch.equal(head.predict(z), head(z).argmax(1))
    nowhere = torch.where(y % 2 == 0, -1 - y, L + y)
    assert head.loss_and_hits(z, nowhere)[0].isnan().all() and head.class_means(nowhere).isnan().any(1).all()
    if priors is None:
        assert torch.equal(head.loss_and_hits(0 * z, y)[1], y == 0)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1 and triton")
@pytest.mark.parametrize(("L", "p"), [(288, 16), (1999, 32), (4224, 64), (40_000, 128), (9000, 256), (9000, 512)])
@pytest.mark.parametrize("gradient", [True, False])
def test_interpreted_kernel(L, p, gradient):
    head = make(L, p, priors=uneven(L))
    z, y = features(9, p), torch.tensor([0, 1, 2, 3, L - 2, L - 1, 7, 100, 200])
    x, signs, core, weight, bias = head._coded(z)
    plus, minus = F.pad(bias, (0, 2 * p * len(signs) + 2 * p - L), value=-math.inf).view(-1, 2).T.contiguous()
    short = plus[: p * len(signs)].contiguous(), minus[: p * len(signs)].contiguous()
    tops, totals, own, directions = structured._by_kernel(weight * x, y, signs, *short, gradient)
    top, total, same, direction = structured._by_blocks(weight * x, y, signs, core, *short, gradient, 0)
    share = (tops - tops.amax(0)).exp()
    torch.testing.assert_close(tops.amax(0), top[0])
    torch.testing.assert_close((share * totals).sum(0), total[0], rtol=1e-4, atol=0)
    torch.testing.assert_close(own.sum(0), same[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close((share[..., None] * directions).sum(0), direction[0], rtol=1e-4, atol=1e-5)
