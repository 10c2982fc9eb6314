"""Max-Mahalanobis Linear Discriminant Analysis networks (Pang, Du and Zhu, ICML 2018).

    data -> backbone -> latent z -> head (posterior, loss) -> attack -> evaluation -> results -> report

>>> import mmlda
>>> train, test = mmlda.data.load("digits")                               # images as tensors
>>> head = mmlda.MaxMahalanobisHead(num_classes=10, dim=32)               # fixed means, nothing to learn
>>> model = mmlda.Classifier(mmlda.models.conv_net(), head)               # pixels in [0, 1] -> logits
>>> recipe = mmlda.Recipe(steps=60, optimizer="adam", lr=1e-3)
>>> run = mmlda.fit(model, train, recipe, show=False)                     # Algorithm 2
>>> result = mmlda.attacks.BIM(eps=0.1)(model, test.pixels(), test.labels)
>>> result.x_adv.shape
torch.Size([360, 1, 8, 8])
"""

from typing import TYPE_CHECKING

from mmlda._version import __version__ as __version__

if TYPE_CHECKING:
    from mmlda._api import *  # noqa: F403
else:
    import gc
    import importlib
    import sys
    from types import ModuleType

    _PACKAGES = "attacks data evaluation models paper report results theory training zoo".split()

    def _import(name):
        """Import a module with the garbage collector paused: its passes over torch's classes outlast our modules."""
        collecting = gc.isenabled()
        gc.disable()
        try:
            return importlib.import_module(name)
        finally:
            if collecting:
                gc.enable()

    class _Package(ModuleType):
        """Imports the public names, and torch with them, on first use: `mmlda --help` needs none of them."""

        def __getattr__(self, name):
            if name in _PACKAGES:  # which the package's own modules also import while _api is being imported
                return _import(f"mmlda.{name}")
            if not name.startswith("_") or name == "__all__":
                api = _import("mmlda._api")
                if hasattr(api, "__all__"):  # not while _api itself is being imported
                    vars(self).update({public: getattr(api, public) for public in ("__all__", *api.__all__)})
            if name in vars(self):
                return vars(self)[name]
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

        def __dir__(self):
            return sorted({*vars(self), *self.__all__})

        def __setattr__(self, name, value):
            # An import of the package mmlda.audit, or below it, would put the package in the function's place.
            super().__setattr__(name, value.audit if name == "audit" and isinstance(value, ModuleType) else value)

    sys.modules[__name__].__class__ = _Package
