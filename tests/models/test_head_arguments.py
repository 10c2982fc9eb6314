"""Bad arguments, features and labels are refused by name."""

import math

import pytest
import torch
from head_cases import make

from mmlda.models.heads import MaxMahalanobisHead, SoftmaxHead

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
    [(change, message) for change, message in BAD if set(change) <= {"num_classes", "dim", "priors"}],
)
def test_softmax_bad_arguments(change, message):
    with pytest.raises(ValueError, match=message):
        SoftmaxHead(**{"num_classes": 5, "dim": 8, **change})


def test_other_arguments_are_keyword_only():
    for kind in (MaxMahalanobisHead, SoftmaxHead):
        with pytest.raises(TypeError):
            kind(5, 8, None)


HEADS = [make, lambda: SoftmaxHead(num_classes=5, dim=8)]
Z_BAD = [
    (torch.zeros(3, 7), r"z must be a floating tensor \[N, 8\], got torch.float32 \[3, 7\]"),
    (torch.zeros(8), r"z must be a floating tensor \[N, 8\], got torch.float32 \[8\]"),
    (torch.zeros(2, 3, 8), r"z must be a floating tensor \[N, 8\], got torch.float32 \[2, 3, 8\]"),
    (torch.zeros(3, 8, dtype=torch.int64), "z must be a floating tensor .*got torch.int64"),
    (torch.zeros(3, 8, dtype=torch.complex64), "z must be a floating tensor .*got torch.complex64"),
    (torch.full((3, 8), math.nan), r"z must be finite, got NaN or infinity in \[3, 8\]"),
    (torch.full((3, 8), math.inf), r"z must be finite, got NaN or infinity in \[3, 8\]"),
    ([[0.0] * 8] * 3, "z must be a floating tensor .*got list"),
    (None, "z must be a floating tensor .*got NoneType"),
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
        ([0, 1, 2], "y must be int64 .*got list"),
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
    with pytest.raises(ValueError, match="reduction must be one of none, mean, sum, got 'max'"):
        build().loss(z, y, reduction="max")


@pytest.mark.parametrize("name", ["soft", "centre"])
def test_softmax_head_has_no_means_for_the_other_losses(name):
    with pytest.raises(ValueError, match=f"name must be one of \\('ce',\\) for a SoftmaxHead, got '{name}'"):
        SoftmaxHead(num_classes=5, dim=8).loss(torch.zeros(3, 8), torch.zeros(3, dtype=torch.int64), name)


@pytest.mark.parametrize("build", HEADS)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"priors": "true"}, "priors must be a number, an array .* got 'true'"),
        ({"priors": "empirical"}, "labels must be given where priors = 'empirical', got None"),
        ({"priors": "empirical", "labels": torch.tensor([0, 9])}, "labels must be classes from 0 to 4, got 9"),
        ({"priors": "empirical", "labels": []}, "labels must have at least one label, got none"),
        ({"priors": "empirical", "labels": "all"}, r"labels must be int64 \[N\], got 'all'"),
        ({"priors": None, "labels": [0, 1]}, "priors must be 'empirical' where labels are given, got None"),
        ({"priors": [0.5, 0.5]}, r"priors must have shape \[5\].*got \[2\]"),
        ({"priors": [0.3] * 5}, "priors must sum to 1, got a sum of 1.5"),
        ({"priors": None, "old": [0.5, 0.5, 0, 0, 0]}, "old must be > 0, got 0.0 for class 2"),
    ],
)
def test_with_priors_bad_input(build, arguments, message):
    with pytest.raises(ValueError, match=message):
        build().with_priors(**arguments)


@pytest.mark.parametrize("kind", [MaxMahalanobisHead, SoftmaxHead])
def test_classes_and_dimension_may_be_given_by_position(kind):
    head = kind(5, 8)
    assert (head.num_classes, head.dim) == (5, 8) and head(torch.zeros(2, 8)).shape == (2, 5)
