"""L4: one process scores tokens and leaves a record; others, at another tensor-parallel degree, recompute from it.

    record.py score FILE [--dtype bf16] [--rows N] [--depth D] [--columns V]
    record.py recompute FILE --out COUNTS

A record holds tokens, the bits of their log-probs and entropies, what they were scored with, and fingerprints of the
hidden states and of the weight; hidden states and weights themselves come from the seed on both sides. And it holds
tokens that the first side drew with temperature and top-p, their log-probs and cuts: the others replay them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vocabshard import launching
from vocabshard.fingerprint import weight_fingerprint
from vocabshard.functional import linear_logp
from vocabshard.ladder.inputs import Inputs, make_inputs, shardings
from vocabshard.ladder.rungs import Rung
from vocabshard.logprob_contract import LogprobContract
from vocabshard.options import LogpOutput, SampleOutput
from vocabshard.sample import vocab_parallel_sample
from vocabshard.sampling import SamplingProgram
from vocabshard.shard import VocabShard

TEMPERATURE = 0.7
PROGRAM = SamplingProgram.of(temperature=TEMPERATURE, top_p=0.9)


def k3(new: Tensor, old: Tensor) -> Tensor:
    """rho - 1 - log rho of rho = exp(new - old), fp64: the estimate of a divergence that ought to be 0."""
    difference = new.double() - old.double()
    return difference.exp() - 1 - difference


def across_processes(device: torch.device, tps: tuple[int, ...] = (1, 3), **shape: Any) -> Rung:
    """L4 by processes of its own: scored at tps[0], recomputed at each of the others."""
    what = f"scored at TP {tps[0]}, recomputed at TP {', '.join(map(str, tps[1:]))} in other processes"
    rung = Rung("L4", what)
    options = [word for name, value in shape.items() for word in (f"--{name}", str(value))]
    options += ["--device", device.type]
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record.json"
        _run(tps[0], ["score", str(record), *options])
        largest = 0.0
        for tp in tps[1:]:
            counts = Path(folder) / f"counts{tp}.json"
            _run(tp, ["recompute", str(record), "--out", str(counts)])
            found = json.loads(counts.read_text())
            rung.rows += found["rows"]
            rung.differing += found["differing"]
            largest = max(largest, found["largest_k3"])
            if found["differing"] and not rung.first:
                rung.first = f"TP {tp}, row {found['first']}"
        rung.detail = {"largest_k3": largest, "weight": json.loads(record.read_text())["weight"]}
    return rung.done()


def _run(tp: int, arguments: list[str]) -> None:
    """This file as a script, so that the ranks import the very package that runs here."""
    before = os.environ.get("PYTHONPATH")
    root = str(Path(launching.__file__).parent.parent)
    os.environ["PYTHONPATH"] = root if before is None else os.pathsep.join((root, before))
    try:
        code = launching.run(tp, [__file__, *arguments])
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before
    if code:
        raise RuntimeError(f"L4: {arguments[0]} on {tp} ranks ended with exit code {code}")


def _shard(columns: int, group: Any, size: int, rank: int) -> VocabShard:
    """Uneven where there are several ranks, so that no boundary is where the other side had one."""
    bounds = shardings(columns)[f"W {size}, uneven" if size in (2, 3, 4, 8) else "W 1"]
    return VocabShard(bounds[rank], bounds[rank + 1], columns, columns, group)


def _score(inputs: Inputs, shard: VocabShard, contract: LogprobContract) -> tuple[LogpOutput, str]:
    """What is scored, and the weight's version, from this rank's rows alone."""
    mine = slice(shard.start, shard.stop)
    out = linear_logp(
        inputs.hidden, inputs.weight[mine], inputs.target_ids, inputs.bias[mine], shard=shard, temperature=TEMPERATURE,
        contract=contract, return_entropy=True, return_lse=True,
    )  # fmt: skip
    assert isinstance(out, LogpOutput)
    return out, weight_fingerprint(inputs.weight[mine], shard)


def _words(out: LogpOutput) -> list[list[int]]:
    return [x.view(torch.int32).tolist() for x in out[:3] if x is not None]


def _draw(inputs: Inputs, shard: VocabShard, contract: LogprobContract) -> SampleOutput:
    mine = slice(shard.start, shard.stop)
    return vocab_parallel_sample(
        inputs.hidden, inputs.weight[mine], inputs.bias[mine], shard=shard, program=PROGRAM, seed=0, contract=contract
    )


def _replay(
    inputs: Inputs, shard: VocabShard, contract: LogprobContract, tokens: Tensor, cut: Tensor | None
) -> LogpOutput:
    mine = slice(shard.start, shard.stop)
    out = linear_logp(
        inputs.hidden, inputs.weight[mine], tokens, inputs.bias[mine], shard=shard, sampling=PROGRAM, cut=cut,
        contract=contract, return_lse=True,
    )  # fmt: skip
    assert isinstance(out, LogpOutput)
    return out


def _contract(role: str, dtype: str, columns: int, drawn: bool = False) -> LogprobContract:
    return LogprobContract(
        role=role, weight_dtype=dtype, bias_dtype="fp32", real_vocab_size=columns,
        temperature=None if drawn else TEMPERATURE, sampling=PROGRAM.transforms if drawn else None,
        outputs=("logp", "lse", "entropy"),
    )  # fmt: skip


def _recompute(record: dict[str, Any], inputs: Inputs, shard: VocabShard) -> dict[str, Any]:
    engine = LogprobContract.from_dict(record["contract"])
    contract = _contract("trainer", record["shape"]["dtype"], record["shape"]["columns"])
    contract.check_same(engine)
    out, version = _score(inputs, shard, contract)
    assert out.provenance is not None
    if version != record["weight"]:
        raise ValueError(f"weight: recorded is version {record['weight']}, this is {version}")
    if out.provenance.fingerprint != record["fingerprint"]:
        raise ValueError(f"provenance: recorded is {record['provenance']}, this is {out.provenance.as_dict()}")
    before, after = (torch.tensor(words, dtype=torch.int32) for words in (record["bits"], _words(out)))
    wrong = (before != after).any(0)
    drawn_before, *drawn_after, cuts_differ = _recompute_drawn(record, inputs, shard)
    wrong = torch.cat([wrong, *[drawn_before != again for again in drawn_after], cuts_differ])
    scores = [(before[0], after[0]), *[(drawn_before, again) for again in drawn_after]]
    divergence = torch.cat([k3(new.view(torch.float32), old.view(torch.float32)) for old, new in scores])
    return {
        "rows": wrong.numel(),
        "differing": int(wrong.sum()),
        "first": int(wrong.nonzero()[0]) if bool(wrong.any()) else None,
        "largest_k3": float(divergence.nan_to_num(math.inf).abs().max()),
    }


def _recompute_drawn(record: dict[str, Any], inputs: Inputs, shard: VocabShard) -> tuple[Tensor, ...]:
    """Bits of the drawn tokens' log-probs: recorded, replayed by the cut, replayed without; rows whose cut differs."""
    contract = _contract("trainer", record["shape"]["dtype"], record["shape"]["columns"], drawn=True)
    device = inputs.hidden.device
    tokens, cut = (torch.tensor(record["drawn"][name], device=device) for name in ("tokens", "cut"))
    given, found = (_replay(inputs, shard, contract, tokens, part) for part in (cut, None))
    assert found.cut is not None
    bits = (out.logp.view(torch.int32).cpu() for out in (given, found))
    return torch.tensor(record["drawn"]["bits"], dtype=torch.int32), *bits, (found.cut != cut).cpu()


def main() -> None:
    """One rank of either side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("score", "recompute"))
    parser.add_argument("record", type=Path)
    parser.add_argument("--out", type=Path, help="where recompute leaves its counts")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bf16")
    for name, default in (("rows", 64), ("depth", 64), ("columns", 2251)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    ranks = launching.init_from_env()
    group = dist.group.WORLD if ranks.world_size > 1 else None
    shape = {"dtype": args.dtype, "rows": args.rows, "depth": args.depth, "columns": args.columns}
    record: dict[str, Any] = {}
    if args.action == "recompute":
        record = json.loads(args.record.read_text())
        shape, args.device = record["shape"], record["device"]
    device = ranks.device if args.device == "cuda" else torch.device("cpu")
    inputs = make_inputs(shape["rows"], shape["depth"], shape["columns"], 0, shape["dtype"], device, masked=False)
    shard = _shard(shape["columns"], group, ranks.world_size, ranks.rank)
    if args.action == "recompute":
        counts = _recompute(record, inputs, shard)
        if ranks.rank == 0:
            args.out.write_text(json.dumps(counts))
    else:
        contract = _contract("rollout", args.dtype, args.columns)
        out, version = _score(inputs, shard, contract)
        drawn = _draw(inputs, shard, _contract("rollout", args.dtype, args.columns, drawn=True))
        assert out.provenance is not None
        if ranks.rank == 0:
            record = {"shape": shape, "device": args.device, "contract": contract.as_dict(), "bits": _words(out)}
            record |= {"tokens": inputs.target_ids.tolist(), "weight": version}
            record["drawn"] = {"tokens": drawn.token.tolist(), "cut": drawn.cut.tolist()}
            record["drawn"]["bits"] = drawn.logp.view(torch.int32).tolist()
            record |= {"provenance": out.provenance.as_dict(), "fingerprint": out.provenance.fingerprint}
            args.record.write_text(json.dumps(record))
    del shard
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
