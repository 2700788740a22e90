"""Exchanges between GPUs in PyTorch: torch.distributed with NCCL, one process a GPU.

Each process captures some calls in a CUDA graph and replays it; the slower GPU counts, as in our
bench. NVLink multicast is off, as there. Our bench subtracts the cost of a replay and of events;
here it cancels in the difference between a graph of some calls and one of twice as many. A graph is
replayed again and again on a stream of its own: on the default stream, one after the other, 64 calls
of 8 KiB took 24 us each, not 6.5.
"""
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


def exchange(operation, tensors):
    x, y, rank = tensors["x"], tensors["y"], dist.get_rank()
    if operation == "all_reduce":
        # In place: PyTorch offers no other form.
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


def measure(problem, ranks):
    operation = problem["workload"].split("/")[1]
    dtype = common.DTYPES[problem["axes"]["dtype"]]
    elements = int(problem["axes"]["bytes"]) // dtype.itemsize
    sent, received = sizes(operation, elements, ranks)
    tensors = {
        "x": torch.randn(sent, device="cuda").to(dtype),
        "y": torch.zeros(received, device="cuda", dtype=dtype),
    }
    call = exchange(operation, tensors)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(5):
            call()
    torch.cuda.synchronize()
    calls = max(3, min(MOST_CALLS, round(GRAPH_NS / (typical_ns(call, 4, stream) / 4))))
    return (typical_ns(call, 2 * calls, stream) - typical_ns(call, calls, stream)) / calls


def rank_main(rank, ranks, problems):
    torch.cuda.set_device(rank)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29531")
    dist.init_process_group("nccl", rank=rank, world_size=ranks)
    time_ns.token = torch.zeros(1, device="cuda")
    version = ".".join(str(part) for part in torch.cuda.nccl.version())
    about = f"PyTorch {torch.__version__}, NCCL {version}, one process a GPU, in CUDA graphs"
    clock = common.SmClock()
    for problem in problems:
        line = {"id": problem["id"], "peer": "pytorch/nccl"}
        try:
            median_ns = measure(problem, ranks)
            line.update(about=about, median_ns=median_ns, power=None, clock_mhz=clock.mhz())
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
