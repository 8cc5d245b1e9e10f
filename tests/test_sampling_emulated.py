"""The CUDA kernels of csrc/sm90/sampling_stream.h on the CPU (tests/emulated): the bytes of the torch reference."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from vocabshard import SamplingProgram, cuts
from vocabshard import sampling as S
from vocabshard.cuts import Block, Over
from vocabshard.dist.fold import fold
from vocabshard.kernels import cpu, sampling_torch
from vocabshard.kernels.problem import LocalProblem
from vocabshard.testing.compare import assert_same_bytes

ROOT = Path(__file__).parent.parent
CSRC, EMULATED = ROOT / "csrc", ROOT / "tests" / "emulated"
CXX = shutil.which(os.environ.get("CXX", "c++"))
FLAGS = "-std=c++17 -O1 -fPIC -fvisibility=hidden -ffp-contract=off -U_FORTIFY_SOURCE -w".split()
KERNELS = ("sampling_count", "sampling_list", "sampling_bracket", "sampling_collect", "sampling_stream")
INF, NAN = float("inf"), float("nan")

# ---- the library ----

# Shared memory belongs to a block: from declarations to what emulator.h has for it.
REWRITTEN = (
    (r"extern __shared__ __align__\(\d+\) (\w+) (\w+)\[\];", r"auto* const \2 = emulated::dynamic_shared<\1>();"),
    (r"__shared__ ([\w<>]+) (\w+)((?:\[\w+\])?);", r"auto& \2 = emulated::shared<\1\3>([] {});"),
)


def compile_one(source: Path, folder: Path) -> Path:
    """Its object; what lies in the folder stands for what csrc has of that name."""
    made = folder / f"{source.stem}.o"
    command = [str(CXX), *FLAGS, f"-I{folder}", f"-I{EMULATED}", f"-I{CSRC}", "-c", str(source), "-o", str(made)]
    subprocess.run(command, check=True, timeout=240)
    return made


def compile_kernel(name: str, folder: Path) -> Path:
    own = folder / "sm90" / f"{name}.cu"
    text = (own if own.exists() else CSRC / "sm90" / own.name).read_text()
    for declaration, instead in REWRITTEN:
        text = re.sub(declaration, instead, text)
    source = folder / f"{name}.cpp"
    source.write_text(text)
    return compile_one(source, folder)


def link(objects: list[Path], made: Path) -> Path:
    subprocess.run([str(CXX), "-shared", *map(str, objects), "-o", str(made)], check=True, timeout=60)
    return made


class Call(ctypes.Structure):
    """That of sampling.cpp; pointers are integers too."""

    FIELDS = (
        "logits rows row_stride valid vocab_start scales scale steps kinds numbers lns seed row_keys target_ids maxima "
        "partials rehearse hide lost fold order uncut cut drawn records logp lse decided_by listed noise"
    ).split()
    _fields_ = [(field, ctypes.c_double if field == "scale" else ctypes.c_int64) for field in FIELDS]


def load(made: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(made))
    library.emulate_sampling.restype = ctypes.c_char_p
    return library


@pytest.fixture(scope="session")
def objects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Compiled once for all workers."""
    if CXX is None:
        pytest.skip("no C++ compiler")
    session = tmp_path_factory.getbasetemp()
    folder = (session.parent if "PYTEST_XDIST_WORKER" in os.environ else session) / "emulated"
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "all").exists():
            for name in KERNELS:
                compile_kernel(name, folder)
            for source in EMULATED.glob("*.cpp"):
                compile_one(source, folder)
            link(list(folder.glob("*.o")), folder / "all")
    return {path.stem: path for path in (*folder.glob("*.o"), folder / "all")}


@pytest.fixture(scope="session")
def library(objects: dict[str, Path]) -> ctypes.CDLL:
    return load(objects["all"])


# ---- rows ----

KINDS = (
    "flat peaked steep one-peak ties equal ascending together many-groups more-equals far-apart nan inf none zeros "
    "lowest below too-large masked one-column last few-hundred thousands by-groups two-levels halves dozen half-of-all"
).split()


@functools.cache
def rows_of(V: int) -> Tensor:
    """A row of each kind."""
    g = torch.Generator().manual_seed(V)
    z = torch.randn(len(KINDS), V, generator=g)
    row = dict(zip(KINDS, z, strict=True))
    row["peaked"] *= 3
    row["steep"] *= 8
    row["one-peak"][V // 3] += 40
    row["ties"].copy_((2 * row["ties"]).round() / 2)
    row["equal"].fill_(0.0)
    row["ascending"].copy_(row["ascending"].sort().values)
    row["together"][V // 2 : V // 2 + 100] += 15
    row["many-groups"][:: max(1, V // 300)] += 11
    row["more-equals"][64 : 64 + 9000] = 7.0  # than are listed
    row["far-apart"] *= 1e4
    row["nan"][5] = NAN
    row["inf"][V // 2] = INF
    row["none"].fill_(-INF)
    row["zeros"][: V // 2], row["zeros"][V // 2 :] = -0.0, 0.0
    row["lowest"].mul_(30).sub_(2.0**20 - 100)
    row["below"].fill_(-(2.0**21))[V // 4] = -1.0
    row["too-large"].fill_(3e6)
    row["masked"][torch.rand(V, generator=g) < 0.4] = -INF
    row["one-column"].fill_(-INF)[V - 1] = 1.5
    row["last"].mul_(2)[V - 3 :] = 20.0
    row["few-hundred"][: 200 * (V // 200) : V // 200] += 14
    row["thousands"][64 : 64 + min(V // 2, 4000)] += 12
    row["by-groups"][::64] += 13
    row["two-levels"].copy_(torch.where(torch.rand(V, generator=g) < 0.01, 20.0, -20.0))
    row["dozen"][7 : V : max(1, V // 12)] += 9
    row["half-of-all"][5] = 11.0  # of 50304: this column
    row["halves"].fill_(-60.0)[: V // 128 * 128 : 64] = 9.0  # p = 0.5 falls between two of these equals
    return z


PROGRAMS = {
    **{f"top_k {k}": SamplingProgram.of(top_k=k) for k in (1, 50, 100, 256)},
    **{f"top_p {p}": SamplingProgram.of(top_p=p) for p in (0.3, 0.5, 0.95, 0.999, 1e-6)},
    "top_k top_p min_p": SamplingProgram((("top_k", 200), ("top_p", 0.8), ("min_p", 0.05))),
    "min_p top_k top_p": SamplingProgram((("min_p", 0.01), ("top_k", 50), ("top_p", 0.95))),
}
STEPS = ("top_k", "top_p", "min_p")
SEED = 1234567890123


class Shard(NamedTuple):
    vocab_start: int
    scale: float | Tensor


def shard_of(V: int) -> Shard:
    scales = torch.linspace(0.5, 2.0, len(KINDS))
    scales[KINDS.index("ties")] = NAN
    return {700: Shard(1024, scales), 5003: Shard(4, 1.25)}.get(V, Shard(0, 1.0))


class Expected(NamedTuple):
    usable: Tensor
    cut: Tensor
    drawn: Tensor  # arrival, token, order

    def of(self, some: slice) -> Expected:
        return Expected(self.usable[some], self.cut[some], self.drawn[:, some].contiguous())


@functools.cache
def expected_of(V: int, name: str) -> Expected:
    """By the torch reference; of long rows by the CPU's kernels, which test_sampling.py holds to the same bytes."""
    kernel, steps = sampling_torch.functions(sampling_torch if V < 10000 else cpu), PROGRAMS[name].steps
    vocab_start, scale = shard_of(V)
    blocks = [Block(rows_of(V), LocalProblem(vocab_start, V, None, False))]
    maxima = cuts.find_maxima(kernel, blocks, Over())
    usable = cuts.usable_rows(maxima, scale, steps)
    cut = cuts.find_cut(kernel, blocks, scale, steps, maxima, usable, Over())
    drawn = kernel.draw(*blocks[0], scale, cut, SEED, row_keys())
    nothing = torch.tensor([S.NO_ARRIVAL, -1, int(S.order_of(torch.tensor(-INF)))])
    return Expected(usable, cut, torch.where(usable, drawn, nothing[:, None]))


def row_keys() -> Tensor:
    return torch.arange(len(KINDS)) * 7 - 3


class Way(NamedTuple):
    """What a launch finds, and is asked for."""

    maxima: bool = True
    partials: bool = False  # of the rows, else their records
    rehearse: bool = False  # on a made-up row: the forward has not ended
    hide: bool = False  # what the forward writes, until a grid waits
    lost: bool = False  # and what it tells before its end
    fold: bool = False
    draw: bool = True
    order: int = 0  # of threads: ascending, descending, shuffled
    at_once: int = len(KINDS)  # rows


WAYS = {
    "partials": Way(partials=True, rehearse=True, hide=True),
    "few-rows": Way(partials=True, rehearse=True, hide=True, at_once=2),
    "lost": Way(partials=True, rehearse=True, hide=True, lost=True),
    "no-maxima": Way(maxima=False, hide=True, order=2),
    "fold": Way(partials=True, rehearse=True, hide=True, fold=True, order=2),
    "no-maxima-fold": Way(maxima=False, fold=True, order=1),
    "records": Way(hide=True, order=1),
    "no-maxima-no-draw": Way(maxima=False, draw=False),
    "no-draw": Way(partials=True, draw=False, order=2),
}
DECIDED_BY = ("few", "listed", "listed, all columns", "collected", "collected, all columns")
NOISE_WORDS, EARLY_BELOW = 2**13, 2**26  # of sampling_noise.cuh
UNWRITTEN = 0x5A5A5A5A5A5A5A5A


def emulate(library: ctypes.CDLL, V: int, name: str, way: Way) -> Counter[str]:
    """Compares all that the grids give. Returns what decided how many of the usable rows."""
    decided_by: Counter[str] = Counter()
    for first in range(0, len(KINDS), way.at_once):
        decided_by += emulate_some(library, V, name, way, slice(first, first + way.at_once))[0]
    return decided_by


def emulate_some(library: ctypes.CDLL, V: int, name: str, way: Way, some: slice) -> tuple[Counter[str], Tensor]:
    """And how many candidates were collected."""
    z, steps, expected = rows_of(V)[some], PROGRAMS[name].steps, expected_of(V, name).of(some)
    (vocab_start, scale), keys, rows = shard_of(V), row_keys()[some], len(z)
    if isinstance(scale, Tensor):
        scale = scale[some]
    problem = LocalProblem(vocab_start, V, None, False)
    padded = torch.nn.functional.pad(z, (0, -V % 4 + 4), value=NAN)
    targets = vocab_start + torch.arange(rows) * 31 % (V + 50) - 1  # some are no column's
    targets[::3] = expected.drawn[1, ::3]

    def new(*shape: int) -> Tensor:
        return torch.full(shape, UNWRITTEN)

    uncut = cpu.logits_forward(z, torch.full((rows,), -1), scale, problem)
    logp, lse = torch.zeros(2, rows)
    groups = torch.nn.functional.pad(z.nan_to_num(-INF, INF, -INF), (0, -V % 64), value=-INF).unflatten(1, (-1, 64))
    given = {
        "logits": padded,
        "maxima": groups.amax(2) if way.maxima else None,
        "scales": scale if isinstance(scale, Tensor) else None,
        "kinds": torch.tensor([STEPS.index(step.kind) for step in steps]),
        "numbers": torch.tensor([int(step.number) for step in steps]),
        "lns": torch.tensor([step.number for step in steps], dtype=torch.float64),
        "row_keys": keys,
        "target_ids": None if way.draw else targets,
    }
    results = {"cut": new(rows), "drawn": new(3, rows), "records": new(4, rows)}
    results |= {"decided_by": new(rows), "listed": new(rows)}
    folded = {"logp": logp, "lse": lse}
    noise = torch.zeros(rows, NOISE_WORDS, dtype=torch.int32)
    tensors = {**given, **results, **folded, "uncut": uncut.clone(), "noise": noise}
    call = Call(
        rows=rows,
        row_stride=padded.stride(0),
        valid=V,
        vocab_start=vocab_start,
        scale=1.0 if isinstance(scale, Tensor) else scale,
        steps=len(steps),
        seed=SEED,
        **{field: getattr(way, field) for field in ("partials", "rehearse", "hide", "lost", "fold", "order")},
        **{field: 0 if x is None else x.data_ptr() for field, x in tensors.items()},
    )
    failure = library.emulate_sampling(ctypes.byref(call)).decode()
    assert not failure, failure

    assert_same_bytes(results["cut"], expected.cut, "cut")
    assert_same_bytes(results["drawn"], expected.drawn if way.draw else new(3, rows), "arrival, token and order")
    ids = expected.drawn[1] if way.draw else targets
    records = cpu.logits_forward(z, ids, scale, problem, cut=expected.cut)
    assert_same_bytes(results["records"], new(4, rows) if way.fold else records, "record")
    if way.fold:
        scores = fold("cpu", records[None], ids, -100, vocab_start + V, "nan")
        assert_same_bytes(logp, scores.logp, "logp")
        assert_same_bytes(lse, scores.lse, "lse")
    if name.startswith("top_p") and way.draw:
        bits = (noise[:, :, None] >> torch.arange(32)).flatten(1)[:, :V] & 1 > 0
        words = sampling_torch.random_words(vocab_start + torch.arange(V), 0, SEED, keys)
        assert torch.equal(bits, words < EARLY_BELOW), "noise differs"
    return Counter(DECIDED_BY[i] for i in results["decided_by"][expected.usable].tolist()), results["listed"]


def cases() -> list[tuple[int, str, str]]:
    """Every program has four of the ways and all sizes, every way all sizes."""
    sizes, ways = (5003, 20032, 700), list(WAYS)
    each = [
        (sizes[(i + j) % 3], name, ways[(i + 2 * j) % len(ways)]) for i, name in enumerate(PROGRAMS) for j in range(4)
    ]
    halves = [(V, "top_p 0.5", "partials") for V in (5003, 20032)]  # of 78 and of 312 candidates
    halves += [(20032, "top_p 0.95", "lost")]
    return list(dict.fromkeys([*each, *halves, (50304, "top_p 0.95", "partials"), (50304, "top_k 50", "no-maxima")]))


@pytest.mark.parametrize(("V", "name", "way"), cases())
def test_rows_have_the_bytes_of_the_reference(library: ctypes.CDLL, V: int, name: str, way: str) -> None:
    emulate(library, V, name, WAYS[way])


@pytest.mark.parametrize(
    ("name", "way", "decided_by"),
    [
        ("top_k 50", "partials", {"few", "listed", "listed, all columns"}),
        ("top_k 50", "no-maxima", {"few", "listed", "listed, all columns"}),
        ("top_p 0.95", "partials", {"collected", "collected, all columns"}),
        ("top_p 0.95", "few-rows", {"few", "collected", "collected, all columns"}),
        ("top_p 0.95", "no-maxima", {"collected", "collected, all columns"}),
    ],
)
def test_rows_are_decided_in_every_way(library: ctypes.CDLL, name: str, way: str, decided_by: set[str]) -> None:
    assert set(emulate(library, 20032, name, WAYS[way])) == decided_by


@pytest.mark.parametrize(("V", "order"), [(20032, 2), (36000, 2), (50304, 0)])
def test_windows_are_narrow(library: ctypes.CDLL, V: int, order: int) -> None:
    """Also of a row whose estimated mass is less certain with its likeliest column than without: there two threads see
    an upper end, and it shows with shuffled threads which of them is taken."""
    way = Way(partials=True, rehearse=True, hide=True, order=order)
    _, listed = emulate_some(library, V, "top_p 0.95", way, slice(0, len(KINDS)))
    counts = {kind: int(listed[KINDS.index(kind)]) for kind in ("flat", "peaked", "dozen", "half-of-all")}
    assert all(1 <= count < 2500 for count in counts.values()), counts


@pytest.mark.parametrize(
    ("file", "text", "instead", "V", "name", "complaint"),
    [
        ("sampling_few.cuh", "  __syncthreads();\n  place = s.", "  place = s.", 5003, "top_k 1", "cut: .* differ"),
        ("sampling_few.cuh", "kept = min(kept, __", "if (i < count) kept = min(kept, __", 5003, "top_k 1", "wait"),
        ("sampling_list.cu", "      ptx::grid_wait();\n", "", 5003, "top_k 50", "cut: .* differ"),
        ("sampling_count.cu", "(real) wait_for_forward", "(false) wait_for_forward", 5003, "top_p 0.95", "differ"),
        ("sampling_window.cuh", "kept || c.with < 0.0f", "kept", 5003, "top_p 0.95", "record"),
        ("sampling_columns.cuh", "  if (all > 1) with = -1.0f;\n", "", 5003, "top_p 0.95", "record"),
        ("sampling_columns.cuh", "noisy >> at % 32u & kept", "0", 700, "top_p 0.95", "arrival"),
        ("sampling_columns.cuh", " | larger", "", 700, "top_p 0.95", "arrival"),
        ("sampling_columns.cuh", "last && count_ > 0", "false", 5003, "top_p 0.95", "arrival"),
        ("sampling_noise.cuh", "early >>= 4", "early >>= 3", 5003, "top_p 0.95", "arrival|noise"),
    ],
    ids=[
        "no barrier",
        "a barrier for some",
        "no wait for the forward",
        "nor here",
        "a tile's first",
        "several of a tile",
        "no columns of early noise",
        "nor of large terms",
        "nor the last ones",
        "noise of others",
    ],
)
def test_what_is_wrong_is_found(
    objects: dict[str, Path], tmp_path: Path, file: str, text: str, instead: str, V: int, name: str, complaint: str
) -> None:
    original = (CSRC / "sm90" / file).read_text()
    assert text in original
    (tmp_path / "sm90").mkdir()
    (tmp_path / "sm90" / file).write_text(original.replace(text, instead))
    changed = [name for name in KERNELS if name != "sampling_bracket"]  # templates are linked once
    others = [path for kernel, path in objects.items() if kernel not in (*changed, "all")]
    made = link([*others, *(compile_kernel(kernel, tmp_path) for kernel in changed)], tmp_path / "all")
    with pytest.raises(AssertionError, match=complaint):
        emulate(load(made), V, name, WAYS["partials"])
