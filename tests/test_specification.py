"""The softmax layer: C++ equals the torch specification byte for byte, is order-free, and is as accurate as stated."""

from __future__ import annotations

import itertools
import random
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from vocabshard import _C, contract
from vocabshard.kernels import cpu
from vocabshard.kernels.problem import LocalProblem
from vocabshard.testing import specification
from vocabshard.testing.compare import assert_same_bytes, differing
from vocabshard.testing.inputs import hard_rows, near_tie_chains, stacked_hard_rows


def compiled(
    y: Tensor, target: Tensor, entropy: bool, order: list[int] | None = None, splits: list[int] | None = None
) -> Tensor:
    """Records of contract.h itself, one tile at a time in `order`, merged over `splits` of that order."""
    rows, columns = y.shape
    tiles = -(-columns // contract.TILE)
    order = list(range(tiles)) if order is None else order
    records = torch.empty(7 if entropy else 4, rows, dtype=torch.int64)
    y = y.contiguous()
    _C.spec_partials(
        y.data_ptr(), rows, columns, target.tolist(), order, splits or [0, tiles], entropy, records.data_ptr()
    )
    return records


def from_kernel(y: Tensor, target: Tensor, entropy: bool) -> Tensor:
    return cpu.logits_forward(y, target, None, LocalProblem(0, y.shape[1], None, entropy))


def test_constants_are_the_same_in_both_languages() -> None:
    compiled_constants = _C.contract()
    for name, value in contract.constants().items():
        assert compiled_constants[name] == value, name


def test_no_compiler_contracts() -> None:
    assert _C.contraction_probe() is False


def test_the_emulated_fma_is_exact() -> None:
    def rounded(x: Fraction) -> float:
        """fp32 nearest even of a rational, by the definition."""
        if x == 0:
            return 0.0
        exponent = max(abs(x).numerator.bit_length() - abs(x).denominator.bit_length() - 24, -149)
        for e in (exponent, exponent + 1):
            n = round(abs(x) / Fraction(2) ** e)  # Python rounds halves to even
            if n < 1 << 24 or (n == 1 << 24 and e == exponent + 1):
                value = float(n * Fraction(2) ** e)
                return value if x > 0 else -value
        raise AssertionError

    random.seed(1)
    rows = []
    for _ in range(3000):
        scale = random.choice([0, 0, 12, 24, 30, -40, -100])
        a, b = (random.getrandbits(24) * 2.0 ** random.randint(-30, 6) for _ in range(2))
        c = (
            -a * b * (1 + random.choice([0, 1, -1]) * 2.0**-23)
            if random.random() < 0.5
            else random.gauss(0, 2.0**scale)
        )
        rows.append(torch.tensor([a * 2.0**-12, b * 2.0**-12, c * 2.0**-24], dtype=torch.float32))
    a, b, c = torch.stack(rows).unbind(1)
    got = specification.fma(a, b, c)
    for i in range(len(rows)):
        want = rounded(Fraction(a[i].item()) * Fraction(b[i].item()) + Fraction(c[i].item()))
        assert got[i].item() == want, (a[i], b[i], c[i])


def test_exp_log2_and_softcap_equal_over_a_million_elements() -> None:
    g = torch.Generator().manual_seed(0)
    y = torch.cat(
        [torch.randn(500_000, generator=g) * s for s in (1e-3, 1.0, 30.0)]
        + [(torch.rand(500_000, generator=g) * 2 - 1) * 2.0**20, torch.tensor([0.0, -0.0, 2.0**20, -(2.0**20)])]
    )
    k, p = torch.empty(y.numel(), dtype=torch.int32), torch.empty_like(y)
    _C.spec_exp(y.data_ptr(), y.numel(), k.data_ptr(), p.data_ptr())
    want_k, want_p = specification.exp_split(y)
    assert_same_bytes(k.long(), want_k)
    assert_same_bytes(p, want_p)
    x = (torch.rand(1_000_000, generator=g, dtype=torch.float64) + 2.0**-53) * 2.0 ** torch.randint(
        -60, 90, (1_000_000,), generator=g
    ).double()
    a, log = torch.empty(x.numel(), dtype=torch.int32), torch.empty_like(x)
    _C.spec_log2(x.data_ptr(), x.numel(), a.data_ptr(), log.data_ptr())
    want_a, want_log = specification.log2_split(x)
    assert_same_bytes(a.long(), want_a)
    assert_same_bytes(log, want_log)
    for cap in (1.0, 30.0, 50.0):
        out = torch.empty_like(y)
        _C.spec_softcap(y.data_ptr(), y.numel(), cap, out.data_ptr())
        assert_same_bytes(out, specification.softcap(y, cap))


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("columns", [64, 65, 96, 129, 1000])
def test_hard_rows(columns: int, entropy: bool) -> None:
    names, y = stacked_hard_rows(columns)
    for place in (0, 5, columns - 1):
        target = torch.full((len(names),), place)
        want = specification.partials(y, target, entropy)
        for got in (compiled(y, target, entropy), from_kernel(y, target, entropy)):
            for i, name in enumerate(names):
                assert_same_bytes(got[:, i], want[:, i], name)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_million_random_elements(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    for rows, columns, scale in ((17, 50257, 3.0), (255, 4096, 40.0), (257, 777, 0.01), (15, 8, 5.0), (16, 1, 1.0)):
        y = torch.randn(rows, columns, generator=g) * scale
        target = torch.randint(0, columns, (rows,), generator=g)
        want = specification.partials(y, target, True)
        assert_same_bytes(from_kernel(y, target, True), want)
        assert_same_bytes(compiled(y, target, True), want)
        assert_same_bytes(from_kernel(y, target, False), want[:4])


def all_rows(columns: int) -> Tensor:
    g = torch.Generator().manual_seed(3)
    return torch.cat([stacked_hard_rows(columns)[1], torch.randn(50, columns, generator=g) * 60])


def test_tile_order_and_splits_change_no_byte() -> None:
    columns = 336
    y = all_rows(columns)
    target = torch.arange(len(y)) % columns
    tiles = columns // 16
    want = compiled(y, target, True)
    rng = random.Random(0)
    order = list(range(tiles))
    for trial in range(40):
        rng.shuffle(order)
        cuts = sorted(rng.sample(range(tiles + 1), rng.randint(0, 6)))
        assert_same_bytes(compiled(y, target, True, order, [0, *cuts, tiles]), want, f"trial {trial}")
    backwards = compiled(y, target, True, order[::-1], list(range(tiles + 1)))
    assert_same_bytes(backwards, want, "a partial a tile")


def test_near_tie_chains_in_every_order_and_split() -> None:
    y = near_tie_chains()
    target = torch.zeros(3, dtype=torch.int64)
    want = compiled(y, target, False)
    for order in itertools.permutations(range(3)):
        for splits in ([0, 3], [0, 1, 3], [0, 2, 3], [0, 1, 2, 3]):
            assert_same_bytes(compiled(y, target, False, list(order), splits), want, f"{order} {splits}")
    for rise in (1, 7, 31, 64, 100):
        assert_same_bytes(specification.partials(y, target, False, K_rise=rise), want, f"K + {rise}")
    assert_same_bytes(want[2:, 2], want[2:, 0], "counters of J-1 and J-2: -89 counts for no more than -200")


def test_any_allowed_K_gives_the_same_counters() -> None:
    y = all_rows(96)
    target = torch.zeros(len(y), dtype=torch.int64)
    want = specification.partials(y, target, False)
    for rise in (1, 2, 13, 40, 77, 150, 195, 400, 5000):
        assert_same_bytes(specification.partials(y, target, False, K_rise=rise), want, f"K + {rise}")


def test_folding_shards_equals_one_partial() -> None:
    columns = 336
    y = all_rows(columns)
    target = torch.arange(len(y)) % columns
    want = specification.fold(specification.partials(y, target, True)[None], target, -100, columns, "nan")
    plain = 0
    for bounds in ([0, 16, 336], [0, 160, 320, 336], [0, 0, 48, 48, 336, 336], list(range(0, 337, 16))):
        pairs = list(itertools.pairwise(bounds))
        stacked = torch.stack([from_kernel(y[:, a:b], target - a, True) for a, b in pairs])
        from vocabshard.dist.fold import fold

        for got in (
            fold("cpu", stacked, target, -100, columns, "nan"),
            specification.fold(stacked, target, -100, columns, "nan"),
        ):
            for name, a, b in zip(want._fields, got, want, strict=True):
                assert_same_bytes(a, b, f"{name} over {bounds}")
        pieces = torch.stack([torch.logsumexp(y[:, a:b], 1) for a, b in pairs if b > a])
        plain += differing(torch.logsumexp(pieces, 0), torch.logsumexp(y, 1))
    assert plain > 0, "an ordinary log-sum-exp must differ on these inputs"


def exact(y: Tensor, target: int):
    """logp, lse, entropy of one fp32 row with 40 digits."""
    import mpmath

    with mpmath.workdps(40):
        values = [mpmath.mpf(v) for v in y.tolist()]
        top = max(values)
        terms = [mpmath.exp(v - top) for v in values]
        total = mpmath.fsum(terms)
        lse = top + mpmath.log(total)
        entropy = mpmath.log(total) - mpmath.fsum(t * (v - top) for t, v in zip(terms, values, strict=True)) / total
        return values[target] - lse, lse, entropy


def ulp(x: float) -> float:
    t = torch.tensor(abs(x), dtype=torch.float32)
    return float(torch.nextafter(t, torch.tensor(float("inf"))) - t)


def test_accuracy_against_mpmath() -> None:
    import mpmath

    g = torch.Generator().manual_seed(0)
    y = torch.cat([torch.rand(4000, generator=g) - 0.5, torch.randn(1000, generator=g) * 20])
    k, p = specification.exp_split(y)
    worst = 0.0
    with mpmath.workdps(40):
        scale = mpmath.mpf(contract.LOG2E)
        for v, kk, pp in zip(y.tolist(), k.tolist(), p.tolist(), strict=True):
            want = mpmath.mpf(2) ** (mpmath.mpf(v) * scale - kk)
            worst = max(worst, float(abs(pp - want)) / ulp(pp))
    assert worst < 0.9, worst  # 0.80 of the polynomial and what f, an fp32, misses of y c - k
    for offset in (0.0, 1e2, 1e4, 1e5):
        for name, row in {**hard_rows(64), "wide": torch.randn(500, generator=g) * 8}.items():
            row = row + offset
            if not (row.abs() < 2.0**20).all():
                continue
            target = int(row.argmax()) if "normal" in name else len(row) // 3
            records = from_kernel(row[None], torch.tensor([target]), True)
            got = specification.fold(records[None], torch.tensor([target]), -100, len(row), "nan")
            logp, lse, entropy = exact(row, target)
            assert abs(float(got.logp) - logp) <= max(0.75 * ulp(float(logp)), 2e-7), (name, offset)
            assert abs(float(got.lse) - lse) <= max(0.75 * ulp(float(lse)), 2e-7), (name, offset)
            assert abs(float(got.entropy) - entropy) <= 4e-7, (name, offset, float(got.entropy), entropy)


def test_log_probs_near_zero_keep_their_digits() -> None:
    """The competing mass lies in other tiles: relative 4e-7 down to 1e-9, of which 1.3e-8 a unit of the gap is c's."""
    for gap in (10.0, 14.0, 18.0, 20.5):
        y = torch.full((64,), -60.0)
        y[3], y[40] = 0.7, 0.7 - gap
        got = specification.fold(
            from_kernel(y[None], torch.tensor([3]), False)[None], torch.tensor([3]), -100, 64, "nan"
        )
        logp, _, _ = exact(y, 3)
        assert abs(float(got.logp) / float(logp) - 1) < 4e-7, gap


def test_one_hot_and_flat() -> None:
    rows = hard_rows(96)
    for name, want in (("one-hot", 0.0), ("flat", 4.564348191467836), ("two-hot in one tile", 0.6931471805599453)):
        got = specification.fold(
            from_kernel(rows[name][None], torch.tensor([32]), True)[None], torch.tensor([32]), -100, 96, "nan"
        )
        assert abs(float(got.entropy) - want) <= 1e-7 + 2e-7 * (want > 0), name
    one = from_kernel(torch.tensor([[3.25]]), torch.tensor([0]), True)
    got = specification.fold(one[None], torch.tensor([0]), -100, 1, "nan")
    assert float(got.logp) == 0 and not torch.signbit(got.logp) and float(got.entropy) <= 1e-7
