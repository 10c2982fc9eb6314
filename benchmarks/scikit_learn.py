"""MaxMahalanobisClassifier beside scikit-learn's classifiers on scikit-learn's datasets.

    OMP_NUM_THREADS=1 python benchmarks/scikit_learn.py --out benchmarks/results/scikit-learn.json

Accuracy over repeated stratified folds (mean and standard deviation over the folds) and CPU seconds per fit, which
other programs on the machine hardly change. Every estimator has its defaults, except that those of scikit-learn get
standardised inputs; ours standardises by itself.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
import warnings
from pathlib import Path

import numpy as np
import sklearn
import torch
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_digits, load_iris, load_wine
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import RepeatedStratifiedKFold
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import mmlda
from mmlda.integrations.sklearn import MaxMahalanobisClassifier

DATASETS = {"iris": load_iris, "wine": load_wine, "breast_cancer": load_breast_cancer, "digits": load_digits}
ESTIMATORS = {
    "MaxMahalanobisClassifier": MaxMahalanobisClassifier(random_state=0),
    "LinearDiscriminantAnalysis": make_pipeline(StandardScaler(), LinearDiscriminantAnalysis()),
    "LogisticRegression": make_pipeline(StandardScaler(), LogisticRegression()),
    "MLPClassifier": make_pipeline(StandardScaler(), MLPClassifier(random_state=0)),
}


def measure(estimator, X, y, folds) -> tuple[np.ndarray, float]:
    """Accuracy on each fold, and the mean CPU seconds of a fit."""
    scores, seconds = [], []
    for train, test in folds.split(X, y):
        fresh, begin = clone(estimator), time.process_time()
        fresh.fit(X[train], y[train])
        seconds.append(time.process_time() - begin)
        scores.append(fresh.score(X[test], y[test]))
    return np.array(scores), float(np.mean(seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore", ConvergenceWarning)
    MaxMahalanobisClassifier(max_iter=1).fit([[0.0], [1.0]], [0, 1])  # warm up
    folds = RepeatedStratifiedKFold(n_splits=options.splits, n_repeats=options.repeats, random_state=0)
    rows = []
    print(f"{'dataset':14} {'estimator':27} {'accuracy':>16} {'CPU s':>10}")
    for dataset, load in DATASETS.items():
        X, y = load(return_X_y=True)
        for name, estimator in ESTIMATORS.items():
            scores, seconds = measure(estimator, X, y, folds)
            row = {"dataset": dataset, "estimator": name, "accuracy": float(scores.mean())}
            row |= {"sd": float(scores.std(ddof=1)), "folds": scores.tolist(), "cpu_seconds": seconds}
            rows.append(row)
            accuracy = f"{100 * scores.mean():8.2f} ± {100 * scores.std(ddof=1):4.2f}%"
            print(f"{dataset:14} {name:27} {accuracy} {seconds:10.3f}", flush=True)
    if options.out:
        record = {
            "benchmark": "scikit-learn",
            "mmlda": mmlda.__version__,
            "torch": torch.__version__,
            "scikit-learn": sklearn.__version__,
            "python": platform.python_version(),
            "device": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
            "splits": options.splits,
            "repeats": options.repeats,
            "result": rows,
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
