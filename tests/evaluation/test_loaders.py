"""A `DataLoader` in `evaluate`, `audit` and `accuracy`: what is read, and what stays in memory."""

import itertools
import weakref

import pytest
import torch
from torch.utils.data import DataLoader

import mmlda
from mmlda import evaluate
from mmlda.attacks import PGD
from mmlda.data import stratified


class Reads(torch.utils.data.Dataset):
    """Counts what is read, and how much of it is still in memory."""

    def __init__(self, data, **listed):
        self.data, self.rows, self.alive, self.most = data, [], weakref.WeakSet(), 0
        vars(self).update(listed)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, row):
        self.rows.append(row)
        return self.data[row]

    def loader(self, **options):
        def collate(items):
            x, y = torch.utils.data.default_collate(items)
            self.alive.add(x)
            self.most = max(self.most, sum(map(len, self.alive)))
            return x, y

        return DataLoader(self, batch_size=7, collate_fn=collate, **options)


def test_a_loader_is_evaluated_batch_by_batch_as_from_memory(model, digits):
    part = digits[1].subset(slice(40))
    reads, attacks = Reads(part), [PGD(eps=0.1, steps=3, restarts=2), "fgsm:0.1"]
    streamed = evaluate(model, reads.loader(), attacks, temperature=digits[1], show=False)
    assert reads.rows == list(range(40)) and reads.most <= 14  # once each; one batch and the next
    whole = evaluate(model, part, attacks, temperature=digits[1], show=False)
    for one, other in zip(streamed.results, whole.results, strict=True):
        assert (one.value, one.n, one.name, one.attack) == (other.value, other.n, other.name, other.attack)
        assert one.data["sha256"] == part.digest() and one.data["images"] == 40
        assert one.numbers == pytest.approx(other.numbers, rel=1e-4)
    assert streamed.attacks[0].value < streamed.clean.value
    assert streamed.clean.series["per_class"] == whole.clean.series["per_class"]


@pytest.mark.parametrize("listed", ["targets", "labels", None])
def test_only_the_sample_of_a_loader_is_read(model, digits, listed):
    test = digits[1].subset(slice(200))
    reads = Reads(test, **({} if listed is None else {listed: test.labels}))
    wanted = stratified(test, 50)

    def audited(loader):
        return mmlda.audit(model, loader, eps=0.1, n=50, steps=2, queries=5, show=False)

    for measure in (
        lambda loader: evaluate(model, loader, n=50, show=False).clean.data["sha256"],
        lambda loader: mmlda.audit(model, loader, eps=0.1, n=50, steps=2, queries=5, show=False).about["data"][
            "sha256"
        ],
    ):
        reads.rows.clear()
        sha256 = measure(reads.loader())
        assert len(reads.rows) == 50 == len(set(reads.rows)) and (sha256 == wanted.digest()) == (listed is not None)
    reads.rows.clear()
    assert mmlda.accuracy(model, reads.loader(shuffle=True), n=30).n == 30 == len(reads.rows)
    assert any("50 of 200 images" in note for note in audited(reads.loader()).notes)


def test_a_stream_without_length_is_read_until_the_sample_is_full(model, digits):
    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):
            return (digits[1][k % 100] for k in itertools.count())

    assert evaluate(model, DataLoader(Endless(), batch_size=8), n=20, show=False).clean.n == 20


def test_string_labels_of_a_loader_need_the_names_of_the_classes(model, digits):
    items = [(digits[1][k][0], digits[1].classes[digits[1][k][1]]) for k in range(20)]
    for measure in (mmlda.accuracy, evaluate):
        with pytest.raises(ValueError, match="whose dataset has classes where labels are strings"):
            measure(lambda x: model(x), DataLoader(items, batch_size=5))  # without the network's class names
    assert evaluate(model, DataLoader(items, batch_size=5), show=False).clean.value == pytest.approx(
        mmlda.accuracy(model, digits[1].subset(slice(20))).accuracy
    )
