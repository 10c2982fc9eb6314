"""Identify a dataset by its content, whatever archive it came in.

For IDX sets the content is that of the decompressed files, for the CIFARs the sorted digests of the records, so that
the order of images does not matter.
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np

from mmlda.data.datasets import KNOWN
from mmlda.data.images import ImageData

# What `content` returns for the published sets.
CONTENT: dict[str, dict[str, str]] = {
    "digits": {
        "train images": "6d8d15d40deec730d14bb6f24cffbe83d57b75136f2ee96280db9d92c21e236d",
        "train labels": "98bc0725be81b408de5297afcc76715050a3685b497dc2e1a9237c4bcf48e544",
        "test images": "6393efa576676b5a66ad45aa6e65df05f857a2695356ff3641921b1c29981d2e",
        "test labels": "86351bd201571777c09a2176ab0dbd7955922caafe1d859fe615e2d040a4e9e3",
    },
    "mnist": {
        "train images": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "train labels": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "test images": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "test labels": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    },
    "fashion-mnist": {
        "train images": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "train labels": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "test images": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "test labels": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    },
    "cifar10": {
        "train records": "55a61f79a40ece2ceda9fb5f9f7078f6ea2fc4952489cef56682bcf92cfcc260",
        "test records": "325704b01eb92e1e2a6215ae6a916bb7db7de054af0c496be1c7be2e0fcfbf5f",
    },
    "cifar100": {
        "train records": "6d2a03c47c105e4c34d3a2ff16c2803e8df0e5d6fa0c631e46663a327aeac573",
        "test records": "381b7d98ce1e9b98232a8df0db0a22992654c39ff2433270656ab8ace5a45e65",
    },
}


def content(name: str, train: ImageData, test: ImageData) -> dict[str, str]:
    """Identify a dataset by SHA-256 digests of its content.

    For the CIFARs they are taken over the sorted digests of the records (fine label, then 3,072 pixels) of train and
    test set; for the others, which have one channel, over the content of the four decompressed IDX files.

    Parameters
    ----------
    name
        Name of the dataset.
    train, test
        Its training and test set.

    Returns
    -------
    dict of str to str
        The digest of each part.
    """
    parts = {}
    for split, part in (("train", train), ("test", test)):
        pixels, labels = part.images.cpu().numpy(), part.labels.cpu().numpy().astype(np.uint8)
        if KNOWN[name].cifar is not None:
            records = np.concatenate([labels[:, None], pixels.reshape(len(pixels), -1)], axis=1)
            digests = sorted(hashlib.sha256(record.data).digest() for record in records)
            parts[f"{split} records"] = hashlib.sha256(b"".join(digests)).hexdigest()
            continue
        for kind, values in (("images", pixels[:, 0]), ("labels", labels)):
            header = bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
            parts[f"{split} {kind}"] = hashlib.sha256(header + values.tobytes()).hexdigest()
    return parts
