"""What the peer programs share: input, output, and timing on the GPU.

A program reads a JSON list of problems from standard input, {"id", "workload", "axes"} each. It
prints one JSON line for its environment, then one for each peer and problem: {"id", "peer",
"about", "median_ns"}, or {"id", "peer", "error"} where the peer cannot compute the problem.
"""
import json
import sys

import torch

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def say(**line):
    print(json.dumps(line), flush=True)


def median_ns(launch, samples=25, warm_up=5):
    """Median over launches, hot, each between two events.

    All are queued behind a kernel that sleeps, so that the host's time is hidden.
    """
    for _ in range(warm_up):
        launch()
    torch.cuda.synchronize()
    times = []
    while len(times) < samples:
        event = lambda: torch.cuda.Event(enable_timing=True)
        burst = [(event(), event()) for _ in range(5)]
        torch.cuda._sleep(20_000_000)
        for start, end in burst:
            start.record()
            launch()
            end.record()
        torch.cuda.synchronize()
        times += [start.elapsed_time(end) for start, end in burst]
    return sorted(times)[len(times) // 2] * 1e6


def main(peers):
    """Times every peer of every problem.

    `peers` yields (name, about, prepare) for a problem; `prepare()` returns what launches it once,
    verified as far as it can be.
    """
    if not torch.cuda.is_available():
        sys.exit("PyTorch finds no GPU")
    say(
        torch=torch.__version__,
        cuda=torch.version.cuda,
        cudnn=str(torch.backends.cudnn.version()),
        device=torch.cuda.get_device_name(),
    )
    for problem in json.load(sys.stdin):
        for name, about, prepare in peers(problem["workload"], problem["axes"]):
            try:
                elapsed = median_ns(prepare())
                say(id=problem["id"], peer=name, about=about, median_ns=elapsed)
            except Exception as error:  # A peer that cannot is a row, not the end.
                message = (str(error).strip() or repr(error)).splitlines()[0]
                say(id=problem["id"], peer=name, about=about, error=message)
            torch.cuda.empty_cache()
