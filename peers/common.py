"""What the peer programs share: input, output, and timing on the GPU.

A program reads a JSON list of problems from standard input, {"id", "workload", "axes"} each. It
prints one JSON line for its environment, then one for each peer and problem: {"id", "peer",
"about", "median_ns", "power", "clock_mhz"}, or {"id", "peer", "error"} where the peer cannot compute
the problem.
"""
import contextlib
import ctypes
import json
import math
import mmap
import signal
import sys
import time

import torch

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}

# All compilation ends so long after the start, so that a program takes about a minute.
START = time.monotonic()
COMPILE_SECONDS = 50

# The steady state of the benches: see measure/power.rs.
WINDOW_NS = 100e6  # Windows that must agree.
AGREEMENT = 0.015
LEAST_LOAD_NS = 150e6
MOST_LOAD_NS = 1e9
SAMPLED_NS = 200e6
LEAST_SAMPLES = 25


def say(**line):
    print(json.dumps(line), flush=True)


def read_safetensors(path):
    """Tensors of a file by name, and its metadata: a length, a JSON header, the data."""
    types = {"F32": torch.float32, "F64": torch.float64, "I8": torch.int8, "BF16": torch.bfloat16}
    with open(path, "rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, entry in header.items():
        dtype, offset = types[entry["dtype"]], start + entry["data_offsets"][0]
        count = math.prod(entry["shape"])
        flat = torch.frombuffer(data, dtype=dtype, count=count, offset=offset)
        tensors[name] = flat.reshape(entry["shape"])
    return tensors, metadata


class SmClock:
    """SM clock of the current device, MHz, through NVML; None without NVML."""

    def __init__(self):
        self.nvml = self.device = None
        try:
            nvml = ctypes.CDLL("libnvidia-ml.so.1")
            uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
            uuid = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
            device = ctypes.c_void_p()
            if nvml.nvmlInit_v2() == 0 and (
                nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(device)) == 0
            ):
                self.nvml, self.device = nvml, device
        except (OSError, AttributeError):
            pass

    def mhz(self):
        clock = ctypes.c_uint()
        sm = 1
        if self.nvml and self.nvml.nvmlDeviceGetClockInfo(self.device, sm, ctypes.byref(clock)) == 0:
            return float(clock.value)
        return None


class Burst:
    """Launches in a row. Each burst is queued while the one before still runs, so that the GPU does
    not pause, as it does not in our bench. Only where the host needs longer than the GPU,
    a burst waits behind a kernel that sleeps, which hides the host's time.
    """

    def __init__(self, launch):
        for _ in range(5):
            launch()
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        launch()
        host_ns = time.perf_counter_ns() - start
        torch.cuda.synchronize()
        launch_ns = time.perf_counter_ns() - start
        self.launch = launch
        # About 20 ms of work, so that the pauses between bursts are a small share of the time.
        self.count = max(5, min(200, round(20e6 / max(launch_ns, 1))))
        self.sleep_cycles = int(max(1e6, min(100e6, 3.0 * host_ns * self.count)))
        self.host_is_slower = 2 * host_ns > launch_ns
        self.queued = self.enqueue()

    def enqueue(self):
        event = lambda: torch.cuda.Event(enable_timing=True)
        events = [(event(), event()) for _ in range(self.count)]
        if self.host_is_slower:
            torch.cuda._sleep(self.sleep_cycles)
        for start, end in events:
            start.record()
            self.launch()
            end.record()
        return events

    def times_ns(self, clock):
        """Nanoseconds of each launch of a burst, and the SM clock while they run."""
        events, self.queued = self.queued, self.enqueue()
        events[self.count // 2][1].synchronize()
        mhz = clock.mhz()
        events[-1][1].synchronize()
        return [start.elapsed_time(end) * 1e6 for start, end in events], mhz


def median(numbers):
    return sorted(numbers)[len(numbers) // 2]


def steady(launch):
    """Median time of a launch, hot, in the power state that the card sustains under this load.

    The load runs until two windows agree, then as long as samples need.
    """
    burst, clock = Burst(launch), SmClock()
    load_ns, window, before, settled = 0.0, [], None, False
    while load_ns < MOST_LOAD_NS and not (settled and load_ns >= LEAST_LOAD_NS):
        times, _ = burst.times_ns(clock)
        load_ns += sum(times)
        window += times
        if sum(window) >= WINDOW_NS:
            mean = sum(window) / len(window)
            settled = before is not None and abs(mean / before - 1.0) <= AGREEMENT
            before, window = mean, []
    samples, clocks = [], []
    while len(samples) < LEAST_SAMPLES or sum(samples) < SAMPLED_NS:
        times, mhz = burst.times_ns(clock)
        samples += times
        clocks += [mhz] if mhz else []
    torch.cuda.synchronize()
    return {
        "median_ns": median(samples),
        "power": "steady" if settled else "unsettled",
        "clock_mhz": median(clocks) if clocks else None,
    }


@contextlib.contextmanager
def within(seconds):
    """Raises TimeoutError in what takes longer.

    The signal is sent again each second, because a library may swallow the first. Errors become one
    line; what the code prints goes to standard error, so that it is not taken for a result.
    """
    left = min(seconds, START + COMPILE_SECONDS - time.monotonic())
    if left < 1:
        raise TimeoutError(f"not compiled: the program's {COMPILE_SECONDS} s are spent")
    late = []

    def stop(*_):
        late.append(True)
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, left, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except Exception as error:
        if late:
            raise TimeoutError(f"not compiled within {left:.0f} s") from error
        raise RuntimeError(" ".join(str(error).split())[:200] or repr(error)) from error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def captured(run):
    """A graph of it, and the output that a replay writes."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph, out


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
                say(id=problem["id"], peer=name, about=about, **steady(prepare()))
            except Exception as error:  # A peer that cannot is a row, not the end.
                message = (str(error).strip() or repr(error)).splitlines()[0]
                say(id=problem["id"], peer=name, about=about, error=message)
            torch.cuda.empty_cache()
