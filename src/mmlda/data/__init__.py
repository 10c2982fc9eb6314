"""Datasets as tensors.

A dataset is two tensors and the names of its classes, small enough to live on the device it is used on:

>>> train, test = load("digits")
>>> train
ImageData('digits', 1437 images of 1 x 8 x 8, 10 classes)
>>> train.pixels([0, 1]).shape                       # [0, 1] floats on use, bytes in storage
torch.Size([2, 1, 8, 8])
"""

from mmlda.data.alignment import images_for
from mmlda.data.augment import augment, draw_augmentation
from mmlda.data.convert import as_images
from mmlda.data.datasets import CLASSES, data_root, find, load
from mmlda.data.images import ImageData
from mmlda.data.subsets import (
    biased,
    bp1,
    bp2,
    digit_strings,
    fold_rows,
    folds,
    holdout,
    long_tailed,
    split,
    stratified,
)
from mmlda.data.tables import table

__all__ = [
    "CLASSES",
    "ImageData",
    "as_images",
    "augment",
    "biased",
    "bp1",
    "bp2",
    "data_root",
    "digit_strings",
    "draw_augmentation",
    "find",
    "fold_rows",
    "folds",
    "holdout",
    "images_for",
    "load",
    "long_tailed",
    "split",
    "stratified",
    "table",
]
