"""A head under DistributedDataParallel."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F

from mmlda.models.heads import MaxMahalanobisHead


def leave():
    """End a process when the other has stopped talking too; gloo's threads sometimes abort an orderly end."""
    dist.barrier()
    os._exit(0)


def ddp_worker(rank, folder):
    """One of two processes: a Classifier under DDP on its half of a batch, one SGD step a loss."""
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    model = classifier(seed=rank)  # different weights: DDP takes rank 0's
    if rank:
        model.head.means.zero_()  # and rank 0's buffers
    x, y = batch()
    step(DistributedDataParallel(model), model, x[rank::2], y[rank::2])
    if rank == 1:
        torch.save(model.state_dict(), f"{folder}/rank1.pt")
    leave()


def classifier(seed):
    from mmlda.models import Classifier, conv_net

    torch.manual_seed(seed)
    head = MaxMahalanobisHead(num_classes=4, dim=6, C=2.0, priors=[0.4, 0.3, 0.2, 0.1])
    return Classifier(conv_net(width=4, batch_norm=False), head)


def batch():
    generator = torch.Generator().manual_seed(0)
    return torch.rand(8, 1, 8, 8, generator=generator), torch.arange(8) % 4


def step(call, model, x, y):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        # two forward passes, one backward: DDP rewrites the buffers in between
        loss = F.cross_entropy(call(x), y) + F.cross_entropy(call(1 - x), y)
        loss.backward()
        optimizer.step()


def test_ddp_of_two_processes_trains_the_network_of_one(tmp_path):
    torch.multiprocessing.spawn(ddp_worker, args=(str(tmp_path),), nprocs=2)
    model, start = classifier(seed=0), classifier(seed=0)
    x, y = batch()
    step(model, model, x, y)
    found = torch.load(tmp_path / "rank1.pt", weights_only=True)
    assert set(found) == set(model.state_dict())
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    moved = [name for name, value in start.state_dict().items() if not torch.equal(value, found[name])]
    assert moved == [name for name, _ in model.named_parameters()]  # all of the network, none of the head


class Streamed(torch.nn.Module):
    """The streamed loss of a network whose head has no matrix of means."""

    def __init__(self, seed):
        from mmlda.models import Classifier, conv_net
        from mmlda.models.heads import max_mahalanobis

        super().__init__()
        max_mahalanobis.PLAIN = 0
        torch.manual_seed(seed)
        self.model = Classifier(conv_net(width=4, batch_norm=False), MaxMahalanobisHead(281, 20, C=2.0))
        max_mahalanobis.PLAIN = 1 << 19
        assert self.model.head.structured

    def forward(self, x, y):
        return self.model.head.loss(self.model.features(x), y)

    def train_on(self, call, x, y):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            (call(x, y) + call(1 - x, y)).backward()
            optimizer.step()


def streamed_worker(rank, folder):
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    module = Streamed(seed=rank)
    if rank:
        module.model.head.signs.zero_()  # DDP takes rank 0's
    x, y = batch()
    module.train_on(DistributedDataParallel(module), x[rank::2], y[rank::2] * 70)
    if rank == 1:
        torch.save(module.state_dict(), f"{folder}/rank1.pt")
    leave()


def test_ddp_with_a_streamed_loss(tmp_path):
    torch.multiprocessing.spawn(streamed_worker, args=(str(tmp_path),), nprocs=2)
    module = Streamed(seed=0)
    x, y = batch()
    module.train_on(module, x, y * 70)
    found = torch.load(tmp_path / "rank1.pt", weights_only=True)
    for name, value in module.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
