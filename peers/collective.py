"""Exchanges between GPUs in PyTorch: torch.distributed with NCCL, one process a GPU.

Each process captures some calls in a CUDA graph and replays it; the slower GPU counts, as in our
bench. NVLink multicast is off, as there. Our bench subtracts the cost of a replay and of events;
here it cancels in the difference between a graph of some calls and one of twice as many. A graph is
replayed again and again on a stream of its own: on the default stream, one after the other, 64 calls
of 8 KiB took 24 us each, not 6.5.

torch.distributed sums in place only and destroys its input; our rows keep theirs. In place, a sum
of 16 MiB is 4 % faster, also by ctypes. So one more peer copies the input before it sums, and one
calls the same NCCL through ctypes, from one tensor of PyTorch to another.
"""
import ctypes
import functools
import json
import os
import sys

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import common

# Work of the shorter graph, and the most calls in it.
GRAPH_NS, MOST_CALLS = 700e3, 50
SAMPLES = 31


# Numbers of NCCL's interface: elements, and the sum.
ELEMENTS = {torch.float32: 7, torch.bfloat16: 9}
SUM = 0


class UniqueId(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 128)]


class Nccl:
    """A communicator over all ranks, of the library that PyTorch uses."""

    def __init__(self, rank, ranks):
        import nvidia.nccl

        self.library = ctypes.CDLL(list(nvidia.nccl.__path__)[0] + "/lib/libnccl.so.2")
        identity, self.communicator = UniqueId(), ctypes.c_void_p()
        if rank == 0:
            self.check(self.library.ncclGetUniqueId(ctypes.byref(identity)))
        shared = torch.frombuffer(bytearray(bytes(identity)), dtype=torch.uint8).cuda()
        dist.broadcast(shared, src=0)
        ctypes.memmove(ctypes.byref(identity), bytes(shared.cpu().tolist()), 128)
        connect = self.library.ncclCommInitRank
        connect.argtypes = [ctypes.c_void_p, ctypes.c_int, UniqueId, ctypes.c_int]
        self.check(connect(ctypes.byref(self.communicator), ranks, identity, rank))
        count, kind, address = ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
        self.sum = self.library.ncclAllReduce
        self.sum.argtypes = [address, address, count, kind, kind, address, address]

    def check(self, status):
        if status != 0:
            raise RuntimeError(f"NCCL fails with {status}")

    def all_reduce(self, x, y):
        element, stream = ELEMENTS[x.dtype], torch.cuda.current_stream().cuda_stream
        addresses = (x.data_ptr(), y.data_ptr())
        self.check(self.sum(*addresses, x.numel(), element, SUM, self.communicator, stream))


def exchange(operation, tensors):
    x, y, rank = tensors["x"], tensors["y"], dist.get_rank()
    if operation == "all_reduce":
        return lambda: dist.all_reduce(y)
    if operation == "all_gather":
        return lambda: dist.all_gather_into_tensor(y, x)
    if operation == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(y, x)
    if operation == "broadcast":
        return lambda: dist.broadcast(y, src=0)
    if operation == "send":
        return (lambda: dist.send(x, 1)) if rank == 0 else (lambda: dist.recv(y, 0))
    raise ValueError(f"no operation {operation}")


def copy_and_sum(tensors):
    tensors["y"].copy_(tensors["x"])
    dist.all_reduce(tensors["y"])


def sizes(operation, elements, ranks):
    part = elements // ranks
    return {"all_gather": (part, elements), "reduce_scatter": (elements, part)}.get(
        operation, (elements, elements)
    )


def graph_of(call, calls, stream):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(calls):
            call()
    return graph


def time_ns(graph, stream):
    """The time of a replay on the slower GPU, behind a barrier of both."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    dist.barrier()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1_000_000)
        dist.all_reduce(time_ns.token)
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    elapsed = torch.tensor([begin.elapsed_time(end) * 1e6], device="cuda")
    dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
    return elapsed.item()


def typical_ns(call, calls, stream):
    """The median time of a graph of so many calls."""
    graph = graph_of(call, calls, stream)
    for _ in range(5):
        time_ns(graph, stream)
    return common.median([time_ns(graph, stream) for _ in range(SAMPLES)])


def measure(call):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(5):
            call()
    torch.cuda.synchronize()
    calls = max(3, min(MOST_CALLS, round(GRAPH_NS / (typical_ns(call, 4, stream) / 4))))
    return (typical_ns(call, 2 * calls, stream) - typical_ns(call, calls, stream)) / calls


def peers(problem, ranks, nccl):
    """Names of the peers of a problem, with their calls."""
    operation = problem["workload"].split("/")[1]
    dtype = common.DTYPES[problem["axes"]["dtype"]]
    elements = int(problem["axes"]["bytes"]) // dtype.itemsize
    sent, received = sizes(operation, elements, ranks)
    tensors = {
        "x": torch.randn(sent, device="cuda").to(dtype),
        "y": torch.zeros(received, device="cuda", dtype=dtype),
    }
    in_place = ", in place" if operation == "all_reduce" else ""
    yield "pytorch/nccl", f"torch.distributed{in_place}", exchange(operation, tensors)
    if operation == "all_reduce":
        about = "copy_, then torch.distributed in place"
        yield "pytorch/kept", about, lambda: copy_and_sum(tensors)
        call = lambda: nccl().all_reduce(tensors["x"], tensors["y"])
        yield "nccl/out_of_place", "ncclAllReduce, out of place", call


def rank_main(rank, ranks, problems):
    torch.cuda.set_device(rank)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29531")
    dist.init_process_group("nccl", rank=rank, world_size=ranks)
    time_ns.token = torch.zeros(1, device="cuda")
    dist.all_reduce(time_ns.token)
    nccl = functools.cache(lambda: Nccl(rank, ranks))
    version = ".".join(str(part) for part in torch.cuda.nccl.version())
    used = f"PyTorch {torch.__version__}, NCCL {version}, one process a GPU, in CUDA graphs"
    clock = common.SmClock()
    for problem in problems:
        for name, about, call in peers(problem, ranks, nccl):
            line = {"id": problem["id"], "peer": name, "about": f"{about}; {used}"}
            try:
                line.update(median_ns=measure(call), power=None, clock_mhz=clock.mhz())
            except Exception as error:  # One line an error: the other problems go on.
                line["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
            if rank == 0:
                common.say(**line)
    dist.destroy_process_group()


def main():
    problems = json.load(sys.stdin)
    available = torch.cuda.device_count()
    common.say(device=torch.cuda.get_device_name(0), torch=torch.__version__)
    by_ranks = {}
    for problem in problems:
        by_ranks.setdefault(int(problem["axes"]["g"]), []).append(problem)
    for ranks, some in by_ranks.items():
        if ranks > available:
            for problem in some:
                why = f"needs {ranks} GPUs, here are {available}"
                common.say(id=problem["id"], peer="pytorch/nccl", error=why)
            continue
        mp.spawn(rank_main, args=(ranks, some), nprocs=ranks, join=True)


if __name__ == "__main__":
    main()
