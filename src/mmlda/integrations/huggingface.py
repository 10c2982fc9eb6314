"""Networks in Hugging Face's layout: `config.json`, `model.safetensors` and a model card, in a folder or on the Hub.

>>> import tempfile
>>> folder = tempfile.mkdtemp()
>>> HubClassifier.from_pretrained("mnist-mmlda").save_pretrained(folder)  # a network that ships
>>> HubClassifier.from_pretrained(folder).num_classes
10
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from mmlda._utils.checks import check_choice, invalid
from mmlda._utils.files import read_json, write_json, write_whole
from mmlda._utils.settings import typed
from mmlda._utils.tensors import packed, tensors_digest
from mmlda._utils.training_data import remembered
from mmlda.models import Classifier
from mmlda.zoo import about, load, names, trained_on

try:
    from huggingface_hub import ModelCard, ModelCardData, ModelHubMixin, snapshot_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )
    from huggingface_hub.utils import validate_repo_id
except ImportError:
    raise ImportError("Hugging Face's layout needs huggingface_hub: pip install 'mmlda[huggingface]'") from None

__all__ = ["HubClassifier"]

FACTS: dict[str, Any] = {"name": str, "data": str, "accuracy": float, "test_images": int, "recipe": dict[str, Any]}
MEASURED = ("accuracy", "test_images", "recipe")  # facts that hold for one set of weights only
KEPT: dict[str, Any] = {"classes": Sequence[str], "bounds": Sequence[Sequence[float]]}  # in config.json
OPTIONS = ("device", "revision", "token", "cache_dir", "force_download", "local_files_only")
CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "card.json"


class HubClassifier(Classifier, ModelHubMixin, library_name="mmlda", pipeline_tag="image-classification"):
    """A `Classifier` with `save_pretrained`, `from_pretrained` and `push_to_hub`.

    Create one from your own network with `HubClassifier.of(model)`. Weights are read from safetensors only, never from
    a pickle, and the network computes in float32, as with `mmlda.load`.

    Attributes
    ----------
    card
        Facts for the model card, as in `of`; they are kept in the folder's `card.json`. `accuracy`, `test_images` and
        `recipe` are not written, with a warning, if the weights or priors have changed since.

    Examples
    --------
    >>> HubClassifier.from_pretrained("mnist-mmlda").card["data"]
    'mnist'
    """

    _described: str | None = None  # digest of the weights that the card describes; None if not known

    def __init__(self, backbone: nn.Module, head: nn.Module, **settings: Any):
        super().__init__(backbone, head, **settings)
        self.card: dict[str, Any] = {}

    @classmethod
    def of(cls, model: nn.Module, /, **card: Any) -> Self:
        """Wrap a network; the result shares its modules.

        Parameters
        ----------
        model
            A `Classifier` with a backbone of this package.
        **card
            Facts for the model card: `name`, `data`, `accuracy` in [0, 1], `test_images`, `recipe` (a dictionary).

        Returns
        -------
        HubClassifier
            The network, with `save_pretrained` and `push_to_hub`.

        Raises
        ------
        ValueError
            If `model` is not a `Classifier`, or a fact is unknown, of another type or out of range.

        Examples
        --------
        >>> from mmlda.models import build
        >>> model = build({"backbone": "mlp", "inputs": 4, "num_classes": 3}, seed=0)
        >>> HubClassifier.of(model, data="iris").num_classes
        3
        """
        if not isinstance(model, Classifier):
            raise invalid("model", "a Classifier", type(model).__name__)
        for fact in card:
            check_choice("fact", fact, FACTS)
        _check(FACTS, card)
        hub = cls.__new__(cls)
        nn.Module.__init__(hub)
        hub.__dict__.update(model.__dict__)
        hub.card, hub._described = card, _digest(model) if card else None
        return hub

    def save_pretrained(
        self,
        save_directory: str | Path,
        *,
        repo_id: str | None = None,
        model_card_kwargs: dict[str, Any] | None = None,
        **options: Any,
    ) -> str | None:
        """Write `config.json`, `model.safetensors`, `README.md` and, if there are facts, `card.json`.

        Parameters
        ----------
        save_directory
            Folder; a network and a model card of this package in it are replaced.
        repo_id
            Id of the repository on the Hub, for the model card.
        model_card_kwargs
            More facts for the model card.
        **options
            Those of huggingface_hub, such as `push_to_hub`.

        Returns
        -------
        str or None
            Address of the commit, with `push_to_hub`.

        Raises
        ------
        ValueError
            If the backbone is not one of this package, or a fact is of another type or out of range.
        """
        facts = {"repo_id": repo_id, **(model_card_kwargs or {})}
        _check(FACTS, {**self.card, **facts})
        return super().save_pretrained(save_directory, repo_id=repo_id, model_card_kwargs=facts, **options)

    def push_to_hub(self, repo_id: str, *, model_card_kwargs: dict[str, Any] | None = None, **options: Any) -> str:
        """Upload the network to the Hub.

        Parameters
        ----------
        repo_id
            Id of the repository, such as "user/network".
        model_card_kwargs
            More facts for the model card.
        **options
            Those of huggingface_hub, such as `private` or `token`.

        Returns
        -------
        str
            Address of the commit.
        """
        facts = {**(model_card_kwargs or {}), "repo_id": repo_id}
        return super().push_to_hub(repo_id, model_card_kwargs=facts, **options)

    def _save_pretrained(self, save_directory: Path) -> None:
        config = self.config  # before anything is written: it raises for a backbone it cannot describe
        readme = save_directory / "README.md"
        if readme.is_file() and "library_name: mmlda" in readme.read_text(errors="replace"):
            readme.unlink()  # huggingface_hub keeps an existing card, also that of another network
        write_whole(save_directory / WEIGHTS, packed(self.state_dict(), {"format": "pt"}))
        write_json(save_directory / CONFIG, {**config, **remembered(self)})
        facts = self._current()
        if stale := [fact for fact in self.card if fact not in facts]:
            text = "the network has changed since its card was made, so the card leaves out"
            warnings.warn(f"{text} {', '.join(stale)}; HubClassifier.of(model, ...) takes new facts", stacklevel=4)
        if facts:
            write_json(save_directory / CARD, facts)
        else:
            (save_directory / CARD).unlink(missing_ok=True)

    def _current(self) -> dict[str, Any]:
        """`card`, without what was measured on other weights."""
        if self._described is None or self._described == _digest(self):
            return self.card
        return {fact: value for fact, value in self.card.items() if fact not in MEASURED}

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | Path, *, device: torch.device | str | None = None, **options: Any
    ) -> Self:
        """Load a network in eval mode and in float32.

        Parameters
        ----------
        pretrained_model_name_or_path
            A folder (of `save_pretrained`, `mmlda.save` or a training run), the name of a network that ships, or the id
            of a repository on the Hub.
        device
            Where to put the network (default: the CPU).
        **options
            For the Hub: `revision`, `token`, `cache_dir`, `force_download` or `local_files_only`.

        Returns
        -------
        HubClassifier
            The network.

        Raises
        ------
        ValueError
            If there is no such network, its files are damaged, an option is unknown, or `device` is not available.
        """
        for option in options:
            check_choice("option", option, OPTIONS)
        source = pretrained_model_name_or_path
        if str(source) in names() and not Path(source).is_dir():
            facts = {key: value for key, value in about(str(source)).items() if key in FACTS}
            return cls.of(load(str(source), device=device), **facts).eval()
        folder = _folder(source, **options)
        config = _read(folder / CONFIG, KEPT)
        model = load(folder, device=device)
        if "classes" in config and len(config["classes"]) != model.num_classes:
            raise invalid(f"{folder / CONFIG}: classes", f"{model.num_classes} names", config["classes"])
        data = (trained_on(folder) or {}).get("name")
        return cls.of(model, **_read(folder / CARD, FACTS) or ({"data": data} if data else {})).eval()

    def generate_model_card(self, *args: Any, **facts: Any) -> ModelCard:
        """The model card, from `card` and from what is passed here."""
        card, config = {**self._current(), **facts}, self.config
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
        if table and self.bounds is not None:
            columns = self.bounds.shape[1]
            inputs = f"rows [N, {columns}] in [0, 1], each column scaled by its `bounds` in `config.json`,"
        source = card.get("repo_id") or "..."
        code = "from mmlda.integrations.huggingface import HubClassifier\n\n"
        code += f'model = HubClassifier.from_pretrained("{source}")'
        text = f"# {card.get('name', 'An mmlda network')}\n\nFrom {inputs} to logits.\n\n| | |\n|---|---|\n{body}"
        return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}\n```python\n{code}\n```\n")


def _folder(source: str | Path, **options: Any) -> Path:
    """The folder of a network, downloaded if `source` is the id of a repository; a ValueError if it has no network."""
    folder = Path(source)
    if not folder.exists() and isinstance(source, str) and _is_repo_id(source):
        try:
            folder = Path(snapshot_download(source, allow_patterns=[CONFIG, WEIGHTS, CARD], **options))
        except (RepositoryNotFoundError, RevisionNotFoundError, EntryNotFoundError) as error:
            here = isinstance(error, LocalEntryNotFoundError)
            why = "not downloaded yet, and the Hub was not reached" if here else "the Hub has none that you may read"
            raise _no_network(source, f" ({why})") from error
    if not any((folder / name).is_file() for name in (WEIGHTS, "run.json")):
        raise _no_network(source)
    return folder


def _no_network(source: str | Path, why: str = "") -> ValueError:
    got = f"{str(source)!r}{why}"
    return ValueError(f"source must be a folder or repository with config.json and model.safetensors, got {got}")


def _is_repo_id(source: str) -> bool:
    try:
        validate_repo_id(source)
    except ValueError:  # a path, such as "./network"
        return False
    return True


def _digest(model: nn.Module) -> str | None:
    """SHA-256 of a network's weights in float32, in which they are loaded; None on the meta device, which has none."""
    weights = model.state_dict()
    if any(tensor.is_meta for tensor in weights.values()):
        return None
    return tensors_digest({name: t.float() if t.is_floating_point() else t for name, t in weights.items()})


def _check(types: dict[str, Any], values: dict[str, Any]) -> None:
    """Raise a ValueError for an entry of another type, or an accuracy that is not a share."""
    typed(types, values)
    if "accuracy" in values and not 0 <= values["accuracy"] <= 1:  # NaN, too
        raise invalid("accuracy", "in [0, 1]", values["accuracy"])


def _read(path: Path, types: dict[str, Any]) -> dict[str, Any]:
    """The entries of these names and types in a JSON file; none if there is no file."""
    if not path.is_file():
        return {}
    values = {key: value for key, value in read_json(path).items() if key in types}
    try:
        _check(types, values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return values
