"""Whether an installed vocabshard works, away from its source tree: `PYTHON launch/smoke.py [FOLDER]`.

FOLDER: where the package has to lie (the environment's own, by default). Prints a line, or fails.
"""

import sys
import tempfile
from pathlib import Path

import torch

import vocabshard
from vocabshard.command import main

folder = Path(sys.argv[1] if len(sys.argv) > 1 else sys.prefix).resolve()
assert folder in Path(vocabshard.__file__).resolve().parents, f"{vocabshard.__file__} is not in {folder}"

torch.manual_seed(0)
hidden, weight = torch.randn(7, 40, requires_grad=True), torch.randn(1000, 40, requires_grad=True)
target_ids = torch.randint(1000, (7,))
out = vocabshard.linear_logp(hidden, weight, target_ids, temperature=0.7, return_entropy=True, strict=True)
out.logp.sum().backward()
expected = torch.log_softmax(hidden.detach() @ weight.detach().t() / 0.7, 1).gather(1, target_ids[:, None])[:, 0]
torch.testing.assert_close(out.logp.detach(), expected)
assert weight.grad is not None and weight.grad.abs().sum() > 0

with tempfile.TemporaryDirectory() as away:
    assert main(["doctor"]) == 0
    assert main(["bench", "--device", "cpu", "--shapes", "4,16,100", "--rounds", "2", "--out", f"{away}/b.json"]) == 0
print(f"works: vocabshard {vocabshard.kernels.build_id()} in {Path(vocabshard.__file__).parent}")
