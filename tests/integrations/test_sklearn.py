"""MaxMahalanobisClassifier: scikit-learn's own checks, its tools, and what the estimator adds."""

import io
import warnings

import joblib
import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_digits, load_iris, load_wine
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import GridSearchCV, cross_val_score, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import mmlda
from mmlda.integrations.sklearn import MaxMahalanobisClassifier, _hold_out

pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
IRIS = load_iris(return_X_y=True)


def quick(**settings):
    return MaxMahalanobisClassifier(**{"random_state": 0, "max_iter": 30, **settings})


@parametrize_with_checks(
    [
        MaxMahalanobisClassifier(random_state=0),
        MaxMahalanobisClassifier(random_state=0, max_iter=200, early_stopping=True),
    ]
)
def test_scikit_learn_checks(estimator, check):
    check(estimator)


@pytest.mark.parametrize(("data", "least"), [(load_iris, 0.93), (load_wine, 0.93), (load_breast_cancer, 0.94)])
def test_accuracy_over_folds(data, least):
    assert cross_val_score(quick(max_iter=60), *data(return_X_y=True), cv=3).mean() > least


@pytest.mark.parametrize("load", [load_iris, load_wine, load_breast_cancer, load_digits])
def test_the_defaults_converge(load):
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        assert MaxMahalanobisClassifier(random_state=0).fit(*load(return_X_y=True)).n_iter_ < 1700


def test_pipeline_grid_search_over_c_and_clone():
    pipeline = make_pipeline(MinMaxScaler(), quick())
    search = GridSearchCV(pipeline, {"maxmahalanobisclassifier__C": [1.0, 100.0]}, cv=3).fit(*IRIS)
    best = search.best_estimator_[-1]
    assert best.model_.head.C == best.C == search.best_params_["maxmahalanobisclassifier__C"]
    assert search.best_score_ > 0.85
    fresh = clone(best)
    assert fresh.get_params() == best.get_params() and not hasattr(fresh, "model_")


def test_the_network_of_a_table_is_evaluated_and_attacked_as_any_other():
    X, y = load_wine(return_X_y=True)
    labels = np.array(["barolo", "grignolino", "barbera"])[y]
    X_train, X_test, y_train, y_test = train_test_split(X, labels, stratify=y, random_state=0)
    fitted = quick(max_iter=30).fit(X_train, y_train)
    test = mmlda.data.table(X_test, y_test, bounds=(X.min(0) - 1, X.max(0) + 1))
    inside = ((X_test >= X_train.min(0)) & (X_test <= X_train.max(0))).all(1)
    assert fitted.model_.classes == ("barbera", "barolo", "grignolino")
    with pytest.warns(UserWarning, match="outside the table's bounds and clipped"):
        assert abs(mmlda.accuracy(fitted.model_, test).accuracy - fitted.score(X_test, y_test)) <= np.mean(~inside)
    known = mmlda.data.table(X_test[inside], y_test[inside], bounds=fitted.model_.bounds)
    assert mmlda.accuracy(fitted.model_, known).accuracy == fitted.score(X_test[inside], y_test[inside]) > 0.9
    assert mmlda.evaluate(fitted.model_, known, "pgd:0.3", show=False).attacks[0].value < 0.5


@pytest.mark.parametrize(
    ("settings", "X", "message"),
    [
        ({"early_stopping": "yes"}, IRIS[0], "early_stopping must be True or False, got 'yes'"),
        ({"dim": 1}, IRIS[0], "dim must be an integer >= 2, got 1"),
        ({}, np.sign(IRIS[0] - 3) * 1e308, "X must be of columns whose range is a finite number, got"),
        ({}, np.zeros((150, 8, 8), bool), "X must be images of bytes or of floats in .*, got bool from 0 to 0"),
        ({}, np.ones((150, 8, 8), np.int64), "X must be images of bytes or of floats in .*, got int64 from 1 to 1"),
    ],
)
def test_what_cannot_work_is_one_clear_error(settings, X, message):
    with pytest.raises(ValueError, match=message):
        quick(**settings).fit(X, IRIS[1])


@pytest.mark.parametrize("labels", [[1, 2, 3], [3, 7, 12]])
def test_numbers_that_are_names_are_matched_by_name(labels):
    X, y = IRIS
    y = np.array(labels)[y]
    fitted = quick(max_iter=60).fit(X, y)
    for rows in (y < labels[2], y > labels[0]):  # without a class
        test = mmlda.data.table(X[rows], y[rows].astype(str), bounds=fitted.model_.bounds)
        assert mmlda.accuracy(fitted.model_, test).accuracy == fitted.score(X[rows], y[rows]) > 0.8
    if labels == [1, 2, 3]:
        test = mmlda.data.table(X[y < 3], y[y < 3], bounds=fitted.model_.bounds)
        assert mmlda.accuracy(fitted.model_, test).accuracy == fitted.score(X[y < 3], y[y < 3])


def test_it_trains_where_gradients_are_off():
    with torch.no_grad():
        assert quick(max_iter=20).fit(*IRIS).score(*IRIS) > 0.8


def test_joblib_round_trip():
    fitted, file = quick().fit(*IRIS), io.BytesIO()
    joblib.dump(fitted, file)
    file.seek(0)
    assert np.array_equal(joblib.load(file).decision_function(IRIS[0]), fitted.decision_function(IRIS[0]))


def test_outputs_agree_with_each_other_and_with_the_network():
    X, y = IRIS
    labels = np.array(["setosa", "versicolor", "virginica"])[y]
    fitted = quick().fit(X, labels)
    logits, probabilities = fitted.decision_function(X), fitted.predict_proba(X)
    rows = torch.from_numpy((X - X.min(0)) / (X.max(0) - X.min(0)))
    with torch.no_grad():
        np.testing.assert_allclose(logits, fitted.model_(rows))
    np.testing.assert_allclose(probabilities, torch.from_numpy(logits).softmax(1))
    assert np.array_equal(fitted.predict(X), fitted.classes_[probabilities.argmax(1)])
    assert fitted.score(X, labels) == np.mean(fitted.predict(X) == labels) > 0.9
    assert list(fitted.classes_) == sorted(set(labels)) and fitted.n_features_in_ == 4


def test_the_network_standardises_its_inputs():
    X, y = IRIS
    moved = quick().fit(X * [1, 1e3, 1e-3, 1] + [0, 0, 0, 1e6], y)
    plain = quick().fit(X, y)
    np.testing.assert_allclose(
        moved.predict_proba(X * [1, 1e3, 1e-3, 1] + [0, 0, 0, 1e6]), plain.predict_proba(X), atol=1e-3
    )


def test_the_same_seed_gives_the_same_network_and_leaves_the_global_generator_alone():
    state = torch.get_rng_state()
    first, second, other = (quick(random_state=seed, max_iter=3).fit(*IRIS) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert np.array_equal(first.predict_proba(IRIS[0]), second.predict_proba(IRIS[0]))
    assert not np.array_equal(first.predict_proba(IRIS[0]), other.predict_proba(IRIS[0]))


def test_early_stopping_keeps_the_best_network():
    rng = np.random.RandomState(0)
    X, y = rng.randn(200, 20), rng.randint(0, 2, 200)  # nothing to learn, so the held-out loss soon rises
    fitted = quick(early_stopping=True, max_iter=200).fit(X, y)
    assert fitted.n_iter_ < 60 and len(fitted.loss_curve_) == fitted.n_iter_
    assert fitted.score(X, y) < quick(max_iter=200).fit(X, y).score(X, y)


def test_early_stopping_on_small_data():
    X = np.random.RandomState(0).randn(7, 2)
    assert quick(early_stopping=True, max_iter=3).fit(X, [0, 0, 1, 1, 1, 2, 2]).n_iter_ == 3
    assert quick(early_stopping=True, max_iter=3).fit(X, [0, 1, 2, 3, 4, 5, 5]).n_iter_ == 3
    with pytest.raises(ValueError, match="y must have 2 samples of a class for early_stopping, got 1 of each of 7"):
        quick(early_stopping=True).fit(X, range(7))


def test_a_tenth_of_each_class_is_held_out():
    labels = np.repeat([0, 1, 2, 3], [100, 11, 2, 1])
    train, held_out = _hold_out(labels, np.random.RandomState(0))
    assert np.array_equal(np.sort(np.concatenate([train, held_out])), np.arange(114))
    assert np.bincount(labels[held_out], minlength=4).tolist() == [10, 2, 1, 0]


@pytest.mark.parametrize("rate", [1e3, 1e30])
@pytest.mark.parametrize("early_stopping", [False, True])
def test_divergence_is_an_error(rate, early_stopping):
    with pytest.raises(ValueError, match=r"learning_rate must be low enough for a finite loss in epoch .*, got 1"):
        quick(learning_rate=rate, early_stopping=early_stopping).fit(*IRIS)


def test_priors():
    X, y = IRIS[0][:120], IRIS[1][:120]  # 50, 50 and 20
    np.testing.assert_allclose(
        quick(max_iter=1, priors="empirical").fit(X, y).model_.head.priors, [5 / 12, 5 / 12, 1 / 6]
    )
    given = quick(max_iter=1, priors=[0.2, 0.3, 0.5]).fit(X, y)
    np.testing.assert_allclose(given.model_.head.priors, [0.2, 0.3, 0.5])
    assert given.model_.config["priors"] == pytest.approx([0.2, 0.3, 0.5])


def test_dim_and_hidden_layer_sizes_shape_the_network():
    fitted = quick(max_iter=1, dim=7, hidden_layer_sizes=(9, 5)).fit(*IRIS)
    assert fitted.model_.config["hidden"] == [9, 5] and fitted.model_.head.dim == 7
    for sizes, hidden in ((7, [7]), (np.array([9, 5]), [9, 5])):  # as MLPClassifier takes them
        assert quick(max_iter=1, hidden_layer_sizes=sizes).fit(*IRIS).model_.config["hidden"] == hidden
    assert quick(max_iter=1).fit(*IRIS).model_.head.dim == 2
    many = quick(max_iter=1, dim=3).fit(np.random.RandomState(0).randn(40, 2), np.arange(40) % 8)
    assert many.decision_function([[0.0, 0.0]]).shape == (1, 8)  # more classes than dim + 1


def test_images():
    digits = load_digits()
    images, y = np.rint(digits.images * 255 / 16).astype(np.uint8), digits.target
    fitted = quick(max_iter=4).fit(images[:600], y[:600])
    assert fitted.score(images[600:900], y[600:900]) > 0.8
    assert fitted.image_shape_ == (1, 8, 8) and fitted.n_features_in_ == 64
    floats = (images[600:610, None] / 255).astype(np.float32)
    np.testing.assert_allclose(fitted.predict_proba(floats), fitted.predict_proba(images[600:610]), atol=1e-5)
    with pytest.raises(ValueError, match=r"X must be images of shape \(1, 8, 8\), as in fit, got \(2, 64\)"):
        fitted.predict(np.zeros((2, 64)))
    with pytest.raises(ValueError, match=r"X must be a table \[N, D\], as in fit, got \(2, 8, 8\)"):
        quick(max_iter=1).fit(*IRIS).predict(images[:2])


def test_a_fit_that_fails_leaves_the_estimator_as_it_was():
    digits = load_digits()
    images, y = digits.images[:100] / 16, digits.target[:100]
    fitted = quick(max_iter=2).fit(images, y)
    before, state = fitted.predict_proba(images), dict(vars(fitted))
    for X, labels, settings in [
        (*IRIS, {"learning_rate": 1e30}),
        (IRIS[0], y[:3], {}),
        (images, y[:3], {}),
        (images[:5], [1] * 5, {}),
        (*IRIS, {"device": "cuda:99"}),
    ]:
        with pytest.raises(ValueError):
            fitted.set_params(**settings).fit(X, labels)
        fitted.set_params(learning_rate=1e-3, device=None)
        assert vars(fitted).keys() == state.keys()
        assert all(vars(fitted)[name] is value for name, value in state.items() if name.endswith("_"))
        assert np.array_equal(fitted.predict_proba(images), before)


def test_lists_of_images():
    digits = load_digits()
    images, y = digits.images[:100] / 16, digits.target[:100]
    fitted = quick(max_iter=2).fit(images, y)
    as_list = quick(max_iter=2).fit(list(images), y)
    assert as_list.image_shape_ == (1, 8, 8)
    assert np.array_equal(as_list.predict_proba(list(images)), fitted.predict_proba(images))
    with pytest.raises(ValueError, match=r"X must be images of one shape, got \[\(5, 8\), \(8, 8\)\]"):
        quick().fit([images[0], images[1, :5]], [0, 1])
    with pytest.raises(
        ValueError, match=r"X must be images of bytes or of floats in \[0, 1\], got float64 from 0 to 16"
    ):
        quick().fit(digits.images, digits.target)


def test_very_many_classes_need_dim():
    X = np.zeros((9000, 1))
    with pytest.warns(match="unique classes"), pytest.raises(ValueError, match="dim must be given for 9000 classes"):
        quick().fit(X, np.arange(9000))


def test_mistakes_are_named():
    for settings, message in [
        ({"C": -1.0}, "C must be a finite number > 0, got -1.0"),
        ({"max_iter": 0}, "max_iter must be an integer >= 1, got 0"),
        ({"priors": "uniform"}, "priors must be numbers, 'empirical' or None, got 'uniform'"),
        ({"priors": [0.5, 0.5, 0.0]}, "priors must be > 0, got 0.0 for class 2"),
        ({"hidden_layer_sizes": ()}, r"hidden must be at least one width, got \(\)"),
        ({"hidden_layer_sizes": (9, 2.5)}, "hidden must be an integer >= 1, got 2.5"),
        ({"weight_decay": -0.1}, "weight_decay must be a finite number >= 0, got -0.1"),
        ({"device": "gpu"}, "device must be available, got 'gpu'"),
    ]:
        with pytest.raises(ValueError, match=message):
            quick(**settings).fit(*IRIS)
    with pytest.raises(ValueError, match="y must be labels of at least 2 classes, got '1 class'"):
        quick().fit([[0.0], [1.0]], [1, 1])


@pytest.mark.filterwarnings("default::sklearn.exceptions.ConvergenceWarning")
def test_reaching_max_iter_warns():
    with pytest.warns(ConvergenceWarning, match="still improving after max_iter = 2 epochs") as caught:
        quick(max_iter=2).fit(*IRIS)
    assert [warning.filename for warning in caught] == [__file__]


def test_the_mlp_round_trips_through_its_config():
    model = quick(max_iter=1).fit(IRIS[0].astype(np.float32), IRIS[1]).model_
    again = mmlda.models.build(model.config)
    again.load_state_dict(model.state_dict())
    x = torch.rand(5, 4)
    assert again.config == model.config and torch.equal(again(x), model(x))
