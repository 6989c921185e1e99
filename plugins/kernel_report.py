"""What nvcc reports of the kernels, and what they move and compute at the sizes of real models.

    python plugins/kernel_report.py PTXAS_LOG            # registers, spills and shared memory; fails on spills
    python plugins/kernel_report.py PTXAS_LOG --model    # the byte-and-flop model beside it
    python plugins/kernel_report.py --model              # the model alone

build_plugins.sh leaves the log beside the library. The model is arithmetic, not a measurement: bench_kernels measures.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

DTYPES = {"f": "float32", "NS_4HalfE": "float16", "NS_8BFloat16E": "bfloat16", "j": "32 bits", "t": "16 bits"}
ACCESS = {"0": "vector", "1": "scalar", None: "-"}
ENTRY = re.compile(r"Compiling entry function '(?P<symbol>\w+)' for 'sm_(?P<sm>\w+)'")
SYMBOL = re.compile(  # as the C++ compiler spells e.g. inject_kernel<Access::kVector, float>
    r"\d(?P<kernel>[a-z_]+)_kernelI(?:LNS_6AccessE(?P<access>[01])E)?(?P<dtype>NS_4HalfE|NS_8BFloat16E|[fjt])E"
)
SPILLS = re.compile(r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill")
USED = re.compile(r"Used (?P<registers>\d+) registers(?:.*?(?P<shared>\d+) bytes smem)?")

REGISTERS_PER_SM = 65536
MAX_THREADS = {"80": 2048, "90": 2048, "100": 2048}  # of a multiprocessor; 1536 on the others
PACK_BYTES = 16
PACKS_PER_THREAD = 4  # plugins/kernels/team.cuh


@dataclass(frozen=True)
class Usage:
    """What one kernel needs on one architecture."""

    kernel: str
    access: str
    dtype: str
    sm: str
    registers: int
    spilled: int
    shared: int

    @property
    def threads_per_sm(self) -> int:
        """Threads that a multiprocessor holds at once, as far as registers go (allocated by 256 a warp)."""
        per_warp = -(-self.registers * 32 // 256) * 256
        return min(REGISTERS_PER_SM // per_warp * 32, MAX_THREADS.get(self.sm, 1536))

    @property
    def kib_in_flight(self) -> float:
        """Bytes that those threads ask for before the first of them waits."""
        return self.threads_per_sm * PACK_BYTES * PACKS_PER_THREAD / 1024


def parse(log: str) -> list[Usage]:
    """One record for each kernel and architecture in the output of ``ptxas -v``."""
    found, entry, spilled = [], None, 0
    for line in log.splitlines():
        if match := ENTRY.search(line):
            entry = match
        elif match := SPILLS.search(line):
            spilled = sum(map(int, match.groups()))
        elif (match := USED.search(line)) and entry:
            needs = int(match["registers"]), spilled, int(match["shared"] or 0)
            found.append(Usage(*_name(entry["symbol"]), entry["sm"], *needs))
            entry = None
    return sorted(found, key=lambda u: (u.kernel, u.access == "scalar", u.dtype, int(u.sm)))


def _name(symbol: str) -> tuple[str, str, str]:
    """Kernel, access and values of a template; any other symbol as it is."""
    match = SYMBOL.search(symbol)
    return (match["kernel"], ACCESS[match["access"]], DTYPES[match["dtype"]]) if match else (symbol, "-", "-")


def print_usage(usages: list[Usage]) -> None:
    """A line a kernel; its registers on each architecture, the worst of the rest."""
    architectures = list(dict.fromkeys(u.sm for u in sorted(usages, key=lambda u: int(u.sm))))
    print(f"{'':8} {'':7} {'':9} registers on sm")
    print(f"{'kernel':8} {'access':7} {'values':9} {' '.join(f'{sm:>4}' for sm in architectures)} ", end="")
    print(f"{'spilled':>8} {'shared':>7} {'threads/SM':>10} {'KiB in flight/SM':>16}")
    for (kernel, access, dtype), group in groupby(usages, lambda u: (u.kernel, u.access, u.dtype)):
        found = {u.sm: u for u in group}
        registers = " ".join(f"{found[sm].registers if sm in found else '-':>4}" for sm in architectures)
        spilled, shared = (max(getattr(u, name) for u in found.values()) for name in ("spilled", "shared"))
        least = min(found.values(), key=lambda u: u.threads_per_sm)
        print(f"{kernel:8} {access:7} {dtype:9} {registers} {spilled:8} {shared:7} ", end="")
        in_flight = "-" if access == "-" else f"{least.kib_in_flight:.0f}"
        print(f"{least.threads_per_sm:10} {in_flight:>16}")
    print("threads/SM: as many as registers allow, on the architecture that allows the fewest")


@dataclass(frozen=True)
class Work:
    """What one call must move and compute at the least, whatever runs it."""

    kernel: str
    model: str
    batch: int
    read: int
    written: int
    flops: int

    @property
    def moved(self) -> int:
        return self.read + self.written


HIDDEN_SIZES = {"Qwen3-1.7B": 2048, "Qwen3-4B": 2560, "Qwen3-8B": 4096}
VOCABULARY = 151_936  # of all of them
BATCHES = (1, 4, 16, 64)
TAPS = 5  # of released drafters
BLOCK = 16
BANDWIDTHS = {"A100": 2.04e12, "H100": 3.35e12, "B200": 8.0e12}  # data sheets, bytes a second


def extract_work(model: str, batch: int) -> Work:
    """A verify pass in bfloat16, all rows live: every tap is read, every packed row written."""
    taps = batch * BLOCK * TAPS * HIDDEN_SIZES[model] * 2
    return Work("extract", model, batch, taps + 8 * batch, taps, 0)


def inject_work(model: str, batch: int) -> Work:
    """In float32, all but the anchor relayed: reads x, h, beta and gamma, and the norm once; writes the block."""
    size, on = HIDDEN_SIZES[model], batch * (BLOCK - 1)
    row = size * 4
    read = batch * BLOCK * (row + 8) + on * 3 * row + 2 * row
    # sum 1; deviation 1, its sum 1, its square 2; unit 3; weight and bias 2; beta and gamma 2; x 1
    return Work("inject", model, batch, read, batch * BLOCK * row, on * size * 13)


def sample_work(model: str, batch: int) -> Work:
    """A token for every row of a verify pass, from bfloat16 logits by temperature alone. In double precision."""
    rows = batch * BLOCK
    # difference to the peak 1, quotient 1, exponential 1 (some 20 of the processor's), steps 1, sum 1
    return Work("sample", model, batch, rows * (VOCABULARY * 2 + 64), rows * 8, rows * VOCABULARY * 5)


def print_model() -> None:
    print(
        f"{'kernel':8} {'model':11} {'batch':>5} {'read MB':>8} {'written MB':>10} {'Mflop':>7} {'flop/byte':>9} ",
        end="",
    )
    print(" ".join(f"{'us on ' + card:>11}" for card in BANDWIDTHS))
    for work_of, models in ((extract_work, HIDDEN_SIZES), (inject_work, HIDDEN_SIZES), (sample_work, ("Qwen3",))):
        for model in models:
            for batch in BATCHES:
                print_work(work_of(model, batch))
    print("us: bytes moved over the card's data-sheet bandwidth, a floor; below a few us a launch costs more")


def print_work(work: Work) -> None:
    print(f"{work.kernel:8} {work.model:11} {work.batch:5} {work.read / 1e6:8.2f} {work.written / 1e6:10.2f} ", end="")
    print(f"{work.flops / 1e6:7.2f} {work.flops / work.moved:9.2f} ", end="")
    print(" ".join(f"{work.moved / bandwidth * 1e6:11.2f}" for bandwidth in BANDWIDTHS.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path, nargs="?", help="what ptxas -v wrote")
    parser.add_argument("--model", action="store_true", help="print the byte-and-flop model")
    arguments = parser.parse_args()
    if arguments.model:
        print_model()
    if arguments.log is None:
        return
    usages = parse(arguments.log.read_text(encoding="utf-8"))
    print_usage(usages)
    if not usages:
        sys.exit(f"{arguments.log} reports no kernel")
    if spilled := sorted({f"{u.kernel} ({u.dtype}, {u.access}) on sm_{u.sm}" for u in usages if u.spilled}):
        sys.exit(f"registers are spilled to memory by {', '.join(spilled)}")


if __name__ == "__main__":
    main()
