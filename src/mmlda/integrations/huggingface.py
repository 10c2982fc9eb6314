"""Networks in Hugging Face's layout: `config.json`, `model.safetensors` and a model card, in a folder or on the Hub.

>>> import tempfile
>>> folder = tempfile.mkdtemp()
>>> HubClassifier.from_pretrained("mnist-mmlda").save_pretrained(folder)  # a network that ships
>>> HubClassifier.from_pretrained(folder).num_classes
10
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from torch import nn

from mmlda._utils.checks import invalid
from mmlda._utils.files import read_json, write_json, write_whole
from mmlda._utils.tensors import packed, read_tensors
from mmlda._utils.training_data import recall, remembered
from mmlda.models import Classifier
from mmlda.models.saved import fill, restore
from mmlda.zoo import about, load, names

try:
    from huggingface_hub import ModelCard, ModelCardData, ModelHubMixin, hf_hub_download
except ImportError:
    raise ImportError("Hugging Face's layout needs huggingface_hub: pip install 'mmlda[huggingface]'") from None

__all__ = ["HubClassifier"]


class HubClassifier(Classifier, ModelHubMixin, library_name="mmlda", pipeline_tag="image-classification"):
    """A `Classifier` with `save_pretrained`, `from_pretrained` and `push_to_hub`.

    Create one from your own network with `HubClassifier.of(model)`. Weights are read from safetensors only, never from
    a pickle.

    Attributes
    ----------
    card
        Facts for the model card: data, accuracy, recipe.

    Examples
    --------
    >>> HubClassifier.from_pretrained("mnist-mmlda").card["data"]
    'mnist'
    """

    card: dict[str, Any]

    @classmethod
    def of(cls, model: nn.Module, /, **card: Any) -> Self:
        """Wrap a network; the result shares its modules.

        Parameters
        ----------
        model
            A `Classifier` with a backbone of this package.
        **card
            Facts for the model card: `name`, `data`, `accuracy`, `test_images`, `recipe`.

        Returns
        -------
        HubClassifier
            The network, with `save_pretrained` and `push_to_hub`.

        Raises
        ------
        ValueError
            If `model` is not a `Classifier`.

        Examples
        --------
        >>> from mmlda.models import build
        >>> model = build({"backbone": "mlp", "inputs": 4, "num_classes": 3}, seed=0)
        >>> HubClassifier.of(model, data="iris").num_classes
        3
        """
        if not isinstance(model, Classifier):
            raise invalid("model", "a Classifier", type(model).__name__)
        hub = cls.__new__(cls)
        nn.Module.__init__(hub)
        hub.__dict__.update(model.__dict__)
        hub.card = card
        return hub

    def _save_pretrained(self, save_directory: Path) -> None:
        config = self.config  # before anything is written: it raises for a backbone it cannot describe
        write_whole(save_directory / "model.safetensors", packed(self.state_dict(), {"format": "pt"}))
        write_json(save_directory / "config.json", {**config, **remembered(self)})

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, **options: Any) -> Self:
        """Load a network in eval mode.

        Parameters
        ----------
        pretrained_model_name_or_path
            A folder, the name of a network that ships, or the id of a repository on the Hub.
        **options
            Passed to huggingface_hub, such as `revision` or `token`.

        Returns
        -------
        HubClassifier
            The network.

        Raises
        ------
        ValueError
            If the folder has no `config.json` or no `model.safetensors`, or one of them is damaged.
        """
        source = pretrained_model_name_or_path
        if str(source) in names() and not Path(source).is_dir():
            return cls.of(load(str(source)), **about(str(source))).eval()
        if (config := Path(source) / "config.json").is_file():
            read_json(config)  # raises if it is damaged
        return super().from_pretrained(source, **options)

    @classmethod
    def _from_pretrained(cls, *, model_id: str, config: dict[str, Any] | None = None, **options: Any) -> Self:
        if config is None:
            raise invalid("source", "a folder or repository with config.json and model.safetensors", model_id)
        path = Path(model_id) / "model.safetensors"
        if not Path(model_id).is_dir():
            path = Path(hf_hub_download(model_id, "model.safetensors", **options))
        elif not path.is_file():
            raise invalid("source", "a folder or repository with config.json and model.safetensors", model_id)
        network = {key: value for key, value in config.items() if key not in ("classes", "bounds")}
        weights = read_tensors(path)[0]
        model = restore(network, weights, path)
        if (dtype := weights["mean"].dtype) != model.mean.dtype:
            fill(model.to(dtype), weights, path)
        recall(model, config)
        return cls.of(model).eval()

    def generate_model_card(self, *args: Any, **facts: Any) -> ModelCard:
        """The model card, from `card` and from what is passed here."""
        card, config = {**getattr(self, "card", {}), **facts}, self.config
        table = config["backbone"] == "mlp"
        data = ModelCardData(
            library_name="mmlda",
            pipeline_tag="tabular-classification" if table else "image-classification",
            tags=["mmlda", "max-mahalanobis"],
            datasets=[card["data"]] if card.get("data") else None,
        )
        head = f"Max-Mahalanobis head, C = {config['C']:g}" if config["head"] == "mmlda" else "softmax head"
        rows = [("network", f"{config['backbone']}, {head}, {config['num_classes']} classes")]
        if card.get("data"):
            rows.append(("dataset", card["data"]))
        if card.get("accuracy") is not None:
            images = f" on {card['test_images']:,} images" if card.get("test_images") else ""
            rows.append(("test accuracy", f"{100 * card['accuracy']:.2f}%{images}"))
        if card.get("recipe"):
            settings = {key: value for key, value in card["recipe"].items() if value not in (None, 0, False, [])}
            rows.append(("recipe", ", ".join(f"{key} {value}" for key, value in settings.items())))
        body = "".join(f"| {name} | {value} |\n" for name, value in rows)
        inputs = "rows of numbers" if table else "images in [0, 1], [N, C, H, W],"
        code = (
            'from mmlda.integrations.huggingface import HubClassifier\n\nmodel = HubClassifier.from_pretrained("...")'
        )
        text = f"# {card.get('name', 'An mmlda network')}\n\nFrom {inputs} to logits.\n\n| | |\n|---|---|\n{body}"
        return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}\n```python\n{code}\n```\n")
