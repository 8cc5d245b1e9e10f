"""Where sampling can be called from: other backends, modules, the registry, torch.compile; and its bytes, frozen."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

import vocabshard as vs
from vocabshard import sampled
from vocabshard.kernels import cpu, sampling_torch
from vocabshard.kernels.problem import LocalProblem
from vocabshard.testing.compare import assert_same_bytes, sha256
from vocabshard.testing.inputs import integer_logits

FULL = vs.SamplingProgram.of(temperature=0.9, min_p=0.005, top_k=60, top_p=0.95)
ON_GPU = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"


def inputs(N: int, D: int, V: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.randn(N, D, generator=g), torch.randn(V, D, generator=g) * 0.5, torch.randn(V, generator=g) * 0.3


@pytest.mark.needs("triton")
@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # the interpreter's
def test_triton_draws_and_scores_with_the_bytes_of_the_cpu() -> None:
    device = torch.device("cuda" if ON_GPU else "cpu")
    hidden, weight, bias = inputs(5, 16, 80)
    options = {"program": FULL, "seed": 4, "topk": 3, "softcap": 8.0, "return_lse": True}
    want = vs.vocab_parallel_sample(hidden, weight, bias, **options)
    moved = [x.to(device) for x in (hidden, weight, bias)]
    got = vs.vocab_parallel_sample(*moved, backend="triton", strict=True, **options)
    assert got.provenance is not None and got.provenance.backend == "triton"
    assert got.provenance.fingerprint == want.provenance.fingerprint  # type: ignore[union-attr]
    for name in ("token", "cut", "top_ids", "token_rank"):
        assert torch.equal(getattr(got, name).cpu(), getattr(want, name)), name
    for name in ("logp", "lse", "top_logp"):
        assert_same_bytes(getattr(got, name).cpu(), getattr(want, name), name)
    grads = []
    for leaves, backend in ((moved, "triton"), ((hidden, weight, bias), "cpu")):
        h, w, b = (x.clone().requires_grad_() for x in leaves)
        cut, token = want.cut.to(h.device), want.token.to(h.device)
        logp = vs.linear_logp(h, w, token, b, sampling=FULL, cut=cut, softcap=8.0, backend=backend, validate=False)
        assert_same_bytes(logp.detach().cpu(), want.logp, f"{backend}, replayed")
        logp.sum().backward()  # type: ignore[union-attr]
        grads.append([x.grad.cpu() for x in (h, w, b)])
    for a, b in zip(*grads, strict=True):
        assert torch.allclose(a, b, atol=2e-5)


@pytest.mark.needs("sm90")
@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_a_gpu_gives_the_integers_of_the_cpu(backend: str) -> None:
    """From the same logits: projections differ between devices, and nothing else."""
    hidden, weight, bias = inputs(33, 64, 5000)
    moved = [hidden.cuda().bfloat16(), weight.cuda().bfloat16(), bias.cuda()]
    drawn = vs.vocab_parallel_sample(*moved, program=FULL, seed=4, backend=backend, topk=5)
    out = vs.linear_logp(*moved[:2], drawn.token, moved[2], return_logits=True, backend=backend)
    logits = out.logits.cpu()  # type: ignore[union-attr]
    steps = FULL.steps
    from vocabshard import cuts

    kernel, over = sampling_torch.functions(cpu), cuts.Over()
    blocks = [cuts.Block(logits, LocalProblem(0, 5000, None, False))]
    scale = drawn.provenance.inv_temperature  # type: ignore[union-attr]
    maxima = cuts.find_maxima(kernel, blocks, over)
    usable = cuts.usable_rows(maxima, scale, steps)
    cut = cuts.find_cut(kernel, blocks, scale, steps, maxima, usable, over)
    assert torch.equal(cut, drawn.cut.cpu())
    tokens = cuts.draw(kernel, blocks, scale, cut, usable, 4, torch.arange(33), over).ids
    assert torch.equal(tokens, drawn.token.cpu())
    again = vs.linear_logp(*moved[:2], drawn.token, moved[2], sampling=FULL, cut=drawn.cut, backend=backend)
    assert_same_bytes(again.cpu(), drawn.logp.cpu())  # type: ignore[union-attr]


def test_modules_and_the_registry() -> None:
    hidden, weight, bias = inputs(9, 16, 150)
    want = vs.vocab_parallel_sample(hidden, weight, bias, program=FULL, seed=4, softcap=8.0)
    head = vs.VocabParallelLMHead(16, 150, bias=True, softcap=8.0, ignore_index=-1)
    head.load_state_dict({"weight": weight, "bias": bias})
    got = head.sample(hidden, FULL, 4)
    for a, b in ((got.token, want.token), (got.cut, want.cut), (got.logp, want.logp)):
        assert torch.equal(a, b)
    with torch.no_grad():
        assert torch.equal(head(hidden, got.token, sampling=FULL, cut=got.cut), want.logp)
        op = vs.VocabParallelLinearLogp(sampling=FULL, softcap=8.0)
        assert torch.equal(op(hidden, weight, got.token, bias, cut=got.cut), want.logp)
    with pytest.raises(TypeError, match="unknown option 'ignore_index'"):
        head.sample(hidden, FULL, 4, ignore_index=3)
    assert vs.get_op("vocab_parallel_sample") is vs.vocab_parallel_sample


def test_narrow_vocabularies_come_in_blocks_of_few_rows() -> None:
    """Histograms are as large as those of wide ones."""
    rows = 5000
    weight = torch.tensor([[0.0], [1.0], [2.0]])
    seen = []
    of_block = sampled._of_block

    def spy(call, x, draw):  # type: ignore[no-untyped-def]
        seen.append(len(x.target_ids))
        return of_block(call, x, draw)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampled, "_of_block", spy)
        program = vs.SamplingProgram.of(top_p=0.8)
        drawn = vs.vocab_parallel_sample(torch.ones(rows, 1), weight, program=program, seed=0)
    assert max(seen) <= 4096 and sum(seen) == rows
    share = drawn.token.bincount(minlength=3).double() / rows
    assert share[0] == 0 and abs(float(share[2]) - 0.731) < 0.02
    assert len(drawn.cut.unique()) == 1


def test_a_block_of_rows_fits_into_the_workspace_of_the_grids_that_stream() -> None:
    from vocabshard import _C
    from vocabshard.kernels import sm90_sampling, truncated

    if not hasattr(_C, "SAMPLING_STREAM_BYTES"):
        pytest.skip("no CUDA kernels in this build")
    rows = len(range(*next(iter(truncated.row_blocks(4096, 151936))).indices(4096)))
    assert rows > 400 and rows * _C.SAMPLING_STREAM_BYTES <= sm90_sampling.STREAM_BYTES


def test_beside_a_compiled_graph() -> None:
    hidden, weight, bias = inputs(9, 16, 150)
    want = vs.vocab_parallel_sample(hidden, weight, bias, program=FULL, seed=4)

    @torch.compile(backend="eager")
    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        drawn = vs.vocab_parallel_sample(x * 1.0, weight, bias, program=FULL, seed=4)
        logp = vs.linear_logp(x * 1.0, weight, drawn.token, bias, sampling=FULL, cut=drawn.cut)
        return drawn.token + 0, logp + 0.0  # type: ignore[operator]

    token, logp = step(hidden)
    assert torch.equal(token, want.token) and torch.equal(logp, want.logp)


FROZEN = "b90c2bd8e72350a658acdc79ea789c3a"


def test_bytes_are_frozen() -> None:
    """Cuts, tokens and log-probs of logits that are integers: others are another program, noise or contract."""
    logits = integer_logits(64, 777, seed=5)
    logits[::3] = (logits[::3] * 4).round() / 4  # equals
    found = []
    for program in (
        FULL,
        vs.SamplingProgram.of(top_p=0.7),
        vs.SamplingProgram.of(top_k=5, temperature=1.7),
        vs.SamplingProgram((("top_p", 0.9), ("temperature", 2.0), ("min_p", 0.1))),
    ):
        for row in (0, 31):
            drawn = vs.vocab_parallel_sample(
                torch.ones(64, 1), logits[row][:, None].contiguous(), program=program, seed=-7,
                row_keys=torch.arange(64) << 33, topk=4,
            )  # fmt: skip
            found += [drawn.token, drawn.cut, drawn.logp, drawn.top_ids, drawn.top_logp]
    assert sha256(*found)[:32] == FROZEN
