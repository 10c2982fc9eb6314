"""What a head's buffers survive: saving, copying, other dtypes and devices, compilation, vmap."""

import copy
import io
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from head_cases import F64, PRIORS, features, make, relative_error
from torch import nn

from mmlda.models.heads import MaxMahalanobisHead, SoftmaxHead
from mmlda.theory.means import separated_means


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
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_state_dict_that_is_not_finite_is_refused(name, value):
    state = make().state_dict()
    state[name] = torch.full_like(state[name], value)
    with pytest.raises(RuntimeError, match=r"means and precision must be finite|log_priors must be log"):
        make().load_state_dict(state)


def test_log_priors_that_are_no_priors_are_refused_in_both_heads():
    for head in (make(), SoftmaxHead(3, 4)):
        for value in (math.inf, math.nan, -math.inf, 0.5):
            state = {**head.state_dict(), "log_priors": torch.full_like(head.log_priors, value)}
            with pytest.raises(RuntimeError, match="log_priors must be logarithms of priors"):
                head.load_state_dict(state)
    zero = make(priors=[0.0, *[0.25] * 4])  # log 0 is -inf, and a prior
    zero.load_state_dict(zero.state_dict())


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
    loss, expected = torch.compile(head.loss, fullgraph=True)(z, y, "soft"), head.loss(w, y, "soft")
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
