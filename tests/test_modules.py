"""The modules in one process: what they compute, initial values, loading, tying, deferred initialisation, training."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F

import vocabshard as vs
from vocabshard.testing.compare import assert_same_bytes

D, V = 24, 1001
PADDED = 1024


def make(**options) -> vs.VocabParallelLMHead:
    torch.manual_seed(7)
    return vs.VocabParallelLMHead(D, V, **options)


@pytest.fixture
def batch():
    g = torch.Generator().manual_seed(1)
    return torch.randn(3, 5, D, generator=g), torch.randint(0, V, (3, 5), generator=g)


def test_scores_as_the_function(batch) -> None:
    hidden, target_ids = batch
    head = make(bias=True, temperature=0.7, return_entropy=True)
    with torch.no_grad():
        head.bias[:V] = torch.linspace(-1, 1, V)
    got = head(hidden, target_ids, return_lse=True)
    want = vs.linear_logp(
        hidden, head.weight[:V], target_ids, head.bias[:V], temperature=0.7, return_entropy=True, return_lse=True
    )
    for a, b in zip(got[:3], want[:3], strict=True):
        assert_same_bytes(a, b)
    assert got.provenance.real_vocab_size == V
    assert head.weight.shape == (PADDED, D)


def test_initial_values() -> None:
    """Normal, of the deviation asked for, no two blocks alike, repeatable, and other ones for another seed."""
    head = make(init_std=0.5)
    weight = head.weight.detach()
    assert abs(weight[:V].std() - 0.5) < 0.01 and abs(weight[:V].mean()) < 0.01
    assert weight[V:].count_nonzero() == 0
    assert len(torch.unique(weight[:V], dim=0)) == V
    assert_same_bytes(make(init_std=0.5).weight, weight)
    assert_same_bytes(make(init_std=0.5, dtype=torch.bfloat16).weight, weight.bfloat16())
    assert_same_bytes(_real(make(init_std=0.5, pad_to_multiple_of=1)), weight[:V])
    torch.manual_seed(8)
    assert not torch.equal(vs.VocabParallelLMHead(D, V, init_std=0.5).weight, weight)


def _real(module) -> torch.Tensor:
    return module.weight.detach()[:V]


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_padding_stays_zero_in_training(batch, optimizer) -> None:
    hidden, target_ids = batch
    head = make(bias=True)
    options = {"momentum": 0.9} if optimizer is torch.optim.SGD else {}
    steps = optimizer(head.parameters(), lr=0.1, weight_decay=0.1, **options)
    before = head.weight.detach().clone()
    for _ in range(3):
        steps.zero_grad()
        (-head(hidden, target_ids)).mean().backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        steps.step()
    assert head.weight[V:].count_nonzero() == 0 and head.bias[V:].count_nonzero() == 0
    assert not torch.equal(head.weight, before)


@pytest.mark.parametrize("rows", [V, PADDED, 1536])
@pytest.mark.parametrize("assign", [False, True])
def test_loads_a_whole_weight_with_any_padding(rows, assign) -> None:
    full = torch.randn(rows, D)
    full[V:] = torch.nan
    given = {"weight": full.clone(), "bias": torch.randn(rows)}
    head = make(bias=True)
    assert str(head.load_state_dict(given, assign=assign)) == "<All keys matched successfully>"
    assert_same_bytes(_real(head), full[:V])
    assert head.weight[V:].count_nonzero() == 0 and head.bias[V:].count_nonzero() == 0
    assert_same_bytes(given["weight"], full)
    assert head.weight.tensor_model_parallel


def test_loads_in_the_dtype_it_has() -> None:
    full = torch.randn(V, D)
    head = make(dtype=torch.bfloat16)
    head.load_state_dict({"weight": full})
    assert_same_bytes(_real(head), full.bfloat16())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"weight": torch.zeros(V - 1, D)}, "expected \\[1001 or more, ...\\], the whole vocabulary"),
        ({"weight": torch.zeros(V, D + 1)}, "size mismatch for weight"),
        ({"weight": torch.zeros(V, D), "bias": torch.zeros(V)}, "Unexpected key"),
        ({}, "Missing key"),
    ],
)
def test_refuses_other_weights(given, message) -> None:
    with pytest.raises(RuntimeError, match=message):
        make().load_state_dict(given)


def test_tied_to_an_embedding(batch) -> None:
    _, target_ids = batch
    torch.manual_seed(7)
    embedding = vs.VocabParallelEmbedding(V, D, init_std=1.0)
    head = vs.VocabParallelLMHead(D, V, weight=embedding.weight)
    model = torch.nn.ModuleDict({"embedding": embedding, "head": head})
    assert len(list(model.parameters())) == 1
    ids = torch.randint(0, V, target_ids.shape)
    (-head(embedding(ids), target_ids)).mean().backward()

    reference = embedding.weight.detach()[:V].double().requires_grad_()
    logits = F.embedding(ids, reference) @ reference.T
    F.cross_entropy(logits.flatten(0, 1), target_ids.flatten()).backward()
    assert (embedding.weight.grad[:V] - reference.grad).abs().max() < 1e-5
    assert embedding.weight.grad[V:].count_nonzero() == 0

    # a checkpoint holds the matrix once, or twice
    full = torch.randn(V, D)
    model.load_state_dict({"embedding.weight": full})
    assert_same_bytes(_real(head), full)
    model.load_state_dict(model.state_dict())
    copied = copy.deepcopy(model)
    assert copied["head"].weight is copied["embedding"].weight is not embedding.weight
    assert copied["head"].weight.partition_dim == 0


def test_a_lost_tie_is_an_error(batch) -> None:
    hidden, target_ids = batch
    embedding = vs.VocabParallelEmbedding(V, D, device="meta")
    head = vs.VocabParallelLMHead(D, V, weight=embedding.weight)
    torch.nn.ModuleList([embedding, head]).to_empty(device="cpu")
    embedding.reset_parameters()
    for call in (lambda: head(hidden, target_ids), head.reset_parameters):
        with pytest.raises(RuntimeError, match="call tie"):
            call()
    head.tie(embedding.weight)
    head.reset_parameters()
    assert torch.isfinite(head(hidden, target_ids)).all()
    head.load_state_dict({"weight": torch.randn(V, D)}, assign=True)
    with pytest.raises(RuntimeError, match="call tie"):
        head(hidden, target_ids)


def test_refused_ties() -> None:
    embedding = vs.VocabParallelEmbedding(V, D, pad_to_multiple_of=128 * 9)
    with pytest.raises(ValueError, match=r"expected a weight of \[1024, 24\].*got \[1152, 24\]"):
        vs.VocabParallelLMHead(D, V, weight=embedding.weight)
    with pytest.raises(TypeError, match=r"must be an nn\.Parameter"):
        vs.VocabParallelLMHead(D, V, weight=torch.zeros(PADDED, D))


def test_deferred_initialisation(batch, monkeypatch) -> None:
    """On the meta device nothing is drawn; afterwards the values are those of a head made at once."""
    hidden, target_ids = batch
    torch.manual_seed(7)
    head = vs.VocabParallelLMHead(D, V, bias=True, device="meta")
    assert torch.equal(torch.randint(100, (4,)), torch.randint(100, (4,), generator=torch.Generator().manual_seed(7)))
    with pytest.raises(ValueError, match="meta device"):
        head(hidden, target_ids)
    with monkeypatch.context() as dirty:  # whatever the memory held
        dirty.setattr(torch, "empty_like", lambda x, device, **_: torch.full(x.shape, torch.nan, device=device))
        head.to_empty(device="cpu")
    assert head.weight[:V].isnan().all() and head.weight[V:].count_nonzero() == 0
    torch.manual_seed(7)
    head.reset_parameters()
    assert_same_bytes(head.weight, make(bias=True).weight)
    assert head.weight.tensor_model_parallel and head.weight.partition_dim == 0 and head.bias.partition_stride == 1


def test_options(batch) -> None:
    with pytest.raises(TypeError, match="unknown option 'tempreature'"):
        vs.VocabParallelLMHead(D, V, tempreature=1.0)
    with pytest.raises(TypeError, match="unknown option 'real_vocab_size'"):
        vs.VocabParallelLMHead(D, V, real_vocab_size=V)
    with pytest.raises(TypeError, match="dtype must be float32, bfloat16 or float16"):
        vs.VocabParallelLMHead(D, V, dtype=torch.float64)
    for sizes in ((0, V), (D, 0), (D, 2.0)):
        with pytest.raises(ValueError, match="must be a positive int"):
            vs.VocabParallelLMHead(*sizes)
    assert "rows=[0, 1024) of 1024" in repr(make())


def test_embedding_is_the_rows(batch) -> None:
    embedding = vs.VocabParallelEmbedding(V, D, dtype=torch.bfloat16)
    ids = torch.tensor([[0, V - 1, 5], [5, 16, 15]], dtype=torch.int32)
    assert_same_bytes(embedding(ids), embedding.weight[ids.long()])
    for wrong in (-1, V, PADDED, 2**40):
        with pytest.raises(ValueError, match=f"input_ids\\[1\\] is {wrong}: expected an id in \\[0, 1001\\)"):
            embedding(torch.tensor([0, wrong]))
    for wrong_type in ([0, 1], torch.tensor([0.0])):
        with pytest.raises(TypeError, match="input_ids must be a tensor of int32 or int64, got"):
            embedding(wrong_type)


def test_checkpoint_of_one_process(tmp_path) -> None:
    """Without a group; the padding is not stored, so a head that pads otherwise loads it."""
    head = make(bias=True)
    dcp.save(head.sharded_state_dict("lm_head."), checkpoint_id=tmp_path)
    torch.manual_seed(9)
    other = vs.VocabParallelLMHead(D, V, bias=True, pad_to_multiple_of=384)
    state = other.sharded_state_dict("lm_head.")
    assert sorted(state) == ["lm_head.bias", "lm_head.weight"]
    dcp.load(state, checkpoint_id=tmp_path)
    assert_same_bytes(_real(other), _real(head))
    assert other.weight[V:].count_nonzero() == 0


def test_compiled(batch) -> None:
    """Head and embedding in one graph: the same bytes, and NaN for an id that does not exist."""
    _, target_ids = batch
    embedding = vs.VocabParallelEmbedding(V, D)
    head = vs.VocabParallelLMHead(D, V, weight=embedding.weight, temperature=0.7)

    def score(ids):
        return head(embedding(ids), target_ids)

    def run(function, ids):
        embedding.weight.grad = None
        logp = function(ids)
        (-logp.nan_to_num().mean()).backward()
        return logp.detach(), embedding.weight.grad

    compiled = torch.compile(score, backend="aot_eager", fullgraph=True)
    ids = target_ids.roll(1)
    for a, b in zip(run(compiled, ids), run(score, ids), strict=True):
        assert_same_bytes(a, b)
    ids[0, 0] = V
    assert compiled(ids).isnan().nonzero().tolist() == [[0, 0]]
