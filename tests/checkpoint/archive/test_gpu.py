"""Checkpoints of tensors on a GPU: the same bytes as on the CPU, in the order of the caller's stream."""

import io

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import torchobj
from tests.support.long_tables import GCS_IN_MATRIX
from tests.support.saved_objects import QUIET, load, random_tensor, same, save
from torchobj import exceptions
from torchobj.checkpoint import CheckpointManager, StorageReader, StorageWriter
from torchobj.checkpoint.archive import device_memory
from torchobj.checkpoint.state.rng import RngState
from torchobj.checkpoint.state.staging import _BLOCK_BYTES, Stager

pytestmark = [
    QUIET,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.providers("s3", GCS_IN_MATRIX),
]

#: Larger than all blocks, which are reused, and not divisible by one.
BLOCKS_BYTES = 32 << 20
LARGE = BLOCKS_BYTES + 12345

DTYPES = [
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "bool",
    "complex64",
    "complex128",
    "float8_e4m3fn",
    "float8_e5m2",
]


@pytest.fixture(autouse=True)
def few_blocks(monkeypatch):
    monkeypatch.setattr(device_memory, "BLOCKS_BYTES", BLOCKS_BYTES)


@pytest.fixture
def job():
    """A job of one rank with NCCL."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cuda", (1,))
    dist.destroy_process_group()


def packed(value):
    """The state on the CPU, with contiguous tensors."""
    if isinstance(value, torch.Tensor):
        return value.cpu().contiguous() if value.layout is torch.strided else value.cpu()
    if isinstance(value, dict):
        return {key: packed(inner) for key, inner in value.items()}
    return [packed(inner) for inner in value]


def zoo():
    """States on the CPU with a copy of each on the GPU."""
    base = torch.arange(float(_BLOCK_BYTES // 4 + 7))
    yield {name: random_tensor(getattr(torch, name), (5, 7)) for name in DTYPES}
    yield {"views": [base[:9], base[3::2], base], "empty": torch.zeros(0, 3), "number": torch.tensor(2.5)}
    yield {"transposed": torch.rand(300, 1000).t(), "expanded": torch.rand(1, 4).expand(3, 4)}
    yield {"conj": torch.rand(5, dtype=torch.complex64).conj(), "large": torch.rand(LARGE // 4)}
    yield {"coo": torch.eye(9).to_sparse(), "csr": torch.eye(9).to_sparse_csr()}


def moved(value, seen=None):
    """The state on the GPU. Views of one storage stay views of one storage."""
    seen = {} if seen is None else seen
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            return value.cuda()
        storage = value.untyped_storage()
        if storage._cdata not in seen:
            seen[storage._cdata] = storage.cuda()
        made = torch.empty(0, dtype=value.dtype, device="cuda")
        made.set_(seen[storage._cdata], value.storage_offset(), value.shape, value.stride())
        return made.conj() if value.is_conj() else made
    if isinstance(value, dict):
        return {key: moved(inner, seen) for key, inner in value.items()}
    if isinstance(value, list):
        return [moved(inner, seen) for inner in value]
    return value


def devices_of(value):
    if isinstance(value, torch.Tensor):
        return {value.device.type}
    inner = value.values() if isinstance(value, dict) else value
    return set().union(*map(devices_of, inner))


@pytest.mark.parametrize("number", range(5))
def test_a_file_loads_with_torch_and_with_torchobj_on_either_device(bucket, number):
    on_host = list(zoo())[number]
    save(bucket, moved(on_host))
    stock = torch.load(io.BytesIO(bucket.body("ckpt.pt")))
    assert devices_of(stock) == {"cuda"}
    for map_location, device in ((None, "cuda"), ("cpu", "cpu"), ("cuda:0", "cuda"), ({"cuda:0": "cpu"}, "cpu")):
        loaded = load(bucket, map_location=map_location)
        assert devices_of(loaded) == {device}
        # A copy to the CPU of a tensor with gaps has none.
        assert same(packed(stock), packed(loaded))
    save(bucket, on_host, "host.pt")
    assert same(packed(load(bucket, "host.pt", map_location="cuda")), packed(on_host))


def test_views_share_their_storage_after_a_load(bucket):
    base = torch.rand(1000, device="cuda")
    save(bucket, [base[:10], base])
    first, second = load(bucket)
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def test_tensors_of_both_devices_are_filled_in_place(bucket):
    saved = {
        "gpu": torch.rand(LARGE // 4),
        "cpu": torch.rand(1000),
        "strided": torch.rand(50, 40),
    }
    save(bucket, {name: tensor if name == "cpu" else tensor.cuda() for name, tensor in saved.items()})
    into = {
        "gpu": torch.zeros(LARGE // 4, device="cuda"),
        "cpu": torch.zeros(1000),
        "strided": torch.zeros(40, 50, device="cuda").t(),
    }
    addresses = {name: tensor.data_ptr() for name, tensor in into.items()}
    load(bucket, into=into)
    assert addresses == {name: tensor.data_ptr() for name, tensor in into.items()}
    assert all(torch.equal(into[name].cpu(), tensor) for name, tensor in saved.items())


def test_a_damaged_file_is_refused_on_the_gpu(bucket):
    tensor = torch.rand(LARGE // 4)
    save(bucket, {"x": tensor.cuda()})
    body = bytearray(bucket.body("ckpt.pt"))
    body[len(body) // 2] ^= 1
    bucket.write("ckpt.pt", bytes(body))
    with pytest.raises(exceptions.IntegrityError, match="x"):
        load(bucket)


@pytest.fixture
def busy():
    """A stream whose work takes long, and a tensor that it fills with 7 at its end."""
    tensor = torch.zeros(LARGE // 4, device="cuda")
    small = torch.zeros(100, device="cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1_000_000_000)
        tensor.fill_(7)
        small.fill_(7)
        yield {"x": tensor, "small": small}


def sevens(state):
    return all(bool((tensor == 7).all()) for tensor in state.values())


def test_a_save_includes_what_the_current_stream_still_computes(bucket, busy):
    torchobj.save(busy, f"{bucket.url}/x.pt", config=bucket.config)
    assert sevens(torchobj.load(f"{bucket.url}/x.pt", config=bucket.config))


@pytest.mark.parametrize("stage", [True, False])
def test_a_background_save_includes_what_the_current_stream_still_computes(bucket, busy, stage):
    with CheckpointManager(f"{bucket.url}/run", config=bucket.config) as manager:
        handle = manager.save_async(1, busy, stage=stage)
        if stage:
            busy["x"].zero_()
        handle.result()
        assert sevens(manager.restore())


def test_a_distributed_save_includes_what_the_current_stream_still_computes(bucket, busy):
    dcp.save(busy, storage_writer=StorageWriter(f"{bucket.url}/dcp", config=bucket.config))
    into = {name: torch.zeros_like(tensor) for name, tensor in busy.items()}
    dcp.load(into, storage_reader=StorageReader(f"{bucket.url}/dcp", config=bucket.config))
    assert sevens(into)


def test_a_load_overwrites_what_the_current_stream_still_computes(bucket, busy):
    torchobj.save(
        {name: torch.full_like(tensor, 3, device="cpu") for name, tensor in busy.items()},
        f"{bucket.url}/x.pt",
        config=bucket.config,
    )
    torchobj.load(f"{bucket.url}/x.pt", into=busy, config=bucket.config)
    assert all(bool((tensor == 3).all()) for tensor in busy.values())


def test_a_tensor_that_changes_during_a_save_without_a_copy_prevents_the_commit(open_manager, gate):
    manager, x = open_manager(), torch.ones(5, device="cuda")
    handle = manager.save_async(1, {"x": x}, stage=False)
    x.add_(1)
    gate.open.set()
    with pytest.raises(exceptions.CheckpointError, match="x was changed while"):
        handle.result()


def test_the_staged_copy_is_pinned_and_reused(bucket):
    stager, state = Stager(), {"x": torch.rand(LARGE // 4, device="cuda"), "cpu": torch.rand(_BLOCK_BYTES)}
    first = stager.stage(state)
    assert all(block.is_pinned() for block in stager._blocks)
    addresses = {block.data_ptr() for block in stager._blocks}
    state["x"].add_(1)
    second = stager.stage(state)
    assert addresses == {block.data_ptr() for block in stager._blocks}
    assert first.size == second.size
    torchobj.save(second, f"{bucket.url}/x.pt", config=bucket.config)
    # Loads on the CPU also where there is no GPU.
    loaded = torchobj.load(f"{bucket.url}/x.pt", config=bucket.config)
    assert (loaded["x"].device.type, torch.equal(loaded["x"], state["x"].cpu())) == ("cpu", True)


def training(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Dropout(0.5), torch.nn.Linear(512, 8)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    return model, optimizer


def steps(model, optimizer, count):
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.randn(32, 64, device="cuda")).square().mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("background", [False, True])
def test_training_resumes_with_the_same_weights_and_generators(bucket, background):
    model, optimizer = training(1)
    steps(model, optimizer, 3)
    with CheckpointManager(f"{bucket.url}/run", config=bucket.config) as manager:
        state = {"model": model, "optimizer": optimizer, "rng": RngState(), "step": 3}
        (manager.save_async if background else manager.save)(3, state)
        expected = steps(model, optimizer, 3)
        manager.wait()
        other, other_optimizer = training(2)
        restored = {"model": other, "optimizer": other_optimizer, "rng": RngState(), "step": 0}
        manager.restore(into=restored)
    assert restored["step"] == 3
    assert all(map(torch.equal, steps(other, other_optimizer, 3), expected))


@pytest.mark.parametrize("background", [False, True])
def test_a_sharded_model_of_fsdp_is_restored(bucket, job, background):
    def sharded(seed):
        model, _ = training(seed)
        for layer in model:
            fully_shard(layer, mesh=job)
        fully_shard(model, mesh=job)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    model, optimizer = sharded(1)
    steps(model, optimizer, 2)
    with CheckpointManager(f"{bucket.url}/run", sharded=True, config=bucket.config) as manager:
        (manager.save_async if background else manager.save)(2, {"model": model, "optimizer": optimizer})
        manager.wait()
        expected = [parameter.detach().full_tensor().clone() for parameter in model.parameters()]
        steps(model, optimizer, 1)
        other, other_optimizer = sharded(2)
        steps(other, other_optimizer, 1)
        manager.restore(into={"model": other, "optimizer": other_optimizer})
    assert all(isinstance(parameter, DTensor) for parameter in other.parameters())
    assert all(
        torch.equal(parameter.full_tensor(), value)
        for parameter, value in zip(other.parameters(), expected, strict=True)
    )


def test_distributed_checkpoints_of_a_gpu_load_on_both_devices(bucket, job):
    whole, number = torch.rand(LARGE // 4), torch.arange(12).reshape(3, 4)
    shards = distribute_tensor(whole.cuda()[: LARGE // 12 * 3].view(-1, 3), job, [Shard(0)])
    state = {"whole": whole.cuda(), "number": number.cuda().t(), "shards": shards, "half": whole[:1000].cuda().half()}
    dcp.save(state, storage_writer=StorageWriter(f"{bucket.url}/dcp", config=bucket.config))
    for device in ("cuda", "cpu"):
        into = {
            "whole": torch.zeros(LARGE // 4, device=device),
            "number": torch.zeros(4, 3, dtype=torch.int64, device=device),
            "half": torch.zeros(1000, dtype=torch.float16, device=device),
        }
        if device == "cuda":
            into["shards"] = torch.zeros_like(shards)
        dcp.load(into, storage_reader=StorageReader(f"{bucket.url}/dcp", config=bucket.config))
        assert torch.equal(into["whole"].cpu(), whole)
        assert torch.equal(into["number"].cpu(), number.t())
        assert torch.equal(into["half"].cpu(), whole[:1000].half())
        if device == "cuda":
            assert torch.equal(into["shards"].full_tensor(), shards.full_tensor())


def test_torch_stages_an_asynchronous_distributed_save(bucket, job):
    state = {"x": torch.full((LARGE // 4,), 7.0, device="cuda")}
    group = dist.new_group(backend="gloo")
    future = dcp.async_save(
        state, storage_writer=StorageWriter(f"{bucket.url}/dcp", config=bucket.config), process_group=group
    )
    state["x"].zero_()
    future.result()
    into = {"x": torch.zeros(LARGE // 4, device="cuda")}
    dcp.load(into, storage_reader=StorageReader(f"{bucket.url}/dcp", config=bucket.config), process_group=group)
    assert sevens(into)
