"""Records traces with a planted cause each, for `kernelgate diagnose`.

    python3 peers/planted.py FOLDER

On two GPUs PyTorch's profiler records two ranks: a straggler, an exposed all-reduce, and one that
compute hides. On one GPU it records copies from pageable memory. Managed memory, which PyTorch's
profiler does not record, is recorded through CUPTI as a recording of kernelgate. `expected.json`
has the times that the program measured itself.
"""
import ctypes
import json
import os
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

STEPS, WARM_UP = 20, 5
# A product of 4096 x 4096 in bf16 takes about 0.2 ms on an H100.
SIZE, PRODUCTS = 4096, 8
SMALL, LARGE = 32 << 20, 512 << 20


def products(a, b, count):
    for _ in range(count):
        torch.mm(a, b)


def events(count):
    return [torch.cuda.Event(enable_timing=True) for _ in range(count)]


def recorded(step, path):
    """Runs a step until it is warm, then records STEPS of them; returns milliseconds of a step."""
    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities, record_shapes=True) as profiler:
        begin, end = events(2)
        begin.record()
        for _ in range(STEPS):
            step()
            profiler.step()
        end.record()
        torch.cuda.synchronize()
    profiler.export_chrome_trace(path)
    return begin.elapsed_time(end) / STEPS


def milliseconds(work, count=10):
    work()
    begin, end = events(2)
    begin.record()
    for _ in range(count):
        work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / count


def rank(number, ranks, folder):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "NCCL_NVLS_ENABLE": "0"}
    torch.cuda.set_device(number)
    dist.init_process_group("nccl", rank=number, world_size=ranks)
    a, b = (torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    small, large = (torch.ones(n // 4, device="cuda") for n in (SMALL, LARGE))

    def straggler():
        # The last rank computes three times as much.
        products(a, b, PRODUCTS * (3 if number == ranks - 1 else 1))
        dist.all_reduce(small)

    def exposed():
        products(a, b, PRODUCTS)
        dist.all_reduce(large)

    def hidden():
        work = dist.all_reduce(small, async_op=True)
        products(a, b, PRODUCTS)
        work.wait()

    measured = {"products_ms": milliseconds(lambda: products(a, b, PRODUCTS))}
    for name, tensor in (("small", small), ("large", large)):
        dist.barrier()
        measured[f"all_reduce_{name}_ms"] = milliseconds(lambda: dist.all_reduce(tensor))
    for step in (straggler, exposed, hidden):
        dist.barrier()
        path = f"{folder}/{step.__name__}-rank{number}.json.gz"
        measured[f"{step.__name__}_step_ms"] = recorded(step, path)
    with open(f"{folder}/.rank{number}.json", "w") as file:
        json.dump(measured, file)
    dist.destroy_process_group()


def pageable(folder):
    a, b = (torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    source = torch.ones(LARGE // 8, dtype=torch.uint8)
    target = torch.empty_like(source, device="cuda")

    def step():
        target.copy_(source, non_blocking=True)
        products(a, b, PRODUCTS)

    copy = milliseconds(lambda: target.copy_(source, non_blocking=True))
    return {"copy_ms": copy, "step_ms": recorded(step, f"{folder}/pageable.json.gz")}


def library(name):
    """A library that PyTorch has loaded."""
    with open("/proc/self/maps") as maps:
        paths = [line.split()[-1] for line in maps if f"/{name}" in line]
    if not paths:
        raise OSError(f"PyTorch has not loaded {name}")
    return ctypes.CDLL(paths[0])


RUNTIME, KERNEL, COUNTER = 5, 10, 25
TO_DEVICE, TO_HOST, CPU_FAULTS, GPU_FAULTS = 1, 2, 3, 4
# Copies of managed pages, as CUPTI's records and exports of Nsight Systems number them.
COPY_OF = {TO_DEVICE: 11, TO_HOST: 12}
MANAGED = 5
# Counters of this process on one device.
ONE_DEVICE = 1


class Cupti:
    """Kernels, calls, migrations and page faults of this process."""

    def __init__(self):
        self.api = library("libcupti.so")
        self.names, self.numbers, self.buffers = [], {}, {}
        self.kernels, self.calls, self.copies, self.faults = [], [], [], []
        pointer = ctypes.c_void_p
        give = ctypes.CFUNCTYPE(None, ctypes.POINTER(pointer), ctypes.POINTER(ctypes.c_size_t),
                                ctypes.POINTER(ctypes.c_size_t))
        take = ctypes.CFUNCTYPE(None, pointer, ctypes.c_uint32, pointer, ctypes.c_size_t,
                                ctypes.c_size_t)
        self.callbacks = give(self.give), take(self.take)
        self.check("cuptiActivityRegisterCallbacks", *self.callbacks)

    def check(self, function, *arguments):
        if status := getattr(self.api, function)(*arguments):
            raise RuntimeError(f"{function} failed with CUPTI's error {status}")

    def start(self):
        """Counters need the driver, and come before the first context."""
        config = (ctypes.c_uint32 * 16)(*(
            word
            for kind in (TO_DEVICE, TO_HOST, CPU_FAULTS, GPU_FAULTS)
            for word in (ONE_DEVICE, kind, 0, 1)
        ))
        self.check("cuptiActivityConfigureUnifiedMemoryCounter", config, 4)
        for kind in (COUNTER, RUNTIME, KERNEL):
            self.check("cuptiActivityEnable", kind)

    def now(self):
        stamp = ctypes.c_uint64()
        self.check("cuptiGetTimestamp", ctypes.byref(stamp))
        return stamp.value

    def stop(self, since):
        """Collects what is pending and keeps the records from a time on."""
        for forced in (0, 1):
            time.sleep(0.3)
            self.check("cuptiActivityFlushAll", forced)
        for kind in (RUNTIME, KERNEL, COUNTER):
            self.check("cuptiActivityDisable", kind)
        self.check("cuptiActivityFlushAll", 1)
        for records in (self.kernels, self.calls, self.copies, self.faults):
            records[:] = [record for record in records if record["start"] >= since]

    def give(self, buffer, size, records):
        memory = ctypes.create_string_buffer(8 << 20)
        self.buffers[ctypes.addressof(memory)] = memory
        buffer[0], size[0], records[0] = ctypes.addressof(memory), len(memory), 0

    def take(self, _context, _stream, buffer, _size, valid):
        record = ctypes.c_void_p()
        following = self.api.cuptiActivityGetNextRecord
        while following(ctypes.c_void_p(buffer), ctypes.c_size_t(valid), ctypes.byref(record)) == 0:
            self.add(record.value)
        self.buffers.pop(buffer, None)

    def name(self, text):
        if text not in self.numbers:
            self.numbers[text] = len(self.names)
            self.names.append(text)
        return self.numbers[text]

    def add(self, at):
        u32 = lambda offset: ctypes.c_uint32.from_address(at + offset).value
        u64 = lambda offset: ctypes.c_uint64.from_address(at + offset).value
        kind = u32(0)
        if kind == KERNEL:
            self.kernels.append({
                "name": self.name(ctypes.string_at(u64(104)).decode()), "start": u64(16),
                "end": u64(24), "on": {"device": u32(40), "context": u32(44), "stream": u32(48)},
                "grid": [u32(52), u32(56), u32(60)], "block": [u32(64), u32(68), u32(72)],
                "registers": ctypes.c_uint16.from_address(at + 6).value, "correlation": u32(92),
            })
        elif kind == RUNTIME:
            text = ctypes.c_char_p()
            self.api.cuptiGetCallbackName(2, u32(4), ctypes.byref(text))
            self.calls.append({
                "name": self.name((text.value or b"unknown").decode()), "start": u64(8),
                "end": u64(16), "thread": u32(28), "correlation": u32(32),
            })
        elif kind == COUNTER:
            counter, value, start, end = u32(4), u64(8), u64(16), u64(24)
            source, target = u32(40), u32(44)
            if counter in COPY_OF:
                device = target if counter == TO_DEVICE else source
                self.copies.append({
                    "start": start, "end": end, "bytes": value, "kind": COPY_OF[counter],
                    "source": MANAGED, "target": MANAGED, "on": {"device": device, "stream": 0},
                })
            elif counter in (CPU_FAULTS, GPU_FAULTS):
                fault = {"start": start, "end": max(end, start), "address": u64(32)}
                if counter == GPU_FAULTS:
                    fault |= {"count": value, "device": source}
                self.faults.append(fault)


class Managed:
    """Managed memory that PyTorch takes for a tensor."""

    def __init__(self, runtime, count):
        self.address = ctypes.c_void_p()
        if status := runtime.cudaMallocManaged(ctypes.byref(self.address), ctypes.c_size_t(4 * count), 1):
            raise RuntimeError(f"cudaMallocManaged failed with error {status}")
        self.__cuda_array_interface__ = {
            "shape": (count,), "typestr": "<f4", "data": (self.address.value, False), "version": 2,
        }


def managed(folder, steps=6, count=8 << 20):
    ctypes.CDLL("libcuda.so.1").cuInit(0)
    cupti = Cupti()
    cupti.start()
    torch.zeros(1, device="cuda")
    memory = Managed(library("libcudart.so"), count)
    tensor = torch.as_tensor(memory, device="cuda")
    ctypes.memset(memory.address, 0, 4 * count)
    tensor.add_(1)
    torch.cuda.synchronize()
    since, begin = cupti.now(), time.monotonic()
    for _ in range(steps):
        # The host takes the pages back, the kernel faults on each.
        ctypes.memset(memory.address, 0, 4 * count)
        tensor.add_(1)
        torch.cuda.synchronize()
    elapsed = (time.monotonic() - begin) * 1e3
    cupti.stop(since)
    properties = torch.cuda.get_device_properties(0)
    recording = {
        "schema": "kernelgate-recording", "schema_version": 1, "case": "planted/managed",
        "steps": steps,
        "device": {"id": 0, "name": properties.name,
                   "compute": [properties.major, properties.minor],
                   "multiprocessors": properties.multi_processor_count},
        "trace": {"pid": os.getpid(), "names": cupti.names, "kernels": cupti.kernels,
                  "calls": cupti.calls, "copies": cupti.copies, "page_faults": cupti.faults},
    }
    with open(f"{folder}/managed.json", "w") as file:
        json.dump(recording, file)
    moved = sum(copy["bytes"] for copy in cupti.copies)
    return {"step_ms": elapsed / steps, "bytes_moved": moved, "migrations": len(cupti.copies),
            "cpu_faults": sum("device" not in fault for fault in cupti.faults),
            "gpu_faults": sum(fault.get("count", 0) for fault in cupti.faults)}


def ranks(folder):
    count = min(torch.cuda.device_count(), 2)
    if count < 2:
        return {"error": "one GPU: no ranks were recorded"}
    torch.multiprocessing.spawn(rank, (count, folder), nprocs=count)
    measured = {}
    for number in range(count):
        path = f"{folder}/.rank{number}.json"
        with open(path) as file:
            measured[f"rank{number}"] = json.load(file)
        os.remove(path)
    return measured


CAUSES = {"managed": managed, "ranks": ranks, "pageable": pageable}


def main():
    folder, *causes = sys.argv[1:]
    if causes:
        print(json.dumps(CAUSES[causes[0]](folder)))
        return
    os.makedirs(folder, exist_ok=True)
    measured = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    for cause in CAUSES:
        # Each in a process of its own: a process has one client of CUPTI.
        command = [sys.executable, __file__, folder, cause]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = done.stdout.splitlines()
        if done.returncode == 0 and lines:
            measured[cause] = json.loads(lines[-1])
        else:
            measured[cause] = {"error": done.stderr[-2000:]}
        print(json.dumps({cause: measured[cause]}), flush=True)
    with open(f"{folder}/expected.json", "w") as file:
        json.dump(measured, file, indent=1)


if __name__ == "__main__":
    main()
